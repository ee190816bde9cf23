//! Tables from the opaque handles that programs hold to the objects behind them. A handle is a
//! number that is never used twice, so a stale or invented handle is found out, not followed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::RwLock;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// A new handle value: not 0, 1 or 2 (special streams), not an address that anything is mapped at.
pub(crate) fn new_handle() -> u64 {
    0x5c00_0000 + (NEXT.fetch_add(1, Ordering::Relaxed) << 4)
}

/// The objects of one kind.
pub(crate) struct Table<T> {
    objects: LazyLock<RwLock<HashMap<u64, Arc<T>>>>,
}

impl<T> Table<T> {
    /// An empty table.
    pub(crate) const fn new() -> Self {
        Table { objects: LazyLock::new(|| RwLock::new(HashMap::new())) }
    }

    /// Adds an object under a handle from [`new_handle`].
    pub(crate) fn insert(&self, handle: u64, object: Arc<T>) {
        self.objects.write().insert(handle, object);
    }

    /// The object behind a handle, if there is one.
    pub(crate) fn get(&self, handle: u64) -> Option<Arc<T>> {
        self.objects.read().get(&handle).cloned()
    }

    /// Removes and returns the object behind a handle.
    pub(crate) fn remove(&self, handle: u64) -> Option<Arc<T>> {
        self.objects.write().remove(&handle)
    }

    /// Removes the objects for which `gone` holds, and returns them.
    pub(crate) fn remove_where(&self, gone: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut removed = Vec::new();
        self.objects.write().retain(|_, object| {
            let keep = !gone(object);
            if !keep {
                removed.push(object.clone());
            }
            keep
        });
        removed
    }

    /// All objects, in no particular order.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        self.objects.read().values().cloned().collect()
    }
}
