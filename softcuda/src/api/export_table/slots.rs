//! What a private table is in memory: pointers to functions one after the other.

use crate::api;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// Places of each table. More than any is known to have, so that a caller that expects a larger one is refused, not
/// lost.
pub(super) const SLOTS: usize = 96;

/// A place of a table: a function, or the size of the table in bytes.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Slot(pub(super) *const ());

// SAFETY: addresses of functions, and a number.
unsafe impl Sync for Slot {}

/// A table.
pub(super) struct Table {
    /// Its identifier, the first byte in the highest place.
    pub(super) id: u128,
    slots: [Slot; SLOTS],
}

impl Table {
    /// A table that begins with its size, which counts `length` places; nothing is known of them yet.
    pub(super) const fn sized<const ID: u128>(length: usize) -> Table {
        let size = std::ptr::without_provenance(length * size_of::<Slot>());
        Table::plain::<ID>().with(0, Slot(size))
    }

    /// A table that begins with a function; nothing is known of its places yet.
    #[rustfmt::skip]
    pub(super) const fn plain<const ID: u128>() -> Table {
        /// A function that names its place and refuses.
        macro_rules! places {
            ($($slot:literal)*) => { [$(Slot(unknown::<ID, $slot> as *const ()),)*] };
        }
        let slots = places!(
             0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
            32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
            64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95
        );
        Table { id: ID, slots }
    }

    /// The same table with a function in a place.
    pub(super) const fn with(mut self, slot: usize, function: Slot) -> Table {
        self.slots[slot] = function;
        self
    }

    /// Where programs find it.
    pub(super) fn address(&self) -> u64 {
        self.slots.as_ptr() as u64
    }

    /// The address of the function in a place.
    pub(super) fn function(&self, slot: usize) -> u64 {
        self.slots[slot].0 as u64
    }
}

/// An identifier as it is written.
pub(super) fn written(id: u128) -> String {
    let text = format!("{id:032X}");
    [&text[..8], &text[8..12], &text[12..16], &text[16..20], &text[20..]].join("-")
}

/// Runs the body of a function in a table as that of any function of the driver. If `SOFTCUDA_LOG` asks for it, the
/// call is named on standard error.
pub(super) fn called(name: &'static str, body: impl FnOnce() -> Outcome) -> u32 {
    if settings().log_tables {
        eprintln!("softcuda: private table: {name}");
    }
    api::call(name, body)
}

/// A function in a place that nothing is known of.
extern "C" fn unknown<const ID: u128, const SLOT: usize>() -> u32 {
    api::early(&format!("place {SLOT} of table {}", written(ID)), || Err(Code::NOT_SUPPORTED))
}
