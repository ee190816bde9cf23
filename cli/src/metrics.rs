//! `--metrics FILE`: what a dump or restore came to, in the text form of Prometheus, for the textfile collector of its
//! node exporter. The file appears whole, and replaces the one of the time before.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use gpucr_core::phase::PhaseTime;

use crate::output::Output;
use crate::{say, stores};

/// What has been done, and where it is told. Without a file it is told nowhere.
pub(crate) struct Metrics {
    path: Option<PathBuf>,
    /// `dump` or `restore`.
    what: &'static str,
    done: u64,
    failed: u64,
}

/// A number, with the end of its name and what it is.
pub(crate) type Value = (&'static str, &'static str, f64);

impl Metrics {
    /// Nothing has been done yet.
    pub(crate) fn new(path: Option<&Path>, what: &'static str) -> Self {
        Self { path: path.map(Path::to_owned), what, done: 0, failed: 0 }
    }

    /// Tells what was done: these numbers, and the times of the phases.
    pub(crate) fn done(&mut self, values: &[Value], phases: &[PhaseTime]) {
        self.done += 1;
        self.write(true, values, phases);
    }

    /// Tells that it has failed.
    pub(crate) fn failed(&mut self) {
        self.failed += 1;
        self.write(false, &[], &[]);
    }

    fn write(&self, success: bool, values: &[Value], phases: &[PhaseTime]) {
        let Some(path) = &self.path else { return };
        let text = self.text(success, values, phases, stores::now());
        let written = Output::prepare(path).and_then(|output| output.write(text.as_bytes()));
        if let Err(error) = written {
            say::lost("the file of --metrics", error);
        }
    }

    fn text(&self, success: bool, values: &[Value], phases: &[PhaseTime], now: u64) -> String {
        let what = self.what;
        let mut text = String::new();
        let mut put = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = writeln!(
                text,
                "# HELP gpucr_{what}{name} {help}\n# TYPE gpucr_{what}{name} {kind}\ngpucr_{what}{name} {value}"
            );
        };
        put("s_total", "counter", "How many this command has completed.", self.done as f64);
        put(
            "_failures_total",
            "counter",
            "How many of this command have failed.",
            self.failed as f64,
        );
        put(
            "_last_success",
            "gauge",
            "Whether the last one succeeded.",
            f64::from(u8::from(success)),
        );
        put("_last_timestamp_seconds", "gauge", "When the last one ended.", now as f64);
        for (name, help, value) in values {
            put(name, "gauge", help, *value);
        }
        if !phases.is_empty() {
            let name = format!("gpucr_{what}_phase_seconds");
            let _ = writeln!(text, "# HELP {name} How long each phase took.\n# TYPE {name} gauge");
            for PhaseTime { name: phase, ms } in phases {
                let _ = writeln!(text, "{name}{{phase=\"{phase}\"}} {}", ms / 1000.0);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_their_help_and_type() {
        let mut metrics = Metrics::new(None, "dump");
        metrics.done(&[], &[]);
        metrics.failed();
        let phases = [PhaseTime { name: "gate", ms: 1.5 }];
        let text = metrics.text(true, &[("_device_bytes", "Bytes.", 3.0)], &phases, 7);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[..3],
            [
                "# HELP gpucr_dumps_total How many this command has completed.",
                "# TYPE gpucr_dumps_total counter",
                "gpucr_dumps_total 1",
            ]
        );
        for line in [
            "gpucr_dump_failures_total 1",
            "gpucr_dump_last_success 1",
            "gpucr_dump_last_timestamp_seconds 7",
            "gpucr_dump_device_bytes 3",
            "# TYPE gpucr_dump_phase_seconds gauge",
            "gpucr_dump_phase_seconds{phase=\"gate\"} 0.0015",
        ] {
            assert!(lines.contains(&line), "no {line} in\n{text}");
        }
    }
}
