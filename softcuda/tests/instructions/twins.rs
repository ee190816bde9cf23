//! Jobs whose kernels are run in parts, as if they had been interrupted between two of their blocks again and again.

use gpucr_rewrite::{control, rewrite};

use super::job::{Job, Launch};
use super::table::Random;

/// In so many parts is a launch made.
pub(crate) const PARTS: u64 = 3;

/// A job with twins in the place of its kernels, as far as they can have one.
pub(crate) struct Twins {
    pub(crate) ptx: String,
    kernels: Vec<String>,
}

impl Twins {
    pub(crate) fn of(job: &Job) -> Twins {
        let rewritten = rewrite(&job.ptx, |_| true).expect("PTX");
        let kernels = rewritten.kernels.into_iter();
        let kernels = kernels.filter(|(_, judged)| judged.is_ok()).map(|(name, _)| name).collect();
        Twins { ptx: rewritten.text, kernels }
    }

    /// The control blocks with which a launch is made one after the other; `None`: its kernel has no twin.
    pub(crate) fn controls(&self, launch: &Launch, random: &mut Random) -> Option<Vec<Vec<u8>>> {
        if !self.kernels.iter().any(|name| name == launch.kernel) {
            return None;
        }
        let blocks = control::blocks([launch.shape.0, 1, 1]).expect("not too many");
        let parts: Vec<u64> = (0..blocks).map(|_| (random.next() >> 32) % PARTS).collect();
        let control = |part: u64| {
            let mut bytes = vec![0; control::bytes(blocks) as usize];
            for (block, own) in parts.iter().enumerate() {
                bytes[control::CLAIMS as usize + block / 8] |=
                    u8::from(*own != part) << (block % 8);
            }
            bytes
        };
        Some((0..PARTS).map(control).collect())
    }
}
