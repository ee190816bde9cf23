//! Standard streams of a program that has gone, over the link.
//!
//! The source holds the ends of the pipes that the program had ([`ends`]), so that whoever is at the other ends sees
//! nothing of the migration. When the program runs at the destination, both sides pass on what goes through them
//! ([`flow`]): the source by [`Relaying`], the destination by a process of its own, a [`Server`], which stays with the
//! program if the link is lost, and keeps then what nobody reads ([`kept`]).

mod end;
mod ends;
mod flow;
mod kept;
mod serve;
mod source;
#[cfg(test)]
mod tests;

pub use end::ProgramEnd;
pub(super) use ends::Ends;
pub use serve::Server;
pub use source::Relaying;
