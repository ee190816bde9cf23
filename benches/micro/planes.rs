//! What byte planes gain: size and speed of a chunk's encoding and decoding on one core, as the store
//! does it, compared with zstd alone, for several kinds of numbers.
//!
//! Rates are bytes of the plain data by CPU time of the thread, so what a thread waits for a core
//! does not count. They include hashing: BLAKE3 of the stored bytes when a chunk is encoded, of
//! the stored and the plain bytes when it is decoded.

use std::convert::Infallible;

use anyhow::{Result, anyhow, ensure};
use clap::Parser;
use gpucr_benches::data::{Kind, fill};
use gpucr_benches::{machine, print_table, size};
use gpucr_core::store::{
    ChunkId, Compression, Decoder, Encoded, Encoder, Encoding, MAX_CHUNK, Stored,
};
use rustix::time::{ClockId, clock_gettime};

#[derive(Parser)]
struct Args {
    /// Bytes of each kind
    #[arg(long, default_value = "16M", value_parser = size)]
    size: u64,
    /// Level of zstd
    #[arg(long, default_value_t = 1)]
    level: i32,
    /// Runs, of which the fastest counts
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The rate of the fastest of some runs, in bytes per second.
fn rate(runs: usize, bytes: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = f64::MAX;
    for _ in 0..runs {
        let start = cpu_seconds();
        work()?;
        best = best.min(cpu_seconds() - start);
    }
    Ok(bytes as f64 / best)
}

/// Stored bytes, and rates of encoding and decoding.
type Figures = (usize, f64, f64);

/// Encodes as the store does, and tells how many chunks it encodes by planes.
fn store(args: &Args, plain: &[u8]) -> Result<(Figures, usize)> {
    let mut encoder = Encoder::new(Compression::Level(args.level));
    let mut forms: Vec<(Stored, Vec<u8>)> = Vec::new();
    for chunk in plain.chunks(MAX_CHUNK) {
        let Encoded { encoding, bytes, check } = encoder.encode(chunk);
        forms.push((Stored { encoding, len: bytes.len(), check }, bytes.to_vec()));
    }
    let encode = rate(args.runs, plain.len(), || {
        for chunk in plain.chunks(MAX_CHUNK) {
            std::hint::black_box(encoder.encode(chunk));
        }
        Ok(())
    })?;
    let mut decoder = Decoder::new()?;
    let mut out = vec![0; MAX_CHUNK];
    let decode = rate(args.runs, plain.len(), || {
        for ((stored, bytes), chunk) in forms.iter().zip(plain.chunks(MAX_CHUNK)) {
            let out = &mut out[..chunk.len()];
            let id = decoder.decode::<Infallible>(*stored, out, |buffer| {
                buffer.copy_from_slice(bytes);
                Ok(())
            });
            id.map_err(|error| anyhow!("{error:?}"))?;
        }
        Ok(())
    })?;
    for ((stored, bytes), chunk) in forms.iter().zip(plain.chunks(MAX_CHUNK)) {
        let out = &mut out[..chunk.len()];
        let read = |buffer: &mut [u8]| {
            buffer.copy_from_slice(bytes);
            Ok::<_, Infallible>(())
        };
        let id = decoder.decode(*stored, out, read).map_err(|error| anyhow!("{error:?}"))?;
        ensure!(out == chunk && id == ChunkId::of(chunk), "something else came back");
    }
    let planes = forms.iter().filter(|(stored, _)| matches!(stored.encoding, Encoding::Planes(_)));
    Ok(((forms.iter().map(|(_, bytes)| bytes.len()).sum(), encode, decode), planes.count()))
}

/// zstd alone, with the same hashes.
fn zstd(args: &Args, plain: &[u8]) -> Result<Figures> {
    let mut compressor = zstd::bulk::Compressor::new(args.level)?;
    let mut buffer = vec![0; zstd::zstd_safe::compress_bound(MAX_CHUNK)];
    let mut forms = Vec::new();
    for chunk in plain.chunks(MAX_CHUNK) {
        forms.push(compressor.compress(chunk)?);
    }
    let encode = rate(args.runs, plain.len(), || {
        for chunk in plain.chunks(MAX_CHUNK) {
            let len = compressor.compress_to_buffer(chunk, &mut buffer[..])?;
            std::hint::black_box(blake3::hash(&buffer[..len]));
        }
        Ok(())
    })?;
    let mut decompressor = zstd::bulk::Decompressor::new()?;
    let mut out = vec![0; MAX_CHUNK];
    let decode = rate(args.runs, plain.len(), || {
        for form in &forms {
            buffer[..form.len()].copy_from_slice(form);
            std::hint::black_box(blake3::hash(&buffer[..form.len()]));
            let len = decompressor.decompress_to_buffer(form, &mut out[..])?;
            std::hint::black_box(ChunkId::of(&out[..len]));
        }
        Ok(())
    })?;
    Ok((forms.iter().map(Vec::len).sum(), encode, decode))
}

fn main() -> Result<()> {
    let args = Args::parse();
    let len = usize::try_from(args.size)?;
    ensure!(len > 0 && args.runs > 0, "nothing to measure");
    println!("{}", machine());
    println!(
        "{} MiB of each kind in chunks of 2 MiB, zstd level {}; rates of one core, fastest of {} \
         runs, CPU time\n",
        len >> 20,
        args.level,
        args.runs
    );
    let kinds = [
        ("bf16 weights", Kind::Bf16Weights),
        ("fp16 weights", Kind::Fp16Weights),
        ("fp32 weights", Kind::Fp32Weights),
        ("Adam, first moments", Kind::FirstMoments),
        ("Adam, second moments", Kind::SecondMoments),
        ("bf16 behind GELU", Kind::GeluActivations),
        ("bf16 behind ReLU", Kind::ReluActivations),
        ("random bytes", Kind::Noise),
    ];
    let mut rows = Vec::new();
    for (name, kind) in kinds {
        let mut plain = vec![0; len];
        fill(kind, &mut plain, 1);
        let alone = zstd(&args, &plain)?;
        let (ours, planes) = store(&args, &plain)?;
        let share = |stored: usize| format!("{:.1} %", 100.0 * stored as f64 / len as f64);
        let gigabytes = |rate: f64| format!("{:.2} GB/s", rate / 1e9);
        rows.push(vec![
            name.to_owned(),
            share(alone.0),
            gigabytes(alone.1),
            gigabytes(alone.2),
            share(ours.0),
            gigabytes(ours.1),
            gigabytes(ours.2),
            format!("{planes} of {}", len.div_ceil(MAX_CHUNK)),
        ]);
    }
    let header = ["", "zstd", "encode", "decode", "store", "encode", "decode", "chunks by planes"];
    print_table(&header, &rows);
    Ok(())
}
