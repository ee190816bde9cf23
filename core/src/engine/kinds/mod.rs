//! The kinds of state that a process has on its devices, and what gpucr does about each.
//!
//! Each kind has a file, which says who carries it over a dump and a restore, how the agent tells of it, what an image
//! says of it, and in which words a dump is refused because of it. [`KINDS`] lists them; preflight, manifest,
//! `gpucr inspect` and `gpucr ps` go through the list. Not listed is what every process with CUDA has, and no agent
//! counts: contexts, modules, streams, events, graphs, module variables and local memory, which the driver's checkpoint
//! carries.

mod arrays;
mod created;
mod endpoints;
mod external;
mod graphics;
mod heap;
mod ipc;
mod kind;
mod managed;
mod multicast;
mod pinned;
mod pools;
mod private;
mod program;
mod sparse;

use gpucr_wire::Counts;

use crate::image::{self, BlockKind};

pub use kind::{Amount, Carrier, Kind};
pub(crate) use private::bytes as private_bytes;

/// Every kind. What is refused is named in this order.
pub const KINDS: [&dyn Kind; 14] = [
    &heap::Heap,
    &program::Program,
    &pools::Pools,
    &arrays::Arrays,
    &pinned::Pinned,
    &private::Private,
    &managed::Managed,
    &ipc::Ipc,
    &created::Created,
    &multicast::Multicast,
    &endpoints::Endpoints,
    &external::External,
    &graphics::Graphics,
    &sparse::Sparse,
];

/// Whether the checkpoint of the driver carries a kind.
pub fn by_driver(kind: &dyn Kind) -> bool {
    kind.carrier() == Carrier::Driver
}

/// The kind of which an agent tells by the name of this function; none if it is newer than this gpucr.
pub fn of_function(function: &str) -> Option<&'static dyn Kind> {
    let tells = |kind: &&dyn Kind| kind.functions().iter().any(|name| function.starts_with(name));
    KINDS.into_iter().find(tells)
}

/// The kind of the state that is in such a block.
pub fn of_block(kind: BlockKind) -> &'static dyn Kind {
    match kind {
        BlockKind::Heap => &heap::Heap,
        BlockKind::Program => &program::Program,
    }
}

/// What a process has that neither gpucr nor the device state of `carries` carries, each in words.
pub fn refused(counts: &Counts, carries: impl Fn(&dyn Kind) -> bool) -> Vec<String> {
    let is_refused = |kind: &dyn Kind| kind.carrier() != Carrier::Gpucr && !carries(kind);
    let by_name = counts.unsupported.iter();
    let by_name = by_name.filter(|function| of_function(function).is_none_or(is_refused)).cloned();
    let counted = KINDS.into_iter().filter(|kind| is_refused(*kind)).filter_map(|kind| {
        let amount = kind.survey(counts);
        (amount != Amount::default()).then(|| kind.words(amount))
    });
    by_name.chain(counted).collect()
}

/// Bytes that are left to the driver's checkpoint, as far as they are counted.
pub fn driver_bytes(counts: &Counts) -> u64 {
    let kinds = KINDS.into_iter().filter(|kind| by_driver(*kind));
    kinds.map(|kind| kind.survey(counts).bytes).fold(0, u64::saturating_add)
}

/// What the manifest says of the state that a process has besides its blocks.
pub(crate) fn describe(counts: &Counts) -> image::Counts {
    let mut said = image::Counts { launches: counts.launches, ..image::Counts::default() };
    KINDS.into_iter().for_each(|kind| kind.describe(counts, &mut said));
    said
}

/// What the manifest says of state other than blocks, by the names of `gpucr inspect --json`.
pub fn inspect(said: &image::Counts) -> Vec<(&'static str, u64)> {
    let kinds = KINDS.into_iter().filter_map(|kind| kind.inspect(said));
    kinds.chain([("launches", said.launches)]).collect()
}

/// What the manifest calls the blocks of this kind; `None` of another process's, which are in the image once.
pub(crate) fn described_block(kind: gpucr_wire::BlockKind) -> Option<BlockKind> {
    match kind {
        gpucr_wire::BlockKind::Heap {} => Some(BlockKind::Heap),
        gpucr_wire::BlockKind::Program {} => Some(BlockKind::Program),
        gpucr_wire::BlockKind::Opened { .. } => None,
    }
}

#[cfg(test)]
mod tests;
