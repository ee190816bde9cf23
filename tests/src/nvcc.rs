//! nvcc, for tests of programs that it compiles. Other crates include this file by its path.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A compiler with the libraries of the CUDA runtime that belong to it.
pub struct Nvcc {
    program: PathBuf,
    libraries: PathBuf,
}

impl Nvcc {
    /// The one that `NVCC` names, or that the machine has, or that `cargo xtask test` has put into the target folder,
    /// which is that of `test`, the path of a test that runs.
    pub fn find(test: &Path) -> Option<Nvcc> {
        let named = std::env::var_os("NVCC").map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let of_path = std::env::split_paths(&path).map(|folder| folder.join("nvcc"));
        let own = test.ancestors().filter_map(|folder| {
            let lib = std::fs::read_dir(folder.join("nvcc/lib")).ok()?.flatten().next()?;
            Some(lib.path().join("site-packages/nvidia/cu13/bin/nvcc"))
        });
        let mut all = named.into_iter().chain(of_path).chain(own);
        let program = all.find(|program| program.is_file())?;
        let root = program.canonicalize().ok()?.parent()?.parent()?.to_path_buf();
        let libraries = ["lib64", "lib"].into_iter().map(|name| root.join(name));
        let libraries = libraries.into_iter().find(|l| l.join("libcudart_static.a").is_file())?;
        Some(Nvcc { program, libraries })
    }

    /// Compiles a program and links it with the static library of the runtime, nvcc's default.
    ///
    /// # Errors
    /// What nvcc says.
    pub fn compile<S: AsRef<std::ffi::OsStr>>(
        &self,
        sources: impl IntoIterator<Item = S>,
        to: &Path,
    ) -> Result<(), String> {
        let mut command = Command::new(&self.program);
        command.arg("-std=c++17").arg("-L").arg(&self.libraries).args(sources).arg("-o").arg(to);
        let output = command.output().map_err(|error| error.to_string())?;
        if output.status.success() {
            return Ok(());
        }
        let said = [output.stdout, output.stderr].concat();
        Err(String::from_utf8_lossy(&said).into_owned())
    }
}
