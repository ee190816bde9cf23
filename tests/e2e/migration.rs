//! A program goes from one gpucr to another while it runs: on one machine, over a Unix socket or through what stands in
//! for ssh. Whatever fails, one program runs or one complete image waits.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, Started, exists, refused, show, undisturbed, until};
use serde_json::Value;

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
/// The device memory of the workload does not change between its steps, so hardly any of it is sent twice.
const WORKLOAD: &str = "sgd";

/// What both sides have said.
struct Sides {
    source: Output,
    destination: Output,
}

impl Sides {
    fn show(&self) -> String {
        format!("source: {}\ndestination: {}", show(&self.source), show(&self.destination))
    }

    fn reports(&self) -> Result<(Value, Value)> {
        let reports = [&self.source, &self.destination].map(|output| {
            ensure!(output.status.success(), "{}", self.show());
            serde_json::from_slice(&output.stdout).with_context(|| self.show())
        });
        let [source, destination] = reports;
        Ok((source?, destination?))
    }
}

/// A command that is at work, and what it says.
struct Side {
    child: Started,
    out: std::fs::File,
    err: std::fs::File,
}

impl Side {
    fn start(command: &mut Command) -> Result<Self> {
        let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let child = Started::spawn(command.stdout(out.try_clone()?).stderr(err.try_clone()?))?;
        Ok(Self { child, out, err })
    }

    fn is_at_work(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    fn end(mut self) -> Result<Output> {
        use std::io::{Read, Seek};
        until("a side of the migration ends", || !self.is_at_work())?;
        let status = self.child.wait()?;
        let [mut stdout, mut stderr] = [Vec::new(), Vec::new()];
        for (file, bytes) in [(&mut self.out, &mut stdout), (&mut self.err, &mut stderr)] {
            file.rewind()?;
            file.read_to_end(bytes)?;
        }
        Ok(Output { status, stdout, stderr })
    }
}

/// Both commands, connected by a pair of sockets.
struct Pair {
    source: Command,
    destination: Command,
    /// Given to one of them each.
    sockets: [OwnedFd; 2],
}

impl Pair {
    fn new(lab: &Lab, program: &Program) -> Result<Self> {
        let (a, b) = UnixStream::pair()?;
        let sockets = [OwnedFd::from(a), OwnedFd::from(b)];
        let (mut source, mut destination) = (lab.gpucr(), lab.gpucr());
        source.args(["migrate", "--json", "--pid", &program.pid.to_string()]);
        destination.args(["receive", "--json", "--store", "store"]);
        for (command, socket) in [&mut source, &mut destination].into_iter().zip(&sockets) {
            let fd = socket.as_raw_fd();
            command.args(["--fd", "50"]);
            // SAFETY: dup2 is async-signal-safe; the copy is not closed by exec.
            unsafe {
                std::os::unix::process::CommandExt::pre_exec(command, move || {
                    if libc::dup2(fd, 50) < 0 {
                        Err(std::io::Error::last_os_error())
                    } else {
                        Ok(())
                    }
                });
            }
        }
        Ok(Self { source, destination, sockets })
    }

    /// Lets both sides come to their end. The program is reaped when it ends, as its parent would do.
    fn run(self, program: &mut Program) -> Result<Sides> {
        let Self { mut source, mut destination, sockets } = self;
        let (mut source, mut destination) =
            (Side::start(&mut source)?, Side::start(&mut destination)?);
        drop(sockets);
        until("both sides end", || {
            program.is_running();
            !source.is_at_work() & !destination.is_at_work()
        })?;
        Ok(Sides { source: source.end()?, destination: destination.end()? })
    }
}

/// The program, which is no child of the test any more, comes to its end as if nothing had been.
fn ends_well(program: &mut Program, expected: &[String]) -> Result<()> {
    program.let_go()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    let pid = program.pid;
    until("it is gone", || !exists(pid))
}

#[test]
fn a_program_goes_to_another_gpucr_and_ends_as_if_it_had_not() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let before = program.output();
    let sides = Pair::new(&lab, &program)?.run(&mut program)?;
    let (source, destination) = sides.reports()?;
    ensure!(source["new_pid"] == program.pid && destination["pid"] == program.pid, "{source}");
    ensure!(source["sent_chunks"].as_u64() > Some(0), "{source}");
    ensure!(source["sent_chunks"] == destination["chunks"], "{}", sides.show());
    ensure!(source["migration"] == destination["migration"], "{}", sides.show());
    ensure!(program.output().starts_with(&before), "its output was not touched");
    ends_well(&mut program, &expected)?;
    let left = lab.run(["migrate", "--list", "--json"])?;
    let id = source["migration"].as_str().context("it has a name")?;
    ensure!(!String::from_utf8_lossy(&left.stdout).contains(id), "{}", show(&left));
    let images = std::fs::read_dir(lab.path("store/images"))?.count();
    ensure!(images == 0, "its image is not needed any more");
    lab.holds_only(&["log", "store"])
}

/// What there is after a migration that did not go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The program runs on at the source; nothing is left at the destination.
    Stays,
    /// The program runs on at the source; the destination has an image, and may remove it.
    StaysWithImage,
    /// The program was handed over, and the destination has not heard of it.
    GoesUnheard,
    /// The program was handed over, and the destination knows it; it does not run.
    GoesParked,
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

fn images(lab: &Lab) -> usize {
    let names = std::fs::read_dir(lab.path("store/images"));
    names.map_or(0, |names| names.count())
}

/// Checks that it has ended so, and that the program comes to its end as if nothing had been, by the way that the
/// messages name.
fn is_so(lab: &Lab, mut program: Program, end: End, expected: &[String]) -> Result<()> {
    let pid = program.pid;
    if matches!(end, End::Stays | End::StaysWithImage) {
        // The watchdog may be at it still.
        until("the source owns it", || matches!(records(lab, &program), Ok((None, _))))?;
        let id = |record: &Value| record["id"].as_str().unwrap_or_default().to_owned();
        if end == End::StaysWithImage {
            let (_, record) = records(lab, &program)?;
            let id = id(&record.context("the destination has noted it")?);
            refused(&lab.run(["receive", "--resume", &id])?, 1, &["Nothing was changed"])?;
            ensure!(images(lab) == 1, "it has an image");
            let aborted = lab.run(["receive", "--abort", &id])?;
            ensure!(aborted.status.success(), "{}", show(&aborted));
        }
        ensure!(records(lab, &program)?.1.is_none(), "nothing is noted at the destination");
        until("nothing is left at the destination", || images(lab) == 0)?;
        ensure!(program.is_running(), "it runs on:\n{}", program.output());
        program.result()?;
        ensure!(program.series() == expected, "differs:\n{}", program.output());
        return Ok(());
    }
    until("the source has none of it", || !program.is_running())?;
    let (source, destination) = records(lab, &program)?;
    if end == End::Goes {
        ensure!(destination.is_none(), "{destination:?}");
    } else {
        until("nothing of it runs", || !exists(pid))?;
        let record = destination.context("the destination has noted it")?;
        let id = record["id"].as_str().context("a name")?.to_owned();
        let state = if end == End::GoesParked { "taken" } else { "prepared" };
        ensure!(record["state"] == state, "{record}");
        let mut resume = vec!["receive", "--resume", &id];
        if end == End::GoesParked {
            let aborted = lab.run(["receive", "--abort", &id])?;
            refused(&aborted, 1, &["all that there is of it"])?;
        } else {
            refused(&lab.run(&resume)?, 1, &["not known whether", "Nothing was changed"])?;
            resume.push("--handed-over");
        }
        let resumed = lab.run(&resume)?;
        ensure!(resumed.status.success(), "{}", show(&resumed));
        ensure!(String::from_utf8_lossy(&resumed.stdout).trim() == pid.to_string(), "its pid");
        let again = lab.run(&resume)?;
        refused(&again, 1, &["knows no migration"])?;
    }
    if let Some(source) = source {
        ensure!(source["state"] == "handed-over", "{source}");
        let id = source["id"].as_str().context("a name")?;
        let forgotten = lab.run(["migrate", "--forget", id])?;
        ensure!(forgotten.status.success(), "{}", show(&forgotten));
    }
    ends_well(&mut program, expected)
}

/// Migrates with faults, and checks what has come of it.
fn with_faults(cases: &[(&str, &str, End)]) -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (source, destination, end) in cases {
        let lab = Lab::new();
        let mut program = lab.at_work(WORKLOAD, &ARGS)?;
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        let sides = pair.run(&mut program)?;
        let told = || format!("{source} {destination} {end:?}: {}", sides.show());
        let both = !sides.source.status.success() && !sides.destination.status.success();
        ensure!(both || *end == End::Goes, "{}", told());
        is_so(&lab, program, *end, &expected).with_context(told)?;
    }
    Ok(())
}

#[test]
fn a_source_killed_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("kill:preflight", "", Stays),
        ("kill:offer", "", Stays),
        ("kill:attach", "", Stays),
        ("kill:precopy", "", Stays),
        ("kill:gate", "", Stays),
        ("kill:checkpoint", "", Stays),
        ("kill:store", "", Stays),
        ("kill:prepare", "", Stays),
        ("kill:decide", "", StaysWithImage),
        ("kill:suspended", "", StaysWithImage),
        ("kill:decided", "", GoesUnheard),
        ("kill:handover", "", GoesUnheard),
    ])
}

#[test]
fn a_source_that_fails_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesUnheard, Stays};
    with_faults(&[
        ("fail:offer", "", Stays),
        ("fail:precopy", "", Stays),
        ("fail:criu", "", Stays),
        ("fail:prepare", "", Stays),
        ("fail:decide", "", Stays),
        ("fail:suspended", "", Stays),
        ("fail:handover", "", GoesUnheard),
    ])
}

#[test]
fn a_destination_killed_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesParked, GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("", "kill:offer", Stays),
        ("", "kill:receive", Stays),
        ("", "kill:prepare", Stays),
        ("", "kill:completed", StaysWithImage),
        ("", "kill:decide", GoesUnheard),
        ("", "kill:handover", GoesParked),
        // In the process that restores.
        ("", "kill:criu", GoesParked),
    ])
}

#[test]
fn a_destination_that_fails_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesParked, GoesUnheard, Stays};
    with_faults(&[
        ("", "fail:offer", Stays),
        ("", "fail:receive", Stays),
        ("", "fail:prepare", Stays),
        ("", "fail:completed", Stays),
        ("", "fail:decide", GoesUnheard),
        ("", "fail:handover", GoesParked),
        ("", "fail:attach", GoesParked),
    ])
}

#[test]
fn a_link_that_is_cut_at_any_message_of_the_source_leaves_one_program() -> Result<()> {
    use End::{Goes, GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("cut:hello", "", Stays),
        ("cut:offer", "", Stays),
        ("cut:ask", "", Stays),
        ("cut:manifest", "", Stays),
        // Nobody knows whether the destination has it, least of all the source.
        ("cut-after:manifest", "", StaysWithImage),
        ("cut:abort,fail:decide", "", StaysWithImage),
        ("cut:commit", "", GoesUnheard),
        ("cut-after:commit", "", Goes),
    ])
}

#[test]
fn a_link_that_is_cut_at_any_message_of_the_destination_leaves_one_program() -> Result<()> {
    use End::{Goes, GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("", "cut:hello", Stays),
        ("", "cut:accept", Stays),
        ("", "cut-after:accept", Stays),
        ("", "cut:want", Stays),
        ("", "cut:prepared", StaysWithImage),
        ("", "cut-after:prepared", GoesUnheard),
        ("", "cut:running", Goes),
    ])
}

/// The destination works on and says so, but does not come to an end.
#[test]
fn a_program_does_not_stand_still_for_longer_than_it_may() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.args(["--max-stopped", "1s"]);
    pair.destination.env("GPUCR_FAULT", "hold:prepare").env("GPUCR_FAULT_FILE", &go_on);
    let Pair { mut source, mut destination, sockets } = pair;
    let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    let source = source.end()?;
    refused(&source, 1, &["stand still for more than 1 s", "the program runs on here"])?;
    std::fs::write(&go_on, "")?;
    let destination = destination.end()?;
    ensure!(!destination.status.success(), "{}", show(&destination));
    std::fs::remove_file(&go_on)?;
    is_so(&lab, program, End::Stays, &expected)
}

#[test]
fn what_is_in_the_way_is_told_at_once_and_nothing_is_changed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    std::fs::create_dir_all(lab.path("store/other"))?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--dry-run");
    pair.destination.args(["--device-map", "0=77"]);
    let sides = pair.run(&mut program)?;
    for output in [&sides.source, &sides.destination] {
        let words =
            ["cannot go on at the destination", "this host's device 77", "is not a gpucr store"];
        refused(output, 1, &words).with_context(|| sides.show())?;
    }
    ensure!(program.is_running(), "it runs on");
    std::fs::remove_dir_all(lab.path("store"))?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--dry-run");
    let sides = pair.run(&mut program)?;
    let (source, _) = sides.reports()?;
    ensure!(source["new_pid"].is_null(), "{source}");
    is_so(&lab, program, End::Stays, &expected)
}

#[test]
fn a_program_goes_to_a_pid_namespace_and_back() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.destination.arg("--new-pids");
    let (source, _) = pair.run(&mut program)?.reports()?;
    let outer = source["new_pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    let outer = outer.context("it has a pid")?;
    ensure!(outer != program.pid && !exists(program.pid), "{source}");
    let pid = std::mem::replace(&mut program.pid, outer);
    let before = program.output().len();
    program.allow(2)?;
    until("it runs there", || program.output().len() > before)?;
    let back = Pair::new(&lab, &program)?.run(&mut program)?;
    let (source, destination) = back.reports()?;
    ensure!(source["new_pid"] == pid && source["pid"] == outer, "{source}");
    // Code and libraries of the program, and whatever it has not written, were there.
    ensure!(destination["chunks"] == source["sent_chunks"], "{}", back.show());
    ensure!(source["there_chunks"].as_u64() > Some(0), "{}", back.show());
    program.pid = pid;
    ends_well(&mut program, &expected)
}

/// What stands in for ssh runs the command on this machine.
#[test]
fn a_program_goes_where_ssh_leads() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let ssh = lab.path("ssh");
    std::fs::write(
        &ssh,
        "#!/bin/sh\necho \"$@\" > called\nfor last; do :; done\nexec sh -c \"$last\"\n",
    )?;
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755))?;
    let gpucr = gpucr_tests::binary("gpucr");
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", gpucr.parent().context("a folder")?.display());
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let store = lab.path("store");
    let to = format!("ssh://root@elsewhere:2222{}", store.display());
    let mut command = lab.gpucr();
    command.args(["migrate", "--json", "--pid", &program.pid.to_string(), "--to", &to, "--ssh"]);
    let mut source = Side::start(command.arg(&ssh).env("PATH", path))?;
    until("it ends", || {
        program.is_running();
        !source.is_at_work()
    })?;
    let output = source.end()?;
    ensure!(output.status.success(), "{}", show(&output));
    let called = std::fs::read_to_string(lab.path("called"))?;
    ensure!(called.starts_with("-p 2222 -- root@elsewhere gpucr receive --stdio"), "{called}");
    ends_well(&mut program, &expected)
}

#[test]
fn both_sides_meet_at_a_socket_of_that_name() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let at = format!("unix:{}", lab.path("socket").display());
    let mut receive = lab.gpucr();
    receive.args(["receive", "--from", &at, "-o", "image", "--keep-image"]);
    let destination = Side::start(&mut receive)?;
    until("somebody listens", || lab.path("socket").exists())?;
    let mut migrate = lab.gpucr();
    migrate.args(["migrate", "--pid", &program.pid.to_string(), "--to", &at]);
    let mut source = Side::start(&mut migrate)?;
    until("it ends", || {
        program.is_running();
        !source.is_at_work()
    })?;
    let (source, destination) = (source.end()?, destination.end()?);
    ensure!(source.status.success() && destination.status.success(), "{}", show(&source));
    let said = String::from_utf8_lossy(&source.stdout).into_owned();
    ensure!(said.contains(&format!("runs there as {}", program.pid)), "{said}");
    let verified = lab.run(["verify", "image"])?;
    ensure!(verified.status.success(), "{}", show(&verified));
    ensure!(!lab.path("socket").exists(), "nobody listens any more");
    ends_well(&mut program, &expected)
}

/// A frame with a message: its kind, and the bytes of its fields.
fn message(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let body = [&[0, kind][..], &fields.concat()].concat();
    [&(body.len() as u32).to_le_bytes()[..], &body].concat()
}

fn hello() -> Vec<u8> {
    message(0, &[&1u32.to_le_bytes(), &3u32.to_le_bytes(), b"odd", &2u32.to_le_bytes()])
}

/// Whatever the other side says, the program runs on.
#[test]
fn a_hostile_destination_changes_nothing() -> Result<()> {
    use std::io::Write;
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let accept = message(2, &[]);
    let accepted = |more: Vec<u8>| [hello(), accept.clone(), more].concat();
    let text = |text: &[u8]| [&(text.len() as u32).to_le_bytes()[..], text].concat();
    let cases: [(&str, Vec<u8>, &[&str]); 11] = [
        ("nothing", Vec::new(), &["was silent"]),
        ("no protocol", b"SSH-2.0-OpenSSH_9.9\r\n".repeat(10), &["does not keep to the protocol"]),
        (
            "another version",
            message(0, &[&2u32.to_le_bytes(), &text(b"9.9"), &2u32.to_le_bytes()]),
            &["gpucr 9.9 with version 2"],
        ),
        ("no answer", hello(), &["was silent"]),
        (
            "no",
            [hello(), message(3, &[&1u32.to_le_bytes(), &text(b"a\x1b[2Jb")])].concat(),
            &["cannot go on at the destination", "a\\u{1b}[2Jb"],
        ),
        ("silence", accepted(Vec::new()), &["was silent"]),
        ("a huge frame", accepted(u32::MAX.to_le_bytes().to_vec()), &["frame is too long"]),
        (
            "a wrong count",
            accepted(message(5, &[&1000u32.to_le_bytes(), &[1; 1000]])),
            &["does not keep to the protocol"],
        ),
        ("too early", accepted(message(7, &[&text(b"/there")])), &["`prepared` came"]),
        ("far too early", accepted(message(9, &[&7u32.to_le_bytes()])), &["`running` came"]),
        ("failure", accepted(message(10, &[&text(b"no more")])), &["no more"]),
    ];
    for (name, says, words) in cases {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = lab.gpucr();
        command.args([
            "migrate",
            "--pid",
            &program.pid.to_string(),
            "--fd",
            "50",
            "--silence",
            "2s",
        ]);
        let fd = theirs.as_raw_fd();
        // SAFETY: dup2 is async-signal-safe.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut command, move || {
                if libc::dup2(fd, 50) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let source = Side::start(&mut command)?;
        drop(theirs);
        // The source may have ended before it has heard all of it.
        let _ = (&ours).write_all(&says);
        // What it says is taken, so that it does not wait for that.
        let mut reading = ours.try_clone()?;
        let reader = std::thread::spawn(move || std::io::copy(&mut reading, &mut std::io::sink()));
        let output = source.end().with_context(|| name.to_owned())?;
        drop(ours);
        let _ = reader.join().expect("no panic");
        let flat = String::from_utf8_lossy(&output.stderr).replace(['│', '\n'], " ");
        let flat = flat.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(output.status.code() == Some(1), "{name}: {}", show(&output));
        ensure!(words.iter().all(|word| flat.contains(word)), "{name}: {}", show(&output));
        ensure!(program.is_running(), "{name}: {}", show(&output));
    }
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    lab.holds_only(&["log"])
}

/// Someone between the two sides who changes what the source says: the frame, given which chunk it is, and what goes
/// on in its place.
type Change = fn(u8, usize, Vec<u8>) -> Vec<Vec<u8>>;

#[test]
fn a_hostile_source_leaves_nothing_behind() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let changes: [(&str, Change, &str); 6] = [
        (
            "an altered chunk",
            |kind, number, mut frame| {
                if (kind, number) == (2, 1) {
                    *frame.last_mut().expect("it has bytes") ^= 1;
                }
                vec![frame]
            },
            "is damaged",
        ),
        (
            "a lacking chunk",
            |kind, number, frame| {
                if (kind, number) == (2, 1) { vec![] } else { vec![frame] }
            },
            "is missing",
        ),
        (
            "a chunk that comes twice",
            |kind, number, frame| {
                if (kind, number) == (2, 1) { vec![frame.clone(), frame] } else { vec![frame] }
            },
            "does not keep to the protocol",
        ),
        (
            "an altered manifest",
            |kind, number, mut frame| {
                // The first piece is the outline.
                if (kind, number) == (1, 2) {
                    let middle = frame.len() / 2;
                    frame[middle] ^= 1;
                }
                vec![frame]
            },
            "its manifest",
        ),
        (
            "an altered outline",
            |kind, number, mut frame| {
                if (kind, number) == (1, 1) {
                    frame.truncate(frame.len() / 2);
                    let len = frame.len() as u32 - 4;
                    frame[..4].copy_from_slice(&len.to_le_bytes());
                }
                vec![frame]
            },
            "its offer",
        ),
        (
            "a flood",
            |kind, number, frame| {
                if (kind, number) == (2, 1) {
                    vec![[&5u32.to_le_bytes()[..], &[1, 0, 0, 0, 0]].concat(); 100_000]
                } else {
                    vec![frame]
                }
            },
            "",
        ),
    ];
    for (name, change, words) in changes {
        let lab = Lab::new();
        let program = lab.at_work(WORKLOAD, &ARGS)?;
        let (from_source, to_source) = UnixStream::pair()?;
        let mut pair = Pair::new(&lab, &program)?;
        // The source talks to the one between.
        let fd = to_source.as_raw_fd();
        // SAFETY: dup2 is async-signal-safe; this comes after the one of `Pair::new`.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut pair.source, move || {
                if libc::dup2(fd, 50) < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
            });
        }
        let to_destination = UnixStream::from(pair.sockets[0].try_clone()?);
        let between = between(from_source, to_destination, change)?;
        let Pair { mut source, mut destination, sockets } = pair;
        let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
        drop((sockets, to_source));
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        between.join().expect("no panic");
        let told = || format!("{name}: {}", sides.show());
        ensure!(
            !sides.source.status.success() && !sides.destination.status.success(),
            "{}",
            told()
        );
        let flat = String::from_utf8_lossy(&sides.destination.stderr).replace(['│', '\n'], " ");
        let flat = flat.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(flat.contains(words) && flat.contains("nothing is left here"), "{}", told());
        is_so(&lab, program, End::Stays, &expected).with_context(told)?;
    }
    Ok(())
}

/// Passes on what both sides say, that of the source with changes, until one of them has ended.
fn between(
    source: UnixStream,
    destination: UnixStream,
    change: Change,
) -> Result<std::thread::JoinHandle<()>> {
    use std::io::{Read, Write};
    let (mut back_from, mut back_to) = (destination.try_clone()?, source.try_clone()?);
    let backwards = std::thread::spawn(move || {
        let _ = std::io::copy(&mut back_from, &mut back_to);
        let _ = back_to.shutdown(std::net::Shutdown::Both);
    });
    let (mut from, mut to) = (source, destination);
    Ok(std::thread::spawn(move || {
        let mut numbers = [0; 3];
        let mut pass_on = || -> std::io::Result<()> {
            loop {
                let mut len = [0; 4];
                from.read_exact(&mut len)?;
                let mut body = vec![0; u32::from_le_bytes(len) as usize];
                from.read_exact(&mut body)?;
                let kind = body[0];
                numbers[usize::from(kind)] += 1;
                let frame = [&len[..], &body].concat();
                for frame in change(kind, numbers[usize::from(kind)], frame) {
                    to.write_all(&frame)?;
                }
            }
        };
        let _ = pass_on();
        let _ = from.shutdown(std::net::Shutdown::Both);
        let _ = to.shutdown(std::net::Shutdown::Both);
        backwards.join().expect("no panic");
    }))
}
