//! Launches of a kernel by how their arguments point to each other's allocations (see [`gpucr_wire::twice`]).

use gpucr_wire::twice::{CLASSES, Class, MOST_WORDS, Numbers, Place};

use crate::calls::effects::Launch;
use crate::state::index;
use crate::state::kernels::Kernel;

/// The classes of one kernel's launches.
#[derive(Default)]
pub(super) struct Classes {
    known: Vec<Class>,
    /// Of the launch that is looked at.
    numbers: Numbers,
    places: Vec<Place>,
}

impl Classes {
    /// Whether launches of a kernel have a class.
    pub(super) fn are_of(kernel: &Kernel) -> bool {
        kernel.params.is_some() && kernel.words.len() <= MOST_WORDS
    }

    /// Another launch of the kernel is looked at.
    pub(super) fn begin(&mut self, kernel: &Kernel) {
        self.numbers.clear();
        self.places.clear();
        self.places.resize(kernel.words.len(), Place::default());
    }

    /// The word with this number holds this, which points to this allocation.
    #[inline]
    pub(super) fn note(&mut self, number: usize, word: u64, allocation: Option<u64>) {
        let Some(place) = self.places.get_mut(number) else { return };
        let mut number_of = |id: Option<u64>| {
            self.numbers.of(id, id.is_some_and(|id| index::reservation_address(id).is_some()))
        };
        place.at = number_of(allocation);
        place.before = number_of(index::find(word.wrapping_sub(1)));
    }

    /// All words of so many launches were noted.
    pub(super) fn end(&mut self, launches: u64) {
        // Most often it is the one that was found the last time.
        let same = |known: &Class| known.places == self.places;
        match self.known.iter().position(same) {
            Some(at) => {
                self.known[at].launches += launches;
                self.known.swap(0, at);
            }
            None if self.known.len() < CLASSES => {
                self.known.push(Class { places: self.places.clone(), launches });
            }
            None => {}
        }
    }

    pub(super) fn known(&self) -> &[Class] {
        &self.known
    }
}

/// Where the words of one launch point; `None`: they are too many.
pub(super) fn places(kernel: &Kernel, launch: &Launch) -> Option<Vec<Place>> {
    if !Classes::are_of(kernel) {
        return None;
    }
    let mut one = Classes::default();
    one.begin(kernel);
    launch.words(kernel, &mut |number, word| one.note(number, word, index::find(word)));
    Some(one.places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_bounded() {
        let mut classes = Classes::default();
        for launch in 0..100 {
            let words = vec![crate::state::kernels::Word { param: 0, offset: 0 }; 1 + launch % 20];
            classes.begin(&Kernel { words, ..Kernel::default() });
            classes.end(1);
        }
        assert_eq!(classes.known().len(), CLASSES);
        assert!(classes.known().iter().all(|class| class.launches == 5));
    }
}
