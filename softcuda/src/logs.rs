//! The log of failed calls that programs can ask the driver for. It is bounded: old messages give way.

use std::collections::VecDeque;

use parking_lot::Mutex;

use crate::handles::new_handle;
use crate::status::{Code, Outcome};

/// The most bytes of messages that are kept, as NVIDIA documents it.
const CAPACITY: usize = 25_600;
/// What is said in the place of messages that are gone, or for which there is no room.
const LEFT_OUT: &str = "[earlier messages are left out]\n";
/// `CU_LOG_LEVEL_ERROR`.
const ERROR: u32 = 0;

/// A function of the program: its data, level, message and its length.
pub(crate) type Callback = unsafe extern "C" fn(u64, u32, *const u8, usize);

#[derive(Default)]
struct Log {
    /// Messages, each with its newline.
    messages: VecDeque<String>,
    bytes: usize,
    /// The number of the next message.
    next: u32,
    callbacks: Vec<(u64, Callback, u64)>,
}

static LOG: Mutex<Option<Log>> = Mutex::new(None);

/// Adds a message, and tells it to those who want to hear. No lock of the driver may be held.
pub(crate) fn add(message: &str) {
    let mut guard = LOG.lock();
    let log = guard.get_or_insert_default();
    log.messages.push_back(format!("{message}\n"));
    log.bytes += message.len() + 1;
    log.next = log.next.wrapping_add(1);
    while log.bytes > CAPACITY {
        let Some(oldest) = log.messages.pop_front() else { break };
        log.bytes -= oldest.len();
    }
    let callbacks = log.callbacks.clone();
    drop(guard);
    for (_, callback, data) in callbacks {
        let text = format!("{message}\0");
        // SAFETY: the program promises a function that may be called with its data and a message.
        unsafe { callback(data, ERROR, text.as_ptr(), message.len()) };
    }
}

/// Has a function hear of all messages from now on; gives its handle.
pub(crate) fn register(callback: Callback, data: u64) -> u64 {
    let handle = new_handle();
    LOG.lock().get_or_insert_default().callbacks.push((handle, callback, data));
    handle
}

/// Takes a function off.
///
/// # Errors
/// `INVALID_VALUE` for an unknown handle.
pub(crate) fn unregister(handle: u64) -> Outcome {
    let mut guard = LOG.lock();
    let callbacks = &mut guard.get_or_insert_default().callbacks;
    let index = callbacks.iter().position(|(known, ..)| *known == handle);
    callbacks.remove(index.ok_or(Code::INVALID_VALUE)?);
    Ok(())
}

/// The number of the next message.
pub(crate) fn end() -> u32 {
    LOG.lock().get_or_insert_default().next
}

/// All messages from a number on as far as they are there, at most so many bytes: the latest ones. Says in front if
/// some are left out.
///
/// # Errors
/// `INVALID_VALUE` when there are messages and there is no room for any.
pub(crate) fn since(from: Option<u32>, room: usize) -> Outcome<String> {
    let mut guard = LOG.lock();
    let log = guard.get_or_insert_default();
    let first = log.next.wrapping_sub(log.messages.len() as u32);
    let skipped = from.map_or(0, |from| from.wrapping_sub(first) as i32);
    let mut is_whole = skipped >= 0 && (from.is_some() || first == 0);
    let wanted: Vec<&String> = log.messages.iter().skip(skipped.max(0) as usize).collect();
    let mut text_size: usize = wanted.iter().map(|message| message.len()).sum();
    let mut left_out = 0;
    while left_out < wanted.len() {
        let head = if is_whole { 0 } else { LEFT_OUT.len() };
        if text_size + head <= room {
            break;
        }
        is_whole = false;
        text_size -= wanted[left_out].len();
        left_out += 1;
    }
    if wanted.is_empty() {
        return Ok(String::new());
    }
    if left_out == wanted.len() {
        return Err(Code::INVALID_VALUE);
    }
    let head = if is_whole { "" } else { LEFT_OUT };
    let messages = wanted[left_out..].iter().map(|message| message.as_str());
    Ok(std::iter::once(head).chain(messages).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_messages_give_way() {
        let from = end();
        assert_eq!(since(Some(from), 0), Ok(String::new()));
        let long = "one".repeat(50);
        add(&long);
        add("two");
        assert_eq!(since(Some(from), 1000).unwrap(), format!("{long}\ntwo\n"));
        assert_eq!(since(Some(from + 1), 100).unwrap(), "two\n");
        // Room for the latest one, and for what says so.
        let said = format!("{LEFT_OUT}two\n");
        assert_eq!(since(Some(from), said.len()), Ok(said));
        assert_eq!(since(Some(from), 3), Err(Code::INVALID_VALUE));
        for _ in 0..CAPACITY {
            add("more");
        }
        let all = since(Some(from), usize::MAX).unwrap();
        assert!(all.starts_with(LEFT_OUT) && all.len() <= CAPACITY + LEFT_OUT.len());
        assert_eq!(unregister(7), Err(Code::INVALID_VALUE));
    }
}
