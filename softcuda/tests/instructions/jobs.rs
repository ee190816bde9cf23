//! Everything that is run.

use super::job::Job;
use super::table::Case;
use super::{
    barriers, conversions, floats, halves, images, integers, matrices, products, programs,
    surfaces, tiny, video, warps, words,
};

/// All jobs; their names are unique.
pub(crate) fn all() -> Vec<Job> {
    let cases = [
        integers::cases(),
        words::cases(),
        floats::cases(),
        halves::cases(),
        conversions::cases(),
        video::cases(),
        tiny::cases(),
    ];
    let cases = cases.into_iter().flatten().map(Case::job);
    let others = [
        warps::jobs(),
        matrices::jobs(),
        products::jobs(),
        barriers::jobs(),
        images::jobs(),
        surfaces::jobs(),
        programs::jobs(),
    ];
    cases.chain(others.into_iter().flatten()).collect()
}
