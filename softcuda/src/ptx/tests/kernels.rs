//! Kernels as nvcc compiles them.

use super::{Device, load};

const MIXTURE: &str = include_str!("../testdata/mixture.ptx");

fn floats(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn vectors_are_added() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let count = 1000;
    let a: Vec<f32> = (0..count).map(|i| i as f32 * 0.5).collect();
    let b: Vec<f32> = (0..count).map(|i| 3.0 - i as f32).collect();
    let pa = device.upload32(&floats(&a));
    let pb = device.upload32(&floats(&b));
    let pc = device.alloc(4 * count);
    let shape = (count.div_ceil(128) as u32, 128, 0);
    device.launch(&module, &globals, "vecadd", shape, &[pa, pb, pc, count as u64]).unwrap();
    let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(device.download_f32(pc, count), sums);
}

#[test]
fn a_called_function_computes_and_the_kernel_prints() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let input: Vec<f32> = (0..8).map(|i| i as f32 * 0.25).collect();
    let data = device.upload32(&floats(&input));
    device.launch(&module, &globals, "calls", (1, 8, 0), &[data, 5]).unwrap();
    let found = device.download_f32(data, 8);
    for (x, y) in input.iter().zip(found) {
        let expected = x * 5.0 + x.exp() + x.sin();
        assert!((y - expected).abs() < 1e-5 * expected.abs().max(1.0), "{x}: {y} {expected}");
    }
    let printed = device.printed.lock().unwrap();
    let text = String::from_utf8_lossy(&printed);
    assert!(text.contains("hi 0 1.000000\n"), "{text}");
    assert_eq!(text.lines().count(), 8);
}

#[test]
fn functions_are_called_through_a_table() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let data = device.upload32(&floats(&[1.0, 2.0, 3.0, 4.0]));
    device.launch(&module, &globals, "ind", (1, 4, 0), &[data]).unwrap();
    // x + 1 for even and x * 2 for odd lanes, times a constant.
    assert_eq!(device.download_f32(data, 4), [2.0, 8.0, 12.0, 32.0]);
    let counter = module.globals.iter().position(|global| global.name == "counter").unwrap();
    assert_eq!(device.download32(globals[counter], 1), [4]);
}

#[test]
fn blocks_reduce_through_shuffles_shared_memory_and_atomics() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let values: Vec<f32> = (0..1000).map(|i| (i % 7) as f32).collect();
    let input = device.upload32(&floats(&values));
    let output = device.upload32(&floats(&[0.0, 0.0]));
    device.launch(&module, &globals, "red", (1, 256, 0), &[input, output, 1000]).unwrap();
    assert_eq!(device.download_f32(output, 1), [values.iter().sum::<f32>()]);
}

#[test]
fn half_precision_works_in_pairs() {
    use half::{bf16, f16};
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let half = |x: f32| u32::from(f16::from_f32(x).to_bits());
    let brain = |x: f32| u32::from(bf16::from_f32(x).to_bits());
    let a = device.upload32(&[half(1.5) | half(-2.0) << 16]);
    let b = device.upload32(&[half(0.5)]);
    let c = device.upload32(&[brain(3.0)]);
    let d = device.upload32(&[brain(1.0) | brain(2.0) << 16]);
    device.launch(&module, &globals, "hh", (1, 1, 0), &[a, b, c, d]).unwrap();
    assert_eq!(device.download32(a, 1), [half(1.5 * 1.5 + 1.5) | half(2.0) << 16]);
    assert_eq!(device.download32(b, 1)[0] & 0xffff, half(0.5f32.exp()));
    assert_eq!(device.download32(c, 1)[0] & 0xffff, brain(9.0));
    assert_eq!(device.download32(d, 1), [brain(1.0) | brain(2.0) << 16]);
}

/// The programs of the end-to-end tests must run on this executor.
#[test]
fn every_workload_loads() {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/workloads/kernels");
    let files = std::fs::read_dir(folder).expect("the workloads are in the repository");
    for file in files.flatten().map(|file| file.path()) {
        if file.extension().is_some_and(|extension| extension == "ptx") {
            let source = std::fs::read_to_string(&file).unwrap();
            if let Err(fault) = crate::ptx::Module::load(&source) {
                panic!("{}: {fault}", file.display());
            }
        }
    }
}

const LIBRARY: &str = include_str!("../testdata/library.ptx");

#[test]
fn library_functions_agree_with_the_host() {
    let module = load(LIBRARY);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let count = 96;
    let x: Vec<f64> = (0..count).map(|i| 0.01 + i as f64 * 0.21).collect();
    let y: Vec<f32> = x.iter().map(|&x| x as f32).collect();
    let bits: Vec<u64> = x.iter().map(|x| x.to_bits()).collect();
    let (px, py) = (device.upload64(&bits), device.upload32(&floats(&y)));
    let (pd, pf) = (device.alloc(8 * 11 * count), device.alloc(4 * 11 * count));
    let shape = (1, count as u32, 0);
    device.launch(&module, &globals, "maths", shape, &[px, pd, py, pf]).unwrap();
    type Case = (&'static str, fn(f64) -> f64);
    let functions: [Case; 11] = [
        ("sin", f64::sin),
        ("cos", f64::cos),
        ("log", f64::ln),
        ("exp", f64::exp),
        ("pow", |x| x.powf(1.7)),
        ("tanh", f64::tanh),
        ("rcp", |x| 1.0 / x),
        ("sqrt", f64::sqrt),
        ("fmod", |x| x % 0.3),
        ("cbrt", f64::cbrt),
        ("atan2", |x| x.atan2(2.0)),
    ];
    let doubles = device.download64(pd, 11 * count);
    let singles = device.download_f32(pf, 11 * count);
    for (row, (name, function)) in functions.iter().enumerate() {
        for i in 0..count {
            let found = f64::from_bits(doubles[row * count + i]);
            let expected = function(x[i]);
            let error = (found - expected).abs();
            assert!(error <= 1e-15 * expected.abs().max(0.5), "{name} {}: {found}", x[i]);
            let found = f64::from(singles[row * count + i]);
            let exact = function(f64::from(y[i]));
            // `1.7` and `0.3` are other numbers in single precision.
            let expected = match *name {
                "pow" => f64::from(y[i]).powf(f64::from(1.7f32)),
                "fmod" => f64::from(y[i] % 0.3f32),
                _ => exact,
            };
            let error = (found - expected).abs();
            assert!(error <= 5e-7 * expected.abs().max(0.1), "{name}f {}: {found}", y[i]);
        }
    }
}

#[test]
fn virtual_functions_diverge() {
    let module = load(LIBRARY);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let out = device.alloc(4 * 64);
    device.launch(&module, &globals, "virtuals", (1, 64, 0), &[out, 6]).unwrap();
    let expected: Vec<u32> = (0..64).map(|i| if i % 2 == 1 { i + 1 } else { 6 * i }).collect();
    assert_eq!(device.download32(out, 64), expected);
}

#[test]
fn cooperative_groups_reduce_and_wait_for_the_grid() {
    let module = load(LIBRARY);
    let mut device = Device { cooperative: true, ..Device::default() };
    let globals = device.globals(&module);
    let out = device.alloc(4 * (1 + 512));
    device.launch(&module, &globals, "groups", (8, 64, 0), &[out]).unwrap();
    let expected = |i: u32| 1000 * 512 + 8 * (i % 64 / 8 * 8) + 28;
    let found = device.download32(out + 4, 512);
    assert!((0..512).all(|i| found[i as usize] == expected(i)), "{found:?}");
}

#[test]
fn wide_and_narrow_integers_and_a_sort() {
    let module = load(LIBRARY);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let wide: Vec<u64> =
        (0..64u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i << 60).collect();
    let narrow: Vec<u8> = (0..64u8).map(|i| i.wrapping_mul(37)).collect();
    let (pq, pc) = (device.upload64(&wide), device.upload(&narrow));
    device.launch(&module, &globals, "integers", (1, 64, 0), &[pq, pc, 64]).unwrap();
    let expected: Vec<u64> = wide
        .iter()
        .map(|&v| {
            let high = ((u128::from(v) * u128::from(v)) >> 64) as u64;
            let quotient = (v as i64).wrapping_neg() / 13;
            (v / 7 + v % 1_000_003).wrapping_add(high).wrapping_add(quotient as u64)
        })
        .collect();
    assert_eq!(device.download64(pq, 64), expected);
    let mut sorted: Vec<i8> = narrow
        .iter()
        .map(|&c| c as i8)
        .map(|c| ((i32::from(c) >> 1) * 3 - i32::from(c) / 5) as i8)
        .collect();
    sorted.sort_unstable();
    let found: Vec<i8> =
        device.download32(pc, 16).iter().flat_map(|w| w.to_le_bytes()).map(|b| b as i8).collect();
    assert_eq!(found, sorted);
}

#[test]
fn structures_are_passed_by_value() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let out = device.alloc(8 * 32);
    // Only the structure's first eight bytes fit in this launcher's words: `a` is 1.5 and the
    // rest is zero.
    let params = [u64::from(1.5f32.to_bits()), out];
    device.launch(&module, &globals, "structure", (1, 32, 256), &params).unwrap();
    assert_eq!(device.download64(out, 32), [1.5f64.to_bits(); 32]);
}

#[test]
fn printf_formats_as_c_does() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    let text = device.upload(b"word\0");
    device.launch(&module, &globals, "prints", (1, 1, 0), &[7, text]).unwrap();
    let printed = device.printed.lock().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&printed),
        "[    7|7    |00007|7|H|word|%|   0.875|0.875|7.000000e+03|1099511627776]\n"
    );
}

#[test]
fn a_failed_assertion_names_itself() {
    let module = load(MIXTURE);
    let mut device = Device::default();
    let globals = device.globals(&module);
    device.launch(&module, &globals, "asserts", (1, 32, 0), &[3]).unwrap();
    let fault = device.launch(&module, &globals, "asserts", (1, 32, 0), &[4]).unwrap_err();
    let crate::ptx::Trap::Assert { message, kernel } = fault else { panic!("{fault}") };
    assert!(message.starts_with("n == 3 (mixture.cu:"), "{message}");
    assert_eq!(kernel, "asserts");
}
