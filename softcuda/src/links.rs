//! Links under way: `cuLinkCreate` to `cuLinkDestroy`.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::handles::{Table, new_handle};
use crate::modules::{self, Refusal};
use crate::ptx;
use crate::settings::settings;
use crate::status::Code;

/// All links.
pub(crate) static LINKS: Table<Link> = Table::new();

/// Pieces of PTX that are to become one.
pub(crate) struct Link {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// Number and addresses of the options that it was created with. The program keeps them valid
    /// for as long as the link exists.
    pub(crate) options: (u32, u64, u64),
    /// Ordinal of the device that it is for.
    device: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Name and text of each piece.
    pieces: Vec<(String, String)>,
    /// The result, with a NUL at its end; programs hold its address.
    result: Option<Vec<u8>>,
}

/// Begins a link for a device.
pub(crate) fn create(device: usize, options: (u32, u64, u64)) -> Arc<Link> {
    let link = Arc::new(Link { handle: new_handle(), options, device, state: Mutex::default() });
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
        ptx::link(&[&text]).map_err(|(_, fault)| Refusal {
            code: Code::INVALID_PTX,
            text: format!("{name}: {fault}"),
        })?;
        let mut state = self.state.lock();
        state.pieces.push((name.to_owned(), text));
        state.result = None;
        Ok(())
    }

    /// Links what was added: address and size of PTX that can be loaded as a module, up to the
    /// next change of the link.
    ///
    /// # Errors
    /// A refusal that says what is wrong, such as a name that is not defined.
    pub(crate) fn complete(&self) -> Result<(u64, usize), Refusal> {
        let mut state = self.state.lock();
        let texts: Vec<&str> = state.pieces.iter().map(|(_, text)| text.as_str()).collect();
        let linked = ptx::link(&texts).map_err(|(piece, fault)| Refusal {
            code: Code::INVALID_IMAGE,
            text: format!("{}: {fault}", state.pieces[piece].0),
        })?;
        modules::parse(linked.as_bytes(), settings().model(self.device))?;
        let mut linked = linked.into_bytes();
        linked.push(0);
        let linked = state.result.insert(linked);
        Ok((linked.as_ptr() as u64, linked.len()))
    }
}
