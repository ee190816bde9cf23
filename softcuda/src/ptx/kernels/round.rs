//! The ways to round.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Round {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Round {
    /// `rn`, `rz`, `rm`, `rp`, and the integer roundings `rni` to `rpi`.
    pub(crate) fn parse(name: &str) -> Option<Round> {
        Some(match name {
            "rn" | "rni" => Round::Nearest,
            "rz" | "rzi" => Round::Zero,
            "rm" | "rmi" => Round::Down,
            "rp" | "rpi" => Round::Up,
            _ => return None,
        })
    }
}
