//! What the way back does from each state, and where a step of it fails.

use std::fs::File;
use std::process::{Child, Command};

use gpucr_wire::{Connection, Hello, MulticastObject, PROTOCOL_VERSION, Reply, Request};

use super::*;
use crate::engine::device_state::double::{Double, Step};
use crate::image::DriverKind;

/// A process that is ended with the test.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Self {
        Self(Command::new("sleep").arg("1000").spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Has copies, and notes where a process stands that asks for them.
struct Copies(Double, Vec<Option<ProcessState>>);

impl HasCopies for Copies {
    fn give_back(&mut self, pid: u32) {
        self.1.push(self.0.now(pid));
    }
}

fn cuda_process(pid: u32, has_agent: bool) -> CudaProcess {
    // The double opens no library.
    let library = HostDriver::vouched(&std::env::current_exe().unwrap(), DriverKind::Soft).unwrap();
    CudaProcess::new(ProcessInfo::read(pid).unwrap(), Arc::new(library), has_agent)
}

/// A descriptor that stands for device memory.
fn memory() -> OwnedFd {
    File::open("/dev/null").unwrap().into()
}

/// The pids that did not come back.
fn failed(double: &Double, cuda_processes: &mut [CudaProcess]) -> Vec<u32> {
    resume_all(cuda_processes, double, None::<&mut Copies>, None)
        .into_iter()
        .map(|(pid, _)| pid)
        .collect()
}

#[test]
fn the_way_back_begins_where_the_process_stands() {
    let (double, program) = (Double::default(), Sleeper::start());
    let pid = program.pid();
    let mut cuda_processes = [cuda_process(pid, false)];
    let steps: [(_, &[Step]); 3] = [
        (ProcessState::Running, &[]),
        (ProcessState::Locked, &[Step::Unlock]),
        (ProcessState::Checkpointed, &[Step::Restore, Step::Unlock]),
    ];
    for (state, steps) in steps {
        double.put(pid, state);
        assert!(failed(&double, &mut cuda_processes).is_empty(), "from {state:?}");
        assert_eq!(double.now(pid), Some(ProcessState::Running));
        let tried: Vec<Step> = double.tried().into_iter().map(|(step, _)| step).collect();
        assert_eq!(tried, steps, "from {state:?}");
    }
    // No step brings this process back.
    double.put(pid, ProcessState::Failed);
    assert!(failed(&double, &mut cuda_processes).is_empty());
    assert!(double.tried().is_empty());
}

#[test]
fn a_step_that_fails_once_is_done_again_and_one_that_fails_twice_is_told_and_may_be_tried_later() {
    let (double, program) = (Double::default(), Sleeper::start());
    let pid = program.pid();
    let mut cuda_processes = [cuda_process(pid, false)];
    for (step, stands) in [
        (Step::State, ProcessState::Checkpointed),
        (Step::Restore, ProcessState::Checkpointed),
        (Step::Unlock, ProcessState::Locked),
    ] {
        double.put(pid, ProcessState::Checkpointed);
        double.fail(step, 1);
        assert!(failed(&double, &mut cuda_processes).is_empty(), "{step:?}");
        assert_eq!(double.now(pid), Some(ProcessState::Running));

        double.put(pid, ProcessState::Checkpointed);
        double.fail(step, 2);
        assert_eq!(failed(&double, &mut cuda_processes), [pid], "{step:?}");
        assert_eq!(double.now(pid), Some(stands));
        assert!(failed(&double, &mut cuda_processes).is_empty(), "{step:?}");
        assert_eq!(double.now(pid), Some(ProcessState::Running));
    }
}

#[test]
fn one_that_does_not_come_back_holds_no_other_up_and_one_that_has_ended_is_no_failure() {
    let (double, programs) = (Double::default(), [(); 3].map(|()| Sleeper::start()));
    let pids = programs.each_ref().map(Sleeper::pid);
    let mut cuda_processes = pids.map(|pid| cuda_process(pid, false));
    let [gone, strange, stopped] = pids;
    let [first, ..] = programs;
    drop(first);
    double.put(gone, ProcessState::Locked);
    double.put(stopped, ProcessState::Locked);
    // Of `strange` nothing is known: it might be in any state, and has no agent to ask.
    assert_eq!(failed(&double, &mut cuda_processes), [strange]);
    assert_eq!(double.tried(), [(Step::Unlock, stopped)]);
}

#[test]
fn what_is_kept_for_a_process_is_given_back_by_all_who_have_it_before_its_state_comes_back() {
    let (double, program) = (Double::default(), Sleeper::start());
    let pid = program.pid();
    let mut cuda_processes = [cuda_process(pid, false)];
    cuda_processes[0].reserve.push(memory());
    let mut copies = Copies(double.clone(), Vec::new());
    double.put(pid, ProcessState::Running);
    assert!(resume_all(&mut cuda_processes, &double, Some(&mut copies), None).is_empty());
    assert!(copies.1.is_empty() && cuda_processes[0].reserve.len() == 1, "it needs nothing");
    double.put(pid, ProcessState::Checkpointed);
    assert!(resume_all(&mut cuda_processes, &double, Some(&mut copies), None).is_empty());
    assert_eq!(copies.1, [Some(ProcessState::Checkpointed)]);
    assert!(cuda_processes[0].reserve.is_empty());
    double.put(pid, ProcessState::Checkpointed);
    assert!(resume_all(&mut cuda_processes, &double, Some(&mut copies), None).is_empty());
    assert_eq!(copies.1.len(), 1, "nothing is left to be given back");
}

/// A multicast object of one device that the agent's own process has created.
fn object(is_whole: bool) -> MulticastObject {
    MulticastObject {
        id: 3,
        owner: [7; 16],
        name: 3,
        devices: 1,
        size: 2 << 20,
        address: 1 << 40,
        added: 1,
        adders: Vec::new(),
        bound: vec![7],
        is_whole,
    }
}

/// Answers in this process as the agent of a program that stands at `gate`, up to the opening of the gate.
/// Gives the requests, but for the greeting.
fn answer_as_agent(
    listener: &std::os::unix::net::UnixListener,
    gate: GateState,
    has: &[MulticastObject],
) -> Vec<Request> {
    let mut connection = Connection::new(listener.accept().unwrap().0);
    let mut requests = Vec::new();
    loop {
        let request: Request = connection.receive().unwrap();
        if let Request::Hello { protocol } = request {
            let (shim, driver) = (String::new(), String::new());
            let pid = std::process::id();
            let hello = Hello { protocol, pid, shim, driver, driver_version: 0, gate };
            assert_eq!(protocol, PROTOCOL_VERSION);
            connection.send(&Reply::Hello { hello }).unwrap();
            continue;
        }
        if let Request::Reattach { blocks } | Request::Join { objects: blocks, .. } = &request {
            assert_eq!(connection.receive_fds(blocks.len()).unwrap().len(), blocks.len());
        }
        let objects = has.to_vec();
        let reply = match &request {
            Request::Objects {} => Reply::Objects { identity: [7; 16], objects },
            Request::Make { .. } => Reply::Made {},
            _ => Reply::Done {},
        };
        connection.send(&reply).unwrap();
        if let Request::Make { objects } = &request {
            let made: Vec<_> = objects.iter().map(|_| memory()).collect();
            connection.send_fds(&made).unwrap();
        }
        requests.push(request);
        if requests.last() == Some(&Request::OpenGate {}) {
            return requests;
        }
    }
}

#[test]
fn the_agent_is_asked_last_and_gives_back_what_was_taken() {
    let (double, pid) = (Double::default(), std::process::id());
    let name = gpucr_wire::agent_socket(gpucr_wire::own_pid_namespace().unwrap(), pid);
    let listener = Connection::listen(&name).unwrap();
    let mut cuda_processes = [cuda_process(pid, true)];
    cuda_processes[0].blocks.push((7, memory()));

    // The agent is not asked before the device state is there.
    double.put(pid, ProcessState::Checkpointed);
    double.fail(Step::Restore, 2);
    assert_eq!(failed(&double, &mut cuda_processes), [pid]);
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "nobody has come");
    listener.set_nonblocking(false).unwrap();

    let reattach = Request::Reattach { blocks: vec![7] };
    // Multicast objects are made again in steps, unless nothing of them is undone.
    let objects = || Request::Objects {};
    let (whole, undone) = ([object(true)], [object(false)]);
    let again = vec![
        Request::Make { objects: vec![3] },
        Request::Join { objects: vec![3], present: vec![[7; 16]] },
        Request::Bind {},
        Request::Whole {},
        Request::OpenGate {},
    ];
    for (gate, has, expected) in [
        (GateState::Open {}, &[][..], vec![Request::OpenGate {}]),
        (GateState::Closed {}, &[], vec![Request::OpenGate {}]),
        (GateState::Detached {}, &[], vec![reattach.clone(), objects(), Request::OpenGate {}]),
        (GateState::Detached {}, &undone, [vec![reattach, objects()], again.clone()].concat()),
        (GateState::Parted {}, &undone, [vec![objects()], again].concat()),
        (GateState::Parted {}, &whole, vec![objects(), Request::Whole {}, Request::OpenGate {}]),
        (GateState::Parted {}, &[], vec![objects(), Request::Whole {}, Request::OpenGate {}]),
    ] {
        double.put(pid, ProcessState::Checkpointed);
        std::thread::scope(|scope| {
            let agent = scope.spawn(|| answer_as_agent(&listener, gate, has));
            assert!(failed(&double, &mut cuda_processes).is_empty(), "{gate:?}");
            assert_eq!(agent.join().unwrap(), expected, "{gate:?}");
        });
        assert_eq!(double.now(pid), Some(ProcessState::Running));
    }

    // A driver that does not know the process cannot have locked it.
    let unknown = Double::default();
    std::thread::scope(|scope| {
        let agent = scope.spawn(|| answer_as_agent(&listener, GateState::Closed {}, &[]));
        assert!(failed(&unknown, &mut cuda_processes).is_empty());
        assert_eq!(agent.join().unwrap(), [Request::OpenGate {}]);
    });
}
