//! Tells the user or tool that waits for it that the program runs.

use std::fs::File;
use std::io::{self, Write};

use super::args::RestoreArgs;
use crate::commands::{io_error, note};
use crate::failure::CliError;
use crate::inherited;
use crate::output::Output;
use crate::say;

/// Where to tell it.
pub(super) struct Ready {
    file: Option<Output>,
    descriptor: Option<File>,
}

impl Ready {
    /// Looks whether that will be possible, before anything is restored.
    ///
    /// # Errors
    /// The descriptor is not open, or the file's directory cannot be written.
    pub(super) fn prepare(args: &RestoreArgs) -> Result<Self, CliError> {
        let descriptor = args.ready_fd.map(inherited::take).transpose();
        let descriptor =
            descriptor.map_err(io_error("the descriptor of --ready-fd cannot be used"))?;
        let prepare = |path: &std::path::PathBuf| {
            let mut file = Output::prepare(path)?;
            // From an earlier restore: it would say too much.
            file.remove_old()?;
            Ok(file)
        };
        let file = args.ready_file.as_ref().map(prepare).transpose();
        let file = file.map_err(io_error("the file of --ready-file cannot be written"))?;
        Ok(Self { file, descriptor: descriptor.map(File::from) })
    }

    /// After the program was restored again with another pid: the file alone can be told.
    pub(super) fn again(args: &RestoreArgs) -> Option<Self> {
        let file = Output::prepare(args.ready_file.as_ref()?);
        let file = file.map_err(|error| lost("the file of --ready-file", error)).ok()?;
        Some(Self { file: Some(file), descriptor: None })
    }

    /// The program runs. That somebody does not hear it is no reason to end it; the command says so at its end.
    pub(super) fn say(self, pid: u32) {
        let line = format!("{pid}\n");
        if let Some(mut descriptor) = self.descriptor
            && let Err(error) = descriptor.write_all(line.as_bytes())
        {
            lost("the descriptor of --ready-fd", error);
        }
        if let Some(file) = self.file
            && let Err(error) = file.write(line.as_bytes())
        {
            lost("the file of --ready-file", error);
        }
    }
}

fn lost(what: &str, error: io::Error) {
    note!("gpucr: the program runs, but that could not be reported: {error}");
    say::lost(what, error);
}
