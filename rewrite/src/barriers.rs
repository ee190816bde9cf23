//! Twins that are interrupted at barriers: the first thread of a block looks at the flag, and all of its threads hear of
//! it at a barrier behind that, by which they decide alike. Each saves its registers, all together save the block's shared
//! memory, and the block ends. When the twin is launched again, the block goes on behind that barrier.
//!
//! The barriers are those for which all threads of the block are there that have not ended. Which of the barriers in the
//! text a thread has come to is its own matter: each saves a number for that, and threads of different warps may have come
//! to different ones. A thread that has ended saves nothing, which is seen when the others go on.
//!
//! What threads of a warp do together lies between barriers, and none of it is under way at one; but copies to shared
//! memory may be, which are waited for.

use std::collections::HashSet;
use std::fmt::Write;
use std::ops::Range;

use crate::body::{Body, What, read_together};
use crate::control::{BLOCK, FIRST_SAVED, RUN, SLOTS, STATES};
use crate::inside::Inside;
use crate::live::{self, Part};
use crate::loops::{Changed, loops, slots};
use crate::opcodes::Class;
use crate::shared::Shared;
use crate::uniform::meet_together;
use crate::unroll::Copies;
use crate::writer::{self, Loop, Polls, moved};

/// A kernel that has more barriers is not interrupted at them.
const MOST_BARRIERS: usize = 128;

/// What a block saves besides its threads' registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Bytes of its variables in shared memory, as they are saved.
    pub(crate) bytes: u64,
    /// And all that the launch gives it in addition; a multiple of so many bytes.
    pub(crate) more: Option<u64>,
}

/// A barrier.
pub(crate) struct Site {
    /// Its item.
    pub(crate) at: usize,
    /// Whether the first thread looks at the flag there.
    pub(crate) looks: bool,
    /// Whether all threads of a warp come to it together.
    pub(crate) is_aligned: bool,
    /// What is saved: registers, and where among what the thread saves.
    slots: Vec<(u32, u64)>,
}

/// The body of a twin, by the text between the braces of its kernel; and what its blocks save. `outside`: variables in
/// shared memory that the module declares and the body names.
pub(crate) fn change<'a>(
    text: &'a str,
    parameter: &str,
    outside: &[Shared<'a>],
    polls: Polls,
) -> Result<(Changed, Memory), Inside> {
    if let Some(longer) = longer(text, outside, polls)?
        && let Ok((changed, memory)) = written(&longer, parameter, outside, polls)
    {
        return Ok((changed.made_of(&longer, text), memory));
    }
    // Also where the copies are too much.
    written(text, parameter, outside, polls)
}

fn written(
    text: &str,
    parameter: &str,
    outside: &[Shared<'_>],
    polls: Polls,
) -> Result<(Changed, Memory), Inside> {
    let body = read_together(text, outside)?;
    let (mut sites, turns) = sites(text, &body, polls)?;
    let behind: Vec<usize> = sites.iter().map(|site| site.at + 1).collect();
    let live = live::at(&body, &behind)?;
    let needed: HashSet<u32> = live.iter().flatten().copied().collect();
    let (again, kept) = live::again(&body, &needed);
    let mut saved = 0;
    for (site, live) in sites.iter_mut().zip(&live) {
        let bytes;
        (site.slots, bytes) = slots(&body, live.iter().filter(|register| kept.contains(register)));
        saved = saved.max(bytes);
    }
    let memory = memory(&body.shared);
    let is_aligned = sites.iter().all(|site| site.is_aligned);
    let meets = Meets::of(is_aligned);
    let asking = Asking { sites: &sites, turns, raised: "ne.u32", flag: 0, to: saving };
    let writer = Writer { text, body: &body, asking, parameter, meets, saved, memory };
    let edits = asking.edits(&body);
    Ok((Changed { edits, begin: writer.begin(), end: writer.end(&again), saved }, memory))
}

/// The text with copies of short loops in which threads ask at barriers, so that one of several turns has such a barrier. `None`:
/// there are no such loops, or it is not known that all threads come to the same barriers.
pub(crate) fn longer(
    text: &str,
    outside: &[Shared<'_>],
    polls: Polls,
) -> Result<Option<String>, Inside> {
    let body = read_together(text, outside)?;
    let (found, turns) = sites(text, &body, polls)?;
    let Some(loops) = loops(&body).ok().filter(|_| turns > 1) else { return Ok(None) };
    let has_site = |of: &Loop| {
        let [end] = of.back[..] else { return false };
        found.iter().any(|site| (of.label..end).contains(&site.at))
    };
    let loops: Vec<Loop> = loops.into_iter().filter(has_site).collect();
    let writer = writer::Writer::unpolled(text, &body, &loops, polls);
    let longer = Copies::of(&writer).put_into(&writer);
    // With copies there may be more barriers than are looked at.
    let asks_seldom = |longer: &String| {
        let body = read_together(longer, outside)?;
        sites(longer, &body, polls).map(|(_, turns)| turns > 1)
    };
    Ok(longer.filter(|longer| asks_seldom(longer) == Ok(true)))
}

/// The barriers of a body, and what is known of the ways between them.
struct Found {
    sites: Vec<Site>,
    parts: Vec<Part>,
    /// The parts that end in them.
    ends: Vec<usize>,
    /// Of each part: whether it ends in one, and in one at which the first thread looks at the flag.
    is_met: Vec<bool>,
    looks: Vec<bool>,
}

/// All barriers, at each of which threads ask. No way comes back to one without passing one at which the first thread looks at
/// the flag.
pub(crate) fn all_sites(body: &Body<'_>) -> Result<Vec<Site>, Inside> {
    found(body).map(|found| found.sites)
}

fn found(body: &Body<'_>) -> Result<Found, Inside> {
    let mut sites = Vec::new();
    for (at, item) in body.items.iter().enumerate() {
        if let What::Step(step) = &item.what
            && let Class::Meets { is_aligned } = step.class
        {
            sites.push(Site { at, looks: true, is_aligned, slots: Vec::new() });
        }
    }
    if sites.len() > MOST_BARRIERS {
        return Err(Inside::Size);
    }
    let (parts, _) = live::parts(body)?;
    // A barrier ends a part, so that who comes through that passes it.
    let of = |site: &Site| parts.partition_point(|part| part.items.start <= site.at) - 1;
    let ends: Vec<usize> = sites.iter().map(of).collect();
    let mut looks = vec![false; parts.len()];
    ends.iter().for_each(|part| looks[*part] = true);
    let is_met = looks.clone();
    for (site, part) in sites.iter_mut().zip(&ends) {
        looks[*part] = false;
        looks[*part] = comes_back(&parts, *part, &looks);
        site.looks = looks[*part];
    }
    if !looks.contains(&true) {
        return Err(Inside::Straight);
    }
    Ok(Found { sites, parts, ends, is_met, looks })
}

/// The barriers at which threads ask, and at every how manieth of them. No way comes back to a barrier without passing one at
/// which the first thread looks at the flag. If threads may come to different barriers, they ask at all, and each time:
/// asking and not asking do not go together.
pub(crate) fn sites(text: &str, body: &Body<'_>, polls: Polls) -> Result<(Vec<Site>, u32), Inside> {
    let Found { mut sites, parts, ends, is_met, looks } = found(body)?;
    if !meet_together(text, body, &parts, &ends) {
        return Ok((sites, 1));
    }
    sites.retain(|site| site.looks);
    // Between two barriers there is no more then than the text has.
    let is_straight = !has_loop_between(&parts, &is_met, &looks);
    Ok((sites, if is_straight { polls.meetings } else { 1 }))
}

/// Whether there is a loop without barriers on a way from one that looks to it again.
fn has_loop_between(parts: &[Part], is_met: &[bool], looks: &[bool]) -> bool {
    let nobody = vec![false; parts.len()];
    let from: Vec<Vec<bool>> = (0..parts.len()).map(|part| reached(parts, part, &nobody)).collect();
    let loops = (0..parts.len()).filter(|part| !is_met[*part] && comes_back(parts, *part, is_met));
    let mut with_looks = loops.flat_map(|part| {
        (0..parts.len()).filter(|look| looks[*look]).map(move |look| (part, look))
    });
    with_looks.any(|(part, look)| from[part][look] && from[look][part])
}

/// Whether a way leads from a part to it again, without coming through others in which the flag is looked at.
fn comes_back(parts: &[Part], start: usize, looks: &[bool]) -> bool {
    reached(parts, start, looks)[start]
}

/// The parts to which a way leads from the end of one, without coming through those that are `closed`; these are reached too.
fn reached(parts: &[Part], start: usize, closed: &[bool]) -> Vec<bool> {
    let mut seen = vec![false; parts.len()];
    let mut open = vec![start];
    while let Some(part) = open.pop() {
        for next in parts[part].next.iter().copied() {
            if !std::mem::replace(&mut seen[next], true) && !closed[next] {
                open.push(next);
            }
        }
    }
    seen
}

/// How much variables take where they are saved one behind the other.
fn memory(shared: &[Shared<'_>]) -> Memory {
    let known = shared.iter().filter_map(|one| one.bytes);
    let more = shared.iter().find(|one| one.bytes.is_none());
    Memory {
        bytes: known.map(|bytes| bytes.next_multiple_of(16)).sum(),
        more: more.map(|one| unit(one)),
    }
}

/// So many bytes of a variable are copied at a time.
fn unit(shared: &Shared<'_>) -> u64 {
    let fits =
        shared.align.is_multiple_of(4) && shared.bytes.is_none_or(|all| all.is_multiple_of(4));
    if fits { 4 } else { 1 }
}

/// The instructions by which all threads of a block meet.
#[derive(Clone, Copy)]
struct Meets {
    sync: &'static str,
    reduce: &'static str,
}

impl Meets {
    /// Threads of a warp come together, or each by itself.
    fn of(is_aligned: bool) -> Self {
        match is_aligned {
            true => Self { sync: "	bar.sync 0;\n", reduce: "bar.red.or.pred" },
            false => Self { sync: "	barrier.sync 0;\n", reduce: "barrier.red.or.pred" },
        }
    }
}

/// What threads do where the text has a barrier: they meet, and at every so manieth one hear whether the flag was raised.
#[derive(Clone, Copy)]
pub(crate) struct Asking<'s> {
    pub(crate) sites: &'s [Site],
    /// Threads ask when they come to a site for so manieth time.
    pub(crate) turns: u32,
    /// The flag is raised if it is this to `flag`: a comparison.
    pub(crate) raised: &'static str,
    pub(crate) flag: u32,
    /// The label to which threads of a site go then, by the site's number.
    pub(crate) to: fn(usize) -> String,
}

/// Where a block is saved that is at a site.
fn saving(number: usize) -> String {
    format!("$gpucr_save_{number}")
}

impl Asking<'_> {
    /// What is put in the place of the barriers.
    pub(crate) fn edits(&self, body: &Body<'_>) -> Vec<(Range<usize>, String)> {
        let edits = self.sites.iter().enumerate();
        edits.map(|(number, site)| (body.items[site.at].span.clone(), self.site(number))).collect()
    }

    fn site(&self, number: usize) -> String {
        if self.turns > 1 {
            let sync = Meets::of(self.sites[number].is_aligned).sync;
            return format!(
                "	sub.u32 %gpucr_turn, %gpucr_turn, 1;
	setp.eq.u32 %gpucr_is, %gpucr_turn, 0;
	@%gpucr_is bra $gpucr_ask_{number};
{sync}$gpucr_after_{number}:
"
            );
        }
        let look = if self.sites[number].looks { LOOK } else { "" };
        format!("{}$gpucr_after_{number}:\n{look}", self.ask(number))
    }

    /// The barrier at which all threads hear what the first one has seen.
    fn ask(&self, number: usize) -> String {
        let Site { looks, is_aligned, .. } = self.sites[number];
        let Self { raised, flag, .. } = self;
        let to = (self.to)(number);
        let reduce = Meets::of(is_aligned).reduce;
        let seen = match looks {
            true => format!("	@%gpucr_first setp.{raised} %gpucr_mine, %gpucr_flag, {flag};\n"),
            false => String::new(),
        };
        format!(
            "{seen}	{reduce} %gpucr_is, 0, %gpucr_mine;
	@%gpucr_is bra {to};
"
        )
    }

    /// Where threads come that ask in this turn, if they do not in each.
    pub(crate) fn asked(&self) -> String {
        let mut asked = String::new();
        for number in (0..self.sites.len()).filter(|_| self.turns > 1) {
            let (turns, ask) = (self.turns, self.ask(number));
            let _ = write!(
                asked,
                "$gpucr_ask_{number}:
	mov.u32 %gpucr_turn, {turns};
{ask}{LOOK}	bra $gpucr_after_{number};
"
            );
        }
        asked
    }
}

struct Writer<'w, 'a> {
    text: &'a str,
    body: &'w Body<'a>,
    asking: Asking<'w>,
    parameter: &'w str,
    /// Outside of the text, where threads have come from any site.
    meets: Meets,
    saved: u64,
    memory: Memory,
}

impl Writer<'_, '_> {
    /// A block that another launch has run, or runs, ends; one that is saved goes on.
    fn begin(&self) -> String {
        let (parameter, turns) = (self.parameter, self.asking.turns);
        format!(
            "
	.reg .pred %gpucr_is, %gpucr_first, %gpucr_mine;
	.reg .b32 %gpucr_a, %gpucr_b, %gpucr_c, %gpucr_flag, %gpucr_label, %gpucr_blocks, %gpucr_tid;
	.reg .b32 %gpucr_count, %gpucr_threads, %gpucr_slots, %gpucr_slot, %gpucr_turn;
	.reg .b64 %gpucr_at, %gpucr_to, %gpucr_state, %gpucr_given, %gpucr_table, %gpucr_named, %gpucr_area;
	mov.u32 %gpucr_a, %tid.x;
	mov.u32 %gpucr_b, %tid.y;
	mov.u32 %gpucr_c, %tid.z;
	or.b32 %gpucr_a, %gpucr_a, %gpucr_b;
	or.b32 %gpucr_a, %gpucr_a, %gpucr_c;
	setp.eq.u32 %gpucr_first, %gpucr_a, 0;
	setp.ne.u32 %gpucr_mine, %gpucr_a, %gpucr_a;
	mov.u32 %gpucr_flag, 0;
	mov.u32 %gpucr_turn, {turns};
	mov.u32 %gpucr_label, 0;
	ld.param.u64 %gpucr_at, [{parameter}];
	@!%gpucr_first bra $gpucr_decided;
	ld.volatile.global.u32 %gpucr_label, [%gpucr_at];
	min.u32 %gpucr_label, %gpucr_label, {RUN};
	setp.ne.u32 %gpucr_is, %gpucr_label, 0;
	@%gpucr_is bra $gpucr_decided;
{BLOCK}{STATE}	atom.global.exch.b32 %gpucr_label, [%gpucr_state], {RUN};
	setp.lt.u32 %gpucr_is, %gpucr_label, {FIRST_SAVED};
	@%gpucr_is bra $gpucr_decided;
	membar.gl;
	st.volatile.global.u32 [%gpucr_given], %gpucr_label;
$gpucr_decided:
	setp.ne.u32 %gpucr_is, %gpucr_label, 0;
	bar.red.or.pred %gpucr_is, 0, %gpucr_is;
	@%gpucr_is bra $gpucr_other;
"
        )
    }

    fn end(&self, again: &[usize]) -> String {
        let mut end = String::from("\n	ret;\n") + &self.asking.asked();
        for number in 0..self.asking.sites.len() {
            let label = number + 1;
            let _ = write!(
                end,
                "$gpucr_save_{number}:
	mov.u32 %gpucr_label, {label};
	bra $gpucr_save;
"
            );
        }
        end += &self.save();
        end += &self.resume(again);
        end
    }

    /// A branch for each site, by the number that a thread has.
    fn choose(&self, to: &str) -> String {
        let mut chosen = String::new();
        for number in 0..self.asking.sites.len() {
            let label = number + 1;
            let _ = write!(
                chosen,
                "	setp.eq.u32 %gpucr_is, %gpucr_label, {label};
	@%gpucr_is bra $gpucr_{to}_{number};
"
            );
        }
        // Nobody has another number.
        chosen + "	trap;\n"
    }

    /// All threads come here that have not ended. The first looks for a place where the block is saved; if there is none it
    /// goes on.
    fn save(&self) -> String {
        let Meets { sync, reduce } = self.meets;
        let mut save = format!(
            "$gpucr_save:
{BLOCK}{STATE}{TABLE}	@!%gpucr_first bra $gpucr_searched;
	rem.u32 %gpucr_a, %gpucr_a, %gpucr_slots;
	mov.u32 %gpucr_b, %gpucr_slots;
$gpucr_search:
	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_table;
	add.u32 %gpucr_a, %gpucr_a, 1;
	atom.global.cas.b32 %gpucr_c, [%gpucr_to], 0, 1;
	setp.eq.u32 %gpucr_is, %gpucr_c, 0;
	@%gpucr_is bra $gpucr_found;
	setp.ge.u32 %gpucr_is, %gpucr_a, %gpucr_slots;
	@%gpucr_is mov.u32 %gpucr_a, 0;
	sub.u32 %gpucr_b, %gpucr_b, 1;
	setp.ne.u32 %gpucr_is, %gpucr_b, 0;
	@%gpucr_is bra $gpucr_search;
	mov.u32 %gpucr_a, 0;
$gpucr_found:
	membar.gl;
	st.volatile.global.u32 [%gpucr_given], %gpucr_a;
$gpucr_searched:
{sync}	ld.volatile.global.u32 %gpucr_slot, [%gpucr_given];
	setp.eq.u32 %gpucr_is, %gpucr_slot, 0;
	@%gpucr_is bra $gpucr_go_on;
	sub.u32 %gpucr_slot, %gpucr_slot, 1;
{AREA}{}	st.volatile.global.u32 [%gpucr_named], %gpucr_label;
{}",
            self.area(),
            self.choose("keep")
        );
        for (number, site) in self.asking.sites.iter().enumerate() {
            let _ = writeln!(save, "$gpucr_keep_{number}:");
            for (register, place) in &site.slots {
                save += &self.register(*register, *place, false);
            }
            save += "	bra $gpucr_kept;\n";
        }
        save += "$gpucr_kept:\n";
        if self.body.has_copies {
            save += "	cp.async.wait_all;\n";
            save += sync;
        }
        save += &self.copy_shared(false);
        // The flag may have been lowered meanwhile, for a launch that has passed this block already. Either that sees the
        // block's state, or the flag is seen here.
        let _ = write!(
            save,
            "	membar.gl;
{sync}	@!%gpucr_first bra $gpucr_told;
	add.u32 %gpucr_a, %gpucr_slot, {FIRST_SAVED};
	setp.ne.u32 %gpucr_mine, %gpucr_a, %gpucr_a;
	membar.gl;
	atom.global.exch.b32 %gpucr_c, [%gpucr_state], %gpucr_a;
	membar.gl;
{LOOK_AGAIN}	setp.ne.u32 %gpucr_is, %gpucr_b, 0;
	@%gpucr_is bra $gpucr_told;
	atom.global.cas.b32 %gpucr_c, [%gpucr_state], %gpucr_a, {RUN};
	setp.eq.u32 %gpucr_mine, %gpucr_c, %gpucr_a;
$gpucr_told:
	{reduce} %gpucr_is, 0, %gpucr_mine;
	@!%gpucr_is exit;
	mov.u32 %gpucr_a, 0;
	st.volatile.global.u32 [%gpucr_named], %gpucr_a;
	membar.gl;
{sync}	@%gpucr_first st.volatile.global.u32 [%gpucr_table], %gpucr_a;
$gpucr_go_on:
	setp.ne.u32 %gpucr_mine, %gpucr_a, %gpucr_a;
{LOOK}{}",
            self.choose("after")
        );
        save
    }

    /// Where blocks come that do not begin.
    fn resume(&self, again: &[usize]) -> String {
        let sync = self.meets.sync;
        let mut resume = format!(
            "$gpucr_other:
	setp.eq.u32 %gpucr_is, %gpucr_label, {RUN};
	bar.red.or.pred %gpucr_is, 0, %gpucr_is;
	@%gpucr_is exit;
{BLOCK}{STATE}{TABLE}	ld.volatile.global.u32 %gpucr_slot, [%gpucr_given];
	sub.u32 %gpucr_slot, %gpucr_slot, {FIRST_SAVED};
{AREA}{}{}	ld.volatile.global.u32 %gpucr_label, [%gpucr_named];
	mov.u32 %gpucr_a, 0;
	st.volatile.global.u32 [%gpucr_named], %gpucr_a;
	membar.gl;
{sync}	setp.eq.u32 %gpucr_is, %gpucr_label, 0;
	@%gpucr_is exit;
",
            self.area(),
            self.copy_shared(true),
        );
        for item in again {
            let _ = writeln!(resume, "	{}", &self.text[self.body.items[*item].span.clone()]);
        }
        resume += &self.choose("load");
        for (number, site) in self.asking.sites.iter().enumerate() {
            let _ = writeln!(resume, "$gpucr_load_{number}:");
            for (register, place) in &site.slots {
                resume += &self.register(*register, *place, true);
            }
            let sync = Meets::of(site.is_aligned).sync;
            let _ = write!(
                resume,
                "	mov.u32 %gpucr_a, 0;
{sync}	@%gpucr_first membar.gl;
	@%gpucr_first st.volatile.global.u32 [%gpucr_table], %gpucr_a;
	bra $gpucr_after_{number};
"
            );
        }
        resume
    }

    /// Behind [`AREA`]: how much a block saves, and where this one does.
    fn area(&self) -> String {
        let (saved, bytes) = (self.saved, self.memory.bytes);
        let more = match self.memory.more {
            None => "",
            Some(_) => {
                "	mov.u32 %gpucr_b, %dynamic_smem_size;
	add.u32 %gpucr_b, %gpucr_b, 15;
	and.b32 %gpucr_b, %gpucr_b, -16;
	add.u32 %gpucr_a, %gpucr_a, %gpucr_b;
"
            }
        };
        format!(
            "	mad.lo.u32 %gpucr_a, %gpucr_threads, {saved}, {bytes};
{more}	mul.wide.u32 %gpucr_to, %gpucr_slot, %gpucr_a;
	add.u64 %gpucr_area, %gpucr_area, %gpucr_to;
"
        )
    }

    /// Saves or loads a register. What threads save of one register is side by side.
    fn register(&self, register: u32, place: u64, is_loading: bool) -> String {
        let register = &self.body.registers[register as usize];
        let (size, moved) = moved(register, "%gpucr_to", is_loading);
        format!(
            "	mul.wide.u32 %gpucr_to, %gpucr_threads, {place};
	add.u64 %gpucr_to, %gpucr_to, %gpucr_area;
	mad.wide.u32 %gpucr_to, %gpucr_tid, {size}, %gpucr_to;
{moved}"
        )
    }

    /// Saves or loads the block's shared memory, each thread a part of it.
    fn copy_shared(&self, is_loading: bool) -> String {
        let mut text = String::new();
        let mut place = 0;
        let mut has_more = false;
        let way = if is_loading { "in" } else { "out" };
        for (number, one) in self.body.shared.iter().enumerate() {
            // All that has no size begins at the same place.
            if one.bytes.is_none() && std::mem::replace(&mut has_more, true) {
                continue;
            }
            let at = if one.bytes.is_none() { self.memory.bytes } else { place };
            place += one.bytes.unwrap_or(0).next_multiple_of(16);
            let (unit, name, saved) = (unit(one), one.name, self.saved);
            let size = match one.bytes {
                Some(bytes) => format!("	mov.u32 %gpucr_slots, {bytes};\n"),
                None => "	mov.u32 %gpucr_slots, %dynamic_smem_size;\n".to_owned(),
            };
            let bits = 8 * unit;
            let [first, second] = match is_loading {
                true => ["ld.global.b", "st.shared.b"],
                false => ["ld.shared.b", "st.global.b"],
            };
            let value = if unit == 4 { "%gpucr_c" } else { "%gpucr_byte" };
            let there = "[%gpucr_b]";
            let here = "[%gpucr_to]";
            let [from, to] = if is_loading { [here, there] } else { [there, here] };
            let _ = write!(
                text,
                "{{
	.reg .b16 %gpucr_byte;
	.reg .b64 %gpucr_from;
{size}	mul.wide.u32 %gpucr_from, %gpucr_threads, {saved};
	add.u64 %gpucr_from, %gpucr_from, %gpucr_area;
	mul.lo.u32 %gpucr_a, %gpucr_tid, {unit};
$gpucr_{way}_{number}:
	setp.ge.u32 %gpucr_is, %gpucr_a, %gpucr_slots;
	@%gpucr_is bra $gpucr_{way}_{number}_over;
	mov.u32 %gpucr_b, {name};
	add.u32 %gpucr_b, %gpucr_b, %gpucr_a;
	cvt.u64.u32 %gpucr_to, %gpucr_a;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_from;
	add.u64 %gpucr_to, %gpucr_to, {at};
	{first}{bits} {value}, {from};
	{second}{bits} {to}, {value};
	mad.lo.u32 %gpucr_a, %gpucr_count, {unit}, %gpucr_a;
	bra $gpucr_{way}_{number};
$gpucr_{way}_{number}_over:
}}
"
            );
        }
        text
    }
}

/// The first thread looks at the flag. What it sees is needed only at the next barrier.
pub(crate) const LOOK: &str = "	@%gpucr_first ld.volatile.global.u32 %gpucr_flag, [%gpucr_at];\n";

/// When the block is saved, it looks once more.
pub(crate) const LOOK_AGAIN: &str = "	ld.volatile.global.u32 %gpucr_b, [%gpucr_at];\n";

// The texts below have these as numbers.
const _: () = assert!(STATES == 16 && SLOTS == 12);

/// Behind [`BLOCK`], which stays: where the block's state is, and the word by which its first thread tells the others a number.
const STATE: &str = "	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_state, %gpucr_at, %gpucr_to;
	add.u64 %gpucr_state, %gpucr_state, 16;
	mov.u32 %gpucr_blocks, %nctaid.x;
	mov.u32 %gpucr_b, %nctaid.y;
	mul.lo.u32 %gpucr_blocks, %gpucr_blocks, %gpucr_b;
	mov.u32 %gpucr_b, %nctaid.z;
	mul.lo.u32 %gpucr_blocks, %gpucr_blocks, %gpucr_b;
	mul.wide.u32 %gpucr_to, %gpucr_blocks, 4;
	add.u64 %gpucr_given, %gpucr_state, %gpucr_to;
";

/// Behind [`STATE`]: the thread's number in its block, how many there are, the same rounded up to a multiple of 4, how many
/// places there are for blocks, and where the words are that say whether these are taken.
const TABLE: &str = "	mov.u32 %gpucr_tid, %tid.z;
	mov.u32 %gpucr_count, %ntid.z;
	mov.u32 %gpucr_b, %ntid.y;
	mov.u32 %gpucr_c, %tid.y;
	mad.lo.u32 %gpucr_tid, %gpucr_tid, %gpucr_b, %gpucr_c;
	mul.lo.u32 %gpucr_count, %gpucr_count, %gpucr_b;
	mov.u32 %gpucr_b, %ntid.x;
	mov.u32 %gpucr_c, %tid.x;
	mad.lo.u32 %gpucr_tid, %gpucr_tid, %gpucr_b, %gpucr_c;
	mul.lo.u32 %gpucr_count, %gpucr_count, %gpucr_b;
	add.u32 %gpucr_threads, %gpucr_count, 3;
	and.b32 %gpucr_threads, %gpucr_threads, -4;
	ld.volatile.global.u32 %gpucr_slots, [%gpucr_at+12];
	mul.wide.u32 %gpucr_table, %gpucr_blocks, 8;
	add.u64 %gpucr_table, %gpucr_table, 31;
	and.b64 %gpucr_table, %gpucr_table, -16;
	add.u64 %gpucr_table, %gpucr_table, %gpucr_at;
";

/// Behind [`TABLE`], which becomes the word of the block's place: where the thread's number of a barrier is, and where begins
/// what blocks save.
const AREA: &str = "	mul.wide.u32 %gpucr_named, %gpucr_slots, 4;
	add.u64 %gpucr_named, %gpucr_named, 15;
	and.b64 %gpucr_named, %gpucr_named, -16;
	add.u64 %gpucr_named, %gpucr_named, %gpucr_table;
	mul.wide.u32 %gpucr_area, %gpucr_slots, %gpucr_threads;
	shl.b64 %gpucr_area, %gpucr_area, 2;
	add.u64 %gpucr_area, %gpucr_area, %gpucr_named;
	mad.lo.u32 %gpucr_a, %gpucr_slot, %gpucr_threads, %gpucr_tid;
	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_named, %gpucr_named, %gpucr_to;
	mul.wide.u32 %gpucr_to, %gpucr_slot, 4;
	add.u64 %gpucr_table, %gpucr_table, %gpucr_to;
";
