//! Fat binaries: containers of code for several architectures. What can be run here is PTX.
//!
//! A container has a header of 16 bytes (magic number, version, its own size, size of the entries)
//! and entries. Each entry has a header of its own and then its contents: PTX or device code, plain
//! or compressed. NVIDIA documents none of this; it is what nvcc 13.0 makes (see `tests/fatbin`).

use thiserror::Error;

/// The first bytes of a container.
pub(crate) const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
/// The first bytes of the structure that programs embed: magic number, version, and pointer to
/// the container.
pub(crate) const WRAPPER_MAGIC: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();
/// Bytes of the container's header.
pub(crate) const HEADER: usize = 16;
/// Bytes of an entry's header that are looked at.
const ENTRY_HEADER: usize = 64;
/// The largest contents that are believed in, in bytes.
const LARGEST: u64 = 256 << 20;

/// An entry's kind.
const PTX: u16 = 1;
/// Flags of an entry.
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;

/// Why there is no PTX to be had from a container.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum FatbinError {
    /// It breaks its own rules.
    #[error("the fat binary is damaged: {0}")]
    Damaged(&'static str),
    /// It has nothing that can run here.
    #[error(
        "the fat binary has no PTX for compute capability {0} or below (device code: {1}, newer \
         PTX: {2}); the software driver executes PTX only: compile with -gencode \
         arch=compute_{0},code=compute_{0}"
    )]
    NoPtx(u32, usize, usize),
}

struct Entry<'a> {
    kind: u16,
    capability: u32,
    flags: u64,
    plain_size: u64,
    /// The contents with what fills them up to a multiple of 8 bytes.
    contents: &'a [u8],
    /// Size of compressed contents, or 0.
    compressed_size: usize,
}

/// Bytes of a container, its header included, from the first [`HEADER`] bytes of it.
///
/// # Errors
/// `Damaged` for another beginning, and for sizes beyond belief.
pub(crate) fn size(header: &[u8]) -> Result<usize, FatbinError> {
    let short = FatbinError::Damaged("it ends in its header");
    if header.get(..4) != Some(&MAGIC[..]) {
        return Err(FatbinError::Damaged("it does not begin with its magic number"));
    }
    let own = u16_at(header, 6).ok_or(short)?;
    let entries = u64_at(header, 8).ok_or(FatbinError::Damaged("it ends in its header"))?;
    if usize::from(own) < HEADER || entries > LARGEST {
        return Err(FatbinError::Damaged("its header gives impossible sizes"));
    }
    Ok(usize::from(own) + entries as usize)
}

/// The PTX in a container for the highest capability (80 for 8.0) up to the given one.
///
/// # Errors
/// See [`FatbinError`].
pub(crate) fn ptx(container: &[u8], capability: u32) -> Result<Vec<u8>, FatbinError> {
    let whole = size(container)?;
    let own = u16_at(container, 6).map_or(HEADER, usize::from);
    let mut rest = container
        .get(own..whole)
        .ok_or(FatbinError::Damaged("it is shorter than its header says"))?;
    let mut best: Option<Entry<'_>> = None;
    let (mut device_code, mut newer) = (0, 0);
    while !rest.is_empty() {
        let (entry, after) = Entry::read(rest)?;
        rest = after;
        if entry.kind != PTX {
            device_code += 1;
        } else if entry.capability > capability {
            newer += 1;
        } else if best.as_ref().is_none_or(|best| best.capability < entry.capability) {
            best = Some(entry);
        }
    }
    best.ok_or(FatbinError::NoPtx(capability, device_code, newer))?.text()
}

impl<'a> Entry<'a> {
    fn read(from: &'a [u8]) -> Result<(Entry<'a>, &'a [u8]), FatbinError> {
        let damaged = || FatbinError::Damaged("an entry is cut off");
        let header = from.get(..ENTRY_HEADER).ok_or_else(damaged)?;
        let word = |at| u32_at(header, at).ok_or_else(damaged);
        let long = |at| u64_at(header, at).ok_or_else(damaged);
        let own = word(4)? as usize;
        let end = usize::try_from(long(8)?).ok().and_then(|size| own.checked_add(size));
        let end = end.filter(|_| own >= ENTRY_HEADER).ok_or_else(damaged)?;
        let entry = Entry {
            kind: u16_at(header, 0).ok_or_else(damaged)?,
            capability: word(28)?,
            flags: long(40)?,
            plain_size: long(56)?,
            contents: from.get(own..end).ok_or_else(damaged)?,
            compressed_size: word(16)? as usize,
        };
        Ok((entry, &from[end..]))
    }

    /// The text, without the NULs at its end.
    fn text(&self) -> Result<Vec<u8>, FatbinError> {
        let mut text = if self.flags & (LZ4 | ZSTD) == 0 {
            self.contents.to_vec()
        } else {
            self.decompressed()?
        };
        text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(text.len()));
        Ok(text)
    }

    fn decompressed(&self) -> Result<Vec<u8>, FatbinError> {
        let damaged = FatbinError::Damaged("compressed PTX cannot be decompressed");
        let compressed = self.contents.get(..self.compressed_size);
        let size = usize::try_from(self.plain_size).ok().filter(|size| *size as u64 <= LARGEST);
        let Some((compressed, size)) = compressed.zip(size) else { return Err(damaged) };
        let plain = if self.flags & ZSTD != 0 {
            zstd::bulk::decompress(compressed, size).ok()
        } else {
            lz4_flex::block::decompress(compressed, size).ok()
        };
        plain.filter(|plain| plain.len() == size).ok_or(damaged)
    }
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> Option<[u8; N]> {
    from.get(at..)?.first_chunk().copied()
}

fn u16_at(from: &[u8], at: usize) -> Option<u16> {
    bytes(from, at).map(u16::from_le_bytes)
}

fn u32_at(from: &[u8], at: usize) -> Option<u32> {
    bytes(from, at).map(u32::from_le_bytes)
}

fn u64_at(from: &[u8], at: usize) -> Option<u64> {
    bytes(from, at).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: &[u8] = include_bytes!("../tests/fatbin/plain.fatbin");
    const LZ4: &[u8] = include_bytes!("../tests/fatbin/lz4.fatbin");
    const ZSTD: &[u8] = include_bytes!("../tests/fatbin/zstd.fatbin");
    const BOTH: &[u8] = include_bytes!("../tests/fatbin/both.fatbin");
    const SASS: &[u8] = include_bytes!("../tests/fatbin/sass.fatbin");
    const NEWER: &[u8] = include_bytes!("../tests/fatbin/newer.fatbin");

    #[test]
    fn every_form_has_the_same_text() {
        let plain = ptx(PLAIN, 80).unwrap();
        assert!(plain.windows(21).any(|part| part == b".visible .entry scale"));
        for other in [LZ4, ZSTD, BOTH] {
            assert_eq!(
                String::from_utf8(ptx(other, 80).unwrap()),
                String::from_utf8(plain.clone())
            );
            assert_eq!(size(other), Ok(other.len()));
        }
        assert_eq!(ptx(SASS, 80), Err(FatbinError::NoPtx(80, 1, 0)));
        assert_eq!(ptx(NEWER, 80), Err(FatbinError::NoPtx(80, 0, 1)));
        assert!(ptx(NEWER, 90).is_ok());
    }

    #[test]
    fn the_best_of_several_entries_is_taken() {
        let mut two = PLAIN.to_vec();
        two.extend_from_slice(&NEWER[HEADER..]);
        let entries = (two.len() - HEADER) as u64;
        two[8..16].copy_from_slice(&entries.to_le_bytes());
        assert_eq!(ptx(&two, 80), ptx(PLAIN, 80));
        assert_eq!(ptx(&two, 90), ptx(NEWER, 90));
        assert!(matches!(ptx(&two[..two.len() - 1], 90), Err(FatbinError::Damaged(_))));
    }

    proptest! {
        #[test]
        fn damaged_containers_are_refused_or_read_but_never_panic(
            which in 0..5_usize,
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut container = [PLAIN, LZ4, ZSTD, BOTH, NEWER][which].to_vec();
            for (place, value) in changes {
                let place = place.index(container.len());
                container[place] = value;
            }
            let _ = ptx(&container, 80);
            container.truncate(cut.index(container.len()));
            let _ = ptx(&container, 80);
        }
    }
}
