//! What is read ahead, before it is touched, and in which order.
//!
//! A program touches first what is in many small mappings: stacks, data of libraries, what has been allocated last. So
//! the parts of the file that have the memory of small mappings come first. What is behind a part that was touched is
//! likely to be touched next, and comes before that.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::Scope;

use parking_lot::Mutex;

use super::super::pages::Extent;
use super::plan::{Memory, Part};

/// Most threads that read ahead for one process.
const READERS: usize = 4;
/// Parts that are read ahead by each of these.
const AHEAD: usize = 2;
/// So many parts come next behind one that was touched.
const BEHIND: usize = 8;

/// A part of the file that was read ahead: the number of its pieces, and its bytes unless it is zeros.
pub(super) type Read = (usize, Option<Vec<u8>>);

/// The parts of the file of a process.
pub(super) struct Order {
    memory: Arc<Memory>,
    left: Mutex<Left>,
}

/// What has not been read.
struct Left {
    is_taken: Vec<bool>,
    /// How many were taken, or passed over, of those in the order of the memory.
    next: usize,
    /// What comes before these.
    behind: Range<usize>,
    is_over: bool,
}

impl Order {
    pub(super) fn of(memory: Arc<Memory>) -> Arc<Self> {
        let is_taken = vec![false; memory.order().len()];
        let left = Mutex::new(Left { is_taken, next: 0, behind: 0..0, is_over: false });
        Arc::new(Self { memory, left })
    }

    /// Somebody waits for a part, and it is read for that.
    pub(super) fn touched(&self, group: usize) {
        let mut left = self.left.lock();
        let after = group + 1;
        left.behind = after..(after + BEHIND).min(left.is_taken.len());
        if let Some(is_taken) = left.is_taken.get_mut(group) {
            *is_taken = true;
        }
    }

    /// Nobody wants what has not been read.
    pub(super) fn end(&self) {
        self.left.lock().is_over = true;
    }

    /// The part that is to be read next.
    fn next(&self) -> Option<usize> {
        let Left { is_taken, next, behind, is_over } = &mut *self.left.lock();
        let rest = self.memory.order()[*next..].iter().copied().inspect(|_| *next += 1);
        let found = behind.by_ref().chain(rest).find(|group| !is_taken[*group]);
        let found = found.filter(|_| !*is_over)?;
        is_taken[found] = true;
        Some(found)
    }

    /// Reads all parts that nobody has read, on several threads, which end when there are no more, or the receiver is
    /// dropped after [`end`](Self::end).
    pub(super) fn read_ahead<'s>(&'s self, scope: &'s Scope<'s, '_>) -> Receiver<io::Result<Read>> {
        let readers = std::thread::available_parallelism().map_or(1, usize::from).min(READERS);
        let (sender, receiver) = sync_channel(readers * AHEAD);
        for _ in 0..readers {
            let sender = sender.clone();
            scope.spawn(move || self.read_all(&sender));
        }
        receiver
    }

    fn read_all(&self, sender: &SyncSender<io::Result<Read>>) {
        while let Some(group) = self.next() {
            let Some(first) = self.memory.group(group).and_then(<[Extent]>::first) else { return };
            let (file, mut buffer) = (&self.memory.file, Vec::new());
            let read = match file.read(&file.part(first.at), &mut buffer) {
                Ok(Part::Zeros) => Ok((group, None)),
                Ok(Part::Bytes(bytes)) => Ok((group, Some(bytes.to_vec()))),
                Err(error) => Err(error),
            };
            // The other end is gone if the process has ended.
            if sender.send(read).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of which parts of four pages are read.
    struct Parts;

    impl super::super::PagesFile for Parts {
        fn size(&self) -> u64 {
            1 << 20
        }

        fn part(&self, at: u64) -> Range<u64> {
            let start = at / 0x4000 * 0x4000;
            start..start + 0x4000
        }

        fn read<'a>(&'a self, _: &Range<u64>, _: &'a mut Vec<u8>) -> io::Result<Part<'a>> {
            Ok(Part::Zeros)
        }
    }

    /// Three parts of a mapping, two of a small one, and four of a large one.
    fn order() -> Arc<Order> {
        let extents = [
            Extent { to: 0x10_0000, at: 0, len: 0xc000 },
            Extent { to: 0x20_0000, at: 0xc000, len: 0x8000 },
            Extent { to: 0x30_0000, at: 0x1_4000, len: 0xf000 },
        ];
        let mappings = [(0x10_0000, 0x11_0000), (0x20_0000, 0x30_0000), (0x30_0000, 0x31_0000)];
        Order::of(Arc::new(Memory::new(Arc::new(Parts), &extents, &mappings)))
    }

    fn all(order: &Order) -> Vec<usize> {
        std::iter::from_fn(|| order.next()).collect()
    }

    #[test]
    fn small_mappings_come_first() {
        assert_eq!(all(&order()), [3, 4, 0, 1, 2, 5, 6, 7, 8]);
    }

    #[test]
    fn what_is_behind_a_touched_part_comes_next() {
        let order = order();
        assert_eq!(order.next(), Some(3));
        order.touched(6);
        assert_eq!(all(&order), [7, 8, 4, 0, 1, 2, 5]);
        order.touched(8);
        order.touched(100);
        assert_eq!(order.next(), None);
    }

    #[test]
    fn nothing_is_read_when_it_is_over() {
        let order = order();
        order.end();
        assert_eq!(order.next(), None);
    }
}
