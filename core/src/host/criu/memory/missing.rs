//! Memory of a process that is not there yet.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::pages::Extent;

/// Which memory is not there yet, and where its bytes are.
#[derive(Debug, Clone, Default)]
pub(super) struct Missing(BTreeMap<u64, Extent>);

impl Missing {
    /// Extents that do not overlap.
    pub(super) fn new(extents: impl IntoIterator<Item = Extent>) -> Self {
        Self(extents.into_iter().map(|extent| (extent.to, extent)).collect())
    }

    pub(super) fn first(&self) -> Option<Extent> {
        self.0.first_key_value().map(|(_, extent)| *extent)
    }

    /// The extent that has this address.
    pub(super) fn at(&self, address: u64) -> Option<Extent> {
        let (_, extent) = self.0.range(..=address).next_back()?;
        (address < extent.to + extent.len).then_some(*extent)
    }

    /// What is missing of some addresses.
    pub(super) fn within(&self, addresses: Range<u64>) -> Vec<Extent> {
        let first = self.at(addresses.start).map_or(addresses.start, |extent| extent.to);
        let found = self.0.range(first..addresses.end.max(first)).map(|(_, extent)| *extent);
        found.filter_map(|extent| extent.within(&addresses)).collect()
    }

    /// Is not missing any more. Gives what of it was.
    pub(super) fn remove(&mut self, addresses: Range<u64>) -> Vec<Extent> {
        let removed = self.within(addresses.clone());
        for part in &removed {
            let whole = self.at(part.to).expect("it is missing");
            self.0.remove(&whole.to);
            for rest in [whole.to..part.to, part.to + part.len..whole.to + whole.len] {
                self.0.extend(whole.within(&rest).map(|rest| (rest.to, rest)));
            }
        }
        removed
    }

    /// Has gone to other addresses, in the place of what was there.
    pub(super) fn shift(&mut self, from: u64, to: u64, len: u64) {
        let moved = self.remove(from..from.saturating_add(len));
        self.remove(to..to.saturating_add(len));
        self.0.extend(moved.into_iter().map(|extent| {
            let to = extent.to - from + to;
            (to, Extent { to, ..extent })
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(to: u64, at: u64, len: u64) -> Extent {
        Extent { to, at, len }
    }

    #[test]
    fn what_comes_is_not_missing_any_more() {
        let mut missing =
            Missing::new([extent(100, 0, 50), extent(150, 500, 50), extent(300, 50, 10)]);
        assert_eq!(missing.at(99), None);
        assert_eq!(missing.at(149), Some(extent(100, 0, 50)));
        assert_eq!(missing.at(200), None);
        assert_eq!(missing.within(120..155), [extent(120, 20, 30), extent(150, 500, 5)]);
        assert_eq!(missing.within(0..1000).len(), 3);
        assert_eq!(missing.within(200..300), []);
        assert_eq!(missing.remove(120..155), [extent(120, 20, 30), extent(150, 500, 5)]);
        assert_eq!(missing.remove(120..155), []);
        assert_eq!(missing.within(0..200), [extent(100, 0, 20), extent(155, 505, 45)]);
        // In the middle of one.
        assert_eq!(missing.remove(160..170), [extent(160, 510, 10)]);
        assert_eq!(missing.within(150..200), [extent(155, 505, 5), extent(170, 520, 30)]);
        assert_eq!(missing.first(), Some(extent(100, 0, 20)));
        missing.remove(0..u64::MAX);
        assert_eq!(missing.first(), None);
    }

    #[test]
    fn what_moves_keeps_its_bytes() {
        let mut missing = Missing::new([extent(100, 0, 50), extent(300, 50, 100)]);
        missing.shift(110, 340, 20);
        let all = [
            extent(100, 0, 10),
            extent(130, 30, 20),
            extent(300, 50, 40),
            extent(340, 10, 20),
            extent(360, 110, 40),
        ];
        assert_eq!(missing.within(0..1000), all);
    }
}
