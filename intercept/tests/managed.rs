//! Managed variables of modules count as managed memory from when the program knows where they are until their module
//! or library goes: no dump can carry them.

mod support;

use std::io::BufRead;

use support::{ENV_PROGRAM, Library, Program, say};

const PTX: &std::ffi::CStr = c"
.version 8.0
.target sm_70
.address_size 64
.visible .global .attribute(.managed) .align 4 .u32 both = 5;
.visible .global .attribute(.managed) .align 4 .u32 other = 6;
.visible .global .align 4 .u32 plain = 7;
.visible .entry nothing() { ret; }
";

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        run();
    }
}

/// Loads, asks for variables and unloads as it is told to: a function and a name in each line.
fn run() {
    let cuda = Library::open("libcuda.so.1");
    let (mut context, mut module, mut library) = (0u64, 0u64, 0u64);
    cuda.must("cuInit", &[0]);
    cuda.must("cuCtxCreate_v2", &[&raw mut context as u64, 0, 0]);
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let (function, name) = line.split_once(' ').expect("two words");
        let name = std::ffi::CString::new(name).expect("a name");
        let (mut address, mut size) = (0u64, 0u64);
        let (image, out) = (PTX.as_ptr() as u64, &raw mut address as u64);
        let (bytes, name) = (&raw mut size as u64, name.as_ptr() as u64);
        let code = match function {
            "cuModuleLoadData" => cuda.call(function, &[&raw mut module as u64, image]),
            "cuLibraryLoadData" => {
                cuda.call(function, &[&raw mut library as u64, image, 0, 0, 0, 0, 0, 0])
            }
            "cuLibraryGetModule" => cuda.call(function, &[&raw mut module as u64, library]),
            "cuModuleGetGlobal_v2" => cuda.call(function, &[out, bytes, module, name]),
            "size" => cuda.call("cuModuleGetGlobal_v2", &[0, bytes, module, name]),
            "cuLibraryGetGlobal" | "cuLibraryGetManaged" => {
                cuda.call(function, &[out, bytes, library, name])
            }
            "cuModuleUnload" => cuda.call(function, &[module]),
            "cuLibraryUnload" => cuda.call(function, &[library]),
            "cuCtxDestroy_v2" => cuda.call(function, &[context]),
            other => panic!("what is {other}?"),
        };
        say(&code.to_string());
    }
    std::process::exit(0);
}

/// Tells the program each line and looks how many pieces of managed memory count after it.
fn counts(lines: &[(&str, u64)]) {
    let mut program = Program::start();
    for (line, expected) in lines {
        assert_eq!(program.ask(line), "0", "{line}");
        assert_eq!(program.agent().0.counts().managed, *expected, "after {line}");
    }
}

#[test]
fn variables_of_a_module_count_until_it_is_unloaded() {
    counts(&[
        ("cuModuleLoadData it", 0),
        ("cuModuleGetGlobal_v2 plain", 0),
        ("size both", 0),
        ("cuModuleGetGlobal_v2 both", 1),
        ("cuModuleGetGlobal_v2 both", 1),
        ("cuModuleGetGlobal_v2 other", 2),
        ("cuModuleUnload it", 0),
    ]);
}

#[test]
fn variables_of_a_module_go_with_its_context() {
    counts(&[
        ("cuModuleLoadData it", 0),
        ("cuModuleGetGlobal_v2 both", 1),
        ("cuCtxDestroy_v2 it", 0),
    ]);
}

#[test]
fn variables_of_a_library_count_until_it_is_unloaded() {
    counts(&[
        ("cuLibraryLoadData it", 0),
        ("cuLibraryGetGlobal plain", 0),
        ("cuLibraryGetManaged both", 1),
        ("cuLibraryGetModule it", 1),
        ("cuModuleGetGlobal_v2 both", 1),
        ("cuModuleGetGlobal_v2 other", 2),
        ("cuCtxDestroy_v2 it", 2),
        ("cuLibraryUnload it", 0),
    ]);
}
