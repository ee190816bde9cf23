//! The store that is meant where none is named, and images by their names in it.
//!
//! The environment variable `GPUCR_STORE` names it, or else a file: `$XDG_CONFIG_HOME/gpucr/config` (usually
//! `~/.config/gpucr/config`), or else `/etc/gpucr/config`. Such a file has lines `store = DIR`, and comments after `#`.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use gpucr_core::image::{self, Manifest};
use gpucr_core::{Error, careful};

use crate::commands::note;
use crate::escape::shell_word;
use crate::failure::{CliError, FAILED, USAGE};

/// Names the store.
const ENV_STORE: &str = "GPUCR_STORE";
/// The name of the image of a store that was made last.
pub(crate) const LATEST: &str = "latest";
/// A file of settings has no more bytes.
const LARGEST_CONFIG: u64 = 1 << 20;
/// Where the images of a store are.
const IMAGES: &str = "images";

/// The store that a command works on.
#[derive(clap::Args)]
pub(crate) struct StoreArgs {
    /// The store, as given to dump --store [default: GPUCR_STORE]
    #[arg(value_name = "STORE")]
    place: Option<PathBuf>,
    /// The store, as an option
    #[arg(long = "store", value_name = "STORE", conflicts_with = "place")]
    option: Option<PathBuf>,
}

impl StoreArgs {
    /// The one that was named, or else the one that is meant.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn store(&self) -> Result<PathBuf, CliError> {
        store(self.place.as_deref().or(self.option.as_deref()))
    }

    /// None was named.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self { place: None, option: None }
    }
}

/// The store that is meant where none is named; none if none was set.
///
/// # Errors
/// A file of settings cannot be read, or says what is not understood.
pub(crate) fn default_store() -> Result<Option<PathBuf>, CliError> {
    if let Some(store) = std::env::var_os(ENV_STORE).filter(|store| !store.is_empty()) {
        return Ok(Some(store.into()));
    }
    for path in configs() {
        match read_own(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => {
                let what = format!("cannot read {}", path.display());
                return Err(Error::Io { what, source }.into());
            }
            Ok(bytes) => {
                let store = setting(&bytes).map_err(|line| {
                    let what = format!(
                        "{}, line {line}: `store = DIR` is expected, with a path that begins with /",
                        path.display()
                    );
                    CliError::new(USAGE, what)
                })?;
                if store.is_some() {
                    return Ok(store);
                }
            }
        }
    }
    Ok(None)
}

/// Reads a file of settings, which has to be this user's or root's: with sudo the environment may name another user's home.
fn read_own(path: &Path) -> std::io::Result<Vec<u8>> {
    let file = careful::open_regular(path)?;
    let owner = file.metadata()?.uid();
    if owner != 0 && owner != rustix::process::geteuid().as_raw() {
        return Err(std::io::Error::new(
            std::io::ErrorKind::PermissionDenied,
            "it belongs to another user",
        ));
    }
    careful::read_at_most(file, LARGEST_CONFIG)
}

/// The files of settings, the first that names a store counts.
fn configs() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".config"));
    let own = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).or(home);
    let own = own.filter(|dir| dir.is_absolute()).map(|dir| dir.join("gpucr/config"));
    own.into_iter().chain([PathBuf::from("/etc/gpucr/config")]).collect()
}

/// The store that a file of settings names; or the number of the line that is not understood.
fn setting(text: &[u8]) -> Result<Option<PathBuf>, usize> {
    let mut store = None;
    for (number, line) in text.split(|byte| *byte == b'\n').enumerate() {
        let line = line.split(|byte| *byte == b'#').next().unwrap_or_default().trim_ascii();
        if line.is_empty() {
            continue;
        }
        let sign = line.iter().position(|byte| *byte == b'=').ok_or(number + 1)?;
        let (key, value) = (line[..sign].trim_ascii(), line[sign + 1..].trim_ascii());
        let value = value.strip_prefix(b"\"").and_then(|v| v.strip_suffix(b"\"")).unwrap_or(value);
        let path = Path::new(OsStr::from_bytes(value));
        if key != b"store" || !path.is_absolute() {
            return Err(number + 1);
        }
        store = Some(path.to_owned());
    }
    Ok(store)
}

/// The store that was named, or else the one that is meant.
///
/// # Errors
/// There is none.
pub(crate) fn store(named: Option<&Path>) -> Result<PathBuf, CliError> {
    match named {
        Some(store) => Ok(store.to_owned()),
        None => default_store()?.ok_or_else(|| {
            CliError::new(USAGE, "no store is named").help(
                "name it (`gpucr COMMAND DIR`; a dump: `--store DIR`), or set GPUCR_STORE=DIR, or write `store = DIR` to \
                 ~/.config/gpucr/config or /etc/gpucr/config",
            )
        }),
    }
}

/// The directory of an image that was named by its path, or by its name in the store that is meant; `latest` is the one
/// there whose dump began last. A name with a `/` is a path, and so is one that is only in the current directory: what lies
/// there does not take the place of an image of the store.
///
/// # Errors
/// The settings cannot be read, there is no such image, or both are there.
pub(crate) fn image(named: &Path) -> Result<PathBuf, CliError> {
    let is_path =
        named.components().count() != 1 || named.as_os_str().as_encoded_bytes().contains(&b'/');
    if is_path {
        return Ok(named.to_owned());
    }
    let Some(store) = default_store()? else { return Ok(named.to_owned()) };
    let images = store.join(IMAGES);
    let path = images.join(named);
    let found = match path.is_dir() {
        true => Some(path),
        false if named.as_os_str() == LATEST => latest(&images)?,
        false => None,
    };
    match (found, named.symlink_metadata().is_ok()) {
        (Some(path), false) => return Ok(path),
        (None, true) => return Ok(named.to_owned()),
        (Some(path), true) => {
            let here = Path::new(".").join(named);
            let what = format!("{} is in this directory and in the store", named.display());
            let help = format!("say which: {} or {}", shell_word(&here), shell_word(&path));
            return Err(CliError::new(USAGE, what).help(help));
        }
        (None, false) => {}
    }
    let what = format!("there is no image {} in the store {}", named.display(), store.display());
    let list = format!("`gpucr ls {}` lists its images", shell_word(&store));
    Err(CliError::new(FAILED, what).help(list))
}

/// Whether this can be meant only as the name of an image in a store, while no store is set.
pub(crate) fn lacks_store(named: &Path) -> bool {
    let is_name = !named.as_os_str().as_encoded_bytes().contains(&b'/');
    let is_here = || named.symlink_metadata().is_ok();
    is_name && !is_here() && matches!(default_store(), Ok(None))
}

/// A path as people write it. An image names its parent or store from where it is itself: `/a/images/x/../..`.
pub(crate) fn plain(path: &Path) -> PathBuf {
    // Not by its text alone: a part of it may be a link.
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// Where the image of this name in a store is.
pub(crate) fn in_store(store: &Path, name: impl AsRef<Path>) -> PathBuf {
    store.join(IMAGES).join(name)
}

/// The images of a store in the order in which their dumps began; none if there is no store. Those whose manifest cannot
/// be read are passed over, and named.
///
/// # Errors
/// The store cannot be read; or it has images, and none of them can be.
pub(crate) fn in_order(store: &Path) -> Result<Vec<PathBuf>, CliError> {
    let images = store.join(IMAGES);
    if images.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound) {
        return Ok(Vec::new());
    }
    let (mut read, mut unread) = (Vec::new(), None);
    for path in paths(&images)? {
        match Manifest::read(&path) {
            Ok(manifest) => read.push((manifest.created, path)),
            Err(error) => {
                note!("gpucr: the image {} is skipped: {error}", path.display());
                unread = Some(error);
            }
        }
    }
    read.sort();
    match unread {
        Some(error) if read.is_empty() => Err(CliError::from(Error::from(error))),
        _ => Ok(read.into_iter().map(|(_, path)| path).collect()),
    }
}

/// Where the images in this directory of a store are.
fn paths(images: &Path) -> Result<Vec<PathBuf>, CliError> {
    let failed = |source| {
        let what = format!("cannot read {}", images.display());
        CliError::from(Error::Io { what, source })
    };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(images).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    Ok(paths)
}

/// The image whose dump began last; of several in one second the one whose name comes last.
///
/// # Errors
/// The store or one of its images cannot be read: then it is not known which is the last.
fn latest(images: &Path) -> Result<Option<PathBuf>, CliError> {
    let mut last = None;
    for path in paths(images)? {
        let manifest = Manifest::read(&path).map_err(Error::from)?;
        last = last.max(Some((manifest.created, path)));
    }
    Ok(last.map(|(_, path)| path))
}

/// How long ago a time of seconds since 1970 was, in its largest unit: `3 d`.
pub(crate) fn age(created: u64, now: u64) -> String {
    let ago = now.saturating_sub(created);
    match ago {
        0..60 => format!("{ago} s"),
        60..3600 => format!("{} min", ago / 60),
        3600..86400 => format!("{} h", ago / 3600),
        _ => format!("{} d", ago / 86400),
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}

/// Lists the images of a store.
///
/// # Errors
/// There is no store, or it cannot be read.
pub(crate) fn list(store: &Path) -> Result<image::Listing, CliError> {
    Ok(image::list(store).map_err(Error::from)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_lines() {
        let text = b"# where images go\n\n  store = /a b  # on the large disk\n";
        assert_eq!(setting(text), Ok(Some("/a b".into())));
        assert_eq!(setting(b"store=\"/c\"\n"), Ok(Some("/c".into())));
        assert_eq!(setting(b""), Ok(None));
        assert_eq!(
            (setting(b"\nstor = /a"), setting(b"store"), setting(b"store =")),
            (Err(2), Err(1), Err(1))
        );
        assert_eq!(setting(b"store = a"), Err(1), "from where is it seen");
    }

    #[test]
    fn ages_have_one_unit() {
        let of = |ago: u64| age(1_000_000, 1_000_000 + ago);
        assert_eq!((of(0), of(59), of(60)), ("0 s".into(), "59 s".into(), "1 min".into()));
        assert_eq!((of(7199), of(86399), of(90000)), ("1 h".into(), "23 h".into(), "1 d".into()));
        assert_eq!(age(10, 5), "0 s", "a clock that was set back");
    }

    #[test]
    fn paths_are_shown_without_detours() {
        let dir = std::env::temp_dir().canonicalize().unwrap();
        assert_eq!(plain(&dir.join("..").join(dir.file_name().unwrap())), dir);
        let gone = Path::new("/nowhere/x/../y");
        assert_eq!(plain(gone), gone, "what a part of it leads to is not known");
    }

    #[test]
    fn a_store_is_named_in_one_of_two_ways() {
        use clap::Parser;
        #[derive(Parser)]
        struct Command {
            #[command(flatten)]
            store: StoreArgs,
        }
        for words in [&["ls", "/a"][..], &["ls", "--store", "/a"], &["ls", "--store=/a"]] {
            let command = Command::try_parse_from(words).ok().unwrap();
            assert_eq!(command.store.store().ok(), Some("/a".into()));
        }
        assert!(Command::try_parse_from(["ls", "/a", "--store", "/b"]).is_err());
    }
}
