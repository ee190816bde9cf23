//! What the agent knows of the program, and how it gets from one state to the next.

use gpucr_wire::{GateState, Reply};

use super::rest::Rest;
use super::sharing::Sharing;
use super::staging::Staging;
use super::transfer::Transfer;
use crate::abi::real;
use crate::limit::Limit;
use crate::log::log;
use crate::state::memory::{self, Failure};
use crate::state::{contexts, gate};
use crate::usage;
use crate::watch::faults::Why;
use crate::watch::{self, faults, guard, interrupt, meeting};

/// What the agent knows from one request to the next.
pub(super) struct Agent {
    pub(super) state: GateState,
    /// While the program is being stopped, and once it is.
    pub(super) rest: Option<Rest>,
    pub(super) driver_version: i32,
    pub(super) transfer: Transfer,
    pub(super) staging: Option<Staging>,
    /// Whether blocks are awaited, or were until all came, and nobody has looked yet whether the device has
    /// missed one.
    pub(super) awaiting: bool,
    /// While memory may be shared with other instances.
    pub(super) sharing: Option<Sharing>,
    /// What it held when it was detached: the driver may be frozen since, and cannot be asked.
    pub(super) devices: Vec<[u8; 16]>,
    /// Whether it was detached once: the driver has restored the process since, or a copy of it.
    pub(super) was_detached: bool,
    /// Whether nobody is accepted before it is woken.
    pub(super) is_left_alone: bool,
}

/// What to do after a request.
pub(super) enum Next {
    Reply(Reply),
    /// The reply has been sent.
    Sent,
    /// Send it, and close the connection.
    Last(Reply),
}

impl Next {
    /// It was done, and there is nothing to tell.
    pub(super) fn done() -> Self {
        Self::Reply(Reply::Done {})
    }
}

impl Agent {
    pub(super) fn new() -> Self {
        Self {
            state: GateState::Open {},
            rest: None,
            driver_version: real::version(),
            transfer: Transfer::default(),
            staging: None,
            awaiting: false,
            sharing: None,
            devices: Vec::new(),
            was_detached: false,
            is_left_alone: false,
        }
    }

    pub(super) fn connection_ended(&mut self) {
        if self.awaiting && !memory::lock().all_attached() {
            // What is missing comes no more. Those who wait for it go on waiting.
            gate::shut();
            self.state = GateState::Detached {};
            return;
        }
        self.stop_awaiting();
        self.end_meeting();
        watch::stop();
        guard::end_saving();
        usage::remember_pinned(false);
        self.staging = None;
        self.transfer.forget_exports();
        match self.state {
            GateState::Closed {} => self.open(),
            GateState::Closing {} => self.reopen(),
            _ => {}
        }
    }

    /// Waits from now on for a call by which the program waits for the device.
    pub(super) fn begin_meeting(&mut self) {
        faults::watch(Why::Meeting, true);
        meeting::begin();
    }

    /// Waits for none any more.
    pub(super) fn end_meeting(&mut self) {
        if meeting::end() {
            faults::watch(Why::Meeting, false);
        }
    }

    /// Nothing is awaited any more.
    pub(super) fn stop_awaiting(&mut self) {
        if std::mem::take(&mut self.awaiting) {
            faults::watch(Why::Memory, false);
        }
    }

    /// Gives all shared memory a memory of its own: a checkpointer is about to look at it.
    ///
    /// # Errors
    /// Some of it is still shared, and the program runs on.
    pub(super) fn end_sharing(&mut self, limit: Limit<'_>) -> Result<(), Failure> {
        if let Some(sharing) = &self.sharing {
            sharing.give_up(limit)?;
        }
        if let Some(sharing) = self.sharing.take() {
            sharing.end();
            faults::watch(Why::Memory, false);
        }
        Ok(())
    }

    pub(super) fn open(&mut self) {
        self.transfer.forget_exports();
        memory::lock().lend_at(guard::addresses().into_iter());
        self.state = GateState::Open {};
        self.rest = None;
        self.launch_interrupted();
        gate::open();
    }

    /// Launches what is interrupted, before the gate opens: at once, or as soon as it may touch all memory. Calls that
    /// come after it wait for that.
    pub(super) fn launch_interrupted(&self) {
        let launched = if gate::is_guarding() { Ok(()) } else { interrupt::relaunch() };
        if let Err(failure) = launched {
            log!("{} (error {})", failure.message, failure.code);
        }
        interrupt::relaunch_later();
    }

    /// Opens a gate that is not closed yet. Calls that are inside may hold the tables of memory.
    pub(super) fn reopen(&mut self) {
        self.state = GateState::Open {};
        self.rest = None;
        self.launch_interrupted();
        gate::open();
    }

    pub(super) fn expect(&self, state: GateState) -> Result<(), Failure> {
        if self.state == state {
            return Ok(());
        }
        Err(Failure::other(format!(
            "not possible now: the program is {:?}, and would have to be {state:?}",
            self.state
        )))
    }
}

/// The devices on which the program has contexts.
pub(super) fn devices() -> Vec<[u8; 16]> {
    let mut devices: Vec<i32> = contexts::all().into_iter().map(|(_, device)| device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.into_iter().map(real::uuid).collect()
}
