//! Small programs that put state on the GPU, run, and verify themselves.
//!
//! Each is dumped and restored from outside at random moments, and must end with the same result
//! line as a run that nobody interrupted. They use the driver API only, through the `libcuda.so.1`
//! that the dynamic loader finds. `README.md` says what each of them proves.

mod adam;
mod addresses;
mod adversaries;
mod ahead;
mod attention;
mod collective;
mod cuda;
mod data_parallel;
mod devices;
mod event;
mod family;
mod gpu;
mod handles;
mod headless;
mod histogram;
mod host_blocks;
mod host_memory;
mod indirect;
mod ipc;
mod late_modules;
mod launcher;
mod lent;
mod long_blocks;
mod many_blocks;
mod mlp;
mod multicast;
mod numbers;
mod one_block;
mod pinned;
mod pool;
mod pools;
mod random;
mod realloc;
mod report;
mod ring;
mod scatter;
mod second;
mod sgd;
mod sharer;
mod signals;
mod small_allocs;
mod stack;
mod stencil;
mod streams;
mod structs;
mod survivors;
mod tensor_parallel;
mod threads;
mod vmm;
mod workers;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use clap::builder::PossibleValuesParser;

use report::{Run, Size};

type Workload = fn(&mut Run) -> Result<()>;

const WORKLOADS: [(&str, Workload); 56] = [
    ("sgd", sgd::run),
    ("adam", adam::run),
    ("attention", attention::run),
    ("stencil", stencil::run),
    ("histogram", histogram::run),
    ("streams", streams::run),
    ("threads", threads::run),
    ("structs", structs::run),
    ("indirect", indirect::run),
    ("small-allocs", small_allocs::run),
    ("late-modules", late_modules::run),
    ("pinned", pinned::run),
    ("stack", stack::run),
    ("realloc", realloc::run),
    ("pools", pools::run),
    ("vmm", vmm::run),
    ("launcher", launcher::run),
    ("family", family::run),
    ("scatter", scatter::run),
    ("many-blocks", many_blocks::run),
    ("sharer", sharer::run),
    ("headless", headless::run),
    ("one-block", one_block::run),
    ("host-memory", host_memory::run),
    ("host-memory-alone", host_memory::run_alone),
    ("addresses", addresses::run),
    ("halves", adversaries::halves),
    ("permuted", adversaries::permuted),
    ("shifting", adversaries::shifting),
    ("const-cast", adversaries::const_cast),
    ("seldom", adversaries::seldom),
    ("two-halves", adversaries::two_halves),
    ("remade", adversaries::remade),
    ("long-kernel", adversaries::long_kernel),
    ("graph-nodes", adversaries::graph_nodes),
    ("model", adversaries::model),
    ("stamp", adversaries::stamp),
    ("ring", ring::run),
    ("ahead", ahead::run),
    ("handles", handles::run),
    ("lent", lent::run),
    ("host-blocks", host_blocks::run),
    ("signals", signals::run),
    ("multicast", multicast::run),
    ("tensor-parallel", collective::run::<tensor_parallel::TensorParallel>),
    ("data-parallel", collective::run::<data_parallel::DataParallel>),
    ("workers", workers::run),
    ("survivors", collective::run::<survivors::Survivors>),
    ("devices", devices::run),
    ("long-again", long_blocks::run_again),
    ("long-blocks", long_blocks::run),
    ("long-barriers", long_blocks::run_barriers),
    ("long-in-place", long_blocks::run_in_place),
    ("long-loops", long_blocks::run_loops),
    ("long-rounds", long_blocks::run_rounds),
    ("random", random::run),
];

/// Runs one workload and verifies its result.
#[derive(Parser)]
struct Options {
    /// Which workload to run
    #[arg(required_unless_present = "list",
          value_parser = PossibleValuesParser::new(WORKLOADS.map(|(name, _)| name)))]
    name: Option<String>,
    /// Print the names of all workloads
    #[arg(long)]
    list: bool,
    /// Number of steps [default: depends on workload and size]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    steps: Option<u32>,
    /// Seed of all data
    #[arg(long, default_value_t = 1)]
    seed: u32,
    /// How much memory and work
    #[arg(long, value_enum, default_value_t = Size::Small)]
    size: Size,
    /// Pause after each step, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = 0)]
    step_delay_ms: u64,
    /// After each step, wait until FILE has a byte more than there were steps: the test that appends to it
    /// sets the pace. With 2 MiB of them it goes on without pauses
    #[arg(long, value_name = "FILE")]
    pace: Option<PathBuf>,
    /// Ask the driver for its functions, as the CUDA runtime does, instead of the dynamic loader
    #[arg(long)]
    get_proc_address: bool,
    /// Also append what is printed to this file
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    #[command(flatten)]
    team: collective::options::Team,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.list {
        for (name, _) in WORKLOADS {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    }
    let name = options.name.unwrap_or_default();
    let Some((_, workload)) = WORKLOADS.iter().find(|(known, _)| *known == name) else {
        eprintln!("workload: no workload is called {name}");
        return ExitCode::FAILURE;
    };
    if options.get_proc_address {
        cuda::choose_lookup(cuda::Lookup::GetProcAddress);
    }
    let delay = Duration::from_millis(options.step_delay_ms);
    let Options { seed, size, steps, pace, log, team, .. } = options;
    let mut run = Run::new(seed, size, steps, delay, pace, log, team);
    match workload(&mut run) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let text = format!("error: workload {name}: {error:#}");
            eprintln!("{text}");
            // The log, where there is one, is often all that a test can see after a restore; and
            // if that cannot be written, stderr has said it.
            let _ = run.line(&text);
            ExitCode::FAILURE
        }
    }
}
