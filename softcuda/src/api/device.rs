//! Devices and their properties.

use super::arguments::{In, Out, Text, set_text};
use super::driver_api;
use crate::drivers::Driver;
use crate::modules::SHARED_PER_BLOCK;
use crate::placement;
use crate::settings::{Vmm, device, settings};
use crate::status::{Code, Outcome};
use crate::virtual_memory::POSIX_FILE_DESCRIPTOR;

/// The UUID of a device: the same in every process and on every machine, unless a restore has moved this
/// process to another one.
pub(super) fn uuid(ordinal: usize) -> [u8; 16] {
    let mut uuid = UUID;
    uuid[15] = placement::of(ordinal) as u8;
    uuid
}

/// Domain, bus and device at which a device sits.
pub(super) fn pci_place(ordinal: usize) -> [i32; 3] {
    [0, ordinal as i32 + 1, 0]
}

const UUID: [u8; 16] = *b"softcuda-device\0";

/// The number in a device's UUID.
pub(crate) fn number(uuid: &[u8; 16]) -> Option<usize> {
    (uuid[..15] == UUID[..15]).then_some(uuid[15].into())
}

/// A device attribute by its number in the API.
fn attribute(number: u32, ordinal: usize) -> Outcome<i32> {
    let exclusive = 3;
    let driver = settings().driver;
    let model = settings().model(ordinal);
    let generation = model.generation;
    Ok(match number {
        1..=3 => 1024,  // threads per block, block x, y
        4 => 64,        // block z
        5 => i32::MAX,  // grid x
        6 | 7 => 65535, // grid y, z
        8 => SHARED_PER_BLOCK as i32,
        9 => 64 << 10,    // constant memory
        10 => 32,         // warp
        11 => i32::MAX,   // pitch
        12 | 82 => 65536, // registers
        13 => 1_000_000,  // clock in kHz
        14 | 30 => 512,   // texture and surface alignment
        15 => 1,          // overlap
        16 => model.multiprocessors as i32,
        17 | 18 => 0, // time limit, integrated
        19 => 1,      // can map host memory
        20 => {
            if settings().exclusive {
                exclusive
            } else {
                0
            }
        }
        31 => 1, // concurrent kernels
        32 => 0, // ECC
        33 => pci_place(ordinal)[1],
        34 => pci_place(ordinal)[2],
        50 => pci_place(ordinal)[0],
        35 => 0,                         // TCC
        36 => 1_000_000,                 // memory clock in kHz
        37 => 64,                        // memory bus
        38 => 4 << 20,                   // L2
        39 => generation.threads as i32, // threads per multiprocessor
        40 => 2,                         // copy engines
        41 => 1,                         // unified addressing
        51 => 32,                        // texture pitch alignment
        75 => generation.capability.0 as i32,
        76 => generation.capability.1 as i32,
        78 => 1,                                  // stream priorities (accepted)
        79 | 80 => 1,                             // L1
        81 => generation.shared as i32,           // shared memory per multiprocessor
        83 | 89 => 1,                             // managed memory, concurrent with the host
        86 => 1,                                  // native host atomics
        87 => generation.single_to_double as i32, // single to double
        90 => 1,                                  // preemption
        91 => 1,                                  // host pointers for registered memory
        92 | 93 | 122 => 1,                       // stream memory operations
        94 | 123 => 1,                            // wait on NOR
        95 | 96 => 1,                             // cooperative launch, on several devices
        97 => generation.shared_of_block as i32,
        98 => 1, // flushes of remote writes: these are seen at once
        99 => 1, // host register
        102 => i32::from(settings().vmm >= Vmm::Private), // virtual memory management
        103 => i32::from(settings().vmm == Vmm::Full), // POSIX descriptors
        106 => generation.blocks as i32, // blocks per multiprocessor
        // Reserved shared memory.
        111 => {
            if generation.capability < (8, 0) {
                0
            } else {
                1024
            }
        }
        113 => 1,                            // read-only host register
        115 => 1,                            // memory pools
        119 => POSIX_FILE_DESCRIPTOR as i32, // as what pools are exported
        126 => 1,                            // memory synchronisation domains
        130 | 131 | 134 => {
            if number == 130 {
                0
            } else {
                -1
            }
        }
        // Host memory of `cuMemCreate`, of NUMA nodes and without that.
        141 | 145 => (settings().vmm != Vmm::None).into(),
        120 => (generation.capability >= (9, 0)).into(), // clusters
        132 => settings().has_multicast(ordinal).into(),
        // Everything else that exists: textures, arrays, ...
        21..=29
        | 42..=49
        | 52..=74
        | 77
        | 84
        | 85
        | 88
        | 100
        | 101
        | 104
        | 105
        | 107..=110
        | 112
        | 114
        | 116..=118
        | 121
        | 124
        | 125
        | 127..=129
        | 133
        | 135..=147 => 0,
        148 if driver >= Driver::R590 => 0,
        151..=156 if driver >= Driver::R610 => 0,
        149 | 150 | 157 | 158 | 161 if driver >= Driver::Cuda13_4 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

/// What device and host, or two devices, can do to the same memory at once: `CUatomicOperationCapability` of each
/// `CUatomicOperation`. Both are processors of the host here.
pub(super) fn atomics(out: &Out<u32>, operations: &In<u32>, count: u32) -> Outcome {
    const SIGNED: u32 = 1;
    const UNSIGNED: u32 = 2;
    const REDUCTION: u32 = 4;
    const OF_32: u32 = 8;
    const OF_64: u32 = 16;
    if count == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let one = |index| {
        Ok(match operations.at(index)? {
            // Addition, minimum, maximum; and, or, exclusive or.
            0..=2 | 5..=7 => SIGNED | UNSIGNED | REDUCTION | OF_32 | OF_64,
            // Increment and decrement within bounds.
            3 | 4 => UNSIGNED | REDUCTION | OF_32,
            // Exchange, and compare and swap.
            8 | 9 => SIGNED | UNSIGNED | OF_32 | OF_64,
            // Addition of floating-point numbers.
            10 => REDUCTION | OF_32 | OF_64,
            // Their minimum and maximum.
            11 | 12 => 0,
            _ => return Err(Code::INVALID_VALUE),
        })
    };
    let capabilities: Vec<u32> = (0..count as usize).map(one).collect::<Outcome<_>>()?;
    out.set_all(capabilities)
}

driver_api! {
    call fn cuDeviceGet(out: Out<i32>, ordinal: i32) {
        device(ordinal)?;
        out.set(ordinal)
    }

    call fn cuDeviceGetCount(count: Out<i32>) {
        count.set(settings().devices as i32)
    }

    call fn cuDeviceGetName(name: Out<u8>, size: i32, ordinal: i32) {
        let named = settings().model(device(ordinal)?).name.as_bytes();
        set_text(&name, usize::try_from(size).map_err(|_| Code::INVALID_VALUE)?, named)
    }

    call fn cuDeviceGetUuid(out: Out<[u8; 16]>, ordinal: i32) {
        out.set(uuid(device(ordinal)?))
    }

    call fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, ordinal: i32) {
        out.set(uuid(device(ordinal)?))
    }

    call fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: i32) {
        bytes.set(settings().model(device(ordinal)?).memory as usize)
    }

    call fn cuDeviceGetAttribute(value: Out<i32>, number: u32, ordinal: i32) {
        value.set(attribute(number, device(ordinal)?)?)
    }

    call fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, ordinal: i32) {
        let capability = settings().model(device(ordinal)?).generation.capability;
        major.set(capability.0 as i32)?;
        minor.set(capability.1 as i32)
    }

    call fn cuDeviceGetPCIBusId(text: Out<u8>, size: i32, ordinal: i32) {
        let id = format!("0000:{:02X}:00.0", device(ordinal)? + 1);
        set_text(&text, usize::try_from(size).map_err(|_| Code::INVALID_VALUE)?, id.as_bytes())
    }

    call fn cuDeviceGetByPCIBusId(out: Out<i32>, text: Text) {
        // [domain:]bus:device[.function], in hexadecimal.
        let text = text.get()?;
        let place = text.split('.').next().unwrap_or(text);
        let bus = place.rsplit(':').nth(1).ok_or(Code::INVALID_VALUE)?;
        let bus = i32::from_str_radix(bus, 16).map_err(|_| Code::INVALID_VALUE)?;
        let ordinal = bus - 1;
        device(ordinal)?;
        out.set(ordinal)
    }

    call fn cuDeviceGetHostAtomicCapabilities(
        out: Out<u32>, operations: In<u32>, count: u32, ordinal: i32,
    ) {
        device(ordinal)?;
        atomics(&out, &operations, count)
    }

    call fn cuDeviceGetProperties(out: Out<[i32; 14]>, ordinal: i32) {
        let ordinal = device(ordinal)?;
        // Threads of a block, in each direction; blocks in each direction; shared memory, constant memory, warp,
        // pitch, registers, clock and alignment of textures: the first attributes, in their order.
        let mut properties = [0; 14];
        for (property, number) in properties.iter_mut().zip(1..) {
            *property = attribute(number, ordinal)?;
        }
        out.set(properties)
    }

    call fn cuDeviceGetExecAffinitySupport(out: Out<i32>, _kind: u32, ordinal: i32) {
        device(ordinal)?;
        out.set(0)
    }
}
