//! Which files of a crate use which, by their text, and which of them use each other in circles. Tests of several
//! crates include this file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Texts by the names of their modules, without comments and tests; the root has an empty name.
pub(crate) type Sources = BTreeMap<String, String>;

/// What is used by what.
pub(crate) type Uses = BTreeMap<String, BTreeSet<String>>;

pub(crate) fn read(dir: &Path, name: &str, sources: &mut Sources) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        let inner = if name.is_empty() { stem.clone() } else { format!("{name}::{stem}") };
        // Tests in files of their own.
        if stem == "tests" || stem.ends_with("_tests") {
            continue;
        } else if path.is_dir() {
            read(&path, &inner, sources);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let is_head = stem == "mod" || stem == "lib";
            let module = if is_head { name.to_owned() } else { inner };
            sources.insert(module, code(&std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// A text without comments and tests.
fn code(text: &str) -> String {
    // Not of those in files of their own.
    let begins = |at: &usize| {
        let line = text[*at..].lines().nth(1).unwrap_or_default();
        line.contains("mod ") && line.ends_with('{')
    };
    let mut tests = text.match_indices("#[cfg(test)]\n").map(|(at, _)| at);
    let text = &text[..tests.find(begins).unwrap_or(text.len())];
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// All paths at the beginning of a text: one, or those of a list in braces.
fn paths(text: &str) -> Vec<Vec<String>> {
    let text = text.trim_start();
    if let Some(list) = text.strip_prefix('{') {
        let mut depth = 0;
        let mut found = paths(list);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => found.extend(paths(&list[at + 1..])),
                _ => {}
            }
        }
        return found;
    }
    let end = text.find(|c| !is_name(c)).unwrap_or(text.len());
    let head = text[..end].to_owned();
    let rest = text[end..].strip_prefix("::").map(paths).unwrap_or_default();
    if rest.is_empty() {
        return if head.is_empty() { Vec::new() } else { vec![vec![head]] };
    }
    rest.into_iter().map(|path| [vec![head.clone()], path].concat()).collect()
}

/// The parts of a text that begin with a word.
fn behind<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    let found = text.match_indices(word).map(|(at, _)| at);
    found.filter(|at| !text[..*at].ends_with(is_name)).map(|at| &text[at..]).collect()
}

/// The module that a path of a file leads to, and what it names there.
fn module(sources: &Sources, file: &str, path: &[String]) -> Option<(String, Option<String>)> {
    let mut at: Vec<&str> = file.split("::").filter(|name| !name.is_empty()).collect();
    let mut path = path.iter().map(String::as_str).peekable();
    match path.peek() {
        Some(&"crate") => {
            at.clear();
            path.next();
        }
        Some(&"super") => {
            while path.next_if_eq(&"super").is_some() {
                at.pop()?;
            }
        }
        _ => {}
    }
    while let Some(name) = path.peek() {
        let inner = [at.clone(), vec![name]].concat();
        if !sources.contains_key(&inner.join("::")) {
            break;
        }
        at = inner;
        path.next();
    }
    Some((at.join("::"), path.next().map(str::to_owned)))
}

/// Where the names are from that a file passes on.
fn passed_on(sources: &Sources) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    for (file, text) in sources {
        for mark in ["pub use ", "pub(crate) use ", "pub(super) use "] {
            for text in behind(text, mark) {
                for path in paths(&text[mark.len()..]) {
                    if let Some((from, Some(name))) = module(sources, file, &path)
                        && from != *file
                    {
                        found.insert((file.clone(), name), from);
                    }
                }
            }
        }
    }
    found
}

pub(crate) fn uses(sources: &Sources) -> Uses {
    let passed_on = passed_on(sources);
    let mut found = Uses::new();
    for (file, text) in sources {
        let inner = if file.is_empty() { String::new() } else { format!("{file}::") };
        let children = sources.keys().filter_map(|other| other.strip_prefix(&inner));
        let children = children.filter(|name| !name.is_empty() && !name.contains("::"));
        let mut marks = vec!["crate::".to_owned(), "super::".to_owned()];
        marks.extend(children.map(|name| format!("{name}::")));
        let used = found.entry(file.clone()).or_default();
        for mark in &marks {
            let places = text.match_indices(mark.as_str()).map(|(at, _)| at);
            // Not in the middle of a path.
            let places = places.filter(|at| {
                !text[..*at].ends_with([':', '_', '$'])
                    && !text[..*at].ends_with(char::is_alphanumeric)
            });
            for path in places.flat_map(|at| paths(&text[at..])) {
                let Some((mut other, mut name)) = module(sources, file, &path) else { continue };
                while let Some(from) =
                    name.clone().and_then(|name| passed_on.get(&(other.clone(), name)))
                {
                    other.clone_from(from);
                    // It has its name there too.
                    name =
                        name.filter(|name| passed_on.contains_key(&(other.clone(), name.clone())));
                }
                if other != *file && !other.is_empty() {
                    used.insert(other);
                }
            }
        }
    }
    found
}

/// Sets of files that use each other, on whatever way.
pub(crate) fn circles(uses: &Uses) -> BTreeSet<Vec<String>> {
    let reached = |file: &str| {
        let mut reached = BTreeSet::new();
        let mut rest = vec![file.to_owned()];
        while let Some(file) = rest.pop() {
            for other in uses.get(&file).into_iter().flatten() {
                if reached.insert(other.clone()) {
                    rest.push(other.clone());
                }
            }
        }
        reached
    };
    let reached: BTreeMap<&String, BTreeSet<String>> =
        uses.keys().map(|file| (file, reached(file))).collect();
    let mut found = BTreeSet::new();
    for (file, others) in &reached {
        let back = |other: &&String| reached.get(other).is_some_and(|back| back.contains(*file));
        let circle: Vec<String> = others.iter().filter(back).cloned().collect();
        if !circle.is_empty() {
            found.insert(circle);
        }
    }
    found
}

#[test]
fn circles_are_found() {
    let sources = |texts: &[(&str, &str)]| {
        texts.iter().map(|(name, text)| ((*name).to_owned(), code(text))).collect::<Sources>()
    };
    let found = |texts: &[(&str, &str)]| circles(&uses(&sources(texts)));
    let one = |names: &[&str]| BTreeSet::from([names.iter().map(|n| (*n).to_owned()).collect()]);

    let direct = [("a", "use crate::b::B;"), ("b", "fn f(a: &crate::a::A) {}")];
    assert_eq!(found(&direct), one(&["a", "b"]));
    let lists = [("a", "use crate::{c, b::{self, B}};"), ("b", "use super::a;"), ("c", "")];
    assert_eq!(found(&lists), one(&["a", "b"]));
    let inner = [("a", "mod b;\nfn f() { b::g() }"), ("a::b", "use super::A;")];
    assert_eq!(found(&inner), one(&["a", "a::b"]));
    // By way of a third.
    let three = [("a", "use crate::b;"), ("b", "use crate::c;"), ("c", "use crate::a;")];
    assert_eq!(found(&three), one(&["a", "b", "c"]));
    // What a module only passes on is not its own.
    let through = [
        ("a", "pub use c::C;"),
        ("a::b", "use super::C;"),
        ("a::c", ""),
        ("d", "use crate::a::C;"),
    ];
    assert!(found(&through).is_empty());
    let comments = [
        ("a", "// crate::b\nuse std::b;"),
        ("b", "use crate::a;\n#[cfg(test)]\nmod tests { use super::*; }"),
    ];
    assert!(found(&comments).is_empty());
}
