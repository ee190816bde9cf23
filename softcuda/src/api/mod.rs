//! The exported functions, one file for each part of the driver API.
//!
//! `driver_api!` defines them. Functions of the driver that no file defines are generated from
//! `names.txt` by the build script and return `CUDA_ERROR_NOT_SUPPORTED`.

mod arguments;
mod array;
mod attributes;
mod capture;
mod checkpoint;
mod context;
mod copy;
mod copy_batch;
mod coredump;
#[cfg(test)]
mod coverage;
mod device;
mod edge_data;
mod errors;
mod event;
mod export_table;
mod function;
mod graph;
mod graph_conditional;
mod graph_exec;
mod graph_memory;
mod graph_node;
mod graph_parts;
mod graph_print;
mod green;
mod host_memory;
mod init;
mod ipc;
mod launch;
mod launch_config;
mod legacy_launch;
mod library;
mod link;
mod logs;
mod managed;
mod managed_batch;
mod memory;
mod memory_operation;
mod module;
mod multicast;
mod newer;
mod occupancy;
mod peer;
mod pointer;
mod pool;
mod pool_properties;
mod primary;
mod proc_address;
mod set;
mod stream;
mod surface;
mod texture;
mod texture_reference;
mod user_object;
mod vmm;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::forked::is_forked;
use crate::gate;
use crate::process;
use crate::settings::settings;
use crate::status::{Code, Outcome, to_c};
use crate::streams;

/// Runs the body of a function that needs nothing: no initialisation, no gate.
pub(crate) fn early(name: &str, body: impl FnOnce() -> Outcome) -> u32 {
    if is_forked() {
        return Code::NOT_INITIALIZED.0;
    }
    finish(name, || crate::faults::check(name).and_then(|()| body()))
}

/// Runs the body of a function that needs an initialised process, inside the gate.
pub(crate) fn call(name: &str, body: impl FnOnce() -> Outcome) -> u32 {
    finish(name, || {
        process::check_initialised()?;
        if streams::is_worker() {
            // Host functions in streams may not call the API: it could wait for their own stream.
            return Err(Code::NOT_PERMITTED);
        }
        let _pass = gate::enter()?;
        crate::faults::check(name)?;
        body()
    })
}

fn finish(name: &str, body: impl FnOnce() -> Outcome) -> u32 {
    // A panic is a defect of this library; it must not cross into C.
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Code::UNKNOWN));
    if let Err(code) = outcome
        && code != Code::NOT_READY
        && !is_forked()
    {
        let message = format!("{name} returns {}", errors::name(code.0).unwrap_or("an error"));
        if settings().log {
            eprintln!("softcuda: {message}");
        }
        crate::logs::add(&message);
    }
    to_c(outcome)
}

/// What a function without an implementation does.
pub(crate) fn not_supported(name: &str) -> u32 {
    finish(name, || Err(Code::NOT_SUPPORTED))
}

/// What a function without an implementation does that came with a version of the API.
pub(crate) fn newer_not_supported(name: &str, since: i32) -> u32 {
    finish(name, || settings().driver.since(since).and(Err(Code::NOT_SUPPORTED)))
}

/// Defines exported functions. `early fn` runs without initialisation, `call fn` needs it and
/// passes the gate, and `stream(mode) fn NAME, PER_THREAD_NAME` defines both variants of a function
/// that takes a stream, with `mode` telling the body which one it is.
macro_rules! driver_api {
    () => {};
    (
        stream($mode:ident) fn $name:ident, $per_thread:ident
        ($($argument:ident: $type:ty),* $(,)?) $body:block $($rest:tt)*
    ) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name($($argument: $type),*) -> u32 {
            crate::api::call(stringify!($name), || {
                let $mode = crate::submission::DefaultStream::Legacy;
                $body
            })
        }
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $per_thread($($argument: $type),*) -> u32 {
            crate::api::call(stringify!($per_thread), || {
                let $mode = crate::submission::DefaultStream::PerThread;
                $body
            })
        }
        crate::api::driver_api! { $($rest)* }
    };
    (
        $how:ident fn $name:ident ($($argument:ident: $type:ty),* $(,)?) $body:block $($rest:tt)*
    ) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name($($argument: $type),*) -> u32 {
            crate::api::$how(stringify!($name), || $body)
        }
        crate::api::driver_api! { $($rest)* }
    };
}
pub(crate) use driver_api;

/// Defines a function of the driver that is not implemented. The caller's arguments, which this
/// definition leaves out, are ignored by the calling convention.
macro_rules! unsupported {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name() -> u32 {
            crate::api::not_supported(stringify!($name))
        }
    };
}
pub(crate) use unsupported;

/// Defines a function that is not implemented and that drivers have since a later version than 580's. It is
/// exported all the same, since a library cannot choose its exports: an older driver says that it has none.
macro_rules! newer_unsupported {
    ($name:ident, $since:expr) => {
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        extern "C" fn $name() -> u32 {
            crate::api::newer_not_supported(stringify!($name), $since)
        }
    };
}
pub(crate) use newer_unsupported;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A defect in the body of a function; the compiler cannot know.
    fn fail() -> Outcome {
        panic!("a defect of {}", std::hint::black_box("this test"))
    }

    driver_api! {
        early fn softcuda_test_early() {
            fail()
        }

        call fn softcuda_test_call(_number: u32) {
            fail()
        }

        stream(mode) fn softcuda_test_stream, softcuda_test_stream_ptsz(_stream: u64) {
            let _ = mode;
            fail()
        }

        call fn softcuda_test_after() {
            Ok(())
        }
    }

    #[test]
    fn a_panic_comes_to_the_caller_as_an_error() {
        assert_eq!(early("cuInit", process::initialise), 0);
        for _ in 0..2 {
            assert_eq!(softcuda_test_early(), Code::UNKNOWN.0);
            assert_eq!(softcuda_test_call(1), Code::UNKNOWN.0);
            assert_eq!(softcuda_test_stream(0), Code::UNKNOWN.0);
            assert_eq!(softcuda_test_stream_ptsz(0), Code::UNKNOWN.0);
        }
        // Nothing is left behind that would keep others out.
        assert_eq!(softcuda_test_after(), 0);
        gate::close(Some(std::time::Duration::from_secs(5))).expect("no call is inside");
        gate::open();
    }

    /// Functions that the macros above do not make would not be guarded.
    #[test]
    fn all_exported_functions_are_made_here() {
        fn look(folder: &Path, found: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).expect("the sources").flatten() {
                let path = entry.path();
                if path.is_dir() {
                    look(&path, found);
                } else if std::fs::read_to_string(&path)
                    .is_ok_and(|text| text.contains("(no_mangle)"))
                {
                    found.push(path.display().to_string());
                }
            }
        }
        let mut found = Vec::new();
        look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
        assert!(matches!(&found[..], [only] if only.ends_with("src/api/mod.rs")), "{found:?}");
    }
}
