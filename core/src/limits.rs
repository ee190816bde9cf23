//! Limits of this process.

use rustix::process::{Resource, Rlimit};

/// Raises the limit of open descriptors as far as it goes: each block of device memory costs one.
/// For commands that work on programs, not for one that becomes a program.
pub fn raise_open_files() {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    // If that is refused, a program with very many blocks meets the old limit with an error.
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
