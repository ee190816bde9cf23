//! Layouts of parameters from cubins: device code in ELF files.
//!
//! For each kernel there is a section `.nv.info.NAME`, a list of attributes. An attribute has a byte
//! for its form, a byte for its kind, and two bytes: its value (forms 1 to 3), or the size of the value
//! that follows (form 4). Of these kinds something is taken:
//!
//! | Kind | Name | Value |
//! |------|------|-------|
//! | 0x17 | `KPARAM_INFO` | index (4 bytes), ordinal (2), offset (2), and 4 bytes of which the upper 14 bits are the size |
//! | 0x45 | `KPARAM_INFO_V2` | the same, but the lower 16 bits are the size; for what 14 bits cannot hold |
//! | 0x19 | `CBANK_PARAM_SIZE` | bytes of all parameters, in the attribute itself |
//! | 0x0a | `PARAM_CBANK` | symbol (4 bytes), offset in the constant bank (2), bytes of all parameters (2) |
//!
//! Offsets are in the block of parameters. The ordinal is the parameter's place in the signature.
//!
//! NVIDIA documents none of this. Names and kinds are those that `cuobjdump -elf` prints and that the
//! documentation of CuAssembler lists; the layout of 0x45, and everything here, was checked against
//! what nvcc 13.0 makes (`testdata/layout.cu`).

use std::collections::HashMap;

use gpucr_kernels::{Direction, Kernel, Param, Source};
use object::LittleEndian;
use object::elf::{EM_CUDA, FileHeader64, SHN_LORESERVE, SHT_SYMTAB, STT_FUNC};
use object::read::elf::{FileHeader, SectionHeader, Sym};
use thiserror::Error;

const KPARAM_INFO: u8 = 0x17;
const KPARAM_INFO_V2: u8 = 0x45;
const CBANK_PARAM_SIZE: u8 = 0x19;
const PARAM_CBANK: u8 = 0x0a;
/// Form of an attribute whose value follows it.
const VALUE_FOLLOWS: u8 = 4;
/// Flag (`STO_CUDA_ENTRY`) of a symbol in `st_other`: it is a kernel.
const ENTRY: u8 = 0x10;

/// Why a cubin tells nothing.
#[derive(Debug, Error, Clone, Copy, PartialEq, Eq)]
pub enum CubinError {
    /// The bytes are no ELF file for CUDA.
    #[error("this is not a cubin")]
    NotCubin,
    /// The file breaks the rules of ELF, or those of its attributes.
    #[error("the cubin is damaged: {0}")]
    Damaged(&'static str),
}

/// The kernels of a cubin with the layout of their parameters. Directions are
/// [`Direction::Unknown`], and all are `indirect`: machine code is not looked into.
///
/// # Errors
/// [`CubinError`]; for bytes of any origin nothing worse, and in time and memory that grow with their
/// number.
pub fn from_cubin(image: &[u8]) -> Result<Vec<Kernel>, CubinError> {
    let damaged = |_| CubinError::Damaged("its sections cannot be read");
    let endian = LittleEndian;
    let header = FileHeader64::<LittleEndian>::parse(image).map_err(|_| CubinError::NotCubin)?;
    if header.e_machine(endian) != EM_CUDA {
        return Err(CubinError::NotCubin);
    }
    let sections = header.sections(endian, image).map_err(damaged)?;
    let symbols = sections.symbols(endian, image, SHT_SYMTAB).map_err(damaged)?;
    let mut budget = Budget(2 * image.len());

    // From a section of code to its attributes.
    let mut attributes = HashMap::new();
    for section in sections.iter() {
        let name = sections.section_name(endian, section).map_err(damaged)?;
        budget.spend(name.len())?;
        if name.starts_with(b".nv.info.") {
            attributes.insert(section.sh_info(endian), section);
        }
    }
    let mut kernels = Vec::new();
    for symbol in symbols.iter() {
        let code = u32::from(symbol.st_shndx(endian).0);
        if symbol.st_type() != STT_FUNC || symbol.st_other().0 & ENTRY == 0 || code == 0 {
            continue;
        }
        // Files of more than 65279 sections have the number elsewhere. Nobody has seen such a cubin.
        if code >= u32::from(SHN_LORESERVE) {
            return Err(CubinError::Damaged("a kernel is in no section"));
        }
        let name = symbols.symbol_name(endian, symbol).ok();
        let name = name
            .and_then(|name| std::str::from_utf8(name).ok())
            .ok_or(CubinError::Damaged("a kernel has no name"))?;
        let section =
            attributes.get(&code).ok_or(CubinError::Damaged("a kernel has no attributes"))?;
        let attributes = section.data(endian, image).map_err(damaged)?;
        budget.spend(name.len() + attributes.len())?;
        let params = parameters(attributes, &mut budget)?;
        let name = name.to_owned();
        let variables = Direction::Unknown;
        kernels.push(Kernel { name, params, indirect: true, variables, closed: false });
    }
    Ok(kernels)
}

/// Names and sections may lie over each other in the file. What they add up to is bounded by what an
/// honest file has, where each parameter also has its place in a constant bank.
struct Budget(usize);

impl Budget {
    fn spend(&mut self, bytes: usize) -> Result<(), CubinError> {
        let left = self.0.checked_sub(bytes);
        self.0 = left.ok_or(CubinError::Damaged("its parts add up to more than the file"))?;
        Ok(())
    }
}

struct Record {
    ordinal: u16,
    offset: u32,
    size: u32,
}

/// The parameters that a list of attributes tells of.
fn parameters(attributes: &[u8], budget: &mut Budget) -> Result<Vec<Param>, CubinError> {
    let short = CubinError::Damaged("an attribute is cut off");
    let (mut records, mut sizes, mut rest) = (Vec::new(), Vec::new(), attributes);
    while let Some((head, after)) = rest.split_first_chunk::<4>() {
        let [form, kind, low, high] = *head;
        let number = u16::from_le_bytes([low, high]);
        let follows = match form {
            1..=3 => 0,
            VALUE_FOLLOWS => usize::from(number),
            _ => return Err(CubinError::Damaged("an attribute has no known form")),
        };
        let (value, after) = after.split_at_checked(follows).ok_or(short)?;
        rest = after;
        match (kind, form) {
            (KPARAM_INFO | KPARAM_INFO_V2, VALUE_FOLLOWS) => {
                let value: &[u8; 12] = value.try_into().map_err(|_| short)?;
                let half = |at| u16::from_le_bytes([value[at], value[at + 1]]);
                let packed = u32::from_le_bytes([value[8], value[9], value[10], value[11]]);
                let size = if kind == KPARAM_INFO { packed >> 18 } else { packed & 0xffff };
                records.push(Record { ordinal: half(4), offset: u32::from(half(6)), size });
            }
            (CBANK_PARAM_SIZE, 3) => sizes.push(u32::from(number)),
            (PARAM_CBANK, VALUE_FOLLOWS) => {
                let value: &[u8; 8] = value.try_into().map_err(|_| short)?;
                sizes.push(u32::from(u16::from_le_bytes([value[6], value[7]])));
            }
            _ => {}
        }
    }
    if !rest.is_empty() {
        return Err(short);
    }
    let total = sizes.first().copied().unwrap_or(0);
    if sizes.iter().any(|size| *size != total) {
        return Err(CubinError::Damaged("a kernel has two sizes of its parameters"));
    }
    laid_out(records, total, budget)
}

/// Checks that parameters are numbered from 0 on and lie one behind the other in `total` bytes.
fn laid_out(
    mut records: Vec<Record>,
    total: u32,
    budget: &mut Budget,
) -> Result<Vec<Param>, CubinError> {
    records.sort_unstable_by_key(|record| record.ordinal);
    let (mut params, mut end) = (Vec::new(), 0);
    for (at, record) in records.into_iter().enumerate() {
        let Record { ordinal, offset, size } = record;
        if usize::from(ordinal) != at {
            return Err(CubinError::Damaged("a parameter is missing"));
        }
        // At most 2^16 each, so this does not overflow.
        if offset < end || offset + size > total {
            return Err(CubinError::Damaged("parameters do not fit"));
        }
        end = offset + size;
        budget.spend(size as usize)?;
        params.push(Param::uniform(offset, size, Direction::Unknown, Source::Assumed));
    }
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SM_75: &[u8] = include_bytes!("testdata/layout.sm_75.cubin");
    const SM_90: &[u8] = include_bytes!("testdata/layout.sm_90.cubin");

    /// Offsets and sizes of the parameters of all kernels, by name.
    fn layouts(image: &[u8]) -> Vec<(String, Vec<(u32, u32)>)> {
        let mut found: Vec<_> = from_cubin(image)
            .unwrap()
            .into_iter()
            .map(|kernel| {
                let params = kernel.params.iter().map(|param| (param.offset, param.size));
                (kernel.name, params.collect())
            })
            .collect();
        found.sort();
        found
    }

    #[test]
    fn layouts_are_those_of_the_source() {
        let expected = [
            // A function that is called, and not inlined, is no kernel.
            ("_Z4pair4Pairc".to_owned(), vec![(0, 24), (24, 1)]),
            ("empty".to_owned(), vec![]),
            ("scale".to_owned(), vec![(0, 8), (8, 8), (16, 4), (20, 4)]),
            // More than 14 bits can hold.
            ("large".to_owned(), vec![(0, 16400), (16400, 4)]),
        ];
        assert_eq!(layouts(SM_75), expected[..3]);
        let mut all = layouts(SM_90);
        all.sort_by_key(|(name, _)| name == "large");
        assert_eq!(all, expected);
        for image in [SM_75, SM_90] {
            for kernel in from_cubin(image).unwrap() {
                assert!(kernel.indirect);
                for param in kernel.params {
                    assert_eq!(param.words.len() as u32, param.size / 8);
                    let unknown = |word: &gpucr_kernels::Word| {
                        (word.direction, word.source) == (Direction::Unknown, Source::Assumed)
                    };
                    assert!(param.words.iter().all(unknown));
                }
            }
        }
    }

    #[test]
    fn other_files_are_refused() {
        for other in [&b""[..], b"\x7fELF", &[0; 4096], &SM_75[..63]] {
            assert_eq!(from_cubin(other), Err(CubinError::NotCubin));
        }
        let mut other = SM_75.to_vec();
        other[18] = 62;
        assert_eq!(from_cubin(&other), Err(CubinError::NotCubin));
        assert!(matches!(from_cubin(&SM_75[..SM_75.len() / 2]), Err(CubinError::Damaged(_))));
    }

    #[test]
    fn attributes_that_contradict_each_other_are_refused() {
        let info = |ordinal: u16, offset: u16, size: u32| {
            let mut bytes = vec![4, KPARAM_INFO, 12, 0, 0, 0, 0, 0];
            bytes.extend_from_slice(&ordinal.to_le_bytes());
            bytes.extend_from_slice(&offset.to_le_bytes());
            bytes.extend_from_slice(&(size << 18 | 0x1f000).to_le_bytes());
            bytes
        };
        let read = |parts: &[Vec<u8>]| parameters(&parts.concat(), &mut Budget(1 << 20));
        let total = |size: u8| vec![3, CBANK_PARAM_SIZE, size, 0];
        let good = read(&[info(1, 8, 8), info(0, 0, 8), total(16)]).unwrap();
        assert_eq!(good.iter().map(|param| param.offset).collect::<Vec<_>>(), [0, 8]);
        for bad in [
            vec![info(0, 0, 8), info(0, 8, 8), total(16)],
            vec![info(1, 0, 8), total(8)],
            vec![info(0, 0, 8), info(1, 4, 8), total(16)],
            vec![info(0, 0, 8), total(4)],
            vec![info(0, 0, 8)],
            vec![info(0, 0, 8), total(8), total(16)],
            vec![info(0, 0, 8), total(8), vec![4, 0, 1, 0]],
            vec![info(0, 0, 8), total(8), vec![9, 0, 0, 0]],
            vec![info(0, 0, 8), total(8), vec![1, 0]],
        ] {
            assert!(read(&bad).is_err(), "{bad:x?}");
        }
        let mut poor = Budget(15);
        assert!(parameters(&[info(0, 0, 16), total(16)].concat(), &mut poor).is_err());
    }

    proptest! {
        #[test]
        fn damaged_cubins_are_refused_or_read_but_never_panic(
            newer in any::<bool>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            near_head in any::<bool>(),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut image = if newer { SM_90 } else { SM_75 }.to_vec();
            for (place, value) in changes {
                // The ELF header and the attributes are a small part of the file.
                let place = place.index(if near_head { 64 } else { image.len() });
                image[place] = value;
            }
            check(&image)?;
            image.truncate(cut.index(image.len()));
            check(&image)?;
        }

        #[test]
        fn damaged_attributes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = parameters(&bytes, &mut Budget(1 << 16));
        }
    }

    fn check(image: &[u8]) -> Result<(), TestCaseError> {
        let Ok(kernels) = from_cubin(image) else { return Ok(()) };
        let params = kernels.iter().flat_map(|kernel| &kernel.params);
        let words: usize = params.map(|param| param.words.len()).sum();
        prop_assert!(words <= image.len() / 4);
        Ok(())
    }
}
