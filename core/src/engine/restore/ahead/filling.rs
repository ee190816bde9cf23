//! Chunks that have come are written to where they are expected.

use std::collections::HashMap;

use super::{Ahead, AheadBlock, ReadyLane, if_room};
use crate::base::stop::Stop;
use crate::cuda::Span;
use crate::engine::error::Error;
use crate::store::{ChunkId, Filled, MAX_CHUNK, StoreError, constant_byte};

/// One call writes to so many places at most, of 2 MiB each: who calls has others to listen to.
pub(super) const AT_ONCE: usize = 128;

/// What is to be written: bytes, or one of them again and again.
enum Contents<'b> {
    Bytes(&'b [u8]),
    Constant(u8),
}

impl Ahead {
    /// Loads chunks, whose bytes were checked against their ids, to where they are expected. Those of one byte are only
    /// noted, for [`Self::fill_some`]. What is expected in very many places is not loaded to all of them. Where the device
    /// has no room for copies nothing is loaded any more until blocks are expected anew.
    ///
    /// # Errors
    /// A copy has failed, or the bytes on the device are other ones.
    pub(crate) fn load(&mut self, chunks: &[(ChunkId, Vec<u8>)]) -> Result<(), Error> {
        let mut contents = HashMap::new();
        // Every chunk of a block is a whole one.
        for (id, bytes) in chunks.iter().filter(|(_, bytes)| bytes.len() == MAX_CHUNK) {
            match constant_byte(bytes) {
                Some(byte) => _ = self.constants.insert(*id, byte),
                None => _ = contents.insert(*id, Contents::Bytes(bytes)),
            }
        }
        let mut spans = Vec::new();
        for id in contents.keys() {
            self.take_places(id, &mut spans);
        }
        self.write(&spans, &contents)
    }

    /// Writes some of the chunks that are one byte again and again. `false` if there are none any more.
    ///
    /// # Errors
    /// The errors of [`Self::load`].
    pub(crate) fn fill_some(&mut self) -> Result<bool, Error> {
        let (mut contents, mut spans) = (HashMap::new(), Vec::new());
        let constants = self.constants.iter().filter(|(id, _)| self.places.contains_key(id));
        for (id, byte) in constants.map(|(id, byte)| (*id, *byte)).collect::<Vec<_>>() {
            self.take_places(&id, &mut spans);
            contents.insert(id, Contents::Constant(byte));
        }
        self.write(&spans, &contents)?;
        Ok(!spans.is_empty())
    }

    /// Takes places at which a chunk is expected, as long as there are not too many spans: what is in them counts for
    /// nothing from now on.
    fn take_places(&mut self, id: &ChunkId, spans: &mut Vec<Span>) {
        let Some(places) = self.places.get_mut(id) else { return };
        let some: Vec<_> = places.iter().copied().take(AT_ONCE - spans.len()).collect();
        for place in some {
            places.remove(&place);
            let (block, chunk) = place;
            let AheadBlock { memory: Some(memory), chunks, .. } = &mut self.blocks[block] else {
                continue;
            };
            if chunks[chunk].expected == Some(*id) {
                chunks[chunk].loaded = None;
                spans.push(Span::of(memory, block, chunk));
            }
        }
        if places.is_empty() {
            self.places.remove(id);
        }
    }

    /// Writes what is expected in these places, and checks it there.
    fn write(
        &mut self,
        spans: &[Span],
        contents: &HashMap<ChunkId, Contents<'_>>,
    ) -> Result<(), Error> {
        let written = if_room(self.write_if_room(spans, contents))?;
        if written.is_none() {
            self.give_back();
        }
        Ok(())
    }

    fn write_if_room(
        &mut self,
        spans: &[Span],
        contents: &HashMap<ChunkId, Contents<'_>>,
    ) -> Result<(), Error> {
        let Self { lanes, blocks, stop, .. } = self;
        for ready in lanes {
            let uuid = ready.lane.context().device().uuid;
            let device =
                |span: &Span| blocks[span.block].memory.as_ref().map(|it| it.device().uuid);
            let here: Vec<Span> =
                spans.iter().filter(|span| device(span) == Some(uuid)).copied().collect();
            if here.is_empty() {
                continue;
            }
            let expected = |span: &Span| blocks[span.block].chunks[span.chunk].expected;
            let stop = Stop::new(stop.clone());
            ready.write(&here, contents, &expected, &stop)?;
            if stop.is_set() {
                return Err(Error::Interrupted);
            }
            if let Some(span) = ready.find_wrong(&here, &expected)? {
                let block = blocks[span.block].what.id;
                let what = format!("chunk {} of block {block}", span.chunk);
                return Err(Error::WrongCopy { what });
            }
            for span in here {
                let chunk = &mut blocks[span.block].chunks[span.chunk];
                chunk.loaded = chunk.expected;
            }
        }
        Ok(())
    }
}

impl ReadyLane {
    fn write(
        &mut self,
        spans: &[Span],
        contents: &HashMap<ChunkId, Contents<'_>>,
        expected: &(impl Fn(&Span) -> Option<ChunkId> + Sync),
        stop: &Stop,
    ) -> Result<(), Error> {
        let give = |span: Span, buffer: &mut [u8]| -> Result<Filled, StoreError> {
            let id = expected(&span).unwrap_or(ChunkId([0; 32]));
            match contents.get(&id) {
                Some(Contents::Constant(byte)) => Ok(Filled::Constant(*byte)),
                Some(Contents::Bytes(bytes)) if bytes.len() == buffer.len() => {
                    buffer.copy_from_slice(bytes);
                    Ok(Filled::Bytes)
                }
                _ => Err(StoreError::UnknownChunk { id }),
            }
        };
        Ok(self.lane.copy_in(spans, stop, &give)?)
    }

    /// One of these that does not hold what is expected. Without a hasher the host's check of the bytes is the one that
    /// there is.
    fn find_wrong(
        &mut self,
        spans: &[Span],
        expected: &impl Fn(&Span) -> Option<ChunkId>,
    ) -> Result<Option<Span>, Error> {
        let Ok(hasher) = &mut self.hasher else { return Ok(None) };
        let places: Vec<_> = spans.iter().map(|span| (span.address, span.len)).collect();
        let mut checked = spans.iter().zip(hasher.hash(&places)?);
        let wrong = checked.find(|(span, hashed)| expected(span) != Some(hashed.id));
        Ok(wrong.map(|(span, _)| *span))
    }
}
