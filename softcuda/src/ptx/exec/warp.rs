//! One warp: the instruction loop, divergence and calls.

use super::block::{Arrival, Barrier, Room, Waiting};
use super::context::{Fault, Step};
use super::memory::Local;
use crate::ptx::code::{
    BarrierMode, CONSTANT, CallSite, Code, FUNCTION_WINDOW, Inst, LOCAL_WINDOW, Lanes, NONE, Op,
    RESERVED_SHARED, Reg, Special, Src, WIDTH, WINDOW_MASK,
};
use crate::ptx::module::MOST_LOCAL;
use std::sync::atomic::{Ordering, fence};

/// The most registers on a warp's stack of calls: 64 MiB.
const MOST_REGISTERS: usize = 1 << 18;

/// The deepest nesting of calls.
const MOST_CALLS: usize = 1 << 14;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ready,
    /// At a barrier.
    Waiting,
    Done,
}

/// Lanes that run together, or wait to: where, and where they stop to join others.
#[derive(Debug, Clone, Copy)]
pub(super) struct Path {
    pub(super) mask: u32,
    pub(super) pc: u32,
    pub(super) join: u32,
}

/// A caller, while its callee runs.
pub(super) struct Frame<'a> {
    code: &'a Code,
    path: Path,
    floor: usize,
    returned: u32,
    called: u32,
    allocated: u32,
    site: u32,
}

pub(super) struct Warp<'a> {
    pub(super) status: Status,
    pub(super) number: u32,
    pub(super) entry: &'a Code,
    pub(super) code: &'a Code,
    registers: Vec<Lanes>,
    /// The current function's first register.
    base: usize,
    pub(super) path: Path,
    /// Paths that wait for the current one, the callers' included.
    pub(super) paths: Vec<Path>,
    /// How many of `paths` are the callers'.
    pub(super) floor: usize,
    pub(super) frames: Vec<Frame<'a>>,
    /// Lanes that have not exited.
    pub(super) live: u32,
    /// Lanes that have returned from the current function.
    pub(super) returned: u32,
    /// Lanes have changed turns, so that more than one path may be past a join.
    pub(super) apart: bool,
    /// Lanes that wait before an operation of several lanes.
    pub(super) parked: u32,
    /// A turn should have ended, but could not.
    pub(super) overdue: bool,
    first_mask: u32,
    pub(super) local: Local,
    /// The current function's frame in local memory.
    pub(super) local_base: u32,
    /// Bytes behind that frame that the function has allocated (`alloca`), the same for all lanes.
    pub(super) allocated: u32,
    thread: [Lanes; 3],
    waiting: Waiting,
    /// What each lane was told last by the device runtime; 0 is no error.
    pub(super) errors: [u32; WIDTH],
}

impl<'a> Warp<'a> {
    pub(super) fn new(code: &'a Code, number: u32, threads: u32, shape: [u32; 3]) -> Self {
        let count = (threads - number * 32).min(32);
        let first_mask = u32::MAX >> (32 - count);
        let index = |lane: usize| number * 32 + lane as u32;
        let thread = [
            std::array::from_fn(|lane| u64::from(index(lane) % shape[0])),
            std::array::from_fn(|lane| u64::from(index(lane) / shape[0] % shape[1])),
            std::array::from_fn(|lane| u64::from(index(lane) / shape[0] / shape[1])),
        ];
        Warp {
            status: Status::Done,
            number,
            entry: code,
            code,
            registers: vec![[0; WIDTH]; code.registers as usize],
            base: 0,
            path: Path { mask: 0, pc: 0, join: NONE },
            paths: Vec::new(),
            floor: 0,
            frames: Vec::new(),
            live: 0,
            returned: 0,
            apart: false,
            parked: 0,
            overdue: false,
            first_mask,
            local: Local::default(),
            local_base: 0,
            allocated: 0,
            thread,
            waiting: Waiting::default(),
            errors: [0; WIDTH],
        }
    }

    /// Puts all threads before the kernel's first instruction.
    pub(super) fn start(&mut self) {
        self.status = Status::Ready;
        self.code = self.entry;
        self.base = 0;
        self.path = Path { mask: self.first_mask, pc: 0, join: NONE };
        self.paths.clear();
        self.floor = 0;
        self.frames.clear();
        self.live = self.first_mask;
        self.returned = 0;
        self.apart = false;
        self.parked = 0;
        self.overdue = false;
        self.local_base = 0;
        self.allocated = 0;
        self.errors = [0; WIDTH];
        self.local.reserve(self.entry.frame_bytes);
    }

    /// A register of the current function to write.
    pub(super) fn reg(&mut self, register: Reg) -> *mut Lanes {
        &raw mut self.registers[self.base + register as usize]
    }

    pub(super) fn lanes(&self, source: Src) -> &Lanes {
        if source & CONSTANT != 0 {
            &self.code.constants[(source & !CONSTANT) as usize]
        } else {
            &self.registers[self.base + source as usize]
        }
    }

    pub(super) fn lanes_mut(&mut self, register: Reg) -> &mut Lanes {
        &mut self.registers[self.base + register as usize]
    }

    /// The lanes whose predicate holds.
    pub(super) fn holding(&self, predicate: Src) -> u32 {
        let lanes = self.lanes(predicate);
        let mut mask = 0;
        for (lane, value) in lanes.iter().enumerate() {
            mask |= ((value & 1) as u32) << lane;
        }
        mask
    }

    pub(super) fn write(&mut self, register: Reg, mask: u32, value: u64) {
        let lanes = self.lanes_mut(register);
        for_lanes(mask, |lane| lanes[lane] = value);
    }

    /// Continues after a barrier.
    pub(super) fn pass(&mut self, barrier: &Barrier) {
        self.status = Status::Ready;
        let waiting = std::mem::take(&mut self.waiting);
        if waiting.to != NONE {
            self.write(waiting.to, waiting.mask, barrier.result(waiting.mode));
        }
    }

    /// Runs until a barrier, the end or the number of instructions, and counts them.
    pub(super) fn run(&mut self, room: &mut Room<'a>, quantum: u32) -> Step<()> {
        let mut left = 0..quantum;
        let came = self.run_some(room, &mut left);
        room.executed += u64::from(quantum - left.len() as u32);
        came
    }

    /// `left` is what is left of the number of instructions.
    // Inlined, so that this number can stay in a register.
    #[inline(always)]
    fn run_some(&mut self, room: &mut Room<'a>, left: &mut std::ops::Range<u32>) -> Step<()> {
        for _ in left {
            if self.path.pc == self.path.join && !self.join()? {
                return Ok(());
            }
            let code = self.code;
            let Inst { guard, op } = &code.insts[self.path.pc as usize];
            let mut mask = self.path.mask;
            self.path.pc += 1;
            if *guard != NONE {
                let holding = self.holding(*guard >> 1);
                mask &= if *guard & 1 == 0 { holding } else { !holding };
                if mask == 0 {
                    continue;
                }
            }
            match *op {
                Op::Map1(kernel, to, a) => {
                    let to = self.reg(to);
                    let a = self.source(a);
                    // SAFETY: `reg` and `source` give valid registers; no reference to one
                    // lives. The kernel was chosen for this CPU.
                    unsafe { kernel(mask, to, a) };
                }
                Op::Map2(kernel, to, a, b) => {
                    let to = self.reg(to);
                    let (a, b) = (self.source(a), self.source(b));
                    // SAFETY: as for one source.
                    unsafe { kernel(mask, to, a, b) };
                }
                Op::Map3(kernel, to, a, b, c) => {
                    let to = self.reg(to);
                    let (a, b, c) = (self.source(a), self.source(b), self.source(c));
                    // SAFETY: as for one source.
                    unsafe { kernel(mask, to, a, b, c) };
                }
                Op::Map4(kernel, to, sources) => {
                    let to = self.reg(to);
                    let [a, b, c, d] = sources.map(|source| self.source(source));
                    // SAFETY: as for one source.
                    unsafe { kernel(mask, to, a, b, c, d) };
                }
                Op::Copy(to, from) => {
                    let from = *self.lanes(from);
                    self.merge(to, mask, &from);
                }
                Op::Special(to, special) => self.special(room, to, mask, special),
                Op::GlobalAddress(to, index, addend) => {
                    let address = room.context.launch.global_addresses[index as usize];
                    self.write(to, mask, address.wrapping_add(addend as u64));
                }
                Op::FrameAddress(to, offset, window) => {
                    let offset = self.local_base.wrapping_add(offset);
                    self.write(to, mask, u64::from(offset) | window);
                }
                Op::DynamicShared(to, align, addend) => {
                    let entry = room.context.entry;
                    let start = entry.static_shared.next_multiple_of(align.max(1) as usize) as u64;
                    self.write(to, mask, start.wrapping_add(addend as u64));
                }
                Op::Load { ref place, signed, count, ref to } => {
                    self.load(room, place, mask, signed, count, to)?;
                }
                Op::Store { ref place, count, ref from } => {
                    self.store(room, place, mask, count, from)?;
                }
                Op::Atomic { ref place, op, ty, to, b, c } => {
                    self.atomic(room, place, mask, op, ty, to, b, c)?;
                }
                Op::Image(index) => self.image(room, &code.images[index as usize], mask)?,
                Op::CopyAsync(copy) => self.copy_async(room, &code.copies[copy as usize], mask)?,
                Op::CopyBulk(copy) => {
                    self.copy_bulk(room, &code.bulk_copies[copy as usize], mask)?;
                }
                Op::Mbarrier(index) => {
                    if self.mbarrier(room, &code.mbarriers[index as usize], mask)? {
                        // They will ask again; meanwhile others may arrive.
                        self.end_turn();
                        return Ok(());
                    }
                }
                Op::Multimem(index) => {
                    self.multimem(room, &code.multimems[index as usize], mask)?;
                }
                Op::Branch(target, join) => {
                    self.branch(mask, target, join);
                    if self.overdue {
                        self.end_overdue_turn();
                    }
                }
                Op::BranchIndexed(index, table, join) => {
                    self.branch_indexed(mask, index, table, join)?;
                }
                Op::Call(function, site) => {
                    let callee = room.context.code(function as usize);
                    self.call(callee, site, mask)?;
                }
                Op::CallIndirect(target, site) => self.call_indirect(room, target, site, mask)?,
                Op::Return => {
                    self.returned |= mask;
                    self.path.mask &= !mask;
                    if self.path.mask == 0 && !self.join()? {
                        return Ok(());
                    }
                }
                Op::Exit => {
                    self.live &= !mask;
                    self.path.mask &= !mask;
                    if self.path.mask == 0 && !self.join()? {
                        return Ok(());
                    }
                }
                Op::Trap => return Err(Fault::Trapped),
                Op::Fence => fence(Ordering::SeqCst),
                Op::Barrier { mode, id, threads, to, predicate, negated } => {
                    if self.apart && self.gather() {
                        continue;
                    }
                    let lane = mask.trailing_zeros() as usize;
                    let mut holding = 0;
                    if predicate != NONE {
                        holding = self.holding(predicate);
                        holding = mask & if negated { !holding } else { holding };
                    }
                    let threads =
                        if threads == NONE { 0 } else { self.lanes(threads)[lane] as u32 };
                    let arrival = Arrival {
                        mode,
                        id: (id != NONE).then(|| self.lanes(id)[lane] & 0xffff_ffff),
                        threads,
                        lanes: mask.count_ones(),
                        holding: holding.count_ones(),
                    };
                    room.arrive(self.number, &arrival)?;
                    if mode != BarrierMode::Arrive {
                        self.waiting = Waiting { mode, to, mask };
                        self.status = Status::Waiting;
                        return Ok(());
                    }
                }
                Op::Print(site) => self.print(room, mask, site)?,
                Op::HeapAllocate(site) => self.heap_allocate(room, mask, site)?,
                Op::HeapFree(site) => self.heap_free(room, mask, site)?,
                Op::SetCondition(site) => self.set_condition(room, mask, site)?,
                Op::DeviceRuntime(call, site) => self.device_runtime(room, mask, call, site)?,
                Op::StackAllocate(to, size, align) => self.stack_allocate(to, size, align, mask)?,
                Op::StackSave(to) => self.write(to, mask, u64::from(self.allocated)),
                Op::StackRestore(from) => self.stack_restore(from, mask),
                Op::AssertFail(site) => return Err(self.assertion(room, mask, site)),
                ref op => {
                    if self.apart && self.gather() {
                        continue;
                    }
                    self.collective(room, op, mask)?;
                }
            }
        }
        self.end_turn();
        Ok(())
    }

    fn source(&self, source: Src) -> *const Lanes {
        if source & CONSTANT != 0 {
            &raw const self.code.constants[(source & !CONSTANT) as usize]
        } else {
            &raw const self.registers[self.base + source as usize]
        }
    }

    pub(super) fn merge(&mut self, to: Reg, mask: u32, from: &Lanes) {
        let to = self.lanes_mut(to);
        if mask == u32::MAX {
            *to = *from;
        } else {
            for_lanes(mask, |lane| to[lane] = from[lane]);
        }
    }

    fn special(&mut self, room: &Room<'_>, to: Reg, mask: u32, special: Special) {
        let launch = room.context.launch;
        let value = match special {
            Special::Tid(axis) => {
                let lanes = self.thread[usize::from(axis)];
                return self.merge(to, mask, &lanes);
            }
            Special::Ntid(axis) => launch.block[usize::from(axis)],
            Special::Ctaid(axis) => room.coordinates[usize::from(axis)],
            Special::Nctaid(axis) => launch.grid[usize::from(axis)],
            Special::WarpId => self.number,
            Special::WarpCount => room.warps,
            Special::SmId => (room.number % 2) as u32,
            Special::SmCount => 2,
            Special::GridId => 1,
            Special::DynamicShared => launch.dynamic_shared,
            Special::TotalShared => room.context.shared_bytes as u32,
            Special::ReservedShared(offset) => {
                room.context.shared_bytes as u32 - RESERVED_SHARED + offset
            }
            Special::GridWorkspace(high) => {
                let address = room.context.workspace_address();
                if high { (address >> 32) as u32 } else { address as u32 }
            }
            Special::ClusterId(_)
            | Special::ClusterCount(_)
            | Special::BlockInCluster(_)
            | Special::ClusterShape(_)
            | Special::ClusterRank
            | Special::ClusterSize
            | Special::IsCluster => room.cluster_special(special),
            Special::Clock => {
                let now = super::memory::nanoseconds(false);
                return self.write(to, mask, now);
            }
            Special::GlobalTimer => {
                let now = super::memory::nanoseconds(true);
                return self.write(to, mask, now);
            }
            Special::LaneId
            | Special::LaneMaskEq
            | Special::LaneMaskLe
            | Special::LaneMaskLt
            | Special::LaneMaskGe
            | Special::LaneMaskGt => {
                let lanes = std::array::from_fn(|lane| {
                    let own = 1u64 << lane;
                    match special {
                        Special::LaneMaskEq => own,
                        Special::LaneMaskLe => own | (own - 1),
                        Special::LaneMaskLt => own - 1,
                        Special::LaneMaskGe => !(own - 1) & 0xffff_ffff,
                        Special::LaneMaskGt => !(own | (own - 1)) & 0xffff_ffff,
                        _ => lane as u64,
                    }
                });
                return self.merge(to, mask, &lanes);
            }
        };
        self.write(to, mask, u64::from(value));
    }

    fn branch(&mut self, taken: u32, target: u32, join: u32) {
        let staying = self.path.mask & !taken;
        if staying == 0 {
            self.path.pc = target;
            return;
        }
        self.diverge(join);
        let next = self.path.pc;
        if next == join {
            self.path = Path { mask: taken, pc: target, join };
            return;
        }
        if target != join {
            self.paths.push(Path { mask: taken, pc: target, join });
        }
        self.path = Path { mask: staying, pc: next, join };
    }

    /// Leaves the current path to be continued at `join` by all its lanes.
    fn diverge(&mut self, join: u32) {
        // Where the current path already ends at the join, the one below it continues there.
        if join != self.path.join && join != NONE {
            self.paths.push(Path { pc: join, ..self.path });
        }
    }

    fn branch_indexed(&mut self, mask: u32, index: Src, table: u32, join: u32) -> Step<()> {
        let code = self.code;
        let table = &code.tables[table as usize];
        let chosen = *self.lanes(index);
        let staying = self.path.mask & !mask;
        self.diverge(join);
        let next = self.path.pc;
        let floor = self.paths.len();
        if staying != 0 && next != join {
            self.paths.push(Path { mask: staying, pc: next, join });
        }
        let mut rest = mask;
        while rest != 0 {
            let first = chosen[rest.trailing_zeros() as usize] as u32;
            let target = *table
                .get(first as usize)
                .ok_or(Fault::Instruction("a branch index beyond its table"))?;
            let mut same = 0;
            for_lanes(rest, |lane| {
                if table.get(chosen[lane] as u32 as usize) == Some(&target) {
                    same |= 1 << lane;
                }
            });
            rest &= !same;
            if target != join {
                self.paths.push(Path { mask: same, pc: target, join });
            }
        }
        self.path = if self.paths.len() > floor {
            self.paths.pop().unwrap_or(self.path)
        } else {
            // Everyone is at the join already.
            Path { mask: self.path.mask, pc: join, join }
        };
        Ok(())
    }

    /// Goes on with the path below the current one, or with the caller; false if the warp is
    /// done.
    fn join(&mut self) -> Step<bool> {
        loop {
            if self.paths.len() > self.floor
                && let Some(path) = self.paths.pop()
            {
                let mask = path.mask & self.live & !self.returned;
                if mask != 0 && path.pc != path.join {
                    self.path = Path { mask, ..path };
                    return Ok(true);
                }
                continue;
            }
            let Some(frame) = self.frames.pop() else {
                self.status = Status::Done;
                return Ok(false);
            };
            self.return_to(&frame)?;
            let mask = self.path.mask & self.live & !self.returned;
            self.path.mask = mask;
            if mask != 0 && self.path.pc != self.path.join {
                return Ok(true);
            }
        }
    }

    fn return_to(&mut self, frame: &Frame<'a>) -> Step<()> {
        let site: &CallSite = &frame.code.calls[frame.site as usize];
        let caller_base = self.local_base - frame.code.frame_bytes - frame.allocated;
        let lanes = frame.called & self.live;
        for (from, to) in self.code.returns.iter().zip(&site.returns) {
            let size = from.size.min(to.size);
            let (from, to) = (self.local_base + from.offset, caller_base + to.offset);
            self.local.copy(lanes, from, to, size);
        }
        self.code = frame.code;
        self.base -= frame.code.registers as usize;
        self.local_base = caller_base;
        self.allocated = frame.allocated;
        self.path = frame.path;
        self.floor = frame.floor;
        self.returned = frame.returned;
        Ok(())
    }

    fn call(&mut self, callee: Option<&'a Code>, site: u32, mask: u32) -> Step<()> {
        let callee = callee.ok_or(Fault::Instruction("a call of an address without function"))?;
        let caller = self.code;
        let base = self.base + caller.registers as usize;
        let local_base = self.local_base + caller.frame_bytes + self.allocated;
        if base + callee.registers as usize > MOST_REGISTERS
            || local_base.saturating_add(callee.frame_bytes) > MOST_LOCAL
            || self.frames.len() >= MOST_CALLS
        {
            return Err(Fault::Stack);
        }
        self.local.reserve(local_base + callee.frame_bytes);
        let args = &caller.calls[site as usize].args;
        for (from, to) in args.iter().zip(&callee.params) {
            let size = from.size.min(to.size);
            self.local.copy(mask, self.local_base + from.offset, local_base + to.offset, size);
        }
        self.frames.push(Frame {
            code: caller,
            path: self.path,
            floor: self.floor,
            returned: self.returned,
            called: mask,
            allocated: self.allocated,
            site,
        });
        self.code = callee;
        self.base = base;
        if self.registers.len() < base + callee.registers as usize {
            self.registers.resize(base + callee.registers as usize, [0; WIDTH]);
        }
        self.local_base = local_base;
        self.allocated = 0;
        self.floor = self.paths.len();
        self.returned = 0;
        self.path = Path { mask, pc: 0, join: NONE };
        Ok(())
    }

    fn call_indirect(&mut self, room: &Room<'a>, target: Src, site: u32, mask: u32) -> Step<()> {
        let targets = *self.lanes(target);
        let first = targets[mask.trailing_zeros() as usize];
        if first & WINDOW_MASK != FUNCTION_WINDOW {
            return Err(Fault::Instruction("a call of an address without function"));
        }
        let mut same = 0;
        for_lanes(mask, |lane| same |= u32::from(targets[lane] == first) << lane);
        if same != mask {
            // The others make their calls, one function at a time, before all go on.
            let next = self.path.pc;
            if next != self.path.join {
                self.paths.push(self.path);
            }
            self.paths.push(Path { mask: mask & !same, pc: next - 1, join: next });
            self.path = Path { mask: same, pc: next, join: next };
        }
        self.call(room.context.code((first & !WINDOW_MASK) as usize), site, same)
    }

    /// The generic address of a place in the current frame, for messages and the like.
    pub(super) fn frame_address(&self, offset: u32) -> u64 {
        LOCAL_WINDOW | u64::from(self.local_base + offset)
    }
}

/// Calls `act` with the number of each lane in the mask.
#[inline(always)]
pub(super) fn for_lanes(mask: u32, mut act: impl FnMut(usize)) {
    if mask == u32::MAX {
        for lane in 0..WIDTH {
            act(lane);
        }
        return;
    }
    let mut rest = mask;
    while rest != 0 {
        act(rest.trailing_zeros() as usize);
        rest &= rest - 1;
    }
}
