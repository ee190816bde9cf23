use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use super::*;

fn flags(start: u64, end: u64, bits: u64) -> Flags {
    Flags { addresses: start..end, bits }
}

fn names() -> Names {
    let sample = |bits, name| Sample { bits, names: [name].into() };
    Names::learn(&[sample(1, "rd"), sample(2, "wr")])
}

#[test]
fn lines_come_with_the_flags_of_their_mappings() {
    let maps = b"1000-2000 r--p 00000000 08:01 12 /a \xff b\n3000-4000 -w-p 00000000 00:00 0\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
    let both = [flags(0x1000, 0x2000, 1), flags(0x3000, 0x4000, 2)];
    let expected = b"1000-2000 r--p 00000000 08:01 12 /a \xff b\nVmFlags: rd \n\
        3000-4000 -w-p 00000000 00:00 0\nVmFlags: wr \n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
    assert_eq!(names().beside(maps, &both), Ok(expected.to_vec()));
}

#[test]
fn mappings_of_different_moments_are_not_merged() {
    let maps = b"1000-2000 r--p 00000000 00:00 0\n3000-4000 -w-p 00000000 00:00 0\n";
    let of = |flags: &[Flags]| names().beside(maps, flags);
    let (first, second) = (flags(0x1000, 0x2000, 1), flags(0x3000, 0x4000, 2));
    let changed = Err(Unlisted::Changed);
    assert_eq!(of(std::slice::from_ref(&first)), changed);
    assert_eq!(of(&[second.clone(), first.clone()]), changed);
    assert_eq!(of(&[first.clone(), flags(0x3000, 0x5000, 2)]), changed);
    assert_eq!(of(&[first.clone(), second.clone(), flags(0x5000, 0x6000, 2)]), changed);
    assert_eq!(of(&[first, flags(0x3000, 0x4000, 6)]), Err(Unlisted::Unknown(6)));
    assert!(of(&[flags(0x1000, 0x2000, 1), second]).is_ok());
}

/// What a text in the form of `smaps` has of each mapping but the kernel's.
fn by_mapping(text: &[u8]) -> BTreeMap<String, Vec<String>> {
    let text = String::from_utf8_lossy(text);
    let (mut found, mut current) = (BTreeMap::new(), None);
    for line in text.lines() {
        if let Some(names) = line.strip_prefix("VmFlags:") {
            let mut names: Vec<_> = names.split_whitespace().map(String::from).collect();
            names.sort();
            found.extend(current.take().map(|line| (line, names)));
        } else if addresses(line).is_some_and(|range| range.start < KERNEL) {
            current = Some(line.to_owned());
        }
    }
    found
}

/// Needs a kernel that runs such programs, and root.
#[test]
fn a_process_is_listed_as_smaps_has_it() {
    // Mappings with the flags that this process has learned from its own, and a thread with files of its own, for which
    // the kernel tells of all of them once more.
    let program = "import mmap, ctypes, sys, threading\n\
        made = []\n\
        for advice in 1, 2, 10, 12, 14, 15, 16, 18:\n    \
            made.append(mmap.mmap(-1, 8 << 12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))\n    \
            made[-1].madvise(advice, 4096, 4096)\n\
        made.append(mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS))\n\
        made.append(mmap.mmap(-1, 4096, prot=0, flags=mmap.MAP_PRIVATE | 0x4000 | mmap.MAP_ANONYMOUS))\n\
        made.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | 0x100 | mmap.MAP_ANONYMOUS))\n\
        made.append(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | 0x2000 | mmap.MAP_ANONYMOUS))\n\
        apart = threading.Event()\n\
        def own_files():\n    \
            ctypes.CDLL(None).unshare(0x400)\n    \
            apart.set()\n    \
            threading.Event().wait()\n\
        threading.Thread(target=own_files, daemon=True).start()\n\
        apart.wait()\n\
        print('ready', flush=True)\nsys.stdin.read()";
    let mut command = Command::new("python3");
    let mut child =
        command.args(["-c", program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut ready).unwrap();
    let pid = child.id() as i32;
    let (smaps, listed) = (std::fs::read(format!("/proc/{pid}/smaps")), listed(pid));
    let opened = open(pid).map(File::from).and_then(|mut file| {
        let mut text = Vec::new();
        io::Read::read_to_end(&mut file, &mut text).map(|_| text)
    });
    drop(child.stdin.take());
    child.wait().unwrap();
    let listed = listed.unwrap().expect("the kernel lists no mappings");
    assert_eq!(by_mapping(&listed), by_mapping(&smaps.unwrap()));
    assert!(by_mapping(&listed).len() > 20);
    assert_eq!(opened.unwrap(), listed);
    // Nor is there one of a process that has ended.
    assert!(read(pid).is_err());
}
