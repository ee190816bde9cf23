//! When the passes of a pre-copy end: of device memory and of host memory alike.

/// A pass that would copy less than this share of the memory is left to the stopped window.
const WORTH_A_PASS: u64 = 200;

/// Passes over memory that is written meanwhile.
pub(super) struct Passes {
    /// How many there may still be.
    most: usize,
    /// Bytes that the last one had to copy.
    last: u64,
}

impl Passes {
    /// At most so many.
    pub(super) fn new(most: usize) -> Self {
        Self { most, last: u64::MAX }
    }

    /// Whether a pass that has `left` bytes of `all` to copy is to be made: that is much less than the last one had, and
    /// not so little that it is better copied when the programs are stopped. How much that is, `little` says where it is
    /// known how fast the copy is: then a pass is made as long as anything is gained by it.
    pub(super) fn is_worth(&mut self, left: u64, all: u64, little: Option<u64>) -> bool {
        let (little, much) = match little {
            None => (all / WORTH_A_PASS, self.last / 2),
            Some(little) => (little, self.last / 4 * 3),
        };
        let is_worth = self.most > 0 && left > little && left <= much;
        (self.most, self.last) = (self.most.saturating_sub(1), left);
        is_worth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_end_when_they_get_on_slowly_or_little_is_left() {
        let made_until = |most, lefts: &[u64], little| {
            let mut passes = Passes::new(most);
            lefts.iter().take_while(|left| passes.is_worth(**left, 1000, little)).count()
        };
        let made = |most, lefts: &[u64]| made_until(most, lefts, None);
        assert_eq!(made(5, &[1000, 500, 250, 125, 60, 30]), 5);
        assert_eq!(made(5, &[1000, 501, 1]), 1);
        assert_eq!(made(5, &[1000, 6, 5]), 1 + 1);
        assert_eq!(made(5, &[5]), 0);
        assert_eq!(made(0, &[1000]), 0);
        assert_eq!(made_until(5, &[1000, 700, 500, 100], Some(100)), 3);
        assert_eq!(made_until(5, &[1000, 800], Some(100)), 1);
        assert_eq!(made_until(5, &[90], Some(100)), 0);
    }
}
