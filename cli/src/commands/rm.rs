//! `gpucr rm`.

use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::image::{self, Removed};

use crate::args::RmArgs;
use crate::commands::{print_json, say};
use crate::{Outcome, display};

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
        eprintln!("What no other image needs is freed by: gpucr gc {}", store.display());
    }
    outcome.map_err(Error::from)?;
    Ok(ExitCode::SUCCESS)
}
