//! What a gpucr that this one has started says by its `--events`.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::pipe::PipeFlags;
use serde_json::Value;

/// The reading end of its pipe.
pub(super) struct EventPipe {
    pipe: File,
    /// The beginning of a line.
    line: Vec<u8>,
}

impl EventPipe {
    /// Has a command, which is to be started now, say its events. The descriptor is the command's, and has to be open until
    /// that has started.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn of(command: &mut Command) -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let fd = theirs.as_raw_fd();
        command.args(["--events", &format!("/dev/fd/{fd}")]);
        // SAFETY: fcntl is async-signal-safe; it lets the descriptor through to the command.
        unsafe {
            command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            });
        }
        Ok((Self { pipe: ours.into(), line: Vec::new() }, theirs))
    }

    /// What it has said since it was listened to last; all of it, if it has ended.
    pub(super) fn listen(&mut self) -> Vec<Value> {
        let mut bytes = [0; 4096];
        loop {
            match self.pipe.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => self.line.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // There is no more for now.
                Err(_) => break,
            }
        }
        let Some(end) = self.line.iter().rposition(|byte| *byte == b'\n') else {
            return Vec::new();
        };
        let lines: Vec<u8> = self.line.drain(..=end).collect();
        let lines = lines.split(|byte| *byte == b'\n');
        lines.filter_map(|line| serde_json::from_slice(line).ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_heard_in_pieces() {
        let mut command = Command::new("sh");
        let script =
            r#"printf '{"event":"a"}\nno JSON\n{"ev' > $2; read x; printf 'ent":"b"}\n' > $2"#;
        command.args(["-c", script, "sh"]).stdin(std::process::Stdio::piped());
        let (mut pipe, theirs) = EventPipe::of(&mut command).unwrap();
        let mut child = command.spawn().unwrap();
        drop(theirs);
        let mut heard = Vec::new();
        while heard.is_empty() {
            heard = pipe.listen();
        }
        assert_eq!(heard, [serde_json::json!({"event": "a"})]);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(pipe.listen(), [serde_json::json!({"event": "b"})]);
        assert!(pipe.listen().is_empty());
    }
}
