//! `gpucr inspect`.

use std::process::ExitCode;

use gpucr_core::image::{Base, ImageReader, Manifest, Process};
use gpucr_core::{Error, hex};

use crate::commands::{print_json, say};
use crate::{Outcome, args::InspectArgs, display};

#[derive(serde::Serialize)]
struct Summary<'a> {
    id: String,
    /// `alone`, `incremental` or `stored`.
    kind: &'static str,
    /// Where the ancestors of an incremental image were found, the parent first.
    ancestors: &'a [std::path::PathBuf],
    /// The store of a stored image.
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<&'a std::path::Path>,
    created: String,
    gpucr_version: &'a str,
    hostname: &'a str,
    kernel: &'a str,
    protocol: gpucr_core::image::Protocol,
    driver: &'a std::path::Path,
    driver_version: i32,
    devices: Vec<DeviceRow<'a>>,
    processes: Vec<ProcessRow<'a>>,
    criu_version: &'a str,
    criu_options: &'a [String],
    /// Device memory that gpucr saved.
    bulk_bytes: u64,
    /// CRIU's files: the host side.
    host_bytes: u64,
    stored_bytes: u64,
    /// Plain bytes for each stored byte.
    ratio: f64,
    /// Files that must be in place for a restore, with these sizes.
    files: Vec<FileRow<'a>>,
    stopped_ms: f64,
    phases: &'a [gpucr_core::image::Phase],
}

#[derive(serde::Serialize)]
struct DeviceRow<'a> {
    uuid: String,
    name: &'a str,
    memory: u64,
}

#[derive(serde::Serialize)]
struct FileRow<'a> {
    path: &'a std::path::Path,
    size: u64,
    /// Open, rather than only mapped as a library is.
    open: bool,
}

#[derive(serde::Serialize)]
struct ProcessRow<'a> {
    pid: u32,
    ppid: u32,
    command: &'a [String],
    cuda: bool,
    under_gpucr: bool,
    blocks: Vec<BlockRow>,
}

#[derive(serde::Serialize)]
struct BlockRow {
    id: u64,
    device: String,
    address: String,
    size: u64,
    allocations: u32,
    kind: gpucr_core::image::BlockKind,
}

pub(crate) fn run(args: &InspectArgs) -> Outcome {
    let image = ImageReader::open(&args.image).map_err(Error::from)?;
    let manifest = image.manifest();
    let host_bytes: u64 = manifest.criu.files.iter().map(|file| file.size).sum();
    let stored = image.chunks().stored_bytes();
    let summary = Summary {
        id: hex(&image.id()),
        kind: match image.base() {
            None => "alone",
            Some(Base::Parent { .. }) => "incremental",
            Some(Base::Store) => "stored",
        },
        ancestors: image.ancestors(),
        store: image.store().map(|store| store.dir()),
        created: time(manifest.created),
        gpucr_version: &manifest.gpucr_version,
        hostname: &manifest.hostname,
        kernel: &manifest.kernel,
        protocol: manifest.protocol,
        driver: &manifest.driver.path,
        driver_version: manifest.driver.version,
        devices: devices(manifest),
        processes: manifest.processes.iter().map(process).collect(),
        criu_version: &manifest.criu.version,
        criu_options: &manifest.criu.options,
        bulk_bytes: manifest.bulk_bytes,
        host_bytes,
        stored_bytes: stored,
        ratio: (manifest.bulk_bytes + host_bytes) as f64 / stored.max(1) as f64,
        files: manifest
            .required
            .iter()
            .map(|file| FileRow { path: &file.path, size: file.size, open: file.open })
            .collect(),
        stopped_ms: manifest.stopped_ms,
        phases: &manifest.phases,
    };
    if args.json {
        print_json(&summary)?;
    } else {
        print(&summary);
    }
    Ok(ExitCode::SUCCESS)
}

fn devices<'a>(manifest: &'a Manifest) -> Vec<DeviceRow<'a>> {
    let row = |device: &'a gpucr_core::image::Device| DeviceRow {
        uuid: hex(&device.uuid),
        name: &device.name,
        memory: device.total_memory,
    };
    manifest.devices.iter().map(row).collect()
}

fn process(process: &Process) -> ProcessRow<'_> {
    let cuda = process.cuda.as_ref();
    let blocks = cuda.into_iter().flat_map(|cuda| &cuda.blocks).map(|block| BlockRow {
        id: block.id,
        device: hex(&block.device),
        address: format!("{:#x}", block.address),
        size: block.size,
        allocations: block.allocations,
        kind: block.kind,
    });
    ProcessRow {
        pid: process.pid,
        ppid: process.ppid,
        command: &process.command,
        cuda: cuda.is_some(),
        under_gpucr: cuda.is_some_and(|cuda| cuda.shim.is_some()),
        blocks: blocks.collect(),
    }
}

fn print(summary: &Summary<'_>) {
    say!("image      {}", summary.id);
    for ancestor in summary.ancestors {
        say!("builds on  {}", ancestor.display());
    }
    if let Some(store) = summary.store {
        say!("in store   {}", store.display());
    }
    say!(
        "made       {} on {} by gpucr {}",
        summary.created,
        summary.hostname,
        summary.gpucr_version
    );
    say!("kernel     {}", summary.kernel);
    say!(
        "driver     {} (CUDA {}.{})",
        summary.driver.display(),
        summary.driver_version / 1000,
        summary.driver_version % 1000 / 10
    );
    for device in &summary.devices {
        say!("device     {} {} {}", device.name, device.uuid, display::bytes(device.memory));
    }
    let options = summary.criu_options.join(" ");
    say!("criu       {} {options}", summary.criu_version);
    say!("stopped    {}", display::time(summary.stopped_ms));
    say!(
        "size       {} device memory + {} host side, stored in {} ({:.2} : 1)",
        display::bytes(summary.bulk_bytes),
        display::bytes(summary.host_bytes),
        display::bytes(summary.stored_bytes),
        summary.ratio
    );
    for process in &summary.processes {
        let kind = match (process.cuda, process.under_gpucr) {
            (false, _) => "no CUDA",
            (true, true) => "under gpucr",
            (true, false) => "CUDA, not under gpucr",
        };
        say!(
            "process    {} (parent {}, {kind}) {}",
            process.pid,
            process.ppid,
            display::command(process.command, 60)
        );
        for block in &process.blocks {
            say!(
                "  block {:>6}  {:>18}  {:>12}  {:>6} allocations",
                block.id,
                block.address,
                display::bytes(block.size),
                block.allocations
            );
        }
    }
    for file in summary.files.iter().filter(|file| file.open) {
        say!("needs      {} with {} bytes", file.path.display(), file.size);
    }
    for phase in summary.phases {
        say!("phase      {:<11} {}", phase.name, display::time(phase.ms));
    }
}

fn time(seconds: u64) -> String {
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}
