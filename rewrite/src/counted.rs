//! Loops that count. Where a loop adds the same number in each turn and compares the sum with a limit, it is known before a part
//! of its turns that none of them is the last one. So it is run in parts: a part's turns are those of the original, with
//! a nearer limit, and the flag is looked at behind each. A compiler can make of them what it makes of the original's.
//! Short turns are written several times one after the other: only the last of them can be the last of a part, so that the
//! others need no branch, which makes up for what the parts cost.

use std::ops::Range;

use crate::backward::Loop;
use crate::body::{Body, Flow, Kind, Step, What};
use crate::edits::edited;
use crate::opcodes::is_of_param;

/// More is not added in a turn.
const MOST_ADDED: i64 = 1 << 20;
/// More is not added in a part of a loop, so that all sums and differences fit 32 bits with a sign.
const MOST_ADDED_IN_PART: i64 = 1 << 30;
/// Compilers write turns of loops so many times one after the other, or a part of that: then none is left over in a part.
const UNROLLED: i64 = 16;

/// A place in a text, and what is written there instead.
pub(crate) type Edit = (Range<usize>, String);

/// The body that has the loops.
pub(crate) struct Source<'s, 'a> {
    pub(crate) text: &'s str,
    pub(crate) body: &'s Body<'a>,
    /// Turns are written one after the other up to so many instructions.
    pub(crate) least: usize,
    /// What is written in the places of an instruction that stays.
    pub(crate) edits: &'s dyn Fn(usize, &Step<'a>) -> Vec<Edit>,
}

/// A loop that counts.
pub(crate) struct Counted {
    /// Where the comparison names the limit.
    limit: Range<usize>,
    /// What a part of the loop has before its first turn.
    begin: String,
    /// What is written instead of the branch that ends the loop.
    end: String,
    /// The register that has a part's limit.
    near: String,
    bits: u32,
    /// The text of copies of its turns, bytes.
    pub(crate) copied: usize,
}

/// An instruction without a guard, and its operands: their texts, and where they are.
struct Parsed<'a> {
    opcode: Vec<&'a str>,
    operands: Vec<(&'a str, Range<usize>)>,
}

fn parsed<'a>(text: &'a str, span: &Range<usize>, step: &Step<'_>) -> Option<Parsed<'a>> {
    if step.guard.is_some() {
        return None;
    }
    let opcode = text[step.opcode.clone()].split('.').collect();
    let rest = step.opcode.end..span.end;
    let rest = rest.start..rest.start + text[rest.clone()].find(';')?;
    let mut operands = Vec::new();
    let mut start = rest.start;
    for operand in text[rest].split(',') {
        let word = operand.trim();
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '%' | '_' | '$' | '-');
        if word.is_empty() || !word.chars().all(is_plain) {
            return None;
        }
        let at = start + operand.find(word)?;
        operands.push((word, at..at + word.len()));
        start += operand.len() + 1;
    }
    Some(Parsed { opcode, operands })
}

/// The only item of some that writes a register.
fn writer_of<'b, 'a>(
    body: &'b Body<'a>,
    inside: Range<usize>,
    register: u32,
) -> Option<(usize, &'b Step<'a>)> {
    let steps = inside.filter_map(|at| match &body.items[at].what {
        What::Step(step) => Some((at, step)),
        _ => None,
    });
    let mut writing = steps.filter(|(_, step)| step.writes.contains(&register));
    let found = writing.next()?;
    writing.next().is_none().then_some(found)
}

/// What is known of a loop that counts, by its number among all; `to`: where it leads behind a part, which has so many
/// instructions. `room`: the copies of its turns may have so much text, bytes.
pub(crate) fn counted(
    source: &Source<'_, '_>,
    (number, one): (usize, &Loop),
    to: &str,
    (part, room): (u32, usize),
) -> Option<Counted> {
    let (text, body) = (source.text, source.body);
    let [end] = one.back[..] else { return None };
    let inside = one.label + 1..end;
    // All of them are run in each turn, up to where the loop is left: nobody comes in between.
    let is_straight = inside.clone().all(|at| {
        let item = &body.items[at];
        item.depth == 1 && matches!(item.what, What::Step(_) | What::Remark)
    });
    let What::Step(branch) = &body.items[end].what else { return None };
    let Flow::Branch(..) = branch.flow else { return None };
    let (predicate, false) = branch.guard? else { return None };
    if !is_straight || body.items[end].depth != 1 {
        return None;
    }
    let (compare, comparing) = writer_of(body, inside.clone(), predicate)?;
    let Parsed { opcode, operands } = parsed(text, &body.items[compare].span, comparing)?;
    let (["setp", comparison, kind], [(to_predicate, _), (counter, _), (limit, place)]) =
        (&opcode[..], &operands[..])
    else {
        return None;
    };
    let bits = match *kind {
        "s32" | "u32" | "b32" => 32,
        "s64" | "u64" | "b64" => 64,
        _ => return None,
    };
    let known = |name: &str| {
        let mut all = body.registers.iter().enumerate();
        let mut all = all.by_ref().filter(|(_, register)| register.name == name);
        let (found, register) = all.next()?;
        // In inner braces there may be another one of that name.
        let is_one = all.next().is_none() && register.kind == Kind::Bytes(bits / 8);
        is_one.then_some(found as u32)
    };
    let register = known(counter)?;
    let is_number = limit.parse::<i64>().is_ok();
    let is_constant = is_number || {
        let limit = known(limit)?;
        let mut steps = body.items[inside.clone()].iter().filter_map(|item| match &item.what {
            What::Step(step) => Some(step),
            _ => None,
        });
        !steps.any(|step| step.writes.contains(&limit))
    };
    let (add, adding) = writer_of(body, inside.clone(), register)?;
    if *to_predicate != body.registers[predicate as usize].name || !is_constant || add > compare {
        return None;
    }
    let added = added(text, &body.items[add].span, adding, counter, bits)?;
    // What holds of a counter that is short of its limit; `None`: any other is.
    let short = match (*comparison, &kind[..1], added > 0) {
        ("ne", _, _) => None,
        ("lt" | "le", "s" | "u", true) | ("lo" | "ls", "u", true) => Some("lt"),
        ("gt" | "ge", "s" | "u", false) | ("hi" | "hs", "u", false) => Some("gt"),
        _ => return None,
    };
    let is_reached = matches!(*comparison, "le" | "ge" | "ls" | "hs");
    let steps = body.items[one.label..=end].iter().map(|item| match &item.what {
        What::Step(step) => weight(&text[step.opcode.clone()]),
        _ => 0,
    });
    let turns = (i64::from(part) / steps.sum::<i64>()).max(2);
    let turns = turns.min(MOST_ADDED_IN_PART / added.abs());
    let turns = if turns < UNROLLED { turns } else { turns / UNROLLED * UNROLLED };
    let (all, up_to) = (turns * added.abs(), (turns - i64::from(is_reached)) * added);
    let near = format!("%gpucr_near_{number}");
    let [more, less] = if added > 0 { [limit, counter] } else { [counter, limit] };
    let ordered = short.map_or(String::new(), |short| {
        format!("	setp.{short}.and.{kind} %gpucr_is, {counter}, {limit}, %gpucr_is;\n")
    });
    let is_far = format!(
        "
	sub.u{bits} {near}, {more}, {less};
	setp.gt.u{bits} %gpucr_is, {near}, {all};
{ordered}"
    );
    let whole = &text[body.items[compare].span.clone()];
    let turn = |limit: &str| turn(source, &inside, (compare, place), limit);
    let copied: String = (1..times(source, &inside, turns)).map(|_| turn(&near)).collect();
    let copied = Some(copied).filter(|copied| (1..=room).contains(&copied.len()));
    let (begin, end) = match &copied {
        None => {
            let begin = format!(
                "{is_far}	add.s{bits} {near}, {counter}, {up_to};
	selp.b{bits} {near}, {near}, {limit}, %gpucr_is;
$gpucr_turn_{number}:
"
            );
            let end = format!(
                "@{to_predicate} bra $gpucr_turn_{number};
	{whole}
	@{to_predicate} bra {to};
"
            );
            (begin, end)
        }
        // The last part, which may have any number of turns, is not among these.
        Some(copied) => {
            let begin = format!(
                "{is_far}	@!%gpucr_is bra $gpucr_last_{number};
	add.s{bits} {near}, {counter}, {up_to};
$gpucr_turn_{number}:
"
            );
            let end = format!(
                "
{copied}	@{to_predicate} bra $gpucr_turn_{number};
	{whole}
	bra {to};
$gpucr_last_{number}:
{}	@{to_predicate} bra $gpucr_last_{number};
",
                turn(limit)
            );
            (begin, end)
        }
    };
    let copied = copied.map_or(0, |copied| copied.len());
    Some(Counted { limit: place.clone(), begin, end, near, bits, copied })
}

/// How often a turn is written one after the other where a part has so many.
fn times(source: &Source<'_, '_>, inside: &Range<usize>, turns: i64) -> i64 {
    let steps = || {
        source.body.items[inside.clone()].iter().filter_map(|item| match &item.what {
            What::Step(step) => Some(&source.text[step.opcode.clone()]),
            _ => None,
        })
    };
    // A compiler may make one instruction, which rounds once, of a product and a sum that do not say how they round: of two
    // turns as well, if no branch is between them.
    let is_free = |opcode: &str, names: &[&str]| {
        let mut parts = opcode.split('.');
        let is_named = names.contains(&parts.next().unwrap_or_default());
        let mut rounds = parts.clone();
        is_named
            && parts.any(|part| part.starts_with('f') || part.starts_with("bf"))
            && !rounds.any(|part| matches!(part, "rn" | "rz" | "rm" | "rp"))
    };
    if steps().any(|opcode| is_free(opcode, &["mul"]))
        && steps().any(|opcode| is_free(opcode, &["add", "sub"]))
    {
        return 1;
    }
    let most = source.least / (steps().count() + 1);
    let mut times = UNROLLED;
    while times > 1 && (times as usize > most || turns % times != 0) {
        times /= 2;
    }
    times
}

/// A turn once more, which is compared with this limit.
fn turn(
    source: &Source<'_, '_>,
    inside: &Range<usize>,
    (compare, place): (usize, &Range<usize>),
    limit: &str,
) -> String {
    let mut text = String::new();
    for at in inside.clone() {
        let item = &source.body.items[at];
        if let What::Step(step) = &item.what {
            let mut edits = (source.edits)(at, step);
            if at == compare {
                edits.push((place.clone(), limit.to_owned()));
            }
            text += &edited(source.text, item.span.clone(), edits);
            text.push('\n');
        }
    }
    text
}

/// As how many of the fastest instructions one counts in a part, by what it takes at worst: where all threads of a device come
/// to it, each with an address far from all others, or all with the same one if it is an atomic.
fn weight(opcode: &str) -> i64 {
    let mut parts = opcode.split('.');
    match parts.next().unwrap_or_default() {
        "nanosleep" => 1 << 12,
        "atom" | "red" | "membar" | "fence" => 1 << 8,
        "ld" if is_of_param(opcode) => 1,
        "ld" | "ldu" | "st" | "prefetch" | "prefetchu" => 1 << 5,
        "div" | "rem" | "sqrt" => 1 << 4,
        _ if parts.any(|part| part == "f64") => 1 << 3,
        _ => 1,
    }
}

/// What is added to a counter in each turn, by an instruction of which that is all.
fn added(
    text: &str,
    span: &Range<usize>,
    step: &Step<'_>,
    counter: &str,
    bits: u32,
) -> Option<i64> {
    let Parsed { opcode, operands } = parsed(text, span, step)?;
    let ([name, kind], [(to, _), (from, _), (number, _)]) = (&opcode[..], &operands[..]) else {
        return None;
    };
    let fits = matches!((*kind, bits), ("s32" | "u32", 32) | ("s64" | "u64", 64));
    let number: i64 = number.parse().ok().filter(|number: &i64| number.abs() <= MOST_ADDED)?;
    let added = match *name {
        "add" => number,
        "sub" => -number,
        _ => return None,
    };
    (fits && *to == counter && *from == counter && added != 0).then_some(added)
}

impl Counted {
    /// The declaration of what a part of the loop needs.
    pub(crate) fn declared(&self) -> String {
        format!("	.reg .b{} {};\n", self.bits, self.near)
    }

    /// What is written in which places of the text. The branch at the end of the loop is not left.
    pub(crate) fn edits(&self, body: &Body<'_>, one: &Loop) -> [(Range<usize>, String); 3] {
        let label = body.items[one.label].span.end;
        let end = body.items[one.back[0]].span.clone();
        let Self { limit, begin, end: instead, near, .. } = self;
        [(label..label, begin.clone()), (limit.clone(), near.clone()), (end, instead.clone())]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_makes_parts_short() {
        let all = ["add.u32", "ld.param.u64", "fma.rn.f64", "div.rn.f64", "st.global.b32"];
        let weights: Vec<i64> = all.into_iter().map(weight).collect();
        assert_eq!(weights, [1, 1, 8, 16, 32]);
        assert_eq!(weight("ld.volatile.global.u32"), weight("st.global.v4.f32"));
        assert!(weight("red.global.add.f64") > weight("ld.global.f64"));
        assert_eq!(weight("membar.gl"), weight("atom.global.cas.b32"));
        assert!(weight("nanosleep.u32") > weight("fence.acq_rel.gpu"));
    }
}
