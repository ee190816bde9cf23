//! Every instruction over edge values and random ones, and programs: what softcuda makes of them
//! is compared with a computation on the host, and with what a GPU made of the same.
//!
//! The golden data of the GPU is made by `examples/golden.rs`.

mod barriers;
mod choices;
mod conversions;
mod coverage;
mod driver;
mod floats;
mod golden;
mod halves;
mod host;
mod images;
mod integers;
mod job;
mod jobs;
mod matrices;
mod products;
mod programs;
mod surfaces;
mod table;
mod tiny;
mod triton;
mod twins;
mod video;
mod warps;
mod words;

use driver::Driver;
use golden::{Found, Golden};
use job::{Job, compare};
use std::ffi::{CString, c_char, c_int, c_void};
use twins::Level;

// The driver is linked in; nothing of it is called as Rust.
use softcuda as _;

unsafe extern "C" {
    fn cuGetProcAddress_v2(
        name: *const c_char,
        address: *mut *const c_void,
        version: c_int,
        flags: u64,
        status: *mut c_int,
    ) -> u32;
}

fn softcuda() -> Driver {
    Driver::new(Box::new(|name| {
        let base = name.trim_end_matches("_v2");
        let base = CString::new(base).expect("names have no zeros");
        let (mut address, mut status) = (std::ptr::null(), 0);
        // SAFETY: the name ends in zero, and both places can be written.
        unsafe { cuGetProcAddress_v2(base.as_ptr(), &raw mut address, 12000, 0, &raw mut status) };
        address
    }))
    .expect("softcuda starts")
}

/// The failures of all jobs, or nothing.
fn check(jobs: &[Job], mut each: impl FnMut(&Driver, &Job) -> Result<(), String>) {
    let driver = softcuda();
    let failures: Vec<String> = jobs
        .iter()
        .filter_map(|job| each(&driver, job).err().map(|why| format!("{}: {why}", job.name)))
        .collect();
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), jobs.len(), failures.join("\n"));
}

#[test]
fn softcuda_agrees_with_the_host() {
    check(&jobs::all(), |driver, job| {
        compare(job.kind, job.precision, &driver.run(job)?, &job.expected)
    });
}

#[test]
fn softcuda_runs_what_triton_compiles() {
    check(&triton::jobs(), |driver, job| {
        compare(job.kind, job.precision, &driver.run(job)?, &job.expected)
    });
}

/// Kernels that are run in parts, some blocks first and the others later, give the same bits.
#[test]
fn twins_give_what_their_kernels_give() {
    let jobs =
        [warps::jobs(), matrices::jobs(), products::jobs(), barriers::jobs(), images::jobs()];
    let more = [surfaces::jobs(), programs::jobs(), triton::jobs()];
    let jobs: Vec<Job> = jobs.into_iter().chain(more).flatten().collect();
    let mut twins = 0;
    check(&jobs, |driver, job| {
        let (result, made) = driver.run_in_parts(job, Level::Blocks)?;
        twins += made;
        compare(job.kind, job::Precision::Exact, &result, &driver.run(job)?)
    });
    assert!(twins > jobs.len() / 2, "{twins} launches of {} jobs", jobs.len());
}

/// Kernels that are interrupted inside of their blocks and go on give the same bits; how many launches were interrupted.
fn interrupted_inside(level: Level) -> usize {
    let mut twins = 0;
    check(&jobs::all(), |driver, job| {
        let (result, interrupted) = driver.run_in_parts(job, level)?;
        twins += interrupted;
        compare(job.kind, job::Precision::Exact, &result, &driver.run(job)?)
    });
    twins
}

#[test]
fn twins_that_are_interrupted_in_loops_give_what_their_kernels_give() {
    let twins = interrupted_inside(Level::Loops);
    assert!(twins > 5, "{twins} launches were interrupted");
}

#[test]
fn twins_that_are_aborted_give_what_their_kernels_give() {
    let twins = interrupted_inside(Level::Aborted);
    assert!(twins > 1, "{twins} launches were aborted");
}

#[test]
fn twins_that_are_interrupted_at_barriers_give_what_their_kernels_give() {
    let twins = interrupted_inside(Level::Barriers);
    assert!(twins > 1, "{twins} launches were interrupted");
}

/// Against every file of golden data. What the GPU's driver refused has nothing to compare with,
/// nor has what it did not run yet, which the README lists.
#[test]
fn softcuda_agrees_with_gpus() {
    let jobs = jobs::all();
    for file in golden::files() {
        let golden = Golden::read(&file).expect("golden data can be read");
        check(&jobs, |driver, job| match golden.find(job) {
            Found::Result(bytes) => compare(job.kind, job.golden, &driver.run(job)?, bytes)
                .map_err(|why| format!("{why} (on {})", golden.device)),
            Found::Refused | Found::Missing => Ok(()),
        });
    }
}

/// Edge cases that PTX leaves open, or that only bits tell: a GPU may do otherwise.
#[test]
fn softcuda_makes_a_choice_of_its_own() {
    let jobs: Vec<Job> = choices::cases().into_iter().map(table::Case::job).collect();
    check(&jobs, |driver, job| compare(job.kind, job.precision, &driver.run(job)?, &job.expected));
}

/// Instructions of architectures that none of the golden data is of.
#[test]
fn softcuda_has_instructions_of_newer_gpus() {
    let jobs: Vec<Job> = tiny::newer().into_iter().map(table::Case::job).collect();
    check(&jobs, |driver, job| compare(job.kind, job.precision, &driver.run(job)?, &job.expected));
}

#[test]
fn names_of_jobs_are_unique() {
    let mut names = std::collections::HashSet::new();
    for job in jobs::all() {
        assert!(!job.name.contains('\n'), "{}", job.name);
        assert!(names.insert(job.name.clone()), "{} is there twice", job.name);
    }
}
