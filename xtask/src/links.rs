//! The links of the pages: each that is relative leads to a file that exists, and to a heading of it if it names one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::sys;

/// Pages that are not below `docs/`.
const PAGES: [&str; 7] = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "softcuda/README.md",
    "benches/README.md",
    "tests/workloads/README.md",
    "fuzz/README.md",
];

/// What a page links to, and where others may link to in it.
#[derive(Default)]
struct Page {
    links: Vec<String>,
    headings: BTreeSet<String>,
}

impl Page {
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut seen = BTreeMap::<String, u32>::new();
        let mut heading = None::<String>;
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let name = anchor(&heading.take().unwrap_or_default());
                    let before = seen.entry(name.clone()).or_default();
                    let name = if *before == 0 { name } else { format!("{name}-{before}") };
                    *before += 1;
                    page.headings.insert(name);
                }
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                _ => {}
            }
        }
        page
    }
}

/// The name that sites with pages of Markdown give to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).flat_map(char::to_lowercase).collect()
}

/// The links of a page that lead nowhere. Those to other sites are not followed.
fn broken(page: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(page).unwrap();
    let parsed = Page::parse(&text);
    let is_broken = |link: &&String| {
        if link.contains("://") || link.starts_with("mailto:") {
            return false;
        }
        let (file, heading) = link.split_once('#').unwrap_or((link, ""));
        let file = match file {
            "" => page.to_owned(),
            file => page.parent().unwrap().join(file),
        };
        let has_heading = || {
            std::fs::read_to_string(&file)
                .is_ok_and(|text| Page::parse(&text).headings.contains(heading))
        };
        !file.exists() || !heading.is_empty() && !has_heading()
    };
    parsed.links.iter().filter(is_broken).cloned().collect()
}

/// All pages of Markdown below a folder.
fn below(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let pages = entries.flat_map(|path| match path.is_dir() {
        true => below(&path),
        false => vec![path],
    });
    pages.filter(|path| path.extension().is_some_and(|extension| extension == "md")).collect()
}

#[test]
fn each_relative_link_leads_to_something() {
    let mut pages: Vec<PathBuf> = PAGES.iter().map(|page| sys::root().join(page)).collect();
    pages.extend(below(&sys::root().join("docs")));
    assert!(pages.len() > PAGES.len(), "there are pages in docs/");
    let told = pages.iter().flat_map(|page| {
        let links = broken(page).into_iter();
        links.map(|link| format!("{}: {link}", page.display()))
    });
    let told: Vec<String> = told.collect();
    assert!(told.is_empty(), "links that lead nowhere:\n{}", told.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("page.md");
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    std::fs::write(dir.path().join("folder/code.rs"), "// # Heading\n").unwrap();
    std::fs::write(dir.path().join("other.md"), "# A `name`, and more\n\n## Twice\n\n## Twice\n")
        .unwrap();
    let good = "\
        # Here\n\n[a](other.md) [b](folder) [c](folder/code.rs) [d](#here) [e](other.md#a-name-and-more)\n\
        [f](other.md#twice-1) [g](https://example.org/none.md#none) `[h](none.md)` ![i](folder/code.rs)\n\n    [j](none.md)\n";
    std::fs::write(&page, good).unwrap();
    assert_eq!(broken(&page), [""; 0]);
    let bad = "[a](none.md) [b](other.md#none) [c](#none) [d](other.md#twice-2) [e](folder/code.rs#heading)\n\n\
        | a |\n|---|\n| [f](folder/none.rs) |\n\n[g][g]\n\n[g]: none.md#here\n";
    std::fs::write(&page, bad).unwrap();
    let found = [
        "none.md",
        "other.md#none",
        "#none",
        "other.md#twice-2",
        "folder/code.rs#heading",
        "folder/none.rs",
        "none.md#here",
    ];
    assert_eq!(broken(&page), found);
}
