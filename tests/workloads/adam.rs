//! A perceptron trained with AdamW: two more buffers for each weight matrix, and a struct argument
//! that changes with each step.

use anyhow::Result;

use crate::mlp::{Optimizer, train};
use crate::report::Run;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    train(run, Optimizer::AdamW)
}
