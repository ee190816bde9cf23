//! What a training run printed, and how two of them compare.

/// The losses and the result of one training run.
#[derive(Debug, Default)]
pub(crate) struct Series {
    /// Step and what was printed for it: the loss in decimal, and its exact bits.
    pub(crate) losses: Vec<(u32, String)>,
    /// The hash over all losses and the final weights, once the run is complete.
    pub(crate) result: Option<String>,
    /// The pid that the program says it has.
    pub(crate) pid: Option<u32>,
}

impl Series {
    /// Reads what the program printed so far. An unfinished last line does not count.
    pub(crate) fn parse(text: &str) -> Self {
        let mut series = Self::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("ready"), Some(pid)) => {
                    series.pid = pid.strip_prefix("pid=").and_then(|pid| pid.parse().ok());
                }
                (Some("step"), Some(step)) => {
                    let rest: Vec<&str> = words.collect();
                    if let (Ok(step), ["loss", loss @ ..]) = (step.parse(), rest.as_slice()) {
                        series.losses.push((step, loss.join(" ")));
                    }
                }
                (Some("result"), Some(hash)) => series.result = Some(hash.to_owned()),
                _ => {}
            }
        }
        series
    }

    /// The last step that was printed, 0 before the first.
    pub(crate) fn last_step(&self) -> u32 {
        self.losses.last().map_or(0, |(step, _)| *step)
    }

    /// The losses as numbers, for drawing.
    pub(crate) fn curve(&self) -> Vec<(u32, f64)> {
        let number = |loss: &String| loss.split_whitespace().next()?.parse().ok();
        self.losses.iter().filter_map(|(step, loss)| Some((*step, number(loss)?))).collect()
    }

    /// The first difference to another run, in words; `None` if both are complete and equal.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let mut pairs = self.losses.iter().zip(&other.losses);
        if let Some((ours, theirs)) = pairs.find(|(ours, theirs)| ours != theirs) {
            return Some(format!(
                "step {} loss {} against step {} loss {}",
                ours.0, ours.1, theirs.0, theirs.1
            ));
        }
        if self.losses.len() != other.losses.len() {
            let (ours, theirs) = (self.losses.len(), other.losses.len());
            return Some(format!("{ours} losses against {theirs}"));
        }
        if self.losses.is_empty() {
            return Some("neither run printed a loss".to_owned());
        }
        match (&self.result, &other.result) {
            (Some(ours), Some(theirs)) if ours == theirs => None,
            (ours, theirs) => {
                let shown = |hash: &Option<String>| hash.clone().unwrap_or_else(|| "none".into());
                Some(format!("result {} against {}", shown(ours), shown(theirs)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "ready pid=42\nstep 1 loss 2.5000000 40200000\n\
                       step 2 loss 1.5000000 3fc00000\nresult abc\n";

    #[test]
    fn reads_a_run() {
        let series = Series::parse(RUN);
        assert_eq!(series.pid, Some(42));
        assert_eq!(series.last_step(), 2);
        assert_eq!(series.curve(), [(1, 2.5), (2, 1.5)]);
        assert_eq!(series.result.as_deref(), Some("abc"));
    }

    #[test]
    fn an_unfinished_line_does_not_count() {
        let series = Series::parse("step 1 loss 2.5 40200000\nstep 2 loss 1.5 3fc0");
        assert_eq!(series.losses.len(), 1);
    }

    #[test]
    fn equal_runs_do_not_differ() {
        assert_eq!(Series::parse(RUN).difference(&Series::parse(RUN)), None);
    }

    #[test]
    fn every_kind_of_difference_is_found() {
        let run = Series::parse(RUN);
        for other in [
            RUN.replace("3fc00000", "3fc00001"),
            RUN.replace("step 2", "step 3"),
            RUN.replace("step 2 loss 1.5000000 3fc00000\n", ""),
            RUN.replace("abc", "abd"),
            RUN.replace("result abc\n", ""),
        ] {
            let other = Series::parse(&other);
            assert!(run.difference(&other).is_some(), "{other:?}");
            assert!(other.difference(&run).is_some(), "{other:?}");
        }
        let nothing = Series::default();
        assert!(nothing.difference(&Series::default()).is_some());
    }
}
