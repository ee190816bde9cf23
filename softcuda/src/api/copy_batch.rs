//! Batches of copies. A batch is checked as a whole before anything of it is submitted, and then
//! done in the order of its stream.

use cudarc::driver::sys;

use super::arguments::{In, Out, read_bytes};
use super::copy::{self, STAGED, is_pageable};
use super::driver_api;
use super::managed::{self, NOWHERE};
use crate::arrays;
use crate::capture;
use crate::copy_engine::{self, Direction, Transfer};
use crate::managed_memory::Location;
use crate::operations::Operation;
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::submission::{DefaultStream, stream_and_context};

/// `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`, which copies here do anyway.
const OVERLAP: u32 = 1;
/// `CU_MEMCPY_OPERAND_TYPE_*`.
const POINTER: u32 = 1;
const ARRAY: u32 = 2;

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attributes {
    order: u32,
    from: Location,
    to: Location,
    flags: u32,
}

/// `CUmemcpy3DOperand`; the words are address, row length, layer height and a location, or an array
/// and the place in it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Operand {
    kind: u32,
    words: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`.
#[repr(C)]
#[derive(Clone, Copy)]
struct BoxCopy {
    from: Operand,
    to: Operand,
    /// In elements, rows and planes.
    extent: [usize; 3],
    order: u32,
    flags: u32,
}

const _: () = assert!(size_of::<Attributes>() == size_of::<sys::CUmemcpyAttributes>());
const _: () = assert!(size_of::<Operand>() == size_of::<sys::CUmemcpy3DOperand>());
const _: () = assert!(size_of::<BoxCopy>() == size_of::<sys::CUDA_MEMCPY3D_BATCH_OP>());

/// `CUmemcpySrcAccessOrder`: when the source may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    /// When the stream comes to the copy.
    Stream,
    /// At any time up to the end of the call.
    DuringCall,
    /// At any time up to the end of the copy.
    Any,
}

impl TryFrom<u32> for Order {
    type Error = Code;

    fn try_from(order: u32) -> Outcome<Order> {
        Ok(match order {
            1 => Order::Stream,
            2 => Order::DuringCall,
            3 => Order::Any,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

/// A copy of a batch.
struct Copy {
    transfer: Transfer,
    order: Order,
}

/// Why a batch is refused, and which of its copies is the reason, if one is.
struct Refusal {
    code: Code,
    index: Option<usize>,
}

impl From<Code> for Refusal {
    fn from(code: Code) -> Refusal {
        Refusal { code, index: None }
    }
}

type Copies = Result<Vec<Copy>, Refusal>;

/// The copies that `one` describes, each by its number.
fn each(count: usize, one: impl Fn(usize) -> Outcome<Copy>) -> Copies {
    let copy = |index| {
        let copy = one(index).and_then(|copy| copy::check(&copy.transfer).map(|()| copy));
        copy.map_err(|code| Refusal { code, index: Some(index) })
    };
    (0..count).map(copy).collect()
}

impl Attributes {
    fn order(&self) -> Outcome<Order> {
        for hint in [self.from, self.to].iter().filter(|hint| hint.kind != NOWHERE) {
            managed::check(*hint).map_err(|_| Code::INVALID_VALUE)?;
        }
        if self.flags & !OVERLAP != 0 {
            return Err(Code::INVALID_VALUE);
        }
        self.order.try_into()
    }
}

/// Attributes, and from which copy on each of them holds.
struct Groups {
    attributes: In<Attributes>,
    starts: In<usize>,
    count: usize,
}

impl Groups {
    /// The order of each of so many copies.
    fn orders(&self, copies: usize) -> Outcome<Vec<Order>> {
        if self.count == 0 || self.count > copies || self.starts.at(0)? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mut orders = Vec::with_capacity(copies);
        for group in 0..self.count {
            let last = group + 1 == self.count;
            let end = if last { copies } else { self.starts.at(group + 1)? };
            if end <= self.starts.at(group)? || end > copies {
                return Err(Code::INVALID_VALUE);
            }
            orders.resize(end, self.attributes.at(group)?.order()?);
        }
        Ok(orders)
    }
}

/// Copies between pointers.
fn lines(to: &In<u64>, from: &In<u64>, sizes: &In<usize>, count: usize, groups: &Groups) -> Copies {
    let orders = groups.orders(count)?;
    each(count, |index| {
        let size = sizes.at(index)?;
        let transfer = Transfer::linear(to.at(index)?, from.at(index)?, size);
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Copy { transfer, order: orders[index] })
    })
}

impl Operand {
    /// Bytes of an element, which only arrays know.
    fn element(&self) -> Outcome<Option<usize>> {
        match self.kind {
            POINTER => Ok(None),
            ARRAY => {
                let element = arrays::by_handle(self.words[0])?.descriptor.element()?;
                Ok(Some(element as usize))
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }

    /// Address, bytes from row to row, and bytes from plane to plane.
    fn place(&self, extent: [usize; 3], element: usize) -> Outcome<(u64, u64, u64)> {
        let bytes = |count: usize| count.checked_mul(element).ok_or(Code::INVALID_VALUE);
        let [width, height, depth] = extent;
        let words = self.words.map(|word| word as usize);
        if self.kind == ARRAY {
            let [_, x, y, z] = words;
            let array = arrays::by_handle(self.words[0])?;
            let part = array.part([bytes(x)?, y, z], [bytes(width)?, height, depth])?;
            return Ok((part.address, part.pitch, part.plane));
        }
        // Without lengths the box is dense.
        let [_, row, layer, _] = words;
        let row = if row == 0 { width } else { row };
        let layer = if layer == 0 { height } else { layer };
        if row < width || layer < height {
            return Err(Code::INVALID_VALUE);
        }
        let pitch = bytes(row)?;
        let plane = pitch.checked_mul(layer).ok_or(Code::INVALID_VALUE)?;
        Ok((self.words[0], pitch as u64, plane as u64))
    }
}

impl BoxCopy {
    fn copy(&self) -> Outcome<Copy> {
        let order = self.order.try_into()?;
        if self.flags & !OVERLAP != 0 || self.extent.contains(&0) {
            return Err(Code::INVALID_VALUE);
        }
        let element = match (self.from.element()?, self.to.element()?) {
            (Some(one), Some(other)) if one != other => return Err(Code::INVALID_VALUE),
            (Some(element), _) | (None, Some(element)) => element,
            (None, None) => 1,
        };
        let (from, from_pitch, from_plane) = self.from.place(self.extent, element)?;
        let (to, to_pitch, to_plane) = self.to.place(self.extent, element)?;
        let [width, height, depth] = self.extent;
        let width = width.checked_mul(element).ok_or(Code::INVALID_VALUE)?;
        let transfer =
            Transfer { to, from, width, height, depth, to_pitch, from_pitch, to_plane, from_plane };
        Ok(Copy { transfer, order })
    }
}

/// Copies of boxes.
fn boxes(given: &In<BoxCopy>, count: usize, flags: u64) -> Copies {
    if flags != 0 || count == 0 {
        return Err(Code::INVALID_VALUE.into());
    }
    each(count, |index| given.at(index)?.copy())
}

impl Copy {
    /// Whether the call must not return before the copy is done. A small source of plain host memory
    /// may be read at once instead, if the order allows: `staged` keeps what was read.
    fn must_be_over(&mut self, staged: &mut Vec<Vec<u8>>) -> bool {
        let transfer = &mut self.transfer;
        let direction = copy_engine::direction(transfer.to, transfer.from);
        let to_program = direction == Direction::DeviceToHost && is_pageable(transfer.to);
        let pageable = is_pageable(transfer.from);
        let one_row = transfer.height == 1 && transfer.depth == 1;
        if pageable && one_row && transfer.width <= STAGED && self.order != Order::Stream {
            // SAFETY: the caller of the API promises the source; its size was checked to be sane.
            let bytes = unsafe { read_bytes(transfer.from as *const u8, transfer.width) };
            transfer.from = bytes.as_ptr() as u64;
            staged.push(bytes);
            return to_program;
        }
        to_program
            || match self.order {
                // What the program may change after the call must have been read by then.
                Order::Stream => pageable,
                Order::DuringCall => true,
                Order::Any => false,
            }
    }
}

fn submit(mode: DefaultStream, stream: u64, plan: impl FnOnce() -> Copies) -> Result<(), Refusal> {
    let (stream, context) = stream_and_context(stream, mode)?;
    if context.is_legacy(&stream) {
        return Err(Code::INVALID_VALUE.into());
    }
    // Batches cannot be captured, but the capture goes on.
    if capture::info(&stream).is_some() {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED.into());
    }
    let mut copies = plan()?;
    let mut staged = Vec::new();
    let mut wait = false;
    for copy in &mut copies {
        wait |= copy.must_be_over(&mut staged);
    }
    let owner = context.clone();
    let position = context.submit(&stream, Vec::new(), move || {
        copies.iter().for_each(|copy| Operation::Copy(copy.transfer).run(&owner));
        drop(staged);
    })?;
    if wait {
        position.wait();
        context.check()?;
    }
    Ok(())
}

/// Tells which copy was at fault; `SIZE_MAX` if none was.
fn answer(outcome: Result<(), Refusal>, failed: &Out<usize>) -> Outcome {
    let index = outcome.as_ref().err().and_then(|refusal| refusal.index);
    failed.set_if_wanted(index.unwrap_or(usize::MAX));
    outcome.map_err(|refusal| refusal.code)
}

driver_api! {
    stream(mode) fn cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(
        to: In<u64>, from: In<u64>, sizes: In<usize>, copies: usize, attributes: In<Attributes>,
        starts: In<usize>, count: usize, failed: Out<usize>, stream: u64,
    ) {
        let groups = Groups { attributes, starts, count };
        answer(submit(mode, stream, || lines(&to, &from, &sizes, copies, &groups)), &failed)
    }

    stream(mode) fn cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(
        to: In<u64>, from: In<u64>, sizes: In<usize>, copies: usize, attributes: In<Attributes>,
        starts: In<usize>, count: usize, stream: u64,
    ) {
        let groups = Groups { attributes, starts, count };
        let outcome = submit(mode, stream, || lines(&to, &from, &sizes, copies, &groups));
        answer(outcome, &Out::at_address(0))
    }

    stream(mode) fn cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz(
        to: u64, from: u64, size: usize, attributes: In<Attributes>, stream: u64,
    ) {
        settings().driver.since(13_020)?;
        let one = |_| {
            let order = attributes.get()?.order()?;
            Ok(Copy { transfer: Transfer::linear(to, from, size), order })
        };
        answer(submit(mode, stream, || each(1, one)), &Out::at_address(0))
    }

    stream(mode) fn cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz(
        count: usize, given: In<BoxCopy>, failed: Out<usize>, flags: u64, stream: u64,
    ) {
        answer(submit(mode, stream, || boxes(&given, count, flags)), &failed)
    }

    stream(mode) fn cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz(
        count: usize, given: In<BoxCopy>, flags: u64, stream: u64,
    ) {
        answer(submit(mode, stream, || boxes(&given, count, flags)), &Out::at_address(0))
    }
}
