//! What a restore has in common whether it is made here or as the first process of a pid namespace.

use std::sync::Arc;

use gpucr_core::restore::{GoesOn, Moved, Options, Report};
use gpucr_core::sharing::Holder;
use gpucr_core::{Failure, Progress};
use serde_json::json;

use super::args::RestoreArgs;
use super::hold;
use crate::commands::{io_error, key, note};
use crate::display;
use crate::events::Events;
use crate::failure::CliError;
use crate::signals::SignalPlan;

/// What holds if gpucr cannot wait for what it is at, and ends.
pub(super) fn settled_by_watchdog() -> String {
    "gpucr could not wait for what it was at. The watchdog ends what had been made of the program; the image is as \
     it was."
        .into()
}

/// The process that is to hold memory which is shared.
pub(super) fn holder(args: &RestoreArgs) -> Result<Option<Holder>, CliError> {
    let failed = io_error("cannot start a process that holds shared memory");
    args.share.then(Holder::start).transpose().map_err(failed)
}

/// What the command line asks of a restore.
///
/// # Errors
/// The keys to trust cannot be read.
pub(super) fn options(
    args: &RestoreArgs,
    share: Option<Holder>,
    signals: &SignalPlan,
    goes_on: GoesOn,
) -> Result<Options, CliError> {
    Ok(Options {
        image: args.image.clone(),
        trust: key::trust_with_policy(&args.trust)?,
        warm: !args.no_warm,
        detach: args.detach,
        before_resume: args.exec_before_resume.clone(),
        may_run: args
            .hold
            .map(hold::ask)
            .transpose()
            .map_err(io_error("--hold is for gpucr's own use"))?,
        device_map: args.device_map.clone(),
        on_demand: args.on_demand,
        share,
        goes_on: Some(goes_on),
        stop: signals.stop.clone(),
    })
}

/// What shows how far it is, and tells the events.
pub(super) fn progress(args: &RestoreArgs, events: &Events) -> Arc<dyn Progress> {
    events.following(display::progress(args.json))
}

/// Tells the events what a restore has come to.
pub(super) fn told<T>(
    events: &Events,
    result: Result<T, Failure>,
    report: impl Fn(&T) -> &Report,
) -> Result<T, Failure> {
    events.say_failure(&result);
    if let Ok(done) = &result {
        events.say("restored", json!(report(done)));
    }
    result
}

/// The driver does not tell the program all that is other on another device, and the program may have asked before.
pub(super) fn say_moved(report: &Report) {
    for Moved { name, old, new } in &report.moved {
        note!("The program has moved from the {name} {old} to {new}.");
    }
    if !report.moved.is_empty() {
        note!(
            "What it has noted of a device (UUID, PCI bus id, index of NVML) is the old one's, and the driver goes on \
             to tell it the old PCI bus id."
        );
    }
}
