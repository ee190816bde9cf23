//! The linker: pieces of PTX that refer to each other.

mod support;

use support::*;

unsafe extern "C" {
    fn cuLinkCreate_v2(count: u32, names: *const u32, values: *mut u64, link: &mut u64) -> u32;
    fn cuLinkAddData_v2(
        link: u64,
        kind: u32,
        data: *const u8,
        size: usize,
        name: *const u8,
        count: u32,
        names: *const u32,
        values: *mut u64,
    ) -> u32;
    safe fn cuLinkComplete(link: u64, image: &mut *const u8, size: &mut usize) -> u32;
    safe fn cuLinkDestroy(link: u64) -> u32;
    safe fn cuFuncGetAttribute(value: &mut i32, attribute: u32, function: u64) -> u32;
    fn cuLaunchCooperativeKernel(
        function: u64,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: u64,
        parameters: *const *const u8,
    ) -> u32;
}

const HEADER: &str = ".version 7.0\n.target sm_70\n.address_size 64\n";

/// The kernel; it calls a function and uses variables of the other piece, and has a variable of
/// its own with the same name as one there.
const KERNEL: &str = "
.extern .func (.param .b32 result) plus(.param .b32 value);
.extern .global .align 4 .u32 shared_value;
.global .align 4 .u32 own = 100;
.extern .shared .align 16 .b8 dynamic[];
.weak .func (.param .b32 result) weak_one() { st.param.b32 [result], 1; ret; }
.visible .entry compute(.param .u64 p_out)
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [p_out];
    ld.global.u32 %r1, [shared_value];
    { .param .b32 a; .param .b32 b; st.param.b32 [a], %r1; call (b), plus, (a);
      ld.param.b32 %r2, [b]; }
    ld.global.u32 %r3, [own];
    add.u32 %r2, %r2, %r3;
    { .param .b32 b; call (b), weak_one; ld.param.b32 %r4, [b]; }
    mad.lo.u32 %r2, %r4, 10000, %r2;
    st.global.u32 [%rd1], %r2;
    ret;
}
";

const FUNCTION: &str = "
.visible .global .align 4 .u32 shared_value = 5;
.global .align 4 .u32 own = 1000;
.extern .shared .align 16 .b8 dynamic[];
.weak .func (.param .b32 result) weak_one() { st.param.b32 [result], 2; ret; }
.visible .func (.param .b32 result) plus(.param .b32 value)
{
    .reg .b32 %r<4>;
    ld.param.b32 %r1, [value];
    ld.global.u32 %r2, [own];
    add.u32 %r3, %r1, %r2;
    st.param.b32 [result], %r3;
    ret;
}
";

#[track_caller]
fn link() -> u64 {
    let mut link = 0;
    // SAFETY: there are no options.
    ok(unsafe { cuLinkCreate_v2(0, std::ptr::null(), std::ptr::null_mut(), &mut link) });
    link
}

const LOG_SIZE: usize = 400;

/// A link with an error log, and a function that reads the log.
#[track_caller]
fn link_with_log() -> (u64, impl Fn() -> String) {
    let log = Box::into_raw(Box::new([0_u8; LOG_SIZE]));
    let values = Box::into_raw(Box::new([log as u64, LOG_SIZE as u64]));
    let mut link = 0;
    // SAFETY: two options, which are never freed.
    ok(unsafe { cuLinkCreate_v2(2, [5, 6].as_ptr(), values.cast(), &mut link) });
    let read = move || {
        // SAFETY: the driver has written the length of the log, which only it writes to; then the
        // size of the buffer is put back for the next message.
        unsafe {
            let length = (*values)[1] as usize;
            (*values)[1] = LOG_SIZE as u64;
            let text = std::slice::from_raw_parts(log.cast(), length);
            String::from_utf8_lossy(text).into_owned()
        }
    };
    (link, read)
}

fn add(link: u64, kind: u32, data: &[u8]) -> u32 {
    let (none, nothing) = (std::ptr::null(), std::ptr::null_mut());
    let name = c"piece".as_ptr().cast();
    // SAFETY: the data are as long as they say, and there are no options.
    unsafe { cuLinkAddData_v2(link, kind, data.as_ptr(), data.len(), name, 0, none, nothing) }
}

fn complete(link: u64) -> (u32, *const u8, usize) {
    let (mut image, mut size) = (std::ptr::null(), 0);
    let code = cuLinkComplete(link, &mut image, &mut size);
    (code, image, size)
}

fn ptx(text: &str) -> Vec<u8> {
    format!("{HEADER}{text}\0").into_bytes()
}

#[test]
fn pieces_refer_to_each_other() {
    let context = context();
    let link = link();
    ok(add(link, 1, &ptx(KERNEL)));
    ok(add(link, 1, &ptx(FUNCTION)));
    // The fat binary has a kernel of its own.
    ok(add(link, 2, include_bytes!("fatbin/zstd.fatbin")));
    let (code, image, size) = complete(link);
    ok(code);
    assert!(size > KERNEL.len());
    let (mut module, mut function, mut other) = (0, 0, 0);
    // SAFETY: the driver made the image; the names end in NUL.
    unsafe {
        ok(cuModuleLoadData(&mut module, image));
        ok(cuLinkDestroy(link));
        ok(cuModuleGetFunction(&mut function, module, c"compute".as_ptr().cast()));
        ok(cuModuleGetFunction(&mut other, module, c"scale".as_ptr().cast()));
    }
    let out = allocate(8);
    let each = [(&raw const out).cast()];
    // SAFETY: the kernel has one parameter, a pointer.
    ok(unsafe {
        cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, each.as_ptr(), std::ptr::null())
    });
    // The first weak definition counts: 1.
    assert_eq!(read(out, 1), [10_000 + 5 + 1000 + 100]);
    assert_eq!(cuLinkDestroy(link), INVALID_HANDLE);
    assert_eq!(complete(link).0, INVALID_HANDLE);
    ok(cuCtxDestroy_v2(context));
}

/// The arrays of options are read when the link is created; what the program has put in their place since stays.
#[test]
fn a_link_does_not_need_its_arrays_of_options() {
    let context = context();
    let mut log = [0_u8; LOG_SIZE];
    let (mut names, mut values) = ([5, 6], [log.as_mut_ptr() as u64, LOG_SIZE as u64]);
    let mut link = 0;
    // SAFETY: two options; the arrays and the log live until the link is gone.
    ok(unsafe { cuLinkCreate_v2(2, names.as_ptr(), values.as_mut_ptr(), &mut link) });
    (names, values) = ([77; 2], [78; 2]);
    assert_eq!(add(link, 1, b"no PTX at all\0"), 218);
    assert_eq!((names, values), ([77; 2], [78; 2]));
    assert!(log.starts_with(b"piece: line 1"), "{:?}", String::from_utf8_lossy(&log));
    ok(cuLinkDestroy(link));
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn what_cannot_be_linked_is_refused_with_a_reason() {
    let context = context();
    let (link, log) = link_with_log();
    assert_eq!(add(link, 1, b"no PTX at all\0"), 218);
    let text = log();
    assert!(text.starts_with("piece: line 1"), "{text}");
    assert_eq!(add(link, 0, b"\x7fELF"), 209);
    assert_eq!(add(link, 2, include_bytes!("fatbin/sass.fatbin")), 209);
    let text = log();
    assert!(text.contains("no PTX"), "{text}");
    assert_eq!(add(link, 5, b"nvvm"), NOT_SUPPORTED);
    assert_eq!(add(link, 9, b"?"), INVALID_VALUE);
    assert_eq!(add(link, 1, b""), INVALID_VALUE);

    // A function that nobody defines.
    ok(add(link, 1, &ptx(KERNEL)));
    log();
    assert_eq!(complete(link).0, 218);
    let text = log();
    assert_eq!(text, "error   : Undefined reference to 'shared_value' in 'piece'");
    // Two that define the same.
    ok(add(link, 1, &ptx(FUNCTION)));
    ok(add(link, 1, &ptx(FUNCTION)));
    log();
    assert_eq!(complete(link).0, 200);
    let text = log();
    assert!(text.contains("defined twice"), "{text}");
    ok(cuLinkDestroy(link));
    ok(cuCtxDestroy_v2(context));
}

/// Completes a link and loads what comes of it; the function of the name `k` in it.
#[track_caller]
fn load(link: u64) -> u64 {
    let (code, image, _) = complete(link);
    ok(code);
    let (mut module, mut function) = (0, 0);
    // SAFETY: the driver made the image; the name ends in NUL.
    unsafe {
        ok(cuModuleLoadData(&mut module, image));
        ok(cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()));
    }
    ok(cuLinkDestroy(link));
    function
}

/// An archive as `ar` writes it: a member with the long names, and one of three bytes, whose name is at their beginning.
fn archive(member: &str) -> Vec<u8> {
    let names = format!("{member:/<31}\n");
    let head = |name: &str, size: usize| format!("{name:<16}{:<32}{size:<10}`\n", "0");
    let [names_head, head] = [head("//", names.len()), head("/0", 3)];
    format!("!<arch>\n{names_head}{names}{head}obj\n").into_bytes()
}

/// Each block says that it is there, waits for the grid twice, and then counts the others.
const WAITS: &str = "
.extern .func (.param .b64 r) cudaCGGetIntrinsicHandle(.param .b32 a);
.extern .func (.param .b32 r) cudaCGSynchronize(.param .b64 a, .param .b32 b);
.visible .entry k(.param .u64 p_out)
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .reg .pred %p;
    ld.param.u64 %rd1, [p_out];
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p, %r1, 0;
    @!%p red.global.add.u32 [%rd1], 1;
    { .param .b32 a; .param .b64 r; st.param.b32 [a], 1; call (r), cudaCGGetIntrinsicHandle, (a);
      ld.param.b64 %rd2, [r]; }
    { .param .b64 a; .param .b32 b; .param .b32 r; st.param.b64 [a], %rd2; st.param.b32 [b], 0;
      call (r), cudaCGSynchronize, (a, b); ld.param.b32 %r2, [r]; }
    { .param .b64 a; .param .b32 b; .param .b32 r; st.param.b64 [a], %rd2; st.param.b32 [b], 0;
      call (r), cudaCGSynchronize, (a, b); ld.param.b32 %r3, [r]; }
    or.b32 %r2, %r2, %r3;
    ld.global.u32 %r4, [%rd1];
    mad.lo.u32 %r4, %r2, 1000, %r4;
    mov.u32 %r5, %ctaid.x;
    mul.wide.u32 %rd3, %r5, 4;
    add.u64 %rd3, %rd3, %rd1;
    @!%p st.global.u32 [%rd3+4], %r4;
    ret;
}
";

#[test]
fn the_device_runtime_has_the_barrier_of_a_grid() {
    const BLOCKS: u32 = 7;
    let context = context();
    let (link, log) = link_with_log();
    ok(add(link, 1, &ptx(WAITS)));
    log();
    assert_eq!(add(link, 4, &archive("other.o")), 209);
    let text = log();
    assert!(text.contains("libcudadevrt.a"), "{text}");
    ok(add(link, 4, &archive("cuda_device_runtime.o")));
    let function = load(link);
    let out = allocate(4 * (BLOCKS as usize + 1));
    let each = [(&raw const out).cast()];
    ok(cuMemsetD32_v2(out, 0, 1));
    // SAFETY: the kernel has one parameter, a pointer.
    ok(unsafe { cuLaunchCooperativeKernel(function, BLOCKS, 1, 1, 64, 1, 1, 0, 0, each.as_ptr()) });
    assert_eq!(read(out, BLOCKS as usize + 1), [BLOCKS; BLOCKS as usize + 1]);

    // Without a cooperative launch there is no barrier, which the result says.
    // SAFETY: as above.
    ok(unsafe {
        cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, 0, each.as_ptr(), std::ptr::null())
    });
    assert_eq!(read(out, 2), [BLOCKS + 1, BLOCKS + 1 + 1000]);
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_limit_of_registers_is_kept() {
    const MANY: &str = ".visible .entry k() { .reg .b64 %rd<200>; ret; }";
    const OWN: &str = ".visible .entry k() .maxnreg 16 { .reg .b64 %rd<200>; ret; }";
    let context = context();
    for (text, limit, found) in [(MANY, 0, 100), (MANY, 38, 38), (OWN, 0, 16), (OWN, 38, 16)] {
        let mut link = 0;
        // SAFETY: one option, CU_JIT_MAX_REGISTERS, which is read at once.
        ok(unsafe { cuLinkCreate_v2(1, &0, [limit].as_mut_ptr(), &mut link) });
        ok(add(link, 1, &ptx(text)));
        let (function, mut registers) = (load(link), 0);
        ok(cuFuncGetAttribute(&mut registers, 4, function));
        assert_eq!(registers, found, "{text} {limit}");
    }
    ok(cuCtxDestroy_v2(context));
}

#[test]
fn a_piece_may_declare_a_function_otherwise_than_it_is() {
    // A result that there is not, and a parameter more.
    const CALLS: &str = ".extern .func (.param .b64 r) mark(.param .b64 a, .param .b32 b);
        .visible .entry k(.param .u64 p_out) .maxntid 32 {
        .reg .b64 %rd<3>; ld.param.u64 %rd1, [p_out];
        { .param .b64 a; .param .b32 b; .param .b64 r; st.param.b64 [a], %rd1; st.param.b32 [b], 7;
          call (r), mark, (a, b); ld.param.b64 %rd2, [r]; }
        ret; }";
    const MARKS: &str = ".visible .func mark(.param .b64 a) { .reg .b64 %rd;
        ld.param.b64 %rd, [a]; st.global.u32 [%rd], 5; ret; }";
    let context = context();
    let out = allocate(4);
    let each = [(&raw const out).cast()];
    for pieces in [[CALLS, MARKS], [MARKS, CALLS]] {
        let link = link();
        pieces.iter().for_each(|piece| ok(add(link, 1, &ptx(piece))));
        let function = load(link);
        ok(cuMemsetD32_v2(out, 0, 1));
        let launch = |threads| {
            // SAFETY: the kernel has one parameter, a pointer.
            unsafe {
                cuLaunchKernel(
                    function,
                    1,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    0,
                    0,
                    each.as_ptr(),
                    std::ptr::null(),
                )
            }
        };
        ok(launch(32));
        assert_eq!(read(out, 1), [5]);
        // More than `.maxntid`.
        assert_eq!(launch(33), INVALID_VALUE);
    }
    ok(cuCtxDestroy_v2(context));
}
