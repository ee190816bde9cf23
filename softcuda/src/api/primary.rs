//! Primary contexts.

use super::arguments::Out;
use super::driver_api;
use crate::lifetime;
use crate::settings::device;

driver_api! {
    call fn cuDevicePrimaryCtxRetain(out: Out<u64>, ordinal: i32) {
        let device = device(ordinal)?;
        out.check()?;
        out.set(lifetime::retain_primary(device)?.handle)
    }

    call fn cuDevicePrimaryCtxRelease(ordinal: i32) {
        lifetime::release_primary(device(ordinal)?)
    }

    call fn cuDevicePrimaryCtxRelease_v2(ordinal: i32) {
        lifetime::release_primary(device(ordinal)?)
    }

    call fn cuDevicePrimaryCtxReset(ordinal: i32) {
        lifetime::reset_primary(device(ordinal)?);
        Ok(())
    }

    call fn cuDevicePrimaryCtxReset_v2(ordinal: i32) {
        lifetime::reset_primary(device(ordinal)?);
        Ok(())
    }

    call fn cuDevicePrimaryCtxGetState(ordinal: i32, flags: Out<u32>, active: Out<i32>) {
        let (set, exists) = lifetime::primary_state(device(ordinal)?);
        flags.set(set)?;
        active.set(exists.into())
    }

    call fn cuDevicePrimaryCtxSetFlags(ordinal: i32, flags: u32) {
        lifetime::set_primary_flags(device(ordinal)?, flags);
        Ok(())
    }

    call fn cuDevicePrimaryCtxSetFlags_v2(ordinal: i32, flags: u32) {
        lifetime::set_primary_flags(device(ordinal)?, flags);
        Ok(())
    }
}
