//! From a tar to an image.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::Serialize;

use super::error::{TarError, io_error};
use super::format::{BATCH, BLOCK};
use crate::base::format::lossy;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::image::trust::{self, SIGNATURES, Trust};
use crate::image::{Destination, ImageError, ImageWriter, MANIFEST, MAX_MANIFEST, Manifest};
use crate::store::index::{Index, MAX_INDEX, PACK_TRAILER, check_pack_trailer};
use crate::store::{Compression, Entry, INDEX, PACKS, decode_stored};

/// Most bytes that may follow the end of the archive; all must be zero. `tar` fills its output up to
/// 10 KiB, or to a multiple that the user chooses.
const MAX_TRAILER: u64 = 16 << 20;

/// What was imported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Imported {
    /// The new image.
    #[serde(serialize_with = "lossy")]
    pub image: PathBuf,
    /// Its identity: the same as that of the image that was exported.
    pub id: String,
    /// Distinct chunks.
    pub chunks: u64,
    /// Their plain bytes.
    pub bytes: u64,
    /// Bytes of the image's files, and of chunks that it shares.
    pub stored_bytes: u64,
    /// Bytes of what was written for it: chunks that its store or its ancestors had are not.
    pub new_bytes: u64,
}

/// Reads a tar that [`export`](super::export()) wrote, to its end, and makes an image of it. Of one
/// that shares chunks with others, only those are stored which these lack.
///
/// The tar may be of any origin. Its members must be exactly those that it must have, in their
/// order; nothing is written to disk but what the new image holds, and that in a hidden directory
/// next to it. Every chunk is decoded and checked before the image is committed. After a failure
/// there is no image. Memory: manifest and index, and a buffer of 16 MiB.
///
/// # Errors
/// [`TarError::BadTar`] if the tar is not as it must be; its signatures are not those that `trust` wants; it cannot be
/// read; the image cannot be made; or `stop` is set.
pub fn import(
    tar: &mut dyn Read,
    to: &Destination,
    trust: &Trust,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<Imported, TarError> {
    let mut image = ImageWriter::begin_unless(to, Compression::None, &|| stop.is_set())?;
    progress.phase("import", None);
    let mut archive = Archive { tar };
    let (manifest, id, index) = read_head(&mut archive, &mut image, trust)?;
    check_complete(&manifest, &index)?;
    // An index may claim packs of any length; the tar must then have them.
    let len = index.packs.iter().fold(0u64, |sum, pack| sum.saturating_add(pack.len));
    progress.phase("import", Some(len));
    copy_packs(&mut archive, &index, &image, stop, progress)?;
    archive.end()?;
    let committed = image.commit(&manifest)?;
    debug_assert_eq!(committed.id, id);
    Ok(Imported {
        image: to.path(),
        id: crate::base::format::hex(&committed.id),
        chunks: index.entries.len() as u64,
        bytes: index.entries.iter().map(|entry| u64::from(entry.plain_len)).sum(),
        stored_bytes: committed.stored_bytes,
        new_bytes: committed.new_bytes,
    })
}

fn bad(what: impl Into<String>) -> TarError {
    TarError::BadTar { what: what.into() }
}

/// Takes manifest and index from the front of the archive, by way of the new image's scratch folder.
fn read_head(
    archive: &mut Archive<'_>,
    image: &mut ImageWriter,
    trust: &Trust,
) -> Result<(Manifest, [u8; 32], Index), TarError> {
    let dir = image.staging_dir();
    let size = archive.member(MANIFEST)?;
    archive.stage(MANIFEST, size, MAX_MANIFEST, &dir)?;
    let (manifest, id) = Manifest::read_with_id(&dir)
        .map_err(|error| bad(format!("its manifest cannot be read: {}", reason(error))))?;
    // Written again it must be the same, or the image would get another identity.
    if manifest.written_identity() != Ok(id) {
        return Err(bad("its manifest is not encoded the way gpucr does it"));
    }
    let (mut name, mut size) = archive.one_of(&[SIGNATURES, INDEX])?;
    let mut signatures = String::new();
    if name == SIGNATURES {
        let mut bytes = Vec::new();
        check_len(name, size, trust::LARGEST)?;
        archive.copy(size, &mut |piece| {
            bytes.extend_from_slice(piece);
            Ok(())
        })?;
        archive.skip_padding(size)?;
        signatures = trust::as_text(bytes)?;
        (name, size) = archive.one_of(&[INDEX])?;
    }
    trust.check(&id, &signatures)?;
    image.set_signatures(signatures);
    archive.stage(name, size, MAX_INDEX, &dir)?;
    let index = Index::read(&dir.join(INDEX))
        .map_err(|error| bad(format!("its index cannot be read: {}", reason(error.into()))))?;
    Ok((manifest, id, index))
}

/// Checks the length of a member.
fn check_len(name: &str, size: u64, limit: u64) -> Result<(), TarError> {
    if size > limit {
        return Err(bad(format!("its {name} has {size} bytes, more than the format allows")));
    }
    Ok(())
}

/// What is wrong with a file of the archive, without the name that it has for the moment.
fn reason(error: ImageError) -> String {
    match error {
        ImageError::Damaged { what, .. } => what,
        ImageError::Truncated { .. } => "it is too short".into(),
        ImageError::NotAnImage { reason, .. } => reason.into(),
        ImageError::NewerVersion { found, supported, .. } => {
            format!("it has format version {found}; this gpucr reads up to {supported}")
        }
        other => other.to_string(),
    }
}

fn no_space(path: &Path, source: io::Error) -> TarError {
    TarError::Image(crate::store::io_error("write", path, source).into())
}

/// Index and manifest must speak of the same chunks.
fn check_complete(manifest: &Manifest, index: &Index) -> Result<(), TarError> {
    let mut needed = vec![false; index.entries.len()];
    for piece in manifest.parts().flat_map(|part| part.pieces()) {
        let Ok(at) = index.entries.binary_search_by_key(&piece.id, |entry| entry.id) else {
            return Err(bad(format!("its index lacks the chunk {}", piece.id)));
        };
        if index.entries[at].plain_len as usize != piece.len {
            return Err(bad(format!("the chunk {} has another length", piece.id)));
        }
        needed[at] = true;
    }
    match needed.iter().position(|needed| !needed) {
        Some(at) => Err(bad(format!("nothing needs the chunk {}", index.entries[at].id))),
        None => Ok(()),
    }
}

/// Moves all chunks into the new image, and checks each.
fn copy_packs(
    archive: &mut Archive<'_>,
    index: &Index,
    image: &ImageWriter,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<(), TarError> {
    let (mut stored, constant): (Vec<&Entry>, Vec<&Entry>) =
        index.entries.iter().partition(|entry| entry.encoding.has_data());
    keep(image, &constant.into_iter().map(|entry| (entry, 0..0)).collect::<Vec<_>>(), &[])?;
    stored.sort_unstable_by_key(|entry| (entry.pack, entry.offset));
    let mut stored = &stored[..];
    let mut buffer = Vec::new();
    for (number, pack) in index.packs.iter().enumerate() {
        let len = pack.len;
        let name = format!("{PACKS}/{}", pack.id.file_name());
        if archive.member(&name)? != len {
            return Err(bad(format!("{name} has another length than the index says")));
        }
        let mut at = 0;
        while at < len.saturating_sub(PACK_TRAILER as u64) {
            if stop.is_set() {
                return Err(TarError::Interrupted);
            }
            let mut batch = Vec::new();
            let mut size = 0;
            while let Some((first, rest)) = stored.split_first()
                && (first.pack, first.offset) == (number as u32, at + size as u64)
                && (size == 0 || size + first.stored_len as usize <= BATCH)
            {
                batch.push((*first, size..size + first.stored_len as usize));
                size += first.stored_len as usize;
                stored = rest;
            }
            if size == 0 {
                return Err(bad(format!("{name} has bytes that belong to no chunk")));
            }
            buffer.resize(size, 0);
            archive.read(&mut buffer)?;
            keep(image, &batch, &buffer)?;
            progress.advance(size as u64);
            at += size as u64;
        }
        let mut trailer = [0; PACK_TRAILER];
        archive.read(&mut trailer)?;
        check_pack_trailer(Path::new(&name), pack.id, &trailer)
            .map_err(|error| bad(error.to_string()))?;
        archive.skip_padding(len)?;
    }
    match stored.first() {
        // Overlaps another, or is of no bytes where none can be.
        Some(entry) => Err(bad(format!("the chunk {} is in an impossible place", entry.id))),
        None => Ok(()),
    }
}

/// Decodes and checks chunks whose stored bytes are in these places of `buffer`, and puts them into
/// the image.
fn keep(
    image: &ImageWriter,
    batch: &[(&Entry, std::ops::Range<usize>)],
    buffer: &[u8],
) -> Result<(), TarError> {
    batch.par_iter().try_for_each_init(Vec::new, |plain, (entry, range)| {
        let stored = &buffer[range.clone()];
        decode_stored(entry, stored, plain)
            .map_err(|what| bad(format!("the chunk {} is damaged: {what}", entry.id)))?;
        // What the store or an ancestor has need not be there twice.
        if image.chunks().contains(&entry.id) {
            return Ok(());
        }
        image.chunks().put_stored(entry, stored).map_err(|error| TarError::Image(error.into()))
    })
}

/// The archive as a stream of bytes.
struct Archive<'a> {
    tar: &'a mut dyn Read,
}

impl Archive<'_> {
    fn read(&mut self, out: &mut [u8]) -> Result<(), TarError> {
        self.tar.read_exact(out).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => bad("it ends too early"),
            _ => io_error("cannot read the tar")(error),
        })
    }

    /// Reads the header of the next member, which must be a regular file of this name. Returns its
    /// length.
    fn member(&mut self, name: &str) -> Result<u64, TarError> {
        Ok(self.one_of(&[name])?.1)
    }

    /// Reads the header of a member that has one of these names; says which.
    fn one_of<'n>(&mut self, names: &[&'n str]) -> Result<(&'n str, u64), TarError> {
        // What may come before the last one need not be there.
        let name = names.last().copied().unwrap_or_default();
        let mut header = tar::Header::new_old();
        self.read(header.as_mut_bytes())?;
        let bytes = header.as_bytes();
        let sum = |bytes: &[u8]| bytes.iter().map(|&byte| u32::from(byte)).sum::<u32>();
        // The field of the sum itself counts as spaces.
        let found = sum(&bytes[..148]) + 8 * u32::from(b' ') + sum(&bytes[156..]);
        if header.cksum().ok() != Some(found) {
            return Err(bad(format!("there is no header where {name} should begin")));
        }
        let path = header.path_bytes();
        let Some(known) = names.iter().find(|known| *path == *known.as_bytes()) else {
            let found = String::from_utf8_lossy(&path[..path.len().min(100)]).into_owned();
            return Err(bad(format!("it has {found:?} where {name} should be")));
        };
        if !header.entry_type().is_file() {
            return Err(bad(format!("{known} is not a regular file in it")));
        }
        let size = header.entry_size();
        Ok((known, size.map_err(|_| bad(format!("{known} has an impossible length")))?))
    }

    /// Takes the member of this name and length, whose header has been read, into a file of `dir`. The frame
    /// around what `limit` is for is small.
    fn stage(&mut self, name: &str, size: u64, limit: u64, dir: &Path) -> Result<(), TarError> {
        check_len(name, size, limit + BLOCK)?;
        let path = dir.join(name);
        let file = File::options().write(true).create_new(true).mode(0o600).open(&path);
        let mut file = file.map_err(io_error("cannot write the image"))?;
        self.copy(size, &mut |piece| {
            file.write_all(piece).map_err(|source| no_space(&path, source))
        })?;
        self.skip_padding(size)
    }

    /// Gives `size` bytes to `put`, in pieces.
    fn copy(
        &mut self,
        size: u64,
        put: &mut dyn FnMut(&[u8]) -> Result<(), TarError>,
    ) -> Result<(), TarError> {
        let mut buffer = vec![0; size.min(1 << 20) as usize];
        let mut left = size;
        while left > 0 {
            let piece = &mut buffer[..left.min(1 << 20) as usize];
            self.read(piece)?;
            put(piece)?;
            left -= piece.len() as u64;
        }
        Ok(())
    }

    /// Reads what fills a member of `size` bytes up, which must be zeros.
    fn skip_padding(&mut self, size: u64) -> Result<(), TarError> {
        let mut padding = [0; BLOCK as usize];
        let padding = &mut padding[..(size.next_multiple_of(BLOCK) - size) as usize];
        self.read(padding)?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(bad("there are bytes between its members"));
        }
        Ok(())
    }

    /// Reads the end of the archive, and everything after it, which must be zeros.
    fn end(&mut self) -> Result<(), TarError> {
        let mut rest = Vec::new();
        let mut left = MAX_TRAILER;
        let mut seen = 0;
        loop {
            rest.resize(64 << 10, 0);
            let len = self.tar.read(&mut rest).or_else(|error| match error.kind() {
                io::ErrorKind::Interrupted => Ok(usize::MAX),
                _ => Err(io_error("cannot read the tar")(error)),
            })?;
            match len {
                0 => break,
                usize::MAX => continue,
                _ => {}
            }
            seen += len as u64;
            left = left.checked_sub(len as u64).ok_or_else(|| bad("it does not end"))?;
            if rest[..len].iter().any(|&byte| byte != 0) {
                return Err(bad("it has further members"));
            }
        }
        if seen < 2 * BLOCK { Err(bad("it ends too early")) } else { Ok(()) }
    }
}
