//! What CRIU's log says about a failure.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::BorrowedFd;

use rustix::fs::{Mode, OFlags};

use super::error::{CriuError, Hint};
use super::kept_logs;

/// Most of a log that is read: CRIU's own logs have a few megabytes.
const MAX_LOG: u64 = 256 << 20;
/// How many error lines are kept from the beginning, and how many from the end.
const KEEP_FIRST: usize = 5;
const KEEP_LAST: usize = 2;

/// Fragments of CRIU's messages and what they mean.
const SIGNS: &[(&str, Hint)] = &[
    ("--shell-job", Hint::ShellJob),
    ("--tcp-established", Hint::TcpEstablished),
    ("--file-locks", Hint::FileLocks),
    ("--ext-unix-sk", Hint::ExtUnixSk),
    ("size, increase limit", Hint::GhostLimit),
    ("has bad size", Hint::FileChanged),
    ("has bad mode", Hint::FileChanged),
    ("has bad build-ID", Hint::FileChanged),
    ("Can't open file", Hint::FileChanged),
    ("Can't bind inet socket", Hint::PortInUse),
    ("File exists", Hint::PidInUse),
    ("Unable to create a thread: -17", Hint::PidInUse),
    ("do not match expected", Hint::PidInUse),
    ("Operation not permitted", Hint::Permission),
    ("Permission denied", Hint::Permission),
    ("Can't dump file", Hint::Device),
    ("send_fds failed (-22)", Hint::IoUring),
    ("Can't lookup mount", Hint::OtherMounts),
    ("No space left on device", Hint::NoSpace),
    ("closed in-flight socket", Hint::InFlight),
    ("for page-pipe", Hint::Pipes),
    ("Don't have tty to inherit", Hint::NoTerminal),
    ("tty: Failed to set group", Hint::NoTerminal),
    ("ctty inheritance", Hint::ControllingTerminal),
    ("kerndat_tcp_repair", Hint::NoLoopback),
    ("SysVIPC shmem", Hint::SharedSegment),
];

/// The error for a request that CRIU answered with failure.
pub(super) fn failure(
    action: &'static str,
    dir: BorrowedFd<'_>,
    name: &str,
    message: Option<String>,
) -> CriuError {
    let mut errors = error_lines(dir, name);
    if errors.is_empty() {
        errors.extend(message.map(|m| m.trim_end().to_owned()).filter(|m| !m.is_empty()));
    }
    let hints = hints(&errors);
    CriuError::Failed { action, errors, hints, log: kept_logs::keep(dir, name) }
}

/// Passes a log on to whoever wants to know everything (`GPUCR_LOG=gpucr_core=trace`): when CRIU did what.
pub(super) fn pass_on(dir: BorrowedFd<'_>, name: &str) {
    if !tracing::enabled!(tracing::Level::TRACE) {
        return;
    }
    let mut bytes = Vec::new();
    // What has come of it is better than nothing.
    _ = open(dir, name).map(|file| file.take(MAX_LOG).read_to_end(&mut bytes));
    tracing::trace!(name, "{}", String::from_utf8_lossy(&bytes));
}

fn open(dir: BorrowedFd<'_>, name: &str) -> rustix::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(dir, name, flags, Mode::empty()).map(File::from)
}

/// The first and last errors of a log, each said once. Failing to read it gives none.
pub(super) fn error_lines(dir: BorrowedFd<'_>, name: &str) -> Vec<String> {
    open(dir, name).map_or_else(|_| Vec::new(), |file| select(BufReader::new(file.take(MAX_LOG))))
}

fn select(log: impl BufRead) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for line in log.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        // When it was said and by which of CRIU's processes helps nobody: the log has it.
        let Some(start) = line.find("Error (") else { continue };
        let line = line[start..].trim_end();
        // Some sandboxes refuse the higher limit, and CRIU goes on without.
        if line.contains("RLIMIT_NOFILE for self")
            || lines.iter().any(|said| says(said) == says(line))
        {
            continue;
        }
        if lines.len() == KEEP_FIRST + KEEP_LAST {
            lines.remove(KEEP_FIRST);
        }
        lines.push(line.to_owned());
    }
    lines
}

/// Reads bytes as a message of CRIU and as its log, for [`crate::engine::hostile`].
pub(crate) fn read_anything(bytes: &[u8]) {
    use prost::Message as _;
    if let Ok(response) = super::rpc::Response::decode(bytes) {
        let _ = super::rpc::Kind::try_from(response.kind);
    }
    let errors = select(bytes);
    assert!(errors.len() <= KEEP_FIRST + KEEP_LAST);
    hints(&errors);
}

/// An error line without the place in CRIU's sources.
fn says(line: &str) -> &str {
    line.split_once("): ").map_or(line, |(_, words)| words)
}

fn hints(errors: &[String]) -> Vec<Hint> {
    let mut hints = Vec::new();
    for (sign, hint) in SIGNS {
        if errors.iter().any(|line| line.contains(sign)) && !hints.contains(hint) {
            hints.push(*hint);
        }
    }
    hints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_first_and_last_error_lines() {
        let log: String = (0..20)
            .map(|i| format!("(00.{i:06}) Error (criu/x.c:{i}): e{i}\n(0) Warn (y.c:1): w\n"))
            .collect();
        let lines = select(log.as_bytes());
        let ends: Vec<&str> = lines.iter().filter_map(|l| l.rsplit(' ').next()).collect();
        assert_eq!(ends, ["e0", "e1", "e2", "e3", "e4", "e18", "e19"]);
    }

    #[test]
    fn says_each_error_once_and_without_its_time() {
        let log = "(00.027210)  28272: Error (criu/files-reg.c:2353): Can't open file w\n\
                   (00.027213)  28272: Error (criu/files-reg.c:2267): Can't open file w\n\
                   (00.027214)  28272: Error (criu/mem.c:911): Can't fixup VMA's fd\n";
        let first = "Error (criu/files-reg.c:2353): Can't open file w";
        let second = "Error (criu/mem.c:911): Can't fixup VMA's fd";
        assert_eq!(select(log.as_bytes()), [first, second]);
    }

    #[test]
    fn names_what_helps() {
        let tcp = "(0) Error (criu/sk-inet.c:200): inet: Connected TCP socket, consider using \
                   --tcp-established option.";
        let limit = "(0) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: \
                     Operation not permitted";
        let errors = select(format!("{limit}\n{tcp}\n").as_bytes());
        assert_eq!(errors, [tcp.trim_start_matches("(0) ")]);
        assert_eq!(hints(&errors), [Hint::TcpEstablished]);
        assert_eq!(Hint::TcpEstablished.option(), Some("--tcp-established"));
        let pipes = "(00.046870) Error (criu/page-pipe.c:113): page-pipe: Can't make pipe for \
                     page-pipe: Too many open files";
        assert_eq!(hints(&select(pipes.as_bytes())), [Hint::Pipes]);
        let ring = "(00.046870) pie: 7: Error (criu/pie/parasite.c:1): send_fds failed (-22)";
        assert_eq!(hints(&select(ring.as_bytes())), [Hint::IoUring]);
    }
}
