//! Where divergent branches reconverge: the immediate post-dominators of the flow graph.

use crate::ptx::code::{Code, NONE, Op};

/// Where control may go from an instruction; [`NONE`] is out of the function.
fn successors(code: &Code, pc: usize, into: &mut Vec<u32>) {
    into.clear();
    let inst = &code.insts[pc];
    let next = pc as u32 + 1;
    let falls = match &inst.op {
        Op::Branch(target, _) => {
            into.push(*target);
            false
        }
        Op::BranchIndexed(_, table, _) => {
            into.extend_from_slice(&code.tables[*table as usize]);
            false
        }
        Op::Return | Op::Exit | Op::Trap => {
            into.push(NONE);
            false
        }
        _ => true,
    };
    if falls || inst.guard != NONE {
        into.push(if (next as usize) < code.insts.len() { next } else { NONE });
    }
}

fn ends_block(op: &Op) -> bool {
    matches!(op, Op::Branch(..) | Op::BranchIndexed(..) | Op::Return | Op::Exit | Op::Trap)
}

/// Fills in the reconvergence point of every branch.
pub(super) fn reconverge(code: &mut Code) {
    let count = code.insts.len();
    let mut leader = vec![false; count + 1];
    leader[0] = true;
    let mut next = Vec::new();
    for pc in 0..count {
        if ends_block(&code.insts[pc].op) {
            leader[pc + 1] = true;
            successors(code, pc, &mut next);
            for &target in next.iter().filter(|&&target| target != NONE) {
                leader[target as usize] = true;
            }
        }
    }
    let starts: Vec<usize> = (0..count).filter(|&pc| leader[pc]).collect();
    let mut block_of = vec![0; count];
    for (block, &start) in starts.iter().enumerate() {
        let end = starts.get(block + 1).copied().unwrap_or(count);
        block_of[start..end].fill(block);
    }
    let exit = starts.len();
    let mut forward = vec![Vec::new(); exit + 1];
    let mut backward = vec![Vec::new(); exit + 1];
    for (block, ahead) in forward.iter_mut().enumerate().take(exit) {
        let last = starts.get(block + 1).copied().unwrap_or(count) - 1;
        successors(code, last, &mut next);
        for &target in &next {
            let to = if target == NONE { exit } else { block_of[target as usize] };
            ahead.push(to);
            backward[to].push(block);
        }
    }
    let dominator = post_dominators(&forward, &backward, exit);
    for pc in 0..count {
        let found = dominator[block_of[pc]];
        let point = match found {
            Some(block) if block != exit => starts[block] as u32,
            _ => NONE,
        };
        match &mut code.insts[pc].op {
            Op::Branch(_, at) | Op::BranchIndexed(_, _, at) => *at = point,
            _ => {}
        }
    }
}

/// The immediate post-dominator of each block, by iteration over the reversed graph (Cooper,
/// Harvey and Kennedy); none for blocks that never reach the exit.
fn post_dominators(
    forward: &[Vec<usize>],
    backward: &[Vec<usize>],
    exit: usize,
) -> Vec<Option<usize>> {
    let mut order = Vec::new();
    let mut rank = vec![usize::MAX; exit + 1];
    let mut seen = vec![false; exit + 1];
    let mut stack = vec![(exit, 0)];
    seen[exit] = true;
    while let Some((block, child)) = stack.pop() {
        if let Some(&from) = backward[block].get(child) {
            stack.push((block, child + 1));
            if !seen[from] {
                seen[from] = true;
                stack.push((from, 0));
            }
        } else {
            rank[block] = order.len();
            order.push(block);
        }
    }
    let mut dominator: Vec<Option<usize>> = vec![None; exit + 1];
    dominator[exit] = Some(exit);
    let mut changed = true;
    while changed {
        changed = false;
        for &block in order.iter().rev().filter(|&&block| block != exit) {
            let mut found: Option<usize> = None;
            for &to in forward[block].iter().filter(|&&to| dominator[to].is_some()) {
                found = Some(match found {
                    None => to,
                    Some(other) => meet(&dominator, &rank, other, to),
                });
            }
            if dominator[block] != found {
                dominator[block] = found;
                changed = true;
            }
        }
    }
    dominator
}

fn meet(dominator: &[Option<usize>], rank: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        while rank[a] < rank[b] {
            a = dominator[a].unwrap_or(b);
        }
        while rank[b] < rank[a] {
            b = dominator[b].unwrap_or(a);
        }
    }
    a
}
