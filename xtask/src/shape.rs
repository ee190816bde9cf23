//! `cargo xtask shape`: measures the structure of the workspace's Rust sources.

pub(crate) mod measure;
pub(crate) mod tree;
pub(crate) mod uses;

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::Result;
use serde_json::{Value, json};

use self::measure::{Measures, Sized};
use self::tree::Package;
use crate::sys;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// The folder of another workspace, to compare with
    dir: Option<PathBuf>,
}

/// Prints a table with a line for each package, and the circles of files.
///
/// # Errors
/// There is no workspace in the folder, one of its files is no Rust, or nothing can be printed.
pub(crate) fn run(args: &Args) -> Result<()> {
    let packages = Package::all(args.dir.as_deref().unwrap_or(sys::root()))?;
    let measures: Vec<Measures> = packages.iter().map(Measures::of).collect();
    let text = if args.json {
        serde_json::to_string_pretty(&measures.iter().map(as_json).collect::<Vec<_>>())? + "\n"
    } else {
        table(&measures) + &details(&measures)
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// Heads of the columns.
const COLUMNS: [&str; 11] = [
    "crate",
    "code",
    "tests",
    "files>600",
    "circles",
    "fns>80",
    "longest",
    "fields",
    "pub",
    "Result",
    "# Errors",
];

fn table(measures: &[Measures]) -> String {
    let row = |of: &Measures| {
        let sizes: Vec<String> = of.circles.iter().map(|circle| circle.len().to_string()).collect();
        let sizes = if sizes.is_empty() { "-".to_owned() } else { sizes.join("+") };
        [
            of.package.clone(),
            of.code.to_string(),
            of.tests.to_string(),
            of.long_files.len().to_string(),
            sizes,
            of.long_functions.to_string(),
            of.longest_function.size.to_string(),
            of.largest_struct.size.to_string(),
            of.public.to_string(),
            of.fallible.to_string(),
            of.with_errors.to_string(),
        ]
    };
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    rows.extend(measures.iter().map(row));
    let widths: Vec<usize> = (0..COLUMNS.len())
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or_default())
        .collect();
    let line = |row: &[String; COLUMNS.len()]| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ") + "\n"
    };
    rows.iter().map(line).collect()
}

/// What the numbers of the table are about.
fn details(measures: &[Measures]) -> String {
    let mut text = String::new();
    let named = |of: &Sized| format!("{} {} ({})", of.size, of.name, of.file);
    let mut section = |head: &str, lines: Vec<String>| {
        if !lines.is_empty() {
            text += &format!("\n{head}\n  {}\n", lines.join("\n  "));
        }
    };
    let those = |sized: fn(&Measures) -> &Sized| {
        let sized = measures.iter().map(sized).filter(|of| of.size > 0);
        sized.map(named).collect::<Vec<_>>()
    };
    section("longest functions, in lines:", those(|of| &of.longest_function));
    section("structs with the most fields:", those(|of| &of.largest_struct));
    let files = measures.iter().flat_map(|of| &of.long_files);
    let files = files.map(|of| format!("{} {}", of.size, of.file)).collect();
    section("files of more than 600 lines:", files);
    let circles = measures.iter().flat_map(|of| of.circles.iter().map(move |circle| (of, circle)));
    let circles = circles
        .map(|(of, circle)| format!("{} of {}: {}", circle.len(), of.package, circle.join(", ")));
    section("files that use each other in circles:", circles.collect());
    text
}

fn as_json(of: &Measures) -> Value {
    let sized = |of: &Sized| json!({"size": of.size, "name": of.name, "file": of.file});
    let files = of.long_files.iter().map(|of| json!({"lines": of.size, "file": of.file}));
    json!({
        "crate": of.package,
        "code": of.code,
        "tests": of.tests,
        "long_files": files.collect::<Vec<_>>(),
        "circles": of.circles,
        "uses": of.uses.iter().map(|uses| &uses.files).collect::<Vec<_>>(),
        "long_functions": of.long_functions,
        "longest_function": sized(&of.longest_function),
        "largest_struct": sized(&of.largest_struct),
        "public": of.public,
        "fallible": of.fallible,
        "with_errors": of.with_errors,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_package_has_a_line_and_its_circles_are_named() {
        let circles = vec![vec!["a".to_owned(), "b".to_owned()]];
        let longest_function = Sized { size: 9, name: "f".to_owned(), file: "a.rs".to_owned() };
        let package = "one".to_owned();
        let measures = [
            Measures { package, code: 1234, circles, longest_function, ..Measures::default() },
            Measures { package: "another".to_owned(), ..Measures::default() },
        ];
        let table = table(&measures);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].starts_with("one      1234"), "{table}");
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{table}");
        let details = details(&measures);
        assert!(details.contains("\n  9 f (a.rs)\n"), "{details}");
        assert!(details.contains("\n  2 of one: a, b\n"), "{details}");
        assert_eq!(as_json(&measures[0])["circles"][0][1], "b");
    }
}
