//! `gpucr warm`, and the hidden `gpucr warm-holder`.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::warm::{self, Kept, Listing, Options, Report};

use crate::commands::key::TrustArgs;
use crate::commands::{Outcome, io_error, key, note_folded, print_json, say, say_folded};
use crate::failure::FAILED;
use crate::table::Table;
use crate::values::size;
use crate::{display, signals};

/// Keep an image ready in host memory
///
/// Reads, checks and decompresses an image once. A background process then keeps the result in memory, where every
/// `gpucr restore` of the image finds it automatically: such a restore reads only the manifest from disk, and does
/// not have to read, decompress and check the rest. Any number of restores may use it, one after the other or at
/// once. The image is kept until `gpucr warm --drop IMAGE`, until that process ends, or until the host is shut down.
#[derive(clap::Args)]
#[command(after_long_help = "\
This takes as much memory as the image does uncompressed; identical chunks count once, and chunks of one repeated \
byte (usually zero) not at all. The memory is not swapped out (Linux 6.4 or newer). If the host runs out of \
memory, the kernel kills this background process first. Nothing is read if the image needs more than \
--memory-limit.\n\n\
If the image's devices are present, the background process opens them, pins the memory, and loads device memory \
for restores; that is faster than in a restore that has to open the device first. Its context takes 260 to 530 \
MiB of each device's memory, and is given up if a restore leaves less than 2 GiB free. --list shows which images \
are pinned; --unpinned turns this off.\n\n\
--drop takes the directory of the image, or at least the first 8 digits of the identity that --list shows. A \
restore that is using the image is completed first; then the memory is freed.\n\n\
For restores the image's directory and its manifest must stay where they are; the data need not. The store is \
not locked: if the image is removed from its store, a gc may remove its data.\n\n\
Restores find a warm image only in the network namespace in which `gpucr warm` ran, and trust only processes of \
root.\n\n\
Examples:\n  gpucr warm /images/model\n  gpucr restore /images/model\n  gpucr warm --list\n  \
gpucr warm --drop /images/model\n\n\
As a systemd service (Type=notify), which keeps the image for as long as it runs:\n  \
ExecStart=gpucr warm --foreground /images/model")]
pub(crate) struct WarmArgs {
    /// The image
    #[arg(required_unless_present_any = ["list", "all"], conflicts_with_all = ["list", "all"])]
    pub(crate) image: Option<PathBuf>,
    /// Maximum memory to use [default: what is available, minus 4 GiB or a sixteenth of all memory, whichever is
    /// less]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with_all = ["list", "drop"])]
    pub(crate) memory_limit: Option<u64>,
    /// Keep the image in memory only: do not pin it, and do not open its devices
    #[arg(long, conflicts_with_all = ["list", "drop"])]
    pub(crate) unpinned: bool,
    /// Keep the image in this process, until it gets SIGTERM or SIGINT
    #[arg(long, conflicts_with_all = ["list", "drop"])]
    pub(crate) foreground: bool,
    /// List the images in memory: identity, size, since when, by which process, how often restored
    #[arg(long, conflicts_with = "drop")]
    pub(crate) list: bool,
    /// Drop the image from memory; the image on disk stays
    #[arg(long)]
    pub(crate) drop: bool,
    /// With --drop: all images
    #[arg(long, requires = "drop")]
    pub(crate) all: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
}

pub(crate) fn run(args: &WarmArgs) -> Outcome {
    match &args.image {
        _ if args.list => list(args.json),
        _ if args.all => dropped(&warm::drop_all()?, args.json),
        Some(image) if args.drop => dropped(&[warm::drop_image(image)?], args.json),
        Some(image) => keep(image, args),
        // The definition of the command line asks for one of these.
        None => list(args.json),
    }
}

fn keep(image: &Path, args: &WarmArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(|| "No image is kept.".into());
    let options = Options {
        image: image.to_owned(),
        trust: key::trust_with_policy(&args.trust)?,
        memory_limit: args.memory_limit,
        pin: !args.unpinned,
        foreground: args.foreground,
        stop: signals.stop.clone(),
    };
    let progress = display::progress(args.json);
    let (report, holder) = warm::warm(&options, progress.as_ref())?;
    drop(progress);
    if args.json {
        print_json(&report)?;
    } else {
        print(image, &report);
    }
    if args.foreground {
        // Also if it is held by another process, and this one ends.
        tell_service_manager();
    }
    if let Some(holder) = holder {
        holder.serve(Some(&signals.stop)).map_err(io_error("cannot hold the warm image"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(image: &Path, report: &Report) {
    let kept = &report.kept;
    say_folded!(
        2,
        "{} is {}: {} of {}memory, held by process {}; identity {}",
        image.display(),
        if report.already { "warm already" } else { "warm" },
        display::bytes(kept.bytes),
        if kept.pinned { "pinned " } else { "" },
        kept.pid,
        kept.id
    );
    if !kept.unpinned.is_empty() {
        note_folded!("not pinned, so each restore loads device memory itself: {}", kept.unpinned);
    }
}

/// Tells systemd, or another service manager with its protocol (sd_notify(3)), that the image is warm.
fn tell_service_manager() {
    let Ok(name) = std::env::var("NOTIFY_SOCKET") else { return };
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None => SocketAddr::from_pathname(&name),
    };
    let send = || UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address?);
    if let Err(error) = send() {
        tracing::warn!(%error, "the service manager was not told");
    }
}

fn list(json: bool) -> Outcome {
    let listing = warm::list()?;
    if json {
        print_json(&listing)?;
    } else {
        print_list(&listing);
    }
    for (pid, error) in &listing.silent {
        note_folded!("process {pid}, which holds a warm image, does not answer: {error}");
    }
    Ok(if listing.silent.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn print_list(listing: &Listing) {
    let mut table =
        Table::new(&["IDENTITY", ">MEMORY", "PINNED", "SINCE", ">PID", ">RESTORES", "IMAGE"]);
    for kept in &listing.kept {
        if kept.other_version {
            let mut row = vec![kept.id[..16].to_owned(), "?".into(), "?".into(), "?".into()];
            row.extend([
                kept.pid.to_string(),
                "?".into(),
                "(held by another version of gpucr)".into(),
            ]);
            table.row(row);
            continue;
        }
        table.row(vec![
            kept.id[..16].to_owned(),
            display::bytes(kept.bytes),
            if kept.pinned { "yes" } else { "no" }.to_owned(),
            display::date(kept.since),
            kept.pid.to_string(),
            kept.restores.to_string(),
            kept.image.clone(),
        ]);
    }
    table.print();
}

fn dropped(images: &[Kept], json: bool) -> Outcome {
    if json {
        print_json(&images)?;
        return Ok(ExitCode::SUCCESS);
    }
    for kept in images {
        match kept {
            Kept { other_version: true, id, .. } => say!("{}: dropped", &id[..16]),
            Kept { image, bytes, .. } => {
                say_folded!(2, "{image}: dropped, {} of memory freed", display::bytes(*bytes));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The process that holds a warm image.
pub(crate) fn hold() -> Outcome {
    warm::main().map_err(io_error("a holder is started by `gpucr warm` alone"))?;
    Ok(ExitCode::SUCCESS)
}
