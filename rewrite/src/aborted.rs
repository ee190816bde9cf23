//! Twins of which what runs is ended without anything being saved, and begun again from its start. That is right for
//! launches of which doing them twice is the same as doing them once, which is not decided here.
//!
//! If threads have nothing to do with each other, each looks at the flag in its loops, ends by itself, and is begun again by
//! itself. Else a block ends as one: its first thread looks at the flag, and all hear of it at the next barrier, as in a
//! twin that is saved there. So no thread goes on by what another one has not written any more.
//!
//! A flag of [`ABORT`] is one for those that run; of any other that is not 0 only those hear that have not begun.

use std::fmt::Write as _;
use std::ops::Range;

use crate::barriers::{self, Asking, Site};
use crate::body::{Body, What, read, read_again, read_together};
use crate::control::{ABORT, BLOCK, FIRST_SAVED, RUN, STATES};
use crate::inside::Inside;
use crate::loops::{Changed, THREAD, loops};
use crate::opcodes::Class;
use crate::shared::Shared;
use crate::writer::{Polls, Writer};

/// The body of a twin whose threads are begun again one by one.
pub(crate) fn alone(text: &str, parameter: &str, polls: Polls) -> Result<Changed, Inside> {
    let again = read_again(text, false)?;
    // What is known of registers tells which loops count.
    let body = read(text).unwrap_or(again);
    let loops = loops(&body)?;
    let writer = Writer::new(text, &body, &loops, parameter, polls);
    let edits = writer.edits();
    let numbers = 0..loops.len();
    let first: String = numbers.clone().map(|number| writer.first(number)).collect();
    let begin = format!(
        "
	.reg .pred %gpucr_is;
	.reg .b32 %gpucr_a, %gpucr_b, %gpucr_c;
	.reg .b64 %gpucr_at, %gpucr_to;
{}	ld.param.u64 %gpucr_at, [{parameter}];
	ld.volatile.global.u32 %gpucr_a, [%gpucr_at];
	setp.ne.u32 %gpucr_is, %gpucr_a, 0;
	@%gpucr_is exit;
{BLOCK}{THREAD}	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
	atom.global.exch.b32 %gpucr_c, [%gpucr_to+{STATES}], {RUN};
	setp.eq.u32 %gpucr_is, %gpucr_c, {RUN};
	@%gpucr_is exit;
{first}",
        writer.declared(),
    );
    let mut end = String::from("\n	ret;\n");
    for number in numbers {
        end += &poll(&writer, number);
    }
    let _ = write!(
        end,
        "$gpucr_abort:
{BLOCK}{THREAD}	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
{TELL}"
    );
    Ok(Changed { edits, begin, end, saved: 0 })
}

/// Where branches go that go back to a loop's label.
fn poll(writer: &Writer<'_, '_>, number: usize) -> String {
    let label = writer.label(&writer.loops[number]);
    let (parameter, not_yet) = (writer.parameter, writer.not_yet(number));
    format!(
        "$gpucr_poll_{number}:
{not_yet}	ld.param.u64 %gpucr_at, [{parameter}];
	ld.volatile.global.u32 %gpucr_c, [%gpucr_at];
	setp.ne.u32 %gpucr_is, %gpucr_c, {ABORT};
	@%gpucr_is bra {label};
	bra $gpucr_abort;
"
    )
}

/// The body of a twin whose blocks are begun again. `outside`: variables in shared memory that the module declares and the body
/// names, if they are known.
pub(crate) fn together(
    text: &str,
    parameter: &str,
    outside: Option<&[Shared<'_>]>,
    polls: Polls,
) -> Result<Changed, Inside> {
    let body = read_again(text, true)?;
    // What is known of registers tells whether threads may ask seldom, as those that are saved do.
    let longer = outside.and_then(|outside| barriers::longer(text, outside, polls).ok().flatten());
    let now = longer.as_deref().unwrap_or(text);
    let seldom = outside.and_then(|outside| {
        let body = read_together(now, outside).ok()?;
        let (sites, turns) = barriers::sites(now, &body, polls).ok()?;
        (turns > 1).then(|| asking(&body, &sites, turns))
    });
    let (turns, edits, asked) = match seldom {
        Some(seldom) => seldom,
        None => asking(&body, &barriers::all_sites(&body)?, 1),
    };
    let begin = format!(
        "
	.reg .pred %gpucr_is, %gpucr_first, %gpucr_mine;
	.reg .b32 %gpucr_a, %gpucr_b, %gpucr_c, %gpucr_flag, %gpucr_turn;
	.reg .b64 %gpucr_at, %gpucr_to;
	mov.u32 %gpucr_turn, {turns};
	mov.u32 %gpucr_a, %tid.x;
	mov.u32 %gpucr_b, %tid.y;
	mov.u32 %gpucr_c, %tid.z;
	or.b32 %gpucr_a, %gpucr_a, %gpucr_b;
	or.b32 %gpucr_a, %gpucr_a, %gpucr_c;
	setp.eq.u32 %gpucr_first, %gpucr_a, 0;
	setp.ne.u32 %gpucr_mine, %gpucr_a, %gpucr_a;
	setp.ne.u32 %gpucr_is, %gpucr_a, %gpucr_a;
	mov.u32 %gpucr_flag, 0;
	ld.param.u64 %gpucr_at, [{parameter}];
	@!%gpucr_first bra $gpucr_decided;
	ld.volatile.global.u32 %gpucr_a, [%gpucr_at];
	setp.ne.u32 %gpucr_is, %gpucr_a, 0;
	@%gpucr_is bra $gpucr_decided;
{BLOCK}	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
	atom.global.exch.b32 %gpucr_c, [%gpucr_to+{STATES}], {RUN};
	setp.eq.u32 %gpucr_is, %gpucr_c, {RUN};
$gpucr_decided:
	bar.red.or.pred %gpucr_is, 0, %gpucr_is;
	@%gpucr_is exit;
"
    );
    // Copies that are under way have to be over: they go to memory of the block.
    let copies = if body.has_copies { "	cp.async.wait_all;\n" } else { "" };
    let end = format!(
        "
	ret;
{asked}$gpucr_abort:
{copies}	@!%gpucr_first exit;
{BLOCK}	mul.wide.u32 %gpucr_to, %gpucr_a, 4;
	add.u64 %gpucr_to, %gpucr_to, %gpucr_at;
{TELL}"
    );
    let changed = Changed { edits, begin, end, saved: 0 };
    Ok(match &longer {
        Some(longer) => changed.made_of(longer, text),
        None => changed,
    })
}

/// At every how manieth barrier threads ask, what is put in the place of barriers, and what comes at the end.
fn asking(
    body: &Body<'_>,
    sites: &[Site],
    turns: u32,
) -> (u32, Vec<(Range<usize>, String)>, String) {
    let to = |_| "$gpucr_abort".to_owned();
    let asking = Asking { sites, turns, raised: "eq.u32", flag: ABORT, to };
    (turns, asking.edits(body), asking.asked())
}

/// Whether a function that such a kernel calls does nothing that it must not do either. No block is ended in it, so it has no
/// barriers.
pub(crate) fn called(text: &str, is_together: bool) -> Result<(), Inside> {
    let body = read_again(text, is_together)?;
    match body.items.iter().find_map(|item| barrier(&item.what)) {
        Some(at) => Err(Inside::Uses(text[at].to_owned())),
        None => Ok(()),
    }
}

fn barrier(what: &What<'_>) -> Option<Range<usize>> {
    let What::Step(step) = what else { return None };
    let meets = matches!(step.class, Class::Meets { .. } | Class::Asks);
    meets.then(|| step.opcode.clone())
}

/// It is told of a thread or block that it has not come to its end.
const TELL: &str = "	mov.u32 %gpucr_c, 2;
	st.volatile.global.u32 [%gpucr_to+16], %gpucr_c;
	exit;
";
// The text has these as numbers.
const _: () = assert!(STATES == 16 && FIRST_SAVED == 2);
