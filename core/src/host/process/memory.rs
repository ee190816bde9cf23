//! The memory of processes, read from outside.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

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

    pub(crate) fn pid(&self) -> u32 {
        self.pid as u32
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

/// Where memory of a process lies in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Where it begins in the file.
    pub(crate) at: u64,
    /// Where it begins in the memory of the process.
    pub(crate) address: u64,
    /// Bytes.
    pub(crate) len: u64,
}

impl Place {
    /// Where it ends in the memory of the process.
    pub(crate) fn end(&self) -> u64 {
        self.address + self.len
    }
}

#[cfg(test)]
mod tests {
    use super::super::pagemap::{Run, private_runs};
    use super::*;

    const PAGE: usize = 4096;

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
