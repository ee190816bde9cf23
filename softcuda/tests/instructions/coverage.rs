//! The README's list of instructions, which a test keeps current.

use super::jobs;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

/// The instructions of PTX 9.0, by the part of their names before the first point.
const INSTRUCTIONS: &str = "abs activemask add addc alloca and applypriority atom bar barrier bfe bfi \
    bfind bmsk bra brev brkpt brx call clusterlaunchcontrol clz cnot copysign cos cp createpolicy cvt \
    cvta discard div dp2a dp4a elect ex2 exit fence fma fns getctarank griddepcontrol isspacep istypep \
    ld ldmatrix ldu lg2 lop3 mad mad24 madc mapa match max mbarrier membar min mma mov movmatrix mul \
    mul24 multimem nanosleep neg not or pmevent popc prefetch prefetchu prmt rcp red redux rem ret \
    rsqrt sad selp set setmaxnreg setp shf shfl shl shr sin slct sqrt st stackrestore stacksave \
    stmatrix sub subc suld suq sured sust szext tanh tcgen05 tensormap testp tex tld4 trap txq vabsdiff \
    vabsdiff2 vabsdiff4 vadd vadd2 vadd4 vavrg2 vavrg4 vmad vmax vmax2 vmax4 vmin vmin2 vmin4 vote vset \
    vset2 vset4 vshl vshr vsub vsub2 vsub4 wgmma wmma xor";

/// Where the front end decides by the instruction's name.
const FRONT_END: [&str; 2] =
    [include_str!("../../src/ptx/lower/mod.rs"), include_str!("../../src/ptx/lower/arithmetic.rs")];

/// The instructions of all programs, with their modifiers and types, by the first part of the name.
fn forms() -> BTreeMap<String, BTreeSet<String>> {
    let mut forms: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for job in jobs::all() {
        for statement in job.ptx.split(['\n', ';', '{', '}']) {
            let mut words = statement.split_whitespace().skip_while(|word| word.starts_with('@'));
            let form = words.next().unwrap_or_default();
            let name = form.split('.').next().unwrap_or_default();
            if INSTRUCTIONS.split_whitespace().any(|known| known == name) {
                forms.entry(name.to_owned()).or_default().insert(form.to_owned());
            }
        }
    }
    forms
}

fn list() -> String {
    let forms = forms();
    let (mut there, mut missing) = (Vec::new(), Vec::new());
    for name in INSTRUCTIONS.split_whitespace() {
        match forms.get(name) {
            Some(forms) => there.push(format!("`{name}` {}", forms.len())),
            None if FRONT_END.iter().any(|text| text.contains(&format!("\"{name}\""))) => {
                there.push(format!("`{name}`"));
            }
            None => missing.push(format!("`{name}`")),
        }
    }
    let all: usize = forms.values().map(BTreeSet::len).sum();
    let mut list = String::new();
    for (title, names) in [
        (
            format!("{} instructions are there, {all} forms of them in the table", there.len()),
            there,
        ),
        (format!("{} are not", missing.len()), missing),
    ] {
        writeln!(list, "{title}:").expect("writing to a string cannot fail");
        let mut line = String::new();
        for name in names {
            if line.len() + name.len() > 98 {
                writeln!(list, "{}", line.trim_end()).expect("writing to a string cannot fail");
                line.clear();
            }
            line.push_str(&format!("{name}, "));
        }
        let line = line.trim_end_matches(", ");
        writeln!(list, "{line}.\n").expect("writing to a string cannot fail");
    }
    list
}

#[test]
fn the_readme_has_the_current_list_of_instructions() {
    const BEGIN: &str = "<!-- instructions -->\n";
    const END: &str = "<!-- end of instructions -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = readme.split_once(BEGIN).expect("the mark before the list");
    let (old, after) = rest.split_once(END).expect("the mark after the list");
    let new = list();
    if old == new {
        return;
    }
    if std::env::var_os("SOFTCUDA_UPDATE_README").is_some() {
        std::fs::write(&path, format!("{before}{BEGIN}{new}{END}{after}")).unwrap();
        return;
    }
    panic!(
        "softcuda/README.md is not current; \
         SOFTCUDA_UPDATE_README=1 cargo test -p softcuda --test instructions coverage writes it"
    );
}
