//! The root directory of a program that was in a container.

use std::path::PathBuf;

use super::options::Options;
use crate::base::file_tree::FileTree;
use crate::engine::error::Error;
use crate::engine::sections;
use crate::host::container::{self, OuterMount, Staged};
use crate::host::process::Tree;
use crate::image::Manifest;

/// Checks that a program from a container gets a root directory with all that was mounted there from outside, and no other
/// does. Gives every reason against it: [`Error::NoRoot`], [`Error::NoContainer`], [`Error::Container`]; or what the image
/// says makes no sense.
pub(super) fn lacking(manifest: &Manifest, options: &Options) -> Vec<Error> {
    let (root, mounts) = match needed(manifest, options) {
        Ok(Some(needed)) => needed,
        Ok(None) => return Vec::new(),
        Err(error) => return vec![error],
    };
    let made_anew = sections::read_made_anew(manifest);
    let lacking = container::lacking(root, &mounts, made_anew.as_deref());
    lacking.into_iter().map(Error::from).collect()
}

/// The same, with the first reason alone.
///
/// # Errors
/// As [`lacking`].
pub(super) fn check(manifest: &Manifest, options: &Options) -> Result<(), Error> {
    lacking(manifest, options).into_iter().next().map_or(Ok(()), Err)
}

/// Refuses an image of a program from a container where no root directory can be given to it.
///
/// # Errors
/// [`Error::NoRoot`]; or what the image says makes no sense.
pub(super) fn refuse_contained(manifest: &Manifest) -> Result<(), Error> {
    sections::read_container(manifest)?.map_or(Ok(()), |_| Err(Error::NoRoot))
}

/// Mounts what the program gets, where CRIU takes it from.
///
/// # Errors
/// As [`check`].
pub(super) fn stage(manifest: &Manifest, options: &Options) -> Result<Option<Staged>, Error> {
    let Some((root, mounts)) = needed(manifest, options)? else { return Ok(None) };
    Ok(Some(Staged::new(root, &mounts)?))
}

/// Refuses processes that CRIU has made, before they run, if one has other files than those that were staged. Of an image
/// that says nothing of a container nothing is staged, and CRIU makes no mounts then.
///
/// # Errors
/// [`Error::Container`]; or they cannot be looked at.
pub(super) fn refuse_others(root: u32, staged: Option<&Staged>) -> Result<(), Error> {
    let Some(staged) = staged else { return Ok(()) };
    let tree = Tree::read(root)?;
    let mut living = tree.processes.iter().filter(|process| !process.has_ended());
    Ok(living.try_for_each(|process| staged.refuse_others(process.pid))?)
}

/// The places at which something from outside was mounted in the container of a program; `None` if it was in none.
pub fn mounted_places(manifest: &Manifest) -> Option<Vec<PathBuf>> {
    let mounts = sections::read_container(manifest).ok()??;
    Some(mounts.into_iter().map(|mount| mount.place).collect())
}

fn needed<'o>(
    manifest: &Manifest,
    options: &'o Options,
) -> Result<Option<(&'o FileTree, Vec<OuterMount>)>, Error> {
    match (sections::read_container(manifest)?, &options.root) {
        (Some(_), None) => Err(Error::NoRoot),
        (None, Some(_)) => Err(Error::NoContainer),
        (mounts, root) => Ok(root.as_ref().zip(mounts)),
    }
}
