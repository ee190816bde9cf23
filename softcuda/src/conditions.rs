//! What conditional nodes of graphs consist of: values that kernels set while a graph runs, and the graphs that these
//! let run.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::handles::new_handle;
use crate::status::{Code, Outcome};

/// A value that decides. Graph and executable graphs keep it alive.
pub(crate) struct Condition {
    /// The value that programs and kernels hold (`CUgraphConditionalHandle`).
    pub(crate) handle: u64,
    /// Handle of the context whose kernels may set it, and in which the bodies run.
    pub(crate) context: u64,
    /// What it is at the beginning of each launch; otherwise it stays as the launch before left it.
    default: Option<u32>,
    value: AtomicU32,
}

static CONDITIONS: Mutex<BTreeMap<u64, Weak<Condition>>> = Mutex::new(BTreeMap::new());

/// `CUgraphConditionalNodeType`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The first body where the value is not 0; otherwise the second, if there is one.
    If,
    /// The body as long as the value is not 0.
    While,
    /// The body with the value's number, if there is one.
    Switch,
}

/// What a conditional node consists of.
pub(crate) struct Conditional {
    /// Its value.
    pub(crate) condition: Arc<Condition>,
    /// What the value means.
    pub(crate) kind: Kind,
    /// Handles of the graphs; programs get the address of this.
    pub(crate) bodies: Box<[u64]>,
}

impl TryFrom<u32> for Kind {
    type Error = Code;

    fn try_from(kind: u32) -> Outcome<Kind> {
        Ok(match kind {
            0 => Kind::If,
            1 => Kind::While,
            2 => Kind::Switch,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

impl Kind {
    /// Whether a node may have so many bodies.
    pub(crate) fn may_have(self, bodies: usize) -> bool {
        match self {
            Kind::If => matches!(bodies, 1 | 2),
            Kind::While => bodies == 1,
            Kind::Switch => bodies > 0,
        }
    }
}

impl Condition {
    /// A condition that begins as `value`, each launch anew if `at_each_launch`.
    pub(crate) fn new(context: u64, value: u32, at_each_launch: bool) -> Arc<Condition> {
        let condition = Arc::new(Condition {
            handle: new_handle(),
            context,
            default: at_each_launch.then_some(value),
            value: AtomicU32::new(value),
        });
        CONDITIONS.lock().insert(condition.handle, Arc::downgrade(&condition));
        condition
    }

    /// Begins a launch.
    pub(crate) fn begin(&self) {
        if let Some(default) = self.default {
            self.value.store(default, Ordering::Relaxed);
        }
    }

    /// What it is now.
    pub(crate) fn value(&self) -> u32 {
        self.value.load(Ordering::Relaxed)
    }
}

impl Drop for Condition {
    fn drop(&mut self) {
        CONDITIONS.lock().remove(&self.handle);
    }
}

/// Sets a condition from a kernel of a context; false if the context has none with this handle.
pub(crate) fn set(context: u64, handle: u64, value: u32) -> bool {
    // The lock is free again when the condition is let go of, which may be the last to hold it.
    let condition = CONDITIONS.lock().get(&handle).and_then(Weak::upgrade);
    let condition = condition.filter(|condition| condition.context == context);
    condition.is_some_and(|condition| {
        condition.value.store(value, Ordering::Relaxed);
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_set_by_their_context_as_long_as_they_are_there() {
        let condition = Condition::new(7, 3, true);
        let handle = condition.handle;
        assert!(set(7, handle, 9) && !set(8, handle, 1));
        assert_eq!(condition.value(), 9);
        condition.begin();
        assert_eq!(condition.value(), 3);
        drop(condition);
        assert!(!set(7, handle, 1));
        let kept = Condition::new(7, 3, false);
        assert!(set(7, kept.handle, 4));
        kept.begin();
        assert_eq!(kept.value(), 4);
    }
}
