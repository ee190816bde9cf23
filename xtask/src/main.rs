//! The chores of this repository: `cargo xtask setup | test | demo | man | deny | shape | mutants | fixtures |
//! dist | bench`.
//!
//! One module for each subcommand; `sys` holds what they share. `walls` has the rules of which code may use which, and
//! `links` that the pages' links lead somewhere, as tests.

mod bench;
mod chart;
mod criu;
mod debian;
mod demo;
mod deny;
mod dist;
mod fixtures;
mod leftover;
#[cfg(test)]
mod links;
mod man;
mod mutants;
mod python;
mod runs;
mod setup;
mod shape;
mod sys;
mod test;
#[cfg(test)]
mod walls;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Set-up, demo, tests, man pages and packaging of gpucr.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what this machine lacks: build tools and a CRIU that works here
    Setup(setup::Args),
    /// Set up, build everything and run every test
    Test(test::Args),
    /// Train a network, dump it half-way, kill it, restore it, and compare with an uninterrupted run
    Demo(demo::Args),
    /// Write man/*.1 from the definition of the command line
    Man(man::Args),
    /// Make the images anew that the tests keep: only when the format changes before a release
    Fixtures,
    /// Check licences, sources and duplicates of what gpucr depends on, against deny.toml
    Deny,
    /// Measure the structure of the Rust sources: circles, long functions and files, public items
    Shape(shape::Args),
    /// Make deliberate defects one by one, and show that the tests find each; writes docs/mutants.md
    Mutants(mutants::Args),
    /// Build a tarball and a Debian package in dist/
    Dist(dist::Args),
    /// Build the wheel of the Python package in dist/
    Wheel,
    /// Run the benchmarks
    Bench(bench::Args),
}

fn main() -> ExitCode {
    sys::keep_inherited_files();
    let outcome = match Cli::parse().task {
        Task::Setup(args) => setup::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Test(args) => test::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Demo(args) => demo::run(&args),
        Task::Man(args) => man::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Mutants(args) => mutants::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Fixtures => fixtures::run().map(|()| ExitCode::SUCCESS),
        Task::Deny => deny::run().map(|()| ExitCode::SUCCESS),
        Task::Shape(args) => shape::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Dist(args) => dist::run(&args).map(|()| ExitCode::SUCCESS),
        Task::Wheel => dist::wheel().map(|()| ExitCode::SUCCESS),
        Task::Bench(args) => bench::run(&args).map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
