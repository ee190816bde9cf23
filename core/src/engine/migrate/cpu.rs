//! What the processor can do: a program that has looked may use all of it.

use std::collections::BTreeSet;

/// The features that `/proc/cpuinfo` names.
pub(super) fn features() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = info.lines().find(|line| line.starts_with("flags"));
    line.and_then(|line| line.split_once(':'))
        .map(|(_, all)| all.trim().to_owned())
        .unwrap_or_default()
}

/// What the processor of this host lacks of these.
pub(super) fn lacks(wanted: &str) -> Option<String> {
    lacks_of(wanted, &features())
}

fn lacks_of(wanted: &str, own: &str) -> Option<String> {
    let own: BTreeSet<&str> = own.split_whitespace().collect();
    let lacking: BTreeSet<&str> =
        wanted.split_whitespace().filter(|feature| !own.contains(feature)).collect();
    let names: Vec<&str> = lacking.into_iter().collect();
    (!names.is_empty()).then(|| format!("the processor of this host lacks {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_is_named() {
        assert_eq!(lacks(&features()), None);
        assert_eq!(lacks_of("fpu sse2", "sse2 avx fpu"), None);
        let lacking = lacks_of("fpu avx2 avx512f", "fpu").expect("two");
        assert!(lacking.ends_with("lacks avx2, avx512f"), "{lacking}");
    }
}
