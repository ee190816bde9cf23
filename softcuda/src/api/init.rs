//! Initialisation and version.

use super::arguments::{Address, Out};
use super::driver_api;
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

    early fn cuGetExportTable(table: Out<u64>, _id: Address) {
        // NVIDIA's private tables: the runtime library asks for them and refuses to go on.
        table.set(0)?;
        Err(Code::NOT_FOUND)
    }

    early fn cuProfilerStart() {
        Ok(())
    }

    early fn cuProfilerStop() {
        Ok(())
    }
}
