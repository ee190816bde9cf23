//! Which files of this crate use which: `ptx` stands alone, the driver is on it, and `api`, the functions that
//! programs call, is on top. Files do not use each other in circles, but for those of a list.

use std::collections::BTreeSet;
use std::path::Path;

#[path = "../../tests/src/imports.rs"]
mod imports;

use imports::{Sources, Uses, circles, read, uses};

/// What is left of circles: these files use each other.
const CIRCLES: [&[&str]; 3] = [
    // A call that fails is logged with the name of its code, which programs ask for by calls.
    &["api", "api::errors"],
    // A warp runs in what its block shares, and reads and writes memory as its block sees it.
    &["ptx::exec::block", "ptx::exec::memory", "ptx::exec::warp"],
    // The parser is one type; its methods are spread over files by what they parse.
    &["ptx::parser", "ptx::parser::variable"],
];

/// The floor of a file; each uses only its own and those below.
fn floor(module: &str) -> usize {
    match module.split("::").next() {
        Some("ptx") => 0,
        Some("api") => 2,
        _ => 1,
    }
}

fn own() -> Uses {
    let mut sources = Sources::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut sources);
    uses(&sources)
}

#[test]
fn each_floor_uses_only_those_below() {
    let mut problems = Vec::new();
    for (file, used) in own() {
        let above = used.iter().filter(|other| floor(other) > floor(&file));
        problems.extend(above.map(|other| format!("{file} uses {other}")));
    }
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn files_use_each_other_in_circles_only_where_the_list_says_so() {
    let listed = CIRCLES.map(|circle| circle.iter().map(|file| (*file).to_owned()).collect());
    assert_eq!(circles(&own()), BTreeSet::from(listed));
}
