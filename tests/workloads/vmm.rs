//! The program manages its memory itself: one large reservation in which segments are mapped and
//! unmapped at the end, as PyTorch's expandable segments are.

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use crate::args;
use crate::cuda::{check, driver};
use crate::gpu::{Gpu, Module, Shape, fill_at, read_at};
use crate::numbers::{Sequence, mix, mixer_round};
use crate::report::Run;

const PTX: &str = include_str!("kernels/mixer.ptx");
const SEGMENTS: usize = 24;

fn location(device: i32) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// A device may read and write.
pub(crate) fn access(device: i32) -> CUmemAccessDesc {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUmemAccessDesc { location: location(device), flags }
}

/// Memory of a device, whose handles may be exported if that is wanted.
pub(crate) fn properties(device: i32, is_exportable: bool) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: if is_exportable {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE
        },
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

/// Physical memory that is mapped at an address; unmapped and released on drop.
struct Segment {
    address: u64,
    bytes: usize,
    // What the host expects in the first words, and in all others.
    busy: Vec<u32>,
    rest: u32,
}

impl Segment {
    fn map(address: u64, bytes: usize, fill: u32, busy: usize) -> Result<Self> {
        let d = driver();
        let (properties, access) = (properties(0, false), access(0));
        let mut handle = 0;
        // SAFETY: all pointers are valid for the calls; the driver checks handle and range.
        unsafe {
            let code = (d.cuMemCreate)(&raw mut handle, bytes, &raw const properties, 0);
            check("cuMemCreate", code)?;
            let mapped = check("cuMemMap", (d.cuMemMap)(address, bytes, 0, handle, 0));
            // The mapping keeps the memory, as with PyTorch; after a failure it goes at once.
            let released = check("cuMemRelease", (d.cuMemRelease)(handle));
            mapped.and(released)?;
        }
        let segment = Self { address, bytes, busy: vec![fill; busy], rest: fill };
        // SAFETY: the pointer is valid for the call; the driver checks the range.
        let code = unsafe { (d.cuMemSetAccess)(address, bytes, &raw const access, 1) };
        check("cuMemSetAccess", code)?;
        fill_at(address, fill, bytes / 4)?;
        Ok(segment)
    }

    fn verify(&self) -> Result<Vec<u32>> {
        let words: Vec<u32> = read_at(self.address, self.bytes / 4)?;
        let (busy, rest) = words.split_at(self.busy.len());
        let right = busy == self.busy && rest.iter().all(|&word| word == self.rest);
        ensure!(right, "segment {:#x} has wrong content", self.address);
        Ok(words)
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, as a whole, and is unmapped once.
        unsafe { (driver().cuMemUnmap)(self.address, self.bytes) };
    }
}

/// A reserved range of addresses, given up on drop.
struct Reservation {
    address: u64,
    bytes: usize,
}

impl Reservation {
    fn new(bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: the out-pointer is valid for the call.
        let code = unsafe { (driver().cuMemAddressReserve)(&raw mut address, bytes, 0, 0, 0) };
        check("cuMemAddressReserve", code)?;
        Ok(Self { address, bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        // SAFETY: the range was reserved by `new`, and its segments are gone: the caller declares
        // them after the reservation.
        unsafe { (driver().cuMemAddressFree)(self.address, self.bytes) };
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let scale = run.pick(1, 4, 64);
    let busy: u32 = run.pick(4 << 10, 64 << 10, 1 << 20);
    let steps = run.plan(400, 500, 2000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let (properties, mut granularity) = (properties(0, false), 0);
    // SAFETY: both pointers are valid for the call; 0 asks for the minimum.
    let code = unsafe {
        let place = &raw mut granularity;
        (driver().cuMemGetAllocationGranularity)(place, &raw const properties, 0)
    };
    check("cuMemGetAllocationGranularity", code)?;
    ensure!(granularity > 0 && granularity % 4 == 0, "granularity of {granularity} bytes");
    // At least 2 MiB, so that the result does not depend on the driver's granularity.
    let bytes = (2usize << 20).next_multiple_of(granularity) * scale;
    let busy = (busy as usize).min(bytes / 4) as u32;
    let reservation = Reservation::new(bytes * SEGMENTS)?;
    let mut segments: Vec<Segment> = Vec::new();
    let mut random = Sequence::new(run.seed);
    let grow = |segments: &mut Vec<Segment>, fill: u32| -> Result<()> {
        let address = reservation.address + (segments.len() * bytes) as u64;
        segments.push(Segment::map(address, bytes, fill, busy as usize)?);
        Ok(())
    };
    for _ in 0..SEGMENTS / 3 {
        grow(&mut segments, random.below(u32::MAX))?;
    }
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let count = segments.len();
        match random.below(4) {
            0 if count < SEGMENTS => grow(&mut segments, random.below(u32::MAX))?,
            1 if count > 1 => {
                gpu.synchronize()?;
                segments.pop().context("no segment")?.verify()?;
            }
            _ => {}
        }
        // A kernel on two segments; where they are neighbours nothing marks the border.
        for _ in 0..2 {
            let index = random.below(segments.len() as u32) as usize;
            let segment = &mut segments[index];
            round.run(Shape::covering(busy), args![segment.address, busy, step])?;
            mixer_round(&mut segment.busy, step);
        }
        let index = random.below(segments.len() as u32) as usize;
        let place = random.below(busy) as usize;
        let word = read_at::<u32>(segments[index].address + place as u64 * 4, 1)?[0];
        ensure!(word == segments[index].busy[place], "segment {index}: word {place} is {word:x}");
        let count = segments.len();
        run.step(step, format_args!("segments {count} word {:08x}", mix(word)))?;
    }
    for segment in &segments {
        let words = segment.verify()?;
        run.absorb(&words);
    }
    while segments.pop().is_some() {}
    run.finish()
}
