use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::channel;

use std::time::Instant;

use super::captures::{DEPENDENT, end_own_captures};
use super::*;

/// The gate is one for the process: one test uses it at a time.
pub(super) static ALONE: Mutex<()> = Mutex::new(());

fn soon(ms: u64) -> Instant {
    Instant::now() + Duration::from_millis(ms)
}

#[test]
fn a_step_lets_one_launch_pass() {
    let _alone = ALONE.lock();
    let (stop, launched, called) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    close(soon(1000)).expect("nobody is inside");
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    drop(enter());
                    called.fetch_add(1, Ordering::SeqCst);
                    let launch = enter_launch();
                    launched.fetch_add(1, Ordering::SeqCst);
                    drop(launch);
                }
            });
        }
        for number in 1..=200 {
            step(soon(10_000), soon(20_000)).expect("all leave soon");
            assert_eq!(launched.load(Ordering::SeqCst), number);
        }
        assert!(called.load(Ordering::SeqCst) >= 200);
        stop.store(true, Ordering::SeqCst);
        open();
    });
    // A capture comes to its end first.
    close(soon(1000)).expect("nobody is inside");
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let capture = Capture::of(77, false);
            assert_eq!(begin_capture(capture, 0, || 0), 0);
            for _ in 0..20 {
                drop(enter_launch());
                thread::sleep(POLL);
            }
            ended.store(true, Ordering::SeqCst);
            end_capture(capture);
        });
        step(soon(10_000), soon(20_000)).expect("it ends");
        assert!(ended.load(Ordering::SeqCst));
    });
    open();
    // Without any launch it is over when the time is.
    close(soon(1000)).expect("nobody is inside");
    step(soon(20), soon(1000)).expect("nobody is inside");
    assert_eq!(LINE.state.load(Ordering::SeqCst), CLOSED);
    open();
}

#[test]
fn nobody_is_inside_after_close() {
    let _alone = ALONE.lock();
    let (stop, inside, passed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let before = launches();
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let outer = enter_launch();
                    inside.fetch_add(1, Ordering::SeqCst);
                    let nested = enter();
                    std::hint::spin_loop();
                    drop(nested);
                    inside.fetch_sub(1, Ordering::SeqCst);
                    drop(outer);
                    passed.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..100 {
            close(soon(10_000)).expect("every call leaves soon");
            for _ in 0..20 {
                assert_eq!(inside.load(Ordering::SeqCst), 0, "a call is inside a closed gate");
                std::hint::spin_loop();
            }
            let now = passed.load(Ordering::SeqCst);
            open();
            while passed.load(Ordering::SeqCst) <= now + 6 {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(launches() - before, passed.load(Ordering::SeqCst), "each launch counts once");
    assert_eq!(callers::inside(), 0);
}

#[test]
fn a_call_that_does_not_leave_opens_the_gate_again() {
    let _alone = ALONE.lock();
    let inside = enter();
    let busy = thread::spawn(|| close(soon(20))).join().expect("joined");
    assert!(matches!(busy, Err(NotClosed::Busy { calls: 1, captures: 0 })), "{busy:?}");
    drop(inside);
    thread::spawn(|| drop(enter())).join().expect("the gate is open");
}

/// Waits until somebody is closing the gate.
fn wait_until_closing() {
    while LINE.state.load(Ordering::SeqCst) != NO_CAPTURE {
        thread::yield_now();
    }
}

#[test]
fn a_capture_under_way_may_finish_and_others_wait_for_it() {
    let _alone = ALONE.lock();
    let (one, two) = (Capture::of(0x10, false), Capture::of(0x20, false));
    assert_eq!(begin_capture(one, 0, || 0), 0);
    assert!(capturing());
    let busy = close(soon(20));
    assert!(matches!(busy, Err(NotClosed::Busy { calls: 0, captures: 1 })), "{busy:?}");
    let [over, open_again, began] = [const { AtomicBool::new(false) }; 3];
    thread::scope(|scope| {
        let closer = scope.spawn(|| close(soon(60_000)));
        wait_until_closing();
        drop(enter()); // a call of the capture under way passes
        scope.spawn(|| {
            let since = Instant::now();
            begin_capture(two, 0, || {
                let waited = since.elapsed() >= DEPENDENT || open_again.load(Ordering::SeqCst);
                assert!(waited, "a capture began at a closing gate");
                began.store(true, Ordering::SeqCst);
                900 // it fails, so it is no capture
            })
        });
        thread::sleep(Duration::from_millis(20));
        over.store(true, Ordering::SeqCst);
        end_capture(one);
        closer.join().expect("joined").expect("closed once the capture is over");
        open_again.store(true, Ordering::SeqCst);
        open();
    });
    assert!(began.load(Ordering::SeqCst));
    assert!(!capturing());
}

#[test]
fn a_capture_within_another_of_its_thread_begins_while_the_gate_closes() {
    let _alone = ALONE.lock();
    let (outer, inner) = (Capture::of(0x10, false), Capture::of(0x20, false));
    assert_eq!(begin_capture(outer, 0, || 0), 0);
    thread::scope(|scope| {
        let closer = scope.spawn(|| close(soon(60_000)));
        wait_until_closing();
        assert_eq!(begin_capture(inner, 0, || 0), 0);
        assert!(!closer.is_finished(), "it closed, or gave up, with a capture under way");
        end_capture(inner);
        end_capture(outer);
        closer.join().expect("joined").expect("closed when both are over");
        open();
    });
}

#[test]
fn a_capture_that_another_one_waits_for_begins_while_the_gate_closes() {
    let _alone = ALONE.lock();
    let (waiting, awaited) = (Capture::of(0x10, false), Capture::of(0x20, false));
    thread::scope(|scope| {
        let (go, told) = channel();
        let (done, is_done) = channel();
        scope.spawn(move || {
            told.recv().expect("told");
            assert_eq!(begin_capture(awaited, 0, || 0), 0);
            end_capture(awaited);
            done.send(()).expect("waited for");
        });
        assert_eq!(begin_capture(waiting, 0, || 0), 0);
        let closer = scope.spawn(|| close(soon(60_000)));
        wait_until_closing();
        go.send(()).expect("it listens");
        is_done.recv().expect("done");
        assert!(!closer.is_finished(), "it closed, or gave up, with a capture under way");
        end_capture(waiting);
        closer.join().expect("joined").expect("closed when both are over");
        open();
    });
}

/// Threads that begin and end captures, alone and nested, while the gate is closed again and again.
#[test]
fn no_capture_is_under_way_behind_a_closed_gate() {
    let _alone = ALONE.lock();
    let (stop, made) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..4 {
            let (stop, made) = (&stop, &made);
            scope.spawn(move || {
                let [outer, inner] = [0x100, 0x200].map(|kind| Capture::of(kind + thread, false));
                while !stop.load(Ordering::SeqCst) {
                    assert_eq!(begin_capture(outer, 0, || 0), 0);
                    assert_eq!(begin_capture(inner, 0, || 0), 0);
                    end_capture(inner);
                    end_capture(outer);
                    made.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..50 {
            close(soon(60_000)).expect("every capture ends soon");
            for _ in 0..20 {
                assert!(!capturing(), "a capture is under way behind a closed gate");
                std::hint::spin_loop();
            }
            let now = made.load(Ordering::SeqCst);
            open();
            while made.load(Ordering::SeqCst) <= now + 4 {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_capture_ends_with_its_context_and_one_of_a_threads_own_stream_with_the_thread() {
    let _alone = ALONE.lock();
    let (one, two) = (Capture::of(0x10, false), Capture::of(0x20, false));
    begin_capture(one, 71, || 0);
    begin_capture(two, 72, || 0);
    end_captures_of(71);
    assert!(capturing());
    end_captures_of(72);
    assert!(!capturing());
    thread::spawn(|| begin_capture(Capture::of(0, true), 71, || 0)).join().expect("joined");
    assert!(!capturing());
    begin_capture(one, 71, || 0);
    end_own_captures();
    assert!(capturing(), "a stream that the program made outlives its thread");
    end_capture(one);
}

#[test]
fn the_gate_closes_while_a_call_waits_aside() {
    let _alone = ALONE.lock();
    let [left, closed, back] = [const { AtomicBool::new(false) }; 3];
    thread::scope(|scope| {
        scope.spawn(|| {
            let inside = enter();
            aside(|| {
                left.store(true, Ordering::SeqCst);
                while !closed.load(Ordering::SeqCst) {
                    thread::yield_now();
                }
            });
            back.store(true, Ordering::SeqCst);
            assert_eq!(callers::inside(), 1);
            drop(inside);
        });
        while !left.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        close(soon(10_000)).expect("the call is not inside");
        closed.store(true, Ordering::SeqCst);
        thread::sleep(Duration::from_millis(10));
        assert!(!back.load(Ordering::SeqCst), "it came back into a closed gate");
        open();
    });
    assert!(back.load(Ordering::SeqCst));
    assert_eq!(callers::inside(), 0);
    // Within another call nothing is left.
    let (outer, inner) = (enter(), enter());
    aside(|| assert_eq!(callers::inside(), 1));
    drop((inner, outer));
    assert_eq!(callers::inside(), 0);
}

#[test]
fn default_streams_are_told_apart() {
    assert_eq!(Capture::of(0, false), Capture::of(1, false));
    assert_eq!(Capture::of(0, true), Capture::of(2, false));
    assert_ne!(Capture::of(0, true), Capture::of(0, false));
    let other = thread::spawn(|| Capture::of(0, true)).join().expect("joined");
    assert_ne!(Capture::of(0, true), other);
}

/// The checkpointer, which holds what was given back, lets go of it when the gate is closed.
#[test]
fn a_call_that_waits_for_memory_does_not_keep_the_gate_open() {
    use crate::abi::types::ERROR_OUT_OF_MEMORY;
    use crate::state::memory;
    use crate::track::patience::patiently;
    let _alone = ALONE.lock();
    memory::lock().lend([u64::MAX].into());
    let (asked, there) = (AtomicBool::new(false), AtomicBool::new(false));
    let ask = || {
        assert_ne!(callers::inside(), 0, "it asks inside");
        asked.store(true, Ordering::SeqCst);
        there.load(Ordering::SeqCst).then_some(()).ok_or(ERROR_OUT_OF_MEMORY)
    };
    let (closed, answer) = thread::scope(|scope| {
        let program = scope.spawn(|| patiently(ask));
        while !asked.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        let closed = close(soon(1000));
        there.store(true, Ordering::SeqCst);
        open();
        (closed, program.join().expect("no panic"))
    });
    memory::lock().lend([].into());
    assert!(closed.is_ok(), "{closed:?}");
    assert_eq!(answer, Ok(()));
}

#[test]
fn nobody_waits_for_a_call_when_the_one_who_asked_is_gone() {
    use std::os::fd::AsFd;
    let _alone = ALONE.lock();
    let (asking, asked) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let inside = enter();
    drop(asking);
    assert!(close(Limit::new(soon(60_000), asked.as_fd())).is_err());
    assert!(is_open());
    drop(inside);
}
