//! Lines that are no longer than a terminal is wide. A terminal folds longer ones by itself, but inside of words.

use std::borrow::Cow;
use std::os::fd::AsFd;

use textwrap::core::Word;
use textwrap::{Options, WordSeparator, WordSplitter};

/// In fewer columns words make no lines that anybody wants to read.
pub(crate) const NARROWEST: usize = 20;

/// How many columns a terminal has; none if this is no terminal, or one that does not tell.
pub(crate) fn width(stream: impl AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    (size.ws_col > 0).then_some(size.ws_col.into())
}

/// A line of prose, with line ends between its words so that it fits into a terminal of this width. What follows the
/// first of them begins `indent` columns from the left. So may what is before it, behind a label: it is not parted from
/// that. What is between backquotes stays in one piece, and can be pasted. Colours take no columns.
pub(crate) fn folded(line: &str, width: Option<usize>, indent: usize) -> String {
    match width.filter(|width| *width >= indent + NARROWEST) {
        Some(width) => {
            let (label, text) = line.split_at(label(line, indent));
            let options = options(width, words).break_words(false).initial_indent(label);
            let indent = " ".repeat(indent);
            textwrap::wrap(text, options.subsequent_indent(&indent)).join("\n")
        }
        None => line.to_owned(),
    }
}

/// The lines of a cell that has this many columns, folded between words, and in paths; none if these are too few.
pub(crate) fn cell(text: &str, width: usize) -> Option<Vec<String>> {
    let parts = || textwrap::wrap(text, options(width, steps)).into_iter().map(Cow::into_owned);
    (width >= NARROWEST).then(|| parts().collect())
}

/// How many bytes of a line are a label, behind which the text begins at this column.
fn label(line: &str, column: usize) -> usize {
    let is_label = |at: &usize| line[..*at].ends_with(' ') && columns(&line[..*at]) == column;
    line.char_indices().map(|(at, _)| at).find(is_label).unwrap_or(0)
}

/// How many columns a text takes.
pub(crate) fn columns(text: &str) -> usize {
    textwrap::core::display_width(text)
}

/// The beginning of a text, as much as fits into this many columns; the last of them is an ellipsis if that is not all.
pub(crate) fn cut(text: &str, width: usize) -> String {
    if columns(text) <= width {
        return text.to_owned();
    }
    let mut taken = 0;
    let fits = |c: &char| {
        taken += columns(c.encode_utf8(&mut [0; 4]));
        taken < width
    };
    text.chars().take_while(fits).chain(['…']).collect()
}

/// What finds the words of a line.
type Find = fn(&str) -> Box<dyn Iterator<Item = Word<'_>> + '_>;

fn options(width: usize, find: Find) -> Options<'static> {
    // An option such as `--new-pids` is one word.
    let whole = WordSplitter::NoHyphenation;
    Options::new(width).word_separator(WordSeparator::Custom(find)).word_splitter(whole)
}

/// The words of prose.
fn words(line: &str) -> Box<dyn Iterator<Item = Word<'_>> + '_> {
    let mut is_quoted = false;
    split(line, move |before, at| {
        if before == '`' {
            // One that is alone is no quote.
            is_quoted = !is_quoted && line[at..].contains('`');
        }
        before == ' ' && !is_quoted && !line[at..].starts_with(' ')
    })
}

/// The words of a text, and the steps of paths in it.
fn steps(line: &str) -> Box<dyn Iterator<Item = Word<'_>> + '_> {
    split(line, |before, at| before == '/' || (before == ' ' && !line[at..].starts_with(' ')))
}

/// The pieces of a line, which ends one where `ends` says so of a character and the place behind it.
fn split<'l>(
    line: &'l str,
    mut ends: impl FnMut(char, usize) -> bool,
) -> Box<dyn Iterator<Item = Word<'l>> + 'l> {
    let (mut pieces, mut begin) = (Vec::new(), 0);
    for (at, c) in line.char_indices() {
        let behind = at + c.len_utf8();
        if ends(c, behind) {
            pieces.push(Word::from(&line[begin..behind]));
            begin = behind;
        }
    }
    if begin < line.len() {
        pieces.push(Word::from(&line[begin..]));
    }
    Box::new(pieces.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_folded_between_words() {
        let line =
            "label  some words and `a command --of --several words` that stay, or --not-so-long";
        let shown = folded(line, Some(40), 7);
        let lines = [
            "label  some words and",
            "       `a command --of --several words`",
            "       that stay, or --not-so-long",
        ];
        assert_eq!(shown, lines.join("\n"));
        assert_eq!(folded(line, None, 7), line);
        assert_eq!(folded(line, Some(26), 7), line, "too narrow to be read");
        assert_eq!(folded("short", Some(40), 7), "short");
    }

    #[test]
    fn what_has_no_place_to_fold_stays_whole() {
        let path = format!("/{}: 1 MiB", "long/".repeat(20));
        assert_eq!(folded(&path, Some(40), 2), path.replacen(": ", ":\n  ", 1));
        let labelled = format!("label  {path}");
        assert_eq!(folded(&labelled, Some(40), 7), labelled.replacen(": ", ":\n       ", 1));
        assert_eq!(folded("a ` b c d e f g h i j k", Some(22), 2), "a ` b c d e f g h i j\n  k");
        assert_eq!(folded("  a b c d e f g h i j k", Some(22), 2), "  a b c d e f g h i j\n  k");
    }

    #[test]
    fn colours_take_no_columns() {
        let line = "\x1b[32mok\x1b[0m  one two three four";
        assert_eq!(folded(line, Some(24), 4), "\x1b[32mok\x1b[0m  one two three four");
        assert_eq!(folded(line, Some(25), 4), line);
        assert_eq!(folded("ok  two three four five", Some(24), 4), "ok  two three four five");
        assert_eq!(
            folded("\x1b[32mok\x1b[0m  one two three four five", Some(25), 4),
            "\x1b[32mok\x1b[0m  one two three four\n    five"
        );
    }

    #[test]
    fn cells_are_folded_in_paths_too() {
        let path = "/usr/lib/x86_64-linux-gnu/some/library.so.1";
        assert_eq!(cell(path, 30).unwrap(), ["/usr/lib/x86_64-linux-gnu/", "some/library.so.1"]);
        assert_eq!(cell(&"x".repeat(25), 20).unwrap(), ["x".repeat(20), "x".repeat(5)]);
        assert_eq!(cell(path, 19), None);
        assert_eq!(cell("", 30).unwrap(), [""]);
    }

    #[test]
    fn what_is_cut_ends_with_an_ellipsis() {
        assert_eq!((cut("abcdef", 6), cut("abcdef", 5)), ("abcdef".into(), "abcd…".into()));
        assert_eq!(cut("火火火", 5), "火火…");
        assert_eq!(columns(&cut("火火火", 4)), 3);
    }
}
