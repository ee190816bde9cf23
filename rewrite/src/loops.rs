//! Twins that are interrupted in their loops: each thread looks at the flag at branches that go back, saves what it
//! needs from there on, and ends; when the twin is launched again, it goes on from there.
//!
//! Every way that does not come to an end goes back somewhere, so no thread runs on for long. The name of the place is
//! that of the label to which it goes back: a thread that is interrupted has taken the branch, and is about to run what
//! follows the label.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;
use std::ops::Range;

use crate::body::{Body, Kind, What, read};
use crate::control::{BLOCK, FIRST_SAVED, RUN, STATES};
use crate::edits::edited;
use crate::inside::Inside;
use crate::live;
use crate::unroll::Copies;
use crate::writer::{Loop, Polls, Writer, moved};

/// A kernel that has more loops is not interrupted in them.
const MOST_LOOPS: usize = 128;

/// What is put in the place of parts of a body.
pub(crate) struct Changed {
    pub(crate) edits: Vec<(Range<usize>, String)>,
    /// Right behind the opening brace.
    pub(crate) begin: String,
    /// Before the closing brace.
    pub(crate) end: String,
    /// What each thread saves, bytes.
    pub(crate) saved: u64,
}

impl Changed {
    /// What was put into `longer`, put into the text that `longer` was made of.
    pub(crate) fn made_of(self, longer: &str, text: &str) -> Self {
        let all = edited(longer, 0..longer.len(), self.edits);
        Self { edits: vec![(0..text.len(), all)], ..self }
    }
}

/// The body of a twin, by the text between the braces of its kernel. `parameter` is the name of the address of the control
/// block.
pub(crate) fn change(text: &str, parameter: &str, polls: Polls) -> Result<Changed, Inside> {
    let body = read(text)?;
    let mut loops = loops(&body)?;
    let labels: Vec<usize> = loops.iter().map(|one| one.label).collect();
    let live = live::at(&body, &labels)?;
    let needed: HashSet<u32> = live.iter().flatten().copied().collect();
    let (again, kept) = live::again(&body, &needed);
    let mut saved = 0;
    for (one, live) in loops.iter_mut().zip(&live) {
        let bytes;
        (one.slots, bytes) = slots(&body, live.iter().filter(|register| kept.contains(register)));
        saved = saved.max(bytes);
    }
    let writer = Writer::new(text, &body, &loops, parameter, polls);
    let edits = writer.edits();
    Ok(Changed { edits, begin: writer.begin(), end: writer.end(&again), saved })
}

/// The labels to which branches go back, in their order.
pub(crate) fn loops(body: &Body<'_>) -> Result<Vec<Loop>, Inside> {
    let mut found: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (at, item) in body.items.iter().enumerate() {
        if let What::Step(step) = &item.what {
            for label in live::targets(body, step)?.into_iter().filter(|label| *label <= at) {
                found.entry(label).or_default().push(at);
            }
        }
    }
    match found.len() {
        0 => Err(Inside::Straight),
        1..=MOST_LOOPS => {
            let new = |(label, back)| Loop { label, back, slots: Vec::new() };
            Ok(found.into_iter().map(new).collect())
        }
        _ => Err(Inside::Size),
    }
}

/// Where registers go among what a thread saves: the wide ones first, so that each is where its size allows. And how many
/// bytes that is.
pub(crate) fn slots<'r>(
    body: &Body<'_>,
    live: impl Iterator<Item = &'r u32>,
) -> (Vec<(u32, u64)>, u64) {
    let size = |register: u32| match body.registers[register as usize].kind {
        Kind::Bytes(8) => 8,
        _ => 4,
    };
    let mut registers: Vec<u32> = live.copied().collect();
    registers.sort_by_key(|register| (std::cmp::Reverse(size(*register)), *register));
    let mut bytes = 0;
    let place = |register| {
        let at = bytes;
        bytes += size(register);
        (register, at)
    };
    (registers.into_iter().map(place).collect(), bytes)
}

impl<'a> Writer<'_, 'a> {
    pub(crate) fn edits(&self) -> Vec<(Range<usize>, String)> {
        let mut edits = Vec::new();
        let copies = Copies::of(self);
        let mut ends = HashSet::new();
        for (number, one) in self.loops.iter().enumerate() {
            if let Some(counted) = self.counted(number) {
                ends.insert(one.back[0]);
                edits.extend(counted.edits(self.body, one));
            }
        }
        for (at, item) in self.body.items.iter().enumerate() {
            match &item.what {
                What::Label(label) => {
                    if let Some(number) = self.number(label) {
                        let start = item.span.start;
                        edits.push((start..start, self.first(number)));
                    }
                }
                What::Step(_) if ends.contains(&at) => {}
                What::Step(step) => match copies.at(at) {
                    Some(copies) => edits.push((item.span.clone(), copies)),
                    None => edits.extend(self.step_edits(at, step)),
                },
                What::Targets(listed) => {
                    for (label, place) in listed {
                        if let Some(number) = self.number(label) {
                            edits.push((place.clone(), format!("$gpucr_poll_{number}")));
                        }
                    }
                }
                What::Open | What::Close | What::Declaration | What::Remark => {}
            }
        }
        edits
    }

    /// A thread that has been run, or is being run by another launch, ends; one that is saved goes on.
    fn begin(&self) -> String {
        let parameter = self.parameter;
        let first: String = (0..self.loops.len()).map(|number| self.first(number)).collect();
        format!(
            "
	.reg .pred %gpucr_is;
	.reg .b32 %gpucr_a, %gpucr_b, %gpucr_c, %gpucr_state;
	.reg .b64 %gpucr_at, %gpucr_to;
{}	ld.param.u64 %gpucr_at, [{parameter}];
	ld.volatile.global.u32 %gpucr_state, [%gpucr_at];
	setp.ne.u32 %gpucr_is, %gpucr_state, 0;
	@%gpucr_is exit;
{BLOCK}{THREAD}	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
	atom.global.exch.b32 %gpucr_state, [%gpucr_to+{STATES}], {RUN};
{first}	setp.ne.u32 %gpucr_is, %gpucr_state, 0;
	@%gpucr_is bra $gpucr_resume;
",
            self.declared()
        )
    }

    fn end(&self, again: &[usize]) -> String {
        let mut end = String::from("\n	ret;\n");
        for number in 0..self.loops.len() {
            end += &self.poll(number);
        }
        let parameter = self.parameter;
        let _ = write!(
            end,
            "$gpucr_resume:
	setp.eq.u32 %gpucr_is, %gpucr_state, {RUN};
	@%gpucr_is exit;
	membar.gl;
	ld.param.u64 %gpucr_at, [{parameter}];
{BLOCK}{THREAD}{THREADS}"
        );
        for item in again {
            end += "	";
            end += &self.text[self.body.items[*item].span.clone()];
            end += "\n";
        }
        for number in 0..self.loops.len() {
            let state = FIRST_SAVED + number as u32;
            let _ = write!(
                end,
                "	setp.eq.u32 %gpucr_is, %gpucr_state, {state};
	@%gpucr_is bra $gpucr_load_{number};
"
            );
        }
        // Nobody writes such a state.
        end += "	trap;\n";
        for (number, one) in self.loops.iter().enumerate() {
            let _ = writeln!(end, "$gpucr_load_{number}:");
            for (register, place) in &one.slots {
                end += &self.slot(*register, *place, true);
            }
            let _ = writeln!(end, "	bra {};", self.label(one));
        }
        end
    }

    /// Where branches go that go back.
    fn poll(&self, number: usize) -> String {
        let one = &self.loops[number];
        let (label, parameter, not_yet) = (self.label(one), self.parameter, self.not_yet(number));
        let mut poll = format!(
            "$gpucr_poll_{number}:
{not_yet}	ld.param.u64 %gpucr_at, [{parameter}];
	ld.volatile.global.u32 %gpucr_c, [%gpucr_at];
	setp.eq.u32 %gpucr_is, %gpucr_c, 0;
	@%gpucr_is bra {label};
{BLOCK}{THREAD}{THREADS}"
        );
        for (register, place) in &one.slots {
            poll += &self.slot(*register, *place, false);
        }
        let state = FIRST_SAVED + number as u32;
        let _ = write!(
            poll,
            "	membar.gl;
	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
	mov.u32 %gpucr_b, {state};
	st.volatile.global.u32 [%gpucr_to+{STATES}], %gpucr_b;
	exit;
"
        );
        poll
    }

    /// Saves or loads a register. What threads save of one register is side by side.
    fn slot(&self, register: u32, place: u64, is_loading: bool) -> String {
        let register = &self.body.registers[register as usize];
        let at = format!("%gpucr_to+{STATES}");
        let (size, moved) = moved(register, &at, is_loading);
        let behind = 4 + place;
        format!(
            "	mul.wide.u32 %gpucr_to, %gpucr_c, {behind};
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
	mad.wide.u32 %gpucr_to, %gpucr_a, {size}, %gpucr_to;
{moved}"
        )
    }
}

/// The thread's number in the grid, to `%gpucr_a`, where its block's is.
pub(crate) const THREAD: &str = "	mov.u32 %gpucr_b, %ntid.z;
	mov.u32 %gpucr_c, %tid.z;
	mad.lo.u32 %gpucr_a, %gpucr_a, %gpucr_b, %gpucr_c;
	mov.u32 %gpucr_b, %ntid.y;
	mov.u32 %gpucr_c, %tid.y;
	mad.lo.u32 %gpucr_a, %gpucr_a, %gpucr_b, %gpucr_c;
	mov.u32 %gpucr_b, %ntid.x;
	mov.u32 %gpucr_c, %tid.x;
	mad.lo.u32 %gpucr_a, %gpucr_a, %gpucr_b, %gpucr_c;
";

/// How many threads the grid has, rounded up to a multiple of 4, to `%gpucr_c`.
const THREADS: &str = "	mov.u32 %gpucr_c, %nctaid.x;
	mov.u32 %gpucr_b, %nctaid.y;
	mul.lo.u32 %gpucr_c, %gpucr_c, %gpucr_b;
	mov.u32 %gpucr_b, %nctaid.z;
	mul.lo.u32 %gpucr_c, %gpucr_c, %gpucr_b;
	mov.u32 %gpucr_b, %ntid.x;
	mul.lo.u32 %gpucr_c, %gpucr_c, %gpucr_b;
	mov.u32 %gpucr_b, %ntid.y;
	mul.lo.u32 %gpucr_c, %gpucr_c, %gpucr_b;
	mov.u32 %gpucr_b, %ntid.z;
	mul.lo.u32 %gpucr_c, %gpucr_c, %gpucr_b;
	add.u32 %gpucr_c, %gpucr_c, 3;
	and.b32 %gpucr_c, %gpucr_c, -4;
";
