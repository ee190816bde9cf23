//! What the driver cannot checkpoint and the shim does not carry: the functions that begin such a use are
//! recorded by name, and those that end it take the name off again. (Where the end cannot be seen, such as
//! that of a file descriptor, the table says `note`, and the name stays.)

use std::ffi::c_void;

use super::support::written;
use crate::abi::real;
use crate::abi::types::{Code, POINTER_POOL, SUCCESS};
use crate::state::{contexts, gate};
use crate::usage::{self, Kind, Thing, ending};

/// Functions that write the handle of a new thing to their first argument.
macro_rules! made {
    ($($thing:ident $name:ident($($argument:ident),*);)*) => { exported! {$(
        fn $name(out: usize, $($argument: usize),*) {
            let _inside = gate::enter();
            let code = pass_on!($name(out, $($argument),*));
            began(code, Thing::$thing, written(out as *const u64), stringify!($name))
        }
    )*} };
}

/// Functions that make a context for a graphics library.
macro_rules! made_contexts {
    ($($name:ident($($argument:ident),*);)*) => { exported! {$(
        fn $name(out: usize, flags: usize, device: usize, $($argument: usize),*) {
            let _inside = gate::enter();
            let code = pass_on!($name(out, flags, device, $($argument),*));
            let context = written(out as *const u64);
            if code == SUCCESS {
                contexts::seen(context, device as i32);
            }
            began(code, Thing::Context, context, stringify!($name))
        }
    )*} };
}

/// Functions that end the thing that is their argument.
macro_rules! ended {
    ($($thing:ident $name:ident;)*) => { exported! {$(
        fn $name(thing: usize) {
            ending(&[Kind::Unsupported(Thing::$thing)], thing as u64, || pass_on!($name(thing)))
        }
    )*} };
}

/// After something began to live that may die with the current context.
pub(super) fn began(code: Code, thing: Thing, name: u64, function: &'static str) -> Code {
    if code == SUCCESS {
        let context = match thing {
            Thing::Pool => 0,
            Thing::Context => name,
            _ => real::current_context().map_or(0, |(context, _)| context),
        };
        usage::began(thing, name, function, context);
    }
    code
}

/// After memory of a pool was opened to other processes, or opened here.
pub(super) fn shared(code: Code, address: u64) -> Code {
    if code == SUCCESS {
        usage::added(Kind::SharedAddress, address, 0, 0);
    }
    code
}

/// Calls `end`, which ends the connection whose handle is at `place`.
fn disconnecting(place: usize, end: impl FnOnce() -> Code) -> Code {
    let connection = written(place as *const u64);
    ending(&[Kind::Unsupported(Thing::EglConnection)], connection, end)
}

/// A pool that is destroyed lives on in what was allocated from it.
pub(super) fn share_allocations_of(pool: u64) {
    if !usage::is_live(Kind::Unsupported(Thing::Pool), pool) {
        return;
    }
    for address in usage::all_of(Kind::Pool) {
        let mut of = 0u64;
        let out = (&raw mut of).cast::<c_void>();
        if call!(cuPointerGetAttribute(out, POINTER_POOL, address)) == SUCCESS && of == pool {
            usage::added(Kind::SharedAddress, address, 0, 0);
        }
    }
}

made! {
    ExternalMemory cuImportExternalMemory(description);
    ExternalAddress cuExternalMemoryGetMappedBuffer(memory, description);
    Array cuExternalMemoryGetMappedMipmappedArray(memory, description);
    ExternalSemaphore cuImportExternalSemaphore(description);
    Resource cuGraphicsEGLRegisterImage(image, flags);
    Resource cuGraphicsGLRegisterBuffer(buffer, flags);
    Resource cuGraphicsGLRegisterImage(image, target, flags);
    Resource cuGraphicsVDPAURegisterOutputSurface(surface, flags);
    Resource cuGraphicsVDPAURegisterVideoSurface(surface, flags);
    EglConnection cuEGLStreamConsumerConnect(stream);
    EglConnection cuEGLStreamConsumerConnectWithFlags(stream, flags);
    EglConnection cuEGLStreamProducerConnect(stream, width, height);
}

made_contexts! {
    cuGLCtxCreate();
    cuGLCtxCreate_v2();
    cuVDPAUCtxCreate(display, resolver);
    cuVDPAUCtxCreate_v2(display, resolver);
}

ended! {
    ExternalMemory cuDestroyExternalMemory;
    ExternalSemaphore cuDestroyExternalSemaphore;
    Resource cuGraphicsUnregisterResource;
    GlBuffer cuGLUnregisterBufferObject;
}

exported! {
    fn cuGLRegisterBufferObject(buffer: usize) {
        let _inside = gate::enter();
        let code = pass_on!(cuGLRegisterBufferObject(buffer));
        began(code, Thing::GlBuffer, buffer as u64, "cuGLRegisterBufferObject")
    }
    fn cuEGLStreamConsumerDisconnect(connection: usize) {
        disconnecting(connection, || pass_on!(cuEGLStreamConsumerDisconnect(connection)))
    }
    fn cuEGLStreamProducerDisconnect(connection: usize) {
        disconnecting(connection, || pass_on!(cuEGLStreamProducerDisconnect(connection)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use gpucr_wire::Counts;

    use super::*;
    use crate::abi::slots::SLOTS;
    use crate::abi::table::NAMES;
    use crate::abi::types::POINTER_IS_MANAGED;
    use crate::track::{
        cuMemAllocFromPoolAsync, cuMemFree_v2, cuMemFreeAsync, cuMemPoolDestroy,
        cuMemPoolExportToShareableHandle, cuMemPoolImportFromShareableHandle,
        cuMemPoolImportPointer, cuMipmappedArrayDestroy,
    };

    /// What stands in for a function of the driver.
    type Stand = unsafe extern "C" fn(usize, usize, usize) -> Code;

    static LAST: AtomicUsize = AtomicUsize::new(0x1000);
    const POOL: usize = 77;

    /// Writes a handle that nothing else has to its first argument.
    unsafe extern "C" fn make(out: usize, _: usize, _: usize) -> Code {
        // SAFETY: the test gives a place for a word.
        unsafe { (out as *mut usize).write(LAST.fetch_add(8, Ordering::Relaxed)) };
        SUCCESS
    }

    unsafe extern "C" fn succeed(_: usize, _: usize, _: usize) -> Code {
        SUCCESS
    }

    unsafe extern "C" fn tell_pool(out: usize, _: usize, _: usize) -> Code {
        // SAFETY: the test gives a place for a word.
        unsafe { (out as *mut usize).write(POOL) };
        SUCCESS
    }

    fn put_in_place_of(name: &str, stand: Stand) {
        let index = NAMES.iter().position(|other| other.to_str() == Ok(name)).expect("a function");
        SLOTS[index].store(stand as *mut (), Ordering::Relaxed);
    }

    fn uses() -> (u64, Vec<String>) {
        let mut counts = Counts::default();
        usage::fill(&mut counts);
        (counts.shared, counts.unsupported)
    }

    /// `begin` is given a place for a handle, and `end` the handle. In between the use counts, by this name.
    fn lasts(name: &str, begin: impl FnOnce(usize) -> Code, end: impl FnOnce(usize) -> Code) {
        assert_eq!(uses(), (0, vec![]), "before {name}");
        let mut handle = 0usize;
        assert_eq!(begin(&raw mut handle as usize), SUCCESS);
        match uses() {
            (0, names) => assert_eq!(names, [name]),
            (shared, names) => assert_eq!((shared, names), (1, vec![]), "{name}"),
        }
        assert_eq!(end(handle), SUCCESS);
        assert_eq!(uses(), (0, vec![]), "after {name}");
    }

    macro_rules! lasts {
        ($($begin:ident($($argument:literal),*) until $end:ident;)*) => {$(
            put_in_place_of(stringify!($begin), make);
            put_in_place_of(stringify!($end), succeed);
            lasts(
                stringify!($begin),
                // SAFETY: what stands in for the driver writes a word to the first argument.
                |out| unsafe { $begin(out, $($argument),*) },
                // SAFETY: and takes anything for a handle.
                |handle| unsafe { $end(handle.try_into().expect("a handle")) },
            );
        )*};
    }

    #[test]
    fn each_use_lasts_until_the_function_that_ends_it() {
        lasts! {
            cuImportExternalMemory(0) until cuDestroyExternalMemory;
            cuExternalMemoryGetMappedBuffer(0, 0) until cuMemFree_v2;
            cuExternalMemoryGetMappedMipmappedArray(0, 0) until cuMipmappedArrayDestroy;
            cuImportExternalSemaphore(0) until cuDestroyExternalSemaphore;
            cuGraphicsEGLRegisterImage(0, 0) until cuGraphicsUnregisterResource;
            cuGraphicsGLRegisterBuffer(0, 0) until cuGraphicsUnregisterResource;
            cuGraphicsGLRegisterImage(0, 0, 0) until cuGraphicsUnregisterResource;
            cuGraphicsVDPAURegisterOutputSurface(0, 0) until cuGraphicsUnregisterResource;
            cuGraphicsVDPAURegisterVideoSurface(0, 0) until cuGraphicsUnregisterResource;
        }
        put_in_place_of("cuMemPoolImportFromShareableHandle", make);
        put_in_place_of("cuMemPoolDestroy", succeed);
        put_in_place_of("cuMemPoolImportPointer", make);
        put_in_place_of("cuMemFree_v2", succeed);
        let null = std::ptr::null_mut::<c_void>();
        lasts(
            "cuMemPoolImportFromShareableHandle",
            // SAFETY: as for all of these.
            |out| unsafe { cuMemPoolImportFromShareableHandle(out as *mut u64, null, 0, 0) },
            // SAFETY: as for all of these.
            |handle| unsafe { cuMemPoolDestroy(handle as u64) },
        );
        lasts(
            "cuMemPoolImportPointer",
            // SAFETY: as for all of these.
            |out| unsafe { cuMemPoolImportPointer(out as *mut u64, 0, null.cast()) },
            // SAFETY: as for all of these.
            |address| unsafe { cuMemFree_v2(address as u64) },
        );
        put_in_place_of("cuEGLStreamProducerConnect", make);
        put_in_place_of("cuEGLStreamProducerDisconnect", succeed);
        let (name, mut place) = ("cuEGLStreamProducerConnect", 0usize);
        let connection = &raw mut place as usize;
        // SAFETY: what stands in for the driver writes a word to the first argument, and takes anything else.
        let connect = |_| unsafe { cuEGLStreamProducerConnect(connection, 0, 0, 0) };
        // SAFETY: the stand-in takes any arguments; the wrapper reads the word, which is alive.
        lasts(name, connect, |_| unsafe { cuEGLStreamProducerDisconnect(connection) });
    }

    /// A pool can be of managed memory, which counts as such.
    #[test]
    fn managed_memory_of_a_pool_lasts_until_it_is_freed() {
        unsafe extern "C" fn tell_managed(out: usize, attribute: usize, _: usize) -> Code {
            assert_eq!(attribute as u32, POINTER_IS_MANAGED);
            // SAFETY: the wrapper gives a place for a word.
            unsafe { (out as *mut usize).write(1) };
            SUCCESS
        }
        fn managed() -> (u64, u64) {
            let mut counts = Counts::default();
            usage::fill(&mut counts);
            (counts.managed, counts.pool_bytes)
        }
        put_in_place_of("cuMemAllocFromPoolAsync", make);
        put_in_place_of("cuPointerGetAttribute", tell_managed);
        put_in_place_of("cuMemFreeAsync", succeed);
        let mut address = 0u64;
        let before = managed();
        // SAFETY: what stands in for the driver writes a word to the first argument, and takes anything else.
        unsafe {
            assert_eq!(cuMemAllocFromPoolAsync(&raw mut address, 100, POOL as u64, 0), SUCCESS);
            assert_eq!(managed(), (before.0 + 1, before.1));
            assert_eq!(cuMemFreeAsync(address, 0), SUCCESS);
        }
        assert_eq!(managed(), before);
    }

    /// Memory of a pool is open to others as long as it is not freed, also when the pool is destroyed.
    #[test]
    fn an_exported_pool_lasts_until_it_and_its_memory_are_gone() {
        put_in_place_of("cuMemPoolExportToShareableHandle", succeed);
        put_in_place_of("cuMemPoolDestroy", succeed);
        put_in_place_of("cuMemAllocFromPoolAsync", make);
        put_in_place_of("cuPointerGetAttribute", tell_pool);
        put_in_place_of("cuMemFreeAsync", succeed);
        let (mut address, null) = (0u64, std::ptr::null_mut());
        // SAFETY: what stands in for the driver writes a word to the first argument, and takes anything else.
        unsafe {
            assert_eq!(cuMemPoolDestroy(POOL as u64), SUCCESS);
            assert_eq!(cuMemAllocFromPoolAsync(&raw mut address, 100, POOL as u64, 0), SUCCESS);
            assert_eq!(uses(), (0, vec![]));
            assert_eq!(cuMemPoolExportToShareableHandle(null, POOL as u64, 1, 0), SUCCESS);
            assert_eq!(uses(), (0, vec!["cuMemPoolExportToShareableHandle".to_owned()]));
            assert_eq!(cuMemPoolDestroy(POOL as u64), SUCCESS);
            assert_eq!(uses(), (1, vec![]));
            assert_eq!(cuMemFreeAsync(address, 0), SUCCESS);
        }
        assert_eq!(uses(), (0, vec![]));
    }
}
