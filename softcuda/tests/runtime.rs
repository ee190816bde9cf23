//! Programs of the CUDA runtime, compiled by nvcc, run on softcuda unchanged, and what their runtime does through the
//! driver's private tables is nothing that a checkpointer would have to hold back. `tests/users/runtime.sh` runs all
//! of them, with other versions of the runtime too.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

// The driver is built with the tests; nothing of it is called here.
use softcuda as _;

#[path = "../../tests/src/nvcc.rs"]
#[expect(unreachable_pub, reason = "the crate that it is of exports it")]
mod nvcc;
#[path = "../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "the crate that it is of exports it")]
mod skip;
use nvcc::Nvcc;
use skip::skip;

/// What the runtime calls through private tables: it asks for handles, keeps values of its own with contexts, and asks
/// who the driver is. None of these enqueues work, touches device memory or loads code.
const HARMLESS: [&str; 11] = [
    "primary_context",
    "runtime_notice",
    "context_check",
    "process_check",
    "tools_callbacks",
    "tools_state",
    "integrity",
    "local_put",
    "local_get",
    "local_delete",
    "load_compilers",
];

/// A folder for what a test builds, with the library under the name that programs look for.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let folder = folder.join(format!("runtime-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let own = std::env::current_exe().expect("the test has a path");
        let built = own.with_file_name("libsoftcuda.so");
        std::os::unix::fs::symlink(&built, folder.join("libcuda.so.1")).expect("a link");
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What stands behind a word in the first lines of a program.
fn said(source: &Path, word: &str) -> Vec<String> {
    let text = std::fs::read_to_string(source).expect("the program");
    let start = format!("// {word}: ");
    let lines = text.lines().take(6).filter_map(|line| line.strip_prefix(&start));
    lines.flat_map(str::split_whitespace).map(str::to_owned).collect()
}

/// Compiles a program of `tests/runtime` and runs it; fails the test unless it finds all as it should be.
fn passes(name: &str) {
    let Some(nvcc) = Nvcc::find(&std::env::current_exe().expect("the test has a path")) else {
        return skip("no nvcc: set NVCC, or run `cargo xtask test`");
    };
    let folder = Folder::new(name);
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runtime");
    let source = sources.join(format!("{name}.cu"));
    let program = folder.0.join(name);
    let mut arguments = said(&source, "flags");
    let others = said(&source, "with");
    arguments.extend(others.iter().map(|other| sources.join(other).display().to_string()));
    arguments.push(source.display().to_string());
    nvcc.compile(&arguments, &program).unwrap_or_else(|error| panic!("{name}: {error}"));

    let mut command = Command::new(&program);
    command.env("LD_LIBRARY_PATH", &folder.0).env("SOFTCUDA_LOG", "tables");
    for setting in said(&source, "environment") {
        let (key, value) = setting.split_once('=').expect("KEY=VALUE");
        command.env(key, value);
    }
    let output = command.output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {}\n{printed}\n{log}", output.status);
    assert!(printed.ends_with(&format!("{name}: passed\n")), "{name}: {printed}");

    let called: BTreeSet<&str> =
        log.lines().filter_map(|line| line.strip_prefix("softcuda: private table: ")).collect();
    assert!(called.contains("integrity") && called.contains("local_get"), "{called:?}");
    let others: Vec<_> = called.iter().filter(|name| !HARMLESS.contains(name)).collect();
    assert!(others.is_empty(), "{name} calls {others:?}");
    assert!(!log.contains("softcuda: place "), "{name} calls what nothing is known of:\n{log}");
}

/// A test of each program.
macro_rules! programs {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            passes(stringify!($name));
        })*

        #[test]
        fn programs_are_all_there() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runtime");
            for name in [$(stringify!($name)),*] {
                assert!(folder.join(format!("{name}.cu")).is_file(), "{name}");
            }
        }
    };
}

// A selection of what is quick and differs most; all of them take minutes to compile.
programs! { launch symbols graphs conditional device_launches managed per_thread separate reset steps }
