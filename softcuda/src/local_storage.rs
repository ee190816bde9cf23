//! Values that the runtime library keeps with contexts, each under a key and with a function to call when the context
//! ends.

use std::collections::HashMap;

use parking_lot::Mutex;

use crate::status::{Code, Outcome};

/// What is called at the end of a context: with its handle, the key and the value.
pub(crate) type Destructor = extern "C" fn(context: u64, key: u64, value: u64);

struct Kept {
    value: u64,
    destructor: Option<Destructor>,
}

/// By context and key.
static KEPT: Mutex<Option<HashMap<(u64, u64), Kept>>> = Mutex::new(None);

/// Keeps a value; it replaces what was there.
pub(crate) fn put(context: u64, key: u64, value: u64, destructor: Option<Destructor>) {
    KEPT.lock().get_or_insert_default().insert((context, key), Kept { value, destructor });
}

/// The value under a key.
///
/// # Errors
/// `INVALID_HANDLE` when there is none.
pub(crate) fn get(context: u64, key: u64) -> Outcome<u64> {
    let kept = KEPT.lock();
    let kept = kept.as_ref().and_then(|kept| kept.get(&(context, key)));
    kept.map(|kept| kept.value).ok_or(Code::INVALID_HANDLE)
}

/// Forgets a value without calling anything.
///
/// # Errors
/// `INVALID_HANDLE` when there is none.
pub(crate) fn delete(context: u64, key: u64) -> Outcome {
    let removed = KEPT.lock().as_mut().and_then(|kept| kept.remove(&(context, key)));
    removed.map(|_| ()).ok_or(Code::INVALID_HANDLE)
}

/// Calls what is to be called at the end of a context, and forgets its values. The caller holds no lock, since what
/// is called may call the driver.
pub(crate) fn end_context(context: u64) {
    let ended: Vec<_> = match KEPT.lock().as_mut() {
        Some(kept) => kept.extract_if(|(of, _), _| *of == context).collect(),
        None => Vec::new(),
    };
    for ((_, key), kept) in ended {
        if let Some(destructor) = kept.destructor {
            destructor(context, key, kept.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    static SUM: AtomicU64 = AtomicU64::new(0);

    extern "C" fn add(context: u64, key: u64, value: u64) {
        // It may use what it is called from.
        assert!(get(context, key).is_err());
        SUM.fetch_add(context * 100 + key * 10 + value, Ordering::SeqCst);
    }

    #[test]
    fn values_end_with_their_context() {
        let (one, two) = (u64::MAX / 1000, 2);
        put(two, 1, 5, Some(add));
        put(two, 1, 6, Some(add));
        put(two, 2, 7, None);
        put(one, 1, 8, Some(add));
        assert_eq!((get(two, 1), get(two, 2), get(one, 1)), (Ok(6), Ok(7), Ok(8)));
        assert_eq!(get(two, 3), Err(Code::INVALID_HANDLE));
        end_context(two);
        assert_eq!(SUM.load(Ordering::SeqCst), 216);
        assert_eq!((get(two, 1), get(one, 1)), (Err(Code::INVALID_HANDLE), Ok(8)));
        assert_eq!(delete(one, 1), Ok(()));
        assert_eq!(delete(one, 1), Err(Code::INVALID_HANDLE));
        end_context(one);
        assert_eq!(SUM.load(Ordering::SeqCst), 216);
    }
}
