//! What the agent says of launches, against a program that knows what it has launched.

#[path = "support/accesses.rs"]
mod program_body;
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;

use gpucr_wire::access::{Accesses, KernelUse, Operation, WHOLE_BUFFER};
use gpucr_wire::reach::Sizes;
use gpucr_wire::twice::Class;
use gpucr_wire::{Reply, Request};
use program_body::PTX;
use support::{Agent, ENV_PROGRAM, Program};

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        program_body::run();
    }
}

/// The program, its agent, and its allocations by name.
fn start() -> (Program, Agent, BTreeMap<String, u64>) {
    let mut program = Program::start();
    let names = program.ask("where");
    let pair = |pair: &str| {
        let (name, address) = pair.split_once('=').expect("a pair");
        (name.to_owned(), address.parse().expect("an address"))
    };
    let addresses = names.split(' ').map(pair).collect();
    let (agent, _) = program.agent();
    (program, agent, addresses)
}

fn accesses(agent: &mut Agent) -> Accesses {
    match agent.ask(&Request::Accesses {}) {
        Reply::Accesses { accesses } => accesses,
        other => panic!("no accesses: {other:?}"),
    }
}

/// Parameter, offset, address of the allocation, launches: for each pair of slot and allocation.
fn touched(accesses: &Accesses, kernel: &KernelUse) -> Vec<(u32, u32, u64, u64)> {
    let address = |id| {
        let found = accesses.allocations.iter().find(|allocation| allocation.id == id);
        found.expect("a live allocation").address
    };
    let of = |slot: &gpucr_wire::access::SlotUse| {
        assert!(!slot.more);
        let (param, offset) = (slot.param, slot.offset);
        let touched = slot.touched.clone().into_iter();
        touched.map(move |t| (param, offset, address(t.allocation), t.launches)).collect::<Vec<_>>()
    };
    kernel.slots.iter().flat_map(of).collect()
}

/// Operation, whether it writes, lowest address, end, and how many.
type Operated = (Operation, bool, u64, u64, u64);

fn operations(accesses: &Accesses) -> Vec<Operated> {
    accesses.operations.iter().map(|o| (o.operation, o.write, o.low, o.end, o.count)).collect()
}

fn only(accesses: &Accesses) -> &KernelUse {
    assert_eq!(accesses.kernels.len(), 1, "{accesses:#?}");
    assert_eq!((accesses.unknown_graphs, accesses.unseen), (0, 0));
    &accesses.kernels[0]
}

#[test]
fn nothing_is_recorded_before_and_after() {
    let (mut program, mut agent, _) = start();
    agent.fails(&Request::Accesses {});
    assert_eq!(program.ask("kernel"), "done");
    agent.must(&Request::Record { on: true });
    assert_eq!(accesses(&mut agent), Accesses::default());
    assert_eq!(program.ask("kernel"), "done");
    agent.must(&Request::Record { on: true });
    assert_eq!(accesses(&mut agent).kernels.len(), 1, "asking twice changes nothing");
    assert_eq!(accesses(&mut agent), Accesses::default(), "each launch is told once");
    assert_eq!(program.ask("kernel"), "done");
    agent.must(&Request::Record { on: false });
    agent.fails(&Request::Accesses {});
    agent.must(&Request::Record { on: true });
    assert_eq!(accesses(&mut agent), Accesses::default(), "nothing is left of what was");
    drop(agent);
    let (mut agent, _) = program.agent();
    agent.fails(&Request::Accesses {});
}

#[test]
fn each_form_of_a_launch_shows_its_pointers() {
    let (mut program, mut agent, at) = start();
    agent.must(&Request::Record { on: true });
    for form in ["kernel", "cooperative", "ex", "extra"] {
        assert_eq!(program.ask(form), "done");
        let accesses = accesses(&mut agent);
        let kernel = only(&accesses);
        assert_eq!((kernel.name.as_str(), kernel.launches, kernel.in_graphs), ("touch", 3, 0));
        assert!(kernel.known);
        // The sizes are those of three launches, each of one block more in the first direction.
        let sizes = Sizes { block: [4, 8, 1], grid: [3, 1, 2], last: [8, 0, 1] };
        assert_eq!(kernel.sizes, sizes, "{form}");
        let layout: Vec<_> = kernel.params.iter().map(|p| (p.offset, p.size)).collect();
        assert_eq!(layout, [(0, 8), (8, 24), (32, 4), (40, 8)]);
        // The small one alternates between two allocations, and points into their middle.
        assert_eq!(
            touched(&accesses, kernel),
            [
                (0, 0, at["large"], 3),
                (1, 8, at["small"], 2),
                (1, 8, at["other"], 1),
                (1, 16, at["mapped"], 3),
            ],
            "{form}"
        );
        // The second and the last word point to nothing, the others to allocations of their own.
        let is_right = |class: &Class| {
            let places: Vec<u8> = class.places.iter().map(|place| place.at).collect();
            let [large, 0, small, mapped, 0] = places[..] else { return false };
            BTreeSet::from([0, large, small, mapped]).len() == 4
        };
        assert!(kernel.classes.iter().all(is_right), "{form}: {:?}", kernel.classes);
        assert_eq!(kernel.classes.iter().map(|class| class.launches).sum::<u64>(), 3, "{form}");
        let small = kernel.slots[1].touched.iter().find(|t| t.launches == 2).expect("two");
        assert_eq!((small.low, small.high), (at["small"] + 8, at["small"] + 24));
        let sizes: BTreeMap<u64, u64> =
            accesses.allocations.iter().map(|a| (a.address, a.size)).collect();
        assert_eq!(sizes[&at["large"]], 5 << 20);
        assert_eq!(sizes[&at["mapped"]], 4 << 20, "both mappings of the reservation");
    }
}

/// A launch that was kept is made once more, and only that one, once.
#[test]
fn a_launch_is_made_once_more() {
    let (mut program, mut agent, _) = start();
    agent.fails(&Request::Again { timeout_ms: 20_000 });
    agent.must(&Request::Record { on: true });
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    let again = |agent: &mut Agent, launched| {
        let reply = agent.ask(&Request::Again { timeout_ms: 20_000 });
        assert_eq!(reply, Reply::Again { launched });
    };
    let step = |program: &mut Program, agent: &mut Agent, command: &str, keep| {
        let before = accesses(agent).kernels.len();
        assert_eq!(before, 0, "{command}");
        program.tell(command);
        loop {
            agent.must(&Request::Step { wait_ms: 1_000, timeout_ms: 20_000, keep });
            if !accesses(agent).kernels.is_empty() {
                break;
            }
        }
    };
    step(&mut program, &mut agent, "count", true);
    again(&mut agent, true);
    again(&mut agent, false);
    assert_eq!(accesses(&mut agent), Accesses::default(), "it is not recorded");
    let told = |program: &mut Program| program.line(20_000).expect("an answer");
    assert_eq!(told(&mut program), "done");
    step(&mut program, &mut agent, "count", false);
    again(&mut agent, false);
    assert_eq!(told(&mut program), "done");
    // What becomes a part of a graph has not run, and is not to.
    step(&mut program, &mut agent, "count in a graph", true);
    again(&mut agent, false);
    agent.must(&Request::OpenGate {});
    assert_eq!(told(&mut program), "done");
    assert_eq!(program.ask("counted"), "3");
}

#[test]
fn threads_are_put_together() {
    let (mut program, mut agent, at) = start();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("threads"), "done");
    let first = accesses(&mut agent);
    let kernel = only(&first);
    assert_eq!(kernel.launches, 4 * 300);
    assert!(touched(&first, kernel).contains(&(0, 0, at["large"], 1200)));
}

#[test]
fn freed_memory_is_not_taken_for_what_takes_its_place() {
    let (mut program, mut agent, at) = start();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("kernel"), "done");
    assert_eq!(program.ask("replace"), "done");
    let before = accesses(&mut agent);
    let kernel = only(&before);
    let old = kernel.slots[0].touched[0];
    assert_eq!(old.low, at["large"]);
    assert!(before.allocations.iter().all(|a| a.id != old.allocation), "it is gone");
    assert_eq!(program.ask("kernel"), "done");
    let after = accesses(&mut agent);
    assert_ne!(only(&after).slots[0].touched[0].allocation, old.allocation);
}

#[test]
fn copies_and_fills_are_exact() {
    let (mut program, mut agent, at) = start();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("copies"), "done");
    let (copy, fill, value) = (Operation::Copy {}, Operation::Fill {}, Operation::Value {});
    let (large, small, other) = (at["large"], at["small"], at["other"]);
    let found = operations(&accesses(&mut agent));
    let expected = [
        // To the host, within the device, and a box of 3 rows of 16 bytes at a pitch of 64.
        (copy, false, large, large + 4096, 2),
        (copy, false, small + 64, small + 64 + 2 * 64 + 16, 1),
        (copy, true, large + 1024, large + 1024 + 2 * 64 + 16, 1),
        (copy, true, other, other + 16, 2),
        (fill, true, large + 100, large + 100 + 4 * 32 + 8, 2),
        (value, true, small, small + 12, 2),
    ];
    for wanted in expected {
        assert!(found.contains(&wanted), "{wanted:?} is not in {found:#?}");
    }
    assert_eq!(found.len(), expected.len() + 1, "and the wait for a value: {found:#?}");
}

/// Gives a command, and expects these operations and no others.
fn expect(command: &str, expected: &dyn Fn(&Places) -> Vec<Operated>) {
    let (mut program, mut agent, at) = start();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask(command), "done");
    let accesses = accesses(&mut agent);
    assert_eq!((accesses.kernels.len(), accesses.unseen, accesses.unknown_graphs), (0, 0, 0));
    let mut found = operations(&accesses);
    let mut expected =
        expected(&Places { large: at["large"], small: at["small"], other: at["other"] });
    found.sort_unstable();
    expected.sort_unstable();
    assert_eq!(found, expected, "{command}");
}

/// The program's plain allocations.
struct Places {
    large: u64,
    small: u64,
    other: u64,
}

#[test]
fn batches_of_copies_are_exact() {
    let copy = Operation::Copy {};
    expect("batches", &|at| {
        vec![
            (copy, false, at.small, at.small + 16, 1),
            (copy, true, at.large + 4096, at.large + 4096 + 16, 1),
            (copy, true, at.other, at.other + 32, 1),
            (copy, false, at.large + 16, at.large + 8192 + 64, 3),
            (copy, true, at.small + 512, at.small + 528 + 8, 2),
        ]
    });
    // Lengths of the sides of boxes are in bytes, and with an array in its elements, 8 bytes each.
    let middle = 2 << 20;
    expect("boxes", &|at| {
        vec![
            (copy, false, at.large + 4, at.large + 4 + 96 + 32 + 8, 1),
            (copy, true, at.other, at.other + 32, 1),
            (copy, false, at.small, at.small + 24 + 16, 1),
            (copy, true, at.large + middle, at.large + middle + 32 + 16, 1),
        ]
    });
}

#[test]
fn batches_of_values_are_exact() {
    let value = Operation::Value {};
    expect("values", &|at| {
        vec![
            (value, true, at.small, at.small + 4, 1),
            (value, true, at.other + 8, at.other + 16, 1),
            (value, false, at.small, at.small + 4, 1),
            (value, false, at.large + 8, at.large + 16, 1),
        ]
    });
}

#[test]
fn graphs_of_values_stand_for_their_operations() {
    let value = Operation::Value {};
    let (mut program, mut agent, at) = start();
    assert_eq!(program.ask("make graph of values"), "done");
    agent.must(&Request::Record { on: true });
    // Two launches each time.
    let mut launched = |program: &mut Program| {
        assert_eq!(program.ask("graph"), "done");
        let accesses = accesses(&mut agent);
        assert_eq!((accesses.unknown_graphs, accesses.unseen), (0, 0));
        operations(&accesses)
    };
    let waits = (value, false, at["small"] + 8, at["small"] + 16, 2);
    let writes = |name: &str, offset: u64, bytes: u64| {
        (value, true, at[name] + offset, at[name] + offset + bytes, 2)
    };
    let sorted = |mut list: Vec<_>| {
        list.sort_unstable();
        list
    };
    assert_eq!(sorted(launched(&mut program)), sorted(vec![writes("other", 16, 4), waits]));
    for (command, now) in [
        ("change graph of values", writes("small", 32, 4)),
        ("change graph of values again", writes("large", 64, 4)),
    ] {
        assert_eq!(program.ask(command), "done");
        // What it was before may have been launched since the last question; not since this one.
        launched(&mut program);
        assert_eq!(sorted(launched(&mut program)), sorted(vec![now, waits]), "{command}");
    }
    assert_eq!(program.ask("end graph"), "done");
    assert_eq!(program.ask("capture values"), "done");
    launched(&mut program);
    let captured = vec![writes("large", 4 << 20, 8), writes("other", 0, 4)];
    assert_eq!(sorted(launched(&mut program)), sorted(captured));
}

#[test]
fn launches_with_arguments_set_before_may_touch_everything() {
    let (mut program, mut agent, _) = start();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("legacy"), "done");
    let first = accesses(&mut agent);
    let kernel = only(&first);
    assert_eq!((kernel.name.as_str(), kernel.launches), ("touch", 3));
    let said: Vec<_> = kernel.slots.iter().map(|slot| (slot.more, slot.touched.len())).collect();
    assert_eq!(said, [(true, 0); 5], "each of its words may point to anything");
    // From then on a launch that shows its arguments is exact again.
    assert_eq!(program.ask("kernel"), "done");
    assert!(only(&accesses(&mut agent)).slots.iter().all(|slot| !slot.more));
}

#[test]
fn graphs_stand_for_their_nodes() {
    let (mut program, mut agent, at) = start();
    assert_eq!(program.ask("make graph"), "done");
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("graph"), "done");
    let first = accesses(&mut agent);
    let kernel = only(&first);
    assert_eq!((kernel.launches, kernel.in_graphs), (2, 2));
    assert!(touched(&first, kernel).contains(&(1, 8, at["small"], 2)));
    let filled = (Operation::Fill {}, true, at["other"], at["other"] + 64, 2);
    assert_eq!(operations(&first), [filled]);
    assert_eq!(first.host_functions, 2);
    // With another pointer in its kernel: both count, since either may have been used.
    assert_eq!(program.ask("graph"), "done");
    assert_eq!(program.ask("change graph"), "done");
    assert_eq!(program.ask("graph"), "done");
    let changed = accesses(&mut agent);
    let touched = touched(&changed, only(&changed));
    for name in ["small", "other"] {
        assert!(touched.iter().any(|t| (t.0, t.1, t.2) == (1, 8, at[name])), "{name}: {touched:?}");
    }
    assert_eq!(program.ask("graph"), "done");
    let after = accesses(&mut agent);
    let now = touched_small(&after);
    assert_eq!(now, [at["other"]], "from then on the new one only");
    assert_eq!(program.ask("end graph"), "done");
}

#[test]
fn graphs_with_conditional_nodes_may_touch_anything() {
    let (mut program, mut agent, _) = start();
    assert_eq!(program.ask("make conditional graph"), "done");
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("graph"), "done");
    let accesses = accesses(&mut agent);
    assert_eq!((accesses.unknown_graphs, operations(&accesses)), (2, Vec::new()));
    assert_eq!(program.ask("end graph"), "done");
}

fn touched_small(accesses: &Accesses) -> Vec<u64> {
    let touched = touched(accesses, only(accesses));
    touched.iter().filter(|t| (t.0, t.1) == (1, 8)).map(|t| t.2).collect()
}

#[test]
fn the_image_of_a_kernel_can_be_read() {
    let (mut program, mut agent, _) = start();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("kernel"), "done");
    let image = only(&accesses(&mut agent)).image;
    assert_ne!(image, 0);
    let Reply::Image { bytes } = agent.ask(&Request::Image { id: image, limit: 1 << 20 }) else {
        panic!("no image");
    };
    let fd = agent.0.receive_fds(1).expect("a descriptor").remove(0);
    let mut text = vec![0; bytes as usize];
    File::from(fd).read_exact_at(&mut text, 0).expect("read");
    assert_eq!(text, PTX.as_bytes());
    agent.fails(&Request::Image { id: image + 100, limit: 1 << 20 });
    agent.fails(&Request::Image { id: image, limit: bytes - 1 });
    // A library's kernel, launched by its own handle.
    assert_eq!(program.ask("library"), "done");
    let accesses = accesses(&mut agent);
    assert_ne!((only(&accesses).image, only(&accesses).image), (0, image));
    assert_eq!(only(&accesses).slots.len(), 3);
    assert!(only(&accesses).slots.iter().all(|slot| slot.param != WHOLE_BUFFER));
}
