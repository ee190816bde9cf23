//! PTX and cubins in what a program loads as a module.
//!
//! softcuda has a reader of fat binaries too. That one looks for the PTX that it can run, and says
//! why there is none; this one takes all there is and leaves out what it cannot read. softcuda is a
//! driver library that is usable on its own, and nothing links against it; so there are two.
//!
//! The form of the container is described in `softcuda/src/fatbin.rs`.

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
    /// Text, for [`from_ptx`](super::from_ptx).
    Ptx(String),
    /// An ELF file of device code, for [`from_cubin`](super::from_cubin).
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
    use crate::kernels::{from_cubin, from_ptx};
    use proptest::prelude::*;

    macro_rules! fatbin {
        ($name:literal) => {
            include_bytes!(concat!("../../../softcuda/tests/fatbin/", $name, ".fatbin"))
        };
    }

    const PLAIN: &[u8] = fatbin!("plain");
    const LZ4: &[u8] = fatbin!("lz4");
    const ZSTD: &[u8] = fatbin!("zstd");
    const BOTH: &[u8] = fatbin!("both");
    const SASS: &[u8] = fatbin!("sass");
    const CUBIN: &[u8] = include_bytes!("testdata/layout.sm_75.cubin");

    /// The kernels of all images, PTX first.
    fn kernels(module: &[u8]) -> (Vec<String>, Vec<String>) {
        let (mut ptx, mut cubin) = (Vec::new(), Vec::new());
        for image in images(module) {
            match image {
                Image::Ptx(text) => {
                    ptx.extend(from_ptx(&text).unwrap().into_iter().map(|kernel| kernel.name));
                }
                Image::Cubin(bytes) => {
                    cubin.extend(from_cubin(&bytes).unwrap().into_iter().map(|kernel| kernel.name));
                }
            }
        }
        (ptx, cubin)
    }

    #[test]
    fn every_form_has_its_images() {
        let scale = || vec!["scale".to_owned()];
        for fatbin in [PLAIN, LZ4, ZSTD] {
            assert_eq!(images(fatbin), images(PLAIN));
            assert_eq!(kernels(fatbin), (scale(), vec![]));
        }
        assert_eq!(kernels(BOTH), (scale(), scale()));
        assert_eq!(kernels(SASS), (vec![], scale()));
        assert_eq!(kernels(&[SASS, PLAIN].concat()), (scale(), scale()));
        assert_eq!(images(CUBIN), [Image::Cubin(CUBIN.to_vec())]);
        let ptx = b".version 9.0\n.target sm_75\n";
        let text = [Image::Ptx(String::from_utf8(ptx.to_vec()).unwrap())];
        assert_eq!(images(ptx), text);
        assert_eq!(images(&[&ptx[..], b"\0anything"].concat()), text);
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
        assert_eq!(texts(CUBIN, usize::MAX), nothing);
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
            let _ = images(&module);
            module.truncate(cut.index(module.len()));
            let _ = images(&module);
        }
    }
}
