//! Where the chunks of device memory belong: the other side is told, so that it can load them as they arrive.

use crate::engine::memory::Laid;
use crate::engine::migrate::message::{LaidOut, MAX_ASKED, MAX_BLOCKS, Message};
use crate::store::ChunkId;

/// What the other side was told.
#[derive(Default)]
pub(super) struct Told {
    blocks: Vec<LaidOut>,
    contents: Vec<Vec<Option<ChunkId>>>,
}

impl Told {
    /// What has to be said so that it knows this: what it knows already is not said again. `pid` gives the pid of a
    /// program by its number.
    pub(super) fn messages(&mut self, laid: Vec<Laid>, pid: impl Fn(usize) -> u32) -> Vec<Message> {
        let mut blocks = Vec::new();
        let mut contents = Vec::new();
        for Laid { program, id, device, size, chunks } in laid.into_iter().take(MAX_BLOCKS) {
            blocks.push(LaidOut { process: pid(program), id, device, size });
            contents.push(chunks);
        }
        let mut messages = Vec::new();
        let mut known: Vec<Vec<Option<ChunkId>>> = Vec::new();
        if blocks == self.blocks {
            known.append(&mut self.contents);
        } else {
            messages.push(Message::Layout { blocks: blocks.clone() });
            // What it knows of a block stays with that.
            for block in &blocks {
                let before = self.blocks.iter().position(|it| it == block);
                let before = before.and_then(|number| self.contents.get_mut(number));
                known.push(before.map(std::mem::take).unwrap_or_default());
            }
        }
        for (block, (now, before)) in contents.iter().zip(&mut known).enumerate() {
            before.resize(now.len(), None);
            messages.extend(differences(block as u32, now, before));
        }
        *self = Self { blocks, contents: known };
        messages
    }
}

/// Tells of the chunks that are others than before, in runs, and takes them down. What is not known now stays.
fn differences(
    block: u32,
    now: &[Option<ChunkId>],
    before: &mut [Option<ChunkId>],
) -> Vec<Message> {
    let mut messages: Vec<Message> = Vec::new();
    let mut end = None;
    for (number, (now, before)) in now.iter().zip(before).enumerate() {
        let Some(id) = now.filter(|_| now != before) else { continue };
        *before = *now;
        match messages.last_mut() {
            Some(Message::Contents { ids, .. }) if end == Some(number) && ids.len() < MAX_ASKED => {
                ids.push(id.0);
            }
            _ => {
                let first = number as u32;
                messages.push(Message::Contents { block, first, ids: vec![id.0] });
            }
        }
        end = Some(number + 1);
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn laid(id: u64, chunks: &[u8]) -> Laid {
        let chunks = chunks.iter().map(|byte| (*byte > 0).then_some(ChunkId([*byte; 32])));
        let chunks: Vec<_> = chunks.collect();
        Laid { program: 0, id, device: [1; 16], size: (chunks.len() as u64) << 21, chunks }
    }

    fn contents(block: u32, first: u32, bytes: &[u8]) -> Message {
        Message::Contents { block, first, ids: bytes.iter().map(|byte| [*byte; 32]).collect() }
    }

    #[test]
    fn what_is_known_is_not_told_again() {
        let mut told = Told::default();
        let mut tell = |laid| told.messages(laid, |_| 7);
        let first = tell(vec![laid(1, &[1, 2, 0, 4]), laid(2, &[5])]);
        assert!(matches!(&first[0], Message::Layout { blocks } if blocks.len() == 2));
        assert_eq!(
            first[1..],
            [contents(0, 0, &[1, 2]), contents(0, 3, &[4]), contents(1, 0, &[5])]
        );
        assert_eq!(tell(vec![laid(1, &[1, 2, 0, 4]), laid(2, &[5])]), []);
        assert_eq!(tell(vec![laid(1, &[1, 3, 3, 0]), laid(2, &[5])]), [contents(0, 1, &[3, 3])]);
        // Another block comes first, one is gone: what is known of the other one stays.
        let next = tell(vec![laid(3, &[6]), laid(1, &[1, 3, 3, 9])]);
        assert!(matches!(&next[0], Message::Layout { blocks } if blocks[0].id == 3));
        assert_eq!(next[1..], [contents(0, 0, &[6]), contents(1, 3, &[9])]);
        assert_eq!(tell(Vec::new()), [Message::Layout { blocks: Vec::new() }]);
    }

    #[test]
    fn no_message_is_too_long() {
        let chunks: Vec<u8> = vec![1; MAX_ASKED + 1];
        let messages = Told::default().messages(vec![laid(1, &chunks)], |_| 7);
        let lengths = messages.iter().filter_map(|message| match message {
            Message::Contents { first, ids, .. } => Some((*first as usize, ids.len())),
            _ => None,
        });
        assert_eq!(lengths.collect::<Vec<_>>(), [(0, MAX_ASKED), (MAX_ASKED, 1)]);
    }
}
