//! `gpucr ls`.

use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use gpucr_core::Error;
use gpucr_core::image::{self, Listing};

use crate::args::LsArgs;
use crate::commands::{print_json, say};
use crate::failure::FAILED;
use crate::{Outcome, display};

pub(crate) fn run(args: &LsArgs) -> Outcome {
    let listing = image::list(&args.store).map_err(Error::from)?;
    if args.json {
        print_json(&listing)?;
    } else {
        print(&listing);
    }
    for (name, error) in &listing.unreadable {
        eprintln!("{name} cannot be read: {error}");
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
        let made =
            humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(image.created));
        say!(
            "{:<width$}  {:<20}  {:>11}  {:>11}  {:>11}  {:>11}  {}",
            image.name,
            made.to_string(),
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
