//! `gpucr warm`, and the hidden `gpucr warm-holder`.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::warm::{self, Kept, Listing, Options, Report};

use crate::commands::key::TrustArgs;
use crate::commands::{Outcome, io_error, key, note, print_json, say};
use crate::failure::FAILED;
use crate::table::Table;
use crate::values::size;
use crate::{display, signals};

/// Keep an image ready in host memory
///
/// Reads, checks and decompresses an image once. A process in the background then keeps the result in
/// memory, where every `gpucr restore` of the image finds it by itself: it reads only the manifest from
/// disk, and does without reading the rest, decompressing and checking. Any number of restores may use it,
/// one after the other or at once. It is kept until it is dropped, or its process or the host ends.
#[derive(clap::Args)]
#[command(after_long_help = "\
The memory is as large as the image was before it was compressed; equal chunks count once, chunks of one \
repeated byte (most often zeros) not at all. It is not swapped out (Linux 6.4 or newer), and where the \
host runs out of memory the kernel ends the process first. Nothing is read if the image needs more than \
--memory-limit.\n\n\
If the image's devices are here, the process that keeps it opens them, pins the memory, and loads device \
memory for restores, which is faster than what a restore can do that has to open the device first. A context \
takes 260 to 530 MiB of each device's memory; it is given back where a restore leaves less than 2 GiB free. \
--list shows which images are pinned. --unpinned does without.\n\n\
--drop takes the directory of the image, or the first 8 or more digits of the identity that --list shows. \
A restore that is at work with it goes on to its end, and its memory is freed then.\n\n\
The directory with the manifest must stay where it is for restores; the data in it need not. No lock of a \
store is held: a gc may remove what the image needs, if the image was removed there.\n\n\
Restores find it in the network namespace that it was made warm in, and trust only processes of root.\n\n\
Examples:\n  gpucr warm /images/model\n  gpucr restore /images/model\n  gpucr warm --list\n  \
gpucr warm --drop /images/model\n\n\
As a systemd service (Type=notify), which ends with it:\n  \
ExecStart=gpucr warm --foreground /images/model")]
pub(crate) struct WarmArgs {
    /// The image
    #[arg(required_unless_present_any = ["list", "all"], conflicts_with_all = ["list", "all"])]
    pub(crate) image: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
    /// Most memory that it may take [default: what is available, less 4 GiB or a sixteenth of all memory]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with_all = ["list", "drop"])]
    pub(crate) memory_limit: Option<u64>,
    /// Only keep it in memory: do not pin it, and do not open the image's devices
    #[arg(long, conflicts_with_all = ["list", "drop"])]
    pub(crate) unpinned: bool,
    /// Keep it in this process, until it gets SIGTERM or SIGINT
    #[arg(long, conflicts_with_all = ["list", "drop"])]
    pub(crate) foreground: bool,
    /// List what is kept: identity, memory, since when, by which process, how often it was restored
    #[arg(long, conflicts_with = "drop")]
    pub(crate) list: bool,
    /// Drop the image from memory; what is on disk stays
    #[arg(long)]
    pub(crate) drop: bool,
    /// With --drop: all images
    #[arg(long, requires = "drop")]
    pub(crate) all: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
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
    signals.settle_at_last(|| "Nothing is kept.".into());
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
    if let Some(holder) = holder {
        tell_service_manager();
        holder.serve(Some(&signals.stop)).map_err(io_error("cannot hold the warm image"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn print(image: &Path, report: &Report) {
    let kept = &report.kept;
    say!(
        "{} is {}: {} of {}memory, held by process {}; identity {}",
        image.display(),
        if report.already { "warm already" } else { "warm" },
        display::bytes(kept.bytes),
        if kept.pinned { "pinned " } else { "" },
        kept.pid,
        kept.id
    );
    if !kept.unpinned.is_empty() {
        note!("not pinned, so restores copy it by themselves: {}", kept.unpinned);
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
        note!("process {pid}, which holds a warm image, does not answer: {error}");
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
                say!("{image}: dropped, {} of memory freed", display::bytes(*bytes));
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
