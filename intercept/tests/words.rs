//! Every word of a kernel's arguments is recorded: each of these points to an allocation of its own.

mod support;

use std::ffi::c_void;
use std::io::BufRead;

use gpucr_wire::{Reply, Request};
use support::{ENV_PROGRAM, Library, Program, say};

/// Words at both ends, within a structure and behind a smaller parameter.
const PTX: &std::ffi::CStr = c"
.version 8.0
.target sm_70
.address_size 64
.visible .entry touch(
    .param .u64 first,
    .param .align 8 .b8 middle[24],
    .param .u32 count,
    .param .u64 last
)
{
    ret;
}
";
/// The words: parameter, and offset in it.
const WORDS: [(u32, u32); 5] = [(0, 0), (1, 0), (1, 8), (1, 16), (3, 0)];

/// Not a test: the program that the other one starts.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        run();
    }
}

/// The arguments, packed as the driver packs them.
#[repr(C)]
struct Arguments {
    first: u64,
    middle: [u64; 3],
    count: u64,
    last: u64,
}

type Launch = unsafe extern "C" fn(
    u64,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u64,
    *mut *mut c_void,
    *mut *mut c_void,
) -> u32;

/// Launches the kernel, with its arguments one by one or in one piece.
fn run() {
    let cuda = Library::open("libcuda.so.1");
    let (mut context, mut module, mut function) = (0u64, 0u64, 0u64);
    cuda.must("cuInit", &[0]);
    cuda.must("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, 0]);
    cuda.must("cuCtxSetCurrent", &[context]);
    cuda.must("cuModuleLoadData", &[&raw mut module as u64, PTX.as_ptr() as u64]);
    let name = c"touch".as_ptr() as u64;
    cuda.must("cuModuleGetFunction", &[&raw mut function as u64, module, name]);
    let mut places = [0u64; WORDS.len()];
    for place in &mut places {
        cuda.must("cuMemAlloc_v2", &[place as *mut u64 as u64, 4096]);
    }
    let [first, a, b, c, last] = places;
    let mut arguments = Arguments { first, middle: [a, b, c], count: 7, last };
    let mut pointers: [*mut c_void; 4] = [
        (&raw mut arguments.first).cast(),
        (&raw mut arguments.middle).cast(),
        (&raw mut arguments.count).cast(),
        (&raw mut arguments.last).cast(),
    ];
    let mut size = size_of::<Arguments>();
    let mut extra: [*mut c_void; 5] = [
        std::ptr::without_provenance_mut(1),
        (&raw mut arguments).cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut size).cast(),
        std::ptr::null_mut(),
    ];
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let none = std::ptr::null_mut();
        let (pointers, extra) = match line.expect("a line").as_str() {
            "one by one" => (pointers.as_mut_ptr(), none),
            "in one piece" => (none, extra.as_mut_ptr()),
            other => panic!("what is {other}?"),
        };
        // SAFETY: the signature of the function, and the arguments of the kernel.
        let code = unsafe {
            let launch: Launch = std::mem::transmute(cuda.symbol("cuLaunchKernel"));
            launch(function, 1, 1, 1, 1, 1, 1, 0, 0, pointers, extra)
        };
        assert_eq!(code, 0);
        cuda.must("cuCtxSynchronize", &[]);
        say("done");
    }
    std::process::exit(0);
}

#[test]
fn no_word_of_a_kernels_arguments_is_missed() {
    let mut program = Program::start();
    let (mut agent, _) = program.agent();
    agent.must(&Request::Record { on: true });
    for form in ["one by one", "in one piece"] {
        assert_eq!(program.ask(form), "done");
        let Reply::Accesses { accesses } = agent.ask(&Request::Accesses {}) else {
            panic!("no accesses");
        };
        let slots = &accesses.kernels[0].slots;
        let words: Vec<(u32, u32)> = slots.iter().map(|slot| (slot.param, slot.offset)).collect();
        assert_eq!(words, WORDS, "{form}");
        let mut touched: Vec<u64> =
            slots.iter().flat_map(|slot| &slot.touched).map(|touched| touched.allocation).collect();
        touched.sort_unstable();
        touched.dedup();
        assert_eq!(touched.len(), WORDS.len(), "each points to one of its own: {slots:?}");
    }
}
