//! Runs the instruction tests and programs of softcuda on a driver, usually that of a GPU, and keeps
//! the results as golden data:
//!
//!     cargo run --release -p softcuda --example golden -- golden.bin [/path/to/libcuda.so.1]
//!
//! The second argument says which driver; without it the dynamic linker finds `libcuda.so.1`.
//! Compile for the oldest machine that shall run it; the program needs nothing but the driver.

// The modules are those of the test, which uses more of them.
#![allow(dead_code)]

#[path = "../tests/instructions/barriers.rs"]
mod barriers;
#[path = "../tests/instructions/conversions.rs"]
mod conversions;
#[path = "../tests/instructions/driver.rs"]
mod driver;
#[path = "../tests/instructions/floats.rs"]
mod floats;
#[path = "../tests/instructions/golden.rs"]
mod golden;
#[path = "../tests/instructions/halves.rs"]
mod halves;
#[path = "../tests/instructions/host.rs"]
mod host;
#[path = "../tests/instructions/images.rs"]
mod images;
#[path = "../tests/instructions/integers.rs"]
mod integers;
#[path = "../tests/instructions/job.rs"]
mod job;
#[path = "../tests/instructions/jobs.rs"]
mod jobs;
#[path = "../tests/instructions/matrices.rs"]
mod matrices;
#[path = "../tests/instructions/products.rs"]
mod products;
#[path = "../tests/instructions/programs.rs"]
mod programs;
#[path = "../tests/instructions/surfaces.rs"]
mod surfaces;
#[path = "../tests/instructions/table.rs"]
mod table;
#[path = "../tests/instructions/tiny.rs"]
mod tiny;
#[path = "../tests/instructions/twins.rs"]
mod twins;
#[path = "../tests/instructions/video.rs"]
mod video;
#[path = "../tests/instructions/warps.rs"]
mod warps;
#[path = "../tests/instructions/words.rs"]
mod words;

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(out) = arguments.next().map(PathBuf::from) else {
        eprintln!("usage: golden OUT [LIBCUDA]");
        return ExitCode::FAILURE;
    };
    let library = arguments.next().unwrap_or_else(|| "libcuda.so.1".to_owned());
    match run(&out, &library) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("golden: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(out: &std::path::Path, library: &str) -> Result<(), String> {
    // SAFETY: a CUDA driver's initialisers may run in any program.
    let library = unsafe { libloading::Library::new(library) }.map_err(|e| e.to_string())?;
    let driver = driver::Driver::new(Box::new(move |name| {
        // SAFETY: the symbol is only taken as an address here.
        let found = unsafe { library.get::<*const std::ffi::c_void>(name) };
        found.map_or(std::ptr::null(), |symbol| *symbol)
    }))?;
    let jobs = jobs::all();
    println!("{}: {} programs", driver.name, jobs.len());
    let mut off = 0;
    let refused = golden::write(&driver, &jobs, out, |job, found| {
        if let Err(why) = job::compare(job.kind, job.precision, found, &job.expected) {
            println!("not as the host has it: {}: {why}", job.name);
            off += 1;
        }
    });
    let refused = refused.map_err(|error| format!("{}: {error}", out.display()))?;
    for program in &refused {
        println!("refused: {program}");
    }
    println!("{} refused, {off} not as the host has it; written: {}", refused.len(), out.display());
    Ok(())
}
