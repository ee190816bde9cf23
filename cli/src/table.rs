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
    /// fit into this `width`. Where there is no room for it at all, it comes below the others, without its head; and
    /// where there is none for these either, what follows the first column of a row comes below that, with its heads.
    fn lines(&self, width: Option<usize>) -> Vec<String> {
        self.folded(width, true)
    }

    /// The same; unless texts `are_folded`, lines can be longer than that.
    fn folded(&self, width: Option<usize>, are_folded: bool) -> Vec<String> {
        let widths = self.widths();
        let last = widths.len() - 1;
        // Where the last column begins.
        let begin = widths[..last].iter().map(|width| width + 2).sum::<usize>() + 2;
        let Some(width) = width.filter(|_| !self.right[last]) else { return self.whole(&widths) };
        let room = width.saturating_sub(begin);
        if room >= widths[last] || (!are_folded && room >= fold::NARROWEST) {
            return self.whole(&widths);
        }
        if room < fold::NARROWEST && are_folded && begin > width + 2 {
            return self.records(width);
        }
        let is_below = room < fold::NARROWEST;
        let (begin, room) = if is_below { (4, width.saturating_sub(4)) } else { (begin, room) };
        let mut lines = vec![self.line(&widths, &self.heads[..last + usize::from(!is_below)])];
        for row in &self.rows {
            let mut cells: Vec<&str> = row.iter().map(String::as_str).collect();
            let folded = fold::cell(cells[last], room).filter(|_| are_folded);
            let folded = folded.unwrap_or_else(|| vec![cells[last].to_owned()]);
            let mut parts = folded.iter().filter(|part| !part.is_empty());
            if is_below {
                cells.pop();
            } else {
                cells[last] = parts.next().map_or("", String::as_str);
            }
            lines.push(self.line(&widths, &cells));
            lines.extend(parts.map(|part| format!("{}{part}", " ".repeat(begin))));
        }
        lines
    }

    /// How many columns of a terminal each column takes.
    fn widths(&self) -> Vec<usize> {
        let widest = |column: usize| {
            let cells = self.rows.iter().map(|row| columns(&row[column]));
            cells.chain([columns(self.heads[column])]).max().unwrap_or(0)
        };
        (0..self.heads.len()).map(widest).collect()
    }

    /// A line of the first columns.
    fn line(&self, widths: &[usize], cells: &[&str]) -> String {
        let mut line = String::from("  ");
        for (column, cell) in cells.iter().enumerate() {
            let space = " ".repeat(widths[column].saturating_sub(columns(cell)));
            let (before, after) = if self.right[column] { (&*space, "") } else { ("", &*space) };
            line += &format!("{before}{cell}{after}  ");
        }
        line.trim_end().to_owned()
    }

    /// A line for each row, however long.
    fn whole(&self, widths: &[usize]) -> Vec<String> {
        let of = |row: &Vec<String>| {
            self.line(widths, &row.iter().map(String::as_str).collect::<Vec<_>>())
        };
        [self.line(widths, &self.heads)].into_iter().chain(self.rows.iter().map(of)).collect()
    }

    /// Each row as what its first column has, with all else below.
    fn records(&self, width: usize) -> Vec<String> {
        let mut lines = vec![format!("  {}", self.heads[0])];
        for row in &self.rows {
            lines.push(format!("  {}", row[0]));
            let cells = self.heads.iter().zip(row).skip(1).filter(|(_, cell)| !cell.is_empty());
            let named = cells.map(|(head, cell)| format!("{} {cell}", head.to_lowercase()));
            let text = format!("    {}", named.collect::<Vec<_>>().join(", "));
            lines.extend(fold::folded(&text, Some(width), 4).lines().map(str::to_owned));
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
        let mut wide = Table::new(&["KERNEL", ">LAUNCHES", "FROM", "WHY"]);
        wide.row(["saxpy", "12", "first, second", "no: it adds"].map(String::from).to_vec());
        wide.row(["fill", "3", "", "yes"].map(String::from).to_vec());
        let first = ["  KERNEL", "  saxpy", "    launches 12, from first,"];
        assert_eq!(wide.lines(Some(30))[..3], first);
        let second = ["    second, why no: it adds", "  fill", "    launches 3, why yes"];
        assert_eq!(wide.lines(Some(30))[3..], second);
        let below = wide.lines(Some(41));
        assert_eq!((below.len(), below[2].as_str()), (5, "    no: it adds"));
        assert_eq!(wide.lines(Some(46)).len(), 3);
        let mut numbers = Table::new(&["NAME", ">SIZE"]);
        numbers.row(vec!["a name that is longer than that".into(), "1".into()]);
        assert_eq!(numbers.lines(Some(30)).len(), 2);
    }
}
