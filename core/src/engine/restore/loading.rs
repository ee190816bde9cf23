//! What a way of bringing memory back loads with, before the processes run.

use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;

use super::bulk::{self, Loaded, Reserve};
use super::devices::Placement;
use super::given::Given;
use super::preflight::Opened;
use super::source::Source;
use super::under_way::UnderWay;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::engine::error::Error;
use crate::image::Block;

/// Who has loaded the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LoadedBy {
    /// This process, or the programs themselves.
    Own,
    /// The holder of a warm image.
    Holder,
    /// The gpucr that has started this one.
    Starter,
}

/// What loads blocks: whoever has started this restore, who may have done so; the holder of a warm image, which has
/// the devices open; or else this process, as soon as
/// it has opened the driver.
pub(super) struct Loading<'a, 'scope> {
    pub(super) image: &'a Arc<Source>,
    pub(super) stop: &'a Stop,
    pub(super) progress: &'a Arc<dyn Progress>,
    /// Whether devices take the place of others.
    moves: bool,
    /// Whether there may be a holder that loads. None has other devices open than the image's.
    has_holder: Cell<bool>,
    opening: Cell<Option<Opening<'scope>>>,
    opened: OnceCell<Opened>,
    by: Cell<LoadedBy>,
    given: Option<Given>,
    reserve: RefCell<Reserve>,
}

/// The thread that opens the driver.
type Opening<'scope> = ScopedJoinHandle<'scope, Result<Opened, Error>>;

impl<'a, 'scope> Loading<'a, 'scope> {
    /// Where devices take the place of others the driver is `opened` already; else a thread is `opening` it.
    pub(super) fn new(
        image: &'a Arc<Source>,
        stop: &'a Stop,
        progress: &'a Arc<dyn Progress>,
        opening: Option<Opening<'scope>>,
        opened: Option<Opened>,
        given: Option<Given>,
    ) -> Self {
        Self {
            image,
            stop,
            progress,
            moves: opened.is_some(),
            has_holder: Cell::new(opened.is_none()),
            opening: Cell::new(opening),
            opened: opened.map_or_else(OnceCell::new, OnceCell::from),
            by: Cell::new(LoadedBy::Own),
            given,
            reserve: RefCell::default(),
        }
    }

    /// Waits for the driver.
    ///
    /// # Errors
    /// The driver cannot be opened, or a device is not on this host.
    pub(super) fn opened(&self) -> Result<&Opened, Error> {
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

    /// Loads blocks, given by their places among the manifest's, into new device memory, and gives a
    /// descriptor of each. `None` where there is no room for that: then the programs load it from inside.
    pub(super) fn load(&self, wanted: &[usize]) -> Result<Option<Vec<OwnedFd>>, Error> {
        let is_all = wanted.len() == self.image.manifest().blocks().len();
        let given = self.given.as_ref().filter(|_| is_all && !wanted.is_empty());
        if let Some((fds, reserve)) = given.and_then(|it| it.take(&self.image.id(), wanted.len())) {
            self.by.set(LoadedBy::Starter);
            self.keep(reserve);
            return Ok(Some(fds));
        }
        if self.has_holder.get()
            && !wanted.is_empty()
            && let Some(fds) = self.image.load(wanted, self.stop, self.progress.as_ref(), &|| {})
        {
            self.by.set(LoadedBy::Holder);
            return Ok(Some(fds));
        }
        let Opened { driver, placement } = self.opened()?;
        let all = self.image.manifest().blocks();
        let blocks: Vec<&Block> = wanted.iter().map(|place| all[*place]).collect();
        let progress = self.progress.as_ref();
        let loaded = bulk::load(driver, &blocks, self.image, placement, self.stop, progress)?;
        Ok(loaded.map(|(fds, reserve)| {
            self.keep(reserve);
            fds
        }))
    }

    /// Has a holder load all blocks, and waits until the devices are known to have room for them, and for the programs'
    /// contexts besides. `None` if no holder does.
    pub(super) fn by_holder(&self) -> Option<UnderWay> {
        let all: Vec<usize> = (0..self.image.manifest().blocks().len()).collect();
        if !self.has_holder.get() || self.given.is_some() || all.is_empty() {
            return None;
        }
        let under_way = UnderWay::start(self.image, all, self.stop, self.progress);
        self.has_holder.set(under_way.is_some());
        let under_way = under_way?;
        self.by.set(LoadedBy::Holder);
        Some(under_way)
    }

    /// Called once: a second load of some of the blocks finds its part taken.
    pub(super) fn keep(&self, reserve: Reserve) {
        let mut kept = self.reserve.borrow_mut();
        if kept.is_empty() {
            *kept = reserve;
        }
    }

    /// Loads all blocks.
    pub(super) fn all(&self) -> Result<Option<Loaded>, Error> {
        let manifest = self.image.manifest();
        let all: Vec<usize> = (0..manifest.blocks().len()).collect();
        self.load(&all)?.map(|fds| bulk::by_process(manifest, fds)).transpose()
    }

    /// The driver and the devices; who has loaded; and what is kept for the contexts.
    ///
    /// # Errors
    /// The errors of [`opened`](Self::opened).
    pub(super) fn done(mut self) -> Result<(Opened, LoadedBy, Reserve), Error> {
        self.opened()?;
        let opened = self.opened.take().ok_or(Error::CopyIncomplete)?;
        Ok((opened, self.by.get(), self.reserve.take()))
    }
}
