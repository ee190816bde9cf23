//! Tests of the parser, the translation and the execution.

mod clusters;
mod flow;
mod kernels;
mod source;

use super::{AddressSpace, Launch, Module, Trap, run};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;

/// Device memory of a test: buffers of 64-bit words, freed at the end.
#[derive(Default)]
pub(super) struct Device {
    buffers: Vec<Vec<u64>>,
    /// Addresses of buffers that kernels may only read.
    pub(super) read_only: Vec<u64>,
    pub(super) printed: Mutex<Vec<u8>>,
    pub(super) cancel: AtomicBool,
    pub(super) cooperative: bool,
    /// Blocks of a cluster; 0 is one too.
    pub(super) cluster: u32,
}

impl AddressSpace for Device {
    fn is_mapped(&self, addr: u64, len: usize) -> bool {
        self.buffer(addr, len).is_some()
    }

    fn is_writable(&self, addr: u64, len: usize) -> bool {
        self.buffer(addr, len).is_some_and(|start| !self.read_only.contains(&start))
    }
}

impl Device {
    /// The address of the buffer that a range is inside of.
    fn buffer(&self, addr: u64, len: usize) -> Option<u64> {
        let found = self.buffers.iter().find(|buffer| {
            let start = buffer.as_ptr() as u64;
            let end = start + 8 * buffer.len() as u64;
            addr >= start && addr.checked_add(len as u64).is_some_and(|last| last <= end)
        });
        found.map(|buffer| buffer.as_ptr() as u64)
    }

    /// Allocates at least `bytes` zero bytes; its address.
    pub(super) fn alloc(&mut self, bytes: usize) -> u64 {
        self.buffers.push(vec![0; bytes.div_ceil(8).max(1)]);
        self.buffers.last_mut().map_or(0, |buffer| buffer.as_mut_ptr() as u64)
    }

    pub(super) fn upload(&mut self, bytes: &[u8]) -> u64 {
        let address = self.alloc(bytes.len());
        // SAFETY: just allocated with at least this length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        address
    }

    pub(super) fn upload32(&mut self, values: &[u32]) -> u64 {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.upload(&bytes)
    }

    pub(super) fn upload64(&mut self, values: &[u64]) -> u64 {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.upload(&bytes)
    }

    pub(super) fn download64(&self, address: u64, count: usize) -> Vec<u64> {
        assert!(self.is_mapped(address, 8 * count), "a test reads its own buffers");
        // SAFETY: within one buffer, which nothing else accesses now.
        (0..count).map(|i| unsafe { (address as *const u64).add(i).read() }).collect()
    }

    pub(super) fn download32(&self, address: u64, count: usize) -> Vec<u32> {
        assert!(self.is_mapped(address, 4 * count), "a test reads its own buffers");
        // SAFETY: as above.
        (0..count).map(|i| unsafe { (address as *const u32).add(i).read() }).collect()
    }

    pub(super) fn download_f32(&self, address: u64, count: usize) -> Vec<f32> {
        self.download32(address, count).into_iter().map(f32::from_bits).collect()
    }

    /// Allocates and initialises the module's variables.
    pub(super) fn globals(&mut self, module: &Module) -> Vec<u64> {
        let addresses: Vec<u64> = module
            .globals
            .iter()
            .map(|global| {
                let mut bytes = global.init.clone();
                bytes.resize(global.size, 0);
                self.upload(&bytes)
            })
            .collect();
        for (global, &address) in module.globals.iter().zip(&addresses) {
            for relocation in &global.relocations {
                let target = module.globals.iter().position(|g| g.name == relocation.symbol);
                let value = addresses[target.expect("a known symbol")]
                    .wrapping_add_signed(relocation.addend);
                // SAFETY: the loader keeps relocations inside their variable.
                unsafe { ((address as usize + relocation.offset) as *mut u64).write(value) };
            }
        }
        addresses
    }

    /// Launches with 64-bit parameters, whatever the kernel declares for their sizes.
    pub(super) fn launch(
        &self,
        module: &Module,
        globals: &[u64],
        name: &str,
        (grid, block, dynamic_shared): (u32, u32, u32),
        params: &[u64],
    ) -> Result<(), Trap> {
        let entry = module.entry(name).expect("the kernel");
        let mut bytes = vec![0; entry.param_bytes];
        for (param, value) in entry.params.iter().zip(params) {
            let size = param.size.min(8);
            bytes[param.offset..param.offset + size].copy_from_slice(&value.to_le_bytes()[..size]);
        }
        let launch = Launch {
            dynamic_shared,
            global_addresses: globals,
            cluster: [self.cluster.max(1), 1, 1],
            cooperative: self.cooperative,
            cancel: &self.cancel,
            print: &|text, _| self.printed.lock().expect("no panics").extend_from_slice(text),
            ..Launch::plain([grid, 1, 1], [block, 1, 1], &bytes)
        };
        run(module, entry, &launch, self)
    }
}

/// A module from the body of one kernel `k(.u64 p0 .. p3)`.
pub(super) fn kernel(body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_80\n.address_size 64\n.visible .entry k(\n\
         .param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3)\n{{\n{body}\n}}\n"
    )
}

pub(super) fn load(source: &str) -> Module {
    match Module::load(source) {
        Ok(module) => module,
        Err(fault) => panic!("{fault}"),
    }
}
