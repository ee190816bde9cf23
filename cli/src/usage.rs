//! The command line's help, in which what is between backquotes stays in one piece and can be pasted.

use clap::builder::StyledStr;
use clap::{CommandFactory, Parser};

use crate::args::Args;

/// Stands for a space at which a line does not end: clap ends lines at spaces alone.
const KEPT: char = '\u{a0}';
/// What is longer than so many columns may be parted.
const LONGEST: usize = 45;

/// Reads the command line.
///
/// # Errors
/// Help was asked for, or something is wrong with it; see [`text`].
pub(crate) fn parse() -> Result<Args, clap::Error> {
    // The help is made ready only where it is shown.
    Args::try_parse()
        .map_err(|words| in_one_piece(Args::command()).try_get_matches().err().unwrap_or(words))
}

/// What is to be printed of it, with colours or without.
pub(crate) fn text(words: &clap::Error, coloured: bool) -> String {
    let words = words.render();
    let text = if coloured { words.ansi().to_string() } else { words.to_string() };
    text.replace(KEPT, " ")
}

/// The command with help in which no code is parted.
fn in_one_piece(mut command: clap::Command) -> clap::Command {
    let kept = |text: Option<&StyledStr>| text.map(|text| code_kept(&text.ansi().to_string()));
    let texts = (
        kept(command.get_about()),
        kept(command.get_long_about()),
        kept(command.get_after_help()),
        kept(command.get_after_long_help()),
    );
    let (about, long_about, after, after_long) = texts;
    command = about.into_iter().fold(command, clap::Command::about);
    command = long_about.into_iter().fold(command, clap::Command::long_about);
    command = after.into_iter().fold(command, clap::Command::after_help);
    command = after_long.into_iter().fold(command, clap::Command::after_long_help);
    let argument = |argument: clap::Arg| {
        let (help, long) = (kept(argument.get_help()), kept(argument.get_long_help()));
        let argument = help.into_iter().fold(argument, clap::Arg::help);
        long.into_iter().fold(argument, clap::Arg::long_help)
    };
    command.mut_args(argument).mut_subcommands(in_one_piece)
}

/// A text whose lines do not end within what is between backquotes.
fn code_kept(text: &str) -> String {
    let keep = |(number, piece): (usize, &str)| {
        let is_code = number % 2 == 1 && piece.len() <= LONGEST && !piece.contains('\n');
        if is_code { piece.replace(' ', &KEPT.to_string()) } else { piece.to_owned() }
    };
    text.split('`').enumerate().map(keep).collect::<Vec<_>>().join("`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fold::columns;

    /// Whether all of the pieces of a help that are code are on one line.
    fn is_whole(help: &str) -> bool {
        help.split("\n\n").all(|paragraph| {
            let code = paragraph.split('`').skip(1).step_by(2);
            code.into_iter().all(|code| code.len() > LONGEST || !code.contains('\n'))
        })
    }

    #[test]
    fn lines_of_help_fit_and_no_command_is_parted() {
        let mut found = 0;
        for width in [80, 100, 120] {
            let command = in_one_piece(Args::command()).term_width(width);
            for subcommand in Args::command().get_subcommands() {
                let name = subcommand.get_name();
                for option in ["-h", "--help"] {
                    let asked = command.clone().try_get_matches_from(["gpucr", name, option]);
                    let help = text(&asked.expect_err("help"), false);
                    found += help.matches('`').count();
                    assert!(is_whole(&help), "{name} {option} at {width}:\n{help}");
                    let longest = help.lines().map(columns).max();
                    assert!(longest <= Some(width), "{name} {option} at {width}:\n{help}");
                    assert!(!help.contains(KEPT));
                }
            }
        }
        assert!(found > 0);
        assert!(!is_whole("so `gpucr\n  ps` says"));
    }
}
