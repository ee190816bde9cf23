//! The store that is meant where none is named, and images by their names in it.
//!
//! The environment variable `GPUCR_STORE` names it, or else a file: `$XDG_CONFIG_HOME/gpucr/config` (usually
//! `~/.config/gpucr/config`), or else `/etc/gpucr/config`. Such a file has lines `store = DIR`, and comments after `#`.

use std::path::{Path, PathBuf};

use gpucr_core::image::{self, Manifest};
use gpucr_core::{Error, careful};

use crate::escape::shell_word;
use crate::failure::{CliError, FAILED, USAGE};

/// Names the store.
const ENV_STORE: &str = "GPUCR_STORE";
/// The name of the image of a store that was made last.
const LATEST: &str = "latest";
/// A file of settings has no more bytes.
const LARGEST_CONFIG: u64 = 1 << 20;
/// Where the images of a store are.
const IMAGES: &str = "images";

/// The store that is meant where none is named; none if none was set.
///
/// # Errors
/// A file of settings cannot be read, or says what is not understood.
pub(crate) fn default_store() -> Result<Option<PathBuf>, CliError> {
    if let Some(store) = std::env::var_os(ENV_STORE).filter(|store| !store.is_empty()) {
        return Ok(Some(store.into()));
    }
    for path in configs() {
        match careful::read_regular(&path, LARGEST_CONFIG) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => {
                let what = format!("cannot read {}", path.display());
                return Err(Error::Io { what, source }.into());
            }
            Ok(bytes) => {
                let store = setting(&String::from_utf8_lossy(&bytes)).map_err(|line| {
                    let what =
                        format!("{}, line {line}: `store = DIR` is expected", path.display());
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

/// The files of settings, the first that names a store counts.
fn configs() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(|home| Path::new(&home).join(".config"));
    let own = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).or(home);
    let own = own.filter(|dir| dir.is_absolute()).map(|dir| dir.join("gpucr/config"));
    own.into_iter().chain([PathBuf::from("/etc/gpucr/config")]).collect()
}

/// The store that a file of settings names; or the number of the line that is not understood.
fn setting(text: &str) -> Result<Option<PathBuf>, usize> {
    let mut store = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let (key, value) = line.split_once('=').ok_or(number + 1)?;
        let value = value.trim().trim_matches('"');
        if key.trim() != "store" || value.is_empty() {
            return Err(number + 1);
        }
        store = Some(PathBuf::from(value));
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
                "name one (a dump: --store DIR; ls, gc and forget: as argument), or set GPUCR_STORE=DIR, or write `store = \
                       DIR` to /etc/gpucr/config",
            )
        }),
    }
}

/// The directory of an image that was named by its path, or by its name in the store that is meant; `latest` is the one
/// there whose dump began last. A name with a `/`, or of something that is there, is a path.
///
/// # Errors
/// The settings cannot be read, or there is no such image in the store.
pub(crate) fn image(named: &Path) -> Result<PathBuf, CliError> {
    let is_path =
        named.components().count() != 1 || named.as_os_str().as_encoded_bytes().contains(&b'/');
    if is_path || named.symlink_metadata().is_ok() {
        return Ok(named.to_owned());
    }
    let Some(store) = default_store()? else { return Ok(named.to_owned()) };
    let images = store.join(IMAGES);
    if named.as_os_str() == LATEST && !images.join(LATEST).exists() {
        return latest(&images).ok_or_else(|| {
            CliError::new(FAILED, format!("there is no image in the store {}", store.display()))
        });
    }
    let path = images.join(named);
    if path.is_dir() {
        return Ok(path);
    }
    let what = format!("there is no image {} in the store {}", named.display(), store.display());
    let list = format!("`gpucr ls {}` lists its images", shell_word(&store));
    Err(CliError::new(FAILED, what).help(list))
}

/// The image whose dump began last; of several in one second the one whose name comes last.
fn latest(images: &Path) -> Option<PathBuf> {
    let all = std::fs::read_dir(images).ok()?.flatten().map(|entry| entry.path());
    let shown = all.filter(|path| {
        path.file_name().is_some_and(|name| !name.as_encoded_bytes().starts_with(b"."))
    });
    shown
        .filter_map(|path| Some((Manifest::read(&path).ok()?.created, path)))
        .max()
        .map(|(_, path)| path)
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
        let text = "# where images go\n\n  store = /a b  # on the large disk\n";
        assert_eq!(setting(text), Ok(Some("/a b".into())));
        assert_eq!(setting("store=\"/c\"\n"), Ok(Some("/c".into())));
        assert_eq!(setting(""), Ok(None));
        assert_eq!(
            (setting("\nstor = /a"), setting("store"), setting("store =")),
            (Err(2), Err(1), Err(1))
        );
    }

    #[test]
    fn ages_have_one_unit() {
        let of = |ago: u64| age(1_000_000, 1_000_000 + ago);
        assert_eq!((of(0), of(59), of(60)), ("0 s".into(), "59 s".into(), "1 min".into()));
        assert_eq!((of(7199), of(86399), of(90000)), ("1 h".into(), "23 h".into(), "1 d".into()));
        assert_eq!(age(10, 5), "0 s", "a clock that was set back");
    }
}
