//! Programs in network namespaces of their own, dumped and restored by a gpucr that is in another.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, ends_well, made};
use gpucr_tests::sockets::{connected, inherit, streams};
use gpucr_tests::{
    Lab, Network, Pace, Piped, Program, Started, binary, exists, finish, kill, refused, show,
    undisturbed, until,
};

const ARGS: [&str; 2] = ["--steps", "8"];

/// A program in a network of its own, in which it listens and is connected with itself.
struct Connected {
    program: Program,
    pace: Pace,
    listens: SocketAddr,
    /// Where the end is that has been sent something.
    server: SocketAddr,
}

/// What was on its way when the program was dumped.
const BEFORE: &[u8] = b"before";

impl Connected {
    fn start(lab: &Lab, network: &Network) -> Result<Self> {
        let pace = Pace::new()?;
        pace.allow(4)?;
        let mut command = lab.gpucr();
        command.args(["run", "--device", "soft", "--"]).arg(binary("workload"));
        command.args(["sgd", ARGS[0], ARGS[1], "--pace", pace.file()]);
        let (mut one, other, listener) = network.visit(connected)?;
        one.write_all(BEFORE)?;
        let (listens, server) = (listener.local_addr()?, other.local_addr()?);
        for socket in [one.into(), other.into(), listener.into()] {
            inherit(&mut command, socket);
        }
        network.take(&mut command);
        // With the command our own copies of the sockets go.
        let mut program = lab.spawn(command, "log")?;
        program.wait_for("step ")?;
        Ok(Self { program, pace, listens, server })
    }

    /// Its sockets are in that network and work as before.
    fn is_at_work(&self, network: &Network) -> Result<()> {
        ensure!(network.has(self.program.pid)?, "it is elsewhere");
        ensure!(TcpStream::connect(self.listens).is_err(), "it listens out here");
        // Nobody accepts it; that it is taken shows who listens.
        network.visit(|| TcpStream::connect(self.listens)).context("it listens")?;
        let mut ends = streams(self.program.pid)?;
        ends.sort_by_key(|end| end.local_addr().ok() == Some(self.server));
        let [client, server] = ends.as_mut_slice() else { anyhow::bail!("not two: {ends:?}") };
        client.write_all(b" and after")?;
        let mut heard = [0; 16];
        server.read_exact(&mut heard)?;
        ensure!(&heard == b"before and after", "{heard:?}");
        Ok(())
    }
}

#[test]
fn it_is_dumped_from_outside_and_comes_back_in_its_network_or_another() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS)?;
    let (lab, old, new) = (Lab::new(), Network::new()?, Network::new()?);
    let mut it = Connected::start(&lab, &old)?;
    let pid = it.program.pid.to_string();
    let output = lab.run(["dump", "--dry-run", "--pid", &pid])?;
    ensure!(output.status.success(), "{}", show(&output));
    let image = lab.path("image");
    lab.dump(&it.program, &image, &["--leave-running"])?;
    ensure!(it.program.is_running() && old.has(it.program.pid)?);
    std::fs::remove_dir_all(&image)?;
    lab.dump(&it.program, &image, &[])?;
    it.program.wait()?;
    what_is_no_network_is_refused(&lab)?;

    // Where none is named it is said that there was one.
    let output = lab.run(["restore", "--dry-run", "image"])?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success() && said.contains("--netns"), "{}", show(&output));
    let output = lab.run(["restore", "--dry-run", "--netns", &old.path(), "image"])?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{}", show(&output));

    let output = lab.run(["restore", "--detach", "--netns", &old.path(), "image"])?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{}", show(&output));
    it.is_at_work(&old)?;
    kill(it.program.pid)?;
    until("it is gone", || !exists(it.program.pid))?;

    // It has printed nothing meanwhile. The hook is run where gpucr is, which stays in its own network.
    let mut command = lab.gpucr();
    command.args(["restore", "--netns", &new.path(), "--ready-file", "ready"]);
    command.args(["--exec-before-resume", "readlink /proc/self/ns/net > hook", "image"]);
    let log = File::create(lab.path("restore.log"))?;
    let mut restore = Started::spawn(command.stdout(log.try_clone()?).stderr(log))?;
    let said = || std::fs::read_to_string(lab.path("restore.log")).unwrap_or_default();
    until("it runs", || lab.path("ready").exists() || !matches!(restore.try_wait(), Ok(None)))?;
    ensure!(lab.path("ready").exists(), "{}", said());
    it.is_at_work(&new).with_context(said)?;
    let hook = std::fs::read_to_string(lab.path("hook"))?;
    ensure!(Path::new(hook.trim()) == std::fs::read_link("/proc/self/ns/net")?, "{hook}");
    it.program.let_go()?;
    it.pace.allow_all()?;
    ensure!(restore.wait()?.success(), "{}", said());
    ensure!(it.program.series() == expected, "{}", it.program.output());
    Ok(())
}

/// Before anything is done, with and without a pid namespace of its own.
fn what_is_no_network_is_refused(lab: &Lab) -> Result<()> {
    for (path, word) in [
        ("/no/such/network", "cannot be opened"),
        ("/dev/null", "is not a network namespace"),
        ("image/manifest", "is not a network namespace"),
        ("/proc/self/ns/mnt", "a namespace of another kind"),
    ] {
        for more in [&[][..], &["--new-pids"], &["--detach"], &["--on-demand"]] {
            let args =
                [&["restore", "--ready-file", "ready", "--netns", path][..], more, &["image"]];
            refused(&lab.run(args.concat())?, 1, &[path, word, "Nothing was changed"])?;
        }
        let output = lab.run(["restore", "--dry-run", "--netns", path, "image"])?;
        let said = show(&output);
        ensure!(output.status.code() == Some(1) && said.contains(path), "{said}");
        ensure!(said.contains("would prevent a restore") && said.contains(word), "{said}");
        let output = lab.run(["receive", "--from", "unix:socket", "--netns", path])?;
        refused(&output, 1, &[path, word, "Nothing was changed"])?;
    }
    lab.holds_only(&["image", "log"])
}

/// Both listen at the same port, each in its own network.
#[test]
fn one_image_comes_to_life_in_two_networks_at_once() -> Result<()> {
    let lab = Lab::new();
    let networks = [Network::new()?, Network::new()?];
    let (one, other, listener) = networks[0].visit(connected)?;
    let port = listener.local_addr()?;
    let sockets = vec![OwnedFd::from(one), other.into(), listener.into()];
    let sockets = std::cell::Cell::new(sockets);
    let piped = Piped::prepared(&lab, "sgd", &["--steps", "120"], &|command: &mut Command| {
        sockets.take().into_iter().for_each(|socket| inherit(command, socket));
        networks[0].take(command);
    })?;
    let restores = networks.iter().zip(["1", "2"]).map(|(network, n)| {
        let (path, ready) = (network.path(), format!("ready-{n}"));
        let mut args = vec!["--netns", &path, "--ready-file", &ready];
        args.extend((n == "2").then_some("--on-demand"));
        piped.restore(&lab, &args, &format!("out-{n}"))
    });
    let mut restores = restores.collect::<Result<Vec<_>>>()?;
    for (n, restore) in ["1", "2"].iter().zip(&mut restores) {
        let ready = lab.path(format!("ready-{n}"));
        until("it runs", || ready.exists() || !matches!(restore.try_wait(), Ok(None)))?;
        ensure!(ready.exists(), "{n} has ended: {:?}", restore.wait());
    }
    for (network, n) in networks.iter().zip(["1", "2"]) {
        let pid: u32 = std::fs::read_to_string(lab.path(format!("ready-{n}")))?.trim().parse()?;
        ensure!(network.has(pid)?, "{n} is elsewhere");
        network.visit(|| TcpStream::connect(port)).context("it listens")?;
    }
    ensure!(TcpStream::connect(port).is_err(), "it listens out here");
    piped.pace.allow_all()?;
    for (mut restore, n) in restores.into_iter().zip(["1", "2"]) {
        ensure!(restore.wait()?.success(), "{n}");
        piped.came_out_right(&lab, &format!("out-{n}"))?;
    }
    Ok(())
}

#[test]
fn a_program_whose_processes_are_in_several_networks_is_refused_by_name() -> Result<()> {
    let lab = Lab::new();
    let expected = undisturbed("sgd", &ARGS)?;
    let (network, pace) = (Network::new()?, Pace::new()?);
    pace.allow(4)?;
    let mut command = Command::new("sh");
    command.args(["-c", "unshare -n sleep 100000 & exec \"$0\" \"$@\""]).arg(binary("gpucr"));
    command.args(["run", "--device", "soft", "--"]).arg(binary("workload"));
    command.args(["sgd", ARGS[0], ARGS[1], "--pace", pace.file()]);
    network.take(&mut command);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let pid = program.pid;
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let child: u32 = children.trim().parse().context("one child")?;
    until("the child has its network", || matches!(network.has(child), Ok(false)))?;
    let (process, pid) = (format!("process {child}"), pid.to_string());
    let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
    let said = [&process, "another network namespace", "Nothing was changed"];
    refused(&output, 1, &said)?;
    let output = lab.run(["dump", "--dry-run", "--pid", &pid])?;
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(!output.status.success() && told.contains(&process), "{}", show(&output));
    lab.holds_only(&["log"])?;
    kill(child)?;
    pace.allow_all()?;
    program.result()?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}

/// CRIU tries TCP there if it does not know from before what the kernel can.
#[test]
fn a_network_without_a_loopback_device_is_refused_where_criu_needs_one() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(1)?;
    let mut command = Command::new("unshare");
    command.arg("-n").arg(binary("gpucr")).args(["run", "--device", "soft", "--"]);
    command.arg(binary("workload")).args(["sgd", ARGS[0], ARGS[1], "--pace", pace.file()]);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let pid = program.pid.to_string();
    if Path::new("/run/criu.kdat").exists() {
        lab.dump(&program, &lab.path("image"), &["--leave-running"])?;
    } else {
        let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
        refused(&output, 1, &["loopback", "nsenter", "Nothing was changed"])?;
        let up = finish(
            Command::new("nsenter")
                .args(["--target", &pid, "--net"])
                .args(["ip", "link", "set", "lo", "up"]),
        )?;
        ensure!(up.status.success(), "{}", show(&up));
        lab.dump(&program, &lab.path("image"), &["--leave-running"])?;
    }
    pace.allow_all()?;
    program.result()?;
    Ok(())
}

#[test]
fn a_program_migrates_from_its_network_to_one_that_is_named() -> Result<()> {
    let args = ["--steps", "40"];
    let expected = undisturbed("sgd", &args)?;
    let (lab, old, new) = (Lab::new(), Network::new()?, Network::new()?);
    let pace = Pace::new()?;
    pace.allow(10)?;
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--"]).arg(binary("workload"));
    command.arg("sgd").args(args).args(["--pace", pace.file()]);
    old.take(&mut command);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.destination.args(["--new-pids", "--netns", &new.path()]);
    let sides = pair.run(&mut program)?;
    sides.reports()?;
    let pid = made(&program).context("it runs there")?;
    ensure!(new.has(pid)?, "it is elsewhere");
    program.pid = pid;
    pace.allow_all()?;
    ends_well(&mut program, &expected)
}
