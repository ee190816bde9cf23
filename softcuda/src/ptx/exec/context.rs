//! What all blocks of a launch share, and why a thread stops.

use crate::ptx::code::Code;
use crate::ptx::launch::{AddressSpace, Launch};
use crate::ptx::module::{Entry, Module};
use crate::ptx::trap::Trap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Instructions a warp runs before the other warps of its block get their turn.
pub(super) const QUANTUM: u32 = 20_000;
/// The same in a block where lanes of one warp have to take turns.
pub(super) const SHORT_QUANTUM: u32 = 200;
/// What all blocks of a launch share.
pub(super) struct Context<'a> {
    pub(super) module: &'a Module,
    pub(super) entry: &'a Entry,
    pub(super) launch: &'a Launch<'a>,
    pub(super) memory: &'a dyn AddressSpace,
    /// Bytes of shared memory per block, dynamic memory included.
    pub(super) shared_bytes: usize,
    pub(super) next_block: AtomicU64,
    pub(super) blocks: u64,
    pub(super) stop: AtomicBool,
    /// What grid-wide barriers count in: a size, then the count.
    pub(super) workspace: [AtomicU32; 2],
    pub(super) trap: Mutex<Option<Trap>>,
}

/// Why a thread stopped; without the kernel's name, which [`Context::trap_of`] adds.
#[derive(Debug)]
pub(super) enum Fault {
    Illegal(u64),
    Misaligned(u64, usize),
    Trapped,
    /// `free` of an address that `malloc` did not give.
    Free(u64),
    /// A condition that there is not.
    Condition(u64),
    Assert(String),
    Instruction(&'static str),
    Stack,
    Deadlock,
    Cancelled,
}

pub(super) type Step<T> = Result<T, Fault>;

impl<'a> Context<'a> {
    pub(super) fn code(&self, function: usize) -> Option<&'a Code> {
        self.module.functions.get(function)
    }

    /// The address of the workspace; 0 tells kernels that the launch is not cooperative.
    pub(super) fn workspace_address(&self) -> u64 {
        if self.launch.cooperative { self.workspace.as_ptr() as u64 } else { 0 }
    }

    pub(super) fn trap_of(&self, fault: Fault) -> Trap {
        let kernel = self.entry.name.clone();
        match fault {
            Fault::Illegal(address) => Trap::IllegalAddress { address, kernel },
            Fault::Misaligned(address, size) => Trap::Misaligned { address, size, kernel },
            Fault::Trapped => Trap::Trapped { kernel },
            Fault::Free(address) => Trap::InvalidFree { address, kernel },
            Fault::Condition(handle) => Trap::UnknownCondition { handle, kernel },
            Fault::Assert(message) => Trap::Assert { message, kernel },
            Fault::Instruction(reason) => {
                Trap::IllegalInstruction { reason: reason.to_owned(), kernel }
            }
            Fault::Stack => Trap::StackOverflow { kernel },
            Fault::Deadlock => Trap::Deadlock { kernel },
            Fault::Cancelled => Trap::Cancelled,
        }
    }

    /// Keeps the first fault and stops the other workers.
    pub(super) fn fail(&self, fault: Fault) {
        let mut trap = self.trap.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        trap.get_or_insert_with(|| self.trap_of(fault));
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(super) fn check_stop(&self) -> Step<()> {
        if self.stop.load(Ordering::Relaxed) || self.launch.cancel.load(Ordering::Relaxed) {
            return Err(Fault::Cancelled);
        }
        Ok(())
    }
}
