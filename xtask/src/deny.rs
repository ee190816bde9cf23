//! `cargo xtask deny`: what gpucr depends on, against `deny.toml`, as cargo-deny would.

use std::collections::{BTreeMap, HashSet};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use toml_edit::{DocumentMut, Item};

use crate::sys;

/// What `deny.toml` says.
#[derive(Default)]
struct Policy {
    targets: Vec<String>,
    licenses: Vec<String>,
    registries: Vec<String>,
    /// Names, and the versions that may be there in addition to another: the first numbers of them.
    skipped: Vec<(String, String)>,
}

/// Checks licences, sources and duplicates of everything that is built for, or with, gpucr.
///
/// # Errors
/// Lists whatever breaks the rules; or `deny.toml` cannot be read.
pub(crate) fn run() -> Result<()> {
    let path = sys::root().join("deny.toml");
    let text = std::fs::read_to_string(&path).context("cannot read deny.toml")?;
    let policy = Policy::read(&text).context("deny.toml")?;
    let mut command = sys::cargo();
    command.args(["metadata", "--format-version=1", "--locked"]);
    for target in &policy.targets {
        command.args(["--filter-platform", target]);
    }
    let metadata: Value = serde_json::from_str(&sys::capture(&mut command)?)?;
    let packages = packages(&metadata)?;
    let problems = policy.problems(&packages);
    if !problems.is_empty() {
        bail!("against the rules of deny.toml:\n  {}", problems.join("\n  "));
    }
    sys::say("dependencies", format!("{} crates, as deny.toml wants them", packages.len()));
    Ok(())
}

/// A crate that is built.
#[derive(Debug, Clone, Default)]
struct Package {
    name: String,
    version: String,
    license: String,
    /// None for one of this repository.
    source: Option<String>,
}

/// The packages that `cargo metadata` has resolved; it lists those of other platforms too.
fn packages(metadata: &Value) -> Result<Vec<Package>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("no resolved crates")?;
    let ids: HashSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let all = metadata["packages"].as_array().context("no crates")?.iter();
    let used = all.filter(|package| package["id"].as_str().is_some_and(|id| ids.contains(id)));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let package = |package: &Value| Package {
        name: text(&package["name"]),
        version: text(&package["version"]),
        license: text(&package["license"]),
        source: package["source"].as_str().map(str::to_owned),
    };
    Ok(used.map(package).collect())
}

impl Policy {
    fn read(text: &str) -> Result<Self> {
        let document: DocumentMut = text.parse()?;
        let list = |table: &str, key: &str| -> Result<Vec<String>> {
            let list =
                document.get(table).and_then(|table| table.get(key)).and_then(Item::as_array);
            let list = list.with_context(|| format!("no list [{table}] {key}"))?;
            let texts = list.iter().map(|item| item.as_str().map(str::to_owned));
            texts
                .collect::<Option<_>>()
                .with_context(|| format!("[{table}] {key} is no list of texts"))
        };
        let skip = document.get("bans").and_then(|bans| bans.get("skip")).and_then(Item::as_array);
        let skipped = skip.context("no list [bans] skip")?.iter().map(|item| {
            let named = item.as_inline_table()?.get("crate")?.as_str()?;
            let (name, version) = named.split_once('@')?;
            Some((name.to_owned(), version.to_owned()))
        });
        let skipped = skipped.collect::<Option<_>>();
        Ok(Self {
            targets: list("graph", "targets")?,
            licenses: list("licenses", "allow")?,
            registries: list("sources", "allow-registry")?,
            skipped: skipped.context("[bans] skip wants { crate = \"NAME@VERSION\", … }")?,
        })
    }

    /// What breaks the rules.
    fn problems(&self, packages: &[Package]) -> Vec<String> {
        let mut problems = Vec::new();
        let mut unused: Vec<&(String, String)> = self.skipped.iter().collect();
        let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for package in packages {
            let Package { name, version, license, source } = package;
            if !self.allows(license) {
                problems.push(format!("{name} {version} has the licence `{license}`"));
            }
            let registry = source.as_ref().and_then(|source| source.strip_prefix("registry+"));
            let is_known = |registry: &str| self.registries.iter().any(|known| known == registry);
            if source.is_some() && !registry.is_some_and(is_known) {
                let source = source.as_deref().unwrap_or_default();
                problems.push(format!("{name} {version} comes from {source}"));
            }
            let is_meant = |skip: &(String, String)| skip.0 == *name && begins(version, &skip.1);
            unused.retain(|skip| !is_meant(skip));
            if !self.skipped.iter().any(is_meant) {
                versions.entry(name).or_default().push(version);
            }
        }
        for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
            problems.push(format!("{name} is there more than once: {}", versions.join(", ")));
        }
        let unused = unused.iter().map(|(name, version)| {
            format!("{name}@{version} is skipped, and is not there: take it out of deny.toml")
        });
        problems.extend(unused);
        problems
    }

    /// Whether the terms of an SPDX expression can be met with allowed licences. A slash is what `OR` was once.
    fn allows(&self, expression: &str) -> bool {
        let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
        let words: Vec<&str> = spaced.split_whitespace().collect();
        let mut rest = &words[..];
        self.any(&mut rest) == Some(true) && rest.is_empty()
    }

    /// One or more with `OR` between them. `None` if it is no expression.
    fn any(&self, words: &mut &[&str]) -> Option<bool> {
        let mut allowed = self.all(words)?;
        while let ["OR", rest @ ..] = *words {
            *words = rest;
            allowed |= self.all(words)?;
        }
        Some(allowed)
    }

    /// One or more with `AND` between them.
    fn all(&self, words: &mut &[&str]) -> Option<bool> {
        let mut allowed = self.one(words)?;
        while let ["AND", rest @ ..] = *words {
            *words = rest;
            allowed &= self.one(words)?;
        }
        Some(allowed)
    }

    fn one(&self, words: &mut &[&str]) -> Option<bool> {
        let is_listed = |name: &str| self.licenses.iter().any(|license| license == name);
        match *words {
            ["(", rest @ ..] => {
                *words = rest;
                let allowed = self.any(words)?;
                *words = words.strip_prefix(&[")"])?;
                Some(allowed)
            }
            [name, "WITH", exception, rest @ ..] => {
                *words = rest;
                Some(is_listed(&format!("{name} WITH {exception}")))
            }
            ["OR" | "AND" | ")", ..] | [] => None,
            [name, rest @ ..] => {
                *words = rest;
                Some(is_listed(name))
            }
        }
    }
}

/// Whether a version begins with these numbers.
fn begins(version: &str, numbers: &str) -> bool {
    version
        .strip_prefix(numbers)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '-', '+']))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> Policy {
        let text = |text: &str| text.to_owned();
        Policy {
            targets: Vec::new(),
            licenses: ["MIT", "Apache-2.0", "Unicode-3.0"].map(text).to_vec(),
            registries: vec![text("https://index")],
            skipped: vec![(text("syn"), text("2"))],
        }
    }

    fn package(name: &str, version: &str) -> Package {
        Package {
            name: name.into(),
            version: version.into(),
            license: "MIT".into(),
            source: Some("registry+https://index".into()),
        }
    }

    #[test]
    fn expressions_of_licences_are_understood() {
        for (expression, allowed) in [
            ("MIT", true),
            ("MIT OR GPL-3.0", true),
            ("MIT/GPL-3.0", true),
            ("Unlicense OR Apache-2.0 / X", true),
            ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
            ("MIT AND GPL-3.0", false),
            ("GPL-3.0 OR MIT AND X", false),
            ("Apache-2.0 WITH LLVM-exception", false),
            ("Apache-2.0 WITH LLVM-exception OR MIT", true),
            ("", false),
            ("MIT OR", false),
            ("(MIT", false),
            ("MIT MIT", false),
        ] {
            assert_eq!(policy().allows(expression), allowed, "{expression}");
        }
    }

    #[test]
    fn each_rule_can_be_broken() {
        let good = [package("syn", "2.0.1"), package("syn", "3.0.0"), package("a", "1.0.0")];
        let own = Package { source: None, ..package("own", "0.1.0") };
        let with = |package: Package| [&good[..], &[own.clone(), package]].concat();
        let broken = |packages: &[Package]| policy().problems(packages).join("; ");
        assert_eq!(broken(&with(package("b", "1.0.0"))), "");
        let other = Package { license: "GPL-3.0".into(), ..package("b", "1.0.0") };
        assert_eq!(broken(&with(other)), "b 1.0.0 has the licence `GPL-3.0`");
        let source = Some("git+https://elsewhere".into());
        let other = Package { source, ..package("b", "1.0.0") };
        assert_eq!(broken(&with(other)), "b 1.0.0 comes from git+https://elsewhere");
        let twice = "a is there more than once: 1.0.0, 2.0.0";
        assert_eq!(broken(&with(package("a", "2.0.0"))), twice);
        assert!(broken(&with(package("syn", "20.0.0"))).starts_with("syn is there more than once"));
        assert!(broken(&good[1..]).starts_with("syn@2 is skipped, and is not there"));
    }

    #[test]
    fn the_policy_can_be_read() {
        let text = std::fs::read_to_string(sys::root().join("deny.toml")).unwrap();
        let policy = Policy::read(&text).unwrap();
        assert!(policy.allows("MIT OR Apache-2.0") && !policy.allows("GPL-3.0"));
        assert!(!policy.skipped.is_empty() && !policy.targets.is_empty());
        assert_eq!(policy.registries, ["https://github.com/rust-lang/crates.io-index"]);
        assert!(Policy::read("[licenses]\nallow = [1]").is_err());
    }
}
