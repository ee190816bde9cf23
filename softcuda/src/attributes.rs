//! Attributes of streams and of kernel nodes (`CUlaunchAttributeID`): values that are kept and reported. What few
//! of them mean here is known to those who have them.

use std::collections::BTreeMap;

use crate::status::{Code, Outcome};

/// `CUlaunchAttributeValue`.
pub(crate) type Value = [u8; 64];

/// `CUlaunchAttributeID`, those that can be kept.
pub(crate) const ACCESS_WINDOW: u32 = 1;
pub(crate) const COOPERATIVE: u32 = 2;
pub(crate) const SYNCHRONISATION: u32 = 3;
pub(crate) const CLUSTER: u32 = 4;
pub(crate) const CLUSTER_SCHEDULING: u32 = 5;
pub(crate) const PRIORITY: u32 = 8;
pub(crate) const DOMAIN_MAP: u32 = 9;
pub(crate) const DOMAIN: u32 = 10;
pub(crate) const PREFERRED_CLUSTER: u32 = 11;
pub(crate) const CARVEOUT: u32 = 14;

/// Those of streams, and of kernel nodes.
pub(crate) const OF_STREAMS: &[u32] =
    &[ACCESS_WINDOW, SYNCHRONISATION, PRIORITY, DOMAIN_MAP, DOMAIN];
pub(crate) const OF_KERNELS: &[u32] = &[
    ACCESS_WINDOW,
    COOPERATIVE,
    CLUSTER,
    CLUSTER_SCHEDULING,
    PRIORITY,
    DOMAIN_MAP,
    DOMAIN,
    PREFERRED_CLUSTER,
    CARVEOUT,
];

/// The nearest priority that a stream or a node can have.
fn clamped(priority: i32) -> i32 {
    priority.clamp(-5, 0)
}

/// Attributes that have been set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attributes(BTreeMap<u32, Value>);

fn word(value: &Value, index: usize) -> u32 {
    let at = 4 * index;
    u32::from_le_bytes([value[at], value[at + 1], value[at + 2], value[at + 3]])
}

/// A value that begins with a number.
pub(crate) fn number(number: i32) -> Value {
    let mut value = [0; 64];
    value[..4].copy_from_slice(&number.to_le_bytes());
    value
}

/// The number that a value begins with.
pub(crate) fn number_in(value: &Value) -> i32 {
    word(value, 0) as i32
}

/// How many bytes of a value an attribute has.
pub(crate) fn size(id: u32) -> usize {
    match id {
        ACCESS_WINDOW => 32,
        CLUSTER | PREFERRED_CLUSTER => 12,
        DOMAIN_MAP => 2,
        _ => 4,
    }
}

impl Attributes {
    /// Those of a new stream.
    pub(crate) fn with_priority(priority: i32) -> Attributes {
        Attributes(BTreeMap::from([(PRIORITY, number(clamped(priority)))]))
    }

    /// The priority.
    pub(crate) fn priority(&self) -> i32 {
        self.0.get(&PRIORITY).map_or(0, number_in)
    }

    /// The value of an attribute, or what it is before it is set.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an attribute that is none of `known`.
    pub(crate) fn get(&self, id: u32, known: &[u32]) -> Outcome<Value> {
        if !known.contains(&id) {
            return Err(Code::INVALID_VALUE);
        }
        let mut unset = [0; 64];
        match id {
            // As driver 580 has it.
            SYNCHRONISATION => unset = number(-1),
            DOMAIN_MAP => unset[1] = 1,
            _ => {}
        }
        Ok(self.0.get(&id).copied().unwrap_or(unset))
    }

    /// Sets an attribute.
    ///
    /// # Errors
    /// `INVALID_VALUE` for an attribute that is none of `known`, and for a value out of its range; `NOT_SUPPORTED`
    /// for clusters of several blocks.
    pub(crate) fn set(&mut self, id: u32, mut value: Value, known: &[u32]) -> Outcome {
        if !known.contains(&id) {
            return Err(Code::INVALID_VALUE);
        }
        let first = word(&value, 0);
        let is_valid = match id {
            ACCESS_WINDOW => {
                // Address, size, share, properties: the second is for what is not in the share.
                let share = f32::from_bits(word(&value, 4));
                (0.0..=1.0).contains(&share) && word(&value, 5) <= 2 && word(&value, 6) <= 1
            }
            SYNCHRONISATION => (1..=4).contains(&first),
            CLUSTER_SCHEDULING => first <= 2,
            DOMAIN_MAP => value[0] < 4 && value[1] < 4,
            DOMAIN => first <= 1,
            CARVEOUT => (-1..=100).contains(&(first as i32)),
            CLUSTER | PREFERRED_CLUSTER if (0..3).any(|n| word(&value, n) > 1) => {
                return Err(Code::NOT_SUPPORTED);
            }
            _ => true,
        };
        if !is_valid {
            return Err(Code::INVALID_VALUE);
        }
        if id == PRIORITY {
            value = number(clamped(first as i32));
        }
        self.0.insert(id, value);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_checked_and_kept() {
        let mut attributes = Attributes::default();
        let mut set = |id, value| attributes.set(id, number(value), OF_STREAMS);
        assert_eq!(
            [0, 1, 4, 5].map(|n| set(SYNCHRONISATION, n).is_ok()),
            [false, true, true, false]
        );
        assert_eq!([1, 2].map(|n| set(DOMAIN, n).is_ok()), [true, false]);
        assert_eq!(
            [0x0303, 0x0004, 0x0400].map(|n| set(DOMAIN_MAP, n).is_ok()),
            [true, false, false]
        );
        assert_eq!(set(COOPERATIVE, 1), Err(Code::INVALID_VALUE));
        assert_eq!(set(PRIORITY, -99), Ok(()));
        let get = |id| attributes.get(id, OF_STREAMS).map(|value| number_in(&value));
        let all = [SYNCHRONISATION, DOMAIN, DOMAIN_MAP, PRIORITY, ACCESS_WINDOW].map(get);
        assert_eq!(all, [4, 1, 0x0303, -5, 0].map(Ok));
        assert_eq!(get(COOPERATIVE), Err(Code::INVALID_VALUE));
        let mut window = [0; 64];
        window[16..20].copy_from_slice(&1.5_f32.to_le_bytes());
        assert_eq!(attributes.set(ACCESS_WINDOW, window, OF_STREAMS), Err(Code::INVALID_VALUE));
        window[16..20].copy_from_slice(&0.5_f32.to_le_bytes());
        assert_eq!(attributes.set(ACCESS_WINDOW, window, OF_STREAMS), Ok(()));
        assert_eq!(attributes.set(CLUSTER, number(2), OF_KERNELS), Err(Code::NOT_SUPPORTED));
    }
}
