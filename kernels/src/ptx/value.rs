//! What a register may hold.

/// A value may derive from something of this kind. A value has any number of marks.
pub(super) type Marks = u16;

/// A value from memory or from nowhere known, of 64 bits: it may be an address of anything.
pub(super) const FOREIGN: Marks = 1;
/// A value from memory or a parameter, which is no address: less than 64 bits of one, or scaled. Put together
/// with another one it may become an address.
pub(super) const NUMBER: Marks = 2;
/// Only in memory: numbers were stored in pieces of less than 8 bytes, of which a load of 8 bytes may
/// make an address.
pub(super) const PIECES: Marks = 4;
/// A constant of 2^24 or more: multiplied by it, a number may become the upper half of an address.
pub(super) const LARGE: Marks = 8;
/// The address of a variable in local memory.
pub(super) const LOCAL: Marks = 16;
/// The address of a variable in shared memory.
pub(super) const SHARED: Marks = 32;
/// The address of a variable in constant memory.
pub(super) const CONST: Marks = 64;
/// The address of a parameter. The value then has the words and marks of what the parameter holds.
pub(super) const PARAM: Marks = 128;
/// The address of a variable of the module in global memory.
pub(super) const VARIABLE: Marks = 256;

/// A value: what it may derive from. Values only ever grow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) marks: Marks,
    /// One bit for each word of the kernel's parameters; none where there would be only zeros.
    words: Vec<u64>,
}

impl Value {
    pub(super) fn marked(marks: Marks) -> Value {
        Value { marks, words: Vec::new() }
    }

    pub(super) fn constant(number: i64) -> Value {
        Value::marked(if number.unsigned_abs() < 1 << 24 { 0 } else { LARGE })
    }

    pub(super) fn of_word(word: usize) -> Value {
        let mut words = vec![0; word / 64 + 1];
        words[word / 64] = 1 << (word % 64);
        Value { marks: 0, words }
    }

    pub(super) fn has(&self, marks: Marks) -> bool {
        self.marks & marks != 0
    }

    /// Adds another value, and says whether this one has grown.
    pub(super) fn add(&mut self, other: &Value) -> bool {
        let mut grown = other.marks & !self.marks != 0;
        self.marks |= other.marks;
        if self.words.len() < other.words.len() {
            self.words.resize(other.words.len(), 0);
        }
        for (own, other) in self.words.iter_mut().zip(&other.words) {
            grown |= other & !*own != 0;
            *own |= other;
        }
        grown
    }

    #[must_use]
    pub(super) fn and(mut self, other: &Value) -> Value {
        self.add(other);
        self
    }

    #[must_use]
    pub(super) fn with(mut self, marks: Marks) -> Value {
        self.marks |= marks;
        self
    }

    #[must_use]
    pub(super) fn without(mut self, marks: Marks) -> Value {
        self.marks &= !marks;
        self
    }

    /// The value is scaled, divided or cut: what may have been an address is a number.
    #[must_use]
    pub(super) fn scaled(self) -> Value {
        if self.has(FOREIGN) { self.without(FOREIGN).with(NUMBER) } else { self }
    }

    /// The value in a register of less than 64 bits.
    #[must_use]
    pub(super) fn narrow(self) -> Value {
        self.scaled().without(LARGE | PIECES)
    }

    /// The value is put together from parts: what was a number may be an address.
    #[must_use]
    pub(super) fn put_together(self) -> Value {
        if self.has(NUMBER | PIECES) { self.with(FOREIGN) } else { self }
    }

    /// The words that it may derive from.
    pub(super) fn words(&self) -> impl Iterator<Item = usize> {
        self.words.iter().enumerate().flat_map(|(at, bits)| {
            (0..64).filter(move |bit| bits >> bit & 1 != 0).map(move |bit| at * 64 + bit)
        })
    }

    pub(super) fn has_words(&self) -> bool {
        !self.words.is_empty()
    }
}
