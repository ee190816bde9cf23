//! Which multimem addresses a block has used, and what they stand for.

use super::context::{Fault, Step};
use crate::ptx::launch::{AddressSpace, Replicas};

/// So many pieces are remembered.
const MOST: usize = 32;

/// Pieces of multicast objects, each with whether it may be written to. Nothing is taken away during a launch, so they
/// stay true.
#[derive(Default)]
pub(super) struct KnownReplicas(Vec<(bool, Replicas)>);

impl KnownReplicas {
    /// Where the pieces of all devices begin that the `size` bytes at a multimem address are in, and how far behind that
    /// these are.
    ///
    /// # Errors
    /// That the address is not one, or that its memory may not be used so.
    pub(super) fn find(
        &mut self,
        memory: &dyn AddressSpace,
        written: bool,
        address: u64,
        size: u64,
    ) -> Step<(&[u64], u64)> {
        let fits = |(writable, piece): &(bool, Replicas)| {
            let offset = address.wrapping_sub(piece.start);
            (*writable || !written) && offset < piece.size && size <= piece.size - offset
        };
        let found = match self.0.iter().position(fits) {
            Some(found) => found,
            None => {
                let piece = memory.replicas(address, written);
                let piece = (written, piece.ok_or(Fault::Illegal(address))?);
                if !fits(&piece) {
                    return Err(Fault::Illegal(address));
                }
                if self.0.len() == MOST {
                    self.0.clear();
                }
                self.0.push(piece);
                self.0.len() - 1
            }
        };
        let (_, piece) = &self.0[found];
        Ok((&piece.places, address - piece.start))
    }
}
