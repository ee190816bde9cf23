//! Pointers that live in device memory only: lists that jump between allocations, relinked all the
//! time, and a table of masked addresses. Nothing outside the device can see what a launch writes.

use anyhow::{Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Module, Shape};
use crate::numbers::mix;
use crate::report::Run;

const PTX: &str = include_str!("kernels/indirect.ptx");
const POOLS: u32 = 5;
const HOPS: u32 = 24;
/// Steps between two relinkings.
const RELINK: u32 = 4;
/// Prime, and no divisor of a total, so that the links are a permutation.
const STRIDE: u32 = 7919;
/// 64-bit words of a node: next, value, id and visits.
const NODE_WORDS: usize = 3;

/// The lists on the host, by node number.
struct Host {
    next: Vec<u32>,
    value: Vec<u64>,
    visits: Vec<u32>,
    trace: Vec<u64>,
}

impl Host {
    fn link(&mut self, shift: u32) {
        let total = self.next.len() as u64;
        for (i, next) in self.next.iter_mut().enumerate() {
            *next = ((i as u64 * u64::from(STRIDE) + u64::from(shift)) % total) as u32;
        }
    }

    fn step(&mut self, step: u32, seed: u32) {
        if step.is_multiple_of(RELINK) {
            self.link(shift(seed, step));
        }
        for w in 0..self.trace.len() {
            let (mut node, mut path) = (w, 0u64);
            for hop in 0..HOPS {
                path = path.wrapping_mul(31).wrapping_add(node as u64);
                self.visits[node] = self.visits[node].wrapping_add(1);
                self.value[node] = self.value[node].wrapping_add(w as u64 + u64::from(hop));
                node = self.next[node] as usize;
            }
            self.trace[w] = self.trace[w].wrapping_add(path);
        }
        for value in &mut self.value {
            *value = value.wrapping_mul(7).wrapping_add(u64::from(step));
        }
    }
}

fn shift(seed: u32, step: u32) -> u32 {
    mix(seed ^ mix(step)) % 1000
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let pool_nodes: u32 = run.pick(1 << 10, 64 << 10, 4 << 20);
    let steps = run.plan(300, 500, 2000);
    let total = POOLS * pool_nodes;
    let walkers = total / 8;
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let link = module.kernel("lists_link")?;
    let walk = module.kernel("lists_walk")?;
    let hide = module.kernel("table_mask")?;
    let touch = module.kernel("table_touch")?;
    let pools: Vec<Buffer> = (0..POOLS)
        .map(|_| Buffer::zeroed::<u64>(pool_nodes as usize * NODE_WORDS))
        .collect::<Result<_>>()?;
    let addresses: Vec<u64> = pools.iter().map(Buffer::address).collect();
    let table = Buffer::holding(&addresses)?;
    let masked = Buffer::zeroed::<u64>(POOLS as usize)?;
    let trace = Buffer::zeroed::<u64>(walkers as usize)?;
    let all = Shape::covering(total);
    link.run(all, args![&table, pool_nodes, total, STRIDE, 0u32, 1u32])?;
    hide.run(Shape::of(1, 32), args![&table, &masked, POOLS])?;
    gpu.synchronize()?;
    run.ready()?;
    let mut series = Vec::new();
    for step in 0..steps {
        if step.is_multiple_of(RELINK) {
            let shift = shift(run.seed, step);
            link.run(all, args![&table, pool_nodes, total, STRIDE, shift, 0u32])?;
        }
        walk.run(Shape::covering(walkers), args![&table, pool_nodes, walkers, HOPS, &trace])?;
        touch.run(all, args![&masked, pool_nodes, total, step])?;
        let first: u64 = trace.read_one(0)?;
        series.push(first);
        run.step(step, format_args!("trace {first:016x}"))?;
    }

    let mut host = Host {
        next: vec![0; total as usize],
        value: (0..total).map(|i| u64::from(mix(i))).collect(),
        visits: vec![0; total as usize],
        trace: vec![0; walkers as usize],
    };
    let checked = run.checkable(u64::from(walkers * HOPS + total));
    for (step, &first) in (0..checked).zip(&series) {
        host.step(step, run.seed);
        ensure!(first == host.trace[0], "step {}: trace {first:016x}", step + 1);
    }
    let complete = checked == steps;
    // The final links, also where the host could not repeat the whole run.
    host.link(shift(run.seed, (steps - 1) / RELINK * RELINK));
    for (p, pool) in pools.iter().enumerate() {
        for (k, node) in pool.read::<u64>()?.chunks_exact(NODE_WORDS).enumerate() {
            let i = p * pool_nodes as usize + k;
            let (next, id, visits) = (host.next[i], node[2] as u32, (node[2] >> 32) as u32);
            let (to_pool, to_node) = ((next / pool_nodes) as usize, next % pool_nodes);
            let wanted = addresses[to_pool] + u64::from(to_node) * NODE_WORDS as u64 * 8;
            ensure!(node[0] == wanted, "node {i} points at {:x}, not at {wanted:x}", node[0]);
            ensure!(id == i as u32, "node {i} has the number {id}");
            let right = node[1] == host.value[i] && visits == host.visits[i];
            ensure!(!complete || right, "node {i} has wrong values");
            // Addresses differ between runs; what they point at does not.
            run.absorb(&[next, id, visits]);
            run.absorb(&[node[1]]);
        }
    }
    let trace: Vec<u64> = trace.read()?;
    ensure!(!complete || trace == host.trace, "the traces are wrong");
    run.absorb(&trace);
    run.finish()
}
