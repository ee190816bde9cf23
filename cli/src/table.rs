//! Tables for people: columns that are as wide as they must be, two spaces apart.

use crate::display;
use crate::paint::Paint;
use crate::say;

/// A table that is printed when it is complete.
pub(crate) struct Table {
    heads: Vec<&'static str>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Columns with these heads. One that begins with `>` is aligned to the right.
    pub(crate) fn new(heads: &[&'static str]) -> Self {
        Self {
            heads: heads.iter().map(|head| head.trim_start_matches('>')).collect(),
            right: heads.iter().map(|head| head.starts_with('>')).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row, which has a cell for each column.
    pub(crate) fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.heads.len());
        self.rows.push(cells);
    }

    /// The lines of the table, without spaces at their ends.
    fn lines(&self) -> Vec<String> {
        let width = |text: &str| text.chars().count();
        let widths: Vec<usize> = (0..self.heads.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| width(&row[column]));
                cells.chain([width(self.heads[column])]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: Vec<&str>| {
            let mut line = String::from("  ");
            for (column, cell) in cells.iter().enumerate() {
                let space = " ".repeat(widths[column] - width(cell));
                let (before, after) =
                    if self.right[column] { (&*space, "") } else { ("", &*space) };
                line += &format!("{before}{cell}{after}  ");
            }
            line.trim_end().to_owned()
        };
        let head = line(self.heads.clone());
        let rows = self.rows.iter().map(|row| line(row.iter().map(String::as_str).collect()));
        [head].into_iter().chain(rows).collect()
    }

    /// Prints it on stdout; with `cut`, and if that is a terminal, lines are cut to its width.
    pub(crate) fn print_cut(&self, cut: bool) {
        let width = display::width().filter(|_| cut).unwrap_or(usize::MAX);
        for (number, mut line) in self.lines().into_iter().enumerate() {
            if line.chars().nth(width).is_some() {
                // The last column that fits is an ellipsis.
                line = line.chars().take(width.saturating_sub(1)).chain(['…']).collect();
            }
            let paint = if number == 0 { Paint::Head } else { Paint::Plain };
            say::painted(&[(paint, &line)]);
        }
    }

    /// Prints it on stdout.
    pub(crate) fn print(&self) {
        self.print_cut(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(&["NAME", ">SIZE", "WHAT"]);
        table.row(vec!["a".into(), "1".into(), "x".into()]);
        table.row(vec!["größer".into(), "1000000".into(), String::new()]);
        let wanted = ["  NAME       SIZE  WHAT", "  a             1  x", "  größer  1000000"];
        assert_eq!(table.lines(), wanted);
    }
}
