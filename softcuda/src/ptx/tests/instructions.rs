//! Single instructions against the same computation on the host, over edge values.

use super::{Device, kernel, load};

/// Runs one instruction over rows of up to three 64-bit inputs; each result is stored with
/// the width of its type. `types` are those of the result and the three sources.
fn results(instruction: &str, types: [&str; 4], rows: &[[u64; 3]]) -> Vec<u64> {
    let letter = |ty: &str| match &ty[1..] {
        "16" | "8" => "h",
        "32" => "r",
        "64" => "d",
        _ => "p",
    };
    let mut body = String::from(
        ".reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p<9>; .reg .b64 %a<9>;\n\
         .reg .b32 %i; mov.u32 %i, %tid.x; mov.u32 %r8, %ctaid.x; mad.lo.u32 %i, %r8, 32, %i;\n\
         ld.param.u64 %a1, [p0]; mul.wide.u32 %a2, %i, 24; add.s64 %a3, %a1, %a2;\n",
    );
    let mut line = instruction.to_owned();
    for (index, ty) in types.iter().enumerate().rev() {
        let name = format!("%{}{index}", letter(ty));
        line = line.replace(&format!("${index}"), &name);
        if index == 0 {
            continue;
        }
        let from = 8 * (index - 1);
        if letter(ty) == "p" {
            body += &format!("ld.global.u32 %r7, [%a3+{from}]; setp.ne.u32 {name}, %r7, 0;\n");
        } else {
            body += &format!("ld.global.{ty} {name}, [%a3+{from}];\n");
        }
    }
    body += &format!("{line}\nld.param.u64 %a4, [p1]; mad.wide.u32 %a5, %i, 8, %a4;\n");
    if letter(types[0]) == "p" {
        body += "selp.u32 %r0, 1, 0, %p0; st.global.u32 [%a5], %r0; ret;";
    } else {
        body += &format!("st.global.{} [%a5], %{}0; ret;", types[0], letter(types[0]));
    }
    let module = load(&kernel(&body));
    let mut device = Device::default();
    let blocks = rows.len().div_ceil(32);
    let mut flat: Vec<u64> = rows.iter().flatten().copied().collect();
    flat.resize(blocks * 32 * 3, 0);
    let input = device.upload64(&flat);
    let output = device.alloc(blocks * 32 * 8);
    device.launch(&module, &[], "k", (blocks as u32, 32, 0), &[input, output]).unwrap();
    device.download64(output, rows.len())
}

fn check(instruction: &str, types: [&str; 4], rows: &[[u64; 3]], host: impl Fn([u64; 3]) -> u64) {
    for (row, found) in rows.iter().zip(results(instruction, types, rows)) {
        let expected = host(*row);
        assert_eq!(found, expected, "{instruction} of {row:x?}: {found:x} != {expected:x}");
    }
}

const EDGES32: [u32; 12] = [
    0,
    1,
    2,
    31,
    32,
    33,
    0x7fff_ffff,
    0x8000_0000,
    0x8000_0001,
    0xffff_ffff,
    0xffff_fffe,
    0x1234_5678,
];
const EDGES64: [u64; 9] =
    [0, 1, 63, 64, i64::MAX as u64, i64::MIN as u64, u64::MAX, 0xffff_ffff, 0x0123_4567_89ab_cdef];
const FLOATS: [f32; 18] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.999_999,
    f32::MAX,
    f32::MIN_POSITIVE,
    1e-40,
    -1e-45,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    4_294_967_300.0,
    -1e10,
];
const DOUBLES: [f64; 12] = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e300,
    -1e300,
    1e-310,
    f64::INFINITY,
    f64::NEG_INFINITY,
    f64::NAN,
    0.1,
    9_007_199_254_740_993.0,
];

fn rows(a: &[u64], c: &[u64]) -> Vec<[u64; 3]> {
    let mut found = Vec::new();
    for &x in a {
        for (index, &y) in a.iter().enumerate() {
            found.push([x, y, c[index % c.len()]]);
        }
    }
    found
}

fn rows32() -> Vec<[u64; 3]> {
    let edges = EDGES32.map(u64::from);
    rows(&edges, &edges[3..])
}

fn float_rows() -> Vec<[u64; 3]> {
    let edges = FLOATS.map(|x| u64::from(x.to_bits()));
    rows(&edges, &edges[1..])
}

fn double_rows() -> Vec<[u64; 3]> {
    let edges = DOUBLES.map(f64::to_bits);
    rows(&edges, &edges[1..])
}

#[test]
fn integers_of_32_bits() {
    type Case = (&'static str, fn(u32, u32, u32) -> u32);
    let cases: &[Case] = &[
        ("add.s32 $0, $1, $2;", |a, b, _| a.wrapping_add(b)),
        ("sub.u32 $0, $1, $2;", |a, b, _| a.wrapping_sub(b)),
        ("add.sat.s32 $0, $1, $2;", |a, b, _| (a as i32).saturating_add(b as i32) as u32),
        ("sub.sat.s32 $0, $1, $2;", |a, b, _| (a as i32).saturating_sub(b as i32) as u32),
        ("mul.lo.s32 $0, $1, $2;", |a, b, _| a.wrapping_mul(b)),
        ("mul.hi.u32 $0, $1, $2;", |a, b, _| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        ("mul.hi.s32 $0, $1, $2;", |a, b, _| {
            ((i64::from(a as i32) * i64::from(b as i32)) >> 32) as u32
        }),
        ("mad.lo.u32 $0, $1, $2, $3;", |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("div.u32 $0, $1, $2;", |a, b, _| a.checked_div(b).unwrap_or(u32::MAX)),
        ("div.s32 $0, $1, $2;", |a, b, _| {
            if b == 0 { u32::MAX } else { (a as i32).wrapping_div(b as i32) as u32 }
        }),
        (
            "rem.s32 $0, $1, $2;",
            |a, b, _| {
                if b == 0 { a } else { (a as i32).wrapping_rem(b as i32) as u32 }
            },
        ),
        ("min.s32 $0, $1, $2;", |a, b, _| (a as i32).min(b as i32) as u32),
        ("max.u32 $0, $1, $2;", |a, b, _| a.max(b)),
        ("shl.b32 $0, $1, $2;", |a, b, _| if b > 31 { 0 } else { a << b }),
        ("shr.u32 $0, $1, $2;", |a, b, _| if b > 31 { 0 } else { a >> b }),
        ("shr.s32 $0, $1, $2;", |a, b, _| (a as i32 >> b.min(31)) as u32),
        ("xor.b32 $0, $1, $2;", |a, b, _| a ^ b),
        ("not.b32 $0, $1;", |a, _, _| !a),
        ("neg.s32 $0, $1;", |a, _, _| a.wrapping_neg()),
        ("abs.s32 $0, $1;", |a, _, _| (a as i32).wrapping_abs() as u32),
        ("clz.b32 $0, $1;", |a, _, _| a.leading_zeros()),
        ("popc.b32 $0, $1;", |a, _, _| a.count_ones()),
        ("brev.b32 $0, $1;", |a, _, _| a.reverse_bits()),
        ("bfind.u32 $0, $1;", |a, _, _| if a == 0 { u32::MAX } else { a.ilog2() }),
        ("bfe.u32 $0, $1, 4, 8;", |a, _, _| a >> 4 & 0xff),
        ("bfe.s32 $0, $1, 24, 16;", |a, _, _| (a as i32 >> 24) as u32),
        ("bfi.b32 $0, $1, $2, 8, 4;", |a, b, _| b & !0xf00 | (a & 0xf) << 8),
        ("lop3.b32 $0, $1, $2, $3, 0xe8;", |a, b, c| a & b | b & c | a & c),
        ("lop3.b32 $0, $1, $2, $3, 0x96;", |a, b, c| a ^ b ^ c),
        ("prmt.b32 $0, $1, $2, 0x7190;", |a, b, _| {
            let (a, b) = (a.to_le_bytes(), b.to_le_bytes());
            u32::from_le_bytes([a[0], ((a[1] as i8) >> 7) as u8, a[1], b[3]])
        }),
        ("shf.l.wrap.b32 $0, $1, $2, $3;", |a, b, c| {
            ((u64::from(b) << 32 | u64::from(a)) << (c & 31) >> 32) as u32
        }),
        ("shf.r.clamp.b32 $0, $1, $2, $3;", |a, b, c| {
            ((u64::from(b) << 32 | u64::from(a)) >> c.min(32)) as u32
        }),
        ("sad.u32 $0, $1, $2, $3;", |a, b, c| c.wrapping_add(a.abs_diff(b))),
        ("set.lt.u32.s32 $0, $1, $2;", |a, b, _| if (a as i32) < b as i32 { u32::MAX } else { 0 }),
        ("slct.u32.s32 $0, $1, $2, $3;", |a, b, c| if c as i32 >= 0 { a } else { b }),
        ("{ .reg .pred %q; setp.hi.u32 %q, $1, $2; selp.b32 $0, $1, $3, %q; }", |a, b, c| {
            if a > b { a } else { c }
        }),
        ("mov.b32 $0, $1; @!%p1 mov.b32 $0, $2;", |_, b, _| b),
    ];
    for (instruction, host) in cases {
        check(instruction, ["b32"; 4], &rows32(), |[a, b, c]| {
            u64::from(host(a as u32, b as u32, c as u32))
        });
    }
}

#[test]
fn integers_of_64_bits() {
    type Case = (&'static str, fn(u64, u64, u64) -> u64);
    let cases: &[Case] = &[
        ("add.s64 $0, $1, $2;", |a, b, _| a.wrapping_add(b)),
        ("mul.lo.u64 $0, $1, $2;", |a, b, _| a.wrapping_mul(b)),
        ("mul.hi.u64 $0, $1, $2;", |a, b, _| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        ("mul.hi.s64 $0, $1, $2;", |a, b, _| {
            ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64
        }),
        ("rem.u64 $0, $1, $2;", |a, b, _| a.checked_rem(b).unwrap_or(a)),
        ("max.s64 $0, $1, $2;", |a, b, _| (a as i64).max(b as i64) as u64),
        ("mad.lo.s64 $0, $1, $2, $3;", |a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        // 128-bit addition and subtraction, upper halves.
        ("add.cc.u64 %d4, $1, $2; addc.u64 $0, $3, 5;", |a, b, c| {
            c.wrapping_add(5).wrapping_add(u64::from(a.checked_add(b).is_none()))
        }),
        ("sub.cc.u64 %d4, $1, $2; subc.cc.u64 $0, $3, $1;", |a, b, c| {
            c.wrapping_sub(a).wrapping_sub(u64::from(a < b))
        }),
        ("mov.b64 {%r1, %r2}, $1; mov.b64 $0, {%r2, %r1};", |a, _, _| a.rotate_left(32)),
        ("bfe.s64 $0, $1, 60, 8;", |a, _, _| (a as i64 >> 60) as u64),
        ("bfi.b64 $0, $1, $2, 32, 32;", |a, b, _| a << 32 | b & 0xffff_ffff),
        ("cvt.s64.s8 $0, $1;", |a, _, _| a as i8 as u64),
        ("cvt.u32.u64 %r1, $1; cvt.s64.s32 $0, %r1;", |a, _, _| a as i32 as u64),
        ("cvt.sat.s32.s64 %r1, $1; cvt.s64.s32 $0, %r1;", |a, _, _| {
            (a as i64).clamp(i32::MIN.into(), i32::MAX.into()) as u64
        }),
        ("cvt.u16.u64 %h1, $1; cvt.u64.u16 $0, %h1;", |a, _, _| a & 0xffff),
    ];
    for (instruction, host) in cases {
        check(instruction, ["b64"; 4], &rows(&EDGES64, &EDGES64[2..]), |[a, b, c]| host(a, b, c));
    }
    check(
        "shl.b64 $0, $1, $2;",
        ["b64", "b64", "b32", "b32"],
        &rows(&EDGES64, &[0]),
        |[a, b, _]| {
            if b as u32 > 63 { 0 } else { a << b as u32 }
        },
    );
    let wide = ["b64", "b32", "b32", "b64"];
    check("mad.wide.s32 $0, $1, $2, $3;", wide, &rows32(), |[a, b, c]| {
        (i64::from(a as i32) * i64::from(b as i32)).wrapping_add(c as i64) as u64
    });
    check("mul.wide.u32 $0, $1, $2;", wide, &rows32(), |[a, b, _]| a * b);
}

fn canonical(x: f32) -> u64 {
    u64::from(if x.is_nan() { 0x7fff_ffff } else { x.to_bits() })
}

fn canonical64(x: f64) -> u64 {
    if x.is_nan() { 0x7fff_ffff_ffff_ffff } else { x.to_bits() }
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

/// The smaller, with negative zero below positive zero; a number rather than NaN.
fn smaller(a: f32, b: f32) -> f32 {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a.total_cmp(&b).is_le() => a,
        _ => b,
    }
}

#[test]
fn single_precision() {
    type Case = (&'static str, fn(f32, f32, f32) -> f32);
    let cases: &[Case] = &[
        ("add.f32 $0, $1, $2;", |a, b, _| a + b),
        ("sub.rn.f32 $0, $1, $2;", |a, b, _| a - b),
        ("mul.f32 $0, $1, $2;", |a, b, _| a * b),
        ("mul.ftz.f32 $0, $1, $2;", |a, b, _| flush(flush(a) * flush(b))),
        ("add.sat.f32 $0, $1, $2;", |a, b, _| {
            let sum = a + b;
            if sum > 0.0 { sum.min(1.0) } else { 0.0 }
        }),
        ("div.rn.f32 $0, $1, $2;", |a, b, _| a / b),
        ("fma.rn.f32 $0, $1, $2, $3;", |a, b, c| a.mul_add(b, c)),
        ("sqrt.rn.f32 $0, $1;", |a, _, _| a.sqrt()),
        ("rcp.rn.f32 $0, $1;", |a, _, _| 1.0 / a),
        ("min.f32 $0, $1, $2;", |a, b, _| smaller(a, b)),
        ("max.f32 $0, $1, $2;", |a, b, _| -smaller(-a, -b)),
        ("max.NaN.f32 $0, $1, $2;", |a, b, _| {
            if a.is_nan() || b.is_nan() { f32::NAN } else { -smaller(-a, -b) }
        }),
        ("neg.f32 $0, $1;", |a, _, _| -a),
        ("abs.f32 $0, $1;", |a, _, _| a.abs()),
        ("cvt.rni.f32.f32 $0, $1;", |a, _, _| a.round_ties_even()),
        ("cvt.rzi.f32.f32 $0, $1;", |a, _, _| a.trunc()),
        ("cvt.f64.f32 %d1, $1; cvt.rn.f32.f64 $0, %d1;", |a, _, _| a),
        ("setp.gtu.f32 %p1, $1, $2; selp.f32 $0, $1, $3, %p1;", |a, b, c| {
            if a > b || a.is_nan() || b.is_nan() { a } else { c }
        }),
        ("setp.ne.f32 %p1|%p2, $1, $2; selp.f32 $0, $3, $1, %p2;", |a, b, c| {
            if a != b && !a.is_nan() && !b.is_nan() { a } else { c }
        }),
    ];
    for (instruction, host) in cases {
        // `selp` and conversions between equal types move bits, so compare with NaN canonical.
        let found = results(instruction, ["b32"; 4], &float_rows());
        for (row, found) in float_rows().iter().zip(found) {
            let [a, b, c] = row.map(|bits| f32::from_bits(bits as u32));
            let found = canonical(f32::from_bits(found as u32));
            assert_eq!(found, canonical(host(a, b, c)), "{instruction} {a} {b} {c} {found:x}");
        }
    }
    check("add.f32 $0, $1, $2;", ["b32"; 4], &float_rows(), |[a, b, _]| {
        canonical(f32::from_bits(a as u32) + f32::from_bits(b as u32))
    });
}

#[test]
fn double_precision() {
    type Case = (&'static str, fn(f64, f64, f64) -> f64);
    let cases: &[Case] = &[
        ("add.f64 $0, $1, $2;", |a, b, _| a + b),
        ("mul.rn.f64 $0, $1, $2;", |a, b, _| a * b),
        ("div.rn.f64 $0, $1, $2;", |a, b, _| a / b),
        ("fma.rn.f64 $0, $1, $2, $3;", |a, b, c| a.mul_add(b, c)),
        ("sqrt.rn.f64 $0, $1;", |a, _, _| a.sqrt()),
        ("cvt.rmi.f64.f64 $0, $1;", |a, _, _| a.floor()),
    ];
    for (instruction, host) in cases {
        check(instruction, ["b64"; 4], &double_rows(), |row| {
            let [a, b, c] = row.map(f64::from_bits);
            canonical64(host(a, b, c))
        });
    }
}

#[test]
fn conversions_between_floats_and_integers() {
    type Case = (&'static str, fn(f32) -> u64);
    let to_int: &[Case] = &[
        ("cvt.rzi.s32.f32 $0, $1;", |x| u64::from(x as i32 as u32)),
        ("cvt.rzi.u32.f32 $0, $1;", |x| u64::from(x as u32)),
        ("cvt.rni.s32.f32 $0, $1;", |x| u64::from(x.round_ties_even() as i32 as u32)),
        ("cvt.rpi.s32.f32 $0, $1;", |x| u64::from(x.ceil() as i32 as u32)),
        ("cvt.rzi.u8.f32 $0, $1;", |x| u64::from(x as u8)),
        ("cvt.rmi.s16.f32 $0, $1;", |x| u64::from(x.floor() as i16 as u32)),
    ];
    for (instruction, host) in to_int {
        check(instruction, ["b32"; 4], &float_rows(), |[a, _, _]| host(f32::from_bits(a as u32)));
    }
    check("cvt.rzi.s64.f32 $0, $1;", ["b64", "b32", "b32", "b32"], &float_rows(), |[a, _, _]| {
        let x = f32::from_bits(a as u32);
        if x.is_nan() { 1 << 63 } else { x as i64 as u64 }
    });
    check(
        "cvt.rn.f32.s64 $0, $1;",
        ["b32", "b64", "b64", "b64"],
        &rows(&EDGES64, &[0]),
        |[a, ..]| u64::from((a as i64 as f32).to_bits()),
    );
    check(
        "cvt.rz.f32.u64 $0, $1;",
        ["b32", "b64", "b64", "b64"],
        &rows(&EDGES64, &[0]),
        |[a, ..]| {
            let near = a as f32;
            let above = near as u128 > u128::from(a);
            u64::from(if above { near.next_down() } else { near }.to_bits())
        },
    );
    check("cvt.rn.f64.u32 $0, $1;", ["b64", "b32", "b32", "b32"], &rows32(), |[a, ..]| {
        (a as f64).to_bits()
    });
}

#[test]
fn half_precision_rounds_once() {
    use half::{bf16, f16};
    let halves: Vec<u64> =
        [0x0000, 0x8000, 0x3c00, 0xbc00, 0x0001, 0x03ff, 0x7bff, 0x7c00, 0x1234, 0x9abc].into();
    let types = ["b16"; 4];
    check("add.f16 $0, $1, $2;", types, &rows(&halves, &halves), |[a, b, _]| {
        let value = |bits: u64| f16::from_bits(bits as u16).to_f32();
        let sum = f16::from_f32(value(a) + value(b));
        if sum.is_nan() { 0x7fff } else { u64::from(sum.to_bits()) }
    });
    check("mul.bf16 $0, $1, $2;", types, &rows(&halves, &halves), |[a, b, _]| {
        let value = |bits: u64| bf16::from_bits(bits as u16).to_f32();
        let product = bf16::from_f32(value(a) * value(b));
        if product.is_nan() { 0x7fff } else { u64::from(product.to_bits()) }
    });
    let singles: Vec<u64> = [0.1f32, 65519.0, 65520.0, 1e-8, 5.96e-8, 2049.0, -1e9, 1.0 / 3.0]
        .map(|x| u64::from(x.to_bits()))
        .into();
    let narrow = ["b16", "b32", "b32", "b32"];
    check("cvt.rn.f16.f32 $0, $1;", narrow, &rows(&singles, &[0]), |[a, ..]| {
        u64::from(f16::from_f32(f32::from_bits(a as u32)).to_bits())
    });
    check("cvt.rn.bf16.f32 $0, $1;", narrow, &rows(&singles, &[0]), |[a, ..]| {
        u64::from(bf16::from_f32(f32::from_bits(a as u32)).to_bits())
    });
    check("cvt.rn.f16x2.f32 $0, $1, $2;", ["b32"; 4], &rows(&singles, &[0]), |[a, b, _]| {
        let half = |x: u64| u64::from(f16::from_f32(f32::from_bits(x as u32)).to_bits());
        half(a) << 16 | half(b)
    });
    // A tie for f16 that rounding to single precision first would get wrong.
    let found = results("fma.rn.f16 $0, $1, $2, $3;", types, &[[0x3c01, 0x3c01, 0x0001]]);
    let exact = (1.0 + 1.0 / 1024.0f64).powi(2) + 2f64.powi(-24);
    assert_eq!(found, [u64::from(f16::from_f64(exact).to_bits())]);
}

#[test]
fn directed_rounding_brackets_the_exact_result() {
    let floats: Vec<u64> = [0.1f32, 0.3, 1e-3, 7.0, 3e38, 1e-38, -0.7, 1.5, -3e38]
        .map(|x| u64::from(x.to_bits()))
        .into();
    let rows = rows(&floats, &floats[2..]);
    type Case = (&'static str, fn(f64, f64, f64) -> f64);
    let operations: [Case; 3] =
        [("mul", |a, b, _| a * b), ("div", |a, b, _| a / b), ("sqrt", |a, _, _| a.sqrt())];
    for (name, exact) in operations {
        let sources = if name == "sqrt" { "$1" } else { "$1, $2" };
        let run = |mode| results(&format!("{name}.{mode}.f32 $0, {sources};"), ["b32"; 4], &rows);
        let (down, up, zero) = (run("rm"), run("rp"), run("rz"));
        for (index, row) in rows.iter().enumerate() {
            let [a, b, c] = row.map(|bits| f64::from(f32::from_bits(bits as u32)));
            let exact = exact(a, b, c);
            if exact.is_nan() {
                continue;
            }
            let value = |found: &[u64]| f64::from(f32::from_bits(found[index] as u32));
            assert!(value(&down) <= exact && exact <= value(&up), "{name} {a} {b}");
            let near = exact as f32;
            if f64::from(near) != exact {
                let next = f32::from_bits(down[index] as u32).next_up();
                assert_eq!(f64::from(next), value(&up), "{name} {a} {b}");
            }
            assert!(value(&zero).abs() <= exact.abs() && value(&zero).is_finite());
        }
    }
    let tiny = [[1f64.to_bits(), 1e-30f64.to_bits(), 0]];
    assert_eq!(results("add.rm.f64 $0, $1, $2;", ["b64"; 4], &tiny), [1f64.to_bits()]);
    assert_eq!(results("add.rp.f64 $0, $1, $2;", ["b64"; 4], &tiny), [1f64.next_up().to_bits()]);
}

#[test]
fn approximations_are_within_their_bounds() {
    let inputs: Vec<f32> = (1..200).map(|i| i as f32 * 0.137).collect();
    let rows: Vec<[u64; 3]> = inputs.iter().map(|x| [u64::from(x.to_bits()), 0, 0]).collect();
    type Case = (&'static str, fn(f64) -> f64);
    let functions: [Case; 7] = [
        ("ex2.approx.f32", f64::exp2),
        ("lg2.approx.f32", f64::log2),
        ("rsqrt.approx.f32", |x| 1.0 / x.sqrt()),
        ("rcp.approx.ftz.f32", |x| 1.0 / x),
        ("sin.approx.f32", f64::sin),
        ("cos.approx.f32", f64::cos),
        ("tanh.approx.f32", f64::tanh),
    ];
    for (name, exact) in functions {
        let found = results(&format!("{name} $0, $1;"), ["b32"; 4], &rows);
        for (x, found) in inputs.iter().zip(found) {
            let exact = exact(f64::from(*x));
            let error = (f64::from(f32::from_bits(found as u32)) - exact).abs();
            assert!(error <= exact.abs() * 2f64.powi(-22) + 1e-9, "{name} {x}: {error}");
        }
    }
}
