//! What is known of a program's kernels: which of the words of their parameters they read and write
//! through.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use gpucr_wire::access::{
    Allocation, KernelSummary, KernelUse, Param, Reached, Slot, SlotUse, Touched, WHOLE_BUFFER,
};
use gpucr_wire::reach::Reach;

use crate::engine::interrupted::Level;
use crate::host::process::{Agent, AgentError};
use crate::kernels::{self, Direction, Kernel, Source};

/// A word of a kernel's parameters: the kernel, the parameter, the offset in it.
type Word = (u64, u32, u32);

/// The readable code in an image.
#[derive(Debug)]
struct Code {
    /// By name; of several architectures a kernel has several.
    kernels: HashMap<String, Vec<Kernel>>,
    /// Kernels that can be interrupted, and why others cannot, by name; or why none can.
    twins: Result<HashMap<String, Result<Level, String>>, String>,
    /// There is no other code in the image. Machine code may have been made of another source, as by
    /// `#if __CUDA_ARCH__`.
    all: bool,
}

impl Default for Code {
    /// Of an image that cannot be had.
    fn default() -> Self {
        Self { kernels: HashMap::new(), twins: Err(NO_MODULE.to_owned()), all: false }
    }
}

/// Why a kernel cannot be interrupted whose module is not known, or has no such text.
const NO_MODULE: &str = "its module is not known";
const NO_TEXT: &str = "its name is not in the PTX of its module";

/// So much PTX of one image is read, bytes: what it is turned into takes ten times as much.
const MOST_TEXT: usize = 32 << 20;

/// What is known of the kernels of one process.
#[derive(Debug, Default)]
pub struct Kernels {
    /// The compute capability of the device on which the process runs, 90 for 9.0. Without it nobody looks for kernels
    /// that can be interrupted.
    capability: Option<u32>,
    /// The code in images, by the agent's ids of images.
    images: HashMap<u64, Arc<Code>>,
    /// What code and names say, by the agent's ids of kernels.
    known: HashMap<u64, CodeFacts>,
    /// Words that pointed to memory that did not change while their kernel was launched.
    unchanged: HashSet<Word>,
    /// Words that have pointed to memory that changed meanwhile.
    moved: HashSet<Word>,
}

/// What code and name of a kernel say.
#[derive(Debug, Default)]
struct CodeFacts {
    /// `None` without code.
    indirect: Option<bool>,
    words: HashMap<(u32, u32), (Direction, Source)>,
    /// How far it goes from the addresses in its words; absent where code does not tell.
    reaches: HashMap<(u32, u32), Reach>,
    /// What its code does, if that is what runs.
    proof: Option<Kernel>,
    /// Whether it can be interrupted between two blocks, or why not.
    twin: Option<Result<Level, String>>,
}

impl Kernels {
    /// Of a process on a device of this compute capability, 90 for 9.0.
    pub(super) fn on(capability: u32) -> Self {
        Self { capability: Some(capability), ..Self::default() }
    }

    /// Finds out about kernels that are new, from the images that they were loaded from and from
    /// their names. Images of more than `limit` bytes are not asked for. No further image is begun
    /// after `until`; one takes a few seconds at most. Says whether all kernels are known now.
    ///
    /// # Errors
    /// The agent does not answer. That an image cannot be had or read is no error.
    pub fn learn<'a>(
        &mut self,
        agent: &mut Agent,
        kernels: impl IntoIterator<Item = &'a KernelUse>,
        limit: u64,
        until: Instant,
    ) -> Result<bool, AgentError> {
        let mut all = true;
        for kernel in kernels {
            if self.known.contains_key(&kernel.id) {
                continue;
            }
            if kernel.image != 0 && !self.images.contains_key(&kernel.image) {
                if Instant::now() >= until {
                    all = false;
                    continue;
                }
                let code = match agent.image(kernel.image, limit) {
                    Ok(bytes) => code(&bytes, self.capability),
                    Err(error @ AgentError::Failed { .. }) => {
                        tracing::debug!(%error, "no image");
                        Code::default()
                    }
                    Err(error) => return Err(error),
                };
                self.images.insert(kernel.image, Arc::new(code));
            }
            let code = self.images.get(&kernel.image);
            self.known.insert(kernel.id, CodeFacts::of(kernel, code.map(AsRef::as_ref)));
        }
        Ok(all)
    }

    /// What a word is used for, and what says so. A word of which nothing is known is
    /// [`Direction::Unknown`] and [`Source::Assumed`].
    pub fn direction(&self, kernel: u64, slot: &SlotUse) -> (Direction, Source) {
        let said = self.known.get(&kernel).and_then(|k| k.words.get(&(slot.param, slot.offset)));
        match said {
            Some(said) => *said,
            None => {
                let word = (kernel, slot.param, slot.offset);
                if self.unchanged.contains(&word) && !self.moved.contains(&word) {
                    (Direction::Read, Source::Observed)
                } else {
                    (Direction::Unknown, Source::Assumed)
                }
            }
        }
    }

    /// How far a kernel goes from the addresses in a word, if its code tells.
    pub(super) fn reach(&self, kernel: u64, slot: &SlotUse) -> Option<&Reach> {
        self.known.get(&kernel)?.reaches.get(&(slot.param, slot.offset))
    }

    /// Whether a kernel follows pointers that are not among its parameters; `None` if its code is not
    /// known.
    pub fn is_indirect(&self, kernel: u64) -> Option<bool> {
        self.known.get(&kernel).and_then(|known| known.indirect)
    }

    /// Where a kernel can be interrupted (`gpucr run --interruptible`), or why it cannot. By abort only those launches can
    /// of which doing them twice is the same as doing them once.
    pub(super) fn twin(&self, kernel: u64) -> Result<Level, String> {
        let twin = self.known.get(&kernel).and_then(|known| known.twin.clone());
        twin.unwrap_or_else(|| Err(NO_MODULE.to_owned()))
    }

    /// What the code of a kernel does; `None` unless all that may run is known and could be read.
    pub(super) fn proof(&self, kernel: u64) -> Option<&Kernel> {
        self.known.get(&kernel)?.proof.as_ref()
    }

    /// What code and names say of all kernels so far, for launches that wait. What was only observed is
    /// left out: memory that stayed unchanged was copied early, so no launch waits for it.
    pub fn summaries(&self) -> Vec<KernelSummary> {
        let of = |(kernel, known): (&u64, &CodeFacts)| {
            let words = known.words.iter().filter(|(_, (direction, _))| !direction.writes());
            let mut reads: Vec<Slot> =
                words.map(|(&(param, offset), _)| Slot { param, offset }).collect();
            reads.sort_unstable();
            let slot = |&(param, offset): &(u32, u32)| Slot { param, offset };
            let mut reaches: Vec<Reached> = known
                .reaches
                .iter()
                .map(|(place, reach)| Reached { slot: slot(place), reach: reach.clone() })
                .filter(|reached| reads.binary_search(&reached.slot).is_err())
                .collect();
            reaches.sort_unstable_by_key(|reached| reached.slot);
            KernelSummary {
                kernel: *kernel,
                anywhere: known.indirect == Some(true),
                reads,
                reaches,
            }
        };
        self.known.iter().map(of).collect()
    }

    /// Draws conclusions from what was launched between two hash passes, and what changed
    /// between them. `changed` says of an allocation whether it did, `None` if that is not known.
    pub fn observe<'a>(
        &mut self,
        launched: impl IntoIterator<Item = &'a KernelUse>,
        allocations: impl IntoIterator<Item = &'a Allocation>,
        changed: impl Fn(&Allocation) -> Option<bool>,
    ) {
        // An allocation that is gone may have been written before.
        let unchanged = allocations.into_iter().filter(|one| changed(one) == Some(false));
        let unchanged: HashSet<u64> = unchanged.map(|allocation| allocation.id).collect();
        for kernel in launched {
            for slot in &kernel.slots {
                let stayed_unchanged = |touched: &Touched| unchanged.contains(&touched.allocation);
                let all = !slot.more && slot.touched.iter().all(stayed_unchanged);
                let set = if all { &mut self.unchanged } else { &mut self.moved };
                set.insert((kernel.id, slot.param, slot.offset));
            }
        }
    }
}

#[cfg(test)]
impl Kernels {
    /// What is known of one kernel that was loaded from this image.
    pub(super) fn knowing(kernel: &KernelUse, image: &[u8]) -> Self {
        let known = CodeFacts::of(kernel, Some(&code(image, None)));
        Self { known: HashMap::from([(kernel.id, known)]), ..Self::default() }
    }
}

/// Which kernels in an image can be interrupted on such a device.
fn twins(image: &[u8], capability: u32) -> Result<HashMap<String, Result<Level, String>>, String> {
    let text = gpucr_fatbin::what_runs(image, capability, MOST_TEXT);
    let text = text.map_err(|why| why.to_string())?;
    let rewritten = gpucr_rewrite::rewrite(&text, |_| true).map_err(|error| error.to_string())?;
    let level =
        |twins: gpucr_rewrite::Twins| match (twins.in_loops, twins.at_barriers, twins.aborted) {
            (Ok(_), _, _) => Level::Loop,
            (_, Ok(_), _) => Level::Barrier,
            (_, _, Ok(_)) => Level::Abort,
            _ => Level::Block,
        };
    let judged = rewritten.kernels.into_iter();
    Ok(judged
        .map(|(name, judged)| (name, judged.map(level).map_err(|why| why.to_string())))
        .collect())
}

/// The readable code in an image, and what can be interrupted of it on a device of this compute capability, if that is
/// asked.
fn code(image: &[u8], capability: Option<u32>) -> Code {
    // Machine code tells the layout only, which is known from the driver.
    let (texts, all) = gpucr_fatbin::texts(image, MOST_TEXT);
    let mut code = Code { all, ..Code::default() };
    if let Some(capability) = capability {
        code.twins = twins(image, capability);
    }
    for text in texts {
        match kernels::from_ptx(&text) {
            Ok(kernels) => {
                for kernel in kernels {
                    code.kernels.entry(kernel.name.clone()).or_default().push(kernel);
                }
            }
            Err(error) => {
                tracing::debug!(%error, "PTX that cannot be read");
                code.all = false;
            }
        }
    }
    code
}

impl CodeFacts {
    fn of(kernel: &KernelUse, code: Option<&Code>) -> Self {
        let named = code.and_then(|code| code.kernels.get(&kernel.name)).into_iter().flatten();
        let (fitting, others): (Vec<&Kernel>, Vec<&Kernel>) =
            named.partition(|code| is_of(&kernel.params, code));
        let twin = code.map(|code| match &code.twins {
            Ok(twins) => {
                twins.get(&kernel.name).cloned().unwrap_or_else(|| Err(NO_TEXT.to_owned()))
            }
            Err(why) => Err(why.clone()),
        });
        let mut known = Self { twin, ..Self::default() };
        if let Some(said) = fitting.into_iter().cloned().reduce(|all, one| all.or(&one)) {
            known.indirect = Some(said.indirect);
            for (number, param) in said.params.iter().enumerate() {
                for word in &param.words {
                    let place = (number as u32, word.offset);
                    // What the code leaves open, its name may tell.
                    if word.direction != Direction::Unknown {
                        known.words.insert(place, (word.direction, Source::Ptx));
                    }
                    known.reaches.extend(word.reach.clone().map(|reach| (place, reach)));
                }
            }
            let is_all = code.is_some_and(|code| code.all) && others.is_empty();
            known.proof = (kernel.known && is_all).then_some(said);
        }
        let named = kernels::from_name(&kernel.name).unwrap_or_default();
        if named.len() == kernel.params.len() {
            for (number, direction) in named.into_iter().enumerate() {
                if let Some(direction) = direction {
                    known.words.entry((number as u32, 0)).or_insert((direction, Source::Name));
                }
            }
        }
        debug_assert!(known.words.keys().all(|(param, _)| *param != WHOLE_BUFFER));
        known
    }
}

/// Whether code has the parameters that the driver reports: then it is that of the kernel.
fn is_of(params: &[Param], code: &Kernel) -> bool {
    let same = |(ours, theirs): (&Param, &kernels::Param)| {
        (ours.offset, ours.size) == (theirs.offset, theirs.size)
    };
    params.len() == code.params.len() && params.iter().zip(&code.params).all(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "\
.version 8.0
.target sm_70
.address_size 64
.visible .entry copy(.param .u64 to, .param .u64 from)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [to];
    ld.param.u64 %rd2, [from];
    ld.global.u32 %r1, [%rd2];
    st.global.u32 [%rd1], %r1;
    ret;
}
";

    fn kernel(name: &str, params: &[(u32, u32)]) -> KernelUse {
        let params = params.iter().map(|&(offset, size)| Param { offset, size }).collect();
        KernelUse { id: 1, name: name.to_owned(), known: true, params, ..KernelUse::default() }
    }

    fn slot(param: u32, allocations: &[u64]) -> SlotUse {
        let touched =
            |allocation: &u64| Touched { allocation: *allocation, low: 0, high: 0, launches: 1 };
        SlotUse { param, touched: allocations.iter().map(touched).collect(), ..SlotUse::default() }
    }

    #[test]
    fn code_counts_if_it_is_the_kernels_own() {
        let found = Kernels::knowing(&kernel("copy", &[(0, 8), (8, 8)]), PTX.as_bytes());
        assert_eq!(found.direction(1, &slot(0, &[])), (Direction::Write, Source::Ptx));
        assert_eq!(found.direction(1, &slot(1, &[])), (Direction::Read, Source::Ptx));
        assert_eq!(found.is_indirect(1), Some(false));
        let reads = vec![Slot { param: 1, offset: 0 }];
        let reach = Reach { low: 0, end: 4, terms: Vec::new() };
        let reaches = vec![Reached { slot: Slot { param: 0, offset: 0 }, reach }];
        assert_eq!(
            found.summaries(),
            [KernelSummary { kernel: 1, anywhere: false, reads, reaches }]
        );
        let other = Kernels::knowing(&kernel("copy", &[(0, 8), (8, 4)]), PTX.as_bytes());
        assert_eq!(other.direction(1, &slot(0, &[])), (Direction::Unknown, Source::Assumed));
        assert_eq!(other.is_indirect(1), None);
    }

    #[test]
    fn names_tell_what_there_is_no_code_for() {
        // copy(int*, int const*)
        let found = Kernels::knowing(&kernel("_Z4copyPiPKi", &[(0, 8), (8, 8)]), PTX.as_bytes());
        assert_eq!(found.direction(1, &slot(0, &[])), (Direction::Unknown, Source::Assumed));
        assert_eq!(found.direction(1, &slot(1, &[])), (Direction::Read, Source::Name));
    }

    #[test]
    fn what_never_changed_under_a_kernel_is_read() {
        let mut kernel = kernel("secret", &[(0, 8), (8, 8)]);
        kernel.slots = vec![slot(0, &[10, 11]), slot(1, &[10])];
        let mut found = Kernels::knowing(&kernel, b"");
        let allocation = |id| Allocation { id, address: 0, size: 1 };
        let (kernels, live) = ([kernel.clone()], [allocation(10), allocation(11)]);
        let observed = (Direction::Read, Source::Observed);
        let assumed = (Direction::Unknown, Source::Assumed);
        found.observe(&kernels, &live, |allocation| Some(allocation.id == 11));
        assert_eq!(found.direction(1, &slot(0, &[])), assumed, "one of its two changed");
        assert_eq!(found.direction(1, &slot(1, &[])), observed);
        // Where it cannot be told, and where the allocation is gone, it is not.
        found.observe(&kernels, &live, |_| None);
        assert_eq!(found.direction(1, &slot(1, &[])), assumed);
        let mut found = Kernels::knowing(&kernel, b"");
        found.observe(&kernels, &[], |_| Some(false));
        assert_eq!(found.direction(1, &slot(1, &[])), assumed);
    }

    #[test]
    fn it_is_told_which_kernels_can_be_interrupted() {
        let twins = twins(PTX.as_bytes(), 80).unwrap();
        assert_eq!(twins.get("copy"), Some(&Ok(Level::Block)));
        let variable = ".version 8.0\n.target sm_70\n.address_size 64\n.global .u32 sum;\n\
            .visible .entry add()\n{\n.reg .b32 %r<2>;\nld.global.u32 %r1, [sum];\nret;\n}\n";
        let why = super::twins(variable.as_bytes(), 80).unwrap()["add"].clone();
        assert_eq!(why, Err("it uses the module's variable sum".to_owned()));
        let why = super::twins(b"\x7fELF\x02\x01\x01", 80);
        assert!(why.is_err_and(|why| why.contains("machine code")));
        let nothing = Kernels::default().twin(1);
        assert_eq!(nothing, Err(NO_MODULE.to_owned()));
    }
}
