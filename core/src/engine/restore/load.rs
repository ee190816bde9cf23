//! The load of the bulk memory, beside what CRIU does.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{JoinHandle, ScopedJoinHandle};

use super::Options;
use super::bulk::{self, Loaded, Reserve};
use super::demand::{self, Prepared};
use super::devices::Placement;
use super::preflight::{self, Opened};
use super::share::{self, InUse};
use super::source::Source;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::cuda::HostDriver;
use crate::engine::error::Error;
use crate::image::Block;

/// The bulk memory before the processes run.
pub(super) enum Memory {
    /// All of it, in device memory of gpucr's; some of it may be shared.
    Loaded(Loaded, Option<InUse>),
    /// Such device memory, with nothing in it yet.
    Prepared(Box<Prepared>),
    /// None: the programs load it from inside.
    Inside,
}

/// What the load leaves.
pub(super) struct Done {
    pub(super) opened: Opened,
    pub(super) memory: Memory,
    /// Whether the holder of the warm image has loaded it.
    pub(super) by_holder: bool,
    /// Device memory that is kept for the programs' contexts.
    pub(super) reserve: Reserve,
}

/// A thread that opens the driver and loads.
pub(super) struct Load {
    stop: Stop,
    thread: Option<JoinHandle<Result<Done, Error>>>,
}

impl Load {
    /// Starts it. With `on_demand` it only makes device memory. What is `opened` already is taken over.
    pub(super) fn start(
        image: Arc<Source>,
        library: Arc<HostDriver>,
        opened: Option<Opened>,
        on_demand: bool,
        options: &Options,
        progress: Arc<dyn Progress>,
    ) -> Self {
        let stop = Stop::new(options.stop.clone());
        let flag = stop.clone();
        let holder = options.share.clone();
        let load = move || {
            std::thread::scope(|scope| {
                let moves = opened.is_some();
                let opening =
                    (!moves).then(|| scope.spawn(|| preflight::open(&image, &library, &[])));
                let loading = Loading {
                    image: &image,
                    stop: &flag,
                    progress: progress.as_ref(),
                    moves,
                    opening: Cell::new(opening),
                    opened: opened.map_or_else(OnceCell::new, OnceCell::from),
                    by_holder: Cell::new(false),
                    reserve: RefCell::default(),
                };
                let memory = if on_demand {
                    let Opened { driver, placement } = loading.opened()?;
                    match demand::prepare(driver, &image, placement)? {
                        Some((prepared, reserve)) => {
                            loading.keep(reserve);
                            Memory::Prepared(Box::new(prepared))
                        }
                        None => Memory::Inside,
                    }
                } else if let Some(holder) = holder {
                    let loaded = share::load(&loading, &holder)?;
                    loaded.map_or(Memory::Inside, |(loaded, in_use)| Memory::Loaded(loaded, in_use))
                } else {
                    let loaded = loading.all()?;
                    loaded.map_or(Memory::Inside, |loaded| Memory::Loaded(loaded, None))
                };
                loading.done(memory)
            })
        };
        Self { stop, thread: Some(std::thread::spawn(load)) }
    }

    /// Waits for its end. To be called once.
    ///
    /// # Errors
    /// Host or image are not as they have to be; `stop` was set.
    pub(super) fn finish(&mut self) -> Result<Done, Error> {
        let thread = self.thread.take().expect("CRIU asks once");
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Ends it early, since CRIU has failed. Says why it could not have ended well, if that is known: a host
    /// that lacks the driver lacks what CRIU needs of it too.
    pub(super) fn give_up(&mut self) -> Option<Error> {
        let thread = self.thread.take()?;
        self.stop.fail();
        let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended.err().filter(|error| !matches!(error, Error::Interrupted))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.give_up();
    }
}

/// What loads blocks: the holder of a warm image, which has the devices open, or else this process, as soon as
/// it has opened the driver.
pub(super) struct Loading<'a, 'scope> {
    pub(super) image: &'a Source,
    pub(super) stop: &'a Stop,
    pub(super) progress: &'a dyn Progress,
    /// Whether devices take the place of others.
    moves: bool,
    opening: Cell<Option<ScopedJoinHandle<'scope, Result<Opened, Error>>>>,
    opened: OnceCell<Opened>,
    by_holder: Cell<bool>,
    reserve: RefCell<Reserve>,
}

impl Loading<'_, '_> {
    /// Waits for the driver.
    fn opened(&self) -> Result<&Opened, Error> {
        if let Some(opening) = self.opening.take() {
            let opened = bulk::joined(opening)?;
            return Ok(self.opened.get_or_init(|| opened));
        }
        self.opened.get().ok_or(Error::CopyIncomplete)
    }

    /// Where the devices of the image are.
    pub(super) fn placement(&self) -> Result<Placement, Error> {
        if self.moves { Ok(self.opened()?.placement.clone()) } else { Ok(Placement::default()) }
    }

    /// Loads blocks, given by their places among those of the manifest, into new device memory, and gives a
    /// descriptor of each. `None` where there is no room for that: then the programs load it from inside.
    pub(super) fn load(&self, wanted: &[usize]) -> Result<Option<Vec<OwnedFd>>, Error> {
        // A holder has no other devices open than those of the image.
        if !self.moves
            && !wanted.is_empty()
            && let Some(fds) = self.image.load(wanted, self.stop, self.progress)
        {
            self.by_holder.set(true);
            return Ok(Some(fds));
        }
        let Opened { driver, placement } = self.opened()?;
        let all = self.image.manifest().blocks();
        let blocks: Vec<&Block> = wanted.iter().map(|place| all[*place]).collect();
        let loaded = bulk::load(driver, &blocks, self.image, placement, self.stop, self.progress)?;
        Ok(loaded.map(|(fds, reserve)| {
            self.keep(reserve);
            fds
        }))
    }

    /// Once: a second load of some of the blocks finds its part taken.
    fn keep(&self, reserve: Reserve) {
        let mut kept = self.reserve.borrow_mut();
        if kept.is_empty() {
            *kept = reserve;
        }
    }

    /// Loads all blocks.
    pub(super) fn all(&self) -> Result<Option<Loaded>, Error> {
        let manifest = self.image.manifest();
        let all: Vec<usize> = (0..manifest.blocks().len()).collect();
        Ok(self.load(&all)?.map(|fds| bulk::by_process(manifest, fds)))
    }

    fn done(mut self, memory: Memory) -> Result<Done, Error> {
        self.opened()?;
        let opened = self.opened.take().ok_or(Error::CopyIncomplete)?;
        let reserve = self.reserve.take();
        Ok(Done { opened, memory, by_holder: self.by_holder.get(), reserve })
    }
}
