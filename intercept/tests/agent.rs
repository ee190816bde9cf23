//! The whole shim: a program on the software driver, and its agent driven from outside.

#[path = "support/program.rs"]
mod program_body;
mod support;

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use gpucr_wire::{Block, BlockKind, Connection, GateState, PROTOCOL_VERSION, Reply, Request};
use program_body::{LARGE, SMALL};
use support::{ENV_PROGRAM, Program, checkpoint, driver, is_soft, shim};

const MIB: u64 = 1 << 20;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        program_body::run();
    }
}

/// Reads all of a block of the software driver, whose file descriptors are plain memory.
fn bytes(fd: &OwnedFd, block: &Block) -> Vec<u8> {
    let file = File::from(fd.try_clone().expect("cloned"));
    let mut bytes = vec![0; block.size as usize];
    file.read_exact_at(&mut bytes, 0).expect("read");
    bytes
}

fn is_filled(bytes: &[u8], word: u32) -> bool {
    bytes.chunks_exact(4).all(|chunk| chunk == word.to_le_bytes())
}

#[test]
fn the_agent_says_who_it_is_and_what_the_program_holds() {
    let program = Program::start();
    let (mut agent, hello) = program.agent();
    assert_eq!(hello.protocol, PROTOCOL_VERSION);
    assert_eq!(hello.pid, program.pid());
    assert_eq!(hello.gate, GateState::Open {});
    assert_eq!(hello.shim, shim().canonicalize().expect("there").to_string_lossy());
    assert_eq!(hello.driver, driver().to_string_lossy());
    assert!(hello.driver_version >= 12_000);
    let counts = agent.counts();
    assert_eq!(counts.allocations, SMALL + LARGE.len() as u64);
    // 10,000 small ones in 5 shared blocks, 3 large ones, 2 of the program's own.
    assert_eq!(counts.blocks, 10);
    assert_eq!(counts.bulk_bytes, (5 * 2 + 4 + 20 + 2 + 2 * 2) * MIB);
    assert_eq!(counts.pinned_bytes, MIB);
    assert_eq!((counts.managed, counts.shared, counts.pool_bytes), (0, 0, 0));
    assert!(counts.unsupported.is_empty());
    assert_eq!(counts.devices.len(), 1);
    drop(agent);
    let (mut agent, _) = program.agent();
    let reply = agent.ask(&Request::Hello { protocol: PROTOCOL_VERSION + 1 });
    assert!(matches!(reply, Reply::Hello { hello } if hello.protocol == PROTOCOL_VERSION));
    assert!(agent.closes());
}

#[test]
fn programs_get_the_answers_that_they_expect() {
    let mut program = Program::start();
    assert_eq!(program.ask("questions"), "answered");
    assert_eq!(program.ask("check"), "as it was");
    assert_eq!(program.ask("fork"), "child 0");
    assert_eq!(program.ask("free"), "3 left");
    let (mut agent, _) = program.agent();
    let counts = agent.counts();
    assert_eq!(counts.allocations, 0);
    assert_eq!(counts.blocks, 3, "one empty block is kept, and the program's two");
}

#[test]
fn blocks_are_listed_while_the_program_runs() {
    let mut program = Program::start();
    let (mut agent, _) = program.agent();
    let (all, fds) = agent.export();
    assert_eq!(fds.len(), all.len());
    assert_eq!(program.ask("check"), "as it was", "the gate is open");
    let ids: Vec<u64> = all.iter().map(|block| block.id).collect();
    assert_eq!(agent.export_but(&ids).1.len(), 0);
    assert_eq!(agent.export_but(&ids[1..]).1.len(), 1, "asked for again");
    // What was listed before the gate was closed is not enough to take the memory away.
    agent.must(&Request::CloseGate { timeout_ms: 10_000 });
    agent.fails(&Request::Detach {});
    assert_eq!(agent.export_but(&ids).1.len(), 0);
    agent.must(&Request::OpenGate {});
    assert_eq!(program.ask("free"), "3 left");
    let (left, new) = agent.export_but(&ids);
    assert!(new.is_empty() && left.iter().all(|block| ids.contains(&block.id)));
    assert_eq!(left.len(), 3);
    drop(fds);
    agent.cycle(&program);
}

/// While CRIU looks at the program, nobody may be connected to it.
#[test]
fn a_detached_program_is_connected_to_those_who_wake_it() {
    let program = Program::start();
    let (mut agent, _) = program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    let (blocks, fds) = agent.export();
    agent.must(&Request::Detach {});
    let namespace = gpucr_wire::pid_namespace(program.pid()).expect("it runs");
    let name = gpucr_wire::agent_socket(namespace, program.pid());
    let soon = || Some(Instant::now() + Duration::from_millis(300));
    let mut stranger = Connection::connect(&name, soon(), None).expect("there is a place");
    stranger.send(&Request::Hello { protocol: PROTOCOL_VERSION }).expect("it is kept for later");
    let answer = stranger.receive::<Reply>().expect_err("nobody is accepted");
    assert_eq!(answer.kind(), std::io::ErrorKind::TimedOut);
    let full = Connection::connect(&name, soon(), None).expect_err("there is one place");
    assert_eq!(full.kind(), std::io::ErrorKind::TimedOut);
    drop(stranger);
    let (mut agent, hello) = program.agent();
    assert_eq!(hello.gate, GateState::Detached {});
    assert_eq!(agent.reattach(&blocks, &fds), Reply::Done {});
    agent.must(&Request::OpenGate {});
    agent.cycle(&program);
}

#[test]
fn memory_is_taken_away_and_put_back_again_and_again() {
    let mut program = Program::start();
    let before = program.lowest_free_descriptor();
    for round in 0..3 {
        let (mut agent, _) = program.agent();
        agent.fails(&Request::Detach {});
        agent.must(&Request::OpenGate {});
        agent.must(&Request::CloseGate { timeout_ms: 10_000 });
        program.tell("memset");
        assert_eq!(program.line(100), None, "a call has passed the closed gate");
        agent.fails(&Request::Detach {});
        let (blocks, fds) = agent.export();
        assert_eq!(blocks.len(), 10);
        assert_eq!(blocks.iter().filter(|b| b.kind == (BlockKind::Program {})).count(), 2);
        let small: u32 = blocks.iter().filter(|b| b.size == 2 * MIB).map(|b| b.allocations).sum();
        assert_eq!(u64::from(small), SMALL + 1 + 3, "allocations, and mappings of the program's");
        let large = blocks.iter().position(|b| b.size == 20 * MIB).expect("the largest");
        assert!(!is_soft() || is_filled(&bytes(&fds[large], &blocks[large]), LARGE[1].1));
        agent.must(&Request::Detach {});
        assert!(agent.closes());

        let (mut agent, hello) = program.agent();
        assert_eq!(hello.gate, GateState::Detached {});
        agent.fails(&Request::OpenGate {});
        drop(agent);
        checkpoint(program.pid(), &["Lock", "Checkpoint"]);
        let (mut agent, hello) = program.agent();
        assert_eq!(hello.gate, GateState::Detached {});
        assert_eq!(agent.counts().devices.len(), 1, "the frozen driver was not asked");
        drop(agent);
        checkpoint(program.pid(), &["Restore", "Unlock"]);

        let (mut agent, _) = program.agent();
        assert!(matches!(agent.reattach(&blocks[1..], &fds[1..]), Reply::Failed { .. }));
        assert_eq!(agent.reattach(&blocks, &fds), Reply::Done {});
        drop(fds);
        assert_eq!(program.line(50), None, "the gate is still closed");
        agent.must(&Request::OpenGate {});
        assert_eq!(program.line(20_000).as_deref(), Some("set"), "round {round}");
        assert_eq!(program.ask("check"), "as it was", "round {round}");
        assert_eq!(agent.counts().blocks, 10);
        drop(agent);
        // The agent closes its end a moment later. NVIDIA's driver comes back with other
        // descriptors of its own, so nothing can be said there.
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_soft() && program.lowest_free_descriptor() > before {
            assert!(Instant::now() < deadline, "low numbers are not left to the program");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    assert_eq!(program.ask("free"), "3 left");
}

#[test]
fn memory_is_copied_from_inside() {
    let mut program = Program::start();
    let len = 8 * MIB;
    let file = tempfile::tempfile().expect("a file");
    file.set_len(len).expect("sized");
    let staging: OwnedFd = file.try_clone().expect("cloned").into();
    let (mut agent, _) = program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 10_000 });
    agent.fails(&Request::CopyOut { block: 1, offset: 0, len: 1 });
    agent.stage(&staging, len);
    let (blocks, fds) = agent.export();
    let mut saved: Vec<Vec<u8>> = Vec::new();
    for (block, fd) in blocks.iter().zip(&fds) {
        let mut all = Vec::new();
        for offset in (0..block.size).step_by(len as usize) {
            let part = len.min(block.size - offset);
            agent.must(&Request::CopyOut { block: block.id, offset, len: part });
            let mut piece = vec![0; part as usize];
            file.read_exact_at(&mut piece, 0).expect("read");
            all.extend(piece);
        }
        assert!(!is_soft() || all == bytes(fd, block), "block {}", block.id);
        saved.push(all);
    }
    agent.fails(&Request::CopyOut { block: blocks[0].id, offset: blocks[0].size, len: 1 });
    agent.fails(&Request::CopyOut { block: 999, offset: 0, len: 1 });
    agent.must(&Request::Detach {});
    drop(fds);

    let (mut agent, _) = program.agent();
    agent.stage(&staging, len);
    for (block, all) in blocks.iter().zip(&saved) {
        agent.fails(&Request::OpenGate {});
        for offset in (0..block.size).step_by(len as usize) {
            let part = len.min(block.size - offset);
            let piece = &all[offset as usize..(offset + part) as usize];
            file.write_all_at(piece, 0).expect("written");
            agent.must(&Request::CopyIn { block: block.id, offset, len: part });
        }
    }
    agent.must(&Request::OpenGate {});
    assert_eq!(program.ask("check"), "as it was");
    // It can be exported and detached again.
    agent.must(&Request::CloseGate { timeout_ms: 10_000 });
    let (blocks, fds) = agent.export();
    agent.must(&Request::Detach {});
    let (mut agent, _) = program.agent();
    assert_eq!(agent.reattach(&blocks, &fds), Reply::Done {});
    agent.must(&Request::OpenGate {});
    assert_eq!(program.ask("check"), "as it was");
}

/// What the descriptors of a process lead to.
fn files(program: &Program) -> Vec<String> {
    let dir = std::fs::read_dir(format!("/proc/{}/fd", program.pid())).expect("there");
    let link = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).unwrap_or_default();
    dir.flatten().map(|entry| link(entry).to_string_lossy().into_owned()).collect()
}

#[test]
fn a_userfaultfd_of_the_program_is_handed_over_and_none_is_kept() {
    let program = Program::start();
    let (mut agent, _) = program.agent();
    agent.fails(&Request::Pinned {});
    if let Ok(uffd) = agent.track() {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", uffd.as_raw_fd()));
        assert_eq!(link.expect("read").to_string_lossy(), "anon_inode:[userfaultfd]");
    }
    let Reply::Ranges { ranges } = agent.ask(&Request::Pinned {}) else { panic!("no ranges") };
    assert_eq!(ranges.iter().map(|range| range.size).sum::<u64>(), MIB);
    // The answer above comes after all descriptors are closed.
    let kept = files(&program).into_iter().filter(|file| file.contains("userfaultfd"));
    assert_eq!(kept.collect::<Vec<_>>(), Vec::<String>::new());
    drop(agent);
    let (mut agent, _) = program.agent();
    agent.fails(&Request::Pinned {});
}

#[test]
fn a_checkpointer_that_dies_leaves_a_running_program() {
    let mut program = Program::start();
    let (mut agent, _) = program.agent();
    agent.must(&Request::CloseGate { timeout_ms: 10_000 });
    agent.export();
    program.tell("memset");
    assert_eq!(program.line(100), None);
    drop(agent);
    assert_eq!(program.line(20_000).as_deref(), Some("set"));
    let (_, hello) = program.agent();
    assert_eq!(hello.gate, GateState::Open {});
    assert_eq!(program.ask("check"), "as it was");
}

#[test]
fn a_checkpointer_that_takes_no_descriptors_does_not_hold_up_the_program() {
    let mut program = Program::start();
    let (mut agent, _) = program.agent();
    let limit = rlimit(&program);
    let reply = agent.ask(&Request::Export { known: Vec::new() });
    let Reply::Blocks { blocks } = reply else { panic!("no blocks: {reply:?}") };
    assert_eq!(rlimit(&program), limit, "its limit of open files is its own");
    assert_eq!(program.ask("free"), "3 left");
    assert_eq!(agent.0.receive_fds(blocks.len()).expect("file descriptors").len(), blocks.len());
    assert!(agent.export().0.len() < blocks.len());
}

/// Limits of open files of a program.
fn rlimit(program: &Program) -> String {
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", program.pid()));
    let limits = limits.expect("it runs");
    limits.lines().find(|line| line.starts_with("Max open files")).expect("a line").to_owned()
}

/// What a checkpointer has been told of it holds until it asks again, which it does once the gate is
/// closed.
#[test]
fn a_program_that_waits_for_memory_does_not_keep_the_gate_open() {
    let mut program = Program::start();
    let (mut agent, _) = program.agent();
    agent.export();
    assert_eq!(program.ask("starve"), "starving");
    assert_eq!(program.line(200), None, "it has memory coming");
    agent.must(&Request::CloseGate { timeout_ms: 2_000 });
    agent.export();
    agent.must(&Request::OpenGate {});
    assert_eq!(program.line(20_000).as_deref(), Some("error 2"), "nothing is kept any more");
    assert_eq!(program.ask("check"), "as it was");
}

#[test]
fn a_busy_device_opens_the_gate_again() {
    let mut program = Program::start();
    assert_eq!(program.ask("block"), "blocked");
    let (mut agent, _) = program.agent();
    let message = agent.fails(&Request::CloseGate { timeout_ms: 200 });
    assert!(message.contains("busy"), "{message}");
    assert_eq!(program.ask("unblock"), "unblocked");
    agent.must(&Request::CloseGate { timeout_ms: 10_000 });
    agent.must(&Request::OpenGate {});
    assert_eq!(program.ask("check"), "as it was");
}

#[test]
fn busy_threads_do_not_notice() {
    let mut program = Program::start();
    assert_eq!(program.ask("busy"), "busy");
    let (mut agent, _) = program.agent();
    for _ in 0..20 {
        agent = agent.cycle(&program);
        std::thread::sleep(Duration::from_millis(20));
    }
    let answer = program.ask("rest");
    let rounds: u64 = answer.parse().unwrap_or_else(|_| panic!("{answer}"));
    assert!(rounds > 100, "only {rounds} rounds");
    assert_eq!(program.ask("check"), "as it was");
    let counts = agent.counts();
    assert_eq!(counts.allocations, SMALL + LARGE.len() as u64, "what they made is freed");
    assert!(counts.blocks <= 11, "{} blocks", counts.blocks);
}

/// Makes a request again if it fails, and counts that.
fn again(failures: &mut u32, mut request: impl FnMut() -> Reply) -> Reply {
    match request() {
        Reply::Failed { code, message } => {
            assert_ne!(code, 0, "the driver is the cause: {message}");
            *failures += 1;
            request()
        }
        reply => reply,
    }
}

#[test]
fn a_driver_call_that_fails_changes_nothing_and_the_request_can_be_repeated() {
    if !is_soft() {
        return;
    }
    // What fails, and which call of it: the first of them after the program has made its memory
    // are those of a dump. (Mapping and access: 11 calls each before.)
    for fault in [
        "cuMemExportToShareableHandle:4:2",
        "cuMemUnmap:1:999",
        "cuMemUnmap:2:999",
        "cuMemRelease:1:999",
        "cuMemRelease:7:999",
        "cuMemImportFromShareableHandle:1:2",
        "cuMemImportFromShareableHandle:9:2",
        "cuMemMap:12:2",
        "cuMemMap:17:2",
        "cuMemSetAccess:12:1",
        "cuCtxSetLimit:2:2",
    ] {
        let mut program = Program::start_with(&[("SOFTCUDA_FAULT", fault)]);
        let mut failures = 0;
        let (mut agent, _) = program.agent();
        agent.must(&Request::CloseGate { timeout_ms: 10_000 });
        let reply = again(&mut failures, || agent.ask(&Request::Export { known: Vec::new() }));
        let Reply::Blocks { blocks } = reply else { panic!("{fault}: {reply:?}") };
        let fds = agent.0.receive_fds(blocks.len()).expect("file descriptors");
        let reply = again(&mut failures, || agent.ask(&Request::Detach {}));
        assert_eq!(reply, Reply::Done {}, "{fault}");
        let (mut agent, hello) = program.agent();
        assert_eq!(hello.gate, GateState::Detached {}, "{fault}");
        let reply = again(&mut failures, || {
            let reply = agent.reattach(&blocks, &fds);
            if reply != (Reply::Done {}) {
                agent.fails(&Request::OpenGate {});
            }
            reply
        });
        assert_eq!(reply, Reply::Done {}, "{fault}");
        agent.must(&Request::OpenGate {});
        assert_eq!(failures, 1, "{fault} did not happen");
        assert_eq!(program.ask("check"), "as it was", "{fault}");
        agent.cycle(&program);
        assert_eq!(program.ask("check"), "as it was", "{fault}");
    }
}
