//! Two processes that have memory of each other open, by legacy IPC handles: each changes what is the other's, in
//! turn. What one of them allocated is a block of its own, what the other allocated shares a block with more.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::cuda::{Lookup, check, driver, lookup};
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, read_at};
use crate::numbers::{filled, mixer_round};
use crate::report::Run;

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Where a second process finds the handle of the first one's memory, and how many words that has.
const ENV: &str = "WORKLOAD_RING";
/// Words of the second process.
const SMALL: u32 = 1 << 10;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY: u32 = 1;

/// Memory of the other process.
struct Opened {
    handle: [u64; 8],
    address: u64,
}

impl Opened {
    fn open(handle: [u64; 8]) -> Result<Self> {
        let mut address = 0;
        // SAFETY: a place for the result, and a handle by value.
        let code = unsafe { (driver().cuIpcOpenMemHandle)(&raw mut address, handle, LAZY) };
        check("cuIpcOpenMemHandle", code)?;
        Ok(Self { handle, address })
    }

    /// Opens it a second time, closes both, and opens it anew.
    fn reopened(self) -> Result<Self> {
        let twice = Self::open(self.handle)?;
        ensure!(twice.address == self.address, "opened twice it is at two places");
        let handle = self.handle;
        drop((twice, self));
        Self::open(handle)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the address came from `cuIpcOpenMemHandle`, and is closed once for each time.
        unsafe { (driver().cuIpcCloseMemHandle)(self.address) };
    }
}

fn offer(buffer: &Buffer) -> Result<String> {
    let mut handle = [0u64; 8];
    // SAFETY: there is room for the 64 bytes of a handle.
    let code =
        unsafe { (driver().cuIpcGetMemHandle)(handle.as_mut_ptr().cast(), buffer.address()) };
    check("cuIpcGetMemHandle", code)?;
    Ok(handle.map(|word| format!("{word:016x}")).concat())
}

fn parsed(text: &str) -> Result<[u64; 8]> {
    ensure!(text.len() == 128, "a handle has 64 bytes");
    let mut handle = [0; 8];
    for (place, word) in handle.iter_mut().zip(text.as_bytes().chunks_exact(16)) {
        *place = u64::from_str_radix(std::str::from_utf8(word)?, 16)?;
    }
    Ok(handle)
}

fn mix(kernel: &Kernel, gpu: &Gpu, address: u64, words: u32, step: u32) -> Result<()> {
    kernel.run(Shape::covering(words), args![address, words, step])?;
    gpu.synchronize()
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(handle) = std::env::var(ENV) {
        return second(&handle);
    }
    let words: u32 = run.pick(1 << 20, 1 << 22, 64 << 20);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let mut host = filled(words as usize, run.seed);
    let own = Buffer::holding(&host)?;
    gpu.synchronize()?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("ring").env(ENV, format!("{} {words}", offer(&own)?));
    if lookup() == Lookup::GetProcAddress {
        command.arg("--get-proc-address");
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut tell = child.stdin.take().context("the pipe is there")?;
    let mut lines = BufReader::new(child.stdout.take().context("the pipe is there")?).lines();
    let mut hear = || lines.next().context("the second process has ended")?.context("a line");
    let mut others = Opened::open(parsed(&hear()?)?)?;
    run.line(format_args!("child pid={}", child.id()))?;
    run.ready()?;
    let mut small = filled(SMALL as usize, 7);
    let checked = run.checkable(2 * u64::from(words));
    for step in 0..steps {
        mix(&round, &gpu, own.address(), words, step)?;
        writeln!(tell, "{step}")?;
        let said = hear()?;
        mix(&round, &gpu, others.address, SMALL, step)?;
        if step % 16 == 7 {
            others = others.reopened()?;
        }
        let seen: Vec<u32> = read_at(others.address, SMALL as usize)?;
        run.step(step, format_args!("{said} {:08x}", seen[5]))?;
        if step < checked {
            mixer_round(&mut host, step);
            mixer_round(&mut host, step + 1000);
            mixer_round(&mut small, step);
            ensure!(seen == small, "step {step}: the memory of the second process is wrong");
        }
    }
    drop(tell);
    ensure!(child.wait()?.success(), "the second process failed");
    let last: Vec<u32> = own.read()?;
    ensure!(checked < steps || last == host, "the final words are wrong");
    run.absorb(&last);
    run.finish()
}

/// The second process: mixes the first one's memory whenever it is told to.
fn second(handle: &str) -> Result<()> {
    let (handle, words) = handle.split_once(' ').context("a handle and a number")?;
    let words: u32 = words.parse()?;
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let own = Buffer::holding(&filled(SMALL as usize, 7))?;
    let more = Buffer::holding(&filled(SMALL as usize, 8))?;
    let mut others = Opened::open(parsed(handle)?)?;
    println!("{}", offer(&own)?);
    for line in std::io::stdin().lines() {
        let step: u32 = line?.trim().parse()?;
        mix(&round, &gpu, others.address, words, step + 1000)?;
        if step % 16 == 3 {
            others = others.reopened()?;
        }
        let seen: u32 = read_at(others.address + 4 * u64::from(words - 1), 1)?[0];
        println!("{seen:08x} {:08x}", more.read_one::<u32>(step as usize % 1024)?);
    }
    Ok(())
}
