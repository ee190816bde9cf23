//! A long list out of many lists.

use rayon::prelude::*;

/// Elements that one thread makes at least.
const BATCH: usize = 4 << 10;

/// What `of` makes of the elements of these lists, one list after the other. All cores work: with millions of elements
/// the kernel spends most of the time on the pages of the new list, which it gives when they are first written.
pub(crate) fn concat<T: Sync, U: Send>(lists: &[&[T]], of: impl Fn(&T) -> U + Sync) -> Vec<U> {
    let ends: Vec<usize> = lists
        .iter()
        .scan(0, |end, list| {
            *end += list.len();
            Some(*end)
        })
        .collect();
    let element = |number: usize| {
        let list = ends.partition_point(|end| *end <= number);
        let begin = ends[list] - lists[list].len();
        of(&lists[list][number - begin])
    };
    let all = 0..ends.last().copied().unwrap_or(0);
    all.into_par_iter().with_min_len(BATCH).map(element).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_follow_one_another() {
        let numbers: Vec<usize> = (0..3 * BATCH).collect();
        let (first, rest) = numbers.split_at(5);
        let (long, last) = rest.split_at(2 * BATCH);
        let expected: Vec<String> = numbers.iter().map(usize::to_string).collect();
        assert_eq!(concat(&[&[], first, &[], &[], long, last, &[]], usize::to_string), expected);
        assert_eq!(concat(&[], usize::to_string), [""; 0]);
    }
}
