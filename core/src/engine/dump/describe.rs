//! What the manifest of an image says, from what the dump has found.

use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::preflight::{Cuda, DumpPlan};
use super::report::{CriuOptions, Options};
use crate::base::format::milliseconds;
use crate::base::phase::PhaseTime;
use crate::engine::copied_files::Candidates;
use crate::engine::error::Error;
use crate::engine::kinds;
use crate::engine::memory::Saved;
use crate::engine::sections;
use crate::host::container::Container;
use crate::host::criu::DumpOptions;
use crate::host::process::files;
use crate::image::library;
use crate::image::{
    self, Block, CarriedFile, CriuImage, CudaProcess, FileEntry, ImageWriter, Manifest, Phase,
    Process, Protocol, Section, Shim,
};

/// Name of the option that is set by itself when the root is no session leader.
const SHELL_JOB: &str = "--shell-job";

/// The options for CRIU's side of the dump.
pub(super) fn criu_options<'a>(
    options: &Options,
    plan: &DumpPlan,
    images: BorrowedFd<'a>,
) -> DumpOptions<'a> {
    let CriuOptions { tcp_established, tcp_close, file_locks, ext_unix_sk } = options.criu;
    DumpOptions {
        leave_running: options.leave_running,
        shell_job: plan.shell_job,
        // Connections within the program are saved always; others are refused before CRIU is asked.
        tcp_established: !tcp_close,
        lock_network: tcp_established,
        tcp_close,
        file_locks,
        ext_unix_sk,
        external: plan.container.as_ref().map(Container::to_save).unwrap_or_default(),
        skipped_mounts: plan.container.as_ref().map(Container::left_out).unwrap_or_default(),
        ..DumpOptions::new(options.pid, images)
    }
}

/// The options of a dump that the restore has to repeat, by CRIU's names.
pub(super) fn option_names(options: &CriuOptions, shell_job: bool) -> Vec<String> {
    let CriuOptions { tcp_established, tcp_close, file_locks, ext_unix_sk } = *options;
    [
        (shell_job, SHELL_JOB),
        (tcp_established, "--tcp-established"),
        (tcp_close, "--tcp-close"),
        (file_locks, "--file-locks"),
        (ext_unix_sk, "--ext-unix-sk"),
    ]
    .into_iter()
    .filter(|(set, _)| *set)
    .map(|(_, name)| name.to_owned())
    .collect()
}

/// Whether an image was made with CRIU's `--shell-job`, and its other options.
pub(crate) fn option_values(names: &[String]) -> (bool, CriuOptions) {
    let has = |name: &str| names.iter().any(|n| n == name);
    let options = CriuOptions {
        tcp_established: has("--tcp-established"),
        tcp_close: has("--tcp-close"),
        file_locks: has("--file-locks"),
        ext_unix_sk: has("--ext-unix-sk"),
    };
    (has(SHELL_JOB), options)
}

/// The libraries that the program runs with, stored and hashed. Done before the program is
/// stopped, since NVIDIA's driver library has 100 MB.
#[derive(Clone)]
pub(super) struct Libraries {
    driver: image::Driver,
    carried: Vec<CarriedFile>,
    shims: Vec<Shim>,
}

impl Libraries {
    /// The libraries that an image will bring along, without their bytes.
    fn named(plan: &DumpPlan) -> Result<Self, Error> {
        let driver = describe_driver(plan)?;
        let mut paths: Vec<&Path> = plan.shims().map(|shim| shim.path.as_path()).collect();
        paths
            .extend(library::is_place_of(&driver.path, &driver.file_hash).then_some(&*driver.path));
        paths.sort_unstable();
        paths.dedup();
        let carried = paths.into_iter().enumerate().map(|(number, path)| {
            let (name, mode) = (format!("carried-{number}"), library::MODE);
            let file = FileEntry { name, size: 0, mode, chunks: Vec::new() };
            CarriedFile { path: path.to_owned(), mode, file }
        });
        Ok(Self { carried: carried.collect(), shims: Vec::new(), driver })
    }

    /// Stores the libraries that the image has to bring along: the shim, and the software driver.
    pub(super) fn store(plan: &DumpPlan, image: &ImageWriter) -> Result<Self, Error> {
        let mut carried: Vec<CarriedFile> = Vec::new();
        let mut carry = |path: &Path, bytes: &[u8]| -> Result<FileEntry, Error> {
            let name = format!("carried-{}", carried.len());
            let file = image.add_bytes(&name, library::MODE, bytes)?;
            let entry = CarriedFile { path: path.to_owned(), mode: file.mode, file: file.clone() };
            carried.push(entry);
            Ok(file)
        };
        let driver = describe_driver(plan)?;
        if library::is_place_of(&driver.path, &driver.file_hash) {
            carry(&driver.path, &plan.driver.bytes()?)?;
        }
        let mut shims: Vec<Shim> = Vec::new();
        for shim in plan.shims() {
            let path = &shim.path;
            if shims.iter().any(|known| known.path == *path) {
                continue;
            }
            // The very file that the program has mapped: its path may lead anywhere by now.
            let read = shim.open().and_then(|file| file.bytes(library::LARGEST_SHIM));
            let bytes = read.map_err(|source| Error::Io {
                what: format!("cannot read {}", path.display()),
                source,
            })?;
            let hash = *blake3::hash(&bytes).as_bytes();
            if !library::is_place_of(path, &hash) {
                return Err(Error::StrangeShim { path: path.clone() });
            }
            let file = carry(path, &bytes)?;
            shims.push(Shim { path: path.clone(), hash, file });
        }
        Ok(Self { driver, carried, shims })
    }
}

fn describe_driver(plan: &DumpPlan) -> Result<image::Driver, Error> {
    Ok(image::Driver {
        path: plan.driver_path.clone(),
        version: plan.driver_version,
        kind: plan.driver.kind(),
        file_hash: plan.driver.hash()?,
    })
}

/// What a manifest would say if the program were dumped now, without memory and files of CRIU's: a migration offers it.
pub(super) fn outline(options: &Options, plan: &DumpPlan) -> Result<Manifest, Error> {
    let libraries = Libraries::named(plan)?;
    let outline = manifest(options, plan, Protocol::Stop, libraries, Vec::new());
    let mut outline = Manifest { bulk_bytes: plan.bulk_bytes(), ..outline };
    if options.target.peer().is_some_and(|peer| peer.copies_files()) {
        let pids: Vec<u32> = plan.processes.iter().map(|process| process.pid).collect();
        let (renamed, stop) = (&plan.renamed, &options.stop);
        let tree = &plan.tree();
        let mut files = Candidates { pids: &pids, renamed, tree, stop }.list();
        // What the image brings along by itself is put in its place by itself.
        files.retain(|file| outline.required.iter().any(|required| required.path == file.path));
        outline.sections.extend(sections::copied_files(&files, Vec::new()));
    }
    Ok(outline)
}

/// Names each block's chunks by what the copy came to.
pub(super) fn set_saved(manifest: &mut Manifest, saved: Vec<Saved>) {
    let all = manifest.processes.iter_mut().filter_map(|process| process.cuda.as_mut());
    for (cuda, saved) in all.zip(saved) {
        cuda.blocks = saved.into_iter().filter_map(block).collect();
    }
}

/// What the manifest says of the processes, which are frozen, and of their memory. CRIU's files and
/// how the dump went are still [missing](finish).
pub(super) fn manifest(
    options: &Options,
    plan: &DumpPlan,
    protocol: Protocol,
    libraries: Libraries,
    saved: Vec<Saved>,
) -> Manifest {
    let Libraries { driver, carried, shims } = libraries;
    let inner_pipes = files::inner_pipes(plan.processes.iter().map(|process| process.pid));
    let saved_bytes = saved.iter().flatten().map(|(block, _)| block.size).sum();
    let mut saved = saved.into_iter();
    let mut processes = Vec::with_capacity(plan.processes.len());
    for process in &plan.processes {
        let cuda = process.cuda.as_ref().map(|Cuda { counts, shim }| CudaProcess {
            blocks: saved.next().unwrap_or_default().into_iter().filter_map(block).collect(),
            shim: shim
                .as_ref()
                .and_then(|shim| shims.iter().find(|known| known.path == shim.path).cloned()),
            counts: kinds::describe(counts),
        });
        processes.push(Process {
            pid: process.pid,
            ppid: process.parent,
            command: process.command.clone(),
            exe: process.exe.clone(),
            cuda,
            stdio: files::stdio(process.pid, &inner_pipes),
            listeners: process.listeners.clone(),
        });
    }

    // Carried files need not be there before a restore; gpucr puts them in place.
    let is_carried = |path: &Path| carried.iter().any(|known| known.path == path);
    let mut required = files::required(
        plan.processes.iter().map(|process| process.pid),
        &plan.renamed,
        &plan.tree(),
    );
    // Nor what CRIU makes.
    let is_made = |path: &Path| plan.container.as_ref().is_some_and(|it| it.makes_anew(path));
    required.retain(|file| !is_carried(&file.path) && !is_made(&file.path));
    let system = rustix::system::uname();
    Manifest {
        created: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        gpucr_version: env!("CARGO_PKG_VERSION").to_owned(),
        hostname: system.nodename().to_string_lossy().into_owned(),
        kernel: system.release().to_string_lossy().into_owned(),
        protocol,
        driver,
        devices: plan
            .devices
            .iter()
            .map(|device| image::Device {
                uuid: device.uuid,
                name: device.name.clone(),
                total_memory: device.memory,
            })
            .collect(),
        processes,
        criu: CriuImage {
            version: plan.criu.version().to_string(),
            files: Vec::new(),
            options: option_names(&options.criu, plan.shell_job),
        },
        carried,
        required,
        bulk_bytes: saved_bytes,
        phases: Vec::new(),
        stopped_ms: 0.0,
        sections: own_namespaces(plan),
    }
}

/// The sections that say what of the host the program does not share.
fn own_namespaces(plan: &DumpPlan) -> Vec<Section> {
    let network = plan.foreign_network().map(|_| sections::network());
    let container = plan.container.as_ref();
    let mounts = container.and_then(|it| sections::container(&it.mounts));
    let made_anew = container.and_then(|it| sections::made_anew(&it.made_anew));
    network.into_iter().chain(mounts).chain(made_anew).collect()
}

/// Adds what is known last.
pub(super) fn finish(
    manifest: &mut Manifest,
    criu_files: Vec<FileEntry>,
    phases: &[PhaseTime],
    stopped: Duration,
) {
    manifest.criu.files = criu_files;
    manifest.phases =
        phases.iter().map(|phase| Phase { name: phase.name.to_owned(), ms: phase.ms }).collect();
    manifest.stopped_ms = milliseconds(stopped);
}

fn block((block, chunks): (gpucr_wire::Block, Vec<crate::store::ChunkId>)) -> Option<Block> {
    Some(Block {
        id: block.id,
        device: block.device,
        size: block.size,
        kind: kinds::described_block(block.kind)?,
        address: block.address,
        allocations: block.allocations,
        chunks,
    })
}
