//! Whether the blocks of a kernel that is named end soon, by its last launches.
//!
//! Interruption inside of blocks costs more than between them, and is of no use if blocks end soon. Launches of a kernel are
//! told apart by their *class*: the grid, and how large the arguments are that look like no pointers, since how long blocks
//! take depends on these. If the last [`ENOUGH`] launches of a class had short blocks, the next one is interrupted between
//! them.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::lengths::SOON;
use crate::calls::effects::Form;
use crate::state::kernels::Kernel;

/// So many launches of a class in a row had short blocks.
const ENOUGH: u32 = 8;
/// Nothing is known of more classes of a kernel's launches.
const MOST_CLASSES: usize = 256;
/// No address is smaller.
const SMALLEST_ADDRESS: u64 = 1 << 32;

/// Launches of a kernel that are alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Class(u64);

impl Class {
    /// The class of a launch of the kernel with these arguments.
    pub(super) fn of(kernel: &Kernel, form: &Form, arguments: &[u8]) -> Self {
        let mut scalars = arguments.to_vec();
        for word in &kernel.words {
            let param = kernel.params.as_deref().and_then(|all| all.get(word.param as usize));
            let Some(begin) = param.map(|param| (param.offset + word.offset) as usize) else {
                continue;
            };
            let Some(bytes) = scalars.get_mut(begin..begin + 8) else { continue };
            let value = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            if value >= SMALLEST_ADDRESS {
                bytes.fill(0);
            }
        }
        // Powers of two: a program that counts its steps does not begin a class with each.
        let size = |word: &[u8]| {
            let value = word.iter().rev().fold(0u32, |value, byte| value << 8 | u32::from(*byte));
            value.checked_ilog2()
        };
        let sizes: Vec<_> = scalars.chunks(4).map(size).collect();
        let mut hasher = DefaultHasher::new();
        (form.shape, form.shared, sizes).hash(&mut hasher);
        Self(hasher.finish())
    }
}

/// Launches of each class in a row that had short blocks.
#[derive(Default)]
pub(super) struct Recent(Mutex<HashMap<Class, u32>>);

impl Recent {
    fn classes(&self) -> MutexGuard<'_, HashMap<Class, u32>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the blocks of the next launch will probably end soon.
    pub(super) fn has_short_blocks(&self, class: Class) -> bool {
        self.classes().get(&class).is_some_and(|short| *short >= ENOUGH)
    }

    /// A launch is over, and as many of its blocks as run at a time took this time at most.
    pub(super) fn observed(&self, class: Class, round: Duration) {
        if round >= SOON {
            return self.unknown(class);
        }
        let mut classes = self.classes();
        if classes.len() >= MOST_CLASSES && !classes.contains_key(&class) {
            classes.clear();
        }
        let short = classes.entry(class).or_default();
        *short = short.saturating_add(1);
    }

    /// It is not known how long a launch takes.
    pub(super) fn unknown(&self, class: Class) {
        self.classes().remove(&class);
    }
}

#[cfg(test)]
mod tests {
    use gpucr_wire::access::Param;

    use super::*;
    use crate::state::kernels::{self, Word};

    const SHORT: Duration = Duration::from_millis(3);

    #[test]
    fn blocks_are_short_if_they_were_in_several_launches_in_a_row() {
        let recent = Recent::default();
        let (one, other) = (Class(1), Class(2));
        for _ in 1..ENOUGH {
            recent.observed(one, SHORT);
            recent.observed(other, SHORT);
        }
        assert!(!recent.has_short_blocks(one));
        recent.observed(one, SHORT);
        assert!(recent.has_short_blocks(one) && !recent.has_short_blocks(other));
        recent.observed(one, SOON);
        assert!(!recent.has_short_blocks(one));
        for _ in 0..ENOUGH {
            recent.observed(other, SHORT);
        }
        recent.unknown(other);
        assert!(!recent.has_short_blocks(other));
    }

    #[test]
    fn not_too_much_is_remembered() {
        let recent = Recent::default();
        for class in 0..10 * MOST_CLASSES as u64 {
            recent.observed(Class(class), SHORT);
            assert!(recent.classes().len() <= MOST_CLASSES);
        }
    }

    #[test]
    fn launches_with_other_pointers_and_steps_are_of_one_class() {
        let mut kernel = kernels::nameless();
        let param = |offset, size| Param { offset, size };
        kernel.params = Some(vec![param(0, 8), param(8, 8), param(16, 4)]);
        kernel.words = vec![Word { param: 0, offset: 0 }, Word { param: 1, offset: 0 }];
        let form = Form { shape: [9, 1, 1, 32, 1, 1], shared: 0 };
        let class = |form: &Form, pointer: u64, size: u64, turns: u32| {
            let words = [pointer.to_le_bytes(), size.to_le_bytes()].concat();
            Class::of(&kernel, form, &[&words[..], &turns.to_le_bytes()].concat())
        };
        let one = class(&form, 0x7f00_0000_0000, 5, 6);
        assert_eq!(one, class(&form, 0x7f00_0000_1000, 4, 7));
        assert_ne!(one, class(&form, 0x7f00_0000_0000, 8, 6));
        assert_ne!(one, class(&form, 0x7f00_0000_0000, 5, 8));
        let larger = Form { shape: [10, 1, 1, 32, 1, 1], ..form };
        assert_ne!(one, class(&larger, 0x7f00_0000_0000, 5, 6));
        let sharing = Form { shared: 64, ..form };
        assert_ne!(one, class(&sharing, 0x7f00_0000_0000, 5, 6));
    }
}
