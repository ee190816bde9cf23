//! Chunks on their way to the other side.

use super::*;
use crate::engine::migrate::message::Frame;
use rayon::prelude::*;
use std::collections::HashSet;
use std::os::unix::net::UnixStream;

fn link(socket: UnixStream) -> Arc<Link> {
    let reader = socket.try_clone().unwrap().into();
    let silence = Duration::from_secs(60);
    Arc::new(Link::new(reader, socket.into(), silence, Arc::default()).unwrap())
}

/// A destination that has every third chunk, and takes so many others; it gives what came.
fn destination(link: Arc<Link>, most: usize) -> std::thread::JoinHandle<HashSet<ChunkId>> {
    std::thread::spawn(move || {
        link.receive_message().unwrap();
        link.send(&hello()).unwrap();
        let mut came = HashSet::new();
        while came.len() < most {
            match link.receive() {
                Ok(Frame::Message(Message::Ask { ids })) => {
                    let wanted = ids.iter().map(|id| id[0] % 3 != 0).collect();
                    link.send(&Message::Want { wanted }).unwrap();
                }
                Ok(Frame::Chunk(entry, stored)) => {
                    let mut plain = Vec::new();
                    crate::store::decode_stored(&entry, &stored, &mut plain).unwrap();
                    assert!(came.insert(entry.id), "twice");
                }
                Ok(frame) => panic!("{}", frame.name()),
                Err(_) => break,
            }
        }
        came
    })
}

fn chunks() -> Vec<Vec<u8>> {
    (0..2000u32).map(|number| number.to_le_bytes().repeat(300)).collect()
}

fn greeted(most: usize) -> (Outgoing, std::thread::JoinHandle<HashSet<ChunkId>>) {
    let (a, b) = UnixStream::pair().unwrap();
    let there = destination(link(b), most);
    let terms = Terms {
        compression: Compression::Level(1),
        max_stopped: Duration::from_secs(60),
        patience: Duration::ZERO,
        goal: None,
        streams: None,
        copies_files: false,
        tight_disk: false,
        relays: false,
    };
    let outgoing = Outgoing::greet(link(a), terms, None);
    (outgoing.unwrap(), there)
}

/// As many wait for a place in the queue as there are threads.
#[test]
fn what_is_put_on_all_threads_at_once_goes_out_once_and_only_if_it_is_lacking() {
    let (outgoing, there) = greeted(usize::MAX);
    let chunks = chunks();
    let ids: HashSet<ChunkId> = chunks
        .par_iter()
        .chain(&chunks)
        .map(|chunk| outgoing.put_hashed(ChunkId::of(chunk), chunk).unwrap())
        .collect();
    outgoing.flush().unwrap();
    let (sent, had) = outgoing.chunks();
    assert_eq!((sent + had) as usize, ids.len());
    drop(outgoing);
    let came = there.join().unwrap();
    assert_eq!(came.len() as u64, sent);
    assert!(ids.iter().all(|id| came.contains(id) == (id.0[0] % 3 != 0)));
}

#[test]
fn chunks_that_the_other_side_has_need_not_be_put() {
    let (outgoing, _there) = greeted(usize::MAX);
    let ids: Vec<ChunkId> = chunks().iter().map(|chunk| ChunkId::of(chunk)).collect();
    outgoing.expect(&mut ids.iter().copied());
    assert!(ids.iter().all(|id| outgoing.contains(id) == (id.0[0] % 3 == 0)));
}

#[test]
fn a_link_that_is_lost_ends_everything_that_waits() {
    let (outgoing, there) = greeted(10);
    let put = |chunk: &Vec<u8>| outgoing.put_hashed(ChunkId::of(chunk), chunk).map(drop);
    let put: Result<(), StoreError> = chunks().par_iter().map(put).collect();
    let ended = put.and_then(|()| outgoing.flush());
    assert!(matches!(ended, Err(StoreError::NotTaken { .. })), "{ended:?}");
    outgoing.expect(&mut std::iter::once(ChunkId::of(b"another")));
    assert!(outgoing.flush().is_err());
    assert_eq!(there.join().unwrap().len(), 10);
}
