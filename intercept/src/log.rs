//! Messages to standard error, only where `GPUCR_LOG` asks for them: a library that sits in
//! every program must not print.

use std::sync::OnceLock;

static WANTED: OnceLock<bool> = OnceLock::new();

/// Whether `GPUCR_LOG` is set and not empty.
pub(crate) fn wanted() -> bool {
    *WANTED.get_or_init(|| std::env::var_os("GPUCR_LOG").is_some_and(|v| !v.is_empty()))
}

/// Prints one line, if wanted.
macro_rules! log {
    ($($part:tt)*) => {
        if $crate::log::wanted() {
            use std::io::Write as _;
            // A closed standard error is no reason to stop.
            let _ = writeln!(std::io::stderr(), "gpucr-intercept: {}", format_args!($($part)*));
        }
    };
}
pub(crate) use log;
