pub use super::ast::Reference;
use super::ast::{Base, Function, Operand, Source, Space, Type, Variable};
use super::code::{Code, FUNCTION_WINDOW};
use super::diagnostic::{Diagnostic, DiagnosticKind};
use super::lower::{Layout, Location, Names, Signature, lower, slots};
use super::parser::parse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A loaded PTX module.
#[derive(Debug)]
pub struct Module {
    /// The PTX ISA version, major and minor.
    pub version: (u32, u32),
    /// The target, such as `sm_75`.
    pub target: String,
    /// The kernels, in the order of the source.
    pub entries: Vec<Arc<Entry>>,
    /// Variables in global and constant memory, in the order of the source.
    pub globals: Vec<Global>,
    /// Whether kernels allocate memory by themselves.
    pub uses_heap: bool,
    /// Whether kernels launch kernels.
    pub launches: bool,
    /// The functions, those of the entries included.
    pub(crate) functions: Vec<Code>,
}

impl Module {
    /// The version that PTX text says it is of, major and minor, without a look at the rest: text of a version that is
    /// not known may hold anything. `None` if it does not begin with one.
    pub fn version_of(source: &str) -> Option<(u32, u32)> {
        let mut rest = source.trim_start();
        loop {
            let comment = if let Some(line) = rest.strip_prefix("//") {
                line.split_once('\n')
            } else if let Some(block) = rest.strip_prefix("/*") {
                block.split_once("*/")
            } else {
                break;
            };
            rest = comment?.1.trim_start();
        }
        let number = rest.strip_prefix(".version")?.split_whitespace().next()?;
        let (major, minor) = number.split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// Parses, checks and translates PTX text.
    ///
    /// # Errors
    /// The first fault found, with its place in the source.
    pub fn load(source: &str) -> Result<Module, Diagnostic> {
        let source = parse(source)?;
        let names = names(&source)?;
        let mut module = Module {
            version: source.version,
            target: source.target.to_owned(),
            entries: Vec::new(),
            globals: globals(&source, &names)?,
            uses_heap: false,
            launches: false,
            functions: Vec::new(),
        };
        let shared = SharedMemory::of(&source)?;
        let names = Names { shared: shared.places.clone(), ..names };
        for function in source.functions.iter().filter(|function| function.body.is_some()) {
            let mut shared_size = Layout { size: shared.size };
            let (locations, own, frame) = locate(&source, function, &shared, &mut shared_size);
            let frame_bytes = u32::try_from(frame.size.next_multiple_of(16))
                .ok()
                .filter(|&bytes| bytes <= MOST_LOCAL)
                .ok_or_else(|| function.position.limit("too much local memory"))?;
            if function.is_entry {
                let number = module.functions.len();
                module.entries.push(Arc::new(entry(function, number, shared_size, frame_bytes)?));
            }
            module.functions.push(lower(&names, function, locations, &own, frame_bytes)?);
        }
        module.uses_heap = module.functions.iter().any(|code| code.uses_heap);
        module.launches = module.functions.iter().any(|code| code.launches);
        Ok(module)
    }

    /// The kernel of this (mangled) name.
    #[must_use]
    pub fn entry(&self, name: &str) -> Option<&Arc<Entry>> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Entry {
    /// The (mangled) name.
    pub name: String,
    /// The parameters in order.
    pub params: Vec<Param>,
    /// Length of the parameter buffer, in bytes.
    pub param_bytes: usize,
    /// Static shared memory per block, in bytes.
    pub static_shared: usize,
    /// Local memory per thread, in bytes, without that of called functions.
    pub local_bytes: usize,
    /// An estimate of the registers per thread, from 1 to 255, and at most what `.maxnreg` allows.
    pub registers: u32,
    /// The `.maxntid` or `.reqntid` limit on the block's shape.
    pub max_threads: Option<[u32; 3]>,
    /// The `.reqnctapercluster` shape of the clusters that it has to be launched with.
    pub cluster: Option<[u32; 3]>,
    /// The index of its code in the module.
    pub(crate) function: usize,
}

/// A kernel parameter's place in the parameter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Offset in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// A variable in global or constant memory.
#[derive(Debug, Clone)]
pub struct Global {
    /// The (mangled) name.
    pub name: String,
    /// Size in bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
    /// Whether it is in `.const` memory.
    pub constant: bool,
    /// It stands for a texture or a surface, by its address.
    pub reference: Option<Reference>,
    /// Whether it lies in managed memory.
    pub managed: bool,
    /// The first bytes of its initial value; the rest, up to `size`, is zero.
    pub init: Vec<u8>,
    /// Addresses to add into `init` once they are known.
    pub relocations: Vec<Relocation>,
}

/// Where an initial value holds the address of another variable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocation {
    /// Where in [`Global::init`] the 8 bytes of the address belong.
    pub offset: usize,
    /// The variable whose address is meant: the name of one of [`Module::globals`].
    pub symbol: String,
    /// Bytes to add to that address.
    pub addend: i64,
}

/// The most local memory of one thread, in bytes, as on a GPU.
pub(crate) const MOST_LOCAL: u32 = 512 << 10;
/// The largest parameter buffer, in bytes.
const MOST_PARAMS: usize = 32764;

fn names<'a>(source: &Source<'a>) -> Result<Names<'a>, Diagnostic> {
    let mut names = Names::default();
    let mut seen = HashSet::new();
    for variable in &source.variables {
        if !seen.insert(variable.name) {
            let message = format!("`{}` is declared twice", variable.name);
            return Err(variable.position.fault(DiagnosticKind::Redefined, message));
        }
        if matches!(variable.space, Space::Global | Space::Const) {
            names.globals.insert(variable.name, names.globals.len() as u32);
        }
    }
    let mut number = 0;
    for function in &source.functions {
        let form = slots(function);
        let defined = function.body.is_some().then(|| {
            number += 1;
            number - 1
        });
        let known = names.functions.get(function.name).and_then(|f: &Signature| f.number);
        if seen.contains(function.name) || (known.is_some() && defined.is_some()) {
            let message = format!("`{}` is defined twice", function.name);
            return Err(function.position.fault(DiagnosticKind::Redefined, message));
        }
        let signature = names.functions.entry(function.name).or_default();
        signature.number = defined.or(known);
        if !signature.forms.contains(&form) {
            signature.forms.push(form);
        }
    }
    Ok(names)
}

fn globals(source: &Source<'_>, names: &Names<'_>) -> Result<Vec<Global>, Diagnostic> {
    let of_module = |v: &&Variable<'_>| matches!(v.space, Space::Global | Space::Const);
    source
        .variables
        .iter()
        .filter(of_module)
        .map(|variable| {
            let mut init = variable.init.clone();
            let mut relocations = Vec::new();
            for address in &variable.addresses {
                let symbol = address.symbol;
                let addend = address.addend;
                if let Some(function) = names.functions.get(symbol) {
                    let number =
                        function.number.ok_or_else(|| address.position.undefined(symbol))?;
                    let value = FUNCTION_WINDOW + u64::from(number);
                    init[address.offset..address.offset + 8].copy_from_slice(&value.to_le_bytes());
                } else if names.globals.contains_key(symbol) {
                    let symbol = symbol.to_owned();
                    relocations.push(Relocation { offset: address.offset, symbol, addend });
                } else {
                    return Err(address.position.undefined(symbol));
                }
            }
            Ok(Global {
                name: variable.name.to_owned(),
                size: variable.size,
                align: variable.align,
                constant: variable.space == Space::Const,
                reference: variable.reference,
                managed: variable.managed,
                init,
                relocations,
            })
        })
        .collect()
}

/// Shared variables that functions other than entries use: every entry may call these, so
/// they lie at the same place for all.
struct SharedMemory<'a> {
    places: HashMap<&'a str, Location>,
    /// Places of the functions' own variables, by function and variable.
    own: HashMap<(&'a str, usize), Location>,
    size: usize,
}

impl<'a> SharedMemory<'a> {
    fn of(source: &Source<'a>) -> Result<Self, Diagnostic> {
        let mut layout = Layout::default();
        let mut found = SharedMemory { places: HashMap::new(), own: HashMap::new(), size: 0 };
        for function in source.functions.iter().filter(|function| !function.is_entry) {
            let Some(body) = &function.body else { continue };
            for (index, variable) in body.variables.iter().enumerate() {
                if variable.space == Space::Shared {
                    let place = shared_place(variable, &mut layout);
                    found.own.insert((function.name, index), place);
                }
            }
            for variable in used_shared(source, function) {
                found
                    .places
                    .entry(variable.name)
                    .or_insert_with(|| shared_place(variable, &mut layout));
            }
        }
        found.size = layout.size;
        Ok(found)
    }
}

fn shared_place(variable: &Variable<'_>, layout: &mut Layout) -> Location {
    if variable.dynamic {
        return Location::Dynamic(variable.align as u32);
    }
    Location::Shared(layout.place(variable.size, variable.align) as u32)
}

/// The module's shared variables that a function names.
fn used_shared<'s, 'a>(source: &'s Source<'a>, function: &Function<'a>) -> Vec<&'s Variable<'a>> {
    let mut used = HashSet::new();
    for instruction in function.body.iter().flat_map(|body| &body.instructions) {
        for operand in &instruction.operands {
            if let Operand::Symbol(Base::Name(name), _) | Operand::Address(Base::Name(name), _) =
                operand
            {
                used.insert(*name);
            }
        }
    }
    let shared = source.variables.iter().filter(|variable| variable.space == Space::Shared);
    shared.filter(|variable| used.contains(variable.name)).collect()
}

type Located<'a> = (Vec<Location>, HashMap<&'a str, Location>, Layout);

/// Where the variables of a function are, where the module's shared variables are that are its
/// alone, and its frame.
fn locate<'a>(
    source: &Source<'a>,
    function: &Function<'a>,
    shared: &SharedMemory<'a>,
    shared_size: &mut Layout,
) -> Located<'a> {
    let mut params = Layout::default();
    let mut frame = Layout::default();
    let (param_slots, return_slots) = slots(function);
    let known = if function.is_entry { 0 } else { param_slots.len() + return_slots.len() };
    let mut locations = Vec::new();
    let variables = function.body.iter().flat_map(|body| &body.variables);
    for (index, variable) in variables.enumerate() {
        locations.push(match variable.space {
            Space::Param if function.is_entry && index < function.params.len() => {
                Location::Param(params.place(variable.size, variable.align) as u32)
            }
            Space::Shared => match shared.own.get(&(function.name, index)) {
                Some(&place) => place,
                None => shared_place(variable, shared_size),
            },
            // Callers know the places of parameters by the same rule as `slots`.
            _ => {
                let align = if index < known { variable.align.max(8) } else { variable.align };
                Location::Frame(frame.place(variable.size, align) as u32)
            }
        });
    }
    let mut own = HashMap::new();
    for variable in used_shared(source, function) {
        if !shared.places.contains_key(variable.name) {
            own.insert(variable.name, shared_place(variable, shared_size));
        }
    }
    (locations, own, frame)
}

fn entry(
    function: &Function<'_>,
    number: usize,
    shared: Layout,
    frame_bytes: u32,
) -> Result<Entry, Diagnostic> {
    let mut layout = Layout::default();
    let params: Vec<Param> = function
        .params
        .iter()
        .map(|param| Param {
            offset: layout.place(param.size, param.align),
            size: param.size,
            align: param.align,
        })
        .collect();
    if layout.size > MOST_PARAMS {
        return Err(function.position.limit("the parameters are too large"));
    }
    if shared.size > 1 << 20 {
        return Err(function.position.limit("too much shared memory"));
    }
    let types = function.body.as_ref().map_or(&[][..], |body| &body.registers);
    let live: usize = types.iter().filter(|&&ty| ty != Type::Pred).map(|ty| ty.size() / 4).sum();
    Ok(Entry {
        name: function.name.to_owned(),
        params,
        param_bytes: layout.size,
        static_shared: shared.size,
        local_bytes: frame_bytes as usize,
        registers: (live / 4)
            .clamp(8, 255)
            .min(function.max_registers.unwrap_or(255).max(1) as usize) as u32,
        max_threads: function.max_threads,
        cluster: function.cluster,
        function: number,
    })
}
