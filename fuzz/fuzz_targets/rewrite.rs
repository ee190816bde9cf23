#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| gpucr_fuzz::feed("rewrite", bytes));
