//! Programs that do not use the allocator of the C library. A driver has to use theirs.

#[path = "support/ways.rs"]
mod program_body;
mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::{ENV_PROGRAM, Program, softcuda};

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        program_body::run();
    }
}

/// Makes a library of one of the sources in `tests/programs`.
fn library(source: &str, folder: &Path, args: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(source);
    let library = folder.join(source.with_extension("so").file_name().expect("a name"));
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).args(args);
    assert!(compiler.status().expect("a C compiler").success(), "{}", source.display());
    library
}

fn works(mut program: Program) {
    let (agent, _) = program.agent();
    let _agent = agent.cycle(&program);
    for call in [
        "symbol cuDriverGetVersion out",
        "symbol cuMemcpyDtoD_v2 to from 4096",
        "symbol cuMemAlloc_v2 out 100",
    ] {
        assert_eq!(program.ask(call), "0", "{call}");
    }
}

#[test]
fn a_driver_frees_what_a_preloaded_allocator_has_allocated() {
    let folder = tempfile::tempdir().expect("a folder");
    // Under another name: the loader would take the shim for the library of this one.
    let (name, other) = (b"libcuda.so.1\0", b"libcudX.so.1\0");
    let mut soft = std::fs::read(softcuda()).expect("read");
    let at = soft.windows(name.len()).position(|bytes| bytes == name).expect("it says its name");
    soft[at..at + name.len()].copy_from_slice(other);
    std::fs::write(folder.path().join("libcudX.so.1"), soft).expect("written");
    let path = folder.path().to_str().expect("a plain path");
    let (search, run) = (format!("-L{path}"), format!("-Wl,-rpath,{path}"));
    let flags = ["-Wl,-Bsymbolic", "-Wl,--no-as-needed", &search, "-l:libcudX.so.1", &run];
    let driver = library("driver.c", folder.path(), &flags);
    let allocator = library("allocator.c", folder.path(), &[]);
    works(Program::start_with(&[
        ("LD_PRELOAD", allocator.to_str().expect("a plain path")),
        (gpucr_wire::ENV_DRIVER, driver.to_str().expect("a plain path")),
    ]));
}

#[test]
fn a_program_runs_with_the_address_sanitizer() {
    // Whose library replaces the allocator too, and refuses to be gone around.
    let found = Command::new("cc").arg("-print-file-name=libasan.so").output();
    let found = String::from_utf8(found.expect("a C compiler").stdout).expect("a plain path");
    let library =
        Path::new(found.trim()).canonicalize().expect("the compiler's libasan is installed");
    works(Program::start_with(&[
        ("LD_PRELOAD", library.to_str().expect("a plain path")),
        ("ASAN_OPTIONS", "detect_leaks=0"),
    ]));
}
