//! What calls do, as values. A decoder says it to an [`Effects`], and those who watch calls are such: a recording
//! takes it as it comes, and [`Decoded`] keeps it for those who look at one call more than once.

use std::ffi::c_void;

use gpucr_wire::reach::Sizes;

use crate::state::kernels::{Arguments, Kernel};
use crate::state::range::Range;

/// Takes what a call is going to do, as its decoder finds it in the arguments.
pub(crate) trait Effects {
    /// The call is for this stream; 0 is the default stream.
    fn stream(&mut self, _stream: u64) {}

    /// A range is read or written by something that is not a kernel.
    fn range(&mut self, range: Range);

    /// A kernel is launched.
    fn launch(&mut self, launch: &Launch);

    /// An executable graph is launched.
    fn graph(&mut self, executable: u64);

    /// A host function is called.
    fn host_function(&mut self);
}

/// Reads the arguments of the functions that the table names it for. They are integer slots, as the program passed
/// them. The upper half of a slot whose argument is 32 bits wide says nothing.
pub(crate) type Decoder = fn(&[usize], &mut dyn Effects);

/// How large a plain launch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Form {
    /// Blocks in each direction, threads of a block in each direction.
    pub(crate) shape: [u32; 6],
    /// Dynamic shared memory of each block, bytes.
    pub(crate) shared: u32,
}

/// A launch of a kernel. It is good as long as the call lasts, since it refers to the program's arguments.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    /// A `CUfunction` or `CUkernel`.
    pub(crate) handle: u64,
    pub(crate) sizes: Sizes,
    /// `None` if there is more to it: attributes, a grid whose blocks wait for each other.
    pub(crate) form: Option<Form>,
    arguments: Arguments,
}

impl Launch {
    /// # Safety
    /// A launch of `handle` that is under way has got these for `kernelParams` and `extra`; either may be null.
    pub(super) unsafe fn new(handle: usize, sizes: Sizes, params: usize, extra: usize) -> Self {
        let arguments =
            Arguments { params: params as *const *const u8, extra: extra as *const *const c_void };
        Self { handle: handle as u64, sizes, form: None, arguments }
    }

    /// Whether its arguments are given one by one, each by its address, or there are none.
    pub(crate) fn is_listed(&self) -> bool {
        self.arguments.extra.is_null()
    }

    /// A plain launch of this size.
    pub(super) fn plain(self, form: Option<Form>) -> Self {
        Self { form, ..self }
    }

    /// Calls `note` with number and value of each word of the arguments. `kernel` is what the handle stands for.
    pub(crate) fn words(&self, kernel: &Kernel, note: &mut dyn FnMut(usize, u64)) {
        // SAFETY: the decoder that made this has promised that a launch of the kernel has these arguments.
        unsafe { kernel.words(&self.arguments, note) };
    }

    /// A copy of the arguments as one buffer; `None` if not all are known. `kernel` is what the handle stands for.
    pub(crate) fn packed(&self, kernel: &Kernel) -> Option<Vec<u8>> {
        // SAFETY: as above.
        unsafe { kernel.packed(&self.arguments) }
    }
}

#[derive(Clone, Copy)]
enum Effect {
    Range(Range),
    Launch(Launch),
    Graph(u64),
    HostFunction,
}

/// What a call does, decoded once.
#[derive(Default)]
pub(crate) struct Decoded {
    stream: u64,
    /// The first ones. Most calls have no more, and take no memory of the heap.
    few: [Option<Effect>; 2],
    rest: Vec<Effect>,
}

impl Decoded {
    /// Decodes a call.
    pub(crate) fn of(decoder: Decoder, arguments: &[usize]) -> Self {
        let mut decoded = Self::default();
        decoder(arguments, &mut decoded);
        decoded
    }

    /// Says what was decoded.
    pub(crate) fn show(&self, to: &mut dyn Effects) {
        to.stream(self.stream);
        for effect in self.few.iter().flatten().chain(&self.rest) {
            match effect {
                Effect::Range(range) => to.range(*range),
                Effect::Launch(launch) => to.launch(launch),
                Effect::Graph(executable) => to.graph(*executable),
                Effect::HostFunction => to.host_function(),
            }
        }
    }

    fn add(&mut self, effect: Effect) {
        match self.few.iter_mut().find(|place| place.is_none()) {
            Some(place) => *place = Some(effect),
            None => self.rest.push(effect),
        }
    }
}

impl Effects for Decoded {
    fn stream(&mut self, stream: u64) {
        self.stream = stream;
    }

    fn range(&mut self, range: Range) {
        self.add(Effect::Range(range));
    }

    fn launch(&mut self, launch: &Launch) {
        self.add(Effect::Launch(*launch));
    }

    fn graph(&mut self, executable: u64) {
        self.add(Effect::Graph(executable));
    }

    fn host_function(&mut self) {
        self.add(Effect::HostFunction);
    }
}
