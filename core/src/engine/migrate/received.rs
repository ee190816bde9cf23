//! What a destination tells of a program that has come, or has not.

use std::path::PathBuf;

use super::message::Step;
use super::record::MigrationId;
use crate::base::phase::{Phase, PhaseTime};
use crate::engine::error::Error;

/// A program that has come, or could come.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Received {
    /// The migration's name.
    pub migration: String,
    /// The program's pid; none if it was only asked whether it could come.
    pub pid: Option<u32>,
    /// Its image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Identity of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Chunks that came.
    pub chunks: u64,
    /// Files of the program that were made here.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// Outputs of the program, `stdout` and `stderr`, that were pipes and go nowhere now.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<String>,
    /// Bytes that were written for the image.
    pub new_bytes: u64,
    /// Bytes of the program's device memory that were on the device before the image was complete.
    pub ahead_bytes: u64,
    /// From the offer to its end.
    pub total_ms: f64,
    /// The phases.
    pub phases: Vec<PhaseTime>,
}

/// What is left after a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Remains {
    /// Nothing. The program is the source's.
    Nothing,
    /// A complete image, and it is not known whether the source has handed the program over.
    InDoubt(MigrationId, PathBuf),
    /// A complete image, and the program is this side's. It does not run.
    Parked(MigrationId, PathBuf),
}

/// A migration that has failed on the destination's side.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct ReceiveFailure {
    /// In which phase.
    pub phase: Phase,
    /// What happened.
    #[source]
    pub error: Box<Error>,
    /// What holds now.
    pub remains: Remains,
}

/// Phases, with their milliseconds, the last of which has just ended, one after the other.
pub(super) fn steps(restores: bool, phases: Vec<(String, f64)>) -> Vec<Step> {
    let micros = |ms: f64| (ms * 1000.0) as u64;
    let mut ago = phases.iter().map(|(_, ms)| micros(*ms)).sum();
    let step = |(name, ms): (String, f64)| {
        let step = Step { name, restores, ago, length: micros(ms) };
        ago -= step.length;
        step
    };
    phases.into_iter().map(step).collect()
}
