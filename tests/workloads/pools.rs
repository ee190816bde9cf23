//! Memory in the order of streams, of several pools: made, used and freed while the host runs ahead, so that one piece
//! of memory has many owners that the host has never waited for.

use anyhow::{Result, ensure};

use crate::args;
use crate::cuda::{STREAM_NON_BLOCKING, check, driver};
use crate::event::Event;
use crate::gpu::{Gpu, Kernel, Module, Shape, Stream};
use crate::numbers::{Sequence, filled, mix, mixer_round};
use crate::pool::{Piece, Pool};
use crate::report::Run;

const PTX: &str = include_str!("kernels/mixer.ptx");
const STREAMS: usize = 5;
const SLOTS: u32 = 40;
/// Pieces that are made anew, and pieces that others leave their content in, in each step.
const CHANGES: u32 = 3;

/// Memory that lasts for a while and what the host knows of its content.
struct Slot {
    piece: Piece,
    /// The stream that uses it.
    stream: usize,
    words: u32,
    tag: u32,
    rounds: Vec<u32>,
}

struct Lab {
    fill: Kernel,
    round: Kernel,
    streams: Vec<Stream>,
    pools: Vec<Pool>,
    random: Sequence,
    largest: u32,
}

impl Lab {
    /// Memory for a stream, of one of the pools or the device's own.
    fn piece(&mut self, words: u32, stream: usize) -> Result<Piece> {
        let bytes = words as usize * 4 + self.random.below(4) as usize;
        let pool = self.pools.get(self.random.below(self.pools.len() as u32 + 1) as usize);
        Piece::new(bytes, pool, &self.streams[stream])
    }

    fn filled(&mut self, words: u32, stream: usize) -> Result<(Piece, u32)> {
        let piece = self.piece(words, stream)?;
        let tag = self.random.below(u32::MAX);
        let arguments = args![piece.address, words, tag];
        self.fill.run_on(&self.streams[stream], Shape::covering(words), arguments)?;
        Ok((piece, tag))
    }

    fn slot(&mut self) -> Result<Slot> {
        let magnitude = self.random.below(self.largest);
        let words = 1 + self.random.below(16 << magnitude);
        let stream = self.random.below(STREAMS as u32) as usize;
        let (piece, tag) = self.filled(words, stream)?;
        Ok(Slot { piece, stream, words, tag, rounds: Vec::new() })
    }

    /// Other memory has the slot's next content and is gone at once; nobody waits for it.
    fn pass_through(&mut self, slot: &mut Slot, step: u32) -> Result<()> {
        let (piece, tag) = self.filled(slot.words, slot.stream)?;
        let stream = &self.streams[slot.stream];
        let arguments = args![piece.address, slot.words, step];
        self.round.run_on(stream, Shape::covering(slot.words), arguments)?;
        let (to, from, bytes) = (slot.piece.address, piece.address, slot.words as usize * 4);
        // SAFETY: both have so many bytes, as long as the stream uses them.
        let code = unsafe { (driver().cuMemcpyDtoDAsync)(to, from, bytes, stream.0) };
        check("cuMemcpyDtoDAsync", code)?;
        piece.free(stream)?;
        (slot.tag, slot.rounds) = (tag, vec![step]);
        Ok(())
    }

    /// Frees the slot in its stream, or in another one that waits for it.
    fn free(&mut self, slot: Slot) -> Result<()> {
        let own = &self.streams[slot.stream];
        let other = &self.streams[self.random.below(STREAMS as u32) as usize];
        let event = Event::new()?;
        event.record(own)?;
        event.hold(other)?;
        slot.piece.free(other)
    }

    fn verify(&self, slot: &Slot) -> Result<Vec<u32>> {
        let mut wanted = filled(slot.words as usize, slot.tag);
        for &round in &slot.rounds {
            mixer_round(&mut wanted, round);
        }
        let mut got = vec![0_u32; slot.words as usize];
        let stream = &self.streams[slot.stream];
        // SAFETY: the stream is waited for before the words are touched.
        unsafe { stream.copy_out(&mut got, slot.piece.address) }?;
        stream.synchronize()?;
        let (address, words) = (slot.piece.address, slot.words);
        ensure!(got == wanted, "{address:#x} with {words} words has wrong content");
        Ok(got)
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let largest: u32 = run.pick(15, 18, 20);
    let steps = run.plan(300, 600, 1000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let flags = |stream: usize| if stream.is_multiple_of(2) { STREAM_NON_BLOCKING } else { 0 };
    let mut lab = Lab {
        fill: module.kernel("mixer_fill")?,
        round: module.kernel("mixer_round")?,
        streams: (0..STREAMS).map(|s| Stream::new(flags(s))).collect::<Result<_>>()?,
        pools: vec![Pool::new(&gpu, u64::MAX)?, Pool::new(&gpu, 1 << 20)?],
        random: Sequence::new(run.seed),
        largest,
    };
    let mut slots: Vec<Option<Slot>> = (0..SLOTS).map(|_| None).collect();
    for slot in slots.iter_mut().step_by(2) {
        *slot = Some(lab.slot()?);
    }
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let mut digest = 0;
        for _ in 0..CHANGES {
            let at = lab.random.below(SLOTS) as usize;
            if let Some(old) = slots[at].take() {
                // Most go without anybody having waited for them.
                if lab.random.below(4) == 0 {
                    digest = lab.verify(&old)?.iter().fold(digest, |all, &word| mix(all ^ word));
                }
                lab.free(old)?;
                if lab.random.below(3) == 0 {
                    continue;
                }
            }
            slots[at] = Some(lab.slot()?);
        }
        for _ in 0..CHANGES {
            let at = lab.random.below(SLOTS) as usize;
            if let Some(slot) = &mut slots[at] {
                lab.pass_through(slot, step)?;
            }
        }
        let live = slots.iter().flatten().count();
        run.step(step, format_args!("live {live} digest {digest:08x}"))?;
    }
    for slot in slots.into_iter().flatten() {
        let words = lab.verify(&slot)?;
        run.absorb(&words);
        lab.free(slot)?;
    }
    run.finish()
}
