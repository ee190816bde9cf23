//! Stream-ordered pools that processes share. Their memory is the heap's, and what of it one process opens is a block of
//! the other one's, as with legacy IPC ([`super::opened`]).

use std::collections::BTreeSet;
use std::os::fd::BorrowedFd;

use gpucr_wire::peers::Piece;

use super::opened::{Offer, Origin};
use super::pools::Sharing;
use super::vmm::Vmm;
use super::{Allocation, Memory};
use crate::abi::types::{Code, ERROR_INVALID_VALUE};

impl Memory {
    /// The program may share this pool, which has just been made.
    pub(crate) fn set_shareable(&mut self, pool: u64) {
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.sharing = Sharing::Shareable;
        }
    }

    /// The pool that the driver names so, which has just been made, stands for another process's: of that one `origin`
    /// tells.
    pub(crate) fn add_imported_pool(&mut self, handle: u64, device: i32, origin: Origin) {
        let pool = self.add_pool(handle, device, 0, 0);
        if let Some(pool) = self.pools.get_mut(pool) {
            pool.sharing = Sharing::Imported(origin, Vec::new());
        }
    }

    /// Whether the pool that the driver names so is another process's.
    pub(crate) fn is_imported_pool(&self, handle: u64) -> bool {
        self.imported_pool(handle).is_some()
    }

    /// Number and device of a pool of another process, and which it is there. `None`: it is none.
    pub(crate) fn imported_pool(&self, handle: u64) -> Option<(u64, i32, Origin)> {
        let (id, device) = self.pool(handle)?;
        match self.pools.get(id)?.sharing {
            Sharing::Imported(origin, _) => Some((id, device, origin)),
            _ => None,
        }
    }

    /// The device of a pool that others may be given. `None`: there is no such pool.
    pub(crate) fn shareable_pool(&self, id: u64) -> Option<i32> {
        let pool = self.pools.get(id)?;
        (pool.sharing == Sharing::Shareable && pool.handle != 0).then_some(pool.device)
    }

    /// Pool and name of the allocation of a pool that begins at `address`, if others may open it. `None`: there is none of
    /// a pool.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`: its pool cannot be shared, or is another process's.
    pub(crate) fn offered_of_pool(&self, address: u64) -> Option<Result<(u64, u64), Code>> {
        let found = self.allocations.get(&address).filter(|found| found.pool != 0)?;
        let sharing = self.pools.get(found.pool).map(|pool| &pool.sharing);
        Some(if sharing == Some(&Sharing::Shareable) {
            Ok((found.pool, found.buffer))
        } else {
            Err(ERROR_INVALID_VALUE)
        })
    }

    /// The allocation of this name of a pool, for another process that has the pool. `uuid` gives the name of a device.
    pub(crate) fn offer_of_pool(
        &self,
        vmm: &dyn Vmm,
        pool: u64,
        buffer: u64,
        address: u64,
        uuid: impl Fn(i32) -> [u8; 16],
    ) -> Offer<Piece> {
        match self.offered_of_pool(address) {
            Some(Ok((of, name))) if (of, name) == (pool, buffer) => {
                self.piece_of(vmm, &self.allocations[&address], uuid)
            }
            _ => Offer::Gone,
        }
    }

    /// Opens an allocation of a pool of another process, or counts that it was opened once more. Gives its address.
    ///
    /// # Errors
    /// The driver's code; then nothing has changed.
    pub(crate) fn open_of_pool(
        &mut self,
        vmm: &dyn Vmm,
        pool: u64,
        piece: &Piece,
        fd: BorrowedFd<'_>,
        device: i32,
    ) -> Result<u64, Code> {
        let sharing = self.pools.get(pool).map(|pool| pool.sharing.clone());
        let Some(Sharing::Imported(origin, others)) = sharing else {
            return Err(ERROR_INVALID_VALUE);
        };
        let origin = Origin { block: piece.block, ..origin };
        let devices: Vec<i32> = std::iter::once(device).chain(others).collect();
        let address = self.open_at(vmm, origin, piece, fd, &devices, 0)?;
        if let Some(allocation) = self.allocations.get_mut(&address) {
            allocation.pool = pool;
        }
        Ok(address)
    }

    /// Opens what there is and will be of a pool of another process to one more device.
    ///
    /// # Errors
    /// The driver's code; what comes later is open to the device all the same.
    pub(crate) fn open_imported_pool(
        &mut self,
        vmm: &dyn Vmm,
        id: u64,
        device: i32,
    ) -> Result<(), Code> {
        let Some(pool) = self.pools.get_mut(id) else { return Ok(()) };
        let Sharing::Imported(_, devices) = &mut pool.sharing else { return Ok(()) };
        if device == pool.device || devices.contains(&device) {
            return Ok(());
        }
        devices.push(device);
        let of_pool = |allocation: &&Allocation| allocation.pool == id;
        let blocks = self.allocations.values().filter(of_pool).map(Allocation::block);
        let blocks: BTreeSet<u64> = blocks.collect();
        blocks.into_iter().try_for_each(|block| self.open_to(vmm, block, &[device]))
    }
}
