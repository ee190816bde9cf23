//! The floors of this crate: each uses only those before it. `core/src/lib.rs` says what they are.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

#[path = "../../tests/src/imports.rs"]
mod imports;

/// From the ground up.
const FLOORS: [&str; 7] = ["base", "store", "image", "cuda", "kernels", "host", "engine"];

/// What a floor is not to use though it lies above it, with the reason.
const APART: [(&str, &str); 7] = [
    // They could be in a library for any program that keeps bytes.
    ("store", "image"),
    // A function of bytes: nothing is needed to try it on a file.
    ("kernels", "cuda"),
    ("kernels", "image"),
    ("kernels", "store"),
    ("host", "cuda"),
    ("host", "kernels"),
    ("host", "store"),
];

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The modules of the crate's root that a text names by `crate::`.
fn named(text: &str) -> Vec<String> {
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let code = code.collect::<Vec<_>>().join("\n");
    let heads = code.split("crate::").skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        rest[..end].to_owned()
    });
    heads.filter(|head| head != "skip").collect()
}

/// What a file of a floor uses and should not.
fn wrong(floor: &str, text: &str) -> Vec<String> {
    let place = |name: &str| FLOORS.iter().position(|floor| *floor == name);
    // What tests use is theirs: they stand on top.
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let is_wrong = |name: &String| {
        place(name) > place(floor) || place(name).is_none() || APART.contains(&(floor, name))
    };
    named(text).into_iter().filter(is_wrong).collect()
}

#[test]
fn each_floor_uses_only_those_before_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut problems = Vec::new();
    for floor in FLOORS {
        let mut files = Vec::new();
        sources(&src.join(floor), &mut files);
        assert!(!files.is_empty(), "{floor}");
        for file in files {
            let name = file.file_stem().unwrap().to_string_lossy().into_owned();
            // Tests in files of their own.
            if name == "tests" || name.ends_with("_tests") {
                continue;
            }
            let wrong = wrong(floor, &std::fs::read_to_string(&file).unwrap());
            let file = file.strip_prefix(&src).unwrap().display().to_string();
            problems.extend(wrong.into_iter().map(|name| format!("{file} uses crate::{name}")));
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}

#[test]
fn what_lies_above_is_found() {
    assert_eq!(wrong("store", "use crate::image::Manifest;"), ["image"]);
    assert_eq!(wrong("store", "fn f(a: crate::engine::A) {}"), ["engine"]);
    assert_eq!(wrong("image", "use crate::{store, host};"), [""], "no lists of floors");
    assert_eq!(wrong("image", "use crate::Error;"), ["Error"], "the root has what lies above");
    assert_eq!(wrong("kernels", "use crate::cuda::Driver;"), ["cuda"]);
    assert!(wrong("engine", "use crate::image::Manifest;\n/// [`crate::x`]").is_empty());
    assert!(wrong("base", "#[cfg(test)]\nmod tests { use crate::image::A; }").is_empty());
}

/// What is free of circles: files of these folders do not use each other in circles.
const FREE: [&str; 5] = ["store", "image", "cuda", "engine::memory", "engine::warm"];

#[test]
fn files_do_not_use_each_other_in_circles() {
    let mut sources = imports::Sources::new();
    imports::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), "", &mut sources);
    let circles = imports::circles(&imports::uses(&sources));
    let is_free = |file: &String| FREE.iter().any(|folder| file.starts_with(folder));
    let found: BTreeSet<_> = circles.into_iter().filter(|c| c.iter().any(is_free)).collect();
    assert!(found.is_empty(), "{found:#?}");
}
