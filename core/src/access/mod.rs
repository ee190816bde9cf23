//! What launches read and write.

pub mod directions;
