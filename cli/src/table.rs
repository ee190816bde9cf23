//! Tables for people: columns that are as wide as they must be, two spaces apart.

use crate::escape::escaped;
use crate::fold::{self, columns};
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
        // So that each is as wide as it is shown.
        self.rows.push(cells.iter().map(|cell| escaped(cell).into_owned()).collect());
    }

    /// The lines of the table, without spaces at their ends. If its last column is text, that is folded so that they
    /// fit into this `width`; where there is no room for it at all, it comes below the others, without its head.
    fn lines(&self, width: Option<usize>) -> Vec<String> {
        self.folded(width, true)
    }

    /// The same; unless texts `are_folded`, they stay on one line each.
    fn folded(&self, width: Option<usize>, are_folded: bool) -> Vec<String> {
        let widths: Vec<usize> = (0..self.heads.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| columns(&row[column]));
                cells.chain([columns(self.heads[column])]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: &[&str]| {
            let mut line = String::from("  ");
            for (column, cell) in cells.iter().enumerate() {
                let space = " ".repeat(widths[column].saturating_sub(columns(cell)));
                let (before, after) =
                    if self.right[column] { (&*space, "") } else { ("", &*space) };
                line += &format!("{before}{cell}{after}  ");
            }
            line.trim_end().to_owned()
        };
        let last = self.heads.len() - 1;
        let others: usize = widths[..last].iter().map(|width| width + 2).sum();
        let room =
            width.filter(|_| !self.right[last]).map(|width| width.saturating_sub(others + 2));
        let is_below = room.is_some_and(|room| room < widths[last] && room < fold::NARROWEST);
        if let (true, Some(width)) = (is_below, width) {
            let mut lines = vec![line(&self.heads[..last])];
            for row in &self.rows {
                let cells: Vec<&str> = row.iter().map(String::as_str).collect();
                lines.push(line(&cells[..last]));
                let text = || vec![cells[last].to_owned()];
                let parts = fold::cell(cells[last], width.saturating_sub(4));
                let parts = parts.filter(|_| are_folded).unwrap_or_else(text);
                let parts = parts.iter().filter(|part| !part.is_empty());
                lines.extend(parts.map(|part| format!("    {part}")));
            }
            return lines;
        }
        let mut lines = vec![line(&self.heads)];
        for row in &self.rows {
            let mut cells: Vec<&str> = row.iter().map(String::as_str).collect();
            let folded = room.filter(|_| are_folded).and_then(|room| fold::cell(cells[last], room));
            let folded = folded.unwrap_or_default();
            let [first, more @ ..] = &folded[..] else {
                lines.push(line(&cells));
                continue;
            };
            cells[last] = first;
            lines.push(line(&cells));
            lines.extend(more.iter().map(|part| format!("{}{part}", " ".repeat(others + 2))));
        }
        lines
    }

    /// Prints it on stdout; if that is a terminal, lines are cut to its width.
    pub(crate) fn print_cut(&self) {
        let width = fold::width(std::io::stdout());
        let lines = self.folded(width, false);
        print(lines.iter().map(|line| fold::cut(line, width.unwrap_or(usize::MAX))));
    }

    /// Prints it on stdout; if that is a terminal, texts in the last column are folded so that lines fit into it.
    pub(crate) fn print(&self) {
        print(self.lines(fold::width(std::io::stdout())));
    }
}

/// Prints the lines of a table, the first of which has the heads.
fn print(lines: impl IntoIterator<Item = String>) {
    for (number, line) in lines.into_iter().enumerate() {
        let paint = if number == 0 { Paint::Head } else { Paint::Plain };
        say::painted(&[(paint, &line)]);
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
        assert_eq!(table.lines(None), wanted);
    }

    #[test]
    fn texts_at_the_end_are_folded() {
        let mut table = Table::new(&[">SIZE", "FILE"]);
        table.row(vec!["1".into(), "/usr/lib/gpucr/libgpucr_intercept.so".into()]);
        table.row(vec!["2".into(), "a\nb".into()]);
        let wanted = [
            "  SIZE  FILE",
            "     1  /usr/lib/gpucr/",
            "        libgpucr_intercept.so",
            "     2  a\\nb",
        ];
        assert_eq!(table.lines(Some(30)), wanted);
        let below = ["  SIZE", "     1", "    /usr/lib/gpucr/", "    libgpucr_intercept.so"];
        assert_eq!(table.lines(Some(25))[..4], below);
        assert_eq!(table.lines(Some(25))[4..], ["     2", "    a\\nb"]);
        assert_eq!(table.folded(Some(25), false)[2], "    /usr/lib/gpucr/libgpucr_intercept.so");
        assert_eq!(table.folded(Some(30), false).len(), 3);
        let mut numbers = Table::new(&["NAME", ">SIZE"]);
        numbers.row(vec!["a name that is longer than that".into(), "1".into()]);
        assert_eq!(numbers.lines(Some(30)).len(), 2);
    }
}
