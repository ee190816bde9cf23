//! Which ends of a program are failures, after which it is restored.

use crate::commands::restore::End;

/// The signals that end programs which have failed, or by which the kernel ends them for want of memory.
const FAILURES: [i32; 8] = [
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGKILL,
    libc::SIGSEGV,
    libc::SIGSYS,
];

/// Why a program has failed; `None` if its end is its own.
pub(super) fn failure(end: End, broken: Option<u32>) -> Option<String> {
    let signal = end.signal.or_else(|| end.exit_code.and_then(|code| code.checked_sub(128)));
    let told = broken.map(|code| format!(" after the driver's error {code}")).unwrap_or_default();
    match (signal.filter(|signal| FAILURES.contains(signal)), end.exit_code) {
        (Some(signal), _) => {
            let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
            Some(format!("it was ended by {name} ({signal}){told}"))
        }
        (None, Some(code)) if code != 0 && broken.is_some() => {
            Some(format!("it ended with exit status {code}{told}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_from_ends() {
        let exit = |code| End { exit_code: Some(code), signal: None };
        let signal = |signal| End { exit_code: None, signal: Some(signal) };
        for its_own in [exit(0), exit(1), exit(130), exit(143), signal(libc::SIGTERM)] {
            assert_eq!(failure(its_own, None), None);
        }
        for failed in [signal(libc::SIGKILL), signal(libc::SIGSEGV), exit(134), exit(137)] {
            assert!(failure(failed, None).is_some());
        }
        assert_eq!(failure(exit(0), Some(700)), None, "it has come to its end nevertheless");
        assert_eq!(failure(signal(libc::SIGINT), Some(700)), None);
        let why = failure(exit(1), Some(700)).unwrap();
        assert_eq!(why, "it ended with exit status 1 after the driver's error 700");
        let why = failure(signal(libc::SIGABRT), Some(719)).unwrap();
        assert_eq!(why, "it was ended by SIGABRT (6) after the driver's error 719");
    }
}
