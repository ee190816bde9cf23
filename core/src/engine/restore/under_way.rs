//! A load by the holder of a warm image that goes on while processes are made and the driver restores their contexts.

use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use super::source::Source;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::base::threads;

/// The load of blocks by a holder. It ends when this is dropped.
pub(super) struct UnderWay {
    stop: Stop,
    state: State,
}

enum State {
    Loading(JoinHandle<Option<Vec<OwnedFd>>>),
    Over(Option<Vec<OwnedFd>>),
}

impl UnderWay {
    /// Has the holder load blocks, given by their places among the manifest's. Returns when there is room for them, and for
    /// the programs' contexts besides, or when they are loaded; `None` if no holder loads them.
    pub(super) fn start(
        image: &Arc<Source>,
        blocks: Vec<usize>,
        stop: &Stop,
        progress: &Arc<dyn Progress>,
    ) -> Option<Self> {
        let (image, progress, own_stop) = (image.clone(), progress.clone(), stop.clone());
        let (say, said) = mpsc::channel();
        let load = move || {
            // Nobody may listen any more.
            let room = || {
                let _ = say.send(());
            };
            image.load(&blocks, &own_stop, progress.as_ref(), &room)
        };
        let stop = stop.clone();
        let mut under_way = Self { stop, state: State::Loading(std::thread::spawn(load)) };
        // There is room, or the thread has ended.
        if said.recv().is_err() {
            under_way.state = State::Over(Some(under_way.finish()?));
        }
        Some(under_way)
    }

    /// Waits for the end of the load: descriptors of the blocks, or `None` if the holder has failed, or the stop was set. To
    /// be called once.
    pub(super) fn finish(&mut self) -> Option<Vec<OwnedFd>> {
        match std::mem::replace(&mut self.state, State::Over(None)) {
            State::Loading(thread) => threads::ended(thread),
            State::Over(loaded) => loaded,
        }
    }

    /// Whether it was to end early.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.is_set()
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if matches!(self.state, State::Loading(_)) {
            self.stop.fail();
            let _ = self.finish();
        }
    }
}
