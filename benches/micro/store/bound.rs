//! Bounds that gpucr sets itself.

/// What is asked of the store, and what it did.
pub(crate) struct Bound {
    pub(crate) what: String,
    pub(crate) bound: String,
    pub(crate) measured: String,
    pub(crate) met: bool,
}

impl Bound {
    /// `value` must be at least `least`, both as factors.
    pub(crate) fn at_least(what: String, least: f64, value: f64) -> Self {
        let (bound, measured) = (format!("at least {least:.2}"), format!("{value:.2}"));
        Self { what, bound, measured, met: value >= least }
    }

    /// `value` must be below `most`, both in `unit`.
    pub(crate) fn below(what: String, most: f64, value: f64, unit: &str) -> Self {
        let (bound, measured) = (format!("below {most} {unit}"), format!("{value:.1} {unit}"));
        Self { what, bound, measured, met: value < most }
    }
}
