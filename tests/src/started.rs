//! Processes that end with the test that started them.

use std::io;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Output};

/// A process that was started. If it runs when this is dropped it is killed, with its descendants.
#[derive(Debug)]
pub struct Started(Option<Child>);

impl Started {
    /// Starts it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        command.spawn().map(|child| Self(Some(child)))
    }

    /// Waits for its end, and gives what it has written to pipes.
    ///
    /// # Errors
    /// It cannot be waited for, or its output cannot be read.
    pub fn wait_with_output(mut self) -> io::Result<Output> {
        self.0.take().expect("taken here only").wait_with_output()
    }
}

impl Deref for Started {
    type Target = Child;

    fn deref(&self) -> &Child {
        self.0.as_ref().expect("taken only where it is consumed")
    }
}

impl DerefMut for Started {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("taken only where it is consumed")
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0
            && matches!(child.try_wait(), Ok(None))
        {
            kill_tree(child.id());
            let _ = child.wait();
        }
    }
}

/// Kills a process and its descendants, these first: what stands in for a program ends with it.
pub(crate) fn kill_tree(root: u32) {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let path = format!("/proc/{0}/task/{0}/children", found[next]);
        let children = std::fs::read_to_string(path).unwrap_or_default();
        found.extend(children.split_whitespace().filter_map(|pid| pid.parse::<u32>().ok()));
        next += 1;
    }
    for pid in found.into_iter().rev() {
        // SAFETY: sends a signal; a pid that is gone by now is an error that changes nothing,
        // and pids are not used again so quickly.
        unsafe { libc::kill(pid as i32, libc::SIGKILL) };
    }
}

/// Whether there is a process of that pid whose standard output goes to that file.
pub(crate) fn writes_to(pid: u32, log: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let number = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    // By another name, where the process has mounts of its own.
    let file = number(Path::new(&format!("/proc/{pid}/fd/1")));
    file.is_some() && file == number(log)
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn a_process_ends_with_its_guard_and_so_do_its_children() {
        let mut shell = Command::new("sh");
        shell.args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped());
        let mut shell = Started::spawn(&mut shell).expect("it starts");
        let mut line = String::new();
        let out = shell.stdout.take().expect("piped");
        io::BufRead::read_line(&mut io::BufReader::new(out), &mut line).expect("a line");
        let (own, child) = (shell.id(), line.trim().parse().expect("a pid"));
        assert!(crate::exists(own) && crate::exists(child));
        drop(shell);
        assert!(!crate::exists(own));
        crate::until("its child is gone", || {
            let stat = std::fs::read_to_string(format!("/proc/{child}/stat"));
            stat.map_or(true, |stat| stat.contains(") Z "))
        })
        .expect("it ends");
    }
}
