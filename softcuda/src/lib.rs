//! softcuda: a CUDA driver library (`libcuda.so.1`) in software. It executes PTX on the CPU, so
//! that driver-API programs, and tools that work on them, run on machines without a GPU.
//!
//! The library is used through the C interface of the CUDA driver; see the README. For Rust it
//! offers the PTX interpreter, [`ptx`].

mod address_space;
mod api;
mod arrays;
mod attributes;
mod backing;
mod capture;
mod checkpoint;
mod conditions;
mod context;
mod copy_engine;
mod custom_storage;
mod descriptors;
mod device_launches;
mod device_memory;
mod device_view;
mod drivers;
mod events;
mod exclusive;
mod executables;
mod fatbin;
mod faults;
mod forked;
mod gate;
mod graph_memory;
mod graph_work;
mod graphs;
mod green_contexts;
mod handles;
mod host_calls;
mod host_memory;
#[doc(hidden)]
pub mod hostile;
mod ipc;
mod kernel_heap;
mod kernel_launch;
mod lifetime;
mod links;
mod local_storage;
mod logs;
mod managed_memory;
mod managed_pools;
mod md2;
mod memory_operations;
mod models;
mod modules;
mod multicast;
mod multicast_table;
mod operations;
mod physical;
mod placement;
mod pools;
mod prints;
mod process;
pub mod ptx;
mod requests;
mod saved_bytes;
mod service;
mod settings;
mod shapes;
mod shared_events;
mod shared_pools;
mod status;
mod streams;
mod submission;
mod switching;
mod textures;
mod twice;
mod user_objects;
mod virtual_memory;
