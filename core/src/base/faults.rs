//! What tests have fail, hang or be left out, in debug builds only.

use std::time::Duration;

/// A failure that a test asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fault {0} was asked for")]
pub struct Injected(String);

/// What tests ask for, in debug builds only: `GPUCR_FAULT=KIND:PHASE`, or several with commas.
fn asked() -> Vec<(String, String)> {
    if !cfg!(debug_assertions) {
        return Vec::new();
    }
    let asked = std::env::var("GPUCR_FAULT").unwrap_or_default();
    let pairs = asked.split(',').filter_map(|one| one.split_once(':'));
    pairs.map(|(kind, phase)| (kind.to_owned(), phase.to_owned())).collect()
}

/// Whether a test asked to leave something out, in debug builds only: `GPUCR_FAULT=skip:validate` (the
/// check of what was copied early), `skip:host-memory` (that of host memory), `skip:compare` (that of what is copied late), `skip:defer` (copying
/// late at all), `skip:summaries` (telling the shim what is known of kernels), `skip:cores` (staying off the CPUs
/// that the programs need), `skip:unwanted` (loading, on demand, what nobody has asked for).
pub(crate) fn skipped(phase: &str) -> bool {
    is_asked("skip", phase)
}

/// Whether a test asked for this, in debug builds only. Besides what [`skipped`] and [`fault`] look for:
/// `GPUCR_FAULT=cut:MESSAGE` cuts the link of a migration before this message goes out (its name in
/// `engine/migrate/message.rs`), and `cut-after:MESSAGE` after that; `fail:untold` has host memory that comes on demand
/// fail as soon as the processes run, and `fail:untold-early` right before that.
pub(crate) fn is_asked(kind: &str, name: &str) -> bool {
    asked().iter().any(|(one, of)| one == kind && of == name)
}

/// A failure on demand, for tests, in debug builds only: `GPUCR_FAULT=kill:PHASE` ends gpucr with SIGKILL when it
/// enters the phase, `fail:PHASE` makes the phase fail, `pause:PHASE` holds it up there for two seconds, and
/// `hold:PHASE` until the file is there that `GPUCR_FAULT_FILE` names. As phases count `detached`, the moment after
/// each process has been detached, `validated`, the one at which hashing all memory has ended, while programs are
/// being detached with `recopy`, `left-memory`, the one at which memory that CRIU has left in frozen processes is
/// about to be read (a failure there has CRIU asked to write it), `host-memory`, the one at which the host memory
/// of restored processes is in its place, `holder`, the one at which the holder of a warm image has made room for
/// its memory, `greeted`, the one at which their agents have answered, `attached`, those at which one of them has
/// its device memory, `passed`, the one after which signals are the program's, of a migration `suspended` and
/// `decided`, the moments before and after its decision, and `completed`, the one at which the destination has an
/// image, `deferred`, those at which a chunk has been stored while the program runs again, and `left-alone`, the
/// one at which a watchdog has found that its gpucr has died (both only `pause` and `hold`).
///
/// # Errors
/// The one that was asked for.
pub(crate) fn fault(phase: &str) -> Result<(), Injected> {
    for (kind, name) in asked().iter().filter(|(_, name)| name == phase) {
        match kind.as_str() {
            "kill" => {
                let own = rustix::process::getpid();
                let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
                unreachable!("killed");
            }
            "fail" => return Err(Injected(format!("fail:{name}"))),
            "pause" => std::thread::sleep(Duration::from_secs(2)),
            "hold" => {
                let file = std::env::var_os("GPUCR_FAULT_FILE").unwrap_or_default();
                while !std::path::Path::new(&file).exists() {
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
            _ => {}
        }
    }
    Ok(())
}
