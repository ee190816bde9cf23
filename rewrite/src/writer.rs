//! What is known of a body whose loops are to be polled, and what becomes of its branches.

use std::ops::Range;

pub(crate) use crate::backward::Loop;
use crate::body::{Body, Flow, Kind, Register, Step, What};
use crate::counted::{Counted, Source, counted};
use crate::opcodes::Class;

/// How often threads look at the flag.
#[derive(Debug, Clone, Copy)]
pub struct Polls {
    /// Of so many times that a thread passes the end of a loop, it looks once.
    pub every: u32,
    /// Loops of fewer instructions are written several times one after the other, so that there are so many between two ends.
    pub least: usize,
    /// Loops that count run in parts of so many instructions, of which slow ones count as several; a quarter of that for each
    /// loop around them, since those may end within their first part each time.
    pub part: u32,
    /// Where all threads of a block come to the same barriers, with straight code between, they ask at one of so many.
    pub meetings: u32,
}

impl Default for Polls {
    fn default() -> Self {
        // An answer takes longer than a barrier, and leaves the compiler fewer registers.
        // Warps that began together come to the end of a part together, so that nobody may be left to run while they
        // wait for the flag: parts are long. One of fast instructions takes about a millisecond.
        Self { every: 16, least: 256, part: 1 << 16, meetings: 8 }
    }
}

/// All copies of turns of a kernel's loops that count have no more text, bytes.
const MOST_TEXT: usize = 256 << 10;

/// A body, and what is needed to write it anew.
pub(crate) struct Writer<'w, 'a> {
    pub(crate) text: &'a str,
    pub(crate) body: &'w Body<'a>,
    pub(crate) loops: &'w [Loop],
    pub(crate) parameter: &'w str,
    pub(crate) polls: Polls,
    /// Whether branches at the ends of loops lead to where the flag is looked at. Else each stays as it is.
    pub(crate) is_polled: bool,
    /// What is known of [loops that count](crate::counted), by their numbers.
    counted: Vec<Option<Counted>>,
}

impl<'w, 'a> Writer<'w, 'a> {
    /// The flag is looked at at the ends of these loops. `parameter` is the name of the address of the control block.
    pub(crate) fn new(
        text: &'a str,
        body: &'w Body<'a>,
        loops: &'w [Loop],
        parameter: &'w str,
        polls: Polls,
    ) -> Self {
        let mut writer =
            Self { parameter, is_polled: true, ..Self::unpolled(text, body, loops, polls) };
        let mut room = MOST_TEXT;
        let edits = |at: usize, step: &Step<'a>| writer.step_edits(at, step);
        let source = Source { text, body, least: polls.least, edits: &edits };
        let counted = loops.iter().enumerate().map(|(number, one)| {
            let around = loops.iter().filter(|other| other.is_around(one)).count();
            let part = polls.part >> (2 * around).min(31);
            let counted = counted(&source, (number, one), &writer.back(number), (part, room))?;
            room -= counted.copied;
            Some(counted)
        });
        let counted = counted.collect();
        writer.counted = counted;
        writer
    }

    /// Nobody looks at anything.
    pub(crate) fn unpolled(
        text: &'a str,
        body: &'w Body<'a>,
        loops: &'w [Loop],
        polls: Polls,
    ) -> Self {
        let counted = loops.iter().map(|_| None).collect();
        Self { text, body, loops, parameter: "", polls, is_polled: false, counted }
    }

    /// What is known of a loop, if it counts.
    pub(crate) fn counted(&self, number: usize) -> Option<&Counted> {
        self.counted[number].as_ref()
    }

    /// Of so many times that a thread comes to the end of a loop, it looks at the flag once; `None`: each time. It does so
    /// behind each part of a loop that counts.
    fn every(&self, number: usize) -> Option<u32> {
        let is_counted = self.counted(number).is_some();
        (!is_counted && self.polls.every > 1).then_some(self.polls.every)
    }

    /// Declares what loops need that count, or whose turns are counted.
    pub(crate) fn declared(&self) -> String {
        let counts = (0..self.loops.len()).filter(|number| self.every(*number).is_some());
        let counts = counts.map(|number| format!("	.reg .b32 %gpucr_left_{number};\n"));
        counts.chain(self.counted.iter().flatten().map(Counted::declared)).collect()
    }

    /// What a loop has before its first turn.
    pub(crate) fn first(&self, number: usize) -> String {
        let every =
            self.every(number).map(|every| format!("	mov.u32 %gpucr_left_{number}, {every};\n"));
        every.unwrap_or_default()
    }

    /// What the end of a loop has before the flag is looked at.
    pub(crate) fn not_yet(&self, number: usize) -> String {
        let Some(every) = self.every(number) else { return String::new() };
        let label = self.label(&self.loops[number]);
        format!(
            "	sub.u32 %gpucr_left_{number}, %gpucr_left_{number}, 1;
	setp.ne.u32 %gpucr_is, %gpucr_left_{number}, 0;
	@%gpucr_is bra {label};
	mov.u32 %gpucr_left_{number}, {every};
"
        )
    }

    /// The number of the loop that begins at a label.
    pub(crate) fn number(&self, label: &str) -> Option<usize> {
        let item = self.body.labels.get(label)?;
        self.loops.binary_search_by_key(item, |one| one.label).ok()
    }

    /// Where an instruction's label and opcode are, and what is written there instead. Nobody promises any more that all
    /// threads of a warp go the same way: some may have been interrupted earlier than others.
    pub(crate) fn step_edits(&self, at: usize, step: &Step<'a>) -> Vec<(Range<usize>, String)> {
        let mut edits = Vec::new();
        if !self.is_polled {
            return edits;
        }
        let opcode = &self.text[step.opcode.clone()];
        if matches!(step.class, Class::Branches | Class::Chooses | Class::Ends)
            && opcode.contains(".uni")
        {
            edits.push((step.opcode.clone(), opcode.replace(".uni", "")));
        }
        if let Flow::Branch(label, place) = &step.flow
            && self.body.labels[label] <= at
            && let Some(number) = self.number(label)
        {
            edits.push((place.clone(), self.back(number)));
        }
        edits
    }

    /// The label to which the branches at the end of a loop go.
    pub(crate) fn back(&self, number: usize) -> String {
        match self.is_polled {
            true => format!("$gpucr_poll_{number}"),
            false => self.label(&self.loops[number]).to_owned(),
        }
    }

    /// The label with which a loop begins.
    pub(crate) fn label(&self, one: &Loop) -> &'a str {
        match self.body.items[one.label].what {
            What::Label(label) => label,
            _ => unreachable!("a loop begins at a label"),
        }
    }
}

/// What loads a register from an address or stores it there; and how many bytes it takes. `%gpucr_b` is used.
pub(crate) fn moved(register: &Register<'_>, at: &str, is_loading: bool) -> (u32, String) {
    let (name, bytes) = match register.kind {
        Kind::Predicate => ("%gpucr_b", 4),
        Kind::Bytes(bytes) => (register.name, bytes),
    };
    let bits = 8 * bytes;
    let access = match is_loading {
        true => format!("	ld.global.b{bits} {name}, [{at}];\n"),
        false => format!("	st.global.b{bits} [{at}], {name};\n"),
    };
    let moved = match (register.kind, is_loading) {
        (Kind::Bytes(_), _) => access,
        (Kind::Predicate, false) => {
            format!("	selp.u32 %gpucr_b, 1, 0, {};\n{access}", register.name)
        }
        (Kind::Predicate, true) => {
            format!("{access}	setp.ne.u32 {}, %gpucr_b, 0;\n", register.name)
        }
    };
    (if bytes == 8 { 8 } else { 4 }, moved)
}
