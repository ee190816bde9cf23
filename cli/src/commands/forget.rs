//! `gpucr forget`.

use std::collections::{BTreeMap, HashSet};
use std::process::ExitCode;
use std::time::Duration;

use clap::ArgGroup;
use gpucr_core::Error;
use gpucr_core::image::{self, Listed};
use serde_json::json;

use crate::commands::{Outcome, note, print_json, say};
use crate::escape::shell_word;
use crate::failure::{CliError, FAILED};
use crate::stores::StoreArgs;
use crate::table::Table;
use crate::values::duration;
use crate::{display, stores};

/// Remove images from a store, except those that rules keep
///
/// An image is kept if any rule keeps it. The rules apply to each command line separately; runs with the same command
/// line count as one, unless you give them tags and name one (`--tag`) each time. `gpucr gc` frees the data that only
/// removed images needed.
#[derive(clap::Args)]
#[command(group(ArgGroup::new("rule").required(true).multiple(true)
    .args(["keep_last", "keep_hourly", "keep_daily", "keep_within", "keep_tag"])))]
#[command(override_usage = "gpucr forget [OPTIONS] <--keep-RULE>... [STORE]")]
#[command(after_long_help = "\
Hours and days are in UTC; those without an image do not count. --keep-within counts back from the newest image \
of the command, not from now, so images of a program that has ended do not expire.\n\n\
Examples:\n  gpucr forget /images --keep-last 3 --dry-run\n  \
gpucr forget --keep-hourly 24 --keep-daily 7 && gpucr gc")]
pub(crate) struct ForgetArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Keep the N newest
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep_last: Option<u32>,
    /// Keep the newest image of each of the last N hours in which one was made
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep_hourly: Option<u32>,
    /// Keep the newest image of each of the last N days in which one was made
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep_daily: Option<u32>,
    /// Keep images that are at most this much older than the newest
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) keep_within: Option<Duration>,
    /// Keep images that have this tag
    #[arg(long, value_name = "TAG")]
    pub(crate) keep_tag: Vec<String>,
    /// Consider only images that have this tag
    #[arg(long, value_name = "TAG")]
    pub(crate) tag: Option<String>,
    /// Only show what would be removed
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &ForgetArgs) -> Outcome {
    let store = args.store.store()?;
    let listing = stores::list(&store)?;
    // Of what cannot be read nobody knows whether a rule keeps it: it stays.
    for (name, error) in &listing.unreadable {
        note!("{name} cannot be read, and stays: {error}");
    }
    let (kept, removed): (Vec<&Listed>, Vec<&Listed>) = {
        let keep = kept(args, &listing.images);
        listing.images.iter().partition(|image| keep.contains(image.name.as_str()))
    };
    if !args.dry_run {
        for one in &removed {
            image::remove(&one.path, false).map_err(|error| {
                CliError::from(Error::from(error))
                    .state("Images that come after it in the list were not removed.")
            })?;
        }
    }
    if args.json {
        let names = |images: &[&Listed]| images.iter().map(|i| i.name.clone()).collect::<Vec<_>>();
        print_json(
            &json!({"kept": names(&kept), "removed": names(&removed), "dry_run": args.dry_run}),
        )?;
    } else {
        print(args, &kept, &removed);
        if !removed.is_empty() && !args.dry_run {
            note!("To free what no image needs any more: gpucr gc {}", shell_word(&store));
        }
    }
    Ok(if listing.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn print(args: &ForgetArgs, kept: &[&Listed], removed: &[&Listed]) {
    if !removed.is_empty() {
        let mut table = Table::new(&["NAME", ">AGE", ">OWN"]);
        for one in removed {
            let age = stores::age(one.created, stores::now());
            table.row(vec![one.name.clone(), age, display::bytes(one.own_bytes)]);
        }
        table.print();
    }
    let done = if args.dry_run { "would be removed" } else { "removed" };
    say!(
        "{} {done}, {} kept",
        display::counted(removed.len() as u64, "image", "images"),
        kept.len()
    );
}

/// The names of the images that stay.
fn kept<'i>(args: &ForgetArgs, images: &'i [Listed]) -> HashSet<&'i str> {
    let mut kept = HashSet::new();
    let mut groups: BTreeMap<&[String], Vec<&Listed>> = BTreeMap::new();
    for image in images {
        if args.tag.as_ref().is_some_and(|tag| !image.tags.contains(tag))
            || image.tags.iter().any(|tag| args.keep_tag.contains(tag))
        {
            kept.insert(image.name.as_str());
        }
        if args.tag.as_ref().is_none_or(|tag| image.tags.contains(tag)) {
            groups.entry(&image.command).or_default().push(image);
        }
    }
    for group in groups.values_mut() {
        // The newest first.
        group.sort_by(|a, b| (b.created, &b.name).cmp(&(a.created, &a.name)));
        let newest = group.first().map_or(0, |image| image.created);
        let last = group.iter().take(args.keep_last.unwrap_or(0) as usize);
        kept.extend(last.map(|image| image.name.as_str()));
        for (count, seconds) in [(args.keep_hourly, 3600), (args.keep_daily, 86400)] {
            let mut seen = None;
            let first = group.iter().filter(|image| {
                let unit = Some(image.created / seconds);
                std::mem::replace(&mut seen, unit) != unit
            });
            kept.extend(first.take(count.unwrap_or(0) as usize).map(|image| image.name.as_str()));
        }
        if let Some(within) = args.keep_within {
            let since = newest.saturating_sub(within.as_secs());
            let recent = group.iter().filter(|image| image.created >= since);
            kept.extend(recent.map(|image| image.name.as_str()));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(name: &str, created: u64, command: &str, tags: &[&str]) -> Listed {
        Listed {
            name: name.into(),
            path: name.into(),
            id: String::new(),
            created,
            pid: 1,
            command: vec![command.into()],
            tags: tags.iter().map(|tag| (*tag).to_owned()).collect(),
            bulk_bytes: 0,
            host_bytes: 0,
            stored_bytes: 0,
            own_bytes: 0,
        }
    }

    fn rules() -> ForgetArgs {
        ForgetArgs {
            store: StoreArgs::none(),
            keep_last: None,
            keep_hourly: None,
            keep_daily: None,
            keep_within: None,
            keep_tag: Vec::new(),
            tag: None,
            dry_run: false,
            json: false,
        }
    }

    fn stay(args: &ForgetArgs, images: &[Listed]) -> Vec<String> {
        let mut names: Vec<String> = kept(args, images).into_iter().map(str::to_owned).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn rules_keep_the_newest_of_each_command() {
        const DAY: u64 = 86400;
        let images = [
            image("a1", DAY, "a", &[]),
            image("a2", DAY + 10, "a", &["good"]),
            image("a3", 3 * DAY + 10, "a", &[]),
            image("a4", 3 * DAY + 20, "a", &[]),
            image("a5", 3 * DAY + 3700, "a", &[]),
            image("b1", 5, "b", &[]),
        ];
        assert_eq!(stay(&rules(), &images), [""; 0]);
        assert_eq!(
            stay(&ForgetArgs { keep_last: Some(2), ..rules() }, &images),
            ["a4", "a5", "b1"]
        );
        assert_eq!(
            stay(&ForgetArgs { keep_hourly: Some(2), ..rules() }, &images),
            ["a4", "a5", "b1"]
        );
        assert_eq!(
            stay(&ForgetArgs { keep_daily: Some(2), ..rules() }, &images),
            ["a2", "a5", "b1"]
        );
        assert_eq!(stay(&ForgetArgs { keep_daily: Some(1), ..rules() }, &images), ["a5", "b1"]);
        let hour = Some(Duration::from_secs(3690));
        assert_eq!(
            stay(&ForgetArgs { keep_within: hour, ..rules() }, &images),
            ["a3", "a4", "a5", "b1"]
        );
        let tagged = ForgetArgs { keep_last: Some(1), keep_tag: vec!["good".into()], ..rules() };
        assert_eq!(stay(&tagged, &images), ["a2", "a5", "b1"]);
        // Others than those with the tag are not looked at.
        let only = ForgetArgs { keep_last: Some(1), tag: Some("good".into()), ..rules() };
        assert_eq!(stay(&only, &images).len(), 6);
    }
}
