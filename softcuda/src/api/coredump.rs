//! Settings of core dumps: kept and reported. No core dumps are made.

use parking_lot::Mutex;

use super::arguments::{In, Out};
use super::driver_api;
use crate::context;
use crate::status::{Code, Outcome};

/// `CUcoredumpSettings`.
const ON_EXCEPTION: u32 = 1;
const TRIGGER_HOST: u32 = 2;
const LIGHTWEIGHT: u32 = 3;
const USER_TRIGGER: u32 = 4;
const FILE: u32 = 5;
const PIPE: u32 = 6;
const GENERATION_FLAGS: u32 = 7;
/// The longest name of a file, with its NUL.
const LONGEST: usize = 1024;

/// What can be set.
#[derive(Clone)]
struct Settings {
    on_exception: bool,
    trigger_host: bool,
    lightweight: bool,
    user_trigger: bool,
    file: Vec<u8>,
    flags: u32,
}

/// For the process, and for contexts that differ.
struct All {
    global: Settings,
    contexts: Vec<(u64, Settings)>,
}

static ALL: Mutex<All> = Mutex::new(All {
    global: Settings {
        on_exception: false,
        trigger_host: true,
        lightweight: false,
        user_trigger: false,
        file: Vec::new(),
        flags: 0,
    },
    contexts: Vec::new(),
});

impl All {
    /// The settings of a context, or of the process.
    fn of(&mut self, context: Option<u64>) -> &mut Settings {
        let Some(context) = context else { return &mut self.global };
        let index = self.contexts.iter().position(|(known, _)| *known == context);
        let index = index.unwrap_or_else(|| {
            self.contexts.push((context, self.global.clone()));
            self.contexts.len() - 1
        });
        &mut self.contexts[index].1
    }
}

/// Fails for settings that are of the process only.
fn check(id: u32, context: Option<u64>) -> Outcome {
    if context.is_some() && matches!(id, USER_TRIGGER | PIPE) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

fn get(id: u32, out: &Out<u8>, size: &Out<usize>, context: Option<u64>) -> Outcome {
    check(id, context)?;
    let mut all = ALL.lock();
    let settings = all.of(context);
    let value = match id {
        ON_EXCEPTION => vec![settings.on_exception.into()],
        TRIGGER_HOST => vec![settings.trigger_host.into()],
        LIGHTWEIGHT => vec![settings.lightweight.into()],
        USER_TRIGGER => vec![settings.user_trigger.into()],
        GENERATION_FLAGS => settings.flags.to_le_bytes().to_vec(),
        FILE | PIPE => {
            let mut name = if id == FILE { settings.file.clone() } else { Vec::new() };
            name.push(0);
            // As much of it as there is room for, and zeros behind.
            name.resize(size.get()?.min(LONGEST), 0);
            name
        }
        _ => return Err(Code::INVALID_VALUE),
    };
    if out.address() == 0 {
        return size.set(value.len());
    }
    if size.get()? != value.len() && !matches!(id, FILE | PIPE) {
        return Err(Code::INVALID_VALUE);
    }
    out.set_all(value)
}

fn set(id: u32, value: &In<u8>, size: &Out<usize>, context: Option<u64>) -> Outcome {
    check(id, context)?;
    let size = size.get()?;
    if value.is_null() || size == 0 || size > LONGEST {
        return Err(Code::INVALID_VALUE);
    }
    let given: Vec<u8> = (0..size).map(|index| value.at(index)).collect::<Outcome<_>>()?;
    let mut all = ALL.lock();
    let settings = all.of(context);
    let flag = match id {
        ON_EXCEPTION => &mut settings.on_exception,
        TRIGGER_HOST => &mut settings.trigger_host,
        LIGHTWEIGHT => &mut settings.lightweight,
        USER_TRIGGER => &mut settings.user_trigger,
        FILE => {
            let end = given.iter().position(|byte| *byte == 0).unwrap_or(given.len());
            settings.file = given[..end].to_vec();
            return Ok(());
        }
        // Too late once the driver is initialised, as driver 580 has it.
        PIPE => return Err(Code::NOT_SUPPORTED),
        GENERATION_FLAGS => {
            let number = given.try_into().map_err(|_| Code::INVALID_VALUE)?;
            settings.flags = u32::from_le_bytes(number);
            return Ok(());
        }
        _ => return Err(Code::INVALID_VALUE),
    };
    let &[given] = given.as_slice() else { return Err(Code::INVALID_VALUE) };
    *flag = given != 0;
    Ok(())
}

fn own() -> Outcome<Option<u64>> {
    Ok(Some(context::current()?.handle))
}

driver_api! {
    call fn cuCoredumpGetAttribute(id: u32, out: Out<u8>, size: Out<usize>) {
        get(id, &out, &size, own()?)
    }

    call fn cuCoredumpGetAttributeGlobal(id: u32, out: Out<u8>, size: Out<usize>) {
        get(id, &out, &size, None)
    }

    call fn cuCoredumpSetAttribute(id: u32, value: In<u8>, size: Out<usize>) {
        set(id, &value, &size, own()?)
    }

    call fn cuCoredumpSetAttributeGlobal(id: u32, value: In<u8>, size: Out<usize>) {
        set(id, &value, &size, None)
    }
}
