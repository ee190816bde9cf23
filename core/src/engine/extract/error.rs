//! Why memory cannot be had of an image.

/// So many stretches are written at most.
pub(super) const MAX_STRETCHES: usize = 1 << 22;
/// So many zeros that the image does not hold are written at most, bytes.
pub(super) const MAX_ZEROS: u64 = 1 << 40;

/// Why memory cannot be had of an image.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum ExtractError {
    #[error("the image has no process {pid}; it has {}", list(pids))]
    NoProcess { pid: u32, pids: Vec<u32> },
    #[error("process {pid} has nothing at {address:#x}")]
    Nothing { pid: u32, address: u64, of_driver: bool },
    #[error(
        "process {pid} has only reserved the addresses from {address:#x} on: there is no memory"
    )]
    Kept { pid: u32, address: u64 },
    #[error(
        "the memory of process {pid} at {address:#x} comes from a file and was not changed, so the image does \
        not contain it"
    )]
    OfFile { pid: u32, address: u64 },
    #[error(
        "the memory of process {pid} at {address:#x} belongs to the kernel or a device, and is not saved"
    )]
    OfKernel { pid: u32, address: u64 },
    #[error("the image's file {file:?} {what}")]
    BadFile { file: String, what: &'static str },
    #[error("the range from {address:#x} on goes beyond the last address")]
    Beyond { address: u64 },
    #[error(
        "the range has {} GiB of zeros that are not stored in the image; no more than {} GiB of these are written",
        zeros >> 30, MAX_ZEROS >> 30
    )]
    TooManyZeros { zeros: u64 },
    #[error("the range lies in more than {MAX_STRETCHES} places")]
    TooManyPlaces {},
}

fn list(pids: &[u32]) -> String {
    let shown: Vec<String> = pids.iter().take(10).map(u32::to_string).collect();
    let more = if pids.len() > 10 { ", …" } else { "" };
    format!("{}{more}", shown.join(", "))
}
