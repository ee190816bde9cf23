//! Multicast objects: what the program does with them is [followed](crate::state::memory).
//!
//! A driver that is asked to bind or to map waits until all devices are added, by whichever processes. Here the program
//! waits outside of the gate, so that it can be dumped meanwhile, and without the tables, by which other processes get
//! the object whose devices are awaited.

use std::thread;
use std::time::Duration;

use gpucr_wire::peers::{PeerReply, PeerRequest};

use super::offered::Offered;
use super::owners::{ask_owner_about, tell_owners};
use super::support::{enter_whole, hold_for, put, written};
use crate::abi::real;
use crate::abi::types::{Code, ERROR_INVALID_VALUE, MulticastProp, SUCCESS};
use crate::state::gate::Inside;
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, Asked, Incomplete, Origin, Source};
use crate::state::peers;
use crate::usage;

/// Between two looks whether all devices are added.
const PAUSE: Duration = Duration::from_millis(2);

/// The object of another process.
fn offered(origin: Origin) -> Offered {
    let Origin { owner, pid, namespace, block } = origin;
    Offered { owner, namespace, pid, name: block, address: 0 }
}

/// Whether all devices of an object were added; `None`: its owner does not tell, who has ended.
fn is_complete(missing: Incomplete) -> Option<bool> {
    let Incomplete::Of(origin) = missing else { return Some(false) };
    let request = PeerRequest::Team { owner: origin.owner, object: origin.block };
    match ask_owner_about(&offered(origin), &request) {
        Some(PeerReply::Team { is_complete }) => Some(is_complete),
        _ => None,
    }
}

/// Passes the gate with a call about a handle; if that is of a multicast object and `waits`, once all its devices are there.
pub(super) fn enter_complete(handle: u64, waits: bool) -> Inside {
    enter_once(handle, || waits)
}

/// The same for a call that waits if this says so when the gate is passed.
fn enter_once(handle: u64, waits: impl Fn() -> bool) -> Inside {
    loop {
        let inside = enter_whole();
        if !waits() {
            return inside;
        }
        let missing = memory::lock().incomplete(handle);
        match missing.and_then(is_complete) {
            Some(false) => {}
            Some(true) => {
                memory::lock().set_complete(handle);
                return inside;
            }
            // Where nobody can tell the driver waits itself.
            None => return inside,
        }
        drop(inside);
        thread::sleep(PAUSE);
    }
}

/// Binds: `bind` calls the driver with its handles of the object and of the memory.
fn bind(asked: Asked, name: &'static str, bind: impl FnOnce(u64, u64) -> Code) -> Code {
    let _inside = enter_once(asked.object, || memory::lock().can_be_bound(&asked));
    let begun = memory::lock().begin_to_bind(&asked);
    match begun {
        Some(Ok(begun)) => {
            let code = bind(begun.real, begun.memory);
            memory::lock().bound(&Driver, &begun, code == SUCCESS);
            tell_owners();
            code
        }
        Some(Err(code)) => code,
        None => {
            let (object, source) = untracked(&asked);
            if memory::is_marked(object) || memory::is_marked(source) {
                return ERROR_INVALID_VALUE;
            }
            let code = bind(object, source);
            if code == SUCCESS {
                usage::record(name);
            }
            code
        }
    }
}

/// The driver's handles for what is not all followed. What `cuMemAlloc` gives is not to be bound by its address.
fn untracked(asked: &Asked) -> (u64, u64) {
    let memory = memory::lock();
    let object = memory.real_object(asked.object).unwrap_or(asked.object);
    let source = match asked.source {
        Source::Memory(handle, _) => memory.real_handle(handle),
        Source::Address(address) if memory.touches_heap(address, asked.size.max(1)) => 0,
        Source::Address(address) => address,
    };
    (object, source)
}

/// Binds memory at an address, at which the driver finds it.
fn bind_address(
    asked: Asked,
    name: &'static str,
    call: impl FnOnce(u64, u64) -> Code,
    address: u64,
) -> Code {
    bind(asked, name, |object, memory| call(object, if memory == 0 { 0 } else { address }))
}

exported! {
    fn cuMulticastCreate(out: *mut u64, properties: *const MulticastProp) {
        let _inside = enter_whole();
        // SAFETY: by the function's contract null or such a structure.
        if let Some(asked) = unsafe { properties.as_ref() }.filter(|_| !out.is_null()) {
            let mut memory = memory::lock();
            memory.tidy_objects(&Driver);
            if let Ok(handle) = memory.create_object(&Driver, *asked) {
                return put(out, Ok(handle));
            }
        }
        // The driver says why, or refuses our addition to what was asked for, and then the program gets what it wants.
        let code = call!(cuMulticastCreate(out, properties));
        if code == SUCCESS {
            memory::lock().foreign_made(written(out), "cuMulticastCreate");
        }
        code
    }
    fn cuMulticastAddDevice(multicast: u64, device: i32) {
        let _inside = enter_whole();
        let mut memory = memory::lock();
        let Some(object) = memory.real_object(multicast) else {
            if memory::is_marked(multicast) {
                return ERROR_INVALID_VALUE;
            }
            let code = call!(cuMulticastAddDevice(multicast, device));
            if code == SUCCESS {
                memory.foreign_used(multicast, "cuMulticastAddDevice");
            }
            return code;
        };
        let code = call!(cuMulticastAddDevice(object, device));
        let owner = if code == SUCCESS { memory.device_added(multicast, device) } else { None };
        drop(memory);
        if let (Some(origin), Some(adder)) = (owner, peers::identity()) {
            let (owner, object, device) = (origin.owner, origin.block, real::uuid(device));
            // One that has ended need not know.
            ask_owner_about(&offered(origin), &PeerRequest::Added { owner, object, device, adder });
        }
        code
    }
    fn cuMulticastBindAddr(multicast: u64, offset: usize, address: u64, size: usize, flags: u64) {
        let asked = Asked {
            object: multicast,
            device: None,
            offset: offset as u64,
            source: Source::Address(address),
            size: size as u64,
            flags,
        };
        bind_address(asked, "cuMulticastBindAddr", |object, address| {
            call!(cuMulticastBindAddr(object, offset, address, size, flags))
        }, address)
    }
    fn cuMulticastBindAddr_v2(
        multicast: u64, device: i32, offset: usize, address: u64, size: usize, flags: u64,
    ) {
        let asked = Asked {
            object: multicast,
            device: Some(device),
            offset: offset as u64,
            source: Source::Address(address),
            size: size as u64,
            flags,
        };
        bind_address(asked, "cuMulticastBindAddr_v2", |object, address| {
            call!(cuMulticastBindAddr_v2(object, device, offset, address, size, flags))
        }, address)
    }
    fn cuMulticastBindMem(
        multicast: u64, offset: usize, handle: u64, handle_offset: usize, size: usize, flags: u64,
    ) {
        let asked = Asked {
            object: multicast,
            device: None,
            offset: offset as u64,
            source: Source::Memory(handle, handle_offset as u64),
            size: size as u64,
            flags,
        };
        bind(asked, "cuMulticastBindMem", |object, memory| {
            call!(cuMulticastBindMem(object, offset, memory, handle_offset, size, flags))
        })
    }
    fn cuMulticastBindMem_v2(
        multicast: u64, device: i32, offset: usize, handle: u64, handle_offset: usize, size: usize,
        flags: u64,
    ) {
        let asked = Asked {
            object: multicast,
            device: Some(device),
            offset: offset as u64,
            source: Source::Memory(handle, handle_offset as u64),
            size: size as u64,
            flags,
        };
        bind(asked, "cuMulticastBindMem_v2", |object, memory| {
            call!(cuMulticastBindMem_v2(
                object, device, offset, memory, handle_offset, size, flags
            ))
        })
    }
    fn cuMulticastUnbind(multicast: u64, device: i32, offset: usize, size: usize) {
        let _inside = enter_whole();
        hold_for(None);
        let mut memory = memory::lock();
        let object = memory.real_object(multicast).unwrap_or(multicast);
        if memory::is_marked(object) {
            return ERROR_INVALID_VALUE;
        }
        let code = call!(cuMulticastUnbind(object, device, offset, size));
        if code == SUCCESS
            && !memory.unbound(&Driver, multicast, device, offset as u64, size as u64)
        {
            // Who has bound it does not know.
            usage::record("cuMulticastUnbind");
        }
        drop(memory);
        tell_owners();
        code
    }
}
