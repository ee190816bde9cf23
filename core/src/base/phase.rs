//! The phases of a dump or a restore: their names, and what is done in them.

use std::fmt;

use serde::{Serialize, Serializer};

/// A part of a dump, of a restore, or of the making of a warm image. Which follow each other is told by
/// `engine/dump`, `engine/restore` and `engine/warm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Nothing has begun.
    Start,
    /// What the host, the programs or the image lack is found before anything is touched.
    Preflight,
    /// Connections to the agents.
    Attach,
    /// Memory is copied while the program runs.
    Precopy,
    /// No call of the programs goes to the driver any more.
    Gate,
    /// The programs hand over what keeps their memory.
    Export,
    /// Memory is compared with what was copied.
    Validate,
    /// What is still to be saved is copied aside within the devices.
    Shadow,
    /// What is left is copied.
    Copy,
    /// The programs lose their memory, which lives on.
    Detach,
    /// The driver moves the rest of the CUDA state into host memory.
    Checkpoint,
    /// CRIU saves or makes the processes.
    Criu,
    /// CRIU's files become part of the image.
    Store,
    /// The image appears.
    Commit,
    /// The programs go on.
    Resume,
    /// Memory was written before it was saved: the program is stopped again.
    Fallback,
    /// Memory of the image goes to the devices, or into the memory of the host.
    Load,
    /// CRIU's files are written for CRIU.
    Extract,
    /// The driver restores the rest of the CUDA state.
    Driver,
    /// Memory comes while the program runs.
    Stream,
    /// A process takes over what is kept.
    Hold,
    /// The program runs and shares memory with other instances.
    Share,
    /// Of a migration: whether the program can go on at the destination.
    Offer,
    /// The destination takes chunks.
    Receive,
    /// The destination completes the image.
    Prepare,
    /// The program changes hands.
    Decide,
    /// The source has none of the program any more, and the destination restores it.
    Handover,
}

impl Phase {
    const ALL: [Self; 27] = [
        Self::Start,
        Self::Preflight,
        Self::Attach,
        Self::Precopy,
        Self::Gate,
        Self::Export,
        Self::Validate,
        Self::Shadow,
        Self::Copy,
        Self::Detach,
        Self::Checkpoint,
        Self::Criu,
        Self::Store,
        Self::Commit,
        Self::Resume,
        Self::Fallback,
        Self::Load,
        Self::Extract,
        Self::Driver,
        Self::Stream,
        Self::Hold,
        Self::Share,
        Self::Offer,
        Self::Receive,
        Self::Prepare,
        Self::Decide,
        Self::Handover,
    ];

    /// The phase's name as it is shown, and given in `GPUCR_FAULT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Preflight => "preflight",
            Self::Attach => "attach",
            Self::Precopy => "precopy",
            Self::Gate => "gate",
            Self::Export => "export",
            Self::Validate => "validate",
            Self::Shadow => "shadow",
            Self::Copy => "copy",
            Self::Detach => "detach",
            Self::Checkpoint => "checkpoint",
            Self::Criu => "criu",
            Self::Store => "store",
            Self::Commit => "commit",
            Self::Resume => "resume",
            Self::Fallback => "fallback",
            Self::Load => "load",
            Self::Extract => "extract",
            Self::Driver => "driver",
            Self::Stream => "stream",
            Self::Hold => "hold",
            Self::Share => "share",
            Self::Offer => "offer",
            Self::Receive => "receive",
            Self::Prepare => "prepare",
            Self::Decide => "decide",
            Self::Handover => "handover",
        }
    }

    /// The phase of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }

    /// What gpucr does in the phase, for somebody who has not read the design.
    pub fn explanation(self) -> &'static str {
        match self {
            Self::Start => "Nothing has begun.",
            Self::Preflight => {
                "gpucr looks for what would prevent the work, before it touches anything."
            }
            Self::Attach => "gpucr connects to the devices, and starts CRIU.",
            Self::Precopy => "Memory is copied while the program runs.",
            Self::Gate => {
                "The program is kept from giving the devices new work, and they finish what they have."
            }
            Self::Export => "The program hands gpucr its device memory.",
            Self::Validate => "Device memory is compared with what was copied.",
            Self::Shadow => "What is still to be copied is set aside on the devices.",
            Self::Copy => "Device memory that is still to be copied is copied.",
            Self::Detach => "The program lets go of its device memory, which gpucr keeps.",
            Self::Checkpoint => "The driver saves the rest of the CUDA state into host memory.",
            Self::Criu => {
                "CRIU freezes the processes and saves them; in a restore it makes them anew."
            }
            Self::Store => "CRIU's files and host memory go into the image.",
            Self::Commit => "The image is completed; until then there is none.",
            Self::Resume => "The program gets its device memory back and continues.",
            Self::Fallback => {
                "The program wrote memory that was not yet saved, so it is stopped again."
            }
            Self::Load => "Memory of the image goes to the devices.",
            Self::Extract => "CRIU's files are taken out of the image.",
            Self::Driver => "The driver restores the rest of the CUDA state.",
            Self::Stream => "Memory is loaded while the program runs.",
            Self::Hold => "A process takes over the loaded memory and keeps it.",
            Self::Share => "The program shares unchanged memory with other instances.",
            Self::Offer => "The destination says whether the program can run there.",
            Self::Receive => "The destination receives memory.",
            Self::Prepare => "The destination completes the image.",
            Self::Decide => {
                "Source and destination agree that the program now belongs to the destination."
            }
            Self::Handover => {
                "The source ends its copy of the program, and the destination restores it."
            }
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Phase {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// How long one phase took.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PhaseTime {
    /// The phase.
    pub name: &'static str,
    /// Milliseconds.
    pub ms: f64,
}
