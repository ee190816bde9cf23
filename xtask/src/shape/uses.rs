//! Which files of a crate use which, and where they do so in circles.
//!
//! A file uses another if it names something that the other defines: in a `use`, or by a path anywhere
//! else, in the arguments of macros and in the texts of attributes too. What a module only passes on by
//! `pub use` is counted as a use of the file that it comes from. Declarations (`mod a;`), tests and
//! documentation are no uses.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ImplItem, Item, Meta, UseTree, Visibility};

use super::tree::{self, Tree};

/// Names from the root of the crate to a module, or to something in it.
type Path = Vec<String>;

/// What the files of a crate use. A file has the name of its module, as in `a::b`; the root is `crate`.
#[derive(Debug, Default)]
pub(crate) struct Uses {
    /// Each file with those that it uses.
    pub(crate) files: BTreeMap<String, BTreeSet<String>>,
    /// The names that follow `crate::`, however the root is written.
    pub(crate) heads: BTreeMap<String, BTreeSet<String>>,
}

/// Files that use each other, on whatever way, in the order of their names.
pub(crate) type Circle = Vec<String>;

impl Uses {
    /// Reads what the files of a crate use; tests are left out.
    pub(crate) fn of(tree: &Tree) -> Self {
        let mut names = Names::default();
        let mut mentions = Vec::new();
        for file in tree.files.iter().filter(|file| !file.is_test) {
            let mut reader = Reader {
                file: shown(&file.module),
                module: file.module.clone(),
                names: &mut names,
                mentions: &mut mentions,
            };
            reader.names.modules.insert(file.module.clone(), shown(&file.module));
            reader.visit_file(&file.syntax);
        }
        let mut uses = Self::default();
        for file in tree.files.iter().filter(|file| !file.is_test) {
            uses.files.entry(shown(&file.module)).or_default();
            uses.heads.entry(shown(&file.module)).or_default();
        }
        let taken: BTreeSet<(&str, &str)> = mentions
            .iter()
            .filter(|mention| mention.path.len() > 1)
            .map(|mention| (mention.file.as_str(), mention.path[0].as_str()))
            .collect();
        for mention in &mentions {
            let alias = mention.imported_as.as_deref();
            let is_taken = alias.is_some_and(|alias| taken.contains(&(&*mention.file, alias)));
            uses.add(mention, &names, is_taken);
        }
        uses
    }

    /// Adds what a path uses; `is_taken` tells that the file has paths which begin with its alias.
    fn add(&mut self, mention: &Mention, names: &Names, is_taken: bool) {
        let Mention { file, module, path, imported_as } = mention;
        let is_bare = path.len() == 1 && imported_as.is_none();
        let absolute = if is_bare { None } else { names.absolute(module, path, FUEL) };
        let Some(absolute) = absolute else {
            // Perhaps a name that a `use a::*` brings.
            for used in names.brought(module, path) {
                self.insert(file, Some(used));
            }
            return;
        };
        if is_way(&path[0]) {
            let head = absolute.first().map_or("*", String::as_str).to_owned();
            self.heads.entry(file.clone()).or_default().insert(head);
        }
        // A module that is imported is used where something is taken out of it.
        if !is_taken || !names.modules.contains_key(&absolute) {
            self.insert(file, names.lead(&absolute, FUEL));
        }
    }

    fn insert(&mut self, file: &str, used: Option<String>) {
        if let Some(used) = used.filter(|used| used != file) {
            self.files.entry(file.to_owned()).or_default().insert(used);
        }
    }

    /// The circles, the largest first.
    pub(crate) fn circles(&self) -> Vec<Circle> {
        let reached: BTreeMap<&str, BTreeSet<&str>> =
            self.files.keys().map(|file| (file.as_str(), self.reached(file))).collect();
        let mut found = BTreeSet::new();
        for (file, others) in &reached {
            let back = |other: &&&str| reached.get(**other).is_some_and(|back| back.contains(file));
            let circle: Circle =
                others.iter().filter(back).map(|file| (*file).to_owned()).collect();
            if !circle.is_empty() {
                found.insert(circle);
            }
        }
        let mut found: Vec<Circle> = found.into_iter().collect();
        found.sort_by_key(|circle| std::cmp::Reverse(circle.len()));
        found
    }

    /// What a file uses, directly or by others.
    fn reached<'a>(&'a self, file: &'a str) -> BTreeSet<&'a str> {
        let mut reached = BTreeSet::new();
        let mut rest = vec![file];
        while let Some(file) = rest.pop() {
            for other in self.files.get(file).into_iter().flatten() {
                if reached.insert(other.as_str()) {
                    rest.push(other);
                }
            }
        }
        reached
    }
}

/// The name of a module.
fn shown(module: &[String]) -> String {
    if module.is_empty() { "crate".to_owned() } else { module.join("::") }
}

/// Whether a path that begins so says where it begins.
fn is_way(head: &str) -> bool {
    matches!(head, "crate" | "super" | "self")
}

/// How many imports are followed from one to the next: names may be passed on in circles.
const FUEL: usize = 16;

/// A path that stands in a file.
struct Mention {
    file: String,
    /// The module in which the path stands: that of the file, or one inside of it.
    module: Path,
    /// The path as it is written.
    path: Path,
    /// The name that a `use` gives to it; `*` for all that is in it.
    imported_as: Option<String>,
}

/// An import: what it names, as it is written, and whether others may take it from there.
struct Import {
    path: Path,
    is_passed_on: bool,
}

/// What the modules of a crate define, import and pass on.
#[derive(Default)]
struct Names {
    /// The file of each module.
    modules: BTreeMap<Path, String>,
    defined: BTreeSet<(Path, String)>,
    imports: BTreeMap<(Path, String), Import>,
    /// `use a::*`.
    globs: BTreeMap<Path, Vec<Import>>,
}

impl Names {
    /// A path from the root, for one that stands in a module; none if it leads out of the crate or to
    /// what the module has itself.
    fn absolute(&self, module: &[String], path: &[String], fuel: usize) -> Option<Path> {
        let fuel = fuel.checked_sub(1)?;
        let (head, rest) = path.split_first()?;
        match head.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                let outer = &module[..module.len().checked_sub(ups)?];
                Some([outer, &path[ups..]].concat())
            }
            name => {
                let inner = [module, path].concat();
                if self.modules.contains_key(&inner[..=module.len()]) {
                    return Some(inner);
                }
                let import = self.imports.get(&(module.to_vec(), name.to_owned()))?;
                // `use a;` of another crate.
                if import.path[0] == *name {
                    return None;
                }
                let origin = self.absolute(module, &import.path, fuel)?;
                Some([&origin, rest].concat())
            }
        }
    }

    /// The files that define a path of a module which begins with a name from a `use a::*`.
    fn brought(&self, module: &[String], path: &[String]) -> Vec<String> {
        let key = (module.to_vec(), path[0].clone());
        if self.defined.contains(&key) || self.imports.contains_key(&key) {
            return Vec::new();
        }
        let globs = self.globs.get(module).into_iter().flatten();
        let origins = globs.filter_map(|glob| self.absolute(module, &glob.path, FUEL));
        let having = origins.filter(|origin| self.has(origin, &path[0], FUEL));
        having.filter_map(|origin| self.lead(&[&origin, path].concat(), FUEL)).collect()
    }

    /// The file that defines what a path from the root names.
    fn lead(&self, path: &[String], fuel: usize) -> Option<String> {
        let fuel = fuel.checked_sub(1)?;
        let depth = (0..=path.len()).rev().find(|n| self.modules.contains_key(&path[..*n]))?;
        let (module, rest) = path.split_at(depth);
        let Some((name, rest)) = rest.split_first() else {
            return self.modules.get(module).cloned();
        };
        let key = (module.to_vec(), name.clone());
        if let Some(import) = self.imports.get(&key).filter(|import| import.is_passed_on)
            && let Some(origin) = self.absolute(module, &import.path, FUEL)
            && origin != path
        {
            return self.lead(&[&origin, rest].concat(), fuel);
        }
        if !self.defined.contains(&key) {
            let globs = self.globs.get(module).into_iter().flatten();
            for glob in globs.filter(|glob| glob.is_passed_on) {
                let Some(origin) = self.absolute(module, &glob.path, FUEL) else { continue };
                if self.has(&origin, name, fuel) {
                    let path = [&origin, std::slice::from_ref(name), rest].concat();
                    return self.lead(&path, fuel);
                }
            }
        }
        self.modules.get(module).cloned()
    }

    /// Whether a module has a name that others can take from it.
    fn has(&self, module: &[String], name: &str, fuel: usize) -> bool {
        let Some(fuel) = fuel.checked_sub(1) else { return false };
        let key = (module.to_vec(), name.to_owned());
        self.defined.contains(&key)
            || self.imports.get(&key).is_some_and(|import| import.is_passed_on)
            || self.globs.get(module).into_iter().flatten().any(|glob| {
                let origin = self.absolute(module, &glob.path, FUEL);
                glob.is_passed_on && origin.is_some_and(|origin| self.has(&origin, name, fuel))
            })
    }
}

/// Reads one file.
struct Reader<'a> {
    file: String,
    module: Path,
    names: &'a mut Names,
    mentions: &'a mut Vec<Mention>,
}

impl Reader<'_> {
    fn mention(&mut self, path: Path, imported_as: Option<String>) {
        let (file, module) = (self.file.clone(), self.module.clone());
        self.mentions.push(Mention { file, module, path, imported_as });
    }

    fn define(&mut self, ident: &syn::Ident) {
        self.names.defined.insert((self.module.clone(), tree::name(ident)));
    }

    /// An exported macro has its name at the root of the crate, wherever it stands.
    fn define_at_root(&mut self, ident: &syn::Ident) {
        if self.module.is_empty() {
            return;
        }
        let way = ["crate".to_owned()];
        let path = [&way, &*self.module, &[tree::name(ident)]].concat();
        let key = (Vec::new(), tree::name(ident));
        self.names.imports.insert(key, Import { path, is_passed_on: true });
    }

    /// Follows a `use` to each of its ends.
    fn import(&mut self, before: &[String], end: &UseTree, is_passed_on: bool) {
        let with = |ident: &syn::Ident| [before, &[tree::name(ident)]].concat();
        let (path, alias) = match end {
            UseTree::Path(path) => {
                return self.import(&with(&path.ident), &path.tree, is_passed_on);
            }
            UseTree::Group(group) => {
                return group.items.iter().for_each(|end| self.import(before, end, is_passed_on));
            }
            UseTree::Glob(_) if before.is_empty() => return,
            UseTree::Glob(_) => {
                let import = Import { path: before.to_vec(), is_passed_on };
                self.names.globs.entry(self.module.clone()).or_default().push(import);
                return self.mention(before.to_vec(), Some("*".to_owned()));
            }
            UseTree::Name(end) if end.ident == "self" && !before.is_empty() => {
                (before.to_vec(), before.last().cloned())
            }
            UseTree::Name(end) => (with(&end.ident), Some(tree::name(&end.ident))),
            UseTree::Rename(end) => {
                let path = if end.ident == "self" { before.to_vec() } else { with(&end.ident) };
                (path, Some(tree::name(&end.rename)))
            }
        };
        if path.is_empty() {
            return;
        }
        let alias = alias.unwrap_or_default();
        let key = (self.module.clone(), alias.clone());
        self.names.imports.insert(key, Import { path: path.clone(), is_passed_on });
        self.mention(path, Some(alias));
    }

    /// Finds paths in what macros and attributes are given, which has no syntax of its own.
    fn scan(&mut self, tokens: TokenStream, reads_texts: bool) {
        let mut found = Vec::new();
        scan(tokens, reads_texts, &mut found);
        for path in found {
            self.mention(path, None);
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if tree::is_for_tests(tree::attributes(item)) {
            return;
        }
        match item {
            Item::Const(item) => self.define(&item.ident),
            Item::Enum(item) => self.define(&item.ident),
            Item::Fn(item) => self.define(&item.sig.ident),
            Item::Macro(item) => item.ident.iter().for_each(|ident| {
                self.define(ident);
                if item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) {
                    self.define_at_root(ident);
                }
            }),
            Item::Static(item) => self.define(&item.ident),
            Item::Struct(item) => self.define(&item.ident),
            Item::Trait(item) => self.define(&item.ident),
            Item::Type(item) => self.define(&item.ident),
            Item::Union(item) => self.define(&item.ident),
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if item.content.is_none() {
            return;
        }
        self.module.push(tree::name(&item.ident));
        self.names.modules.insert(self.module.clone(), self.file.clone());
        visit::visit_item_mod(self, item);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            let is_passed_on = !matches!(item.vis, Visibility::Inherited);
            self.import(&[], &item.tree, is_passed_on);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        let attributes: &[Attribute] = match item {
            ImplItem::Const(item) => &item.attrs,
            ImplItem::Fn(item) => &item.attrs,
            _ => &[],
        };
        if !tree::is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        visit::visit_path(self, path);
        if path.leading_colon.is_none() {
            let names = path.segments.iter().map(|segment| tree::name(&segment.ident));
            self.mention(names.collect(), None);
        }
    }

    /// Whom something is shown to is no use of them.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.visit_path(&mac.path);
        self.scan(mac.tokens.clone(), false);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta
            && !list.path.is_ident("doc")
        {
            self.scan(list.tokens.clone(), true);
        }
    }
}

/// Paths of at least two names in tokens, and in texts among them if those are read too.
fn scan(tokens: TokenStream, reads_texts: bool, found: &mut Vec<Path>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is = |at: usize, c: char| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == c);
    let mut at = 0;
    while at < tokens.len() {
        match &tokens[at] {
            TokenTree::Ident(ident) => {
                // A name that a macro is given, or the rest of a path, does not begin one.
                let is_given = at > 0 && is(at - 1, '$') && ident != "crate";
                let goes_on = at > 1 && is(at - 1, ':') && is(at - 2, ':');
                let mut paths = Vec::new();
                at = path(&tokens, at, &[], &mut paths);
                if !is_given && !goes_on {
                    found.extend(paths.into_iter().filter(|path| path.len() > 1));
                }
                continue;
            }
            TokenTree::Group(group) => scan(group.stream(), reads_texts, found),
            TokenTree::Literal(text) if reads_texts => {
                if let syn::Lit::Str(text) = syn::Lit::new(text.clone())
                    && let Ok(path) = text.parse::<syn::Path>()
                    && path.segments.len() > 1
                {
                    let names = path.segments.iter().map(|segment| tree::name(&segment.ident));
                    found.push(names.collect());
                }
            }
            _ => {}
        }
        at += 1;
    }
}

/// Reads the path that begins at a name, with each end of a list in braces; returns where it ends.
fn path(tokens: &[TokenTree], at: usize, before: &[String], found: &mut Vec<Path>) -> usize {
    let Some(TokenTree::Ident(ident)) = tokens.get(at) else { return at + 1 };
    let path = [before, &[tree::name(ident)]].concat();
    let colon = |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    if colon(at + 1) && colon(at + 2) {
        match tokens.get(at + 3) {
            Some(TokenTree::Ident(_)) => return self::path(tokens, at + 3, &path, found),
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(punct) if punct.as_char() == ',');
                for part in inner.split(is_comma) {
                    self::path(part, 0, &path, found);
                }
                return at + 4;
            }
            _ => {}
        }
    }
    found.push(path);
    at + 1
}

#[cfg(test)]
mod tests;
