//! Calls of CUDA's device runtime, which is no code of the program's.

use super::{Lower, Lowered};
use crate::ptx::code::{CallSite, DeviceCall, Op, Slot};

/// A function by its name without what compilers put before and behind it, the sizes of its arguments and of its
/// result in bytes, and what it does.
type Known = (&'static str, &'static [u32], u32, DeviceCall);

/// As `cuda_device_runtime_api.h` declares them; a `dim3` has 12 bytes.
const KNOWN: &[Known] = &[
    ("GetParameterBuffer", &[8, 8], 8, DeviceCall::Room),
    ("GetParameterBufferV2", &[8, 12, 12, 4], 8, DeviceCall::RoomOfLaunch),
    ("LaunchDevice", &[8, 8, 12, 12, 4, 8], 4, DeviceCall::Launch),
    ("LaunchDeviceV2", &[8, 8], 4, DeviceCall::LaunchOfRoom),
    ("GetLastError", &[], 4, DeviceCall::LastError { taken: true }),
    ("PeekAtLastError", &[], 4, DeviceCall::LastError { taken: false }),
    ("GetDevice", &[8], 4, DeviceCall::Device),
    ("GetDeviceCount", &[8], 4, DeviceCall::DeviceCount),
    ("StreamCreateWithFlags", &[8, 4], 4, DeviceCall::Handle),
    ("StreamDestroy", &[8], 4, DeviceCall::Nothing),
    ("StreamWaitEvent", &[8, 8, 4], 4, DeviceCall::Nothing),
    ("EventCreateWithFlags", &[8, 4], 4, DeviceCall::Handle),
    ("EventRecord", &[8, 8], 4, DeviceCall::Nothing),
    ("EventRecordWithFlags", &[8, 8, 4], 4, DeviceCall::Nothing),
    ("EventDestroy", &[8], 4, DeviceCall::Nothing),
    ("Malloc", &[8, 8], 4, DeviceCall::Allocate),
    ("Free", &[8], 4, DeviceCall::Free),
    ("MemcpyAsync", &[8, 8, 8, 4, 8], 4, DeviceCall::Copy),
    ("MemsetAsync", &[8, 4, 8, 8], 4, DeviceCall::Fill),
];

/// The name within that of a function of the device runtime: the prefix is the runtime's generation, the suffix means
/// the default stream of a thread, which is that of its block here.
fn name_of(name: &str) -> Option<&str> {
    let name = name.strip_prefix("__cudaCDP2").or_else(|| name.strip_prefix("cuda"))?;
    Some(name.strip_suffix("_ptsz").unwrap_or(name))
}

impl Lower<'_, '_> {
    /// A call of a function without a body.
    pub(super) fn device_call(&mut self, name: &str, site: CallSite) -> Lowered<Op> {
        let Some(called) = name_of(name) else { return Err(self.position.undefined(name)) };
        let sizes = |slots: &[Slot]| slots.iter().map(|slot| slot.size).collect::<Vec<_>>();
        let found = KNOWN.iter().find(|(known, ..)| *known == called);
        let found = found.filter(|(_, arguments, result, _)| {
            sizes(&site.args) == *arguments && sizes(&site.returns) == [*result]
        });
        let Some((_, _, _, call)) = found else {
            let what = format!("{name}, a function of CUDA's device runtime");
            return Err(self.position.unsupported(what));
        };
        self.code.uses_heap |= matches!(call, DeviceCall::Allocate | DeviceCall::Free);
        self.code.launches = true;
        Ok(Op::DeviceRuntime(*call, self.call_site(site)))
    }
}
