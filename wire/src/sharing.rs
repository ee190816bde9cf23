//! What an image says about memory that instances of it can share.
//!
//! A dump that has watched the program run knows which blocks did not change meanwhile, and which words of
//! its kernels' parameters pointed to nothing else. `gpucr restore --share` maps such blocks read-only, and
//! lets the agent judge launches by the same knowledge. It is a guess: the device stops a program that
//! writes all the same.

use crate::access::KernelSummary;
use crate::codec::Stream;
use crate::wire_struct;

/// Version of [`Sharing`] as it is stored.
pub const SHARING_VERSION: u32 = 1;

wire_struct! {
    /// What can be shared of all processes of an image.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct Sharing {
        /// [`SHARING_VERSION`]; another one tells nothing.
        pub version: u32,
        /// The processes that used CUDA under gpucr.
        pub processes: Vec<ProcessSharing>,
    }
}

wire_struct! {
    /// What can be shared of one process.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct ProcessSharing {
        /// Its pid in the manifest.
        pub pid: u32,
        /// Ids of the blocks that nobody is known to write.
        pub blocks: Vec<u64>,
        /// Kernels, and the words of their parameters through which they are taken only to read.
        pub summaries: Vec<KernelSummary>,
    }
}

impl Stream for Sharing {}
