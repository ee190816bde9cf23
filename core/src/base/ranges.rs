//! Sets of addresses.

/// Addresses, as ranges in their order that neither overlap nor touch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    /// Adds the addresses from `start` to `end`, all of which are behind what there is, or touch its end.
    pub(crate) fn push(&mut self, start: u64, end: u64) {
        match self.0.last_mut() {
            _ if start >= end => {}
            Some(last) if last.1 >= start => last.1 = last.1.max(end),
            _ => self.0.push((start, end)),
        }
    }

    /// Starts and ends, in their order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0.iter().copied()
    }

    /// How many addresses.
    pub(crate) fn len(&self) -> u64 {
        self.iter().map(|(start, end)| end - start).sum()
    }

    /// Whether all addresses from `start` to `end` are among these.
    pub(crate) fn cover(&self, start: u64, end: u64) -> bool {
        let next = self.0.partition_point(|range| range.1 <= start);
        start >= end || self.0.get(next).is_some_and(|range| range.0 <= start && range.1 >= end)
    }

    /// Whether any address from `start` to `end` is among these.
    pub(crate) fn touch(&self, start: u64, end: u64) -> bool {
        let next = self.0.partition_point(|range| range.1 <= start);
        self.0.get(next).is_some_and(|range| range.0 < end)
    }

    /// What of these is between two addresses.
    pub(crate) fn within(&self, start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let first = self.0.partition_point(|range| range.1 <= start);
        let within = self.0[first..].iter().take_while(move |range| range.0 < end);
        within.map(move |range| (range.0.max(start), range.1.min(end)))
    }

    /// The addresses that are among these and among the others.
    pub(crate) fn both(&self, others: &Self) -> Self {
        let (mut both, mut next) = (Self::default(), 0);
        for (start, end) in self.iter() {
            while others.0.get(next).is_some_and(|other| other.1 <= start) {
                next += 1;
            }
            for (low, high) in others.0[next..].iter().take_while(|other| other.0 < end) {
                both.push(start.max(*low), end.min(*high));
            }
        }
        both
    }

    /// The addresses that are among these and not among the others.
    pub(crate) fn without(&self, others: &Self) -> Self {
        let (mut rest, mut next) = (Self::default(), 0);
        for (mut start, end) in self.iter() {
            while others.0.get(next).is_some_and(|other| other.1 <= start) {
                next += 1;
            }
            for (low, high) in others.0[next..].iter().take_while(|other| other.0 < end) {
                rest.push(start, (*low).min(end));
                start = start.max(*high);
            }
            rest.push(start, end);
        }
        rest
    }

    /// The addresses that are among these or among the others.
    pub(crate) fn all(&self, others: &Self) -> Self {
        self.iter().chain(others.iter()).collect()
    }
}

impl FromIterator<(u64, u64)> for Ranges {
    /// Starts and ends, in any order.
    fn from_iter<T: IntoIterator<Item = (u64, u64)>>(all: T) -> Self {
        let mut sorted: Vec<_> = all.into_iter().collect();
        sorted.sort_unstable();
        let mut ranges = Self::default();
        sorted.into_iter().for_each(|(start, end)| ranges.push(start, end));
        ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(all: &[(u64, u64)]) -> Ranges {
        all.iter().copied().collect()
    }

    #[test]
    fn sets_are_put_together_as_sets_of_numbers_are() {
        // Sets of small numbers, each as the bits of one.
        let of = |bits: u32| (0..8).filter(|n| bits >> n & 1 == 1).map(|n| (n, n + 1)).collect();
        for (a, b) in (0..256).flat_map(|a| (0..256).step_by(7).map(move |b| (a, b))) {
            let (first, second): (Ranges, Ranges) = (of(a), of(b));
            assert_eq!(first.both(&second), of(a & b), "{a} {b}");
            assert_eq!(first.without(&second), of(a & !b), "{a} {b}");
            assert_eq!(first.all(&second), of(a | b), "{a} {b}");
            assert_eq!(first.len(), u64::from(a.count_ones()));
            for (start, end) in (0..8).flat_map(|start| (start..9).map(move |end| (start, end))) {
                let within = (1u32 << end) - (1u32 << start);
                let found: Ranges = first.within(start, end).collect();
                assert_eq!(found, of(a & within), "{a} {start} {end}");
                assert_eq!(first.cover(start, end), a & within == within, "{a} {start} {end}");
                assert_eq!(
                    start < end && first.touch(start, end),
                    a & within != 0,
                    "{a} {start} {end}"
                );
            }
        }
    }

    #[test]
    fn they_may_come_in_any_order_and_overlap() {
        assert_eq!(ranges(&[(5, 9), (1, 3), (2, 4), (9, 10), (7, 7)]), ranges(&[(1, 4), (5, 10)]));
    }
}
