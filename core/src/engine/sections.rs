//! What this version of gpucr says in [sections](Section) of the manifest.

use std::collections::HashSet;
use std::path::PathBuf;

use gpucr_wire::{Sharing, Stream};

use super::copied_files::{self, Copied, CopiedFile};
use super::error::Error;
use super::interrupted;
use super::kept_files::Kept;
use super::launched;
use super::multicast;
use super::opened;
use crate::host::container::{self, OuterMount};
use crate::image::{FileChunk, ImageError, Manifest, Section};

/// What of the device memory instances can share, as [`Sharing::to_bytes`] writes it, which has a version of its own.
const SHARING: &str = "sharing";

/// How much device memory the contexts of each process take, in postcard form: [`Contexts`].
const CONTEXTS: &str = "contexts";

/// Which memory of others each process has open, in postcard form: [`opened::ByProcess`].
const OPENED: &str = "opened";

/// Copies of files that processes were writing, in postcard form: [`Kept`], and as chunks their bytes.
const FILES: &str = "files";

/// Files that go along with a program that is migrated, in postcard form: [`CopiedFile`], and as chunks their bytes.
const COPIED: &str = "copied";

/// Words that a user has given the image, in postcard form: a list of strings.
const TAGS: &str = crate::image::TAGS;

/// That the program was in a network namespace of its own. It has no data.
const NETWORK: &str = "network";

/// That the program was in a container, in postcard form: the [mounts](OuterMount) of that from elsewhere, in the order in
/// which CRIU's files number them.
const CONTAINER: &str = "container";

/// The places in a container at which CRIU makes file systems anew, in postcard form: a list of paths.
const MADE_ANEW: &str = "made-anew";

/// By process, and by the UUID of the device: bytes besides the memory that the image has.
pub(super) type Contexts = Vec<(u32, Vec<([u8; 16], u64)>)>;

/// Kinds and versions that a restore understands.
const KNOWN: [(&str, u32); 12] = [
    (SHARING, 1),
    (CONTEXTS, 1),
    (OPENED, 1),
    (FILES, 1),
    (COPIED, 1),
    (TAGS, 1),
    (NETWORK, 1),
    (CONTAINER, 1),
    (MADE_ANEW, 1),
    (launched::SECTION, 1),
    (interrupted::SECTION, 1),
    (multicast::SECTION, 1),
];

/// Refuses an image that needs what this gpucr does not know.
///
/// # Errors
/// [`ImageError::UnknownSection`].
pub(super) fn check(manifest: &Manifest) -> Result<(), ImageError> {
    manifest.check_sections(&KNOWN)
}

/// The section for memory that can be shared. It may be passed over: then nothing is shared.
pub(super) fn sharing(sharing: &Sharing) -> Section {
    let (kind, data) = (SHARING.to_owned(), sharing.to_bytes());
    Section { kind, version: 1, needed: false, data, chunks: Vec::new() }
}

/// What [`sharing`] has written.
pub(super) fn read_sharing(manifest: &Manifest) -> Option<&[u8]> {
    manifest.section(SHARING, 1).map(|section| section.data.as_slice())
}

/// The section for the memory of contexts. It may be passed over: then others can take what the program needs, and its
/// restore fails.
pub(super) fn contexts(mut contexts: Contexts) -> Option<Section> {
    contexts.retain(|(_, devices)| !devices.is_empty());
    let data = postcard::to_stdvec(&contexts).ok().filter(|_| !contexts.is_empty())?;
    let kind = CONTEXTS.to_owned();
    Some(Section { kind, version: 1, needed: false, data, chunks: Vec::new() })
}

/// What [`contexts`] has written, of the processes and devices of the image, each once; nothing if it makes no sense.
pub(super) fn read_contexts(manifest: &Manifest) -> Contexts {
    let section = manifest.section(CONTEXTS, 1);
    let said = section.and_then(|section| postcard::from_bytes::<Contexts>(&section.data).ok());
    let mut processes: HashSet<u32> = manifest.processes.iter().map(|p| p.pid).collect();
    let mut contexts = said.unwrap_or_default();
    contexts.retain(|(pid, _)| processes.remove(pid));
    for (_, devices) in &mut contexts {
        let mut known: HashSet<_> = manifest.devices.iter().map(|device| device.uuid).collect();
        devices.retain(|(device, _)| known.remove(device));
    }
    contexts
}

/// The section for memory that processes have opened of each other; none if none has. Without it they would not have
/// their memory.
pub(super) fn opened(opened: &opened::ByProcess) -> Option<Section> {
    let data = postcard::to_stdvec(opened).ok().filter(|_| !opened.is_empty())?;
    let kind = OPENED.to_owned();
    Some(Section { kind, version: 1, needed: true, data, chunks: Vec::new() })
}

/// What [`opened`] has written.
///
/// # Errors
/// [`Error::Damaged`]: it makes no sense.
pub(super) fn read_opened(manifest: &Manifest) -> Result<opened::ByProcess, Error> {
    let Some(section) = manifest.section(OPENED, 1) else { return Ok(Vec::new()) };
    let said = postcard::from_bytes::<opened::ByProcess>(&section.data).ok();
    said.filter(|said| opened::is_possible(said, manifest)).ok_or_else(|| Error::Damaged {
        what: "what it says of memory that processes have opened of each other".into(),
    })
}

/// The section for the tags of an image; none if it has none. It may be passed over.
pub(super) fn tags(tags: &[String]) -> Option<Section> {
    let data = postcard::to_stdvec(tags).ok().filter(|_| !tags.is_empty())?;
    Some(Section { kind: TAGS.to_owned(), version: 1, needed: false, data, chunks: Vec::new() })
}

/// The section of a program that was in another network namespace than the gpucr that has dumped it. It may be passed over:
/// where it is restored is said by whoever restores it.
pub(super) fn network() -> Section {
    let (kind, data) = (NETWORK.to_owned(), Vec::new());
    Section { kind, version: 1, needed: false, data, chunks: Vec::new() }
}

/// Whether the image has what [`network`] writes.
pub(super) fn had_own_network(manifest: &Manifest) -> bool {
    manifest.section(NETWORK, 1).is_some()
}

/// The section of a program that was in a container. A restore that did not know would have no root for it.
pub(super) fn container(mounts: &[OuterMount]) -> Option<Section> {
    let data = postcard::to_stdvec(mounts).ok()?;
    let kind = CONTAINER.to_owned();
    Some(Section { kind, version: 1, needed: true, data, chunks: Vec::new() })
}

/// What [`container`] has written; `None` if the program was in none.
///
/// # Errors
/// [`Error::Damaged`]: it makes no sense.
pub(super) fn read_container(manifest: &Manifest) -> Result<Option<Vec<OuterMount>>, Error> {
    let Some(section) = manifest.section(CONTAINER, 1) else { return Ok(None) };
    let said = postcard::from_bytes::<Vec<OuterMount>>(&section.data).ok();
    let said = said.filter(|mounts| container::are_possible(mounts));
    let what = "what it says of the container of the program";
    said.map(Some).ok_or_else(|| Error::Damaged { what: what.into() })
}

/// The section for the places in a container at which CRIU makes file systems anew. It may be passed over: CRIU knows.
pub(super) fn made_anew(places: &[PathBuf]) -> Option<Section> {
    let data = postcard::to_stdvec(places).ok()?;
    let kind = MADE_ANEW.to_owned();
    Some(Section { kind, version: 1, needed: false, data, chunks: Vec::new() })
}

/// What [`made_anew`] has written; `None` if nobody knows.
pub(super) fn read_made_anew(manifest: &Manifest) -> Option<Vec<PathBuf>> {
    let said = postcard::from_bytes::<Vec<PathBuf>>(&manifest.section(MADE_ANEW, 1)?.data).ok();
    said.filter(|places| {
        places.len() <= container::MOST && places.iter().all(|it| it.is_absolute())
    })
}

/// The section for copies of files; none if there are none. It may be passed over: then no file is put back.
pub(super) fn kept_files(kept: &[Kept], chunks: Vec<FileChunk>) -> Option<Section> {
    let data = postcard::to_stdvec(kept).ok().filter(|_| !kept.is_empty())?;
    Some(Section { kind: FILES.to_owned(), version: 1, needed: false, data, chunks })
}

/// What [`kept_files`] has written: the files, and the bytes of all one after the other.
pub(super) fn read_kept_files(manifest: &Manifest) -> Option<(Vec<Kept>, &[FileChunk])> {
    let section = manifest.section(FILES, 1)?;
    Some((postcard::from_bytes(&section.data).ok()?, &section.chunks))
}

/// The section for files that go along. It may be passed over: whoever takes the program has made them by then.
pub(super) fn copied_files(files: &[CopiedFile], chunks: Vec<FileChunk>) -> Option<Section> {
    let data = postcard::to_stdvec(files).ok()?;
    Some(Section { kind: COPIED.to_owned(), version: 1, needed: false, data, chunks })
}

/// What [`copied_files`] has written: the files, and the bytes of all one after the other. `None` if there is nothing.
///
/// # Errors
/// It makes no sense.
pub(super) fn read_copied_files(manifest: &Manifest) -> Result<Option<Copied<'_>>, &'static str> {
    let Some(section) = manifest.section(COPIED, 1) else { return Ok(None) };
    let files = postcard::from_bytes::<Vec<CopiedFile>>(&section.data).ok();
    let files = files.filter(|files| copied_files::are_possible(files));
    let files = files.ok_or("what it says of files that go along makes no sense")?;
    Ok(Some((files, &section.chunks)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::manifest;

    #[test]
    fn sections_are_read_as_they_were_written() {
        let mut manifest = manifest();
        assert!(read_contexts(&manifest).is_empty() && read_sharing(&manifest).is_none());
        let (pid, device) = (manifest.processes[0].pid, manifest.devices[0].uuid);
        let sizes = vec![(pid, vec![(device, 96 << 20)]), (pid + 1, vec![])];
        manifest.sections.extend(contexts(sizes.clone()));
        let shared = Sharing { version: 1, processes: Vec::new() };
        manifest.sections.push(sharing(&shared));
        assert_eq!(read_contexts(&manifest), sizes[..1]);
        assert_eq!(read_sharing(&manifest), Some(&shared.to_bytes()[..]));
        assert!(!had_own_network(&manifest));
        manifest.sections.push(network());
        assert!(had_own_network(&manifest));
        check(&manifest).unwrap();
        assert_eq!(read_container(&manifest).unwrap(), None);
        let mounts = vec![OuterMount { place: "/data".into(), is_directory: true }];
        manifest.sections.extend(container(&mounts));
        assert_eq!(read_container(&manifest).unwrap(), Some(mounts));
        assert_eq!(read_made_anew(&manifest), None);
        let places = vec![PathBuf::from("/tmp")];
        manifest.sections.insert(0, made_anew(&places).unwrap());
        assert_eq!(read_made_anew(&manifest), Some(places));
        check(&manifest).unwrap();
        for nonsense in [vec![PathBuf::from("tmp")], vec![PathBuf::from("/tmp"); 1025]] {
            manifest.sections[0] = made_anew(&nonsense).unwrap();
            assert_eq!(read_made_anew(&manifest), None);
        }
        manifest.sections[0].data = vec![0xff];
        assert_eq!(read_made_anew(&manifest), None);
        manifest.sections.remove(0);
        let last = manifest.sections.len() - 1;
        let outside = [OuterMount { place: "/../etc".into(), is_directory: true }];
        manifest.sections[last] = container(&outside).unwrap();
        read_container(&manifest).expect_err("it leads out of the container");
        manifest.sections.pop();
        // Nothing is said of a program that needs nothing, and nonsense is nothing.
        assert_eq!(contexts(vec![(8, vec![])]), None);
        manifest.sections[0].data = vec![255; 40];
        assert!(read_contexts(&manifest).is_empty());
        // However long the list, there is one number for each process and device of the image.
        let many = vec![(pid, [vec![(device, 1); 50], vec![([77; 16], 1); 50]].concat()); 50];
        let strangers = vec![(pid + 1, vec![(device, 1)])];
        manifest.sections[0] = contexts([many, strangers].concat()).unwrap();
        assert_eq!(read_contexts(&manifest), [(pid, vec![(device, 1)])]);
    }
}
