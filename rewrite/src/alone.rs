//! A module with one kernel.

use std::ops::Range;

use crate::edits::edited;
use crate::lexer::Syntax;
use crate::scan::scan;

/// The text without the kernels that are not `wanted`; of the others each thread has no more than so many registers, if that is
/// said, and the text of the kernel says nothing of it.
///
/// # Errors
/// The text is no module, as far as its outlines are looked at.
pub fn alone(
    text: &str,
    wanted: impl Fn(&str) -> bool,
    most_registers: Option<u32>,
) -> Result<String, Syntax> {
    let mut edits: Vec<(Range<usize>, String)> = Vec::new();
    for kernel in scan(text)?.kernels {
        if !wanted(kernel.name) {
            edits.push((kernel.all, String::new()));
            continue;
        }
        let brace = kernel.body.start - 1;
        let is_free = !text[kernel.all.start..brace].contains(".maxnreg");
        if let Some(most) = most_registers.filter(|_| is_free) {
            edits.push((brace..brace, format!(".maxnreg {most}\n")));
        }
    }
    Ok(edited(text, 0..text.len(), edits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_left_out() {
        let text = ".version 8.0\n.target sm_80\n.address_size 64\n.global .u32 g;\n\
            .visible .entry one(.param .u64 p)\n.maxntid 4, 1, 1\n{\n\tret;\n}\n\
            .func f() { ret; }\n.entry two() .maxnreg 40 { ret; } .entry three { ret; }\n";
        let only = |name: &'static str, most| alone(text, move |kernel| kernel == name, most);
        let one = only("one", Some(32)).unwrap();
        assert!(one.contains(".maxntid 4, 1, 1\n.maxnreg 32\n{"), "{one}");
        assert!(one.contains(".func f()") && one.contains(".global .u32 g"), "{one}");
        assert!(!one.contains("two") && !one.contains("three"), "{one}");
        assert!(only("two", Some(32)).unwrap().contains(".entry two() .maxnreg 40 {"));
        assert!(only("three", None).unwrap().ends_with(" .entry three { ret; }\n"));
        assert_eq!(alone(text, |_| true, None).unwrap(), text);
        assert!(alone("}", |_| true, None).is_err());
    }
}
