//! The workspace's Rust sources as cargo and rustc see them: packages, their crates, and the files of
//! each crate, found by `mod` declarations.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;
use syn::{Attribute, Item, Meta};

use crate::sys;

/// A package of the workspace.
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) crates: Vec<Tree>,
}

/// The files of one crate: a library, a program, an example, a test.
#[derive(Default)]
pub(crate) struct Tree {
    pub(crate) files: Vec<File>,
}

/// A file of a crate: one module, with those written inside of it.
pub(crate) struct File {
    /// Names from the root of the crate; that of the root itself has none.
    pub(crate) module: Vec<String>,
    /// Where the file lies, from the folder of the workspace.
    pub(crate) path: PathBuf,
    pub(crate) text: String,
    pub(crate) syntax: syn::File,
    /// Nothing of it is in what is built for users.
    pub(crate) is_test: bool,
}

impl Package {
    /// The packages of the workspace in a folder.
    ///
    /// # Errors
    /// There is no workspace that `cargo metadata` can read, or a source file is missing or no Rust.
    pub(crate) fn all(dir: &Path) -> Result<Vec<Self>> {
        let dir = dir.canonicalize().with_context(|| format!("no folder {}", dir.display()))?;
        let mut command = Command::new(sys::cargo().get_program());
        command.args(["metadata", "--format-version=1", "--no-deps", "--manifest-path"]);
        let text = sys::capture(command.current_dir(&dir).arg(dir.join("Cargo.toml")))?;
        let metadata: Value = serde_json::from_str(&text)?;
        let packages = metadata["packages"].as_array().context("no packages")?;
        packages.iter().map(|package| Self::read(&dir, package)).collect()
    }

    fn read(dir: &Path, metadata: &Value) -> Result<Self> {
        let text = |value: &Value, key: &str| {
            let text = value[key].as_str().map(str::to_owned);
            text.with_context(|| format!("cargo metadata says no `{key}`"))
        };
        let manifest = PathBuf::from(text(metadata, "manifest_path")?);
        let home = manifest.parent().context("a manifest lies in a folder")?;
        let crates = metadata["targets"].as_array().into_iter().flatten().map(|target| {
            let root = PathBuf::from(text(target, "src_path")?);
            let is_test = target["kind"][0] == "test";
            Tree::read(&root, &Place { dir, home }, is_test)
        });
        Ok(Self { name: text(metadata, "name")?, crates: crates.collect::<Result<_>>()? })
    }
}

/// Where files are: the folder of the workspace, and that of the package.
struct Place<'a> {
    dir: &'a Path,
    home: &'a Path,
}

impl Tree {
    fn read(root: &Path, place: &Place<'_>, is_test: bool) -> Result<Self> {
        let mut tree = Self::default();
        let beside = root.parent().context("a file lies in a folder")?;
        tree.add(root, beside, Vec::new(), place, is_test)?;
        Ok(tree)
    }

    /// Adds a file and those that it declares; the modules declared in it lie in `inner`.
    fn add(
        &mut self,
        path: &Path,
        inner: &Path,
        module: Vec<String>,
        place: &Place<'_>,
        is_test: bool,
    ) -> Result<()> {
        let text = std::fs::read_to_string(path);
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let short = path.strip_prefix(place.dir).unwrap_or(path).to_owned();
        let is_test = is_test || is_of_tests(path.strip_prefix(place.home).unwrap_or(path));
        let file = File::parse(module.clone(), short, text, is_test)?;
        let mut declared = Vec::new();
        declarations(&file.syntax.items, &[], is_test, &mut declared);
        self.files.push(file);
        for declaration in declared {
            let mut folder = inner.to_owned();
            let (name, outer) = declaration.names.split_last().context("a module has a name")?;
            folder.extend(outer);
            let (beside, below) = (folder.join(format!("{name}.rs")), folder.join(name));
            let (path, inner) = match declaration.path {
                Some(given) => {
                    let from = if outer.is_empty() { path.parent() } else { Some(&*folder) };
                    let path = from.unwrap_or(&folder).join(given);
                    let inner = path.parent().unwrap_or(&folder).to_owned();
                    (path, inner)
                }
                None if beside.is_file() => (beside, below),
                None => (below.join("mod.rs"), below),
            };
            let module = [module.clone(), declaration.names.clone()].concat();
            self.add(&path, &inner, module, place, declaration.is_test)?;
        }
        Ok(())
    }
}

impl File {
    /// A file from its text.
    ///
    /// # Errors
    /// The text is no Rust.
    pub(crate) fn parse(
        module: Vec<String>,
        path: PathBuf,
        text: String,
        is_test: bool,
    ) -> Result<Self> {
        let syntax = syn::parse_file(&text).map_err(|error| {
            let line = error.span().start().line;
            anyhow::anyhow!("{}:{line}: {error}", path.display())
        })?;
        Ok(Self { module, path, text, syntax, is_test })
    }
}

/// Whether a file of a package is there for tests, by its name.
fn is_of_tests(path: &Path) -> bool {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let in_folder = path.components().any(|part| part.as_os_str() == "tests");
    in_folder || stem == "tests" || stem.ends_with("_tests")
}

/// A `mod name;` of a file.
struct Declaration {
    /// Its name behind those of the modules around it in the file.
    names: Vec<String>,
    /// What its `#[path]` says.
    path: Option<String>,
    is_test: bool,
}

fn declarations(items: &[Item], outer: &[String], is_test: bool, found: &mut Vec<Declaration>) {
    for item in items {
        let Item::Mod(item) = item else { continue };
        let names = [outer, &[name(&item.ident)]].concat();
        let is_test = is_test || is_for_tests(&item.attrs);
        if let Some((_, items)) = &item.content {
            declarations(items, &names, is_test, found);
        } else {
            let path = item.attrs.iter().find_map(path_given);
            found.push(Declaration { names, path, is_test });
        }
    }
}

/// The path of an attribute `#[path = "..."]`.
fn path_given(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(meta) = &attribute.meta else { return None };
    let syn::Expr::Lit(value) = &meta.value else { return None };
    let syn::Lit::Str(text) = &value.lit else { return None };
    meta.path.is_ident("path").then(|| text.value())
}

/// A name as it is written where it needs no `r#`.
pub(crate) fn name(ident: &syn::Ident) -> String {
    ident.to_string().trim_start_matches("r#").to_owned()
}

/// Whether what has these attributes is built for tests only.
pub(crate) fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let is_cfg = attribute.path().is_ident("cfg");
        attribute.path().is_ident("test")
            || is_cfg && attribute.parse_args::<Meta>().is_ok_and(|meta| needs_test(&meta))
    })
}

/// Whether a condition of `cfg` holds in tests only.
fn needs_test(condition: &Meta) -> bool {
    let parts = |meta: &syn::MetaList| {
        let list = syn::punctuated::Punctuated::<Meta, syn::Token![,]>::parse_terminated;
        meta.parse_args_with(list).into_iter().flatten().collect::<Vec<_>>()
    };
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => parts(list).iter().any(needs_test),
        Meta::List(list) if list.path.is_ident("any") => {
            let parts = parts(list);
            !parts.is_empty() && parts.iter().all(needs_test)
        }
        _ => false,
    }
}

/// The attributes of an item.
pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// First and last line of a piece of a file.
pub(crate) fn lines(piece: &impl syn::spanned::Spanned) -> (usize, usize) {
    let span = piece.span();
    (span.start().line, span.end().line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_found_where_rustc_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "src/lib.rs",
            "mod a; mod b; mod inline { mod deep; } #[cfg(test)] mod check;\n\
             #[path = \"other/name.rs\"] mod given;",
        );
        write("src/a.rs", "mod c; #[cfg(all(test, unix))] mod more_tests;");
        write("src/a/c.rs", "");
        write("src/a/more_tests.rs", "");
        write("src/b/mod.rs", "mod tests; mod d;");
        write("src/b/tests.rs", "");
        write("src/b/d.rs", "");
        write("src/inline/deep.rs", "");
        write("src/check.rs", "mod support;");
        write("src/check/support.rs", "");
        write("src/other/name.rs", "mod beside;");
        write("src/other/beside.rs", "");
        let place = Place { dir: dir.path(), home: dir.path() };
        let tree = Tree::read(&dir.path().join("src/lib.rs"), &place, false).unwrap();
        let found = |is_test: bool| {
            let files = tree.files.iter().filter(|file| file.is_test == is_test);
            files.map(|file| file.module.join("::")).collect::<Vec<_>>()
        };
        assert_eq!(
            found(false),
            ["", "a", "a::c", "b", "b::d", "inline::deep", "given", "given::beside"]
        );
        assert_eq!(found(true), ["a::more_tests", "b::tests", "check", "check::support"]);
    }

    #[test]
    fn only_what_tests_alone_have_is_left_out() {
        let is = |text: &str| is_for_tests(attributes(&syn::parse_str(text).unwrap()));
        assert!(is("#[cfg(test)] mod a;"));
        assert!(is("#[test] fn a() {}"));
        assert!(is("#[cfg(all(unix, test))] fn a() {}"));
        assert!(!is("#[cfg(any(unix, test))] fn a() {}"));
        assert!(!is("#[cfg(not(test))] use a::b;"));
        assert!(!is("#[cfg_attr(test, allow(dead_code))] struct A;"));
    }

    #[test]
    fn what_is_no_rust_is_an_error_with_its_line() {
        let error = File::parse(Vec::new(), "a.rs".into(), "fn a() {}\nfn {".into(), false);
        let error = error.err().expect("this is no Rust").to_string();
        assert!(error.starts_with("a.rs:2:"), "{error}");
    }
}
