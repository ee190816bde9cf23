//! The README's list of instructions, which a test keeps current.

use super::golden::{self, Found, Golden};
use super::jobs;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

#[path = "../support/readme.rs"]
mod readme;

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
    let title = format!("{} instructions are there, {all} forms of them in the table", there.len());
    paragraph(&title, there) + &paragraph(&format!("{} are not", missing.len()), missing)
}

/// Which programs the files of golden data have no result of, by the instruction or program.
fn golden() -> String {
    let jobs = jobs::all();
    let mut text = String::new();
    for file in golden::files() {
        let golden = Golden::read(&file).expect("golden data can be read");
        let mut missing: BTreeMap<&str, usize> = BTreeMap::new();
        let mut refused = 0;
        for job in &jobs {
            match golden.find(job) {
                Found::Result(_) => {}
                Found::Refused => refused += 1,
                Found::Missing => {
                    let end = if job.name.starts_with("program ") { ' ' } else { '.' };
                    *missing.entry(job.name.split(end).next().unwrap_or_default()).or_default() +=
                        1;
                }
            }
        }
        let lacking: usize = missing.values().sum();
        writeln!(
            text,
            "`{}` ({}): {} of {} programs agree, {refused} were refused.\n",
            file.file_name().unwrap_or_default().display(),
            golden.device,
            jobs.len() - refused - lacking,
            jobs.len(),
        )
        .expect("writing to a string cannot fail");
        if lacking != 0 {
            let names = missing.iter().map(|(name, count)| format!("`{name}` {count}"));
            text.push_str(&paragraph(&format!("{lacking} were not run there yet"), names));
        }
    }
    text
}

/// A title and a list of names, in lines of at most 100 characters.
fn paragraph(title: &str, names: impl IntoIterator<Item = String>) -> String {
    let mut text = format!("{title}:\n");
    let mut line = String::new();
    for name in names {
        if line.len() + name.len() > 98 {
            text.push_str(line.trim_end());
            text.push('\n');
            line.clear();
        }
        line.push_str(&format!("{name}, "));
    }
    text.push_str(line.trim_end_matches(", "));
    text.push_str(".\n\n");
    text
}

#[test]
fn the_readme_has_the_current_lists() {
    readme::check("instructions", &list());
    readme::check("golden", &golden());
}
