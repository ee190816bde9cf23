//! Initialisation and version.

use super::arguments::{In, Out};
use super::driver_api;
use super::export_table;
use crate::process;
use crate::settings::{self, settings};
use crate::status::Code;

driver_api! {
    early fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        process::initialise()
    }

    early fn cuDriverGetVersion(version: Out<i32>) {
        settings::check()?;
        version.set(settings().driver.version())
    }

    early fn cuGetExportTable(table: Out<u64>, id: In<[u8; 16]>) {
        export_table::give(settings().driver.version(), &table, &id)
    }

    early fn cuProfilerStart() {
        Ok(())
    }

    early fn cuProfilerStop() {
        Ok(())
    }
}
