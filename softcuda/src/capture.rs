//! Stream capture: work of streams that goes into a graph instead of being done.
//!
//! A capture begins in one stream and spreads to others through events. Whatever cannot be
//! captured fails and invalidates the capture, which then only its end gets rid of.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::ThreadId;

use parking_lot::Mutex;

use crate::context::Context;
use crate::events::{Event, Mark};
use crate::graphs::{self, Work};
use crate::handles::new_handle;
use crate::status::{Code, Outcome};
use crate::streams::{NON_BLOCKING, Stream};

/// `CUstreamCaptureMode`: which unsafe calls a capture forbids, and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// To all threads.
    Global = 0,
    /// To the thread that began the capture.
    ThreadLocal = 1,
    /// To nobody.
    Relaxed = 2,
}

impl TryFrom<u32> for Mode {
    type Error = Code;

    fn try_from(mode: u32) -> Outcome<Mode> {
        Ok(match mode {
            0 => Mode::Global,
            1 => Mode::ThreadLocal,
            2 => Mode::Relaxed,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
}

/// What is known of a stream's capture.
pub(crate) struct Info {
    /// It can only be ended.
    pub(crate) invalidated: bool,
    /// A number that no other capture of this process has.
    pub(crate) id: u64,
    /// Handle of the graph.
    pub(crate) graph: u64,
    /// What the stream's next node will depend on.
    pub(crate) dependencies: Vec<u64>,
}

struct Member {
    /// Handle of its context, or 0 when it is destroyed.
    context: u64,
    blocking: bool,
    dependencies: Vec<u64>,
}

struct Capture {
    id: u64,
    graph: u64,
    /// The graph was there before the capture.
    foreign_graph: bool,
    mode: Mode,
    thread: ThreadId,
    origin: u64,
    invalidated: bool,
    streams: BTreeMap<u64, Member>,
}

static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());
/// How many captures there are, so that calls without any cost no lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The mode of the calling thread, which says what it wants to be kept from.
    pub(crate) static THREAD_MODE: std::cell::Cell<Mode> =
        const { std::cell::Cell::new(Mode::Global) };
}

fn any() -> bool {
    COUNT.load(Ordering::SeqCst) != 0
}

fn of<'a>(captures: &'a mut [Capture], stream: &Stream) -> Option<&'a mut Capture> {
    captures.iter_mut().find(|capture| capture.streams.contains_key(&stream.handle))
}

/// Begins a capture, into a graph that is there already (after some of its nodes) or a new one.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` for the legacy default stream, `ILLEGAL_STATE` for a stream that
/// captures already, `INVALID_VALUE` for nodes that are not the graph's.
pub(crate) fn begin(
    context: &Context,
    stream: &Arc<Stream>,
    mode: Mode,
    into: Option<(u64, Vec<u64>)>,
) -> Outcome {
    if context.is_legacy(stream) {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut captures = CAPTURES.lock();
    if of(&mut captures, stream).is_some() {
        return Err(Code::ILLEGAL_STATE);
    }
    let foreign_graph = into.is_some();
    let (graph, dependencies) = match into {
        Some((graph, dependencies)) => {
            let nodes = graphs::nodes(graph)?;
            if !dependencies.iter().all(|node| nodes.contains(node)) {
                return Err(Code::INVALID_VALUE);
            }
            (graph, dependencies)
        }
        None => (graphs::create(), Vec::new()),
    };
    captures.push(Capture {
        id: new_handle(),
        graph,
        foreign_graph,
        mode,
        thread: std::thread::current().id(),
        origin: stream.handle,
        invalidated: false,
        streams: BTreeMap::from([(stream.handle, Member::of(stream, dependencies))]),
    });
    COUNT.store(captures.len(), Ordering::SeqCst);
    Ok(())
}

/// Ends a capture; gives its graph. The capture is over also when this fails, other than for the
/// wrong stream or thread.
///
/// # Errors
/// `ILLEGAL_STATE` when the stream does not capture, `STREAM_CAPTURE_UNMATCHED` when the capture
/// began in another stream, `STREAM_CAPTURE_WRONG_THREAD`, `STREAM_CAPTURE_INVALIDATED`, and
/// `STREAM_CAPTURE_UNJOINED` when other streams have work that this one was not made to wait for.
pub(crate) fn end(stream: &Stream) -> Outcome<u64> {
    let mut captures = CAPTURES.lock();
    let index = captures.iter().position(|c| c.streams.contains_key(&stream.handle));
    let index = index.ok_or(Code::ILLEGAL_STATE)?;
    let capture = &mut captures[index];
    if capture.origin != stream.handle {
        capture.invalidated = true;
        return Err(Code::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != Mode::Relaxed && capture.thread != std::thread::current().id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    let capture = captures.remove(index);
    COUNT.store(captures.len(), Ordering::SeqCst);
    drop(captures);
    let outcome = if capture.invalidated {
        Err(Code::STREAM_CAPTURE_INVALIDATED)
    } else if !capture.is_joined() {
        Err(Code::STREAM_CAPTURE_UNJOINED)
    } else {
        Ok(capture.graph)
    };
    if outcome.is_err() && !capture.foreign_graph {
        let _ = graphs::destroy(capture.graph);
    }
    outcome
}

/// Whether a stream captures into a graph that was there before.
pub(crate) fn is_into_a_known_graph(stream: &Stream) -> bool {
    of(&mut CAPTURES.lock(), stream).is_some_and(|capture| capture.foreign_graph)
}

/// The capture that a stream takes part in.
pub(crate) fn info(stream: &Stream) -> Option<Info> {
    if !any() {
        return None;
    }
    let mut captures = CAPTURES.lock();
    let capture = of(&mut captures, stream)?;
    Some(Info {
        invalidated: capture.invalidated,
        id: capture.id,
        graph: capture.graph,
        dependencies: capture.streams.get(&stream.handle)?.dependencies.clone(),
    })
}

/// Adds a node if the stream captures; false if it does not.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED`.
pub(crate) fn record(stream: &Stream, work: Work) -> Outcome<bool> {
    if !any() {
        return Ok(false);
    }
    let mut captures = CAPTURES.lock();
    let Some(capture) = of(&mut captures, stream) else { return Ok(false) };
    let graph = capture.graph;
    let member = capture.member(stream)?;
    let node = graphs::add(graph, &member.dependencies, work)?;
    member.dependencies = vec![node];
    Ok(true)
}

/// Sets or adds to what the stream's next node will depend on.
///
/// # Errors
/// `ILLEGAL_STATE` when the stream does not capture, `STREAM_CAPTURE_INVALIDATED`,
/// `INVALID_VALUE` for nodes that are not the graph's.
pub(crate) fn set_dependencies(stream: &Stream, nodes: Vec<u64>, keep: bool) -> Outcome {
    let mut captures = CAPTURES.lock();
    let capture = of(&mut captures, stream).ok_or(Code::ILLEGAL_STATE)?;
    let known = graphs::nodes(capture.graph)?;
    let member = capture.member(stream)?;
    if !nodes.iter().all(|node| known.contains(node)) {
        return Err(Code::INVALID_VALUE);
    }
    if !keep {
        member.dependencies.clear();
    }
    member.depend_on(&nodes);
    Ok(())
}

/// The mark that an event gets in a stream that captures.
///
/// # Errors
/// `STREAM_CAPTURE_INVALIDATED`.
pub(crate) fn mark(stream: &Stream) -> Outcome<Option<Mark>> {
    if !any() {
        return Ok(None);
    }
    let mut captures = CAPTURES.lock();
    let Some(capture) = of(&mut captures, stream) else { return Ok(None) };
    let id = capture.id;
    let nodes = capture.member(stream)?.dependencies.clone();
    Ok(Some(Mark { capture: id, nodes }))
}

/// Has a stream wait for a captured event, which makes it take part in the capture.
///
/// # Errors
/// `CAPTURED_EVENT` when that capture is over, `STREAM_CAPTURE_MERGE` for a stream of another
/// capture, `STREAM_CAPTURE_IMPLICIT` for the legacy default stream, `STREAM_CAPTURE_INVALIDATED`.
pub(crate) fn join(context: &Context, stream: &Arc<Stream>, mark: &Mark) -> Outcome {
    let mut captures = CAPTURES.lock();
    if let Some(other) = of(&mut captures, stream).filter(|other| other.id != mark.capture) {
        other.invalidated = true;
        if let Some(capture) = captures.iter_mut().find(|capture| capture.id == mark.capture) {
            capture.invalidated = true;
        }
        return Err(Code::STREAM_CAPTURE_MERGE);
    }
    let capture = captures.iter_mut().find(|capture| capture.id == mark.capture);
    let capture = capture.ok_or(Code::CAPTURED_EVENT)?;
    if capture.invalidated {
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    if context.is_legacy(stream) {
        capture.invalidated = true;
        return Err(Code::STREAM_CAPTURE_IMPLICIT);
    }
    let member = capture.streams.entry(stream.handle);
    member.or_insert_with(|| Member::of(stream, Vec::new())).depend_on(&mark.nodes);
    Ok(())
}

/// Invalidates the capture of a stream, for a wait on an event from outside of it.
pub(crate) fn refuse_outside_event(stream: &Stream) -> Outcome {
    if any()
        && let Some(capture) = of(&mut CAPTURES.lock(), stream)
    {
        capture.invalidated = true;
        return Err(Code::STREAM_CAPTURE_ISOLATION);
    }
    Ok(())
}

/// Fails if an event was recorded last in a capture, where it has no time.
///
/// # Errors
/// `CAPTURED_EVENT`, with the capture invalidated.
pub(crate) fn check_not_captured(event: &Event) -> Outcome {
    event.mark().map_or(Ok(()), |mark| Err(refuse_captured_event(&mark)))
}

/// Invalidates the capture of an event, for a call that asks for the event's state.
fn refuse_captured_event(mark: &Mark) -> Code {
    let mut captures = CAPTURES.lock();
    if let Some(capture) = captures.iter_mut().find(|capture| capture.id == mark.capture) {
        capture.invalidated = true;
    }
    Code::CAPTURED_EVENT
}

/// Refuses what cannot be captured in a stream that captures, and work of the legacy default
/// stream while a stream captures that it would have to wait for.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED` or `STREAM_CAPTURE_IMPLICIT`, with the captures invalidated.
pub(crate) fn refuse(context: &Context, stream: &Arc<Stream>) -> Outcome {
    if !any() {
        return Ok(());
    }
    let mut captures = CAPTURES.lock();
    if let Some(capture) = of(&mut captures, stream) {
        capture.invalidated = true;
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    if !context.is_legacy(stream) {
        return Ok(());
    }
    let waits = |member: &Member| member.blocking && member.context == context.handle;
    let mut outcome = Ok(());
    for capture in captures.iter_mut().filter(|c| c.streams.values().any(waits)) {
        capture.invalidated = true;
        outcome = Err(Code::STREAM_CAPTURE_IMPLICIT);
    }
    outcome
}

/// Whether the legacy default stream would wait for a stream of this context that captures.
pub(crate) fn blocks_legacy(context: &Context) -> bool {
    let waits = |member: &Member| member.blocking && member.context == context.handle;
    any() && CAPTURES.lock().iter().any(|capture| capture.streams.values().any(waits))
}

/// Refuses waiting for a whole context with a stream that captures.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`, with the captures invalidated.
pub(crate) fn refuse_in_context(context: u64) -> Outcome {
    refuse_where(|capture| capture.streams.values().any(|member| member.context == context))
}

/// Refuses a call that is unsafe during captures, as far as the modes of captures and of the
/// calling thread say so.
///
/// # Errors
/// `STREAM_CAPTURE_UNSUPPORTED`, with the captures invalidated.
pub(crate) fn refuse_unsafe() -> Outcome {
    let own_mode = THREAD_MODE.get();
    if own_mode == Mode::Relaxed {
        return Ok(());
    }
    let thread = std::thread::current().id();
    refuse_where(|capture| match capture.mode {
        Mode::Relaxed => false,
        Mode::ThreadLocal => capture.thread == thread,
        Mode::Global => capture.thread == thread || own_mode == Mode::Global,
    })
}

fn refuse_where(forbids: impl Fn(&Capture) -> bool) -> Outcome {
    if !any() {
        return Ok(());
    }
    let mut outcome = Ok(());
    for capture in CAPTURES.lock().iter_mut().filter(|capture| forbids(capture)) {
        capture.invalidated = true;
        outcome = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    outcome
}

/// Forgets a stream that is destroyed; a capture that began in it ends. What another stream has captured stays, and
/// has to be joined as before.
pub(crate) fn forget(stream: u64) {
    if !any() {
        return;
    }
    let mut captures = CAPTURES.lock();
    captures.retain_mut(|capture| {
        if let Some(member) = capture.streams.get_mut(&stream) {
            member.context = 0;
            member.blocking = false;
        }
        let over = capture.origin == stream;
        if over && !capture.foreign_graph {
            let _ = graphs::destroy(capture.graph);
        }
        !over
    });
    COUNT.store(captures.len(), Ordering::SeqCst);
}

impl Member {
    fn of(stream: &Stream, dependencies: Vec<u64>) -> Member {
        let blocking = stream.flags & NON_BLOCKING == 0;
        Member { context: stream.context, blocking, dependencies }
    }

    fn depend_on(&mut self, nodes: &[u64]) {
        for node in nodes {
            if !self.dependencies.contains(node) {
                self.dependencies.push(*node);
            }
        }
    }
}

impl Capture {
    fn member(&mut self, stream: &Stream) -> Outcome<&mut Member> {
        if self.invalidated {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        self.streams.get_mut(&stream.handle).ok_or(Code::ILLEGAL_STATE)
    }

    /// Whether the origin waits for everything that the other streams have captured.
    fn is_joined(&self) -> bool {
        let Some(origin) = self.streams.get(&self.origin) else { return false };
        let others = self.streams.values().flat_map(|member| member.dependencies.iter().copied());
        graphs::all_before(&others.collect::<Vec<_>>(), &origin.dependencies)
    }
}
