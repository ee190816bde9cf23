//! What is known of a pointer.

use std::collections::BTreeSet;

use parking_lot::Mutex;

use super::arguments::In;
use super::driver_api;
use crate::address_space;
use crate::context;
use crate::device_memory;
use crate::graph_memory;
use crate::host_memory;
use crate::ipc;
use crate::managed_memory;
use crate::pools;
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::virtual_memory;

/// `CU_MEMORYTYPE_HOST`.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;

/// The ids of memory for which synchronous operations are asked for. No other memory ever has them.
static SYNCHRONOUS: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

struct Pointer {
    address: u64,
    start: u64,
    size: u64,
    kind: u32,
    context: u64,
    device: i32,
    id: u64,
    shareable: bool,
    is_mapping: bool,
    is_managed: bool,
    /// Handle of its pool, or 0.
    pool: u64,
}

fn find(address: u64) -> Option<Pointer> {
    if let Some(memory) = device_memory::find(address) {
        return Some(Pointer {
            address,
            start: memory.address,
            size: memory.size,
            kind: DEVICE,
            context: memory.context,
            device: memory.device as i32,
            id: memory.id,
            shareable: false,
            is_mapping: false,
            is_managed: false,
            pool: 0,
        });
    }
    if let Some((start, mapping)) = virtual_memory::find(address) {
        return Some(Pointer {
            address,
            start,
            size: mapping.size,
            kind: if mapping.backing.is_host() { HOST } else { DEVICE },
            context: 0,
            device: mapping.backing.device() as i32,
            id: mapping.id,
            shareable: mapping.backing.is_shareable(),
            is_mapping: true,
            is_managed: false,
            pool: 0,
        });
    }
    if let Some(memory) = ipc::find(address) {
        return Some(Pointer {
            address,
            start: memory.address,
            size: memory.size,
            kind: DEVICE,
            context: memory.context,
            device: memory.device as i32,
            id: memory.id,
            shareable: false,
            is_mapping: false,
            is_managed: false,
            pool: 0,
        });
    }
    if let Some(memory) = pools::find(address) {
        return Some(Pointer {
            address,
            start: memory.address,
            size: memory.size,
            kind: DEVICE,
            context: 0,
            device: memory.device as i32,
            id: memory.id,
            shareable: false,
            is_mapping: false,
            is_managed: false,
            pool: memory.pool,
        });
    }
    if let Some(memory) = graph_memory::find(address) {
        return Some(Pointer {
            address,
            start: memory.address,
            size: memory.size,
            kind: DEVICE,
            context: 0,
            device: memory.device as i32,
            id: memory.id,
            shareable: false,
            is_mapping: false,
            is_managed: memory.is_managed,
            pool: 0,
        });
    }
    if let Some(memory) = managed_memory::find(address) {
        return Some(Pointer {
            address,
            start: memory.address,
            size: memory.size,
            kind: DEVICE,
            context: memory.context,
            device: context::by_handle(memory.context).map_or(0, |c| c.device as i32),
            id: memory.id,
            shareable: false,
            is_mapping: false,
            is_managed: true,
            pool: memory.pool,
        });
    }
    let memory = host_memory::find(address)?;
    Some(Pointer {
        address,
        start: memory.address,
        size: memory.size,
        kind: HOST,
        context: memory.context,
        device: context::by_handle(memory.context).map_or(0, |c| c.device as i32),
        id: memory.id,
        shareable: false,
        is_mapping: false,
        is_managed: false,
        pool: 0,
    })
}

/// A value and how many bytes of it the attribute has.
enum Value {
    Bool(bool),
    Word(u32),
    Long(u64),
}

impl Value {
    fn store(&self, to: u64) -> Outcome {
        if to == 0 {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller promises room for the attribute that it names.
        unsafe {
            match *self {
                // Four bytes, as a GPU's driver writes them.
                Value::Bool(value) => (to as *mut u32).write_unaligned(value.into()),
                Value::Word(value) => (to as *mut u32).write_unaligned(value),
                Value::Long(value) => (to as *mut u64).write_unaligned(value),
            }
        }
        Ok(())
    }

    fn zero(&self) -> Value {
        match self {
            Value::Bool(_) => Value::Bool(false),
            Value::Word(_) => Value::Word(0),
            Value::Long(_) => Value::Long(0),
        }
    }
}

impl Pointer {
    /// Whether it is host memory of `cuMemCreate` to which nobody has access.
    fn is_bare_host(&self) -> bool {
        self.is_mapping && self.kind == HOST && !address_space::is_accessible(self.address, 1)
    }

    fn attribute(&self, number: u32) -> Outcome<Value> {
        Ok(match number {
            1 if self.context != 0 => Value::Long(self.context),
            // Host memory of `cuMemCreate` is of none.
            1 if self.kind == HOST => Value::Long(0),
            1 => Value::Long(context::top().map_or(0, |context| context.handle)),
            2 => Value::Word(self.kind),
            // As long as nobody has access to such memory, driver 580 tells no address.
            3 | 4 if self.is_bare_host() => return Err(Code::INVALID_VALUE),
            3 => Value::Long(self.address),
            4 if self.kind == HOST || self.is_managed => Value::Long(self.address),
            4 => return Err(Code::INVALID_VALUE),
            6 => Value::Bool(SYNCHRONOUS.lock().contains(&self.id)),
            7 => Value::Long(self.id),
            8 => Value::Bool(self.is_managed),
            9 => Value::Word(self.device as u32),
            10 => Value::Bool(device_memory::find(self.address).is_some()), // legacy IPC
            11 => Value::Long(self.start),
            12 => Value::Long(self.size),
            13 => Value::Bool(self.kind == HOST || address_space::is_accessible(self.address, 1)),
            14 => Value::Long(self.shareable.into()),
            15 => Value::Bool(false), // RDMA
            16 => Value::Word(address_space::access(self.address) as u32),
            17 => Value::Long(self.pool),
            18 if self.is_mapping => Value::Long(self.size),
            19 if self.is_mapping => Value::Long(self.start),
            18 | 19 => Value::Long(0),
            20 => Value::Long(self.id),
            21 => Value::Bool(false), // decompression
            // The part of the device's memory that it is bound to: none. `cudart` 13.4 asks older drivers too.
            22 if settings().driver.version() >= 13_040 => Value::Word(-1_i32 as u32),
            22.. => return Err(Code::INVALID_VALUE),
            _ => return Err(Code::NOT_SUPPORTED),
        })
    }
}

/// What `cuPointerGetAttributes` stores for a pointer that the driver does not know.
fn unknown(number: u32) -> Outcome<Value> {
    let nothing = Pointer {
        address: 0,
        start: 0,
        size: 0,
        kind: HOST,
        context: 0,
        device: -2,
        id: 0,
        shareable: false,
        is_mapping: false,
        is_managed: false,
        pool: 0,
    };
    match number {
        9 => Ok(Value::Word(-2_i32 as u32)), // no device
        number => nothing.attribute(number).map(|value| value.zero()),
    }
}

driver_api! {
    call fn cuPointerGetAttribute(out: u64, attribute: u32, address: u64) {
        let pointer = find(address).ok_or(Code::INVALID_VALUE)?;
        pointer.attribute(attribute)?.store(out)
    }

    call fn cuPointerGetAttributes(
        count: u32, attributes: In<u32>, out: In<u64>, address: u64,
    ) {
        if count == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let pointer = find(address);
        for index in 0..count as usize {
            let number = attributes.at(index)?;
            let value = match &pointer {
                Some(pointer) => match pointer.attribute(number) {
                    Err(Code::INVALID_VALUE) => Value::Long(0),
                    other => other?,
                },
                None => unknown(number)?,
            };
            value.store(out.at(index)?)?;
        }
        Ok(())
    }

    call fn cuPointerSetAttribute(value: In<u32>, attribute: u32, address: u64) {
        // Only "synchronous operations" can be set. They are here, whether that is set or not.
        let pointer = find(address).filter(|_| attribute == 6 && !value.is_null());
        let pointer = pointer.ok_or(Code::INVALID_VALUE)?;
        // As a GPU's driver, which answers so for mapped memory (seen with 580).
        if pointer.is_mapping {
            return Err(Code::NOT_SUPPORTED);
        }
        let mut synchronous = SYNCHRONOUS.lock();
        if value.at(0)? != 0 {
            synchronous.insert(pointer.id);
        } else {
            synchronous.remove(&pointer.id);
        }
        Ok(())
    }
}
