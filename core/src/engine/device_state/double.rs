//! A device state for tests, any step of which fails as often as the test says.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::{DeviceState, DeviceStates, StateError};
use crate::cuda::driver::{DevicePair, DriverError, OpenError};
use crate::cuda::{HostDriver, ProcessState};
use crate::engine::kinds::{self, Kind};

/// What can be asked of a device state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    State,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

#[derive(Default)]
struct Inner {
    processes: HashMap<u32, ProcessState>,
    /// How often a step still fails.
    failures: HashMap<Step, usize>,
    /// The steps that were tried, but for questions.
    tried: Vec<(Step, u32)>,
}

/// Knows the states of processes, and does nothing to them. It is the same in all its copies.
#[derive(Default, Clone)]
pub(crate) struct Double(Arc<Mutex<Inner>>);

impl Double {
    /// Puts process `pid` into a state.
    pub(crate) fn put(&self, pid: u32, state: ProcessState) {
        self.0.lock().processes.insert(pid, state);
    }

    /// Lets a step fail the next `times` times.
    pub(crate) fn fail(&self, step: Step, times: usize) {
        self.0.lock().failures.insert(step, times);
    }

    /// Where process `pid` stands.
    pub(crate) fn now(&self, pid: u32) -> Option<ProcessState> {
        self.0.lock().processes.get(&pid).copied()
    }

    /// The steps that were tried since this was asked last.
    pub(crate) fn tried(&self) -> Vec<(Step, u32)> {
        std::mem::take(&mut self.0.lock().tried)
    }

    fn go(
        &self,
        step: Step,
        pid: u32,
        from: ProcessState,
        to: ProcessState,
    ) -> Result<(), StateError> {
        let mut inner = self.0.lock();
        inner.tried.push((step, pid));
        inner.fail(step)?;
        match inner.processes.get_mut(&pid) {
            Some(state) if *state == from => *state = to,
            _ => return Err(refused("a step from another state")),
        }
        Ok(())
    }
}

impl Inner {
    fn fail(&mut self, step: Step) -> Result<(), StateError> {
        match self.failures.get_mut(&step) {
            Some(left) if *left > 0 => {
                *left -= 1;
                Err(refused("a step that the test lets fail"))
            }
            _ => Ok(()),
        }
    }
}

fn refused(name: &str) -> StateError {
    DriverError { function: "the double", code: 1, name: name.into() }.into()
}

impl DeviceState for Double {
    fn state(&self, pid: u32) -> Result<ProcessState, StateError> {
        let mut inner = self.0.lock();
        inner.fail(Step::State)?;
        inner.processes.get(&pid).copied().ok_or_else(|| refused("no such process"))
    }

    fn lock(&self, pid: u32, _: Duration) -> Result<(), StateError> {
        self.go(Step::Lock, pid, ProcessState::Running, ProcessState::Locked)
    }

    fn checkpoint(&self, pid: u32) -> Result<(), StateError> {
        self.go(Step::Checkpoint, pid, ProcessState::Locked, ProcessState::Checkpointed)
    }

    fn restore(&self, pid: u32, _: &[DevicePair]) -> Result<(), StateError> {
        self.go(Step::Restore, pid, ProcessState::Checkpointed, ProcessState::Locked)
    }

    fn unlock(&self, pid: u32) -> Result<(), StateError> {
        self.go(Step::Unlock, pid, ProcessState::Locked, ProcessState::Running)
    }
}

impl DeviceStates for Double {
    fn carries(&self, kind: &dyn Kind) -> bool {
        kinds::by_driver(kind)
    }

    fn device_state(&self, _: &Arc<HostDriver>) -> Result<Arc<dyn DeviceState>, OpenError> {
        Ok(Arc::new(self.clone()))
    }
}
