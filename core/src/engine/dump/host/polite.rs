//! Memory of programs that run, read without being in their way.

use std::io;

use crate::base::cores::Cores;
use crate::host::process::RunningMemory;
use crate::image::Contents;

/// Memory that is read by threads that stay off the CPUs which the programs need.
pub(super) struct Polite<'a> {
    pub(super) memory: &'a RunningMemory,
    pub(super) cores: &'a Cores,
}

impl Contents for Polite<'_> {
    fn name(&self) -> &str {
        self.memory.name()
    }

    fn mode(&self) -> u32 {
        self.memory.mode()
    }

    fn size(&self) -> u64 {
        self.memory.size()
    }

    fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.cores.stay_off();
        self.memory.read_exact_at(bytes, offset)
    }
}
