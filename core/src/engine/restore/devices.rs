//! On which devices of this host a program goes on: its own ones, or others of the same kind
//! (`--device-map`).

use std::collections::HashSet;

use crate::base::format::device_uuid;
use crate::cuda::Device;
use crate::cuda::driver::DevicePair;
use crate::engine::error::Error;
use crate::image;

type Uuid = [u8; 16];

/// A pair of `--device-map`: a device of the image, and the one of this host that takes its place. Each is a
/// UUID (`GPU-…`, or 32 hexadecimal digits) or a number: that of `gpucr inspect`, and that of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedDevice {
    old: Named,
    new: Named,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    Number(usize),
    Uuid(Uuid),
}

impl std::str::FromStr for MappedDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (old, new) = text.split_once('=').ok_or("it is not OLD=NEW")?;
        Ok(Self { old: named(old)?, new: named(new)? })
    }
}

fn named(text: &str) -> Result<Named, String> {
    if let Ok(number) = text.parse::<u8>() {
        return Ok(Named::Number(number.into()));
    }
    let digits = text.strip_prefix("GPU-").unwrap_or(text).replace('-', "");
    let mut uuid = [0; 16];
    let is_uuid = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if !is_uuid {
        return Err(format!("`{text}` is neither a number nor a UUID"));
    }
    for (byte, pair) in uuid.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let pair = std::str::from_utf8(pair).expect("digits");
        *byte = u8::from_str_radix(pair, 16).expect("digits");
    }
    Ok(Named::Uuid(uuid))
}

/// A device of the image, and another one that has taken its place. The program goes on to know it by its number
/// there; what tells one device from another is that of the new one, as far as the driver says so.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Moved {
    /// The kind of both.
    pub name: String,
    /// The device that the image names.
    pub old: Identity,
    /// The device that has taken its place.
    pub new: Identity,
}

/// What tells a device from all others.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Identity {
    /// The UUID as NVIDIA's tools write it: `GPU-…`.
    pub uuid: String,
    /// Where it is on the PCI bus; `None` if it is not on this host, or the driver does not say.
    pub bus_id: Option<String>,
}

impl Identity {
    fn of(uuid: &Uuid, present: &[Device]) -> Self {
        let here = present.iter().find(|device| device.uuid == *uuid);
        let bus_id = here.map(|device| device.bus_id.clone()).filter(|id| !id.is_empty());
        Self { uuid: device_uuid(uuid), bus_id }
    }
}

impl std::fmt::Display for Identity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.bus_id {
            Some(bus_id) => write!(f, "{} ({bus_id})", self.uuid),
            None => f.write_str(&self.uuid),
        }
    }
}

/// For each device of the image the one of this host, and what the driver is to be told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Placement {
    places: Vec<(Uuid, Uuid)>,
    /// The devices of the image that others take the place of.
    pub(super) moved: Vec<Moved>,
    /// Every device that the program could see; empty if each keeps its place.
    pub(super) pairs: Vec<DevicePair>,
}

impl Placement {
    /// The device that takes the place of device `old` of the image.
    pub(super) fn of(&self, old: &Uuid) -> Uuid {
        self.places.iter().find(|(from, _)| from == old).map_or(*old, |(_, to)| *to)
    }
}

/// Finds out where the devices of an image go.
///
/// # Errors
/// Names a device that is not there, is of another kind, or is asked for twice.
pub(super) fn place(
    pid: u32,
    devices: &[image::Device],
    present: &[Device],
    asked: &[MappedDevice],
) -> Result<Placement, Error> {
    let mut places: Vec<(Uuid, Uuid)> = Vec::new();
    for MappedDevice { old, new } in asked {
        let what =
            |side: &str, number: usize| Error::NoSuchDevice { what: format!("{side} {number}") };
        let old = match *old {
            Named::Uuid(uuid) => uuid,
            Named::Number(n) => devices.get(n).ok_or_else(|| what("the image's device", n))?.uuid,
        };
        let new = match *new {
            Named::Uuid(uuid) => uuid,
            Named::Number(n) => present.get(n).ok_or_else(|| what("this host's device", n))?.uuid,
        };
        places.push((old, new));
    }
    for device in devices {
        if !places.iter().any(|(old, _)| *old == device.uuid) {
            places.push((device.uuid, device.uuid));
        }
    }
    let (mut olds, mut news) = (HashSet::new(), HashSet::new());
    for (old, new) in &places {
        if !olds.insert(*old) || !news.insert(*new) {
            return Err(Error::DeviceTwice {
                device: device_uuid(if news.contains(new) { new } else { old }),
            });
        }
        let was = devices.iter().find(|device| device.uuid == *old);
        let Some(is) = present.iter().find(|device| device.uuid == *new) else {
            let name = was.map_or("device", |was| &was.name);
            return Err(Error::NoDevice { pid, device: format!("{name} {}", device_uuid(new)) });
        };
        if let Some(was) = was.filter(|was| was.name != is.name) {
            return Err(Error::OtherDevice { old: was.name.clone(), new: is.name.clone() });
        }
    }
    let pairs = if places.iter().all(|(old, new)| old == new) {
        Vec::new()
    } else {
        complete(&places, present, &olds, &news)
    };
    let moved = devices.iter().filter_map(|device| {
        let (old, new) = places.iter().find(|(old, new)| *old == device.uuid && old != new)?;
        let (old, new) = (Identity::of(old, present), Identity::of(new, present));
        Some(Moved { name: device.name.clone(), old, new })
    });
    Ok(Placement { moved: moved.collect(), places, pairs })
}

/// The driver wants to hear of every device that the program could see. Where all old ones are of this
/// host these are all devices of this host: a device that had to give way goes where there is room.
fn complete(
    places: &[(Uuid, Uuid)],
    present: &[Device],
    olds: &HashSet<Uuid>,
    news: &HashSet<Uuid>,
) -> Vec<DevicePair> {
    let mut pairs: Vec<DevicePair> =
        places.iter().map(|&(old, new)| DevicePair { old, new }).collect();
    let here: Vec<Uuid> = present.iter().map(|device| device.uuid).collect();
    if olds.iter().all(|old| here.contains(old)) {
        let stays = |uuid: &&Uuid| !olds.contains(*uuid) && !news.contains(*uuid);
        pairs.extend(here.iter().filter(stays).map(|&uuid| DevicePair { old: uuid, new: uuid }));
        let without = here.iter().filter(|uuid| !olds.contains(*uuid) && news.contains(*uuid));
        let free = here.iter().filter(|uuid| olds.contains(*uuid) && !news.contains(*uuid));
        pairs.extend(without.zip(free).map(|(&old, &new)| DevicePair { old, new }));
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(number: u8) -> Uuid {
        [number; 16]
    }

    fn of_image(number: u8) -> image::Device {
        image::Device { uuid: uuid(number), name: "A".into(), total_memory: 1 << 30 }
    }

    fn present(number: u8, name: &str) -> Device {
        let bus_id = format!("0000:{number:02X}:00.0");
        let (ordinal, uuid, name) = (number.into(), uuid(number), name.into());
        Device { ordinal, uuid, name, bus_id, memory: 1 << 30 }
    }

    fn placed(asked: &[&str], present: &[Device]) -> Result<Vec<(u8, u8)>, Error> {
        let asked: Vec<MappedDevice> = asked.iter().map(|text| text.parse().unwrap()).collect();
        let placement = place(1, &[of_image(0), of_image(1)], present, &asked)?;
        let mut pairs: Vec<_> =
            placement.pairs.iter().map(|pair| (pair.old[0], pair.new[0])).collect();
        pairs.sort_unstable();
        Ok(pairs)
    }

    #[test]
    fn every_device_of_the_host_has_a_place() {
        let host: Vec<Device> = (0..4).map(|number| present(number, "A")).collect();
        assert_eq!(placed(&[], &host).unwrap(), []);
        assert_eq!(placed(&["0=0", "1=1"], &host).unwrap(), []);
        assert_eq!(placed(&["0=1", "1=0"], &host).unwrap(), [(0, 1), (1, 0), (2, 2), (3, 3)]);
        assert_eq!(placed(&["0=2"], &host).unwrap(), [(0, 2), (1, 1), (2, 0), (3, 3)]);
        assert_eq!(placed(&["0=3", "1=2"], &host).unwrap(), [(0, 3), (1, 2), (2, 0), (3, 1)]);
        let text = format!("GPU-00000000-0000-0000-0000-000000000000={}", "03".repeat(16));
        assert_eq!(placed(&[&text], &host).unwrap(), [(0, 3), (1, 1), (2, 2), (3, 0)]);
        // From another host: nobody knows what else the program could see.
        let other: Vec<Device> = (5..8).map(|number| present(number, "A")).collect();
        assert_eq!(placed(&["0=1", "1=2"], &other).unwrap(), [(0, 6), (1, 7)]);
    }

    #[test]
    fn what_has_moved_is_told_by_all_that_is_known_of_it() {
        let asked = ["0=1".parse().unwrap()];
        let told = |present: &[Device]| {
            let moved = place(1, &[of_image(0)], present, &asked).unwrap().moved;
            moved.iter().map(|m| format!("{}: {} to {}", m.name, m.old, m.new)).collect::<Vec<_>>()
        };
        let here = [present(0, "A"), present(1, "A")];
        let one = "GPU-01010101-0101-0101-0101-010101010101 (0000:01:00.0)";
        let zero = "GPU-00000000-0000-0000-0000-000000000000";
        assert_eq!(told(&here), [format!("A: {zero} (0000:00:00.0) to {one}")]);
        // From another host.
        let mut there = [present(5, "A"), present(1, "A")];
        assert_eq!(told(&there), [format!("A: {zero} to {one}")]);
        there[1].bus_id.clear();
        assert_eq!(told(&there), [format!("A: {zero} to {}", &one[..40])]);
        let stays = place(1, &[of_image(0)], &here, &["0=0".parse().unwrap()]).unwrap();
        assert_eq!(stays.moved, []);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let mut host: Vec<Device> = (0..3).map(|number| present(number, "A")).collect();
        host.push(present(3, "B"));
        assert!(matches!(placed(&["0=1"], &host), Err(Error::DeviceTwice { .. })));
        assert!(matches!(placed(&["0=1", "0=2"], &host), Err(Error::DeviceTwice { .. })));
        assert!(matches!(placed(&["0=3"], &host), Err(Error::OtherDevice { .. })));
        assert!(matches!(placed(&["2=1"], &host), Err(Error::NoSuchDevice { .. })));
        assert!(matches!(placed(&["0=4"], &host), Err(Error::NoSuchDevice { .. })));
        assert!(matches!(placed(&[], &host[1..]), Err(Error::NoDevice { .. })));
        for text in ["", "0", "a=b", "=", "0=GPU-1", "300=0"] {
            assert!(text.parse::<MappedDevice>().is_err(), "{text}");
        }
    }
}
