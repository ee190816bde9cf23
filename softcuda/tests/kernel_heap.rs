//! Memory that kernels allocate by themselves: the limit, what is left when it is full, memory that
//! outlives its kernel, and the checkpoint.

mod support;

use support::*;

const LAUNCH_FAILED: u32 = 719;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const HEAP: u32 = 2;

unsafe extern "C" {
    safe fn cuCtxSetLimit(limit: u32, value: usize) -> u32;
    safe fn cuCtxGetLimit(value: &mut usize, limit: u32) -> u32;
}

/// `take(out, size)`: each thread allocates, keeps the address, and writes its number there;
/// `look(out, seen)` reads the numbers; `give(out)` frees.
const PTX: &str = concat!(
    "
.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b64 r) malloc (.param .b64 a);
.extern .func free (.param .b64 a);
.visible .entry take(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<8>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %d2, %r0, 8, %d0;
    {
        .param .b64 size; .param .b64 place;
        st.param.b64 [size], %d1;
        call.uni (place), malloc, (size);
        ld.param.b64 %d3, [place];
    }
    st.global.u64 [%d2], %d3;
    setp.eq.u64 %p, %d3, 0;
    @!%p st.u32 [%d3], %r0;
    ret;
}
.visible .entry look(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<8>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %d2, %r0, 8, %d0; mad.wide.u32 %d3, %r0, 4, %d1;
    ld.global.u64 %d4, [%d2];
    ld.u32 %r1, [%d4];
    st.global.u32 [%d3], %r1;
    ret;
}
.visible .entry give(.param .u64 p0)
{
    .reg .b64 %d<8>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %d2, %r0, 8, %d0;
    ld.global.u64 %d3, [%d2];
    {
        .param .b64 place;
        st.param.b64 [place], %d3;
        call.uni free, (place);
    }
    ret;
}
",
    "\0"
);

struct Room {
    module: u64,
    places: u64,
    seen: u64,
}

impl Room {
    fn new() -> Room {
        let mut module = 0;
        // SAFETY: the text ends in NUL.
        ok(unsafe { cuModuleLoadData(&mut module, PTX.as_ptr()) });
        Room { module, places: allocate(8 * 64), seen: allocate(4 * 64) }
    }

    fn run(&self, name: &str, threads: u32, second: u64) -> u32 {
        let (mut function, name) = (0, format!("{name}\0"));
        let arguments = [self.places, second];
        let pointers = arguments.each_ref().map(std::ptr::from_ref);
        let null = std::ptr::null();
        // SAFETY: the name ends in NUL, and there is a pointer for each parameter.
        unsafe {
            ok(cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
            let pointers = pointers.as_ptr().cast();
            ok(cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, pointers, null));
        }
        cuCtxSynchronize()
    }

    fn places(&self) -> Vec<u64> {
        let words = read(self.places, 128);
        words.chunks(2).map(|two| u64::from(two[0]) | u64::from(two[1]) << 32).collect()
    }

    fn seen(&self) -> Vec<u32> {
        ok(self.run("look", 64, self.seen));
        read(self.seen, 64)
    }
}

#[test]
fn memory_outlives_its_kernel() {
    context();
    let room = Room::new();
    ok(room.run("take", 64, 100));
    let mut places = room.places();
    assert!(places.iter().all(|place| *place != 0 && place.is_multiple_of(16)));
    assert_eq!(room.seen(), (0..64).collect::<Vec<u32>>());
    places.sort_unstable();
    assert!(places.windows(2).all(|two| two[1] - two[0] >= 100), "they are apart");
    ok(room.run("give", 64, 0));
    assert_eq!(room.run("give", 1, 0), LAUNCH_FAILED, "twice");
}

#[test]
fn a_full_heap_gives_nothing() {
    context();
    ok(cuCtxSetLimit(HEAP, 1 << 20));
    let before = used();
    let room = Room::new();
    assert!(used() >= before + (1 << 20), "it is memory of the device");
    assert_eq!(cuCtxSetLimit(HEAP, 2 << 20), INVALID_VALUE, "it is there");
    let mut limit = 0;
    ok(cuCtxGetLimit(&mut limit, HEAP));
    assert_eq!(limit, 1 << 20);
    ok(room.run("take", 64, 64 << 10));
    let there = room.places().iter().filter(|place| **place != 0).count();
    assert_eq!(there, 16);
    // Null is freed without harm, and what was freed can be had again.
    ok(room.run("give", 64, 0));
    ok(room.run("take", 1, 1 << 20));
    assert_ne!(room.places()[0], 0);
    ok(room.run("give", 1, 0));
    ok(room.run("take", 1, u64::MAX));
    assert_eq!(room.places()[0], 0);
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let room = Room::new();
    ok(room.run("take", 64, 100));
    let places = room.places();
    say("ready");
    listen();
    assert_eq!(room.seen(), (0..64).collect::<Vec<u32>>());
    ok(room.run("give", 32, 0));
    ok(room.run("take", 32, 100));
    assert_eq!(room.places(), places, "the same are free as before");
}

#[test]
fn the_checkpoint_carries_the_heap() {
    ok(cuInit(0));
    let mut program = Program::start("program", &[]);
    assert_eq!(program.hear(), "ready");
    program.checkpoint_and_restore();
    program.tell("go on");
    program.finish();
}
