//! Programs that make it hard to tell what a launch writes: none of them may come back wrong from a
//! dump that copied memory while they ran.

mod field;
mod graph_nodes;
mod hidden;
mod long_kernel;
mod model;
mod remade;
mod two_halves;

pub(crate) use graph_nodes::run as graph_nodes;
pub(crate) use hidden::{const_cast, halves, permuted, seldom, shifting};
pub(crate) use long_kernel::run as long_kernel;
pub(crate) use model::{model, stamp};
pub(crate) use remade::run as remade;
pub(crate) use two_halves::run as two_halves;
