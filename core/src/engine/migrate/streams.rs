//! Connections besides the link, over which chunks go: TCP with TLS 1.3.
//!
//! The two sides tell each other over the link what makes them known to each other on these: the destination a key that
//! it has made for this one migration, which is all that the source accepts there, and a token that the source has to
//! say. Whoever else comes to the destination's port is sent away, and the migration goes on. All messages, and what is
//! decided, stay on the link; a stream that is lost is as a link that is lost.

mod door;
mod keys;
mod secure;
mod source;
#[cfg(test)]
mod tests;
mod way;

pub(super) use door::Door;
pub(super) use source::Streams;
pub use source::Wanted;
pub use way::MOST;
pub(super) use way::Way;
