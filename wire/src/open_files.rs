//! The limit of open files of a process (`RLIMIT_NOFILE`), raised for a while.
//!
//! Each block of a program's memory takes a descriptor while it is handed over, and a program may have more blocks
//! than its limit allows. The limit is the program's all the same: afterwards it is what it was, or what the
//! program has set itself meanwhile.

use std::io;

use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// A limit that is put back when this is dropped.
#[derive(Debug)]
pub struct Raised {
    pid: Option<Pid>,
    before: Rlimit,
    raised: Rlimit,
}

impl Raised {
    /// Sets the limit of a process (`None`: of this one), which is `before`, to `raised`. Should the process be
    /// able to choose `raised` itself, its choice and ours could not be told apart.
    ///
    /// # Errors
    /// The errors of `prlimit(2)`; `Interrupted` if the limit was not `before`. It is as it was.
    pub fn new(pid: Option<Pid>, before: Rlimit, raised: Rlimit) -> io::Result<Self> {
        let found = prlimit(pid, Resource::Nofile, raised)?;
        let changed = found != before;
        let raised = Self { pid, before: found, raised };
        if changed {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the limit has just changed"));
        }
        Ok(raised)
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        put_back(self.raised, self.before, |limit| prlimit(self.pid, Resource::Nofile, limit));
    }
}

/// Puts `before` in the place of `ours`. Each exchange gives what was there: if that is not what was put there last,
/// the program has set it, and it goes back there.
fn put_back<E>(ours: Rlimit, before: Rlimit, exchange: impl Fn(Rlimit) -> Result<Rlimit, E>) {
    let (mut last, mut next) = (ours, before);
    // Refused is only what is above a limit that the program has set since.
    while let Ok(found) = exchange(next) {
        if found == last {
            return;
        }
        (last, next) = (next, found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    fn limit(current: u64, maximum: u64) -> Rlimit {
        Rlimit { current: Some(current), maximum: Some(maximum) }
    }

    #[test]
    fn what_the_program_has_set_meanwhile_stands() {
        let own = limit(100, 200);
        // The limits that the program sets, each just before an exchange of ours.
        for (sets, left) in [
            (vec![], limit(50, 300)),
            (vec![own], own),
            (vec![own, limit(70, 200)], limit(70, 200)),
            (vec![own, limit(70, 200), limit(60, 200)], limit(60, 200)),
        ] {
            let now = RefCell::new(limit(299, 300));
            let turn = Cell::new(0);
            put_back(limit(299, 300), limit(50, 300), |next| {
                if let Some(set) = sets.get(turn.replace(turn.get() + 1)) {
                    *now.borrow_mut() = *set;
                }
                Ok::<_, ()>(now.replace(next))
            });
            assert_eq!(*now.borrow(), left, "{sets:?}");
        }
    }

    #[test]
    fn a_limit_that_cannot_be_put_back_stays_the_programs() {
        let now = RefCell::new(limit(10, 20));
        put_back(limit(299, 300), limit(50, 300), |next| {
            if next.maximum > now.borrow().maximum { Err(()) } else { Ok(now.replace(next)) }
        });
        assert_eq!(*now.borrow(), limit(10, 20));
    }
}
