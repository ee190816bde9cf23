//! Jobs whose kernels are run in parts, as if they had been interrupted again and again.

use gpucr_kernels::Kernel;
use gpucr_rewrite::hostile::{LOOKS, haunted};
use gpucr_rewrite::{Aborted, AtBarriers, How, InLoops, Polls, control, rewrite_with};
use gpucr_wire::twice::{Place, Twice, words};

use super::job::{Argument, Job, Launch};
use super::table::Random;

/// In so many parts is a launch made that is interrupted between two of its blocks.
const PARTS: u64 = 3;
/// After so many launches one that is interrupted in loops or at barriers is left alone.
const MOST_LAUNCHES: u32 = 40;
/// As many as there are.
const NEVER: u32 = u32::MAX;

/// Where kernels are interrupted, if they can be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Blocks,
    Loops,
    Barriers,
    /// They end anywhere and begin again, if doing the launch twice is the same as doing it once.
    Aborted,
}

/// The twins of a kernel.
struct Twin {
    name: String,
    in_loops: Option<InLoops>,
    at_barriers: Option<AtBarriers>,
    /// And what its code does.
    aborted: Option<(Aborted, Kernel)>,
}

/// A job with twins in the place of its kernels, as far as they can have one.
pub(crate) struct Twins {
    pub(crate) ptx: String,
    kernels: Vec<Twin>,
    pub(crate) level: Level,
}

/// How a launch is made.
pub(crate) struct Parts {
    /// The kernel.
    pub(crate) name: String,
    /// The control block for the next launch.
    pub(crate) control: Vec<u8>,
    left: Left,
}

/// What comes after a launch.
enum Left {
    /// Launches with these.
    Blocks(Vec<Vec<u8>>),
    /// Launches, until all threads or blocks have come to their ends.
    Inside { level: Level, all: u64, every: u32, launches: u32 },
}

impl Twins {
    pub(crate) fn of(job: &Job, level: Level) -> Twins {
        // Each thread looks at each end of a loop of some instructions.
        let polls = Polls { every: 1, least: 12, part: 12, meetings: 1 };
        let rewritten =
            rewrite_with(&job.ptx, |_| true, How { polls, ..How::default() }).expect("PTX");
        let kernels = rewritten.kernels.into_iter();
        let codes = gpucr_kernels::from_ptx(&job.ptx).expect("PTX");
        let kernels = kernels.filter_map(|(name, judged)| {
            let twins = judged.ok()?;
            let code = codes.iter().find(|code| code.name == name).cloned();
            let (in_loops, at_barriers) = (twins.in_loops.ok(), twins.at_barriers.ok());
            Some(Twin { name, in_loops, at_barriers, aborted: twins.aborted.ok().zip(code) })
        });
        Twins { ptx: haunted(&rewritten.text), kernels: kernels.collect(), level }
    }

    /// How a launch is made; `None`: its kernel has no such twin.
    pub(crate) fn parts(&self, launch: &Launch, random: &mut Random) -> Option<Parts> {
        let known = self.kernels.iter().find(|twin| twin.name == launch.kernel);
        let Twin { name, in_loops, at_barriers, aborted } = known?;
        let (grid, block, dynamic) = launch.shape;
        let blocks = control::blocks([grid, 1, 1]).expect("not too many");
        if let (Level::Loops, Some(in_loops)) = (self.level, in_loops) {
            let threads = blocks * u64::from(block);
            let bytes = control::bytes_in_loops(threads, in_loops.saved).expect("not too many");
            let every = 1 + (random.next() >> 32) as u32 % 97;
            let mut control = vec![0; bytes as usize];
            set_every(&mut control, every);
            let left = Left::Inside { level: self.level, all: threads, every, launches: 1 };
            return Some(Parts { name: in_loops.name.clone(), control, left });
        }
        if let (Level::Barriers, Some(twin)) = (self.level, at_barriers) {
            let dynamic = twin.dynamic.map_or(0, |_| u64::from(dynamic).next_multiple_of(16));
            let (threads, together) = (u64::from(block), twin.shared + dynamic);
            let layout = control::AtBarriers::of(blocks, threads, twin.saved, together, 8);
            let layout = layout.expect("not too large");
            let every = 1 + (random.next() >> 32) as u32 % 23;
            let mut control = vec![0; layout.bytes as usize];
            control[control::SLOTS as usize..][..4]
                .copy_from_slice(&(layout.slots as u32).to_le_bytes());
            set_every(&mut control, every);
            let left = Left::Inside { level: self.level, all: blocks, every, launches: 1 };
            return Some(Parts { name: twin.name.clone(), control, left });
        }
        if let (Level::Aborted, Some((twin, code))) = (self.level, aborted)
            && is_same_twice(code, launch)
        {
            let all = blocks * if twin.by_blocks { 1 } else { u64::from(block) };
            let every = 1 + (random.next() >> 32) as u32 % 97;
            let mut control =
                vec![0; control::bytes_in_loops(all, 0).expect("not too many") as usize];
            set_every(&mut control, every);
            let left = Left::Inside { level: self.level, all, every, launches: 1 };
            return Some(Parts { name: twin.name.clone(), control, left });
        }
        let parts: Vec<u64> = (0..blocks).map(|_| (random.next() >> 32) % PARTS).collect();
        let control = |part: u64| {
            let mut bytes = vec![0; control::bytes(blocks) as usize];
            for (block, own) in parts.iter().enumerate() {
                bytes[control::CLAIMS as usize + block / 8] |=
                    u8::from(*own != part) << (block % 8);
            }
            bytes
        };
        let left = Left::Blocks((1..PARTS).map(control).collect());
        Some(Parts { name: name.clone(), control: control(0), left })
    }
}

impl Parts {
    /// Goes on to the next launch, by the control block that the last one has left; false if there is none.
    pub(crate) fn go_on(&mut self, after: Vec<u8>) -> bool {
        match &mut self.left {
            Left::Blocks(left) => left.pop().map(|control| self.control = control).is_some(),
            Left::Inside { all, every, launches, .. } => {
                // Of states of threads and of blocks alike.
                if control::done(&after, *all, 1) == *all {
                    return false;
                }
                *launches += 1;
                assert!(*launches <= MOST_LAUNCHES + 1, "it was not interrupted any more");
                self.control = after;
                let every = if *launches > MOST_LAUNCHES { NEVER } else { *every };
                set_every(&mut self.control, every);
                // The first look is none that finds it raised.
                self.control[LOOKS[0] as usize..][..4].copy_from_slice(&1u32.to_le_bytes());
                true
            }
        }
    }

    /// Whether it was made in more than one at this level.
    pub(crate) fn is_at(&self, level: Level) -> bool {
        match self.left {
            Left::Blocks(_) => level == Level::Blocks,
            Left::Inside { level: own, launches, .. } => level == own && launches > 1,
        }
    }
}

/// Whether doing a launch twice is the same as doing it once. Each buffer is an allocation.
fn is_same_twice(code: &Kernel, launch: &Launch) -> bool {
    let params: Vec<(u32, u32)> =
        code.params.iter().map(|param| (param.offset, param.size)).collect();
    let place = |(param, offset): (u32, u32)| match launch.arguments[param as usize] {
        Argument::Buffer(buffer) if offset == 0 => Place { at: buffer as u8 + 1, before: 0 },
        _ => Place::default(),
    };
    let places: Vec<Place> = words(params.iter().copied()).map(place).collect();
    let code = gpucr_kernels::code(code, &params);
    code.is_ok_and(|code| code.twice(&places) == Twice::Same)
}

fn set_every(control: &mut [u8], every: u32) {
    control[LOOKS[1] as usize..][..4].copy_from_slice(&every.to_le_bytes());
}
