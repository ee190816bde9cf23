//! What a host lacks for a program that is not there yet: all of it at once, before anything is changed.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::at_hand::AtHand;
use super::devices::{self, MappedDevice};
use super::files::{FilePolicy, Files};
use super::options::Options;
use super::processes::REAPING;
use super::source::Source;
use super::stdio::{self, Named};
use super::{driver, memory};
use super::{preflight, root};
use crate::base::file_tree::FileTree;
use crate::base::limits;
use crate::cuda::Drivers;
use crate::engine::error::Error;
use crate::engine::sections;
use crate::host::criu::{self, Criu, PROCESS_TREE};
use crate::host::network::NetworkNamespace;
use crate::image::Manifest;
use crate::image::trust::Trust;

/// How a program is to be restored.
#[derive(Clone, Copy)]
pub(crate) struct Circumstances<'a> {
    /// Devices that others of this host take the place of.
    pub(crate) device_map: &'a [MappedDevice],
    /// Whether its pids have to be free: not if it gets a namespace of its own, or has them itself.
    pub(crate) needs_pids: bool,
    /// Which of its outputs are to go to files: they have to have been pipes.
    pub(crate) named: Named,
    /// Set to end it.
    pub(crate) stop: &'a Arc<AtomicBool>,
}

/// All that this host lacks for the program of a manifest that may be without memory and files, and was made while the
/// program runs.
pub(crate) fn lacks(manifest: &Manifest, how: Circumstances<'_>) -> Vec<String> {
    let mut found = lacks_but_files(manifest, how, &FileTree::host());
    if let Err(error) = root::refuse_contained(manifest) {
        // Its files are not to be looked for here.
        found.push(error);
        return found.iter().map(to_source).collect();
    }
    for file in &manifest.required {
        match std::fs::metadata(&file.path) {
            Err(_) => found.push(Error::FileMissing { path: file.path.clone() }),
            // What the program has open it may be writing.
            Ok(meta) if meta.len() != file.size && !file.open => found.push(Error::FileChanged {
                path: file.path.clone(),
                found: meta.len(),
                expected: file.size,
            }),
            Ok(_) => {}
        }
    }
    found.iter().map(to_source).collect()
}

/// What a source is told of it, which is asked for the options.
fn to_source(error: &Error) -> String {
    match error {
        Error::FileMissing { .. } => format!("{error} (--files copy sends it along)"),
        Error::PidInUse { .. } => format!("{error} (--new-pids gives the program others)"),
        error => error.to_string(),
    }
}

/// Everything that is known to keep an image of this host from being restored with these options; its data aside, which
/// is not read. Nothing is changed. `needs_pids` is false for a program that gets a pid namespace of its own.
pub fn blockers(options: &Options, needs_pids: bool) -> Vec<Error> {
    let source = match Source::open(&options.image, options.warm) {
        Ok(source) => source,
        Err(error) => return vec![error],
    };
    let manifest = source.manifest();
    let named = options.outputs.named();
    let (device_map, stop) = (&options.device_map, &options.stop);
    let how = Circumstances { device_map, needs_pids, named, stop };
    let mut found = lacks_but_files(manifest, how, &options.tree());
    if let Err(error) = options.trust.check_image(&options.image, &source.id()) {
        found.push(error.into());
    }
    found.extend(check_network(options.network.as_ref()).err());
    let lacking = root::lacking(manifest, options);
    let is_elsewhere = lacking.iter().any(|error| matches!(error, Error::NoRoot));
    found.extend(lacking);
    // Then its files are not to be looked for here.
    if is_elsewhere {
        return found;
    }
    found.extend(memory::check(&source, options.device_memory_there(&source)).err());
    match Files::look(&source, options.files, &options.tree()) {
        Ok((_, reasons)) => found.extend(reasons),
        Err(error) => found.push(error),
    }
    found
}

/// Whether the program of an image led its session: then it can be given a terminal in a pid namespace of its own too.
/// `None` if the image cannot be read, or does not tell.
pub fn leads_its_session(options: &Options) -> Option<bool> {
    let source = Source::open(&options.image, options.warm).ok()?;
    let manifest = source.manifest();
    let tree = manifest.criu.files.iter().find(|file| file.name == PROCESS_TREE)?;
    let tree = source.criu_file(tree).ok()?;
    criu::leads_its_session(&tree, manifest.processes.first()?.pid)
}

/// Whether CRIU can work in the network namespace that is named.
///
/// # Errors
/// [`Error::NoLoopback`]; or it cannot be looked at.
pub(super) fn check_network(network: Option<&NetworkNamespace>) -> Result<(), Error> {
    let Some(network) = network.filter(|network| !network.is_own()) else { return Ok(()) };
    let can = Criu::can_work_in(network).map_err(|source| {
        let what = "the network namespace cannot be looked at".to_owned();
        Error::Io { what, source }
    })?;
    if can { Ok(()) } else { Err(Error::NoLoopback { of: None }) }
}

/// Whether the program of an image was in a network namespace of its own and would be in gpucr's with these options, which
/// need not be what is wanted. Not if the image cannot be read.
pub fn would_leave_network(options: &Options) -> bool {
    let source = Source::open(&options.image, options.warm);
    source.is_ok_and(|source| leaves_network(source.manifest(), options))
}

pub(super) fn leaves_network(manifest: &Manifest, options: &Options) -> bool {
    options.network.is_none() && sections::had_own_network(manifest)
}

/// What this host lacks for the program of a manifest, the program's files aside.
fn lacks_but_files(manifest: &Manifest, how: Circumstances<'_>, tree: &FileTree) -> Vec<Error> {
    let mut found: Vec<Error> = Vec::new();
    let mut lacking = |error: Error| found.push(error);
    if !rustix::process::geteuid().is_root() {
        lacking(Error::NotRoot);
    }
    if let Err(error) = sections::check(manifest) {
        lacking(error.into());
    }
    match Criu::find(Some(how.stop)) {
        Ok(criu) => {
            let (own, needed) = (criu.version().to_string(), &manifest.criu.version);
            if numbers(&own) < numbers(needed) {
                lacking(Error::OlderCriu { needed: needed.clone(), found: own });
            }
        }
        Err(error) => lacking(error.into()),
    }
    if let Err(error) = limits::make_room_for(manifest.blocks().len() as u64) {
        lacking(error.into());
    }
    if how.needs_pids {
        let ids = manifest.thread_ids();
        // A process that has several of them is told once: by its own pid, if that is among them.
        let of_another = |id: &u32| preflight::process_of(*id).filter(|process| process != id);
        let new =
            |id: &u32| of_another(id).is_none_or(|process| ids.binary_search(&process).is_err());
        // One for all of them: there can be many whose parents do not wait.
        let deadline = Instant::now() + REAPING;
        let in_use = |id: u32| preflight::wait_until_free(id, deadline).err();
        ids.iter().copied().filter(new).filter_map(in_use).for_each(&mut lacking);
    }
    if let Err(error) = stdio::check(&manifest.processes, how.named) {
        lacking(error);
    }
    let drivers = Drivers::default();
    match driver::find(&manifest.driver, &drivers) {
        Ok(library) => {
            let is_carried = manifest.carried.iter().any(|file| file.path == manifest.driver.path);
            if !is_carried && let Err(error) = driver::check_place(&manifest.driver, &library, tree)
            {
                lacking(error);
            }
            let opened = driver::open(&manifest.driver, &library, &drivers).and_then(|driver| {
                let root = manifest.processes[0].pid;
                devices::place(root, &manifest.devices, &driver.devices()?, how.device_map)
            });
            if let Err(error) = opened {
                lacking(error);
            }
        }
        Err(error) => lacking(error),
    }
    found
}

/// Checks an image of this host as a restore does before it changes anything. Files that the image carries are put in
/// place. So many bytes of device memory, `there`, were loaded already. What `files` would change stays as it is.
///
/// # Errors
/// The restore would fail.
pub(crate) fn check_image(
    image: &Path,
    trust: &Trust,
    how: Circumstances<'_>,
    files: FilePolicy,
    there: u64,
) -> Result<(), Error> {
    let source = Source::open(image, false)?;
    trust.check_image(image, &source.id())?;
    root::refuse_contained(source.manifest())?;
    memory::check(&source, there)?;
    stdio::check(&source.manifest().processes, how.named)?;
    let (at_hand, tree) = (AtHand::default(), FileTree::host());
    let (_, library, _) = preflight::check_but_pids(&source, (files, &tree), &at_hand, how.stop)?;
    if how.needs_pids {
        preflight::check_pids(source.manifest())?;
    }
    preflight::open(&source, &library, &at_hand.drivers, how.device_map).map(drop)
}

/// The numbers of a version, as far as it has any.
fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::manifest;
    use crate::image::{RequiredFile, Stdio};

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert!(numbers("4.9") < numbers("4.10") && numbers("4.2") < numbers("4.2.1"));
        assert!(numbers("4.2.1") >= numbers("4.2.1") && numbers("5.0") > numbers("4.99.1"));
    }

    #[test]
    fn all_that_is_lacking_is_told_at_once() {
        let mut manifest = manifest();
        manifest.processes[0].pid = std::process::id();
        manifest.driver.file_hash = [7; 32];
        manifest.criu.version = "99.0".into();
        let file = |path: &str, open: bool| {
            let path = path.into();
            RequiredFile { path, size: 1, mapped: !open, open }
        };
        manifest.required = vec![
            file("/no/such/file", true),
            file("/proc/self/exe", false),
            file("/proc/self/exe", true),
        ];
        let stop = Arc::default();
        for process in &mut manifest.processes {
            process.stdio[1] = Stdio::DevNull;
        }
        let named = [false, true, false];
        let how = |needs_pids| Circumstances { device_map: &[], needs_pids, named, stop: &stop };
        let found = lacks(&manifest, how(true));
        let names = |word: &str| found.iter().filter(|reason| reason.contains(word)).count();
        assert_eq!(names("/no/such/file"), 1, "{found:?}");
        assert_eq!(names("/proc/self/exe"), 1, "only what nobody writes: {found:?}");
        assert_eq!(names("is in use"), 1, "{found:?}");
        assert_eq!(names("no driver of that build"), 1, "{found:?}");
        assert_eq!(names("CRIU"), 1, "{found:?}");
        assert_eq!(names("stdout was not a pipe"), 1, "{found:?}");
        assert!(!lacks(&manifest, how(false)).iter().any(|reason| reason.contains("in use")));
        // Whoever receives a program gives it no root directory.
        manifest.sections.extend(sections::container(&[]));
        let found = lacks(&manifest, how(true));
        assert!(found.iter().any(|reason| reason.contains("needs a root")), "{found:?}");
        assert!(!found.iter().any(|reason| reason.contains("/no/such/file")), "{found:?}");
    }
}
