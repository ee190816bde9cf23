//! The thread on which memory is prepared while CRIU works.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::arrival::{Arrival, choose};
use super::at_hand::AtHand;
use super::bulk::Reserve;
use super::given::Given;
use super::loading::{LoadedBy, Loading};
use super::preflight::{self, Opened};
use super::source::Source;
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::base::threads;
use crate::cuda::HostDriver;
use crate::engine::error::Error;

/// What the load leaves.
pub(super) struct Done {
    pub(super) opened: Opened,
    /// Is prepared.
    pub(super) arrival: Box<dyn Arrival>,
    pub(super) by: LoadedBy,
    /// Device memory that is kept for the programs' contexts.
    pub(super) reserve: Reserve,
}

/// A thread that opens the driver and prepares the memory.
pub(super) struct Load {
    stop: Stop,
    thread: Option<JoinHandle<Result<Done, Error>>>,
}

impl Load {
    /// Starts it, with the library of the driver. What is `opened` already is taken over.
    pub(super) fn start(
        image: Arc<Source>,
        (library, at_hand): (Arc<HostDriver>, Arc<AtHand>),
        opened: Option<Opened>,
        arrival: Box<dyn Arrival>,
        given: Option<Given>,
        stop: Stop,
        progress: Arc<dyn Progress>,
    ) -> Self {
        let flag = stop.clone();
        let load = move || {
            std::thread::scope(|scope| {
                let moves = opened.is_some();
                let open = || preflight::open(&image, &library, &at_hand.drivers, &[]);
                let opening = (!moves).then(|| scope.spawn(open));
                let loading = Loading::new(&image, &flag, &progress, opening, opened, given);
                let arrival = choose::prepare(arrival, &loading)?;
                let (opened, by, reserve) = loading.done()?;
                Ok(Done { opened, arrival, by, reserve })
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
        threads::ended(thread)
    }

    /// Ends it early, since CRIU has failed. Says why it could not have ended well, if that is known: a host
    /// that lacks the driver lacks what CRIU needs of it too.
    pub(super) fn give_up(&mut self) -> Option<Error> {
        let thread = self.thread.take()?;
        self.stop.fail();
        threads::ended(thread).err().filter(|error| !matches!(error, Error::Interrupted))
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.give_up();
    }
}
