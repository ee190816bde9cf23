//! Dumps and restores of a real process, with real CRIU. They need root.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::*;

const COUNTER_DIR: &str = "GPUCR_TEST_COUNTER_DIR";
const VICTIM: &str = "GPUCR_TEST_VICTIM";
const LIMIT: Duration = Duration::from_secs(20);

pub(super) fn criu() -> Option<Criu> {
    if !rustix::process::geteuid().is_root() {
        crate::skip::skip("CRIU needs root");
        return None;
    }
    match Criu::find(None) {
        Ok(criu) => Some(criu),
        Err(CriuError::NotFound { .. }) => {
            crate::skip::skip("there is no CRIU");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Not a test: the program that is dumped. Counts in a file until a file `stop` appears.
#[test]
#[ignore = "a program that the other tests run in a process of its own"]
fn counter_program() {
    let Some(dir) = std::env::var_os(COUNTER_DIR).map(PathBuf::from) else { return };
    for count in 0u64.. {
        fs::write(dir.join("next"), count.to_string()).unwrap();
        fs::rename(dir.join("next"), dir.join("counter")).unwrap();
        println!("count {count}");
        if dir.join("stop").exists() {
            std::process::exit(7);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Not a test: dumps the victim, and is killed at the end of that.
#[test]
#[ignore = "a program that the other tests run in a process of its own"]
fn dying_client() {
    let (Some(victim), Some(criu)) = (std::env::var(VICTIM).ok(), criu()) else { return };
    let images = tempfile::tempdir().unwrap();
    let dir = File::open(images.path()).unwrap();
    let options = DumpOptions::new(victim.parse().unwrap(), dir.as_fd());
    let _ = criu.dump(&options, &mut || -> Result<(), ()> {
        kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
        Ok(())
    });
}

/// This test binary as another program.
fn program(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &format!("host::criu::tests::{name}"), "--ignored", "--nocapture"]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

struct Counter {
    dir: tempfile::TempDir,
    child: Child,
}

impl Counter {
    fn start(stdout: Stdio) -> Self {
        Self::start_with(stdout, true)
    }

    fn start_with(stdout: Stdio, own_session: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = program("counter_program");
        command.env(COUNTER_DIR, dir.path()).stdout(stdout);
        if own_session {
            // SAFETY: setsid is a plain system call, allowed between fork and exec.
            unsafe { command.pre_exec(|| Ok(rustix::process::setsid().map(drop)?)) };
        }
        let counter = Self { child: command.spawn().unwrap(), dir };
        counter.wait_past(3);
        counter
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn value(&self) -> u64 {
        fs::read_to_string(self.dir.path().join("counter"))
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0)
    }

    fn wait_past(&self, past: u64) {
        let start = Instant::now();
        while self.value() <= past {
            assert!(start.elapsed() < LIMIT, "the counter stands at {}", self.value());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn assert_runs(&self) {
        self.wait_past(self.value() + 2);
    }

    fn assert_stands(&self) {
        let value = self.value();
        std::thread::sleep(Duration::from_millis(40));
        assert_eq!(self.value(), value);
    }

    fn stop(&self) {
        fs::write(self.dir.path().join("stop"), "").unwrap();
    }

    /// Whether a process counts in this directory; one that has ended has no environment any more.
    fn is_somewhere(&self) -> bool {
        let entry = format!("{COUNTER_DIR}={}", self.dir.path().display());
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        processes.filter_map(|process| fs::read(process.path().join("environ")).ok()).any(
            |environment| environment.split(|byte| *byte == 0).any(|one| one == entry.as_bytes()),
        )
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        // Stops it wherever it was restored to; a pid might belong to another process by now.
        self.stop();
        let _ = self.child.wait();
        // A program that was restored and is nobody's child here looks for the file now and then: if it were gone
        // again with the directory before that, it would count for ever.
        let start = Instant::now();
        while self.is_somewhere() && start.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

struct Images(tempfile::TempDir, File);

impl Images {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fd = File::open(dir.path()).unwrap();
        Self(dir, fd)
    }
}

pub(super) fn wait_status(pid: u32) -> ExitStatus {
    let pid = Pid::from_raw(pid as i32);
    let (_, status) = waitpid(pid, WaitOptions::empty()).unwrap().unwrap();
    ExitStatus::from_raw(status.as_raw())
}

fn nothing() -> Result<(), String> {
    Ok(())
}

/// Starts a CRIU and has it restore at once.
pub(super) fn restore(
    criu: &Criu,
    mut options: RestoreOptions<'_>,
    inherit_fds: Vec<InheritFd>,
    shell_job: bool,
) -> Result<u32, RestoreError<String>> {
    options.plan = Plan::of(options.images, &|_| None, None).unwrap().map(Arc::new);
    let worker = criu.start_restore(inherit_fds, None, shell_job, None).unwrap();
    worker.restore(options, &mut || (), &mut nothing)
}

/// Dumps and restores three times in a row; the last life ends by itself.
fn round_trip(criu: &Criu, images: [OwnedFd; 3]) {
    let mut counter = Counter::start(Stdio::null());
    let pid = counter.pid();
    for (round, images) in images.iter().enumerate() {
        let mut called = 0;
        criu.dump(&DumpOptions::new(pid, images.as_fd()), &mut || {
            called += 1;
            counter.assert_stands();
            Ok::<(), String>(())
        })
        .unwrap();
        assert_eq!(called, 1);
        let status = if round == 0 { counter.child.wait().unwrap() } else { wait_status(pid) };
        assert_eq!(status.signal(), Some(9));
        counter.assert_stands();

        let mut options = RestoreOptions::new(images.as_fd());
        options.rst_sibling = true;
        assert_eq!(restore(criu, options, Vec::new(), false).unwrap(), pid);
        counter.assert_runs();
    }
    counter.stop();
    assert_eq!(wait_status(pid).code(), Some(7));
}

#[test]
fn dump_and_restore_again_and_again() {
    let Some(criu) = criu() else { return };
    let images = [Images::new(), Images::new(), Images::new()];
    round_trip(&criu, std::array::from_fn(|i| images[i].1.try_clone().unwrap().into()));
    let log = fs::read_to_string(images[0].0.path().join("dump.log")).unwrap();
    assert!(!log.contains("plugin_init"), "CRIU loaded a plugin");
    let log = fs::read_to_string(images[0].0.path().join("restore.log")).unwrap();
    assert!(log.contains("Lazy restore skips"), "CRIU has brought in private memory");
}

#[test]
fn images_on_a_mount_without_a_path() {
    use rustix::mount::*;
    let Some(criu) = criu() else { return };
    let mount = || {
        let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
        fsconfig_create(tmpfs.as_fd()).unwrap();
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        fsmount(tmpfs.as_fd(), flags, MountAttrFlags::empty()).unwrap()
    };
    round_trip(&criu, std::array::from_fn(|_| mount()));
}

#[test]
fn leave_running() {
    let Some(criu) = criu() else { return };
    let counter = Counter::start(Stdio::null());
    let images = Images::new();
    let mut options = DumpOptions::new(counter.pid(), images.1.as_fd());
    options.leave_running = true;
    criu.dump(&options, &mut nothing).unwrap();
    counter.assert_runs();
}

#[test]
fn failing_callback_lets_the_process_run() {
    let Some(criu) = criu() else { return };
    let counter = Counter::start(Stdio::null());
    let images = Images::new();
    let options = DumpOptions::new(counter.pid(), images.1.as_fd());
    let error = criu.dump(&options, &mut || Err("disk on fire")).unwrap_err();
    assert!(matches!(error, DumpError::Callback("disk on fire")), "{error:?}");
    counter.assert_runs();
    // The program can still be dumped.
    let again = Images::new();
    criu.dump(&DumpOptions::new(counter.pid(), again.1.as_fd()), &mut nothing).unwrap();
}

#[test]
fn death_of_the_client_lets_the_process_run() {
    let Some(criu) = criu() else { return };
    let counter = Counter::start(Stdio::null());
    let client = program("dying_client").env(VICTIM, counter.pid().to_string()).status().unwrap();
    assert_eq!(client.signal(), Some(9));
    counter.assert_runs();
    let images = Images::new();
    criu.dump(&DumpOptions::new(counter.pid(), images.1.as_fd()), &mut nothing).unwrap();
}

/// Begins a dump that would kill the process, and stops listening at the notification number
/// `at`, without an answer. Returns the name of that stage; none if the dump ended before.
fn hang_up(criu: &Criu, pid: u32, at: usize, kill_criu: bool) -> Option<String> {
    use super::rpc::{Kind, Opts, Request};
    let images = Images::new();
    let action = "dump";
    let (path, stop) = (criu.path(), None);
    let (options, inherit, in_session, network) = (&[], &[], false, None);
    let variable = None;
    let start = swrk::Start { path, action, options, variable, inherit, in_session, network, stop };
    let mut swrk = swrk::Swrk::start(&start).unwrap();
    swrk.begin(swrk::Work::Dump);
    let opts = Opts {
        images_dir_fd: std::os::fd::AsRawFd::as_raw_fd(&images.1),
        pid: Some(pid as i32),
        notify_scripts: Some(true),
        manage_cgroups_mode: Some(0),
        ..Opts::default()
    };
    swrk.send(&Request { kind: Kind::Dump as i32, opts: Some(opts), ..Request::default() })
        .unwrap();
    for number in 0.. {
        let response = swrk.receive(None).unwrap();
        if response.kind != Kind::Notify as i32 {
            assert!(response.success);
            return None;
        }
        if number == at {
            if kill_criu {
                kill_process(Pid::from_raw(swrk.pid() as i32).unwrap(), Signal::KILL).unwrap();
            }
            return response.notify.unwrap().script;
        }
        let kind = Kind::Notify as i32;
        swrk.send(&Request { kind, notify_success: Some(true), ..Request::default() }).unwrap();
    }
    unreachable!()
}

#[test]
fn silence_at_any_stage_lets_the_process_run() {
    let Some(criu) = criu() else { return };
    for kill_criu in [false, true] {
        let mut counter = Counter::start(Stdio::null());
        let mut stages = Vec::new();
        while let Some(stage) = hang_up(&criu, counter.pid(), stages.len(), kill_criu) {
            counter.assert_runs();
            stages.push(stage);
        }
        assert_eq!(stages.last().unwrap(), "post-dump", "{stages:?}");
        assert!(stages.len() >= 3, "{stages:?}");
        // The last time nobody hung up.
        assert_eq!(counter.child.wait().unwrap().signal(), Some(9));
    }
}

#[test]
fn stdout_pipe_is_replaced() {
    let Some(criu) = criu() else { return };
    let mut counter = Counter::start(Stdio::piped());
    let pid = counter.pid();
    let old = counter.child.stdout.take().unwrap();
    let inode = fs::metadata(format!("/proc/{pid}/fd/1")).unwrap().ino();
    let images = Images::new();
    criu.dump(&DumpOptions::new(pid, images.1.as_fd()), &mut nothing).unwrap();
    counter.child.wait().unwrap();
    drop(old);

    let (reader, writer) = std::io::pipe().unwrap();
    let mut options = RestoreOptions::new(images.1.as_fd());
    options.rst_sibling = true;
    let fds = vec![InheritFd { key: format!("pipe:[{inode}]"), fd: writer.into() }];
    assert_eq!(restore(&criu, options, fds, false).unwrap(), pid);
    let line = BufReader::new(reader).lines().nth(2).unwrap().unwrap();
    assert!(line.starts_with("count "), "{line}");
    // The reader is closed now; libtest's `println!` would end the program with a broken pipe.
    assert!(!wait_status(pid).success());
}

#[test]
fn the_callback_may_remove_the_images() {
    let Some(criu) = criu() else { return };
    for leave_running in [true, false] {
        let mut counter = Counter::start(Stdio::null());
        let images = Images::new();
        let mut options = DumpOptions::new(counter.pid(), images.1.as_fd());
        options.leave_running = leave_running;
        criu.dump(&options, &mut || fs::remove_dir_all(images.0.path())).unwrap();
        if leave_running {
            counter.assert_runs();
        } else {
            assert_eq!(counter.child.wait().unwrap().signal(), Some(9));
        }
    }
}

/// Parent, process group and session of a process.
fn lineage(pid: u32) -> [i32; 3] {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let mut fields = stat.rsplit(')').next().unwrap().split_whitespace().skip(1);
    std::array::from_fn(|_| fields.next().unwrap().parse().unwrap())
}

/// Whether this process has a session that CRIU can see. Where its leader is outside of the pid
/// namespace, as below some container runtimes, runs the test again in a session of its own.
fn in_a_session(test: &str) -> bool {
    if lineage(std::process::id())[2] != 0 {
        return true;
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    again
        .args(["--exact", &format!("host::criu::tests::{test}"), "--nocapture"])
        .stdin(Stdio::null());
    // SAFETY: setsid is a plain system call, allowed between fork and exec.
    unsafe { again.pre_exec(|| Ok(rustix::process::setsid().map(drop)?)) };
    assert!(again.status().unwrap().success());
    false
}

#[test]
fn shell_job_joins_the_session_of_the_caller() {
    let Some(criu) = criu() else { return };
    if !in_a_session("shell_job_joins_the_session_of_the_caller") {
        return;
    }
    let mut counter = Counter::start_with(Stdio::null(), false);
    let pid = counter.pid();
    let images = Images::new();
    let mut options = DumpOptions::new(pid, images.1.as_fd());
    options.shell_job = true;
    criu.dump(&options, &mut nothing).unwrap();
    counter.child.wait().unwrap();
    let mut options = RestoreOptions::new(images.1.as_fd());
    options.rst_sibling = true;
    assert_eq!(restore(&criu, options, Vec::new(), true).unwrap(), pid);
    counter.assert_runs();
    let [_, group, session] = lineage(std::process::id());
    assert_eq!(lineage(pid), [std::process::id() as i32, group, session]);
    counter.stop();
    assert_eq!(wait_status(pid).code(), Some(7));
}

#[test]
fn a_detached_restore_has_another_parent() {
    let Some(criu) = criu() else { return };
    let mut counter = Counter::start(Stdio::null());
    let pid = counter.pid();
    let images = Images::new();
    criu.dump(&DumpOptions::new(pid, images.1.as_fd()), &mut nothing).unwrap();
    counter.child.wait().unwrap();
    let options = RestoreOptions::new(images.1.as_fd());
    assert_eq!(restore(&criu, options, Vec::new(), false).unwrap(), pid);
    counter.assert_runs();
    let [parent, group, session] = lineage(pid);
    assert_ne!(parent, std::process::id() as i32);
    assert_eq!([group, session], [pid as i32; 2]);
}

#[test]
fn a_pid_in_use_is_named() {
    let Some(criu) = criu() else { return };
    let counter = Counter::start(Stdio::null());
    let images = Images::new();
    let mut options = DumpOptions::new(counter.pid(), images.1.as_fd());
    options.leave_running = true;
    criu.dump(&options, &mut nothing).unwrap();
    let error = restore(&criu, RestoreOptions::new(images.1.as_fd()), Vec::new(), false);
    let Err(RestoreError::Criu(error)) = error else { panic!("{error:?}") };
    let CriuError::Failed { errors, hints, .. } = error else { panic!("{error:?}") };
    assert!(hints.contains(&Hint::PidInUse), "{errors:?}");
    counter.assert_runs();
}

#[test]
fn failure_names_the_reason() {
    let Some(criu) = criu() else { return };
    if !in_a_session("failure_names_the_reason") {
        return;
    }
    // The process is not the leader of its session.
    let mut sleep = Command::new("sleep");
    sleep.arg("infinity").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = sleep.spawn().unwrap();
    let images = Images::new();
    let options = DumpOptions::new(child.id(), images.1.as_fd());
    let error = criu.dump(&options, &mut nothing).unwrap_err();
    let still_there = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    let DumpError::Criu { error: CriuError::Failed { errors, hints, .. }, after_callback: false } =
        error
    else {
        panic!("{error:?}");
    };
    assert!(still_there);
    assert_eq!(hints, [Hint::ShellJob], "{errors:?}");
    assert!(errors[0].contains("not a session leader"), "{errors:?}");
}

#[test]
fn a_callback_that_fails_ends_the_restored_processes() {
    let Some(criu) = criu() else { return };
    let mut counter = Counter::start(Stdio::null());
    let pid = counter.pid();
    let images = Images::new();
    criu.dump(&DumpOptions::new(pid, images.1.as_fd()), &mut nothing).unwrap();
    counter.child.wait().unwrap();
    counter.assert_stands();
    let worker = criu.start_restore(Vec::new(), None, false, None).unwrap();
    let options = RestoreOptions::new(images.1.as_fd());
    let result = worker.restore(options, &mut || (), &mut || Err("no"));
    assert!(matches!(result, Err(RestoreError::Callback("no"))), "{result:?}");
    counter.assert_stands();
    // The process was killed; its pid is free once init has waited for it.
    let deadline = Instant::now() + Duration::from_secs(20);
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        assert!(Instant::now() < deadline, "process {pid} is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The images are as they were.
    let mut options = RestoreOptions::new(images.1.as_fd());
    options.rst_sibling = true;
    assert_eq!(restore(&criu, options, Vec::new(), false).unwrap(), pid);
    counter.assert_runs();
    counter.stop();
    assert_eq!(wait_status(pid).code(), Some(7));
}

#[test]
fn restore_of_nothing_fails() {
    let Some(criu) = criu() else { return };
    let images = Images::new();
    let error = restore(&criu, RestoreOptions::new(images.1.as_fd()), Vec::new(), false);
    let Err(RestoreError::Criu(error)) = error else { panic!("{error:?}") };
    assert!(matches!(&error, CriuError::Failed { errors, .. } if !errors.is_empty()), "{error:?}");
}

#[test]
fn asks_for_features() {
    let Some(criu) = criu() else { return };
    assert!(criu.version() >= MIN_VERSION);
    criu.features().unwrap();
    // Whether the kernel is good enough is not ours to say, but a refusal has reasons.
    if let Err(error) = criu.check() {
        let reasons = matches!(&error, CriuError::Failed { errors, .. } if !errors.is_empty());
        assert!(reasons, "{error:?}");
    }
}

#[test]
fn a_program_that_is_no_criu_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let fake = dir.path().join("criu");
    let mut file = File::create(&fake).unwrap();
    file.write_all(b"#!/bin/sh\necho what now >&2\nexit 3\n").unwrap();
    drop(file);
    fs::set_permissions(&fake, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let error = Criu::at(&fake, None).unwrap_err();
    assert!(
        matches!(&error, CriuError::Protocol { reason, .. } if reason.contains("what now")),
        "{error:?}"
    );
    let missing = Criu::at(Path::new("/nonexistent/criu"), None).unwrap_err();
    assert!(matches!(missing, CriuError::Run { .. }), "{missing:?}");
}
