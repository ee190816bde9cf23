//! How fast device memory comes into an image, and what holds it up: the copy alone, with the hash
//! of each chunk, and with the image's store behind it; and how fast it comes back. Next to it the same
//! without a device.
//!
//! On a machine with a GPU it runs there, else on the software driver, whose device memory is host
//! memory. No program runs meanwhile.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use clap::Parser;
use gpucr_benches::data::Sequence;
use gpucr_benches::{binaries, build, built, machine, median, print_table, size};
use gpucr_core::cuda::lanes::chunks_in;
use gpucr_core::cuda::{Driver, Filled, Hashed, Hasher, HostDriver, Lane, SharedBlock, Span};
use gpucr_core::image::DriverKind;
use gpucr_core::library;
use gpucr_core::stop::Stop;
use gpucr_core::store::{ChunkId, ChunkReader, ChunkWriter, Compression, MAX_CHUNK, StoreError};
use rayon::prelude::*;
use tempfile::TempDir;

#[derive(Parser)]
struct Args {
    /// Bytes of device memory
    #[arg(long, default_value = "1G", value_parser = size)]
    size: u64,
    /// Runs, of which the median counts
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Where the store is written
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
    /// The software driver also where there is a GPU
    #[arg(long)]
    soft: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Device memory of 512 MiB.
const BLOCK: u64 = 512 << 20;

/// The rate of `work` on so many bytes, in GB/s: the median of some runs. `work` gives the seconds
/// that count.
fn rate(args: &Args, bytes: u64, mut work: impl FnMut() -> Result<f64>) -> Result<f64> {
    let seconds = (0..args.runs).map(|_| work()).collect::<Result<Vec<_>>>()?;
    Ok(bytes as f64 / median(&seconds) / 1e9)
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// Makes a store, lets `work` fill it, and removes it. Only the filling counts.
fn into_store(args: &Args, work: impl FnOnce(&ChunkWriter) -> Result<()>) -> Result<f64> {
    Ok(filled_store(args, work)?.0)
}

/// Makes a store and lets `work` fill it. Gives the seconds that the filling took.
fn filled_store(
    args: &Args,
    work: impl FnOnce(&ChunkWriter) -> Result<()>,
) -> Result<(f64, TempDir)> {
    let dir = tempfile::tempdir_in(&args.dir)?;
    let store = ChunkWriter::create(dir.path(), Compression::None)?;
    let seconds = timed(|| work(&store))?;
    store.finish()?;
    Ok((seconds, dir))
}

fn fill(bytes: &mut [u8], seed: u64) {
    let mut sequence = Sequence::new(seed + 1);
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&sequence.next_number().to_le_bytes());
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (path, kind) = match library::nvidia().filter(|_| !args.soft) {
        Some(path) => (path, DriverKind::Nvidia),
        None => {
            build(&["-p", "softcuda"])?;
            (built(&binaries()?, library::SOFT_DRIVER)?, DriverKind::Soft)
        }
    };
    let driver = Arc::new(Driver::open(&Arc::new(HostDriver::vouched(&path, kind)?))?);
    let device = driver.devices()?.into_iter().next().context("the driver has a device")?;
    let cores = std::thread::available_parallelism()?.get();
    println!("{}", machine());
    println!(
        "{} MiB on {}, {cores} workers, store in {}; medians of {} runs\n",
        args.size >> 20,
        device.name,
        args.dir.display(),
        args.runs
    );

    let mut lane = Lane::prepare(&driver, &device, cores).map_err(anyhow::Error::from)?;
    let sizes = (0..args.size).step_by(BLOCK as usize).map(|at| BLOCK.min(args.size - at));
    let blocks = sizes
        .map(|len| SharedBlock::allocate(lane.context(), len.next_multiple_of(MAX_CHUNK as u64)))
        .collect::<Result<Vec<_>, _>>()?;
    let bytes: u64 = blocks.iter().map(SharedBlock::len).sum();
    let all: Vec<Span> = blocks
        .iter()
        .enumerate()
        .flat_map(|(b, memory)| (0..chunks_in(memory.len())).map(move |c| Span::of(memory, b, c)))
        .collect();
    let stop = Stop::new(Arc::new(AtomicBool::new(false)));
    let give = |span: Span, to: &mut [u8]| -> Result<Filled, StoreError> {
        fill(to, (span.block * 1000 + span.chunk) as u64);
        Ok(Filled::Bytes)
    };
    lane.copy_in(&all, &stop, &give).map_err(|e| anyhow::anyhow!("{e:?}"))?;
    let mut hasher = Hasher::prepare(lane.context())?;
    let places: Vec<(u64, usize)> = all.iter().map(|span| (span.address, span.len)).collect();

    let mut copy = |take: &(dyn Fn(&[u8]) -> Result<(), StoreError> + Sync)| -> Result<()> {
        let take = |_: Span, bytes: &[u8], _| take(bytes);
        lane.copy_out(&all, &stop, &take).map_err(|e| anyhow::anyhow!("{e:?}"))
    };
    let alone = rate(&args, bytes, || timed(|| copy(&|_| Ok(()))))?;
    let hashed = rate(&args, bytes, || {
        timed(|| {
            copy(&|bytes| {
                std::hint::black_box(ChunkId::of(bytes));
                Ok(())
            })
        })
    })?;
    let stored = rate(&args, bytes, || {
        into_store(&args, |store| copy(&|bytes| store.put(bytes).map(drop)))
    })?;
    let on_device = rate(&args, bytes, || {
        timed(|| {
            let hashes = hasher.hash(&places)?;
            ensure!(hashes.len() == all.len(), "a hash for each chunk");
            Ok(())
        })
    })?;

    // From here on what is copied out is hashed on the device.
    lane.prepare_bounce(bytes)?;
    let bounced = |lane: &mut Lane, store: Option<&ChunkWriter>| -> Result<()> {
        let take = |_: Span, bytes: &[u8], id: Option<ChunkId>| {
            let id = id.expect("the device hashes");
            store.map_or(Ok(()), |store| store.put_hashed(id, bytes).map(drop))
        };
        lane.copy_out(&all, &stop, &take).map_err(|e| anyhow::anyhow!("{e:?}"))
    };
    let bounced_alone = rate(&args, bytes, || timed(|| bounced(&mut lane, None)))?;
    let bounced_stored =
        rate(&args, bytes, || into_store(&args, |store| bounced(&mut lane, Some(store))))?;

    let (_, dir) = filled_store(&args, |store| bounced(&mut lane, Some(store)))?;
    let store = ChunkReader::open(dir.path())?;
    let looked_at = hasher.hash(&places)?;
    let ids: Vec<ChunkId> = looked_at.iter().map(|hashed| hashed.id).collect();
    let by_place: HashMap<u64, ChunkId> =
        places.iter().map(|(address, _)| *address).zip(ids.iter().copied()).collect();
    let key = hasher.key().clone();
    let looked_at: HashMap<u64, Hashed> =
        places.iter().map(|(address, _)| *address).zip(looked_at).collect();
    let ahead_stored = rate(&args, bytes, || {
        into_store(&args, |store| {
            let hashed = |span: &Span| looked_at[&span.address];
            let take = |_: Span, bytes: &[u8], id| store.put_hashed(id, bytes).map(drop);
            lane.copy_ahead(&all, &key, &hashed, &AtomicBool::new(false), &stop, &take)
                .map_err(|e| anyhow::anyhow!("{e:?}"))
        })
    })?;
    let load = |lane: &mut Lane,
                get: fn(&ChunkReader, &ChunkId, &mut [u8]) -> Result<(), StoreError>|
     -> Result<()> {
        let give = |span: Span, to: &mut [u8]| {
            get(&store, &by_place[&span.address], to).map(|()| Filled::Bytes)
        };
        lane.copy_in(&all, &stop, &give).map_err(|e| anyhow::anyhow!("{e:?}"))
    };
    let back = rate(&args, bytes, || timed(|| load(&mut lane, ChunkReader::get)))?;
    let back_on_device = rate(&args, bytes, || {
        timed(|| {
            load(&mut lane, ChunkReader::get_unchecked)?;
            let found = hasher.hash(&places)?;
            ensure!(found.iter().map(|hashed| hashed.id).eq(ids.iter().copied()), "the same bytes");
            Ok(())
        })
    })?;
    drop(dir);

    let mut host = vec![0u8; bytes.min(8 << 30) as usize];
    host.par_chunks_mut(MAX_CHUNK).enumerate().for_each(|(i, chunk)| fill(chunk, i as u64));
    let host_hash = rate(&args, host.len() as u64, || {
        timed(|| {
            host.par_chunks(MAX_CHUNK).for_each(|c| {
                std::hint::black_box(ChunkId::of(c));
            });
            Ok(())
        })
    })?;
    let one = &host[..host.len().min(256 << 20)];
    let one_hash = rate(&args, one.len() as u64, || {
        timed(|| {
            one.chunks(MAX_CHUNK).for_each(|c| {
                std::hint::black_box(ChunkId::of(c));
            });
            Ok(())
        })
    })?;
    let one_sum = rate(&args, one.len() as u64, || {
        timed(|| {
            one.chunks(MAX_CHUNK).for_each(|c| {
                std::hint::black_box(key.sum(c));
            });
            Ok(())
        })
    })?;
    let host_stored = rate(&args, host.len() as u64, || {
        into_store(&args, |store| {
            Ok(host.par_chunks(MAX_CHUNK).try_for_each(|chunk| store.put(chunk).map(drop))?)
        })
    })?;

    let rows = [
        ("from the device", alone),
        ("from the device, hashed", hashed),
        ("from the device into the store, raw", stored),
        ("hashed on the device", on_device),
        ("from the device, hashed there first", bounced_alone),
        ("from the device, hashed there first, into the store", bounced_stored),
        ("from the device, hashed there before, into the store", ahead_stored),
        ("from the store to the device, hashed by the host", back),
        ("from the store to the device, hashed there", back_on_device),
        ("from memory into the store, raw", host_stored),
        ("hashed from memory, all cores", host_hash),
        ("hashed from memory, one core", one_hash),
        ("summed from memory, one core", one_sum),
    ];
    let rows: Vec<_> =
        rows.iter().map(|(name, r)| vec![(*name).to_owned(), format!("{r:.2} GB/s")]).collect();
    print_table(&["way", "rate"], &rows);
    Ok(())
}
