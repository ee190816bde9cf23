//! Device memory that the program itself makes with `cuMemCreate` and maps where it likes. Its blocks are in the
//! manifest one by one; an agent counts their bytes with the bytes of [the heap](super::heap).

use super::kind::{Carrier, Kind};

pub(super) struct Program;

impl Kind for Program {
    fn name(&self) -> &'static str {
        "cuMemCreate"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Gpucr
    }
}
