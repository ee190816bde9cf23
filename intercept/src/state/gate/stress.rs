//! Calls against a gate that is closed and opened all the time, by way of [`enter`] and [`close`] alone.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::tests::ALONE;
use super::{NotClosed, callers, close, enter, is_open, open};

/// For so long calls and closers race.
const TIME: Duration = Duration::from_secs(1);
/// How long a call stays inside, in looks at a counter. The closer looks for as long.
const STAY: u64 = 200;

/// Waits until both have come here so often.
fn meet(arrived: &AtomicU64, times: u64) {
    arrived.fetch_add(1, Ordering::SeqCst);
    let mut waited = 0;
    while arrived.load(Ordering::SeqCst) < 2 * times {
        waited += 1;
        // The other one may need this processor.
        if waited % 1024 == 0 {
            thread::yield_now();
        }
    }
}

/// A caller writes with a plain store that it is there. Unless the closer has the kernel make that visible it
/// finds the gate empty now and then, and a call is inside. That takes two processors that have nothing else
/// to do.
#[test]
fn no_call_is_inside_a_gate_that_was_just_closed() {
    let _alone = ALONE.lock();
    let (arrived, inside, over) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let (seen, closed) = thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1.. {
                meet(&arrived, 2 * round - 1);
                if over.load(Ordering::SeqCst) {
                    break;
                }
                meet(&arrived, 2 * round);
                // The closer takes some time up to the flag; all offsets are tried. What is looked at is the
                // flag, so that it is in the cache.
                for _ in 0..round % 512 {
                    black_box(is_open());
                }
                let call = enter();
                inside.store(1, Ordering::Relaxed);
                for _ in 0..STAY {
                    black_box(inside.load(Ordering::Relaxed));
                }
                inside.store(0, Ordering::Release);
                drop(call);
            }
        });
        let (since, mut seen, mut closed) = (Instant::now(), 0_u64, Ok(()));
        for round in 1.. {
            meet(&arrived, 2 * round - 1);
            // The caller's place is in the cache as well: so the caller's next store to it takes long.
            black_box(callers::inside());
            meet(&arrived, 2 * round);
            closed = close(Instant::now() + Duration::from_secs(60));
            let found = (0..STAY).any(|_| inside.load(Ordering::SeqCst) != 0);
            seen += u64::from(found);
            open();
            if closed.is_err() || since.elapsed() > TIME {
                break;
            }
        }
        // The caller waits for one round more.
        over.store(true, Ordering::SeqCst);
        arrived.fetch_add(1, Ordering::SeqCst);
        (seen, closed)
    });
    closed.expect("every call leaves soon");
    assert_eq!(seen, 0, "so often a call was inside a closed gate");
}

/// Lets every membarrier(2) of this thread fail from here on.
fn forbid_membarrier() {
    let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    let jump = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    let give = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // The number of the call comes first in what a filter sees.
    let mut filter = [
        step(load, 0, 0, 0),
        step(jump, 0, 1, libc::SYS_membarrier as u32),
        step(give, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(give, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter is a valid program of this length; it counts for this thread alone.
    let code = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
    };
    assert_eq!(code, 0, "{}", std::io::Error::last_os_error());
}

/// However few processors there are: who cannot have the kernel do that does not close the gate.
#[test]
fn a_gate_is_closed_with_a_barrier_or_not_at_all() {
    let _alone = ALONE.lock();
    // This thread has a place of its own, which only a barrier makes visible.
    drop(enter());
    let closed = thread::spawn(|| {
        forbid_membarrier();
        close(Instant::now() + Duration::from_secs(60))
    });
    let closed = closed.join().expect("no panic");
    assert!(matches!(closed, Err(NotClosed::NoBarrier(_))), "{closed:?}");
    assert!(is_open());
}
