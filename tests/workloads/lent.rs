//! Memory of a pool that the first process lends to a second one on another device: the pool by a descriptor that is
//! inherited, each piece by what the driver exports its pointer as. Both change it in turn, and both free it.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result, ensure};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::args;
use crate::cuda::STREAM_NON_BLOCKING;
use crate::gpu::{Gpu, Kernel, Module, Shape, Stream, read_at, write_at};
use crate::numbers::{Sequence, filled, mixer_round};
use crate::pool::{Piece, Pool};
use crate::report::Run;
use crate::second::Second;

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Where the second process finds the descriptor of the pool.
const ENV: &str = "WORKLOAD_LENT";
/// Pieces that are lent at a time.
const PIECES: u32 = 6;

/// A piece that the second process has.
struct Lent {
    piece: Piece,
    words: Vec<u32>,
}

fn mix(kernel: &Kernel, stream: &Stream, address: u64, words: u32, round: u32) -> Result<()> {
    kernel.run_on(stream, Shape::covering(words), args![address, words, round])?;
    stream.synchronize()
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(given) = std::env::var(ENV) {
        return second(&given);
    }
    let largest: u32 = run.pick(16, 19, 22);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open_at(0)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let stream = Stream::new(STREAM_NON_BLOCKING)?;
    let pool = Pool::shareable(&gpu)?;
    let ticket = pool.export()?;
    fcntl_setfd(&ticket, FdFlags::empty())?;
    let mut other = Second::start("lent", ENV, &ticket.as_raw_fd().to_string())?;
    drop(ticket);
    other.hear()?;
    run.line(format_args!("child pid={}", other.pid()))?;
    run.ready()?;
    let mut random = Sequence::new(run.seed);
    let mut lent: BTreeMap<u32, Lent> = BTreeMap::new();
    for step in 0..steps {
        let slot = step % PIECES;
        if let Some(old) = lent.remove(&slot) {
            other.tell(format_args!("back {slot}"))?;
            other.hear()?;
            run.absorb(&old.words);
            old.piece.free(&stream)?;
        }
        let magnitude = random.below(largest);
        let words = 1 + random.below(16 << magnitude);
        let piece = Piece::new(4 * words as usize, Some(&pool), &stream)?;
        stream.synchronize()?;
        let host = filled(words as usize, step);
        write_at(piece.address, &host)?;
        other.tell(format_args!("lent {slot} {words} {}", piece.export()?))?;
        other.hear()?;
        lent.insert(slot, Lent { piece, words: host });
        let mut said = 0;
        for (slot, lent) in &mut lent {
            let words = lent.words.len() as u32;
            mix(&round, &stream, lent.piece.address, words, step)?;
            other.tell(format_args!("mix {slot} {}", step + 1000))?;
            let last: u32 = other.hear()?.parse()?;
            for number in [step, step + 1000] {
                mixer_round(&mut lent.words, number);
            }
            ensure!(lent.words.last() == Some(&last), "step {step}: piece {slot} ends otherwise");
            said ^= last;
        }
        for (slot, lent) in &lent {
            let seen: Vec<u32> = read_at(lent.piece.address, lent.words.len())?;
            ensure!(seen == lent.words, "step {step}: piece {slot} is wrong");
        }
        run.step(step, format_args!("{said:08x}"))?;
    }
    other.end()?;
    for lent in lent.into_values() {
        run.absorb(&lent.words);
        lent.piece.free(&stream)?;
    }
    stream.synchronize()?;
    run.finish()
}

/// The second process: has what it is lent, mixes it and gives it back, as it is told.
fn second(given: &str) -> Result<()> {
    // SAFETY: the first process leaves the descriptor to this one, which uses it here alone.
    let ticket = unsafe { OwnedFd::from_raw_fd(given.parse()?) };
    let gpu = Gpu::open_at(1)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let stream = Stream::new(STREAM_NON_BLOCKING)?;
    let mut pool = Pool::import(&gpu, &ticket)?;
    let mut lent: BTreeMap<u32, (Piece, u32)> = BTreeMap::new();
    println!("has the pool");
    for (number, line) in std::io::stdin().lines().enumerate() {
        let line = line?;
        let mut parts = line.split(' ');
        let order = parts.next();
        let slot: u32 = parts.next().context("a slot")?.parse()?;
        match order {
            Some("lent") => {
                let words = parts.next().context("the words")?.parse()?;
                let piece = Piece::import(&pool, parts.next().context("a handle")?)?;
                lent.insert(slot, (piece, words));
                println!("has it");
            }
            Some("mix") => {
                let (piece, words) = lent.get(&slot).context("it is lent")?;
                let number = parts.next().context("a number")?.parse()?;
                mix(&round, &stream, piece.address, *words, number)?;
                let last = piece.address + 4 * u64::from(words - 1);
                println!("{}", read_at::<u32>(last, 1)?[0]);
            }
            _ => {
                let (piece, _) = lent.remove(&slot).context("it is lent")?;
                piece.free(&stream)?;
                println!("gave it back");
            }
        }
        if number % 64 == 7 {
            // From a descriptor that is kept, and was perhaps made in an earlier life.
            pool = Pool::import(&gpu, &ticket)?;
        }
    }
    for (piece, _) in lent.into_values() {
        piece.free(&stream)?;
    }
    stream.synchronize()
}
