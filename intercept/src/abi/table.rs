//! The driver's functions by name and number, as `driver.table` lists them.

use std::ffi::CStr;

/// Position of a function in the table, and what is put in its place.
#[derive(Clone, Copy)]
pub(crate) struct Wrapper(pub(crate) usize, pub(crate) *const ());

// SAFETY: the pointer is the address of a function.
unsafe impl Send for Wrapper {}
// SAFETY: the pointer is the address of a function.
unsafe impl Sync for Wrapper {}

include!(concat!(env!("OUT_DIR"), "/names.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_complete() {
        assert_eq!(COUNT, 733);
        assert!(NAMES.windows(2).all(|pair| pair[0] < pair[1]), "sorted, no name twice");
        assert_eq!(NAMES[index::cuInit], c"cuInit");
    }
}
