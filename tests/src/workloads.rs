//! The workloads by name.

/// The workloads that make it hard to tell what they write; `e2e/adversaries.rs` dumps them.
pub const ADVERSARIES: [&str; 11] = [
    "halves",
    "permuted",
    "shifting",
    "const-cast",
    "seldom",
    "two-halves",
    "remade",
    "long-kernel",
    "graph-nodes",
    "model",
    "stamp",
];

/// The workloads that a dump refuses for a while; `e2e/hard.rs` has them.
pub const REFUSED: [&str; 2] = ["sharer", "headless"];

/// The workload with more memory than each test needs; `e2e/faults.rs` has it.
pub const LARGE: [&str; 1] = ["one-block"];

/// The workloads whose processes share device memory; `e2e/groups.rs` has them.
pub const GROUPS: [&str; 11] = [
    "ring",
    "ahead",
    "handles",
    "lent",
    "host-blocks",
    "signals",
    MULTICAST,
    "tensor-parallel",
    "data-parallel",
    "workers",
    "survivors",
];

/// The workload that uses all devices; `e2e/groups.rs` has it.
pub const DEVICES: [&str; 1] = ["devices"];

/// The workload whose processes have memory behind one multicast object, which needs [devices](crate::Lab::of) of its own.
pub const MULTICAST: &str = "multicast";

/// The workloads that write host memory in every way, and one that leaves it alone; `e2e/host_memory.rs`, `e2e/demand.rs`
/// and `e2e/extract.rs` have them.
pub const HOST: [&str; 3] = ["host-memory", "host-memory-alone", "addresses"];

/// Workloads whose kernels are interrupted; `e2e/interrupt.rs` has it.
pub const INTERRUPTED: [&str; 6] =
    ["long-again", "long-blocks", "long-barriers", "long-in-place", "long-loops", "long-rounds"];

/// Workloads that may be restored a second time, in full, after a restore on demand: two follow pointers which lie in
/// memory, and of a CUDA process that is no child of gpucr nobody knows how it ended.
pub const MAY_FALL_BACK: [&str; 4] = ["small-allocs", "scatter", "launcher", "family"];

/// Makes a test of each workload, in a module `workload`, by a function that takes its name, and one that
/// fails if a workload is missing here. The adversaries, the generated programs, the large one, the groups, and those that are
/// refused have tests of their own.
#[macro_export]
macro_rules! each_workload {
    ($run:ident) => {
        $crate::each_workload! { $run:
            sgd "sgd",
            adam "adam",
            attention "attention",
            stencil "stencil",
            histogram "histogram",
            streams "streams",
            threads "threads",
            structs "structs",
            indirect "indirect",
            small_allocs "small-allocs",
            late_modules "late-modules",
            pinned "pinned",
            stack "stack",
            realloc "realloc",
            pools "pools",
            vmm "vmm",
            launcher "launcher",
            family "family",
            scatter "scatter",
            many_blocks "many-blocks",
        }
    };
    ($run:ident: $($test:ident $name:literal,)*) => {
        mod workload {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::$run($name)
            })*

            #[test]
            fn none_is_left_out() -> anyhow::Result<()> {
                let output = std::process::Command::new($crate::binary("workload"))
                    .arg("--list")
                    .output()?;
                let all = [&[$($name),*][..], &$crate::REFUSED, &$crate::LARGE, &$crate::HOST];
                let all = [&all.concat()[..], &$crate::ADVERSARIES, &$crate::GROUPS, &$crate::DEVICES, &$crate::INTERRUPTED, &["random"]].concat();
                assert_eq!(String::from_utf8(output.stdout)?.lines().collect::<Vec<_>>(), all);
                Ok(())
            }
        }
    };
}

/// Makes a test of each of [`GROUPS`], in a module of this name, by a function that takes the workload's; and one that fails if a
/// group is missing here. Each takes as long as a test may: so they run side by side.
#[macro_export]
macro_rules! each_group {
    ($module:ident by $run:ident) => {
        $crate::each_group! { $module by $run:
            ring "ring",
            ahead "ahead",
            handles "handles",
            lent "lent",
            host_blocks "host-blocks",
            signals "signals",
            multicast "multicast",
            tensor_parallel "tensor-parallel",
            data_parallel "data-parallel",
            workers "workers",
            survivors "survivors",
        }
    };
    ($module:ident by $run:ident: $($test:ident $name:literal,)*) => {
        mod $module {
            $(#[test]
            fn $test() -> anyhow::Result<()> {
                super::$run($name)
            })*

            #[test]
            fn none_is_left_out() {
                assert_eq!([$($name),*], $crate::GROUPS);
            }
        }
    };
}
