//! Modules, functions, libraries and kernels.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use parking_lot::Mutex;

use crate::context::Context;
use crate::copy_engine::{Transfer, copy};
use crate::device_memory;
use crate::fatbin::{self, FatbinError};
use crate::handles::{Table, new_handle};
use crate::managed_memory;
use crate::models::Model;
use crate::ptx::{self, DiagnosticKind, Entry};
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::textures::{
    Reference, SURFACE_REFERENCES, SurfaceReference, TEXTURE_REFERENCES, TextureReference,
};

/// All modules.
pub(crate) static MODULES: Table<Module> = Table::new();
/// All functions of modules.
pub(crate) static FUNCTIONS: Table<Function> = Table::new();
/// All libraries.
pub(crate) static LIBRARIES: Table<Library> = Table::new();
/// All kernels of libraries.
pub(crate) static KERNELS: Table<Kernel> = Table::new();

/// What stands in for NVIDIA's device runtime.
pub(crate) const DEVICE_RUNTIME: &str = include_str!("device_runtime.ptx");
/// What the driver says to PTX that is for newer devices, or for an architecture that the device is not.
const OTHER_TARGET: Code = Code::INVALID_PTX;
/// Shared memory of a block without opting in for more, in bytes.
pub(crate) const SHARED_PER_BLOCK: usize = 48 << 10;

/// A module in a context.
pub(crate) struct Module {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Handle of the context that it is loaded in.
    pub(crate) context: u64,
    /// The code.
    pub(crate) code: Arc<ptx::Module>,
    /// Addresses of the code's globals, in their order.
    pub(crate) addresses: Vec<u64>,
    /// Those among them of managed variables that end with the module.
    managed: Vec<u64>,
    functions: HashMap<String, u64>,
    /// Handles of the references, by the names of their variables.
    references: HashMap<String, u64>,
}

/// A kernel of a module.
pub(crate) struct Function {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Handle of its module.
    pub(crate) module: u64,
    /// Handle of its context.
    pub(crate) context: u64,
    /// Ordinal of its device.
    device: usize,
    /// The module's code, alive as long as work needs it.
    pub(crate) code: Arc<ptx::Module>,
    /// The kernel.
    pub(crate) entry: Arc<Entry>,
    /// Addresses of the module's globals.
    pub(crate) addresses: Arc<[u64]>,
    /// The module's variables that stand for textures and surfaces.
    pub(crate) references: Arc<[Reference]>,
    /// Name, for C.
    pub(crate) name: CString,
    /// What programs can set.
    pub(crate) settings: FunctionSettings,
}

/// What programs set in a function.
#[derive(Default)]
pub(crate) struct FunctionSettings {
    /// The most dynamic shared memory in bytes; 0 for the default.
    pub(crate) dynamic_shared: AtomicI32,
    /// Preference, kept and reported only.
    pub(crate) carveout: AtomicI32,
    /// Whether clusters may have more blocks than every device with clusters can have.
    pub(crate) large_clusters: AtomicBool,
    /// For launches of the first versions of CUDA.
    pub(crate) legacy: Mutex<LegacySettings>,
}

/// What `cuFuncSetBlockShape`, `cuFuncSetSharedSize` and `cuParamSet*` set.
#[derive(Clone)]
pub(crate) struct LegacySettings {
    /// Threads of a block in each direction.
    pub(crate) block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub(crate) shared: u32,
    /// So many bytes of the parameters count.
    pub(crate) size: usize,
    /// Parameters as far as they were set.
    pub(crate) parameters: Vec<u8>,
}

impl Default for LegacySettings {
    fn default() -> LegacySettings {
        LegacySettings { block: [1; 3], shared: 0, size: 0, parameters: Vec::new() }
    }
}

/// A library: code that is loaded in each context when it is needed there.
pub(crate) struct Library {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Or why it could not be read, which only those are told who want something of it.
    code: Outcome<Arc<ptx::Module>>,
    modules: Mutex<HashMap<u64, u64>>,
    kernels: Vec<u64>,
    /// Addresses of the managed variables, which are the same in all contexts, once somebody needs them.
    managed: Mutex<Option<HashMap<String, u64>>>,
}

/// A kernel of a library.
pub(crate) struct Kernel {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Handle of its library.
    pub(crate) library: u64,
    /// The kernel.
    pub(crate) entry: Arc<Entry>,
    /// Name, for C.
    pub(crate) name: CString,
}

/// Why code was not loaded: the code and the text for the JIT's error log.
pub(crate) struct Refusal {
    /// What the call returns.
    pub(crate) code: Code,
    /// For a person.
    pub(crate) text: String,
}

impl Refusal {
    fn new(code: Code, text: &str) -> Refusal {
        Refusal { code, text: text.to_owned() }
    }
}

/// Checks and translates an image: PTX, or a fat binary with PTX.
///
/// # Errors
/// A refusal that says what is wrong; `NO_BINARY_FOR_GPU` for device binaries, which only a GPU
/// can run, and for PTX that is for other devices than this one.
pub(crate) fn parse(image: &[u8], model: &Model) -> Result<Arc<ptx::Module>, Refusal> {
    match ptx::Module::load(&ptx_of(image, model)?) {
        Ok(module) => {
            check_target(&module, model)?;
            Ok(Arc::new(module))
        }
        Err(diagnostic) => {
            let code = match diagnostic.kind {
                DiagnosticKind::UnsupportedTarget => Code::UNSUPPORTED_PTX_VERSION,
                _ => Code::INVALID_PTX,
            };
            Err(Refusal { code, text: diagnostic.to_string() })
        }
    }
}

/// Refuses PTX that is for other devices than this one.
fn check_target(module: &ptx::Module, model: &Model) -> Result<(), Refusal> {
    if model.takes(&module.target) {
        return Ok(());
    }
    let (target, own) = (&module.target, model.target());
    let text = format!("PTX with .target {target} cannot be compiled for sm_{own}, {}", model.name);
    Err(Refusal::new(OTHER_TARGET, &text))
}

/// The PTX in an image that suits a device best.
///
/// # Errors
/// As [`parse`], for what holds none; `UNSUPPORTED_PTX_VERSION` for PTX that is newer than the driver.
pub(crate) fn ptx_of(image: &[u8], model: &Model) -> Result<String, Refusal> {
    const ELF: [u8; 4] = [0x7f, b'E', b'L', b'F'];
    if image.starts_with(&ELF) {
        let text = "this is a cubin (device code); the software driver executes PTX only";
        return Err(Refusal::new(Code::NO_BINARY_FOR_GPU, text));
    }
    let text = if image.starts_with(&fatbin::MAGIC) {
        fatbin::ptx(image, model.target()).map_err(|error| {
            let code = match error {
                FatbinError::Damaged(_) => Code::INVALID_IMAGE,
                FatbinError::NoPtx(..) => Code::NO_BINARY_FOR_GPU,
            };
            Refusal { code, text: error.to_string() }
        })?
    } else {
        image.to_vec()
    };
    let text = String::from_utf8(text)
        .map_err(|_| Refusal::new(Code::INVALID_IMAGE, "the image is neither PTX nor a binary"))?;
    check_version(&text)?;
    Ok(text)
}

/// Refuses PTX of a version that came after the driver that this one presents itself as.
fn check_version(text: &str) -> Result<(), Refusal> {
    let newest = settings().driver.ptx_version();
    match ptx::Module::version_of(text) {
        Some(version) if version > newest => {
            let [(major, minor), (own, point)] = [version, newest];
            let text = format!(
                "PTX version {major}.{minor} is newer than the driver, which takes up to {own}.{point} \
                 (SOFTCUDA_DRIVER chooses another)"
            );
            Err(Refusal::new(Code::UNSUPPORTED_PTX_VERSION, &text))
        }
        _ => Ok(()),
    }
}

/// One piece of PTX of the fat binaries of several parts of a program. A part without PTX is left out if others have
/// some: nvcc links NVIDIA's device runtime with each program of several parts, as device code. Its stand-in takes the
/// place. What is called and not there is found when the piece is loaded.
///
/// # Errors
/// As [`parse`], for parts of which none has PTX; `INVALID_IMAGE` for parts that do not fit together.
pub(crate) fn linked(parts: &[Vec<u8>], model: &Model) -> Result<Vec<u8>, Refusal> {
    let mut texts = Vec::new();
    let mut without = None;
    for (number, part) in parts.iter().enumerate() {
        match ptx_of(part, model) {
            Ok(text) => texts.push((number, text)),
            Err(refusal) if refusal.code == Code::NO_BINARY_FOR_GPU => without = Some(refusal),
            Err(refusal) => return Err(refusal),
        }
    }
    if texts.is_empty()
        && let Some(refusal) = without
    {
        return Err(refusal);
    }
    if without.is_some() {
        texts.push((parts.len(), DEVICE_RUNTIME.to_owned()));
    }
    let sources: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).collect();
    let linked = ptx::link(&sources, None).map_err(|(index, fault)| Refusal {
        code: Code::INVALID_IMAGE,
        text: format!("part {} of the program: {fault}", texts[index].0),
    })?;
    Ok(linked.into_bytes())
}

/// Loads code in a context: places its globals and gives its functions handles.
///
/// # Errors
/// `OUT_OF_MEMORY`, `INVALID_IMAGE` when an initial value names an unknown variable; nothing is
/// left then.
pub(crate) fn load(context: &Context, code: Arc<ptx::Module>) -> Outcome<Arc<Module>> {
    let managed = place_managed(context.handle, &code)?;
    load_with(context, code, &managed, true).inspect_err(|_| free_managed(managed.values()))
}

/// Loads code whose managed variables have been placed already; they end with the module if they are its `own`.
fn load_with(
    context: &Context,
    code: Arc<ptx::Module>,
    managed: &HashMap<String, u64>,
    own: bool,
) -> Outcome<Arc<Module>> {
    if code.uses_heap {
        context.need_heap()?;
    }
    if code.launches {
        context.need_launch_room()?;
    }
    let handle = new_handle();
    let addresses = place_globals(context, &code, managed)?;
    let shared: Arc<[u64]> = addresses.clone().into();
    let (references, all) = place_references(context, &code, &addresses);
    let all: Arc<[Reference]> = all.into();
    let mut functions = HashMap::new();
    for entry in &code.entries {
        let function = Function {
            handle: new_handle(),
            module: handle,
            context: context.handle,
            device: context.device,
            code: code.clone(),
            entry: entry.clone(),
            addresses: shared.clone(),
            references: all.clone(),
            name: CString::new(entry.name.as_str()).map_err(|_| Code::INVALID_IMAGE)?,
            settings: FunctionSettings::default(),
        };
        functions.insert(entry.name.clone(), function.handle);
        FUNCTIONS.insert(function.handle, Arc::new(function));
    }
    let managed = if own { managed.values().copied().collect() } else { Vec::new() };
    let module =
        Module { handle, context: context.handle, code, addresses, managed, functions, references };
    let module = Arc::new(module);
    MODULES.insert(handle, module.clone());
    Ok(module)
}

/// Places the managed variables of code, with their initial values, by name.
fn place_managed(owner: u64, code: &ptx::Module) -> Outcome<HashMap<String, u64>> {
    let mut placed = HashMap::new();
    let result = code.globals.iter().filter(|global| global.managed).try_for_each(|global| {
        let address = managed_memory::allocate(owner, global.size.max(1) as u64)?;
        placed.insert(global.name.clone(), address);
        if !global.relocations.is_empty() {
            // The addresses of others may differ from context to context.
            return Err(Code::NOT_SUPPORTED);
        }
        let length = global.init.len().min(global.size);
        copy(&Transfer::linear(address, global.init.as_ptr() as u64, length))
    });
    result.inspect_err(|_| free_managed(placed.values()))?;
    Ok(placed)
}

fn free_managed<'a>(addresses: impl IntoIterator<Item = &'a u64>) {
    for address in addresses {
        let _ = managed_memory::free(*address);
    }
}

fn place_globals(
    context: &Context,
    code: &ptx::Module,
    managed: &HashMap<String, u64>,
) -> Outcome<Vec<u64>> {
    let _still = device_memory::hold_still();
    let mut addresses = Vec::new();
    let result = (|| {
        for global in &code.globals {
            let size = global.size.max(1) as u64;
            addresses.push(match managed.get(&global.name) {
                Some(address) => *address,
                None => device_memory::allocate(context.device, context.handle, size)?,
            });
        }
        for (global, address) in code.globals.iter().zip(&addresses) {
            if global.managed {
                continue;
            }
            let mut value = global.init.clone();
            value.resize(global.size, 0);
            for relocation in &global.relocations {
                let target = code.globals.iter().position(|g| g.name == relocation.symbol);
                let target = addresses[target.ok_or(Code::INVALID_IMAGE)?];
                value
                    .get_mut(relocation.offset..relocation.offset + 8)
                    .ok_or(Code::INVALID_IMAGE)?
                    .copy_from_slice(&target.wrapping_add_signed(relocation.addend).to_le_bytes());
            }
            // Fresh memory, which no work can know of: written at once, out of stream order.
            copy(&Transfer::linear(*address, value.as_ptr() as u64, value.len()))?;
        }
        Ok(())
    })();
    if let Err(code) = result {
        for address in addresses {
            let _ = device_memory::free(address);
        }
        return Err(code);
    }
    Ok(addresses)
}

/// Makes the references of a module's variables: their handles by name, and all of them.
fn place_references(
    context: &Context,
    code: &ptx::Module,
    addresses: &[u64],
) -> (HashMap<String, u64>, Vec<Reference>) {
    let (mut handles, mut all) = (HashMap::new(), Vec::new());
    for (global, address) in code.globals.iter().zip(addresses) {
        let (context, address, handle) = (context.handle, *address, new_handle());
        match global.reference {
            Some(ptx::Reference::Texture) => {
                let state = Mutex::default();
                let reference = Arc::new(TextureReference { context, address, state });
                TEXTURE_REFERENCES.insert(handle, reference.clone());
                all.push(Reference::Texture(reference));
            }
            Some(ptx::Reference::Surface) => {
                let array = Mutex::default();
                let reference = Arc::new(SurfaceReference { context, address, array });
                SURFACE_REFERENCES.insert(handle, reference.clone());
                all.push(Reference::Surface(reference));
            }
            Some(ptx::Reference::Sampler) | None => continue,
        }
        handles.insert(global.name.clone(), handle);
    }
    (handles, all)
}

/// Unloads a module. Its work must be done.
pub(crate) fn unload(module: &Module) {
    for reference in module.references.values() {
        TEXTURE_REFERENCES.remove(*reference);
        SURFACE_REFERENCES.remove(*reference);
    }
    MODULES.remove(module.handle);
    for function in module.functions.values() {
        FUNCTIONS.remove(*function);
    }
    for address in &module.addresses {
        let _ = device_memory::free(*address);
    }
    free_managed(&module.managed);
}

/// Forgets the modules of a context; their memory is freed with the context's.
pub(crate) fn unload_context(context: u64) {
    MODULES.remove_where(|module| module.context == context);
    FUNCTIONS.remove_where(|function| function.context == context);
    for library in LIBRARIES.all() {
        library.modules.lock().remove(&context);
    }
}

impl Module {
    /// The function of a name.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub(crate) fn function(&self, name: &str) -> Outcome<u64> {
        self.functions.get(name).copied().ok_or(Code::NOT_FOUND)
    }

    /// The reference of a name: a texture's or a surface's.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub(crate) fn reference(&self, name: &str) -> Outcome<u64> {
        self.references.get(name).copied().ok_or(Code::NOT_FOUND)
    }

    /// Handles of all functions, in the order of the source.
    pub(crate) fn functions(&self) -> Vec<u64> {
        self.code.entries.iter().filter_map(|e| self.functions.get(&e.name).copied()).collect()
    }

    /// Address and size of a variable.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub(crate) fn global(&self, name: &str) -> Outcome<(u64, usize)> {
        let globals = self.code.globals.iter().zip(&self.addresses);
        globals
            .filter(|(global, _)| global.name == name && global.reference.is_none())
            .map(|(global, address)| (*address, global.size))
            .next()
            .ok_or(Code::NOT_FOUND)
    }
}

impl Function {
    /// What its device is.
    pub(crate) fn model(&self) -> &'static Model {
        settings().model(self.device)
    }

    /// The most dynamic shared memory that a launch may ask for, in bytes.
    pub(crate) fn dynamic_shared_limit(&self) -> usize {
        match self.settings.dynamic_shared.load(Ordering::Relaxed) {
            0 => SHARED_PER_BLOCK.saturating_sub(self.entry.static_shared),
            set => set as usize,
        }
    }

    /// Blocks that a multiprocessor holds at the same time.
    pub(crate) fn resident_blocks(&self, threads: i32, dynamic_shared: usize) -> i32 {
        let limits = self.model().generation;
        let shared = self.entry.static_shared.saturating_add(dynamic_shared);
        let by_shared = limits.shared.checked_div(shared).unwrap_or(limits.blocks as usize);
        let fits = (1..=self.max_threads() as i32).contains(&threads);
        if !fits || shared > limits.shared_of_block {
            return 0;
        }
        let threads = (threads + 31) / 32 * 32;
        (limits.blocks as i32).min(limits.threads as i32 / threads).min(by_shared as i32)
    }

    /// Whether the device has clusters of several blocks.
    pub(crate) fn has_clusters(&self) -> bool {
        self.model().generation.capability >= (9, 0)
    }

    /// The most blocks of a cluster.
    pub(crate) fn most_in_cluster(&self) -> u32 {
        if self.settings.large_clusters.load(Ordering::Relaxed) { 16 } else { 8 }
    }

    /// The most threads in a block.
    pub(crate) fn max_threads(&self) -> u32 {
        let limit = self.entry.max_threads.map(|t| t.iter().product::<u32>());
        limit.filter(|limit| *limit > 0).map_or(1024, |limit| limit.min(1024))
    }
}

/// Makes a library of code.
///
/// # Errors
/// `INVALID_IMAGE` when a name cannot be given to C.
pub(crate) fn make_library(code: Outcome<Arc<ptx::Module>>) -> Outcome<Arc<Library>> {
    let handle = new_handle();
    let mut kernels = Vec::new();
    for entry in code.iter().flat_map(|code| &code.entries) {
        let name = CString::new(entry.name.as_str()).map_err(|_| Code::INVALID_IMAGE)?;
        let kernel = Kernel { handle: new_handle(), library: handle, entry: entry.clone(), name };
        kernels.push(kernel.handle);
        KERNELS.insert(kernel.handle, Arc::new(kernel));
    }
    let library = Arc::new(Library {
        handle,
        code,
        modules: Mutex::default(),
        kernels,
        managed: Mutex::default(),
    });
    LIBRARIES.insert(handle, library.clone());
    Ok(library)
}

/// Unloads a library and its modules. Their work must be done.
pub(crate) fn unload_library(library: &Library) {
    LIBRARIES.remove(library.handle);
    for kernel in &library.kernels {
        KERNELS.remove(*kernel);
    }
    for module in library.modules.lock().values() {
        if let Some(module) = MODULES.get(*module) {
            unload(&module);
        }
    }
    free_managed(library.managed.lock().take().unwrap_or_default().values());
}

impl Library {
    fn code(&self) -> Outcome<&Arc<ptx::Module>> {
        self.code.as_ref().map_err(|code| *code)
    }

    /// Its module in a context, loaded if need be.
    ///
    /// # Errors
    /// As [`load`]; that of [`parse`] where the code is for other devices or could not be read.
    pub(crate) fn module(&self, context: &Context) -> Outcome<Arc<Module>> {
        let mut modules = self.modules.lock();
        if let Some(module) = modules.get(&context.handle).and_then(|m| MODULES.get(*m)) {
            return Ok(module);
        }
        let code = self.code()?;
        check_target(code, settings().model(context.device)).map_err(|refusal| refusal.code)?;
        let managed = self.managed()?;
        let module = load_with(context, code.clone(), &managed, false)?;
        modules.insert(context.handle, module.handle);
        Ok(module)
    }

    /// Address and size of a managed variable, which is the same in all contexts.
    ///
    /// # Errors
    /// `NOT_FOUND`, that of [`parse`] for code that could not be read, and what there is against placing the managed
    /// variables.
    pub(crate) fn managed_variable(&self, name: &str) -> Outcome<(u64, usize)> {
        let mut globals = self.code()?.globals.iter();
        let global = globals.find(|global| global.managed && global.name == name);
        let global = global.ok_or(Code::NOT_FOUND)?;
        let address = self.managed()?.get(name).copied().ok_or(Code::NOT_FOUND)?;
        Ok((address, global.size))
    }

    /// Addresses of the managed variables by name; they are placed if need be, and stay until the library is unloaded.
    fn managed(&self) -> Outcome<HashMap<String, u64>> {
        let mut managed = self.managed.lock();
        if managed.is_none() {
            *managed = Some(place_managed(self.handle, self.code()?)?);
        }
        Ok(managed.clone().unwrap_or_default())
    }

    /// Handles of all kernels, in the order of the source.
    ///
    /// # Errors
    /// That of [`parse`] for code that could not be read.
    pub(crate) fn kernels(&self) -> Outcome<&[u64]> {
        self.code()?;
        Ok(&self.kernels)
    }

    /// The kernel of a name.
    ///
    /// # Errors
    /// `NOT_FOUND`; that of [`parse`] for code that could not be read.
    pub(crate) fn kernel(&self, name: &str) -> Outcome<u64> {
        let index = self.code()?.entries.iter().position(|entry| entry.name == name);
        index.map(|index| self.kernels[index]).ok_or(Code::NOT_FOUND)
    }
}

/// The kernel of a library that a function was loaded for, if it was.
pub(crate) fn kernel_of(function: u64) -> Option<u64> {
    let function = FUNCTIONS.get(function)?;
    let of = |library: &Arc<Library>| {
        library.modules.lock().values().any(|module| *module == function.module)
    };
    LIBRARIES.all().iter().find(|library| of(library))?.kernel(&function.entry.name).ok()
}

/// The function behind a function handle, or behind a kernel handle in this context.
///
/// # Errors
/// `INVALID_HANDLE` for anything else.
pub(crate) fn function(handle: u64, context: &Context) -> Outcome<Arc<Function>> {
    if let Some(function) = FUNCTIONS.get(handle) {
        return Ok(function);
    }
    let kernel = KERNELS.get(handle).ok_or(Code::INVALID_HANDLE)?;
    let library = LIBRARIES.get(kernel.library).ok_or(Code::INVALID_HANDLE)?;
    let function = library.module(context)?.function(&kernel.entry.name)?;
    FUNCTIONS.get(function).ok_or(Code::INVALID_HANDLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &[u8] = include_bytes!("../tests/fatbin/plain.fatbin");
    const SASS: &[u8] = include_bytes!("../tests/fatbin/sass.fatbin");

    #[test]
    fn parts_without_ptx_are_left_out_of_a_program() {
        let model = Model::of_this_machine(1 << 30);
        let linked = |parts: &[&[u8]]| {
            linked(&parts.iter().map(|part| part.to_vec()).collect::<Vec<_>>(), &model)
        };
        for parts in [[PLAIN, SASS], [SASS, PLAIN]] {
            let text = linked(&parts).unwrap_or_else(|refusal| panic!("{}", refusal.text));
            assert!(text.windows(21).any(|part| part == b".visible .entry scale"));
        }
        assert_eq!(linked(&[SASS, SASS]).err().map(|it| it.code), Some(Code::NO_BINARY_FOR_GPU));
        assert_eq!(linked(&[PLAIN, PLAIN]).err().map(|it| it.code), Some(Code::INVALID_IMAGE));
    }
}
