//! Initialisation and version.

use super::arguments::{In, Out};
use super::driver_api;
use super::export_table;
use crate::process;
use crate::status::Code;

/// The version of the API, as `cuDriverGetVersion` gives it.
pub(crate) const DRIVER_VERSION: i32 = 13000;

driver_api! {
    early fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        process::initialise()
    }

    early fn cuDriverGetVersion(version: Out<i32>) {
        version.set(DRIVER_VERSION)
    }

    early fn cuGetExportTable(table: Out<u64>, id: In<[u8; 16]>) {
        export_table::give(DRIVER_VERSION, &table, &id)
    }

    early fn cuProfilerStart() {
        Ok(())
    }

    early fn cuProfilerStop() {
        Ok(())
    }
}
