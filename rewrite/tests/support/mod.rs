//! Memory and launches for tests on the software driver's interpreter.
#![allow(dead_code)]

use std::sync::atomic::{AtomicU32, Ordering};

use softcuda::ptx::{AddressSpace, Launch, Module, run};

/// A module whose kernels take the address of words and their number.
pub(crate) fn module(rest: &str) -> String {
    format!(".version 8.0\n.target sm_80\n.address_size 64\n{rest}\n")
}

/// Dynamic shared memory of launches, bytes.
pub(crate) const DYNAMIC: u64 = 256;

/// Memory of a test: words, each of which may be touched.
pub(crate) struct Memory(pub(crate) Vec<AtomicU32>);

impl Memory {
    pub(crate) fn new(words: usize) -> Self {
        Self((0..words).map(|_| AtomicU32::new(0)).collect())
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub(crate) fn words(&self) -> Vec<u32> {
        self.0.iter().map(|word| word.load(Ordering::SeqCst)).collect()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.words().into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

struct Space<'a>(&'a [&'a Memory]);

impl AddressSpace for Space<'_> {
    fn is_mapped(&self, address: u64, len: usize) -> bool {
        self.0.iter().any(|memory| {
            let end = memory.address() + 4 * memory.0.len() as u64;
            address >= memory.address() && address + len as u64 <= end
        })
    }

    fn is_writable(&self, address: u64, len: usize) -> bool {
        self.is_mapped(address, len)
    }
}

/// Runs a kernel.
pub(crate) fn launch(
    text: &str,
    kernel: &str,
    memories: &[&Memory],
    grid: [u32; 3],
    block: [u32; 3],
    params: &[u64],
) {
    let module = Module::load(text).unwrap_or_else(|fault| panic!("{fault}\n{text}"));
    let entry = module.entry(kernel).expect("the kernel");
    let mut bytes = vec![0; entry.param_bytes];
    assert_eq!(entry.params.len(), params.len());
    for (param, value) in entry.params.iter().zip(params) {
        bytes[param.offset..][..param.size].copy_from_slice(&value.to_le_bytes()[..param.size]);
    }
    let launch = Launch { dynamic_shared: DYNAMIC as u32, ..Launch::plain(grid, block, &bytes) };
    run(&module, entry, &launch, &Space(memories)).expect("no trap");
}

/// A random number generator (xorshift).
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 16) % limit
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// The number of the thread in the grid in `%r0`, and the address of its word in `%rd0`.
pub(crate) const PLACE: &str = "
	.reg .b32 %r<40>;
	.reg .b64 %rd<10>;
	.reg .pred %p<10>;
	mov.u32 %r1, %ctaid.z; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y; mad.lo.u32 %r0, %r1, %r2, %r3;
	mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r0, %r0, %r1, %r2;
	mov.u32 %r1, %ntid.z; mov.u32 %r2, %tid.z; mad.lo.u32 %r0, %r0, %r1, %r2;
	mov.u32 %r1, %ntid.y; mov.u32 %r2, %tid.y; mad.lo.u32 %r0, %r0, %r1, %r2;
	mov.u32 %r1, %ntid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2;
	ld.param.u64 %rd0, [words];
	mul.wide.u32 %rd1, %r0, 4;
	add.u64 %rd0, %rd0, %rd1;
";

/// A module of the kernel `k`, which begins with [`PLACE`].
pub(crate) fn kernel(body: &str) -> String {
    module(&format!(".visible .entry k(\n\t.param .u64 words\n)\n{{{PLACE}{body}\n}}"))
}

/// Loops in loops, of the form that compilers write, with `more` in each.
pub(crate) fn loops(
    random: &mut Random,
    depth: u32,
    names: &mut u32,
    more: &dyn Fn(&mut Random) -> String,
) -> String {
    let mut body = String::new();
    for _ in 0..1 + random.below(2) {
        *names += 1;
        let (name, counter) = (*names, 20 + depth);
        let [to, a, b] = [(); 3].map(|()| 10 + random.below(6));
        body += &format!("	and.b32 %r{counter}, %r{a}, {};\n", 1 + random.below(7));
        body += &format!("T{name}:\n	mad.lo.u32 %r{to}, %r{b}, 5, %r{counter};\n");
        body += &more(random);
        if random.below(2) == 0 {
            body += &format!(
                "	and.b32 %r28, %r{a}, 1; setp.eq.u32 %p3, %r28, 0; @%p3 bra E{name};\n	xor.b32 %r{a}, %r{b}, {name};\nE{name}:\n"
            );
        }
        if depth < 3 && random.below(2) == 0 {
            body += &loops(random, depth + 1, names, more);
        }
        body += &match random.below(3) {
            0 => format!(
                "	setp.eq.u32 %p2, %r{counter}, 0; @%p2 bra X{name};\n	sub.u32 %r{counter}, %r{counter}, 1; bra T{name};\nX{name}:\n"
            ),
            1 => format!(
                "	setp.eq.u32 %p2, %r{counter}, 0; sub.u32 %r{counter}, %r{counter}, 1; @!%p2 bra T{name};\n"
            ),
            _ => format!(
                "	setp.ne.u32 %p2, %r{counter}, 0; sub.u32 %r{counter}, %r{counter}, 1; @%p2 bra T{name};\n"
            ),
        };
    }
    body
}

/// Texts that compilers have made, and those of the workloads.
pub(crate) fn texts() -> Vec<(String, String)> {
    let folders = [
        "softcuda/tests/programs",
        "softcuda/tests/triton",
        "softcuda/benches",
        "tests/workloads/kernels",
    ];
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut texts = Vec::new();
    for folder in folders {
        for entry in std::fs::read_dir(root.join(folder)).expect("a folder") {
            let path = entry.expect("a file").path();
            if path.extension().is_some_and(|extension| extension == "ptx") {
                let text = std::fs::read_to_string(&path).expect("text");
                texts
                    .push((path.file_name().expect("a name").to_string_lossy().into_owned(), text));
            }
        }
    }
    texts
}
