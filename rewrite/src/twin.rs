//! Kernels to twins.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use crate::control::{BLOCK, CLAIMS};
use crate::edits::edited;
use crate::inside::Inside;
use crate::lexer::Syntax;
use crate::loops::Changed;
use crate::scan::{Kernel, Module, scan};
use crate::shared::{Shared, declared};
use crate::writer::Polls;
use crate::{aborted, barriers, loops};

/// What all names begin with that are put into a text.
const MARK: &str = "gpucr_";
/// The name of the parameter.
const PARAMETER: &str = "gpucr_control";

/// What the names of functions of the device runtime begin with, of two generations.
const RUNTIMES: [&str; 2] = ["cuda", "__cudaCDP2"];
/// What follows in those by which a kernel launches another one.
const LAUNCHING: [&str; 2] = ["LaunchDevice", "GetParameterBuffer"];

/// Why a kernel has no twin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Why {
    /// Its blocks run in clusters, and must begin together.
    Cluster,
    /// It launches kernels itself, which begin when all of it is done.
    Launches,
    /// It uses a variable of its module, of this name: the twin is in another module, which has its own.
    Variable(String),
    /// It uses a variable of its module whose name is not known.
    Nameless,
    /// Its addresses have 32 bits.
    Addresses,
    /// There are names in the text that a twin needs.
    Names,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cluster => f.write_str("its blocks run in clusters"),
            Self::Launches => f.write_str("it launches kernels itself"),
            Self::Variable(name) => write!(f, "it uses the module's variable {name}"),
            Self::Nameless => f.write_str("it may use variables of the module"),
            Self::Addresses => f.write_str("its addresses have 32 bits"),
            Self::Names => f.write_str("its module has names that begin with gpucr_"),
        }
    }
}

/// A kernel's twins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Twins {
    /// The one that can be interrupted in its loops, or why there is none. The other one has the kernel's name.
    pub in_loops: Result<InLoops, Inside>,
    /// The one that can be interrupted at barriers, or why there is none. No kernel has both.
    pub at_barriers: Result<AtBarriers, Inside>,
    /// The one that is aborted, or why there is none: because of what its threads do by themselves, and at barriers.
    pub aborted: Result<Aborted, [Inside; 2]>,
}

/// A twin that can be interrupted in its loops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InLoops {
    /// Its name.
    pub name: String,
    /// What each thread saves, bytes.
    pub saved: u64,
}

/// A twin that can be interrupted at barriers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AtBarriers {
    /// Its name.
    pub name: String,
    /// What each thread saves, bytes.
    pub saved: u64,
    /// What all of a block save together, bytes.
    pub shared: u64,
    /// The dynamic shared memory of a launch is saved too, which has to be a multiple of so many bytes.
    pub dynamic: Option<u64>,
}

/// A twin of which what runs ends without being saved, and begins anew in the next launch. It is right only for launches of which
/// doing them twice is the same as doing them once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Aborted {
    /// Its name.
    pub name: String,
    /// Blocks end and begin as one, at barriers: each has a state. Else threads do, in their loops.
    pub by_blocks: bool,
}

/// How twins are made.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// How often threads look at the flag.
    pub polls: Polls,
    /// There are twins that are [aborted](Aborted).
    pub aborted: bool,
}

impl Default for How {
    fn default() -> Self {
        Self { polls: Polls::default(), aborted: true }
    }
}

/// A module with twins: those that are interrupted between blocks in the place of kernels, under their names, and others next to
/// them.
#[derive(Debug, Clone)]
pub struct Rewritten {
    /// The text.
    pub text: String,
    /// The kernels that were wanted: their twins, or why there are none.
    pub kernels: Vec<(String, Result<Twins, Why>)>,
}

/// Puts twins in the place of the kernels whose names are `wanted`. All else is as it was.
///
/// # Errors
/// The text is no module, as far as its outlines are looked at.
pub fn rewrite(text: &str, wanted: impl Fn(&str) -> bool) -> Result<Rewritten, Syntax> {
    rewrite_with(text, wanted, How::default())
}

/// The same, made as is said.
///
/// # Errors
/// As for [`rewrite`].
pub fn rewrite_with(
    text: &str,
    wanted: impl Fn(&str) -> bool,
    how: How,
) -> Result<Rewritten, Syntax> {
    let module = scan(text)?;
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    let mut kernels = Vec::new();
    for kernel in module.kernels.iter().filter(|kernel| wanted(kernel.name)) {
        let judged = judge(&module, kernel, text).map(|()| {
            let (in_loops, in_text) = in_loops(text, kernel, how.polls);
            let (at_barriers, at_text) = at_barriers(text, &module, kernel, how.polls);
            edits.push(parameter(kernel));
            edits.push((kernel.body.start..kernel.body.start, prologue()));
            let (aborted, again_text) = aborted(text, &module, kernel, how);
            edits.push((kernel.all.end..kernel.all.end, in_text + &at_text + &again_text));
            Twins { in_loops, at_barriers, aborted }
        });
        kernels.push((kernel.name.to_owned(), judged));
    }
    Ok(Rewritten { text: edited(text, 0..text.len(), edits), kernels })
}

/// The twin of a kernel that can be interrupted in its loops, and its text; or why there is none.
fn in_loops(text: &str, kernel: &Kernel<'_>, polls: Polls) -> (Result<InLoops, Inside>, String) {
    match loops::change(&text[kernel.body.clone()], PARAMETER, polls) {
        Ok(changed) => {
            let (name, saved) = (format!("{MARK}loops_{}", kernel.name), changed.saved);
            let written = written(text, kernel, &name, changed);
            (Ok(InLoops { name, saved }), written)
        }
        Err(why) => (Err(why), String::new()),
    }
}

/// The same for the one that can be interrupted at barriers.
fn at_barriers(
    text: &str,
    module: &Module<'_>,
    kernel: &Kernel<'_>,
    polls: Polls,
) -> (Result<AtBarriers, Inside>, String) {
    let body = &text[kernel.body.clone()];
    let changed = outside(text, module, kernel)
        .and_then(|outside| barriers::change(body, PARAMETER, &outside, polls));
    match changed {
        Ok((changed, memory)) => {
            let (name, saved) = (format!("{MARK}barriers_{}", kernel.name), changed.saved);
            let written = written(text, kernel, &name, changed);
            let (shared, dynamic) = (memory.bytes, memory.more);
            (Ok(AtBarriers { name, saved, shared, dynamic }), written)
        }
        Err(why) => (Err(why), String::new()),
    }
}

/// The same for the one that is aborted.
fn aborted(
    text: &str,
    module: &Module<'_>,
    kernel: &Kernel<'_>,
    how: How,
) -> (Result<Aborted, [Inside; 2]>, String) {
    if !how.aborted {
        return (Err([Inside::Unasked, Inside::Unasked]), String::new());
    }
    let body = &text[kernel.body.clone()];
    let alone = || match shared_of(module, kernel) {
        Some(name) => Err(Inside::Uses(name.to_owned())),
        None => called(text, module, kernel, false)
            .and_then(|()| aborted::alone(body, PARAMETER, how.polls)),
    };
    let outside = outside(text, module, kernel).ok();
    let together = || {
        called(text, module, kernel, true)?;
        aborted::together(body, PARAMETER, outside.as_deref(), how.polls)
    };
    let found = alone().map(|changed| (changed, false));
    let found =
        found.or_else(|of| together().map(|changed| (changed, true)).map_err(|at| [of, at]));
    let (changed, by_blocks) = match found {
        Ok(found) => found,
        Err(why) => return (Err(why), String::new()),
    };
    let name = format!("{MARK}aborted_{}", kernel.name);
    let written = written(text, kernel, &name, changed);
    (Ok(Aborted { name, by_blocks }), written)
}

/// The kernel, and all functions of its module that are named in it, or in one of these, whether they are called or not: their
/// names, and those in them.
fn reached<'m, 'a>(
    module: &'m Module<'a>,
    kernel: &'m Kernel<'a>,
) -> Vec<(&'a str, &'m HashSet<&'a str>)> {
    let mut seen = HashSet::from([kernel.name]);
    let mut reached = vec![(kernel.name, &kernel.names)];
    let mut at = 0;
    while let Some((_, names)) = reached.get(at).copied() {
        at += 1;
        for name in names {
            if let Some(more) = module.functions.get(name)
                && seen.insert(name)
            {
                reached.push((name, more));
            }
        }
    }
    reached
}

/// A variable of the module in shared memory that the kernel names, or what it calls.
fn shared_of<'a>(module: &Module<'a>, kernel: &Kernel<'a>) -> Option<&'a str> {
    let reached = reached(module, kernel);
    let mut shared = module.shared.iter().flat_map(|(_, names)| names.iter().copied());
    shared.find(|name| reached.iter().any(|(_, names)| names.contains(name)))
}

/// Whether what the kernel calls may be called by one that is aborted.
fn called(
    text: &str,
    module: &Module<'_>,
    kernel: &Kernel<'_>,
    is_together: bool,
) -> Result<(), Inside> {
    let reached: HashSet<&str> = reached(module, kernel).iter().map(|(name, _)| *name).collect();
    let mut bodies = module.bodies.iter().filter(|(name, _)| reached.contains(name));
    bodies.try_for_each(|(_, body)| aborted::called(&text[body.clone()], is_together))
}

/// The variables in shared memory that a module declares and the kernel names.
fn outside<'a>(
    text: &'a str,
    module: &Module<'a>,
    kernel: &Kernel<'a>,
) -> Result<Vec<Shared<'a>>, Inside> {
    let mut found = Vec::new();
    for (at, names) in &module.shared {
        if names.iter().any(|name| kernel.names.contains(name)) {
            let all = declared(&text[at.clone()])?;
            found.extend(all.into_iter().filter(|one| kernel.names.contains(one.name)));
        }
    }
    Ok(found)
}

/// A kernel's text with another name, the parameter, and changes in its body.
fn written(text: &str, kernel: &Kernel<'_>, name: &str, changed: Changed) -> String {
    let Range { start, end } = kernel.body;
    let mut edits = vec![(kernel.named.clone(), name.to_owned()), parameter(kernel)];
    edits.push((start..start, changed.begin));
    let inside = changed.edits.into_iter();
    edits.extend(inside.map(|(at, instead)| (start + at.start..start + at.end, instead)));
    edits.push((end..end, changed.end));
    let written = edited(text, kernel.all.clone(), edits);
    format!("\n{written}\n")
}

/// Whether a kernel may have a twin.
fn judge(module: &Module<'_>, kernel: &Kernel<'_>, text: &str) -> Result<(), Why> {
    if module.address_size != Some("64") {
        return Err(Why::Addresses);
    }
    if text.contains(MARK) {
        return Err(Why::Names);
    }
    if kernel.has_cluster {
        return Err(Why::Cluster);
    }
    if module.has_nameless {
        return Err(Why::Nameless);
    }
    for (_, names) in reached(module, kernel) {
        let launches = |name: &str| {
            let named = RUNTIMES.iter().filter_map(|runtime| name.strip_prefix(runtime));
            let mut named = named.filter(|rest| LAUNCHING.iter().any(|it| rest.starts_with(it)));
            named.next().is_some()
        };
        if names.iter().any(|name| launches(name)) {
            return Err(Why::Launches);
        }
        if names.contains(".global") || names.contains(".const") {
            return Err(Why::Nameless);
        }
        if let Some(variable) = names.iter().filter(|name| module.variables.contains(*name)).min() {
            return Err(Why::Variable((*variable).to_owned()));
        }
    }
    Ok(())
}

/// The parameter, and where it goes.
fn parameter(kernel: &Kernel<'_>) -> (Range<usize>, String) {
    let (at, words) = match kernel.params {
        Some((end, true)) => (end, format!(",\n\t.param .u64 {PARAMETER}\n")),
        Some((end, false)) => (end, format!(".param .u64 {PARAMETER}")),
        None => (kernel.named.end, format!("(.param .u64 {PARAMETER})")),
    };
    (at..at, words)
}

/// What a block does before all else. `bar.red` has all of its threads decide alike: all of them are there still, and
/// they use the barrier as they like afterwards.
///
/// ptxas spreads sums over the units that add and those that multiply, as it seems by what a kernel has had of both, this text
/// included. So this has about as many instructions for the ones as for the others: the block's number is divided by a
/// multiplication, for one. Else more loops behind it would become others than those of the original (docs/interruption.md).
fn prologue() -> String {
    format!(
        "
{{
	.reg .pred %gpucr_runs, %gpucr_leave;
	.reg .b32 %gpucr_a, %gpucr_b, %gpucr_c;
	.reg .b64 %gpucr_at, %gpucr_by;
	mov.u32 %gpucr_a, %tid.x;
	mov.u32 %gpucr_b, %tid.y;
	mov.u32 %gpucr_c, %tid.z;
	or.b32 %gpucr_a, %gpucr_a, %gpucr_b;
	or.b32 %gpucr_a, %gpucr_a, %gpucr_c;
	setp.ne.u32 %gpucr_runs, %gpucr_a, 0;
	@%gpucr_runs bra $gpucr_decided;
	ld.param.u64 %gpucr_at, [{PARAMETER}];
	ld.volatile.global.u32 %gpucr_a, [%gpucr_at];
	setp.ne.u32 %gpucr_leave, %gpucr_a, 0;
	@%gpucr_leave bra $gpucr_decided;
{BLOCK}	mul.hi.u32 %gpucr_b, %gpucr_a, 0x08000000;
	mul.wide.u32 %gpucr_by, %gpucr_b, 4;
	add.u64 %gpucr_at, %gpucr_at, %gpucr_by;
	and.b32 %gpucr_a, %gpucr_a, 31;
	mov.u32 %gpucr_b, 1;
	shl.b32 %gpucr_b, %gpucr_b, %gpucr_a;
	atom.global.or.b32 %gpucr_c, [%gpucr_at+{CLAIMS}], %gpucr_b;
	not.b32 %gpucr_c, %gpucr_c;
	and.b32 %gpucr_c, %gpucr_c, %gpucr_b;
	setp.ne.u32 %gpucr_runs, %gpucr_c, 0;
$gpucr_decided:
	bar.red.and.pred %gpucr_runs, 0, %gpucr_runs;
	@!%gpucr_runs exit;
}}
"
    )
}
