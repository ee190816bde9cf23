//! Whether doing a launch twice leaves what doing it once leaves, decided before it runs: by what the code of its
//! kernel does with its arguments ([`Code`]), and by where these point ([`Place`]).
//!
//! It does if it reads nothing that it writes. An argument leads to the whole of its allocation: how far the
//! code goes in it holds for numbers that do not overflow, which nobody has proven.
//!
//! Launches of one kernel whose arguments point to each other's allocations in the same way are of one
//! [`Class`], and judged alike.

use crate::{wire_enum, wire_struct};

/// A kernel with more words that may be pointers has no classes: its launches are not looked at one by one.
pub const MOST_WORDS: usize = 128;

/// Allocations of one launch have the numbers 1 to this; the words beyond are taken to point to what is not followed.
const MOST_NUMBERS: u8 = 126;
/// In the number of an allocation: the program has reserved its addresses, and may have mapped its memory at
/// other addresses too.
const RESERVED: u8 = 0x80;

wire_struct! {
    /// Where a word of a launch's arguments points.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub struct Place {
        /// Its allocation, by a number that all words of the launch which point there share; 0 if it points to
        /// none that is followed.
        pub at: u8,
        /// The allocation of the byte before, in the same way: another one if the word is the first address of
        /// its own.
        pub before: u8,
    }
}

wire_struct! {
    /// Launches of a kernel whose arguments have the same places.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct Class {
        /// One for each word that may be a pointer, in the order of [`words`].
        pub places: Vec<Place>,
        /// How many launches.
        pub launches: u64,
    }
}

/// So many classes of a kernel are told apart. Most kernels have one or two.
pub const CLASSES: usize = 16;

/// Adds classes of a kernel's launches to others of the same kernel, which may take so many more places. What there is
/// no room for is left out.
pub fn merge(all: &mut Vec<Class>, new: &[Class], room: &mut usize) {
    for class in new {
        if let Some(known) = all.iter_mut().find(|known| known.places == class.places) {
            known.launches = known.launches.saturating_add(class.launches);
        } else if all.len() < CLASSES && *room >= class.places.len() {
            *room -= class.places.len();
            all.push(class.clone());
        }
    }
}

/// Numbers the allocations of one launch, in the order in which they come.
#[derive(Debug, Default)]
pub struct Numbers {
    known: Vec<u64>,
}

impl Numbers {
    /// For another launch.
    pub fn clear(&mut self) {
        self.known.clear();
    }

    /// The number of an allocation with this id; `reserved` if it is a reservation of addresses.
    #[inline]
    pub fn of(&mut self, id: Option<u64>, reserved: bool) -> u8 {
        let Some(id) = id else { return 0 };
        let mark = if reserved { RESERVED } else { 0 };
        if let Some(at) = self.known.iter().position(|known| *known == id) {
            return (at as u8 + 1) | mark;
        }
        if self.known.len() >= usize::from(MOST_NUMBERS) {
            return 0;
        }
        self.known.push(id);
        self.known.len() as u8 | mark
    }
}

/// The words of a kernel's arguments that may be pointers: aligned in the buffer of all parameters, which are given by
/// their offsets there and sizes, bytes. Each with the number of its parameter and its offset in that, bytes.
pub fn words(params: impl IntoIterator<Item = (u32, u32)>) -> impl Iterator<Item = (u32, u32)> {
    let of = |(index, (offset, size)): (usize, (u32, u32))| {
        let first = offset.wrapping_neg() % 8;
        let count = size.saturating_sub(first) / 8;
        (0..count).map(move |word| (index as u32, first + 8 * word))
    };
    params.into_iter().enumerate().flat_map(of)
}

/// What the code of a kernel does with an argument.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Use {
    /// Which of [`words`] it is; `None` if it is none of them.
    pub word: Option<usize>,
    /// Memory that it leads to is read.
    pub reads: bool,
    /// Memory that it leads to is written.
    pub writes: bool,
    /// Whether the code may go to lower addresses from there; `None` if that is not known.
    pub down: Option<bool>,
}

/// What the code of a kernel does to memory. There is one only for code that is known to be what runs, follows
/// no pointer but its arguments, and depends on nothing but memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Code {
    /// The arguments by which it goes.
    pub uses: Vec<Use>,
    /// It reads variables of its module by their names.
    pub reads_variables: bool,
    /// It writes some.
    pub writes_variables: bool,
}

wire_enum! {
    /// Why a launch that is done twice may leave something else.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Reason {
        /// It reads and writes by one argument.
        0 => InPlace {},
        /// It reads or writes memory of which it is not known where else it is reached.
        1 => Elsewhere {},
        /// It reads and writes variables of its module.
        2 => Variables {},
        /// It reads and writes memory that the program has mapped itself.
        3 => Mapped {},
        /// It reads and writes one allocation.
        4 => OneAllocation {},
    }
}

impl Reason {
    /// In words, as the end of a sentence about the launch.
    pub fn text(self) -> &'static str {
        match self {
            Self::InPlace {} => "reads and writes one argument",
            Self::Elsewhere {} => "memory that is not followed",
            Self::Variables {} => "variables of its module",
            Self::Mapped {} => "memory mapped by the program",
            Self::OneAllocation {} => "reads and writes one allocation",
        }
    }
}

/// What doing a launch twice does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Twice {
    /// The same as doing it once.
    Same,
    /// Something else.
    Differs(Reason),
    /// Nobody knows.
    Unknown(Reason),
}

/// What a launch reads, or what it writes.
#[derive(Default)]
struct Side {
    elsewhere: bool,
    reserved: bool,
    /// A bit for each number of an allocation.
    allocations: u128,
}

impl Side {
    #[inline]
    fn add(&mut self, number: u8) {
        match number {
            0 => self.elsewhere = true,
            _ if number & RESERVED != 0 => self.reserved = true,
            _ => self.allocations |= 1 << number,
        }
    }

    fn is_empty(&self) -> bool {
        !self.elsewhere && !self.reserved && self.allocations == 0
    }
}

impl Code {
    /// What doing a launch twice does whose words point to these places. A word without a place points to what is
    /// not followed.
    pub fn twice(&self, places: &[Place]) -> Twice {
        let (mut read, mut written, mut in_place) = (Side::default(), Side::default(), false);
        for used in &self.uses {
            let place = used.word.and_then(|word| places.get(word)).copied().unwrap_or_default();
            in_place |= used.reads && used.writes && place.at != 0;
            for (side, touched) in [(&mut read, used.reads), (&mut written, used.writes)] {
                if !touched {
                    continue;
                }
                side.add(place.at);
                // The first address of an allocation is the end of the one before, and may be meant as that: always if
                // the code is seen to go down, else where there is one.
                let is_end = used.down.unwrap_or(place.before != 0);
                if is_end && place.at != place.before {
                    side.add(place.before);
                }
            }
        }
        let nothing = |side: &Side, variables: bool| side.is_empty() && !variables;
        match () {
            () if in_place => Twice::Differs(Reason::InPlace {}),
            () if nothing(&read, self.reads_variables) => Twice::Same,
            () if nothing(&written, self.writes_variables) => Twice::Same,
            () if read.elsewhere || written.elsewhere => Twice::Unknown(Reason::Elsewhere {}),
            () if self.reads_variables && self.writes_variables => {
                Twice::Unknown(Reason::Variables {})
            }
            () if read.reserved && written.reserved => Twice::Unknown(Reason::Mapped {}),
            () if read.allocations & written.allocations != 0 => {
                Twice::Unknown(Reason::OneAllocation {})
            }
            () => Twice::Same,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_aligned_in_the_buffer_of_all_parameters() {
        let params = [(0, 8), (8, 4), (12, 20), (32, 24), (56, 7)];
        // The third begins in the middle of a word.
        let expected = [(0, 0), (2, 4), (2, 12), (3, 0), (3, 8), (3, 16)];
        assert_eq!(words(params).collect::<Vec<_>>(), expected);
        assert_eq!(words([(u32::MAX, 1), (4, 3)]).count(), 0);
    }

    #[test]
    fn allocations_are_numbered_in_their_order() {
        let mut numbers = Numbers::default();
        let found = [Some(70), None, Some(9), Some(70)].map(|id| numbers.of(id, false));
        assert_eq!(found, [1, 0, 2, 1]);
        assert_eq!(numbers.of(Some(8), true), 3 | RESERVED);
        for id in 100..300 {
            numbers.of(Some(id), false);
        }
        // There are no more: such a word points to what is not followed.
        assert_eq!((numbers.of(Some(1), false), numbers.of(Some(9), false)), (0, 2));
        numbers.clear();
        assert_eq!(numbers.of(Some(9), false), 1);
    }

    #[test]
    fn classes_are_bounded() {
        let class = |at: u8| Class { places: vec![Place { at, before: 0 }; 10], launches: 2 };
        let all: Vec<Class> = (0..100).map(class).collect();
        let (mut merged, mut room) = (Vec::new(), 95);
        merge(&mut merged, &all, &mut room);
        assert_eq!((merged.len(), room), (9, 5));
        merge(&mut merged, &all, &mut 1000);
        assert_eq!(merged.len(), CLASSES);
        // Those that are known go on to be counted.
        assert_eq!((merged[0].launches, merged[15].launches), (4, 2));
    }

    #[test]
    fn many_words_are_told_apart() {
        let word =
            |word| Use { word: Some(word), reads: word > 0, writes: word == 0, down: Some(false) };
        let code = Code { uses: (0..100).map(word).collect(), ..Code::default() };
        let mut places: Vec<Place> = (1..=100).map(|at| Place { at, before: at }).collect();
        assert_eq!(code.twice(&places), Twice::Same);
        places[99].at = 1;
        assert_eq!(code.twice(&places), Twice::Unknown(Reason::OneAllocation {}));
        assert_eq!(code.twice(&places[..99]), Twice::Unknown(Reason::Elsewhere {}));
    }
}
