//! Integer arithmetic, logic, shifts, bit fields and comparisons.

use super::table::{Case, EDGES32, EDGES64, Random, Row, cross, rows16, rows32, rows64};

/// An integer type.
#[derive(Clone, Copy)]
pub(crate) struct Int {
    pub(crate) signed: bool,
    pub(crate) width: u32,
}

impl Int {
    pub(crate) const ALL: [Int; 6] = [
        Int { signed: false, width: 16 },
        Int { signed: true, width: 16 },
        Int { signed: false, width: 32 },
        Int { signed: true, width: 32 },
        Int { signed: false, width: 64 },
        Int { signed: true, width: 64 },
    ];

    pub(crate) fn name(self) -> String {
        format!("{}{}", if self.signed { 's' } else { 'u' }, self.width)
    }

    pub(crate) fn register(self) -> &'static str {
        register(self.width)
    }

    fn wide(self) -> Int {
        Int { width: 2 * self.width, ..self }
    }

    /// The number that bits stand for.
    pub(crate) fn value(self, bits: u64) -> i128 {
        let shift = 64 - self.width;
        if self.signed {
            i128::from(((bits << shift) as i64) >> shift)
        } else {
            i128::from(bits << shift >> shift)
        }
    }

    pub(crate) fn bits(self, value: i128) -> u64 {
        let shift = 64 - self.width;
        (value as u64) << shift >> shift
    }

    pub(crate) fn least(self) -> i128 {
        if self.signed { -(1 << (self.width - 1)) } else { 0 }
    }

    pub(crate) fn most(self) -> i128 {
        (1 << (self.width - u32::from(self.signed))) - 1
    }

    fn rows(self) -> Vec<Row> {
        match self.width {
            16 => rows16(),
            32 => rows32(),
            _ => rows64(),
        }
    }

    /// The whole product, which for 64 bits does not fit a signed number of 128 bits.
    fn high(self, a: u64, b: u64) -> i128 {
        let (a, b) = (self.value(a), self.value(b));
        if self.signed {
            (a * b) >> self.width
        } else {
            ((a as u128 * b as u128) >> self.width) as i128
        }
    }
}

pub(crate) fn register(width: u32) -> &'static str {
    match width {
        16 => "b16",
        32 => "b32",
        _ => "b64",
    }
}

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for ty in Int::ALL {
        arithmetic(ty, &mut cases);
        comparisons(ty, &mut cases);
    }
    for width in [16, 32, 64] {
        logic(width, &mut cases);
    }
    counts(&mut cases);
    fields(&mut cases);
    words(&mut cases);
    carries(&mut cases);
    pairs(&mut cases);
    dots(&mut cases);
    low_bits(&mut cases);
    cases
}

fn arithmetic(ty: Int, cases: &mut Vec<Case>) {
    let (name, rows) = (ty.name(), ty.rows());
    let types = [ty.register(); 4];
    let mut add = |text: String, host: Box<dyn Fn(u64, u64, u64) -> i128>| {
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| ty.bits(host(a, b, c))));
    };
    let v = move |bits| ty.value(bits);
    let low = move |a, b| v(a).wrapping_mul(v(b));
    add(format!("add.{name} $0, $1, $2;"), Box::new(move |a, b, _| v(a) + v(b)));
    add(format!("sub.{name} $0, $1, $2;"), Box::new(move |a, b, _| v(a) - v(b)));
    add(format!("mul.lo.{name} $0, $1, $2;"), Box::new(move |a, b, _| low(a, b)));
    add(format!("mul.hi.{name} $0, $1, $2;"), Box::new(move |a, b, _| ty.high(a, b)));
    add(
        format!("mad.lo.{name} $0, $1, $2, $3;"),
        Box::new(move |a, b, c| low(a, b).wrapping_add(v(c))),
    );
    add(format!("mad.hi.{name} $0, $1, $2, $3;"), Box::new(move |a, b, c| ty.high(a, b) + v(c)));
    add(format!("min.{name} $0, $1, $2;"), Box::new(move |a, b, _| v(a).min(v(b))));
    add(format!("max.{name} $0, $1, $2;"), Box::new(move |a, b, _| v(a).max(v(b))));
    add(format!("sad.{name} $0, $1, $2, $3;"), Box::new(move |a, b, c| v(c) + (v(a) - v(b)).abs()));
    // What a division by zero gives is left open; `or` avoids it. Most negative by minus one is too.
    add(
        format!(
            "or.b{} %{}4, $2, 1; div.{name} $0, $1, %{}4;",
            ty.width,
            types[0].letter(),
            types[0].letter()
        ),
        Box::new(move |a, b, _| v(a) / v(b | 1)),
    );
    add(
        format!(
            "or.b{} %{}4, $2, 1; rem.{name} $0, $1, %{}4;",
            ty.width,
            types[0].letter(),
            types[0].letter()
        ),
        Box::new(move |a, b, _| v(a) % v(b | 1)),
    );
    if ty.signed {
        add(format!("neg.{name} $0, $1;"), Box::new(move |a, _, _| -v(a)));
        add(format!("abs.{name} $0, $1;"), Box::new(move |a, _, _| v(a).abs()));
    }
    if ty.signed && ty.width == 32 {
        let clamp = move |x: i128| x.clamp(ty.least(), ty.most());
        add("add.sat.s32 $0, $1, $2;".into(), Box::new(move |a, b, _| clamp(v(a) + v(b))));
        add("sub.sat.s32 $0, $1, $2;".into(), Box::new(move |a, b, _| clamp(v(a) - v(b))));
        add(
            "mad.hi.sat.s32 $0, $1, $2, $3;".into(),
            Box::new(move |a, b, c| clamp(ty.high(a, b) + v(c))),
        );
    }
    if ty.width == 32 {
        let part = Int { width: 24, ..ty };
        let product = move |a, b| part.value(a) * part.value(b);
        add(format!("mul24.lo.{name} $0, $1, $2;"), Box::new(move |a, b, _| product(a, b)));
        add(
            format!("mad24.hi.{name} $0, $1, $2, $3;"),
            Box::new(move |a, b, c| (product(a, b) >> 16) + v(c)),
        );
        if ty.signed {
            add(
                "mad24.hi.sat.s32 $0, $1, $2, $3;".into(),
                Box::new(move |a, b, c| {
                    ((product(a, b) >> 16) + v(c)).clamp(ty.least(), ty.most())
                }),
            );
        }
        add(format!("mul24.hi.{name} $0, $1, $2;"), Box::new(move |a, b, _| product(a, b) >> 16));
        add(
            format!("mad24.lo.{name} $0, $1, $2, $3;"),
            Box::new(move |a, b, c| product(a, b) + v(c)),
        );
    }
    if ty.width < 64 {
        let wide = ty.wide();
        let types = [wide.register(), ty.register(), ty.register(), wide.register()];
        let text = format!("mul.wide.{name} $0, $1, $2;");
        cases.push(Case::new(text, types, &ty.rows(), move |[a, b, _]| wide.bits(v(a) * v(b))));
        let text = format!("mad.wide.{name} $0, $1, $2, $3;");
        cases.push(Case::new(text, types, &ty.rows(), move |[a, b, c]| {
            wide.bits(v(a) * v(b) + wide.value(c))
        }));
    }
    let shift = [ty.register(), ty.register(), "b32", "b32"];
    let text = format!("shr.{name} $0, $1, $2;");
    cases.push(Case::new(text, shift, &ty.rows(), move |[a, b, _]| {
        ty.bits(v(a) >> (b as u32).min(64))
    }));
}

trait Letter {
    fn letter(&self) -> char;
}

impl Letter for &str {
    fn letter(&self) -> char {
        match *self {
            "b16" => 'h',
            "b32" => 'r',
            _ => 'd',
        }
    }
}

type Comparison = (&'static str, fn(i128, i128) -> bool);
const COMPARISONS: [Comparison; 6] = [
    ("eq", |a, b| a == b),
    ("ne", |a, b| a != b),
    ("lt", |a, b| a < b),
    ("le", |a, b| a <= b),
    ("gt", |a, b| a > b),
    ("ge", |a, b| a >= b),
];
const UNSIGNED_NAMES: [(&str, usize); 4] = [("lo", 2), ("ls", 3), ("hi", 4), ("hs", 5)];

fn comparisons(ty: Int, cases: &mut Vec<Case>) {
    let (name, register, rows) = (ty.name(), ty.register(), ty.rows());
    let mut named: Vec<Comparison> = COMPARISONS.into();
    if !ty.signed {
        named.extend(UNSIGNED_NAMES.map(|(name, index)| (name, COMPARISONS[index].1)));
    }
    for (comparison, holds) in named {
        let text = format!("setp.{comparison}.{name} $0, $1, $2;");
        let types = ["pred", register, register, register];
        cases.push(Case::new(text, types, &rows, move |[a, b, _]| {
            u64::from(holds(ty.value(a), ty.value(b)))
        }));
        let text = format!("set.{comparison}.u32.{name} $0, $1, $2;");
        let types = ["b32", register, register, register];
        cases.push(Case::new(text, types, &rows, move |[a, b, _]| {
            if holds(ty.value(a), ty.value(b)) { 0xffff_ffff } else { 0 }
        }));
    }
    let text = format!("setp.lt.and.{name} $0|%p4, $1, $2, $3;");
    cases.push(Case::new(text, ["pred", register, register, "pred"], &rows, move |[a, b, c]| {
        u64::from(ty.value(a) < ty.value(b) && c as u32 != 0)
    }));
    let text = format!("setp.lt.xor.{name} %p4|$0, $1, $2, !$3;");
    cases.push(Case::new(text, ["pred", register, register, "pred"], &rows, move |[a, b, c]| {
        u64::from((ty.value(a) >= ty.value(b)) ^ (c as u32 == 0))
    }));
    let text = format!("selp.{name} $0, $1, $2, $3;");
    cases.push(Case::new(text, [register, register, register, "pred"], &rows, move |[a, b, c]| {
        ty.bits(ty.value(if c as u32 != 0 { a } else { b }))
    }));
    let text = format!("slct.{name}.s32 $0, $1, $2, $3;");
    cases.push(Case::new(text, [register, register, register, "b32"], &rows, move |[a, b, c]| {
        ty.bits(ty.value(if c as i32 >= 0 { a } else { b }))
    }));
}

fn logic(width: u32, cases: &mut Vec<Case>) {
    let ty = Int { signed: false, width };
    let (rows, types) = (ty.rows(), [ty.register(); 4]);
    type Operation = (&'static str, fn(u64, u64) -> u64);
    let operations: [Operation; 5] = [
        ("and.bW $0, $1, $2;", |a, b| a & b),
        ("or.bW $0, $1, $2;", |a, b| a | b),
        ("xor.bW $0, $1, $2;", |a, b| a ^ b),
        ("not.bW $0, $1;", |a, _| !a),
        ("mov.bW $0, $2;", |_, b| b),
    ];
    for (text, host) in operations {
        let text = text.replace('W', &width.to_string());
        cases.push(Case::new(text, types, &rows, move |[a, b, _]| ty.bits(i128::from(host(a, b)))));
    }
    let cnot = format!("cnot.b{width} $0, $1;");
    cases.push(Case::new(cnot, types, &rows, move |[a, ..]| u64::from(ty.value(a) == 0)));
    let shift = [ty.register(), ty.register(), "b32", "b32"];
    let shl = format!("shl.b{width} $0, $1, $2;");
    cases.push(Case::new(shl, shift, &rows, move |[a, b, _]| {
        if b as u32 >= width { 0 } else { ty.bits(i128::from(a) << (b as u32)) }
    }));
    let shr = format!("shr.b{width} $0, $1, $2;");
    cases.push(Case::new(shr, shift, &rows, move |[a, b, _]| {
        ty.bits(ty.value(a) >> (b as u32).min(64))
    }));
}

fn counts(cases: &mut Vec<Case>) {
    for width in [32, 64] {
        let ty = Int { signed: false, width };
        let (rows, to_word) = (ty.rows(), ["b32", ty.register(), ty.register(), ty.register()]);
        let cut = move |a: u64| ty.bits(i128::from(a));
        let zeros = move |a: u64| u64::from(cut(a).leading_zeros()) - u64::from(64 - width);
        cases.push(Case::new(format!("clz.b{width} $0, $1;"), to_word, &rows, move |[a, ..]| {
            zeros(a)
        }));
        cases.push(Case::new(format!("popc.b{width} $0, $1;"), to_word, &rows, move |[a, ..]| {
            u64::from(cut(a).count_ones())
        }));
        let same = [ty.register(); 4];
        cases.push(Case::new(format!("brev.b{width} $0, $1;"), same, &rows, move |[a, ..]| {
            a.reverse_bits() >> (64 - width)
        }));
        for signed in [false, true] {
            let ty = Int { signed, width };
            // The highest bit that differs from the sign.
            let found = move |a: u64| {
                let value = ty.value(a);
                let magnitude = if value < 0 { !value } else { value };
                (0..width).rev().find(|bit| magnitude >> bit & 1 != 0)
            };
            let name = ty.name();
            let text = format!("bfind.{name} $0, $1;");
            cases.push(Case::new(text, to_word, &rows, move |[a, ..]| {
                found(a).map_or(0xffff_ffff, u64::from)
            }));
            let text = format!("bfind.shiftamt.{name} $0, $1;");
            cases.push(Case::new(text, to_word, &rows, move |[a, ..]| {
                found(a).map_or(0xffff_ffff, |bit| u64::from(width - 1 - bit))
            }));
        }
    }
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

/// Two words joined to one, and taken apart.
fn pairs(cases: &mut Vec<Case>) {
    let text = "mov.b64 {%r1, %r2}, $1; mov.b64 $0, {%r2, %r1};";
    cases.push(Case::new(text, ["b64"; 4], &rows64(), |[a, ..]| a.rotate_left(32)));
    let text = "mov.b64 {%h1, %h2, %h3, %h4}, $1; mov.b64 $0, {%h4, %h3, %h2, %h1};";
    cases.push(Case::new(text, ["b64"; 4], &rows64(), |[a, ..]| {
        a >> 48 | (a >> 16) & 0xffff_0000 | (a << 16) & 0xffff_0000_0000 | a << 48
    }));
}

fn carries(cases: &mut Vec<Case>) {
    for width in [32u32, 64] {
        let ty = Int { signed: false, width };
        let types = [ty.register(); 4];
        let r = types[0].letter();
        let rows = ty.rows();
        let n = ty.name();
        // Upper words of sums and differences of two words; lower words are $1, $2 and $2, $3.
        let text = format!("add.cc.{n} %{r}4, $1, $2; addc.{n} $0, $2, $3;");
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| {
            let low = ty.value(a) + ty.value(b);
            ty.bits(ty.value(b) + ty.value(c) + (low >> width))
        }));
        let text = format!("sub.cc.{n} %{r}4, $1, $2; subc.{n} $0, $2, $3;");
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| {
            let borrow = i128::from(ty.value(a) < ty.value(b));
            ty.bits(ty.value(b) - ty.value(c) - borrow)
        }));
        let text =
            format!("add.cc.{n} %{r}4, $1, $2; addc.cc.{n} %{r}4, $2, $3; addc.{n} $0, $1, 0;");
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| {
            let first = (ty.value(a) + ty.value(b)) >> width;
            let second = (ty.value(b) + ty.value(c) + first) >> width;
            ty.bits(ty.value(a) + second)
        }));
        let text =
            format!("sub.cc.{n} %{r}4, $1, $2; subc.cc.{n} %{r}4, $2, $3; subc.{n} $0, $1, 1;");
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| {
            let first = i128::from(ty.value(a) < ty.value(b));
            let second = i128::from(ty.value(b) < ty.value(c) + first);
            ty.bits(ty.value(a) - 1 - second)
        }));
        let text = format!("mad.lo.cc.{n} %{r}4, $1, $2, $3; madc.hi.{n} $0, $1, $2, 7;");
        cases.push(Case::new(text, types, &rows, move |[a, b, c]| {
            let product = ty.value(a) as u128 * ty.value(b) as u128;
            let low = (product & ty.most() as u128) + ty.value(c) as u128;
            ty.bits((product >> width) as i128 + (low >> width) as i128 + 7)
        }));
    }
}
