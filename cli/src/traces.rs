//! `--traces FILE`: what a dump or restore did and when, as spans of OpenTelemetry, for a collector with the
//! `otlpjsonfile` receiver. The file has one JSON object on a line, in the form of OTLP's file exporter
//! (<https://opentelemetry.io/docs/specs/otel/protocol/file-exporter/>), and grows.
//!
//! The names of attributes are those of the semantic conventions where these have one, and begin with `gpucr.` else. Of a caller
//! whose trace this is part of the environment tells (`TRACEPARENT`, as in W3C's trace context).

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpucr_core::phase::PhaseTime;
use serde_json::{Value, json};

use crate::failure::{CliError, io_error};
use crate::metrics;
use crate::{escape, output, say};

/// A span that is part of a process, as OTLP numbers kinds.
const INTERNAL: u8 = 1;
/// Statuses, as OTLP numbers them.
const OK: u8 = 1;
const ERROR: u8 = 2;

/// Where spans go; nowhere without `--traces`.
pub(crate) struct Traces {
    file: Option<Mutex<File>>,
    /// `dump` or `restore`.
    what: &'static str,
}

/// What was done.
pub(crate) struct Done<'d> {
    pub(crate) pid: u32,
    pub(crate) values: &'d [metrics::Value],
    pub(crate) phases: &'d [PhaseTime],
}

impl Traces {
    /// Opens the file, to which spans are added; it is made if it is not there.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn open(path: Option<&Path>, what: &'static str) -> Result<Self, CliError> {
        let file = path.map(output::append).transpose();
        let file = file.map_err(io_error("the file of --traces cannot be written"))?;
        Ok(Self { file: file.map(Mutex::new), what })
    }

    /// Tells what has been done since then, or in which phase it has failed. That it cannot be written is no reason to stop; the command
    /// says so at its end.
    pub(crate) fn tell(&self, since: Instant, outcome: Result<Done<'_>, &gpucr_core::Failure>) {
        let Some(file) = &self.file else { return };
        let caller = std::env::var("TRACEPARENT").ok().and_then(|text| Caller::read(&text));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let begin = now.saturating_sub(since.elapsed());
        let line = self.line(&caller.unwrap_or_else(Caller::none), [begin, now], &outcome);
        let mut file = file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // An error has words of programs and images in it.
        let line = format!("{}\n", escape::escaped_json(&line.to_string()));
        if let Err(error) = file.write_all(line.as_bytes()) {
            say::lost("the file of --traces", error);
        }
    }

    fn line(
        &self,
        caller: &Caller,
        [begin, end]: [Duration; 2],
        outcome: &Result<Done<'_>, &gpucr_core::Failure>,
    ) -> Value {
        let what = self.what;
        let id = random::<8>();
        let span = |id: &str, parent: Option<&str>, name: &str, [begin, end]: [Duration; 2]| {
            json!({
                "traceId": caller.trace, "spanId": id, "parentSpanId": parent.unwrap_or_default(),
                "name": name, "kind": INTERNAL,
                "startTimeUnixNano": begin.as_nanos().to_string(),
                "endTimeUnixNano": end.as_nanos().to_string(),
            })
        };
        let mut whole = span(&id, caller.span.as_deref(), &format!("gpucr {what}"), [begin, end]);
        let mut parts = Vec::new();
        match outcome {
            Ok(done) => {
                let numbers = done.values.iter().map(|(name, _, value)| {
                    let name = format!("gpucr.{what}.{}", name.trim_start_matches('_'));
                    attribute(&name, json!({"doubleValue": value}))
                });
                let pid = attribute("process.pid", json!({"intValue": done.pid.to_string()}));
                whole["attributes"] = std::iter::once(pid).chain(numbers).collect();
                whole["status"] = json!({"code": OK});
                let mut from = begin;
                for PhaseTime { name, ms } in done.phases {
                    let to = from + Duration::from_secs_f64(ms.max(0.0) / 1000.0);
                    parts.push(span(&random::<8>(), Some(&id), name, [from, to]));
                    from = to;
                }
            }
            Err(failure) => {
                let phase = json!({"stringValue": failure.phase.name()});
                whole["attributes"] = json!([attribute("error.type", phase)]);
                whole["status"] = json!({"code": ERROR, "message": failure.to_string()});
            }
        }
        parts.insert(0, whole);
        let service = std::env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| "gpucr".to_owned());
        let text = |name, value: &str| attribute(name, json!({"stringValue": value}));
        let version = env!("CARGO_PKG_VERSION");
        let resource = [text("service.name", &service), text("service.version", version)];
        json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": {"name": "gpucr", "version": version}, "spans": parts}],
        }]})
    }
}

fn attribute(name: &str, value: Value) -> Value {
    json!({"key": name, "value": value})
}

/// A number that nobody else has, in hexadecimal digits.
fn random<const BYTES: usize>() -> String {
    let mut bytes = [0; BYTES];
    // Short ones are given as a whole, and the system has some from its start on. All zeros would stand for no number.
    let given = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    if given != Ok(BYTES) || bytes == [0; BYTES] {
        bytes[0] = 1;
    }
    gpucr_core::format::hex(&bytes)
}

/// The trace and the span of which this is a part.
struct Caller {
    trace: String,
    span: Option<String>,
}

impl Caller {
    /// A trace of its own.
    fn none() -> Self {
        Self { trace: random::<16>(), span: None }
    }

    /// What `TRACEPARENT` says: version, trace, span and flags. `None`: it is not of that form.
    fn read(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.trim().split('-').collect();
        let [version, trace, span, _flags, ..] = parts[..] else { return None };
        let is_number = |text: &str, digits: usize| {
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            text.len() == digits && text.bytes().all(is_digit)
        };
        let is_id = |text: &str, digits| is_number(text, digits) && text.bytes().any(|b| b != b'0');
        let is_read =
            is_number(version, 2) && version != "ff" && is_id(trace, 32) && is_id(span, 16);
        is_read.then(|| Self { trace: trace.to_owned(), span: Some(span.to_owned()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_caller_is_read_or_passed_over() {
        let caller = Caller::read(PARENT).expect("a caller");
        assert_eq!(caller.trace, "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(caller.span.as_deref(), Some("b7ad6b7169203331"));
        for wrong in [
            "",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        ] {
            assert!(Caller::read(wrong).is_none(), "{wrong}");
        }
    }

    #[test]
    fn phases_are_spans_one_after_the_other() {
        let traces = Traces { file: None, what: "dump" };
        let phases = [("gate", 1.5), ("copy", 2.0)].map(|(name, ms)| PhaseTime { name, ms });
        let done = Done { pid: 7, values: &[("_device_bytes", "Bytes.", 3.0)], phases: &phases };
        let [begin, end] = [Duration::from_secs(10), Duration::from_secs(11)];
        let caller = Caller::read(PARENT).expect("a caller");
        let line = traces.line(&caller, [begin, end], &Ok(done));
        let spans = &line["resourceSpans"][0]["scopeSpans"][0]["spans"];
        assert_eq!(spans[0]["name"], "gpucr dump");
        assert_eq!(spans[0]["parentSpanId"], "b7ad6b7169203331");
        assert_eq!(
            spans[0]["attributes"][0],
            json!({"key": "process.pid", "value": {"intValue": "7"}})
        );
        assert_eq!(spans[0]["attributes"][1]["key"], "gpucr.dump.device_bytes");
        assert_eq!(spans[2]["name"], "copy");
        assert_eq!(spans[2]["parentSpanId"], spans[0]["spanId"]);
        assert_eq!(spans[2]["startTimeUnixNano"], spans[1]["endTimeUnixNano"]);
        assert_eq!(spans[2]["endTimeUnixNano"], "10003500000");
        for span in spans.as_array().expect("spans") {
            assert_eq!(span["traceId"], "0af7651916cd43dd8448eb211c80319c");
            assert_eq!(span["spanId"].as_str().map(str::len), Some(16));
        }
    }
}
