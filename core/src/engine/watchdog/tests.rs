//! Which processes the watchdog ends after a restore that died.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::*;

/// A process that is ended with the test.
struct Helper(Child);

impl Helper {
    fn start(command: &mut Command) -> Self {
        Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap())
    }

    fn sleeping() -> Self {
        Self::start(Command::new("sleep").arg("1000"))
    }

    fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: in the place of a watchdog, ends what it is told to.
#[test]
#[ignore = "a program that another test runs in a process of its own"]
fn kills() {
    println!("ready");
    let mut pids = String::new();
    std::io::stdin().read_line(&mut pids).unwrap();
    let pids: Vec<u32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
    // Nobody is at work any more.
    let (at_work, _) = rustix::pipe::pipe().unwrap();
    kill_restored(&pids, &at_work, Vec::new());
}

/// A pid that was free when the watchdog was started is taken by a younger process; an older one of that pid is
/// somebody else.
#[test]
fn only_processes_younger_than_the_watchdog_are_ended() {
    let mut older = Helper::sleeping();
    // Times of processes are in hundredths of a second.
    std::thread::sleep(Duration::from_millis(50));
    let mut watchdog = Command::new(std::env::current_exe().unwrap());
    watchdog.args(["--exact", "engine::watchdog::tests::kills", "--ignored", "--nocapture"]);
    let mut watchdog = Helper::start(&mut watchdog);
    let mut lines = BufReader::new(watchdog.0.stdout.take().unwrap()).lines();
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains("ready")));
    let mut younger = Helper::sleeping();
    let pids = format!("{} {}\n", older.0.id(), younger.0.id());
    watchdog.0.stdin.take().unwrap().write_all(pids.as_bytes()).unwrap();
    lines.map_while(Result::ok).for_each(drop);
    assert!(watchdog.0.wait().unwrap().success());
    let deadline = Instant::now() + Duration::from_secs(60);
    while younger.is_running() {
        assert!(Instant::now() < deadline, "what was restored is left");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(older.is_running(), "a process was ended that is older than the watchdog");
}
