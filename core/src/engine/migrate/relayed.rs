//! Which standard streams of a program are relayed, as both sides say it.

/// Which standard streams of a program are relayed: its input, its output, its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Relayed(pub [bool; 3]);

/// As a message says it: that anything is relayed, were it only how the program ends.
const WANTED: u32 = 8;

impl Relayed {
    /// Those that are pipes.
    pub(super) fn of(pipes: [Option<u64>; 3]) -> Self {
        Self(pipes.map(|pipe| pipe.is_some()))
    }

    /// As a message says it.
    pub(super) fn to_wire(relayed: Option<Self>) -> u32 {
        let Some(Self(streams)) = relayed else { return 0 };
        let bits = (0..3).filter(|stream| streams[*stream]).map(|stream| 1 << stream);
        WANTED | bits.sum::<u32>()
    }

    /// What a message says; the outer `None` if that is nothing.
    pub(super) fn from_wire(bits: u32) -> Option<Option<Self>> {
        match bits {
            0 => Some(None),
            bits if bits & WANTED != 0 && bits < 2 * WANTED => {
                Some(Some(Self([0, 1, 2].map(|stream| bits & (1 << stream) != 0))))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood_and_nothing_else() {
        let all = (0..8).map(|bits| Relayed([bits & 1 != 0, bits & 2 != 0, bits & 4 != 0]));
        for relayed in all.map(Some).chain([None]) {
            assert_eq!(Relayed::from_wire(Relayed::to_wire(relayed)), Some(relayed));
        }
        for bits in [1, 7, 16, 17, u32::MAX] {
            assert_eq!(Relayed::from_wire(bits), None, "{bits}");
        }
    }
}
