//! `printf` of kernels: each conversion as the C library has it, and when texts come out.

mod support;

use std::ffi::CString;
use std::process::{Command, Stdio};

use support::*;

unsafe extern "C" {
    safe fn cuCtxSetLimit(limit: u32, value: usize) -> u32;
}

/// `CU_LIMIT_PRINTF_FIFO_SIZE`.
const FIFO: u32 = 1;

/// A kernel for each format, and a text: `one(out, value)`, which keeps what `vprintf` returns.
fn module(format: &str) -> String {
    let bytes: Vec<String> = format.bytes().chain([0]).map(|byte| byte.to_string()).collect();
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n\
         .global .align 1 .b8 text[{}] = {{{}}};\n\
         .global .align 1 .b8 word[5] = {{119, 111, 114, 100, 0}};\n\
         .visible .entry one(.param .u64 p0, .param .u64 p1)\n{{\n\
         .local .align 8 .b8 place[24];\n.reg .b64 %d<8>; .reg .b32 %r<4>; .reg .pred %p;\n\
         ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];\n\
         setp.eq.u64 %p, %d1, 77; mov.u64 %d4, word; cvta.global.u64 %d4, %d4;\n\
         @%p mov.u64 %d1, %d4;\n\
         st.local.u64 [place], %d1; st.local.u64 [place+8], %d1; st.local.u64 [place+16], %d1;\n\
         mov.u64 %d2, text; cvta.global.u64 %d2, %d2;\n\
         mov.u64 %d3, place; cvta.local.u64 %d3, %d3;\n\
         {{ .param .b64 a; .param .b64 b; .param .b32 r;\n\
         st.param.b64 [a], %d2; st.param.b64 [b], %d3;\n\
         call.uni (r), vprintf, (a, b);\n ld.param.b32 %r0, [r]; }}\n\
         st.global.u32 [%d0], %r0;\nret;\n}}\n\0",
        bytes.len(),
        bytes.join(", ")
    )
}

/// Prints one value; what `printf` returned.
fn print(format: &str, value: u64) -> u32 {
    let text = module(format);
    let (mut module, mut function) = (0, 0);
    let out = allocate(4);
    let arguments = [out, value];
    let pointers = arguments.each_ref().map(std::ptr::from_ref);
    // SAFETY: the texts end in NUL, and there is a pointer for each parameter.
    unsafe {
        ok(cuModuleLoadData(&mut module, text.as_ptr()));
        ok(cuModuleGetFunction(&mut function, module, c"one".as_ptr().cast()));
        let (pointers, null) = (pointers.as_ptr().cast(), std::ptr::null());
        ok(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, pointers, null));
    }
    ok(cuCtxSynchronize());
    read(out, 1)[0]
}

enum Argument {
    Int(i32),
    Long(i64),
    Double(f64),
    Word,
}

fn cases() -> Vec<(String, Argument)> {
    use Argument::*;
    let mut cases = Vec::new();
    for flags in ["", "-", "+", " ", "#", "0", "-#", "+0"] {
        for size in ["", "9", ".3", "12.4", ".0"] {
            for conversion in ["d", "u", "x", "X", "o", "i", "hd", "hhu"] {
                for value in [0, 7, -7, 70000] {
                    cases.push((format!("%{flags}{size}{conversion}"), Int(value)));
                }
            }
            for conversion in ["lld", "lx"] {
                cases.push((format!("%{flags}{size}{conversion}"), Long(-(1 << 40))));
            }
            for conversion in ["f", "e", "g", "a", "F", "E", "G", "A"] {
                for value in [0.0, -0.0, 0.5, 2.5, 1e300, -1e-5, f64::INFINITY, f64::NAN] {
                    cases.push((format!("%{flags}{size}{conversion}"), Double(value)));
                }
            }
        }
    }
    for format in ["%s", "%9s", "%-9s", "%.2s"] {
        cases.push((format.to_owned(), Word));
    }
    for (format, value) in [("%c", 65), ("%4c", 200), ("a%%b%d", 5), ("%q %d", 6), ("%", 1)] {
        cases.push((format.to_owned(), Int(value)));
    }
    for (format, value) in [("%p", 0x1234), ("%p", 0), ("%12p", 0xabcd)] {
        cases.push((format.to_owned(), Long(value)));
    }
    cases
}

/// As the C library prints it. What has no conversion that CUDA knows is printed as it is.
fn expected(format: &str, argument: &Argument) -> Vec<u8> {
    let format = CString::new(format.replace("%q", "%%q")).expect("no zero");
    let mut text = vec![0u8; 1024];
    let (to, size) = (text.as_mut_ptr().cast(), text.len());
    // SAFETY: the formats of the cases have one conversion, of the argument's type; the buffer is
    // as large as it says.
    let length = unsafe {
        match argument {
            Argument::Int(value) => libc::snprintf(to, size, format.as_ptr(), *value),
            Argument::Long(value) => libc::snprintf(to, size, format.as_ptr(), *value),
            Argument::Double(value) => libc::snprintf(to, size, format.as_ptr(), *value),
            Argument::Word => libc::snprintf(to, size, format.as_ptr(), c"word".as_ptr()),
        }
    };
    text.truncate(usize::try_from(length).unwrap_or(0));
    text
}

/// What a program printed between two lines.
fn printed(name: &str) -> Vec<u8> {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--quiet"])
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success());
    let find = |mark: &[u8]| {
        let found = output.stdout.windows(mark.len()).position(|part| part == mark);
        found.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stdout)))
    };
    let (start, end) = (find(b"<begin>\n") + 8, find(b"<end>\n"));
    let printed = &output.stdout[start..end];
    // On a busy machine libtest says in between that the test takes long.
    let is_printed = |line: &&[u8]| !line.ends_with(b" has been running for over 60 seconds\n");
    printed.split_inclusive(|byte| *byte == b'\n').filter(is_printed).flatten().copied().collect()
}

#[test]
#[ignore = "a program for other tests"]
fn formats() {
    context();
    println!("<begin>");
    for (format, argument) in cases() {
        let value = match argument {
            Argument::Int(value) => u64::from(value as u32),
            Argument::Long(value) => value as u64,
            Argument::Double(value) => value.to_bits(),
            Argument::Word => 77,
        };
        let count = u32::from(format != "%");
        assert_eq!(print(&format!("{format}\n"), value), count, "{format}");
    }
    println!("<end>");
}

#[test]
fn conversions_are_those_of_the_c_library() {
    let printed = printed("formats");
    let mut lines = printed.split(|byte| *byte == b'\n');
    for (format, argument) in cases() {
        let mut wanted = if format == "%" { b"%".to_vec() } else { expected(&format, &argument) };
        if let Argument::Double(value) = argument
            && value.is_nan()
        {
            // The sign of a NaN is its own.
            wanted.retain(|byte| *byte != b'-');
        }
        let found = lines.next().expect("a line for each case");
        assert_eq!(String::from_utf8_lossy(found), String::from_utf8_lossy(&wanted), "{format}");
    }
}

#[test]
#[ignore = "a program for other tests"]
fn order() {
    let context = context();
    println!("<begin>");
    let launch = |format: &str| {
        let text = module(format);
        let (mut module, mut function) = (0, 0);
        let out = allocate(4);
        let arguments = [out, 1u64];
        let pointers = arguments.each_ref().map(std::ptr::from_ref);
        // SAFETY: the texts end in NUL, and there is a pointer for each parameter.
        unsafe {
            ok(cuModuleLoadData(&mut module, text.as_ptr()));
            ok(cuModuleGetFunction(&mut function, module, c"one".as_ptr().cast()));
            let (pointers, null) = (pointers.as_ptr().cast(), std::ptr::null());
            ok(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, pointers, null));
        }
        while cuStreamQuery(0) == NOT_READY {
            std::thread::yield_now();
        }
    };
    launch("first\n");
    println!("before the synchronisation");
    ok(cuStreamSynchronize(0));
    // Each call takes 16 bytes and its arguments: the oldest two are lost.
    let whole = module("%lld %lld\n");
    let (mut loaded, mut function) = (0, 0);
    // SAFETY: the texts end in NUL.
    unsafe {
        ok(cuModuleLoadData(&mut loaded, whole.as_ptr()));
        ok(cuModuleGetFunction(&mut function, loaded, c"one".as_ptr().cast()));
    }
    ok(cuCtxSetLimit(FIFO, 64));
    let arguments: Vec<[u64; 2]> = (0..4).map(|value| [allocate(4), value]).collect();
    let graph = graph_of(function, &arguments);
    graph.launch();
    ok(cuCtxSynchronize());
    launch("at the end\n");
    ok(cuCtxDestroy_v2(context));
    println!("<end>");
}

#[test]
fn texts_come_out_when_the_program_synchronises() {
    let text = String::from_utf8(printed("order")).unwrap();
    assert_eq!(text, "before the synchronisation\nfirst\n2 2\n3 3\nat the end\n");
}

unsafe extern "C" {
    safe fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> u32;
    safe fn cuStreamEndCapture(stream: u64, graph: &mut u64) -> u32;
    safe fn cuGraphInstantiateWithFlags(executable: &mut u64, graph: u64, flags: u64) -> u32;
    safe fn cuGraphLaunch(executable: u64, stream: u64) -> u32;
}

/// Several launches of one kernel, none of which lets texts out.
struct Graph {
    executable: u64,
    stream: u64,
}

fn graph_of(function: u64, arguments: &[[u64; 2]]) -> Graph {
    let (mut stream, mut graph, mut executable) = (0, 0, 0);
    ok(cuStreamCreate(&mut stream, 1));
    ok(cuStreamBeginCapture_v2(stream, 2));
    for pair in arguments {
        let pointers = pair.each_ref().map(std::ptr::from_ref);
        let (pointers, null) = (pointers.as_ptr().cast(), std::ptr::null());
        // SAFETY: there is a pointer for each parameter.
        ok(unsafe { cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, pointers, null) });
    }
    ok(cuStreamEndCapture(stream, &mut graph));
    ok(cuGraphInstantiateWithFlags(&mut executable, graph, 0));
    Graph { executable, stream }
}

impl Graph {
    fn launch(&self) {
        ok(cuGraphLaunch(self.executable, self.stream));
    }
}
