//! Collective operations of the workloads' own, made as NCCL makes them: ranks in processes of their own that find each
//! other over sockets, share memory of their devices, and launch kernels that wait for each other on the devices. What one
//! rank has launched and another one has not does not come to an end, unless a rank is lost: then all kernels end, and an
//! error says who it was.

mod bootstrap;
mod communicator;
mod links;
mod lost;
pub(crate) mod options;
mod ranks;
mod window;

pub(crate) use communicator::Communicator;
pub(crate) use lost::Lost;
pub(crate) use ranks::{Member, Program, Step, run};
