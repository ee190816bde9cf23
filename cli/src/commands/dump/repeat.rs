//! `gpucr dump --every`: images of a program for as long as it lives.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpucr_core::dump::Options;
use gpucr_core::process::ProcessInfo;
use gpucr_core::{Error, Left, Quiet, image};

use super::args::DumpArgs;
use super::once;
use super::options::destination;
use super::tell::tell;
use crate::commands::{Outcome, note, say};
use crate::events::Events;
use crate::failure;
use crate::say::print_json_line;

/// How often it is looked whether the program lives.
const LOOK: Duration = Duration::from_millis(50);
/// How long a gc waits for other users of the store; what it does not get is freed the next time.
const PATIENCE: Duration = Duration::from_secs(5);

/// Dumps at once, and then at each multiple of `interval`, until the program ends or a signal comes.
/// A dump that fails is reported, and the next one is tried at its time; if the first one fails there
/// are no others.
pub(super) fn run(
    args: &DumpArgs,
    mut options: Options,
    events: &Events,
    interval: Duration,
) -> Outcome {
    let process = ProcessInfo::read(args.own_pid()).map_err(Error::from)?;
    let store = args.store.as_deref().expect("required by --every");
    let start = Instant::now();
    let (mut due, mut taken) = (0u32, 0u64);
    let mut kept: VecDeque<PathBuf> = VecDeque::new();
    while wait(&process, &options, start + interval * due) {
        options.destination = destination(args);
        match once::dump(args, &options, events) {
            Ok(report) => {
                taken += 1;
                kept.push_back(report.image.clone());
                if args.json {
                    print_json_line(&report)?;
                } else {
                    tell(args, &options, &report);
                }
            }
            Err(failure) if failure.left == Left::Ended || process.has_ended() => break,
            Err(_) if options.stop.load(Ordering::Relaxed) => break,
            Err(failure) if taken == 0 => return Err(failure.into()),
            Err(failure) => failure::show(failure.into()),
        }
        let surplus = args.keep.map_or(0, |keep| kept.len().saturating_sub(keep as usize));
        clean(store, kept.drain(..surplus), &options);
        due = next(due, start.elapsed(), interval);
    }
    let fate = if process.has_ended() { "has ended" } else { "runs on" };
    if !args.json {
        say!("process {} {fate}; {taken} images were taken, {} are left", args.pid, kept.len());
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the time of the next dump. `false` if there is to be none any more.
fn wait(process: &ProcessInfo, options: &Options, until: Instant) -> bool {
    loop {
        if process.has_ended() || options.stop.load(Ordering::Relaxed) {
            return false;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

/// The number of the next dump, after that of number `due` has ended at `elapsed`. Says how many
/// times have passed meanwhile.
fn next(due: u32, elapsed: Duration, interval: Duration) -> u32 {
    let passed = (elapsed.as_nanos() / interval.as_nanos()) as u32;
    let next = passed.max(due) + 1;
    if next > due + 1 {
        note!("The dump took longer than the interval: {} are left out.", next - due - 1);
    }
    next
}

/// Removes images that are not to be kept any more, and what nobody else needs of them.
fn clean(store: &Path, surplus: impl Iterator<Item = PathBuf>, options: &Options) {
    let mut any = false;
    for image in surplus {
        match image::remove(&image, false) {
            Ok(_) => any = true,
            // Somebody may have removed it by hand.
            Err(error) => failure::show(Error::from(error).into()),
        }
    }
    if any && let Err(error) = image::gc(store, PATIENCE, &options.stop, &Quiet) {
        failure::show(Error::from(error).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_have_passed_are_left_out() {
        let second = Duration::from_secs(1);
        assert_eq!(next(0, Duration::from_millis(200), second), 1);
        assert_eq!(next(0, Duration::from_millis(999), second), 1);
        assert_eq!(next(1, Duration::from_millis(1100), second), 2);
        assert_eq!(next(1, Duration::from_millis(4100), second), 5);
    }
}
