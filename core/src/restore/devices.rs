//! On which devices of this host a program goes on: its own ones, or others of the same kind
//! (`--device-map`).

use std::collections::HashSet;

use crate::device::Device;
use crate::device::driver::DevicePair;
use crate::error::Error;
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

/// For each device of the image that of this host; and what the driver is to be told.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Placement {
    places: Vec<(Uuid, Uuid)>,
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
                device: crate::hex(if news.contains(new) { new } else { old }),
            });
        }
        let was = devices.iter().find(|device| device.uuid == *old);
        let Some(is) = present.iter().find(|device| device.uuid == *new) else {
            let name = was.map_or("device", |was| &was.name);
            return Err(Error::NoDevice { pid, device: format!("{name} {}", crate::hex(new)) });
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
    Ok(Placement { places, pairs })
}

/// The driver wants to hear of every device that the program could see. Where all old ones are of this
/// host those are all of this host: who had to give way goes where there is room.
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
        Device { ordinal: number.into(), uuid: uuid(number), name: name.into(), memory: 1 << 30 }
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
