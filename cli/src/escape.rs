//! Text of any origin, made fit to be shown by a terminal or to be typed into a shell.

use std::borrow::Cow;

/// Characters of a line of an error; a path that a program really uses is rarely a third of it.
const LONGEST: usize = 1000;

/// What a terminal may take for more than text: control characters, and those that turn the direction of
/// writing or end a line.
fn is_special(c: char) -> bool {
    let turns = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}');
    let isolates = matches!(c, '\u{2066}'..='\u{2069}');
    c.is_control() || turns || isolates || matches!(c, '\u{2028}' | '\u{2029}')
}

fn replaced<'a>(text: &'a str, shown: impl Fn(char) -> Option<String>) -> Cow<'a, str> {
    if !text.contains(is_special) {
        return text.into();
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match Some(c).filter(|c| is_special(*c)).and_then(&shown) {
            Some(shown) => safe += &shown,
            None => safe.push(c),
        }
    }
    safe.into()
}

/// A text of one line in which every special character is shown: `\n`, `\u{1b}`.
pub(crate) fn escaped(text: &str) -> Cow<'_, str> {
    replaced(text, |c| Some(c.escape_default().to_string()))
}

/// Escapes a text of several lines.
pub(crate) fn escaped_lines(text: &str) -> Cow<'_, str> {
    replaced(text, |c| (c != '\n').then(|| c.escape_default().to_string()))
}

/// Escapes an error, whose own lists have lines that begin with two spaces. A line end before anything else
/// was in a name, and would make it look like words of gpucr's. Of lines that only a name makes so long the middle is
/// left out: the reader still has to find the rest on the screen.
pub(crate) fn escaped_list(text: &str) -> String {
    let lines: Vec<_> = text.split("\n  ").map(|line| shortened(escaped(line))).collect();
    lines.join("\n  ")
}

/// A line without its middle, if it has more than [`LONGEST`] characters.
fn shortened(line: Cow<'_, str>) -> Cow<'_, str> {
    let length = line.chars().count();
    if length <= LONGEST {
        return line;
    }
    let at = |character: usize| line.char_indices().nth(character).map_or(line.len(), |(at, _)| at);
    let (begin, end) = (at(LONGEST * 3 / 4), at(length - LONGEST / 4));
    let left_out = length - LONGEST * 3 / 4 - LONGEST / 4;
    format!("{} [… {left_out} characters …] {}", &line[..begin], &line[end..]).into()
}

/// JSON in which every special character is written as JSON can: `\u001b`. Outside of its strings it has none but
/// line ends.
pub(crate) fn escaped_json(json: &str) -> Cow<'_, str> {
    replaced(json, |c| (c != '\n').then(|| format!("\\u{:04x}", u32::from(c))))
}

/// A path as a word of a shell's command line, whatever is in it.
pub(crate) fn shell_word(path: &std::path::Path) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    let word = path.display().to_string();
    if path.to_str().is_some() && !word.is_empty() && word.chars().all(plain) {
        return word;
    }
    if path.to_str().is_some() && !word.contains(is_special) {
        return format!("'{}'", word.replace('\'', r"'\''"));
    }
    let bytes = std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()).iter();
    let shown = bytes.map(|byte| match byte {
        b'\'' | b'\\' => format!("\\{}", char::from(*byte)),
        b' '..=b'~' => char::from(*byte).to_string(),
        byte => format!("\\{byte:03o}"),
    });
    format!("$'{}'", shown.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_special_character_is_left() {
        let evil = "a\x1b]0;x\x07\r\u{9b}2J\u{85}\x7f\u{202e}\u{2028}é\tz\n  b\nc";
        let is_plain = |text: &str| !text.contains(|c| c != '\n' && is_special(c));
        let one = escaped(evil);
        assert_eq!(one, r"a\u{1b}]0;x\u{7}\r\u{9b}2J\u{85}\u{7f}\u{202e}\u{2028}é\tz\n  b\nc");
        assert!(is_plain(&escaped_lines(evil)) && escaped_lines(evil).lines().count() == 3);
        let list = escaped_list(evil);
        assert!(is_plain(&list) && list.ends_with("z\n  b\\nc"), "{list}");
        let json = serde_json::json!({"name": evil}).to_string();
        let safe = escaped_json(&json);
        assert!(is_plain(&safe), "{safe}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).unwrap()["name"], evil);
        assert!(matches!(escaped("plain ü"), Cow::Borrowed("plain ü")));
    }

    #[test]
    fn the_middle_of_a_long_name_is_left_out() {
        for (text, length) in [("a", 1000), ("é", 1000)] {
            let text = text.repeat(length);
            assert_eq!(escaped_list(&text), text);
        }
        let long =
            format!("cannot open {}, which is too long:\n  {}", "é".repeat(5000), "b".repeat(20));
        let shown = escaped_list(&long);
        let (first, second) = shown.split_once("\n  ").unwrap();
        assert_eq!(second, "b".repeat(20));
        assert!(first.starts_with("cannot open éé") && first.ends_with("éé, which is too long:"));
        assert!(first.contains("é [… 4032 characters …] é"), "{first}");
    }

    #[test]
    fn a_path_is_one_word_of_a_shell() {
        use std::os::unix::ffi::OsStrExt;
        for (path, word) in [
            (&b"/var/log/a-1.log"[..], "/var/log/a-1.log"),
            (b"/a b;rm -rf x", "'/a b;rm -rf x'"),
            (b"/it's", r"'/it'\''s'"),
            (b"/a\nb\x1b'\\", r"$'/a\012b\033\'\\'"),
            (b"/\xff", r"$'/\377'"),
            (b"", "''"),
        ] {
            let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path));
            assert_eq!(shell_word(path), word);
            let said = std::process::Command::new("bash")
                .args(["-c", &format!("printf %s {word}")])
                .output()
                .unwrap();
            assert_eq!(said.stdout, path.as_os_str().as_bytes());
        }
    }
}
