//! Turns `driver.table` into names, slots and the exported functions, and sets how the library is linked.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=driver.table");
    // Programs ask for this name. `nodelete`: the agent's thread runs this code until the end.
    for arg in ["-soname,libcuda.so.1", "-z,nodelete", "-Bsymbolic-functions"] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{arg}");
    }
    let table = fs::read_to_string("driver.table").expect("driver.table is readable");
    let lines: Vec<&str> =
        table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let write = |file: &str, code: String| {
        fs::write(Path::new(&out).join(file), code).expect("OUT_DIR is writable");
    };
    write("names.rs", names(&lines));
    write("slots.rs", slots(lines.len()));
    write("exports.rs", exports(&lines));
}

/// Names and positions of the functions.
fn names(lines: &[&str]) -> String {
    let (mut names, mut indices) = (String::new(), String::new());
    for (i, line) in lines.iter().enumerate() {
        let name = line.split(' ').next().expect("a name");
        writeln!(names, "    c\"{name}\",").unwrap();
        writeln!(indices, "    pub(crate) const {name}: usize = {i};").unwrap();
    }
    let count = lines.len();
    format!(
        "/// How many functions the table has.\n\
         pub(crate) const COUNT: usize = {count};\n\
         /// Their names.\n\
         pub(crate) static NAMES: [&CStr; COUNT] = [\n{names}];\n\
         /// Positions by name.\n\
         #[allow(non_upper_case_globals, dead_code)]\n\
         pub(crate) mod index {{\n{indices}}}\n"
    )
}

/// The slots, and the stub that is in each at first.
fn slots(count: usize) -> String {
    let (mut code, mut slots) = (String::new(), String::new());
    for i in 0..count {
        writeln!(slots, "    AtomicPtr::new(stub_{i} as *const () as *mut ()),").unwrap();
        writeln!(code, "stub!(stub_{i}, {i});").unwrap();
    }
    format!(
        "/// Where each function goes: the real one, or at first a stub that looks it up.\n\
         pub(crate) static SLOTS: [AtomicPtr<()>; COUNT] = [\n{slots}];\n\
         {code}"
    )
}

/// The exported functions.
fn exports(lines: &[&str]) -> String {
    let (mut code, mut exported, mut wrapped) = (String::new(), String::new(), String::new());
    for (i, line) in lines.iter().enumerate() {
        let mut words = line.split(' ');
        let (name, class) = (words.next().expect("a name"), words.next().expect("a class"));
        let arguments = words.next().map(|n| n.parse::<usize>().expect("a number"));
        // What passes the gate and has no decoder of its own may touch any memory.
        let none = if class == "watch" { "none" } else { "unknown" };
        // The one that is applied before the call, and the one for after it has succeeded.
        let decoder = match (words.next(), words.next()) {
            (Some("then"), Some(decoder)) => format!("none {decoder}"),
            (decoder, None) => format!("{} none", decoder.unwrap_or(none)),
            _ => panic!("driver.table: cannot read {line:?}"),
        };
        let module = if class == "track" { "crate::track::" } else { "" };
        writeln!(exported, "    Wrapper({i}, {module}{name} as *const ()),").unwrap();
        if class != "forward" {
            writeln!(wrapped, "    {i},").unwrap();
        }
        match (class, arguments) {
            ("forward", None) => writeln!(code, "forward!({name}, {i});").unwrap(),
            ("track", None) => {}
            ("sync", Some(n)) => {
                let list: Vec<String> = (0..n).map(|n| format!("a{n}")).collect();
                // `CU_STREAM_PER_THREAD` and `CU_STREAM_LEGACY`
                let stream = if name.ends_with("_ptds") { 2 } else { 1 };
                writeln!(code, "sync!({name}, {i}, {decoder}, {stream}, {});", list.join(" "))
                    .unwrap();
            }
            ("gate" | "launch" | "note" | "watch", Some(n)) => {
                let list: Vec<String> = (0..n).map(|n| format!("a{n}")).collect();
                writeln!(code, "{class}!({name}, {i}, {decoder}, {});", list.join(" ")).unwrap();
            }
            _ => panic!("driver.table: cannot read {line:?}"),
        }
    }
    format!(
        "/// All exported functions, in the order of the table.\n\
         static EXPORTED: [Wrapper; COUNT] = [\n{exported}];\n\
         /// Positions of those that are more than a jump.\n\
         static WRAPPED: &[usize] = &[\n{wrapped}];\n\
         {code}"
    )
}
