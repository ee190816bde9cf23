//! `--stdout FILE` and `--stderr FILE`: where outputs of a program go that were pipes.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpucr_core::restore::{OutputFiles, Outputs};

use crate::commands::{io_error, note_folded};
use crate::failure::CliError;

/// Opens the files, each by `open`.
///
/// # Errors
/// One cannot be opened; the error has its option.
pub(crate) fn open(
    files: &OutputFiles,
    open: fn(&Path) -> io::Result<File>,
) -> Result<Outputs, CliError> {
    let file = |path: &Option<PathBuf>, option: &str| -> Result<Option<Arc<File>>, CliError> {
        let file = path.as_deref().map(open).transpose();
        let what = format!("the file of {option} cannot be written");
        Ok(file.map_err(io_error(&what))?.map(Arc::new))
    };
    let stdout = file(&files.stdout, "--stdout")?;
    // One file has one end, whoever writes to it.
    let stderr = match &files.stderr {
        same if *same == files.stdout => stdout.clone(),
        other => file(other, "--stderr")?,
    };
    Ok(Outputs { stdout, stderr, ..Outputs::default() })
}

/// Tells of outputs that nobody reads, and how somebody could: by options of this `command`.
pub(crate) fn say_unread(unread: &[impl AsRef<str>], command: &str) {
    if unread.is_empty() {
        return;
    }
    let streams: Vec<&str> = unread.iter().map(AsRef::as_ref).collect();
    let were = if streams.len() == 1 { "was a pipe, and goes" } else { "were pipes, and go" };
    let (options, streams) = (options(&streams), streams.join(" and "));
    note_folded!(
        "The program's {streams} {were} to /dev/null now: to keep it, {command} with {options}."
    );
}

/// The options that name files for these outputs.
pub(crate) fn options(outputs: &[&str]) -> String {
    let options: Vec<String> = outputs.iter().map(|output| format!("--{output} FILE")).collect();
    options.join(" ")
}
