//! Loops, by the branches that go back.

/// A label to which branches go back.
pub(crate) struct Loop {
    /// The label's item.
    pub(crate) label: usize,
    /// The items of the branches that go back there.
    pub(crate) back: Vec<usize>,
    /// What is saved: registers, and where among what the thread saves.
    pub(crate) slots: Vec<(u32, u64)>,
}

impl Loop {
    /// Whether the other one is within this one.
    pub(crate) fn is_around(&self, other: &Self) -> bool {
        self.label < other.label && self.back.iter().max() > other.back.iter().max()
    }
}
