//! `gpucr warm`, and the hidden `gpucr warm-holder`.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;
use std::process::ExitCode;

use gpucr_core::warm::{self, Kept, Listing, Options, Report};

use crate::args::WarmArgs;
use crate::commands::{io_error, print_json, say};
use crate::failure::FAILED;
use crate::table::Table;
use crate::{Outcome, display, signals};

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
    let options = Options {
        image: image.to_owned(),
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
        eprintln!("not pinned, so restores copy it by themselves: {}", kept.unpinned);
    }
}

/// Tells systemd, or whoever speaks its protocol (sd_notify(3)), that the image is warm.
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
        eprintln!("process {pid}, which holds a warm image, does not answer: {error}");
    }
    Ok(if listing.silent.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn print_list(listing: &Listing) {
    let mut table =
        Table::new(&["IDENTITY", ">MEMORY", "PINNED", "SINCE", ">PID", ">RESTORES", "IMAGE"]);
    for kept in &listing.kept {
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
        say!("{}: dropped, {} of memory freed", kept.image, display::bytes(kept.bytes));
    }
    Ok(ExitCode::SUCCESS)
}

/// The process that holds a warm image.
pub(crate) fn hold() -> Outcome {
    warm::main().map_err(io_error("a holder is started by `gpucr warm` alone"))?;
    Ok(ExitCode::SUCCESS)
}
