//! Which registers a thread needs where it is interrupted, and which of them it can compute again.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::body::{Body, Flow, Step, What};
use crate::inside::Inside;
use crate::opcodes::Class;

/// Words of all sets of registers together.
const MOST_WORDS: usize = 1 << 22;

/// A set of registers.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Set(Vec<u64>);

impl Set {
    fn new(registers: usize) -> Self {
        Self(vec![0; registers.div_ceil(64)])
    }

    fn insert(&mut self, register: u32) {
        self.0[register as usize / 64] |= 1 << (register % 64);
    }

    fn remove(&mut self, register: u32) {
        self.0[register as usize / 64] &= !(1 << (register % 64));
    }

    /// Adds what another set has; whether that was more.
    fn merge(&mut self, other: &Self) -> bool {
        let mut more = false;
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            more |= *other & !*word != 0;
            *word |= other;
        }
        more
    }

    fn members(&self) -> impl Iterator<Item = u32> {
        let words = self.0.iter().enumerate();
        words.flat_map(|(at, word)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u32 * 64 + bit)
        })
    }
}

/// Items that are run one after the other.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) items: Range<usize>,
    /// The parts that may come next.
    pub(crate) next: Vec<usize>,
}

/// The parts of a body, and which of them begins with which item. A barrier of the block ends one.
pub(crate) fn parts(body: &Body<'_>) -> Result<(Vec<Part>, HashMap<usize, usize>), Inside> {
    let mut starts = vec![0];
    for (at, item) in body.items.iter().enumerate() {
        let begins = match &item.what {
            What::Label(_) => at,
            What::Step(step) if step.flow != Flow::Next || step.class.meets() => at + 1,
            _ => continue,
        };
        if starts.last() != Some(&begins) {
            starts.push(begins);
        }
    }
    let of: HashMap<usize, usize> = starts.iter().enumerate().map(|(n, at)| (*at, n)).collect();
    let mut parts = Vec::with_capacity(starts.len());
    for (number, start) in starts.iter().enumerate() {
        let items = *start..starts.get(number + 1).copied().unwrap_or(body.items.len());
        let mut next: Vec<usize> = Vec::new();
        let last = items.clone().last().map(|at| &body.items[at].what);
        let mut falls = true;
        if let Some(What::Step(step)) = last {
            next.extend(targets(body, step)?.into_iter().map(|at| of[&at]));
            falls = step.flow == Flow::Next || step.guard.is_some();
        }
        if falls && number + 1 < starts.len() {
            next.push(number + 1);
        }
        parts.push(Part { items, next });
    }
    Ok((parts, of))
}

/// The labels' items to which an instruction may go.
pub(crate) fn targets(body: &Body<'_>, step: &Step<'_>) -> Result<Vec<usize>, Inside> {
    let label = |name: &str| body.labels.get(name).copied().ok_or(Inside::Form);
    match &step.flow {
        Flow::Next | Flow::End => Ok(Vec::new()),
        Flow::Branch(name, _) => Ok(vec![label(name)?]),
        Flow::Table(list) => {
            let item = body.lists.get(list).ok_or(Inside::Form)?;
            let What::Targets(listed) = &body.items[*item].what else {
                return Err(Inside::Form);
            };
            listed.iter().map(|(name, _)| label(name)).collect()
        }
    }
}

fn steps<'b, 'a>(body: &'b Body<'a>, part: &Part) -> impl DoubleEndedIterator<Item = &'b Step<'a>> {
    body.items[part.items.clone()].iter().filter_map(|item| match &item.what {
        What::Step(step) => Some(step),
        _ => None,
    })
}

/// The registers that may be read from some items on before they are written, in the order of these, which begin
/// [parts](parts). Those of inner braces are none: no label or barrier is in these, and their values are not kept from one
/// passage to the next.
pub(crate) fn at(body: &Body<'_>, items: &[usize]) -> Result<Vec<Vec<u32>>, Inside> {
    let (parts, of) = parts(body)?;
    let count = body.registers.len();
    if parts.len() * count.div_ceil(64) > MOST_WORDS {
        return Err(Inside::Size);
    }
    for part in &parts {
        let mut has_carry = false;
        for (sets, reads) in steps(body, part).map(|step| step.carry) {
            if reads && !has_carry {
                return Err(Inside::Carry);
            }
            has_carry |= sets;
        }
    }
    let mut before = vec![Vec::new(); parts.len()];
    for (number, part) in parts.iter().enumerate() {
        part.next.iter().for_each(|next| before[*next].push(number));
    }
    let mut live: Vec<Set> = vec![Set::new(count); parts.len()];
    let mut open: Vec<usize> = (0..parts.len()).collect();
    let mut is_open = vec![true; parts.len()];
    while let Some(number) = open.pop() {
        is_open[number] = false;
        let mut set = Set::new(count);
        for next in &parts[number].next {
            set.merge(&live[*next]);
        }
        for step in steps(body, &parts[number]).rev() {
            if step.guard.is_none() {
                step.writes.iter().for_each(|register| set.remove(*register));
            }
            let guard = step.guard.map(|(register, _)| register);
            step.reads.iter().copied().chain(guard).for_each(|register| set.insert(register));
        }
        if live[number].merge(&set) {
            for earlier in &before[number] {
                if !std::mem::replace(&mut is_open[*earlier], true) {
                    open.push(*earlier);
                }
            }
        }
    }
    let outer = |item: &usize| {
        let members = live[of[item]].members();
        members.filter(|register| body.registers[*register as usize].is_outer).collect()
    };
    Ok(items.iter().map(outer).collect())
}

/// The instructions, as items in their order, by which a thread that begins can compute registers; and the registers that it
/// cannot compute so. What it can compute is written once, and of nothing else than what each launch tells it alike.
pub(crate) fn again(body: &Body<'_>, needed: &HashSet<u32>) -> (Vec<usize>, HashSet<u32>) {
    let mut writers = vec![0u32; body.registers.len()];
    let all = body.items.iter().enumerate().filter_map(|(at, item)| match &item.what {
        What::Step(step) => Some((at, item.depth, step)),
        _ => None,
    });
    let all: Vec<_> = all.collect();
    for (_, _, step) in &all {
        step.writes.iter().for_each(|register| writers[*register as usize] += 1);
    }
    // By whom, for each register.
    let mut known: HashMap<u32, usize> = HashMap::new();
    for (number, (_, depth, step)) in all.iter().enumerate() {
        let is_plain = step.class == Class::Computes && step.guard.is_none() && *depth == 1;
        if is_plain
            && step.carry == (false, false)
            && step.reads.iter().all(|register| known.contains_key(register))
        {
            let once = step.writes.iter().filter(|register| writers[**register as usize] == 1);
            known.extend(once.map(|register| (*register, number)));
        }
    }
    let (mut wanted, mut open) = (HashSet::new(), Vec::new());
    open.extend(needed.iter().copied());
    while let Some(register) = open.pop() {
        if let Some(number) = known.get(&register)
            && wanted.insert(*number)
        {
            open.extend(&all[*number].2.reads);
        }
    }
    let mut wanted: Vec<usize> = wanted.into_iter().map(|number| all[number].0).collect();
    wanted.sort_unstable();
    let rest = needed.iter().copied().filter(|register| !known.contains_key(register));
    (wanted, rest.collect())
}
