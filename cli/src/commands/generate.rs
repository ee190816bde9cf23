//! `gpucr completions`, and the hidden `gpucr generate-man`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;

use crate::commands::{Outcome, io_error};
use crate::say;

/// Print a completion script for a shell
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: Shell,
}

/// Write the manual pages
#[derive(clap::Args)]
pub(crate) struct GenerateManArgs {
    /// Where to
    pub(crate) dir: PathBuf,
}

/// Prints the script for the command line of `gpucr`.
pub(crate) fn completions(args: &CompletionsArgs, mut gpucr: Command) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut gpucr, "gpucr", &mut script);
    let script = with_pids(args.shell, &String::from_utf8_lossy(&script));
    say::text(script.trim_end_matches('\n'));
    Ok(ExitCode::SUCCESS)
}

/// Has `-t` and `--pid` completed by the pids that `gpucr ps` lists. clap's scripts offer files there: it has no hint for
/// pids. Those of `gpucr extract --pid`, which has no `-t`, are an image's.
fn with_pids(shell: Shell, script: &str) -> String {
    const PS: &str = "gpucr ps --format '{{.pid}}' 2>/dev/null";
    match shell {
        Shell::Bash => {
            let files = "COMPREPLY=($(compgen -f \"${cur}\"))\n                    return 0\n                    ;;\n";
            let case = |option: &str, then: &str| {
                format!("                {option})\n                    {then}")
            };
            let both = |then: &str| format!("{}{}", case("--pid", then), case("-t", then));
            let pids = files.replace("-f \"${cur}\"", &format!("-W \"$({PS})\" -- \"${{cur}}\""));
            script.replace(&both(files), &both(&pids))
        }
        Shell::Zsh => {
            let complete = format!(":PID:( ${{(f)\"$({})\"}} )", PS.replace('\'', "'\\''"));
            let line =
                |line: &str| match line.starts_with("'-t+[") || line.starts_with("'--pid=[Root") {
                    true => line.replace(":PID:_default", &complete),
                    false => line.to_owned(),
                };
            script.lines().map(|text| line(text) + "\n").collect()
        }
        Shell::Fish => {
            let line = |line: &str| match line.contains(" -s t -l pid ") {
                true => format!("{line} -f -a \"({PS})\"\n"),
                false => format!("{line}\n"),
            };
            script.lines().map(line).collect()
        }
        _ => script.to_owned(),
    }
}

/// Writes gpucr.1 and a page for each subcommand.
pub(crate) fn man(args: &GenerateManArgs, gpucr: Command) -> Outcome {
    clap_mangen::generate_to(gpucr.disable_help_subcommand(true), &args.dir)
        .map_err(io_error(&format!("cannot write to {}", args.dir.display())))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn pids_are_completed_wherever_there_is_one() {
        let mut gpucr = crate::args::Args::command();
        let taking =
            |command: &&Command| command.get_arguments().any(|arg| arg.get_short() == Some('t'));
        let commands = gpucr.get_subcommands().filter(taking).count();
        assert!(commands >= 3);
        for (shell, each) in [(Shell::Bash, 2), (Shell::Zsh, 2), (Shell::Fish, 1)] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut gpucr, "gpucr", &mut script);
            let script = with_pids(shell, &String::from_utf8(script).unwrap());
            assert_eq!(script.matches("(gpucr ps --format").count(), each * commands, "{shell}");
        }
    }
}
