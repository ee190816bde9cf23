//! What reads text that anybody may have made. The fuzz target `rewrite` calls it, and so does `tests/hostile.rs` with a kept
//! corpus. No part of the library's interface.

use crate::rewrite;

/// Rewrites all kernels of a text. `loads` says whether a driver takes a module.
///
/// # Panics
/// A driver takes the text, and not what was made of it.
pub fn feed(text: &str, loads: impl Fn(&str) -> bool) {
    let Ok(rewritten) = rewrite(text, |_| true) else { return };
    let twins = rewritten.kernels.iter().filter(|(_, judged)| judged.is_ok()).count();
    if twins == 0 {
        assert!(rewritten.text == text, "the text has changed");
    } else if loads(text) {
        assert!(loads(&rewritten.text), "a driver does not take\n{}", rewritten.text);
    }
}
