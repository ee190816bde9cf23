//! What is shared with a graphics library: OpenGL, EGL, VDPAU, and contexts of Direct3D or Vulkan (`CIG`).

use super::kind::{Carrier, Kind};

pub(super) struct Graphics;

impl Kind for Graphics {
    fn name(&self) -> &'static str {
        "graphics interoperation"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &[
            "cuEGL",
            "cuGL",
            "cuGraphicsEGL",
            "cuGraphicsGL",
            "cuGraphicsVDPAU",
            "cuStreamBeginCaptureToCig",
            "cuVDPAU",
        ]
    }
}
