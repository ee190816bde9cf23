use super::*;
use crate::shape::tree::File;

/// What files use, by the names of their modules.
pub(crate) fn uses(texts: &[(&str, &str)]) -> Uses {
    let file = |(name, text): &(&str, &str)| {
        let module = name.split("::").filter(|name| *name != "crate").map(str::to_owned).collect();
        File::parse(module, format!("{name}.rs").into(), (*text).to_owned(), false).unwrap()
    };
    Uses::of(&Tree { files: texts.iter().map(file).collect() })
}

/// Everything that one file of some uses.
fn used(texts: &[(&str, &str)], file: &str) -> Vec<String> {
    uses(texts).files[file].iter().cloned().collect()
}

fn circles(texts: &[(&str, &str)]) -> Vec<String> {
    uses(texts).circles().iter().map(|circle| circle.join(" ")).collect()
}

#[test]
fn circles_are_found() {
    let direct = [("a", "use crate::b::B;"), ("b", "fn f(a: &crate::a::A) {}")];
    assert_eq!(circles(&direct), ["a b"]);
    let lists = [("a", "use crate::{c, b::{self, B}};"), ("b", "use super::a;"), ("c", "")];
    assert_eq!(circles(&lists), ["a b"]);
    let inner = [("a", "mod b;\nfn f() { b::g() }"), ("a::b", "use super::A;")];
    assert_eq!(circles(&inner), ["a a::b"]);
    // By way of a third.
    let three = [("a", "use crate::b;"), ("b", "use crate::c;"), ("c", "use crate::a;")];
    assert_eq!(circles(&three), ["a b c"]);
    let root = [("crate", "mod a; fn f() { a::g() }"), ("a", "use crate::A;")];
    assert_eq!(circles(&root), ["a crate"]);
    let two = [
        ("a", "use crate::b;"),
        ("b", "use crate::a;"),
        ("c", "use crate::{a, d};"),
        ("d", "use crate::e;"),
        ("e", "use crate::c;"),
    ];
    assert_eq!(circles(&two), ["c d e", "a b"], "the largest first");
}

#[test]
fn what_a_module_only_passes_on_is_not_its_own() {
    let through = [
        ("a", "pub use c::C; pub use crate::d::D as E; mod b; mod c;"),
        ("a::b", "use super::C;"),
        ("a::c", ""),
        ("d", "use crate::a::C;"),
        ("e", "use crate::a::E;"),
        ("f", "use crate::a; fn f(c: a::C) {}"),
        ("g", "use crate::a::{self, Own};"),
    ];
    assert!(circles(&through).is_empty());
    assert_eq!(used(&through, "d"), ["a::c"]);
    assert_eq!(used(&through, "e"), ["d"]);
    assert_eq!(used(&through, "f"), ["a::c"]);
    assert_eq!(used(&through, "g"), ["a"]);
    // On from one to the next, and by all names at once.
    let far = [
        ("a", "pub(crate) use b::*; mod b; fn own() {}"),
        ("a::b", "pub(crate) use crate::c::C; pub(crate) struct B;"),
        ("c", "pub(crate) struct C;"),
        ("d", "use crate::a::C;"),
        ("e", "use crate::a::*; fn f(_: B) { own() }"),
    ];
    assert_eq!(used(&far, "d"), ["c"]);
    assert_eq!(used(&far, "e"), ["a", "a::b"]);
    let exported = [
        ("crate", "mod a; fn f() {}"),
        ("a", "#[macro_export] macro_rules! m { () => {} }"),
        ("b", "use crate::m;"),
    ];
    assert_eq!(used(&exported, "b"), ["a"]);
    // What a module has imported for itself is taken from it all the same.
    let private = [("a", "use crate::c::C; mod b;"), ("a::b", "use super::C;"), ("c", "")];
    assert_eq!(used(&private, "a::b"), ["a"]);
    let circle = [("a", "pub use crate::b::X;"), ("b", "pub use crate::a::X;")];
    assert!(circles(&circle).is_empty(), "it ends");
}

#[test]
fn paths_are_found_wherever_they_stand() {
    let other = ("b", "");
    let uses_b = |text: &str| used(&[("a", text), other, ("a::c", "")], "a") == ["b"];
    assert!(uses_b("fn f() -> crate::b::B { loop {} }"));
    assert!(uses_b("impl super::b::Trait for X {}"));
    assert!(uses_b("fn f() { <X as crate::b::Trait>::call() }"));
    assert!(uses_b("fn f() { println!(\"{}\", crate::b::f()); }"));
    assert!(uses_b("macro_rules! m { () => { $crate::b::f() } }"));
    assert!(uses_b("table! { use super::b::{B}; }"));
    assert!(uses_b("#[serde(with = \"crate::b\")] struct A;"));
    assert!(uses_b("#[derive(crate::b::Derive)] struct A;"));
    assert!(uses_b("fn f() { crate::b::mac!() }"));
    assert!(uses_b("use crate::b as other; fn f() { other::g() }"));
    assert!(uses_b("mod inner { use super::super::b::B; }"));
    assert!(uses_b("mod inner { pub fn f() { crate::b::g() } } fn g() { inner::f() }"));
    assert!(uses_b("fn f() { use crate::b; b::g(vec![b::h()]) }"));
}

#[test]
fn what_is_no_use_is_not_counted() {
    let texts = |text: &'static str| [("a", text), ("b", "use crate::a;"), ("a::c", "")];
    let uses_none = |text: &'static str| used(&texts(text), "a").is_empty();
    assert!(uses_none("// crate::b\nuse std::b;"));
    assert!(uses_none("//! [`crate::b::B`]\n/// crate::b::B\nfn f() {}"));
    assert!(uses_none("mod c;"));
    assert!(uses_none("pub(super) fn f() {} pub(in crate::b) fn g() {}"));
    assert!(uses_none("#[cfg(test)]\nmod tests { use crate::b::B; }"));
    assert!(uses_none("#[cfg(test)] use crate::b::B; #[test] fn f() { crate::b::f() }"));
    assert!(uses_none("impl A { #[cfg(test)] fn f() { crate::b::f() } }"));
    assert!(uses_none("fn f(c: u32) -> u32 { let b = c; b + c }"), "not modules");
    assert!(uses_none("use ::b::B; use libc; fn f() { libc::b::g(::b::h()) }"), "other crates");
    assert!(uses_none("m! { x::crate_b, $b::f, \"crate::b\" }"));
    assert!(uses_none("use self::inner::f; mod inner { pub fn f() {} }"));
}

#[test]
fn what_follows_a_declaration_of_tests_is_read() {
    let text = "#[cfg(test)]\nmod tests;\nuse crate::b::B;";
    assert_eq!(used(&[("a", text), ("b", "")], "a"), ["b"]);
}

#[test]
fn names_at_the_root_are_told() {
    let texts = [("a", "use crate::{b, c::C}; fn f(_: super::Error) { crate::m!() }"), ("b", "")];
    assert_eq!(uses(&texts).heads["a"], ["Error", "b", "c", "m"].map(str::to_owned).into());
}
