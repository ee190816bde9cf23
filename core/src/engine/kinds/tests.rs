use std::collections::BTreeSet;

use super::*;

fn counts() -> Counts {
    Counts {
        allocations: 1,
        bulk_bytes: 2,
        blocks: 3,
        pool_bytes: 4,
        private: false,
        arrays: 5,
        pinned_bytes: 6,
        managed: 7,
        shared: 8,
        unsupported: vec![
            "cuMulticastCreate".into(),
            "cuTomorrow".into(),
            "cuIpcGetEventHandle".into(),
        ],
        ungated: Vec::new(),
        launches: 9,
        devices: Vec::new(),
        identity: [0; 16],
        owners: Vec::new(),
        openers: Vec::new(),
        multicast: 1,
    }
}

#[test]
fn what_nobody_carries_is_refused_in_words() {
    let expected = [
        "cuMulticastCreate",
        "cuTomorrow",
        "cuIpcGetEventHandle",
        "managed memory (7 allocations)",
        "memory shared with other processes (8 handles)",
    ];
    assert_eq!(refused(&counts(), by_driver), expected);
    assert!(
        refused(&Counts { bulk_bytes: 1, arrays: 1, ..Counts::default() }, by_driver).is_empty()
    );
    // Another carrier may carry other kinds, and what nobody knows yet is carried by none.
    let all_but_ipc = |kind: &dyn Kind| kind.name() != ipc::Ipc.name();
    let left =
        ["cuTomorrow", "cuIpcGetEventHandle", "memory shared with other processes (8 handles)"];
    assert_eq!(refused(&counts(), all_but_ipc), left);
    let nothing = Counts { private: true, arrays: 1, ..Counts::default() };
    let words = ["arrays", "memory that cannot be handed to another process"];
    assert_eq!(refused(&nothing, |_| false), words);
}

#[test]
fn what_is_carried_is_counted_and_described() {
    let counts = counts();
    assert_eq!(driver_bytes(&counts), 10);
    assert_eq!(private_bytes(&counts), 0);
    assert_eq!(private_bytes(&Counts { private: true, ..counts.clone() }), 4);
    let said = describe(&counts);
    let expected =
        image::Counts { allocations: 1, pool_bytes: 4, arrays: 5, pinned_bytes: 6, launches: 9 };
    assert_eq!(said, expected);
    let shown = [
        ("allocations", 1),
        ("pool_bytes", 4),
        ("arrays", 5),
        ("pinned_bytes", 6),
        ("launches", 9),
    ];
    assert_eq!(inspect(&said), shown);
}

/// Functions that the shim follows by code of its own, and of which it tells while what they made lives.
const FOLLOWED: [&str; 29] = [
    "cuEGLStreamConsumerConnect",
    "cuEGLStreamConsumerConnectWithFlags",
    "cuEGLStreamProducerConnect",
    "cuExternalMemoryGetMappedBuffer",
    "cuExternalMemoryGetMappedMipmappedArray",
    "cuGLCtxCreate",
    "cuGLRegisterBufferObject",
    "cuGraphicsEGLRegisterImage",
    "cuGraphicsGLRegisterBuffer",
    "cuGraphicsGLRegisterImage",
    "cuGraphicsVDPAURegisterOutputSurface",
    "cuGraphicsVDPAURegisterVideoSurface",
    "cuImportExternalMemory",
    "cuImportExternalSemaphore",
    "cuIpcGetEventHandle",
    "cuIpcOpenEventHandle",
    "cuLogicalEndpointBindMem",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemMapArrayAsync",
    "cuMemMapArrayAsync_ptsz",
    "cuMemPoolExportToShareableHandle",
    "cuMemPoolImportFromShareableHandle",
    "cuMulticastAddDevice",
    "cuMulticastBindAddr",
    "cuMulticastBindMem",
    "cuMulticastBindMem_v2",
    "cuMulticastCreate",
    "cuVDPAUCtxCreate",
];

#[test]
fn each_function_of_which_an_agent_tells_is_of_one_kind() {
    let table = concat!(env!("CARGO_MANIFEST_DIR"), "/../intercept/driver.table");
    let table = std::fs::read_to_string(table).unwrap();
    let lines = table.lines().filter(|line| !line.starts_with('#'));
    let functions: Vec<(&str, &str)> = lines
        .filter_map(|line| {
            let mut words = line.split(' ');
            words.next().zip(words.next())
        })
        .collect();
    for function in FOLLOWED {
        assert!(functions.contains(&(function, "track")), "{function} is not in the table");
    }
    let noted = functions.iter().filter(|(_, class)| *class == "note").map(|(name, _)| *name);
    for function in noted.chain(FOLLOWED) {
        let is_of = |kind: &&dyn Kind| kind.functions().iter().any(|f| function.starts_with(f));
        let kinds: Vec<&str> = KINDS.into_iter().filter(is_of).map(Kind::name).collect();
        assert_eq!(kinds.len(), 1, "{function} is of {kinds:?}");
    }
}

#[test]
fn every_kind_has_its_name_and_a_carrier_that_fits() {
    let names: BTreeSet<&str> = KINDS.into_iter().map(Kind::name).collect();
    assert_eq!(names.len(), KINDS.len());
    for kind in KINDS {
        let is_told_by_name = !kind.functions().is_empty();
        assert!(!is_told_by_name || kind.carrier() == Carrier::Nobody, "{}", kind.name());
        // A process that has something of it says so, or has it in blocks.
        let is_told = is_told_by_name
            || kind.survey(&Counts { private: true, ..counts() }) != Amount::default();
        assert!(is_told || kind.carrier() == Carrier::Gpucr, "{}", kind.name());
    }
    for kind in [BlockKind::Heap, BlockKind::Program] {
        assert_eq!(of_block(kind).carrier(), Carrier::Gpucr);
    }
}
