//! Watches over the program: saves it, and restores it when it has failed.
//!
//! This process only waits and starts others. Dumps and restores are made by a gpucr of their own, so that neither a
//! driver that fails with the device nor a dump that is killed takes this one along.

use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gpucr_core::Error;
use gpucr_core::dump::Schedule;
use gpucr_core::process::{ProcessInfo, environment, kill_descendants};
use gpucr_wire::supervisor::{ENV_SUPERVISOR, code, is_supervisor};
use rustix::fs::{FileType, OFlags};
use rustix::process::{Pid, WaitOptions};

use super::args::{How, SupervisionArgs};
use super::dumping::{Dumped, Dumping, Wanted};
use super::entry;
use super::failures::failure;
use super::images::{Images, is_damaged};
use super::life::{Ending, Life, cannot_run};
use super::listener::{Farewell, Listener};
use crate::commands::restore::End;
use crate::commands::{Outcome, dump, io_error, note};
use crate::display;
use crate::failure::{self, CliError, FAILED};
use crate::signals::{self, SignalPlan};
use crate::stores;

/// The exit code after a signal that saves and ends the program: the one by which programs say that somebody may try again
/// later (`EX_TEMPFAIL`).
const SAVED_TO_END: u8 = 75;
/// How often this process looks how things are.
const POLL: Duration = Duration::from_millis(50);
/// The pause before the second restore without a new image, and the longest before any.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long what is left of a program that has failed may take to end when it was killed.
const LAST_MOMENTS: Duration = Duration::from_secs(10);

/// Starts the program, and ends when it has ended for good, with its exit status.
pub(super) fn run(args: &SupervisionArgs, mut command: Command) -> Outcome {
    args.check()?;
    let store = stores::store(args.store.as_deref())?;
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::from(Error::NotRoot).state("The program was not started."));
    }
    // Better now than at the first dump.
    let folder = if store.is_dir() { Some(store.as_path()) } else { store.parent() };
    if !folder.is_some_and(|dir| dir.as_os_str().is_empty() || dir.is_dir()) {
        let what = format!("the store {} cannot be made: there is no such folder", store.display());
        return Err(CliError::new(FAILED, what).state("The program was not started."));
    }
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let listener = Listener::start(&store).map_err(io_error("cannot listen to the program"))?;
    append();
    args.on_signal.iter().for_each(|on| signals.keep_for_itself(on.signal));
    // Processes of the program that lose their parents become children of this one, which ends them with the program.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(|error| {
        io_error("cannot become the parent of the program's processes")(error.into())
    })?;
    let earlier = if args.resume { stores::in_order(&store)? } else { Vec::new() };
    let images = Images::new(earlier, args.keep.map_or(usize::MAX, |keep| keep as usize));
    let life = match images.next() {
        Some(image) => {
            note!("gpucr: resuming from the image {}", image.display());
            Life::restore(image, &args.restore_args, &signals)
                .map_err(io_error("cannot start a restore"))?
        }
        None => {
            command.env(ENV_SUPERVISOR, &listener.names()[0]);
            ignore(&mut command, args);
            entry::leave_low_pids();
            listener.expect_program();
            Life::start(&mut command, &signals).map_err(|error| cannot_run(&command, &error))?
        }
    };
    // The program has its own limit.
    gpucr_core::limits::raise_open_files();
    let mut supervisor = Supervisor {
        args,
        store: &store,
        signals,
        listener,
        images,
        life,
        is_met: false,
        schedule: None,
        dumping: None,
        how: How::Now,
        saved_to_end: None,
        ticket: None,
        cleaning: None,
        failed: Vec::new(),
    };
    let outcome = supervisor.until_it_ends();
    supervisor.end_cleaning();
    outcome
}

struct Supervisor<'a> {
    args: &'a SupervisionArgs,
    store: &'a Path,
    signals: SignalPlan,
    listener: Listener,
    images: Images,
    life: Life,
    /// Whether the program of this life is known.
    is_met: bool,
    schedule: Option<Schedule>,
    dumping: Option<Dumping>,
    /// How the last dump was made.
    how: How,
    /// The image with which the program was ended.
    saved_to_end: Option<PathBuf>,
    /// For whom the dump under way is, and whether he has named its image.
    ticket: Option<(u64, bool)>,
    cleaning: Option<Cleaning>,
    /// After how long the program has failed, each time since the last image.
    failed: Vec<Duration>,
}

/// Images that are not kept are removed beside the program, since what they had is looked for in all others.
struct Cleaning {
    thread: JoinHandle<()>,
    stop: Arc<AtomicBool>,
}

impl Supervisor<'_> {
    /// Whether gpucr, and so the program, was asked to end.
    fn is_to_end(&self) -> bool {
        self.signals.stop.load(Ordering::Relaxed)
    }

    /// Watches over the program, and restores it when it has failed.
    fn until_it_ends(&mut self) -> Outcome {
        // What gpucr ends with if the program is not restored again.
        let mut last = None;
        loop {
            let ending = self.watch()?;
            let broken = self.listener.broken();
            let farewell = self.listener.farewell();
            self.listener.listen_to(None);
            self.is_met = false;
            let why = match ending {
                Ending::Left(pid) => return Err(left(pid)),
                Ending::Program(end) => {
                    last = Some(end);
                    if let (Some(Farewell::Saved), Some(image)) = (farewell, &self.saved_to_end) {
                        note!("gpucr: the program was saved and ended: {}", image.display());
                        return Ok(ExitCode::from(SAVED_TO_END));
                    }
                    if let Some(farewell) = farewell {
                        tell(farewell);
                        return Ok(end.exit_code());
                    }
                    match failure(end, broken) {
                        Some(why) if self.args.restart.is_some() && !self.is_to_end() => why,
                        _ => return Ok(end.exit_code()),
                    }
                }
                Ending::NotRestored if self.args.restart.is_some() && !self.is_to_end() => {
                    self.images.choose(is_damaged);
                    "it could not be restored".to_owned()
                }
                Ending::NotRestored => return Ok(given_up(last)),
            };
            self.failed.push(self.life.age());
            match self.next_life(&why)? {
                Some(life) => self.life = life,
                None => return Ok(given_up(last)),
            }
        }
    }

    /// Waits for the end of the program, and saves it meanwhile.
    fn watch(&mut self) -> Result<Ending, CliError> {
        loop {
            self.settle_dump();
            let ending = self.life.end(&self.signals);
            if let Some(ending) = ending.map_err(io_error("cannot wait for the program"))? {
                if let Some(mut dumping) = self.dumping.take() {
                    if self.is_to_end() {
                        dumping.ask_to_end();
                    }
                    // Its image may have been complete before the program ended.
                    let dumped = dumping.wait();
                    self.take(dumped, true);
                }
                return Ok(ending);
            }
            self.reap_others();
            if let Some(root) = self.life.root().filter(|_| !self.is_met) {
                self.meet(root);
                self.life.let_run();
            }
            if let Some(root) = self.life.program() {
                self.save_if_due(root);
            }
            std::thread::sleep(POLL);
        }
    }

    /// There is a program, which is about to run.
    fn meet(&mut self, root: u32) {
        self.is_met = true;
        self.listener.listen_to(Some(root));
        self.schedule = self.args.every.map(|interval| Schedule::begin(interval, false));
        // An image may have been made under another gpucr.
        let name = environment(root, ENV_SUPERVISOR).filter(|name| is_supervisor(name));
        if let Some(Err(error)) = name.map(|name| self.listener.answer_to(name)) {
            note!(
                "gpucr: requests from within the program do not arrive, since it has another name for this \
                gpucr: {error}"
            );
        }
    }

    /// Takes up what a dump has come to.
    fn settle_dump(&mut self) {
        let is_to_end = self.is_to_end();
        if is_to_end {
            self.listener.tickets().refuse_all();
        }
        let Some(dumping) = &mut self.dumping else { return };
        if is_to_end {
            dumping.ask_to_end();
        }
        if let Some(dumped) = dumping.end() {
            self.dumping = None;
            // Its end may have been seen by the dump first.
            let has_ended = |pid| ProcessInfo::read(pid).map_or(true, |root| root.has_ended());
            let is_over = is_to_end || self.life.program().is_none_or(has_ended);
            self.take(dumped, is_over);
        }
    }

    fn take(&mut self, dumped: Dumped, has_ended: bool) {
        let ticket = self.ticket.take();
        if let Some((number, _)) = ticket {
            self.listener.tickets().is_done(
                number,
                match &dumped {
                    Dumped::Image(_) => Ok(()),
                    Dumped::Failed(why) => Err((code::NOT_SAVED, first_line(why).to_owned())),
                },
            );
        }
        let is_named = ticket.is_some_and(|(_, is_named)| is_named);
        match dumped {
            Dumped::Image(image) => {
                tracing::info!(image = %image.display(), "an image");
                self.failed.clear();
                if self.how != How::End {
                    self.listener.still_runs();
                }
                self.saved_to_end = (self.how == How::End).then(|| image.clone());
                let surplus = self.images.took(image, is_named);
                self.clean(surplus);
            }
            // That it could not be saved to its end is the way of things.
            Dumped::Failed(why) if has_ended => tracing::info!(why, "not saved"),
            Dumped::Failed(why) => {
                note!("gpucr: the program was not saved:");
                why.lines().filter(|line| !line.is_empty()).for_each(|line| note!("{line}"));
            }
        }
    }

    /// Starts a dump, if its time has come.
    fn save_if_due(&mut self, root: u32) {
        if self.dumping.is_some() || self.is_to_end() {
            return;
        }
        let ticket = self.listener.tickets().next();
        let how = self.wanted().or(ticket.as_ref().map(|_| How::Now));
        let Some(how) = how else { return };
        // Who waits for an image is in this one, whoever else has wanted it.
        let name = ticket.as_ref().map(|(_, name)| name.as_str()).filter(|name| !name.is_empty());
        let wanted = Wanted { pid: root, store: self.store, name, how, args: &self.args.dump_args };
        let started = Dumping::start(&wanted);
        let mut tickets = self.listener.tickets();
        match started {
            Ok((dumping, events)) => {
                self.dumping = Some(dumping);
                self.how = how;
                if let Some((number, name)) = ticket {
                    tickets.is_served(number, events);
                    self.ticket = Some((number, !name.is_empty()));
                }
            }
            Err(error) => {
                if let Some((number, _)) = ticket {
                    tickets.is_done(number, Err((code::NOT_SAVED, error.to_string())));
                }
                note!("gpucr: a dump cannot be started: {error}");
            }
        }
    }

    /// Whether a dump is wanted now, and how.
    fn wanted(&mut self) -> Option<How> {
        // All signals that have come are answered by one image.
        let come = self.args.on_signal.iter().filter(|on| self.signals.take(on.signal));
        let come: Vec<How> = come.map(|on| on.how).collect();
        if let Some(how) = come.into_iter().max() {
            return Some(how);
        }
        let schedule = self.schedule.as_mut().filter(|schedule| schedule.left().is_zero())?;
        schedule.advance();
        Some(How::Now)
    }

    /// Removes images, and what nobody else needs of them, on a thread of its own.
    fn clean(&mut self, surplus: Vec<PathBuf>) {
        if surplus.is_empty() {
            return;
        }
        self.end_cleaning();
        let (store, stop) = (self.store.to_owned(), Arc::<AtomicBool>::default());
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || dump::clean(&store, surplus, &stopped));
        self.cleaning = Some(Cleaning { thread, stop });
    }

    /// What is not cleaned by now is so the next time.
    fn end_cleaning(&mut self) {
        if let Some(Cleaning { thread, stop }) = self.cleaning.take() {
            stop.store(true, Ordering::Relaxed);
            let _ = thread.join();
        }
    }

    /// Restores the program, which has failed, unless it has done so too often.
    ///
    /// # Errors
    /// No restore can be started.
    fn next_life(&mut self, why: &str) -> Result<Option<Life>, CliError> {
        let (most, times) = (self.args.restart.unwrap_or(0) as usize, self.failed.len());
        let Some(image) = self.images.next().map(Path::to_owned) else {
            failure::show(
                CliError::new(FAILED, format!("the program has failed: {why}"))
                    .state("There is no image yet from which it could be restored."),
            );
            return Ok(None);
        };
        if times > most {
            failure::show(self.too_often(why, &image));
            return Ok(None);
        }
        if !self.pause(times) {
            return Ok(None);
        }
        self.kill_rest();
        note!(
            "gpucr: the program has failed: {why}. Restoring it from {} (attempt {times} of {most} without a new \
            image).",
            image.display()
        );
        let life = Life::restore(&image, &self.args.restore_args, &self.signals);
        life.map(Some).map_err(io_error("cannot start a restore"))
    }

    /// Says that the program is not restored any more.
    fn too_often(&self, why: &str, image: &Path) -> CliError {
        let times: Vec<String> = self
            .failed
            .iter()
            .map(|time| display::time(gpucr_core::format::milliseconds(*time)))
            .collect();
        let what = format!(
            "the program keeps failing: {} times without a new image in between, the last time: {why}",
            times.len()
        );
        CliError::new(FAILED, what)
            .state(format!(
                "It is not restored again. The times for which it ran before it failed: {}. Its last image is as \
                it was.",
                times.join(", ")
            ))
            .help(format!("`gpucr restore {}` restores it", crate::escape::shell_word(image)))
    }

    /// Waits before a restore which is the second in a row, or a later one. `false` if gpucr was asked to end.
    fn pause(&self, times: usize) -> bool {
        let pause = times.checked_sub(2).map_or(Duration::ZERO, |doubled| {
            FIRST_PAUSE.saturating_mul(1 << doubled.min(10)).min(LONGEST_PAUSE)
        });
        let until = Instant::now() + pause;
        while Instant::now() < until && !self.is_to_end() {
            std::thread::sleep(POLL);
        }
        !self.is_to_end()
    }

    /// Kills what is left of the program: the restore needs the pids.
    fn kill_rest(&self) {
        let until = Instant::now() + LAST_MOMENTS;
        while kill_descendants() > 0 && Instant::now() < until {
            self.reap_others();
            std::thread::sleep(POLL);
        }
        self.reap_others();
    }

    /// This process is the parent of all processes of the program that lose theirs.
    fn reap_others(&self) {
        let own = [Some(self.life.child()), self.dumping.as_ref().map(Dumping::pid)];
        while let Some(pid) = ended_child() {
            let is_own = own.contains(&Some(pid.as_raw_nonzero().get() as u32));
            if is_own || rustix::process::waitpid(Some(pid), WaitOptions::NOHANG).is_err() {
                return;
            }
        }
    }
}

/// A child that has ended, and that nobody has waited for.
fn ended_child() -> Option<Pid> {
    // SAFETY: the call writes one value, for which there is room; zeros are one.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOWAIT | libc::WNOHANG;
    // SAFETY: as above.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &mut info, options) };
    // SAFETY: it was set by the call, or is 0.
    (result == 0).then(|| Pid::from_raw(unsafe { info.si_pid() })).flatten()
}

/// Lets this process and the program add to the ends of the files that are their standard output and standard error: a
/// restored program opens them anew, and would write over what this process writes, and this one over what it writes.
fn append() {
    let append = |stream: std::os::fd::BorrowedFd<'_>| -> rustix::io::Result<()> {
        let is_file =
            FileType::from_raw_mode(rustix::fs::fstat(stream)?.st_mode) == FileType::RegularFile;
        if is_file {
            rustix::fs::fcntl_setfl(stream, rustix::fs::fcntl_getfl(stream)? | OFlags::APPEND)?;
        }
        Ok(())
    };
    for stream in [std::io::stdout().as_fd(), std::io::stderr().as_fd()] {
        if let Err(error) = append(stream) {
            tracing::warn!(%error, "lines may be written over");
        }
    }
}

/// Lets the program ignore the signals that this process takes for itself, unless it does something with them: whoever
/// sends them to all processes of a job does not mean to end it.
fn ignore(command: &mut Command, args: &SupervisionArgs) {
    for on in &args.on_signal {
        let signal = on.signal;
        // SAFETY: signal(2) is async-signal-safe, and so is reading the error.
        unsafe {
            command.pre_exec(move || match libc::signal(signal, libc::SIG_IGN) {
                libc::SIG_ERR => Err(std::io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
    }
}

/// The exit code where the program is not restored: its own, if it has ended by itself.
fn given_up(last: Option<End>) -> ExitCode {
    last.map_or(ExitCode::from(FAILED), End::exit_code)
}

/// What has happened, of an error as people see it.
fn first_line(why: &str) -> &str {
    let lines = why.lines().map(|line| line.trim_start_matches([' ', '\u{d7}']));
    lines.filter(|line| !line.is_empty()).map(str::trim).next().unwrap_or_default()
}

/// Another gpucr has ended the program: that is no failure.
fn tell(farewell: Farewell) {
    match farewell {
        Farewell::Saved => note!("gpucr: the program was saved and ended by another gpucr"),
        Farewell::Unknown => note!(
            "gpucr: the program ended while another gpucr was dumping it in order to end it, and the result of \
            that dump is not known; the program is not restored"
        ),
    }
}

/// Nobody stands in for the program any more.
fn left(pid: u32) -> CliError {
    CliError::new(FAILED, "the restore that stood in for the program has ended")
        .state(format!("The program, process {pid}, keeps running, and nobody watches over it."))
        .help(format!("`gpucr dump --pid {pid}` saves it"))
}
