//! `gpucr ls`.

use std::cmp::Reverse;
use std::process::ExitCode;

use clap::ValueEnum;
use gpucr_core::image::Listing;

use crate::commands::{Outcome, note, print_json, say_folded};
use crate::failure::FAILED;
use crate::stores::StoreArgs;
use crate::table::Table;
use crate::template::{self, Template, template};
use crate::{display, stores};

/// List the images in a store
///
/// For each image: its age; the bytes of device memory that the program had; the bytes stored for the image; and its
/// own bytes, which no other image in the store needs, so that removing it and running `gpucr gc` frees about that
/// much. --wide shows more. Exit code 1 if an image cannot be read; the others are listed all the same.
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr dump --pid 4242 --leave-running --store /images --name before\n  gpucr ls /images\n  \
gpucr restore /images/images/before\n\n\
With GPUCR_STORE=/images (or `store = /images` in /etc/gpucr/config):\n  gpucr ls --sort age\n  \
gpucr restore latest")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// Sort order
    #[arg(long, value_enum, value_name = "BY", default_value_t = Sort::Name)]
    pub(crate) sort: Sort,
    /// Only images whose name or command contains this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Only images that have this tag
    #[arg(long, value_name = "TAG")]
    pub(crate) tag: Option<String>,
    /// Also show identities, dates, pids, bytes of the host side and shared bytes, and full commands
    #[arg(short, long)]
    pub(crate) wide: bool,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print one line per image from a template with fields of the images in the JSON object, such as '{{.name}}
    /// {{.id}}'
    #[arg(long, value_name = "TEMPLATE", value_parser = template, conflicts_with = "json")]
    pub(crate) format: Option<Template>,
}

/// The order of a list.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
    /// Alphabetically
    Name,
    /// Newest first
    Age,
    /// Largest first, including shared bytes
    Size,
    /// Most own bytes first
    Own,
}

pub(crate) fn run(args: &LsArgs) -> Outcome {
    let mut listing = stores::list(&args.store.store()?)?;
    let all = listing.images.len();
    listing.images.retain(|image| {
        let has = |text: &String| {
            image.name.contains(text.as_str()) || image.command.join(" ").contains(text.as_str())
        };
        args.filter.as_ref().is_none_or(has)
            && args.tag.as_ref().is_none_or(|tag| image.tags.contains(tag))
    });
    match args.sort {
        Sort::Name => {}
        Sort::Age => listing.images.sort_by_key(|image| Reverse(image.created)),
        Sort::Size => listing.images.sort_by_key(|image| Reverse(image.stored_bytes)),
        Sort::Own => listing.images.sort_by_key(|image| Reverse(image.own_bytes)),
    }
    if let Some(template) = &args.format {
        template::print(template, &listing.images)?;
    } else if args.json {
        print_json(&listing)?;
    } else {
        print(&listing, args.wide, all);
    }
    for (name, error) in &listing.unreadable {
        note!("{name} cannot be read: {error}");
    }
    Ok(if listing.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn print(listing: &Listing, wide: bool, all: usize) {
    let now = stores::now();
    let mut heads = vec!["NAME", ">AGE", ">DEVICE", ">STORED", ">OWN"];
    if wide {
        heads.extend([">SHARED", ">HOST", "MADE", ">PID", "IDENTITY"]);
    }
    let has_tags = listing.images.iter().any(|image| !image.tags.is_empty());
    heads.extend(has_tags.then_some("TAGS"));
    heads.push("COMMAND");
    let mut table = Table::new(&heads);
    for image in &listing.images {
        let mut cells = vec![
            image.name.clone(),
            stores::age(image.created, now),
            display::bytes(image.bulk_bytes),
            display::bytes(image.stored_bytes),
            display::bytes(image.own_bytes),
        ];
        if wide {
            cells.extend([
                display::bytes(image.stored_bytes.saturating_sub(image.own_bytes)),
                display::bytes(image.host_bytes),
                display::date(image.created),
                image.pid.to_string(),
                image.id[..16].to_owned(),
            ]);
        }
        cells.extend(has_tags.then(|| image.tags.join(",")));
        cells.push(image.command.join(" "));
        table.row(cells);
    }
    if wide {
        table.print()
    } else {
        table.print_cut()
    }
    let spare = listing.pack_bytes.saturating_sub(listing.needed_bytes);
    let shown = listing.images.len();
    let of = if shown == all { String::new() } else { format!("{shown} of ") };
    say_folded!(
        2,
        "{of}{}, {} needed by {}, {} more in the packs",
        display::counted(all as u64, "image", "images"),
        display::bytes(listing.needed_bytes),
        if all == 1 { "it" } else { "them" },
        display::bytes(spare)
    );
}
