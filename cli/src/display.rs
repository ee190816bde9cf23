//! Progress on a terminal, and numbers as people read them.

use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::{Arc, Once};
use std::time::Duration;

use gpucr_core::kernels::readable;
use gpucr_core::{Pass, Progress, Quiet};
use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressState, ProgressStyle};

use crate::{bars, fold, say};

/// Longer names of kernels are cut, characters.
const KERNEL_WIDTH: usize = 48;
/// 9999-12-31T23:59:59Z.
const LAST_SECOND: u64 = 253_402_300_799;

/// A progress bar on stderr if that is a terminal and nothing else was asked for.
pub(crate) fn progress(quiet: bool) -> Arc<dyn Progress> {
    if !is_shown(quiet) {
        return Arc::new(Quiet);
    }
    let bar = ProgressBar::new(0);
    bar.set_style(ProgressStyle::default_spinner());
    bars::show(&bar);
    Arc::new(Bar { bar, moves: Once::new() })
}

/// Whether progress is shown to somebody.
fn is_shown(quiet: bool) -> bool {
    !quiet && !say::is_quiet() && std::io::stderr().is_terminal()
}

/// On a terminal, where nothing else was asked for, a bar that fills up in `time`, until it is dropped.
pub(crate) fn waiting(quiet: bool, what: &'static str, time: Duration) -> Option<impl Drop> {
    if !is_shown(quiet) {
        return None;
    }
    let bar = ProgressBar::new(time.as_millis() as u64).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {bar:30} {elapsed}") {
        bar.set_style(style);
    }
    bars::show(&bar);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let moving = bar.clone();
    let thread = std::thread::spawn(move || {
        let step = Duration::from_millis(100);
        while stopped.recv_timeout(step) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            moving.set_position(moving.elapsed().as_millis() as u64);
        }
        moving.finish_and_clear();
    });
    Some(Waiting { stop: Some(stop), thread: Some(thread) })
}

struct Waiting {
    /// Dropping it ends the thread.
    stop: Option<std::sync::mpsc::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Bar {
    bar: ProgressBar,
    /// Done when it moves. Not before the first phase: until then ssh may ask for a password on the same line.
    moves: Once,
}

impl Progress for Bar {
    fn phase(&self, name: &'static str, bytes: Option<u64>) {
        self.moves.call_once(|| self.bar.enable_steady_tick(Duration::from_millis(100)));
        self.bar.set_message(name);
        // The copy of device memory goes on during later phases: its bar stays.
        if let Some(bytes) = bytes.filter(|bytes| *bytes > 0) {
            self.bar.set_length(bytes);
            self.bar.set_position(0);
            // Or rate and time would be those of the phase before.
            self.bar.reset();
        }
        // The line fits into 80 columns.
        let template = if self.bar.length().unwrap_or(0) > 0 {
            "{spinner} {msg:<11} {bar:16} {bytes}/{total_bytes}{rate}"
        } else {
            "{spinner} {msg}"
        };
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.with_key("rate", rate));
        }
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    fn pass(&self, pass: &Pass) {
        let rate = |per_s: f64| format!("{}/s", bytes(per_s as u64));
        let link = pass.bytes_per_s.map(|it| format!(", {}", rate(it))).unwrap_or_default();
        let downtime = pass.downtime_ms.map(|it| format!(", downtime {}", time(it)));
        self.bar.set_message(format!(
            "pass {}: {} sent{link}, {} written{}",
            pass.pass,
            bytes(pass.sent_bytes),
            rate(pass.written_per_s),
            downtime.unwrap_or_default(),
        ));
    }
}

/// How fast it goes, and how long it takes yet: nothing before something was moved, and nothing when all was.
fn rate(state: &ProgressState, out: &mut dyn Write) {
    let (per_sec, eta) = (state.per_sec(), state.eta());
    if state.pos() == 0 || Some(state.pos()) >= state.len() || per_sec < 1.0 {
        return;
    }
    // What cannot be written into a line is not shown.
    let _ = write!(out, " {}/s", bytes(per_sec as u64));
    if eta.as_secs() > 0 {
        let _ = write!(out, " {:#} left", HumanDuration(eta));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// So many things, by their name for one and for several.
pub(crate) fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// Bytes with a binary unit.
pub(crate) fn bytes(count: u64) -> String {
    HumanBytes(count).to_string()
}

/// Milliseconds, as seconds where that reads better.
pub(crate) fn time(ms: f64) -> String {
    if ms < 1000.0 { format!("{ms:.0} ms") } else { format!("{:.2} s", ms / 1000.0) }
}

/// A share of one, in per cent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Seconds since 1970 as a date and a time, UTC. Images come from anywhere: what is no date of four digits is shown
/// as a number.
pub(crate) fn date(seconds: u64) -> String {
    if seconds > LAST_SECOND {
        return format!("{seconds} s");
    }
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
    humantime::format_rfc3339_seconds(time).to_string()
}

/// A command line, cut to a width.
pub(crate) fn command(words: &[String], width: usize) -> String {
    fold::cut(&words.join(" "), width)
}

/// A kernel's name as people write it: without its parameters, and not too long.
pub(crate) fn kernel(name: &str) -> String {
    if name.is_empty() {
        return "(no name)".to_owned();
    }
    let plain = readable(name).unwrap_or_else(|| name.to_owned());
    if plain.chars().count() <= KERNEL_WIDTH {
        return plain;
    }
    let plain = without_arguments(&plain);
    if plain.chars().count() <= KERNEL_WIDTH {
        return plain;
    }
    let cut: String = plain.chars().take(KERNEL_WIDTH - 1).collect();
    cut + "…"
}

/// The name of an instance of a template with its arguments left out.
fn without_arguments(name: &str) -> String {
    let (mut plain, mut depth) = (String::new(), 0_u32);
    for c in name.chars() {
        match c {
            '<' => {
                if depth == 0 {
                    plain += "<…>";
                }
                depth += 1;
            }
            '>' => depth = depth.saturating_sub(1),
            _ if depth == 0 => plain.push(c),
            _ => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_of_seconds_can_be_shown() {
        assert_eq!(date(0), "1970-01-01T00:00:00Z");
        assert_eq!(date(LAST_SECOND), "9999-12-31T23:59:59Z");
        assert_eq!(date(LAST_SECOND + 1), "253402300800 s");
        assert_eq!(date(u64::MAX), "18446744073709551615 s");
    }

    #[test]
    fn names_are_readable() {
        assert_eq!(kernel("mlp_forward"), "mlp_forward");
        assert_eq!(kernel("_ZN5layer4gemmIfLi8EEEvPKT_PS1_"), "layer::gemm<float, 8>");
        let long = "_ZN5layer4gemmI52a_type_whose_name_is_so_long_that_nobody_will_readitEEvv";
        assert_eq!(kernel(long), "layer::gemm<…>");
        assert_eq!(kernel(&"k".repeat(100)).chars().count(), KERNEL_WIDTH);
        assert_eq!(kernel(""), "(no name)");
    }
}
