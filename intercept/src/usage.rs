//! What the program holds that the shim does not carry itself: counted, so that `gpucr ps` and
//! the preflight of a dump can say what it costs, or that it cannot be done.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use gpucr_wire::Counts;

use crate::abi::types::{Code, SUCCESS};
use crate::resettable::Resettable;

/// What is counted while it lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Memory from a stream-ordered pool, or what the driver itself gives for `cuMemAlloc*`; named by its
    /// address, in bytes.
    Pool,
    /// Managed memory, variables of modules among it; named by its address.
    Managed,
    /// Pinned or registered host memory; named by its address, in bytes.
    Pinned,
    /// An array or mipmapped array; named by its handle.
    Array,
    /// Memory of another process, or open to one; named by its address.
    SharedAddress,
    /// Something that the driver cannot checkpoint, of this kind; named by its handle.
    Unsupported(Thing),
}

/// Things that the driver cannot checkpoint, each kind with functions of its own that end it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Thing {
    /// An event of another process, or open to others.
    Event,
    /// A pool of another process, or open to others.
    Pool,
    /// A context of a graphics library.
    Context,
    /// A sparse array with memory of the program's, or an array in memory of another library.
    Array,
    /// Memory of another library.
    ExternalMemory,
    /// An address of such memory.
    ExternalAddress,
    /// A semaphore of another library.
    ExternalSemaphore,
    /// Something that was registered with a graphics library.
    Resource,
    /// A buffer of OpenGL; named by its number.
    GlBuffer,
    /// An end of a stream of EGL.
    EglConnection,
}

/// Something that lives.
#[derive(Clone, Copy)]
struct Life {
    /// Bytes, where they are counted.
    size: u64,
    /// The context with which it dies, 0 if there is none.
    context: u64,
    /// The module or library with which it dies, 0 if there is none.
    owner: u64,
    /// The function that made it.
    made_by: &'static str,
}

#[derive(Default)]
struct Usage {
    /// Functions whose effect has no end that could be seen.
    unsupported: BTreeSet<&'static str>,
    live: HashMap<(Kind, u64), Life>,
    /// Where pinned memory has begun and how many bytes it had, since somebody wants to know.
    pinned: Option<BTreeMap<u64, u64>>,
}

impl Usage {
    /// The pinned memory that there is.
    fn live_pinned(&self) -> impl Iterator<Item = (u64, u64)> {
        let pinned = self.live.iter().filter(|((kind, _), _)| *kind == Kind::Pinned);
        pinned.map(|((_, address), life)| (*address, life.size))
    }
}

static USAGE: Resettable<Mutex<Option<Usage>>> = Resettable::new(Mutex::new(None));
/// Whether there has been an event that the driver cannot checkpoint: programs destroy many others.
static EVENTS: AtomicBool = AtomicBool::new(false);

fn with<T>(work: impl FnOnce(&mut Usage) -> T) -> T {
    let mut usage = USAGE.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(usage.get_or_insert_default())
}

/// The program has used a function whose effect the driver cannot checkpoint, and whose end is not seen.
pub(crate) fn record(function: &'static str) {
    with(|usage| usage.unsupported.insert(function));
}

/// Something new lives. `context` is the one with which it dies, 0 if there is none.
pub(crate) fn added(kind: Kind, name: u64, size: u64, context: u64) {
    let life = Life { size, context, owner: 0, made_by: "" };
    with(|usage| {
        usage.live.insert((kind, name), life);
        if let (Kind::Pinned, Some(pinned)) = (kind, &mut usage.pinned) {
            let most = pinned.entry(name).or_default();
            *most = size.max(*most);
        }
    });
}

/// Remembers from now on what is or gets pinned, also after it is not any more; or forgets that.
pub(crate) fn remember_pinned(on: bool) {
    with(|usage| usage.pinned = on.then(|| usage.live_pinned().collect()));
}

/// What is remembered: addresses in their order, and bytes. `None` if nobody has asked for that.
pub(crate) fn remembered_pinned() -> Option<Vec<(u64, u64)>> {
    with(|usage| usage.pinned.as_ref().map(|pinned| pinned.iter().map(|(a, b)| (*a, *b)).collect()))
}

/// A managed variable is at `address`. It dies with `owner`, a module or library, and with `context` unless that is 0.
pub(crate) fn managed_variable(address: u64, owner: u64, context: u64) {
    let life = Life { size: 0, context, owner, made_by: "" };
    with(|usage| usage.live.insert((Kind::Managed, address), life));
}

/// Something that the driver cannot checkpoint lives: `function` has made it, or made it such. `context` is
/// the one with which it dies, 0 if there is none.
pub(crate) fn began(thing: Thing, name: u64, function: &'static str, context: u64) {
    let life = Life { size: 0, context, owner: 0, made_by: function };
    with(|usage| usage.live.insert((Kind::Unsupported(thing), name), life));
    if thing == Thing::Event {
        EVENTS.store(true, Ordering::Relaxed);
    }
}

/// Whether `name` is counted.
pub(crate) fn is_live(kind: Kind, name: u64) -> bool {
    with(|usage| usage.live.contains_key(&(kind, name)))
}

/// The names of all of one kind.
pub(crate) fn all_of(kind: Kind) -> Vec<u64> {
    with(|usage| usage.live.keys().filter(|(of, _)| *of == kind).map(|(_, name)| *name).collect())
}

/// Calls `end`, which ends whatever of these kinds is called `name`. It is taken off the counts before
/// that: afterwards another thread may be given the same name. If `end` fails it is put back.
pub(crate) fn ending(kinds: &[Kind], name: u64, end: impl FnOnce() -> Code) -> Code {
    let take = |usage: &mut Usage| -> Vec<_> {
        let keys = kinds.iter().map(|kind| (*kind, name));
        keys.filter_map(|key| Some((key, usage.live.remove(&key)?))).collect()
    };
    ending_all(take, end)
}

/// The same for what dies with a module or library, which `end` unloads.
pub(crate) fn unloading(owner: u64, end: impl FnOnce() -> Code) -> Code {
    ending_all(|usage| usage.live.extract_if(|_, life| life.owner == owner).collect(), end)
}

/// The same for what `take` takes off.
fn ending_all(
    take: impl FnOnce(&mut Usage) -> Vec<((Kind, u64), Life)>,
    end: impl FnOnce() -> Code,
) -> Code {
    let taken = with(take);
    let code = end();
    if code != SUCCESS && !taken.is_empty() {
        with(|usage| usage.live.extend(taken));
    }
    code
}

/// Whether an event has ever been counted.
pub(crate) fn has_had_events() -> bool {
    EVENTS.load(Ordering::Relaxed)
}

/// A context is gone, and what lived in it.
pub(crate) fn context_gone(context: u64) {
    with(|usage| usage.live.retain(|_, life| life.context != context || context == 0));
}

/// Writes the counts kept here.
pub(crate) fn fill(counts: &mut Counts) {
    with(|usage| {
        let mut unsupported = usage.unsupported.clone();
        for ((kind, _), life) in &usage.live {
            match kind {
                Kind::Pool => counts.pool_bytes += life.size,
                Kind::Managed => counts.managed += 1,
                Kind::Pinned => counts.pinned_bytes += life.size,
                Kind::Array => counts.arrays += 1,
                Kind::SharedAddress => counts.shared += 1,
                Kind::Unsupported(_) => {
                    unsupported.insert(life.made_by);
                }
            }
        }
        counts.unsupported.extend(unsupported.into_iter().map(str::to_owned));
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

    fn counts() -> (u64, u64, u64, Vec<String>) {
        let mut counts = Counts::default();
        fill(&mut counts);
        (counts.pool_bytes, counts.arrays, counts.shared, counts.unsupported)
    }

    #[test]
    fn what_lives_is_counted_until_it_or_its_context_is_gone() {
        let gone = |kind, name| assert_eq!(ending(&[kind], name, || SUCCESS), SUCCESS);
        record("cuThatIsTested");
        added(Kind::Pool, 0x1000, 100, 71);
        added(Kind::Pool, 0x2000, 20, 72);
        added(Kind::Array, 0x1000, 0, 71);
        added(Kind::SharedAddress, 5, 0, 0);
        began(Thing::Event, 0x1000, "cuMade", 71);
        began(Thing::Pool, 0x1000, "cuExported", 0);
        let names =
            |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(counts(), (120, 1, 1, names(&["cuExported", "cuMade", "cuThatIsTested"])));
        context_gone(71);
        assert_eq!(counts(), (20, 0, 1, names(&["cuExported", "cuThatIsTested"])));
        gone(Kind::Pool, 0x2000);
        gone(Kind::Pool, 0x3000);
        gone(Kind::Unsupported(Thing::Pool), 0x1000);
        context_gone(0);
        gone(Kind::SharedAddress, 5);
        assert_eq!(counts(), (0, 0, 0, names(&["cuThatIsTested"])));
    }

    #[test]
    fn what_was_pinned_since_somebody_asked_is_remembered() {
        assert_eq!(remembered_pinned(), None);
        added(Kind::Pinned, 0x9000, 4096, 73);
        remember_pinned(true);
        added(Kind::Pinned, 0x8000, 10, 73);
        ending(&[Kind::Pinned], 0x8000, || SUCCESS);
        added(Kind::Pinned, 0x8000, 5, 73);
        context_gone(73);
        assert_eq!(remembered_pinned(), Some(vec![(0x8000, 10), (0x9000, 4096)]));
        remember_pinned(false);
        assert_eq!(remembered_pinned(), None);
    }

    #[test]
    fn what_does_not_end_is_still_counted_and_what_is_made_anew_meanwhile_is_not_forgotten() {
        let event = [Kind::Unsupported(Thing::Event)];
        began(Thing::Event, 7, "cuMade", 0);
        let others = counts().3.len() - 1;
        assert_eq!(ending(&event, 7, || 1), 1);
        assert_eq!(counts().3.len(), others + 1);
        let destroyed_and_made_anew = || {
            began(Thing::Event, 7, "cuMade", 0);
            SUCCESS
        };
        ending(&event, 7, destroyed_and_made_anew);
        assert_eq!(counts().3.len(), others + 1);
        ending(&event, 7, || SUCCESS);
        assert_eq!(counts().3.len(), others);
    }
}
