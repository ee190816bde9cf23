//! Video instructions, scalar and side by side, and memory on the stack.

use super::table::{Case, Row, rows32};

type Values = fn(i64, i64) -> i64;

const TYPES: [(&str, bool); 2] = [("u32", false), ("s32", true)];

const ACTS: [(&str, Values); 5] = [
    ("vadd", |a, b| a + b),
    ("vsub", |a, b| a - b),
    ("vabsdiff", |a, b| (a - b).abs()),
    ("vmin", i64::min),
    ("vmax", i64::max),
];

const COMPARISONS: [(&str, Values); 6] = [
    ("eq", |a, b| i64::from(a == b)),
    ("ne", |a, b| i64::from(a != b)),
    ("lt", |a, b| i64::from(a < b)),
    ("le", |a, b| i64::from(a <= b)),
    ("gt", |a, b| i64::from(a > b)),
    ("ge", |a, b| i64::from(a >= b)),
];

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    scalars(&mut cases);
    parts(&mut cases);
    shifts(&mut cases);
    products(&mut cases);
    pairs(&mut cases);
    selections(&mut cases);
    stack(&mut cases);
    cases
}

/// Some bits of a word as a number.
fn number(word: u64, at: u32, width: u32, signed: bool) -> i64 {
    let bits = (word >> at) & ((1 << width) - 1);
    if signed && bits >> (width - 1) != 0 { bits as i64 - (1 << width) } else { bits as i64 }
}

fn clamped(value: i64, width: u32, signed: bool) -> i64 {
    if signed {
        value.clamp(-(1 << (width - 1)), (1 << (width - 1)) - 1)
    } else {
        value.clamp(0, (1 << width) - 1)
    }
}

fn case(text: String, host: impl Fn(Row) -> i64 + 'static) -> Case {
    Case::new(text, ["b32"; 4], &rows32(), move |row| u64::from(host(row) as u32))
}

/// On whole registers, with and without limits.
fn scalars(cases: &mut Vec<Case>) {
    for (name, act) in ACTS {
        for (to, to_signed) in TYPES {
            for (from, signed) in TYPES {
                let text = format!("{name}.{to}.{from}.{from}.sat $0, $1, $2;");
                cases.push(case(text, move |[a, b, _]| {
                    let value = act(number(a, 0, 32, signed), number(b, 0, 32, signed));
                    // The driver's compiler forgets the limit of sums without signs.
                    let forgets = name == "vadd" && !signed && !to_signed;
                    if forgets { value } else { clamped(value, 32, to_signed) }
                }));
            }
        }
        let text = format!("{name}.s32.u32.s32 $0, $1, $2;");
        cases.push(case(text, move |[a, b, _]| {
            act(number(a, 0, 32, false), number(b, 0, 32, true))
        }));
    }
    for (name, compare) in COMPARISONS {
        let text = format!("vset.s32.u32.{name} $0, $1, $2;");
        cases.push(case(text, move |[a, b, _]| {
            compare(number(a, 0, 32, true), number(b, 0, 32, false))
        }));
    }
}

/// On bytes and halves, with a second operation, and into a part of the result.
fn parts(cases: &mut Vec<Case>) {
    for (name, act) in ACTS {
        for (second, join) in [
            ("add", (|a, b| a + b) as Values),
            ("min", i64::min as Values),
            ("max", i64::max as Values),
        ] {
            let text = format!("{name}.s32.s32.u32.sat.{second} $0, $1.b2, $2.h1, $3;");
            cases.push(case(text, move |[a, b, c]| {
                let value = act(number(a, 16, 8, true), number(b, 16, 16, false));
                join(clamped(value, 32, true), number(c, 0, 32, true))
            }));
        }
        for (part, at, width) in [("b0", 0, 8), ("b3", 24, 8), ("h1", 16, 16)] {
            for (limits, saturates) in [("", false), (".sat", true)] {
                let text = format!("{name}.u32.s32.s32{limits} $0.{part}, $1.b1, $2.h0, $3;");
                cases.push(case(text, move |[a, b, c]| {
                    let value = act(number(a, 8, 8, true), number(b, 0, 16, true));
                    // By the PTX ISA the limit of what is negative is 0; the driver takes it for a large number.
                    let value = (value as u32).into();
                    let value = if saturates { clamped(value, width, false) } else { value };
                    let mask = ((1i64 << width) - 1) << at;
                    // By the PTX ISA the lower half of the value goes into h1; the driver puts the upper one there.
                    let moved = if part == "h1" { value } else { value << at };
                    (c as i64 & !mask) | (moved & mask)
                }));
            }
        }
    }
    let text = "vset.u32.s32.gt $0.h0, $1.b3, $2.b0, $3;".to_owned();
    cases.push(case(text, |[a, b, c]| {
        let greater = number(a, 24, 8, false) > number(b, 0, 8, true);
        (c as i64 & 0xffff_0000) | i64::from(greater)
    }));
}

fn shifts(cases: &mut Vec<Case>) {
    for (from, signed) in TYPES {
        for (mode, wraps) in [("clamp", false), ("wrap", true)] {
            let amount = move |b: u64| {
                let b = b & 0xffff_ffff;
                if wraps { b & 31 } else { b.min(32) }
            };
            let text = format!("vshl.u32.{from}.u32.{mode} $0, $1, $2;");
            cases.push(case(text, move |[a, b, _]| number(a, 0, 32, signed) << amount(b)));
            let text = format!("vshr.s32.{from}.u32.{mode} $0, $1, $2;");
            cases.push(case(text, move |[a, b, _]| number(a, 0, 32, signed) >> amount(b)));
        }
    }
}

fn products(cases: &mut Vec<Case>) {
    for (scale, bits) in [("", 0), (".shr7", 7), (".shr15", 15)] {
        let text = format!("vmad.s32.s32.s32.sat{scale} $0, $1.h0, $2.h1, $3;");
        cases.push(case(text, move |[a, b, c]| {
            let product = number(a, 0, 16, true) * number(b, 16, 16, true);
            clamped((product + number(c, 0, 32, true)) >> bits, 32, true)
        }));
        let text = format!("vmad.u32.u32.u32{scale} $0, $1.b1, $2.h0, $3;");
        cases.push(case(text, move |[a, b, c]| {
            let product = number(a, 8, 8, false) * number(b, 0, 16, false);
            // The PTX ISA does not say that the third source has a sign when the sum is shifted.
            (product + number(c, 0, 32, bits != 0)) >> bits
        }));
    }
    let text = "vmad.s32.s32.s32 $0, $1.h0, -$2.h0, $3;".to_owned();
    cases.push(case(text, |[a, b, c]| {
        number(c, 0, 32, true) - number(a, 0, 16, true) * number(b, 0, 16, true)
    }));
    let text = "vmad.s32.s32.s32 $0, $1.h0, $2.h0, -$3;".to_owned();
    cases.push(case(text, |[a, b, c]| {
        number(a, 0, 16, true) * number(b, 0, 16, true) - number(c, 0, 32, true)
    }));
    let text = "vmad.u32.u32.u32.po $0, $1.h0, $2.h0, $3;".to_owned();
    cases.push(case(text, |[a, b, c]| {
        number(a, 0, 16, false) * number(b, 0, 16, false) + number(c, 0, 32, false) + 1
    }));
}

/// Two halves or four bytes of the sources.
fn pairs(cases: &mut Vec<Case>) {
    let average: Values = |a, b| (a + b + i64::from(a + b >= 0)) >> 1;
    for (count, width) in [(2u32, 16), (4, 8)] {
        for (name, act) in ACTS.into_iter().chain([("vavrg", average)]) {
            for (from, signed) in TYPES {
                for (limits, saturates) in [("", false), (".sat", true)] {
                    let text =
                        format!("{name}{count}.{from}.{from}.{from}{limits} $0, $1, $2, $3;");
                    cases.push(case(text, move |[a, b, _]| {
                        (0..count).fold(0, |all, index| {
                            let at = index * width;
                            let value =
                                act(number(a, at, width, signed), number(b, at, width, signed));
                            let value =
                                if saturates { clamped(value, width, signed) } else { value };
                            all | (value & ((1 << width) - 1)) << at
                        })
                    }));
                }
                let text = format!("{name}{count}.{from}.{from}.{from}.add $0, $1, $2, $3;");
                cases.push(case(text, move |[a, b, c]| {
                    (0..count).fold(c as i64, |sum, index| {
                        let at = index * width;
                        sum + act(number(a, at, width, signed), number(b, at, width, signed))
                    })
                }));
            }
        }
        for (name, compare) in COMPARISONS {
            let text = format!("vset{count}.s32.u32.{name} $0, $1, $2, $3;");
            cases.push(case(text, move |[a, b, _]| {
                (0..count).fold(0, |all, index| {
                    let at = index * width;
                    let holds = compare(number(a, at, width, true), number(b, at, width, false));
                    all | holds << at
                })
            }));
        }
    }
}

/// Any parts of both sources, and only some of the result.
fn selections(cases: &mut Vec<Case>) {
    let text = "vadd2.u32.u32.u32 $0.h1, $1.h03, $2.h21, $3;".to_owned();
    cases.push(case(text, |[a, b, c]| {
        let sum = number(a, 0, 16, false) + number(b, 0, 16, false);
        (c as i64 & 0xffff) | (sum & 0xffff) << 16
    }));
    let text = "vmax4.s32.s32.u32.add $0.b20, $1.b7410, $2.b3256, $3;".to_owned();
    cases.push(case(text, |[a, b, c]| {
        // Byte 0 of the result: byte 0 of the first, byte 6 (2 of the second); byte 2: bytes 4 and 2.
        let first = number(a, 0, 8, true).max(number(b, 16, 8, false));
        let third = number(b, 0, 8, true).max(number(a, 16, 8, false));
        c as i64 + first + third
    }));
}

/// Memory that is taken from the stack, and given back.
fn stack(cases: &mut Vec<Case>) {
    let text = "stacksave.u64 %d4; alloca.u64 %d5, 16; alloca.u64 %d6, 16, 32; \
        st.local.u32 [%d5], $1; st.local.u32 [%d6], $2; st.local.u32 [%d5+12], $3; \
        ld.local.u32 %r4, [%d5]; ld.local.u32 %r5, [%d6]; ld.local.u32 %r6, [%d5+12]; \
        stackrestore.u64 %d4; xor.b32 %r4, %r4, %r5; sub.u32 $0, %r4, %r6;";
    cases.push(case(text.to_owned(), |[a, b, c]| {
        i64::from(((a ^ b) as u32).wrapping_sub(c as u32))
    }));
}
