//! The phases that change nothing: checks, connections, preparations. The gates of programs that the driver has restored
//! may be shut for some moments meanwhile, to see whether they come to rest.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::describe::{self, Libraries};
use super::host::memory::Host;
use super::preflight::{self, DumpPlan};
use super::report::{Options, Target};
use super::speculate::Speculation;
use super::strategy::Strategy;
use super::task::{Account, Made, Standstill, Task};
use crate::base::clock::Clock;
use crate::base::phase::Phase;
use crate::base::progress::Progress;
use crate::cuda::{Drivers, Reserver};
use crate::engine::cuda_process::{CudaProcess, are_fragile};
use crate::engine::error::{Error, Failure, Left};
use crate::engine::memory::Bulk;
use crate::engine::migrate::outgoing::Outgoing;
use crate::engine::watchdog::Watchdog;
use crate::host::criu::DumpWorker;
use crate::host::process::farewell::Farewell;
use crate::host::process::{Lock, ProcessInfo};
use crate::image::ImageWriter;

/// After `attach`, and once more after `fallback`: all is at hand that the image needs before the programs are
/// stopped. They run, and nothing of them is changed. The way back: there is nothing to be taken back.
pub(super) struct Prepared {
    pub(super) image: Unfinished,
    /// Waits for its request.
    pub(super) criu: DumpWorker,
    /// The memory as gpucr maps it; `None` where the programs have to copy from inside.
    pub(super) memory: Option<Bulk>,
}

impl Prepared {
    /// Comes to the devices, which are idle.
    ///
    /// # Errors
    /// The driver does not start, or fails.
    pub(super) fn open(&mut self, task: &mut Task<'_>) -> Result<(), Error> {
        let programs = &task.made.cuda_processes;
        let Opened { memory, reserver } =
            Opened::open(&task.plan, programs, &task.drivers, task.options)?;
        (self.memory, task.reserver) = (memory, reserver);
        Ok(())
    }
}

/// An image that is being written. Dropped, it is removed.
pub(super) struct Unfinished {
    pub(super) writer: Arc<ImageWriter>,
    pub(super) libraries: Libraries,
}

/// The phases `preflight` and `attach`.
pub(super) fn attach<'a>(
    options: &'a Options,
    progress: &'a Arc<dyn Progress>,
) -> Result<(Task<'a>, Prepared), Failure> {
    let mut clock = Clock::recorded(progress.as_ref(), options.timeline.clone());
    let drivers = Drivers::default();
    let root = ProcessInfo::read(options.pid).ok();
    let begun = Checked::look_at(options, &drivers, &mut clock).and_then(|checked| {
        let mut checked = checked;
        let ready = Ready::make(&mut checked, options, &drivers, &mut clock)?;
        Ok((checked, ready))
    });
    match begun {
        Ok((checked, ready)) => {
            let Checked { farewell, writer, watchdog, plan, cuda_processes, locks } = checked;
            let Ready { strategy, opens_late, opened, libraries, criu } = ready;
            let Opened { memory, reserver } = opened;
            let task = Task {
                options,
                progress,
                clock,
                drivers,
                reserver,
                account: Account { bulk_bytes: plan.bulk_bytes(), ..Account::default() },
                plan,
                strategy,
                opens_late,
                speculation: Speculation::default(),
                host: Host::default(),
                made: Made { cuda_processes, watchdog, standstill: Standstill::default() },
                farewell,
                _locks: locks,
            };
            let image = Unfinished { writer: Arc::new(writer), libraries };
            Ok((task, Prepared { image, criu, memory }))
        }
        Err(error) => {
            // What is looked for at a process that ends meanwhile is missing in many ways.
            let (error, left) = match root.is_some_and(|root| root.is_ending()) {
                true => (Error::ProgramEnded, Left::Ended),
                false => (error, Left::Untouched),
            };
            Err(Failure { phase: clock.phase(), error: Box::new(error), left })
        }
    }
}

/// After `preflight`: nothing that could be found beforehand keeps the program from being saved.
struct Checked {
    /// Whoever watches over the program knows that it is about to be ended, if it is.
    farewell: Option<Farewell>,
    writer: ImageWriter,
    watchdog: Watchdog,
    plan: DumpPlan,
    cuda_processes: Vec<CudaProcess>,
    /// Let go of last.
    locks: Vec<Lock>,
}

impl Checked {
    fn look_at(options: &Options, drivers: &Drivers, clock: &mut Clock<'_>) -> Result<Self, Error> {
        clock.enter(Phase::Preflight, None)?;
        let (plan, cuda_processes, locks) = preflight::check(options, drivers)?;
        // Not before the program has answered: one that is just being restored is not yet watched over.
        let farewell = match options.leave_running {
            true => None,
            false => Some(say_farewell(options.pid)?),
        };
        let mut watchdog = Watchdog::start().map_err(Error::Watchdog)?;
        watchdog.locks(&locks).map_err(Error::Watchdog)?;
        let mut writer = match &options.target {
            Target::Image(destination) => {
                let target = destination.path();
                let target = std::path::absolute(&target).map_err(|source| Error::Io {
                    what: format!("cannot make {} absolute", target.display()),
                    source,
                })?;
                watchdog.writing(&target).map_err(Error::Watchdog)?;
                // Locks the store, so that nothing vanishes that this dump will rely on.
                let stop = || options.stop.load(Ordering::Relaxed);
                ImageWriter::begin_unless(destination, options.compression, &stop)?
            }
            Target::Peer(peer) => {
                offer_to(peer, options, &plan, clock, false)?;
                watchdog.migrating(&peer.record_path()).map_err(Error::Watchdog)?;
                if let Some(safety) = peer.safety_path() {
                    watchdog.writing(safety).map_err(Error::Watchdog)?;
                    peer.begin_safety_image()?;
                }
                ImageWriter::begin_away(peer.clone())?
            }
        };
        if let Some(key) = &options.sign {
            writer.sign_with(key.clone());
        }
        Ok(Self { farewell, writer, watchdog, plan, cuda_processes, locks })
    }
}

/// A dump that would end the program is not begun if who watches over it does not know: the program would be restored.
fn say_farewell(root: u32) -> Result<Farewell, Error> {
    Farewell::begin(root).map_err(|source| Error::Io {
        what: "the `gpucr run` that watches over the program does not answer".to_owned(),
        source,
    })
}

/// The phase `offer` of a migration.
fn offer_to(
    peer: &Outgoing,
    options: &Options,
    plan: &DumpPlan,
    clock: &mut Clock<'_>,
    dry_run: bool,
) -> Result<(), Error> {
    clock.enter(Phase::Offer, None)?;
    // Where the program is stopped for good, it is by signals that such a process does not notice.
    let pids = plan.processes.iter().map(|process| process.pid);
    for process in pids.filter_map(|pid| ProcessInfo::read(pid).ok()) {
        if process.is_suspended() {
            return Err(Error::Suspended { pid: process.pid });
        }
    }
    let (outline, signer) = (describe::outline(options, plan)?, options.sign.as_deref());
    peer.offer(&outline, &plan.network, signer, dry_run)
}

/// The phases `preflight` and `offer`, of a migration that ends with them.
pub(super) fn offer(options: &Options, progress: &Arc<dyn Progress>) -> Result<(), Failure> {
    let mut clock = Clock::start(progress.as_ref());
    let drivers = Drivers::default();
    let mut ask = || -> Result<(), Error> {
        clock.enter(Phase::Preflight, None)?;
        let (plan, _cuda_processes, _locks) = preflight::check(options, &drivers)?;
        let peer = options.target.peer();
        peer.map_or(Ok(()), |peer| offer_to(peer, options, &plan, &mut clock, true))
    };
    let asked = ask();
    asked.map_err(|error| Failure {
        phase: clock.phase(),
        error: Box::new(error),
        left: Left::Untouched,
    })
}

/// After `attach`: what the next phases need is made and started.
struct Ready {
    strategy: Strategy,
    /// gpucr comes to the devices when the programs stand still, not before.
    opens_late: bool,
    opened: Opened,
    libraries: Libraries,
    criu: DumpWorker,
}

/// What gpucr has on the devices.
pub(super) struct Opened {
    pub(super) memory: Option<Bulk>,
    pub(super) reserver: Reserver,
}

impl Opened {
    /// Makes gpucr's contexts on the devices of the programs.
    ///
    /// # Errors
    /// The driver does not start, or fails.
    pub(super) fn open(
        plan: &DumpPlan,
        cuda_processes: &[CudaProcess],
        drivers: &Drivers,
        options: &Options,
    ) -> Result<Self, Error> {
        let driver = drivers.open(&plan.driver)?;
        let timeline = options.timeline.clone();
        let memory = Bulk::prepare(&driver, &plan.devices, plan.bulk_bytes(), timeline)?;
        let contexts = memory.as_ref().map_or_else(Vec::new, Bulk::contexts);
        let mut reserver = Reserver::new(contexts);
        // Nobody knows which devices a program uses that has no agent.
        if cuda_processes.iter().any(|program| !program.has_agent) {
            reserver.add(&driver, &driver.devices()?);
        }
        Ok(Self { memory, reserver })
    }
}

impl Ready {
    fn make(
        checked: &mut Checked,
        options: &Options,
        drivers: &Drivers,
        clock: &mut Clock<'_>,
    ) -> Result<Self, Error> {
        clock.enter(Phase::Attach, None)?;
        let Checked { plan, cuda_processes, writer, .. } = checked;
        let opens_late = are_fragile(cuda_processes)?;
        let mut opened = match opens_late {
            true => Opened { memory: None, reserver: Reserver::new(Vec::new()) },
            false => Opened::open(plan, cuda_processes, drivers, options)?,
        };
        let strategy = Strategy::choose(options, plan, opened.memory.as_mut());
        let libraries = Libraries::store(plan, writer)?;
        let criu = plan.start_criu()?;
        Ok(Self { strategy, opens_late, opened, libraries, criu })
    }
}
