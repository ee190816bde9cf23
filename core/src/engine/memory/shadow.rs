//! Shadows: copies of device memory within the device.
//!
//! A device copies its own memory some forty times faster than PCIe carries it away. So what has
//! changed since it was copied is first copied aside, which takes milliseconds; the program goes on
//! with its memory, and gpucr saves the shadows while it runs.

use std::collections::HashSet;

use super::bulk::{Bulk, Shadow};
use crate::cuda::context::GRANULE;
use crate::cuda::{Lane, SharedBlock, Span, Stream};
use crate::engine::error::Error;

impl Bulk {
    /// Copies aside, within each device, what is left to be saved, as far as there is room: `limit`
    /// bytes on each device, or half of what is free there. Nothing writes the memory. Gives the bytes
    /// that found room.
    ///
    /// # Errors
    /// The driver fails. A device without room is no error: what it has is saved before the program goes
    /// on.
    pub(crate) fn shadow(&mut self, limit: Option<u64>) -> Result<u64, Error> {
        let mut all = 0;
        for lane in 0..self.lanes.len() {
            // Equal chunks are saved once.
            let mut taken = HashSet::new();
            let left =
                self.left_on(lane).into_iter().filter(|span| taken.insert(self.hash_of(span)));
            let runs = runs(left.collect());
            let needed: u64 = runs.iter().map(|run| run.len).sum();
            let context = self.lanes[lane].context();
            let room = limit.map_or_else(|| Ok(context.free_memory()? / 2), Ok::<u64, Error>)?;
            let room = needed.next_multiple_of(GRANULE).min(room / GRANULE * GRANULE);
            if room == 0 {
                continue;
            }
            // Another process may have been faster.
            let Ok(memory) = SharedBlock::allocate(context, room) else { continue };
            let (placed, bytes) = fill(&self.lanes[lane], &memory, runs)?;
            self.shadows.push(Shadow { memory });
            for (span, address) in placed {
                self.set_shadow(&span, address);
            }
            all += bytes;
        }
        Ok(all)
    }
}

/// Spans that follow each other in memory, to be copied in one go.
struct Run {
    spans: Vec<Span>,
    len: u64,
}

fn runs(spans: Vec<Span>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for span in spans {
        let follows = |run: &Run| run.spans[0].address + run.len == span.address;
        match runs.last_mut().filter(|run| follows(run)) {
            Some(run) => {
                run.len += span.len as u64;
                run.spans.push(span);
            }
            None => runs.push(Run { len: span.len as u64, spans: vec![span] }),
        }
    }
    runs
}

/// Copies the runs into `memory` until it is full. Gives the new address of each span.
fn fill(
    lane: &Lane,
    memory: &SharedBlock,
    runs: Vec<Run>,
) -> Result<(Vec<(Span, u64)>, u64), Error> {
    let stream = Stream::create(lane.context())?;
    let (mut placed, mut used) = (Vec::new(), 0);
    for run in runs {
        let from = run.spans[0].address;
        let to = memory.address() + used;
        let fitting = run.spans.iter().scan(0, |end, span| {
            *end += span.len as u64;
            Some((span, *end))
        });
        let mut len = 0;
        for (span, end) in fitting.take_while(|(_, end)| used + end <= memory.len()) {
            placed.push((*span, to + end - span.len as u64));
            len = end;
        }
        if len > 0 {
            stream.copy_within(from, to, len as usize)?;
        }
        used += len;
    }
    stream.synchronize()?;
    Ok((placed, used))
}
