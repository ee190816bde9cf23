//! Versions of CRIU.

/// The oldest CRIU that is used: older ones fail on recent kernels.
pub const MIN_VERSION: Version = Version { major: 4, minor: 1, sublevel: 0 };

/// The oldest CRIU that does without the option `SO_PASSCRED` of TCP sockets.
pub(super) const NO_PASSCRED: Version = Version { major: 4, minor: 2, sublevel: 0 };

/// A version of CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: i32,
    /// Second number.
    pub minor: i32,
    /// Third number.
    pub sublevel: i32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.sublevel == 0 { Ok(()) } else { write!(f, ".{}", self.sublevel) }
    }
}
