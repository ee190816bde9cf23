//! Faults on demand: `SOFTCUDA_FAULT="cuMemCreate:3:2,cuMemMap:1:999"` makes the third call of
//! `cuMemCreate` return 2 and the first call of `cuMemMap` return 999, without doing anything.
//! `kernel:5:WHAT` is about the fifth kernel that runs, in a graph too: it takes longer (`slow=MS`), never
//! ends (`hang`), fails its context with a code (a number), or the device is lost with it (`lost`).
//! `WHAT@FILE` happens only if there is that file, which is removed: once, also in a program that is restored.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::status::{Code, Outcome};

struct Fault {
    /// `kernel`, or the function.
    place: String,
    call: u64,
    what: What,
    /// It happens only if this can be removed.
    file: Option<PathBuf>,
    seen: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Fail(Code),
    /// Of kernels only.
    Slow(Duration),
    Hang,
    Lost,
}

const KERNEL: &str = "kernel";

/// Whether the devices are lost.
static LOST: AtomicBool = AtomicBool::new(false);

fn what(place: &str, text: &str) -> Option<What> {
    let code = text.parse().ok().filter(|code| *code > 0).map(|code| What::Fail(Code(code)));
    let slow =
        || Some(What::Slow(Duration::from_millis(text.strip_prefix("slow=")?.parse().ok()?)));
    code.or_else(|| match text {
        _ if place != KERNEL => None,
        "hang" => Some(What::Hang),
        "lost" => Some(What::Lost),
        _ => slow(),
    })
}

/// Reads the list; entries that make no sense are named on standard error and left out.
fn parse(list: &str) -> Vec<Fault> {
    let one = |text: &str| {
        let mut parts = text.trim().split(':');
        let place =
            parts.next().filter(|name| name.starts_with("cu") || *name == KERNEL)?.to_owned();
        let call = parts.next()?.parse().ok().filter(|call| *call > 0)?;
        let text = parts.next()?;
        let (text, file) =
            text.split_once('@').map_or((text, None), |(text, file)| (text, Some(file.into())));
        let what = what(&place, text)?;
        let seen = AtomicU64::new(0);
        parts.next().is_none().then_some(Fault { place, call, what, file, seen })
    };
    let mut faults = Vec::new();
    for text in list.split(',').filter(|text| !text.trim().is_empty()) {
        match one(text) {
            Some(fault) => faults.push(fault),
            None => eprintln!("softcuda: SOFTCUDA_FAULT: cannot understand \"{text}\""),
        }
    }
    faults
}

/// What the environment wants of this call, which is counted.
fn due(faults: &[Fault], place: &str) -> Option<What> {
    let is_due = |fault: &&Fault| {
        fault.place == place && fault.seen.fetch_add(1, Ordering::Relaxed) + 1 == fault.call
    };
    // All of them count it.
    let due: Vec<&Fault> = faults.iter().filter(is_due).collect();
    let happens =
        |fault: &&Fault| fault.file.as_ref().is_none_or(|file| std::fs::remove_file(file).is_ok());
    due.into_iter().find(happens).map(|fault| fault.what)
}

fn faults() -> &'static [Fault] {
    static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
    FAULTS.get_or_init(|| parse(&std::env::var("SOFTCUDA_FAULT").unwrap_or_default()))
}

/// Counts a call; fails when the environment wants this call to fail.
///
/// # Errors
/// The code from the environment.
pub(crate) fn check(function: &str) -> Outcome {
    match faults() {
        [] => Ok(()),
        faults => match due(faults, function) {
            Some(What::Fail(code)) => Err(code),
            _ => Ok(()),
        },
    }
}

/// Counts a kernel, which is about to run: waits, for ever or until `cancel` is set, if the environment
/// wants that.
///
/// # Errors
/// Those that the environment asks for; `DEVICE_UNAVAILABLE` if the device is lost.
pub(crate) fn kernel(cancel: &AtomicBool) -> Outcome {
    match faults() {
        [] => Ok(()),
        faults => act(due(faults, KERNEL), cancel),
    }
}

fn act(what: Option<What>, cancel: &AtomicBool) -> Outcome {
    match what {
        None => {}
        Some(What::Fail(code)) => return Err(code),
        Some(What::Slow(time)) => std::thread::sleep(time),
        Some(What::Hang) => {
            while !cancel.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Some(What::Lost) => LOST.store(true, Ordering::Relaxed),
    }
    present()
}

/// # Errors
/// `DEVICE_UNAVAILABLE`: the devices are lost.
pub(crate) fn present() -> Outcome {
    if LOST.load(Ordering::Relaxed) { Err(Code::DEVICE_UNAVAILABLE) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_call_fails_once() {
        let faults = parse("cuMemCreate:2:2, cuMemMap:1:999,nonsense,cuX:0:1,cuY:1:1:1");
        assert_eq!(faults.len(), 2);
        assert_eq!(due(&faults, "cuMemCreate"), None);
        assert_eq!(due(&faults, "cuMemMap"), Some(What::Fail(Code(999))));
        assert_eq!(due(&faults, "cuMemCreate"), Some(What::Fail(Code(2))));
        assert_eq!(due(&faults, "cuMemCreate"), None);
        assert_eq!(due(&faults, "cuMemUnmap"), None);
    }

    #[test]
    fn what_is_bound_to_a_file_happens_once() {
        let file = std::env::temp_dir().join(format!("softcuda-fault-{}", std::process::id()));
        let list = format!("kernel:1:700@{}", file.display());
        assert_eq!(due(&parse(&list), KERNEL), None, "there is no such file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(due(&parse(&list), KERNEL), Some(What::Fail(Code(700))));
        assert_eq!(due(&parse(&list), KERNEL), None, "it was removed");
    }

    #[test]
    fn kernels_are_slow_or_hang_or_fail() {
        let faults =
            parse("kernel:1:slow=20,kernel:3:700,kernel:4:hang,cuMemMap:1:hang,kernel:1:slow");
        assert_eq!(faults.len(), 3);
        let cancel = AtomicBool::new(false);
        let run = || act(due(&faults, KERNEL), &cancel);
        let begin = std::time::Instant::now();
        assert_eq!(run(), Ok(()));
        assert!(begin.elapsed() >= Duration::from_millis(20));
        assert_eq!([run(), run()], [Ok(()), Err(Code(700))]);
        std::thread::scope(|scope| {
            let hanging = scope.spawn(run);
            std::thread::sleep(Duration::from_millis(30));
            assert!(!hanging.is_finished());
            cancel.store(true, Ordering::Relaxed);
            assert_eq!(hanging.join().unwrap(), Ok(()));
        });
    }
}
