//! Bit fields, parts of words and what is made of them.

use super::integers::{Int, register};
use super::table::{Case, EDGES32, EDGES64, Random, Row, cross, rows32, rows64};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    fields(&mut cases);
    words(&mut cases);
    dots(&mut cases);
    low_bits(&mut cases);
    searches(&mut cases);
    hints(&mut cases);
    pairs(&mut cases);
    halves(&mut cases);
    cases
}

/// Rows whose second and third number are mostly positions and lengths inside of a word.
fn field_rows(values: &[u64]) -> Vec<Row> {
    let mut random = Random::new(99);
    let mut rows = Vec::new();
    for &value in values {
        for (position, length) in [
            (0, 0),
            (0, 8),
            (4, 8),
            (24, 16),
            (31, 1),
            (32, 4),
            (60, 8),
            (63, 1),
            (0, 32),
            (0, 64),
            (255, 255),
            (5, 255),
            (64, 1),
            (8, 0),
        ] {
            rows.push([value, position, length]);
        }
    }
    rows.extend((0..80).map(|_| {
        let bits = random.next();
        [random.next(), bits & 63, bits >> 8 & 63]
    }));
    rows
}

fn fields(cases: &mut Vec<Case>) {
    for ty in &Int::ALL[2..] {
        let (ty, name) = (*ty, ty.name());
        let edges = if ty.width == 32 { EDGES32.map(u64::from).to_vec() } else { EDGES64.to_vec() };
        let types = [ty.register(), ty.register(), "b32", "b32"];
        // As the PTX ISA describes it, bit by bit.
        let text = format!("bfe.{name} $0, $1, $2, $3;");
        cases.push(Case::new(text, types, &field_rows(&edges), move |[a, b, c]| {
            let (position, length) = ((b & 0xff) as u32, (c & 0xff) as u32);
            let bit = |at: u32| a >> at & 1;
            let most = ty.width - 1;
            let sign =
                if !ty.signed || length == 0 { 0 } else { bit((position + length - 1).min(most)) };
            (0..ty.width)
                .map(|i| {
                    let inside = i < length && position + i <= most;
                    (if inside { bit(position + i) } else { sign }) << i
                })
                .sum()
        }));
    }
    for width in [32u32, 64] {
        let register = register(width);
        let types = [register, register, "b32", "b32"];
        let edges = if width == 32 { EDGES32.map(u64::from).to_vec() } else { EDGES64.to_vec() };
        let other = if width == 32 { "%r4" } else { "%d4" };
        let pattern: u64 = if width == 32 { 0x5a5a_3c3c } else { 0x0ff0_5a5a_3c3c_a5a5 };
        let text =
            format!("mov.b{width} {other}, {pattern:#x}; bfi.b{width} $0, $1, {other}, $2, $3;");
        cases.push(Case::new(text, types, &field_rows(&edges), move |[a, b, c]| {
            let (position, length) = ((b & 0xff) as u32, (c & 0xff) as u32);
            (0..width)
                .map(|i| {
                    let inside = i >= position && i - position < length;
                    (if inside { a >> (i - position) } else { pattern >> i } & 1) << i
                })
                .sum()
        }));
    }
}

fn words(cases: &mut Vec<Case>) {
    let types = ["b32"; 4];
    let rows = rows32();
    let mut add = |text: String, rows: &[Row], host: Box<dyn Fn(u32, u32, u32) -> u32>| {
        cases.push(Case::new(text, types, rows, move |[a, b, c]| {
            u64::from(host(a as u32, b as u32, c as u32))
        }));
    };
    for table in [0x80u32, 0xfe, 0x96, 0xe8, 0x1b, 0xca, 0x01] {
        add(
            format!("lop3.b32 $0, $1, $2, $3, {table:#x};"),
            &rows,
            Box::new(move |a, b, c| {
                (0..32)
                    .map(|i| {
                        let row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1;
                        (table >> row & 1) << i
                    })
                    .sum()
            }),
        );
    }
    for (join, table) in [("or", 0x80u32), ("and", 0xfe), ("and", 0x96), ("or", 0x02)] {
        let text = format!("lop3.{join}.b32 %r4|$0, $1, $2, $1, {table:#x}, $3;");
        let types = ["pred", "b32", "b32", "pred"];
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| {
            let any = (0..32).any(|i| {
                let row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | a >> i & 1;
                table >> row & 1 != 0
            });
            let other = c as u32 != 0;
            u64::from(if join == "or" { any || other } else { any && other })
        }));
    }
    let mut add = |text: String, rows: &[Row], host: Box<dyn Fn(u32, u32, u32) -> u32>| {
        cases.push(Case::new(text, types, rows, move |[a, b, c]| {
            u64::from(host(a as u32, b as u32, c as u32))
        }));
    };
    let joined = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    let amounts = cross(&[0, 1, 5, 31, 32, 33, 63, 0xffff_ffff], 60, {
        let mut random = Random::new(7);
        move || random.next() >> 32
    });
    add(
        "shf.l.wrap.b32 $0, $1, $2, $3;".into(),
        &amounts,
        Box::new(move |a, b, c| (joined(a, b) << (c & 31) >> 32) as u32),
    );
    add(
        "shf.l.clamp.b32 $0, $1, $2, $3;".into(),
        &amounts,
        Box::new(move |a, b, c| (joined(a, b) << c.min(32) >> 32) as u32),
    );
    add(
        "shf.r.wrap.b32 $0, $1, $2, $3;".into(),
        &amounts,
        Box::new(move |a, b, c| (joined(a, b) >> (c & 31)) as u32),
    );
    add(
        "shf.r.clamp.b32 $0, $1, $2, $3;".into(),
        &amounts,
        Box::new(move |a, b, c| (joined(a, b) >> c.min(32)) as u32),
    );
    // The byte that each mode picks for each place, from the eight bytes of both words.
    let select = move |a: u32, b: u32, control: [u32; 4]| {
        let bytes = joined(a, b).to_le_bytes();
        u32::from_le_bytes(control.map(|nibble| {
            let byte = bytes[nibble as usize & 7];
            if nibble & 8 == 0 {
                byte
            } else if byte & 0x80 == 0 {
                0
            } else {
                0xff
            }
        }))
    };
    add(
        "prmt.b32 $0, $1, $2, $3;".into(),
        &rows,
        Box::new(move |a, b, c| select(a, b, [c, c >> 4, c >> 8, c >> 12].map(|n| n & 15))),
    );
    type Mode = (&'static str, fn(u32) -> [u32; 4]);
    let modes: [Mode; 6] = [
        ("f4e", |c| [c, c + 1, c + 2, c + 3]),
        ("b4e", |c| [c, (c + 7) % 8, (c + 6) % 8, (c + 5) % 8]),
        ("rc8", |c| [c; 4]),
        ("ecl", |c| [0, 1, 2, 3].map(|place: u32| place.max(c))),
        ("ecr", |c| [0, 1, 2, 3].map(|place: u32| place.min(c))),
        ("rc16", |c| [c % 2 * 2, c % 2 * 2 + 1, c % 2 * 2, c % 2 * 2 + 1]),
    ];
    for (mode, places) in modes {
        add(
            format!("prmt.b32.{mode} $0, $1, $2, $3;"),
            &rows,
            Box::new(move |a, b, c| select(a, b, places(c & 3))),
        );
    }
    add(
        "mov.b32 {%h4, %h5}, $1; mov.b32 $0, {%h5, %h4};".into(),
        &rows,
        Box::new(|a, _, _| a.rotate_left(16)),
    );
    add(
        "mov.b32 $0, $1; @!%p1 mov.b32 $0, $2;"
            .replace("%p1", "%p4")
            .replace("mov.b32 $0, $1;", "setp.ge.u32 %p4, $1, $2; mov.b32 $0, $1;"),
        &rows,
        Box::new(|a, b, _| a.max(b)),
    );
}

/// Sums of products of parts of words.
fn dots(cases: &mut Vec<Case>) {
    let parts = |word: u64, width: u32, signed: bool, count: u32| {
        let part = Int { signed, width };
        (0..count).map(move |i| part.value(word as u32 as u64 >> (width * i)))
    };
    for (a_name, a_signed) in [("u32", false), ("s32", true)] {
        for (b_name, b_signed) in [("u32", false), ("s32", true)] {
            for (name, width, at) in [("dp4a", 8, 0), ("dp2a.lo", 16, 0), ("dp2a.hi", 16, 16)] {
                let text = format!("{name}.{a_name}.{b_name} $0, $1, $2, $3;");
                cases.push(Case::new(text, ["b32"; 4], &rows32(), move |[a, b, c]| {
                    let a = parts(a, width, a_signed, 32 / width);
                    let b = parts(b as u32 as u64 >> at, 8, b_signed, 32 / width);
                    let sum: i128 = a.zip(b).map(|(a, b)| a * b).sum();
                    (sum + i128::from(c)) as u64 & 0xffff_ffff
                }));
            }
        }
    }
}

/// Masks of bits, and the low bits of a word.
fn low_bits(cases: &mut Vec<Case>) {
    let positions = cross(&[0, 1, 5, 15, 16, 31, 32, 33, 63, 64, 0xffff_ffff], 60, {
        let mut random = Random::new(17);
        move || random.next() & 63
    });
    let values = cross(&EDGES32.map(u64::from), 60, {
        let mut random = Random::new(18);
        move || random.next() >> (32 + (random.next() & 31))
    });
    for (mode, clamps) in [("clamp", true), ("wrap", false)] {
        let number = move |n: u64| if clamps { n.min(32) } else { n % 32 };
        let text = format!("bmsk.{mode}.b32 $0, $1, $2;");
        cases.push(Case::new(text, ["b32"; 4], &positions, move |[a, b, _]| {
            let (start, count) = (number(a), number(b));
            (0..32u64).filter(|i| *i >= start && *i < start + count).map(|i| 1 << i).sum()
        }));
        for (name, signed) in [("u32", false), ("s32", true)] {
            let text = format!("szext.{mode}.{name} $0, $1, $2;");
            cases.push(Case::new(text, ["b32"; 4], &values, move |[a, b, _]| {
                let count = number(b) as u32;
                let word = Int { signed: false, width: 32 };
                word.bits(if count == 0 { 0 } else { Int { signed, width: count }.value(a) })
            }));
        }
    }
}

/// Places of ones, and spaces of addresses.
fn searches(cases: &mut Vec<Case>) {
    let mut random = Random::new(19);
    let mut rows: Vec<Row> = Vec::new();
    for mask in [0, 1, 0x8000_0000, 0xffff_ffff, 0x0f0f_3300, 0x8000_0001, random.next() >> 32] {
        for base in [0, 1, 8, 16, 30, 31] {
            for offset in [0i32, 1, -1, 2, -2, 5, -5, 16, -16, 32, -32, 33, i32::MAX] {
                rows.push([mask, base, u64::from(offset as u32)]);
            }
        }
    }
    cases.push(Case::new("fns.b32 $0, $1, $2, $3;", ["b32"; 4], &rows, |[mask, base, offset]| {
        let set = |at: &u64| mask >> at & 1 != 0;
        let number = (offset as i32).unsigned_abs() as usize;
        let found = match offset as i32 {
            0 => Some(base).filter(set),
            1.. => (base..32).filter(set).nth(number - 1),
            _ => (0..=base).rev().filter(set).nth(number - 1),
        };
        found.unwrap_or(0xffff_ffff)
    }));
    for (space, inside) in [("global", 1), ("shared", 0), ("local", 0)] {
        let text = format!("isspacep.{space} $0, %a3;");
        cases.push(Case::new(text, ["pred", "b32", "b32", "b32"], &rows32(), move |_| inside));
    }
}

/// Loads with a hint on caching.
fn hints(cases: &mut Vec<Case>) {
    for policy in [
        "createpolicy.fractional.L2::evict_last.b64 %d4, 0.5;",
        "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %d4;",
        "createpolicy.cvt.L2.b64 %d4, 0x10f0000000000000;",
    ] {
        let text = format!("{policy} ld.global.L1::evict_last.L2::cache_hint.b32 $0, [%a3], %d4;");
        cases.push(Case::new(text, ["b32"; 4], &rows32(), |[a, ..]| a & 0xffff_ffff));
    }
}

/// Two words joined to one, and taken apart.
fn pairs(cases: &mut Vec<Case>) {
    let text = "mov.b64 {%r1, %r2}, $1; mov.b64 $0, {%r2, %r1};";
    cases.push(Case::new(text, ["b64"; 4], &rows64(), |[a, ..]| a.rotate_left(32)));
    let text = "mov.b64 {%h1, %h2, %h3, %h4}, $1; mov.b64 $0, {%h4, %h3, %h2, %h1};";
    cases.push(Case::new(text, ["b64"; 4], &rows64(), |[a, ..]| {
        a >> 48 | (a >> 16) & 0xffff_0000 | (a << 16) & 0xffff_0000_0000 | a << 48
    }));
}

/// Operations on two integers of 16 bits in one register.
fn halves(cases: &mut Vec<Case>) {
    for (name, signed) in [("s16x2", true), ("u16x2", false)] {
        let half = Int { signed, width: 16 };
        type Operation = fn(i128, i128) -> i128;
        let relu: [(&str, Operation); 2] =
            [("min.relu", |a, b| a.min(b).max(0)), ("max.relu", |a, b| a.max(b).max(0))];
        let all: [(&str, Operation); 3] =
            [("add", |a, b| a + b), ("min", |a, b| a.min(b)), ("max", |a, b| a.max(b))];
        for (operation, host) in all.into_iter().chain(relu.into_iter().filter(|_| signed)) {
            let text = format!("{operation}.{name} $0, $1, $2;");
            cases.push(Case::new(text, ["b32"; 4], &rows32(), move |[a, b, _]| {
                let part = |at: u32| half.bits(host(half.value(a >> at), half.value(b >> at)));
                part(0) | part(16) << 16
            }));
        }
    }
    let word = Int { signed: true, width: 32 };
    cases.push(Case::new("min.relu.s32 $0, $1, $2;", ["b32"; 4], &rows32(), move |[a, b, _]| {
        word.bits(word.value(a).min(word.value(b)).max(0))
    }));
    cases.push(Case::new("max.relu.s32 $0, $1, $2;", ["b32"; 4], &rows32(), move |[a, b, _]| {
        word.bits(word.value(a).max(word.value(b)).max(0))
    }));
}
