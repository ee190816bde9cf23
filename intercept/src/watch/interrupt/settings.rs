//! Which kernels may be interrupted, as the program's environment says.

use std::sync::OnceLock;

use gpucr_wire::{ABORTED, AT_BARRIERS, AUTO, ENV_INTERRUPT_LEVEL, ENV_INTERRUPTIBLE, IN_LOOPS};

use crate::log::log;
use crate::state::gate;

/// What the environment says.
struct Settings {
    /// The names of kernels that may be interrupted, with `*` and `?`.
    patterns: Vec<String>,
    /// And those that take long.
    is_auto: bool,
}

impl Settings {
    fn of(listed: &str) -> Self {
        let names = listed.split(',').map(str::trim).filter(|name| !name.is_empty());
        let (auto, patterns): (Vec<&str>, Vec<&str>) = names.partition(|name| *name == AUTO);
        let patterns = patterns.into_iter().map(str::to_owned).collect();
        Self { patterns, is_auto: !auto.is_empty() }
    }

    fn names(&self, kernel: &str) -> bool {
        self.patterns.iter().any(|pattern| matches(pattern.as_bytes(), kernel.as_bytes()))
    }
}

fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings::of(&std::env::var(ENV_INTERRUPTIBLE).unwrap_or_default()))
}

/// From now on launches are looked at, if the program was started so. Whether they are, and were not before.
pub(crate) fn begin() -> bool {
    let Settings { patterns, is_auto } = settings();
    if patterns.is_empty() && !is_auto || gate::is_interruptible() {
        return false;
    }
    let long = if *is_auto { ", and those that take long" } else { "" };
    log!("kernels may be interrupted: {patterns:?}{long}");
    gate::set_interruptible(true);
    true
}

/// Why nothing can be interrupted, as the end of a message; empty if something can.
pub(crate) fn why_none() -> &'static str {
    if gate::is_interruptible() {
        ""
    } else {
        "; kernels cannot be interrupted, since it was not started with `gpucr run --interruptible`"
    }
}

/// Inside of which kernels' blocks these are to be interrupted, if that is possible.
#[derive(Debug, Clone, Copy)]
pub(super) struct Insides {
    pub(super) loops: bool,
    pub(super) barriers: bool,
    /// And aborted, where that is right.
    pub(super) aborted: bool,
}

pub(super) fn insides() -> Insides {
    static INSIDES: OnceLock<Insides> = OnceLock::new();
    *INSIDES.get_or_init(|| {
        let level = std::env::var(ENV_INTERRUPT_LEVEL).unwrap_or_default();
        let aborted = level == ABORTED;
        let loops = aborted || level == IN_LOOPS;
        Insides { loops, barriers: loops || level == AT_BARRIERS, aborted }
    })
}

/// Whether the kernel of this name may be interrupted, however long it takes.
pub(super) fn is_named(name: &str) -> bool {
    settings().names(name)
}

/// Whether kernels that take long may be interrupted.
pub(super) fn is_auto() -> bool {
    settings().is_auto
}

/// Whether a name is as a pattern with `*` and `?` says.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where the last star is, and what it has taken of the name so far.
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => {
                let Some((at, taken)) = star else { return false };
                star = Some((at, taken + 1));
                (p, n) = (at + 1, taken + 1);
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::{Settings, matches};

    #[test]
    fn who_is_meant() {
        let settings = Settings::of("matmul, *solve*,,");
        assert!(!settings.is_auto && settings.names("matmul") && settings.names("_Z5solvev"));
        assert!(!settings.names("auto"));
        let settings = Settings::of("auto");
        assert!(settings.is_auto && settings.patterns.is_empty() && !settings.names("auto"));
        let settings = Settings::of("k, auto ,aut?");
        assert!(settings.is_auto && settings.names("k") && settings.names("auto"));
        let settings = Settings::of(" , ");
        assert!(!settings.is_auto && settings.patterns.is_empty());
    }

    #[test]
    fn patterns_of_names() {
        let is = |pattern: &str, name: &str| matches(pattern.as_bytes(), name.as_bytes());
        assert!(
            is("*", "") && is("*", "kernel") && is("kernel", "kernel") && is("k?rnel*", "kernel")
        );
        assert!(is("*step*", "_Z4stepv") && is("*a*b", "aab") && is("a*a", "aa") && is("**x", "x"));
        assert!(!is("", "k") && !is("kernel", "kernels") && !is("?", "") && !is("a*a", "a"));
        assert!(!is("*ab", "abc") && is("*ab", "abab"));
    }
}
