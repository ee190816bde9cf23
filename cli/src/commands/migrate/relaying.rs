//! `gpucr migrate --relay`, when the program runs on the other side.

use gpucr_core::Error;
use gpucr_core::migrate::{ProgramEnd, Relaying};
use serde_json::json;

use crate::commands::Outcome;
use crate::commands::restore::End;
use crate::events::Events;
use crate::failure::CliError;
use crate::signals::SignalPlan;

/// It is not known how the program ends: as ssh says that its connection was lost.
const UNKNOWN: u8 = 255;

/// What is lost is the relay alone.
fn goes_on(error: CliError, migration: &str) -> CliError {
    error
        .code(UNKNOWN)
        .state("The program continues there; its standard streams are not relayed any more.")
        .help(format!(
            "its output from now on, and how it ends, are kept there in \
             /var/lib/gpucr/migrations/{migration}.output"
        ))
}

/// Relays until the program has ended, and ends with its exit status. The program goes on if this is interrupted.
pub(super) fn relay(
    relaying: Relaying,
    migration: &str,
    events: &Events,
    signals: &SignalPlan,
) -> Outcome {
    let id = migration.to_owned();
    signals.end_at_last_with(move || goes_on(CliError::new(UNKNOWN, "interrupted"), &id));
    let end = match relaying.run() {
        Ok(ProgramEnd::Code(code)) => End { exit_code: Some(code.into()), signal: None },
        Ok(ProgramEnd::Signal(signal)) => End { exit_code: None, signal: Some(signal.into()) },
        Ok(ProgramEnd::Unknown) => {
            events.say("ended", json!({}));
            let error =
                CliError::new(UNKNOWN, "the other side does not know how the program has ended");
            return Err(error.state("All its output so far was relayed."));
        }
        Err(error) => {
            let error = Error::from(error);
            events.say("relay-lost", json!({"error": error.to_string()}));
            return Err(goes_on(error.into(), migration));
        }
    };
    events.say("ended", json!(end));
    Ok(end.exit_code())
}
