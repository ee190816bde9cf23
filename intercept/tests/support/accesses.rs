//! A program that launches in many ways, each known to its test.

use std::ffi::c_void;
use std::io::BufRead;

use super::support::{Library, say};

#[path = "batches.rs"]
mod batches;

const MIB: u64 = 1 << 20;

/// A kernel that does nothing with a pointer, a structure, a number and a pointer that is null.
pub(crate) const PTX: &str = "\
.version 8.0
.target sm_70
.address_size 64
.visible .entry touch(
    .param .u64 large,
    .param .align 8 .b8 both[24],
    .param .u32 count,
    .param .u64 none
)
{
    ret;
}
.visible .entry count(.param .u64 at)
{
    .reg .b64 %rd<2>;
    ld.param.u64 %rd1, [at];
    red.global.add.u32 [%rd1], 1;
    ret;
}
";

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

struct State {
    cuda: Library,
    context: u64,
    module: u64,
    function: u64,
    stream: u64,
    large: u64,
    small: u64,
    other: u64,
    mapped: u64,
    graph: u64,
    node: u64,
    executable: u64,
}

/// The arguments of one launch, packed as the driver packs them.
#[repr(C)]
struct Arguments {
    large: u64,
    both: [u64; 3],
    count: u64,
    none: u64,
}

impl Arguments {
    fn pointers(&mut self) -> [*mut c_void; 4] {
        [
            (&raw mut self.large).cast(),
            (&raw mut self.both).cast(),
            (&raw mut self.count).cast(),
            (&raw mut self.none).cast(),
        ]
    }
}

/// `CUDA_KERNEL_NODE_PARAMS`, second version.
#[repr(C)]
struct KernelNode {
    function: u64,
    shape: [u32; 7],
    params: u64,
    extra: u64,
    kernel: u64,
    context: u64,
}

unsafe extern "C" fn nothing(_: *mut c_void) {}

pub(crate) fn run() {
    let cuda = Library::open("libcuda.so.1");
    cuda.must("cuInit", &[0]);
    let mut context = 0u64;
    cuda.must("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, 0]);
    cuda.must("cuCtxSetCurrent", &[context]);
    let text = std::ffi::CString::new(PTX).expect("no NUL");
    let (mut module, mut function, mut stream) = (0u64, 0u64, 0u64);
    cuda.must("cuModuleLoadData", &[&raw mut module as u64, text.as_ptr() as u64]);
    let name = c"touch".as_ptr() as u64;
    cuda.must("cuModuleGetFunction", &[&raw mut function as u64, module, name]);
    drop(text);
    cuda.must("cuStreamCreate", &[&raw mut stream as u64, 1]);
    let mut state = State {
        cuda,
        context,
        module,
        function,
        stream,
        large: 0,
        small: 0,
        other: 0,
        mapped: 0,
        graph: 0,
        node: 0,
        executable: 0,
    };
    (state.large, state.small, state.other) =
        (state.allocate(5 * MIB), state.allocate(1000), state.allocate(1000));
    state.mapped = state.map();
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        state.obey(&line);
    }
    std::process::exit(0);
}

impl State {
    fn allocate(&self, size: u64) -> u64 {
        let mut address = 0u64;
        self.cuda.must("cuMemAlloc_v2", &[&raw mut address as u64, size]);
        address
    }

    /// Two blocks of the program's own, one after the other in a reservation.
    fn map(&self) -> u64 {
        let prop: [u32; 8] = [1, 0, 1, 0, 0, 0, 0, 0];
        let access: [u32; 3] = [1, 0, 3];
        let mut base = 0u64;
        self.cuda.must("cuMemAddressReserve", &[&raw mut base as u64, 16 * MIB, 0, 0, 0]);
        for address in [base, base + 2 * MIB] {
            let mut handle = 0u64;
            let out = &raw mut handle as u64;
            self.cuda.must("cuMemCreate", &[out, 2 * MIB, prop.as_ptr() as u64, 0]);
            self.cuda.must("cuMemMap", &[address, 2 * MIB, 0, handle, 0]);
            self.cuda.must("cuMemSetAccess", &[address, 2 * MIB, access.as_ptr() as u64, 1]);
        }
        base
    }

    /// The `round`th of three launches.
    fn arguments(&self, round: u64) -> Arguments {
        let second = if round == 1 { self.other } else { self.small + 8 + 8 * round };
        // The first word of the structure is no pointer, nor is the number next to it.
        Arguments {
            large: self.large,
            both: [0x3f80_0000_3f80_0000, second, self.mapped + 3 * MIB],
            count: 7,
            none: 0,
        }
    }

    fn launch(&self, name: &str, function: u64, each: bool, round: u64) {
        let mut arguments = self.arguments(round);
        let mut size = size_of::<Arguments>();
        let mut pointers = arguments.pointers();
        let mut extra: [*mut c_void; 5] = [
            std::ptr::without_provenance_mut(1),
            (&raw mut arguments).cast(),
            std::ptr::without_provenance_mut(2),
            (&raw mut size).cast(),
            std::ptr::null_mut(),
        ];
        let none = std::ptr::null_mut();
        let (pointers, extra) =
            if each { (pointers.as_mut_ptr(), none) } else { (none, extra.as_mut_ptr()) };
        // SAFETY: the signature of the function; a cooperative launch takes one argument less.
        let code = unsafe {
            let launch: Launch = std::mem::transmute(self.cuda.symbol(name));
            launch(function, 1 + round as u32, 1, 2, 4, 8, 1, 0, self.stream, pointers, extra)
        };
        assert_eq!(code, 0, "{name}");
    }

    fn launch_ex(&self, round: u64) {
        let mut arguments = self.arguments(round);
        let mut pointers = arguments.pointers();
        // CUlaunchConfig: shape, shared memory, stream, no attributes.
        let mut config = [0u64; 7];
        config[0] = (1 + round) | 1 << 32;
        config[1] = 2 | 4 << 32;
        config[2] = 8 | 1 << 32;
        config[4] = self.stream;
        let (config, pointers) = (config.as_ptr() as u64, pointers.as_mut_ptr() as u64);
        self.cuda.must("cuLaunchKernelEx", &[config, self.function, pointers, 0]);
    }

    fn copies(&self) {
        let mut host = vec![0u8; 8192];
        let to = host.as_mut_ptr() as u64;
        let must = |name: &str, arguments: &[u64]| self.cuda.must(name, arguments);
        must("cuMemcpyDtoH_v2", &[to, self.large, 4096]);
        must("cuMemcpyDtoDAsync_v2", &[self.other, self.large + 8, 16, self.stream]);
        must("cuMemcpy", &[self.other, to, 16]);
        // CUDA_MEMCPY2D: three rows of 16 bytes.
        let device = 2u64;
        let copy: [u64; 16] = [
            0,
            1,
            device,
            0,
            self.small,
            0,
            64, // from the second row
            0,
            0,
            device,
            0,
            self.large + 1024,
            0,
            64, // to
            16,
            3,
        ];
        must("cuMemcpy2D_v2", &[copy.as_ptr() as u64]);
        must("cuMemsetD2D8_v2", &[self.large + 100, 32, 1, 8, 5]);
        must("cuMemsetD16Async", &[self.large + 100, 1, 2, self.stream]);
        must("cuStreamWriteValue32_v2", &[self.stream, self.small, 5, 0]);
        must("cuStreamWriteValue32_v2", &[self.stream, self.small + 8, 5, 0]);
        must("cuStreamWaitValue32_v2", &[self.stream, self.small, 5, 1]);
        must("cuStreamSynchronize", &[self.stream]);
    }

    fn node(&self, pointers: &[*mut c_void; 4]) -> KernelNode {
        let params = pointers.as_ptr() as u64;
        let shape = [1, 1, 1, 1, 1, 1, 0];
        KernelNode { function: self.function, shape, params, extra: 0, kernel: 0, context: 0 }
    }

    fn make_graph(&mut self) {
        let mut arguments = self.arguments(0);
        let pointers = arguments.pointers();
        let kernel = self.node(&pointers);
        self.cuda.must("cuGraphCreate", &[&raw mut self.graph as u64, 0]);
        let node = &raw mut self.node as u64;
        let params = &raw const kernel as u64;
        self.cuda.must("cuGraphAddKernelNode_v2", &[node, self.graph, 0, 0, params]);
        let mut another = 0u64;
        let another = &raw mut another as u64;
        // CUDA_MEMSET_NODE_PARAMS: 16 elements of 4 bytes.
        let fill: [u64; 5] = [self.other, 0, 7 | 4 << 32, 16, 1];
        let fill = fill.as_ptr() as u64;
        let arguments = [another, self.graph, 0, 0, fill, self.context];
        self.cuda.must("cuGraphAddMemsetNode", &arguments);
        let host: [u64; 2] = [nothing as *const () as u64, 0];
        let host = host.as_ptr() as u64;
        self.cuda.must("cuGraphAddHostNode", &[another, self.graph, 0, 0, host]);
        let out = &raw mut self.executable as u64;
        self.cuda.must("cuGraphInstantiateWithFlags", &[out, self.graph, 0]);
    }

    fn change_graph(&self) {
        let mut arguments = self.arguments(1);
        let pointers = arguments.pointers();
        let kernel = self.node(&pointers);
        let params = &raw const kernel as u64;
        let arguments = [self.executable, self.node, params];
        self.cuda.must("cuGraphExecKernelNodeSetParams_v2", &arguments);
    }

    fn obey(&mut self, command: &str) {
        let threes = |launch: &dyn Fn(u64)| (0..3).for_each(launch);
        match command {
            "where" => {
                return say(&format!(
                    "large={} small={} other={} mapped={}",
                    self.large, self.small, self.other, self.mapped
                ));
            }
            "kernel" => threes(&|i| self.launch("cuLaunchKernel", self.function, true, i)),
            "extra" => threes(&|i| self.launch("cuLaunchKernel", self.function, false, i)),
            "cooperative" => {
                threes(&|i| self.launch("cuLaunchCooperativeKernel", self.function, true, i));
            }
            "ex" => threes(&|i| self.launch_ex(i)),
            "threads" => std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        self.cuda.must("cuCtxSetCurrent", &[self.context]);
                        for _ in 0..100 {
                            threes(&|i| self.launch("cuLaunchKernel", self.function, true, i));
                        }
                    });
                }
            }),
            "replace" => {
                self.cuda.must("cuMemFree_v2", &[self.large]);
                self.large = self.allocate(5 * MIB);
            }
            "copies" => self.copies(),
            "make graph" => self.make_graph(),
            "change graph" => self.change_graph(),
            "graph" => {
                for _ in 0..2 {
                    self.cuda.must("cuGraphLaunch", &[self.executable, self.stream]);
                }
            }
            "capture" => {
                let mut graph = 0u64;
                self.cuda.must("cuStreamBeginCapture_v2", &[self.stream, 2]);
                self.launch("cuLaunchKernel", self.function, true, 0);
                self.cuda.must("cuStreamEndCapture", &[self.stream, &raw mut graph as u64]);
                self.cuda.must("cuGraphDestroy", &[graph]);
            }
            "read" => {
                let mut host = [0u8; 64];
                let to = host.as_mut_ptr() as u64;
                self.cuda.must("cuMemcpyDtoH_v2", &[to, self.large, 64]);
            }
            "count" | "count in a graph" => {
                let (mut count, mut graph) = (0u64, 0u64);
                let (name, out) = (c"count".as_ptr() as u64, &raw mut count as u64);
                self.cuda.must("cuModuleGetFunction", &[out, self.module, name]);
                if command == "count in a graph" {
                    self.cuda.must("cuStreamBeginCapture_v2", &[self.stream, 2]);
                }
                let arguments = [&raw const self.large as u64];
                let at = arguments.as_ptr() as u64;
                let launch = [count, 1, 1, 1, 1, 1, 1, 0, self.stream, at, 0];
                self.cuda.must("cuLaunchKernel", &launch);
                if command == "count in a graph" {
                    self.cuda.must("cuStreamEndCapture", &[self.stream, &raw mut graph as u64]);
                    self.cuda.must("cuGraphDestroy", &[graph]);
                }
            }
            "counted" => {
                let mut count = 0u32;
                self.cuda.must("cuMemcpyDtoH_v2", &[&raw mut count as u64, self.large, 4]);
                return say(&count.to_string());
            }
            "end graph" => self.cuda.must("cuGraphExecDestroy", &[self.executable]),
            "library" => {
                let text = std::ffi::CString::new(PTX).expect("no NUL");
                let (mut library, mut kernel) = (0u64, 0u64);
                let load: unsafe extern "C" fn(u64, u64, u64, u64, u32, u64, u64, u32) -> u32 = {
                    // SAFETY: the signature of the function.
                    unsafe { std::mem::transmute(self.cuda.symbol("cuLibraryLoadData")) }
                };
                let (out, image) = (&raw mut library as u64, text.as_ptr() as u64);
                // SAFETY: the library has a place, and the image ends with a NUL.
                assert_eq!(unsafe { load(out, image, 0, 0, 0, 0, 0, 0) }, 0);
                let name = c"touch".as_ptr() as u64;
                self.cuda.must("cuLibraryGetKernel", &[&raw mut kernel as u64, library, name]);
                self.launch("cuLaunchKernel", kernel, true, 0);
            }
            other if self.obey_batch(other) => {}
            other => panic!("what is {other}?"),
        }
        self.cuda.must("cuStreamSynchronize", &[self.stream]);
        say("done");
    }
}
