//! `cargo xtask mutants`: makes deliberate defects, and shows that the tests find each of them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use toml_edit::{DocumentMut, Item, Table};

use crate::sys;

/// Where the defects are listed, and where it is said what came of them.
const LIST: &str = "xtask/mutants.toml";
const TABLE: &str = "docs/mutants.md";
/// Who has found a defect that no test has found.
const NOTHING: &str = "**nothing**";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Make only those whose name contains this; the rows of the others stay
    #[arg(long)]
    only: Option<String>,
}

/// A defect, and the tests that have to find it.
struct Mutant {
    name: String,
    file: String,
    find: String,
    replace: String,
    packages: Vec<String>,
    tests: String,
}

/// What came of one.
enum Outcome {
    /// The tests that failed.
    Found(Vec<String>),
    /// All of them passed.
    Missed,
}

/// Makes each defect in a copy of this repository, and runs its tests there.
///
/// # Errors
/// A defect was not found, cannot be made, or does not build; or its tests fail without it too.
pub(crate) fn run(args: &Args) -> Result<()> {
    let mut mutants = read(sys::root())?;
    let names: Vec<String> = mutants.iter().map(|mutant| mutant.name.clone()).collect();
    if let Some(only) = &args.only {
        mutants.retain(|mutant| mutant.name.contains(only.as_str()));
        ensure!(!mutants.is_empty(), "no defect has `{only}` in its name");
    }
    let copy = Tree::make()?;
    copy.pass(&mutants)?;
    let path = sys::root().join(TABLE);
    let before = std::fs::read_to_string(&path).unwrap_or_default();
    let mut outcomes = Vec::new();
    for mutant in &mutants {
        let start = Instant::now();
        let outcome = copy.with(mutant).with_context(|| mutant.name.clone())?;
        let said = match &outcome {
            Outcome::Found(by) if by.len() == 1 => "found by 1 test".into(),
            Outcome::Found(by) => format!("found by {} tests", by.len()),
            Outcome::Missed => "NOT FOUND".into(),
        };
        sys::say(&said, format!("{} ({} s)", mutant.name, start.elapsed().as_secs()));
        outcomes.push((mutant, outcome));
        // After each: the next may not build.
        let page = table(&names, &before, &outcomes);
        std::fs::write(&path, page).context(TABLE)?;
    }
    let missed = outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Missed));
    let missed: Vec<_> = missed.map(|(mutant, _)| mutant.name.as_str()).collect();
    ensure!(missed.is_empty(), "no test has found:\n  {}", missed.join("\n  "));
    Ok(())
}

/// The list of defects. Each can be made: what it replaces is there once.
fn read(root: &Path) -> Result<Vec<Mutant>> {
    let text = std::fs::read_to_string(root.join(LIST)).context(LIST)?;
    let document: DocumentMut = text.parse().context(LIST)?;
    let list = document.get("mutant").and_then(Item::as_array_of_tables).context("no defects")?;
    let mutants = list.iter().map(Mutant::read).collect::<Result<Vec<_>>>().context(LIST)?;
    for mutant in &mutants {
        let text = std::fs::read_to_string(root.join(&mutant.file)).context("no such file");
        let times = text.with_context(|| mutant.name.clone())?.matches(&mutant.find).count();
        let Mutant { name, file, .. } = mutant;
        ensure!(times == 1, "{LIST}: `{name}`: what it replaces is in {file} {times} times");
    }
    Ok(mutants)
}

impl Mutant {
    fn read(table: &Table) -> Result<Self> {
        let text = |key: &str| {
            let text = table.get(key).and_then(Item::as_str);
            text.map(str::to_owned).with_context(|| format!("a defect has no text `{key}`"))
        };
        let packages = table.get("packages").and_then(Item::as_array).context("no packages")?;
        let packages = packages.iter().map(|name| name.as_str().map(str::to_owned));
        Ok(Self {
            name: text("name")?,
            file: text("file")?,
            find: text("find")?,
            replace: text("replace")?,
            packages: packages.collect::<Option<_>>().context("packages are texts")?,
            tests: text("tests")?,
        })
    }
}

/// A copy of what git has of this repository, as it is now, which is built in a folder of its own.
struct Tree {
    root: PathBuf,
    target: PathBuf,
}

impl Tree {
    fn make() -> Result<Self> {
        let dir = sys::target_dir()?.join("mutants");
        let (root, target) = (dir.join("tree"), dir.join("target"));
        std::fs::create_dir_all(&root)?;
        let mut list = Command::new("git");
        list.current_dir(sys::root()).args(["ls-files", "--cached", "--others"]);
        let names = sys::capture(list.arg("--exclude-standard"))?;
        for name in names.lines() {
            let (from, to) = (sys::root().join(name), root.join(name));
            // One that was removed and not committed is in the list too.
            let Ok(bytes) = std::fs::read(&from) else { continue };
            // One that is the same keeps its time, so that it is not built again.
            if std::fs::read(&to).is_ok_and(|there| there == bytes) {
                continue;
            }
            std::fs::create_dir_all(to.parent().context("a file lies somewhere")?)?;
            std::fs::copy(&from, &to).with_context(|| name.to_owned())?;
        }
        Ok(Self { root, target })
    }

    fn cargo(&self) -> Command {
        let mut cargo = sys::cargo();
        cargo.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        // Debug information is most of what is written and linked anew for each defect.
        cargo.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_INCREMENTAL", "1");
        cargo
    }

    /// What end-to-end tests start and load.
    fn build(&self) -> Result<()> {
        let packages = ["gpucr", "gpucr-intercept", "softcuda", "gpucr-tests"];
        let packages = packages.iter().flat_map(|package| ["-p", package]);
        sys::run(self.cargo().args(["build", "--quiet"]).args(packages))
    }

    fn tests(&self, packages: &[String], tests: &str) -> Command {
        let mut nextest = self.cargo();
        nextest.args(["nextest", "run", "--profile", "mutants", "--color", "never", "-E", tests]);
        nextest.args(packages.iter().flat_map(|package| ["-p", package]));
        nextest
    }

    /// All tests that are to fail pass without any defect.
    fn pass(&self, mutants: &[Mutant]) -> Result<()> {
        self.build()?;
        let mut packages: Vec<String> =
            mutants.iter().flat_map(|mutant| mutant.packages.clone()).collect();
        packages.sort_unstable();
        packages.dedup();
        let tests: Vec<String> = mutants.iter().map(|m| format!("({})", m.tests)).collect();
        sys::run(&mut self.tests(&packages, &tests.join(" or ")))
    }

    /// Makes the defect, runs its tests, and takes it back.
    fn with(&self, mutant: &Mutant) -> Result<Outcome> {
        let path = self.root.join(&mutant.file);
        let text = std::fs::read_to_string(&path)?;
        std::fs::write(&path, text.replacen(&mutant.find, &mutant.replace, 1))?;
        let outcome = self.run(mutant);
        std::fs::write(&path, text)?;
        outcome
    }

    fn run(&self, mutant: &Mutant) -> Result<Outcome> {
        self.build()?;
        let mut tests = self.tests(&mutant.packages, &mutant.tests);
        let output = tests.stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(Outcome::Missed);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let failed = failed(&said);
        if failed.is_empty() {
            bail!("no test was run:\n{}", sys::tail(&said, 25));
        }
        Ok(Outcome::Found(failed))
    }
}

/// The names of the tests that nextest says have failed.
fn failed(said: &str) -> Vec<String> {
    let lines = said.lines().map(str::trim_start);
    let lines = lines.filter(|line| {
        // A test that fails may leave a process behind, which keeps its output open.
        const WORDS: [&str; 5] = ["FAIL [", "FAIL + LEAK [", "TIMEOUT [", "SIGABRT [", "SIGSEGV ["];
        WORDS.iter().any(|word| line.starts_with(word))
    });
    let names = lines.filter_map(|line| line.split_whitespace().next_back().map(str::to_owned));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// The page, with a row for each of the `names` that was ever made: the outcome, or else what the page said `before`.
fn table(names: &[String], before: &str, outcomes: &[(&Mutant, Outcome)]) -> String {
    let row = |name: &String| {
        let outcome = outcomes.iter().find(|(mutant, _)| mutant.name == *name);
        let known = || before.lines().find(|line| line.starts_with(&format!("| {name} |")));
        outcome.map(row).or_else(|| known().map(str::to_owned))
    };
    let rows: Vec<String> = names.iter().filter_map(row).collect();
    let found = rows.iter().filter(|row| !row.contains(NOTHING)).count();
    format!(
        "# Deliberate defects\n\n\
         Tests are worth what they find. `cargo xtask mutants` makes each of these defects in a copy of the\n\
         repository, one at a time, and runs the tests that have to fail then; `xtask/mutants.toml` has the changes.\n\
         This page is what it wrote last: {found} of {} were found; the list has {}.\n\n\
         | defect | in | found by |\n|---|---|---|\n{}\n",
        rows.len(),
        names.len(),
        rows.join("\n")
    )
}

fn row((mutant, outcome): &(&Mutant, Outcome)) -> String {
    let by = match outcome {
        Outcome::Missed => NOTHING.to_owned(),
        Outcome::Found(tests) => {
            let names: Vec<_> = tests.iter().take(3).map(|name| format!("`{name}`")).collect();
            let more = tests.len().saturating_sub(3);
            let more = if more == 0 { String::new() } else { format!(" and {more} more") };
            format!("{}{more}", names.join(", "))
        }
    };
    format!("| {} | `{}` | {by} |", mutant.name, mutant.file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A list that is not kept up with the code would show nothing.
    #[test]
    fn each_defect_can_be_made() {
        let mutants = read(sys::root()).unwrap();
        assert!(mutants.len() > 20);
        for mutant in &mutants {
            assert_ne!(mutant.find, mutant.replace, "{}", mutant.name);
        }
    }

    #[test]
    fn rows_of_what_was_not_made_again_stay() {
        let mutant = |name: &str| Mutant {
            name: name.into(),
            file: "a.rs".into(),
            find: String::new(),
            replace: String::new(),
            packages: Vec::new(),
            tests: String::new(),
        };
        let (a, b, gone) = (mutant("a"), mutant("b"), mutant("gone"));
        let names = ["a", "b"].map(str::to_owned);
        let missed = [(&a, Outcome::Missed), (&b, Outcome::Missed), (&gone, Outcome::Missed)];
        let page = table(&names, "", &missed);
        assert!(page.contains("0 of 2 were found"), "{page}");
        let page = table(&names, &page, &[(&a, Outcome::Found(vec!["test".into()]))]);
        assert!(page.contains("1 of 2 were found"), "{page}");
        assert!(
            page.contains("| a | `a.rs` | `test` |")
                && page.contains("| b | `a.rs` | **nothing** |")
        );
        assert!(!page.contains("gone"));
    }

    #[test]
    fn the_tests_that_failed_are_told_from_those_that_passed() {
        let said = "    PASS [   0.1s] (1/3) gpucr-core a::b\n    FAIL [   4.7s] (2/3) gpucr-tests::x y\n\
                    \n  TIMEOUT [ 600.0s] (3/3) gpucr-tests::x z\n    FAIL + LEAK [   4.7s] (2/3) gpucr-tests::x y\n";
        assert_eq!(failed(said), ["y", "z"]);
    }
}
