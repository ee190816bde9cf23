//! The walls of the workspace: which package uses which, which folders of a package use which, and which files may
//! use each other in circles. These lists are the rules; the tests below compare the sources with them.

use std::collections::{BTreeMap, BTreeSet};

use crate::shape::tree::{File, Package, Tree};
use crate::shape::uses::Uses;
use crate::sys;

/// Each package with those of the workspace that it uses, and with those that only its tests use.
const PACKAGES: [(&str, &[&str], &[&str]); 12] = [
    // It is loaded into programs, also into those that do not run under gpucr: it uses nothing.
    ("gpucr-c", &[], &[]),
    ("gpucr-wire", &[], &[]),
    // Bytes in, bytes out.
    ("gpucr-fatbin", &[], &[]),
    // Text in, text out.
    ("gpucr-rewrite", &[], &["softcuda"]),
    // Text in, and what it says.
    ("gpucr-kernels", &["gpucr-rewrite", "gpucr-wire"], &[]),
    ("gpucr-core", &["gpucr-fatbin", "gpucr-kernels", "gpucr-rewrite", "gpucr-wire"], &[]),
    // It is loaded into programs: it never uses the checkpointer.
    (
        "gpucr-intercept",
        &["gpucr-fatbin", "gpucr-kernels", "gpucr-rewrite", "gpucr-wire"],
        &["softcuda"],
    ),
    ("softcuda", &[], &["gpucr-kernels", "gpucr-rewrite", "gpucr-wire"]),
    ("gpucr", &["gpucr-core", "gpucr-wire"], &[]),
    ("gpucr-tests", &["gpucr-core", "gpucr-wire"], &[]),
    ("gpucr-benches", &["gpucr-core", "gpucr-wire"], &[]),
    ("xtask", &[], &[]),
];

/// The floors of a package: each uses only itself and those before it.
struct Floors {
    of: &'static str,
    /// Modules at the root, from the ground up. `*` has all that are not named, and the root itself; where there is
    /// none, the root stands over all, and nothing else is allowed next to the floors.
    order: &'static [&'static str],
    /// What a floor is not to use though it lies above it.
    apart: &'static [(&'static str, &'static str)],
}

const FLOORS: [Floors; 3] = [
    // `core/src/lib.rs` says what they are.
    Floors {
        of: "gpucr-core",
        order: &["base", "store", "image", "cuda", "kernels", "host", "engine"],
        apart: &[
            // They could be in a library for any program that keeps bytes.
            ("store", "image"),
            // A function of bytes: nothing is needed to try it on a file.
            ("kernels", "cuda"),
            ("kernels", "image"),
            ("kernels", "store"),
            ("host", "cuda"),
            ("host", "kernels"),
            ("host", "store"),
        ],
    },
    // `intercept/src/lib.rs` says what they are.
    Floors {
        of: "gpucr-intercept",
        order: &[
            "log",
            "limit",
            "cancel",
            "resettable",
            "abi",
            "usage",
            "state",
            "calls",
            "watch",
            "unknown",
            "ungated",
            "agent",
            "fork",
            "resolver",
            "track",
            "checkpoint",
            "exports",
        ],
        apart: &[],
    },
    // The interpreter stands alone, the driver is on it, and the functions that programs call are on top.
    Floors { of: "softcuda", order: &["ptx", "*", "api"], apart: &[] },
];

/// Files of a package that use each other in a circle, which is allowed for the reason given.
struct Allowed {
    of: &'static str,
    because: &'static str,
    /// Modules, in the order of their names; the root is `crate`.
    files: &'static [&'static str],
}

/// The circles that are left. A change that breaks one removes it here, or what no longer belongs to it: a circle that is
/// listed and is not there fails too.
#[rustfmt::skip]
const CIRCLES: &[Allowed] = &[
    Allowed {
        of: "gpucr-intercept",
        because: "The tables of memory are one type in the head; its methods are spread over files by what they do.",
        files: &["state::memory", "state::memory::attach", "state::memory::foreign", "state::memory::heap", "state::memory::host", "state::memory::multicast", "state::memory::multicast::serve", "state::memory::opened", "state::memory::pools", "state::memory::program"],
    },
    Allowed {
        of: "softcuda",
        because: "A warp runs in what its block shares, and reads and writes memory as its block sees it.",
        files: &["ptx::exec::block", "ptx::exec::memory", "ptx::exec::warp"],
    },
    Allowed {
        of: "softcuda",
        because: "The head logs a status by its name, and the functions of the file of names are defined by its macro.",
        files: &["api", "api::errors"],
    },
    Allowed {
        of: "softcuda",
        because: "The parser is one type; its methods are spread over files by what they parse.",
        files: &["ptx::parser", "ptx::parser::variable"],
    },
    Allowed {
        of: "xtask",
        because: "CRIU is built by means of Debian's packages, and what lacks them names the CRIU that is needed.",
        files: &["criu", "debian"],
    },
];

impl Floors {
    /// Where a module stands, by the first of its names.
    fn floor(&self, head: &str) -> Option<usize> {
        let named = self.order.iter().position(|floor| *floor == head);
        named.or_else(|| self.order.iter().position(|floor| *floor == "*"))
    }

    /// The uses that break the rules.
    fn broken(&self, uses: &Uses) -> Vec<String> {
        let mut broken = Vec::new();
        for (file, used) in &uses.files {
            let of = head(file);
            let Some(floor) = self.floor(of) else {
                if of != "crate" {
                    broken.push(format!("{file} is on no floor"));
                }
                continue;
            };
            // What stands at the root is a floor, or has been taken from one to be passed on.
            let names = used.iter().chain(&uses.heads[file]);
            broken.extend(names.filter_map(|name| {
                let other = head(name);
                let is_above = self.floor(other).is_none_or(|other| other > floor);
                let is_apart = self.apart.contains(&(of, other));
                (is_above || is_apart).then(|| format!("{file} uses {name}"))
            }));
        }
        broken
    }
}

/// The first name of a module.
fn head(module: &str) -> &str {
    module.split("::").next().unwrap_or(module)
}

fn packages() -> Vec<Package> {
    Package::all(sys::root()).unwrap()
}

#[test]
fn packages_use_only_those_that_they_may() {
    let metadata = sys::metadata().unwrap();
    let mut found = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let (mut always, mut in_tests) = (BTreeSet::new(), BTreeSet::new());
        for dependency in package["dependencies"].as_array().unwrap() {
            if dependency["path"].is_string() {
                let uses = if dependency["kind"] == "dev" { &mut in_tests } else { &mut always };
                uses.insert(dependency["name"].as_str().unwrap());
            }
        }
        found.insert(package["name"].as_str().unwrap(), (always, in_tests));
    }
    let set = |names: &[&'static str]| names.iter().copied().collect();
    let listed = PACKAGES.map(|(name, always, in_tests)| (name, (set(always), set(in_tests))));
    assert_eq!(found, BTreeMap::from(listed));
}

#[test]
fn each_floor_uses_only_those_before_it() {
    let packages = packages();
    for floors in &FLOORS {
        let package = packages.iter().find(|package| package.name == floors.of).unwrap();
        let all: Vec<Uses> = package.crates.iter().map(Uses::of).collect();
        let has = |uses: &Uses, floor: &str| uses.files.keys().any(|file| head(file) == floor);
        let uses = all.iter().find(|uses| has(uses, floors.order[0])).expect("the library");
        for floor in floors.order.iter().filter(|floor| **floor != "*") {
            assert!(has(uses, floor), "{}: nothing is in {floor}", floors.of);
        }
        let broken = floors.broken(uses);
        assert!(broken.is_empty(), "{}: {broken:#?}", floors.of);
    }
}

#[test]
fn files_use_each_other_in_circles_only_where_the_list_says_so() {
    let mut wrong = Vec::new();
    let mut found = BTreeSet::new();
    for package in packages() {
        for uses in package.crates.iter().map(Uses::of) {
            for circle in uses.circles() {
                let is = |allowed: &&Allowed| allowed.of == package.name && allowed.files == circle;
                if !CIRCLES.iter().any(|allowed| is(&allowed)) {
                    let edges = circle.iter().map(|file| {
                        let others = uses.files[file].iter().filter(|other| circle.contains(other));
                        let others = others.map(String::as_str).collect::<Vec<_>>();
                        format!("\n    {file} uses {}", others.join(", "))
                    });
                    let edges = edges.collect::<String>();
                    wrong.push(format!("{}: {circle:?} is not listed:{edges}", package.name));
                }
                found.insert((package.name.clone(), circle));
            }
        }
    }
    for Allowed { of, files, because } in CIRCLES {
        assert!(!because.is_empty(), "{of}: {files:?} has no reason");
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        if !found.contains(&((*of).to_owned(), files.clone())) {
            wrong.push(format!("{of}: {files:?} is listed and no circle any more"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a file of core, or of another package with floors, uses and should not.
fn broken(package: &str, module: &str, text: &str) -> Vec<String> {
    let file = |module: &str, text: &str| {
        let names = module.split("::").filter(|name| *name != "crate");
        let names = names.map(str::to_owned).collect();
        File::parse(names, "a.rs".into(), text.to_owned(), false).unwrap()
    };
    let floors = FLOORS.iter().find(|floors| floors.of == package).unwrap();
    let others = floors.order.iter().filter(|floor| **floor != module && **floor != "*");
    let mut files: Vec<File> = others.map(|floor| file(floor, "")).collect();
    files.extend([file("crate", ""), file(module, text)]);
    let uses = Uses::of(&Tree { files });
    let told = floors.broken(&uses).into_iter().map(|text| {
        let uses = format!("{module} uses ");
        text.strip_prefix(&uses).map(str::to_owned).unwrap_or(text)
    });
    // One that is named at the root and defined there is told once.
    told.collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn what_lies_above_is_found() {
    let core = |module: &str, text: &str| broken("gpucr-core", module, text);
    assert_eq!(core("store", "use crate::image::Manifest;"), ["image"]);
    assert_eq!(core("store", "fn f(a: crate::engine::A) {}"), ["engine"]);
    assert_eq!(core("store::inner", "use super::super::image::Manifest;"), ["image"]);
    assert_eq!(core("image", "use crate::{store, host};"), ["host"]);
    assert_eq!(core("image", "use crate::Error;"), ["Error", "crate"], "the root is above");
    assert_eq!(core("image", "use crate::*;"), ["*", "crate"], "the root is above");
    assert_eq!(core("kernels", "use crate::cuda::Driver;"), ["cuda"]);
    assert_eq!(core("base", "#[cfg(test)]\nmod tests;\nuse crate::image::A;"), ["image"]);
    assert_eq!(core("other", ""), ["other is on no floor"]);
    assert!(core("engine", "use crate::image::Manifest;\n/// [`crate::x`]\nfn f() {}").is_empty());
    assert!(core("base", "#[cfg(test)]\nmod tests { use crate::image::A; }").is_empty());
    assert!(core("store", "use crate::base; use super::base::stop::Stop; mod b;").is_empty());

    let softcuda = |module: &str, text: &str| broken("softcuda", module, text);
    assert_eq!(softcuda("streams", "use crate::api::call;"), ["api"]);
    assert_eq!(softcuda("ptx", "use crate::streams::Stream;"), ["crate", "streams"]);
    assert!(softcuda("streams", "use crate::{gate, ptx::Module};").is_empty());
    assert!(softcuda("api", "use crate::streams; use crate::ptx::Module;").is_empty());
}
