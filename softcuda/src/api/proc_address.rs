//! `cuGetProcAddress`: from a name without suffixes to the newest function of that name that the
//! caller's version of the API knows.

use super::arguments::{Out, Text};
use super::driver_api;
use super::newer;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// What the build script generates from the list of names.
mod symbols {
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}
#[cfg(test)]
pub(super) use symbols::IMPLEMENTED;
use symbols::NEWER;
pub(super) use symbols::SYMBOLS;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const PER_THREAD: u64 = 2;

/// `CUdriverProcAddressQueryResult`.
const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;
const TOO_NEW: u32 = 2;

/// The version of the API since when a function with a version suffix exists, where that is not
/// 3.2 (the change to 64-bit sizes, which made most of them).
static SINCE: &[(&str, i32)] = &[
    ("cuCtxCreate_v3", 11040),
    ("cuCtxCreate_v4", 12050),
    ("cuCtxDestroy_v2", 4000),
    ("cuCtxGetDevice_v2", 13000),
    ("cuCtxPopCurrent_v2", 4000),
    ("cuCtxPushCurrent_v2", 4000),
    ("cuCtxSynchronize_v2", 13000),
    ("cuDeviceGetUuid_v2", 11040),
    ("cuDevicePrimaryCtxRelease_v2", 11000),
    ("cuDevicePrimaryCtxReset_v2", 11000),
    ("cuDevicePrimaryCtxSetFlags_v2", 11000),
    ("cuEventDestroy_v2", 4000),
    ("cuEventElapsedTime_v2", 12080),
    ("cuGLGetDevices_v2", 6050),
    ("cuGetProcAddress_v2", 12000),
    ("cuGraphAddDependencies_v2", 12030),
    ("cuGraphAddKernelNode_v2", 12000),
    ("cuGraphAddNode_v2", 12030),
    ("cuGraphExecKernelNodeSetParams_v2", 12000),
    ("cuGraphExecUpdate_v2", 12000),
    ("cuGraphGetEdges_v2", 12030),
    ("cuGraphInstantiate_v2", 11000),
    ("cuGraphKernelNodeGetParams_v2", 12000),
    ("cuGraphKernelNodeSetParams_v2", 12000),
    ("cuGraphNodeGetDependencies_v2", 12030),
    ("cuGraphNodeGetDependentNodes_v2", 12030),
    ("cuGraphRemoveDependencies_v2", 12030),
    ("cuGraphicsResourceSetMapFlags_v2", 6050),
    ("cuIpcOpenMemHandle_v2", 11000),
    ("cuLinkAddData_v2", 6050),
    ("cuLinkAddFile_v2", 6050),
    ("cuLinkCreate_v2", 6050),
    ("cuMemAdvise_v2", 12020),
    ("cuMemGetAttribute_v2", 13000),
    ("cuMemHostRegister_v2", 6050),
    ("cuMemPrefetchAsync_v2", 12020),
    ("cuMemcpy3DBatchAsync_v2", 13000),
    ("cuMemcpyBatchAsync_v2", 13000),
    ("cuStreamBatchMemOp_v2", 11070),
    ("cuStreamBeginCapture_v2", 10010),
    ("cuStreamDestroy_v2", 4000),
    ("cuStreamGetCaptureInfo_v2", 11030),
    ("cuStreamGetCaptureInfo_v3", 12030),
    ("cuStreamGetCtx_v2", 12050),
    ("cuStreamUpdateCaptureDependencies_v2", 12030),
    ("cuStreamWaitValue32_v2", 11070),
    ("cuStreamWaitValue64_v2", 11070),
    ("cuStreamWriteValue32_v2", 11070),
    ("cuStreamWriteValue64_v2", 11070),
    ("cuTexRefSetAddress2D_v3", 4010),
];

fn since(name: &str, generation: u32) -> i32 {
    let known = SINCE.binary_search_by_key(&name, |(name, _)| name).map(|index| SINCE[index].1);
    let newer = || NEWER.binary_search_by_key(&name, |(name, ..)| name).map(|index| NEWER[index].1);
    match known.or_else(|_| newer()).ok() {
        Some(version) => version,
        None if generation == 1 => 2000,
        None => 3020,
    }
}

fn exported(name: &str) -> Option<u64> {
    if let Ok(index) = SYMBOLS.binary_search_by_key(&name, |(name, _)| name) {
        return Some(SYMBOLS[index].1 as usize as u64);
    }
    let index = NEWER.binary_search_by_key(&name, |(name, ..)| name).ok()?;
    let (_, since, function) = NEWER[index];
    (since <= settings().driver.version()).then_some(function as usize as u64)
}

/// The address for a name, or why there is none.
fn look_up(name: &str, version: i32, flags: u64) -> Result<u64, u32> {
    let mut too_new = false;
    for generation in (1..=4).rev() {
        let full = match generation {
            1 => name.to_owned(),
            generation => format!("{name}_v{generation}"),
        };
        let per_thread = (flags & PER_THREAD != 0)
            .then(|| {
                exported(&format!("{full}_ptsz")).or_else(|| exported(&format!("{full}_ptds")))
            })
            .flatten();
        if let Some(address) = per_thread.or_else(|| exported(&full)) {
            if since(&full, generation) <= version {
                return Ok(address);
            }
            too_new = true;
        }
    }
    Err(if too_new { TOO_NEW } else { NOT_FOUND })
}

fn get(
    name: &Text,
    out: &Out<u64>,
    version: i32,
    flags: u64,
    status: Option<&Out<u32>>,
) -> Outcome {
    let name = name.get()?;
    out.check()?;
    if flags & !3 != 0 || version > newest() {
        return Err(Code::INVALID_VALUE);
    }
    let found = newer::find(name, version).map_or_else(|| look_up(name, version, flags), Ok);
    if let Some(status) = status {
        status.set_if_wanted(found.err().unwrap_or(FOUND));
    }
    out.set(found.unwrap_or(0))?;
    // The form with a status succeeds with null, the one without has to say it.
    if status.is_some() { Ok(()) } else { found.map(|_| ()).map_err(|_| Code::NOT_FOUND) }
}

/// The latest version that a caller may name: the driver's own.
fn newest() -> i32 {
    if settings().newer { newer::NEWEST } else { settings().driver.version() }
}

driver_api! {
    early fn cuGetProcAddress(name: Text, out: Out<u64>, version: i32, flags: u64) {
        get(&name, &out, version, flags, None)
    }

    early fn cuGetProcAddress_v2(
        name: Text, out: Out<u64>, version: i32, flags: u64, status: Out<u32>,
    ) {
        get(&name, &out, version, flags, Some(&status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sorted_and_complete() {
        assert_eq!(SYMBOLS.len(), 682);
        assert!(NEWER.is_sorted_by_key(|(name, ..)| *name));
        assert!(SYMBOLS.is_sorted_by_key(|(name, _)| *name));
        assert!(SINCE.is_sorted_by_key(|(name, _)| *name));
        for (name, _) in SINCE {
            assert!(exported(name).is_some(), "{name}");
        }
    }

    #[test]
    fn the_newest_function_that_the_caller_knows() {
        let at = |name: &str| exported(name).unwrap();
        assert_eq!(look_up("cuMemAlloc", 13000, 0), Ok(at("cuMemAlloc_v2")));
        assert_eq!(look_up("cuMemAlloc", 2000, 0), Ok(at("cuMemAlloc")));
        assert_eq!(look_up("cuCtxCreate", 12000, 0), Ok(at("cuCtxCreate_v3")));
        assert_eq!(look_up("cuCtxCreate", 13000, 0), Ok(at("cuCtxCreate_v4")));
        assert_eq!(look_up("cuLaunchKernel", 13000, 2), Ok(at("cuLaunchKernel_ptsz")));
        assert_eq!(look_up("cuMemcpyHtoD", 13000, 2), Ok(at("cuMemcpyHtoD_v2_ptds")));
        assert_eq!(look_up("cuMemcpyHtoD", 13000, 1), Ok(at("cuMemcpyHtoD_v2")));
        assert_eq!(look_up("cuInit", 13000, 2), Ok(at("cuInit")));
        for name in ["cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync"] {
            assert_eq!(look_up(name, 12080, 0), Ok(at(name)));
            assert_eq!(look_up(name, 13000, 0), Ok(at(&format!("{name}_v2"))));
            assert_eq!(look_up(name, 12080, 2), Ok(at(&format!("{name}_ptsz"))));
            assert_eq!(look_up(name, 13000, 2), Ok(at(&format!("{name}_v2_ptsz"))));
        }
        assert_eq!(look_up("cuStreamBatchMemOp", 11060, 0), Ok(at("cuStreamBatchMemOp")));
        assert_eq!(look_up("cuStreamBatchMemOp", 11070, 0), Ok(at("cuStreamBatchMemOp_v2")));
        assert_eq!(look_up("cuNothing", 13000, 0), Err(NOT_FOUND));
        assert_eq!(look_up("cuMemAlloc", 1000, 0), Err(TOO_NEW));
    }
}
