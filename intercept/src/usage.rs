//! What the program holds that the shim does not carry itself: counted, so that `gpucr ps` and
//! the preflight of a dump can say what it costs, or that it cannot be done.

use std::collections::{BTreeSet, HashMap};
use std::sync::Mutex;

use gpucr_wire::Counts;

use crate::fork::Resettable;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Memory from a stream-ordered pool; named by its address, in bytes.
    Pool,
    /// Managed memory; named by its address.
    Managed,
    /// Pinned or registered host memory; named by its address, in bytes.
    Pinned,
    /// An array or mipmapped array; named by its handle.
    Array,
    /// Memory of another process, or open to one; named by its address.
    SharedAddress,
    /// The same; named by its handle.
    SharedHandle,
}

#[derive(Default)]
struct Usage {
    unsupported: BTreeSet<&'static str>,
    /// Size and context of everything that lives.
    live: HashMap<(Kind, u64), (u64, u64)>,
}

static USAGE: Resettable<Mutex<Option<Usage>>> = Resettable::new(Mutex::new(None));

fn with<T>(work: impl FnOnce(&mut Usage) -> T) -> T {
    let mut usage = USAGE.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(usage.get_or_insert_default())
}

/// The program has used a function whose effect the driver cannot checkpoint.
pub(crate) fn record(function: &'static str) {
    with(|usage| usage.unsupported.insert(function));
}

/// Something new lives. `context` is the one with which it dies, 0 if there is none.
pub(crate) fn added(kind: Kind, name: u64, size: u64, context: u64) {
    with(|usage| usage.live.insert((kind, name), (size, context)));
}

/// Something is gone; nothing happens if it was never seen.
pub(crate) fn removed(kind: Kind, name: u64) {
    with(|usage| usage.live.remove(&(kind, name)));
}

/// A context is gone, and what lived in it.
pub(crate) fn context_gone(context: u64) {
    with(|usage| usage.live.retain(|_, (_, of)| *of != context || context == 0));
}

/// Writes the counts kept here.
pub(crate) fn fill(counts: &mut Counts) {
    with(|usage| {
        counts.unsupported = usage.unsupported.iter().map(|name| (*name).to_owned()).collect();
        for ((kind, _), (size, _)) in &usage.live {
            match kind {
                Kind::Pool => counts.pool_bytes += size,
                Kind::Managed => counts.managed += 1,
                Kind::Pinned => counts.pinned_bytes += size,
                Kind::Array => counts.arrays += 1,
                Kind::SharedAddress | Kind::SharedHandle => counts.shared += 1,
            }
        }
    });
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { USAGE.reset(Mutex::new(None)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lives_is_counted_until_it_or_its_context_is_gone() {
        record("cuThatIsTested");
        added(Kind::Pool, 0x1000, 100, 71);
        added(Kind::Pool, 0x2000, 20, 72);
        added(Kind::Array, 0x1000, 0, 71);
        added(Kind::SharedHandle, 5, 0, 0);
        let counts = || {
            let mut counts = Counts::default();
            fill(&mut counts);
            (counts.pool_bytes, counts.arrays, counts.shared, counts.unsupported)
        };
        let names = vec!["cuThatIsTested".to_owned()];
        assert_eq!(counts(), (120, 1, 1, names.clone()));
        context_gone(71);
        assert_eq!(counts(), (20, 0, 1, names.clone()));
        removed(Kind::Pool, 0x2000);
        removed(Kind::Pool, 0x3000);
        context_gone(0);
        removed(Kind::SharedHandle, 5);
        assert_eq!(counts(), (0, 0, 0, names));
    }
}
