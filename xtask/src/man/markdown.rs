//! A manual page from Markdown: headings, paragraphs, lists, tables and code, as the pages in docs/
//! use them.

use std::fmt::Write;

use pulldown_cmark::{Event, HeadingLevel, Options, Parser, Tag, TagEnd};

/// The page `name` of a section. The first heading of `text` is left out for the name line.
pub(super) fn page(name: &str, section: u8, what: &str, text: &str) -> String {
    let mut page = Page::default();
    // The first line tells man(1) that there are tables.
    let _ = writeln!(page.out, "'\\\" t\n.TH {name} {section}\n.SH NAME\n{name} \\- {what}");
    page.out.push_str(".SH DESCRIPTION\n");
    Parser::new_ext(text, Options::ENABLE_TABLES).for_each(|event| page.event(event));
    page.out
}

#[derive(Default)]
struct Page {
    out: String,
    /// Text of the paragraph, item, heading or cell that is being read.
    text: String,
    /// Within a heading of the first level, which is not printed.
    title: bool,
    /// For each open list the next number, if it has numbers.
    lists: Vec<Option<u64>>,
    /// Cells of the row of a table that is being read.
    cells: Vec<String>,
    code_block: bool,
}

impl Page {
    fn event(&mut self, event: Event<'_>) {
        match event {
            Event::Start(tag) => self.start(&tag),
            Event::End(tag) => self.end(tag),
            Event::Text(text) if self.code_block => {
                for line in text.lines() {
                    self.line(&escape(line));
                }
            }
            Event::Text(text) => self.text.push_str(&escape(&text)),
            Event::Code(code) => {
                let _ = write!(self.text, "\\fB{}\\fR", escape(&code));
            }
            Event::SoftBreak | Event::HardBreak => self.text.push('\n'),
            _ => {}
        }
    }

    fn start(&mut self, tag: &Tag<'_>) {
        match tag {
            Tag::Heading { level, .. } => self.title = *level == HeadingLevel::H1,
            Tag::Paragraph if self.lists.is_empty() => self.out.push_str(".PP\n"),
            Tag::CodeBlock(_) => {
                self.flush();
                self.out.push_str(".PP\n.RS 4\n.nf\n");
                self.code_block = true;
            }
            Tag::List(first) => {
                self.flush();
                self.lists.push(*first);
            }
            Tag::Item => match self.lists.last_mut() {
                Some(Some(number)) => {
                    let _ = writeln!(self.out, ".IP {number}. 4");
                    *number += 1;
                }
                _ => self.out.push_str(".IP \\(bu 2\n"),
            },
            Tag::Table(alignments) => {
                let columns = alignments.len();
                let row = |style: &str| {
                    let mut cells = vec![style.to_owned(); columns];
                    if let Some(last) = cells.last_mut() {
                        last.push('x');
                    }
                    cells.join(" ")
                };
                // A cell is too narrow to have both edges straight.
                let _ = writeln!(self.out, ".PP\n.na\n.TS\n{}\n{}.", row("lb"), row("l"));
            }
            Tag::Emphasis => self.text.push_str("\\fI"),
            Tag::Strong => self.text.push_str("\\fB"),
            _ => {}
        }
    }

    fn end(&mut self, tag: TagEnd) {
        match tag {
            TagEnd::Heading(level) => {
                let text = std::mem::take(&mut self.text);
                match level {
                    _ if self.title => {}
                    HeadingLevel::H2 => {
                        let _ = writeln!(self.out, ".SH {}", text.to_uppercase());
                    }
                    _ => {
                        let _ = writeln!(self.out, ".SS {text}");
                    }
                }
                self.title = false;
            }
            TagEnd::Paragraph | TagEnd::Item => self.flush(),
            TagEnd::CodeBlock => {
                self.out.push_str(".fi\n.RE\n");
                self.code_block = false;
            }
            TagEnd::List(_) => {
                self.flush();
                self.lists.pop();
                if self.lists.is_empty() {
                    self.out.push_str(".PP\n");
                }
            }
            TagEnd::TableCell => {
                let cell = std::mem::take(&mut self.text);
                self.cells.push(format!("T{{\n{cell}\nT}}"));
            }
            TagEnd::TableHead | TagEnd::TableRow => {
                let row = std::mem::take(&mut self.cells).join("\t");
                self.out.push_str(&row);
                self.out.push('\n');
            }
            TagEnd::Table => self.out.push_str(".TE\n.ad\n"),
            TagEnd::Emphasis | TagEnd::Strong => self.text.push_str("\\fR"),
            _ => {}
        }
    }

    /// Prints the text that was gathered.
    fn flush(&mut self) {
        let text = std::mem::take(&mut self.text);
        text.lines().for_each(|line| self.line(line));
    }

    fn line(&mut self, line: &str) {
        // What begins like a request is none.
        if line.starts_with(['.', '\'']) {
            self.out.push_str("\\&");
        }
        self.out.push_str(line);
        self.out.push('\n');
    }
}

/// Text in which nothing means anything to troff.
fn escape(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq").replace('`', "\\(ga")
}

#[cfg(test)]
mod tests {
    #[test]
    fn each_element_has_its_request() {
        let text = "# Title\n\nA `b-c` and *d*.\n.e\n\n## Head\n\n- one\n- two\n\n1. x\n\n   y\n\n\
                    | k | v |\n|---|---|\n| a | 'b' |\n\n    code\\n\n";
        let page = super::page("name", 7, "what", text);
        let expected = "'\\\" t\n.TH name 7\n.SH NAME\nname \\- what\n.SH DESCRIPTION\n.PP\n\
            A \\fBb\\-c\\fR and \\fId\\fR.\n\\&.e\n.SH HEAD\n.IP \\(bu 2\none\n.IP \\(bu 2\ntwo\n.PP\n\
            .IP 1. 4\nx\ny\n.PP\n.PP\n.na\n.TS\nlb lbx\nl lx.\nT{\nk\nT}\tT{\nv\nT}\n\
            T{\na\nT}\tT{\n\\(aqb\\(aq\nT}\n.TE\n.ad\n.PP\n.RS 4\n.nf\ncode\\en\n.fi\n.RE\n";
        assert_eq!(page, expected);
    }
}
