//! The memory of processes, read from outside.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};

/// A process whose memory is read.
pub(crate) struct ProcessMemory {
    pid: i32,
    /// `/proc/PID/mem`, by which memory is read that the process itself may not read.
    memory: File,
}

impl ProcessMemory {
    /// # Errors
    /// There is no such process, or its memory must not be read.
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        Ok(Self { pid, memory: File::open(format!("/proc/{pid}/mem"))? })
    }

    /// # Errors
    /// Not all of it can be read. The error names the place.
    pub(crate) fn read(&self, bytes: &mut [u8], address: u64) -> io::Result<()> {
        let read = self.read_permitted(bytes, address);
        let (rest, address) = (&mut bytes[read..], address + read as u64);
        if rest.is_empty() {
            return Ok(());
        }
        let failed = |e: io::Error| {
            let (pid, kind) = (self.pid, e.kind());
            io::Error::new(kind, format!("memory of process {pid} at {address:#x}: {e}"))
        };
        self.memory.read_exact_at(rest, address).map_err(failed)
    }

    /// Reads up to the first byte that is not there, or that the process itself may not read. Gives the number of
    /// bytes.
    pub(crate) fn read_permitted(&self, bytes: &mut [u8], address: u64) -> usize {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &mut bytes[done..];
            let to = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            let from = libc::iovec {
                iov_base: std::ptr::without_provenance_mut((address + done as u64) as usize),
                iov_len: rest.len(),
            };
            // SAFETY: the kernel writes to `rest` alone, which is borrowed exclusively, and at most its length; it
            // checks the other process's addresses itself.
            let read = unsafe { libc::process_vm_readv(self.pid, &to, 1, &from, 1, 0) };
            match usize::try_from(read) {
                Ok(read) if read > 0 => done += read,
                _ => break,
            }
        }
        done
    }
}

/// Pages in a row that a process has for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// The pages that a process has for itself now and that hold something, in order of their addresses: those of files
/// and of zeros that it has never written are none. What could be kept from being read by anybody but the kernel, such
/// as memory that the process itself brings in when it is touched, is left out.
///
/// # Errors
/// The process has ended, must not be looked at, or the kernel cannot tell (before Linux 6.7).
pub(crate) fn private_runs(pid: i32) -> io::Result<Vec<Run>> {
    let maps = std::fs::read(format!("/proc/{pid}/smaps"))?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut runs = Vec::new();
    for (start, end) in private_mappings(&maps) {
        scan(&pagemap, start, end, &mut runs)?;
    }
    Ok(runs)
}

/// The mappings in a file `smaps` that are of the process alone and can be read safely.
fn private_mappings(smaps: &[u8]) -> Vec<(u64, u64)> {
    let text = String::from_utf8_lossy(smaps);
    let mut found = Vec::new();
    let mut current = None;
    for line in text.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            // Of devices, of pages without a frame of their own, and with a userfaultfd.
            let unsafe_flags = ["io", "pf", "um", "uw", "ui"];
            let is_safe = !flags.split_whitespace().any(|flag| unsafe_flags.contains(&flag));
            found.extend(current.take().filter(|_| is_safe));
        } else if let Some(mapping) = header(line) {
            current = mapping;
        }
    }
    found
}

/// The mapping that a line begins, if it begins one; nothing of it if it is not of the process alone.
fn header(line: &str) -> Option<Option<(u64, u64)>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let (start, end) = (number(start)?, number(end)?);
    let is_private = words.next()?.as_bytes().get(3) == Some(&b'p');
    let is_kernels = words.nth(3).is_some_and(|name| name.starts_with("[v"));
    Some((is_private && !is_kernels && start < end).then_some((start, end)))
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    /// Where the kernel has stopped.
    walk_end: u64,
    regions: u64,
    regions_len: u64,
    max_pages: u64,
    inverted: u64,
    mask: u64,
    any_of: u64,
    returned: u64,
}

/// `PAGEMAP_SCAN`.
const PAGEMAP_SCAN: Opcode = opcode::read_write::<Scan>(b'f', 16);
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;
const IS_ZERO: u64 = 1 << 5;

/// Adds what a mapping has to the runs.
fn scan(pagemap: &File, start: u64, end: u64, runs: &mut Vec<Run>) -> io::Result<()> {
    let mut at = start;
    while at < end {
        // What the kernel does not fill in stays empty.
        let mut regions = [Region::default(); 512];
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            start: at,
            end,
            regions: regions.as_mut_ptr().expose_provenance() as u64,
            regions_len: regions.len() as u64,
            inverted: IS_FILE | IS_ZERO,
            mask: IS_FILE | IS_ZERO,
            any_of: IS_PRESENT | IS_SWAPPED,
            returned: IS_PRESENT,
            ..Scan::default()
        };
        // SAFETY: the request is the kernel's for this structure, and the kernel writes at most `regions_len` regions
        // to where they are, which nobody else refers to meanwhile.
        unsafe { ioctl(pagemap.as_fd(), Updater::<PAGEMAP_SCAN, Scan>::new(&mut scan)) }?;
        for region in regions.iter().take_while(|region| region.end > region.start) {
            let (address, len) = (region.start, region.end - region.start);
            match runs.last_mut().filter(|last| last.address + last.len == address) {
                Some(last) => last.len += len,
                None => runs.push(Run { address, len }),
            }
        }
        if scan.walk_end <= at {
            return Err(io::Error::other("the kernel does not get on"));
        }
        at = scan.walk_end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 4096;

    #[test]
    fn mappings_of_the_process_alone_are_told_from_others() {
        let smaps = b"00400000-00401000 r-xp 00000000 08:01 12 /bin/cat file\nSize: 4 kB\n\
            VmFlags: rd ex mr mw me\n\
            00500000-00600000 rw-s 00000000 00:01 99 /dev/zero (deleted)\nVmFlags: rd wr sh\n\
            7f0000000000-7f0000002000 rw-p 00000000 00:00 0 \nRss: 8 kB\nVmFlags: rd wr mr ac\n\
            7f0000004000-7f0000005000 rw-p 00000000 00:00 0 \nVmFlags: rd wr um ac\n\
            7f0000006000-7f0000007000 rw-p 00000000 00:05 3 /dev/nvidia0\nVmFlags: rd wr io dd\n\
            7fff00000000-7fff00001000 r--p 00000000 00:00 0 [vvar]\nVmFlags: rd mr pf de dd\n\
            7fff00001000-7fff00002000 r-xp 00000000 00:00 0 [vdso]\nVmFlags: rd ex mr\n";
        let expected = [(0x40_0000, 0x40_1000), (0x7f00_0000_0000, 0x7f00_0000_2000)];
        assert_eq!(private_mappings(smaps), expected);
    }

    #[test]
    fn pages_that_were_written_are_found_and_read() {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let pages = 64;
        // SAFETY: a new mapping, anywhere.
        let memory =
            unsafe { libc::mmap(std::ptr::null_mut(), pages * PAGE, access, flags, -1, 0) };
        // SAFETY: no large page is to hold what was not written.
        unsafe { libc::madvise(memory, pages * PAGE, libc::MADV_NOHUGEPAGE) };
        let memory: *mut u8 = memory.cast();
        for page in [0, 1, 2, 10, 63] {
            // SAFETY: within the mapping.
            unsafe { memory.add(page * PAGE).write_volatile(page as u8 + 1) };
        }
        // SAFETY: within the mapping; a page that is read only is one of zeros.
        unsafe { memory.add(20 * PAGE).read_volatile() };
        let pid = std::process::id() as i32;
        let (from, to) = (memory.expose_provenance() as u64, (pages * PAGE) as u64);
        let runs = match private_runs(pid) {
            // A kernel before Linux 6.7.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => return,
            runs => runs.unwrap(),
        };
        let within = |run: &&Run| run.address >= from && run.address < from + to;
        let found: Vec<(u64, u64)> = runs
            .iter()
            .filter(within)
            .map(|run| ((run.address - from) / 4096, run.len / 4096))
            .collect();
        // The next mapping may follow at once.
        assert_eq!(found[..2], [(0, 3), (10, 1)]);
        assert_eq!(found.last().unwrap().0, 63);
        let process = ProcessMemory::open(pid).unwrap();
        let mut bytes = vec![0; 12 * PAGE];
        process.read(&mut bytes, from).unwrap();
        let firsts: Vec<u8> = bytes.chunks(PAGE).map(|page| page[0]).collect();
        assert_eq!(firsts, [1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 11, 0]);
        // SAFETY: the mapping is this test's.
        unsafe { libc::munmap(memory.cast(), pages * PAGE) };
        assert_eq!(process.read_permitted(&mut bytes, from), 0);
        let error = process.read(&mut bytes, from).unwrap_err().to_string();
        assert!(error.contains(&format!("{from:#x}")), "{error}");
    }
}
