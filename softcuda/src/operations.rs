//! Work of streams that can also be captured into graphs and repeated: kernels, copies, fills,
//! host functions, and waiting for values and writing them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::conditions;
use crate::context::Context;
use crate::copy_engine::{self, Fill, Transfer};
use crate::device_launches::{self, Launches, Task, Tasks};
use crate::device_view::DeviceView;
use crate::faults;
use crate::host_calls::HostCall;
use crate::kernel_launch::KernelLaunch;
use crate::memory_operations::{self, MemoryOperation};
use crate::ptx::{self, Trap};
use crate::status::{Code, Outcome};
use crate::switching;
use crate::twice;

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
            Operation::Kernel(launch) => run(launch, context),
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

/// Runs a kernel, and then what comes of it.
fn run(launch: &KernelLaunch, context: &Context) -> Outcome {
    faults::kernel(&context.cancel)?;
    let waiting = AtomicUsize::new(0);
    let mut unfinished = vec![run_one(launch, context, 0, &waiting)?];
    while let Some(tasks) = unfinished.last_mut() {
        let next = tasks.next(&waiting);
        // Before the next ones are added, so that a chain of kernels, each launched by the end of the one before, may
        // have any length.
        if tasks.is_empty() {
            unfinished.pop();
        }
        match next {
            Some((Task::Kernel(launch), depth)) => {
                unfinished.push(run_one(&launch, context, depth, &waiting)?);
            }
            Some((Task::Copy(transfer), _)) => device_launches::copy(&transfer)?,
            Some((Task::Fill(fill), _)) => copy_engine::fill(&fill)?,
            None => {}
        }
    }
    Ok(())
}

/// Runs a kernel; gives what it has asked for.
fn run_one(
    launch: &KernelLaunch,
    context: &Context,
    depth: u32,
    waiting: &AtomicUsize,
) -> Outcome<Tasks> {
    let alone = twice::alone();
    let launches = Launches::new(context, launch, depth, waiting);
    let shape = &launch.shape;
    let given = ptx::Launch {
        grid: shape.grid,
        block: shape.block,
        dynamic_shared: shape.shared,
        params: &launch.parameters,
        global_addresses: &launch.function.addresses,
        cluster: shape.cluster_of(&launch.function),
        cooperative: shape.cooperative,
        cancel: &context.cancel,
        images: &launch.images,
        heap: &context.heap,
        launcher: &launches,
        set_condition: &|handle, value| conditions::set(context.handle, handle, value),
        print: &|text, size| context.prints.add(text, size, context.print_room()),
        executed: None,
    };
    let function = &launch.function;
    let run = || ptx::run(&function.code, &function.entry, &given, &DeviceView);
    switching::watched(context, run).map_err(|trap| {
        if crate::settings::settings().log {
            eprintln!("softcuda: {trap}");
        }
        code_of(&trap)
    })?;
    if alone.is_some() {
        let again = ptx::Launch {
            heap: &ptx::NoHeap,
            launcher: &ptx::NoLauncher,
            set_condition: &|_, _| true,
            print: &|_, _| {},
            ..given
        };
        twice::check(&function.entry.name, |view| {
            ptx::run(&function.code, &function.entry, &again, view).is_ok()
        });
    }
    Ok(launches.tasks())
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
