//! The log of failed calls.

use super::arguments::{Out, Text};
use super::driver_api;
use crate::logs::{self, Callback};
use crate::status::{Code, Outcome};

/// Messages from an iterator on, which then stands at their end.
fn dump(iterator: &Out<u32>, room: usize, flags: u32) -> Outcome<String> {
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let from = iterator.get().ok();
    let end = logs::end();
    let text = logs::since(from, room)?;
    iterator.set_if_wanted(end);
    Ok(text)
}

driver_api! {
    call fn cuLogsRegisterCallback(callback: Option<Callback>, data: u64, out: Out<u64>) {
        let callback = callback.ok_or(Code::INVALID_VALUE)?;
        out.set_if_wanted(logs::register(callback, data));
        Ok(())
    }

    call fn cuLogsUnregisterCallback(handle: u64) {
        logs::unregister(handle)
    }

    call fn cuLogsCurrent(out: Out<u32>, flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        out.set(logs::end())
    }

    call fn cuLogsDumpToFile(iterator: Out<u32>, path: Text, flags: u32) {
        let path = path.get()?;
        let text = dump(&iterator, usize::MAX, flags)?;
        std::fs::write(path, text).map_err(|_| Code::INVALID_VALUE)
    }

    call fn cuLogsDumpToMemory(
        iterator: Out<u32>, buffer: Out<u8>, size: Out<usize>, flags: u32,
    ) {
        buffer.check()?;
        let room = size.get()?.checked_sub(1).ok_or(Code::INVALID_VALUE)?;
        let text = dump(&iterator, room, flags).inspect_err(|_| size.set_if_wanted(0))?;
        buffer.set_all(text.bytes().chain([0]))?;
        size.set(text.len())
    }
}
