//! `gpucr rm`.

use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::image::{self, Removed};

use crate::commands::{Outcome, note, print_json, say};
use crate::display;
use crate::escape::shell_word;

/// Remove images
///
/// Whatever happens, each image is either removed or still complete. Data that an image shares with others in a store
/// stays; `gpucr gc` frees what no image needs any more. An image that incremental images in the same directory build
/// on is not removed without --force.
#[derive(clap::Args)]
#[command(after_long_help = "\
gpucr does not search other directories for images that build on a removed one (dump --parent). They cannot be \
restored without it.\n\n\
Examples:\n  gpucr rm monday tuesday\n  gpucr rm /images/images/step-1000 && gpucr gc /images")]
pub(crate) struct RmArgs {
    /// The images
    #[arg(required = true, value_name = "IMAGE")]
    pub(crate) images: Vec<PathBuf>,
    /// Also remove an image that others build on
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &RmArgs) -> Outcome {
    let mut removed: Vec<Removed> = Vec::new();
    // In order; the first that fails ends it, and those before it are gone.
    let outcome = args.images.iter().try_for_each(|path| {
        let gone = image::remove(path, args.force)?;
        if !args.json {
            say!("{}: removed, {} freed", gone.path.display(), display::bytes(gone.freed_bytes));
        }
        removed.push(gone);
        Ok::<_, image::ImageError>(())
    });
    if args.json {
        print_json(&removed)?;
    }
    let mut stores: Vec<_> = removed.iter().filter_map(|gone| gone.store.as_ref()).collect();
    stores.dedup();
    for store in stores.into_iter().filter(|_| !args.json) {
        note!("To free what no image needs any more: gpucr gc {}", shell_word(store));
    }
    outcome.map_err(Error::from)?;
    Ok(ExitCode::SUCCESS)
}
