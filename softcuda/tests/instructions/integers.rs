//! Integer arithmetic, logic, shifts and comparisons.

use super::table::{Case, Row, rows16, rows32, rows64};

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
    carries(&mut cases);
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
