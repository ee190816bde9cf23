//! What the built library shows to the outside.

mod support;

use std::ffi::CStr;
use std::mem::MaybeUninit;

use support::{Library, shim};

/// The names in the table.
fn names() -> Vec<&'static str> {
    include_str!("../driver.table")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| line.split(' ').next().expect("a name"))
        .collect()
}

#[test]
fn every_function_of_the_table_is_exported_by_the_library_itself() {
    let path = shim();
    let library = Library::open(path.to_str().expect("a plain path"));
    let names = names();
    let soft = include_str!("../../softcuda/src/api/names.txt").lines();
    assert!(soft.clone().all(|name| names.contains(&name)), "those of driver 580 are among them");
    assert_eq!(soft.count(), 682);
    for name in names {
        let address = library.symbol(name);
        let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: fills the structure, whose members may be zero.
        let info = unsafe {
            assert_ne!(libc::dladdr(address, info.as_mut_ptr()), 0, "{name}");
            info.assume_init()
        };
        // SAFETY: dladdr gives C strings.
        let (file, symbol) =
            unsafe { (CStr::from_ptr(info.dli_fname), CStr::from_ptr(info.dli_sname)) };
        assert_eq!(file.to_str().ok(), path.to_str(), "{name}");
        assert_eq!(symbol.to_str(), Ok(name));
    }
}

#[test]
fn without_a_driver_every_call_says_so() {
    // A process of its own: the driver is looked for once.
    if std::env::var_os("GPUCR_TEST_NO_DRIVER").is_some() {
        let library = Library::open(shim().to_str().expect("a plain path"));
        for name in ["cuInit", "cuDriverGetVersion", "cuMemAlloc_v2", "cuLaunchKernel"] {
            let mut out = [0u64; 8];
            let to = out.as_mut_ptr() as u64;
            assert_eq!(library.call(name, &[to, to]), 100, "{name}");
        }
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().expect("a file"))
        .args(["without_a_driver_every_call_says_so", "--exact"])
        .env("GPUCR_TEST_NO_DRIVER", "1")
        // The shim itself is no driver.
        .env(gpucr_wire::ENV_DRIVER, shim())
        .status()
        .expect("it runs");
    assert!(status.success());
}
