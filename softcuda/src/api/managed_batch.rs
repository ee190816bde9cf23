//! Batches of prefetches and discards of managed memory. A batch is checked as a whole before anything of it is done.

use super::arguments::In;
use super::driver_api;
use super::managed;
use crate::managed_memory::{self, Location};
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// `CU_STREAM_LEGACY`.
const LEGACY: u64 = 1;

/// Addresses and sizes.
struct Ranges {
    addresses: In<u64>,
    sizes: In<usize>,
    count: usize,
}

/// Locations, and from which range on each of them holds.
struct Places {
    locations: In<Location>,
    firsts: In<usize>,
    count: usize,
}

impl Ranges {
    /// All ranges, each of which must be in managed memory.
    fn read(&self) -> Outcome<Vec<(u64, usize)>> {
        if self.count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let one = |index| {
            let (address, size) = (self.addresses.at(index)?, self.sizes.at(index)?);
            let is_managed = managed_memory::has(address, size as u64);
            if is_managed { Ok((address, size)) } else { Err(Code::INVALID_VALUE) }
        };
        (0..self.count).map(one).collect()
    }
}

impl Places {
    /// A location for each range.
    fn read(&self, ranges: usize) -> Outcome<Vec<Location>> {
        if self.count == 0 || self.count > ranges || self.firsts.at(0)? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut all = Vec::new();
        for index in 0..self.count {
            let location = self.locations.at(index)?;
            managed::check(location)?;
            let is_last = index + 1 == self.count;
            let end = if is_last { ranges } else { self.firsts.at(index + 1)? };
            if end <= all.len() || end > ranges {
                return Err(Code::INVALID_VALUE);
            }
            all.resize(end, location);
        }
        Ok(all)
    }
}

fn check(mode: DefaultStream, flags: u64, stream: u64) -> Outcome {
    let is_legacy = stream == LEGACY || stream == 0 && mode == DefaultStream::Legacy;
    if flags != 0 || is_legacy {
        return Err(Code::INVALID_VALUE);
    }
    stream_and_context(stream, mode).map(|_| ())
}

fn prefetch(
    mode: DefaultStream,
    ranges: &Ranges,
    places: &Places,
    flags: u64,
    stream: u64,
) -> Outcome {
    check(mode, flags, stream)?;
    let ranges = ranges.read()?;
    let locations = places.read(ranges.len())?;
    for ((address, size), location) in ranges.into_iter().zip(locations) {
        managed::prefetch(mode, address, size, location, 0, stream)?;
    }
    Ok(())
}

driver_api! {
    stream(mode) fn cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync_ptsz(
        addresses: In<u64>, sizes: In<usize>, count: usize, locations: In<Location>,
        firsts: In<usize>, places: usize, flags: u64, stream: u64,
    ) {
        let ranges = Ranges { addresses, sizes, count };
        prefetch(mode, &ranges, &Places { locations, firsts, count: places }, flags, stream)
    }

    stream(mode) fn cuMemDiscardBatchAsync, cuMemDiscardBatchAsync_ptsz(
        addresses: In<u64>, sizes: In<usize>, count: usize, flags: u64, stream: u64,
    ) {
        check(mode, flags, stream)?;
        // The contents may be anything afterwards, also what they were.
        Ranges { addresses, sizes, count }.read().map(|_| ())
    }

    stream(mode) fn cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync_ptsz(
        addresses: In<u64>, sizes: In<usize>, count: usize, locations: In<Location>,
        firsts: In<usize>, places: usize, flags: u64, stream: u64,
    ) {
        let ranges = Ranges { addresses, sizes, count };
        prefetch(mode, &ranges, &Places { locations, firsts, count: places }, flags, stream)
    }
}
