//! PTX and cubins in what a program loads as a module.
//!
//! [`images`] and [`texts`] give what there is; [`what_runs`] gives the text of which a device's driver makes what it
//! runs.
//!
//! softcuda has a reader of fat binaries too. That one looks for the PTX that it can run, and says
//! why there is none; this one takes all there is and leaves out what it cannot read. softcuda is a
//! driver library that is usable on its own, and nothing links against it; so there are two.
//!
//! The form of the container is described in `softcuda/src/fatbin.rs`.

use std::fmt;
use std::io::Read;

const ELF_MAGIC: &[u8] = b"\x7fELF";
const CONTAINER_MAGIC: u32 = 0xba55_ed50;
/// Bytes of a container's header, and of an entry's.
const CONTAINER_HEADER: usize = 16;
const ENTRY_HEADER: usize = 64;
/// Kinds of entries.
const PTX: u16 = 1;
const CUBIN: u16 = 2;
/// Flags of entries.
const LZ4: u64 = 0x2000;
const ZSTD: u64 = 0x8000;
/// The most bytes that all images of a module may have.
const LARGEST: usize = 512 << 20;
/// A byte of LZ4 stands for no more than so many.
const LZ4_RATIO: usize = 255;

/// Code in one form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Image {
    /// Text.
    Ptx(String),
    /// An ELF file of device code.
    Cubin(Vec<u8>),
}

/// The code in a module: PTX text (up to a NUL), a cubin, or a fat binary, plain or compressed, with
/// images for any number of architectures, in its order. What is damaged, of another kind, or more
/// than 512 MiB is left out; bytes that are none of these have no images.
pub fn images(module: &[u8]) -> Vec<Image> {
    read(module, LARGEST, &[PTX, CUBIN]).0
}

/// Only the PTX in a module, and no more of it than so many bytes; machine code is not even unpacked. And
/// whether that is all there is: then it is what runs.
pub fn texts(module: &[u8], most: usize) -> (Vec<String>, bool) {
    let (images, all) = read(module, most, &[PTX]);
    let texts = images.into_iter().filter_map(|image| match image {
        Image::Ptx(text) => Some(text),
        Image::Cubin(_) => None,
    });
    (texts.collect(), all)
}

/// Why there is no text of which a driver makes what it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoText {
    /// There is none, or none for the device.
    None,
    /// There is machine code for the device, which runs in its place.
    MachineCode,
    /// It is longer than was asked for, or damaged.
    Unreadable,
    /// Some of it is of a kind that is not known, or it is not known which of several is taken.
    Unclear,
}

impl fmt::Display for NoText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "its module has no PTX for the device",
            Self::MachineCode => "its module has machine code for the device, which is what runs",
            Self::Unreadable => "the PTX of its module cannot be read, or is too long",
            Self::Unclear => "it is not known which code of its module runs",
        })
    }
}

/// The PTX of which the driver makes what it runs on a device of this compute capability (90 for 9.0), of so many bytes at
/// most: a text itself, or from a fat binary the text for the highest capability that is not above the device's. Machine
/// code for another generation is never run, and that for this one, up to the device's own capability, always is before
/// any text (CUDA C++ Programming Guide, "Binary Compatibility").
///
/// # Errors
/// See [`NoText`].
pub fn what_runs(module: &[u8], capability: u32, most: usize) -> Result<String, NoText> {
    if module.starts_with(ELF_MAGIC) {
        return Err(NoText::MachineCode);
    }
    let Some((mut entries, rest)) = container(module) else {
        if module.len() > most {
            return Err(NoText::Unreadable);
        }
        return match text(module.to_vec()).filter(is_ptx) {
            Some(Image::Ptx(text)) => Ok(text),
            _ => Err(NoText::None),
        };
    };
    if !rest.is_empty() {
        return Err(NoText::Unclear);
    }
    let mut best: Option<Entry<'_>> = None;
    while !entries.is_empty() {
        let (entry, after) = Entry::read(entries).ok_or(NoText::Unreadable)?;
        entries = after;
        match entry.kind {
            CUBIN if entry.capability / 10 != capability / 10 || entry.capability > capability => {}
            CUBIN => return Err(NoText::MachineCode),
            PTX if entry.capability > capability => {}
            PTX => match &best {
                Some(best) if best.capability > entry.capability => {}
                Some(best) if best.capability == entry.capability => return Err(NoText::Unclear),
                _ => best = Some(entry),
            },
            _ => return Err(NoText::Unclear),
        }
    }
    let best = best.ok_or(NoText::None)?;
    let plain = best.plain(most).ok_or(NoText::Unreadable)?;
    match text(plain).filter(is_ptx) {
        // Text for one capability alone, or for a family of them, is not for all above.
        Some(Image::Ptx(text)) if best.capability == capability || is_for_all_above(&text) => {
            Ok(text)
        }
        Some(Image::Ptx(_)) => Err(NoText::Unclear),
        _ => Err(NoText::Unreadable),
    }
}

/// Whether the target of a text has no letter at its end, such as that of `sm_90a`.
fn is_for_all_above(text: &str) -> bool {
    let targets = text.lines().filter_map(|line| line.trim_start().strip_prefix(".target"));
    let names = targets
        .flat_map(|line| line.split([',', ' ', '\t']))
        .filter(|name| name.starts_with("sm_"));
    names.clone().count() > 0
        && names.clone().all(|name| name.ends_with(|last: char| last.is_ascii_digit()))
}

/// The images of these kinds, of so many bytes at most, and whether there is nothing else.
fn read(module: &[u8], most: usize, kinds: &[u16]) -> (Vec<Image>, bool) {
    let one = |image: Option<Image>| (image.clone().into_iter().collect(), image.is_some());
    if module.starts_with(ELF_MAGIC) {
        let cubin = kinds.contains(&CUBIN) && module.len() <= most;
        return one(cubin.then(|| Image::Cubin(module.to_vec())));
    }
    if u32_at(module, 0) != Some(CONTAINER_MAGIC) {
        let small = (module.len() <= most).then(|| module.to_vec());
        return one(small.and_then(text).filter(is_ptx));
    }
    let (mut images, mut rest, mut left, mut all) = (Vec::new(), module, most, true);
    // Several containers may follow each other, as in a section of a program.
    while let Some((mut entries, after)) = container(rest) {
        rest = after;
        while let Some((entry, after)) = Entry::read(entries) {
            entries = after;
            if !kinds.contains(&entry.kind) {
                all = false;
                continue;
            }
            let plain = entry.plain(left);
            let image = plain.and_then(|plain| match entry.kind {
                PTX => text(plain),
                CUBIN if plain.starts_with(ELF_MAGIC) => Some(Image::Cubin(plain)),
                _ => None,
            });
            match image {
                Some(image) => {
                    left = left.saturating_sub(image.len());
                    images.push(image);
                }
                None => all = false,
            }
        }
        all &= entries.is_empty();
    }
    (images, all && rest.is_empty())
}

impl Image {
    fn len(&self) -> usize {
        match self {
            Image::Ptx(text) => text.len(),
            Image::Cubin(bytes) => bytes.len(),
        }
    }
}

fn text(mut bytes: Vec<u8>) -> Option<Image> {
    bytes.truncate(bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len()));
    String::from_utf8(bytes).ok().map(Image::Ptx)
}

fn is_ptx(image: &Image) -> bool {
    matches!(image, Image::Ptx(text) if text.contains(".version"))
}

/// The entries of the container at the beginning, and what follows it.
fn container(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    if u32_at(bytes, 0)? != CONTAINER_MAGIC {
        return None;
    }
    let header = usize::from(u16_at(bytes, 6)?);
    let entries = usize::try_from(u64_at(bytes, 8)?).ok()?;
    let rest = bytes.get(header.max(CONTAINER_HEADER)..)?;
    // A directory that is cut off still has entries.
    Some(rest.split_at(entries.min(rest.len())))
}

struct Entry<'a> {
    kind: u16,
    /// 80 for 8.0.
    capability: u32,
    flags: u64,
    plain_size: u64,
    contents: &'a [u8],
    /// Of compressed contents.
    compressed_size: usize,
}

impl<'a> Entry<'a> {
    /// The entry at the beginning, and what follows it.
    fn read(from: &'a [u8]) -> Option<(Entry<'a>, &'a [u8])> {
        let own = u32_at(from, 4)? as usize;
        let size = usize::try_from(u64_at(from, 8)?).ok()?;
        let end = own.checked_add(size).filter(|_| own >= ENTRY_HEADER)?;
        let entry = Entry {
            kind: u16_at(from, 0)?,
            capability: u32_at(from, 28)?,
            flags: u64_at(from, 40)?,
            plain_size: u64_at(from, 56)?,
            contents: from.get(own..end)?,
            compressed_size: u32_at(from, 16)? as usize,
        };
        Some((entry, &from[end..]))
    }

    /// The contents, if they have no more than so many bytes.
    fn plain(&self, most: usize) -> Option<Vec<u8>> {
        if self.flags & (LZ4 | ZSTD) == 0 {
            return (self.contents.len() <= most).then(|| self.contents.to_vec());
        }
        let compressed = self.contents.get(..self.compressed_size)?;
        let size = usize::try_from(self.plain_size).ok().filter(|size| *size <= most)?;
        let plain = if self.flags & ZSTD != 0 {
            // Memory grows with what really comes out.
            let mut plain = Vec::new();
            let decoder = zstd::stream::read::Decoder::new(compressed).ok()?;
            decoder.take(size as u64 + 1).read_to_end(&mut plain).ok()?;
            plain
        } else if size <= compressed.len().saturating_mul(LZ4_RATIO) {
            lz4_flex::block::decompress(compressed, size).ok()?
        } else {
            return None;
        };
        (plain.len() == size).then_some(plain)
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

    macro_rules! fatbin {
        ($name:literal) => {
            include_bytes!(concat!("../../softcuda/tests/fatbin/", $name, ".fatbin"))
        };
    }

    const PLAIN: &[u8] = fatbin!("plain");
    const LZ4: &[u8] = fatbin!("lz4");
    const ZSTD: &[u8] = fatbin!("zstd");
    const BOTH: &[u8] = fatbin!("both");
    const SASS: &[u8] = fatbin!("sass");
    const NEWER: &[u8] = fatbin!("newer");

    /// How many texts with the kernel there are, and how many files of machine code.
    fn kinds(module: &[u8]) -> (usize, usize) {
        let images = images(module);
        let has_kernel = |image: &&Image| match image {
            Image::Ptx(text) => text.contains(".visible .entry scale"),
            Image::Cubin(_) => false,
        };
        let cubins = images.iter().filter(|image| matches!(image, Image::Cubin(_))).count();
        (images.iter().filter(has_kernel).count(), cubins)
    }

    #[test]
    fn every_form_has_its_images() {
        for fatbin in [PLAIN, LZ4, ZSTD] {
            assert_eq!(images(fatbin), images(PLAIN));
            assert_eq!(kinds(fatbin), (1, 0));
        }
        assert_eq!(kinds(BOTH), (1, 1));
        assert_eq!(kinds(SASS), (0, 1));
        assert_eq!(kinds(&[SASS, PLAIN].concat()), (1, 1));
        let cubin = [ELF_MAGIC, b"anything"].concat();
        assert_eq!(images(&cubin), [Image::Cubin(cubin.clone())]);
        let ptx = b".version 9.0\n.target sm_75\n";
        let text = [Image::Ptx(String::from_utf8(ptx.to_vec()).unwrap())];
        assert_eq!(images(ptx), text);
        assert_eq!(images(&[&ptx[..], b"\0anything"].concat()), text);
    }

    /// One container with the entries of several.
    fn joined(containers: &[&[u8]]) -> Vec<u8> {
        let entries: Vec<u8> =
            containers.iter().flat_map(|one| one[CONTAINER_HEADER..].to_vec()).collect();
        let mut joined = PLAIN[..CONTAINER_HEADER].to_vec();
        joined[8..16].copy_from_slice(&(entries.len() as u64).to_le_bytes());
        [joined, entries].concat()
    }

    #[test]
    fn what_runs_is_what_a_driver_would_take() {
        let most = 1 << 20;
        let of = |module: &[u8]| texts(module, usize::MAX).0.remove(0);
        for fatbin in [PLAIN, LZ4, ZSTD] {
            assert_eq!(what_runs(fatbin, 80, most), Ok(of(PLAIN)));
            assert_eq!(what_runs(fatbin, 90, most), Ok(of(PLAIN)));
            assert_eq!(what_runs(fatbin, 75, most), Err(NoText::None));
            assert_eq!(what_runs(fatbin, 80, 100), Err(NoText::Unreadable));
            assert_eq!(what_runs(&fatbin[..fatbin.len() - 1], 80, most), Err(NoText::Unreadable));
        }
        // Machine code for 8.0 runs on 8.6 too, and not on 9.0.
        for module in [BOTH, SASS] {
            assert_eq!(what_runs(module, 80, most), Err(NoText::MachineCode));
            assert_eq!(what_runs(module, 86, most), Err(NoText::MachineCode));
        }
        assert_eq!(what_runs(BOTH, 90, most), Ok(of(BOTH)));
        assert_eq!(what_runs(SASS, 90, most), Err(NoText::None));
        assert_eq!(what_runs(SASS, 75, most), Err(NoText::None));
        for both in [joined(&[PLAIN, NEWER]), joined(&[NEWER, PLAIN])] {
            assert_eq!(what_runs(&both, 80, most), Ok(of(PLAIN)));
            assert_eq!(what_runs(&both, 90, most), Ok(of(NEWER)));
        }
        assert_eq!(what_runs(&joined(&[PLAIN, PLAIN]), 80, most), Err(NoText::Unclear));
        assert_eq!(what_runs(&[PLAIN, PLAIN].concat(), 80, most), Err(NoText::Unclear));
        let mut unknown = joined(&[PLAIN, PLAIN]);
        unknown[PLAIN.len()] = 77;
        assert_eq!(what_runs(&unknown, 80, most), Err(NoText::Unclear));
        let text = of(PLAIN);
        assert_eq!(what_runs(text.as_bytes(), 10, most), Ok(text.clone()));
        assert_eq!(what_runs(text.as_bytes(), 80, 100), Err(NoText::Unreadable));
        assert_eq!(what_runs(b"text", 80, most), Err(NoText::None));
        assert_eq!(what_runs(&[ELF_MAGIC, b"x"].concat(), 80, most), Err(NoText::MachineCode));
    }

    #[test]
    fn text_for_one_capability_is_not_for_those_above() {
        let place = PLAIN.windows(5).position(|bytes| bytes == b"sm_80").unwrap();
        let mut alone = PLAIN.to_vec();
        assert_eq!(alone[place + 5], b'\n');
        alone[place + 3..place + 6].copy_from_slice(b"8a\n");
        assert_eq!(what_runs(&alone, 90, 1 << 20), Err(NoText::Unclear));
        assert!(what_runs(&alone, 80, 1 << 20).is_ok());
        for (target, all) in [("sm_80", true), ("sm_90a", false), ("sm_100f", false)] {
            assert_eq!(is_for_all_above(&format!(".version 9.0\n.target {target}, debug\n")), all);
        }
        assert!(!is_for_all_above(".version 9.0"));
    }

    #[test]
    fn text_is_had_without_machine_code_and_within_bounds() {
        let Some(Image::Ptx(plain)) = images(PLAIN).into_iter().next() else { panic!("no PTX") };
        let (whole, nothing) = (vec![plain.clone()], (vec![], false));
        for (fatbin, all) in [(PLAIN, true), (LZ4, true), (ZSTD, true), (BOTH, false)] {
            // Entries are padded.
            assert_eq!(texts(fatbin, plain.len() + 64), (whole.clone(), all));
            assert_eq!(texts(fatbin, plain.len() - 1), nothing);
        }
        assert_eq!(texts(plain.as_bytes(), plain.len()), (whole.clone(), true));
        assert_eq!(texts(plain.as_bytes(), plain.len() - 1), nothing);
        assert_eq!(texts(SASS, usize::MAX), nothing);
        assert_eq!(texts(&[ELF_MAGIC, b"x"].concat(), usize::MAX), nothing);
        assert_eq!(texts(&[PLAIN, SASS].concat(), usize::MAX), (whole.clone(), false));
        assert_eq!(texts(&[PLAIN, &[0; 8]].concat(), usize::MAX), (whole, false));
    }

    #[test]
    fn other_bytes_have_none() {
        for other in [&b""[..], b"text", &[0; 100], &[0xff; 100], &PLAIN[..20]] {
            assert_eq!(images(other), []);
        }
    }

    #[test]
    fn a_size_that_is_not_true_is_not_believed() {
        for fatbin in [LZ4, ZSTD] {
            let mut large = fatbin.to_vec();
            large[CONTAINER_HEADER + 56 + 3] = 0x1f;
            assert_eq!(images(&large), []);
        }
    }

    proptest! {
        #[test]
        fn damaged_containers_are_left_out_or_read_but_never_panic(
            which in 0..5_usize,
            changes in prop::collection::vec((0..200_usize, any::<u8>()), 1..6),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut module = [PLAIN, LZ4, ZSTD, BOTH, SASS][which].to_vec();
            for (place, value) in changes {
                module[place] = value;
            }
            let _ = (images(&module), what_runs(&module, 90, 1 << 20));
            module.truncate(cut.index(module.len()));
            let _ = (images(&module), what_runs(&module, 90, 1 << 20));
        }
    }
}
