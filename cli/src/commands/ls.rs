//! `gpucr ls`.

use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::image::{self, Listing};

use crate::commands::{Outcome, note, print_json, say};
use crate::display;
use crate::failure::FAILED;

/// List the images of a store
///
/// For each image: bytes of device memory and of the host side as they were in the program; bytes
/// stored for it; and its own bytes, which no other image of the store needs, so that removing it
/// and a `gpucr gc` free about that much. Exit code 1 if an image cannot be read; the others are
/// listed all the same.
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr dump --pid 4242 --leave-running --store /images --name before\n  gpucr ls /images\n  \
gpucr restore /images/images/before")]
pub(crate) struct LsArgs {
    /// The store, as given to dump --store
    pub(crate) store: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &LsArgs) -> Outcome {
    let listing = image::list(&args.store).map_err(Error::from)?;
    if args.json {
        print_json(&listing)?;
    } else {
        print(&listing);
    }
    for (name, error) in &listing.unreadable {
        note!("{name} cannot be read: {error}");
    }
    Ok(if listing.unreadable.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn print(listing: &Listing) {
    let width = listing.images.iter().map(|image| image.name.len()).max().unwrap_or(0).max(4);
    say!(
        "{:<width$}  {:<20}  {:>11}  {:>11}  {:>11}  {:>11}  COMMAND",
        "NAME",
        "MADE",
        "DEVICE",
        "HOST",
        "STORED",
        "OWN"
    );
    for image in &listing.images {
        say!(
            "{:<width$}  {:<20}  {:>11}  {:>11}  {:>11}  {:>11}  {}",
            image.name,
            display::date(image.created),
            display::bytes(image.bulk_bytes),
            display::bytes(image.host_bytes),
            display::bytes(image.stored_bytes),
            display::bytes(image.own_bytes),
            display::command(&image.command, 40)
        );
    }
    let spare = listing.pack_bytes.saturating_sub(listing.needed_bytes);
    say!(
        "{} images, {} needed by them, {} more in the packs",
        listing.images.len(),
        display::bytes(listing.needed_bytes),
        display::bytes(spare)
    );
}
