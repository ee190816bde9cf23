//! `gpucr migrate`.

mod args;
mod connect;
mod relaying;

use std::process::ExitCode;
use std::sync::Arc;

use gpucr_core::migrate::{
    self, MigrateFailure, Migrated, MigrationId, Owner, Record, Side, State, Wishes,
};
use gpucr_core::timeline::{Fact, Timeline};
use gpucr_core::trust::PrivateKey;
use gpucr_core::{Error, Failure, namespace};
use serde_json::json;

use args::{FilesArg, To};
pub(crate) use args::{MigrateArgs, plain_directory};
pub(crate) use connect::{accept, given, link};

use crate::commands::dump::{about, prepare_timeline, write_timeline};
use crate::commands::{
    Outcome, inside, io_error, note_folded, print_json, restore, say, say_folded,
};
use crate::events::Events;
use crate::failure::{self, CliError, FAILED};
use crate::{display, signals};

/// What holds if gpucr ends before its work is finished.
const SETTLED_BY_WATCHDOG: &str = "gpucr could not wait until its work was finished. The watchdog settles the rest: `gpucr \
                                   migrate --list` tells whether the program was handed over; if not, it keeps running \
                                   here.";

pub(crate) fn run(args: &MigrateArgs) -> Outcome {
    if args.list {
        return list(args.json);
    }
    if let Some(id) = args.forget {
        return forget(id);
    }
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(settled(args.dry_run));
    // clap sees to it that there is one.
    let pid = args.pid.unwrap_or_default();
    if args.inside.is_none()
        && let Some(entry) = namespace::entry(pid).map_err(Error::from)?
    {
        if entry.is_of_container() {
            return Err(Error::ContainerStays { pid }.into());
        }
        return inside::run("migrate", &entry, &signals);
    }
    inside::begin(args.inside, None)?;
    let timeline = args.timeline.as_deref().map(prepare_timeline).transpose()?;
    let sign = args.sign.as_deref().map(PrivateKey::read).transpose().map_err(Error::from)?;
    let wishes = Wishes {
        pid: args.inside.unwrap_or(pid),
        dry_run: args.dry_run,
        max_stopped: args.max_stopped,
        goal: args.goal(),
        patience: connect::patience(args),
        timeline: if timeline.is_some() { Timeline::recording() } else { Timeline::default() },
        protocol: args.protocol.protocol(),
        before_stop: args.exec_before_stop.clone(),
        timeout: args.timeout,
        compression: args.compress,
        shell_job: args.criu.shell_job,
        criu: args.criu.options(),
        streams: args.wanted_streams()?,
        copies_files: args.files == FilesArg::Copy,
        tight_disk: args.tight_disk,
        relays: args.relay,
        sign: sign.map(Arc::new),
        safety_image: args.safety_image.clone(),
        stop: signals.stop.clone(),
    };
    let events = Events::open(args.events.as_deref())?;
    let (link, other) = connect::connect(args, &signals)?;
    // What may wait for a password has the terminal, and would keep it.
    let ends_other = other.as_ref().and_then(connect::Other::ender);
    let settle = settled(args.dry_run);
    signals.settle_at_last(move || {
        ends_other.inspect(|end| end());
        settle()
    });
    if let Some(bandwidth) = args.bandwidth {
        link.set_bandwidth(bandwidth);
    }
    let progress = events.following(display::progress(args.json));
    let mut migrated = migrate::migrate(link, &wishes, &progress);
    drop(progress);
    let relaying = migrated.as_mut().ok().and_then(|migrated| migrated.relaying.take());
    // What the other side had to say of it is said before this command ends.
    let other = other.filter(|_| relaying.is_some());
    // The timeline of a migration that failed is written too.
    let written = timeline
        .map_or(Ok(()), |output| write_timeline(output, &wishes.timeline, facts(pid, &migrated)));
    let mut migrated = migrated.map_err(|failure| {
        let (phase, error) = (failure.phase, failure.to_string());
        events.say("failed", json!({"phase": phase, "error": error}));
        CliError::from(failure)
    })?;
    migrated.pid = pid;
    events.say("migrated", json!(migrated));
    tell(args, &migrated)?;
    let written = written.map_err(|error| error.state("The program was migrated."));
    let Some(relaying) = relaying else { return written.map(|()| ExitCode::SUCCESS) };
    if let Err(error) = written {
        failure::show(error);
    }
    let ended = relaying::relay(relaying, &migrated.migration, &events, &signals);
    drop(other);
    ended
}

/// What holds if gpucr cannot wait for what it is at, and ends.
fn settled(is_dry: bool) -> impl FnOnce() -> String + Send {
    let state = if is_dry { "Nothing was changed." } else { SETTLED_BY_WATCHDOG };
    || state.to_owned()
}

/// What the timeline says of the migration.
fn facts(pid: u32, migrated: &Result<Migrated, MigrateFailure>) -> Vec<Fact> {
    let mut facts = about::place(pid);
    match migrated {
        Ok(migrated) => {
            facts.extend([
                Fact::new("stopped for", display::time(migrated.downtime_ms)),
                Fact::new("whole migration", display::time(migrated.total_ms)),
                Fact::new("sent", display::bytes(migrated.sent_bytes)),
            ]);
            let new_pid = migrated.new_pid.map(|pid| Fact::new("process there", pid.to_string()));
            facts.extend(new_pid);
        }
        Err(failure) => facts.push(Fact::new("failed", failure.to_string())),
    }
    facts
}

fn tell(args: &MigrateArgs, migrated: &Migrated) -> Outcome {
    say_unread(args, migrated);
    if args.json {
        print_json(migrated)?;
        return Ok(ExitCode::SUCCESS);
    }
    match migrated.new_pid {
        None => say!("process {} can continue there", migrated.pid),
        Some(new_pid) => say_folded!(
            2,
            "process {} runs there as {new_pid}: it was stopped for {}; {} sent in {}, {} more already \
            there; {} in all",
            migrated.pid,
            display::time(migrated.downtime_ms),
            display::bytes(migrated.sent_bytes),
            display::counted(migrated.sent_chunks, "chunk", "chunks"),
            migrated.there_chunks,
            display::time(migrated.total_ms),
        ),
    }
    Ok(ExitCode::SUCCESS)
}

/// Output that nobody reads there, and how somebody could.
fn say_unread(args: &MigrateArgs, migrated: &Migrated) {
    if migrated.unread.is_empty() {
        return;
    }
    let streams = migrated.unread.join(" and ");
    // A terminal cannot become a file.
    let outputs: Vec<&str> =
        migrated.unread.iter().copied().filter(|stream| *stream != "terminal").collect();
    let options = restore::outputs::options(&outputs);
    let files = match &args.to {
        _ if outputs.is_empty() => String::new(),
        Some(To::Ssh { .. }) => format!(", and with {options} a file there gets it"),
        _ => format!(", and with `gpucr receive {options}` a file there gets it"),
    };
    note_folded!(
        "Nobody reads the program's {streams} there: with --relay gpucr relays its output{files}."
    );
}

impl From<MigrateFailure> for CliError {
    fn from(failure: MigrateFailure) -> Self {
        let MigrateFailure { phase, error, owner, safety_image } = failure;
        let kept = safety_image.map_or_else(String::new, |path| {
            let path = path.display();
            format!(
                " There is one here too, {path}: remove it once the program runs there; use it only if the other \
                host is lost."
            )
        });
        match owner {
            Owner::Source(gpucr_core::Left::RolledBack) => Self::from(*error).state(format!(
                "The migration was given up in phase {phase}: the program keeps running here."
            )),
            Owner::Source(left) if kept.is_empty() => Self::from(Failure { phase, error, left }),
            Owner::Source(left) => {
                let help = format!("there is a complete image of it.{kept}");
                Self::from(Failure { phase, error, left }).help(help)
            }
            Owner::Destination { migration, image } => Self::from(*error)
                .state(format!(
                    "The program was handed over and does not run here any more. The destination has a complete image \
                     of it: {image}.{kept}"
                ))
                .help(format!(
                    "see there with `gpucr ps` whether it runs; if it does not: gpucr receive --resume {migration} \
                    --handed-over"
                )),
        }
    }
}

/// What this host has noted of migrations.
pub(crate) fn list(json: bool) -> Outcome {
    let records = Record::all().map_err(Error::from)?;
    if json {
        print_json(&records)?;
        return Ok(ExitCode::SUCCESS);
    }
    for record in records {
        say_folded!(2, "{}  {}", record.id, meaning(&record));
    }
    Ok(ExitCode::SUCCESS)
}

fn meaning(record: &Record) -> String {
    let image = || record.image.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    match (record.side, record.state) {
        (Side::Source, State::HandedOver) => {
            let left = match record.left().as_slice() {
                [] => String::new(),
                left => format!("; being ended here: {left:?}"),
            };
            format!(
                "source: handed over; the program belongs to the destination{left}. When it runs there: `gpucr migrate \
                --forget {}`",
                record.id
            )
        }
        (Side::Source, _) => "source: not handed over; the program belongs to this host".into(),
        (Side::Destination, State::Prepared) => {
            format!(
                "destination: complete in {}; ask the source whether it was handed over (`gpucr migrate --list` there). If \
                so: `gpucr receive --resume {id} --handed-over`; if not: `gpucr receive --abort {id}`",
                image(),
                id = record.id
            )
        }
        (Side::Destination, State::Taken) => {
            format!(
                "destination: handed over, but not yet restored from {}: `gpucr receive --resume {}`",
                image(),
                record.id
            )
        }
        (Side::Destination, State::Restoring) => {
            format!(
                "destination: handed over, and its restore from {} was begun. If gpucr was killed in it, see with `gpucr \
                ps` whether the program runs. If not: `gpucr receive --resume {id} --not-running`; if so: `gpucr \
                receive --abort {id} --running`",
                image(),
                id = record.id
            )
        }
        (Side::Destination, _) => {
            format!(
                "destination: not handed over; {} is not needed: `gpucr receive --abort {}`",
                image(),
                record.id
            )
        }
    }
}

/// Forgets what this host has noted as the source.
fn forget(id: MigrationId) -> Outcome {
    let record = Record::read(id, Side::Source).map_err(Error::from)?;
    let none = || {
        CliError::new(
            FAILED,
            format!("this host has no record of a migration {id} with it as the source"),
        )
    };
    let record = record.ok_or_else(none)?;
    if !record.left().is_empty() {
        return Err(CliError::new(FAILED, format!("migration {id} is not complete yet"))
            .state("Nothing was changed."));
    }
    record.remove().map_err(Error::from)?;
    Ok(ExitCode::SUCCESS)
}
