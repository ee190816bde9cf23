//! User objects: things of the program that graphs keep alive. The last reference that goes calls
//! the program's destructor.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::handles::{Table, new_handle};
use crate::host_calls::HostCall;
use crate::status::{Code, Outcome};

/// All user objects.
pub(crate) static USER_OBJECTS: Table<UserObject> = Table::new();

/// A thing of the program with a count of references.
pub(crate) struct UserObject {
    /// The value that programs hold.
    pub(crate) handle: u64,
    destructor: HostCall,
    references: Mutex<u64>,
}

/// References that belong to a graph.
pub(crate) struct Held {
    object: Arc<UserObject>,
    count: u64,
}

/// Makes an object with references that belong to the program.
pub(crate) fn create(destructor: HostCall, references: u64) -> Arc<UserObject> {
    let references = Mutex::new(references);
    let object = Arc::new(UserObject { handle: new_handle(), destructor, references });
    USER_OBJECTS.insert(object.handle, object.clone());
    object
}

impl UserObject {
    /// Adds references.
    pub(crate) fn retain(&self, count: u64) {
        *self.references.lock() += count;
    }

    /// Takes references away; without any, the object is destroyed. No lock may be held, as
    /// the destructor is the program's.
    ///
    /// # Errors
    /// `INVALID_VALUE` when there are fewer; nothing is changed then.
    pub(crate) fn release(&self, count: u64) -> Outcome {
        let mut references = self.references.lock();
        *references = references.checked_sub(count).ok_or(Code::INVALID_VALUE)?;
        let gone = *references == 0;
        drop(references);
        if gone && USER_OBJECTS.remove(self.handle).is_some() {
            // SAFETY: the program promises a function that may be called with its argument.
            unsafe { (self.destructor.function)(self.destructor.data) };
        }
        Ok(())
    }
}

impl Held {
    /// Takes over references that the caller has counted.
    pub(crate) fn new(object: Arc<UserObject>, count: u64) -> Held {
        Held { object, count }
    }
}

impl Clone for Held {
    fn clone(&self) -> Held {
        self.object.retain(self.count);
        Held { object: self.object.clone(), count: self.count }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // They were counted, so they are there.
        let _ = self.object.release(self.count);
    }
}

/// Takes references of one object out of a list.
///
/// # Errors
/// `INVALID_VALUE` when there are fewer; nothing is changed then.
pub(crate) fn take(list: &mut Vec<Held>, object: u64, count: u64) -> Outcome<Vec<Held>> {
    let of_object = |held: &&mut Held| held.object.handle == object;
    let all: u64 = list.iter_mut().filter(of_object).map(|held| held.count).sum();
    if all < count {
        return Err(Code::INVALID_VALUE);
    }
    let mut left = count;
    let mut taken = Vec::new();
    for held in list.iter_mut().filter(of_object) {
        let part = held.count.min(left);
        held.count -= part;
        left -= part;
        taken.push(Held::new(held.object.clone(), part));
    }
    list.retain(|held| held.count > 0);
    Ok(taken)
}
