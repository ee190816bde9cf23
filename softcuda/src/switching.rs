//! Kernels that die because another process comes to the device: `SOFTCUDA_SWITCH=MS@FILE`.
//!
//! With driver 580, as measured on an H200, the device cannot be taken from a kernel of a process that the driver has
//! restored. When another process needs the device, by making a context for example, the driver waits for five seconds, and
//! then ends the kernel: its context fails with `LAUNCH_FAILED`. Processes with the same `FILE` do so here; a process
//! tells the others of a new context by a byte more in the file.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::settings::{Switching, settings};
use crate::status::Code;

/// How often somebody looks whether another process has come.
const LOOK: Duration = Duration::from_millis(5);

/// Whether this process has been restored.
static IS_RESTORED: AtomicBool = AtomicBool::new(false);

/// How many contexts there have been.
fn count(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |file| file.len())
}

/// This process makes a context.
pub(crate) fn come() {
    let Some(switching) = &settings().switching else { return };
    let file = File::options().append(true).create(true).open(&switching.file);
    if let Err(error) = file.and_then(|mut file| file.write_all(b".")) {
        eprintln!("softcuda: SOFTCUDA_SWITCH: {error}");
    }
}

/// This process has been restored.
pub(crate) fn restored() {
    IS_RESTORED.store(true, Ordering::SeqCst);
}

/// Runs a kernel in a context, which fails if the kernel has to make room for another process and does not end in time.
pub(crate) fn watched<T>(context: &Context, kernel: impl FnOnce() -> T) -> T {
    let is_restored = || IS_RESTORED.load(Ordering::SeqCst);
    match settings().switching.as_ref().filter(|_| is_restored()) {
        Some(switching) => watch(switching, context, kernel),
        None => kernel(),
    }
}

fn watch<T>(switching: &Switching, context: &Context, kernel: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    let before = count(&switching.file);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut came = None;
            while !is_over.load(Ordering::Relaxed) {
                if count(&switching.file) != before {
                    let since = *came.get_or_insert_with(Instant::now);
                    if since.elapsed() >= switching.time {
                        context.fail(Code::LAUNCH_FAILED);
                        context.cancel.store(true, Ordering::SeqCst);
                        return;
                    }
                }
                std::thread::sleep(LOOK);
            }
        });
        let result = kernel();
        is_over.store(true, Ordering::Relaxed);
        result
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifetime;

    #[test]
    fn a_kernel_that_does_not_make_room_fails_its_context() {
        let file = std::env::temp_dir().join(format!("softcuda-switch-{}", std::process::id()));
        let switching = Switching::parse(&format!("20@{}", file.display())).unwrap();
        let context = lifetime::create(9, 0).unwrap();
        // Nobody comes; or somebody, and the kernel ends.
        watch(&switching, &context, || ());
        watch(&switching, &context, || std::fs::write(&file, ".").unwrap());
        assert_eq!(context.check(), Ok(()));
        watch(&switching, &context, || {
            std::fs::write(&file, "..").unwrap();
            while !context.cancel.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
            }
        });
        assert_eq!(context.check(), Err(Code::LAUNCH_FAILED));
        lifetime::destroy(&context);
        std::fs::remove_file(&file).unwrap();
    }
}
