use std::time::{Duration, Instant};

use super::page::{Picture, draw};
use super::*;
use crate::base::phase::Phase;

fn misspeculation(suspects: &[&str]) -> Misspeculation {
    let suspects = suspects.iter().map(|name| (*name).to_owned()).collect();
    Misspeculation { pid: 7, address: 0x7000, size: 3 << 20, suspects }
}

/// A dump as it might go.
fn recorded() -> Trace {
    let timeline = Timeline::recording();
    for number in 0..3 {
        let _phase = timeline.begin(Track::Phases, || format!("phase {number}"));
        let _pass = timeline.begin(Track::Passes, || format!("pass {number}"));
        let mut hash_pass = timeline.begin(Track::HashPasses, || "hash pass");
        std::thread::sleep(Duration::from_millis(2));
        timeline.add(Counter::Copied, 1 << 21);
        timeline.add(Counter::Copied, 1 << 21);
        timeline.add(Counter::Changed, 4096);
        hash_pass.set_bytes(4096);
    }
    let since = Instant::now();
    timeline.mark(since, &[misspeculation(&["_Z4copyPiPKi", "fill"]), misspeculation(&[])]);
    drop(timeline.begin(Track::Copies(1), || "copy"));
    timeline.lasted(Track::Program, "stopped", since, since.elapsed());
    timeline.trace().expect("it records")
}

/// A dump of one second with these phases, in milliseconds.
fn phases(lengths: &[u64]) -> Trace {
    let mut begin = Duration::ZERO;
    let slices = lengths.iter().enumerate().map(|(number, &length)| {
        let length = Duration::from_millis(length);
        let slice = Slice {
            track: "phases".into(),
            name: format!("phase-{number}"),
            begin,
            length,
            bytes: None,
        };
        begin += length;
        slice
    });
    let slices = slices.collect();
    let points = vec![(Duration::ZERO, 0), (begin / 2, 10), (begin, 20)];
    Trace {
        about: Vec::new(),
        tracks: [(1, "phases".to_owned())].into(),
        slices,
        marks: Vec::new(),
        counters: vec![("bytes copied".into(), points)],
        total: begin,
    }
}

#[test]
fn nothing_is_recorded_where_nobody_asked() {
    let timeline = Timeline::default();
    drop(timeline.begin(Track::Phases, || -> &'static str { unreachable!("no name is made") }));
    timeline.add(Counter::Copied, 1);
    assert!(timeline.trace().is_none());
}

#[test]
fn what_is_written_is_read_back() {
    let mut trace = recorded();
    trace.about = vec![Fact::new("host", "here"), Fact::new("image", "a \"b\" <c>")];
    assert_eq!(Trace::read(&trace.write()).unwrap(), trace);
    // Files of before say nothing of the whole.
    let before = trace.write().replace("\"about\":", "\"apart\":");
    assert_eq!(Trace::read(&before).unwrap(), Trace { about: Vec::new(), ..trace.clone() });
    // Tracks in their order; 12 MiB and 12 KiB, though not every value was written.
    let names: Vec<&str> = trace.tracks.values().map(String::as_str).collect();
    assert_eq!(
        names,
        ["phases", "program", "pre-copy", "hash passes", "misspeculations", "copies 1"]
    );
    let last = |counter: usize| trace.counters[counter].1.last().unwrap().1;
    assert_eq!((last(0), last(1)), (12 << 20, 3 * 4096));
    for (_, points) in &trace.counters {
        assert!(points.windows(2).all(|w| w[0].0 <= w[1].0 && w[0].1 <= w[1].1));
    }
    assert!(trace.slices.iter().all(|slice| slice.end() <= trace.total));
    let changed: u64 = trace.slices.iter().filter_map(|slice| slice.bytes).sum();
    assert_eq!((changed, trace.marks.len()), (3 * 4096, 2));
}

#[test]
fn files_that_cannot_be_are_refused() {
    let good = recorded().write();
    let cut = &good[..good.len() / 2];
    let other = good.replace("\"gpucr dump\"", "\"something\"");
    let negative = good.replacen("\"dur\":", "\"dur\":-", 1);
    let huge = good.replacen("\"dur\":", "\"dur\":9e99", 1);
    let nameless = good.replace("thread_name", "thread_title");
    let unknown = good.replacen("\"ph\":\"X\"", "\"ph\":\"Q\"", 1);
    let harmless = good.replacen("\"suspects\":", "\"friends\":", 1);
    let bad = [cut, &other, &negative, &huge, &nameless, &unknown, &harmless];
    for bad in ["", "[]", "{}", "null"].iter().chain(&bad) {
        assert!(Trace::read(bad).is_err(), "{bad}");
    }
    let mut backwards = recorded();
    backwards.counters[0].1.reverse();
    assert!(Trace::read(&backwards.write()).is_err());
    let mut marked_late = recorded();
    marked_late.marks[1].at = marked_late.total * 2;
    assert!(Trace::read(&marked_late.write()).is_err());
    let mut late = recorded();
    late.total /= 2;
    assert!(Trace::read(&late.write()).is_err());
}

/// No label lies on another, and nothing lies outside.
fn check(picture: &Picture) {
    let within =
        |x: f64, y: f64| (0.0..=1000.0).contains(&x) && (0.0..=picture.height).contains(&y);
    for bar in &picture.bars {
        assert!(within(bar.x, bar.y) && within(bar.x + bar.width, bar.y + bar.height));
        assert!(bar.width >= 1.0);
    }
    for line in &picture.lines {
        assert!(line.points.iter().all(|&(x, y)| within(x, y)));
    }
    for (number, a) in picture.labels.iter().enumerate() {
        assert!(within(a.x, a.y) && within(a.x + a.width(), a.y - 8.0), "{}", a.text);
        for b in &picture.labels[..number] {
            let apart =
                a.x + a.width() <= b.x || b.x + b.width() <= a.x || (a.y - b.y).abs() >= 11.0;
            assert!(apart, "`{}` lies on `{}`", a.text, b.text);
        }
    }
}

#[test]
fn pictures_hold_together() {
    check(&draw(&recorded()));
    for lengths in [
        &[1000][..],
        &[1, 1, 996, 1, 1],
        &[100; 10],
        &[1; 100],
        &[0, 0, 0],
        &[3_600_000, 1, 86_400_000],
        &[],
    ] {
        check(&draw(&phases(lengths)));
    }
    // What overlaps gets a row of its own.
    let mut trace = phases(&[500, 500]);
    trace.slices[1].begin = Duration::from_millis(200);
    trace.slices[0].length = Duration::from_millis(600);
    let picture = draw(&trace);
    assert_ne!(picture.bars[0].y, picture.bars[1].y);
    check(&picture);
    // A mark is drawn wherever it is.
    for at in [0, 300, 1000] {
        let at = Duration::from_millis(at);
        let mut trace = phases(&[500, 500]);
        let mark = |at| Mark { track: "phases".into(), at, misspeculation: misspeculation(&[]) };
        trace.marks = vec![mark(at), mark(at)];
        trace.slices.clear();
        let picture = draw(&trace);
        assert_eq!(picture.bars.len(), 1);
        assert!(picture.labels.iter().any(|label| label.text == "2 places, 6.0 MiB"));
        check(&picture);
        trace.marks.push(mark(at / 2 + Duration::from_millis(5)));
        assert_eq!(draw(&trace).bars.len(), 2);
        check(&draw(&trace));
    }
}

#[test]
fn a_page_names_everything_and_needs_nothing() {
    let mut trace = recorded();
    trace.about = vec![Fact::new("host", "node-1"), Fact::new("<script>", "<script>alert(3)")];
    trace.slices[0].name = "<script>alert(1)</script>".into();
    trace.marks[0].misspeculation.suspects[1] = "<script>alert(2)</script>".into();
    let page = page(&trace, "a & b");
    let names = [
        "phase 1",
        "phase 2",
        "pass 0",
        "hash pass",
        "copy",
        "stopped",
        "bytes copied",
        "_Z4copyPiPKi",
    ];
    for name in names.iter().chain(&[
        ">host</th><td>node-1</td>",
        "0x7000",
        "an unknown writer",
        "2 places, 6.0 MiB",
    ]) {
        assert!(page.contains(name), "no {name}");
    }
    assert!(!page.contains("<script") && page.contains("<h1>a &amp; b</h1>"));
    for outside in ["http", "src=", "href=", "url(", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    // The marks are of one moment.
    assert_eq!(page.matches("<rect").count(), trace.slices.len() + 1);
}

#[test]
fn a_page_explains_the_phases_and_rows_that_occur() {
    let mut trace = recorded();
    let gates = trace.slices.iter_mut().filter(|slice| slice.track == "phases").take(2);
    gates.for_each(|slice| slice.name = "gate".into());
    let page = page(&trace, "title");
    assert_eq!(page.matches(&format!("<dt>gate</dt><dd>{}", Phase::Gate.explanation())).count(), 1);
    assert!(page.contains("<dt>hash passes</dt><dd>When all device memory was hashed"), "{page}");
    for other in [Phase::Commit.explanation(), "<dt>destination</dt>"] {
        assert!(!page.contains(other), "{other}: {page}");
    }
    // Each of the tracks has its words.
    for name in trace.tracks.values() {
        assert!(page.contains(&format!("<dt>{name}</dt>")), "{name}: {page}");
    }
}
