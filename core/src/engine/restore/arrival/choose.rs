//! Which way memory arrives: the one that was asked for, or from inside where there is no room for that.

use crate::engine::error::Error;
use crate::engine::multicast;
use crate::engine::sections;

use super::super::loading::Loading;
use super::super::options::Options;
use super::eager::EagerArrival;
use super::inside::InsideArrival;
use super::on_demand::OnDemandArrival;
use super::shared::SharedArrival;
use super::{Arrival, Prepared};

/// The way that was asked for.
pub(in crate::engine::restore) fn choose(options: &Options) -> Box<dyn Arrival> {
    if options.on_demand {
        Box::<OnDemandArrival>::default()
    } else if let Some(holder) = &options.share {
        Box::new(SharedArrival::new(holder.clone()))
    } else {
        // Who is called before the processes run finds all memory loaded.
        Box::new(EagerArrival::new(options.before_resume.is_some()))
    }
}

/// Prepares the memory. Where there is no room for that the programs load it from inside.
///
/// # Errors
/// The errors of [`Arrival::prepare`].
pub(in crate::engine::restore) fn prepare(
    mut arrival: Box<dyn Arrival>,
    loading: &Loading<'_, '_>,
) -> Result<Box<dyn Arrival>, Error> {
    // Each of these blocks has to come to several processes at once.
    let manifest = loading.image.manifest();
    let is_shared =
        !sections::read_opened(manifest)?.is_empty() || !multicast::read(manifest)?.is_empty();
    if arrival.brings_blocks_alone() && is_shared {
        tracing::warn!("processes share device memory: all of it is loaded before they run");
        arrival = Box::<EagerArrival>::default();
    }
    Ok(match arrival.prepare(loading)? {
        Prepared::Ready => arrival,
        Prepared::NoRoom => Box::new(InsideArrival::in_place_of(arrival)),
    })
}
