//! Faults on demand: `SOFTCUDA_FAULT="cuMemCreate:3:2,cuMemMap:1:999"` makes the third call of
//! `cuMemCreate` return 2 and the first call of `cuMemMap` return 999, without doing anything.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::status::{Code, Outcome};

struct Fault {
    function: String,
    call: u64,
    code: u32,
    seen: AtomicU64,
}

/// Reads the list; entries that make no sense are named on standard error and left out.
fn parse(list: &str) -> Vec<Fault> {
    let one = |text: &str| {
        let mut parts = text.trim().split(':');
        let function = parts.next().filter(|name| name.starts_with("cu"))?.to_owned();
        let call = parts.next()?.parse().ok().filter(|call| *call > 0)?;
        let code = parts.next()?.parse().ok().filter(|code| *code > 0)?;
        parts.next().is_none().then_some(Fault { function, call, code, seen: AtomicU64::new(0) })
    };
    let mut faults = Vec::new();
    for text in list.split(',').filter(|text| !text.trim().is_empty()) {
        match one(text) {
            Some(fault) => faults.push(fault),
            None => eprintln!("softcuda: SOFTCUDA_FAULT: cannot understand \"{text}\""),
        }
    }
    faults
}

fn check_in(faults: &[Fault], function: &str) -> Outcome {
    for fault in faults {
        if fault.function == function
            && fault.seen.fetch_add(1, Ordering::Relaxed) + 1 == fault.call
        {
            return Err(Code(fault.code));
        }
    }
    Ok(())
}

/// Counts a call; fails when the environment wants this call to fail.
///
/// # Errors
/// The code from the environment.
pub(crate) fn check(function: &str) -> Outcome {
    static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
    let faults = FAULTS.get_or_init(|| parse(&std::env::var("SOFTCUDA_FAULT").unwrap_or_default()));
    if faults.is_empty() { Ok(()) } else { check_in(faults, function) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_named_call_fails_once() {
        let faults = parse("cuMemCreate:2:2, cuMemMap:1:999,nonsense,cuX:0:1,cuY:1:1:1");
        assert_eq!(faults.len(), 2);
        assert_eq!(check_in(&faults, "cuMemCreate"), Ok(()));
        assert_eq!(check_in(&faults, "cuMemMap"), Err(Code(999)));
        assert_eq!(check_in(&faults, "cuMemCreate"), Err(Code(2)));
        assert_eq!(check_in(&faults, "cuMemCreate"), Ok(()));
        assert_eq!(check_in(&faults, "cuMemUnmap"), Ok(()));
    }
}
