//! Waiting until the devices have finished all that the program gave them.

use std::collections::BTreeMap;
use std::mem;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::abi::real;
use crate::abi::types::{CAPTURE_RELAXED, Code, ERROR_CONTEXT_IS_DESTROYED, ERROR_INVALID_CONTEXT};
use crate::limit::Limit;
use crate::state::contexts;
use crate::state::memory::Failure;
use crate::watch::own;

/// How often is looked whether the limit is reached.
const POLL: Duration = Duration::from_millis(10);

/// Calls of this thread, which is one of gpucr's, shall not disturb stream captures of others.
pub(crate) fn tolerate_captures() {
    own::exempt_this_thread();
    let mut mode = CAPTURE_RELAXED;
    // SAFETY: reads and writes one value.
    unsafe { real::cuThreadExchangeStreamCaptureMode(&mut mode) };
}

/// Waits for every context. The gate is closed, so nothing new comes.
///
/// # Errors
/// Names the context that was not done at the limit, or that is broken.
pub(crate) fn drain<'a>(limit: impl Into<Limit<'a>>) -> Result<(), Failure> {
    let limit = limit.into();
    let mut drain = Drain::begin()?;
    while !drain.is_done()? {
        if limit.is_over() {
            return Err(drain.unfinished());
        }
        drain.wait(POLL.min(limit.left()))?;
    }
    Ok(())
}

/// The wait for all devices, by somebody who looks from time to time how far it is.
///
/// The driver's wait has no time limit, so for each device another thread waits, and is left alone if nobody waits for
/// it any more. It ends when the device is done.
pub(super) struct Drain {
    devices: BTreeMap<i32, Device>,
    /// Where the threads say what came of each context.
    said: (Sender<Said>, Receiver<Said>),
    /// The longest time that a device was busy which has become idle, since somebody has asked for it.
    longest: Duration,
}

/// The wait for one device.
struct Device {
    since: Instant,
    /// Its contexts that are not done.
    left: Vec<u64>,
    /// Waits for them; none when they are done.
    thread: Option<JoinHandle<()>>,
    /// More work may have come since this wait began.
    is_stale: bool,
}

/// What came of waiting for a context of a device.
struct Said {
    device: i32,
    context: u64,
    result: Result<(), Code>,
}

impl Device {
    fn begin(device: i32, contexts: Vec<u64>, say: Sender<Said>) -> Result<Self, Failure> {
        let left = contexts.clone();
        let thread = thread::Builder::new()
            .name("gpucr-drain".into())
            .spawn(move || {
                tolerate_captures();
                for context in contexts {
                    let result = real::synchronize(context);
                    if say.send(Said { device, context, result }).is_err() {
                        return;
                    }
                }
            })
            .map_err(|error| Failure::other(format!("cannot start a thread to drain: {error}")))?;
        Ok(Self { since: Instant::now(), left, thread: Some(thread), is_stale: false })
    }
}

impl Drain {
    /// Begins to wait for every context.
    ///
    /// # Errors
    /// There are no threads.
    pub(super) fn begin() -> Result<Self, Failure> {
        let mut drain =
            Self { devices: BTreeMap::new(), said: mpsc::channel(), longest: Duration::ZERO };
        drain.renew()?;
        Ok(drain)
    }

    /// Work may have come to any device: whatever is idle is waited for once more, and what is busy as soon as it is
    /// idle.
    ///
    /// # Errors
    /// There are no threads.
    pub(super) fn renew(&mut self) -> Result<(), Failure> {
        self.devices.values_mut().for_each(|device| device.is_stale = true);
        self.wait_for_more()
    }

    /// Waits for devices for which nobody waits although work may have come.
    fn wait_for_more(&mut self) -> Result<(), Failure> {
        let idle = |device: &Device| device.thread.is_none() && device.is_stale;
        if !self.devices.is_empty() && !self.devices.values().any(idle) {
            return Ok(());
        }
        let mut of_device: BTreeMap<i32, Vec<u64>> = BTreeMap::new();
        for (context, device) in contexts::all() {
            of_device.entry(device).or_default().push(context);
        }
        self.devices
            .retain(|number, device| device.thread.is_some() || of_device.contains_key(number));
        for (number, contexts) in of_device {
            if self.devices.get(&number).is_none_or(idle) {
                let device = Device::begin(number, contexts, self.said.0.clone())?;
                self.devices.insert(number, device);
            }
        }
        Ok(())
    }

    /// Waits for news, for so long at most.
    ///
    /// # Errors
    /// Names a context that is broken.
    pub(super) fn wait(&mut self, time: Duration) -> Result<(), Failure> {
        match self.said.1.recv_timeout(time) {
            Ok(said) => self.heard(said),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(()),
        }
    }

    fn heard(&mut self, Said { device: number, context, result }: Said) -> Result<(), Failure> {
        let Some(device) = self.devices.get_mut(&number) else { return Ok(()) };
        match result {
            Ok(()) => {}
            // Destroyed in a way that was not seen.
            Err(ERROR_INVALID_CONTEXT | ERROR_CONTEXT_IS_DESTROYED) => contexts::gone(context),
            Err(code) => {
                let message = format!("context {context:#x} on device {number} is broken");
                return Err(Failure::driver(code, message));
            }
        }
        device.left.retain(|left| *left != context);
        if device.left.is_empty() {
            // It has nothing left to do, and must not be in the driver when that is checkpointed.
            let _ = device.thread.take().map(JoinHandle::join);
            self.longest = self.longest.max(device.since.elapsed());
        }
        Ok(())
    }

    /// Whether all devices are done with what they had when the last wait [began](Self::renew).
    ///
    /// # Errors
    /// Names a context that is broken, or the device whose thread has failed.
    pub(super) fn is_done(&mut self) -> Result<bool, Failure> {
        while let Ok(said) = self.said.1.try_recv() {
            self.heard(said)?;
        }
        let failed = |device: &Device| device.thread.as_ref().is_some_and(JoinHandle::is_finished);
        if self.devices.values().any(failed) {
            // It may have said all of it since.
            while let Ok(said) = self.said.1.try_recv() {
                self.heard(said)?;
            }
            if self.devices.values().any(failed) {
                return Err(Failure::other("the thread that drains has failed"));
            }
        }
        self.wait_for_more()?;
        Ok(self.devices.values().all(|device| device.thread.is_none()))
    }

    /// The devices that are busy, a bit for each.
    pub(super) fn busy(&self) -> u64 {
        let busy = self.devices.iter().filter(|(_, device)| device.thread.is_some());
        busy.filter_map(|(number, _)| 1u64.checked_shl(*number as u32)).sum()
    }

    /// Whether there is a device that is not busy.
    pub(super) fn may_launch(&self) -> bool {
        self.devices.is_empty() || self.devices.values().any(|device| device.thread.is_none())
    }

    /// For how long the device is busy that is so for the longest time.
    pub(super) fn busy_for(&self) -> Duration {
        let busy = self.devices.values().filter(|device| device.thread.is_some());
        busy.map(|device| device.since.elapsed()).max().unwrap_or_default()
    }

    /// The longest time that a device was busy which has become idle since this was asked last.
    pub(super) fn take_longest(&mut self) -> Duration {
        mem::take(&mut self.longest)
    }

    /// Says which device is not done.
    pub(super) fn unfinished(&self) -> Failure {
        let busy = self.devices.iter().find(|(_, device)| device.thread.is_some());
        let context = busy.and_then(|(_, device)| device.left.first().copied()).unwrap_or_default();
        let number = busy.map_or(0, |(number, _)| *number);
        Failure::other(format!(
            "device {number} was still busy with context {context:#x} at the time limit"
        ))
    }
}
