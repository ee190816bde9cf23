//! What the parts of an image are called, and how many images build on each other.

/// Name of the manifest within an image.
pub(crate) const MANIFEST: &str = "manifest";
/// Name of the folder for CRIU's files within an image that is being written.
pub(super) const STAGING: &str = "staging";
/// In images of version 1 among CRIU's files, if memory may be shared: what later ones have in a section.
pub const SHARING_FILE: &str = "gpucr-sharing.img";
/// Most images in a chain of incremental ones, the first and self-contained one included.
pub const MAX_CHAIN: usize = 64;
