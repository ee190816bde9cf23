//! A kernel with its shape and parameters, ready to run.

use std::sync::Arc;

use crate::attributes::Attributes;
use crate::modules::Function;
use crate::shapes::Shape;
use crate::textures::LaunchImages;

/// A kernel with all that it is launched with.
pub(crate) struct KernelLaunch {
    /// The kernel.
    pub(crate) function: Arc<Function>,
    /// How many threads.
    pub(crate) shape: Shape,
    /// What the kernel finds in its parameter buffer.
    pub(crate) parameters: Vec<u8>,
    /// Textures and surfaces, as they were when it was made.
    pub(crate) images: LaunchImages,
    /// Addresses of the single parameters, for programs that ask for them.
    pub(crate) places: Vec<u64>,
    /// What programs set in the node of a graph that has it; reported, otherwise ignored.
    pub(crate) attributes: Attributes,
}

impl KernelLaunch {
    /// A launch with parameters as the kernel sees them.
    pub(crate) fn new(function: Arc<Function>, shape: Shape, parameters: Vec<u8>) -> KernelLaunch {
        let base = parameters.as_ptr() as u64;
        let places = function.entry.params.iter().map(|p| base + p.offset as u64).collect();
        let images = LaunchImages::new(&function.references);
        let attributes = Attributes::default();
        KernelLaunch { function, shape, parameters, images, places, attributes }
    }

    /// The same launch once more, to be changed.
    pub(crate) fn again(&self) -> KernelLaunch {
        let mut again = Self::new(self.function.clone(), self.shape, self.parameters.clone());
        again.attributes = self.attributes.clone();
        again
    }
}
