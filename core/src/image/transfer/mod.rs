//! Images as one file to ship: an uncompressed tar of a self-contained image.
//!
//! The tar has these members and nothing else, in this order: `manifest`, `signatures` if the image has any,
//! `index`, and the packs in the order of the index, as `packs/NAME`. All are regular files. So `tar xf` makes an image
//! of it too, and [`import`] can check each member's name and length before it takes a byte.
//!
//! [`export`] knows all lengths before it begins, so it writes a stream; chunks are passed on as
//! they are stored, wherever the image has them. [`import`] checks each chunk on its way into a
//! new image, which appears only if all of it is right. The manifest stays the same byte by byte,
//! and so does the identity of the image.

mod export;
mod import;
mod parts;

#[cfg(test)]
mod tests;

pub use export::{Exported, export, export_to_file, remove_unfinished};
pub use import::{Imported, import};
pub use parts::TarError;
