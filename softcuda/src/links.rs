//! Links under way: `cuLinkCreate` to `cuLinkDestroy`.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::handles::{Table, new_handle};
use crate::modules::{self, DEVICE_RUNTIME, Refusal};
use crate::ptx;
use crate::settings::settings;
use crate::status::Code;

/// The only member of `libcudadevrt.a` of CUDA 13.0.
const DEVICE_RUNTIME_OBJECT: &str = "cuda_device_runtime.o";

/// All links.
pub(crate) static LINKS: Table<Link> = Table::new();

/// Pieces of PTX that are to become one.
pub(crate) struct Link {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// What it was created with.
    pub(crate) given: Given,
    /// The most registers that a thread of each kernel may have.
    most_registers: Option<u32>,
    /// Ordinal of the device that it is for.
    device: usize,
    state: Mutex<State>,
}

/// The options of a link. They are read once: cuda.core frees its arrays behind `cuLinkCreate`.
pub(crate) struct Given {
    /// `CUjit_option` of each.
    pub(crate) names: Vec<u32>,
    /// Their values as they were given.
    pub(crate) values: Vec<u64>,
    /// Where the program has the values, and wants those that the driver gives.
    pub(crate) place: u64,
    /// What is there unless the program has changed it.
    pub(crate) last: Mutex<Vec<u64>>,
}

#[derive(Default)]
struct State {
    /// Name and text of each piece.
    pieces: Vec<(String, String)>,
    /// The result, with a NUL at its end; programs hold its address.
    result: Option<Vec<u8>>,
}

/// Begins a link for a device, whose kernels may have at most so many registers in each thread.
pub(crate) fn create(device: usize, given: Given, most_registers: Option<u32>) -> Arc<Link> {
    let (handle, state) = (new_handle(), Mutex::default());
    let link = Arc::new(Link { handle, given, most_registers, device, state });
    LINKS.insert(link.handle, link.clone());
    link
}

impl Link {
    /// Adds PTX, or a fat binary with PTX.
    ///
    /// # Errors
    /// A refusal that says what is wrong; nothing is added then.
    pub(crate) fn add(&self, name: &str, image: &[u8]) -> Result<(), Refusal> {
        let text = modules::ptx_of(image, settings().model(self.device))?;
        // Alone it may refer to what is not there yet, but it must be PTX.
        ptx::link(&[&text], None).map_err(|(_, fault)| Refusal {
            code: Code::INVALID_PTX,
            text: format!("{name}: {fault}"),
        })?;
        let mut state = self.state.lock();
        state.pieces.push((name.to_owned(), text));
        state.result = None;
        Ok(())
    }

    /// Adds a static library. Only one is known, NVIDIA's device runtime, which has no PTX: of its functions those of
    /// `device_runtime.ptx` are there.
    ///
    /// # Errors
    /// A refusal for another library, or what is none; nothing is added then.
    pub(crate) fn add_library(&self, name: &str, library: &[u8]) -> Result<(), Refusal> {
        if !has_member(library, DEVICE_RUNTIME_OBJECT) {
            let text =
                format!("{name}: a library; the software driver knows `libcudadevrt.a` only");
            return Err(Refusal { code: Code::NO_BINARY_FOR_GPU, text });
        }
        self.add(name, DEVICE_RUNTIME.as_bytes())
    }

    /// Links what was added: address and size of PTX that can be loaded as a module, up to the
    /// next change of the link.
    ///
    /// # Errors
    /// A refusal that says what is wrong, such as a name that is not defined.
    pub(crate) fn complete(&self) -> Result<(u64, usize), Refusal> {
        let mut state = self.state.lock();
        let texts: Vec<&str> = state.pieces.iter().map(|(_, text)| text.as_str()).collect();
        let linked = ptx::link(&texts, self.most_registers).map_err(|(piece, fault)| Refusal {
            code: Code::INVALID_IMAGE,
            text: format!("{}: {fault}", state.pieces[piece].0),
        })?;
        let parsed = modules::parse(linked.as_bytes(), settings().model(self.device));
        parsed.map_err(|refusal| match ptx::undefined(&texts, &refusal.text) {
            // The words of NVIDIA's driver.
            Some((piece, name)) => Refusal {
                code: refusal.code,
                text: format!(
                    "error   : Undefined reference to '{name}' in '{}'",
                    state.pieces[piece].0
                ),
            },
            None => refusal,
        })?;
        let mut linked = linked.into_bytes();
        linked.push(0);
        let linked = state.result.insert(linked);
        Ok((linked.as_ptr() as u64, linked.len()))
    }
}

/// Whether an archive (`ar` of GNU) has a member of this name.
fn has_member(archive: &[u8], name: &str) -> bool {
    const HEADER: usize = 60;
    let Some(mut rest) = archive.strip_prefix(b"!<arch>\n") else {
        return false;
    };
    // The long names, which a member of its own holds, one a line.
    let mut long = "";
    while let Some((header, data)) = rest.split_at_checked(HEADER) {
        let text = |range: std::ops::Range<usize>| {
            std::str::from_utf8(&header[range]).unwrap_or("").trim_end()
        };
        let size = text(48..58).parse::<usize>().ok().filter(|size| *size <= data.len());
        let Some(size) = size else { return false };
        let called = text(0..16);
        if called == "//" {
            long = std::str::from_utf8(&data[..size]).unwrap_or("");
        }
        let called = match called.strip_prefix('/').and_then(|place| place.parse().ok()) {
            Some(place) => {
                long.get(place..).and_then(|from: &str| from.lines().next()).unwrap_or("")
            }
            None => called,
        };
        if called.trim_end_matches('/') == name {
            return true;
        }
        // Members begin at even places.
        rest = data.get(size.next_multiple_of(2)..).unwrap_or(&[]);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive with members of these names, whose sizes are odd.
    fn archive(long: &str, names: &[&str]) -> Vec<u8> {
        let mut archive = b"!<arch>\n".to_vec();
        for (name, data) in
            std::iter::once(("//", long)).chain(names.iter().map(|name| (*name, "odd")))
        {
            let size = data.len();
            archive.extend(format!("{name:<16}{:<32}{size:<10}`\n{data}", "0").bytes());
            if size % 2 == 1 {
                archive.push(b'\n');
            }
        }
        archive
    }

    #[test]
    fn members_of_archives_are_found() {
        let library = archive("a_long_file_name.o/\ncuda_device_runtime.o/\n", &["a.o/", "/20"]);
        assert!(has_member(&library, "a.o"));
        assert!(has_member(&library, DEVICE_RUNTIME_OBJECT));
        assert!(!has_member(&library, "b.o"));
        for size in 0..library.len() {
            let _ = has_member(&library[..size], DEVICE_RUNTIME_OBJECT);
        }
        assert!(!has_member(b"cuda_device_runtime.o", DEVICE_RUNTIME_OBJECT));
        assert!(!has_member(&archive("", &["/99"]), DEVICE_RUNTIME_OBJECT));
    }
}
