//! Programs that have a root directory and mounts of their own, as in a container.
//!
//! gpucr does not go there: it looks at the files of such a program through the root of its root process, and CRIU saves
//! and makes the mounts. What a container makes for itself (`/proc`, a tmpfs) is CRIU's. What was mounted there from
//! elsewhere, such as a volume, is not: the image has the place alone, and a restore needs something for it.

mod find;
mod mount;
mod named;
mod stage;

pub use find::Container;
pub(crate) use mount::MOST;
pub(crate) use mount::are_possible;
pub use mount::{ContainerError, OuterMount};
pub use named::named;
pub use stage::{Staged, lacking};
