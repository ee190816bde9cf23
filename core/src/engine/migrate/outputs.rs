//! Outputs of a program that go to files at the destination, as a message says it.

use crate::engine::restore::stdio::Named;

/// The two that there are.
const OUTPUTS: [usize; 2] = [1, 2];

/// As a message says which have a place there.
pub(super) fn to_wire(named: Named) -> u32 {
    OUTPUTS.into_iter().filter(|number| named[*number]).map(|number| 1 << number).sum()
}

/// What a message says; `None` if it says more than there is.
pub(super) fn from_wire(bits: u32) -> Option<Named> {
    let named = [0, 1, 2].map(|number| OUTPUTS.contains(&number) && bits & (1 << number) != 0);
    (to_wire(named) == bits).then_some(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood_and_nothing_else() {
        for bits in [0, 2, 4, 6] {
            let named = from_wire(bits).unwrap();
            assert_eq!((named[0], to_wire(named)), (false, bits));
        }
        for bits in [1, 3, 8, u32::MAX] {
            assert_eq!(from_wire(bits), None, "{bits}");
        }
    }
}
