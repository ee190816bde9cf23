//! What the subcommands share: running commands, finding programs and folders, printing.

use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace's root")
}

/// A `cargo` command in the workspace's root.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// What `cargo metadata` says about the workspace.
///
/// # Errors
/// cargo cannot be started, or it finds no workspace that it can read.
pub(crate) fn metadata() -> Result<&'static serde_json::Value> {
    static METADATA: OnceLock<serde_json::Value> = OnceLock::new();
    if let Some(known) = METADATA.get() {
        return Ok(known);
    }
    let text = capture(cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
    let value = serde_json::from_str(&text).context("cargo metadata printed no JSON")?;
    Ok(METADATA.get_or_init(|| value))
}

/// The folder that cargo builds into.
///
/// # Errors
/// As for [`metadata`].
pub(crate) fn target_dir() -> Result<PathBuf> {
    let dir = metadata()?["target_directory"].as_str();
    Ok(dir.context("cargo metadata names no target_directory")?.into())
}

/// The version of gpucr.
///
/// # Errors
/// As for [`metadata`]; or there is no package `gpucr`.
pub(crate) fn version() -> Result<String> {
    let packages = metadata()?["packages"].as_array();
    packages
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "gpucr")
        .and_then(|package| package["version"].as_str())
        .map(str::to_owned)
        .context("cargo metadata names no package gpucr")
}

/// Runs a command with the terminal's input and output.
///
/// # Errors
/// The command cannot be started, or it failed.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = shown(command);
    let status = command.status().with_context(|| format!("cannot start `{name}`"))?;
    if !status.success() {
        bail!("`{name}` failed ({})", ended(status));
    }
    Ok(())
}

/// Runs a command quietly and returns what it wrote to its standard output.
///
/// # Errors
/// The command cannot be started, or it failed; the error then holds the end of its output.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let name = shown(command);
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start `{name}`"))?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        let said = tail(&format!("{stdout}{stderr}"), 25);
        bail!("`{name}` failed ({}):\n{said}", ended(output.status));
    }
    Ok(stdout)
}

/// Whether a command can be started and succeeds; its output is dropped.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    let command = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Where a program lies on PATH. The system folders count even if PATH lacks them, as in a `su`
/// shell.
pub(crate) fn on_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|file| is_executable(file))
}

/// Whether a path is a file that may be executed by somebody.
pub(crate) fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// The last lines of a text, indented.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = &all[all.len().saturating_sub(lines)..];
    last.iter().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}

/// A command as a person would type it.
fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(OsStr::new("?"));
    let words = std::iter::once(program).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// Keeps files that this process was started with to itself, except standard input, output and
/// error: a program that inherits a pipe or socket of the process that started us (a CI runner, an editor)
/// cannot be dumped. Where the kernel cannot do this (before 5.11) it stays as it is.
pub(crate) fn keep_inherited_files() {
    let (first, last, flags) = (3 as libc::c_uint, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
    // SAFETY: close_range takes integers only, and with this flag it closes nothing: descriptors
    // in use stay valid, they are merely not handed on at the next exec.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
}

/// How a process ended, in words.
pub(crate) fn ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// LD_LIBRARY_PATH without the folders that `cargo run` puts in front of it: a program that is to
/// be restored later must not depend on them. `None` where nothing is left.
///
/// # Errors
/// As for [`metadata`]; or a folder has a name that cannot be in such a list.
pub(crate) fn library_path() -> Result<Option<OsString>> {
    let Some(path) = std::env::var_os("LD_LIBRARY_PATH") else { return Ok(None) };
    if std::env::var_os("CARGO").is_none() {
        return Ok(Some(path));
    }
    let target = target_dir()?;
    let sysroot = capture(Command::new("rustc").args(["--print", "sysroot"])).unwrap_or_default();
    let sysroot = Some(sysroot.trim()).filter(|dir| !dir.is_empty());
    let kept: Vec<PathBuf> = std::env::split_paths(&path)
        .filter(|dir| !dir.as_os_str().is_empty() && !dir.starts_with(&target))
        .filter(|dir| sysroot.is_none_or(|sysroot| !dir.starts_with(sysroot)))
        .collect();
    Ok((!kept.is_empty()).then(|| std::env::join_paths(kept)).transpose()?)
}

/// Prints one line: a short name in a column, then what was done or found.
pub(crate) fn say(name: &str, text: impl std::fmt::Display) {
    // Nobody listens any more if this fails; the task itself goes on.
    let _ = writeln!(std::io::stdout(), "{} {text}", bold(&format!("{name:<12}")));
}

/// Prints a headline between two steps.
pub(crate) fn headline(text: &str) {
    let _ = writeln!(std::io::stdout(), "\n{}", bold(text));
}

/// Whether standard output is a terminal that wants colours.
pub(crate) fn fancy() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    !dumb && std::env::var_os("NO_COLOR").is_none() && std::io::stdout().is_terminal()
}

/// The text in bold on a terminal, else as it is.
pub(crate) fn bold(text: &str) -> String {
    styled("1", text)
}

/// The text in a terminal style (an SGR parameter such as `32` for green), else as it is.
pub(crate) fn styled(style: &str, text: &str) -> String {
    if fancy() { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
}
