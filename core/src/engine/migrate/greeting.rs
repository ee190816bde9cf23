//! What the two sides of a migration say first, and by what they know whether they are on one host.

use super::link::{LinkError, unexpected_message};
use super::message::{Message, PROTOCOL};
use crate::image::MANIFEST_VERSION;

/// What each side says first.
pub(super) fn hello() -> Message {
    let gpucr = env!("CARGO_PKG_VERSION").to_owned();
    Message::Hello { protocol: PROTOCOL, gpucr, manifest: MANIFEST_VERSION }
}

/// Whether the other side is one to talk to.
///
/// # Errors
/// It is not; both versions are named.
pub(super) fn check_hello(message: Message) -> Result<(), LinkError> {
    match message {
        Message::Hello { protocol: PROTOCOL, manifest: MANIFEST_VERSION, .. } => Ok(()),
        Message::Hello { protocol, gpucr, manifest } => Err(LinkError::Protocol(format!(
            "it is gpucr {gpucr} with version {protocol} of the protocol and {manifest} of the manifest; this is \
            gpucr {} with {PROTOCOL} and {MANIFEST_VERSION}",
            env!("CARGO_PKG_VERSION")
        ))),
        other => Err(unexpected_message(other)),
    }
}

/// Whether what [`namespace`] gave there is of this host.
pub(super) fn is_of_this_host(namespace_there: &str) -> bool {
    let host = |name: &str| name.split(' ').next().map(str::to_owned);
    host(namespace_there) == host(&namespace("pid"))
}

/// Tells namespaces of a kind, such as `pid`, apart, also those of different hosts.
pub(super) fn namespace(kind: &str) -> String {
    let namespace = std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
    named(&namespace.to_string_lossy())
}

/// The same of a namespace that has this name in `/proc`.
pub(super) fn named(namespace: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    format!("{} {namespace}", boot.trim())
}
