//! Whether a kernel that is done twice leaves what it leaves when it is done once.
//!
//! It does if it reads nothing that it writes. [`Twice::Same`] is said only where the code proves that: the
//! code is all that can run, it follows no pointer but its arguments, it depends on nothing but memory,
//! and each argument through which it goes has always pointed to an allocation that is followed, or the
//! kernel only reads, or only writes. An argument leads to the whole of its allocation: how far the code
//! goes in it (`kernels/ptx/reach.rs`) holds for numbers that do not overflow, which nobody has proven.
//!
//! `docs/access-sets.md` names what is taken for granted.

use std::collections::BTreeMap;
use std::ops::Range;

use gpucr_wire::access::{Allocation, KernelUse, RESERVATION, SlotUse};

use super::Kernels;
use crate::kernels::Direction;

/// What doing a kernel twice does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Twice {
    /// The same as doing it once.
    Same,
    /// Something else, for this reason.
    Differs(&'static str),
    /// Nobody knows, for this reason.
    Unknown(&'static str),
}

impl Twice {
    /// Gives what a report says: whether it is the same if that is known, and the reason if it is not.
    pub(super) fn told(self) -> (Option<bool>, Option<&'static str>) {
        match self {
            Self::Same => (Some(true), None),
            Self::Differs(reason) => (Some(false), Some(reason)),
            Self::Unknown(reason) => (None, Some(reason)),
        }
    }
}

/// What a kernel reads, or what it writes.
#[derive(Debug, Default)]
struct Side {
    /// Memory that is not followed: of pools, of the host, of variables. It may be any.
    elsewhere: bool,
    /// Variables of the module, by their names.
    variables: bool,
    /// Addresses that the program has reserved itself: the same memory may be at two of them.
    reserved: bool,
    /// Addresses of allocations.
    ranges: Vec<Range<u64>>,
}

impl Side {
    fn is_empty(&self) -> bool {
        !self.elsewhere && !self.variables && !self.reserved && self.ranges.is_empty()
    }

    /// An allocation that an argument has pointed to; `below` if the code goes down from there.
    fn add(&mut self, id: u64, allocation: Option<&Allocation>, below: bool) {
        match allocation {
            Some(_) if id & RESERVATION != 0 => self.reserved = true,
            Some(a) => {
                // An address behind one allocation is the beginning of the next, and leads back.
                let start = a.address.saturating_sub(below.into());
                self.ranges.push(start..a.address.saturating_add(a.size));
            }
            // The allocation was gone when it was asked for.
            None => self.elsewhere = true,
        }
    }

    fn take(&mut self, other: &Self) {
        self.elsewhere |= other.elsewhere;
        self.variables |= other.variables;
        self.reserved |= other.reserved;
        self.ranges.extend(other.ranges.iter().cloned());
    }

    fn overlaps(&self, other: &Self) -> bool {
        let sides = [&self.ranges, &other.ranges];
        let of = |side: usize| sides[side].iter().map(move |range| (range.start, range.end, side));
        let mut all: Vec<(u64, u64, usize)> = of(0).chain(of(1)).collect();
        all.sort_unstable();
        // How far each side has come.
        let mut ends = [0, 0];
        all.into_iter().any(|(start, end, side)| {
            ends[side] = end.max(ends[side]);
            start < ends[1 - side]
        })
    }
}

/// What the launches of a kernel, as far as they were seen, would do if they were done twice.
pub(super) fn twice(
    kernel: &KernelUse,
    kernels: &Kernels,
    allocations: &BTreeMap<u64, Allocation>,
) -> Twice {
    use Twice::{Differs, Same, Unknown};
    let Some(code) = kernels.proof(kernel.id) else {
        return Unknown("its code is not known");
    };
    if code.indirect {
        return Unknown("follows pointers in memory");
    }
    if !code.closed {
        return Unknown("more than memory counts");
    }
    if kernel.slots.iter().any(|slot| slot.more) {
        return Unknown("not all arguments were noted");
    }
    let (mut read, mut written, mut in_place) = (Side::default(), Side::default(), false);
    read.variables = code.variables.reads();
    written.variables = code.variables.writes();
    for (number, param) in code.params.iter().enumerate() {
        for word in param.words.iter().filter(|word| word.direction != Direction::None) {
            if word.direction == Direction::Unknown {
                return Unknown("its code is not understood");
            }
            let place = (number as u32, word.offset);
            let slot = kernel.slots.iter().find(|slot| (slot.param, slot.offset) == place);
            let mut side = Side { elsewhere: seen(slot) < kernel.launches, ..Side::default() };
            for touched in slot.iter().flat_map(|slot| &slot.touched) {
                let allocation = allocations.get(&touched.allocation);
                let below = allocation.is_some_and(|one| {
                    let reach = word.reach.as_ref();
                    let all = 0..u64::MAX;
                    let range =
                        reach.map(|r| r.within(&kernel.sizes, touched.low, touched.high, all));
                    range.is_some_and(|range| range.start < one.address)
                });
                side.add(touched.allocation, allocation, below);
            }
            in_place |= word.direction == Direction::ReadWrite && seen(slot) > 0;
            if word.direction.reads() {
                read.take(&side);
            }
            if word.direction.writes() {
                written.take(&side);
            }
        }
    }
    match () {
        () if in_place => Differs("reads and writes one argument"),
        () if read.is_empty() || written.is_empty() => Same,
        () if read.elsewhere || written.elsewhere => Unknown("memory that is not followed"),
        () if read.variables && written.variables => Unknown("variables of its module"),
        () if read.reserved && written.reserved => Unknown("memory mapped by the program"),
        () if read.overlaps(&written) => Unknown("reads and writes one allocation"),
        () => Same,
    }
}

/// In how many launches a word has pointed to an allocation.
fn seen(slot: Option<&SlotUse>) -> u64 {
    slot.map_or(0, |slot| slot.touched.iter().map(|touched| touched.launches).sum())
}

#[cfg(test)]
mod tests {
    use gpucr_wire::access::{Param, Touched};
    use gpucr_wire::reach::Sizes;

    use super::Twice::{Differs, Same, Unknown};
    use super::*;

    /// Two allocations, one behind the other, and what the program has mapped itself.
    const FIRST: u64 = 1;
    const SECOND: u64 = 2;
    const MAPPED: u64 = RESERVATION | 0x7000_0000;
    /// Memory of a pool or of the host: no allocation is found for it.
    const ELSEWHERE: u64 = 0;

    fn image(body: &str) -> String {
        format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n\
             .global .align 8 .u64 total; .const .align 8 .u64 scale;\n\
             .extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 v);\n\
             .visible .entry k(.param .u64 a, .param .u64 b)\n{{\n\
             .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b64 %a, %b;\n\
             ld.param.u64 %a, [a]; ld.param.u64 %b, [b];\n{body}\nret;\n}}\n"
        )
    }

    /// A kernel of two words, and for each of its launches where they pointed.
    fn launched(launches: &[[u64; 2]]) -> KernelUse {
        let slot = |param: usize| {
            let mut slot = SlotUse { param: param as u32, ..SlotUse::default() };
            for allocation in launches.iter().map(|to| to[param]).filter(|to| *to != ELSEWHERE) {
                let at = place(allocation).map_or(0, |one| one.address);
                slot.touched.push(Touched { allocation, low: at, high: at, launches: 1 });
            }
            slot
        };
        KernelUse {
            id: 1,
            name: "k".to_owned(),
            known: true,
            params: vec![Param { offset: 0, size: 8 }, Param { offset: 8, size: 8 }],
            launches: launches.len() as u64,
            sizes: Sizes::of([1; 3], [32, 1, 1]),
            slots: vec![slot(0), slot(1)],
            ..KernelUse::default()
        }
    }

    fn place(id: u64) -> Option<Allocation> {
        let (address, size) = match id {
            FIRST => (0x1000_0000, 0x1000),
            SECOND => (0x1000_1000, 0x1000),
            MAPPED => (0x7000_0000, 0x1000),
            _ => return None,
        };
        Some(Allocation { id, address, size })
    }

    fn judged(image: &[u8], kernel: &KernelUse) -> Twice {
        let known = [FIRST, SECOND, MAPPED].into_iter().filter_map(place);
        let allocations = known.map(|one| (one.id, one)).collect();
        twice(kernel, &Kernels::knowing(kernel, image), &allocations)
    }

    #[track_caller]
    fn check(body: &str, launches: &[[u64; 2]], expected: Twice) {
        let found = judged(image(body).as_bytes(), &launched(launches));
        assert_eq!(found, expected, "{body} {launches:?}");
    }

    const COPY: &str = "ld.global.u32 %r1, [%b]; st.global.u32 [%a], %r1;";

    #[test]
    fn reading_one_allocation_and_writing_another_is_the_same_twice() {
        check(COPY, &[[FIRST, SECOND]], Same);
        check(COPY, &[[FIRST, SECOND], [FIRST, MAPPED]], Same);
        check("st.global.u32 [%a], 7; st.global.u32 [%b], 7;", &[[FIRST, FIRST]], Same);
        check("ld.global.u32 %r1, [%a];", &[[ELSEWHERE, ELSEWHERE]], Same);
        check("ld.global.u32 %r1, [%a]; st.global.u32 [%a], %r1;", &[[FIRST, SECOND]], IN_PLACE);
        check("red.global.add.u32 [%a], 1;", &[[FIRST, SECOND]], IN_PLACE);
        let one = Unknown("reads and writes one allocation");
        check(COPY, &[[FIRST, FIRST]], one);
        check(COPY, &[[FIRST, SECOND], [SECOND, FIRST]], one);
    }

    const IN_PLACE: Twice = Differs("reads and writes one argument");
    const NOT_FOLLOWED: Twice = Unknown("memory that is not followed");

    /// Pools, memory of the host, and variables whose address is an argument.
    #[test]
    fn memory_that_is_not_followed_may_be_any() {
        check(COPY, &[[FIRST, ELSEWHERE]], NOT_FOLLOWED);
        check(COPY, &[[ELSEWHERE, SECOND]], NOT_FOLLOWED);
        check(COPY, &[[ELSEWHERE, ELSEWHERE]], NOT_FOLLOWED);
        check(COPY, &[[FIRST, SECOND], [FIRST, ELSEWHERE]], NOT_FOLLOWED);
        check("red.global.add.u32 [%a], 1;", &[[ELSEWHERE, FIRST]], NOT_FOLLOWED);
        // An allocation that was gone when its place was asked for.
        check(COPY, &[[FIRST, 99]], NOT_FOLLOWED);
        check(COPY, &[[MAPPED, MAPPED]], Unknown("memory mapped by the program"));
        check(COPY, &[[MAPPED, SECOND]], Same);
    }

    #[test]
    fn variables_of_the_module_are_memory_too() {
        let variables = Unknown("variables of its module");
        check("atom.global.add.u64 %rd1, [total], 1;", &[[FIRST, SECOND]], variables);
        let count =
            "ld.global.u64 %rd1, [total]; st.global.u64 [total], 3; st.global.u64 [%a], %rd1;";
        check(count, &[[FIRST, SECOND]], variables);
        let read = "ld.global.u64 %rd1, [total]; st.global.u64 [%a], %rd1;";
        check(read, &[[FIRST, SECOND]], Same);
        // The variable may be what the argument points to.
        check(read, &[[ELSEWHERE, SECOND]], NOT_FOLLOWED);
        let constant = "ld.const.u64 %rd1, [scale]; st.global.u64 [%a], %rd1;";
        check(constant, &[[FIRST, SECOND]], Same);
        check(constant, &[[ELSEWHERE, SECOND]], NOT_FOLLOWED);
        check("st.global.u64 [total], 3; ld.global.u32 %r1, [%b];", &[[FIRST, SECOND]], Same);
        check("st.global.u64 [total], 3; ld.global.u32 %r1, [%b];", &[[FIRST, 0]], NOT_FOLLOWED);
    }

    #[test]
    fn more_than_memory_may_count() {
        let print = ".local .b64 x; mov.u64 %rd1, x; { .param .b64 f; .param .b64 v; .param .b32 r;
            st.param.b64 [f], %rd1; st.param.b64 [v], %rd1; call (r), vprintf, (f, v); }";
        for body in [
            "mov.u64 %rd1, %clock64; st.global.u64 [%a], %rd1;",
            "mov.u64 %rd1, %globaltimer; st.global.u64 [%a], %rd1;",
            "mov.u32 %r1, %smid; st.global.u32 [%a], %r1;",
            "activemask.b32 %r1; st.global.u32 [%a], %r1;",
            "frobnicate.u32 %r1; st.global.u32 [%a], %r1;",
            print,
        ] {
            check(body, &[[FIRST, SECOND]], Unknown("more than memory counts"));
        }
        let place = "mov.u32 %r1, %tid.x; mov.u32 %r2, %laneid; mov.u32 %r3, %lanemask_lt;
            st.global.u32 [%a], %r1;";
        check(place, &[[FIRST, SECOND]], Same);
    }

    #[test]
    fn pointers_in_memory_lead_anywhere() {
        let follow = "ld.global.u64 %rd1, [%a]; st.global.u32 [%rd1], 1;";
        check(follow, &[[FIRST, SECOND]], Unknown("follows pointers in memory"));
        let mut kernel = launched(&[[FIRST, SECOND]]);
        kernel.slots[1].more = true;
        let found = judged(image(COPY).as_bytes(), &kernel);
        assert_eq!(found, Unknown("not all arguments were noted"));
    }

    /// The address behind an allocation is one of the next: code that goes down from there is in the first.
    #[test]
    fn an_argument_may_be_the_end_of_an_allocation() {
        let back = "ld.global.u32 %r1, [%b+-4]; st.global.u32 [%a], %r1;";
        check(back, &[[FIRST, SECOND]], Unknown("reads and writes one allocation"));
        check(back, &[[SECOND, FIRST]], Same);
    }

    /// The name says `k(int*, int const*)`, and machine code may have been made of other source.
    #[test]
    fn only_code_that_runs_is_a_proof() {
        let unknown = Unknown("its code is not known");
        let mut kernel = launched(&[[FIRST, SECOND]]);
        kernel.name = "_Z1kPiPKi".to_owned();
        assert_eq!(judged(b"", &kernel), unknown);
        assert_eq!(judged(image(COPY).as_bytes(), &kernel), unknown, "code of another kernel");
        let renamed = image(COPY).replace(".entry k", ".entry _Z1kPiPKi");
        assert_eq!(judged(renamed.as_bytes(), &kernel), Same);
        let none = KernelUse { slots: Vec::new(), ..launched(&[[ELSEWHERE, ELSEWHERE]]) };
        assert_eq!(judged(b"", &none), unknown);

        // scale(unsigned*, unsigned)
        let mut scale = launched(&[[FIRST, ELSEWHERE]]);
        scale.name = "scale".to_owned();
        scale.params[1].size = 4;
        macro_rules! fatbin {
            ($name:literal) => {
                include_bytes!(concat!("../../../../softcuda/tests/fatbin/", $name, ".fatbin"))
            };
        }
        assert_eq!(judged(fatbin!("plain"), &scale), IN_PLACE);
        assert_eq!(judged(fatbin!("both"), &scale), unknown);
    }

    #[test]
    fn ranges_overlap_if_they_share_a_byte() {
        let side = |ranges: &[(u64, u64)]| {
            let ranges = ranges.iter().map(|(start, end)| *start..*end).collect();
            Side { ranges, ..Side::default() }
        };
        for (one, two, expected) in [
            (side(&[(0, 4)]), side(&[(4, 8)]), false),
            (side(&[(0, 5)]), side(&[(4, 8)]), true),
            (side(&[(0, 20), (2, 3)]), side(&[(10, 11)]), true),
            (side(&[(0, 2), (8, 9)]), side(&[(2, 8), (9, 10)]), false),
            (side(&[(5, 6)]), side(&[(5, 6)]), true),
            (side(&[]), side(&[(0, u64::MAX)]), false),
        ] {
            assert_eq!((one.overlaps(&two), two.overlaps(&one)), (expected, expected), "{one:?}");
        }
    }
}
