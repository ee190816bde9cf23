//! What is said of a kernel.

use gpucr_wire::reach::Reach;

/// What a kernel does to the memory that a word of its parameters points to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Nothing: no address is made of this word.
    None,
    /// The kernel reads there, and does not write.
    Read,
    /// The kernel writes there, and does not read.
    Write,
    /// The kernel reads and writes there.
    ReadWrite,
    /// The direction is not known. To be taken for [`Direction::ReadWrite`].
    Unknown,
}

impl Direction {
    /// What two accesses do together.
    #[must_use]
    pub fn and(self, other: Direction) -> Direction {
        use Direction::{None, Read, ReadWrite, Unknown, Write};
        match (self, other) {
            (Unknown, _) | (_, Unknown) => Unknown,
            (None, one) | (one, None) => one,
            (Read, Read) => Read,
            (Write, Write) => Write,
            _ => ReadWrite,
        }
    }

    /// May memory be read?
    pub fn reads(self) -> bool {
        !matches!(self, Direction::None | Direction::Write)
    }

    /// May memory be written?
    pub fn writes(self) -> bool {
        !matches!(self, Direction::None | Direction::Read)
    }
}

/// What a statement about a word rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The code of the kernel.
    Ptx,
    /// The types in its mangled name.
    Name,
    /// What it did when it ran.
    Observed,
    /// Nothing.
    Assumed,
}

/// A kernel and what it does with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// The name that the driver knows: mangled, if it is C++.
    pub name: String,
    /// The parameters, in the order of the launch.
    pub params: Vec<Param>,
    /// It may reach memory through pointers that are not parameters: those that it loads from
    /// memory, textures and surfaces, or code that is not in its module. What its words say is then
    /// not all that it touches.
    pub indirect: bool,
    /// What it does to variables of its module (`__device__`, `__constant__`), which are reached by name. Their
    /// memory belongs to the module and to no allocation of the program.
    pub variables: Direction,
    /// What it does follows from its parameters and from the memory that it reads, and shows in memory
    /// alone: it prints nothing, takes no memory of the device's heap, asks neither clock nor where it
    /// runs, and has no instruction without a rule.
    pub closed: bool,
}

impl Kernel {
    /// What may be done if either of two runs, which have the same layout.
    #[must_use]
    pub fn or(mut self, other: &Kernel) -> Kernel {
        let own = self.params.iter_mut().flat_map(|param| &mut param.words);
        for (own, other) in own.zip(other.params.iter().flat_map(|param| &param.words)) {
            own.direction = own.direction.and(other.direction);
            // A reach that the two do not share is unknown.
            own.reach = own.reach.take().filter(|reach| Some(reach) == other.reach.as_ref());
        }
        self.indirect |= other.indirect;
        self.variables = self.variables.and(other.variables);
        self.closed &= other.closed;
        self
    }
}

/// A parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Param {
    /// Bytes from the beginning of the kernel's block of parameters.
    pub offset: u32,
    /// Bytes.
    pub size: u32,
    /// Its whole words of 8 bytes. A parameter of less than 8 bytes has none, and holds no address.
    pub words: Vec<Word>,
}

/// A word of 8 bytes in a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// Bytes from the beginning of the parameter.
    pub offset: u32,
    /// What is done to the memory that it points to, if it is an address at all.
    pub direction: Direction,
    /// What `direction` rests on.
    pub source: Source,
    /// How far from that address it goes; `None` if that is not known.
    pub reach: Option<Reach>,
}

impl Param {
    /// A parameter of which all words have the same direction.
    pub fn uniform(offset: u32, size: u32, direction: Direction, source: Source) -> Param {
        let word = |word| Word { offset: word * 8, direction, source, reach: None };
        Param { offset, size, words: (0..size / 8).map(word).collect() }
    }
}
