//! Ways by which work gets to the devices past the gate: as long as a program has one, its memory must not be
//! taken away from it.

use std::path::PathBuf;

use crate::abi::library;
use crate::state::memory::Failure;
use crate::unknown;

/// Why a closed gate does not hold all of the program's work, each in words.
pub(crate) fn reasons() -> Vec<String> {
    let called = |name| format!("it has called {name}, which this gpucr does not know");
    let mut reasons: Vec<String> = unknown::called().map(called).collect();
    if let Some(library) = library::library().filter(|library| library.was_open) {
        let path = library.path.display();
        reasons.push(format!("it has opened {path} past gpucr, before it first called the driver"));
    }
    let opened = |path: PathBuf| format!("it has opened {} past gpucr", path.display());
    reasons.extend(library::others().into_iter().map(opened));
    reasons
}

/// Asked once the gate is closed.
///
/// # Errors
/// It does not hold all work.
pub(crate) fn check() -> Result<(), Failure> {
    match reasons().first() {
        None => Ok(()),
        Some(reason) => Err(Failure::other(format!("a closed gate does not stop it: {reason}"))),
    }
}
