//! What reads text that anybody may have made. The fuzz target `rewrite` calls it, and so does `tests/hostile.rs` with a kept
//! corpus; and twins for tests. No part of the library's interface.

use crate::barriers::{LOOK, LOOK_AGAIN};
use crate::rewrite;

/// Where the control block of a [`haunted`] twin counts looks at the flag, and where it says of how many one finds it raised;
/// both are words of 32 bits.
pub const LOOKS: [u64; 2] = [4, 8];

/// Twins whose threads find the flag raised at one of so many looks in their loops, whatever it is.
pub fn haunted(twins: &str) -> String {
    let [count, of] = LOOKS;
    let look = format!(
        "	atom.global.add.u32 %gpucr_c, [%gpucr_at+{count}], 1;
	ld.global.u32 %gpucr_b, [%gpucr_at+{of}];
	rem.u32 %gpucr_c, %gpucr_c, %gpucr_b;
	setp.eq.u32 %gpucr_is, %gpucr_c, 0;
	selp.u32 %gpucr_c, 1, 0, %gpucr_is;"
    );
    let twins = twins.replace("	ld.volatile.global.u32 %gpucr_c, [%gpucr_at];", &look);
    // Here one thread looks of those that are there.
    let look = look.replace("%gpucr_c", "%gpucr_flag").replace("	", "	@%gpucr_first ");
    let twins = twins.replace(LOOK, &(look + "\n"));
    // And finds it lowered again sometimes.
    let again = format!(
        "	ld.global.u32 %gpucr_b, [%gpucr_at+{count}];
	ld.global.u32 %gpucr_c, [%gpucr_at+{of}];
	div.u32 %gpucr_b, %gpucr_b, %gpucr_c;
	and.b32 %gpucr_b, %gpucr_b, 3;
	setp.ne.u32 %gpucr_is, %gpucr_b, 3;
	selp.u32 %gpucr_b, 1, 0, %gpucr_is;\n"
    );
    twins.replace(LOOK_AGAIN, &again)
}

/// Rewrites all kernels of a text. `loads` says whether a driver takes a module.
///
/// # Panics
/// A driver takes the text, and not what was made of it.
pub fn feed(text: &str, loads: impl Fn(&str) -> bool) {
    let Ok(rewritten) = rewrite(text, |_| true) else { return };
    let twins = rewritten.kernels.iter().filter(|(_, judged)| judged.is_ok()).count();
    if twins == 0 {
        assert!(rewritten.text == text, "the text has changed");
    } else if loads(text) {
        assert!(loads(&rewritten.text), "a driver does not take\n{}", rewritten.text);
    }
}
