//! What a kernel's code says of doing a launch twice.

use std::collections::HashMap;

use gpucr_wire::reach::Reach;
use gpucr_wire::twice::{Code, Use, words};

use crate::{Direction, Kernel};

/// What the code of a kernel does to memory, by which [`gpucr_wire::twice`] decides of each launch whether doing it
/// twice is the same as doing it once. The code has to be all that may run. The driver has these parameters, by offset
/// and size.
///
/// # Errors
/// Why doing one of its launches twice can never be said to be the same.
pub fn code(kernel: &Kernel, params: &[(u32, u32)]) -> Result<Code, &'static str> {
    let same = |(theirs, ours): (&(u32, u32), &crate::Param)| *theirs == (ours.offset, ours.size);
    if params.len() != kernel.params.len() || !params.iter().zip(&kernel.params).all(same) {
        return Err("its code is not known");
    }
    if kernel.indirect {
        return Err("follows pointers in memory");
    }
    if !kernel.closed {
        return Err("more than memory counts");
    }
    let places: HashMap<(u32, u32), usize> =
        words(params.iter().copied()).enumerate().map(|(at, word)| (word, at)).collect();
    let uses = uses(kernel, &places).ok_or("its code is not understood")?;
    let (reads_variables, writes_variables) = (kernel.variables.reads(), kernel.variables.writes());
    Ok(Code { uses, reads_variables, writes_variables })
}

/// What is done with each argument; `None` if that of one is not known.
fn uses(code: &Kernel, places: &HashMap<(u32, u32), usize>) -> Option<Vec<Use>> {
    let mut uses = Vec::new();
    for (number, param) in code.params.iter().enumerate() {
        for word in param.words.iter().filter(|word| word.direction != Direction::None) {
            if word.direction == Direction::Unknown {
                return None;
            }
            uses.push(Use {
                word: places.get(&(number as u32, word.offset)).copied(),
                reads: word.direction.reads(),
                writes: word.direction.writes(),
                down: word.reach.as_ref().map(goes_down),
            });
        }
    }
    Some(uses)
}

/// Whether there is a size of a launch with which it goes to lower addresses.
fn goes_down(reach: &Reach) -> bool {
    reach.low < 0 || reach.terms.iter().any(|term| term.bytes < 0)
}
