//! Limits of open files that are too low for the blocks of a program: that is found before anything is done, and
//! said with what to do. What works all the same the workload `many-blocks` shows in `workloads.rs` and others.
//! And TCP sockets and files without their names, which programs of any kind have.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use gpucr_tests::sockets::{connected, inherit, streams, taken};
use gpucr_tests::{Lab, Pace, Program, binary, exists, finish, refused, show, undisturbed, until};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};

/// Runs gpucr by a shell, without the right to raise hard limits, after `first`.
fn limited(lab: &Lab, first: &str, args: &[&str]) -> Result<Output> {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_resource", "sh", "-c"]);
    command.arg(format!("{first} && exec \"$0\" \"$@\"")).arg(binary("gpucr"));
    finish(command.args(args).current_dir(lab.path("")))
}

#[test]
fn a_dump_that_has_too_few_descriptors_is_refused_and_says_what_it_needs() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("many-blocks", &["--steps", "100"])?;
    let pid = program.pid.to_string();
    let dump = ["dump", "--pid", &pid, "-o", "image"];
    let output = limited(&lab, "ulimit -n 90", &dump)?;
    refused(&output, 1, &["100 blocks", "this gpucr is 90", "ulimit -n ", "Nothing was changed"])?;
    // The program's own hard limit, lowered when it has its memory already.
    let lower = format!("prlimit --pid {pid} --nofile=64:64");
    let output = limited(&lab, &lower, &dump)?;
    let said = ["100 blocks", &format!("process {pid} is 64"), "prlimit", "Nothing was changed"];
    refused(&output, 1, &said)?;
    program.wait_for_progress()?;
    lab.holds_only(&["log"])?;
    program.result()?;
    Ok(())
}

#[test]
fn a_restore_that_has_too_few_descriptors_is_refused_and_says_what_it_needs() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("many-blocks", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    let output = limited(&lab, "ulimit -n 90", &["restore", "image"])?;
    refused(&output, 1, &["100 blocks", "this gpucr is 90", "ulimit -n "])?;
    // A soft limit is raised.
    let output = limited(&lab, "ulimit -Sn 90", &["restore", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    program.let_go()?;
    program.wait_for("result ").map(drop)
}

#[test]
fn a_program_with_a_tcp_socket_comes_back_with_it() -> Result<()> {
    let lab = Lab::new();
    let expected = undisturbed("sgd", &["--steps", "8"])?;
    let (listener, pace) = (TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, Pace::new()?);
    pace.allow(4)?;
    let address = listener.local_addr()?;
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--"]).arg(binary("workload"));
    command.args(["sgd", "--steps", "8", "--pace", pace.file()]);
    inherit(&mut command, listener.into());
    // With the command our own copy of the socket goes.
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    ensure!(TcpStream::connect(address).is_err(), "somebody else has the socket");
    let output = lab.run(["restore", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    // Nobody accepts it; that it is taken shows who listens.
    TcpStream::connect(address).context("the restored program listens")?;
    program.let_go()?;
    pace.allow_all()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}

/// The first step of a program that inherits these.
fn with(lab: &Lab, pace: &Pace, inherited: Vec<OwnedFd>) -> Result<Program> {
    pace.allow(1)?;
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--"]).arg(binary("workload"));
    command.args(["sgd", "--steps", "8", "--pace", pace.file()]);
    inherited.into_iter().for_each(|fd| inherit(&mut command, fd));
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    Ok(program)
}

/// Restores in the background what was dumped and has ended.
fn restore(lab: &Lab) -> Result<()> {
    let output = lab.run(["restore", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(())
}

/// Ends what was restored in the background.
fn end(program: &Program) -> Result<()> {
    let pid = Pid::from_raw(program.pid as i32).context("no pid")?;
    rustix::process::kill_process(pid, Signal::KILL)?;
    until("the program is gone", || !exists(program.pid))
}

#[test]
fn a_connection_within_the_program_is_saved_with_what_is_on_its_way() -> Result<()> {
    let (lab, pace) = (Lab::new(), Pace::new()?);
    let expected = undisturbed("sgd", &["--steps", "8"])?;
    let (mut one, other, _) = connected()?;
    let (client, server) = (one.local_addr()?, other.local_addr()?);
    one.write_all(b"before")?;
    let mut program = with(&lab, &pace, vec![one.into(), other.into()])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    program.let_go()?;
    restore(&lab)?;
    let mut ends = streams(program.pid)?;
    ensure!(ends.len() == 2, "{ends:?}");
    ends.sort_by_key(|end| end.local_addr().ok() == Some(server));
    let [one, other] = ends.as_mut_slice() else { anyhow::bail!("not two") };
    ensure!((one.local_addr()?, one.peer_addr()?) == (client, server), "{one:?}");
    one.write_all(b" and after")?;
    let mut heard = [0; 16];
    other.read_exact(&mut heard)?;
    ensure!(&heard == b"before and after", "{heard:?}");
    other.write_all(b"answer")?;
    one.read_exact(&mut heard[..6])?;
    pace.allow_all()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}

#[test]
fn a_connection_that_leads_out_is_refused_by_name_or_closed_where_that_is_wanted() -> Result<()> {
    let (lab, pace) = (Lab::new(), Pace::new()?);
    let (one, other, _) = connected()?;
    let (client, server) = (one.local_addr()?.to_string(), one.peer_addr()?.to_string());
    let mut program = with(&lab, &pace, vec![other.into()])?;
    let pid = program.pid.to_string();
    let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
    let process = format!("process {pid}");
    let said = [&process, "TCP connection", &client, &server, "--tcp-close", "Nothing was changed"];
    refused(&output, 1, &said)?;
    lab.holds_only(&["log"])?;
    lab.dump(&program, &lab.path("image"), &["--tcp-close"])?;
    program.wait()?;
    program.let_go()?;
    restore(&lab)?;
    ensure!(streams(program.pid)?.is_empty(), "it is closed");
    pace.allow_all()?;
    program.wait_for("result ")?;
    Ok(())
}

/// A socket that listens and does not let others have its port.
fn alone() -> Result<TcpListener> {
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))?;
    rustix::net::listen(&socket, 8)?;
    Ok(socket.into())
}

/// The kernel keeps such a connection for a minute, and CRIU cannot listen where it was.
#[test]
fn a_connection_that_was_closed_shortly_before_the_dump_delays_a_restore_and_no_more() -> Result<()>
{
    let (lab, pace) = (Lab::new(), Pace::new()?);
    let listener = alone()?;
    let address = listener.local_addr()?;
    let mut client = TcpStream::connect(address)?;
    // The end that is closed first is the one that is kept.
    drop(listener.accept()?);
    ensure!(client.read(&mut [0])? == 0, "it is closed");
    drop(client);
    let mut program = with(&lab, &pace, vec![listener.into()])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    program.let_go()?;
    restore(&lab)?;
    TcpStream::connect(address).context("the restored program listens")?;
    pace.allow_all()?;
    program.wait_for("result ")?;
    Ok(())
}

/// A file that was opened by a name that is gone, and has another one.
fn renamed(gone: &Path, name: &Path, text: &str) -> Result<File> {
    let mut file = File::options().read(true).write(true).create_new(true).open(gone)?;
    file.write_all(text.as_bytes())?;
    std::fs::hard_link(gone, name)?;
    std::fs::remove_file(gone)?;
    Ok(file)
}

#[test]
fn files_that_have_another_name_than_they_were_opened_by_come_back() -> Result<()> {
    let (lab, pace) = (Lab::new(), Pace::new()?);
    let expected = undisturbed("sgd", &["--steps", "8"])?;
    for directory in ["near", "far"] {
        std::fs::create_dir(lab.path(directory))?;
    }
    // The other name is beside the first, as that of a semaphore, and somewhere else.
    let near = renamed(&lab.path("near/passing"), &lab.path("near/name"), "near")?;
    let far = renamed(&lab.path("near/away"), &lab.path("far/name"), "far")?;
    rustix::fs::ftruncate(&far, 1 << 20)?;
    let again = far.as_fd().try_clone_to_owned()?;
    let mut program = with(&lab, &pace, vec![near.into(), far.into(), again])?;
    lab.dump(&program, &lab.path("image"), &["--leave-running"])?;
    let names = |directory| -> Result<Vec<_>> {
        let entries = std::fs::read_dir(lab.path(directory))?;
        entries.map(|entry| Ok(entry?.file_name())).collect()
    };
    ensure!(names("near")? == ["name"] && names("far")? == ["name"], "links are left");
    program.kill();
    program.let_go()?;
    for _ in 0..2 {
        restore(&lab)?;
        let path = lab.path("near/name");
        let near = taken(program.pid, |name| Path::new(name) == path)?;
        let [near] = near.as_slice() else { anyhow::bail!("{} files", near.len()) };
        let inode = rustix::fs::fstat(near)?.st_ino;
        ensure!(inode == path.metadata()?.ino(), "it is another file");
        let far = taken(program.pid, |name| name.contains("near/away"))?;
        ensure!(far.len() == 2, "{} files", far.len());
        let mut bytes = [1; 5];
        rustix::io::pread(&far[0], &mut bytes, 0)?;
        let stat = rustix::fs::fstat(&far[0])?;
        ensure!(&bytes == b"far\0\0" && stat.st_size == 1 << 20, "{bytes:?}");
        // Two descriptors of one open file stay that.
        ensure!(stat.st_ino == rustix::fs::fstat(&far[1])?.st_ino, "two files");
        ensure!(names("near")? == ["name"], "something is left");
        end(&program)?;
    }
    // The image has what is in it, too.
    std::fs::remove_file(lab.path("near/name"))?;
    let refused = lab.run(["restore", "--detach", "image"])?;
    ensure!(
        !refused.status.success() && show(&refused).contains("near/name"),
        "{}",
        show(&refused)
    );
    let rewound = lab.run(["restore", "--detach", "--files", "rewind", "image"])?;
    ensure!(rewound.status.success(), "{}", show(&rewound));
    ensure!(std::fs::read(lab.path("near/name"))? == b"near", "it is another file");
    pace.allow_all()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}
