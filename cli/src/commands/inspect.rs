//! `gpucr inspect`.

mod kernels;
mod print;
mod rows;

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::image::{Base, ImageReader, Part};
use gpucr_core::interrupted;
use gpucr_core::kinds;
use gpucr_core::multicast;
use gpucr_core::open_blocks;
use gpucr_core::store::ChunkId;
use gpucr_core::{Error, device_uuid, hex};

use self::rows::{
    BlockRow, ChunkRow, CountsRow, CriuRow, DeviceRow, FileRow, LibraryRow, ProcessRow, SectionRow,
    ShimRow, Summary,
};
use crate::commands::{Outcome, print_json};
use crate::template::{self, Template, template};
use crate::{display, stores};

/// Show what is in an image
///
/// Shows its identity, where it comes from, the processes as a tree, the devices, the blocks of device memory, and
/// the files. Only the manifest and the index are read: use `gpucr verify` to check whether the data is intact.
#[derive(clap::Args)]
#[command(after_long_help = "\
SIZE is the size as the program sees it, STORED the space used in the image. Identical chunks are stored once, \
but count for each block and file that has them.\n\n\
The identity is the hash of the manifest, which names every chunk by its own hash: two images with the same \
identity are the same, wherever they are.\n\n\
Examples:\n  gpucr inspect image\n  \
gpucr inspect --format '{{range .processes}}{{.pid}} {{.exe}}\\n{{end}}' image")]
pub(crate) struct InspectArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// Show every block and file, not only the 20 largest
    #[arg(long)]
    pub(crate) all: bool,
    /// Show instead the kernels that each process launched during the dump
    ///
    /// Only a dump that copies while the program runs (--protocol recopy or cow) records them.
    #[arg(long)]
    pub(crate) kernels: bool,
    /// Print everything as a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print fields of the JSON object from a template, such as '{{.created}} {{.protocol}}'
    ///
    /// As with docker and podman: {{.field}}, {{.devices.0.name}}, {{json .field}}, {{range .processes}}{{.pid}}\n{{end}}.
    #[arg(long, value_name = "TEMPLATE", value_parser = template, conflicts_with = "json")]
    pub(crate) format: Option<Template>,
}

pub(crate) fn run(args: &InspectArgs) -> Outcome {
    let image = ImageReader::open(&args.image).map_err(Error::from)?;
    if args.kernels && !args.json && args.format.is_none() {
        kernels::print(image.manifest(), args.all);
        return Ok(ExitCode::SUCCESS);
    }
    let summary = summary(&image);
    if let Some(template) = &args.format {
        return template::print(template, &summary);
    }
    if args.json {
        print_json(&summary)?;
    } else {
        print::print(&summary, args.all);
    }
    Ok(ExitCode::SUCCESS)
}

fn summary(image: &ImageReader) -> Summary<'_> {
    let manifest = image.manifest();
    let host_bytes: u64 = manifest.criu.files.iter().map(|file| file.size).sum();
    let libraries = libraries(image);
    let library_bytes: u64 = libraries.iter().map(|library| library.size).sum();
    let stored = image.chunks().stored_bytes();
    let plain = manifest.bulk_bytes + host_bytes + library_bytes;
    Summary {
        id: hex(&image.id()),
        kind: match image.base() {
            None => "alone",
            Some(Base::Parent { .. }) => "incremental",
            Some(Base::Store) => "stored",
        },
        ancestors: image.ancestors().iter().map(|path| stores::plain(path)).collect(),
        store: image.store().map(|store| stores::plain(store.dir())),
        created: display::date(manifest.created),
        gpucr_version: &manifest.gpucr_version,
        hostname: &manifest.hostname,
        kernel: &manifest.kernel,
        protocol: manifest.protocol,
        driver: &manifest.driver.path,
        driver_version: manifest.driver.version,
        driver_kind: manifest.driver.kind,
        driver_hash: hex(&manifest.driver.file_hash),
        devices: devices(image),
        processes: processes(image),
        criu_version: &manifest.criu.version,
        criu_options: &manifest.criu.options,
        bulk_bytes: manifest.bulk_bytes,
        host_bytes,
        library_bytes,
        stored_bytes: stored,
        unneeded_bytes: image.chunks().unneeded_bytes(),
        ratio: plain as f64 / stored.max(1) as f64,
        chunks: chunks(image),
        criu_files: criu_files(image),
        sections: sections(image),
        container: gpucr_core::restore::mounted_places(image.manifest()),
        libraries,
        files: manifest
            .required
            .iter()
            .map(|file| FileRow {
                path: &file.path,
                size: file.size,
                open: file.open,
                mapped: file.mapped,
            })
            .collect(),
        kernels: kernels::of(manifest),
        // What makes no sense a restore refuses.
        multicast: multicast::read(manifest).unwrap_or_default(),
        opened: open_blocks::read(manifest).unwrap_or_default(),
        interrupted: interrupted::read(manifest),
        stopped_ms: manifest.stopped_ms,
        phases: &manifest.phases,
    }
}

/// Stored bytes of the distinct chunks of a part.
fn stored_bytes(image: &ImageReader, part: &Part<'_>) -> u64 {
    let ids: HashSet<ChunkId> = part.pieces().map(|piece| piece.id).collect();
    let entries = ids.iter().filter_map(|id| image.chunks().entry(id));
    entries.map(|entry| u64::from(entry.stored_len)).sum()
}

fn chunks(image: &ImageReader) -> ChunkRow {
    let parts = image.manifest().parts();
    let ids: HashSet<ChunkId> = parts.flat_map(|part| part.pieces()).map(|p| p.id).collect();
    let mut row = ChunkRow { count: ids.len() as u64, ..ChunkRow::default() };
    for entry in ids.iter().filter_map(|id| image.chunks().entry(id)) {
        row.bytes += u64::from(entry.plain_len);
        row.stored_bytes += u64::from(entry.stored_len);
        row.constant += u64::from(entry.stored_len == 0 && entry.plain_len > 0);
    }
    row
}

fn devices(image: &ImageReader) -> Vec<DeviceRow<'_>> {
    let manifest = image.manifest();
    let mut bulk: BTreeMap<[u8; 16], u64> = BTreeMap::new();
    for part in manifest.parts() {
        if let Part::Block { block, .. } = part {
            *bulk.entry(block.device).or_default() += block.size;
        }
    }
    let row = |device: &gpucr_core::image::Device| bulk.get(&device.uuid).copied().unwrap_or(0);
    let devices = manifest.devices.iter();
    devices
        .map(|device| DeviceRow {
            uuid: device_uuid(&device.uuid),
            name: &device.name,
            memory: device.total_memory,
            bulk_bytes: row(device),
        })
        .collect()
}

fn processes(image: &ImageReader) -> Vec<ProcessRow<'_>> {
    let row = |process: &'_ gpucr_core::image::Process| -> Vec<BlockRow> {
        let blocks = process.cuda.iter().flat_map(|cuda| &cuda.blocks);
        blocks
            .map(|block| {
                let part = Part::Block { process, block };
                BlockRow {
                    id: block.id,
                    device: device_uuid(&block.device),
                    address: format!("{:#x}", block.address),
                    size: block.size,
                    stored_bytes: stored_bytes(image, &part),
                    allocations: block.allocations,
                    kind: block.kind,
                    chunks: part.pieces().count(),
                }
            })
            .collect()
    };
    let processes = image.manifest().processes.iter();
    processes
        .map(|process| {
            let cuda = process.cuda.as_ref();
            let shim = cuda.and_then(|cuda| cuda.shim.as_ref());
            ProcessRow {
                pid: process.pid,
                ppid: process.ppid,
                command: &process.command,
                exe: &process.exe,
                cuda: cuda.is_some(),
                under_gpucr: shim.is_some(),
                stdio: &process.stdio,
                listeners: &process.listeners,
                shim: shim.map(|shim| ShimRow { path: &shim.path, hash: hex(&shim.hash) }),
                counts: cuda.map(|cuda| CountsRow(kinds::inspect(&cuda.counts))),
                blocks: row(process),
            }
        })
        .collect()
}

fn criu_files(image: &ImageReader) -> Vec<CriuRow<'_>> {
    let files = image.manifest().criu.files.iter();
    files
        .map(|file| {
            let part = Part::Criu(file);
            CriuRow {
                name: &file.name,
                size: file.size,
                stored_bytes: stored_bytes(image, &part),
                mode: format!("{:o}", file.mode),
                chunks: part.pieces().count(),
            }
        })
        .collect()
}

fn sections(image: &ImageReader) -> Vec<SectionRow<'_>> {
    let sections = image.manifest().sections.iter();
    sections
        .map(|section| {
            let chunks: u64 = section.chunks.iter().map(|chunk| u64::from(chunk.len)).sum();
            SectionRow {
                kind: &section.kind,
                version: section.version,
                needed: section.needed,
                size: section.data.len() as u64 + chunks,
            }
        })
        .collect()
}

/// Carried files and shims, each path once.
fn libraries(image: &ImageReader) -> Vec<LibraryRow<'_>> {
    let mut seen: HashSet<PathBuf> = HashSet::new();
    let mut rows = Vec::new();
    for part in image.manifest().parts() {
        let (Some(path), Some(file)) = (part.path(), part.file()) else { continue };
        if seen.insert(path.to_owned()) {
            rows.push(LibraryRow {
                path,
                size: file.size,
                stored_bytes: stored_bytes(image, &part),
                mode: format!("{:o}", file.mode),
                chunks: part.pieces().count(),
            });
        }
    }
    rows
}
