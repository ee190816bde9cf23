//! How wide a warp is.

/// Lanes of a warp.
pub(crate) const WIDTH: usize = 32;
