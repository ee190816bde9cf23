//! Keeps what gpucr has in its memory from others with the same user, such as the processes of a container.

use std::io;

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// No core is written, be it to a file or to a program that takes cores: so says core(5) of this size.
const NO_CORE: u64 = 1;

/// Has the kernel show this process only to those who may trace everything, and write no core of it. What it executes later is
/// shown as before; of that no core is written either, whatever others of the same user do.
///
/// # Errors
/// None that the kernel documents.
pub fn shield() -> io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    let limit = Rlimit { current: Some(NO_CORE), maximum: Some(NO_CORE) };
    match setrlimit(Resource::Core, limit) {
        // It is lower already.
        Err(rustix::io::Errno::PERM) => Ok(()),
        set => Ok(set?),
    }
}
