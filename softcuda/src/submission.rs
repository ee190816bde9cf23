//! How the streams of a context get work: in order with the legacy default stream, or into the graph
//! that a stream captures.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::capture;
use crate::context::{CONTEXTS, Context, STREAMS, Streams, current};
use crate::events::{Event, Last, Record};
use crate::forked::is_forked;
use crate::graphs::Work;
use crate::handles::new_handle;
use crate::operations::Operation;
use crate::status::{Code, Outcome};
use crate::streams::{NON_BLOCKING, Position, Stream};

/// `CU_STREAM_LEGACY`, a name for the legacy default stream.
const LEGACY: u64 = 1;
/// `CU_STREAM_PER_THREAD`, a name for the default stream of the calling thread.
const PER_THREAD: u64 = 2;

/// Which stream a function means by stream 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultStream {
    /// The stream that synchronises with all blocking streams.
    Legacy,
    /// One stream for each thread (functions ending in `_ptds` and `_ptsz`).
    PerThread,
}

/// The contexts in which this thread has a default stream of its own, which ends with the thread.
struct OwnStreams(RefCell<Vec<u64>>);

impl Drop for OwnStreams {
    fn drop(&mut self) {
        // In the child of a fork locks may be held for ever.
        if is_forked() {
            return;
        }
        for context in self.0.take().into_iter().filter_map(|handle| CONTEXTS.get(handle)) {
            let stream = context.streams.lock().of_threads.remove(&std::thread::current().id());
            if let Some(stream) = stream {
                context.retire(&stream);
            }
        }
    }
}

thread_local! {
    static OWN_STREAMS: OwnStreams = const { OwnStreams(RefCell::new(Vec::new())) };
}

impl Streams {
    /// Lets a new stream begin with what all of the context wait for.
    fn hold_back(&mut self, stream: &Arc<Stream>) {
        self.barriers.retain(|position| !position.is_reached());
        if !self.barriers.is_empty() {
            // Fails only where there is no thread for the stream, which its first work will say.
            let _ = stream.submit(self.barriers.clone(), || ());
        }
    }
}

impl Context {
    /// Has all work that is submitted from now on wait for a position.
    ///
    /// # Errors
    /// As [`Context::submit`].
    pub(crate) fn wait_for(&self, position: &Position) -> Outcome {
        let mut streams = self.streams.lock();
        streams.barriers.push(position.clone());
        let all: Vec<Arc<Stream>> = streams.all().cloned().collect();
        drop(streams);
        for stream in all.iter().chain([&self.legacy]) {
            self.submit(stream, vec![position.clone()], || ())?;
        }
        Ok(())
    }

    /// Creates a stream.
    pub(crate) fn create_stream(&self, flags: u32, priority: i32) -> Arc<Stream> {
        let stream = Stream::new(new_handle(), self.handle, flags, priority);
        let mut streams = self.streams.lock();
        streams.created.push(stream.clone());
        streams.hold_back(&stream);
        drop(streams);
        STREAMS.insert(stream.handle, stream.clone());
        stream
    }

    /// Removes a stream; its work goes on to the end.
    pub(crate) fn destroy_stream(&self, stream: &Arc<Stream>) {
        STREAMS.remove(stream.handle);
        self.streams.lock().created.retain(|other| !Arc::ptr_eq(other, stream));
        self.retire(stream);
    }

    /// Lets a stream end that nobody can name any more.
    fn retire(&self, stream: &Arc<Stream>) {
        capture::forget(stream.handle);
        let last = stream.last();
        if !last.is_reached() {
            // A call that waits for all streams must still wait for what is under way.
            self.streams.lock().retired.push(last);
        }
        stream.close();
    }

    /// The stream that a handle means, special names included.
    ///
    /// # Errors
    /// `INVALID_HANDLE` for an unknown handle.
    pub(crate) fn stream(&self, handle: u64, default: DefaultStream) -> Outcome<Arc<Stream>> {
        match (handle, default) {
            (LEGACY, _) | (0, DefaultStream::Legacy) => Ok(self.legacy.clone()),
            (PER_THREAD, _) | (0, DefaultStream::PerThread) => {
                let mut streams = self.streams.lock();
                let is_new = !streams.of_threads.contains_key(&std::thread::current().id());
                let stream =
                    streams.of_threads.entry(std::thread::current().id()).or_insert_with(|| {
                        // Fails only while the thread ends, when nobody is left to clean up for.
                        let _ = OWN_STREAMS.try_with(|own| own.0.borrow_mut().push(self.handle));
                        Stream::new(new_handle(), self.handle, 0, 0)
                    });
                let stream = stream.clone();
                if is_new {
                    streams.hold_back(&stream);
                }
                Ok(stream)
            }
            _ => STREAMS.get(handle).ok_or(Code::INVALID_HANDLE),
        }
    }

    /// Adds an operation to a stream of this context, or to the graph that the stream captures.
    ///
    /// # Errors
    /// As [`Context::submit`], and `STREAM_CAPTURE_INVALIDATED`.
    pub(crate) fn enqueue(
        self: &Arc<Self>,
        stream: &Arc<Stream>,
        operation: Operation,
    ) -> Outcome<Option<Position>> {
        if capture::record(stream, Work::Operation(operation.clone(), self.handle))? {
            return Ok(None);
        }
        let owner = self.clone();
        self.submit(stream, Vec::new(), move || operation.run(&owner)).map(Some)
    }

    /// Adds work to a stream of this context, in order with the legacy default stream.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM` when no thread can be started; those of [`capture::refuse`], as this
    /// work cannot be captured.
    pub(crate) fn submit(
        &self,
        stream: &Arc<Stream>,
        mut after: Vec<Position>,
        work: impl FnOnce() + Send + 'static,
    ) -> Outcome<Position> {
        capture::refuse(self, stream)?;
        let mut streams = self.streams.lock();
        if self.is_legacy(stream) {
            let blocking = streams.all().filter(|s| s.flags & NON_BLOCKING == 0);
            after.extend(blocking.map(Stream::last).filter(|p| !p.is_reached()));
            // Retired streams are few, so blocking or not is not told apart.
            streams.retired.retain(|position| !position.is_reached());
            after.extend(streams.retired.iter().cloned());
        } else if stream.flags & NON_BLOCKING == 0 {
            after.extend(Some(self.legacy.last()).filter(|p| !p.is_reached()));
        }
        stream.submit(after, work)
    }

    /// A point that is reached when a stream is done, including, for the legacy default stream,
    /// all streams that synchronise with it.
    ///
    /// # Errors
    /// As [`Context::submit`].
    pub(crate) fn submit_marker(&self, stream: &Arc<Stream>) -> Outcome<Position> {
        if self.is_idle(stream) {
            return Ok(stream.last());
        }
        if self.is_legacy(stream) {
            self.submit(stream, Vec::new(), || ())
        } else {
            Ok(stream.last())
        }
    }
}

impl Event {
    /// Marks the present end of a stream, or of what it has captured.
    ///
    /// # Errors
    /// `INVALID_HANDLE` when event and stream belong to different contexts,
    /// `STREAM_CAPTURE_INVALIDATED`.
    pub(crate) fn record(&self, context: &Context, stream: &Arc<Stream>) -> Outcome {
        if !context.has(self.context) {
            return Err(Code::INVALID_HANDLE);
        }
        if let Some(mark) = capture::mark(stream)? {
            *self.last.lock() = Last::InCapture(mark);
            return Ok(());
        }
        let mut last = self.last.lock();
        if let Some(shared) = &self.shared {
            let (event, number) = (shared.clone(), shared.announce());
            *last = Last::Nowhere;
            let submitted = context.submit(stream, Vec::new(), move || event.pass(number));
            if submitted.is_err() {
                shared.pass(number);
            }
            return submitted.map(|_| ());
        }
        let passed = Arc::new(OnceLock::new());
        let mark = passed.clone();
        let position = context.submit(stream, Vec::new(), move || {
            let _ = mark.set(Instant::now());
        })?;
        *last = Last::InStream(Record { position, passed });
        Ok(())
    }

    /// Marks the present ends of several streams, through a stream that waits for them.
    ///
    /// # Errors
    /// As [`Event::record`].
    pub(crate) fn record_after(
        &self,
        context: &Context,
        stream: &Arc<Stream>,
        after: Vec<Position>,
    ) -> Outcome {
        context.submit(stream, after, || ())?;
        self.record(context, stream)
    }
}

/// The context of a stream, for calls that name only the stream.
///
/// # Errors
/// As [`current`] and [`Context::stream`].
pub(crate) fn stream_and_context(
    handle: u64,
    default: DefaultStream,
) -> Outcome<(Arc<Stream>, Arc<Context>)> {
    if !is_default_stream(handle) {
        let stream = STREAMS.get(handle).ok_or(Code::INVALID_HANDLE)?;
        let context = CONTEXTS.get(stream.context).ok_or(Code::CONTEXT_IS_DESTROYED)?;
        context.check()?;
        return Ok((stream, context));
    }
    let context = current()?;
    Ok((context.stream(handle, default)?, context))
}

/// Whether this names a default stream.
pub(crate) fn is_default_stream(handle: u64) -> bool {
    handle <= PER_THREAD
}
