//! `--on-demand`: the program goes on before its memory is there.
//!
//! Device memory for all blocks is made during CRIU's work, and loaded while the program runs. A launch waits
//! for the blocks that it may touch, as the shim reads its arguments (`docs/access-sets.md`); these come
//! first. A block that is not there is not mapped in the program. So an unforeseen access is an
//! error of the device, and never a wrong result: the program is ended then, and restored with all of its
//! memory (`restore/supervisor.rs`).
//!
//! When all is loaded the gate is closed once, until the device has done all that it was given: only then is
//! it certain that no access was missed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gpucr_wire::Table;
use gpucr_wire::table::Range;
use parking_lot::Mutex;

use crate::base::faults::{fault, skipped};
use crate::base::format::milliseconds;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::cuda::lanes::{chunks_in, spans_on};
use crate::cuda::{DriverError, Hasher, Lane, SharedBlock, Span};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::host::process::{AgentError, LAST_MOMENTS};
use crate::image::Block;

use super::super::bulk::{self, Chunks, Room};
use super::super::loading::Loading;
use super::super::preflight::Opened;
use super::super::processes::{ended_well, unless_ended};
use super::super::report::{OnDemand, Report};
use super::super::source::Source;
use super::{Arrival, Prepared, Programs};

/// Bytes that are loaded before it is checked again what is wanted: some ten milliseconds over PCIe.
const BATCH: u64 = 512 << 20;
/// How long the gate is closed at most to see that the device has missed nothing; and the longest pause
/// before the next try, when it was busy for longer.
const PROOF: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// The pause between two checks, while nothing is wanted.
const POLL: Duration = Duration::from_millis(2);

/// Loads memory while the program runs.
#[derive(Default)]
pub(super) struct OnDemandArrival {
    lanes: Vec<(Lane, Result<Hasher, DriverError>)>,
    /// Device memory for all blocks, with nothing in it at first.
    memory: Vec<SharedBlock>,
    /// What the agents have been told to wait for.
    awaited: Awaited,
    done: Option<OnDemand>,
}

/// Which blocks the programs wait for, by their places among all.
#[derive(Default)]
struct Awaited {
    /// For each block, the process and the block's place in the table of that process.
    places: Vec<(usize, usize)>,
    /// The chunk table of each process, if it waits for blocks.
    tables: Vec<Option<Table>>,
}

impl Arrival for OnDemandArrival {
    fn brings_blocks_alone(&self) -> bool {
        true
    }

    /// How the program ends tells whether it has missed memory.
    fn needs_parent(&self) -> bool {
        true
    }

    /// Makes device memory, and keeps gpucr's contexts.
    fn prepare(&mut self, loading: &Loading<'_, '_>) -> Result<Prepared, Error> {
        let Opened { driver, placement } = loading.opened()?;
        let manifest = loading.image.manifest();
        let room = bulk::make_room(driver, &manifest.blocks(), placement)?;
        let Some(room) = room else { return Ok(Prepared::NoRoom) };
        loading.keep(room.reserve(manifest, placement));
        let Room { lanes, memory } = room;
        let with_hasher = |lane: Lane| {
            let hasher = Hasher::prepare(lane.context());
            (lane, hasher)
        };
        self.lanes = lanes.into_iter().map(with_hasher).collect();
        self.memory = memory;
        Ok(Prepared::Ready)
    }

    fn attach(&mut self, programs: &mut Programs<'_>) -> Result<(), Error> {
        self.awaited = Awaited::begin(programs)?;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        false
    }

    fn complete(
        &mut self,
        programs: &mut Programs<'_>,
        root: u32,
        asked: &AtomicBool,
    ) -> Result<(), Error> {
        self.done = Some(self.stream(programs, root, asked)?);
        Ok(())
    }

    fn report(&self, report: &mut Report) {
        report.on_demand.clone_from(&self.done);
    }
}

/// The blocks that the programs wait for.
struct Blocks<'a> {
    image: &'a Source,
    /// All blocks of the image.
    all: Vec<&'a Block>,
    /// For each block, the process and the block's place in the table of that process.
    places: Vec<(usize, usize)>,
    /// The chunk table of each process, if it waits for blocks.
    tables: Vec<Option<Table>>,
}

/// What the lanes of all devices share. Each loads the blocks of its own device.
struct Lanes<'b> {
    blocks: &'b Blocks<'b>,
    memory: &'b [SharedBlock],
    cuda_processes: &'b [Mutex<&'b mut CudaProcess>],
    root: u32,
    asked: &'b AtomicBool,
    stop: &'b Stop,
    progress: &'b dyn Progress,
}

impl Awaited {
    /// Tells the agents, whose programs are detached, to let launches wait.
    fn begin(programs: &mut Programs<'_>) -> Result<Self, Error> {
        let processes = bulk::cuda_processes(&programs.image.manifest().processes);
        let Self { mut places, mut tables } = Self::default();
        for (number, (program, (_, blocks))) in
            programs.cuda_processes.iter_mut().zip(processes).enumerate()
        {
            places.extend((0..blocks.len()).map(|range| (number, range)));
            let Some(agent) = &mut program.agent else {
                tables.push(None);
                continue;
            };
            if blocks.is_empty() {
                unless_ended(&program.process, agent.reattach(&[]))?;
                tables.push(None);
                fault("attached")?;
                continue;
            }
            let io = |source| Error::Io { what: "cannot share a table".into(), source };
            let (table, file) = Table::create(vec![Range::WHOLE; blocks.len()]).map_err(io)?;
            (0..blocks.len()).for_each(|range| table.chunks(range).pend(0));
            let told = agent.await_blocks(blocks.iter().map(|block| block.id).collect(), file);
            let told = unless_ended(&program.process, told)?;
            // A program that is at its end already could not miss anything: its gate is closed.
            tables.push(told.map(|()| table));
            fault("attached")?;
        }
        Ok(Self { places, tables })
    }
}

impl OnDemandArrival {
    /// Loads everything into the running programs, and makes sure that they have missed nothing. `root` is
    /// the pid of a child of this process. Ends early if that ends with status 0, or in any way after it was
    /// `asked` to end. gpucr's contexts are given up at the end.
    fn stream(
        &mut self,
        programs: &mut Programs<'_>,
        root: u32,
        asked: &AtomicBool,
    ) -> Result<OnDemand, Error> {
        let (mut lanes, memory) =
            (std::mem::take(&mut self.lanes), std::mem::take(&mut self.memory));
        let Awaited { places, tables } = std::mem::take(&mut self.awaited);
        let image = programs.image;
        let blocks = Blocks { image, all: image.manifest().blocks(), places, tables };
        // Signals are the program's by now.
        let stop = Stop::new(Arc::<AtomicBool>::default());
        let shared: Vec<Mutex<&mut CudaProcess>> =
            programs.cuda_processes.iter_mut().map(Mutex::new).collect();
        let work = Lanes {
            blocks: &blocks,
            memory: &memory,
            cuda_processes: &shared,
            root,
            asked,
            stop: &stop,
            progress: programs.progress,
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = lanes
                .iter_mut()
                .map(|(lane, hasher)| {
                    let work = &work;
                    scope.spawn(move || work.load(lane, hasher).inspect_err(|_| work.stop.fail()))
                })
                .collect();
            threads.into_iter().try_for_each(bulk::joined)
        })?;
        if work.goes_on()? {
            work.prove()?;
        }
        let headers = blocks.tables.iter().flatten().map(Table::header);
        let waited = headers.map(|header| {
            (header.blocked.load(Ordering::Relaxed), header.blocked_ns.load(Ordering::Relaxed))
        });
        let (blocked, ns) = waited.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let blocked_ms = milliseconds(Duration::from_nanos(ns));
        Ok(OnDemand { blocked, blocked_ms, ..OnDemand::default() })
    }
}

impl Blocks<'_> {
    /// Claims the blocks to load next: the wanted ones, or else the blocks from `next` on.
    fn claim(&self, of_lane: &[usize], next: &mut usize) -> Vec<usize> {
        let chunks = |block: usize| {
            let (process, range) = self.places[block];
            self.tables[process].as_ref().map(|table| table.chunks(range))
        };
        let mut bytes = 0;
        let mut room = |block: usize| {
            bytes += self.all[block].size;
            bytes < BATCH
        };
        let mut claimed = Vec::new();
        for &block in of_lane {
            if chunks(block).is_some_and(|chunks| chunks.claim_wanted().is_some()) {
                claimed.push(block);
                if !room(block) {
                    return claimed;
                }
            }
        }
        if !claimed.is_empty() || skipped("unwanted") {
            return claimed;
        }
        for &block in &of_lane[*next..] {
            *next += 1;
            if chunks(block).is_some_and(|chunks| chunks.claim(0)) {
                claimed.push(block);
                if !room(block) {
                    break;
                }
            }
        }
        claimed
    }
}

impl Lanes<'_> {
    /// Loads the blocks of one device.
    fn load(&self, lane: &mut Lane, hasher: &mut Result<Hasher, DriverError>) -> Result<(), Error> {
        let spans = spans_on(self.memory, &lane.context().device().uuid);
        let mut of_lane: Vec<usize> = spans.iter().map(|span| span.block).collect();
        of_lane.dedup();
        let chunks = Chunks { blocks: &self.blocks.all, image: self.blocks.image };
        let mut next = 0;
        while self.goes_on()? && !self.stop.is_set() {
            let claimed = self.blocks.claim(&of_lane, &mut next);
            if claimed.is_empty() {
                if next == of_lane.len() {
                    break;
                }
                std::thread::sleep(POLL);
                continue;
            }
            let of = |block: &usize| {
                let (block, memory) = (*block, &self.memory[*block]);
                (0..chunks_in(memory.len())).map(move |chunk| Span::of(memory, block, chunk))
            };
            let work: Vec<Span> = claimed.iter().flat_map(of).collect();
            chunks.fill(lane, &work, self.stop, self.progress)?;
            chunks.check(lane, hasher, work, self.stop)?;
            if !self.stop.is_set() {
                self.hand_over(&claimed)?;
            }
        }
        Ok(())
    }

    /// Gives blocks that are loaded to their processes, and lets the calls that wait for them go on.
    fn hand_over(&self, blocks: &[usize]) -> Result<(), Error> {
        for (process, program) in self.cuda_processes.iter().enumerate() {
            let of_process = blocks.iter().filter(|block| self.blocks.places[**block].0 == process);
            let of_process: Vec<usize> = of_process.copied().collect();
            if of_process.is_empty() {
                continue;
            }
            let fds = of_process
                .iter()
                .map(|block| Ok((self.blocks.all[*block].id, self.memory[*block].export()?)));
            let fds: Vec<_> = fds.collect::<Result<_, DriverError>>()?;
            let mut program = program.lock();
            let agent = program.agent.as_mut().expect("its blocks are awaited");
            let attached = agent.attach(&fds);
            drop(program);
            if self.answered(process, attached)?.is_none() {
                continue;
            }
            let table = self.blocks.tables[process].as_ref().expect("its blocks are awaited");
            for block in of_process {
                table.chunks(self.blocks.places[block].1).finish(0);
            }
        }
        Ok(())
    }

    /// What an agent has answered; `None` if its program has ended, as it should.
    fn answered<T>(
        &self,
        process: usize,
        answer: Result<T, AgentError>,
    ) -> Result<Option<T>, Error> {
        let error = match answer {
            Ok(answer) => return Ok(Some(answer)),
            Err(error) => error,
        };
        let has_ended = matches!(error, AgentError::Broken { .. })
            && self.cuda_processes[process].lock().process.ends_within(LAST_MOMENTS);
        // If a program has missed memory, or has ended, that is the reason.
        self.goes_on()?;
        match error {
            _ if has_ended => Ok(None),
            AgentError::Failed { pid, code, .. } if code != 0 => Err(Error::Missed { pid, code }),
            error => Err(error.into()),
        }
    }

    /// Whether a program that is to get memory is still at work: the root may have ended as it should.
    ///
    /// # Errors
    /// A program has touched what was not there, or has ended and may have done so because of that.
    fn goes_on(&self) -> Result<bool, Error> {
        let mut goes_on = false;
        for (program, table) in self.cuda_processes.iter().zip(&self.blocks.tables) {
            let Some(table) = table else { continue };
            let program = program.lock();
            let pid = program.process.pid;
            if let Some(code) = table.header().fault() {
                return Err(Error::Missed { pid, code: code as i32 });
            }
            if !program.process.has_ended() {
                goes_on = true;
                continue;
            }
            let asked = self.asked.load(Ordering::Relaxed);
            if pid != self.root || !(asked || ended_well(pid)) {
                return Err(Error::EndedAwaiting { pid });
            }
        }
        Ok(goes_on)
    }

    /// Lets the device come to the end of what it was given: an access that was missed would show.
    fn prove(&self) -> Result<(), Error> {
        for (process, program) in self.cuda_processes.iter().enumerate() {
            if self.blocks.tables[process].is_none() {
                continue;
            }
            let mut pause = Duration::from_millis(250);
            while self.goes_on()? {
                let closed = {
                    let mut program = program.lock();
                    let agent = program.agent.as_mut().expect("its blocks were awaited");
                    agent.close_gate(PROOF).and_then(|()| agent.open_gate())
                };
                match closed {
                    // The device was busy for longer, and the program runs on.
                    Err(AgentError::Failed { code: 0, .. }) => std::thread::sleep(pause),
                    closed => {
                        self.answered(process, closed)?;
                        break;
                    }
                }
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        Ok(())
    }
}
