//! The phase `offer`: all that is in the way of a program is told at once, before anything is taken for it.

use std::sync::atomic::Ordering;

use super::wanted::Incoming;
use crate::engine::error::Error;
use crate::engine::migrate::cpu;
use crate::engine::migrate::fit::Needs;
use crate::engine::migrate::greeting::{is_of_this_host, namespace};
use crate::engine::migrate::link::{Link, LinkError, unexpected_message};
use crate::engine::migrate::message::{Message, cut_reasons, offered};
use crate::engine::migrate::record::{MigrationId, Record, Side};
use crate::engine::migrate::relayed::Relayed;
use crate::engine::migrate::streams::{Door, Way};
use crate::engine::migrate::{outputs, placing};
use crate::engine::restore::MappedDevice;
use crate::engine::restore::ahead::Ahead;
use crate::engine::restore::lacks;
use crate::engine::restore::stdio::Named;
use crate::engine::watchdog::Watchdog;
use crate::image::{Destination, DriverKind, ImageWriter, Manifest, Stdio};
use crate::store::Compression;

/// Most bytes of an outline.
const MAX_OUTLINE: u64 = 64 << 20;

/// What a source offers.
struct Offer {
    id: MigrationId,
    dry_run: bool,
    /// The pid namespace of the program, and that of its network.
    pids: String,
    network: String,
    outline: Manifest,
    /// What its signatures are of.
    hash: [u8; 32],
    cpu: String,
    signatures: String,
    streams: u32,
    host_memory: u64,
    tight_disk: bool,
    relayed: Option<Relayed>,
    leads: bool,
}

/// An offer that was taken.
pub(super) struct Taken {
    pub(super) id: MigrationId,
    /// Whether the source's processes have their pids in this very namespace.
    pub(super) same_pids: bool,
    /// Whether they have their network in this very namespace.
    pub(super) same_network: bool,
    pub(super) dry_run: bool,
    /// Which of its standard streams are relayed, if that is wanted.
    pub(super) relayed: Option<Relayed>,
    /// Of each file that would go along, whether it is there.
    there: Vec<bool>,
    /// Which of its outputs go to files here.
    named: Named,
    /// Where the streams come to that the source wants.
    pub(super) door: Option<Door>,
    pub(super) writer: ImageWriter,
    pub(super) destination: Destination,
    /// Loads device memory as it arrives.
    pub(super) ahead: Option<Ahead>,
    /// Hash of the program's driver library.
    pub(super) driver: [u8; 32],
}

impl Taken {
    /// Says to the source that its offer was taken.
    pub(super) fn accept(&mut self, link: &Link) -> Result<(), Error> {
        let there = std::mem::take(&mut self.there);
        let way = self.door.as_ref().map(Door::way).transpose().map_err(|source| Error::Io {
            what: "the port for streams is not known".into(),
            source,
        })?;
        let Way { port, token, key } = way.unwrap_or_default();
        let outputs = outputs::to_wire(self.named);
        Ok(link.send(&Message::Accept { there, port: port.into(), token, key, outputs })?)
    }
}

/// Takes an offer, or refuses it with all that is in the way.
///
/// # Errors
/// [`Error::Refused`]; the link is lost, or the source does not keep to the protocol.
pub(super) fn take(
    link: &Link,
    wishes: &Incoming,
    watchdog: &mut Option<Watchdog>,
) -> Result<Taken, Error> {
    let mut offer = receive_offer(link)?;
    let device_map = wishes.mapped_devices()?;
    let same_pids = offer.pids == namespace("pid");
    let found = placing::look(&mut offer.outline, &wishes.files_below)?;
    let how = wishes.circumstances(&device_map, same_pids);
    let mut reasons = lacks::lacks(&offer.outline, how);
    reasons.extend(found.reasons);
    if wishes.new_pids && !offer.leads && has_terminal(&offer.outline) {
        reasons.push(Error::TerminalLost.to_string());
    }
    if offer.relayed.is_some() && !wishes.outputs.is_empty() {
        reasons.push(Error::RelayedToo.to_string());
    }
    let door = Door::for_offer(offer.streams, wishes.streams_at, &mut reasons)?;
    // Before anything is taken for it. What comes is checked once more when all of it is here.
    let trusted = wishes.trust.check_offer(&offer.hash, &offer.signatures);
    reasons.extend(trusted.err().map(|error| error.to_string()));
    if Record::read(offer.id, Side::Destination)?.is_some() {
        reasons.push(format!("migration {} has been here before", offer.id));
    }
    reasons.extend(cpu::lacks(&offer.cpu));
    let destination = wishes.place.destination(offer.id);
    let (host, device, files) = (offer.host_memory, offer.outline.bulk_bytes, found.lacking);
    let (kind, needs) = (offer.outline.driver.kind, Needs { host, device, files });
    let unfit = needs.unfit(&destination.path(), kind, offer.tight_disk);
    reasons.extend(unfit.iter().map(Error::to_string));
    let ahead = open_ahead(wishes, &offer, &device_map, &mut reasons);
    let writer = begin_image(wishes, &destination, watchdog)?;
    match writer {
        Ok(writer) if reasons.is_empty() => {
            let Offer { id, dry_run, network, relayed, outline, .. } = offer;
            let (same_network, there) = (network == wishes.network_name(), found.there);
            return Ok(Taken {
                id,
                same_pids,
                same_network,
                dry_run,
                relayed,
                there,
                named: wishes.outputs.named(),
                door,
                writer,
                destination,
                ahead,
                driver: outline.driver.file_hash,
            });
        }
        Ok(_) => {}
        Err(error) => reasons.push(error.to_string()),
    }
    cut_reasons(&mut reasons);
    link.send(&Message::Refuse { reasons: reasons.clone() })?;
    Err(Error::Refused { reasons })
}

/// Whether a standard stream of the program itself is a terminal. One that its children have may be of its own making.
fn has_terminal(outline: &Manifest) -> bool {
    let streams = outline.processes.first().into_iter().flat_map(|process| &process.stdio);
    { streams }.any(|stream| matches!(stream, Stdio::Terminal { .. }))
}

fn receive_offer(link: &Link) -> Result<Offer, Error> {
    let (body, message) = link.receive_long(MAX_OUTLINE)?;
    let Message::Offer {
        id,
        dry_run,
        pids,
        network,
        version,
        cpu,
        signatures,
        streams,
        host_memory,
        tight_disk,
        relay,
        leads,
    } = message
    else {
        return Err(unexpected_message(message).into());
    };
    let hash = offered(&id, version, &body);
    let id = MigrationId(id);
    let unknown = || LinkError::Protocol("its offer: there are no such standard streams".into());
    let relayed = Relayed::from_wire(relay).ok_or_else(unknown)?;
    let outline = Manifest::decode(version, &body);
    let outline = outline.map_err(|what| LinkError::Protocol(format!("its offer: {what}")))?;
    Ok(Offer {
        id,
        dry_run,
        pids,
        network,
        outline,
        hash,
        cpu,
        signatures,
        streams,
        host_memory,
        tight_disk,
        relayed,
        leads,
    })
}

/// Begins the image, which is removed if this process dies. The inner error is a reason to refuse the offer.
fn begin_image(
    wishes: &Incoming,
    at: &Destination,
    watchdog: &mut Option<Watchdog>,
) -> Result<Result<ImageWriter, Error>, Error> {
    let started = Watchdog::start().map_err(Error::Watchdog)?;
    let watchdog = watchdog.insert(started);
    watchdog.writing(&at.path()).map_err(Error::Watchdog)?;
    let stop = || wishes.stop.load(Ordering::Relaxed);
    Ok(ImageWriter::begin_unless(at, Compression::None, &stop).map_err(Error::from))
}

/// Opens what loads device memory as it arrives, and adds what does not fit on the devices to what is in the way.
fn open_ahead(
    wishes: &Incoming,
    offer: &Offer,
    device_map: &[MappedDevice],
    reasons: &mut Vec<String>,
) -> Option<Ahead> {
    let outline = &offer.outline;
    // Where the program runs on the same devices it may need what is free on them, and its driver too should it have
    // to go on. The software driver's devices are memory of the host.
    let is_elsewhere = !is_of_this_host(&offer.pids);
    if !is_elsewhere && outline.driver.kind != DriverKind::Soft {
        return None;
    }
    match Ahead::open(outline, device_map, is_elsewhere, &wishes.stop) {
        Ok(mut ahead) => {
            let fits = ahead.check_offered(outline.bulk_bytes);
            reasons.extend(fits.err().map(|error| error.to_string()));
            Some(ahead)
        }
        // What cannot be opened is found again when the image is checked.
        Err(error) => {
            if reasons.is_empty() {
                tracing::warn!(%error, "no device memory is loaded ahead");
            }
            None
        }
    }
}
