//! `gpucr inspect --kernels`.

use gpucr_core::image::Manifest;
use gpucr_core::launched::{self, Launched};

use crate::commands::{LARGEST, say};
use crate::display;
use crate::table::Table;

/// The kernels of a process.
#[derive(serde::Serialize)]
pub(super) struct ProcessKernels {
    pid: u32,
    /// The most launched first.
    kernels: Vec<Launched>,
}

/// The kernels that each process launched while it was dumped.
pub(super) fn of(manifest: &Manifest) -> Vec<ProcessKernels> {
    let all = launched::read(manifest).into_iter();
    all.map(|(pid, kernels)| ProcessKernels { pid, kernels }).collect()
}

pub(super) fn print(manifest: &Manifest, all: bool) {
    let processes = of(manifest);
    if processes.is_empty() {
        say!(
            "The image names no kernel: its dump recorded no launches, or there were none during it."
        );
        return;
    }
    let mut table = Table::new(&[
        ">PID",
        ">LAUNCHES",
        ">IN GRAPHS",
        ">GRID",
        ">BLOCK",
        ">POINTERS",
        ">READ ONLY",
        "FOLLOWS MEMORY",
        "KERNEL",
    ]);
    let mut hidden = 0;
    for ProcessKernels { pid, kernels } in &processes {
        let shown = if all { kernels.len() } else { kernels.len().min(LARGEST) };
        hidden += kernels.len() - shown;
        for kernel in &kernels[..shown] {
            table.row(vec![
                pid.to_string(),
                kernel.launches.to_string(),
                kernel.in_graphs.to_string(),
                size(kernel.grid),
                size(kernel.block),
                kernel.pointers.to_string(),
                kernel.read_only.to_string(),
                match kernel.indirect {
                    Some(true) => "yes",
                    Some(false) => "no",
                    None => "?",
                }
                .to_owned(),
                match kernel.name.as_str() {
                    "" => "?".to_owned(),
                    name => display::kernel(name),
                },
            ]);
        }
    }
    table.print();
    if hidden > 0 {
        say!("  and {hidden} that were launched less often: --all shows them");
    }
}

/// Three numbers, those at the end left out that are 1.
fn size(of: [u64; 3]) -> String {
    if of.contains(&u64::MAX) {
        return "?".into();
    }
    let last = of.iter().rposition(|count| *count != 1).unwrap_or(0);
    of[..=last].iter().map(u64::to_string).collect::<Vec<_>>().join("x")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        assert_eq!(size([1, 1, 1]), "1");
        assert_eq!(size([64, 1, 1]), "64");
        assert_eq!(size([8, 1, 2]), "8x1x2");
        assert_eq!(size([u64::MAX; 3]), "?");
    }
}
