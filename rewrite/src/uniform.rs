//! Whether all threads of a block that have not ended come to the same barriers of the text, one after the other.
//!
//! That is so if every branch that some threads take and others do not leads them together again before the next barrier. A
//! branch is such a one if it depends on a register that may have another value in another thread: one that is computed of the
//! thread's number, loaded from memory, or written only by some. (Such analyses are known as those of divergence; of the
//! joins that belong to a branch only those count here that all ways to a barrier lead through.)

use std::collections::{HashMap, HashSet};

use crate::body::{Body, Flow, Step, What};
use crate::live::Part;
use crate::opcodes::{Class, is_of_block};

/// Bodies of more parts are not looked at: each branch is held against each part.
const MOST_PARTS: usize = 256;
/// Nor are those in which registers are found so many times that vary by others.
const MOST_ROUNDS: usize = 16;

/// Whether they do; `meets` are the parts that end with a barrier. False where it is not known.
pub(crate) fn meet_together(text: &str, body: &Body<'_>, parts: &[Part], meets: &[usize]) -> bool {
    if parts.len() > MOST_PARTS {
        return false;
    }
    let mut is_met = vec![false; parts.len()];
    meets.iter().for_each(|part| is_met[*part] = true);
    let names: HashSet<&str> = body.registers.iter().map(|register| register.name).collect();
    let mut threads = Threads {
        text,
        body,
        names,
        parts,
        next: ways_to_barriers(parts, &is_met),
        is_met,
        varying: vec![false; body.registers.len()],
        apart: HashMap::new(),
    };
    threads.meet()
}

/// The parts that come next, without those from which no barrier is reached any more: who goes there leaves the others for good.
fn ways_to_barriers(parts: &[Part], is_met: &[bool]) -> Vec<Vec<usize>> {
    let mut leads = is_met.to_vec();
    let mut has_changed = true;
    while has_changed {
        has_changed = false;
        for (number, part) in parts.iter().enumerate().rev() {
            if !leads[number] && part.next.iter().any(|next| leads[*next]) {
                leads[number] = true;
                has_changed = true;
            }
        }
    }
    let of = |part: &Part| {
        let mut next: Vec<usize> = part.next.iter().copied().filter(|next| leads[*next]).collect();
        next.sort_unstable();
        next.dedup();
        next
    };
    parts.iter().map(of).collect()
}

struct Threads<'b, 'a> {
    text: &'b str,
    body: &'b Body<'a>,
    names: HashSet<&'a str>,
    parts: &'b [Part],
    next: Vec<Vec<usize>>,
    is_met: Vec<bool>,
    /// The registers that may have other values in other threads.
    varying: Vec<bool>,
    /// What is known of [that](Threads::apart), which does not change.
    apart: HashMap<usize, Option<Vec<usize>>>,
}

impl Threads<'_, '_> {
    /// Finds more registers until there are none, or threads are found that do not meet.
    fn meet(&mut self) -> bool {
        for _ in 0..MOST_ROUNDS {
            let before = self.varying.clone();
            for part in 0..self.parts.len() {
                self.vary(part, false);
            }
            for part in 0..self.parts.len() {
                if !self.splits(part) {
                    continue;
                }
                if !self.apart.contains_key(&part) {
                    let apart = self.apart(part);
                    self.apart.insert(part, apart);
                }
                let Some(apart) = self.apart[&part].clone() else { return false };
                apart.into_iter().for_each(|part| self.vary(part, true));
            }
            if self.varying == before {
                return true;
            }
        }
        false
    }

    /// Notes the registers that vary by what a part writes: all of them if not all threads come through it, or not together.
    fn vary(&mut self, part: usize, are_apart: bool) {
        let body = self.body;
        for item in &body.items[self.parts[part].items.clone()] {
            if let What::Step(step) = &item.what
                && (are_apart || self.is_varying(step, &self.text[item.span.clone()]))
            {
                step.writes.iter().for_each(|register| self.varying[*register as usize] = true);
            }
        }
    }

    /// Whether an instruction may do one thing in one thread and another in another.
    fn is_varying(&self, step: &Step<'_>, text: &str) -> bool {
        let is_own = match step.class {
            // All hear the same.
            Class::Asks => return false,
            Class::Writes => true,
            _ => step.carry.1 || self.names_a_thread(text),
        };
        let guard = step.guard.map(|(register, _)| register);
        is_own || step.reads.iter().chain(&guard).any(|register| self.varying[*register as usize])
    }

    /// Whether a special register is read that may be another one in another thread.
    fn names_a_thread(&self, text: &str) -> bool {
        let is_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.');
        let mut words = text.split(|c| !is_of_name(c));
        words.any(|word| {
            word.starts_with('%') && !self.is_register(word) && !is_of_block(&word[1..])
        })
    }

    /// Whether it is one that the body declares, or a part of one.
    fn is_register(&self, word: &str) -> bool {
        self.names.contains(word)
            || word.split_once('.').is_some_and(|(name, _)| self.names.contains(name))
    }

    /// Whether some threads go from the end of a part to one that leads to a barrier, and others to another one.
    fn splits(&self, part: usize) -> bool {
        let last = self.parts[part].items.clone().last().map(|at| &self.body.items[at]);
        let Some(item) = last.filter(|_| self.next[part].len() > 1) else { return false };
        match &item.what {
            What::Step(step) if step.flow != Flow::Next => {
                self.is_varying(step, &self.text[item.span.clone()])
            }
            _ => false,
        }
    }

    /// The parts through which threads come that were split at the end of `part`, up to that in which all are together again;
    /// `None` if they may come to barriers before.
    fn apart(&self, part: usize) -> Option<Vec<usize>> {
        let joins = 0..self.parts.len();
        let ways = joins.filter_map(|join| self.up_to(part, join));
        ways.min_by_key(Vec::len)
    }

    /// The parts on all ways from the end of `part` to `join`, without that; `None` if a way leads to a barrier past it.
    fn up_to(&self, part: usize, join: usize) -> Option<Vec<usize>> {
        let mut seen = vec![false; self.parts.len()];
        let mut open = self.next[part].clone();
        let mut found = Vec::new();
        while let Some(part) = open.pop() {
            if part == join || std::mem::replace(&mut seen[part], true) {
                continue;
            }
            if self.is_met[part] {
                return None;
            }
            found.push(part);
            open.extend(&self.next[part]);
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::read_together;
    use crate::live::parts;

    /// Whether threads meet in a body with these instructions. `%n` is a parameter, `%t` the thread's number.
    fn together(text: &str) -> bool {
        let text = format!(
            ".reg .pred %p<4>; .reg .b32 %r<8>, %n, %t, %c; .reg .b64 %rd<4>;
             ld.param.u32 %n, [some]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x;
             {text} ret;"
        );
        let body = read_together(&text, &[]).expect("a body");
        let (parts, _) = parts(&body).expect("parts");
        let is_barrier =
            |at: &usize| matches!(&body.items[*at].what, What::Step(step) if step.class.meets());
        let ends = (0..body.items.len()).filter(is_barrier);
        let meets: Vec<usize> = ends
            .map(|at| parts.iter().position(|part| part.items.contains(&at)).expect("a part"))
            .collect();
        meet_together(&text, &body, &parts, &meets)
    }

    #[test]
    fn a_loop_that_all_make_as_often() {
        let turns = |turns: &str| {
            together(&format!(
                "mov.u32 %r0, 0;
                 $next: bar.sync 0; add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, {turns};
                 @%p0 bra $next; bar.sync 0;"
            ))
        };
        assert!(turns("%n"));
        assert!(turns("%c"));
        assert!(turns("16"));
        assert!(!turns("%t"));
        assert!(!turns("%laneid"));
    }

    #[test]
    fn what_is_loaded_may_vary() {
        let from = |load: &str| {
            together(&format!(
                "{load} setp.ne.u32 %p0, %r0, 0;
                 @%p0 bra $over; bar.sync 0; $over: bar.sync 0;"
            ))
        };
        assert!(from("ld.param.u32 %r0, [some];"));
        assert!(!from("ld.global.u32 %r0, [%rd0];"));
        assert!(!from("mov.u32 %r0, 0; setp.eq.u32 %p1, %t, 3; @%p1 mov.u32 %r0, 1;"));
        assert!(!from("mov.u32 %r0, %n; add.cc.u32 %r1, %t, 1; addc.u32 %r0, %n, 0;"));
        assert!(from("bar.red.or.pred %p2, 0, %p1; selp.u32 %r0, 1, 0, %p2;"), "all hear the same");
    }

    #[test]
    fn who_is_apart_comes_together_before_the_barrier() {
        let split = "setp.eq.u32 %p0, %t, 0; @%p0 bra $one;";
        assert!(together(&format!("{split} add.u32 %r1, %n, 1; $one: bar.sync 0;")));
        assert!(!together(&format!(
            "{split} bar.sync 0; bra $over; $one: bar.sync 0; $over: add.u32 %r0, %n, 1;"
        )));
        // A loop of which each makes as many turns as it likes, before the barrier.
        let alone = "$next: sub.u32 %t, %t, 1; setp.ne.u32 %p0, %t, 0; @%p0 bra $next;";
        assert!(together(&format!("{alone} bar.sync 0;")));
        // What was written apart is not the same in all of them.
        let after = |register: &str| {
            together(&format!(
                "mov.u32 %r1, 0; mov.u32 %r2, 0; {split} mov.u32 %r1, 1; $one:
                 setp.eq.u32 %p1, {register}, 0; @%p1 bra $two; bar.sync 0; $two: bar.sync 0;"
            ))
        };
        assert!(after("%r2"));
        assert!(!after("%r1"));
    }

    #[test]
    fn who_leaves_for_good_does_not_count() {
        let leave = "setp.ge.u32 %p0, %t, %n; @%p0 bra $end;";
        assert!(together(&format!("{leave} $next: bar.sync 0; bra $next; $end: ret;")));
        assert!(together("setp.ge.u32 %p0, %t, %n; @%p0 ret; bar.sync 0;"));
        assert!(!together(&format!("{leave} bar.sync 0; $end: bar.sync 0;")));
    }

    #[test]
    fn one_of_many_labels() {
        let by = |register: &str| {
            together(&format!(
                "brx.idx {register}, $all; $all: .branchtargets $a, $b;
                 $a: bar.sync 0; ret; $b: bar.sync 0;"
            ))
        };
        assert!(by("%n"));
        assert!(!by("%t"));
    }
}
