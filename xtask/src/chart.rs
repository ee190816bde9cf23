//! A loss curve in characters.

/// The signs that a chart is drawn with.
#[derive(Clone, Copy)]
pub(crate) struct Signs {
    /// A point before the dump.
    pub(crate) before: char,
    /// A point after the restore.
    pub(crate) after: char,
    /// A point of the other run where it lies elsewhere.
    pub(crate) other: char,
    /// The moment of the dump.
    pub(crate) cut: char,
    /// Left edge, corner and bottom.
    pub(crate) frame: [char; 3],
}

/// For a terminal.
pub(crate) const UNICODE: Signs =
    Signs { before: '●', after: '○', other: '×', cut: '┊', frame: ['│', '└', '─'] };

/// For a file or a pipe.
pub(crate) const ASCII: Signs =
    Signs { before: '*', after: 'o', other: 'x', cut: ':', frame: ['|', '+', '-'] };

const WIDTH: usize = 60;
const HEIGHT: usize = 12;

/// Draws `curve` (step, loss) with the dump marked after step `cut`, over the curve of another run;
/// that one shows only where the two differ. Empty if there is nothing to draw.
pub(crate) fn draw(curve: &[(u32, f64)], other: &[(u32, f64)], cut: u32, signs: Signs) -> String {
    let points = || curve.iter().chain(other).filter(|(_, loss)| loss.is_finite());
    let (Some(first), Some(last)) =
        (points().map(|point| point.0).min(), points().map(|point| point.0).max())
    else {
        return String::new();
    };
    let lowest = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
    let highest = points().map(|point| point.1).fold(f64::NEG_INFINITY, f64::max);

    // Positions are bounded by WIDTH and HEIGHT, so that the conversions lose nothing.
    let column = |step: u32| {
        let share = f64::from(step.clamp(first, last) - first) / f64::from((last - first).max(1));
        (share * (WIDTH - 1) as f64).round() as usize
    };
    let row = |loss: f64| {
        let range = if highest > lowest { highest - lowest } else { 1.0 };
        ((highest - loss) / range * (HEIGHT - 1) as f64).round() as usize
    };
    let mut cells = [[' '; WIDTH]; HEIGHT];
    for line in &mut cells {
        line[column(cut)] = signs.cut;
    }
    for (step, loss) in other.iter().filter(|(_, loss)| loss.is_finite()) {
        cells[row(*loss)][column(*step)] = signs.other;
    }
    for (step, loss) in curve.iter().filter(|(_, loss)| loss.is_finite()) {
        cells[row(*loss)][column(*step)] = if *step > cut { signs.after } else { signs.before };
    }

    let [edge, corner, bottom] = signs.frame;
    let mut text = String::new();
    for (index, line) in cells.iter().enumerate() {
        let label = match index {
            0 => format!("{highest:.4}"),
            _ if index == HEIGHT - 1 => format!("{lowest:.4}"),
            _ => String::new(),
        };
        let line: String = line.iter().collect();
        text.push_str(format!("  {label:>10} {edge}{line}").trim_end());
        text.push('\n');
    }
    let rule: String = std::iter::repeat_n(bottom, WIDTH).collect();
    text.push_str(&format!("  {:>10} {corner}{rule}\n", ""));
    let width = WIDTH - first.to_string().len();
    text.push_str(&format!("  {:>10}  {first}{last:>width$}\n", "step"));
    let Signs { before, after, cut: mark, .. } = signs;
    text.push_str(&format!(
        "  {:>10}  {before} before the dump   {mark} dump after step {cut}   {after} restored\n",
        "loss"
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shows_both_halves_and_the_cut() {
        let curve: Vec<(u32, f64)> = (1..=50).map(|step| (step, 1.0 / f64::from(step))).collect();
        let text = draw(&curve, &curve, 25, ASCII);
        assert_eq!(text.lines().count(), HEIGHT + 3);
        assert!(text.lines().all(|line| line.len() <= WIDTH + 14), "{text}");
        assert!(text.starts_with("      1.0000 |*"), "{text}");
        assert!(text.contains('o') && text.contains(':') && !text.contains('x'), "{text}");
    }

    #[test]
    fn another_run_shows_where_it_differs() {
        let text = draw(&[(1, 1.0), (2, 0.5)], &[(1, 1.0), (2, 0.7)], 1, ASCII);
        assert!(text.contains('x'), "{text}");
    }

    #[test]
    fn odd_series_are_drawn_too() {
        assert_eq!(draw(&[], &[], 3, ASCII), "");
        assert_eq!(draw(&[(1, f64::NAN)], &[], 3, ASCII), "");
        assert!(draw(&[(7, 2.0)], &[], 3, ASCII).contains('o'));
    }
}
