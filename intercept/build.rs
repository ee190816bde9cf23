//! Turns `driver.table` into the exported functions, and sets how the library is linked.

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
    let code = generate(&table);
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    fs::write(Path::new(&out).join("table.rs"), code).expect("OUT_DIR is writable");
}

fn generate(table: &str) -> String {
    let lines: Vec<&str> =
        table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let mut code = String::new();
    let (mut names, mut slots, mut indices, mut wrapped) =
        (String::new(), String::new(), String::new(), String::new());
    for (i, line) in lines.iter().enumerate() {
        let mut words = line.split(' ');
        let (name, class) = (words.next().expect("a name"), words.next().expect("a class"));
        let arguments = words.next().map(|n| n.parse::<usize>().expect("a number"));
        // What passes the gate and has no form of its own may touch any memory.
        let none = if class == "watch" { "none" } else { "unknown" };
        // The one that is applied before the call, and the one for after it has succeeded.
        let form = match (words.next(), words.next()) {
            (Some("then"), Some(form)) => format!("none {form}"),
            (form, None) => format!("{} none", form.unwrap_or(none)),
            _ => panic!("driver.table: cannot read {line:?}"),
        };
        writeln!(names, "    c\"{name}\",").unwrap();
        writeln!(slots, "    AtomicPtr::new(stub_{i} as *const () as *mut ()),").unwrap();
        writeln!(indices, "    pub(crate) const {name}: usize = {i};").unwrap();
        writeln!(code, "stub!(stub_{i}, {i});").unwrap();
        match (class, arguments) {
            ("forward", None) => writeln!(code, "forward!({name}, {i});").unwrap(),
            ("track", None) => {
                writeln!(wrapped, "    Wrapper({i}, crate::track::{name} as *const ()),").unwrap();
            }
            ("sync", Some(n)) => {
                let list: Vec<String> = (0..n).map(|n| format!("a{n}")).collect();
                // `CU_STREAM_PER_THREAD` and `CU_STREAM_LEGACY`
                let stream = if name.ends_with("_ptds") { 2 } else { 1 };
                writeln!(code, "sync!({name}, {i}, {form}, {stream}, {});", list.join(" "))
                    .unwrap();
                writeln!(wrapped, "    Wrapper({i}, {name} as *const ()),").unwrap();
            }
            ("gate" | "launch" | "note" | "watch", Some(n)) => {
                let list: Vec<String> = (0..n).map(|n| format!("a{n}")).collect();
                writeln!(code, "{class}!({name}, {i}, {form}, {});", list.join(" ")).unwrap();
                writeln!(wrapped, "    Wrapper({i}, {name} as *const ()),").unwrap();
            }
            _ => panic!("driver.table: cannot read {line:?}"),
        }
    }
    let count = lines.len();
    format!(
        "/// How many functions the table has.\n\
         pub(crate) const COUNT: usize = {count};\n\
         /// Their names.\n\
         pub(crate) static NAMES: [&CStr; COUNT] = [\n{names}];\n\
         /// Where each goes: the real function, or at first a stub that looks it up.\n\
         pub(crate) static SLOTS: [AtomicPtr<()>; COUNT] = [\n{slots}];\n\
         /// Positions by name.\n\
         #[allow(non_upper_case_globals, dead_code)]\n\
         pub(crate) mod index {{\n{indices}}}\n\
         /// The functions that are more than a jump.\n\
         pub(crate) static WRAPPED: &[Wrapper] = &[\n{wrapped}];\n\
         {code}"
    )
}
