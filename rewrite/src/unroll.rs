//! Short loops, written several times one after the other.

use std::collections::HashMap;
use std::ops::Range;

use crate::body::{Flow, Item, What};
use crate::edits::edited;
use crate::live;
use crate::writer::{Loop, Writer};

/// A loop is written so many times at most.
const MOST_COPIES: usize = 64;
/// All copies of a kernel's loops have no more text, bytes.
const MOST_TEXT: usize = 256 << 10;

/// What is put in the place of branches at the ends of short loops, by their items.
pub(crate) struct Copies(HashMap<usize, String>);

impl Copies {
    pub(crate) fn of(writer: &Writer<'_, '_>) -> Self {
        let (mut copies, mut text) = (HashMap::new(), 0);
        for number in (0..writer.loops.len()).filter(|number| writer.counted(*number).is_none()) {
            if let Some((at, copied)) = copied(writer, number)
                && text + copied.len() <= MOST_TEXT
            {
                text += copied.len();
                copies.insert(at, copied);
            }
        }
        Self(copies)
    }

    pub(crate) fn at(&self, item: usize) -> Option<String> {
        self.0.get(&item).cloned()
    }

    /// The text with these copies and no other change; `None` if there are none.
    pub(crate) fn put_into(self, writer: &Writer<'_, '_>) -> Option<String> {
        let at = |item: usize| writer.body.items[item].span.clone();
        let edits: Vec<_> = self.0.into_iter().map(|(item, text)| (at(item), text)).collect();
        (!edits.is_empty()).then(|| edited(writer.text, 0..writer.text.len(), edits))
    }
}

/// The item of the branch that ends a loop, and what to put there.
fn copied(writer: &Writer<'_, '_>, number: usize) -> Option<(usize, String)> {
    let one = &writer.loops[number];
    let [at] = one.back[..] else { return None };
    let inside = one.label + 1..at;
    if !is_alone(writer, one, at) {
        return None;
    }
    let is_step = |item: &&Item<'_>| matches!(item.what, What::Step(_));
    let steps = writer.body.items[inside.clone()].iter().filter(is_step).count() + 1;
    let count = (writer.polls.least / steps).min(MOST_COPIES);
    if count < 2 {
        return None;
    }
    let What::Step(branch) = &writer.body.items[at].what else { return None };
    let (mut leave, mut back) = (String::new(), format!("bra {};\n", writer.back(number)));
    if let Some((register, is_negated)) = branch.guard {
        let name = writer.body.registers[register as usize].name;
        let [if_so, if_not] = if is_negated { ["!", ""] } else { ["", "!"] };
        leave = format!("@{if_not}{name} bra $gpucr_over_{number};\n");
        back = format!("@{if_so}{name} {back}$gpucr_over_{number}:\n");
    }
    let mut text = leave.clone();
    for copy in 1..count {
        text += &copy_of(writer, inside.clone(), &format!("$gpucr_{number}_{copy}_"));
        text += if copy + 1 < count { &leave } else { &back };
    }
    Some((at, text))
}

/// Whether what is between a label and a branch back to it is a loop that nothing else leads into, and that has no loops
/// inside.
fn is_alone(writer: &Writer<'_, '_>, one: &Loop, end: usize) -> bool {
    let items = &writer.body.items;
    let is_inside = |item: usize| item > one.label && item <= end;
    let fits = |(at, item): (usize, &Item<'_>)| match &item.what {
        What::Step(step) => {
            let Ok(targets) = live::targets(writer.body, step) else { return false };
            if !is_inside(at) {
                return !targets.iter().any(|target| is_inside(*target));
            }
            let is_plain = !matches!(step.flow, Flow::Table(_));
            let goes_back = |target: &usize| *target >= one.label && *target <= at;
            is_plain && (at == end || !targets.iter().any(goes_back))
        }
        What::Targets(listed) => {
            let labels = listed.iter().filter_map(|(label, _)| writer.body.labels.get(label));
            !is_inside(at) && !labels.copied().any(is_inside)
        }
        // Its names would be declared twice.
        What::Declaration => !is_inside(at) || item.depth > 1,
        _ => true,
    };
    items[end].depth == 1 && items.iter().enumerate().all(fits)
}

/// The items once more, with other names for their labels.
fn copy_of(writer: &Writer<'_, '_>, inside: Range<usize>, prefix: &str) -> String {
    let mut text = String::new();
    for at in inside.clone() {
        let item = &writer.body.items[at];
        match &item.what {
            What::Label(_) => text += &format!("{prefix}{at}:\n"),
            What::Step(step) => {
                let mut edits = writer.step_edits(at, step);
                if let Flow::Branch(label, place) = &step.flow {
                    let target = writer.body.labels[label];
                    if inside.contains(&target) {
                        edits.push((place.clone(), format!("{prefix}{target}")));
                    }
                }
                text += &edited(writer.text, item.span.clone(), edits);
                text.push('\n');
            }
            What::Open | What::Close | What::Declaration => {
                text += &writer.text[item.span.clone()];
                text.push('\n');
            }
            What::Targets(_) | What::Remark => {}
        }
    }
    text
}
