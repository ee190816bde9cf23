//! Memory and semaphores of other libraries, such as Vulkan's, and graph nodes that use them.

use super::kind::{Carrier, Kind};

pub(super) struct External;

impl Kind for External {
    fn name(&self) -> &'static str {
        "memory and semaphores of other libraries"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &["cuExternalMemory", "cuGraphAddExternalSemaphores", "cuImportExternal"]
    }
}
