//! What a call has left behind that has to be known later, whether anything is recorded or not: read after it has
//! succeeded.

use super::arguments::{at, named};
use crate::abi::types::{
    CopyNodeParams, NODE_CHILD, NODE_COPY, NODE_FILL, NODE_KERNEL, NODE_MEMORY_OPS, NodeParams,
};

/// What a call has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// A module or library was loaded from the image at an address.
    Loaded { owner: u64, image: usize },
    /// A module or library was loaded from the file whose name is at an address.
    LoadedFromFile { owner: u64, path: usize },
    /// `function` is the function of `kernel` in some context.
    FunctionOfKernel { function: u64, kernel: u64 },
    /// `module` is the module of `library` in some context.
    ModuleOfLibrary { module: u64, library: u64 },
    /// A variable of `library` is at `address`.
    VariableOfLibrary { library: u64, address: u64 },
    /// A variable of `module` is at `address`.
    VariableOfModule { module: u64, address: u64 },
    /// A graph was made executable, or an executable one was updated from it.
    GraphMade { executable: u64, graph: u64 },
    /// A node of an executable graph has got other parameters.
    NodeSet { executable: u64, node: u64, given: Given },
}

/// New parameters of a node: where they are, or the child graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Given {
    /// The first version of a kernel's, whose last members are missing.
    KernelV1(usize),
    Kernel(usize),
    Copy(usize),
    Fill(usize),
    MemoryOps(usize),
    Child(u64),
}

/// Reads the arguments of a call that has succeeded. `None`: there is nothing to be kept.
pub(crate) type OutcomeDecoder = fn(&[usize]) -> Option<Outcome>;

/// Reads what the driver has just written where an argument points.
fn result(place: usize) -> u64 {
    // SAFETY: the functions below write a handle there.
    unsafe { at(place) }.unwrap_or(0)
}

/// `cuModuleLoadData(module, image)`, `cuLibraryLoadData(library, image, ...)`.
pub(crate) fn image_loaded(a: &[usize]) -> Option<Outcome> {
    let [owner, image] = named(a);
    Some(Outcome::Loaded { owner: result(owner), image })
}

/// `cuModuleLoad(module, path)`, `cuLibraryLoadFromFile(library, path, ...)`.
pub(crate) fn file_loaded(a: &[usize]) -> Option<Outcome> {
    let [owner, path] = named(a);
    Some(Outcome::LoadedFromFile { owner: result(owner), path })
}

/// `cuKernelGetFunction(function, kernel)`.
pub(crate) fn function_of_kernel(a: &[usize]) -> Option<Outcome> {
    let [function, kernel] = named(a);
    Some(Outcome::FunctionOfKernel { function: result(function), kernel: kernel as u64 })
}

/// `cuLibraryGetModule(module, library)`.
pub(crate) fn module_of_library(a: &[usize]) -> Option<Outcome> {
    let [module, library] = named(a);
    Some(Outcome::ModuleOfLibrary { module: result(module), library: library as u64 })
}

/// `cuLibraryGetGlobal(address, size, library, name)`, `cuLibraryGetManaged(...)`. Who wants no more than the size is
/// not looked at, here and below.
pub(crate) fn variable_of_library(a: &[usize]) -> Option<Outcome> {
    let [place, _size, library] = named(a);
    // SAFETY: null, or the function has written the address there.
    let address = unsafe { at(place) }?;
    Some(Outcome::VariableOfLibrary { library: library as u64, address })
}

/// `cuModuleGetGlobal(address, size, module, name)`.
pub(crate) fn variable_of_module(a: &[usize]) -> Option<Outcome> {
    let [place, _size, module] = named(a);
    // SAFETY: null, or the function has written the address there.
    let address = unsafe { at(place) }?;
    Some(Outcome::VariableOfModule { module: module as u64, address })
}

/// The first version of it, whose addresses have 32 bits.
pub(crate) fn variable_of_module_v1(a: &[usize]) -> Option<Outcome> {
    let [place, _size, module] = named(a);
    // SAFETY: null, or the function has written the address there.
    let address = unsafe { at::<u32>(place) }?;
    Some(Outcome::VariableOfModule { module: module as u64, address: address.into() })
}

/// `cuGraphInstantiate(exec, graph, ...)`.
pub(crate) fn graph_made(a: &[usize]) -> Option<Outcome> {
    let [executable, graph] = named(a);
    Some(Outcome::GraphMade { executable: result(executable), graph: graph as u64 })
}

/// `cuGraphExecUpdate(exec, graph, ...)`.
pub(crate) fn graph_updated(a: &[usize]) -> Option<Outcome> {
    let [executable, graph] = named(a);
    Some(Outcome::GraphMade { executable: executable as u64, graph: graph as u64 })
}

/// `cuGraphExecKernelNodeSetParams(exec, node, params)`, the first version.
pub(crate) fn kernel_node_set(a: &[usize]) -> Option<Outcome> {
    node(a, Given::KernelV1)
}

/// The second version, whose parameters may name a `CUkernel`.
pub(crate) fn kernel_node_set_v2(a: &[usize]) -> Option<Outcome> {
    node(a, Given::Kernel)
}

/// `cuGraphExecMemcpyNodeSetParams(exec, node, params, context)`.
pub(crate) fn copy_node_set(a: &[usize]) -> Option<Outcome> {
    node(a, Given::Copy)
}

/// `cuGraphExecMemsetNodeSetParams(exec, node, params, context)`.
pub(crate) fn fill_node_set(a: &[usize]) -> Option<Outcome> {
    node(a, Given::Fill)
}

/// `cuGraphExecBatchMemOpNodeSetParams(exec, node, params)`.
pub(crate) fn memory_ops_node_set(a: &[usize]) -> Option<Outcome> {
    node(a, Given::MemoryOps)
}

/// `cuGraphExecChildGraphNodeSetParams(exec, node, graph)`.
pub(crate) fn child_node_set(a: &[usize]) -> Option<Outcome> {
    node(a, |graph| Given::Child(graph as u64))
}

/// `cuGraphExecNodeSetParams(exec, node, params)`.
pub(crate) fn node_set(a: &[usize]) -> Option<Outcome> {
    let [executable, of, params] = named(a);
    // SAFETY: the function's signature: the kind comes first.
    let kind = unsafe { at::<u32>(params) }?;
    let params = params + std::mem::offset_of!(NodeParams, params);
    let given = match kind {
        NODE_KERNEL => Given::Kernel(params),
        NODE_COPY => Given::Copy(params + std::mem::offset_of!(CopyNodeParams, copy)),
        NODE_FILL => Given::Fill(params),
        NODE_CHILD => Given::Child(result(params)),
        NODE_MEMORY_OPS => Given::MemoryOps(params),
        _ => return None,
    };
    Some(Outcome::NodeSet { executable: executable as u64, node: of as u64, given })
}

fn node(a: &[usize], given: impl FnOnce(usize) -> Given) -> Option<Outcome> {
    let [executable, node, params] = named(a);
    let (executable, node) = (executable as u64, node as u64);
    Some(Outcome::NodeSet { executable, node, given: given(params) })
}
