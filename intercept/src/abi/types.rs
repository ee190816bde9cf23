//! Types and codes of the driver API, as far as the shim looks into them.
//!
//! Flags and enumerations are plain integers here: the driver may return values that are newer
//! than any list, and a combination of flags is no value of a Rust enumeration. A test compares
//! the layouts with those of `cudarc`.

use std::ffi::c_void;
use std::ops::RangeInclusive;

/// What every driver function returns.
pub(crate) type Code = u32;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const ERROR_INVALID_VALUE: Code = 1;
pub(crate) const ERROR_OUT_OF_MEMORY: Code = 2;
/// The driver is shutting down: the process is on its way out.
pub(crate) const ERROR_DEINITIALIZED: Code = 4;
/// The device is lost.
pub(crate) const ERROR_DEVICE_UNAVAILABLE: Code = 46;
pub(crate) const ERROR_NO_DEVICE: Code = 100;
pub(crate) const ERROR_INVALID_DEVICE: Code = 101;
pub(crate) const ERROR_INVALID_CONTEXT: Code = 201;
pub(crate) const ERROR_MAP_FAILED: Code = 205;
pub(crate) const ERROR_ECC_UNCORRECTABLE: Code = 214;
pub(crate) const ERROR_NVLINK_UNCORRECTABLE: Code = 220;
pub(crate) const ERROR_OPERATING_SYSTEM: Code = 304;
pub(crate) const ERROR_INVALID_HANDLE: Code = 400;
pub(crate) const ERROR_NOT_FOUND: Code = 500;
pub(crate) const ERROR_NOT_READY: Code = 600;
/// Errors that leave a context broken begin here.
pub(crate) const ERROR_ILLEGAL_ADDRESS: Code = 700;
pub(crate) const ERROR_LAUNCH_TIMEOUT: Code = 702;
pub(crate) const ERROR_CONTEXT_IS_DESTROYED: Code = 709;
pub(crate) const ERROR_ASSERT: Code = 710;
/// `CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED`
pub(crate) const ERROR_NOT_REGISTERED: Code = 713;
pub(crate) const ERROR_HARDWARE_STACK_ERROR: Code = 714;
pub(crate) const ERROR_LAUNCH_FAILED: Code = 719;
pub(crate) const ERROR_NOT_SUPPORTED: Code = 801;
pub(crate) const ERROR_UNKNOWN: Code = 999;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`
pub(crate) const ALLOCATION_PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub(crate) const LOCATION_DEVICE: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`
pub(crate) const LOCATION_HOST_NUMA: u32 = 3;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
pub(crate) const HANDLE_POSIX_FD: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_NONE`
pub(crate) const ACCESS_NONE: u32 = 0;
/// `CU_MEM_ACCESS_FLAGS_PROT_READ`
pub(crate) const ACCESS_READ: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
pub(crate) const ACCESS_READ_WRITE: u32 = 3;
/// `CU_LIMIT_STACK_SIZE`
pub(crate) const LIMIT_STACK_SIZE: u32 = 0;
/// `CU_STREAM_PER_THREAD`
pub(crate) const STREAM_PER_THREAD: u64 = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
pub(crate) const CAPTURE_RELAXED: u32 = 2;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`
pub(crate) const ATTRIBUTE_RDMA_WITH_VMM: u32 = 110;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`
pub(crate) const ATTRIBUTE_VMM: u32 = 102;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`
pub(crate) const ATTRIBUTE_POSIX_FD: u32 = 103;

/// `CU_MEMPOOL_ATTR_*`
pub(crate) const POOL_THRESHOLD: u32 = 4;
pub(crate) const POOL_RESERVED: u32 = 5;
pub(crate) const POOL_RESERVED_HIGH: u32 = 6;
pub(crate) const POOL_USED: u32 = 7;
pub(crate) const POOL_USED_HIGH: u32 = 8;

/// `CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES`
pub(crate) const ATTRIBUTE_POOL_HANDLES: u32 = 119;
/// `CU_POINTER_ATTRIBUTE_*`
pub(crate) const POINTER_CONTEXT: u32 = 1;
pub(crate) const POINTER_MEMORY_TYPE: u32 = 2;
pub(crate) const POINTER_SYNC_MEMOPS: u32 = 6;
pub(crate) const POINTER_BUFFER_ID: u32 = 7;
pub(crate) const POINTER_IS_MANAGED: u32 = 8;
pub(crate) const POINTER_IS_LEGACY_IPC_CAPABLE: u32 = 10;
pub(crate) const POINTER_RANGE_START: u32 = 11;
pub(crate) const POINTER_RANGE_SIZE: u32 = 12;
pub(crate) const POINTER_ALLOWED_HANDLE_TYPES: u32 = 14;
pub(crate) const POINTER_POOL: u32 = 17;
pub(crate) const POINTER_MAPPING_SIZE: u32 = 18;
pub(crate) const POINTER_MAPPING_BASE: u32 = 19;

/// `CU_LAUNCH_PARAM_BUFFER_POINTER` and `CU_LAUNCH_PARAM_BUFFER_SIZE`: names of the values in `extra`.
pub(crate) const EXTRA_BUFFER: usize = 1;
pub(crate) const EXTRA_SIZE: usize = 2;

/// `CU_STREAM_MEM_OP_*`
pub(crate) const STREAM_WAIT_32: u32 = 1;
pub(crate) const STREAM_WRITE_32: u32 = 2;
pub(crate) const STREAM_WAIT_64: u32 = 4;
pub(crate) const STREAM_WRITE_64: u32 = 5;
/// Of CUDA 13.1, which is newer than what the tests compare with.
pub(crate) const STREAM_ATOMIC_REDUCTION: u32 = 8;

/// `CU_GRAPH_NODE_TYPE_*`
pub(crate) const NODE_KERNEL: u32 = 0;
pub(crate) const NODE_COPY: u32 = 1;
pub(crate) const NODE_FILL: u32 = 2;
pub(crate) const NODE_HOST: u32 = 3;
pub(crate) const NODE_CHILD: u32 = 4;
/// Empty nodes, events, semaphores; memory that the graph allocates is the driver's.
pub(crate) const NODES_WITHOUT_EFFECT: RangeInclusive<u32> = 5..=11;
pub(crate) const NODE_MEMORY_OPS: u32 = 12;

/// `CU_AD_FORMAT_*`
const FORMAT_UNSIGNED_8: u32 = 0x01;
const FORMAT_UNSIGNED_16: u32 = 0x02;
const FORMAT_UNSIGNED_32: u32 = 0x03;
const FORMAT_SIGNED_8: u32 = 0x08;
const FORMAT_SIGNED_16: u32 = 0x09;
const FORMAT_SIGNED_32: u32 = 0x0a;
const FORMAT_HALF: u32 = 0x10;
const FORMAT_FLOAT: u32 = 0x20;

/// `CU_MEMORYTYPE_HOST`
pub(crate) const MEMORY_HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`
pub(crate) const MEMORY_DEVICE: u32 = 2;
/// `CU_MEMORYTYPE_UNIFIED`
pub(crate) const MEMORY_UNIFIED: u32 = 4;
/// `CU_MEMCPY_OPERAND_TYPE_POINTER`
pub(crate) const OPERAND_POINTER: u32 = 1;
/// `CU_MEMCPY_OPERAND_TYPE_ARRAY`
pub(crate) const OPERAND_ARRAY: u32 = 2;

/// `CUmemLocation`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

impl Location {
    /// Whether it is host memory, by whichever of the names for it: those of a NUMA node, or of the thread's, too.
    pub(crate) fn is_host(self) -> bool {
        (LOCATION_DEVICE + 1..=LOCATION_HOST_NUMA + 1).contains(&self.kind)
    }
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AllocationProp {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location: Location,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

// SAFETY: the pointer is unused on this system; it is copied and never followed.
unsafe impl Send for AllocationProp {}

impl AllocationProp {
    /// Pinned memory on `device`, exportable as a file descriptor.
    pub(crate) fn on_device(device: i32, rdma: bool) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: HANDLE_POSIX_FD,
            location: Location { kind: LOCATION_DEVICE, id: device },
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma: rdma.into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

/// `CUmulticastObjectProp`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MulticastProp {
    pub(crate) devices: u32,
    pub(crate) size: usize,
    pub(crate) handle_types: u64,
    pub(crate) flags: u64,
}

/// `CUmemPoolProps`
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolProperties {
    kind: u32,
    handle_types: u32,
    location: Location,
    win32: *mut c_void,
    /// The most that it may have, bytes; 0 for no limit.
    pub(crate) most: usize,
    usage: u16,
    reserved: [u8; 54],
}

impl PoolProperties {
    /// A pool of plain memory on `device` that no other process can be given.
    pub(crate) fn on_device(device: i32) -> Self {
        Self {
            kind: ALLOCATION_PINNED,
            handle_types: 0,
            location: Location { kind: LOCATION_DEVICE, id: device },
            win32: std::ptr::null_mut(),
            most: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }

    /// Whether other processes may be given it.
    pub(crate) fn is_shareable(&self) -> bool {
        self.handle_types != 0
    }

    /// The same pool, for this process alone.
    pub(crate) fn alone(&self) -> Self {
        Self { handle_types: 0, ..*self }
    }

    /// The device of a pool of plain memory which other processes are given by descriptors or not at all; `None` for
    /// other pools.
    pub(crate) fn plain_device(&self) -> Option<i32> {
        let is_plain = self.kind == ALLOCATION_PINNED
            && self.handle_types & !HANDLE_POSIX_FD == 0
            && self.location.kind == LOCATION_DEVICE
            && self.usage == 0;
        is_plain.then_some(self.location.id)
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

impl Access {
    /// Access of `device` with these flags.
    pub(crate) fn of_device(device: i32, flags: u32) -> Self {
        Self { location: Location { kind: LOCATION_DEVICE, id: device }, flags }
    }
}

/// `CUarrayMapInfo`, the parts before and after the handle left as they are.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ArrayMapInfo {
    pub(crate) before: [u64; 8],
    pub(crate) handle: u64,
    pub(crate) after: [u64; 3],
}

/// `CUipcMemHandle`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// `CUmemPoolPtrExportData`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PoolExport(pub(crate) [u8; 64]);

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy2d {
    pub(crate) from_x: usize,
    pub(crate) from_y: usize,
    pub(crate) from_kind: u32,
    pub(crate) from_host: u64,
    pub(crate) from_device: u64,
    pub(crate) from_array: u64,
    pub(crate) from_pitch: usize,
    pub(crate) to_x: usize,
    pub(crate) to_y: usize,
    pub(crate) to_kind: u32,
    pub(crate) to_host: u64,
    pub(crate) to_device: u64,
    pub(crate) to_array: u64,
    pub(crate) to_pitch: usize,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// One side of a [`Copy3d`].
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Copy3dSide {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) z: usize,
    pub(crate) lod: usize,
    pub(crate) kind: u32,
    pub(crate) host: u64,
    pub(crate) device: u64,
    pub(crate) array: u64,
    /// The context, in a copy between peers.
    pub(crate) context: u64,
    pub(crate) pitch: usize,
    pub(crate) height: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Copy3d {
    pub(crate) from: Copy3dSide,
    pub(crate) to: Copy3dSide,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ArrayDescriptor {
    pub(crate) extent: [usize; 3],
    pub(crate) format: u32,
    pub(crate) channels: u32,
    pub(crate) flags: u32,
}

impl ArrayDescriptor {
    /// Bytes of an element, or more in formats that are not plain numbers.
    pub(crate) fn element(&self) -> usize {
        let channel = match self.format {
            FORMAT_UNSIGNED_8 | FORMAT_SIGNED_8 => 1,
            FORMAT_UNSIGNED_16 | FORMAT_SIGNED_16 | FORMAT_HALF => 2,
            FORMAT_UNSIGNED_32 | FORMAT_SIGNED_32 | FORMAT_FLOAT => 4,
            _ => return LARGEST_ELEMENT,
        };
        LARGEST_ELEMENT.min(channel * self.channels as usize)
    }
}

/// Bytes of an array's element at most.
pub(crate) const LARGEST_ELEMENT: usize = 16;

/// `CUmemcpy3DOperand`; the words are address, row length, layer height and a location for a
/// pointer, and an array and the place in it for an array.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy3dOperand {
    pub(crate) kind: u32,
    pub(crate) words: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy3dOp {
    pub(crate) from: Copy3dOperand,
    pub(crate) to: Copy3dOperand,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) order: u32,
    pub(crate) flags: u32,
}

/// `CUlaunchConfig`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchConfig {
    /// Blocks in each direction, threads of a block in each direction.
    pub(crate) shape: [u32; 6],
    pub(crate) shared: u32,
    pub(crate) stream: u64,
    pub(crate) attributes: u64,
    pub(crate) count: u32,
}

/// `CUDA_LAUNCH_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct LaunchParams {
    pub(crate) function: u64,
    pub(crate) shape: [u32; 7],
    pub(crate) stream: u64,
    pub(crate) params: u64,
}

/// `CUstreamBatchMemOpParams`, as far as all kinds agree.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MemoryOp {
    pub(crate) operation: u32,
    pub(crate) address: u64,
    pub(crate) rest: [u64; 4],
}

/// `CUmemDecompressParams`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DecompressParams {
    pub(crate) from_bytes: usize,
    pub(crate) to_bytes: usize,
    pub(crate) actual_bytes: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) rest: [u32; 6],
}

/// `CUDA_KERNEL_NODE_PARAMS`, second version; the first lacks the last two members.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct KernelNodeParams {
    pub(crate) function: u64,
    pub(crate) shape: [u32; 7],
    pub(crate) params: u64,
    pub(crate) extra: u64,
    pub(crate) kernel: u64,
    pub(crate) context: u64,
}

/// `CUDA_MEMSET_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct FillParams {
    pub(crate) to: u64,
    pub(crate) pitch: usize,
    pub(crate) value: u32,
    pub(crate) value_size: u32,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// `CUDA_BATCH_MEM_OP_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct MemoryOpsParams {
    pub(crate) context: u64,
    pub(crate) count: u32,
    pub(crate) list: u64,
    pub(crate) flags: u32,
}

/// `CUgraphNodeParams`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct NodeParams {
    pub(crate) kind: u32,
    pub(crate) reserved: [u32; 3],
    /// What there is depends on the kind.
    pub(crate) params: [u64; 29],
    pub(crate) reserved_too: u64,
}

/// `CUDA_MEMCPY_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CopyNodeParams {
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
    pub(crate) context: u64,
    pub(crate) copy: Copy3d,
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys;
    use std::mem::{offset_of, size_of};

    #[test]
    fn layouts_are_the_drivers() {
        assert_eq!(size_of::<Location>(), size_of::<sys::CUmemLocation_st>());
        assert_eq!(size_of::<Access>(), size_of::<sys::CUmemAccessDesc_st>());
        assert_eq!(offset_of!(Access, flags), offset_of!(sys::CUmemAccessDesc_st, flags));
        assert_eq!(size_of::<AllocationProp>(), size_of::<sys::CUmemAllocationProp_st>());
        assert_eq!(size_of::<MulticastProp>(), size_of::<sys::CUmulticastObjectProp_st>());
        assert_eq!(
            offset_of!(MulticastProp, handle_types),
            offset_of!(sys::CUmulticastObjectProp_st, handleTypes)
        );
        assert_eq!(
            offset_of!(AllocationProp, compression),
            offset_of!(sys::CUmemAllocationProp_st, allocFlags)
        );
        assert_eq!(
            offset_of!(AllocationProp, location),
            offset_of!(sys::CUmemAllocationProp_st, location)
        );
        assert_eq!(size_of::<ArrayMapInfo>(), size_of::<sys::CUarrayMapInfo_st>());
        assert_eq!(offset_of!(ArrayMapInfo, handle), offset_of!(sys::CUarrayMapInfo_st, memHandle));
        assert_eq!(size_of::<IpcHandle>(), size_of::<sys::CUipcMemHandle_st>());
        assert_eq!(
            ATTRIBUTE_POOL_HANDLES,
            sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES as u32
        );
        assert_eq!(
            ATTRIBUTE_RDMA_WITH_VMM,
            sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
                as u32
        );
        assert_eq!(
            [ATTRIBUTE_VMM, ATTRIBUTE_POSIX_FD],
            [
                sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
                    as u32,
                sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
                    as u32
            ]
        );
    }

    #[test]
    fn elements_of_arrays() {
        let array = |format, channels| ArrayDescriptor { format, channels, ..Default::default() };
        let sizes = [(0x08, 1), (0x10, 2), (0x20, 4), (0xb0, 3)];
        let sizes = sizes.map(|(format, channels)| array(format, channels).element());
        assert_eq!(sizes, [1, 4, 16, LARGEST_ELEMENT]);
    }

    macro_rules! same {
        ($ours:ty, $theirs:ty, $($member:ident $field:ident),*) => {
            assert_eq!(size_of::<$ours>(), size_of::<$theirs>());
            $(assert_eq!(offset_of!($ours, $member), offset_of!($theirs, $field));)*
        };
    }

    #[test]
    #[rustfmt::skip]
    fn arguments_of_launches_and_copies_are_the_drivers() {
        same!(PoolProperties, sys::CUmemPoolProps_st, kind allocType, handle_types handleTypes,
            location location, most maxSize, usage usage);
        same!(PoolExport, sys::CUmemPoolPtrExportData_st,);
        same!(Copy2d, sys::CUDA_MEMCPY2D_st, from_x srcXInBytes, from_y srcY,
            from_kind srcMemoryType, from_host srcHost, from_device srcDevice, from_pitch srcPitch,
            to_x dstXInBytes, to_y dstY, to_kind dstMemoryType, to_host dstHost,
            to_device dstDevice, to_pitch dstPitch, width WidthInBytes, height Height);
        same!(Copy3d, sys::CUDA_MEMCPY3D_st, from srcXInBytes, to dstXInBytes,
            width WidthInBytes, height Height, depth Depth);
        same!(Copy3d, sys::CUDA_MEMCPY3D_PEER_st, from srcXInBytes, to dstXInBytes,
            width WidthInBytes, height Height, depth Depth);
        let side = |offset: usize| offset - offset_of!(sys::CUDA_MEMCPY3D_st, dstXInBytes);
        for (ours, theirs) in [
            (offset_of!(Copy3dSide, y), offset_of!(sys::CUDA_MEMCPY3D_st, dstY)),
            (offset_of!(Copy3dSide, z), offset_of!(sys::CUDA_MEMCPY3D_st, dstZ)),
            (offset_of!(Copy3dSide, kind), offset_of!(sys::CUDA_MEMCPY3D_st, dstMemoryType)),
            (offset_of!(Copy3dSide, host), offset_of!(sys::CUDA_MEMCPY3D_st, dstHost)),
            (offset_of!(Copy3dSide, device), offset_of!(sys::CUDA_MEMCPY3D_st, dstDevice)),
            (offset_of!(Copy3dSide, pitch), offset_of!(sys::CUDA_MEMCPY3D_st, dstPitch)),
            (offset_of!(Copy3dSide, height), offset_of!(sys::CUDA_MEMCPY3D_st, dstHeight)),
        ] {
            assert_eq!(ours, side(theirs));
        }
        same!(ArrayDescriptor, sys::CUDA_ARRAY3D_DESCRIPTOR_st, extent Width, format Format,
            channels NumChannels, flags Flags);
        same!(Copy3dOperand, sys::CUmemcpy3DOperand_st, kind type_);
        same!(Copy3dOp, sys::CUDA_MEMCPY3D_BATCH_OP_st, from src, to dst, width extent);
        same!(LaunchParams, sys::CUDA_LAUNCH_PARAMS_st, function function, params kernelParams);
        same!(MemoryOp, sys::CUstreamBatchMemOpParams_union,);
        same!(DecompressParams, sys::CUmemDecompressParams_st, from_bytes srcNumBytes,
            to_bytes dstNumBytes, actual_bytes dstActBytes, from src, to dst);
        same!(KernelNodeParams, sys::CUDA_KERNEL_NODE_PARAMS_v2_st, function func,
            params kernelParams, extra extra, kernel kern, context ctx);
        same!(FillParams, sys::CUDA_MEMSET_NODE_PARAMS_st, to dst, pitch pitch,
            value_size elementSize, width width, height height);
        same!(MemoryOpsParams, sys::CUDA_BATCH_MEM_OP_NODE_PARAMS_v1_st, count count,
            list paramArray);
        same!(LaunchConfig, sys::CUlaunchConfig_st, shape gridDimX, shared sharedMemBytes,
            stream hStream, attributes attrs, count numAttrs);
        same!(NodeParams, sys::CUgraphNodeParams_st, kind type_, params __bindgen_anon_1);
        same!(CopyNodeParams, sys::CUDA_MEMCPY_NODE_PARAMS_st, context copyCtx, copy copyParams);
        assert_eq!(MEMORY_DEVICE, sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32);
        assert_eq!(MEMORY_UNIFIED, sys::CUmemorytype_enum::CU_MEMORYTYPE_UNIFIED as u32);
        let pointer = sys::CUmemcpy3DOperandType_enum::CU_MEMCPY_OPERAND_TYPE_POINTER;
        assert_eq!(OPERAND_POINTER, pointer as u32);
        let array = sys::CUmemcpy3DOperandType_enum::CU_MEMCPY_OPERAND_TYPE_ARRAY;
        assert_eq!(OPERAND_ARRAY, array as u32);
    }

    #[test]
    fn numbers_are_the_drivers() {
        use sys::CUarray_format_enum::*;
        use sys::CUgraphNodeType_enum::*;
        use sys::CUmemPool_attribute_enum::*;
        use sys::CUpointer_attribute_enum::*;
        use sys::CUstreamBatchMemOpType_enum::*;
        use sys::cudaError_enum::*;
        let numbers = [
            (ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE as u32),
            (ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE as u32),
            (ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE as u32),
            (ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS as u32),
            (ERROR_LAUNCH_TIMEOUT, CUDA_ERROR_LAUNCH_TIMEOUT as u32),
            (ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED as u32),
            (ERROR_ASSERT, CUDA_ERROR_ASSERT as u32),
            (ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR as u32),
            (ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED as u32),
            (POOL_THRESHOLD, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD as u32),
            (POOL_RESERVED, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as u32),
            (POOL_RESERVED_HIGH, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as u32),
            (POOL_USED, CU_MEMPOOL_ATTR_USED_MEM_CURRENT as u32),
            (POOL_USED_HIGH, CU_MEMPOOL_ATTR_USED_MEM_HIGH as u32),
            (POINTER_CONTEXT, CU_POINTER_ATTRIBUTE_CONTEXT as u32),
            (POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE as u32),
            (POINTER_SYNC_MEMOPS, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS as u32),
            (POINTER_BUFFER_ID, CU_POINTER_ATTRIBUTE_BUFFER_ID as u32),
            (POINTER_IS_MANAGED, CU_POINTER_ATTRIBUTE_IS_MANAGED as u32),
            (POINTER_IS_LEGACY_IPC_CAPABLE, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE as u32),
            (POINTER_RANGE_START, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR as u32),
            (POINTER_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_SIZE as u32),
            (POINTER_ALLOWED_HANDLE_TYPES, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES as u32),
            (POINTER_POOL, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE as u32),
            (POINTER_MAPPING_SIZE, CU_POINTER_ATTRIBUTE_MAPPING_SIZE as u32),
            (POINTER_MAPPING_BASE, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as u32),
            (EXTRA_BUFFER as u32, sys::CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT),
            (EXTRA_SIZE as u32, sys::CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT),
            (STREAM_WAIT_32, CU_STREAM_MEM_OP_WAIT_VALUE_32 as u32),
            (STREAM_WRITE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32 as u32),
            (STREAM_WAIT_64, CU_STREAM_MEM_OP_WAIT_VALUE_64 as u32),
            (STREAM_WRITE_64, CU_STREAM_MEM_OP_WRITE_VALUE_64 as u32),
            (NODE_KERNEL, CU_GRAPH_NODE_TYPE_KERNEL as u32),
            (NODE_COPY, CU_GRAPH_NODE_TYPE_MEMCPY as u32),
            (NODE_FILL, CU_GRAPH_NODE_TYPE_MEMSET as u32),
            (NODE_HOST, CU_GRAPH_NODE_TYPE_HOST as u32),
            (NODE_CHILD, CU_GRAPH_NODE_TYPE_GRAPH as u32),
            (*NODES_WITHOUT_EFFECT.start(), CU_GRAPH_NODE_TYPE_EMPTY as u32),
            (*NODES_WITHOUT_EFFECT.end(), CU_GRAPH_NODE_TYPE_MEM_FREE as u32),
            (NODE_MEMORY_OPS, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP as u32),
            (FORMAT_UNSIGNED_8, CU_AD_FORMAT_UNSIGNED_INT8 as u32),
            (FORMAT_UNSIGNED_16, CU_AD_FORMAT_UNSIGNED_INT16 as u32),
            (FORMAT_UNSIGNED_32, CU_AD_FORMAT_UNSIGNED_INT32 as u32),
            (FORMAT_SIGNED_8, CU_AD_FORMAT_SIGNED_INT8 as u32),
            (FORMAT_SIGNED_16, CU_AD_FORMAT_SIGNED_INT16 as u32),
            (FORMAT_SIGNED_32, CU_AD_FORMAT_SIGNED_INT32 as u32),
            (FORMAT_HALF, CU_AD_FORMAT_HALF as u32),
            (FORMAT_FLOAT, CU_AD_FORMAT_FLOAT as u32),
        ];
        for (number, (ours, theirs)) in numbers.into_iter().enumerate() {
            assert_eq!(ours, theirs, "in line {number} of the list");
        }
    }
}
