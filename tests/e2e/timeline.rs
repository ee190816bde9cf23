//! The timeline of a dump, and the page that is made of it.

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, PausedDump, finish, refused, show};
use serde_json::Value;

/// Bytes of a chunk.
const CHUNK: u64 = 2 << 20;

/// One event with a begin and an end, in microseconds.
#[derive(Debug)]
struct Slice {
    track: String,
    name: String,
    begin: f64,
    end: f64,
    /// 0 where it has none.
    bytes: u64,
}

/// What a file says.
#[derive(Debug)]
struct Timeline {
    slices: Vec<Slice>,
    /// The moments, and what is said of them.
    marks: Vec<(f64, Value)>,
    /// What the counters came to.
    copied: u64,
    changed: u64,
    total: f64,
}

impl Timeline {
    fn on<'a>(&'a self, track: &'a str) -> impl Iterator<Item = &'a Slice> + Clone {
        self.slices.iter().filter(move |slice| slice.track == track)
    }

    fn phase(&self, name: &str) -> Result<&Slice> {
        self.on("phases").find(|slice| slice.name == name).with_context(|| format!("no {name}"))
    }

    fn bytes_copied(&self, name: &str) -> u64 {
        self.on("copies 0").filter(|copy| copy.name == name).map(|copy| copy.bytes).sum()
    }
}

impl Slice {
    fn lies_in(&self, outer: &Self) -> bool {
        // Times are rounded to nanoseconds.
        outer.begin - 0.01 <= self.begin && self.end <= outer.end + 0.01
    }
}

/// Reads the file as any reader of the format would, and checks what holds for every trace.
fn read(text: &str) -> Result<Timeline> {
    let trace: Value = serde_json::from_str(text)?;
    let events = trace["traceEvents"].as_array().context("events")?;
    let total = trace["otherData"]["total"].as_f64().context("a total")?;
    let kind = |kind: &'static str| events.iter().filter(move |event| event["ph"] == kind);
    let track = |tid: &Value| {
        let of = kind("M").find(|event| event["name"] == "thread_name" && event["tid"] == *tid);
        of.and_then(|event| event["args"]["name"].as_str()).map(str::to_owned)
    };
    for event in events {
        let known = ["M", "X", "C", "i"].iter().any(|kind| event["ph"] == *kind);
        let numbers = ["pid", "tid"].iter().all(|key| event[key].is_u64());
        ensure!(
            known && numbers && event["name"].is_string() && event["ts"].is_number(),
            "{event}"
        );
    }
    let mut slices = Vec::new();
    for event in kind("X") {
        let begin = event["ts"].as_f64().context("a begin")?;
        let end = begin + event["dur"].as_f64().context("a length")?;
        ensure!(begin >= 0.0 && end <= total + 1.0, "{event} lies outside of {total}");
        let name = event["name"].as_str().context("a name")?.to_owned();
        let bytes = event["args"]["bytes"].as_u64().unwrap_or(0);
        let track = track(&event["tid"]).context("a track")?;
        slices.push(Slice { track, name, begin, end, bytes });
    }
    let mut marks = Vec::new();
    for event in kind("i") {
        ensure!(event["s"] == "t" && event["name"] == "misspeculation", "{event}");
        ensure!(track(&event["tid"]).as_deref() == Some("misspeculations"), "{event}");
        marks.push((event["ts"].as_f64().context("a time")?, event["args"].clone()));
    }
    let mut last_values = [0; 2];
    for (name, last_value) in ["bytes copied", "bytes found changed"].iter().zip(&mut last_values) {
        let mut last = (0.0, 0);
        for event in kind("C").filter(|event| event["name"] == *name) {
            let at = event["ts"].as_f64().context("a time")?;
            let value = event["args"]["value"].as_u64().context("a value")?;
            ensure!(at >= last.0 && value >= last.1, "{name} goes back: {event}");
            last = (at, value);
        }
        ensure!(last.0 > 0.0 && last.0 <= total + 1.0, "{name} ends at {}", last.0);
        *last_value = last.1;
    }
    let [copied, changed] = last_values;
    Ok(Timeline { slices, marks, copied, changed, total })
}

/// The slices tell of the same bytes as the counters.
fn is_consistent(timeline: &Timeline) -> bool {
    let copied: u64 = timeline.on("copies 0").map(|slice| slice.bytes).sum();
    let changed: u64 = timeline.on("hash passes").map(|slice| slice.bytes).sum();
    copied == timeline.copied && changed == timeline.changed
}

/// Phases, stopped time and misspeculations are those of the report.
fn agrees_with(timeline: &Timeline, report: &Value) -> Result<()> {
    let reported = report["phases"].as_array().context("phases")?;
    ensure!(timeline.on("phases").count() == reported.len(), "{timeline:?}\n{report}");
    for (slice, reported) in timeline.on("phases").zip(reported) {
        let took = (slice.end - slice.begin) / 1e3;
        // Both are rounded.
        let apart = (took - reported["ms"].as_f64().context("a time")?).abs();
        ensure!(reported["name"] == *slice.name && apart < 0.002, "{slice:?} is not {reported}");
    }
    let mut pairs = timeline.on("phases").zip(timeline.on("phases").skip(1));
    ensure!(pairs.all(|(a, b)| a.end <= b.begin + 0.01), "phases overlap");
    ensure!(timeline.total / 1e3 >= report["total_ms"].as_f64().context("a time")?);

    let stopped: Vec<&Slice> = timeline.on("program").collect();
    let [stopped] = stopped[..] else { anyhow::bail!("stopped more than once: {stopped:?}") };
    let apart =
        (stopped.end - stopped.begin) / 1e3 - report["stopped_ms"].as_f64().context("ms")?;
    ensure!(apart.abs() < 0.002, "{stopped:?}\n{report}");
    ensure!(timeline.phase("copy")?.lies_in(stopped));
    ensure!(timeline.phase("gate")?.begin <= stopped.begin);

    let empty = Vec::new();
    let named = report["validation"]["misspeculations"].as_array().unwrap_or(&empty);
    ensure!(timeline.marks.iter().map(|(_, found)| found).eq(named), "{timeline:?}\n{report}");
    for (at, _) in &timeline.marks {
        let (begin, end) = checked_in(timeline, report)?;
        ensure!(begin <= *at && *at <= end, "{at} is not in {begin} to {end}");
    }
    Ok(())
}

/// Between when what was copied ahead is checked: in the phase for that; with `recopy` until the image is stored at the
/// latest.
fn checked_in(timeline: &Timeline, report: &Value) -> Result<(f64, f64)> {
    let validate = timeline.phase("validate")?;
    let last = if report["protocol"] == "recopy" { timeline.phase("store")? } else { validate };
    Ok((validate.begin, last.end))
}

/// One hash pass comes before the passes, one with each of them, one at the end. Only the first of the later
/// passes may do with the hash pass of the last early one.
fn hashed_in_passes(timeline: &Timeline, report: &Value) -> Result<()> {
    let precopy = timeline.phase("precopy")?;
    let (begin, end) = checked_in(timeline, report)?;
    ensure!(timeline.on("pre-copy").any(|pass| pass.name == "early pass 1"), "{timeline:?}");
    for pass in timeline.on("pre-copy") {
        ensure!(pass.lies_in(precopy), "{pass:?} is not in {precopy:?}");
        let hash_passes =
            timeline.on("hash passes").filter(|hashing| hashing.lies_in(pass)).count();
        ensure!(
            hash_passes == 1 || hash_passes == 0 && pass.name == "pass 1",
            "{hash_passes} hash passes in {pass:?}"
        );
    }
    let in_none = |hashing: &&Slice| !timeline.on("pre-copy").any(|pass| hashing.lies_in(pass));
    let others: Vec<&Slice> = timeline.on("hash passes").filter(in_none).collect();
    let [first, last] = others[..] else {
        anyhow::bail!("hash passes outside of the passes: {others:?}")
    };
    ensure!(first.lies_in(precopy) && begin <= last.begin && last.end <= end, "{others:?}");
    let mut ahead = timeline.on("copies 0").filter(|copy| copy.name == "ahead");
    ensure!(ahead.all(|copy| timeline.on("pre-copy").any(|pass| copy.lies_in(pass))));
    Ok(())
}

#[test]
fn a_timeline_tells_what_the_report_tells() -> Result<()> {
    for protocol in ["cow", "recopy", "stop"] {
        let lab = Lab::new();
        let program = lab.at_work("scatter", &["--steps", "400", "--step-delay-ms", "10"])?;
        let (file, page) = (lab.path("dump.json"), lab.path("dump.html"));
        let flags = ["--leave-running", "--protocol", protocol, "--timeline"];
        let args = [&flags[..], &[file.to_str().context("a path")?]].concat();
        let report = lab.dump(&program, &lab.path("image"), &args)?;
        let timeline = read(&std::fs::read_to_string(&file)?)?;
        ensure!(is_consistent(&timeline), "{timeline:?}");
        agrees_with(&timeline, &report)?;
        let number = |name: &str| report[name].as_u64().with_context(|| format!("no {name}"));
        let (ahead, left) = (timeline.bytes_copied("ahead"), timeline.bytes_copied("what is left"));
        let shadows = timeline.bytes_copied("shadows");
        ensure!(ahead == number("precopied_chunks")? * CHUNK, "{timeline:?}\n{report}");
        ensure!(shadows == number("shadowed_bytes")?, "{timeline:?}\n{report}");
        if protocol == "stop" {
            // Everything, once, though some of it is equal.
            ensure!(left == number("bulk_bytes")? && ahead == 0, "{timeline:?}\n{report}");
            ensure!(timeline.on("hash passes").chain(timeline.on("pre-copy")).count() == 0);
            ensure!(timeline.marks.is_empty() && timeline.changed == 0, "{timeline:?}");
        } else {
            let recopied = report["validation"]["recopied"].as_u64().context("a count")?;
            ensure!(left + shadows <= recopied * CHUNK, "{timeline:?}\n{report}");
            ensure!(timeline.changed > 0 && ahead > 0, "{timeline:?}");
            hashed_in_passes(&timeline, &report)?;
        }

        let output = lab.run(["report", "dump.json", "-o", "dump.html"])?;
        ensure!(output.status.success(), "{}", show(&output));
        let page = std::fs::read_to_string(page)?;
        let cells = timeline.on("phases").map(|slice| format!("<td>{}</td>", slice.name));
        for slice in timeline.on("phases") {
            ensure!(page.contains(&format!("<dt>{}</dt>", slice.name)), "{}: {page}", slice.name);
        }
        let id = report["id"].as_str().context("an id")?;
        for fact in ["host", "process", "written", "stopped for", "device memory"] {
            ensure!(page.contains(&format!("<th scope=\"row\">{fact}</th>")), "{fact}: {page}");
        }
        ensure!(page.contains(&format!("<td>{id}</td>")), "{page}");
        ensure!(page.contains("<h1>Timeline of process "), "{page}");
        ensure!(cells.clone().count() > 5 && cells.clone().all(|cell| page.contains(&cell)));
        let bars = timeline.slices.len() + usize::from(!timeline.marks.is_empty());
        ensure!(page.matches("<rect").count() == bars, "a bar for each, and one for the marks");
    }
    Ok(())
}

/// What changed after it was copied is marked with those who may have done it.
#[test]
fn who_changed_what_was_copied_is_in_the_timeline() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(2)?;
    let mut program = lab.start("stencil", &["--steps", "60", "--pace", pace.file()])?;
    program.wait_for("step 3 ")?;
    // Its memory stays unchanged while it is copied, and makes a step before it is stopped.
    let args = ["-R", "--protocol", "recopy", "--timeline", "timeline.json"];
    let dump = PausedDump::start(&lab, &program, &args, "hold:gate")?;
    pace.allow(1)?;
    program.wait_for("step 4 ")?;
    let report = dump.finish()?;
    let timeline = read(&std::fs::read_to_string(lab.path("timeline.json"))?)?;
    agrees_with(&timeline, &report)?;
    let suspected =
        |(_, found): &(f64, Value)| found["suspects"] == serde_json::json!(["heat_step"]);
    ensure!(timeline.marks.iter().any(suspected), "{timeline:?}");
    let output = lab.run(["report", "timeline.json", "-o", "-"])?;
    let page = String::from_utf8(output.stdout)?;
    ensure!(page.contains("<td class=\"name\">heat_step</td>"), "{page}");
    Ok(())
}

#[test]
fn a_failed_dump_has_a_timeline_too() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("scatter", &["--steps", "400", "--step-delay-ms", "10"])?;
    let mut command = lab.gpucr();
    command
        .args(["dump", "--pid", &program.pid.to_string(), "-o", "image", "--timeline", "dump.json"])
        .env("GPUCR_FAULT", "fail:detach");
    let output = finish(&mut command)?;
    refused(&output, 1, &["rolled back in phase detach"])?;
    let timeline = read(&std::fs::read_to_string(lab.path("dump.json"))?)?;
    ensure!(timeline.on("program").count() == 1, "{timeline:?}");
    let stopped = timeline.on("program").next().context("stopped")?;
    ensure!(timeline.phase("detach")?.lies_in(stopped), "{timeline:?}");
    ensure!(timeline.phase("resume")?.begin < stopped.end, "{timeline:?}");
    let page = String::from_utf8(lab.run(["report", "dump.json", "-o", "-"])?.stdout)?;
    ensure!(page.contains("<th scope=\"row\">failed</th>"), "{page}");
    Ok(())
}

#[test]
fn what_is_no_timeline_is_one_clear_error() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("sgd", &["--steps", "400"])?;
    let file = lab.path("dump.json");
    let args = ["--timeline", file.to_str().context("a path")?];
    lab.dump(&program, &lab.path("image"), &args)?;
    let good = std::fs::read_to_string(&file)?;
    let cut = good.len() * 2 / 3;
    for text in ["", "{\"traceEvents\": []}", &good[..cut], &good.replace("\"ts\":", "\"ts\":-")] {
        std::fs::write(&file, text)?;
        let output = lab.run(["report", "dump.json", "-o", "dump.html"])?;
        refused(&output, 1, &["is not a timeline of a dump", "gpucr dump --timeline"])?;
        ensure!(!lab.path("dump.html").exists(), "a page of nothing");
    }
    refused(&lab.run(["report", "absent", "-o", "-"])?, 1, &["absent is not a timeline"])?;
    // A place where the timeline cannot be: nothing is touched.
    let mut program = lab.at_work("sgd", &["--steps", "400"])?;
    let pid = program.pid.to_string();
    let output =
        lab.run(["dump", "--pid", &pid, "-o", "other", "--timeline", "no/such/place.json"])?;
    refused(&output, 1, &["cannot write no/such/place.json", "Nothing was changed"])?;
    ensure!(program.is_running() && !lab.path("other").exists());
    Ok(())
}
