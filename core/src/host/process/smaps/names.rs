//! Which bits of a mapping's flags have which names, found out by comparing.
//!
//! The kernel prints each bit that it has a name for (`show_smap_vma_flags` of fs/proc/task_mmu.c), but neither numbers
//! nor names are promised to stay. So they are learned from mappings of which both the bits and the names are known: a
//! name belongs to the bit that is set where the name is printed, and nowhere else. Bits that always come together
//! keep together. Where a mapping has a bit that nothing was learned of, its names are not known.

use std::collections::{BTreeMap, BTreeSet};

/// The flags of a mapping, as bits and as names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sample<'a> {
    pub(super) bits: u64,
    pub(super) names: BTreeSet<&'a str>,
}

/// Bits and their names.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    /// Bits that come together, and their names, each with a space behind it.
    groups: Vec<(u64, String)>,
}

impl Names {
    pub(super) fn learn(samples: &[Sample<'_>]) -> Self {
        let all: BTreeSet<&str> = samples.iter().flat_map(|it| it.names.iter().copied()).collect();
        let mut groups: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
        for name in all {
            let may_be = samples.iter().fold(u64::MAX, |bits, sample| {
                let has = sample.names.contains(name);
                bits & if has { sample.bits } else { !sample.bits }
            });
            groups.entry(may_be).or_default().push(name);
        }
        // Else one of the bits has no name, or a name is that of several bits.
        groups.retain(|bits, names| bits.count_ones() as usize == names.len());
        let said = |names: Vec<&str>| names.iter().map(|name| format!("{name} ")).collect();
        Self { groups: groups.into_iter().map(|(bits, names)| (bits, said(names))).collect() }
    }

    /// The names of these flags, each with a space behind it. `None` if they are not all known.
    pub(super) fn of(&self, flags: u64) -> Option<String> {
        let (mut names, mut rest) = (String::new(), flags);
        for (bits, group) in &self.groups {
            if flags & bits == *bits {
                names.push_str(group);
                rest &= !bits;
            }
        }
        (rest == 0).then_some(names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned(samples: &[(u64, &'static str)]) -> Names {
        let sample = |(bits, names): &(u64, &'static str)| Sample {
            bits: *bits,
            names: names.split_whitespace().collect(),
        };
        Names::learn(&samples.iter().map(sample).collect::<Vec<_>>())
    }

    #[test]
    fn names_belong_to_bits_that_are_set_where_they_are_printed() {
        let names = learned(&[(0b0011, "rd wr"), (0b0001, "rd"), (0b1101, "rd io pf")]);
        assert_eq!(names.of(0b0010).unwrap(), "wr ");
        assert_eq!(names.of(0b1100).unwrap(), "io pf ");
        assert_eq!(names.of(0).unwrap(), "");
        // One of two that were only seen together; and one that was never seen.
        assert_eq!(names.of(0b0101), None);
        assert_eq!(names.of(0b1_0001), None);
    }

    #[test]
    fn bits_without_a_name_of_their_own_are_not_known() {
        // A bit that is never printed, and two that are printed alike.
        let names = learned(&[(0b011, "rd"), (0b100, "??"), (0b1000, "??"), (0b1_0000, "wr")]);
        assert_eq!(names.of(0b001), None);
        assert_eq!(names.of(0b011), None);
        assert_eq!(names.of(0b100), None);
        assert_eq!(names.of(0b1_0000).unwrap(), "wr ");
    }

    #[test]
    fn what_contradicts_itself_is_not_learned() {
        let names = learned(&[(0b01, "rd"), (0b10, "wr"), (0b11, "rd")]);
        assert_eq!(names.of(0b10), None);
        assert_eq!(names.of(0b01).unwrap(), "rd ");
    }
}
