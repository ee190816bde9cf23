//! Tells whoever waits for it that the program runs.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::args::RestoreArgs;
use crate::commands::io_error;
use crate::failure::CliError;

/// Where to tell it.
pub(super) struct Ready {
    file: Option<PathBuf>,
    descriptor: Option<File>,
}

impl Ready {
    /// Looks whether that will be possible, before anything is restored.
    ///
    /// # Errors
    /// The descriptor is not open, or the file's directory cannot be written.
    pub(super) fn prepare(args: &RestoreArgs) -> Result<Self, CliError> {
        let descriptor = args.ready_fd.map(descriptor).transpose();
        let descriptor =
            descriptor.map_err(io_error("the descriptor of --ready-fd cannot be used"))?;
        if let Some(file) = &args.ready_file {
            // From an earlier restore: it would say too much.
            match std::fs::remove_file(file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                other => other,
            }
            .and_then(|()| File::create(unfinished(file)).map(drop))
            .map_err(io_error("the file of --ready-file cannot be written"))?;
        }
        Ok(Self { file: args.ready_file.clone(), descriptor })
    }

    /// After the program was restored again with another pid: the file alone can be told.
    pub(super) fn again(args: &RestoreArgs) -> Option<Self> {
        Some(Self { file: Some(args.ready_file.clone()?), descriptor: None })
    }

    /// The program runs. That somebody does not hear it is no reason to end it.
    pub(super) fn say(mut self, pid: u32) {
        let line = format!("{pid}\n");
        if let Some(mut descriptor) = self.descriptor.take() {
            warn(descriptor.write_all(line.as_bytes()));
        }
        if let Some(file) = self.file.take() {
            let temporary = unfinished(&file);
            warn(
                std::fs::write(&temporary, line).and_then(|()| std::fs::rename(&temporary, &file)),
            );
        }
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = std::fs::remove_file(unfinished(file));
        }
    }
}

fn warn(result: io::Result<()>) {
    if let Err(error) = result {
        eprintln!("gpucr: the program runs, but nobody could be told: {error}");
    }
}

fn unfinished(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".unfinished");
    name.into()
}

fn descriptor(number: i32) -> io::Result<File> {
    // SAFETY: only looks whether it is open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // Nobody whom gpucr starts is to keep it open.
    // SAFETY: as above.
    unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
    // SAFETY: the user has given it to gpucr for this, and nothing else here knows it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(number) }))
}
