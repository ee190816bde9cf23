//! Power cuts and full disks at every step of every writer, and processes that are killed.
//!
//! Whatever happens: an image whose commit was reported is whole, one whose removal was reported is
//! gone, any other is whole or not there, and a gc leaves a clean store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::catalogue::remove_on;
use super::kinds_tests::{assert_clean, collect_on, files, on_top, read, real, stored, write_on};
use super::*;
use crate::store::disk::Disk;
use crate::store::power::{Fault, Journal, Kept, Recorder};
use crate::store::shared::is_store;

use Step::*;

/// A place where syncs cost little.
pub(super) fn fast_place() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() }
}

/// A number that the environment may raise.
fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// The images of the script, with their files.
const IMAGES: [(&str, Range<u64>); 17] = [
    ("store/images/a", 0..14),
    ("store/images/b", 10..18),
    ("store/images/c", 8..20),
    ("store/images/d", 0..6),
    ("alone", 0..5),
    ("child", 3..8),
    ("grandchild", 4..9),
    // Each image has one chunk, so one pack.
    ("store/images/s0", 0..1),
    ("store/images/s1", 1..2),
    ("store/images/s2", 4..5),
    ("store/images/s3", 5..6),
    ("store/images/s4", 8..9),
    ("store/images/s5", 9..10),
    ("store/images/s6", 12..13),
    ("store/images/s7", 13..14),
    ("store/images/s8", 16..17),
    ("store/images/mixed", 3..17),
];

/// A step of a script.
#[derive(Debug, Clone, Copy)]
enum Step {
    Write(&'static str),
    Remove(&'static str),
    Collect,
}

/// All kinds of images, and packs that are half dead.
const KINDS: &[Step] = &[
    Write("alone"),
    Write("child"),
    Write("grandchild"),
    Remove("grandchild"),
    Write("store/images/a"),
    Write("store/images/b"),
    Remove("store/images/a"),
    Collect,
    Write("store/images/c"),
    Remove("store/images/b"),
    Write("store/images/d"),
    Collect,
];

/// Small packs that are merged, with some dead ones among them.
const SMALL: &[Step] = &[
    Write("store/images/s0"),
    Write("store/images/s1"),
    Write("store/images/s2"),
    Write("store/images/s3"),
    Write("store/images/s4"),
    Write("store/images/s5"),
    Write("store/images/s6"),
    Write("store/images/s7"),
    Write("store/images/s8"),
    Remove("store/images/s3"),
    Collect,
    Write("store/images/mixed"),
    Remove("store/images/s0"),
    Collect,
];

/// Does what a script says, and notes what has succeeded. A step that fails is passed over.
fn play(script: &[Step], recorder: &Recorder, root: &Path) {
    let disk: Arc<dyn Disk> = Arc::new(recorder.clone());
    let path = |name: &str| root.join(name);
    let write = |name: &str| {
        let (_, seeds) = IMAGES.iter().find(|(n, _)| *n == name).unwrap().clone();
        let to = match name {
            "alone" => Destination::Alone(path(name)),
            "child" => on_top(&path(name), &path("alone")),
            "grandchild" => on_top(&path(name), &path("child")),
            _ => stored(&path("store"), name.rsplit('/').next().unwrap()),
        };
        if write_on(&disk, &to, seeds).is_ok() {
            recorder.note(format!("+{name}"));
        }
    };
    let remove = |name: &str| {
        recorder.note(format!("?{name}"));
        if remove_on(disk.as_ref(), &path(name), false).is_ok() {
            recorder.note(format!("-{name}"));
        }
    };
    let collect = || {
        if let Ok(report) = collect_on(&disk, &path("store")) {
            recorder.note(format!("gc {} {}", report.moved_bytes, report.removed_packs));
        }
    };
    for step in script {
        match step {
            Write(name) => write(name),
            Remove(name) => remove(name),
            Collect => collect(),
        }
    }
}

/// Checks that what is below `root` is what the notes promise.
fn check(root: &Path, notes: &[&str], situation: &str) {
    let mut expected: BTreeMap<&str, Option<bool>> = BTreeMap::new();
    for note in notes {
        let (kind, name) = note.split_at(1);
        let state = match kind {
            "+" => Some(true),
            "-" => Some(false),
            "?" => None,
            _ => continue,
        };
        expected.insert(name, state);
    }
    let images_are_right = |when: &str| {
        for (name, seeds) in &IMAGES {
            let path = root.join(name);
            let there = path.exists();
            // What was not reported may be there or not.
            if let Some(&Some(wanted)) = expected.get(name) {
                assert_eq!(there, wanted, "{name} {when}, {situation}: {notes:?}");
            }
            if !there {
                continue;
            }
            match read(&path) {
                Ok(found) => {
                    assert_eq!(found, seeds.clone().collect(), "{name} {when}, {situation}");
                }
                Err(error) => panic!("{name} {when}, {situation}: {error}\n{notes:?}"),
            }
        }
    };
    images_are_right("at first");
    let store = root.join("store");
    if is_store(&store) {
        if let Err(error) = collect_on(&real(), &store) {
            panic!("gc, {situation}: {error}");
        }
        assert_clean(&store);
        images_are_right("after a gc");
    }
    // What was begun goes on.
    let again = stored(&store, "again");
    if let Err(error) = write_on(&real(), &again, 0..3) {
        panic!("again, {situation}: {error}");
    }
}

/// What of so many changes reaches the disk: all subsets of few; of many, those that have all or none,
/// or lack one, or have one. Then each alone is torn, while all others are there; and `rounds` times
/// each is there, lost or torn by chance.
fn subsets(pending: usize, rounds: usize, seed: usize) -> BTreeSet<Vec<Kept>> {
    let mut subsets: BTreeSet<Vec<Kept>> = BTreeSet::new();
    let kept = |yes: bool| if yes { Kept::All } else { Kept::Nothing };
    let random = |what: &str, round: usize| {
        let hash = blake3::hash(format!("{what} {seed} {round}").as_bytes());
        move |i: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&hash.as_bytes()[i % 4 * 8..][..8]);
            u64::from_le_bytes(bytes).rotate_left((i / 4) as u32)
        }
    };
    if pending <= 3 {
        let subset = |set: u32| (0..pending).map(|bit| kept(set >> bit & 1 == 1)).collect();
        subsets.extend((0..1 << pending).map(subset));
    } else {
        for alone in 0..pending {
            subsets.insert((0..pending).map(|i| kept(i == alone)).collect());
            subsets.insert((0..pending).map(|i| kept(i != alone)).collect());
        }
        subsets.insert(vec![Kept::Nothing; pending]);
        subsets.insert(vec![Kept::All; pending]);
    }
    for alone in 0..pending {
        let torn = Kept::torn(random("torn", alone)(0));
        subsets.insert((0..pending).map(|i| if i == alone { torn } else { Kept::All }).collect());
    }
    for round in 0..rounds {
        let random = random("round", round);
        let choose = |i: usize| match random(i) >> 60 {
            0..6 => Kept::All,
            6..12 => Kept::Nothing,
            _ => Kept::torn(random(i)),
        };
        subsets.insert((0..pending).map(choose).collect());
    }
    subsets
}

/// The journal of a script that was played below `root` without a fault.
fn journal_of(script: &[Step], root: &Path) -> Journal {
    fs::create_dir(root).unwrap();
    let recorder = Recorder::default();
    play(script, &recorder, root);
    recorder.journal()
}

/// Cuts the power at every step of a script. Returns the number of disks that came of it.
fn cut_everywhere(script: &[Step], rounds: usize) -> usize {
    let dir = tempfile::tempdir_in(fast_place()).unwrap();
    let root = dir.path().join("real");
    let journal = journal_of(script, &root);
    let notes = journal.notes(journal.len());
    check(&root, &notes, "without a cut");
    // The script does what it is there for.
    let done = notes.iter().filter(|note| note.starts_with(['+', '-', 'g'])).count();
    assert_eq!(done, script.len(), "{notes:?}");
    let moved = notes.iter().filter(|n| n.starts_with("gc ") && !n.starts_with("gc 0")).count();
    assert!(moved > 0, "no gc has moved anything: {notes:?}");

    let states: usize = (0..=journal.len())
        .into_par_iter()
        .map(|cut| {
            let pending = journal.pending(&root, cut);
            let subsets = subsets(pending, rounds, cut);
            let notes = journal.notes(cut);
            for subset in &subsets {
                let place = dir.path().join(format!("{cut}"));
                let mut bits = subset.iter();
                journal.after_cut(&root, &place, cut, || *bits.next().unwrap());
                check(&place, &notes, &format!("cut before step {cut}, kept {subset:?}"));
                fs::remove_dir_all(&place).unwrap();
            }
            subsets.len()
        })
        .sum();
    eprintln!("{} steps, {states} states of the disk", journal.len());
    states
}

#[test]
fn the_power_is_cut_at_every_step() {
    let states = cut_everywhere(KINDS, number("GPUCR_POWER_ROUNDS", 2));
    assert!(states > 1000, "{states}");
}

#[test]
fn the_power_is_cut_at_every_step_of_a_merge() {
    let states = cut_everywhere(SMALL, number("GPUCR_POWER_ROUNDS", 2));
    assert!(states > 1000, "{states}");
}

/// The tests above can fail: they do for code that forgets the syncs of any one kind.
#[test]
fn no_sync_is_made_in_vain() {
    let dir = tempfile::tempdir_in(fast_place()).unwrap();
    let root = dir.path().join("real");
    let journal = journal_of(KINDS, &root);
    let kinds = journal.syncs();
    let said = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let harmless: Vec<&String> = kinds
        .par_iter()
        .filter(|kind| {
            let forgetful = journal.forgetting(kind);
            let place = dir.path().join(kind.replace(' ', "-"));
            !(0..=forgetful.len()).any(|cut| {
                let notes = forgetful.notes(cut);
                subsets(forgetful.pending(&root, cut), 0, cut).iter().any(|subset| {
                    let mut bits = subset.iter();
                    forgetful.after_cut(&root, &place, cut, || *bits.next().unwrap());
                    let found = std::panic::catch_unwind(|| check(&place, &notes, "")).is_err();
                    fs::remove_dir_all(&place).unwrap();
                    found
                })
            })
        })
        .collect();
    std::panic::set_hook(said);
    assert!(kinds.len() > 8, "{kinds:?}");
    assert!(harmless.is_empty(), "nobody would miss the syncs of {harmless:?} of {kinds:?}");
}

#[test]
fn the_disk_is_full_at_every_step() {
    let run = |script: &[Step], fault: Fault| {
        let dir = tempfile::tempdir_in(fast_place()).unwrap();
        let recorder = Recorder::failing(fault);
        play(script, &recorder, dir.path());
        let journal = recorder.journal();
        check(dir.path(), &journal.notes(journal.len()), &format!("{fault:?}"));
        // Except in stores nothing is left of a dump that failed, unless removing fails.
        if matches!(fault, Fault::FullFrom(_)) {
            for entry in fs::read_dir(dir.path()).unwrap() {
                let name = entry.unwrap().file_name();
                let name = name.to_string_lossy();
                assert!(!name.contains(".partial-"), "{fault:?} leaves {name:?}");
            }
        }
        recorder.was_hit()
    };
    for (script, fault) in [KINDS, SMALL]
        .into_iter()
        .flat_map(|script| [Fault::FullOnce, Fault::FullFrom].map(|fault| (script, fault)))
    {
        // The order in which threads seal packs varies, so the last steps may not be reached by
        // each: all numbers up to where none was.
        let mut at = 0;
        let is_hit = |at| run(script, fault(at));
        while (at..at + 64).into_par_iter().map(is_hit).reduce(|| false, |a, b| a | b) {
            at += 64;
        }
        assert!(at > 128, "{at}");
    }
}

/// What the processes do that are killed: `GPUCR_CRASH_ROLE` is `ROLE NUMBER DIRECTORY`. As a test it
/// does nothing.
#[test]
fn helper() {
    let Ok(role) = std::env::var("GPUCR_CRASH_ROLE") else { return };
    let mut words = role.splitn(3, ' ');
    let (role, number) = (words.next().unwrap(), words.next().unwrap());
    let dir = PathBuf::from(words.next().unwrap());
    let store = dir.join("store");
    let mut log = fs::File::options().append(true).create(true).open(dir.join("log")).unwrap();
    let mut say = |line: String| log.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut own = Vec::new();
    for round in 0u64.. {
        if role == "collect" {
            // Another may be at it.
            let _ = collect_on(&real(), &store);
            continue;
        }
        let name = format!("{number}-{round}");
        let hash = blake3::hash(name.as_bytes());
        let first = u64::from(hash.as_bytes()[0]) % 60;
        let seeds = first..first + 1 + u64::from(hash.as_bytes()[1]) % 12;
        write_on(&real(), &stored(&store, &name), seeds.clone()).unwrap();
        say(format!("+ {name} {} {}", seeds.start, seeds.end));
        own.push(name);
        if own.len() > 2 {
            let name = own.remove(0);
            say(format!("- {name}"));
            remove(&store.join("images").join(name), false).unwrap();
        }
    }
}

/// A process that is killed with the test.
struct Helper(Child);

impl Helper {
    fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.kill();
    }
}

#[test]
fn processes_are_killed_at_random_moments() {
    let kills = number("GPUCR_KILLS", 250);
    let dir = tempfile::tempdir_in(fast_place()).unwrap();
    write_on(&real(), &stored(&dir.path().join("store"), "first"), 0..30).unwrap();
    let start = |role: &str, number: usize| -> Helper {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "image::crash_tests::helper", "--test-threads", "1"])
            .env("GPUCR_CRASH_ROLE", format!("{role} {number} {}", dir.path().display()))
            .stdout(Stdio::null())
            .stderr(
                fs::File::options().append(true).create(true).open(dir.path().join("err")).unwrap(),
            )
            .spawn();
        Helper(child.unwrap())
    };
    let roles = ["write", "write", "write", "collect"];
    let mut children: Vec<Helper> = Vec::new();
    for (number, role) in roles.iter().enumerate() {
        children.push(start(role, number));
    }
    let mut ended = 0;
    let commits = || {
        let log = fs::read_to_string(dir.path().join("log")).unwrap_or_default();
        log.lines().filter(|line| line.starts_with('+')).count()
    };
    // A machine may be so slow that helpers are killed before they have committed anything: they get more time then.
    let mut slowness = 1;
    for kill in 0..kills {
        let dice = blake3::hash(&kill.to_le_bytes());
        let dice = dice.as_bytes();
        // A kill may also come in the moment of the start.
        let moment = Duration::from_micros(u64::from(dice[0]) * u64::from(dice[1]) / 2);
        std::thread::sleep(moment * slowness);
        if kill % 10 == 9 && commits() < kill / 2 {
            slowness += 1;
        }
        let victim = dice[2] as usize % roles.len();
        // A child that has ended by itself has failed.
        ended += usize::from(children[victim].0.try_wait().unwrap().is_some());
        children[victim].kill();
        children[victim] = start(roles[victim], roles.len() + kill);
    }
    drop(children);
    let errors = fs::read_to_string(dir.path().join("err")).unwrap_or_default();
    assert_eq!(ended, 0, "helpers have failed:\n{errors}");

    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let mut expected: BTreeMap<&str, Range<u64>> = BTreeMap::from([("first", 0..30)]);
    let mut committed = 0;
    for line in log.lines() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["+", name, from, to] => {
                expected.insert(name, from.parse().unwrap()..to.parse().unwrap());
                committed += 1;
            }
            ["-", name] => drop(expected.remove(name)),
            _ => panic!("{line}"),
        }
    }
    let store = dir.path().join("store");
    let is_right = || {
        for (name, seeds) in &expected {
            assert_eq!(read(&store.join("images").join(name)).unwrap(), seeds.clone().collect());
        }
    };
    is_right();
    let since = Instant::now();
    collect_on(&real(), &store).unwrap();
    assert_clean(&store);
    is_right();
    eprintln!(
        "{kills} kills, {committed} images committed, {} there; last gc {:?}, {} files",
        expected.len(),
        since.elapsed(),
        files(&store).len()
    );
    assert!(committed > kills / 4, "{committed} commits at {kills} kills");
}
