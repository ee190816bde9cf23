//! Launches that are made with a twin.

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_rewrite::control;

use super::instances::{Control, HOLD, Instance, LEGACY, Launching, State, Watched, with};
use super::layout::{Layout, Shape};
use super::lengths::{self, Grid, Length, Next};
use super::recent::Class;
use super::repeat::Repeat;
use super::twins::{self, Entry, Found, Inside, Relaxed, Twin};
use crate::abi::real::{self, check};
use crate::abi::types::{Code, ERROR_NOT_SUPPORTED, STREAM_PER_THREAD, SUCCESS};
use crate::calls::effects::{Decoder, Effects, Launch};
use crate::state::memory::vmm::Driver;
use crate::state::range::Range;
use crate::state::{gate, memory};
use crate::watch::packed;

/// For how long a launch waits until others have left the gate.
const ALONE: Duration = Duration::from_millis(1);
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`
const MULTIPROCESSORS: u32 = 16;
/// `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`
const THREADS_OF_MULTIPROCESSOR: u32 = 39;
/// `CU_STREAM_NON_BLOCKING`
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;

/// A launch of one kernel in one stream.
#[derive(Default)]
struct Called {
    stream: u64,
    launch: Option<Launch>,
}

impl Effects for Called {
    fn stream(&mut self, stream: u64) {
        self.stream = stream;
    }

    fn range(&mut self, _: Range) {}

    fn launch(&mut self, launch: &Launch) {
        self.launch = Some(*launch);
    }

    fn graph(&mut self, _: u64) {}

    fn host_function(&mut self) {}
}

/// Makes a launch with the kernel's twin: the code to give back. `None`: it is to be made as the program wants it. The
/// caller is inside the gate, and has waited for what comes before.
#[inline(never)]
pub(crate) fn launch(decoder: Decoder, arguments: &[usize], per_thread: bool) -> Option<Code> {
    let mut called = Called::default();
    decoder(arguments, &mut called);
    let stream = match called.stream {
        0 if per_thread => STREAM_PER_THREAD,
        0 => LEGACY,
        stream => stream,
    };
    with_twin(&called.launch?, stream)
}

fn with_twin(launch: &Launch, stream: u64) -> Option<Code> {
    let form = launch.form.filter(|_| launch.is_listed())?;
    let (context, device) = real::current_context().ok()?;
    let found = twins::of(context, launch.handle);
    let kernel = match &found {
        Found { length: Some(length), .. } => &length.kernel,
        Found { twin: Some(twin), .. } => &twin.kernel,
        _ => return None,
    };
    let no = |why: &str| {
        twins::note(&kernel.name, why);
        None
    };
    if stream == STREAM_PER_THREAD {
        return no("it was launched in a thread's default stream");
    }
    if gate::capturing() {
        return no("a stream was being captured");
    }
    let [gx, gy, gz, bx, by, bz] = form.shape;
    let blocks = control::blocks([gx, gy, gz])?;
    let threads: u64 = [bx, by, bz].iter().map(|size| u64::from(*size)).product();
    let shape = Shape { blocks, threads };
    let resident = || resident(device, threads);
    let rounds = || resident().map_or(1, |resident| blocks.div_ceil(resident));
    let grid = || Grid { blocks, rounds: rounds() };
    let twin = match (&found.length, &found.twin) {
        (None, twin) => twin.clone()?,
        (Some(length), twin) => match (length.next(), twin) {
            (Next::Plain, _) => return None,
            (Next::Measure, _) => {
                let arguments = launch.packed(kernel)?;
                let enqueue = || packed::launch(launch.handle, form, stream, &arguments);
                return length.measure(context, stream, grid(), enqueue);
            }
            (Next::Long, Some(twin)) => twin.clone(),
            (Next::Long, None) => first_twin(context, launch.handle, stream, length)?,
        },
    };
    let mut arguments = launch.packed(&twin.kernel)?;
    let is_blocking = is_blocking(stream)?;
    let Some(launching) = Launching::begin(stream, ALONE) else {
        return no("other threads were in calls of the driver");
    };
    let _relaxed = Relaxed::now();
    let admits = |entry: &Entry| entry.admits(launch.handle, threads, form.shared);
    let prepare = |layout: &Layout| prepare(context, device, layout.bytes).ok();
    let layout = |inside| Layout::inside(inside, shape, form.shared, resident()?);
    let may_repeat = |repeat: &Repeat| match repeat.admits(&twin.kernel, launch) {
        Ok(()) => true,
        Err(why) => {
            twins::note(&twin.kernel.name, &format!("it cannot be begun again: {why}"));
            false
        }
    };
    let (watched, between) = match &found.length {
        Some(length) => {
            let between = length.has_short_blocks();
            (Watched::Length(length.clone(), grid()), between)
        }
        None if twin.inside.is_some() || twin.aborted.is_some() => {
            let class = Class::of(&twin.kernel, &form, &arguments);
            (Watched::Blocks(class, grid()), twin.recent.has_short_blocks(class))
        }
        None => (Watched::No, false),
    };
    let chosen = choose(&twin, shape, between, admits, layout, may_repeat, prepare);
    let Chosen { entry, layout, control, event } = match chosen {
        Ok(chosen) => chosen,
        Err(why) => return no(why),
    };
    arguments.resize(entry.place, 0);
    arguments.extend(control.address.to_le_bytes());
    let number = with(|table| {
        table.last += 1;
        table.last
    });
    let instance = Instance {
        number,
        context,
        stream,
        is_blocking,
        twin: twin.clone(),
        entry,
        layout,
        form,
        arguments: arguments.into(),
        control,
        shape,
        event,
        state: State::Running,
        watched,
        done: 0,
        in_vain: 0,
        since: Instant::now(),
    };
    let words = (layout.zero - control::CLAIMS) / 4;
    // SAFETY: memory of ours that is as long.
    let cleaned = unsafe {
        let told = layout.slots.map_or(SUCCESS, |slots| {
            real::cuMemsetD32Async(control.address + control::SLOTS, slots, 1, stream)
        });
        check(told).and_then(|()| {
            let claims = control.address + control::CLAIMS;
            check(real::cuMemsetD32Async(claims, 0, words as usize, stream))
        })
    };
    let made = cleaned.and_then(|()| instance.enqueue());
    // SAFETY: an event and a stream of the current context.
    let recorded = made.and_then(|()| check(unsafe { real::cuEventRecord(event, stream) }));
    let code = match (made, recorded) {
        (_, Ok(())) => {
            with(|table| table.instances.push(instance));
            Some(SUCCESS)
        }
        // What it uses is given up for good, since nobody knows when the stream is done with that; and there will be no
        // other. Where it was launched it is like any other launch.
        (made, _) => {
            twins::give_up(context, launch.handle, "the driver did not launch its twin");
            made.is_ok().then_some(SUCCESS)
        }
    };
    drop(launching);
    code
}

/// The twin of a kernel that takes long, of which one is about to be launched. It is loaded when nothing runs in its context,
/// which is waited for: what runs might be waiting for this launch, and the driver for that.
fn first_twin(context: u64, handle: u64, stream: u64, length: &Arc<Length>) -> Option<Arc<Twin>> {
    if !length.may_load() {
        return None;
    }
    // No call passes the gate while the context is waited for and the module is loaded.
    let launching = Launching::begin(stream, ALONE);
    if launching.is_none() {
        twins::note(&length.kernel.name, "other threads were in calls of the driver");
        return None;
    }
    let loaded = twins::load(context, handle, length, || lengths::comes_to_rest(context, HOLD));
    if loaded.is_none() {
        length.was_busy();
        twins::note(&length.kernel.name, "its twin is loaded when nothing else runs");
    }
    loaded?
}

/// The twin with which a launch is made, and what it uses.
struct Chosen {
    entry: Entry,
    layout: Layout,
    control: Control,
    event: u64,
}

/// The twin that is interrupted inside of its blocks, if there is one and not too much would be saved; or else the one that
/// is aborted, if this launch may be begun again; or else, or if it is to be interrupted `between` blocks, the first one.
/// Why none can be launched.
fn choose(
    twin: &Twin,
    shape: Shape,
    between: bool,
    admits: impl Fn(&Entry) -> bool,
    layout: impl Fn(Inside) -> Option<Layout>,
    may_repeat: impl Fn(&Repeat) -> bool,
    prepare: impl Fn(&Layout) -> Option<(Control, u64)>,
) -> Result<Chosen, &'static str> {
    let inside = || {
        let (entry, inside) = twin.inside.filter(|(entry, _)| admits(entry))?;
        let layout = layout(inside)?;
        let (control, event) = prepare(&layout)?;
        Some(Chosen { entry, layout, control, event })
    };
    let aborted = || {
        let aborted = twin.aborted.as_ref();
        let (entry, repeat) = aborted.filter(|(entry, _)| admits(entry))?;
        if !may_repeat(repeat) {
            return None;
        }
        let layout = Layout::aborted(repeat.by_blocks, shape)?;
        let (control, event) = prepare(&layout)?;
        Some(Chosen { entry: *entry, layout, control, event })
    };
    if !between && let Some(chosen) = inside().or_else(aborted) {
        return Ok(chosen);
    }
    if !admits(&twin.between) {
        return Err("its twin cannot have blocks as large, or its blocks run in clusters");
    }
    let layout = Layout::between(shape);
    let (control, event) = prepare(&layout).ok_or("there was no memory for its control block")?;
    Ok(Chosen { entry: twin.between, layout, control, event })
}

/// No more blocks of so many threads run at a time on a device.
fn resident(device: i32, threads: u64) -> Option<u64> {
    let asked = |attribute| {
        let mut value = 0;
        // SAFETY: writes one value.
        let code = unsafe { real::cuDeviceGetAttribute(&mut value, attribute, device) };
        (code == SUCCESS).then_some(value.max(1) as u64)
    };
    let at_a_time = asked(THREADS_OF_MULTIPROCESSOR)?.checked_div(threads)?.max(1);
    Some(asked(MULTIPROCESSORS)? * at_a_time)
}

/// Whether synchronous copies wait for a stream.
fn is_blocking(stream: u64) -> Option<bool> {
    let mut flags = 0;
    // SAFETY: writes one value.
    let asked =
        stream == LEGACY || unsafe { real::cuStreamGetFlags(stream, &mut flags) } == SUCCESS;
    asked.then_some(flags & NON_BLOCKING == 0)
}

/// A control block of at least so many bytes whose flag is 0, and an event.
fn prepare(context: u64, device: i32, bytes: u64) -> Result<(Control, u64), Code> {
    let spare = with(|table| {
        let fits =
            |(of, control, _): &(u64, Control, u64)| *of == context && control.capacity >= bytes;
        let at = table.spare.iter().position(fits)?;
        Some(table.spare.swap_remove(at))
    });
    if let Some((_, control, event)) = spare {
        return Ok((control, event));
    }
    let stream = own_stream(context)?;
    let size = bytes.next_power_of_two();
    let address = {
        let mut memory = memory::lock();
        if !memory.serves(&Driver, device) {
            return Err(ERROR_NOT_SUPPORTED);
        }
        memory.allocate(&Driver, device, context, size)?
    };
    let mut event = 0;
    // SAFETY: the memory is ours and as long; each call of the driver writes one value.
    let made = unsafe {
        check(real::cuStreamWriteValue32_v2(stream, address, 0, 0))
            .and_then(|()| check(real::cuStreamSynchronize(stream)))
            .and_then(|()| check(real::cuEventCreate(&mut event, DISABLE_TIMING)))
    };
    if let Err(code) = made {
        let mut memory = memory::lock();
        if let Some(allocation) = memory.take(address) {
            memory.release(&Driver, allocation);
        }
        return Err(code);
    }
    Ok((Control { address, capacity: size }, event))
}

/// The stream of ours in a context, which is current.
pub(super) fn own_stream(context: u64) -> Result<u64, Code> {
    let known = |table: &mut super::instances::Table| {
        table.streams.iter().find(|(of, _)| *of == context).map(|(_, stream)| *stream)
    };
    if let Some(stream) = with(known) {
        return Ok(stream);
    }
    let mut stream = 0;
    // SAFETY: writes one value.
    check(unsafe { real::cuStreamCreate(&mut stream, NON_BLOCKING) })?;
    with(|table| table.streams.push((context, stream)));
    Ok(stream)
}

impl Instance {
    /// Launches the twin in the instance's stream. Its context is current.
    pub(super) fn enqueue(&self) -> Result<(), Code> {
        self.enqueue_in(self.stream)
    }

    /// Launches the twin in a stream. The instance's context is current.
    pub(super) fn enqueue_in(&self, stream: u64) -> Result<(), Code> {
        packed::launch(self.entry.function, self.form, stream, &self.arguments)
    }
}
