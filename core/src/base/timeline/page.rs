//! A timeline as one HTML page that needs nothing else: a picture (SVG), and the same as a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use super::trace::{Fact, Mark, Slice, Trace};
use crate::base::phase::Phase;

/// Everything below is in units of the picture, which is as wide as the page.
const WIDTH: f64 = 1000.0;
/// Where the names of the tracks stand.
const GUTTER: f64 = 145.0;
const MARGIN: f64 = 24.0;
const PLOT: f64 = WIDTH - GUTTER - MARGIN;
const AXIS: f64 = 26.0;
const ROW: f64 = 22.0;
const BAR: f64 = 16.0;
const BETWEEN: f64 = 8.0;
const CHART: f64 = 70.0;
/// The width of what has no length.
const MARK: f64 = 3.0;
/// No character of the labels is wider.
const CHARACTER: f64 = 6.7;
const MOST_TICKS: f64 = 8.0;

/// The picture before it is text, so that a test can look at its geometry.
pub(super) struct Picture {
    pub(super) height: f64,
    pub(super) bars: Vec<Bar>,
    pub(super) labels: Vec<Label>,
    pub(super) lines: Vec<Line>,
    pub(super) ticks: Vec<f64>,
}

pub(super) struct Bar {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) width: f64,
    pub(super) height: f64,
    class: &'static str,
    title: String,
}

/// Text from `x` on, with its base line at `y`.
pub(super) struct Label {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) text: String,
    class: &'static str,
}

impl Label {
    /// The most room that it takes.
    pub(super) fn width(&self) -> f64 {
        self.text.chars().count() as f64 * CHARACTER
    }
}

/// A counter: the corners of its curve.
pub(super) struct Line {
    pub(super) points: Vec<(f64, f64)>,
    title: String,
}

/// Draws a trace.
pub(super) fn draw(trace: &Trace) -> Picture {
    let total = trace.total.as_secs_f64().max(1e-3);
    let x = |at: Duration| GUTTER + PLOT * (at.as_secs_f64() / total).min(1.0);
    let mut picture = Picture {
        height: AXIS,
        bars: Vec::new(),
        labels: Vec::new(),
        lines: Vec::new(),
        ticks: Vec::new(),
    };
    let step = tick(total);
    for i in 0..=(total / step).floor() as u64 {
        let at = Duration::from_secs_f64(step * i as f64);
        picture.ticks.push(x(at));
        let label = Label { x: x(at) + 3.0, y: 14.0, text: time(at), class: "tick" };
        // The last one may have no room left.
        if label.x + label.width() <= WIDTH {
            picture.labels.push(label);
        }
    }
    for name in trace.tracks.values() {
        picture.name(name, ROW);
        for (row, slices) in rows(trace, name).into_iter().enumerate() {
            let y = picture.height + row as f64 * ROW;
            for slice in slices {
                picture.bar(slice, name, x(slice.begin), x(slice.end()), y);
            }
        }
        picture.marks(&moments(trace, name), x);
        picture.height += rows(trace, name).len().max(1) as f64 * ROW + BETWEEN;
    }
    for (name, points) in &trace.counters {
        picture.curve(name, points, x);
    }
    picture
}

impl Picture {
    fn name(&mut self, name: &str, height: f64) {
        let most = ((GUTTER - 8.0) / CHARACTER) as usize;
        let text = name.chars().take(most).collect();
        self.labels.push(Label {
            x: 2.0,
            y: self.height + height / 2.0 + 2.0,
            text,
            class: "name",
        });
    }

    fn bar(&mut self, slice: &Slice, track: &str, from: f64, to: f64, y: f64) {
        let class = match track {
            "phases" | "destination" | "restore there" => "phase",
            "program" | "calls blocked" => "stopped",
            _ if track.starts_with("copies") => "copy",
            _ => "hash",
        };
        // What is too short to be seen is drawn a little longer, to the left where there is no room.
        let width = (to - from).max(1.0);
        let x = from.min(WIDTH - MARGIN - width);
        let mut title =
            format!("{}: {} from {}", slice.name, time(slice.length), time(slice.begin));
        if let Some(count) = slice.bytes {
            let _ = write!(title, ", {}", bytes(count));
        }
        self.bars.push(Bar { x, y, width, height: BAR, class, title });
        let label = Label { x: x + 4.0, y: y + 12.0, text: slice.name.clone(), class: "label" };
        if label.width() + 6.0 <= width {
            self.labels.push(label);
        }
    }

    /// Marks by their moments, which grow.
    fn marks(&mut self, moments: &[(Duration, Vec<&Mark>)], x: impl Fn(Duration) -> f64) {
        let y = self.height;
        for (at, marks) in moments {
            let size = marks.iter().map(|mark| mark.misspeculation.size).sum();
            let text = format!("{} places, {}", marks.len(), bytes(size));
            let left = x(*at).min(WIDTH - MARGIN - MARK);
            let title = format!("{text} changed after they were copied, found at {}", time(*at));
            self.bars.push(Bar { x: left, y, width: MARK, height: BAR, class: "missed", title });
            let mut label = Label { x: left + MARK + 4.0, y: y + 12.0, text, class: "name" };
            // The label goes to the other side where there is no room on this one.
            if label.x + label.width() > WIDTH {
                label.x = left - 4.0 - label.width();
            }
            // Several could lie on each other.
            if moments.len() == 1 {
                self.labels.push(label);
            }
        }
    }

    fn curve(&mut self, name: &str, points: &[(Duration, u64)], x: impl Fn(Duration) -> f64) {
        let most = points.iter().map(|(_, value)| *value).max().unwrap_or(0);
        let (top, bottom) = (self.height + 4.0, self.height + CHART);
        let y = |value: u64| bottom - (bottom - top) * value as f64 / most.max(1) as f64;
        let mut corners = vec![(GUTTER, bottom)];
        for &(at, value) in points {
            let (_, before) = corners[corners.len() - 1];
            corners.push((x(at), before));
            corners.push((x(at), y(value)));
        }
        self.name(name, ROW);
        let text = bytes(most);
        self.labels.push(Label { x: 2.0, y: self.height + ROW + 12.0, text, class: "name" });
        self.lines.push(Line { points: corners, title: format!("{name}: {}", bytes(most)) });
        self.height = bottom + BETWEEN;
    }
}

/// The marks of a track, those of one moment together.
fn moments<'a>(trace: &'a Trace, track: &str) -> Vec<(Duration, Vec<&'a Mark>)> {
    let mut moments: BTreeMap<Duration, Vec<&Mark>> = BTreeMap::new();
    for mark in trace.marks.iter().filter(|mark| mark.track == track) {
        moments.entry(mark.at).or_default().push(mark);
    }
    moments.into_iter().collect()
}

/// The slices of a track in rows, so that none covers another.
fn rows<'a>(trace: &'a Trace, track: &str) -> Vec<Vec<&'a Slice>> {
    let mut slices: Vec<&Slice> = trace.slices.iter().filter(|s| s.track == track).collect();
    slices.sort_by_key(|slice| (slice.begin, std::cmp::Reverse(slice.length)));
    let mut rows: Vec<Vec<&Slice>> = Vec::new();
    for slice in slices {
        let free = |row: &&mut Vec<&Slice>| row.last().is_none_or(|last| last.end() <= slice.begin);
        match rows.iter_mut().find(free) {
            Some(row) => row.push(slice),
            None => rows.push(vec![slice]),
        }
    }
    rows
}

/// Seconds between two ticks: 1, 2 or 5 times a power of ten.
fn tick(total: f64) -> f64 {
    let rough = total / MOST_TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= rough);
    factor.unwrap_or(10.0) * power
}

fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        0.0 => "0".into(),
        s if s < 0.001 => format!("{:.3} ms", s * 1e3),
        s if s < 0.1 => format!("{:.1} ms", s * 1e3),
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (count as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", units[unit]) }
}

fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            c => safe.push(c),
        }
    }
    safe
}

const STYLE: &str = "\
:root{color-scheme:light dark;--back:#fff;--text:#222;--faint:#ccc;--phase:#7aa6da;--stopped:#d9776c;\
--copy:#7dbb8a;--hash:#c9a94f;--missed:#b03a8c;--in:#111}\
@media(prefers-color-scheme:dark){:root{--back:#1c1c1e;--text:#ddd;--faint:#444;--phase:#3f6fa8;\
--stopped:#a8483c;--copy:#3f7d4d;--hash:#86701f;--missed:#d36bb5;--in:#fff}}\
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;max-width:1100px;\
margin:2em auto;padding:0 1em}svg{width:100%;height:auto}table{border-collapse:collapse}\
th,td{padding:.15em 1em .15em 0;text-align:right}th:first-child,td:first-child,th:nth-child(2),\
td:nth-child(2){text-align:left}tr{border-bottom:1px solid var(--faint)}\
text{font:11px ui-monospace,monospace;fill:var(--text)}text.label{fill:var(--in)}\
.grid{stroke:var(--faint)}rect{stroke:var(--back);stroke-width:.6}.phase{fill:var(--phase)}.stopped{fill:var(--stopped)}.copy{fill:var(--copy)}\
table.facts{margin-bottom:1em}table.facts td{text-align:left;overflow-wrap:anywhere}\
.hash{fill:var(--hash)}.missed{fill:var(--missed)}td.name{overflow-wrap:anywhere}dt{font-weight:bold}.curve{fill:none;stroke:var(--text);stroke-width:1.5}";

/// A page with the picture of a trace and a table of it. It refers to nothing outside of itself.
pub fn page(trace: &Trace, title: &str) -> String {
    let title = escaped(title);
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<style>{STYLE}</style></head>\n\
         <body><h1>{title}</h1>\n<p>{}</p>\n",
        escaped(&summary(trace))
    );
    facts(&mut page, &trace.about);
    svg(&mut page, &draw(trace));
    words(&mut page, trace);
    page.push_str(
        "<h2>All of it in numbers</h2>\n<table><tr><th>track</th><th>what</th><th>begins</th><th>takes</th>\
         <th>of the whole</th><th>bytes</th></tr>\n",
    );
    let total = trace.total.as_secs_f64().max(1e-9);
    for name in trace.tracks.values() {
        for slice in trace.slices.iter().filter(|slice| slice.track == *name) {
            let _ = writeln!(
                page,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.1} %</td><td>{}</td></tr>",
                escaped(name),
                escaped(&slice.name),
                time(slice.begin),
                time(slice.length),
                slice.length.as_secs_f64() / total * 100.0,
                slice.bytes.map(bytes).unwrap_or_default()
            );
        }
    }
    page.push_str("</table>\n");
    misspeculations(&mut page, &trace.marks);
    page.push_str("</body></html>\n");
    page
}

/// A table of what is said of the whole.
fn facts(page: &mut String, about: &[Fact]) {
    if about.is_empty() {
        return;
    }
    page.push_str("<table class=\"facts\">\n");
    for Fact { name, value } in about {
        let (name, value) = (escaped(name), escaped(value));
        let _ = writeln!(page, "<tr><th scope=\"row\">{name}</th><td>{value}</td></tr>");
    }
    page.push_str("</table>\n");
}

/// A table of what had changed after it was copied.
fn misspeculations(page: &mut String, marks: &[Mark]) {
    if marks.is_empty() {
        return;
    }
    page.push_str(
        "<h2>Changed after it was copied</h2>\n<p>Memory that was copied while the program ran, had changed by \
        the time the program was stopped, and was copied again; and what was launched in between that may have \
        written it.</p>\n<table class=\"missed\"><tr><th>address</th><th>launched</th>\
         <th>bytes</th><th>process</th></tr>\n",
    );
    for Mark { misspeculation: found, .. } in marks {
        let suspects = match found.suspects.as_slice() {
            [] => "an unknown writer".to_owned(),
            names => names.join(", "),
        };
        let _ = writeln!(
            page,
            "<tr><td>{:#x}</td><td class=\"name\">{}</td><td>{}</td><td>{}</td></tr>",
            found.address,
            escaped(&suspects),
            bytes(found.size),
            found.pid
        );
    }
    page.push_str("</table>\n");
}

/// What the rows of the picture are, and what the phases do: those that occur.
fn words(page: &mut String, trace: &Trace) {
    let mut explained: Vec<(&str, &'static str)> = Vec::new();
    for name in trace.tracks.values() {
        if let Some(explanation) = track(name) {
            explained.push((name, explanation));
        }
        for slice in trace.slices.iter().filter(|slice| slice.track == *name) {
            let known = explained.iter().any(|(name, _)| *name == slice.name);
            if let (false, Some(phase)) = (known, Phase::named(&slice.name)) {
                explained.push((&slice.name, phase.explanation()));
            }
        }
    }
    page.push_str("<details><summary>What the rows and the phases are</summary>\n<dl>\n");
    for (name, explanation) in explained {
        let _ = writeln!(page, "<dt>{}</dt><dd>{explanation}</dd>", escaped(name));
    }
    page.push_str("</dl></details>\n");
}

/// What a track shows.
fn track(name: &str) -> Option<&'static str> {
    Some(match name {
        "phases" => "The steps of the dump, one after the other:",
        "program" => "When the program was stopped.",
        "pre-copy" => {
            "Rounds in which device memory is copied while the program runs. Each copies what changed since the last one."
        }
        "hash passes" => {
            "When all device memory was hashed, on the device, to find what had changed. The bytes are those that differ \
             from the hash pass before."
        }
        "misspeculations" => {
            "Memory that was copied while the program ran, had changed by the time it was stopped, and was copied again."
        }
        "calls blocked" => {
            "Calls of the program that had to wait, since they might have written memory that was not yet saved."
        }
        "host memory" => "Rounds in which host memory is copied while the program runs.",
        "destination" => "The steps of the host to which the program moves:",
        "restore there" => "The steps of the restore on that host:",
        name if name.starts_with("copies ") => {
            "Copies from one device. Those called ahead were made while the program ran, and what is left while it was \
             stopped. Shadows are memory that had been set aside on the device, and deferred is what there was no room \
             to set aside; both were copied after the program had continued."
        }
        _ => return None,
    })
}

/// The whole in a sentence or two.
fn summary(trace: &Trace) -> String {
    let stopped: Duration =
        trace.slices.iter().filter(|slice| slice.track == "program").map(|s| s.length).sum();
    let mut text = format!("The dump took {}.", time(trace.total));
    if !stopped.is_zero() {
        let _ = write!(text, " The program was stopped for {} of it.", time(stopped));
    }
    for (name, points) in &trace.counters {
        let last = points.last().map_or(0, |(_, value)| *value);
        let _ = match name.as_str() {
            "bytes copied" => write!(text, " Copied from devices: {}.", bytes(last)),
            "bytes found changed" => {
                write!(text, " Found changed by hash passes: {}.", bytes(last))
            }
            name => write!(text, " {name}: {}.", bytes(last)),
        };
    }
    text
}

fn svg(page: &mut String, picture: &Picture) {
    let height = picture.height;
    let _ = writeln!(page, "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\">");
    for x in &picture.ticks {
        let _ = writeln!(
            page,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"4\" x2=\"{x:.1}\" y2=\"{height:.1}\"/>"
        );
    }
    for bar in &picture.bars {
        let _ = writeln!(
            page,
            "<rect class=\"{}\" x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\">\
             <title>{}</title></rect>",
            bar.class,
            bar.x,
            bar.y,
            bar.width,
            bar.height,
            escaped(&bar.title)
        );
    }
    for line in &picture.lines {
        let points: Vec<String> =
            line.points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let _ = writeln!(
            page,
            "<polyline class=\"curve\" points=\"{}\"><title>{}</title></polyline>",
            points.join(" "),
            escaped(&line.title)
        );
    }
    for label in &picture.labels {
        let _ = writeln!(
            page,
            "<text class=\"{}\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            label.class,
            label.x,
            label.y,
            escaped(&label.text)
        );
    }
    page.push_str("</svg>\n");
}
