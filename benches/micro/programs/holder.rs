//! A program that holds device memory and does little else: what a dump is measured on.
//!
//! `holder BYTES END WRITTEN` allocates, fills the memory with a mixture of weights, zeros and repeated
//! data, and prints `ready`. From then on it reads a part of it back every 5 ms, compares, and
//! prints `step N`; each step also changes a part of WRITTEN bytes more. Once the file END exists it
//! compares everything, prints `result ok`, and ends.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_benches::data::{PIECE, fill_piece};
use libloading::Library;

type Init = unsafe extern "C" fn(u32) -> c_int;
type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type SetCurrent = unsafe extern "C" fn(usize) -> c_int;
type Alloc = unsafe extern "C" fn(*mut u64, usize) -> c_int;
type CopyIn = unsafe extern "C" fn(u64, *const c_void, usize) -> c_int;
type CopyOut = unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int;

/// Bytes of one allocation, a multiple of the pieces.
const ALLOCATION: usize = 64 * PIECE;
/// Bytes that one step compares.
const STEP: usize = 64 << 10;

struct Memory {
    copy_in: CopyIn,
    copy_out: CopyOut,
    /// Addresses and lengths.
    allocations: Vec<(u64, usize)>,
    /// Memory that changes, and what is in it.
    written: Option<(u64, Vec<u8>)>,
}

fn check(call: &str, code: c_int) -> Result<()> {
    ensure!(code == 0, "{call} failed with {code}");
    Ok(())
}

impl Memory {
    fn make(bytes: usize, written: usize) -> Result<Self> {
        // SAFETY: loading a driver is what any program of its API does.
        let library = unsafe { Library::new("libcuda.so.1") }.context("no CUDA driver")?;
        let library: &'static Library = Box::leak(Box::new(library));
        // SAFETY: the types are those of cuda.h, and the library is never closed.
        let (init, retain, set_current, alloc, copy_in, copy_out) = unsafe {
            (
                *library.get::<Init>(b"cuInit\0")?,
                *library.get::<Retain>(b"cuDevicePrimaryCtxRetain\0")?,
                *library.get::<SetCurrent>(b"cuCtxSetCurrent\0")?,
                *library.get::<Alloc>(b"cuMemAlloc_v2\0")?,
                *library.get::<CopyIn>(b"cuMemcpyHtoD_v2\0")?,
                *library.get::<CopyOut>(b"cuMemcpyDtoH_v2\0")?,
            )
        };
        let mut context = 0;
        // SAFETY: plain calls; the places for results are valid.
        unsafe {
            check("cuInit", init(0))?;
            check("cuDevicePrimaryCtxRetain", retain(&raw mut context, 0))?;
            check("cuCtxSetCurrent", set_current(context))?;
        }
        let (mut allocations, mut piece, mut number) = (Vec::new(), vec![0u8; PIECE], 0);
        for offset in (0..bytes).step_by(ALLOCATION) {
            let (len, mut address) = (ALLOCATION.min(bytes - offset), 0);
            // SAFETY: the place for the address is valid.
            check("cuMemAlloc", unsafe { alloc(&raw mut address, len) })?;
            for start in (0..len).step_by(PIECE) {
                fill_piece(&mut piece, number);
                number += 1;
                let part = PIECE.min(len - start);
                // SAFETY: `part` bytes lie in the piece and in the allocation.
                let code = unsafe { copy_in(address + start as u64, piece.as_ptr().cast(), part) };
                check("cuMemcpyHtoD", code)?;
            }
            allocations.push((address, len));
        }
        let mut written = (written > 0).then(|| (0, vec![0u8; written]));
        if let Some((address, host)) = &mut written {
            // SAFETY: the place for the address is valid; the bytes lie in host memory and allocation.
            unsafe {
                check("cuMemAlloc", alloc(address, host.len()))?;
                check("cuMemcpyHtoD", copy_in(*address, host.as_ptr().cast(), host.len()))?;
            }
        }
        Ok(Self { copy_in, copy_out, allocations, written })
    }

    /// Changes some of the bytes that change.
    fn write(&mut self, step: usize) -> Result<()> {
        let Some((address, host)) = &mut self.written else { return Ok(()) };
        let len = STEP.min(host.len());
        let start = step * STEP % (host.len() - len + 1);
        host[start..][..len].fill(step as u8);
        let to = *address + start as u64;
        // SAFETY: `len` bytes lie in host memory and in the allocation.
        check("cuMemcpyHtoD", unsafe { (self.copy_in)(to, host[start..].as_ptr().cast(), len) })
    }

    /// Compares the bytes that change.
    fn compare_written(&self) -> Result<()> {
        let Some((address, host)) = &self.written else { return Ok(()) };
        let mut found = vec![0u8; host.len()];
        // SAFETY: all bytes lie in the buffer and in the allocation.
        let code = unsafe { (self.copy_out)(found.as_mut_ptr().cast(), *address, found.len()) };
        check("cuMemcpyDtoH", code)?;
        ensure!(found == *host, "what was written has changed");
        Ok(())
    }

    /// Compares `len` bytes from the start of a piece with what they must be.
    fn compare(&self, number: usize, len: usize) -> Result<()> {
        let per = ALLOCATION / PIECE;
        let (address, size) = self.allocations[number / per];
        let start = number % per * PIECE;
        let len = len.min(size - start);
        let (mut found, mut wanted) = (vec![1u8; len], vec![0u8; len]);
        fill_piece(&mut wanted, number as u64);
        // SAFETY: `len` bytes lie in the buffer and in the allocation.
        let code =
            unsafe { (self.copy_out)(found.as_mut_ptr().cast(), address + start as u64, len) };
        check("cuMemcpyDtoH", code)?;
        ensure!(found == wanted, "piece {number} has changed");
        Ok(())
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let bytes = args.next().and_then(|arg| arg.to_str()?.parse::<usize>().ok());
    let bytes = bytes.filter(|&bytes| bytes > 0).context("usage: holder BYTES END WRITTEN")?;
    let end = PathBuf::from(args.next().context("usage: holder BYTES END WRITTEN")?);
    let written = args.next().and_then(|arg| arg.to_str()?.parse().ok());
    let mut memory = Memory::make(bytes, written.context("usage: holder BYTES END WRITTEN")?)?;
    let pieces = bytes.div_ceil(PIECE);
    println!("ready");
    for step in 0.. {
        memory.compare(step % pieces, STEP)?;
        memory.write(step)?;
        println!("step {step}");
        if end.exists() {
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    for number in 0..pieces {
        memory.compare(number, PIECE)?;
    }
    memory.compare_written()?;
    println!("result ok");
    Ok(())
}
