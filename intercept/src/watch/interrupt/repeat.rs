//! Which launches may be aborted and begun again: those of which doing them twice is the same as doing them once. That is
//! decided of each before it is made, by what the code of its twin does and by its arguments.

use gpucr_wire::twice::{Code, Twice};

use crate::calls::effects::Launch;
use crate::log::log;
use crate::state::kernels::Kernel;
use crate::watch::classes::places;

/// Of which launches of a kernel that is known.
pub(super) struct Repeat {
    code: Code,
    /// Its blocks end and begin as one.
    pub(super) by_blocks: bool,
}

/// What the code of a kernel in a text does, which is also that of its twins. `None` if the text is not understood, or has no
/// such kernel.
pub(super) fn code(text: &str, name: &str) -> Option<gpucr_kernels::Kernel> {
    match gpucr_kernels::from_ptx_of(text, |other| other == name) {
        Ok(kernels) => kernels.into_iter().find(|kernel| kernel.name == name),
        Err(error) => {
            log!("what `{name}` does is not known: {error}");
            None
        }
    }
}

impl Repeat {
    /// By the code of a kernel.
    ///
    /// # Errors
    /// Why it is right for none of its launches.
    pub(super) fn of(
        kernel: &Kernel,
        code: &gpucr_kernels::Kernel,
        by_blocks: bool,
    ) -> Result<Self, &'static str> {
        let params = kernel.params.as_deref().ok_or("the driver does not tell its parameters")?;
        let params: Vec<(u32, u32)> =
            params.iter().map(|param| (param.offset, param.size)).collect();
        Ok(Self { code: gpucr_kernels::code(code, &params)?, by_blocks })
    }

    /// Whether a launch of the kernel may be begun again; or why not.
    pub(super) fn admits(&self, kernel: &Kernel, launch: &Launch) -> Result<(), &'static str> {
        let places = places(kernel, launch).ok_or("it has too many arguments")?;
        match self.code.twice(&places) {
            Twice::Same => Ok(()),
            Twice::Differs(why) | Twice::Unknown(why) => Err(why.text()),
        }
    }
}
