//! The commands that work on images: inspect, verify, diff, export, import.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use gpucr_core::image::ImageReader;
use gpucr_core::store::Encoding;
use gpucr_tests::{Lab, Program, Started, exists, finish, refused, show};
use serde_json::Value;

/// A program on the software driver, and its image; the program runs on.
fn dumped(lab: &Lab) -> Result<(Program, PathBuf)> {
    let program = lab.at_work("sgd", &["--steps", "100"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &["--leave-running"])?;
    Ok((program, image))
}

fn done(output: Output) -> Result<String> {
    ensure!(output.status.success(), "{}", show(&output));
    // Nothing of a progress bar where nobody watches.
    ensure!(output.stderr.is_empty(), "on stderr: {}", show(&output));
    Ok(String::from_utf8(output.stdout)?)
}

fn json(output: Output) -> Result<Value> {
    Ok(serde_json::from_str(&done(output)?)?)
}

/// The JSON that a command has printed that failed with exit code 1.
fn failed_json(output: &Output) -> Result<Value> {
    ensure!(output.status.code() == Some(1) && output.stderr.is_empty(), "{}", show(output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn flip(file: &Path, at: u64) -> Result<()> {
    let file = File::options().read(true).write(true).open(file)?;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at)?;
    Ok(file.write_all_at(&[byte[0] ^ 1], at)?)
}

/// The longest pack of an image, and its length.
fn pack(image: &Path) -> Result<(PathBuf, u64)> {
    let mut packs = Vec::new();
    for entry in image.join("packs").read_dir()? {
        let entry = entry?;
        packs.push((entry.metadata()?.len(), entry.path()));
    }
    let (len, path) = packs.into_iter().max().context("an image has packs")?;
    Ok((path, len))
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key].as_str().with_context(|| format!("no {key} in {value}"))
}

#[test]
fn inspect_shows_a_tree_and_tables() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("family", &["--steps", "100"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;

    let summary = json(lab.run(["inspect", "--json", "image"])?)?;
    let processes = summary["processes"].as_array().context("processes")?;
    ensure!(processes.len() == 3 && processes[0]["pid"] == program.pid, "{summary}");
    ensure!(processes[1..].iter().all(|child| child["ppid"] == program.pid), "{summary}");
    for process in processes {
        ensure!(process["under_gpucr"] == true && process["counts"]["launches"].is_u64());
        ensure!(process["stdio"].as_array().is_some_and(|stdio| stdio.len() == 3), "{process}");
        for block in process["blocks"].as_array().context("blocks")? {
            let (size, stored) = (&block["size"], &block["stored_bytes"]);
            ensure!(size.as_u64() > Some(0) && stored.as_u64() <= size.as_u64(), "{block}");
            ensure!(text(block, "address")?.starts_with("0x"), "{block}");
        }
    }
    let device = &summary["devices"][0];
    ensure!(device["bulk_bytes"] == summary["bulk_bytes"], "{summary}");
    let files = summary["criu_files"].as_array().context("criu_files")?;
    let host: u64 = files.iter().filter_map(|file| file["size"].as_u64()).sum();
    ensure!(summary["host_bytes"] == host, "{summary}");
    ensure!(files.iter().any(|file| file["name"] == "inventory.img"), "{summary}");
    let libraries = summary["libraries"].as_array().context("libraries")?;
    ensure!(libraries.len() == 2, "the shim and the software driver: {summary}");
    let chunks = &summary["chunks"];
    ensure!(chunks["stored_bytes"].as_u64() < summary["stored_bytes"].as_u64(), "{summary}");

    let format =
        "{{.protocol}}:{{range .processes}} {{.pid}}{{end}} {{.devices.0.uuid}}\\n{{json .chunks}}";
    let pids: Vec<String> =
        processes.iter().map(|process| format!(" {}", process["pid"])).collect();
    let wanted = format!(
        "{}:{} {}\n{}\n",
        text(&summary, "protocol")?,
        pids.concat(),
        text(device, "uuid")?,
        summary["chunks"]
    );
    let shown = done(lab.run(["inspect", "--format", format, "image"])?)?;
    ensure!(shown == wanted, "{shown}{wanted}");
    let output = lab.run(["inspect", "--format", "{{.nothing}}", "image"])?;
    gpucr_tests::refused(&output, 2, &["there is no `nothing`", "protocol"])?;

    let people = done(lab.run(["inspect", "image"])?)?;
    let lines: Vec<&str> = people.lines().collect();
    ensure!(lines[0] == format!("image      {}", text(&summary, "id")?), "{people}");
    let root = format!("  {} ", program.pid);
    let at = lines.iter().position(|line| line.starts_with(&root)).context("the root")?;
    ensure!(lines[at + 1].starts_with("  ├─ ") && lines[at + 2].starts_with("  └─ "), "{people}");
    for head in ["devices", "device memory", "files"] {
        ensure!(lines.contains(&head), "no {head}: {people}");
    }
    ensure!(people.contains("--all shows them"), "{people}");
    let all = done(lab.run(["inspect", "--all", "image"])?)?;
    ensure!(all.lines().count() > lines.len() && !all.contains("--all"), "{all}");
    for file in files {
        ensure!(all.contains(text(file, "name")?), "{} is missing", file["name"]);
    }
    Ok(())
}

#[test]
fn a_whole_image_is_verified() -> Result<()> {
    let lab = Lab::new();
    let (_program, _) = dumped(&lab)?;
    let id = json(lab.run(["inspect", "--json", "image"])?)?["id"].clone();
    let report = json(lab.run(["verify", "--json", "image"])?)?;
    ensure!(report["whole"] == true && report["id"] == id, "{report}");
    ensure!(report["damage"].as_array().is_some_and(Vec::is_empty), "{report}");
    let people = done(lab.run(["verify", "image"])?)?;
    ensure!(people.lines().count() == 1 && people.starts_with("image is intact: "), "{people}");
    ensure!(people.contains(id.as_str().context("a string")?), "{people}");
    Ok(())
}

#[test]
fn all_damage_is_named_and_nothing_is_restored() -> Result<()> {
    let lab = Lab::new();
    let (mut program, image) = dumped(&lab)?;
    program.kill();
    let (pack, len) = pack(&image)?;
    // A chunk here and there, the last one before the trailer among them.
    let places = [100, len / 3, len / 2, len - 42];
    for at in places {
        flip(&pack, at)?;
    }
    let report = failed_json(&lab.run(["verify", "--json", "image"])?)?;
    ensure!(report["whole"] == false, "{report}");
    let damage = report["damage"].as_array().context("damage")?;
    ensure!((2..=places.len()).contains(&damage.len()), "{report}");
    for damage in damage {
        ensure!(text(damage, "chunk")?.len() == 64, "{damage}");
        ensure!(Path::new(text(damage, "file")?).ends_with(pack.strip_prefix(&image)?), "{damage}");
        ensure!(damage["offset"].is_u64() && damage["problem"].is_string(), "{damage}");
        let owners = damage["owners"].as_array().context("owners")?;
        ensure!(!owners.is_empty(), "{damage}");
        for owner in owners {
            let named = match text(owner, "kind")? {
                "block" => owner["pid"] == program.pid && owner["device"].is_string(),
                "criu" => text(owner, "name")?.ends_with(".img"),
                "library" => text(owner, "path")?.starts_with('/'),
                _ => false,
            };
            ensure!(named && owner["offset"].is_u64() && owner["bytes"].is_u64(), "{owner}");
        }
    }
    let people = lab.run(["verify", "image"])?;
    ensure!(people.status.code() == Some(1) && people.stderr.is_empty(), "{}", show(&people));
    let said = String::from_utf8_lossy(&people.stdout);
    for damage in damage {
        ensure!(said.contains(text(damage, "chunk")?), "{said}");
    }
    ensure!(said.contains("cannot be restored"), "{said}");

    // A pack that is gone, and a manifest that is damaged, on top of it.
    std::fs::rename(&pack, lab.path("away"))?;
    flip(&image.join("manifest"), 60)?;
    let worse = failed_json(&lab.run(["verify", "--json", "image"])?)?;
    ensure!(worse["id"].is_null(), "{worse}");
    let files = |value: &Value| -> Vec<String> {
        let damage = value["damage"].as_array().into_iter().flatten();
        let files = damage.filter(|d| d["chunk"].is_null()).filter_map(|d| d["file"].as_str());
        files.map(str::to_owned).collect()
    };
    ensure!(files(&worse).len() == 2, "{worse}");
    ensure!(files(&report).is_empty(), "{report}");

    let output = lab.run(["restore", "image"])?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    Ok(())
}

#[test]
fn a_damaged_image_is_neither_restored_nor_exported() -> Result<()> {
    let lab = Lab::new();
    let (mut program, image) = dumped(&lab)?;
    program.kill();
    lab.rewind(&program, &image)?;
    let (pack, len) = pack(&image)?;
    flip(&pack, len / 2)?;
    for args in [&["restore", "image"][..], &["export", "image", "image.tar"]] {
        let output = lab.run(args)?;
        refused(&output, 1, &["damaged", "gpucr verify"]).with_context(|| args.join(" "))?;
    }
    ensure!(!lab.path("image.tar").exists());
    Ok(())
}

/// What is stored as it was goes to the device unread, and it is the device that looks whether it is right.
#[test]
fn one_wrong_bit_of_device_memory_is_refused_by_every_restore() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("halves", &["--steps", "60"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &["--compress", "none"])?;
    program.wait()?;
    let reader = ImageReader::open(&image)?;
    let processes = reader.manifest().processes.iter();
    let blocks =
        processes.filter_map(|process| process.cuda.as_ref()).flat_map(|cuda| &cuda.blocks);
    let entries = blocks.flat_map(|block| &block.chunks).filter_map(|id| reader.chunks().entry(id));
    let entry =
        entries.filter(|entry| entry.encoding == Encoding::Raw).last().context("a raw chunk")?;
    flip(&reader.chunks().pack_path(entry), entry.offset + u64::from(entry.stored_len) / 2)?;
    for args in [
        &["restore", "image"][..],
        &["restore", "--on-demand", "image"],
        &["restore", "--share", "image"],
        &["warm", "image"],
    ] {
        let output = lab.run(args)?;
        refused(&output, 1, &["damaged"]).with_context(|| args.join(" "))?;
        ensure!(!exists(program.pid), "{args:?}: it is still there");
    }
    Ok(())
}

#[test]
fn diff_tells_what_changed() -> Result<()> {
    let lab = Lab::new();
    let (mut program, _) = dumped(&lab)?;
    program.wait_for_progress()?;
    lab.dump(&program, &lab.path("later"), &["--leave-running"])?;

    let diff = json(lab.run(["diff", "--json", "image", "later"])?)?;
    ensure!(diff["a"] != diff["b"], "{diff}");
    let process = &diff["processes"][0];
    ensure!(process["pid"] == program.pid && process["change"] == "same", "{diff}");
    let parts = diff["parts"].as_array().context("parts")?;
    let changed = |kind: &str, change: &str| {
        parts.iter().filter(|p| p["kind"] == kind && p["change"] == change).count()
    };
    // The weights have moved; the libraries are the same; CRIU's files are some of both.
    ensure!(changed("block", "changed") > 0, "{diff}");
    ensure!(changed("library", "same") == 2, "{diff}");
    ensure!(changed("criu", "changed") > 0 && changed("criu", "same") > 0, "{diff}");
    let bytes: Vec<u64> = parts.iter().filter_map(|part| part["changed_bytes"].as_u64()).collect();
    ensure!(bytes.is_sorted_by(|a, b| a >= b), "not sorted: {bytes:?}");
    let cost = &diff["cost"];
    ensure!(cost["chunks"].as_u64() > Some(0), "{diff}");
    ensure!(cost["chunks"].as_u64() < cost["of_chunks"].as_u64(), "{diff}");

    let people = done(lab.run(["diff", "image", "later"])?)?;
    ensure!(people.contains("CHANGED") && people.contains("on top of A"), "{people}");
    let same = done(lab.run(["diff", "image", "image"])?)?;
    ensure!(same.contains("same image"), "{same}");
    let same = json(lab.run(["diff", "--json", "image", "image"])?)?;
    ensure!(same["cost"]["chunks"] == 0 && same["memory"]["share"] == 0.0, "{same}");
    Ok(())
}

#[test]
fn an_image_travels_as_a_file_and_is_restored() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("sgd", &["--steps", "60"])?;
    let image = lab.path("image");
    let dump = lab.dump(&program, &image, &[])?;
    let exported = json(lab.run(["export", "--json", "image", "image.tar"])?)?;
    ensure!(exported["id"] == dump["id"], "{exported}");
    let len = std::fs::metadata(lab.path("image.tar"))?.len();
    ensure!(exported["tar_bytes"] == len, "{exported}");
    std::fs::remove_dir_all(&image)?;

    let said = done(lab.run(["import", "image.tar", "-o", "image"])?)?;
    ensure!(said.contains(text(&dump, "id")?), "{said}");
    let report = json(lab.run(["verify", "--json", "image"])?)?;
    ensure!(report["whole"] == true && report["id"] == dump["id"], "{report}");
    let mut program = lab.restore(&image, program)?;
    let series = {
        program.result()?;
        program.series()
    };
    let undisturbed = Lab::new();
    let mut reference = undisturbed.start("sgd", &["--steps", "60"])?;
    reference.result()?;
    ensure!(series == reference.series(), "the restored program computes something else");
    Ok(())
}

#[test]
fn an_image_travels_through_a_pipe() -> Result<()> {
    let lab = Lab::new();
    let (_program, _) = dumped(&lab)?;
    let id = json(lab.run(["inspect", "--json", "image"])?)?["id"].clone();
    let mut export = lab.gpucr();
    export.args(["export", "image", "-"]).stdout(Stdio::piped());
    let mut export = Started::spawn(&mut export)?;
    let mut import = lab.gpucr();
    import.args(["import", "--json", "-", "-o", "copy"]);
    import.stdin(export.stdout.take().context("a pipe")?);
    let report = json(finish(&mut import)?)?;
    ensure!(export.wait()?.success());
    ensure!(report["id"] == id && report["chunks"].as_u64() > Some(0), "{report}");
    let diff = json(lab.run(["diff", "--json", "image", "copy"])?)?;
    ensure!(diff["a"] == diff["b"], "{diff}");

    // With --json the report of an export to stdout goes to stderr.
    let output = lab.run(["export", "--json", "image", "-"])?;
    let report: Value = serde_json::from_slice(&output.stderr)?;
    ensure!(report["id"] == id, "{report}");
    ensure!(report["tar_bytes"] == output.stdout.len(), "{report}");

    // A reader that goes away.
    let script = format!("{} export image - | head -c 1000", lab.gpucr().get_program().display());
    let mut command = std::process::Command::new("bash");
    command.args(["-o", "pipefail", "-c", &script]).current_dir(lab.path("."));
    let output = finish(&mut command)?;
    ensure!(output.status.code() == Some(1) && output.stdout.len() == 1000, "{}", show(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("discard it"), "{said}");
    Ok(())
}

#[test]
fn bad_tars_are_refused_and_leave_nothing() -> Result<()> {
    let lab = Lab::new();
    let (_program, image) = dumped(&lab)?;
    done(lab.run(["export", "image", "image.tar"])?)?;
    let tar = std::fs::read(lab.path("image.tar"))?;

    std::fs::write(lab.path("cut.tar"), &tar[..tar.len() / 2])?;
    let mut flipped = tar.clone();
    flipped[tar.len() / 2] ^= 1;
    std::fs::write(lab.path("flipped.tar"), flipped)?;
    std::fs::write(lab.path("text.tar"), "text".repeat(1000))?;
    std::fs::write(lab.path("empty.tar"), "")?;
    // What tar(1) makes of a link that leads elsewhere, and of a file that is there twice.
    std::fs::create_dir(lab.path("evil"))?;
    std::os::unix::fs::symlink("/etc", lab.path("evil/manifest"))?;
    let mut tar = std::process::Command::new("tar");
    tar.args(["-cf", "link.tar", "-C", "evil", "manifest"]).current_dir(lab.path("."));
    done(finish(&mut tar)?)?;
    let mut tar = std::process::Command::new("tar");
    tar.args([
        "-cf",
        "../twice.tar",
        "--hard-dereference",
        "manifest",
        "manifest",
        "index",
        "packs",
    ]);
    done(finish(tar.current_dir(&image))?)?;

    let before = lab.path(".").read_dir()?.count();
    for (file, word) in [
        ("cut.tar", "too early"),
        ("flipped.tar", "damaged"),
        ("text.tar", "no header"),
        ("empty.tar", "too early"),
        ("link.tar", "not a regular file"),
        ("twice.tar", "where index should be"),
    ] {
        let output = lab.run(["import", file, "-o", "new"])?;
        refused(&output, 1, &[word, "There is no image"]).with_context(|| file.to_owned())?;
    }
    ensure!(lab.path(".").read_dir()?.count() == before, "something was left behind");
    Ok(())
}

#[test]
fn wrong_usage_and_what_is_in_the_way() -> Result<()> {
    let lab = Lab::new();
    let (_program, _) = dumped(&lab)?;
    done(lab.run(["export", "image", "image.tar"])?)?;
    for (args, code, words) in [
        (&["export", "image", "image.tar"][..], 1, &["exists", "Nothing was written"][..]),
        (&["export", "image", "none/image.tar"], 1, &["none/image.tar"]),
        (&["export", "none", "new.tar"], 1, &["none", "There is no new.tar"]),
        (&["import", "image.tar", "-o", "image"], 1, &["not empty", "Nothing was changed"]),
        (&["import", "none.tar", "-o", "new"], 1, &["none.tar"]),
        (&["import", "image", "-o", "new"], 1, &["tar"]),
        (&["import", "image.tar"], 2, &["--output"]),
        (&["export", "image"], 2, &["FILE.tar"]),
        (&["diff", "image"], 2, &["B"]),
        (&["diff", "image", "none"], 1, &["none"]),
        (&["verify"], 2, &["IMAGE"]),
        (&["verify", "none"], 1, &["none"]),
        (&["verify", "image.tar"], 1, &["image.tar", "not a directory"]),
        (&["inspect", "none"], 1, &["none"]),
    ] {
        refused(&lab.run(args)?, code, words).with_context(|| args.join(" "))?;
    }
    ensure!(!lab.path("new").exists() && !lab.path("new.tar").exists());
    Ok(())
}

#[test]
fn the_shells_know_the_commands() -> Result<()> {
    let lab = Lab::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = done(lab.run(["completions", shell])?)?;
        for command in ["inspect", "verify", "diff", "export", "import"] {
            ensure!(script.contains(command), "{shell} does not know {command}");
        }
    }
    Ok(())
}

#[test]
fn an_image_moves_into_a_store_and_out_again() -> Result<()> {
    let lab = Lab::new();
    let (_program, _) = dumped(&lab)?;
    let id = json(lab.run(["inspect", "--json", "image"])?)?["id"].clone();
    done(lab.run(["export", "image", "image.tar"])?)?;
    for args in [
        &["import", "--json", "image.tar", "--store", "store"][..],
        &["import", "--json", "image.tar", "--store", "store", "--name", "again"],
    ] {
        ensure!(json(lab.run(args)?)?["id"] == id);
    }
    // The last shares every chunk with the others: it brings a manifest, which names them.
    let report =
        json(lab.run(["import", "--json", "image.tar", "--store", "store", "--name", "c"])?)?;
    let mut own = 0;
    for file in std::fs::read_dir(lab.path("store/images/c"))? {
        own += file?.metadata()?.len();
    }
    ensure!(report["new_bytes"] == own, "{own}: {report}");
    for name in ["image", "again", "c"] {
        let report = json(lab.run(["verify", "--json", &format!("store/images/{name}")])?)?;
        ensure!(report["whole"] == true && report["id"] == id, "{name}: {report}");
    }
    done(lab.run(["export", "store/images/again", "again.tar"])?)?;
    ensure!(std::fs::read(lab.path("again.tar"))? == std::fs::read(lab.path("image.tar"))?);
    let output = lab.run(["import", "image.tar", "--store", "store"])?;
    refused(&output, 1, &["not empty", "Nothing was changed"])?;
    let output = lab.run(["import", "image.tar", "-o", "new", "--store", "store"])?;
    refused(&output, 2, &["cannot be used with"])?;
    Ok(())
}
