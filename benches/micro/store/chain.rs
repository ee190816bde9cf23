//! Reading the last of a chain of incremental images compared with a full image of the same memory.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use gpucr_benches::median;
use gpucr_core::image::{Destination, ImageReader, ImageWriter};
use gpucr_core::store::{Compression, MAX_CHUNK};
use rayon::prelude::*;

use crate::bound::Bound;
use crate::memory::manifest;

/// Images of the chain that build on others.
const LINKS: usize = 8;

/// Writes `plain` as a full image, and as the last of a chain in which each image changes a hundredth of
/// the chunks; reads both, by turns.
pub(crate) fn bound(dir: &Path, plain: &mut [u8], runs: usize) -> Result<Bound> {
    let dir = tempfile::tempdir_in(dir)?;
    let place = |name: &str| dir.path().join(name);
    write(&Destination::Alone(place("0")), plain)?;
    for link in 1..=LINKS {
        let chunks = plain.len().div_ceil(MAX_CHUNK);
        for chunk in plain.chunks_mut(MAX_CHUNK).skip(link * 7).step_by(101).take(chunks / 100 + 1)
        {
            chunk[chunk.len() / 2] ^= 0x55;
        }
        let parent = place(&(link - 1).to_string());
        write(&Destination::Incremental { path: place(&link.to_string()), parent }, plain)?;
    }
    write(&Destination::Alone(place("full")), plain)?;
    let (mut chain, mut full) = (Vec::new(), Vec::new());
    for _ in 0..runs.max(3) {
        full.push(read(&place("full"))?);
        chain.push(read(&place(&LINKS.to_string()))?);
    }
    let what = format!("read the last of {LINKS} incremental images, by a full one");
    Ok(Bound::at_least(what, 0.9, median(&full) / median(&chain)))
}

fn write(to: &Destination, plain: &[u8]) -> Result<()> {
    let writer = ImageWriter::begin(to, Compression::Level(1))?;
    let put = |chunk| writer.chunks().put(chunk);
    let chunks = plain.par_chunks(MAX_CHUNK).map(put).collect::<Result<Vec<_>, _>>()?;
    let manifest = manifest(plain.len() as u64, chunks);
    writer.commit(&manifest)?;
    Ok(())
}

/// Opens an image and reads all of its memory. Gives the seconds.
fn read(image: &Path) -> Result<f64> {
    let start = Instant::now();
    let damage = ImageReader::open(image)?.verify();
    let seconds = start.elapsed().as_secs_f64();
    ensure!(damage.is_empty(), "{} chunks are damaged", damage.len());
    Ok(seconds)
}
