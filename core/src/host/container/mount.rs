//! What an image says of a container, and what is wrong with one.

use std::collections::BTreeSet;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Most mounts of a container that come from elsewhere.
pub(crate) const MOST: usize = 1024;

/// A place in a container at which something is mounted from elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OuterMount {
    /// The place, as the container sees it.
    pub place: PathBuf,
    /// Whether that is a directory; a file otherwise.
    pub is_directory: bool,
}

/// Why a container cannot be saved or made.
#[derive(Debug, thiserror::Error)]
pub enum ContainerError {
    /// It cannot be looked at.
    #[error("the root directory or the mounts of process {pid} cannot be looked at: {source}")]
    Unreadable {
        /// Its process.
        pid: u32,
        /// Why.
        source: io::Error,
    },
    /// By its root directory the paths of its files cannot be told.
    #[error("the root directory of process {pid} is not that of its mounts")]
    Chrooted {
        /// The process.
        pid: u32,
    },
    /// It sees the files of this host, by mounts of its own: a restore would need a root directory for it.
    #[error("process {pid} has mounts of its own, below the root directory of this host")]
    OwnMounts {
        /// The process.
        pid: u32,
    },
    /// A mount is hidden by another one, so that a restore cannot name what is to be in its place.
    #[error(
        "what is mounted at {place} in the container of process {pid} is hidden by another mount",
        place = place.display()
    )]
    Overmounted {
        /// Its process.
        pid: u32,
        /// The place.
        place: PathBuf,
    },
    /// What is mounted is not there any more outside.
    #[error(
        "what is mounted at {place} in the container of process {pid} was removed or replaced outside",
        place = place.display()
    )]
    Deleted {
        /// Its process.
        pid: u32,
        /// The place.
        place: PathBuf,
    },
    /// There are too many.
    #[error("more than {MOST} file systems are mounted in the container of process {pid}")]
    Mounts {
        /// The process.
        pid: u32,
    },
    /// The root that a user names cannot be used.
    #[error("{path} cannot be given to the program: {source}", path = path.display())]
    Root {
        /// The directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A path leads through a process, which another `/proc` does not show, or shows another one of.
    #[error("{path} leads through /proc, where a restore with a root of its own sees other processes", path = path.display())]
    ThroughProc {
        /// The path.
        path: PathBuf,
    },
    /// What CRIU has made of an image sees other files than those that were named.
    #[error(
        "process {pid} of the image was not to be made with the root directory that it is given"
    )]
    OtherRoot {
        /// The process, by its pid in the image.
        pid: u32,
    },
    /// There is nothing to be mounted at this place.
    #[error("something was mounted at {place} in the program's container, and nothing is there: {why}", place = place.display())]
    Lacking {
        /// The place.
        place: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// There is no file or directory on which it could be mounted.
    #[error("something was mounted at {place} in the program's container, and below the new root directory {why}", place = place.display())]
    NoPoint {
        /// The place.
        place: PathBuf,
        /// Whether it is to be a directory.
        is_directory: bool,
        /// What is wrong with it, as the end of a sentence.
        why: String,
        /// Whether nothing is there: neither the place nor a link on the way.
        is_missing: bool,
    },
    /// A mount is given for a place at which there was none.
    #[error("nothing from outside was mounted at {place} in the program's container", place = place.display())]
    NoSuchMount {
        /// The place.
        place: PathBuf,
    },
    /// The mounts cannot be prepared.
    #[error("cannot prepare {what}: {source}")]
    Stage {
        /// Which of them.
        what: String,
        /// Why.
        source: io::Error,
    },
}

/// Whether the mounts that an image tells of are possible: each at one plain path, not too many.
pub(crate) fn are_possible(mounts: &[OuterMount]) -> bool {
    let mut places = BTreeSet::new();
    let is_plain = |path: &Path| {
        let mut parts = path.components();
        parts.next() == Some(Component::RootDir)
            && parts.clone().next().is_some()
            && parts.all(|part| matches!(part, Component::Normal(_)))
            && !path.as_os_str().as_encoded_bytes().contains(&0)
    };
    mounts.len() <= MOST
        && mounts.iter().all(|mount| is_plain(&mount.place) && places.insert(&mount.place))
}

/// The name of a mount in CRIU's files.
pub(super) fn key(number: usize) -> String {
    format!("gpucr-{number}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_names_plain_places_each_once() {
        let at = |place: &str| OuterMount { place: place.into(), is_directory: true };
        assert!(are_possible(&[at("/a"), at("/a/b")]) && are_possible(&[]));
        for place in ["", "/", "a", "/a/../b", "/..", "../a", "/a\0b"] {
            assert!(!are_possible(&[at(place)]), "{place}");
        }
        assert!(!are_possible(&[at("/a"), at("/a")]), "twice");
        let many: Vec<_> = (0..=MOST).map(|n| at(&format!("/{n}"))).collect();
        assert!(!are_possible(&many) && are_possible(&many[1..]));
    }
}
