//! Export, detach, reattach, and copying from inside.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::Arc;

use gpucr_wire::{Connection, GateState, Reply};

use super::descriptors::Room;
use crate::abi::real::{self, check};
use crate::abi::types::{ERROR_DEINITIALIZED, ERROR_INVALID_CONTEXT, LIMIT_STACK_SIZE};
use crate::log::log;
use crate::state::contexts;
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, Failure, Fds};

/// What has to be remembered from one request to the next.
#[derive(Default)]
pub(super) struct Transfer {
    /// File descriptors that were sent, until the program is detached or the checkpointer has gone:
    /// with them a detach that fails half-way is undone.
    exported: Fds,
    /// Whether these are of all blocks: the program cannot have made more.
    complete: bool,
    /// Contexts whose stacks were shrunk, and their limits before.
    stacks: Vec<(u64, usize)>,
}

impl Transfer {
    /// Sends all blocks, and the file descriptors of those that are not known.
    pub(super) fn export(
        &mut self,
        connection: &mut Connection,
        known: Vec<u64>,
        state: GateState,
    ) -> Result<(), Failure> {
        let (blocks, fds) = {
            let room = Room::make();
            let mut memory = memory::lock();
            self.exported.retain(|id, _| memory.has_block(*id));
            let new = memory.export(&Driver, &self.exported, |fd| room.park(fd))?;
            self.exported.extend(new);
            self.complete = state == (GateState::Closed {});
            let blocks = memory.list(real::uuid);
            memory.lend(known.iter().copied().chain(blocks.iter().map(|block| block.id)).collect());
            (blocks, memory.fds(&self.exported)?)
        };
        // The program waits for the tables, and its limit of open files is its own: a checkpointer that does not
        // read holds up the agent alone.
        let known: BTreeSet<u64> = known.into_iter().collect();
        let new = fds.into_iter().filter(|(id, _)| !known.contains(id));
        let new: Vec<_> = new.map(|(_, fd)| fd).collect();
        let sent =
            connection.send(&Reply::Blocks { blocks }).and_then(|()| connection.send_fds(&new));
        // There is nobody to tell: the connection is broken, and the next receive says so.
        sent.unwrap_or_else(|error| log!("cannot send file descriptors: {error}"));
        Ok(())
    }

    /// Closes the file descriptors that were sent; the checkpointer holds no memory any more.
    pub(super) fn forget_exports(&mut self) {
        self.exported.clear();
        self.complete = false;
        memory::lock().lend(BTreeSet::new());
    }

    /// Takes stacks and blocks away. No file descriptor is left afterwards.
    ///
    /// # Errors
    /// All is as before, unless the message says otherwise.
    pub(super) fn detach(&mut self) -> Result<(), Failure> {
        if !self.complete {
            return Err(Failure::other("the blocks have not been exported"));
        }
        self.complete = false;
        let mut exported = std::mem::take(&mut self.exported);
        self.shrink_stacks();
        let mut memory = memory::lock();
        // What is undone of multicast objects stays so: only with the other processes can they be made again.
        let undone = memory.undo_objects(&Driver);
        let Err(mut failure) = undone.and_then(|()| memory.detach(&Driver)) else { return Ok(()) };
        let undone = memory.attach(&Driver, &mut exported);
        drop(memory);
        for problem in [undone, self.restore_stacks()].into_iter().filter_map(Result::err) {
            failure.message += &format!(
                "; and this could not be undone: {} (error {})",
                problem.message, problem.code
            );
        }
        (self.exported, self.complete) = (exported, true);
        Err(failure)
    }

    /// Puts blocks and stacks back.
    ///
    /// # Errors
    /// The program is detached, as before.
    pub(super) fn reattach(&mut self, mut fds: Fds) -> Result<(), Failure> {
        // A driver may need descriptors of its own to import.
        let _room = Room::make();
        let mut memory = memory::lock();
        if let Some(unknown) = fds.keys().find(|id| !memory.has_block(**id)) {
            return Err(Failure::other(format!("there is no block {unknown}")));
        }
        let missing = memory.detached_blocks().into_iter().filter(|id| !fds.contains_key(id));
        let missing: Vec<String> = missing.map(|id| id.to_string()).collect();
        if !missing.is_empty() {
            return Err(Failure::other(format!("blocks {} are missing", missing.join(", "))));
        }
        // Blocks that were filled from inside before, and come as file descriptors now.
        for id in fds.keys() {
            memory.strip(&Driver, *id);
        }
        let result = memory.attach(&Driver, &mut fds);
        if let Err(failure) = result {
            detach_again(&mut memory);
            return Err(failure);
        }
        drop(memory);
        self.restore_stacks().inspect_err(|_| detach_again(&mut memory::lock()))
    }

    /// After all blocks were filled from inside: puts the stacks back.
    ///
    /// # Errors
    /// The program is detached, as before.
    pub(super) fn finish_copy_in(&mut self) -> Result<(), Failure> {
        let memory = memory::lock();
        if !memory.all_attached() {
            let detached = memory.detached_blocks().len();
            return Err(Failure::other(format!("{detached} blocks are still detached")));
        }
        drop(memory);
        self.restore_stacks()
    }

    /// The driver's checkpoint saves the space for stacks: half of an empty context. It is made
    /// as small as it gets. Where that fails the checkpoint is larger, and that is all.
    fn shrink_stacks(&mut self) {
        for (context, _) in contexts::all() {
            let before = real::with_context(context, || {
                let mut limit = 0;
                // SAFETY: writes one value; a context is current.
                unsafe {
                    check(real::cuCtxGetLimit(&mut limit, LIMIT_STACK_SIZE))?;
                    check(real::cuCtxSetLimit(LIMIT_STACK_SIZE, 0))?;
                }
                Ok(limit)
            });
            match before {
                Ok(limit) => self.stacks.push((context, limit)),
                Err(code) => log!("stacks of context {context:#x} stay: error {code}"),
            }
        }
    }

    /// Gives awaited blocks their memory.
    ///
    /// # Errors
    /// Some of them are still detached.
    pub(super) fn attach(&mut self, fds: Fds) -> Result<(), Failure> {
        let _room = Room::make();
        memory::lock().attach_some(&Driver, fds)
    }

    /// Puts the limits back that [`Self::shrink_stacks`] changed. What fails may be repeated.
    pub(super) fn restore_stacks(&mut self) -> Result<(), Failure> {
        while let Some((context, limit)) = self.stacks.last().copied() {
            real::with_context(context, || {
                // SAFETY: plain values; a context is current.
                check(unsafe { real::cuCtxSetLimit(LIMIT_STACK_SIZE, limit) })
            })
            // The program is at its end, and its driver has ended already: there is no context any more.
            .or_else(|code| if code == ERROR_DEINITIALIZED { Ok(()) } else { Err(code) })
            .map_err(|code| {
                let message = format!("context {context:#x} does not get its stacks back");
                Failure::driver(code, message)
            })?;
            self.stacks.pop();
        }
        Ok(())
    }
}

fn detach_again(memory: &mut memory::Memory) {
    if let Err(failure) = memory.detach(&Driver) {
        log!("cannot detach again: {} (error {})", failure.message, failure.code);
    }
}

/// Receives one file descriptor for each id.
pub(super) fn receive(connection: &mut Connection, ids: &[u64]) -> Result<Fds, Failure> {
    let room = Room::make();
    let fds = connection
        .receive_fds_to(ids.len(), |fd| room.park(fd))
        .map_err(|error| Failure::other(format!("file descriptors did not come: {error}")))?;
    let fds: Fds = ids.iter().copied().zip(fds.into_iter().map(Arc::new)).collect();
    if fds.len() < ids.len() {
        return Err(Failure::other("a block is named twice"));
    }
    Ok(fds)
}

/// Copies from a block to `to`, where there is room.
pub(super) fn copy_out(block: u64, offset: u64, len: u64, to: *mut c_void) -> Result<(), Failure> {
    copy(block, offset, len, |address| {
        // SAFETY: the range lies within the block, and the staging memory has room.
        check(unsafe { real::cuMemcpyDtoH_v2(to, address, len as usize) })
    })
}

/// Copies to a block, which is made first if it has no memory, from `from`.
pub(super) fn copy_in(block: u64, offset: u64, len: u64, from: *mut c_void) -> Result<(), Failure> {
    memory::lock().renew(&Driver, block)?;
    copy(block, offset, len, |address| {
        // SAFETY: the range lies within the block and within the staging memory.
        check(unsafe { real::cuMemcpyHtoD_v2(address, from, len as usize) })
    })
}

fn copy(
    block: u64,
    offset: u64,
    len: u64,
    copy: impl FnOnce(u64) -> Result<(), u32>,
) -> Result<(), Failure> {
    let memory = memory::lock();
    let (device, size) =
        memory.block(block).ok_or_else(|| Failure::other(format!("there is no block {block}")))?;
    if offset.checked_add(len).is_none_or(|end| end > size) {
        let message = format!("{len} bytes at {offset} are not within block {block} of {size}");
        return Err(Failure::other(message));
    }
    if len == 0 {
        return Ok(());
    }
    let context = contexts::of_device(device).ok_or_else(|| {
        Failure::driver(ERROR_INVALID_CONTEXT, format!("there is no context on device {device}"))
    })?;
    memory.with_address(&Driver, block, |address| {
        real::with_context(context, || copy(address + offset))
            .map_err(|code| Failure::driver(code, format!("block {block} cannot be copied")))
    })
}
