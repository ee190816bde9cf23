//! The shim: a `libcuda.so.1` that stands in front of the real driver library, so that a program
//! can be checkpointed from outside without knowing of it.
//!
//! # Rules
//!
//! - **Every function of the driver is exported**, from one table (`driver.table`) that says
//!   of each what happens to it. A program finds what it would find without the shim.
//! - **A forwarded function is one jump.** It is a naked function: it has no frame, touches no
//!   register and does not know its own signature, so it cannot get it wrong. (Functions written in
//!   global assembly would do as well, but rustc hides their symbols.)
//! - **Nothing runs before the program's own code.** No constructors; the driver is loaded by the
//!   first call of one of its functions, the agent's thread starts after the first successful
//!   `cuInit`.
//! - **The real driver is asked first.** `cuGetProcAddress` replaces what the real resolver found,
//!   and only addresses that it knows; `cuGetExportTable` is not touched. So what the shim does not
//!   know goes by it unharmed, and contexts and modules that it never saw must not surprise it.
//! - **Bulk memory is ours, the rest is the driver's.** `cuMemAlloc*` is served from physical
//!   blocks that can be handed to another process and taken out of this one; what the program
//!   makes with virtual memory management itself is followed. All other memory is left to the
//!   driver's own checkpoint, and counted; what that cannot do is recorded by name.
//! - **What is launched is looked at only while somebody asks.** See [`watch`]. Only the handles of the last
//!   launches are kept always, for messages. See [`state::recent`].
//! - **An open gate costs a few nanoseconds.** See [`state::gate`]. No lock is shared between threads
//!   that launch. The tables' lock is taken by calls that make, free or ask about memory, after
//!   they have entered the gate, and never while waiting for it.
//! - **After `fork` the child starts afresh,** as CUDA itself asks.
//! - **It prints nothing,** unless `GPUCR_LOG` is set.
//!
//! # Layout
//!
//! Each of these uses only those before it (`xtask/src/walls.rs` checks that):
//!
//! - [`abi`]: types, slots and real functions of the driver;
//! - [`usage`] and [`state`]: what the shim keeps of the program, all of which the child of a fork forgets;
//! - [`calls`]: what the arguments of a call say, as values; nothing is changed there;
//! - [`watch`]: who wants to know that: the recorder, and the guard that lets calls wait;
//! - [`agent`], which serves the checkpointer;
//! - [`fork`], the list of all that a child resets;
//! - [`resolver`] and [`track`]: functions of the driver that are written by hand;
//! - [`checkpoint`]: what `libgpucr.so` calls, by which a program saves itself;
//! - [`exports`]: the functions that are made from `driver.table`.

mod abi;
mod agent;
mod calls;
mod cancel;
mod checkpoint;
mod exports;
mod fork;
mod limit;
mod log;
mod resettable;
mod resolver;
mod state;
mod track;
mod ungated;
mod unknown;
mod usage;
mod watch;
