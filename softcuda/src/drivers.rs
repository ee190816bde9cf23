//! The drivers that this library can present itself as, by `SOFTCUDA_DRIVER`. What differs between them, and who
//! says so, is in a table of the README.

use crate::status::{Code, Outcome};

/// A release of NVIDIA's driver, the oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Driver {
    /// Driver 580, CUDA 13.0.
    R580,
    /// Driver 590, CUDA 13.1.
    R590,
    /// Driver 610, CUDA 13.3.
    R610,
    /// The driver of CUDA 13.4.
    Cuda13_4,
}

/// The drivers by the names that `SOFTCUDA_DRIVER` knows.
const NAMES: [(&str, Driver); 4] = [
    ("580", Driver::R580),
    ("590", Driver::R590),
    ("610", Driver::R610),
    ("13.4", Driver::Cuda13_4),
];

impl Driver {
    /// The driver of a name.
    ///
    /// # Errors
    /// A sentence with the names that are known.
    pub(crate) fn parse(name: &str) -> Result<Driver, String> {
        let found = NAMES.iter().find(|(known, _)| *known == name.trim());
        found.map(|(_, driver)| *driver).ok_or_else(|| {
            let known = NAMES.map(|(name, _)| name).join(", ");
            format!("SOFTCUDA_DRIVER={name} is no driver that softcuda knows: {known}")
        })
    }

    /// The version of the API, as `cuDriverGetVersion` gives it.
    pub(crate) fn version(self) -> i32 {
        match self {
            Driver::R580 => 13_000,
            Driver::R590 => 13_010,
            Driver::R610 => 13_030,
            Driver::Cuda13_4 => 13_040,
        }
    }

    /// The newest PTX ISA version that the driver compiles: each release of CUDA 13 has brought one with the same
    /// minor number (release notes of the PTX ISA, 9.0 to 9.4).
    pub(crate) fn ptx_version(self) -> (u32, u32) {
        (9, (self.version() % 1000 / 10) as u32)
    }

    /// Whether a process of a job (`CUDA_CHECKPOINT_JOB_FILE`) can be checkpointed with memory that is shared
    /// through IPC handles.
    pub(crate) fn carries_ipc_memory(self) -> bool {
        self >= Driver::R610
    }

    /// Whether a checkpoint can go to storage of the caller's choice.
    pub(crate) fn has_custom_storage(self) -> bool {
        self >= Driver::Cuda13_4
    }

    /// Refuses a function that this driver does not have.
    ///
    /// # Errors
    /// `NOT_FOUND` if the function came with a later version of the API.
    pub(crate) fn since(self, version: i32) -> Outcome {
        if version <= self.version() { Ok(()) } else { Err(Code::NOT_FOUND) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(Driver::parse("590"), Ok(Driver::R590));
        assert_eq!(Driver::parse(" 13.4 "), Ok(Driver::Cuda13_4));
        for name in ["", "13.0", "591", "610.57.04"] {
            let refused = Driver::parse(name).unwrap_err();
            assert!(refused.ends_with("knows: 580, 590, 610, 13.4"), "{refused}");
        }
        assert!(NAMES.is_sorted_by_key(|(_, driver)| driver.version()));
        let newest = NAMES.map(|(_, driver)| driver.ptx_version());
        assert_eq!(newest, [(9, 0), (9, 1), (9, 3), (9, 4)]);
    }
}
