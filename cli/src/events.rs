//! `--events FILE`: what happens, for programs to follow, one JSON object on a line.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use gpucr_core::{Pass, Progress};
use serde_json::{Value, json};

use crate::failure::{CliError, io_error};
use crate::{escape, output, say};

/// Where events go; nowhere without `--events`. Clones write to the same place.
#[derive(Clone)]
pub(crate) struct Events {
    file: Option<Arc<Mutex<File>>>,
    begin: Instant,
}

impl Events {
    /// Opens the file, to which events are added; it is made if it is not there.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, CliError> {
        let file = path.map(output::append).transpose();
        let file = file.map_err(io_error("the file of --events cannot be written"))?;
        Ok(Self { file: file.map(|file| Arc::new(Mutex::new(file))), begin: Instant::now() })
    }

    /// Writes an event with its name, the milliseconds since the start, and what belongs to it. That it cannot
    /// be written is no reason to stop; the command says so at its end.
    pub(crate) fn say(&self, event: &str, mut fields: Value) {
        let Some(file) = &self.file else { return };
        fields["event"] = event.into();
        fields["ms"] = gpucr_core::format::milliseconds(self.begin.elapsed()).into();
        // In one piece: another process may write to the same pipe.
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        let line = format!("{}\n", escape::escaped_json(&fields.to_string()));
        if let Err(error) = file.write_all(line.as_bytes()) {
            say::lost("the file of --events", error);
        }
    }

    /// When what they tell of began.
    pub(crate) fn begin(&self) -> Instant {
        self.begin
    }

    /// Says how a dump or restore has failed, if it has.
    pub(crate) fn say_failure<T>(&self, result: &Result<T, gpucr_core::Failure>) {
        if let Err(failure) = result {
            self.say("failed", json!({"phase": failure.phase, "error": failure.to_string()}));
        }
    }

    /// Shows progress as before, and writes its phases.
    pub(crate) fn following(&self, progress: Arc<dyn Progress>) -> Arc<dyn Progress> {
        match self.file {
            Some(_) => Arc::new(Followed { events: self.clone(), progress }),
            None => progress,
        }
    }
}

struct Followed {
    events: Events,
    progress: Arc<dyn Progress>,
}

impl Progress for Followed {
    fn phase(&self, name: &'static str, bytes: Option<u64>) {
        self.events.say("phase", json!({"phase": name, "bytes": bytes}));
        self.progress.phase(name, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }

    fn pass(&self, pass: &Pass) {
        self.events.say("pass", json!(pass));
        self.progress.pass(pass);
    }
}
