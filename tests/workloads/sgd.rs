//! A perceptron trained with gradient descent and momentum.

use anyhow::Result;

use crate::mlp::{Optimizer, train};
use crate::report::Run;

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    train(run, Optimizer::Sgd)
}
