//! What a call costs more through the shim than directly, in front of a driver that does nothing.
//!
//! Both ways are measured in one process, by turns, in many short rounds; the figure is the median
//! of the differences of the pairs. Time is the CPU time of the calling thread, so that threads
//! that wait for a core do not count it: 8 launching threads can be measured on 2 cores. Ends with
//! exit status 1 if a limit is exceeded.

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Barrier, OnceLock};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use gpucr_benches::{build, built, machine, median, print_table};
use gpucr_wire::access::{KernelUse, SlotUse};
use gpucr_wire::twice::{Code, Place, Twice, Use};
use gpucr_wire::{Connection, Reply, Request};
use libloading::Library;
use rustix::time::{ClockId, clock_gettime};

#[derive(Parser)]
struct Args {
    /// Pairs of rounds
    #[arg(long, default_value_t = 201)]
    rounds: usize,
    /// Calls of each round
    #[arg(long, default_value_t = 50_000)]
    calls: u32,
    /// Nanoseconds that a forwarded call may cost more
    #[arg(long, default_value_t = 5.0)]
    forward_limit: f64,
    /// Nanoseconds that an idle launch may cost more
    #[arg(long, default_value_t = 30.0)]
    launch_limit: f64,
    /// Nanoseconds that a launch with ten pointers may cost more while it is recorded
    #[arg(long, default_value_t = 500.0)]
    recorded_limit: f64,
    /// Nanoseconds that may take, with recording, to decide whether a launch with ten pointers may be done twice
    #[arg(long, default_value_t = 500.0)]
    decision_limit: f64,
    /// Measures idle launches with this of `gpucr run --interruptible`, and prints what they cost more
    #[arg(long, hide = true)]
    interruptible: Option<String>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

type Init = unsafe extern "C" fn(u32) -> u32;
type GetAttribute = unsafe extern "C" fn(*mut c_int, u32, i32) -> u32;
type CopyAsync = unsafe extern "C" fn(u64, u64, usize, u64) -> u32;
#[rustfmt::skip]
type Launch = unsafe extern "C" fn(
    u64, u32, u32, u32, u32, u32, u32, u32, u64, *mut *mut c_void, *mut *mut c_void,
) -> u32;

/// The functions of one library.
#[derive(Clone, Copy)]
struct Way {
    get_attribute: GetAttribute,
    copy: CopyAsync,
    launch: Launch,
}

fn open(path: &Path) -> Result<Way> {
    // SAFETY: neither the stub nor the shim has constructors that do anything.
    let library = unsafe { Library::new(path) }.with_context(|| path.display().to_string())?;
    // SAFETY: these are the types of the driver's functions of these names, and the library is
    // never closed (see below).
    let (init, way): (Init, Way) = unsafe {
        let init = *library.get(b"cuInit\0")?;
        let way = Way {
            get_attribute: *library.get(b"cuDeviceGetAttribute\0")?,
            copy: *library.get(b"cuMemcpyAsync\0")?,
            launch: *library.get(b"cuLaunchKernel\0")?,
        };
        (init, way)
    };
    std::mem::forget(library);
    // SAFETY: any thread may call this at any time.
    let code = unsafe { init(0) };
    ensure!(code == 0, "cuInit of {} failed with {code}", path.display());
    Ok(way)
}

#[derive(Clone, Copy)]
enum Call {
    Forwarded,
    Gated,
    Launch,
    /// A launch with ten pointers, of kernels and to allocations that take turns.
    Pointers,
}

/// Pointers that are passed to each launch of [`Call::Pointers`].
const POINTERS: usize = 10;
/// Kernels, and for each pointer allocations, that take turns.
const TURNS: usize = 8;
/// Bytes of each allocation.
const ALLOCATION: usize = 4 << 20;

/// What the launches with pointers point to.
static ALLOCATIONS: OnceLock<Vec<u64>> = OnceLock::new();

/// Asks the shim for memory, as a program does.
fn allocate(shim: &Path) -> Result<Vec<u64>> {
    // SAFETY: loaded already; these are the types of the driver's functions of these names.
    unsafe {
        let library = Library::new(shim)?;
        let set: unsafe extern "C" fn(u64) -> u32 = *library.get(b"cuCtxSetCurrent\0")?;
        let alloc: unsafe extern "C" fn(*mut u64, usize) -> u32 =
            *library.get(b"cuMemAlloc_v2\0")?;
        ensure!(set(1) == 0, "no context");
        let one = |_| {
            let mut address = 0;
            let code = alloc(&raw mut address, ALLOCATION);
            ensure!(code == 0, "cuMemAlloc failed with {code}");
            Ok(address)
        };
        (0..POINTERS * TURNS).map(one).collect()
    }
}

/// Asks this process's own agent to record, until the connection is dropped.
fn record() -> Result<Connection> {
    let name = gpucr_wire::agent_socket(gpucr_wire::own_pid_namespace()?, std::process::id());
    let mut agent = Connection::connect(&name, None, None).context("the shim's agent")?;
    for request in
        [Request::Hello { protocol: gpucr_wire::PROTOCOL_VERSION }, Request::Record { on: true }]
    {
        agent.send(&request)?;
        let reply: Reply = agent.receive()?;
        ensure!(!matches!(reply, Reply::Failed { .. }), "{request:?}: {reply:?}");
    }
    Ok(agent)
}

/// What was recorded: all launches, with all their pointers.
fn check_recorded(agent: &mut Connection) -> Result<()> {
    agent.send(&Request::Accesses {})?;
    let Reply::Accesses { accesses } = agent.receive()? else { bail!("no accesses") };
    ensure!(accesses.unseen == 0 && accesses.kernels.len() == TURNS, "kernels are missing");
    let whole = |kernel: &KernelUse| {
        let touched = |slot: &SlotUse| slot.touched.iter().map(|t| t.launches).sum::<u64>();
        kernel.slots.len() == POINTERS && kernel.slots.iter().all(|s| touched(s) == kernel.launches)
    };
    ensure!(accesses.kernels.iter().all(whole), "pointers are missing");
    Ok(())
}

/// Makes `calls` calls and tells how much CPU time of this thread one took, in nanoseconds.
fn time(way: &Way, call: Call, calls: u32) -> f64 {
    let mut failed = 0;
    let mut pointers = [[0u64; POINTERS]; TURNS];
    let mut places = [[std::ptr::null_mut(); POINTERS]; TURNS];
    if let Call::Pointers = call {
        let all = ALLOCATIONS.get().expect("made before");
        for turn in 0..TURNS {
            for (number, pointer) in pointers[turn].iter_mut().enumerate() {
                *pointer = all[turn * POINTERS + number] + 256;
                places[turn][number] = std::ptr::from_mut(pointer).cast::<c_void>();
            }
        }
    }
    let before = clock_gettime(ClockId::ThreadCPUTime);
    // SAFETY: the stub looks at no argument of these; the shim, while it records, at the pointers,
    // which outlive the calls.
    unsafe {
        match call {
            Call::Forwarded => {
                let mut value = 0;
                for i in 0..calls {
                    failed |= black_box(way.get_attribute)(&raw mut value, i, 0);
                }
            }
            Call::Gated => {
                for i in 0..calls {
                    failed |= black_box(way.copy)(4096, 8192, i as usize, 0);
                }
            }
            Call::Pointers => {
                let none = std::ptr::null_mut;
                for i in 0..calls {
                    let turn = i as usize % TURNS;
                    let (kernel, places) = (16 + turn as u64, places[turn].as_mut_ptr());
                    failed |=
                        black_box(way.launch)(kernel, i, 1, 1, 256, 1, 1, 0, 0, places, none());
                }
            }
            Call::Launch => {
                let none = std::ptr::null_mut;
                for i in 0..calls {
                    failed |= black_box(way.launch)(1, i, 1, 1, 256, 1, 1, 0, 0, none(), none());
                }
            }
        }
    }
    let after = clock_gettime(ClockId::ThreadCPUTime);
    assert_eq!(failed, 0, "a call failed");
    let spent =
        (after.tv_sec - before.tv_sec) as f64 * 1e9 + (after.tv_nsec - before.tv_nsec) as f64;
    spent / f64::from(calls)
}

/// What one thread measured: nanoseconds a call directly, and how many more through the shim.
#[derive(Default)]
struct Rounds {
    direct: Vec<f64>,
    more: Vec<f64>,
}

fn measure(direct: &Way, shim: &Way, call: Call, threads: usize, args: &Args) -> Rounds {
    // All threads go the same way at the same time, so that they meet in the shim.
    let barrier = Barrier::new(threads);
    let run = || {
        let mut rounds = Rounds::default();
        for round in 0..args.rounds {
            // Which way comes first changes, so that neither gains from its place.
            let shim_first = round % 2 == 1;
            barrier.wait();
            let first = time(if shim_first { shim } else { direct }, call, args.calls);
            barrier.wait();
            let second = time(if shim_first { direct } else { shim }, call, args.calls);
            let (straight, through) = if shim_first { (second, first) } else { (first, second) };
            rounds.direct.push(straight);
            rounds.more.push(through - straight);
        }
        rounds
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        let mut all = Rounds::default();
        for thread in threads {
            let rounds = thread.join().expect("a measuring thread ends well");
            all.direct.extend(rounds.direct);
            all.more.extend(rounds.more);
        }
        all
    })
}

/// Nanoseconds of CPU time that it takes to decide whether a launch with ten pointers may be done twice, once it is known
/// where they point.
fn decide(args: &Args) -> f64 {
    let word = |word: usize| Use {
        word: Some(word),
        reads: word > 0,
        writes: word == 0,
        down: Some(true),
    };
    let code = Code { uses: (0..POINTERS).map(word).collect(), ..Code::default() };
    let place = |number: usize| Place { at: number as u8 + 1, before: number as u8 };
    let mut places: Vec<Place> = (0..POINTERS).map(|number| place(number + POINTERS)).collect();
    places[0] = place(1);
    let round = |_| {
        let before = clock_gettime(ClockId::ThreadCPUTime);
        for _ in 0..args.calls {
            let decided = black_box(&code).twice(black_box(&places));
            assert_eq!(decided, Twice::Same);
        }
        let after = clock_gettime(ClockId::ThreadCPUTime);
        let spent =
            (after.tv_sec - before.tv_sec) as f64 * 1e9 + (after.tv_nsec - before.tv_nsec) as f64;
        spent / f64::from(args.calls)
    };
    median(&(0..args.rounds).map(round).collect::<Vec<_>>())
}

/// What is given to `gpucr run --interruptible`, and what that means.
const INTERRUPTIBLE: [(&str, &str); 3] = [
    ("", "without --interruptible"),
    ("no_such,long_*", "with patterns that do not match"),
    ("auto", "with auto, short launches"),
];

/// What launches cost more that may be interrupted or not, each in a process of its own, since that is settled when it starts.
fn measure_interruptible(args: &Args) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for (value, name) in INTERRUPTIBLE {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--interruptible", value, "--rounds", &args.rounds.to_string()]);
        command
            .args(["--calls", &args.calls.to_string()])
            .env(gpucr_wire::ENV_INTERRUPTIBLE, value);
        let output = command.stderr(Stdio::inherit()).output()?;
        ensure!(output.status.success(), "{name}: {}", output.status);
        let said = String::from_utf8(output.stdout)?;
        let cells = said.split_whitespace().map(|more| format!("{more} ns"));
        rows.push(std::iter::once(name.to_owned()).chain(cells).collect());
    }
    Ok(rows)
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let machine = machine();
    build(&["-p", "gpucr-benches", "--example", "stub_driver"])?;
    let dir = build(&["-p", "gpucr-intercept"])?;
    let stub = built(&dir, "examples/libstub_driver.so")?;
    let shim = built(&dir, "libgpucr_intercept.so")?;
    // SAFETY: no other thread runs yet.
    unsafe { std::env::set_var(gpucr_wire::ENV_DRIVER, &stub) };
    let (direct, through) = (open(&stub)?, open(&shim)?);
    let allocations = allocate(&shim)?;
    ALLOCATIONS.get_or_init(|| allocations);

    if args.interruptible.is_some() {
        let more = [Call::Launch, Call::Pointers]
            .map(|call| median(&measure(&direct, &through, call, 1, &args).more));
        println!("{:+.2} {:+.2}", more[0], more[1]);
        return Ok(ExitCode::SUCCESS);
    }
    println!("{machine}");
    println!(
        "CPU time of the calling thread for one call, medians of {} pairs of {} calls\n",
        args.rounds, args.calls
    );
    let cases = [
        ("forwarded call (cuDeviceGetAttribute)", Call::Forwarded, Some(args.forward_limit)),
        ("gated call (cuMemcpyAsync)", Call::Gated, None),
        ("idle launch (cuLaunchKernel)", Call::Launch, Some(args.launch_limit)),
        ("idle launch, 10 pointers", Call::Pointers, Some(args.launch_limit)),
        ("recorded launch, 10 pointers", Call::Pointers, Some(args.recorded_limit)),
    ];
    let (mut rows, mut exceeded) = (Vec::new(), Vec::new());
    for (name, call, limit) in cases {
        let mut agent = if name.starts_with("recorded") { Some(record()?) } else { None };
        for threads in [1, 8] {
            let rounds = measure(&direct, &through, call, threads, &args);
            let mut sorted = rounds.more.clone();
            sorted.sort_by(f64::total_cmp);
            let more = median(&rounds.more);
            let quarter = sorted.len() / 4;
            rows.push(vec![
                name.to_owned(),
                threads.to_string(),
                format!("{:.2} ns", median(&rounds.direct)),
                format!("{more:+.2} ns"),
                format!("{:+.2} to {:+.2}", sorted[quarter], sorted[sorted.len() - 1 - quarter]),
                limit.map_or("none".into(), |limit| format!("{limit} ns")),
            ]);
            if limit.is_some_and(|limit| more > limit) {
                exceeded.push(format!("{name} with {threads} threads: {more:+.2} ns"));
            }
            agent.as_mut().map_or(Ok(()), check_recorded)?;
            if agent.is_some() && threads == 1 {
                // To record is to find out where the pointers lead, too.
                let (decision, name) = (decide(&args), "decision about a launch, 10 pointers");
                let all = more + decision;
                let cells =
                    [name, "1", "", &format!("{decision:+.2} ns, {all:+.2} ns with recording")];
                let rest = [String::new(), format!("{} ns", args.decision_limit)];
                rows.push(cells.into_iter().map(str::to_owned).chain(rest).collect());
                if all > args.decision_limit {
                    exceeded.push(format!("{name}: {all:+.2} ns"));
                }
            }
        }
    }
    print_table(&["call", "threads", "directly", "shim", "middle half", "limit"], &rows);
    println!("\nidle launches of one thread, by what may be interrupted:\n");
    let rows = measure_interruptible(&args)?;
    print_table(&["--interruptible", "no arguments", "10 pointers"], &rows);
    if exceeded.is_empty() {
        println!("\nall within their limits");
        return Ok(ExitCode::SUCCESS);
    }
    println!("\nLIMIT EXCEEDED: {}", exceeded.join("; "));
    Ok(ExitCode::FAILURE)
}
