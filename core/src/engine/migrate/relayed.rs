//! Which standard streams of a program are relayed, as both sides say it.

use crate::engine::error::Error;
use crate::engine::restore::stdio::{self, Found, Named};
use crate::image::Manifest;

/// Which standard streams of a program are relayed: its input, its output, its standard error, and what it writes to its
/// terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Relayed(pub [bool; 4]);

/// As a message says it: that anything is relayed, were it only how the program ends.
const WANTED: u32 = 16;

impl Relayed {
    /// Those that were found.
    pub(super) fn of(found: Found) -> Self {
        let [stdin, stdout, stderr] = found.pipes.map(|pipe| pipe.is_some());
        Self([stdin, stdout, stderr, found.terminal.is_some()])
    }

    /// The standard streams of a program that comes, which lead to a process of their own: those that are `relayed`,
    /// which have to be those that were offered; and if none are, all of a program that has a terminal, which it cannot do
    /// without, but for those that have a place which somebody has `named`.
    ///
    /// # Errors
    /// Those that are relayed are not those that were offered.
    pub(super) fn of_coming(
        relayed: Option<Self>,
        manifest: &Manifest,
        named: Named,
    ) -> Result<Option<Self>, Error> {
        let found = stdio::found(manifest.processes.iter().map(|process| &process.stdio), named);
        let found = found.map(|found| (Self::of(found), found.terminal.is_some()));
        match (relayed, found) {
            (None, Ok((_, false))) => Ok(None),
            (None, Ok((found, true))) => Ok(Some(found)),
            (Some(relayed), Ok((found, _))) if found == relayed => Ok(Some(found)),
            (Some(_), Ok(_)) => {
                Err(Error::NotRelayed { why: "it has changed them since it was offered".into() })
            }
            (Some(_), Err(why)) => Err(Error::NotRelayed { why }),
            // What it has is /dev/null then, and CRIU says what it cannot do.
            (None, Err(_)) => Ok(None),
        }
    }

    /// As a message says it.
    pub(super) fn to_wire(relayed: Option<Self>) -> u32 {
        let Some(Self(streams)) = relayed else { return 0 };
        let bits = (0..4).filter(|stream| streams[*stream]).map(|stream| 1 << stream);
        WANTED | bits.sum::<u32>()
    }

    /// What a message says; the outer `None` if that is nothing.
    pub(super) fn from_wire(bits: u32) -> Option<Option<Self>> {
        match bits {
            0 => Some(None),
            bits if bits & WANTED != 0 && bits < 2 * WANTED => {
                Some(Some(Self([0, 1, 2, 3].map(|stream| bits & (1 << stream) != 0))))
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
        let all = (0..16).map(|bits| Relayed([0, 1, 2, 3].map(|bit| bits & (1 << bit) != 0)));
        for relayed in all.map(Some).chain([None]) {
            assert_eq!(Relayed::from_wire(Relayed::to_wire(relayed)), Some(relayed));
        }
        for bits in [1, 15, 32, 33, u32::MAX] {
            assert_eq!(Relayed::from_wire(bits), None, "{bits}");
        }
    }
}
