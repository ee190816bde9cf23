//! Kernels that launch kernels: how much may wait, places for parameters, what cannot be launched, and failures.
//! `tests/runtime/device_launches.cu` has what compilers make of it.

mod support;

use support::*;

const INVALID_PTX: u32 = 218;
const ILLEGAL_ADDRESS: u32 = 700;
/// `cudaErrorInvalidValue`.
const INVALID_VALUE: u32 = 1;
/// `cudaErrorInvalidConfiguration`.
const INVALID_CONFIGURATION: u32 = 9;
/// `cudaErrorLaunchPendingCountExceeded`.
const TOO_MANY: u32 = 69;
/// `cudaErrorInvalidDeviceFunction`.
const NO_FUNCTION: u32 = 98;

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const LOG: [u32; 2] = [5, 6];

/// `add(out)` adds 1 to `out[0]`; `large` has 4000 bytes of parameters. The function `ask` gives a place for the
/// parameters of a kernel in one block of so many threads. The other kernels get `out` and a number.
const PTX: &str = "
.version 8.0
.target sm_80
.address_size 64
.extern .func (.param .b64 r) __cudaCDP2GetParameterBufferV2
    (.param .b64 f, .param .align 4 .b8 g[12], .param .align 4 .b8 b[12], .param .b32 s);
.extern .func (.param .b32 r) __cudaCDP2LaunchDeviceV2_ptsz (.param .b64 p, .param .b64 s);
.extern .func (.param .b64 r) cudaGetParameterBuffer (.param .b64 a, .param .b64 s);
.extern .func (.param .b32 r) cudaLaunchDevice (.param .b64 f, .param .b64 p, .param .align 4 .b8 g[12],
    .param .align 4 .b8 b[12], .param .b32 s, .param .b64 t);
.extern .func (.param .b32 r) __cudaCDP2GetLastError ();
.extern .func (.param .b32 r) __cudaCDP2MemsetAsync
    (.param .b64 p, .param .b32 v, .param .b64 n, .param .b64 s);
.extern .func (.param .b32 r) __cudaCDP2MemcpyAsync
    (.param .b64 t, .param .b64 f, .param .b64 n, .param .b32 k, .param .b64 s);
.visible .entry add(.param .u64 p0)
{
    .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.u64 %d0, [p0];
    atom.global.add.u32 %r0, [%d0], 1;
    ret;
}
.visible .entry large(.param .align 8 .b8 p0[4000]) { ret; }
.visible .entry bad(.param .u64 p0)
{
    .reg .b64 %d<2>;
    mov.b64 %d0, 8;
    st.global.u64 [%d0], %d0;
    ret;
}
.func (.param .b64 room) ask(.param .b64 kernel, .param .b32 threads)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>;
    ld.param.b64 %d0, [kernel]; ld.param.b32 %r0, [threads];
    {
        .param .b64 f; .param .align 4 .b8 g[12]; .param .align 4 .b8 b[12]; .param .b32 s; .param .b64 r;
        st.param.b64 [f], %d0;
        st.param.b32 [g], 1; st.param.b32 [g+4], 1; st.param.b32 [g+8], 1;
        st.param.b32 [b], %r0; st.param.b32 [b+4], 1; st.param.b32 [b+8], 1;
        st.param.b32 [s], 0;
        call.uni (r), __cudaCDP2GetParameterBufferV2, (f, g, b, s);
        ld.param.b64 %d1, [r];
    }
    st.param.b64 [room], %d1;
    ret;
}
.func (.param .b32 error) launch(.param .b64 room)
{
    .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.b64 %d0, [room];
    {
        .param .b64 p; .param .b64 s; .param .b32 r;
        st.param.b64 [p], %d0;
        st.param.b64 [s], 0;
        call.uni (r), __cudaCDP2LaunchDeviceV2_ptsz, (p, s);
        ld.param.b32 %r0, [r];
    }
    st.param.b32 [error], %r0;
    ret;
}
.func (.param .b32 error) last()
{
    .reg .b32 %r<2>;
    { .param .b32 r; call.uni (r), __cudaCDP2GetLastError, (); ld.param.b32 %r0, [r]; }
    st.param.b32 [error], %r0;
    ret;
}
.visible .entry many(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %d0, [p0];
    mov.u64 %d1, add;
    { .param .b64 k; .param .b32 t; .param .b64 r; st.param.b64 [k], %d1; st.param.b32 [t], 1;
      call.uni (r), ask, (k, t); ld.param.b64 %d2, [r]; }
    st.u64 [%d2], %d0;
    { .param .b64 p; .param .b32 r; st.param.b64 [p], %d2; call.uni (r), launch, (p); ld.param.b32 %r0, [r]; }
    setp.eq.u32 %p, %r0, 0;
    @%p ret;
    atom.global.add.u32 %r1, [%d0+4], 1;
    atom.global.max.u32 %r1, [%d0+8], %r0;
    ret;
}
.visible .entry keep(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %d0, [p0];
    mov.u64 %d1, large;
    { .param .b64 k; .param .b32 t; .param .b64 r; st.param.b64 [k], %d1; st.param.b32 [t], 1;
      call.uni (r), ask, (k, t); ld.param.b64 %d2, [r]; }
    { .param .b32 r; call.uni (r), last, (); ld.param.b32 %r0, [r]; }
    setp.ne.u64 %p, %d2, 0;
    @%p atom.global.add.u32 %r1, [%d0], 1;
    @%p ret;
    atom.global.add.u32 %r1, [%d0+4], 1;
    atom.global.max.u32 %r1, [%d0+8], %r0;
    ret;
}
.visible .entry wrong(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<8>; .reg .b32 %r<8>; .reg .pred %p;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d4, [p1];
    { .param .b64 k; .param .b32 t; .param .b64 r; st.param.b64 [k], %d0; st.param.b32 [t], 1;
      call.uni (r), ask, (k, t); ld.param.b64 %d2, [r]; }
    st.global.u32 [%d0+4], %d2;
    { .param .b32 r; call.uni (r), last, (); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+8], %r0;
    mov.u64 %d1, add;
    cvt.u32.u64 %r1, %d4;
    { .param .b64 k; .param .b32 t; .param .b64 r; st.param.b64 [k], %d1; st.param.b32 [t], %r1;
      call.uni (r), ask, (k, t); ld.param.b64 %d2, [r]; }
    st.global.u32 [%d0+12], %d2;
    { .param .b32 r; call.uni (r), last, (); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+16], %r0;
    { .param .b64 p; .param .b32 r; st.param.b64 [p], %d0; call.uni (r), launch, (p); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+20], %r0;
    { .param .b64 k; .param .b32 t; .param .b64 r; st.param.b64 [k], %d1; st.param.b32 [t], 1;
      call.uni (r), ask, (k, t); ld.param.b64 %d2, [r]; }
    st.u64 [%d2], %d0;
    { .param .b64 p; .param .b32 r; st.param.b64 [p], %d2; call.uni (r), launch, (p); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+24], %r0;
    { .param .b64 p; .param .b32 r; st.param.b64 [p], %d2; call.uni (r), launch, (p); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+28], %r0;
    ret;
}
.visible .entry failing(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0];
    mov.u64 %d1, bad;
    { .param .b64 k; .param .b32 t; .param .b64 r; st.param.b64 [k], %d1; st.param.b32 [t], 1;
      call.uni (r), ask, (k, t); ld.param.b64 %d2, [r]; }
    { .param .b64 p; .param .b32 r; st.param.b64 [p], %d2; call.uni (r), launch, (p); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+4], 1;
    ret;
}
.visible .entry former(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>; .reg .pred %p;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d3, [p1];
    { .param .b64 a; .param .b64 s; .param .b64 r; st.param.b64 [a], 64; st.param.b64 [s], %d3;
      call.uni (r), cudaGetParameterBuffer, (a, s); ld.param.b64 %d1, [r]; }
    st.u64 [%d1], %d0;
    mov.u64 %d2, add;
    setp.eq.u64 %p, %d3, 8;
    @%p bra go;
    mov.u64 %d2, large;
go:
    {
        .param .b64 f; .param .b64 p; .param .align 4 .b8 g[12]; .param .align 4 .b8 b[12]; .param .b32 s;
        .param .b64 t; .param .b32 r;
        st.param.b64 [f], %d2; st.param.b64 [p], %d1;
        st.param.b32 [g], 3; st.param.b32 [g+4], 2; st.param.b32 [g+8], 1;
        st.param.b32 [b], 5; st.param.b32 [b+4], 1; st.param.b32 [b+8], 2;
        st.param.b32 [s], 0; st.param.b64 [t], 0;
        call.uni (r), cudaLaunchDevice, (f, p, g, b, s, t);
        ld.param.b32 %r0, [r];
    }
    st.global.u32 [%d0+4], %r0;
    ret;
}
.visible .entry fills(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    { .param .b64 p; .param .b32 v; .param .b64 n; .param .b64 s; .param .b32 r;
      st.param.b64 [p], %d1; st.param.b32 [v], 0; st.param.b64 [n], 4; st.param.b64 [s], 0;
      call.uni (r), __cudaCDP2MemsetAsync, (p, v, n, s); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0], %r0;
    ret;
}
.visible .entry copies(.param .u64 p0, .param .u64 p1)
{
    .reg .b64 %d<4>; .reg .b32 %r<4>;
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
    { .param .b64 t; .param .b64 f; .param .b64 n; .param .b32 k; .param .b64 s; .param .b32 r;
      st.param.b64 [t], %d0; st.param.b64 [f], %d1; st.param.b64 [n], 4; st.param.b32 [k], 4;
      st.param.b64 [s], 3;
      call.uni (r), __cudaCDP2MemcpyAsync, (t, f, n, k, s); ld.param.b32 %r0, [r]; }
    st.global.u32 [%d0+4], %r0;
    ret;
}
";

struct Room {
    module: u64,
    out: u64,
}

impl Room {
    fn new() -> Room {
        context();
        let (mut module, text) = (0, format!("{PTX}\0"));
        // SAFETY: the text ends in NUL.
        ok(unsafe { cuModuleLoadData(&mut module, text.as_ptr()) });
        Room { module, out: allocate(32) }
    }

    /// Runs a kernel with 8 words of zero and a number; gives the words, or how it failed.
    fn run(&self, name: &str, blocks: u32, threads: u32, number: u64) -> Result<Vec<u32>, u32> {
        write(self.out, &[0; 8]);
        let (mut function, name) = (0, format!("{name}\0"));
        let arguments = [self.out, number];
        let pointers = arguments.each_ref().map(std::ptr::from_ref);
        let null = std::ptr::null();
        // SAFETY: the name ends in NUL, and there is a pointer for each parameter.
        unsafe {
            ok(cuModuleGetFunction(&mut function, self.module, name.as_ptr()));
            let pointers = pointers.as_ptr().cast();
            ok(cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, 0, pointers, null));
        }
        match cuCtxSynchronize() {
            0 => Ok(read(self.out, 8)),
            code => Err(code),
        }
    }
}

#[test]
fn only_so_many_launches_wait() {
    let room = Room::new();
    let most = 1 << 16;
    let words = room.run("many", 66, 1024, 0).unwrap();
    assert_eq!(words[..3], [most, 66 * 1024 - most, TOO_MANY]);
    // What waited is through.
    assert_eq!(room.run("many", 64, 1024, 0).unwrap()[..3], [most, 0, 0]);
}

#[test]
fn places_that_were_not_used_are_given_back() {
    let room = Room::new();
    let first = room.run("keep", 3, 1024, 0).unwrap();
    assert!(first[0] > 1024 && first[1] > 0 && first[2] == TOO_MANY, "{first:?}");
    assert_eq!(room.run("keep", 3, 1024, 0).unwrap(), first);
    assert_eq!(room.run("many", 1, 100, 0).unwrap()[..3], [100, 0, 0]);
}

#[test]
fn what_cannot_be_launched_is_refused() {
    let words = Room::new().run("wrong", 1, 1, 1025).unwrap();
    let refused = [0, NO_FUNCTION, 0, INVALID_CONFIGURATION, INVALID_VALUE];
    assert_eq!(words[1..6], refused);
    // A place is good for one launch, which runs.
    assert_eq!([words[0], words[6], words[7]], [1, 0, INVALID_VALUE]);
}

#[test]
fn launches_of_the_first_form() {
    let room = Room::new();
    assert_eq!(room.run("former", 1, 1, 8).unwrap()[..2], [3 * 2 * 5 * 2, 0]);
    // A place that is too small for the parameters of a larger kernel.
    assert_eq!(room.run("former", 1, 1, 3900).unwrap()[..2], [0, INVALID_VALUE]);
}

#[test]
fn a_launched_kernel_fails_like_any_other() {
    assert_eq!(Room::new().run("failing", 1, 1, 0), Err(ILLEGAL_ADDRESS));
}

#[test]
fn only_memory_of_the_device_is_copied() {
    let room = Room::new();
    let source = allocate(4);
    write(source, &[9]);
    assert_eq!(room.run("copies", 1, 1, source).unwrap()[..2], [9, 0]);
    let mut own = 7_u32;
    let place = std::ptr::from_mut(&mut own) as u64;
    assert_eq!(room.run("copies", 1, 1, place), Err(ILLEGAL_ADDRESS));
}

#[test]
fn only_memory_of_the_device_is_filled() {
    let mut own = 7_u32;
    let place = std::ptr::from_mut(&mut own) as u64;
    assert_eq!(Room::new().run("fills", 1, 1, place), Err(ILLEGAL_ADDRESS));
    // SAFETY: a variable of this function.
    assert_eq!(unsafe { std::ptr::from_mut(&mut own).read_volatile() }, 7);
}

#[test]
fn functions_that_are_not_there_are_named() {
    context();
    let text = ".version 8.0\n.target sm_80\n.address_size 64
        .extern .func (.param .b32 r) cudaDeviceSynchronize ();
        .visible .entry wait() { { .param .b32 r; call.uni (r), cudaDeviceSynchronize, (); } ret; }\0";
    let (mut module, mut log) = (0, [0_u8; 500]);
    let mut values = [log.as_mut_ptr() as u64, log.len() as u64];
    // SAFETY: the text ends in NUL, and the buffer has its size.
    let code = unsafe {
        cuModuleLoadDataEx(&mut module, text.as_ptr(), 2, LOG.as_ptr(), values.as_mut_ptr())
    };
    let log = String::from_utf8_lossy(&log);
    assert_eq!(code, INVALID_PTX);
    assert!(log.contains("cudaDeviceSynchronize, a function of CUDA's device runtime"), "{log}");
}
