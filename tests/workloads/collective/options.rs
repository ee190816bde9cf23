//! How the workloads of several ranks work.

use clap::{Args, ValueEnum};

/// The most ranks; as in `kernels/collective.cu`.
pub(super) const MOST: u32 = 8;

/// What ranks talk over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wire {
    /// TCP on loopback, as NCCL does.
    Tcp,
    /// Unix sockets that the first rank hands down.
    Unix,
}

/// How ranks share memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sharing {
    /// By handles of legacy IPC.
    Ipc,
    /// By exported descriptors.
    Handles,
}

/// The options of a run that say so.
#[derive(Args, Clone, Copy)]
pub(crate) struct Team {
    /// Number of ranks, of the workloads that have them [default: depends on workload]
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=i64::from(MOST)))]
    pub(crate) ranks: Option<u32>,
    /// How ranks share memory
    #[arg(long, value_enum, default_value_t = Sharing::Ipc)]
    pub(crate) sharing: Sharing,
    /// What ranks talk over
    #[arg(long, value_enum, default_value_t = Wire::Unix)]
    pub(crate) wire: Wire,
    /// In which step a rank of `survivors` ends, counted from 0 [default: after nine tenths of them]
    #[arg(long, value_name = "STEP")]
    pub(crate) ends_at: Option<u32>,
}
