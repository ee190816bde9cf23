//! Memory that is read from images: the bytes that the program had, at the addresses where it had them.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use gpucr_core::image::{FileEntry, Manifest};
use gpucr_tests::{Lab, Program, finish, refused, show};
use serde_json::Value;

/// Memory as the workload says it.
struct Place {
    name: String,
    address: u64,
    bytes: u64,
    /// BLAKE3 in hexadecimal digits; `-` where it has no bytes.
    hash: String,
}

impl Place {
    fn all(program: &Program) -> Result<Vec<Self>> {
        let output = program.output();
        let lines = output.lines().filter_map(|line| line.strip_prefix("memory "));
        let of = |line: &str| -> Option<Self> {
            let [name, address, bytes, hash] = line.split(' ').collect::<Vec<_>>()[..] else {
                return None;
            };
            let address = u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()?;
            Some(Self { name: name.into(), address, bytes: bytes.parse().ok()?, hash: hash.into() })
        };
        lines.map(|line| of(line).with_context(|| line.to_owned())).collect()
    }

    fn named(all: &[Self], name: &str) -> Result<u64> {
        all.iter().find(|place| place.name == name).map(|p| p.address).context("it has printed it")
    }
}

/// Extracts memory to the file `out`; gives it, and the report.
fn extract(
    lab: &Lab,
    image: &Path,
    pid: u32,
    address: u64,
    length: Option<u64>,
) -> Result<(Vec<u8>, Value)> {
    let (pid, address) = (pid.to_string(), format!("{address:#x}"));
    let mut command = lab.gpucr();
    command
        .args(["extract", "--json", "--pid", &pid, "--address", &address, "-o", "out"])
        .arg(image);
    command.args(length.iter().flat_map(|length| ["--length".to_owned(), length.to_string()]));
    let output = finish(&mut command)?;
    ensure!(output.status.success() && output.stderr.is_empty(), "{}", show(&output));
    Ok((std::fs::read(lab.path("out"))?, serde_json::from_slice(&output.stdout)?))
}

/// Compares all memory that the program has told of with what an image has.
fn check(lab: &Lab, image: &Path, program: &Program) -> Result<()> {
    for place in Place::all(program)?.iter().filter(|place| place.hash != "-") {
        let Place { name, address, bytes, hash } = place;
        let (found, report) = extract(lab, image, program.pid, *address, Some(*bytes))?;
        ensure!(found.len() as u64 == *bytes && report["bytes"] == *bytes, "{name}: {report}");
        ensure!(blake3::hash(&found).to_hex().as_str() == hash, "{name} differs: {report}");
        // Without a length it goes on as far as the block or mapping does.
        let (more, _) = extract(lab, image, program.pid, *address, None)?;
        ensure!(more.get(..found.len()) == Some(&found), "{name}: {} bytes", more.len());
        // Parts, over ends of chunks and pages.
        for (from, len) in [(0, 1), (4095, 2), (bytes / 3, bytes / 2), (bytes - 1, 1)] {
            let (part, _) = extract(lab, image, program.pid, address + from, Some(len))?;
            ensure!(part == found[from as usize..][..len as usize], "{name}: {len} from {from} on");
        }
        let kind = match name.as_str() {
            "device" => report["stretches"][0]["device"]["owner"] == program.pid,
            "private" => report["stretches"][0]["host"].is_object(),
            _ => report["stretches"][0]["shared"].is_object(),
        };
        ensure!(kind, "{name}: {report}");
    }
    Ok(())
}

#[test]
fn memory_is_what_the_program_had_in_every_kind_of_image() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("addresses", &["--steps", "100"])?;
    let (first, second) = (lab.path("first"), lab.path("second"));
    lab.dump(&program, &first, &["--leave-running"])?;
    check(&lab, &first, &program).context("a full image")?;
    program.wait_for_progress()?;
    lab.dump(&program, &second, &["--leave-running", "--parent", "first"])?;
    check(&lab, &second, &program).context("an image with a parent")?;
    let pid = program.pid.to_string();
    let dump = ["dump", "--pid", &pid, "--store", "store", "--name", "x", "--protocol", "stop"];
    let output = lab.run(dump)?;
    ensure!(output.status.success(), "{}", show(&output));
    check(&lab, &lab.path("store/images/x"), &program).context("an image in a store")?;
    program.wait()?;
    Ok(())
}

#[test]
fn memory_that_criu_has_written_itself_is_found_too() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("addresses", &["--steps", "100"])?;
    let mut command = lab.gpucr();
    command.args(["dump", "-o", "image", "--pid", &program.pid.to_string()]);
    let output = finish(command.env("GPUCR_CRIU_WRITES_MEMORY", "1"))?;
    ensure!(output.status.success(), "{}", show(&output));
    check(&lab, &lab.path("image"), &program)
}

#[test]
fn what_an_image_does_not_have_is_refused_and_nothing_is_written() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("addresses", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    let all = Place::all(&program)?;
    std::fs::write(lab.path("out"), "as it was")?;
    let pid = program.pid.to_string();
    let refuse = |pid: &str, address: u64, more: &[&str], words: &[&str]| -> Result<()> {
        let address = format!("{address:#x}");
        let args = ["extract", "image", "-o", "out", "--pid", pid, "--address", &address];
        let output = lab.run(args.iter().chain(more))?;
        refused(&output, 1, &[words, &["Nothing was written"]].concat())?;
        ensure!(std::fs::read(lab.path("out"))? == b"as it was");
        Ok(())
    };
    refuse("1", 4096, &[], &["no process 1", &pid])?;
    refuse(&pid, 4096, &[], &["nothing at 0x1000", "gpucr inspect"])?;
    refuse(&pid, u64::MAX - 10, &["--length", "100"], &["beyond the last address"])?;
    refuse(&pid, Place::named(&all, "kept")?, &[], &["reserved the addresses", "no memory"])?;
    refuse(&pid, Place::named(&all, "code")?, &[], &["comes from a file"])?;
    let device = Place::named(&all, "device")?;
    refuse(&pid, device, &["--length", "1TiB"], &["process"])?;
    for args in [["--address", "soon"], ["--length", "0"], ["--pid", "0"]] {
        let output = lab.run(["extract", "image", "-o", "out"].iter().chain(&args))?;
        ensure!(output.status.code() == Some(2), "{args:?}: {}", show(&output));
    }
    // A place that cannot be written.
    let device = format!("{device:#x}");
    let args = ["extract", "image", "--pid", &pid, "--address", &device, "-o", "no/such"];
    refused(&lab.run(args)?, 1, &["cannot write no/such"])?;
    lab.holds_only(&["log", "image", "out"])
}

#[test]
fn a_pipe_gets_the_bytes_and_nothing_else() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("addresses", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    for place in Place::all(&program)?.iter().filter(|place| place.hash != "-") {
        let mut command = lab.gpucr();
        command.args(["extract", "image", "-o", "/dev/stdout", "--pid", &program.pid.to_string()]);
        command.args(["--address", &place.address.to_string()]);
        command.args(["--length", &place.bytes.to_string()]).stdout(Stdio::piped());
        let output = finish(&mut command)?;
        ensure!(output.status.success() && output.stderr.is_empty(), "{}", output.status);
        ensure!(blake3::hash(&output.stdout).to_hex().as_str() == place.hash, "{}", place.name);
    }
    Ok(())
}

/// Changes one of CRIU's files, as the manifest has it.
fn change(manifest: &mut Manifest, name: &str, how: impl FnOnce(&mut FileEntry)) {
    let file = manifest.criu.files.iter_mut().find(|file| file.name == name);
    how(file.expect("CRIU has written it"));
}

#[test]
fn images_that_lie_are_refused_by_name() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("addresses", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    let pid = program.pid;
    let private = Place::named(&Place::all(&program)?, "private")?;
    let good = std::fs::read(lab.path("image/manifest"))?;
    let (mm, pagemap) = (format!("mm-{pid}.img"), format!("pagemap-{pid}.img"));
    type Lie<'a> = Box<dyn FnOnce(&mut Manifest) + 'a>;
    let lies: [(Lie<'_>, &str); 5] = [
        // The mappings are another file's bytes.
        (
            Box::new(|m: &mut Manifest| {
                let other = m.criu.files.iter().find(|f| f.name == "inventory.img").cloned();
                let other = other.expect("CRIU has written it");
                change(m, &mm, |file| (file.size, file.chunks) = (other.size, other.chunks));
            }),
            "is not as it is known here",
        ),
        (Box::new(|m| m.criu.files.retain(|file| file.name != pagemap)), "is missing"),
        // A list so long that nobody has the memory to read it.
        (
            Box::new(|m| {
                let chunk = m.criu.files.iter().flat_map(|f| &f.chunks).max_by_key(|c| c.len);
                let chunk = *chunk.expect("there are chunks");
                let count = (65 << 20) / chunk.len as usize + 1;
                change(m, &pagemap, |file| {
                    file.chunks = vec![chunk; count];
                    file.size = u64::from(chunk.len) * count as u64;
                });
            }),
            "is longer than any list",
        ),
        // Fewer pages than are listed.
        (
            Box::new(|m| {
                for file in m.criu.files.iter_mut().filter(|file| file.name.starts_with("pages-")) {
                    file.chunks.truncate(1);
                    file.size = file.chunks.iter().map(|chunk| u64::from(chunk.len)).sum();
                }
            }),
            "has fewer pages than are listed",
        ),
        (Box::new(|m| m.criu.files.retain(|f| !f.name.starts_with("pages-"))), "is missing"),
    ];
    for (lie, word) in lies {
        gpucr_core::hostile::forge(&lab.path("image"), lie);
        let (pid, address) = (pid.to_string(), private.to_string());
        let args = ["extract", "image", "-o", "out", "--pid", &pid, "--address", &address];
        let output = lab.run(args)?;
        refused(&output, 1, &[word, "Nothing was written"]).context(word)?;
        ensure!(!lab.path("out").exists(), "{word}");
        std::fs::write(lab.path("image/manifest"), &good)?;
    }
    check(&lab, &lab.path("image"), &program)
}

#[test]
fn a_damaged_chunk_is_no_memory() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("addresses", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &["--compress", "none"])?;
    let device = Place::named(&Place::all(&program)?, "device")?;
    for entry in lab.path("image/packs").read_dir()? {
        let path = entry?.path();
        let mut bytes = std::fs::read(&path)?;
        let end = bytes.len().saturating_sub(32);
        bytes[..end].iter_mut().step_by(1000).for_each(|byte| *byte ^= 1);
        std::fs::write(path, bytes)?;
    }
    std::fs::write(lab.path("out"), "as it was")?;
    let (pid, address) = (program.pid.to_string(), device.to_string());
    let args = ["extract", "image", "-o", "out", "--pid", &pid, "--address", &address];
    refused(&lab.run(args)?, 1, &["damaged"])?;
    ensure!(std::fs::read(lab.path("out"))? == b"as it was");
    lab.holds_only(&["log", "image", "out"])
}

#[test]
fn kernels_that_were_launched_during_a_dump_are_named() -> Result<()> {
    let lab = Lab::new();
    let dumped = gpucr_tests::Dumped::at_work(&lab, "sgd", &["--steps", "200"])?;
    let people = lab.run(["inspect", "--kernels", "image"])?;
    ensure!(people.status.success(), "{}", show(&people));
    let people = String::from_utf8(people.stdout)?;
    let json = lab.run(["inspect", "--json", "image"])?;
    let summary: Value = serde_json::from_slice(&json.stdout)?;
    let process = &summary["kernels"][0];
    ensure!(process["pid"] == dumped.program.pid, "{summary}");
    let kernels = process["kernels"].as_array().context("kernels")?;
    ensure!(!kernels.is_empty(), "{summary}");
    for kernel in kernels {
        let name = kernel["name"].as_str().context("a name")?;
        ensure!(
            kernel["launches"].as_u64() > Some(0) && people.contains(name),
            "{kernel}: {people}"
        );
        ensure!(kernel["pointers"].as_u64() >= kernel["read_only"].as_u64(), "{kernel}");
        ensure!(kernel["indirect"] == false, "its code is PTX: {kernel}");
    }
    // A dump that stops the program at once has seen none.
    let program = lab.at_work("stencil", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("second"), &["--protocol", "stop"])?;
    let none = lab.run(["inspect", "--kernels", "second"])?;
    ensure!(String::from_utf8(none.stdout)?.contains("names no kernel"));
    Ok(())
}
