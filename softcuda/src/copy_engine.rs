//! Copies and fills of memory, executed in stream order. One engine for each direction between
//! host and device, with an optional rate (`SOFTCUDA_PCIE_GBPS`), so that transfers in the same
//! direction share it and transfers in different directions, and kernels, overlap.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::address_space;
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::twice;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From host to device.
    HostToDevice,
    /// From device to host.
    DeviceToHost,
    /// Within one side.
    Local,
}

/// Pieces in which a limited copy is made: about 0.1 ms at 10 GB/s.
const PIECE: usize = 1 << 20;

struct Engine {
    free_at: Option<Instant>,
}

static TO_DEVICE: Mutex<Engine> = Mutex::new(Engine { free_at: None });
static TO_HOST: Mutex<Engine> = Mutex::new(Engine { free_at: None });

impl Engine {
    /// Occupies the engine for `size` bytes; gives the time at which they are through.
    fn occupy(&mut self, size: usize, rate: f64) -> Instant {
        let begin = self.free_at.map_or_else(Instant::now, |free| free.max(Instant::now()));
        let end = begin + Duration::from_secs_f64(size as f64 / rate);
        self.free_at = Some(end);
        end
    }
}

/// The direction of a copy between two addresses.
pub(crate) fn direction(to: u64, from: u64) -> Direction {
    match (address_space::in_window(to), address_space::in_window(from)) {
        (true, false) => Direction::HostToDevice,
        (false, true) => Direction::DeviceToHost,
        _ => Direction::Local,
    }
}

/// Checks that device addresses may be written to and read; host addresses are the program's
/// business.
///
/// # Errors
/// `ILLEGAL_ADDRESS` for a device address with nothing behind it, or to write to read-only memory.
fn check_ranges(to: u64, from: u64, size: u64) -> Outcome {
    let refused = address_space::in_window(to) && !address_space::is_writable(to, size)
        || address_space::in_window(from) && !address_space::is_accessible(from, size);
    if refused { Err(Code::ILLEGAL_ADDRESS) } else { Ok(()) }
}

/// Copies rows of bytes. Checks device addresses first.
///
/// # Errors
/// `ILLEGAL_ADDRESS`; nothing of the failing row is copied then.
pub(crate) fn copy(transfer: &Transfer) -> Outcome {
    let direction = direction(transfer.to, transfer.from);
    let engine = match direction {
        Direction::HostToDevice => Some(&TO_DEVICE),
        Direction::DeviceToHost => Some(&TO_HOST),
        Direction::Local => None,
    };
    let limit = engine.zip(settings().copy_rate);
    let _alone = twice::alone();
    for plane in 0..transfer.depth as u64 {
        for row in 0..transfer.height as u64 {
            let to = transfer.to + plane * transfer.to_plane + row * transfer.to_pitch;
            let from = transfer.from + plane * transfer.from_plane + row * transfer.from_pitch;
            copy_row(to, from, transfer.width, limit)?;
        }
    }
    Ok(())
}

fn copy_row(to: u64, from: u64, size: usize, limit: Option<(&Mutex<Engine>, f64)>) -> Outcome {
    check_ranges(to, from, size as u64)?;
    let mut done = 0;
    while done < size {
        let piece = if limit.is_some() { PIECE.min(size - done) } else { size - done };
        let end = limit.map(|(engine, rate)| engine.lock().occupy(piece, rate));
        // SAFETY: device addresses were checked just now, host addresses are the caller's promise
        // under the API's contract; `copy` allows overlap. Races with kernels are the program's
        // own, as on a device, and raw pointers keep them out of Rust's references.
        unsafe {
            std::ptr::copy(
                (from as usize + done) as *const u8,
                (to as usize + done) as *mut u8,
                piece,
            );
        }
        done += piece;
        if let Some(end) = end {
            std::thread::sleep(end.saturating_duration_since(Instant::now()));
        }
    }
    Ok(())
}

/// A copy of up to three dimensions. One-dimensional copies have height and depth 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    /// Where to.
    pub(crate) to: u64,
    /// Where from.
    pub(crate) from: u64,
    /// Bytes in a row.
    pub(crate) width: usize,
    /// Rows in a plane.
    pub(crate) height: usize,
    /// Planes.
    pub(crate) depth: usize,
    /// Bytes from row to row at the destination.
    pub(crate) to_pitch: u64,
    /// Bytes from row to row at the source.
    pub(crate) from_pitch: u64,
    /// Bytes from plane to plane at the destination.
    pub(crate) to_plane: u64,
    /// Bytes from plane to plane at the source.
    pub(crate) from_plane: u64,
}

impl Transfer {
    /// A copy of `size` consecutive bytes.
    pub(crate) fn linear(to: u64, from: u64, size: usize) -> Transfer {
        Transfer {
            to,
            from,
            width: size,
            height: 1,
            depth: 1,
            to_pitch: 0,
            from_pitch: 0,
            to_plane: 0,
            from_plane: 0,
        }
    }

    /// Whether there is nothing to copy.
    pub(crate) fn is_empty(&self) -> bool {
        self.width == 0 || self.height == 0 || self.depth == 0
    }

    /// Whether a part of what is written is read-only memory. No row may lie beyond the last address.
    pub(crate) fn writes_read_only(&self) -> bool {
        let end = (self.height as u64 - 1) * self.to_pitch
            + (self.depth as u64 - 1) * self.to_plane
            + self.width as u64;
        // Between the rows lies what is not written.
        address_space::any_read_only(self.to, end)
            && (0..self.depth as u64).any(|plane| {
                (0..self.height as u64).any(|row| {
                    let to = self.to + plane * self.to_plane + row * self.to_pitch;
                    address_space::any_read_only(to, self.width as u64)
                })
            })
    }
}

/// A fill of rows with a value of one, two or four bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fill {
    /// First address, a multiple of the value's size.
    pub(crate) to: u64,
    /// Bytes from row to row.
    pub(crate) pitch: u64,
    /// The value, in its low bytes.
    pub(crate) value: u32,
    /// Size of the value in bytes.
    pub(crate) value_size: usize,
    /// Values in a row.
    pub(crate) width: usize,
    /// Rows.
    pub(crate) height: usize,
}

impl Fill {
    /// Whether a part of what is written is read-only memory. No row may lie beyond the last address.
    pub(crate) fn writes_read_only(&self) -> bool {
        let row_size = (self.width * self.value_size) as u64;
        (0..self.height as u64)
            .any(|row| address_space::any_read_only(self.to + row * self.pitch, row_size))
    }
}

/// Fills memory.
///
/// # Errors
/// `ILLEGAL_ADDRESS` for memory that the device may not write to.
pub(crate) fn fill(fill: &Fill) -> Outcome {
    let _alone = twice::alone();
    for row in 0..fill.height as u64 {
        let to = fill.to + row * fill.pitch;
        let size = fill.width * fill.value_size;
        if !address_space::is_writable(to, size as u64) {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        // SAFETY: the range was found writable just now and the address is a multiple of the
        // value's size (checked by the caller); no Rust reference points to device memory.
        unsafe {
            match fill.value_size {
                1 => std::ptr::write_bytes(to as *mut u8, fill.value as u8, fill.width),
                2 => std::slice::from_raw_parts_mut(to as *mut u16, fill.width)
                    .fill(fill.value as u16),
                _ => std::slice::from_raw_parts_mut(to as *mut u32, fill.width).fill(fill.value),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_spreads_transfers_over_time() {
        let mut engine = Engine { free_at: None };
        let begin = Instant::now();
        engine.occupy(1_000_000, 1e9);
        let end = engine.occupy(1_000_000, 1e9);
        let took = end - begin;
        assert!(took >= Duration::from_millis(2) && took < Duration::from_millis(100), "{took:?}");
    }

    #[test]
    fn planes_and_rows() {
        let from: Vec<u8> = (0..64).collect();
        let mut to = vec![0u8; 24];
        let transfer = Transfer {
            to: to.as_mut_ptr() as u64,
            from: from.as_ptr() as u64,
            width: 3,
            height: 2,
            depth: 2,
            to_pitch: 4,
            from_pitch: 8,
            to_plane: 12,
            from_plane: 32,
        };
        copy(&transfer).unwrap();
        assert_eq!(to[..12], [0, 1, 2, 0, 8, 9, 10, 0, 0, 0, 0, 0]);
        assert_eq!(to[12..], [32, 33, 34, 0, 40, 41, 42, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn unmapped_device_memory_is_refused() {
        let byte = 0u8;
        let transfer = Transfer::linear(0x20ff_0000_0000, (&raw const byte) as u64, 1);
        assert_eq!(copy(&transfer), Err(Code::ILLEGAL_ADDRESS));
    }
}
