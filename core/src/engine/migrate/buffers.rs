//! Memory for chunks that come.

use parking_lot::Mutex;

/// Chunks that may be under way on this side at a time, from the link to device memory: more are not kept.
const MOST: usize = 64;

/// Memory that was used for chunks, and is used again: the kernel clears new memory page by page, which takes about as
/// long as receiving what is put there.
#[derive(Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

impl Buffers {
    /// So many bytes, which have anything in them.
    pub(super) fn take(&self, len: usize) -> Vec<u8> {
        match self.0.lock().pop() {
            // What is longer than before is written to, so that it is there though nothing has come yet: no more than a chunk.
            Some(mut used) => {
                used.resize(len, 0);
                used
            }
            None => vec![0; len],
        }
    }

    /// Takes back what is not needed any more.
    pub(super) fn give_back(&self, used: Vec<u8>) {
        let mut all = self.0.lock();
        if all.len() < MOST {
            all.push(used);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_and_no_more_is_kept_than_is_needed() {
        let buffers = Buffers::default();
        let mut first = buffers.take(1 << 20);
        first.fill(7);
        let place = first.as_ptr();
        buffers.give_back(first);
        let again = buffers.take(1 << 10);
        assert_eq!((again.as_ptr(), again.len()), (place, 1 << 10));
        (0..MOST + 3).for_each(|_| buffers.give_back(vec![1; 8]));
        assert_eq!(buffers.0.lock().len(), MOST);
        assert_eq!(buffers.take(16)[8..], [0; 8]);
    }
}
