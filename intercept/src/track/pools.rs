//! Stream-ordered memory. Plain pools, the default ones among them, have their memory from the heap, so that it goes the
//! way of all bulk memory ([`crate::state::memory::pools`]); [`super::shared_pools`] gives them to other processes. What is
//! allocated in a capture is the driver's, and so are pools of managed or host memory, and those where memory is
//! [left to the driver](crate::state::memory::Memory::serves).

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use super::counted::added;
use super::heap::{FREED, close_of_pool, free_heap};
use super::patience::patiently;
use super::shared_pools;
use super::support::{enter_at, hold_for, put, synchronize_device, written};
use super::uses::share_allocations_of;
use crate::abi::real;
use crate::abi::types::{
    ACCESS_NONE, Access, Code, ERROR_INVALID_VALUE, ERROR_OUT_OF_MEMORY, LOCATION_DEVICE,
    POINTER_IS_MANAGED, POOL_RESERVED, POOL_RESERVED_HIGH, POOL_THRESHOLD, POOL_USED,
    POOL_USED_HIGH, PoolProperties, SUCCESS,
};
use crate::state::memory::pools::{After, Asked};
use crate::state::memory::vmm::Driver;
use crate::state::{contexts, gate, memory};
use crate::usage::{self, Kind, Thing};
use crate::watch::faults::{self, Why};
use crate::watch::guard;

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;

/// A stream as the program names it.
#[derive(Clone, Copy)]
struct Stream {
    handle: u64,
    /// 0 is the thread's default stream.
    per_thread: bool,
}

/// Where a stream is.
struct Place {
    context: u64,
    device: i32,
}

/// Calls one of two functions of the driver, as the stream says.
macro_rules! in_stream {
    ($stream:expr, $plain:ident | $per_thread:ident ($($argument:expr),*)) => {
        if $stream.per_thread {
            call!($per_thread($($argument),*))
        } else {
            call!($plain($($argument),*))
        }
    };
}

impl Stream {
    /// Where it is, if work can be given to it that does not become a part of a graph. The driver tells the program
    /// what is wrong otherwise.
    fn place(self) -> Option<Place> {
        let mut status = 0;
        let code = in_stream!(
            self,
            cuStreamIsCapturing | cuStreamIsCapturing_ptsz(self.handle, &mut status)
        );
        if code != SUCCESS || status != 0 {
            return None;
        }
        let mut context = 0;
        let code =
            in_stream!(self, cuStreamGetCtx | cuStreamGetCtx_ptsz(self.handle, &mut context));
        real::check(code).ok()?;
        let device = match real::current_context() {
            Ok((current, device)) if current == context => device,
            _ => real::with_context(context, || real::current_context().map(|(_, device)| device))
                .ok()?,
        };
        contexts::seen(context, device);
        Some(Place { context, device })
    }

    /// What tells it from all others, those that are gone too; 0 if the driver does not say.
    fn id(self) -> u64 {
        let mut id = 0;
        let code = in_stream!(self, cuStreamGetId | cuStreamGetId_ptsz(self.handle, &mut id));
        if code == SUCCESS { id } else { 0 }
    }

    /// Notes what is in the stream now.
    fn mark(self, place: &Place) -> Result<After, Code> {
        let Place { context, .. } = *place;
        // Held for no longer than that.
        let spare = memory::lock().spare_event(context);
        let event = match spare {
            Some(event) => event,
            None => real::with_context(context, || {
                let mut event = 0;
                real::check(call!(cuEventCreate(&mut event, DISABLE_TIMING)))?;
                Ok(event)
            })?,
        };
        match in_stream!(self, cuEventRecord | cuEventRecord_ptsz(event, self.handle)) {
            SUCCESS => Ok(After { context, stream: self.id(), event }),
            code => {
                memory::lock().keep_event(context, event);
                Err(code)
            }
        }
    }
}

/// The number of the pool that the driver names so, if its memory is the heap's, and its device.
fn pool(handle: u64) -> Option<(u64, i32)> {
    let found = memory::lock().pool(handle);
    if found.is_some() {
        return found;
    }
    let is_default = |device: &i32| {
        let mut default = 0;
        call!(cuDeviceGetDefaultMemPool(&mut default, *device)) == SUCCESS && default == handle
    };
    let device = (0..real::device_count()).find(is_default)?;
    // The program may have set it before it asked for memory.
    let mut threshold = 0_u64;
    let code = call!(cuMemPoolGetAttribute(handle, POOL_THRESHOLD, (&raw mut threshold).cast()));
    real::check(code).ok()?;
    let mut memory = memory::lock();
    // Another thread may have been here meanwhile.
    let found = memory.pool(handle);
    Some(found.unwrap_or_else(|| (memory.add_pool(handle, device, 0, threshold), device)))
}

/// Serves an allocation from `from`, or the pool that the device uses; `None` if it is the driver's to serve.
fn allocate(out: *mut u64, size: usize, from: Option<u64>, stream: Stream) -> Option<Code> {
    if out.is_null() || size == 0 {
        return None;
    }
    let place = stream.place()?;
    let handle = from.or_else(|| {
        let mut current = 0;
        real::check(call!(cuDeviceGetMemPool(&mut current, place.device))).ok()?;
        Some(current)
    })?;
    let (pool, device) = pool(handle)?;
    if !memory::lock().serves(&Driver, device) {
        return None;
    }
    let asked = Asked { pool, context: place.context, stream: stream.id(), size: size as u64 };
    let served = patiently(|| {
        let first = memory::lock().allocate_in_pool(&Driver, &asked);
        // The driver would have the stream wait for what others have freed.
        if first != Err(ERROR_OUT_OF_MEMORY) || !wait_for_freed(device) {
            return first;
        }
        memory::lock().allocate_in_pool(&Driver, &asked)
    });
    Some(put(out, served))
}

/// Waits until nothing uses what was freed on a device. Whether there was anything that could be waited for.
fn wait_for_freed(device: i32) -> bool {
    if gate::capturing() || !memory::lock().has_freed(device) {
        return false;
    }
    guard::wait_for_awaited();
    // A broken context uses nothing any more either.
    let _ = synchronize_device(device);
    true
}

/// Frees what is from one of our pools, in the order of the stream; `None` if nothing of that kind begins at `address`.
fn free(address: u64, stream: Stream) -> Option<Code> {
    let is_of_pool = memory::lock().allocation_at(address).is_some_and(|found| found.pool != 0);
    // In a capture the driver says that it is not memory of a graph.
    let place = if is_of_pool { stream.place()? } else { return None };
    if let Some(code) = close_of_pool(address) {
        return Some(code);
    }
    let allocation = memory::lock().take_of_pool(address)?;
    watch_synchronising();
    match stream.mark(&place) {
        Ok(after) => {
            memory::lock().free_in_pool(allocation, Some(after));
            Some(SUCCESS)
        }
        Err(code) => {
            memory::lock().put_back(allocation);
            Some(code)
        }
    }
}

/// From now on pools hear of it when the program synchronises.
fn watch_synchronising() {
    static IS_WATCHED: AtomicBool = AtomicBool::new(false);
    if !IS_WATCHED.swap(true, Ordering::SeqCst) {
        faults::watch(Why::Pools, true);
    }
}

/// After the driver has served an allocation: pools may be of managed memory, which nobody carries.
fn driver_served(code: Code, address: *const u64, size: usize, is_named: bool) -> Code {
    let mut managed = 0_u64;
    let out = (&raw mut managed).cast();
    let is_managed = is_named
        && code == SUCCESS
        && written(address) != 0
        && call!(cuPointerGetAttribute(out, POINTER_IS_MANAGED, written(address))) == SUCCESS
        && managed as u8 == 1;
    added(code, if is_managed { Kind::Managed } else { Kind::Pool }, address, size)
}

/// A number that the program asks for about one of our pools; `None` if the driver knows it.
fn amount(handle: u64, attribute: u32) -> Option<u64> {
    let mut memory = memory::lock();
    let (id, _) = memory.pool(handle)?;
    let (reserved, used) = memory.pool_amounts(id)?;
    match attribute {
        POOL_RESERVED => Some(reserved.current),
        POOL_RESERVED_HIGH => Some(reserved.high),
        POOL_USED => Some(used.current),
        POOL_USED_HIGH => Some(used.high),
        _ => None,
    }
}

/// After the driver has taken a value for a pool.
fn set(handle: u64, attribute: u32, value: u64) {
    let mut memory = memory::lock();
    let Some((id, _)) = memory.pool(handle) else { return };
    match attribute {
        POOL_THRESHOLD => memory.set_threshold(id, value),
        // The marks can only be reset: the driver has refused anything else.
        POOL_RESERVED_HIGH | POOL_USED_HIGH => {
            if let Some((reserved, used)) = memory.pool_amounts(id) {
                let mark = if attribute == POOL_USED_HIGH { used } else { reserved };
                mark.high = mark.current;
            }
        }
        _ => {}
    }
}

/// After the driver has taken a pool's access: the heap is opened to the devices. It is not closed again, which only
/// shows where a program relies on a fault.
fn open_to(handle: u64, access: &[Access]) -> Result<(), Code> {
    let mut memory = memory::lock();
    let Some((id, owner)) = memory.pool(handle) else { return Ok(()) };
    let is_imported = memory.is_imported_pool(handle);
    let mut devices = access.iter().filter(|one| {
        one.flags != ACCESS_NONE && one.location.kind == LOCATION_DEVICE && one.location.id != owner
    });
    devices.try_for_each(|one| match one.location.id {
        peer if is_imported => memory.open_imported_pool(&Driver, id, peer),
        peer => memory.open_pools(&Driver, owner, peer),
    })
}

/// The functions that take a stream.
macro_rules! stream_ordered {
    ($($alloc:ident, $from_pool:ident, $free:ident, $per_thread:literal;)*) => {exported! {$(
        fn $alloc(out: *mut u64, size: usize, stream: u64) {
            let named = Stream { handle: stream, per_thread: $per_thread };
            if let Some(code) = allocate(out, size, None, named) {
                return code;
            }
            let _inside = gate::enter();
            hold_for(Some(stream));
            driver_served(call!($alloc(out, size, stream)), out, size, false)
        }
        fn $from_pool(out: *mut u64, size: usize, pool: u64, stream: u64) {
            let named = Stream { handle: stream, per_thread: $per_thread };
            if let Some(code) = allocate(out, size, Some(pool), named) {
                return code;
            }
            let _inside = gate::enter();
            hold_for(Some(stream));
            driver_served(call!($from_pool(out, size, pool, stream)), out, size, true)
        }
        fn $free(address: u64, stream: u64) {
            let _inside = enter_at(address);
            hold_for(Some(stream));
            free(address, Stream { handle: stream, per_thread: $per_thread })
                .or_else(|| free_plain(address))
                .unwrap_or_else(|| {
                    usage::ending(&FREED, address, || call!($free(address, stream)))
                })
        }
    )*}};
}

/// Frees what `cuMemAlloc*` gave. Waiting for everything is later than the stream asks for, never too early.
fn free_plain(address: u64) -> Option<Code> {
    let is_of_pool = memory::lock().allocation_at(address).is_some_and(|found| found.pool != 0);
    if is_of_pool { None } else { free_heap(address) }
}

stream_ordered! {
    cuMemAllocAsync, cuMemAllocFromPoolAsync, cuMemFreeAsync, false;
    cuMemAllocAsync_ptsz, cuMemAllocFromPoolAsync_ptsz, cuMemFreeAsync_ptsz, true;
}

exported! {
    fn cuMemPoolCreate(out: *mut u64, properties: *const PoolProperties) {
        // SAFETY: by the function's contract null or such a structure.
        let Some(asked) = (unsafe { properties.as_ref() }) else {
            return call!(cuMemPoolCreate(out, properties));
        };
        let plain = asked.plain_device();
        let is_shareable = asked.is_shareable();
        let served = plain.filter(|device| !is_shareable || shared_pools::are_served(*device));
        let Some(device) = served else { return call!(cuMemPoolCreate(out, properties)) };
        // Others get it from us, and the driver's checkpoint knows of no sharing.
        let plain = asked.alone();
        let code = call!(cuMemPoolCreate(out, &plain));
        if code == SUCCESS {
            let mut memory = memory::lock();
            let pool = memory.add_pool(written(out), device, asked.most as u64, 0);
            if is_shareable {
                memory.set_shareable(pool);
            }
        }
        code
    }
    fn cuMemPoolDestroy(pool: u64) {
        share_allocations_of(pool);
        let kind = Kind::Unsupported(Thing::Pool);
        let code = usage::ending(&[kind], pool, || call!(cuMemPoolDestroy(pool)));
        if code == SUCCESS {
            let _inside = gate::enter();
            let mut memory = memory::lock();
            if let Some((id, _)) = memory.pool(pool) {
                memory.destroy_pool(&Driver, id);
            }
        }
        code
    }
    fn cuMemPoolTrimTo(pool: u64, keep: usize) {
        let _inside = gate::enter();
        let code = call!(cuMemPoolTrimTo(pool, keep));
        let mut memory = memory::lock();
        if code == SUCCESS && let Some((id, _)) = memory.pool(pool) {
            memory.trim_pool(&Driver, id, keep as u64);
        }
        code
    }
    fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: *mut c_void) {
        match amount(pool, attribute) {
            Some(amount) => put(value.cast::<u64>(), Ok(amount)),
            None => call!(cuMemPoolGetAttribute(pool, attribute, value)),
        }
    }
    fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: *mut c_void) {
        let code = call!(cuMemPoolSetAttribute(pool, attribute, value));
        if code == SUCCESS && (POOL_THRESHOLD..=POOL_USED_HIGH).contains(&attribute) {
            set(pool, attribute, written(value.cast::<u64>()));
        }
        code
    }
    fn cuMemPoolSetAccess(pool: u64, access: *const Access, count: usize) {
        let _inside = gate::enter();
        let code = call!(cuMemPoolSetAccess(pool, access, count));
        if code != SUCCESS || count == 0 {
            return code;
        }
        if access.is_null() {
            return ERROR_INVALID_VALUE;
        }
        // SAFETY: the driver has just read so many.
        let access = unsafe { std::slice::from_raw_parts(access, count) };
        open_to(pool, access).err().unwrap_or(SUCCESS)
    }
}
