//! Whatever one side of a migration says, the other stays as it was.

use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migrated::{End, is_so};
use gpucr_tests::migration::{FD, Pair, Side, Sides, connect};
use gpucr_tests::{Lab, show, undisturbed};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";

/// A frame with a message: its kind, and the bytes of its fields.
fn message(kind: u8, fields: &[&[u8]]) -> Vec<u8> {
    let body = [&[0, kind][..], &fields.concat()].concat();
    [&(body.len() as u32).to_le_bytes()[..], &body].concat()
}

fn hello() -> Vec<u8> {
    message(0, &[&12u32.to_le_bytes(), &3u32.to_le_bytes(), b"odd", &2u32.to_le_bytes()])
}

/// Whatever the other side says, the program runs on.
#[test]
fn a_hostile_destination_changes_nothing() -> Result<()> {
    use std::io::Write;
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let accept = message(2, &[&[0; 4 + 4 + 32 + 4 + 4]]);
    let accepted = |more: Vec<u8>| [hello(), accept.clone(), more].concat();
    let text = |text: &[u8]| [&(text.len() as u32).to_le_bytes()[..], text].concat();
    let cases: [(&str, Vec<u8>, &[&str]); 11] = [
        ("nothing", Vec::new(), &["was silent"]),
        ("no protocol", b"SSH-2.0-OpenSSH_9.9\r\n".repeat(10), &["is not gpucr: it said `SSH-2.0"]),
        (
            "another version",
            message(0, &[&99u32.to_le_bytes(), &text(b"9.9"), &2u32.to_le_bytes()]),
            &["gpucr 9.9 with version 99"],
        ),
        ("no answer", hello(), &["was silent"]),
        (
            "no",
            [hello(), message(3, &[&1u32.to_le_bytes(), &text(b"a\x1b[2Jb")])].concat(),
            &["cannot continue at the destination", "a\\u{1b}[2Jb"],
        ),
        ("silence", accepted(Vec::new()), &["was silent"]),
        ("a huge frame", accepted(u32::MAX.to_le_bytes().to_vec()), &["frame is too long"]),
        (
            "a wrong count",
            accepted(message(5, &[&1000u32.to_le_bytes(), &[1; 1000]])),
            &["does not keep to the protocol"],
        ),
        ("too early", accepted(message(7, &[&text(b"/there"), &[0]])), &["`prepared` came"]),
        (
            "far too early",
            accepted(message(9, &[&7u32.to_le_bytes(), &0u32.to_le_bytes()])),
            &["`running` came"],
        ),
        ("failure", accepted(message(10, &[&text(b"no more")])), &["no more"]),
    ];
    for (name, says, words) in cases {
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = lab.gpucr();
        command.args([
            "migrate",
            "--pid",
            &program.pid.to_string(),
            "--fd",
            &FD.to_string(),
            "--silence",
            "2s",
        ]);
        connect(&mut command, &theirs);
        let source = Side::start(&mut command)?;
        drop(theirs);
        // The source may have ended before it has heard all of it.
        let _ = (&ours).write_all(&says);
        // What it says is taken, so that it does not wait for that.
        let mut reading = ours.try_clone()?;
        let reader = std::thread::spawn(move || std::io::copy(&mut reading, &mut std::io::sink()));
        let output = source.end().with_context(|| name.to_owned())?;
        drop(ours);
        let _ = reader.join().expect("no panic");
        let flat = String::from_utf8_lossy(&output.stderr).replace(['│', '\n'], " ");
        let flat = flat.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(output.status.code() == Some(1), "{name}: {}", show(&output));
        ensure!(words.iter().all(|word| flat.contains(word)), "{name}: {}", show(&output));
        ensure!(program.is_running(), "{name}: {}", show(&output));
    }
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    lab.holds_only(&["log"])
}

/// Someone between the two sides who changes what the source says: the frame, given which chunk it is, and what goes
/// on in its place.
type Change = fn(u8, usize, Vec<u8>) -> Vec<Vec<u8>>;

/// Messages that tell of device memory.
const LAYOUT: u8 = 13;
const CONTENTS: u8 = 14;

/// A frame with other last bytes, if it is such a message.
fn with_last(mut frame: Vec<u8>, message: u8, bytes: &[u8]) -> Vec<u8> {
    if frame[4..6] == [0, message] {
        let at = frame.len() - bytes.len();
        frame[at..].copy_from_slice(bytes);
    }
    frame
}

#[test]
fn a_hostile_source_leaves_nothing_behind() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let changes: [(&str, Change, &str); 13] = [
        (
            "an altered chunk",
            |kind, number, mut frame| {
                if (kind, number) == (2, 1) {
                    *frame.last_mut().expect("it has bytes") ^= 1;
                }
                vec![frame]
            },
            "is damaged",
        ),
        (
            "a lacking chunk",
            |kind, number, frame| {
                if (kind, number) == (2, 1) { vec![] } else { vec![frame] }
            },
            "is missing",
        ),
        (
            "a chunk that comes twice",
            |kind, number, frame| {
                if (kind, number) == (2, 1) { vec![frame.clone(), frame] } else { vec![frame] }
            },
            "does not keep to the protocol",
        ),
        (
            "an altered manifest",
            |kind, number, mut frame| {
                // The first piece is the outline.
                if (kind, number) == (1, 2) {
                    let middle = frame.len() / 2;
                    frame[middle] ^= 1;
                }
                vec![frame]
            },
            "its manifest",
        ),
        (
            "an altered outline",
            |kind, number, mut frame| {
                if (kind, number) == (1, 1) {
                    frame.truncate(frame.len() / 2);
                    let len = frame.len() as u32 - 4;
                    frame[..4].copy_from_slice(&len.to_le_bytes());
                }
                vec![frame]
            },
            "its offer",
        ),
        (
            "a block of no possible size",
            |_, _, frame| vec![with_last(frame, LAYOUT, &1u64.to_le_bytes())],
            "no possible size",
        ),
        (
            "a block that is larger than all memory",
            |_, _, frame| vec![with_last(frame, LAYOUT, &(1u64 << 50).to_le_bytes())],
            "there is room for",
        ),
        (
            "a block on a device that was not offered",
            |_, _, mut frame| {
                if frame[4..6] == [0, LAYOUT] {
                    // Before the size.
                    let at = frame.len() - 24;
                    frame[at..at + 16].fill(238);
                }
                vec![frame]
            },
            "has not offered",
        ),
        (
            "a block that is told of twice",
            |_, _, mut frame| {
                if frame[4..6] == [0, LAYOUT] {
                    // Pid, name, device and size.
                    let last = frame.len() - 36..;
                    frame.extend_from_within(last);
                    frame[6] += 1;
                    let len = frame.len() as u32 - 4;
                    frame[..4].copy_from_slice(&len.to_le_bytes());
                }
                vec![frame]
            },
            "a block twice",
        ),
        (
            "contents of a block that there is not",
            |_, _, mut frame| {
                if frame[4..6] == [0, CONTENTS] {
                    frame[6..10].copy_from_slice(&[255; 4]);
                }
                vec![frame]
            },
            "memory that there is not",
        ),
        (
            "a layout within the manifest",
            |kind, number, frame| {
                // The first piece is the outline.
                if (kind, number) == (1, 2) {
                    vec![frame, message(LAYOUT, &[&0u32.to_le_bytes()])]
                } else {
                    vec![frame]
                }
            },
            "`layout` came where it makes no sense",
        ),
        (
            "a flood of layouts and contents, the last of which is wrong",
            |_, _, frame| {
                if frame[4..6] == [0, LAYOUT] {
                    let none = message(LAYOUT, &[&0u32.to_le_bytes()]);
                    let ids = [&0u32.to_le_bytes()[..], &0u32.to_le_bytes(), &1u32.to_le_bytes()];
                    let odd = |n: u32| [&ids.concat()[..], &n.to_le_bytes(), &[7; 28]].concat();
                    let contents = (0..20_000).map(|n| message(CONTENTS, &[&odd(n)]));
                    let flood = std::iter::repeat_n(none, 1000).chain([frame]).chain(contents);
                    let wrong = message(CONTENTS, &[&[255; 4], &odd(0)[4..]]);
                    flood.chain([wrong]).collect()
                } else {
                    vec![frame]
                }
            },
            "memory that there is not",
        ),
        (
            "a flood",
            |kind, number, frame| {
                if (kind, number) == (2, 1) {
                    vec![[&5u32.to_le_bytes()[..], &[1, 0, 0, 0, 0]].concat(); 100_000]
                } else {
                    vec![frame]
                }
            },
            "",
        ),
    ];
    for (name, change, words) in changes {
        let lab = Lab::new();
        let program = lab.at_work(WORKLOAD, &ARGS)?;
        let (from_source, to_source) = UnixStream::pair()?;
        let mut pair = Pair::new(&lab, &program)?;
        // The source talks to the one between.
        connect(&mut pair.source, &to_source);
        let to_destination = UnixStream::from(pair.sockets[0].try_clone()?);
        let between = between(from_source, to_destination, change)?;
        let Pair { mut source, mut destination, sockets } = pair;
        let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
        drop((sockets, to_source));
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        between.join().expect("no panic");
        let told = || format!("{name}: {}", sides.show());
        ensure!(
            !sides.source.status.success() && !sides.destination.status.success(),
            "{}",
            told()
        );
        let flat = String::from_utf8_lossy(&sides.destination.stderr).replace(['│', '\n'], " ");
        let flat = flat.split_whitespace().collect::<Vec<_>>().join(" ");
        ensure!(flat.contains(words) && flat.contains("nothing is left here"), "{}", told());
        is_so(&lab, program, End::Stays, &expected).with_context(told)?;
    }
    Ok(())
}

/// Passes on what both sides say, that of the source with changes, until one of them has ended.
fn between(
    source: UnixStream,
    destination: UnixStream,
    change: Change,
) -> Result<std::thread::JoinHandle<()>> {
    use std::io::{Read, Write};
    let (mut back_from, mut back_to) = (destination.try_clone()?, source.try_clone()?);
    let backwards = std::thread::spawn(move || {
        let _ = std::io::copy(&mut back_from, &mut back_to);
        let _ = back_to.shutdown(std::net::Shutdown::Both);
    });
    let (mut from, mut to) = (source, destination);
    Ok(std::thread::spawn(move || {
        let mut numbers = [0; 3];
        let mut pass_on = || -> std::io::Result<()> {
            loop {
                let mut len = [0; 4];
                from.read_exact(&mut len)?;
                let mut body = vec![0; u32::from_le_bytes(len) as usize];
                from.read_exact(&mut body)?;
                let kind = body[0];
                numbers[usize::from(kind)] += 1;
                let frame = [&len[..], &body].concat();
                for frame in change(kind, numbers[usize::from(kind)], frame) {
                    to.write_all(&frame)?;
                }
            }
        };
        let _ = pass_on();
        let _ = from.shutdown(std::net::Shutdown::Both);
        let _ = to.shutdown(std::net::Shutdown::Both);
        backwards.join().expect("no panic");
    }))
}
