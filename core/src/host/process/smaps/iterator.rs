//! A program that the kernel runs over the mappings of a process, and that tells of each where it is and which flags it
//! has (BPF iterator `task_vma`, Linux 5.12; of one process since 6.1).

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::types::Types;

/// Commands of bpf(2).
const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const ITER_CREATE: libc::c_int = 33;
/// `BPF_PROG_TYPE_TRACING`.
const TRACING: u32 = 26;
/// `BPF_TRACE_ITER`.
const ITER: u32 = 28;
/// The helper bpf_seq_write.
const SEQ_WRITE: u32 = 127;
/// What the kernel asks of whoever calls that helper. The instructions below may be used by that licence too.
const LICENSE: &core::ffi::CStr = c"Dual MIT/GPL";
/// The function whose argument the program gets.
const TARGET: &str = "bpf_iter_task_vma";
/// Where that argument has the kernel's place for output, and the mapping.
const META: i16 = 0;
const MAPPING: i16 = 16;
/// Bytes that the program writes of each mapping: three numbers.
const RECORD: usize = 24;
/// More bytes than are read of any process: 65530 mappings are the kernel's default limit.
const LONGEST: u64 = 256 << 20;

/// Bytes that are read before it is looked whether that was all: whole records.
const PART: u64 = RECORD as u64 * (1 << 16);

/// A mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Flags {
    pub(super) addresses: Range<u64>,
    pub(super) bits: u64,
}

/// The loaded program.
#[derive(Debug)]
pub(super) struct Program(OwnedFd);

/// `union bpf_attr` for [`PROG_LOAD`], up to what is used.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    instructions: u32,
    code: u64,
    license: u64,
    log: [u64; 2],
    kernel: u32,
    flags: u32,
    name: [u8; 16],
    device: u32,
    attached_as: u32,
    types: u32,
    functions: [u32; 4],
    lines: [u32; 4],
    target: u32,
    target_in: u32,
}

/// The same for [`LINK_CREATE`].
#[repr(C)]
struct Link {
    program: u32,
    target: u32,
    attached_as: u32,
    flags: u32,
    about: u64,
    about_len: u32,
    end: u32,
}

/// `union bpf_iter_link_info` of a task.
#[repr(C)]
#[derive(Default)]
struct About {
    thread: u32,
    process: u32,
    process_fd: u32,
    end: u32,
}

/// The same for [`ITER_CREATE`].
#[repr(C)]
struct Iterate {
    link: u32,
    flags: u32,
}

impl Program {
    /// Has the kernel check and compile it.
    ///
    /// # Errors
    /// The kernel has no such iterators, tells nothing of its types, or this user may load none.
    pub(super) fn load() -> io::Result<Self> {
        let file = std::fs::read("/sys/kernel/btf/vmlinux")?;
        let missing = || io::Error::from(io::ErrorKind::Unsupported);
        let types = Types::of(&file).ok_or_else(missing)?;
        let target = types.function(TARGET).ok_or_else(missing)?;
        let members = ["vm_start", "vm_end", "vm_flags"];
        let places = types.members("vm_area_struct", members).ok_or_else(missing)?;
        let code = code(places);
        let load = Load {
            kind: TRACING,
            instructions: code.len() as u32,
            code: code.as_ptr().expose_provenance() as u64,
            license: LICENSE.as_ptr().expose_provenance() as u64,
            name: *b"gpucr_mappings\0\0",
            attached_as: ITER,
            target,
            ..Load::default()
        };
        // SAFETY: code and licence live until the call is over, and have the lengths that the kernel is told.
        unsafe { bpf(PROG_LOAD, &load) }.map(Self)
    }

    /// The mappings of a process in the order of their addresses: without the kernel's own, such as `[vsyscall]`. While
    /// it runs they may be of several moments.
    ///
    /// # Errors
    /// The kernel cannot tell of one process alone (before Linux 6.1), or there is none.
    pub(super) fn mappings(&self, pid: i32) -> io::Result<Vec<Flags>> {
        // Asked of one thread alone, the kernel begins again whenever it has come to the end.
        let about = About { process: pid as u32, ..About::default() };
        let link = Link {
            program: self.0.as_raw_fd() as u32,
            target: 0,
            attached_as: ITER,
            flags: 0,
            about: (&raw const about).expose_provenance() as u64,
            about_len: size_of::<About>() as u32,
            end: 0,
        };
        // SAFETY: the kernel reads `about`, which lives until the call is over.
        let link = unsafe { bpf(LINK_CREATE, &link) }?;
        let iterate = Iterate { link: link.as_raw_fd() as u32, flags: 0 };
        // SAFETY: the request has numbers alone.
        let records = unsafe { bpf(ITER_CREATE, &iterate) }?;
        let mut output = File::from(records).take(LONGEST);
        let (mut all, mut bytes) = (Vec::<Flags>::new(), Vec::new());
        while output.by_ref().take(PART).read_to_end(&mut bytes)? > 0 {
            let next = flags(&bytes, all.last().map_or(0, |last| last.addresses.end));
            // A program could have very many threads that do not share their files.
            let is_all = next.len() < bytes.len() / RECORD;
            all.extend(next);
            if is_all {
                break;
            }
            bytes.clear();
        }
        Ok(all)
    }
}

/// The one of these mappings, which are in order, that has just these addresses.
pub(super) fn at<'a>(mappings: &'a [Flags], addresses: &Range<u64>) -> Option<&'a Flags> {
    let place = mappings.binary_search_by_key(&addresses.start, |it| it.addresses.start).ok()?;
    mappings.get(place).filter(|it| it.addresses == *addresses)
}

/// What the program wrote: of one thread, and then again of each other that does not share its files. Only what lies
/// behind the address `last` is new.
fn flags(bytes: &[u8], mut last: u64) -> Vec<Flags> {
    let (records, _) = bytes.as_chunks::<RECORD>();
    let number = |record: &[u8; RECORD], at| {
        record[at..].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    };
    let flags = |record: &[u8; RECORD]| Flags {
        addresses: number(record, 0)..number(record, 8),
        bits: number(record, 16),
    };
    let is_next =
        |flags: &Flags| flags.addresses.start >= std::mem::replace(&mut last, flags.addresses.end);
    records.iter().map(flags).take_while(is_next).collect()
}

/// The instructions, for a kernel whose mappings have beginning, end and flags at these places.
fn code([start, end, flags]: [i16; 3]) -> [u64; 17] {
    const STACK: u8 = 10;
    let record = -(RECORD as i16);
    [
        copy(6, 1),
        load(7, 6, MAPPING),
        // There is none behind the last.
        skip_if_zero(7, 12),
        load(1, 7, start),
        store(STACK, record, 1),
        load(1, 7, end),
        store(STACK, record + 8, 1),
        load(1, 7, flags),
        store(STACK, record + 16, 1),
        load(1, 6, META),
        load(1, 1, 0),
        copy(2, STACK),
        add(2, i32::from(record)),
        set(3, RECORD as u32),
        instruction(0x85, 0, 0, 0, SEQ_WRITE),
        set(0, 0),
        instruction(0x95, 0, 0, 0, 0),
    ]
}

/// An instruction of eight bytes (Documentation/bpf/standardization/instruction-set.rst of Linux).
const fn instruction(code: u8, to: u8, from: u8, place: i16, number: u32) -> u64 {
    let registers = (from << 4 | to) as u64;
    code as u64 | registers << 8 | (place as u16 as u64) << 16 | (number as u64) << 32
}

const fn copy(to: u8, from: u8) -> u64 {
    instruction(0xbf, to, from, 0, 0)
}

const fn load(to: u8, from: u8, place: i16) -> u64 {
    instruction(0x79, to, from, place, 0)
}

const fn store(to: u8, place: i16, from: u8) -> u64 {
    instruction(0x7b, to, from, place, 0)
}

const fn set(to: u8, number: u32) -> u64 {
    instruction(0xb7, to, 0, 0, number)
}

const fn add(to: u8, number: i32) -> u64 {
    instruction(0x07, to, 0, 0, number as u32)
}

const fn skip_if_zero(register: u8, instructions: i16) -> u64 {
    instruction(0x15, register, 0, instructions, 0)
}

/// # Safety
/// What the request refers to is what the kernel takes it for.
unsafe fn bpf<T>(command: libc::c_int, request: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads the request, whose size it is told.
    let made = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(request), size_of::<T>())
    };
    if made < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it, closed on exec, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(made as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_again_is_left_out() {
        let record = |start: u64, end: u64, bits: u64| [start, end, bits].map(u64::to_ne_bytes);
        let told = [record(1, 2, 7), record(2, 5, 8), record(1, 2, 7), record(2, 5, 8)];
        let bytes = told.as_flattened().as_flattened();
        let expected = [Flags { addresses: 1..2, bits: 7 }, Flags { addresses: 2..5, bits: 8 }];
        assert_eq!(flags(bytes, 0), expected);
        assert_eq!(flags(bytes, 5), [], "it was told before");
        assert_eq!(flags(&bytes[..RECORD + 8], 0), expected[..1]);
    }

    #[test]
    fn instructions_have_the_bytes_of_the_instruction_set() {
        // As `llvm-objdump` has them: r7 = *(u64 *)(r6 + 0x10); *(u64 *)(r10 - 0x18) = r1.
        assert_eq!(load(7, 6, 16).to_le_bytes(), [0x79, 0x67, 0x10, 0, 0, 0, 0, 0]);
        assert_eq!(store(10, -24, 1).to_le_bytes(), [0x7b, 0x1a, 0xe8, 0xff, 0, 0, 0, 0]);
        assert_eq!(add(2, -24).to_le_bytes(), [0x07, 0x02, 0, 0, 0xe8, 0xff, 0xff, 0xff]);
    }
}
