//! On which of the host's devices each device of this process is: the one with its number, until a restore
//! moves the process.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::settings::MAX_DEVICES;
use crate::status::{Code, Outcome};

/// Its own number, and what was added to it.
static MOVED: [AtomicU8; MAX_DEVICES] = [const { AtomicU8::new(0) }; MAX_DEVICES];

/// The number of the host's device that device `ordinal` is on.
pub(crate) fn of(ordinal: usize) -> usize {
    (ordinal + usize::from(MOVED[ordinal].load(Ordering::Relaxed))) % MAX_DEVICES
}

/// The device of this process that is on a device of the host.
pub(crate) fn ordinal_on(number: usize, devices: usize) -> Option<usize> {
    (0..devices).find(|ordinal| of(*ordinal) == number)
}

/// Where a list of pairs puts a device of the host.
pub(crate) fn moved(encoded: u32, number: usize) -> usize {
    let new = if number < 8 { encoded >> (4 * number) & 15 } else { 0 };
    if new == 0 { number } else { new as usize - 1 }
}

/// A list of pairs of the host's devices, old and new, as one number, of which 0 is an empty list.
///
/// # Errors
/// `INVALID_VALUE`: a device is named twice. `NOT_SUPPORTED`: one is beyond the eighth.
pub(crate) fn encode(pairs: impl Iterator<Item = (usize, usize)>) -> Outcome<u32> {
    let mut encoded = 0;
    for (old, new) in pairs {
        if old.max(new) >= 8 {
            return Err(Code::NOT_SUPPORTED);
        }
        if encoded >> (4 * old) & 15 != 0 {
            return Err(Code::INVALID_VALUE);
        }
        encoded |= (new as u32 + 1) << (4 * old);
    }
    Ok(encoded)
}

/// Moves the process. As with the real driver, the pairs must name every device of the host, each once as
/// the old and once as the new one.
///
/// # Errors
/// `INVALID_VALUE`: they do not; nothing is moved.
pub(crate) fn move_to(encoded: u32, devices: usize) -> Outcome {
    if encoded == 0 {
        return Ok(());
    }
    let new = |old: usize| (encoded >> (4 * old) & 15).checked_sub(1).map(|new| new as usize);
    let all: Option<Vec<usize>> = (0..devices.min(8)).map(new).collect();
    let mut sorted = all.ok_or(Code::INVALID_VALUE)?;
    sorted.sort_unstable();
    let others = u64::from(encoded) >> (4 * devices.min(8));
    if devices > 8 || others != 0 || !sorted.into_iter().eq(0..devices) {
        return Err(Code::INVALID_VALUE);
    }
    for (ordinal, moved) in MOVED.iter().enumerate().take(devices) {
        let to = new(of(ordinal)).unwrap_or_default();
        let added = (to + MAX_DEVICES - ordinal) % MAX_DEVICES;
        moved.store(added as u8, Ordering::Relaxed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_device_must_be_named_once_on_each_side() {
        let tried = |pairs: &[(usize, usize)]| move_to(encode(pairs.iter().copied())?, 2);
        for pairs in
            [&[(0, 1)][..], &[(0, 0)], &[(0, 1), (1, 1)], &[(0, 1), (0, 0)], &[(0, 1), (1, 2)]]
        {
            assert_eq!(tried(pairs), Err(Code::INVALID_VALUE), "{pairs:?}");
        }
        assert_eq!(tried(&[(0, 8)]), Err(Code::NOT_SUPPORTED));
        assert_eq!([of(0), of(1), of(2)], [0, 1, 2]);
        // Moved twice it is back.
        for at in [[1, 0], [0, 1]] {
            assert_eq!(tried(&[(0, 1), (1, 0)]), Ok(()));
            assert_eq!([of(0), of(1)], at);
        }
        assert_eq!(tried(&[]), Ok(()));
    }
}
