//! Tests that say nothing on a machine that lacks something. Other crates include this file by its path.

/// Says that this test is left out, and why. Where `CI` is set that fails it: nothing may be missing there.
#[track_caller]
pub fn skip(reason: &str) {
    let ci = std::env::var_os("CI");
    assert!(may_skip(ci.as_deref()), "left out, although CI is set: {reason}");
    eprintln!("SKIPPED: {reason}");
}

fn may_skip(ci: Option<&std::ffi::OsStr>) -> bool {
    ci.is_none_or(|value| value.is_empty() || value == "false")
}

#[cfg(test)]
mod tests {
    #[test]
    fn nothing_is_left_out_under_ci() {
        for (ci, expected) in [(None, true), (Some(""), true), (Some("false"), true)] {
            assert_eq!(super::may_skip(ci.map(AsRef::as_ref)), expected, "{ci:?}");
        }
        for ci in ["true", "1"] {
            assert!(!super::may_skip(Some(ci.as_ref())), "{ci}");
        }
    }
}
