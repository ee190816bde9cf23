//! What kernels print. It is kept in a buffer of a limited size, and comes out when the program
//! synchronises, as the CUDA C++ Programming Guide describes ("Formatted Output").

use std::collections::VecDeque;
use std::io::Write;

use parking_lot::Mutex;

/// Bytes that each call takes beside its arguments.
const HEAD: usize = 16;

/// What a context's kernels have printed and nobody has seen yet.
#[derive(Default)]
pub(crate) struct Prints(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// Texts with the room that they take.
    texts: VecDeque<(Vec<u8>, usize)>,
    taken: usize,
}

impl Prints {
    /// Adds the text of a call with so many bytes of arguments. Where there is no room, the oldest texts
    /// are lost.
    pub(crate) fn add(&self, text: &[u8], arguments: usize, limit: u64) {
        let mut waiting = self.0.lock();
        let size = HEAD + arguments.min(1 << 20).next_multiple_of(8);
        waiting.texts.push_back((text.to_vec(), size));
        waiting.taken += size;
        while waiting.taken as u64 > limit {
            let Some((_, size)) = waiting.texts.pop_front() else { break };
            waiting.taken -= size;
        }
    }

    /// Lets out all that waits.
    pub(crate) fn flush(&self) {
        // The lock is held, so that texts of two calls do not change places.
        let mut waiting = self.0.lock();
        let texts = std::mem::take(&mut *waiting).texts;
        if texts.is_empty() {
            return;
        }
        let mut out = std::io::stdout().lock();
        // A closed output is no reason to fail.
        let _ = texts.iter().try_for_each(|(text, _)| out.write_all(text));
        let _ = out.flush();
    }
}
