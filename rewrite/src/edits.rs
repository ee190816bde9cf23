//! Changes of a text.

use std::ops::Range;

/// A part of a text with other words in some places of it, which do not overlap. Of those at one place the first comes first.
pub(crate) fn edited(
    text: &str,
    part: Range<usize>,
    mut edits: Vec<(Range<usize>, String)>,
) -> String {
    edits.sort_by_key(|(at, _)| at.start);
    let mut written = String::with_capacity(part.len() + 2048);
    let mut done = part.start;
    for (at, instead) in edits {
        written.push_str(&text[done..at.start]);
        written.push_str(&instead);
        done = at.end;
    }
    written.push_str(&text[done..part.end]);
    written
}
