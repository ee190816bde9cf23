//! By which the runtime finds out whether a driver is one that it can work with: it gives a number and the time, and
//! expects a digest of these, of the process, the tables and the devices, which it computes as well.
//!
//! As ZLUDA has published it, the digest is an HMAC (RFC 2104) with the hash function MD2 (RFC 1319) under a fixed key.

use std::sync::OnceLock;

use super::slots::called;
use crate::api::arguments::Out;
use crate::api::device::{pci_place, uuid};
use crate::md2;
use crate::settings::settings;
use crate::status::Code;

/// The key of the digest.
const KEY: [u8; 16] = [
    0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52, 0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f,
];
/// What is expected when the number ends in 0, and in 1, whatever the rest.
const FIXED: [[u64; 2]; 2] = [
    [0x3341_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
    [0x1841_181c_03cb_675c, 0x8ed3_83aa_1f4c_d1e8],
];

/// What the digest is of besides.
#[derive(Clone, Copy)]
pub(super) struct DriverFacts {
    /// As `cuDriverGetVersion` gives it.
    pub(super) driver_version: i32,
    /// Of the table by which the runtime loads modules, of the table of the function here, and of this function.
    pub(super) addresses: [u64; 3],
}

static KNOWN: OnceLock<DriverFacts> = OnceLock::new();

/// Keeps what the digest is of.
pub(super) fn know(known: DriverFacts) {
    KNOWN.get_or_init(|| known);
}

/// What the digest is of.
fn message(known: &DriverFacts, version: u32, seconds: u64) -> Vec<u8> {
    // SAFETY: the function takes nothing and cannot fail.
    let thread = unsafe { libc::pthread_self() } as u32;
    let mut message = Vec::new();
    for word in [known.driver_version as u32, version, std::process::id(), thread] {
        message.extend_from_slice(&word.to_le_bytes());
    }
    for long in known.addresses.into_iter().chain([seconds]) {
        message.extend_from_slice(&long.to_le_bytes());
    }
    for ordinal in 0..settings().devices {
        message.extend_from_slice(&uuid(ordinal));
        for number in pci_place(ordinal) {
            message.extend_from_slice(&number.to_le_bytes());
        }
    }
    message
}

/// The digest for a number and a time.
fn digest(known: &DriverFacts, version: u32, seconds: u64) -> [u64; 2] {
    if let Some(fixed) = FIXED.get(version as usize % 10) {
        return *fixed;
    }
    let digest = md2::hmac(&KEY, &message(known, version, seconds));
    [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|index| digest[at + index])))
}

/// Gives the digest.
pub(super) extern "C" fn integrity(version: u32, seconds: u64, out: Out<[u64; 2]>) -> u32 {
    called("integrity", || {
        let known = KNOWN.get().ok_or(Code::NOT_INITIALIZED)?;
        out.set(digest(known, version, seconds))
    })
}
