//! Modules, libraries and executable graphs that go. What is known of their handles is given up
//! before the driver is called: after that another thread may be given the same handle.

use crate::{usage, watch};

exported! {
    fn cuModuleUnload(module: u64) {
        watch::unloading(module);
        usage::unloading(module, || call!(cuModuleUnload(module)))
    }
    fn cuLibraryUnload(library: u64) {
        watch::unloading(library);
        usage::unloading(library, || call!(cuLibraryUnload(library)))
    }
    fn cuGraphExecDestroy(executable: u64) {
        watch::destroying_graph(executable);
        call!(cuGraphExecDestroy(executable))
    }
}
