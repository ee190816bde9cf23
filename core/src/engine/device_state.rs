//! The device state of a process that gpucr does not carry itself.
//!
//! gpucr carries the bytes of the blocks ([`kinds`] lists who carries what). All else that a process has on its
//! devices (contexts, modules, streams, pools, ...) is saved and brought back by a [`DeviceState`]. There is one,
//! [`DriverCheckpoint`]: the checkpoint that the driver itself offers. Dump, restore and
//! roll-back know the trait alone.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::cuda::driver::{DevicePair, DriverError, OpenError};
use crate::cuda::{Driver, Drivers, HostDriver, ProcessState};
use crate::engine::kinds::{self, Kind};
use crate::host::process::network;

/// Why the device state of a process was not saved or brought back.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A call of the driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Nothing could be asked of the driver.
    #[error("the network namespace of the process cannot be entered: {0}")]
    Unreachable(String),
}

/// Saves the device state of processes and brings it back. A process passes through the states
/// [`Running`](ProcessState::Running), [`Locked`](ProcessState::Locked),
/// [`Checkpointed`](ProcessState::Checkpointed), and back in the opposite order.
pub(crate) trait DeviceState: Send + Sync {
    /// Where process `pid` stands.
    ///
    /// # Errors
    /// The process has no device state, or it cannot be asked for.
    fn state(&self, pid: u32) -> Result<ProcessState, StateError>;

    /// Keeps a running process from changing its device state, and waits up to `limit` for the calls that do.
    ///
    /// # Errors
    /// The calls take longer, or the process cannot be locked. It runs on then.
    fn lock(&self, pid: u32, limit: Duration) -> Result<(), StateError>;

    /// Moves the device state of a locked process into its host memory.
    ///
    /// # Errors
    /// The device state cannot be moved; [`state`](Self::state) tells what holds then.
    fn checkpoint(&self, pid: u32) -> Result<(), StateError>;

    /// Moves the device state of a checkpointed process back; the process is locked then. With `devices`, which
    /// must name every device of the host that the process could see, to other ones.
    ///
    /// # Errors
    /// The device state cannot be moved, as where a device has no room for it. The process is still checkpointed, or
    /// has [failed](ProcessState::Failed).
    fn restore(&self, pid: u32, devices: &[DevicePair]) -> Result<(), StateError>;

    /// Lets a locked process go on.
    ///
    /// # Errors
    /// The process is still locked.
    fn unlock(&self, pid: u32) -> Result<(), StateError>;

    /// Brings process `pid` to running from wherever it stands, with `devices` as for [`restore`](Self::restore).
    ///
    /// # Errors
    /// A step fails. The steps before it are done, and this may be tried again.
    fn resume(&self, pid: u32, devices: &[DevicePair]) -> Result<(), StateError> {
        if self.state(pid)? == ProcessState::Checkpointed {
            self.restore(pid, devices)?;
            tracing::debug!(pid, "the driver has restored its device state");
        }
        if self.state(pid)? == ProcessState::Locked {
            self.unlock(pid)?;
        }
        Ok(())
    }
}

/// Gives out what saves the device state of processes.
pub(crate) trait DeviceStates {
    /// Whether what it gives out carries state of this kind. A process that has state which neither that nor gpucr
    /// carries is refused.
    fn carries(&self, kind: &dyn Kind) -> bool;

    /// The one for the processes that this driver library serves.
    ///
    /// # Errors
    /// The library cannot be used.
    fn device_state(&self, library: &Arc<HostDriver>) -> Result<Arc<dyn DeviceState>, OpenError>;
}

/// The one for the processes that this driver serves.
pub(crate) fn of(driver: &Arc<Driver>) -> Arc<dyn DeviceState> {
    Arc::new(DriverCheckpoint(driver.clone()))
}

/// The driver's own checkpoint, `cuCheckpointProcess*`. The driver in the process listens on a socket whose name belongs
/// to a network namespace, so it is called from there.
struct DriverCheckpoint(Arc<Driver>);

impl DriverCheckpoint {
    /// Calls the driver in the network namespace of process `pid`.
    fn call<T: Send>(
        &self,
        pid: u32,
        work: impl FnOnce(&Driver) -> Result<T, DriverError> + Send,
    ) -> Result<T, StateError> {
        let unreachable = |error: io::Error| StateError::Unreachable(error.to_string());
        match network::of_pid(pid).map_err(unreachable)? {
            Some(network) => Ok(network.visit(|| Ok(work(&self.0))).map_err(unreachable)??),
            // There is no such process, which the driver tells in its own words.
            None => Ok(work(&self.0)?),
        }
    }
}

impl DeviceState for DriverCheckpoint {
    fn state(&self, pid: u32) -> Result<ProcessState, StateError> {
        self.call(pid, |driver| driver.process_state(pid))
    }

    fn lock(&self, pid: u32, limit: Duration) -> Result<(), StateError> {
        // The driver takes 0 for no limit.
        let limit = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).max(1);
        self.call(pid, |driver| driver.lock(pid, limit))
    }

    fn checkpoint(&self, pid: u32) -> Result<(), StateError> {
        self.call(pid, |driver| driver.checkpoint(pid))
    }

    fn restore(&self, pid: u32, devices: &[DevicePair]) -> Result<(), StateError> {
        self.call(pid, |driver| driver.restore(pid, devices))
    }

    fn unlock(&self, pid: u32) -> Result<(), StateError> {
        self.call(pid, |driver| driver.unlock(pid))
    }
}

impl DeviceStates for Drivers {
    fn carries(&self, kind: &dyn Kind) -> bool {
        kinds::by_driver(kind)
    }

    fn device_state(&self, library: &Arc<HostDriver>) -> Result<Arc<dyn DeviceState>, OpenError> {
        Ok(of(&self.open(library)?))
    }
}

#[cfg(test)]
pub(crate) mod double;
