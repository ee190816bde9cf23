//! Sockets that programs are given, and those that they have.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Lets a command inherit a copy of this descriptor.
pub fn inherit(command: &mut Command, socket: OwnedFd) {
    // SAFETY: dup is async-signal-safe; the descriptor lives as long as the closure that has it.
    unsafe {
        command.pre_exec(move || {
            std::mem::forget(rustix::io::dup(&socket)?);
            Ok(())
        });
    }
}

/// Copies of what a process has open under such names.
///
/// # Errors
/// There is no such process, or it changes what it has open meanwhile.
pub fn taken(pid: u32, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<OwnedFd>> {
    let process = Pid::from_raw(pid as i32).context("no pid")?;
    let process = pidfd_open(process, PidfdFlags::empty())?;
    let mut found = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        let target = std::fs::read_link(&path)?;
        if is_wanted(&target.to_string_lossy()) {
            let number = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            let number = number.context("no number")?;
            found.push(pidfd_getfd(&process, number, PidfdGetfdFlags::empty())?);
        }
    }
    Ok(found)
}

/// The streams of TCP that a process has.
///
/// # Errors
/// There is no such process, or it changes what it has open meanwhile.
pub fn streams(pid: u32) -> Result<Vec<TcpStream>> {
    let sockets = taken(pid, |name| name.starts_with("socket:"))?;
    let streams = sockets.into_iter().map(TcpStream::from);
    let streams: Vec<TcpStream> = streams.filter(|s| s.peer_addr().is_ok()).collect();
    for stream in &streams {
        stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    }
    Ok(streams)
}

/// Both ends of a connection of TCP, the one that has asked for it first, and what listens there.
///
/// # Errors
/// There is no loopback device.
pub fn connected() -> std::io::Result<(TcpStream, TcpStream, TcpListener)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let one = TcpStream::connect(listener.local_addr()?)?;
    let other = listener.accept()?.0;
    Ok((one, other, listener))
}
