//! What reads bytes that anybody may have made. The fuzz targets in `fuzz/` of the repository call
//! these, and so does `tests/hostile.rs` with a kept corpus. No part of the library's interface.
//!
//! Each must come back whatever it is given, without a panic.

use crate::fatbin;
use crate::modules;
use crate::ptx;
use crate::settings::settings;

/// Names of the targets.
pub const TARGETS: [&str; 2] = ["ptx", "fatbin"];

/// Gives `bytes` to the reader of this name.
///
/// # Panics
/// If a reader has a fault, or there is none of this name.
pub fn feed(target: &str, bytes: &[u8]) {
    match target {
        "ptx" => ptx(&String::from_utf8_lossy(bytes)),
        "fatbin" => fatbin(bytes),
        _ => panic!("there is no target {target}"),
    }
}

/// As a module, and as two pieces that are linked, cut in the middle.
fn ptx(text: &str) {
    let loaded = ptx::Module::load(text);
    if let Err(diagnostic) = &loaded {
        // What a program finds in its error log.
        let _ = diagnostic.to_string();
    }
    let middle = (text.len() / 2..text.len()).find(|at| text.is_char_boundary(*at));
    let (first, second) = text.split_at(middle.unwrap_or(text.len()));
    let _ = ptx::link(&[first, second], None);
    // What loads must load again when it was linked.
    if loaded.is_ok()
        && let Ok(linked) = ptx::link(&[text], Some(32))
    {
        let _ = ptx::Module::load(&linked);
    }
}

/// As an image of a module: a container, device code or text.
fn fatbin(bytes: &[u8]) {
    if let Some(header) = bytes.get(..fatbin::HEADER) {
        let _ = fatbin::size(header);
    }
    let _ = modules::parse(bytes, settings().model(0));
    for capability in [0, 80, 90, u32::MAX] {
        let _ = fatbin::ptx(bytes, capability);
    }
}
