//! What there is after a migration, whatever has become of it.

use std::path::{Path, PathBuf};
use std::process::Output;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::{exists, refused, show, until};
use crate::lab::Lab;
use crate::migration::{Side, ends_well, made, put_elsewhere};
use crate::program::Program;
use crate::started::writes_to;

/// A folder of a lab, and the one that the destination has in its place.
#[derive(Debug, Clone, Copy)]
pub struct Elsewhere {
    /// At the source.
    pub folder: &'static str,
    /// What has the same path at the destination.
    pub there: &'static str,
}

impl Elsewhere {
    /// Where a file is that the source has, as it is seen from the outside, for the destination.
    fn file_there(&self, lab: &Lab, file: &Path) -> PathBuf {
        let name = file.strip_prefix(lab.path(self.folder));
        name.map_or_else(|_| file.to_owned(), |name| lab.path(self.there).join(name))
    }
}

/// Where the destination is.
#[derive(Clone, Copy)]
struct There<'l> {
    lab: &'l Lab,
    elsewhere: Option<Elsewhere>,
}

impl There<'_> {
    /// Runs `gpucr receive` there.
    fn receive(&self, args: &[&str]) -> Result<Output> {
        let mut command = self.lab.gpucr();
        if let Some(Elsewhere { folder, there }) = self.elsewhere {
            put_elsewhere(self.lab, &mut command, folder, there)?;
        }
        Side::start(command.arg("receive").args(args))?.end()
    }

    /// The program has gone there.
    fn takes(&self, program: &mut Program) {
        if let Some(elsewhere) = &self.elsewhere {
            program.goes_on_as(program.pid, elsewhere.file_there(self.lab, &program.log));
        }
    }

    /// Nothing has been made there, or all of it is gone.
    fn has_no_files(&self) -> bool {
        let folder = self.elsewhere.map(|elsewhere| self.lab.path(elsewhere.there));
        folder.is_none_or(|folder| std::fs::read_dir(folder).is_ok_and(|all| all.count() == 0))
    }
}

/// What there is after a migration that did not go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The program runs on at the source; nothing is left at the destination.
    Stays,
    /// The program runs on at the source; the destination has an image, and may remove it.
    StaysWithImage,
    /// The program runs on at the source; the destination may have noted it, with an image or without one.
    StaysEitherWay,
    /// The program was handed over, and the destination has not heard of it.
    GoesUnheard,
    /// The program was handed over, and the destination knows it; it does not run.
    GoesParked,
    /// The program was handed over, and the destination was killed while it restored it: it runs there or not.
    GoesPerhaps,
    /// The program runs at the destination.
    Goes,
}

/// What was noted of the migration of a program into the store of a lab, by either side.
fn records(lab: &Lab, program: &Program) -> Result<(Option<Value>, Option<Value>)> {
    let output = lab.run(["migrate", "--list", "--json"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let all: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let is_source = |record: &&Value| {
        let processes = record["processes"].as_array();
        record["side"] == "source"
            && processes.is_some_and(|all| all.iter().any(|one| one[0] == program.pid))
    };
    let store = lab.path("");
    let is_destination = |record: &&Value| {
        let image = record["image"].as_str();
        record["side"] == "destination" && image.is_some_and(|i| Path::new(i).starts_with(&store))
    };
    Ok((all.iter().find(is_source).cloned(), all.iter().find(is_destination).cloned()))
}

/// Which of the ends it has come to, both sides of which have ended.
///
/// # Errors
/// It comes to none: what was noted does not fit to what runs.
pub fn end_of(lab: &Lab, program: &mut Program) -> Result<End> {
    let mut end = None;
    let settled = until("it is settled who owns the program", || {
        let Ok((source, destination)) = records(lab, program) else { return false };
        let state =
            |record: Option<Value>| record.and_then(|it| Some(it["state"].as_str()?.into()));
        let states: [Option<String>; 2] = [state(source), state(destination)];
        end = match (states[0].as_deref(), states[1].as_deref()) {
            (None, None | Some("preparing" | "prepared")) if program.is_running() => {
                Some(End::StaysEitherWay)
            }
            (None | Some("handed-over"), None) if !program.is_running() => Some(End::Goes),
            (Some("handed-over"), Some("prepared")) => Some(End::GoesUnheard),
            (Some("handed-over"), Some("taken")) => Some(End::GoesParked),
            (Some("handed-over"), Some("restoring")) => Some(End::GoesPerhaps),
            _ => None,
        };
        end.is_some()
    });
    settled.with_context(|| format!("{:?}", records(lab, program)))?;
    end.context("it is settled")
}

/// Removes what both sides have noted of it: the program was brought back in another way.
///
/// # Errors
/// A side does not let go of it.
pub fn forget(lab: &Lab, program: &Program) -> Result<()> {
    let (source, destination) = records(lab, program)?;
    for (record, args) in [(source, ["migrate", "--forget"]), (destination, ["receive", "--abort"])]
    {
        let Some(id) = record.as_ref().and_then(|record| record["id"].as_str()) else { continue };
        let output = lab.run(args.into_iter().chain([id]))?;
        ensure!(output.status.success(), "{}", show(&output));
    }
    Ok(())
}

fn images(lab: &Lab) -> usize {
    let names = std::fs::read_dir(lab.path("store/images"));
    names.map_or(0, |names| names.count())
}

/// Whether a gpucr that was started in the lab is migrating, or watching over that.
fn is_anyone_at_work(lab: &Lab) -> bool {
    let is_of_it = |process: &Path| {
        let args = std::fs::read(process.join("cmdline")).unwrap_or_default();
        let mut args = args.split(|byte| *byte == 0).skip(1);
        let works: [&[u8]; 4] = [b"receive", b"migrate", b"restore", b"watchdog"];
        args.next().is_some_and(|first| works.contains(&first))
            && std::fs::read_link(process.join("cwd")).is_ok_and(|at| at.starts_with(lab.path("")))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.map(|entry| entry.path()).any(|process| is_of_it(&process))
}

/// Checks that it has ended so, and that the program comes to its end as if nothing had been, by the way that the
/// messages name.
///
/// # Errors
/// It is not so.
pub fn is_so(lab: &Lab, program: Program, end: End, expected: &[String]) -> Result<()> {
    is_so_there(lab, None, program, end, expected)
}

/// The same of a destination that has a folder of its own, with nothing in it before the migration.
///
/// # Errors
/// As [`is_so`].
pub fn is_so_there(
    lab: &Lab,
    elsewhere: Option<Elsewhere>,
    mut program: Program,
    end: End,
    expected: &[String],
) -> Result<()> {
    let there = There { lab, elsewhere };
    let pid = program.pid;
    if matches!(end, End::Stays | End::StaysWithImage | End::StaysEitherWay) {
        // The watchdog may be at it still.
        until("the source owns it", || matches!(records(lab, &program), Ok((None, _))))?;
        let id = |record: &Value| record["id"].as_str().unwrap_or_default().to_owned();
        let record = if end == End::Stays { None } else { records(lab, &program)?.1 };
        ensure!(record.is_some() || end != End::StaysWithImage, "the destination has noted it");
        if let Some(record) = record {
            let id = id(&record);
            refused(&there.receive(&["--resume", &id])?, 1, &["Nothing was changed"])?;
            ensure!(end != End::StaysWithImage || images(lab) == 1, "it has an image");
            let runs = there.receive(&["--abort", &id, "--running"])?;
            refused(&runs, 1, &["does not run here", "Nothing was changed"])?;
            let aborted = there.receive(&["--abort", &id])?;
            ensure!(aborted.status.success(), "{}", show(&aborted));
        }
        ensure!(records(lab, &program)?.1.is_none(), "nothing is noted at the destination");
        until("nothing is left at the destination", || images(lab) == 0)?;
        // Device memory that was loaded there is free when all have ended who had it.
        until("nobody is at work there", || !is_anyone_at_work(lab))?;
        ensure!(there.has_no_files(), "a file is left at the destination");
        ensure!(program.is_running(), "it runs on:\n{}", program.output());
        program.result()?;
        ensure!(program.series() == expected, "differs:\n{}", program.output());
        return Ok(());
    }
    until("the source has none of it", || !program.is_running())?;
    there.takes(&mut program);
    let (source, destination) = records(lab, &program)?;
    if end == End::Goes {
        ensure!(destination.is_none(), "{destination:?}");
    } else if end == End::GoesPerhaps {
        let record = destination.context("the destination has noted it")?;
        let id = record["id"].as_str().context("a name")?;
        return perhaps(there, program, id, source, expected);
    } else {
        until("nothing of it runs", || !exists(pid))?;
        let record = destination.context("the destination has noted it")?;
        let id = record["id"].as_str().context("a name")?.to_owned();
        let state = if end == End::GoesParked { "taken" } else { "prepared" };
        ensure!(record["state"] == state, "{record}");
        let mut resume = vec!["--resume", &id];
        if end == End::GoesParked {
            let aborted = there.receive(&["--abort", &id])?;
            refused(&aborted, 1, &["the only copy of it"])?;
        } else {
            refused(&there.receive(&resume)?, 1, &["not known whether", "Nothing was changed"])?;
            resume.push("--handed-over");
        }
        let resumed = there.receive(&resume)?;
        ensure!(resumed.status.success(), "{}", show(&resumed));
        let has_its_pid = String::from_utf8_lossy(&resumed.stdout).trim() == pid.to_string();
        ensure!(has_its_pid || record["new_pids"] == true, "its pid");
        let again = there.receive(&resume)?;
        refused(&again, 1, &["no record of a migration"])?;
    }
    forget_source(lab, source)?;
    ends_well(&mut program, expected)
}

/// The source does not need to know any more what it has noted.
fn forget_source(lab: &Lab, source: Option<Value>) -> Result<()> {
    let Some(source) = source else { return Ok(()) };
    ensure!(source["state"] == "handed-over", "{source}");
    let id = source["id"].as_str().context("a name")?;
    let forgotten = lab.run(["migrate", "--forget", id])?;
    ensure!(forgotten.status.success(), "{}", show(&forgotten));
    Ok(())
}

/// The destination was killed while it restored the program. The user sees whether that runs, and says so.
fn perhaps(
    there: There<'_>,
    mut program: Program,
    id: &str,
    source: Option<Value>,
    expected: &[String],
) -> Result<()> {
    let lab = there.lab;
    until("nobody is at work there", || !is_anyone_at_work(lab))?;
    refused(&there.receive(&["--resume", id])?, 1, &["may run", "Nothing was changed"])?;
    refused(&there.receive(&["--abort", id])?, 1, &["the only copy of it"])?;
    let here = writes_to(program.pid, &program.log).then_some(program.pid);
    forget_source(lab, source)?;
    let done = match here.or_else(|| made(&program)) {
        Some(pid) => {
            program.pid = pid;
            ends_well(&mut program, expected)?;
            there.receive(&["--abort", id, "--running"])?
        }
        None => {
            let resumed = there.receive(&["--resume", id, "--not-running"])?;
            ends_well(&mut program, expected).with_context(|| show(&resumed))?;
            resumed
        }
    };
    ensure!(done.status.success(), "{}", show(&done));
    ensure!(records(lab, &program)?.1.is_none(), "nothing is noted any more");
    Ok(())
}
