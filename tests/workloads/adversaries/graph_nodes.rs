//! A graph whose nodes are changed between its launches: one and the same handle writes elsewhere
//! each time.

use std::ffi::{c_uint, c_void};

use anyhow::Result;
use cudarc::driver::sys::CUDA_KERNEL_NODE_PARAMS_v1;

use super::field::{Field, POOLS, PTX, TOUCHED};
use crate::args;
use crate::cuda::{Handle, check, driver};
use crate::gpu::{Arg, Gpu, Kernel, Module, Stream};
use crate::numbers::mix;
use crate::report::Run;

/// What a node launches: one block of [`TOUCHED`] threads.
fn with_parameters<T>(
    kernel: &Kernel,
    args: &[Arg],
    use_it: impl FnOnce(&CUDA_KERNEL_NODE_PARAMS_v1) -> T,
) -> Result<T> {
    let mut places = kernel.places(args)?;
    Ok(use_it(&CUDA_KERNEL_NODE_PARAMS_v1 {
        func: kernel.handle() as *mut _,
        gridDimX: 1,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: TOUCHED as c_uint,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: 0,
        kernelParams: places.as_mut_ptr(),
        extra: std::ptr::null_mut(),
    }))
}

/// Two kernels, one after the other, made once.
struct Graph {
    graph: Handle,
    executable: Handle,
    nodes: [Handle; 2],
}

impl Graph {
    fn new(kernel: &Kernel, args: &[Arg]) -> Result<Self> {
        let (d, mut made) = (driver(), Self { graph: 0, executable: 0, nodes: [0; 2] });
        // SAFETY: the place for the result is valid.
        check("cuGraphCreate", unsafe { (d.cuGraphCreate)(&raw mut made.graph, 0) })?;
        for node in 0..2 {
            let before = made.nodes[..node].to_vec();
            let code = with_parameters(kernel, args, |parameters| {
                let (place, list) = (&raw mut made.nodes[node], before.as_ptr());
                // SAFETY: the pointers are valid for the call, and the driver copies the arguments.
                unsafe { (d.cuGraphAddKernelNode)(place, made.graph, list, node, parameters) }
            })?;
            check("cuGraphAddKernelNode", code)?;
        }
        let (place, none) = (&raw mut made.executable, std::ptr::null_mut::<c_void>());
        // SAFETY: the place for the result is valid; nobody wants the log.
        let code =
            unsafe { (d.cuGraphInstantiate)(place, made.graph, none.cast(), none.cast(), 0) };
        check("cuGraphInstantiate", code)?;
        Ok(made)
    }

    /// Gives a node of the executable graph other arguments.
    fn set(&self, node: usize, kernel: &Kernel, args: &[Arg]) -> Result<()> {
        let code = with_parameters(kernel, args, |parameters| {
            // SAFETY: the pointers are valid for the call, and the driver copies the arguments.
            unsafe {
                (driver().cuGraphExecKernelNodeSetParams)(
                    self.executable,
                    self.nodes[node],
                    parameters,
                )
            }
        })?;
        check("cuGraphExecKernelNodeSetParams", code)
    }

    fn launch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live as long as the references.
        check("cuGraphLaunch", unsafe { (driver().cuGraphLaunch)(self.executable, stream.0) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and destroyed once.
        unsafe {
            (driver().cuGraphExecDestroy)(self.executable);
            (driver().cuGraphDestroy)(self.graph);
        }
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(200, 1000, 5000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let write = module.kernel("adversary_write")?;
    let mut field = Field::new(run)?;
    let stream = Stream::new(0)?;
    let graph = Graph::new(&write, args![&field.pools[0], field.words, 0u32, run.seed])?;
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let targets = [mix(step) % POOLS, mix(!step) % POOLS];
        for (node, &pool) in targets.iter().enumerate() {
            let arguments =
                args![&field.pools[pool as usize], field.words, step, run.seed ^ node as u32];
            graph.set(node, &write, arguments)?;
        }
        graph.launch(&stream)?;
        stream.synchronize()?;
        let mut index = 0;
        for (node, &pool) in targets.iter().enumerate() {
            index = field.touch(pool, step, run.seed ^ node as u32);
        }
        run.step(step, format_args!("word {:016x}", field.word(targets[1], index)?))?;
    }
    field.finish(run)
}
