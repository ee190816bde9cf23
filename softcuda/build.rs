//! Gives the library its soname and generates what follows from the lists of the drivers' function
//! names: a stub for each function that `src/api` does not define, and the table of all of them
//! for `cuGetProcAddress`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // The table of functions must hold our own, also when another library of the same process
    // (the interceptor) exports the same names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=src/api");
    println!("cargo:rerun-if-changed=build.rs");

    let names = fs::read_to_string("src/api/names.txt")?;
    let names: BTreeSet<&str> = names.lines().map(str::trim).filter(|n| !n.is_empty()).collect();

    let mut defined = BTreeSet::new();
    for entry in fs::read_dir("src/api")? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "rs") {
            collect_defined(&path, &mut defined)?;
        }
    }
    let newer = fs::read_to_string("src/api/newer_names.txt")?;
    let newer: BTreeMap<&str, &str> =
        newer.lines().filter_map(|line| line.trim().split_once(' ')).collect();
    for name in &defined {
        let listed = names.contains(name.as_str()) || newer.contains_key(name.as_str());
        assert!(listed, "{name} is defined but not in src/api/names.txt or newer_names.txt");
    }

    let mut out = String::from("unsafe extern \"C\" {\n");
    for name in &defined {
        writeln!(out, "    fn {name}() -> u32;").expect("writing to a string cannot fail");
    }
    out.push_str("}\n");
    for name in names.iter().filter(|n| !defined.contains(**n)) {
        writeln!(out, "crate::api::unsupported!({name});")
            .expect("writing to a string cannot fail");
    }
    for (name, since) in newer.iter().filter(|(name, _)| !defined.contains(**name)) {
        writeln!(out, "crate::api::newer_unsupported!({name}, {since});")
            .expect("writing to a string cannot fail");
    }
    out.push_str("/// All functions of driver 580, sorted by name.\n");
    out.push_str("pub(crate) static SYMBOLS: &[(&str, unsafe extern \"C\" fn() -> u32)] = &[\n");
    for name in &names {
        writeln!(out, "    (\"{name}\", {name}),").expect("writing to a string cannot fail");
    }
    out.push_str("];\n");
    out.push_str("/// Functions of later drivers, sorted by name, with the version of the API since which they are.\n");
    out.push_str("pub(crate) static NEWER: &[(&str, i32, unsafe extern \"C\" fn() -> u32)] = &[\n");
    for (name, since) in &newer {
        writeln!(out, "    (\"{name}\", {since}, {name}),")
            .expect("writing to a string cannot fail");
    }
    out.push_str("];\n");
    out.push_str("/// Those of driver 580 that do something.\n#[cfg(test)]\n");
    let defined: Vec<&String> =
        defined.iter().filter(|name| names.contains(name.as_str())).collect();
    writeln!(out, "pub(crate) static IMPLEMENTED: &[&str] = &{defined:?};")
        .expect("writing to a string cannot fail");
    fs::write(Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("symbols.rs"), out)
}

/// Finds the names in lines such as `call fn cuInit(flags: u32) {`, which is how `driver_api!`
/// writes them: after `fn`, up to the parenthesis, separated by commas.
fn collect_defined(path: &Path, defined: &mut BTreeSet<String>) -> io::Result<()> {
    for line in fs::read_to_string(path)?.lines() {
        let Some((mode, rest)) = line.trim_start().split_once(" fn cu") else { continue };
        if !(mode == "call" || mode == "early" || mode.starts_with("stream(")) {
            continue;
        }
        let list = rest.split('(').next().unwrap_or(rest);
        for name in format!("cu{list}").split(',') {
            defined.insert(name.trim().to_owned());
        }
    }
    Ok(())
}
