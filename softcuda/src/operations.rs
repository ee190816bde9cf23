//! Work of streams that can also be captured into graphs and repeated: kernels, copies, fills,
//! host functions, and waiting for values and writing them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::address_space::DeviceView;
use crate::attributes::Attributes;
use crate::conditions;
use crate::context::Context;
use crate::copy_engine::{self, Fill, Transfer};
use crate::faults;
use crate::host_calls::HostCall;
use crate::memory_operations::{self, MemoryOperation};
use crate::modules::Function;
use crate::ptx::{self, Trap};
use crate::status::{Code, Outcome};
use crate::textures::LaunchImages;

/// A piece of work.
#[derive(Clone)]
pub(crate) enum Operation {
    /// Runs a kernel.
    Kernel(Arc<KernelLaunch>),
    /// Copies memory.
    Copy(Transfer),
    /// Fills memory.
    Fill(Fill),
    /// Calls a function of the program.
    Host(HostCall),
    /// Waits for values and writes them, one after the other.
    Values(Arc<[MemoryOperation]>),
}

/// A kernel with all that it is launched with.
pub(crate) struct KernelLaunch {
    /// The kernel.
    pub(crate) function: Arc<Function>,
    /// How many threads.
    pub(crate) shape: Shape,
    parameters: Vec<u8>,
    images: LaunchImages,
    /// Addresses of the single parameters, for programs that ask for them.
    pub(crate) places: Vec<u64>,
    /// What programs set in the node of a graph that has it; reported, otherwise ignored.
    pub(crate) attributes: Attributes,
}

/// Grid, blocks and shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Blocks in each direction.
    pub(crate) grid: [u32; 3],
    /// Threads of a block in each direction.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(crate) shared: u32,
    /// All blocks run at the same time.
    pub(crate) cooperative: bool,
    /// Blocks of a cluster in each direction, if the launch says so.
    pub(crate) cluster: Option<[u32; 3]>,
}

impl Shape {
    /// Blocks of a cluster of this function in each direction.
    pub(crate) fn cluster_of(&self, function: &Function) -> [u32; 3] {
        self.cluster.or(function.entry.cluster).unwrap_or([1; 3])
    }
}

/// What a trap of a kernel makes of its context.
fn code_of(trap: &Trap) -> Code {
    match trap {
        Trap::IllegalAddress { .. } => Code::ILLEGAL_ADDRESS,
        Trap::Misaligned { .. } => Code::MISALIGNED_ADDRESS,
        Trap::Assert { .. } => Code::ASSERT,
        Trap::IllegalInstruction { .. } => Code::ILLEGAL_INSTRUCTION,
        Trap::InvalidLaunch { .. } => Code::INVALID_VALUE,
        _ => Code::LAUNCH_FAILED,
    }
}

/// Does something; its failure becomes the context's. A panic is a defect of this library, of which
/// the program learns as of a failed kernel.
fn answer_for(context: &Context, work: impl FnOnce() -> Outcome) {
    let outcome = catch_unwind(AssertUnwindSafe(work)).unwrap_or(Err(Code::UNKNOWN));
    if let Err(code) = outcome {
        context.fail(code);
    }
}

impl Operation {
    /// Does the work, unless work of the context has failed; a failure becomes the context's.
    pub(crate) fn run(&self, context: &Context) {
        if context.has_failed() {
            return;
        }
        answer_for(context, || self.work(context));
    }

    fn work(&self, context: &Context) -> Outcome {
        match self {
            Operation::Kernel(launch) => launch.run(context),
            Operation::Copy(transfer) => copy_engine::copy(transfer),
            Operation::Fill(fill) => copy_engine::fill(fill),
            Operation::Host(call) => {
                context.prints.flush();
                // SAFETY: the program promises a function that may be called with its argument.
                unsafe { (call.function)(call.data) };
                Ok(())
            }
            Operation::Values(operations) => memory_operations::run(operations, context),
        }
    }
}

impl KernelLaunch {
    /// A launch with parameters as the kernel sees them.
    pub(crate) fn new(function: Arc<Function>, shape: Shape, parameters: Vec<u8>) -> KernelLaunch {
        let base = parameters.as_ptr() as u64;
        let places = function.entry.params.iter().map(|p| base + p.offset as u64).collect();
        let images = LaunchImages::new(&function.references);
        let attributes = Attributes::default();
        KernelLaunch { function, shape, parameters, images, places, attributes }
    }

    /// The same launch once more, to be changed.
    pub(crate) fn again(&self) -> KernelLaunch {
        let mut again = Self::new(self.function.clone(), self.shape, self.parameters.clone());
        again.attributes = self.attributes.clone();
        again
    }

    fn run(&self, context: &Context) -> Outcome {
        faults::kernel(&context.cancel)?;
        let launch = ptx::Launch {
            grid: self.shape.grid,
            block: self.shape.block,
            dynamic_shared: self.shape.shared,
            params: &self.parameters,
            global_addresses: &self.function.addresses,
            cluster: self.shape.cluster_of(&self.function),
            cooperative: self.shape.cooperative,
            cancel: &context.cancel,
            images: &self.images,
            heap: &context.heap,
            set_condition: &|handle, value| conditions::set(context.handle, handle, value),
            print: &|text, size| context.prints.add(text, size, context.print_room()),
        };
        ptx::run(&self.function.code, &self.function.entry, &launch, &DeviceView).map_err(|trap| {
            if crate::settings::settings().log {
                eprintln!("softcuda: {trap}");
            }
            code_of(&trap)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifetime;

    #[test]
    fn a_panic_in_a_stream_fails_its_context() {
        let context = lifetime::create(9, 0).unwrap();
        answer_for(&context, || Ok(()));
        assert_eq!(context.check(), Ok(()));
        answer_for(&context, || panic!("a defect of this test"));
        assert_eq!(context.check(), Err(Code::UNKNOWN));
        lifetime::destroy(&context);
    }
}
