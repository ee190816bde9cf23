//! The tree of processes, as CRIU lists it in `pstree.img` (CRIU's `pstree.proto`).

use prost::Message;

use super::pages::messages;

/// Name of the file.
pub(crate) const PROCESS_TREE: &str = "pstree.img";
/// The numbers of CRIU's images and of this one.
const MAGIC: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x30, 0x30, 0x27, 0x50];

/// A process, as far as it matters here.
#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(uint32, required, tag = "1")]
    pid: u32,
    #[prost(uint32, required, tag = "4")]
    session: u32,
}

/// Whether a process leads its session. `None` if the file does not list it, or is not what is expected.
pub(crate) fn leads_its_session(tree: &[u8], pid: u32) -> Option<bool> {
    let all: Vec<Entry> = messages(tree.strip_prefix(&MAGIC)?)?;
    all.iter().find(|entry| entry.pid == pid).map(|entry| entry.session == pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_leads_a_session_is_found() {
        let mut tree = MAGIC.to_vec();
        for (pid, session) in [(40, 7), (41, 41)] {
            let message = Entry { pid, session }.encode_to_vec();
            tree.extend((message.len() as u32).to_le_bytes());
            tree.extend(message);
        }
        let leads = |pid| leads_its_session(&tree, pid);
        assert_eq!([leads(40), leads(41), leads(42)], [Some(false), Some(true), None]);
        assert_eq!(leads_its_session(&tree[..tree.len() - 1], 40), None);
        assert_eq!(leads_its_session(&tree[1..], 40), None);
    }
}
