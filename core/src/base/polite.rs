//! A process that lets others go first while nobody waits for it.
//!
//! Its threads are nicer meanwhile, and of the policy `SCHED_BATCH`: who is of that does not push aside what runs when it
//! wakes up, as threads do that send and receive all the time (sched(7)).

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// So much nicer are its threads meanwhile.
const NICER: i32 = 10;
/// Nobody is nicer.
const NICEST: i32 = 19;

/// All threads of this process, also those that they start, let those of other processes go first as long as this lives.
pub(crate) struct Polite {
    /// Processes that are so too.
    helpers: Vec<u32>,
    before: Manners,
    meanwhile: Manners,
}

/// How a thread stands to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Manners {
    nice: i32,
    policy: libc::c_int,
}

impl Polite {
    /// With this process the `helpers`, which it has started. `None` where what is given up could not be taken back: not
    /// everybody may do that.
    pub(crate) fn begin(helpers: Vec<u32>) -> Option<Self> {
        let before = Manners { nice: getpriority_process(None).ok()?, policy: policy(0) };
        // Whoever has chosen another policy than the usual one keeps it.
        let is_usual = before.policy == libc::SCHED_OTHER;
        let meanwhile = Manners {
            nice: (before.nice + NICER).min(NICEST),
            policy: if is_usual { libc::SCHED_BATCH } else { before.policy },
        };
        let there_and_back = move || -> rustix::io::Result<()> {
            setpriority_process(None, meanwhile.nice)?;
            setpriority_process(None, before.nice)
        };
        let tried = std::thread::spawn(there_and_back).join();
        if !tried.is_ok_and(|tried| tried.is_ok()) {
            return None;
        }
        let polite = Self { helpers, before, meanwhile };
        polite.change(before, meanwhile);
        Some(polite)
    }

    /// Changes all threads that stand like this.
    fn change(&self, from: Manners, to: Manners) {
        // A thread that was being started is seen the second time.
        let all = || {
            self.helpers.iter().fold(threads("self"), |mut all, helper| {
                all.extend(threads(&helper.to_string()));
                all
            })
        };
        for thread in all().into_iter().chain(all()) {
            if getpriority_process(Some(thread)) == Ok(from.nice) {
                if let Err(error) = setpriority_process(Some(thread), to.nice) {
                    tracing::debug!(%error, "a thread keeps its priority");
                }
                change_policy(thread, from.policy, to.policy);
            }
        }
    }
}

/// Changes the policy of a thread that has this one, whose priority stays; what cannot be changed stays too.
fn change_policy(thread: Pid, from: libc::c_int, to: libc::c_int) {
    let thread = thread.as_raw_nonzero().get();
    if from == to || policy(thread) != from {
        return;
    }
    let param = libc::sched_param { sched_priority: 0 };
    // SAFETY: reads `param`, which is 0 for both policies.
    if unsafe { libc::sched_setscheduler(thread, to, &raw const param) } != 0 {
        let error = std::io::Error::last_os_error();
        tracing::debug!(%error, "a thread keeps its policy");
    }
}

impl Drop for Polite {
    fn drop(&mut self) {
        self.change(self.meanwhile, self.before);
    }
}

/// The policy of a thread; 0 is the calling one.
fn policy(thread: libc::pid_t) -> libc::c_int {
    // SAFETY: takes a number, and gives one.
    unsafe { libc::sched_getscheduler(thread) }
}

/// The threads of a process, which goes by this name in `/proc`.
fn threads(process: &str) -> Vec<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{process}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let number = |entry: std::fs::DirEntry| entry.file_name().to_str()?.parse().ok();
    threads.filter_map(|entry| Pid::from_raw(number(entry)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_are_polite_for_a_while() {
        let own = || Manners { nice: getpriority_process(None).unwrap(), policy: policy(0) };
        let before = own();
        let (ask, asked) = crossbeam_channel::bounded::<()>(0);
        let (answer, answered) = crossbeam_channel::bounded(0);
        let other = std::thread::spawn(move || {
            asked.iter().for_each(|()| answer.send(own()).unwrap());
        });
        let of_other = || {
            ask.send(()).unwrap();
            answered.recv().unwrap()
        };
        let mut helper = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_raw(helper.id() as i32);
        let of_helper = || Manners {
            nice: getpriority_process(pid).unwrap(),
            policy: policy(pid.unwrap().as_raw_nonzero().get()),
        };
        let polite = Polite::begin(vec![helper.id()]);
        // Where it may not be taken back nobody begins.
        let meanwhile = match polite {
            Some(_) => {
                Manners { nice: (before.nice + NICER).min(NICEST), policy: libc::SCHED_BATCH }
            }
            None => before,
        };
        assert_eq!([own(), of_other(), of_helper()], [meanwhile; 3]);
        drop(polite);
        assert_eq!([own(), of_other(), of_helper()], [before; 3]);
        helper.kill().unwrap();
        helper.wait().unwrap();
        drop(ask);
        other.join().unwrap();
    }
}
