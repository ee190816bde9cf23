//! The README's table of what is implemented, which a test keeps current.

use super::proc_address::{IMPLEMENTED, SYMBOLS};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

#[path = "../../tests/support/readme.rs"]
mod readme;

/// Parts of the API by the beginnings of names; the longest beginning that fits counts.
const PARTS: &[(&str, &[&str])] = &[
    ("initialisation, errors, versions", &["Init", "Driver", "GetError", "GetProc", "GetExport"]),
    ("devices", &["Device", "CtxGetExecAffinity"]),
    ("contexts", &["Ctx", "DevicePrimaryCtx"]),
    ("peer access", &["CtxEnablePeer", "CtxDisablePeer", "DeviceCanAccess", "DeviceGetP2P"]),
    ("modules and functions", &["Module", "Func", "ParamSet"]),
    ("libraries and kernels", &["Library", "Kernel"]),
    ("linker", &["Link"]),
    ("launches", &["Launch"]),
    ("occupancy", &["Occupancy"]),
    ("plain and pinned memory", &["Mem", "Pointer"]),
    ("copies and fills", &["Memcpy", "Memset", "MemBatchDecompress"]),
    (
        "virtual memory management",
        &[
            "MemAddress",
            "MemCreate",
            "MemRelease",
            "MemMap",
            "MemUnmap",
            "MemSetAccess",
            "MemGetAccess",
            "MemExport",
            "MemImport",
            "MemRetain",
            "MemGetAllocation",
            "MemGetHandle",
        ],
    ),
    (
        "managed memory",
        &["MemAllocManaged", "MemAdvise", "MemPrefetch", "MemRange", "MemDiscard", "StreamAttach"],
    ),
    (
        "stream-ordered pools",
        &[
            "MemPool",
            "MemAllocAsync",
            "MemFreeAsync",
            "MemAllocFromPool",
            "MemGetDefault",
            "MemGetMemPool",
            "MemSetMemPool",
            "DeviceGetDefaultMemPool",
            "DeviceGetMemPool",
            "DeviceSetMemPool",
        ],
    ),
    ("IPC handles", &["Ipc"]),
    ("streams", &["Stream"]),
    (
        "stream capture",
        &[
            "StreamBeginCapture",
            "StreamEndCapture",
            "StreamIsCapturing",
            "StreamGetCapture",
            "StreamUpdateCapture",
            "ThreadExchange",
        ],
    ),
    ("events", &["Event"]),
    ("graphs", &["Graph", "UserObject", "DeviceGetGraph", "DeviceSetGraph", "DeviceGraph"]),
    ("checkpoint", &["Checkpoint"]),
    (
        "arrays, textures, surfaces",
        &[
            "Array",
            "Mipmapped",
            "Tex",
            "Surf",
            "MemcpyAto",
            "MemcpyDtoA",
            "MemcpyHtoA",
            "TensorMap",
            "DeviceGetTexture",
            "MemMapArray",
        ],
    ),
    (
        "graphics and external memory",
        &[
            "GL",
            "EGL",
            "VDPAU",
            "Graphics",
            "ImportExternal",
            "DestroyExternal",
            "External",
            "SignalExternal",
            "WaitExternal",
            "D3D",
            "DeviceGetNvSci",
            "DeviceGetLuid",
        ],
    ),
    ("green contexts", &["GreenCtx", "DevResource", "DeviceGetDevResource", "DevSm"]),
    ("multicast", &["Multicast"]),
    ("core dumps, profiler, logs", &["Coredump", "Profiler", "Logs"]),
];

/// The name without what tells versions and default streams apart.
fn base(name: &str) -> &str {
    let name = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")).unwrap_or(name);
    match name.rsplit_once("_v") {
        Some((base, version)) if version.parse::<u32>().is_ok() => base,
        _ => name,
    }
}

fn part(name: &str) -> &'static str {
    let name = &name[2..];
    let fits = PARTS.iter().flat_map(|(part, starts)| starts.iter().map(move |s| (*part, *s)));
    let longest = fits.filter(|(_, start)| name.starts_with(start)).max_by_key(|(_, s)| s.len());
    longest.map_or("others", |(part, _)| part)
}

/// The table, from the same lists that the exported functions are made of.
fn table() -> String {
    let all: BTreeSet<&str> = SYMBOLS.iter().map(|(name, _)| base(name)).collect();
    let done: BTreeSet<&str> = IMPLEMENTED.iter().map(|name| base(name)).collect();
    let mut parts: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in &all {
        parts.entry(part(name)).or_default().push(name);
    }
    let mut table = format!(
        "{} of the {} functions do something (versions and default streams of one function are \
         counted\nonce):\n\n| part | there | of | not there |\n|---|---|---|---|\n",
        done.len(),
        all.len()
    );
    let order = PARTS.iter().map(|(part, _)| *part).chain(["others"]);
    for (part, names) in order.filter_map(|part| parts.get(part).map(|names| (part, names))) {
        let missing: Vec<&str> =
            names.iter().filter(|name| !done.contains(*name)).map(|name| &name[2..]).collect();
        let there = names.len() - missing.len();
        let missing = if there == 0 { "all".to_owned() } else { missing.join(", ") };
        writeln!(table, "| {part} | {there} | {} | {missing} |", names.len())
            .expect("writing to a string cannot fail");
    }
    table
}

#[test]
fn the_readme_has_the_current_table() {
    readme::check("coverage", &table());
}
