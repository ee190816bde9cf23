//! The forms of `multimem`, each against the host, on three devices; and those that there are not.

mod support;

use half::{bf16, f16};
use support::multicast::*;
use support::*;

const ON_THREE: [(&str, &str); 2] = [("SOFTCUDA_DEVICE", HOPPER), ("SOFTCUDA_DEVICES", "3")];
const THREADS: usize = 32;

/// A type, and what the operations on it are.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    bytes: usize,
    /// The vectors that there are; 1 is none.
    vectors: &'static [usize],
    operations: &'static [&'static str],
}

const KINDS: [Kind; 12] = [
    Kind { name: "u32", bytes: 4, vectors: &[1], operations: &["add", "min", "max"] },
    Kind { name: "s32", bytes: 4, vectors: &[1], operations: &["add", "min", "max"] },
    Kind { name: "u64", bytes: 8, vectors: &[1], operations: &["add", "min", "max"] },
    Kind { name: "s64", bytes: 8, vectors: &[1], operations: &["min", "max"] },
    Kind { name: "b32", bytes: 4, vectors: &[1], operations: &["and", "or", "xor"] },
    Kind { name: "b64", bytes: 8, vectors: &[1], operations: &["and", "or", "xor"] },
    Kind { name: "f32", bytes: 4, vectors: &[1, 2, 4], operations: &["add"] },
    Kind { name: "f64", bytes: 8, vectors: &[1], operations: &["add"] },
    Kind { name: "f16", bytes: 2, vectors: &[2, 4, 8], operations: &["add", "min", "max"] },
    Kind { name: "bf16", bytes: 2, vectors: &[2, 4, 8], operations: &["add", "min", "max"] },
    Kind { name: "f16x2", bytes: 4, vectors: &[1, 2, 4], operations: &["add", "min", "max"] },
    Kind { name: "bf16x2", bytes: 4, vectors: &[1, 2, 4], operations: &["add", "min", "max"] },
];

/// Two 16-bit numbers reduced.
fn small(name: &str, op: &str, a: u16, b: u16) -> u16 {
    let is_half = name.starts_with("f16");
    let number = |bits| match is_half {
        true => f16::from_bits(bits).to_f32(),
        false => bf16::from_bits(bits).to_f32(),
    };
    // A sum in single precision is close enough to be rounded once more.
    let result = match op {
        "add" => number(a) + number(b),
        "min" => number(a).min(number(b)),
        _ => number(a).max(number(b)),
    };
    rounded(name, result)
}

fn rounded(name: &str, value: f32) -> u16 {
    match name.starts_with("f16") {
        true => f16::from_f32(value).to_bits(),
        false => bf16::from_f32(value).to_bits(),
    }
}

/// Two elements reduced.
fn reduced(name: &str, op: &str, a: u64, b: u64) -> u64 {
    match (name, op) {
        ("f32", _) => u64::from((f32::from_bits(a as u32) + f32::from_bits(b as u32)).to_bits()),
        ("f64", _) => (f64::from_bits(a) + f64::from_bits(b)).to_bits(),
        ("f16" | "bf16", _) => small(name, op, a as u16, b as u16).into(),
        ("f16x2" | "bf16x2", _) => {
            let high = small(name, op, (a >> 16) as u16, (b >> 16) as u16);
            u64::from(small(name, op, a as u16, b as u16)) | u64::from(high) << 16
        }
        (_, "and") => a & b,
        (_, "or") => a | b,
        (_, "xor") => a ^ b,
        ("u32", "add") | ("s32", "add") => u64::from((a as u32).wrapping_add(b as u32)),
        ("u64", "add") => a.wrapping_add(b),
        ("s32", "min") => u64::from((a as i32).min(b as i32) as u32),
        ("s32", "max") => u64::from((a as i32).max(b as i32) as u32),
        ("s64", "min") => (a as i64).min(b as i64) as u64,
        ("s64", "max") => (a as i64).max(b as i64) as u64,
        (_, "min") => a.min(b),
        (_, "max") => a.max(b),
        _ => unreachable!("{name} {op}"),
    }
}

/// Random elements; floating-point numbers are finite, of different sizes, no zeros.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn number(&mut self) -> f64 {
        let bits = self.next();
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        let size = f64::from(bits as u32 >> 1) / 4e8 + 0.001;
        sign * size * [1.0, 64.0, 1.0 / 64.0][(bits >> 40) as usize % 3]
    }

    fn element(&mut self, name: &str) -> u64 {
        match name {
            "f32" => u64::from((self.number() as f32).to_bits()),
            "f64" => self.number().to_bits(),
            "f16" | "bf16" => rounded(name, self.number() as f32).into(),
            "f16x2" | "bf16x2" => {
                let high = u64::from(rounded(name, self.number() as f32));
                u64::from(rounded(name, self.number() as f32)) | high << 16
            }
            "u32" | "s32" | "b32" => self.next() & 0xffff_ffff,
            _ => self.next(),
        }
    }
}

/// Memory of three devices behind one object.
struct Devices {
    /// The multimem address.
    at: u64,
    members: Vec<u64>,
    /// Of one device, for what goes into a kernel and comes out.
    plain: u64,
}

impl Devices {
    fn new() -> Devices {
        let object = team(3, GRANULE);
        let members = (0..3).map(|device| {
            let (memory, address) = map_on(device, GRANULE);
            ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
            address
        });
        let members = members.collect();
        Devices { at: map_object(object, GRANULE), members, plain: allocate(4096) }
    }
}

fn put(to: u64, elements: &[u64], bytes: usize) {
    let all: Vec<u8> = elements.iter().flat_map(|e| e.to_le_bytes()[..bytes].to_vec()).collect();
    // SAFETY: the source is the vector itself.
    ok(unsafe { cuMemcpyHtoD_v2(to, all.as_ptr(), all.len()) });
}

fn get(from: u64, count: usize, bytes: usize) -> Vec<u64> {
    let mut all = vec![0_u8; count * bytes];
    // SAFETY: the destination is the vector itself.
    ok(unsafe { cuMemcpyDtoH_v2(all.as_mut_ptr(), from, all.len()) });
    let one = |element: &[u8]| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(element);
        u64::from_le_bytes(word)
    };
    all.chunks(bytes).map(one).collect()
}

/// The registers of a vector, as an operand.
fn operand(kind: &Kind, count: usize) -> String {
    let register = ["", "", "%h", "", "%r", "", "", "", "%rd"][kind.bytes];
    let all: Vec<String> = (1..=count).map(|n| format!("{register}{n}")).collect();
    if count == 1 { all[0].clone() } else { format!("{{{}}}", all.join(", ")) }
}

/// Each element of a vector loaded from, or stored to, the plain memory.
fn moved(kind: &Kind, count: usize, loads: bool) -> String {
    let register = ["", "", "%h", "", "%r", "", "", "", "%rd"][kind.bytes];
    let (bits, bytes) = (8 * kind.bytes, kind.bytes);
    let one = |n: usize| match loads {
        true => format!("ld.global.b{bits} {register}{}, [%b+{}];", n + 1, n * bytes),
        false => format!("st.global.b{bits} [%b+{}], {register}{};", n * bytes, n + 1),
    };
    (0..count).map(one).collect::<Vec<_>>().join(" ")
}

/// `%a` and `%b` moved on to the vector of the thread.
fn stepped(kind: &Kind, count: usize) -> String {
    let step = kind.bytes * count;
    format!("mul.wide.u32 %rd19, %t, {step}; add.u64 %a, %a, %rd19; add.u64 %b, %b, %rd19;")
}

fn vector(count: usize) -> String {
    if count == 1 { String::new() } else { format!(".v{count}") }
}

#[test]
fn all_forms_do_what_the_host_does() {
    Program::start("program_with_all_forms", &ON_THREE).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_with_all_forms() {
    context();
    let devices = Devices::new();
    let mut random = Random(7);
    let mut forms = 0;
    for kind in KINDS {
        for &count in kind.vectors {
            store(&devices, &mut random, &kind, count);
            forms += 1;
            for op in kind.operations {
                load_reduce(&devices, &mut random, &kind, count, op, false);
                forms += 1;
                if *op == "add" && kind.name.contains("f16") {
                    load_reduce(&devices, &mut random, &kind, count, op, true);
                    forms += 1;
                }
                if *op == "add" || count > 1 || !kind.name.ends_with("x2") {
                    reduce(&devices, &mut random, &kind, count, op);
                    forms += 1;
                }
            }
        }
    }
    assert_eq!(forms, 144);
}

fn fill(devices: &Devices, random: &mut Random, kind: &Kind, count: usize) -> Vec<Vec<u64>> {
    let one = |address: &u64| {
        let elements: Vec<u64> = (0..THREADS * count).map(|_| random.element(kind.name)).collect();
        put(*address, &elements, kind.bytes);
        elements
    };
    devices.members.iter().map(one).collect()
}

fn load_reduce(
    devices: &Devices,
    random: &mut Random,
    kind: &Kind,
    count: usize,
    op: &str,
    wide: bool,
) {
    let all = fill(devices, random, kind, count);
    let acc = if wide { ".acc::f32" } else { "" };
    let form = format!("multimem.ld_reduce.relaxed.sys.global.{op}{acc}{}", vector(count));
    let form = format!("{form}.{} {}, [%a];", kind.name, operand(kind, count));
    let body = format!("{}\n{form}\n{}", stepped(kind, count), moved(kind, count, false));
    ok(run(&body, &[devices.at, devices.plain]));
    let found = get(devices.plain, THREADS * count, kind.bytes);
    for (place, value) in found.iter().enumerate() {
        let values: Vec<u64> = all.iter().map(|elements| elements[place]).collect();
        let expected = if wide {
            wide_sum(kind.name, &values)
        } else {
            values.iter().copied().reduce(|a, b| reduced(kind.name, op, a, b)).unwrap()
        };
        assert_eq!(*value, expected, "{form} element {place}: {values:x?}");
    }
}

/// The sum in single precision, in the order of the devices, rounded once.
fn wide_sum(name: &str, values: &[u64]) -> u64 {
    let one = |shift: u32| {
        let number = |bits: u64| match name.starts_with("f16") {
            true => f16::from_bits((bits >> shift) as u16).to_f32(),
            false => bf16::from_bits((bits >> shift) as u16).to_f32(),
        };
        let sum = values.iter().map(|bits| number(*bits)).reduce(|a, b| a + b).unwrap();
        u64::from(rounded(name, sum)) << shift
    };
    if name.ends_with("x2") { one(0) | one(16) } else { one(0) }
}

fn store(devices: &Devices, random: &mut Random, kind: &Kind, count: usize) {
    fill(devices, random, kind, count);
    let elements: Vec<u64> = (0..THREADS * count).map(|_| random.element(kind.name)).collect();
    put(devices.plain, &elements, kind.bytes);
    let form = format!("multimem.st.relaxed.sys.global{}.{}", vector(count), kind.name);
    let form = format!("{form} [%a], {};", operand(kind, count));
    let body = format!("{}\n{}\n{form}", stepped(kind, count), moved(kind, count, true));
    ok(run(&body, &[devices.at, devices.plain]));
    for address in &devices.members {
        assert_eq!(get(*address, THREADS * count, kind.bytes), elements, "{form}");
    }
}

fn reduce(devices: &Devices, random: &mut Random, kind: &Kind, count: usize, op: &str) {
    let all = fill(devices, random, kind, count);
    let elements: Vec<u64> = (0..THREADS * count).map(|_| random.element(kind.name)).collect();
    put(devices.plain, &elements, kind.bytes);
    let form = format!("multimem.red.relaxed.sys.global.{op}{}.{}", vector(count), kind.name);
    let form = format!("{form} [%a], {};", operand(kind, count));
    let body = format!("{}\n{}\n{form}", stepped(kind, count), moved(kind, count, true));
    ok(run(&body, &[devices.at, devices.plain]));
    for (address, before) in devices.members.iter().zip(&all) {
        let both = before.iter().zip(&elements);
        let expected: Vec<u64> = both.map(|(a, b)| reduced(kind.name, op, *a, *b)).collect();
        assert_eq!(get(*address, THREADS * count, kind.bytes), expected, "{form}");
    }
}

/// Rounding at each step, in the order in which devices were added, and once with `.acc::f32`.
#[test]
fn sums_go_by_the_order_of_the_devices() {
    Program::start("program_with_an_order", &ON_THREE).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program_with_an_order() {
    context();
    let plain = allocate(64);
    let numbers = [1.0_f32, 16_777_216.0, -16_777_216.0];
    let sum = "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%a]; st.global.f32 [%b], %f1;";
    for (order, expected) in [([0, 1, 2], 0.0_f32), ([1, 2, 0], 1.0), ([2, 1, 0], 1.0)] {
        let object = create(3, GRANULE);
        order.iter().for_each(|device| ok(cuMulticastAddDevice(object, *device)));
        for (device, number) in (0..).zip(numbers) {
            let (memory, address) = map_on(device, GRANULE);
            write(address, &[number.to_bits()]);
            ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
        }
        ok(run(sum, &[map_object(object, GRANULE), plain]));
        assert_eq!(f32::from_bits(read(plain, 1)[0]), expected, "{order:?}");
    }
    let halves = |values: [f32; 3], acc: &str| {
        let object = team(3, GRANULE);
        for (device, value) in (0..).zip(values) {
            let (memory, address) = map_on(device, GRANULE);
            write(address, &[u32::from(f16::from_f32(value).to_bits())]);
            ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
        }
        let body = format!(
            "multimem.ld_reduce.relaxed.sys.global.add{acc}.f16x2 %r1, [%a]; st.global.u32 [%b], %r1;"
        );
        ok(run(&body, &[map_object(object, GRANULE), plain]));
        f16::from_bits(read(plain, 1)[0] as u16).to_f32()
    };
    assert_eq!(halves([2048.0, 1.0, 1.0], ""), 2048.0);
    assert_eq!(halves([2048.0, 1.0, 1.0], ".acc::f32"), 2050.0);
    // A number counts, a NaN does not, and zeros have signs.
    let least = |values: [u32; 3], op: &str| {
        let object = team(3, GRANULE);
        for (device, value) in (0..).zip(values) {
            let (memory, address) = map_on(device, GRANULE);
            write(address, &[value]);
            ok(cuMulticastBindMem(object, 0, memory, 0, GRANULE, 0));
        }
        let body = format!(
            "multimem.ld_reduce.relaxed.sys.global.{op}.bf16x2 %r1, [%a]; st.global.u32 [%b], %r1;"
        );
        ok(run(&body, &[map_object(object, GRANULE), plain]));
        read(plain, 1)[0]
    };
    assert_eq!(least([0x7fff_0000, 0x3f80_8000, 0x4000_0000], "min"), 0x3f80_8000);
    assert_eq!(least([0x7fff_8000, 0x3f80_0000, 0x4000_8000], "max"), 0x4000_0000);
}

#[test]
fn spellings_that_ptxas_takes() {
    context();
    for body in [
        "multimem.ld_reduce.add.u32 %r1, [%a];",
        "multimem.ld_reduce.global.add.u32 %r1, [%a];",
        "multimem.ld_reduce.weak.global.add.u32 %r1, [%a];",
        "multimem.ld_reduce.weak.add.u32 %r1, [%a];",
        "multimem.ld_reduce.acquire.gpu.add.u32 %r1, [%a+16];",
        "multimem.ld_reduce.relaxed.gpu.add.v4.f32 {%f1, %f2, _, %f4}, [%a];",
        "multimem.ld_reduce.relaxed.gpu.add.f32 %r1, [%a];",
        "multimem.st.u32 [%a], %r1;",
        "multimem.st.weak.global.u32 [%a], %r1;",
        "multimem.st.release.sys.global.u32 [%a], 7;",
        "multimem.st.release.cluster.global.v4.f32 [%a], {%f1, %f2, %f3, 0f3f800000};",
        "multimem.red.add.u32 [%a], 1;",
        "multimem.red.release.cta.v4.add.f32 [%a], {%f1, %f2, %f3, %f4};",
    ] {
        assert_eq!(load(body).0, 0, "{body}");
    }
}

#[test]
fn what_ptxas_refuses_is_refused() {
    const INVALID_PTX: u32 = 218;
    context();
    for body in [
        "multimem.add.u32 %r1, [%a];",
        "multimem.ld_reduce.add.s64 %rd1, [%a];",
        "multimem.ld_reduce.add.b32 %r1, [%a];",
        "multimem.ld_reduce.and.u32 %r1, [%a];",
        "multimem.ld_reduce.inc.u32 %r1, [%a];",
        "multimem.ld_reduce.min.f32 %f1, [%a];",
        "multimem.ld_reduce.max.f64 %fd1, [%a];",
        "multimem.ld_reduce.add.f16 %h1, [%a];",
        "multimem.ld_reduce.add.u16 %h1, [%a];",
        "multimem.ld_reduce.add.v2.u32 {%r1, %r2}, [%a];",
        "multimem.ld_reduce.add.v2.f64 {%fd1, %fd2}, [%a];",
        "multimem.ld_reduce.add.v8.f32 {%f1,%f2,%f3,%f4,%f5,%f6,%f7,%f8}, [%a];",
        "multimem.ld_reduce.add.v4.f32 {%f1, %f2}, [%a];",
        "multimem.ld_reduce.add.f32 {%f1}, [%a];",
        "multimem.ld_reduce.add.acc::f32.f32 %f1, [%a];",
        "multimem.ld_reduce.min.acc::f32.f16x2 %r1, [%a];",
        "multimem.ld_reduce.relaxed.add.u32 %r1, [%a];",
        "multimem.ld_reduce.release.gpu.add.u32 %r1, [%a];",
        "multimem.ld_reduce.weak.gpu.add.u32 %r1, [%a];",
        "multimem.ld_reduce.gpu.add.u32 %r1, [%a];",
        "multimem.ld_reduce.acq_rel.gpu.add.u32 %r1, [%a];",
        "multimem.ld_reduce.volatile.add.u32 %r1, [%a];",
        "multimem.ld_reduce.shared.add.u32 %r1, [%a];",
        "multimem.ld_reduce.L2::cache_hint.relaxed.gpu.add.f32 %f1, [%a];",
        "multimem.ld_reduce.add.u32 _, [%a];",
        "multimem.ld_reduce.add.u32 %rd1, [%a];",
        "multimem.ld_reduce.add.f32 %f1, [a];",
        "multimem.ld_reduce.relaxed.sys.add.u32 %r1, [%a], %r2;",
        "multimem.st.acquire.sys.u32 [%a], %r1;",
        "multimem.st.add.u32 [%a], %r1;",
        "multimem.st.u16 [%a], %h1;",
        "multimem.st.v2.u64 [%a], {%rd1, %rd2};",
        "multimem.red.weak.add.u32 [%a], 1;",
        "multimem.red.acquire.gpu.add.u32 [%a], %r1;",
        "multimem.red.min.f16x2 [%a], %r1;",
        "multimem.red.add.acc::f32.f16x2 [%a], %r1;",
        "multimem.red.exch.b32 [%a], %r1;",
        "multimem.red.add.u32 [%a], %r1, %r2;",
    ] {
        assert_eq!(load(body).0, INVALID_PTX, "{body}");
    }
}
