//! Read-only mappings: what reads them works; kernels that write are stopped, and what else writes is
//! refused. As measured on an H200 (`docs/results/sharing.md`, "Memory that processes share read-only").

mod support;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use support::read_only::*;
use support::*;

/// The codes of launching a warp of a kernel, and of waiting for it. The kernel finds the first address
/// in `%data`, the other in `%other`, its thread in `%x`, and whether that is number 13 in `%p`.
fn run(body: &str, data: u64, other: u64) -> (u32, u32) {
    let text = format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n\
         .visible .entry k(.param .u64 data, .param .u64 other)\n{{\n\
         .reg .b64 %data, %other, %to; .reg .b32 %x, %r; .reg .pred %p;\n\
         .reg .f32 %f<8>; .reg .b32 %a, %b, %c, %d; .shared .align 16 .b8 own[1024];\n\
         ld.param.u64 %data, [data]; ld.param.u64 %other, [other]; mov.u32 %x, %tid.x;\n\
         setp.eq.u32 %p, %x, 13;\n{body}\nret;\n}}\n\0"
    );
    let (mut module, mut function) = (0, 0);
    let each = [(&raw const data).cast(), (&raw const other).cast()];
    let (each, none) = (each.as_ptr(), std::ptr::null());
    // SAFETY: text and name end in NUL; the kernel has these parameters.
    unsafe {
        assert_eq!(cuModuleLoadData(&mut module, text.as_ptr()), 0, "{body}");
        ok(cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()));
        let launched = cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, each, none);
        (launched, cuCtxSynchronize())
    }
}

/// A kernel that writes to read-only memory fails its context for good and changes nothing.
#[track_caller]
fn is_stopped(body: &str, memory: &Memory) {
    let context = context();
    assert_eq!(run(body, memory.read_only, memory.beside), (0, ILLEGAL_ADDRESS), "{body}");
    let (mut word, mut address) = ([0_u32; 1], 0);
    assert_eq!(cuMemAlloc_v2(&mut address, 4), ILLEGAL_ADDRESS);
    assert_eq!(cuMemsetD32_v2(memory.alias, 1, 1), ILLEGAL_ADDRESS);
    // SAFETY: the destination is the array.
    let copied = unsafe { cuMemcpyDtoH_v2(word.as_mut_ptr().cast(), memory.read_only, 4) };
    assert_eq!(copied, ILLEGAL_ADDRESS);
    assert_eq!(cuCtxSynchronize(), ILLEGAL_ADDRESS);
    ok(cuCtxDestroy_v2(context));
}

/// In a new context: nothing of the memory has changed.
#[track_caller]
fn is_unchanged(memory: &Memory, body: &str) {
    let context = context();
    assert!(read(memory.alias, WORDS).iter().all(|word| *word == FILLING), "{body}");
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn kernels_that_write_are_stopped() {
    let outer = context();
    let memory = memory();
    const TO_SHARED: &str =
        "mov.u64 %to, own; cvta.shared.u64 %to, %to; selp.b64 %to, %data, %to, %p;";
    const TO_OTHER: &str = "selp.b64 %to, %data, %other, %p;";
    let writes = [
        "st.global.u32 [%data], %x;",
        "st.global.u8 [%data+5], %x;",
        "st.global.u64 [%data], %other;",
        "st.global.u32 [%data+2097148], %x;",
        "st.global.v4.u32 [%data+16], {%x, %x, %x, %x};",
        "st.global.v2.u64 [%data+16], {%other, %other};",
        "st.volatile.global.u32 [%data], %x;",
        "st.u32 [%data], %x;",
        "st.v2.u32 [%data], {%x, %x};",
        "atom.global.add.u32 %r, [%data], 1;",
        "atom.global.exch.b64 %to, [%data], %other;",
        "atom.global.cas.b32 %r, [%data], 1, 2;",
        "atom.global.add.f32 %f0, [%data], %f1;",
        "atom.add.u32 %r, [%data], 1;",
        "red.global.add.u32 [%data], 1;",
        "red.max.u32 [%data], 99;",
        "wmma.store.d.sync.aligned.row.m16n16k16.global.f32 [%data], \
         {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, 16;",
        "mov.u64 %to, own; cp.async.bulk.global.shared::cta.bulk_group [%data], [%to], 16;",
    ];
    for write in writes {
        is_stopped(write, &memory);
        is_unchanged(&memory, write);
        // One lane alone.
        if !write.contains("sync") {
            let alone = format!("@!%p bra end; {write} end:");
            is_stopped(&alone, &memory);
            is_unchanged(&memory, &alone);
        }
        // What is known from reading the page is no leave to write.
        let read_first = format!("ld.global.u32 %a, [%data]; ld.u8 %b, [%data+5]; {write}");
        is_stopped(&read_first, &memory);
        is_unchanged(&memory, &read_first);
    }
    // One lane means read-only memory, the others memory beside it or shared memory.
    for to in [TO_OTHER, TO_SHARED] {
        for write in [
            "st.u32 [%to], %x;",
            "st.v2.u32 [%to], {%x, %x};",
            "atom.add.u32 %r, [%to], 1;",
            "red.add.u32 [%to], 1;",
        ] {
            for before in ["", "ld.u32 %a, [%to];", "ld.global.u32 %a, [%data];"] {
                let body = format!("{to} {before} {write}");
                is_stopped(&body, &memory);
                is_unchanged(&memory, &body);
            }
        }
    }
    // A page that was written to has the read-only one as neighbour, and shares its place in tables.
    let body = "st.global.u32 [%other], %x; st.global.u32 [%data], %x;";
    is_stopped(body, &memory);
    is_unchanged(&memory, body);
    ok(cuCtxSetCurrent(outer));
    ok(cuCtxSynchronize());
}

#[test]
fn what_reads_works() {
    let context = context();
    let Memory { read_only, beside, alias, .. } = memory();
    assert_eq!((access_of(read_only), access_of(beside), access_of(alias)), (1, 3, 3));
    for body in [
        "ld.global.u32 %r, [%data];",
        "ld.u32 %r, [%data];",
        "ld.global.nc.u32 %r, [%data];",
        "ld.volatile.global.u32 %r, [%data];",
        "ld.global.v4.u32 {%a, %b, %c, %r}, [%data+2097136];",
        "mov.u64 %to, own; cp.async.ca.shared.global [%to], [%data], 16; cp.async.wait_all;\n\
         ld.shared.u32 %r, [own+12];",
        "mov.u64 %to, own; cvta.shared.u64 %to, %to; @%p bra no; st.u32 [%to], 42;\n\
         no: bar.warp.sync -1; selp.b64 %to, %data, %to, %p; ld.u32 %r, [%to];",
        // Written before and between, at the same place in tables of pages.
        "st.global.u32 [%other], 1; ld.global.u32 %a, [%data]; st.global.u32 [%other], %a;\n\
         ld.global.u32 %r, [%data];",
    ] {
        ok(cuMemsetD32_v2(beside, 0, 1));
        let body = format!("{body} st.global.u32 [%other], %r;");
        assert_eq!(run(&body, read_only, beside), (0, 0), "{body}");
        assert_eq!(read(beside, 1), [FILLING], "{body}");
    }
    // The memory may well change; only not through this mapping.
    write(alias + 4, &[7]);
    assert_eq!(read(read_only, 3), [FILLING, 7, FILLING]);
    ok(cuMemcpyDtoDAsync_v2(beside, read_only, GRANULE, 0));
    assert_eq!(read(beside, 2), [FILLING, 7]);
    ok(cuStreamWaitValue32_v2(0, read_only + 4, 7, 1));
    ok(cuCtxSynchronize());
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn access_is_given_and_taken() {
    let context = context();
    let Memory { read_only, alias, .. } = memory();
    const PUT: &str = "st.global.u32 [%data], 5;";
    // A granted access is there for kernels, copies and fills.
    set_access(read_only, &READ_WRITE);
    assert_eq!(access_of(read_only), 3);
    assert_eq!(run(PUT, read_only, 0), (0, 0));
    assert_eq!(read(alias, 1), [5]);
    write(read_only, &[6]);
    ok(cuMemsetD32_v2(read_only + 4, 6, 1));
    assert_eq!(read(alias, 3), [6, 6, FILLING]);
    // Less than before, and nothing.
    set_access(read_only, &READ);
    assert_eq!(access_of(read_only), 1);
    assert_eq!(cuMemsetD32_v2(read_only, 1, 1), INVALID_VALUE);
    set_access(read_only, &NO_ACCESS);
    assert_eq!(access_of(read_only), 0);
    let mut word = 0_u32;
    // SAFETY: the destination is the word.
    let copied = unsafe { cuMemcpyDtoH_v2((&raw mut word).cast(), read_only, 4) };
    assert_eq!(copied, INVALID_VALUE);
    set_access(read_only, &READ);
    assert_eq!(read(read_only, 2), [6, 6]);
    // The most that any description says; there is no writing alone.
    for (list, access) in [
        (vec![NO_ACCESS, READ], 1),
        (vec![READ, NO_ACCESS], 1),
        (vec![READ_WRITE, READ], 3),
        (vec![READ, READ_WRITE, NO_ACCESS], 3),
    ] {
        ok(cuMemSetAccess(read_only, GRANULE, &list[0], list.len()));
        assert_eq!(access_of(read_only), access);
    }
    let alone = Access { flags: 2, ..READ };
    assert_eq!(cuMemSetAccess(read_only, GRANULE, &alone, 1), INVALID_VALUE);
    assert_eq!(cuMemSetAccess(read_only, 3 * GRANULE, &READ, 1), INVALID_VALUE);
    assert_eq!(access_of(read_only), 3);

    // What was writable and is unmapped leaves nothing behind.
    ok(cuMemUnmap(alias, GRANULE));
    let mut handle = 0;
    ok(cuMemCreate(&mut handle, GRANULE, &SHAREABLE, 0));
    ok(cuMemMap(alias, GRANULE, 0, handle, 0));
    assert_eq!(access_of(alias), 0);
    assert_eq!(run(PUT, alias, 0), (0, ILLEGAL_ADDRESS));
    ok(cuCtxDestroy_v2(context));
}

static STAGE: AtomicU32 = AtomicU32::new(0);

/// Waits until the stage is the one given, for a minute at most; then it is 100.
extern "C" fn wait_for_stage(stage: u64) {
    let begin = Instant::now();
    while u64::from(STAGE.load(Ordering::SeqCst)) != stage {
        if begin.elapsed() > Duration::from_secs(60) {
            STAGE.store(100, Ordering::SeqCst);
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn only_taking_access_waits_for_work() {
    let context = context();
    let Memory { read_only, beside, .. } = memory();
    let mut stream = 0;
    ok(cuStreamCreate(&mut stream, 1));
    ok(cuLaunchHostFunc(stream, wait_for_stage, 1));
    ok(cuMemsetD32Async(beside, 9, 1, stream));
    // More access, or the same.
    set_access(read_only, &READ_WRITE);
    set_access(read_only, &READ_WRITE);
    assert_eq!(STAGE.load(Ordering::SeqCst), 0, "nothing waited");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            STAGE.store(1, Ordering::SeqCst);
        });
        // The fill that was submitted before may still write.
        set_access(beside, &READ);
    });
    ok(cuCtxSynchronize());
    assert_eq!(read(beside, 1), [9]);
    ok(cuCtxDestroy_v2(context));
}

/// Opens a descriptor of another process.
fn descriptor_of(place: &str) -> File {
    let (pid, fd) = place.split_once(' ').unwrap();
    File::options().read(true).write(true).open(format!("/proc/{pid}/fd/{fd}")).unwrap()
}

#[test]
#[ignore = "a program for other tests"]
fn importing_program() {
    let context = context();
    let file = descriptor_of(&listen());
    let (mut handle, mut address) = (0, 0);
    ok(cuMemImportFromShareableHandle(&mut handle, file.as_raw_fd() as u64, 1));
    ok(cuMemAddressReserve(&mut address, GRANULE, 0, 0, 0));
    ok(cuMemMap(address, GRANULE, 0, handle, 0));
    set_access(address, &READ);
    ok(cuMemRelease(handle));
    let own = allocate(4);
    assert_eq!(access_of(address), 1);
    assert_eq!(read(address, 1), [FILLING]);
    let get = "ld.global.u32 %r, [%data]; st.global.u32 [%other], %r;";
    assert_eq!(run(get, address, own), (0, 0));
    assert_eq!(read(own, 1), [FILLING]);
    assert_eq!(cuMemsetD32_v2(address, 5, 1), INVALID_VALUE);
    say("read");
    assert_eq!(listen(), "written");
    assert_eq!(read(address, 1), [77]);
    assert_eq!(run("st.global.u32 [%data], 5;", address, own), (0, ILLEGAL_ADDRESS));
    say("stopped");
    listen();
    ok(cuCtxDestroy_v2(context));
    ok(cuCtxCreate_v2(&mut 0, 0, 0));
    set_access(address, &READ_WRITE);
    assert_eq!(run("st.global.u32 [%data], 6;", address, 0), (0, 0));
}

#[test]
fn memory_of_another_process_is_read_only_there_alone() {
    let context = context();
    let (handle, address) = map_new(GRANULE);
    ok(cuMemsetD32_v2(address, FILLING, WORDS));
    let mut fd = -1;
    ok(cuMemExportToShareableHandle(&mut fd, handle, 1, 0));
    let mut program = Program::start("importing_program", &[]);
    program.tell(&format!("{} {fd}", std::process::id()));
    assert_eq!(program.hear(), "read");
    assert_eq!(access_of(address), 3);
    assert_eq!(run("st.global.u32 [%data], 77;", address, 0), (0, 0));
    program.tell("written");
    assert_eq!(program.hear(), "stopped");
    assert_eq!(read(address, 2), [77, FILLING]);
    ok(cuMemsetD32_v2(address + 4, 78, 1));
    program.tell("go on");
    program.finish();
    assert_eq!(read(address, 2), [6, 78]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
#[ignore = "a program for other tests"]
fn restored_program() {
    let first = context();
    let memory = memory();
    let mut hidden = 0;
    let (handle, alias) = map_new(GRANULE);
    ok(cuMemAddressReserve(&mut hidden, GRANULE, 0, 0, 0));
    ok(cuMemMap(hidden, GRANULE, 0, handle, 0));
    write(alias, &[8]);
    say("ready");
    listen();
    let Memory { read_only, beside, alias, .. } = memory;
    let access = [read_only, beside, alias, hidden].map(access_of);
    assert_eq!(access, [1, 3, 3, 0]);
    assert_eq!(read(read_only, WORDS), [FILLING; WORDS]);
    assert_eq!(cuMemsetD32_v2(read_only, 5, 1), INVALID_VALUE);
    assert_eq!(run("st.global.u32 [%data], 1; st.global.u32 [%other], 2;", alias, beside), (0, 0));
    assert_eq!((read(read_only, 2), read(beside, 1)), (vec![1, FILLING], vec![2]));
    write(alias, &[FILLING]);
    ok(cuCtxDestroy_v2(first));
    is_stopped("st.global.u32 [%data], 7;", &memory);
    is_unchanged(&memory, "after a restore");
    context();
    set_access(read_only, &READ_WRITE);
    assert_eq!(run("st.global.u32 [%data], 7;", read_only, 0), (0, 0));
    assert_eq!(read(alias, 1), [7]);
}

#[test]
fn a_checkpoint_keeps_it_read_only() {
    let mut program = Program::start("restored_program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}
