//! Measures of a package: lengths, sizes, and what it shows to others.

use std::collections::HashSet;

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, ReturnType, Signature, Type, Visibility};

use super::tree::{self, File, Package};
use super::uses::{Circle, Uses};

/// A function of more lines is long.
const LONG_FUNCTION: usize = 80;

/// A file of more lines is long.
const LONG_FILE: usize = 600;

/// Something with a size.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Sized {
    pub(crate) size: usize,
    pub(crate) name: String,
    pub(crate) file: String,
}

/// What is measured of a package. Tests are left out but where it is said.
#[derive(Debug, Default)]
pub(crate) struct Measures {
    pub(crate) package: String,
    /// Lines that are neither blank nor a comment, and those of tests.
    pub(crate) code: usize,
    pub(crate) tests: usize,
    /// Files of more than 600 lines, tests too.
    pub(crate) long_files: Vec<Sized>,
    /// What files use, by crate: a package can have a library and programs.
    pub(crate) uses: Vec<Uses>,
    pub(crate) circles: Vec<Circle>,
    pub(crate) longest_function: Sized,
    /// Functions of more than 80 lines, from the first of the signature to the last.
    pub(crate) long_functions: usize,
    pub(crate) largest_struct: Sized,
    /// What is declared `pub`, but for fields, variants and `pub use`.
    pub(crate) public: usize,
    /// Public functions that return a `Result`, and those of them that say which errors.
    pub(crate) fallible: usize,
    pub(crate) with_errors: usize,
}

impl Measures {
    pub(crate) fn of(package: &Package) -> Self {
        let mut measures = Self { package: package.name.clone(), ..Self::default() };
        let mut seen = HashSet::new();
        let files = package.crates.iter().flat_map(|tree| &tree.files);
        // Where crates share a file, that of users counts.
        let (tests, others): (Vec<&File>, Vec<&File>) = files.partition(|file| file.is_test);
        for file in others.into_iter().chain(tests) {
            if seen.insert(&file.path) {
                measures.add(file);
            }
        }
        measures.uses = package.crates.iter().map(Uses::of).collect();
        measures.circles = measures.uses.iter().flat_map(Uses::circles).collect();
        measures.circles.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        measures.long_files.sort_by_key(|file| std::cmp::Reverse(file.size));
        measures
    }

    fn add(&mut self, file: &File) {
        let path = file.path.display().to_string();
        let size = file.text.lines().count();
        if size > LONG_FILE {
            self.long_files.push(Sized { size, name: String::new(), file: path.clone() });
        }
        if file.is_test {
            self.tests += code(&file.text, |_| true);
            return;
        }
        let mut meter = Meter { path, measures: self, tests: Vec::new() };
        meter.visit_file(&file.syntax);
        let tests = meter.tests;
        let is_test =
            |line: usize| tests.iter().any(|(first, last)| (*first..=*last).contains(&line));
        self.code += code(&file.text, |line| !is_test(line));
        self.tests += code(&file.text, is_test);
    }
}

/// Lines that are neither blank nor a comment, of those whose numbers are wanted.
fn code(text: &str, is_wanted: impl Fn(usize) -> bool) -> usize {
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    lines.filter(|(at, line)| !line.is_empty() && !line.starts_with("//") && is_wanted(*at)).count()
}

/// Measures one file.
struct Meter<'a> {
    path: String,
    measures: &'a mut Measures,
    /// First and last lines of tests.
    tests: Vec<(usize, usize)>,
}

impl Meter<'_> {
    fn function(&mut self, name: &str, size: usize) {
        self.measures.long_functions += usize::from(size > LONG_FUNCTION);
        if size > self.measures.longest_function.size {
            let (name, file) = (name.to_owned(), self.path.clone());
            self.measures.longest_function = Sized { size, name, file };
        }
    }

    fn with_body(&mut self, signature: &Signature, body: &syn::Block) {
        let (first, _) = tree::lines(signature);
        let last = body.brace_token.span.close().end().line;
        self.function(&tree::name(&signature.ident), last + 1 - first);
    }

    fn public(&mut self, visibility: &Visibility) -> bool {
        let is_public = matches!(visibility, Visibility::Public(_));
        self.measures.public += usize::from(is_public);
        is_public
    }

    fn promises(&mut self, signature: &Signature, attributes: &[Attribute]) {
        if returns_result(signature) {
            self.measures.fallible += 1;
            self.measures.with_errors += usize::from(says_errors(attributes));
        }
    }

    /// Functions in what a macro is given.
    fn scan(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (at, token) in tokens.iter().enumerate() {
            if let TokenTree::Group(group) = token {
                self.scan(group.stream());
            }
            let [TokenTree::Ident(word), TokenTree::Ident(name), rest @ ..] = &tokens[at..] else {
                continue;
            };
            // Its body comes before the next function.
            let until = rest.iter().take_while(|token| match token {
                TokenTree::Ident(ident) => ident != "fn",
                TokenTree::Punct(punct) => punct.as_char() != ';',
                _ => true,
            });
            let body = until.into_iter().find_map(|token| match token {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => Some(group),
                _ => None,
            });
            if let (true, Some(body)) = (word == "fn", body) {
                let last = body.span_close().end().line;
                self.function(&tree::name(name), last + 1 - word.span().start().line);
            }
        }
    }
}

impl<'ast> Visit<'ast> for Meter<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if tree::is_for_tests(tree::attributes(item)) {
            self.tests.push(tree::lines(item));
            return;
        }
        match item {
            Item::Const(item) => _ = self.public(&item.vis),
            Item::Enum(item) => _ = self.public(&item.vis),
            Item::Fn(item) => {
                self.with_body(&item.sig, &item.block);
                if self.public(&item.vis) {
                    self.promises(&item.sig, &item.attrs);
                }
            }
            Item::Mod(item) => _ = self.public(&item.vis),
            Item::Static(item) => _ = self.public(&item.vis),
            Item::Struct(item) => {
                self.public(&item.vis);
                if item.fields.len() > self.measures.largest_struct.size {
                    let (size, name) = (item.fields.len(), tree::name(&item.ident));
                    self.measures.largest_struct = Sized { size, name, file: self.path.clone() };
                }
            }
            Item::Trait(item) if self.public(&item.vis) => {
                for item in &item.items {
                    if let syn::TraitItem::Fn(function) = item {
                        self.promises(&function.sig, &function.attrs);
                    }
                }
            }
            Item::Type(item) => _ = self.public(&item.vis),
            Item::Union(item) => _ = self.public(&item.vis),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        match item {
            ImplItem::Fn(function) if tree::is_for_tests(&function.attrs) => {
                self.tests.push(tree::lines(function));
                return;
            }
            ImplItem::Fn(function) => {
                self.with_body(&function.sig, &function.block);
                if self.public(&function.vis) {
                    self.promises(&function.sig, &function.attrs);
                }
            }
            ImplItem::Const(item) => _ = self.public(&item.vis),
            _ => {}
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        if let Some(body) = &function.default {
            self.with_body(&function.sig, body);
        }
        visit::visit_trait_item_fn(self, function);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.scan(mac.tokens.clone());
    }
}

fn returns_result(signature: &Signature) -> bool {
    let ReturnType::Type(_, returned) = &signature.output else { return false };
    let Type::Path(path) = &**returned else { return false };
    path.path.segments.last().is_some_and(|last| last.ident.to_string().ends_with("Result"))
}

/// Whether the documentation of a function has a section about its errors.
fn says_errors(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::NameValue(meta) = &attribute.meta else { return false };
        let syn::Expr::Lit(value) = &meta.value else { return false };
        let syn::Lit::Str(text) = &value.lit else { return false };
        meta.path.is_ident("doc") && text.value().lines().any(|line| line.trim() == "# Errors")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::tree::Tree;

    fn measured(files: &[(&str, &str, bool)]) -> Measures {
        let file = |(name, text, is_test): &(&str, &str, bool)| {
            let module = vec![(*name).to_owned()];
            File::parse(module, format!("{name}.rs").into(), (*text).to_owned(), *is_test).unwrap()
        };
        let tree = Tree { files: files.iter().map(file).collect() };
        Measures::of(&Package { name: "package".to_owned(), crates: vec![tree] })
    }

    #[test]
    fn lines_of_code_are_those_with_code() {
        let text = "//! About.\n\nfn f() {\n    // Why.\n    g(); // and more\n}\n\
                    #[cfg(test)]\nmod tests {\n    fn h() {}\n}\n";
        let measures = measured(&[("a", text, false), ("b", "fn f() {}\n", true)]);
        assert_eq!((measures.code, measures.tests), (3, 5));
    }

    #[test]
    fn a_file_in_two_crates_counts_once() {
        let measures = measured(&[("a", "fn f() {}", true), ("a", "fn f() {}", false)]);
        assert_eq!((measures.code, measures.tests), (1, 0));
    }

    #[test]
    fn functions_are_measured_from_signature_to_end() {
        let lines = "    g();\n".repeat(79);
        let text = format!(
            "/// About.\n#[inline]\nfn a() {{\n{lines}}}\nimpl A {{\n    fn b(\n    ) {{\n{lines}}}\n}}\n\
             #[cfg(test)]\nmod tests {{\n    fn c() {{\n{lines}{lines}}}\n}}\n"
        );
        let measures = measured(&[("a", &text, false)]);
        assert_eq!(measures.long_functions, 2);
        let longest = &measures.longest_function;
        assert_eq!((longest.size, &*longest.name, &*longest.file), (82, "b", "a.rs"));
        let in_macro = format!("api! {{\n    call fn d(a: u32) -> X {{\n{lines}    }}\n}}\n");
        let measures = measured(&[("a", &in_macro, false)]);
        assert_eq!((measures.long_functions, measures.longest_function.size), (1, 81));
        assert_eq!(measures.longest_function.name, "d");
    }

    #[test]
    fn the_struct_with_the_most_fields_is_found() {
        let measures = measured(&[("a", "struct A { a: u8 } struct B(u8, u8); struct C;", false)]);
        let largest = &measures.largest_struct;
        assert_eq!((largest.size, &*largest.name), (2, "B"));
    }

    #[test]
    fn what_is_shown_to_all_is_public() {
        let text = "pub struct A { pub a: u8 } pub(crate) struct B; struct C; pub use x::Y; pub mod m;\n\
                    impl A { pub const D: u8 = 1; pub fn e() {} fn f() {} }\n\
                    #[cfg(test)] pub fn g() {}";
        assert_eq!(measured(&[("a", text, false)]).public, 4);
    }

    #[test]
    fn public_functions_with_results_say_their_errors_or_not() {
        let text = "/// A.\n///\n/// # Errors\n/// No.\npub fn a() -> Result<(), E> {}\n\
                    pub fn b() -> io::Result<u8> {}\npub(crate) fn c() -> Result<u8> {}\n\
                    pub trait T { /// # Errors\n fn d() -> CallResult; fn e() -> u8; }";
        let measures = measured(&[("a", text, false)]);
        assert_eq!((measures.fallible, measures.with_errors), (3, 2));
    }

    #[test]
    fn long_files_are_told_tests_too() {
        let (long, short) = ("\n".repeat(601), "\n".repeat(600));
        let measures = measured(&[("a", &long, true), ("b", &short, false)]);
        assert_eq!(measures.long_files.len(), 1);
        assert_eq!((measures.long_files[0].size, &*measures.long_files[0].file), (601, "a.rs"));
    }
}
