//! Drivers that cannot hand device memory to another process: they keep it, and their checkpoint saves it.

#[path = "support/ways.rs"]
mod program_body;
mod support;

use gpucr_wire::{GateState, Reply, Request};
use support::{ENV_PROGRAM, Program, checkpoint};

const MIB: u64 = 1 << 20;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        program_body::run();
    }
}

#[test]
fn memory_that_cannot_be_exported_is_left_to_the_driver() {
    for vmm in ["private", "none"] {
        let mut program = Program::start_with(&[("SOFTCUDA_VMM", vmm)]);
        let (mut agent, _) = program.agent();
        let counts = agent.counts();
        assert!(counts.private, "{vmm}");
        assert_eq!((counts.blocks, counts.allocations), (0, 0), "{vmm}");
        assert_eq!(counts.pool_bytes, 8 * MIB, "{vmm}");
        assert_eq!(counts.unsupported, [""; 0], "{vmm}");
        // All of it goes through the driver's checkpoint.
        agent.must(&Request::CloseGate { timeout_ms: 20_000 });
        assert_eq!(agent.export().0.len(), 0, "{vmm}");
        agent.must(&Request::Detach {});
        checkpoint(program.pid(), &["Lock", "Checkpoint"]);
        checkpoint(program.pid(), &["Restore", "Unlock"]);
        let (mut agent, hello) = program.agent();
        assert_eq!(hello.gate, GateState::Detached {});
        assert_eq!(agent.reattach(&[], &[]), Reply::Done {});
        agent.must(&Request::OpenGate {});
        for call in [
            "symbol cuMemcpyDtoH_v2 out from 8",
            "symbol cuMemFree_v2 to",
            "symbol cuMemAllocPitch_v2 out out 1000 1000 4",
        ] {
            assert_eq!(program.ask(call), "0", "{vmm}: {call}");
        }
        let counts = agent.counts();
        assert_eq!((counts.blocks, counts.pool_bytes), (0, 4 * MIB + 1024 * 1000), "{vmm}");
    }
}

#[test]
fn other_memory_is_served_from_blocks() {
    let program = Program::start();
    let (mut agent, _) = program.agent();
    let counts = agent.counts();
    assert!(!counts.private);
    assert_eq!((counts.allocations, counts.pool_bytes), (2, 0));
}
