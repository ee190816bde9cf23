//! The pools of managed memory that the driver has from the beginning, and those that a program chose instead: one
//! for each place where the memory should stay.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::managed_memory::Location;
use crate::pools::{self, Kind, Pool};
use crate::status::{Code, Outcome};

/// The pools of one place.
struct Place {
    preferred: Option<Location>,
    default: Arc<Pool>,
    /// Handle of the one that the program chose; it may be destroyed since.
    chosen: u64,
}

/// Places in the order in which they were asked for.
static PLACES: Mutex<Vec<Place>> = Mutex::new(Vec::new());

fn with<T>(preferred: Option<Location>, work: impl FnOnce(&mut Place) -> T) -> T {
    let mut places = PLACES.lock();
    let known = places.iter().position(|place| place.preferred == preferred);
    let index = known.unwrap_or_else(|| {
        let default = pools::create(0, 0, Kind::Managed { preferred, is_default: true });
        places.push(Place { preferred, chosen: default.handle, default });
        places.len() - 1
    });
    work(&mut places[index])
}

/// The pool that a place has from the beginning.
pub(crate) fn default_of(preferred: Option<Location>) -> Arc<Pool> {
    with(preferred, |place| place.default.clone())
}

/// The pool that was chosen for a place, or the one from the beginning.
pub(crate) fn current_of(preferred: Option<Location>) -> Arc<Pool> {
    with(preferred, |place| {
        pools::by_handle(place.chosen).unwrap_or_else(|_| place.default.clone())
    })
}

/// Chooses the pool of a place.
///
/// # Errors
/// `INVALID_VALUE` for a pool of another place or of a device.
pub(crate) fn set_current(preferred: Option<Location>, pool: &Pool) -> Outcome {
    match pool.kind() {
        Kind::Managed { preferred: own, .. } if own == preferred => {
            with(preferred, |place| place.chosen = pool.handle);
            Ok(())
        }
        _ => Err(Code::INVALID_VALUE),
    }
}
