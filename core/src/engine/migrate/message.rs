//! What the two sides of a migration say to each other: `docs/migration.md` has the order of it.
//!
//! A frame is a 32-bit little-endian length, a byte that says what it is, and the rest. The other side may be anybody:
//! every length is bounded before memory is taken for it, and every value is checked.

use gpucr_wire::{Stream, wire_enum, wire_struct};

use crate::store::{ChunkId, Encoding, Entry, MAX_CHUNK};

/// Version of the protocol. Both sides must have the same.
pub(super) const PROTOCOL: u32 = 12;
/// Most bytes of a message.
const MAX_MESSAGE: usize = 1 << 20;
/// Most bytes of a piece.
pub(super) const MAX_PIECE: usize = 1 << 20;
/// Most chunks in one question.
pub(super) const MAX_ASKED: usize = 8192;
/// Most bytes of a standard stream in one message.
pub(super) const MAX_PART: usize = 1 << 16;
/// Most blocks of device memory that are told of: what is not is loaded when the image is there.
pub(super) const MAX_BLOCKS: usize = 16384;
/// Bytes of what comes before the stored bytes of a chunk: address, encoding, both lengths, check.
const CHUNK_HEAD: usize = 32 + 2 + 4 + 4 + 8;
/// Bytes of a frame before those of its chunk, if it has one.
pub(super) const CHUNK_BEGIN: usize = 1 + CHUNK_HEAD;
/// Most bytes of a frame behind its length.
pub(super) const MAX_FRAME: usize = CHUNK_BEGIN + MAX_CHUNK;

const MESSAGE: u8 = 0;
const PIECE: u8 = 1;
const CHUNK: u8 = 2;

wire_enum! {
    /// A message of either side.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub(super) enum Message {
        /// The first one of each side, the source's first. It has this form in all versions of the protocol.
        0 => Hello {
            /// [`PROTOCOL`].
            protocol: u32,
            /// gpucr's version, as shown.
            gpucr: String,
            /// The newest version of a manifest that is understood.
            manifest: u32,
        },
        /// From the source, after the pieces of an outline: the manifest without memory and files.
        1 => Offer {
            /// Names the migration.
            id: [u8; 16],
            /// Nothing follows but the answer.
            dry_run: bool,
            /// The pid namespace of the program, where it is on which host.
            pids: String,
            /// The same of its network.
            network: String,
            /// Version of the outline.
            version: u32,
            /// What the processor can do, as `/proc/cpuinfo` names it.
            cpu: String,
            /// Who has signed [`offered`] of this offer.
            signatures: String,
            /// So many streams are wanted.
            streams: u32,
            /// Bytes of private memory that its processes have.
            host_memory: u64,
            /// It is to go on though there may be too little space for its image.
            tight_disk: bool,
            /// Which of its standard streams are relayed, see [`Relayed`](super::relayed::Relayed).
            relay: u32,
            /// Whether the program leads its session.
            leads: bool,
        },
        /// To the offer: the program can go on there.
        2 => Accept {
            /// Of each file that is offered to go along, whether it is there.
            there: Vec<bool>,
            /// Where the streams go that were wanted: the port, what is said there, and the public key of who is there.
            port: u32,
            /// The same.
            token: [u8; 32],
            /// The same.
            key: Vec<u8>,
            /// Which of its outputs, if they are pipes, go to files there: a bit for the number of each.
            outputs: u32,
        },
        /// To the offer: it cannot, and this is all that is in the way.
        3 => Refuse {
            /// What is lacking.
            reasons: Vec<String>,
        },
        /// From the source: which of these chunks are lacking?
        4 => Ask {
            /// At most [`MAX_ASKED`].
            ids: Vec<[u8; 32]>,
        },
        /// For each of them, whether it is to be sent.
        5 => Want {
            /// As many as were asked for.
            wanted: Vec<bool>,
        },
        /// From the source, after all chunks and the pieces of the manifest: that is the image.
        6 => Manifest {
            /// Its identity.
            id: [u8; 32],
            /// Version of the manifest.
            version: u32,
            /// Who has signed it.
            signatures: String,
        },
        /// To that: the image is complete there, and durable, and the program can go on from it.
        7 => Prepared {
            /// Where it is.
            image: String,
            /// Whether its processes are there and wait: then they need nothing of what those of the source have.
            waits: bool,
        },
        /// From the source: it has decided. The program exists there no more; if it waits at the destination, its
        /// processes may be about to end, but do not run.
        8 => Commit {},
        /// To that: the program runs.
        9 => Running {
            /// Its pid there.
            pid: u32,
            /// What was done there when.
            steps: Vec<Step>,
        },
        /// Instead of `Prepared` or `Running`.
        10 => Failed {
            /// What went wrong.
            why: String,
        },
        /// From the source, before its decision: the program stays there.
        11 => Abort {
            /// Why.
            why: String,
        },
        /// Nothing but a sign of life.
        12 => Alive {},
        /// From the source, before chunks: these are the blocks of device memory now. A guess, which the manifest
        /// replaces.
        13 => Layout {
            /// At most [`MAX_BLOCKS`].
            blocks: Vec<LaidOut>,
        },
        /// From the source, after a layout: what is in a block, as far as that is known.
        14 => Contents {
            /// Its number in the layout.
            block: u32,
            /// The chunk with which that begins.
            first: u32,
            /// At most [`MAX_ASKED`] chunks from there on.
            ids: Vec<[u8; 32]>,
        },
        /// From the source, before it asks for nothing: so many chunks went over streams, all of which have to be there for
        /// the answer.
        15 => Sent {
            /// Since the begin.
            chunks: u64,
        },
        /// From either side, when the program runs and its standard streams are relayed: what goes through one of them.
        16 => Bytes {
            /// Its number.
            stream: u32,
            /// 1 to [`MAX_PART`] of them.
            bytes: Vec<u8>,
        },
        /// To that: so many bytes of the stream were written to where they belong.
        17 => Taken {
            /// Its number.
            stream: u32,
            /// Since the last such message.
            bytes: u32,
        },
        /// From who sends the bytes of a stream: these were all. From who gets them: nobody reads them any more.
        18 => Closed {
            /// Its number.
            stream: u32,
        },
        /// From the destination, when all streams that it sends are closed: the program has ended.
        19 => Ended {
            /// Whether it is known how.
            is_known: bool,
            /// The signal that has ended it, or 0.
            signal: u32,
            /// Its exit code.
            code: u32,
        },
        /// To that: all was written to where it belongs.
        20 => Heard {},
    }
}

impl Stream for Message {}

wire_struct! {
    /// A block of device memory.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub(super) struct LaidOut {
        /// Pid of its process.
        pub(super) process: u32,
        /// The agent's name for it.
        pub(super) id: u64,
        /// UUID of its device.
        pub(super) device: [u8; 16],
        /// Bytes.
        pub(super) size: u64,
    }
}

wire_struct! {
    /// Something that the destination did.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub(super) struct Step {
        /// The phase.
        pub(super) name: String,
        /// Whether that was in the restore.
        pub(super) restores: bool,
        /// How long before this message it began, microseconds.
        pub(super) ago: u64,
        /// How long it lasted, microseconds.
        pub(super) length: u64,
    }
}

/// What is signed of the offer with this name and outline.
pub(super) fn offered(id: &[u8; 16], version: u32, outline: &[u8]) -> [u8; 32] {
    ChunkId::of(&[&id[..], &version.to_le_bytes(), outline].concat()).0
}

/// More steps of the destination than these are not drawn.
pub(super) const MAX_STEPS: usize = 64;

impl Message {
    /// Its name, for errors and for `GPUCR_FAULT`.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Hello { .. } => "hello",
            Self::Offer { .. } => "offer",
            Self::Accept { .. } => "accept",
            Self::Refuse { .. } => "refuse",
            Self::Ask { .. } => "ask",
            Self::Want { .. } => "want",
            Self::Manifest { .. } => "manifest",
            Self::Prepared { .. } => "prepared",
            Self::Commit {} => "commit",
            Self::Running { .. } => "running",
            Self::Failed { .. } => "failed",
            Self::Abort { .. } => "abort",
            Self::Alive {} => "alive",
            Self::Layout { .. } => "layout",
            Self::Contents { .. } => "contents",
            Self::Sent { .. } => "sent",
            Self::Bytes { .. } => "bytes",
            Self::Taken { .. } => "taken",
            Self::Closed { .. } => "closed",
            Self::Ended { .. } => "ended",
            Self::Heard {} => "heard",
        }
    }
}

/// What a frame has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    Message(Message),
    /// A part of something long that the next message is about.
    Piece(Vec<u8>),
    /// A chunk as it is stored.
    Chunk(Entry, Vec<u8>),
}

impl Frame {
    /// Its name in errors.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Message(message) => message.name(),
            Self::Piece(_) => "piece",
            Self::Chunk(..) => "chunk",
        }
    }

    /// The whole frame of a message.
    ///
    /// # Errors
    /// It is too long to be sent.
    pub(super) fn of_message(message: &Message) -> Result<Vec<u8>, &'static str> {
        let body = message.to_bytes();
        if body.len() > MAX_MESSAGE {
            Err("a message is too long")
        } else {
            Ok(framed(MESSAGE, &[&body]))
        }
    }

    /// The whole frame of at most [`MAX_PIECE`] bytes.
    pub(super) fn of_piece(bytes: &[u8]) -> Vec<u8> {
        framed(PIECE, &[bytes])
    }

    /// The whole frame of a chunk.
    pub(super) fn of_chunk(entry: &Entry, stored: &[u8]) -> Vec<u8> {
        let head = [
            &entry.id.0[..],
            &entry.encoding.to_bytes(),
            &entry.stored_len.to_le_bytes(),
            &entry.plain_len.to_le_bytes(),
            &entry.check.to_le_bytes(),
        ];
        framed(CHUNK, &[&head.concat(), stored])
    }

    /// Whether a frame that begins so has a chunk: with its kind and all that comes before its bytes.
    pub(super) fn has_chunk(begin: &[u8]) -> bool {
        begin.len() == CHUNK_BEGIN && begin[0] == CHUNK
    }

    /// A frame that [has a chunk](Self::has_chunk), and the chunk's bytes; any are safe.
    ///
    /// # Errors
    /// It is no frame.
    pub(super) fn with_chunk(begin: &[u8], stored: Vec<u8>) -> Result<Self, &'static str> {
        let entry = entry(&begin[1..]).ok_or("a chunk is of an unknown form")?;
        if entry.stored_len as usize != stored.len() || entry.plain_len as usize > MAX_CHUNK {
            return Err("a chunk has an impossible length");
        }
        Ok(Self::Chunk(entry, stored))
    }

    /// Reads what follows the length of any other frame; any bytes are safe.
    ///
    /// # Errors
    /// It is no frame.
    pub(super) fn decode(mut body: Vec<u8>) -> Result<Self, &'static str> {
        let (kind, rest) = body.split_first().ok_or("a frame is empty")?;
        match *kind {
            MESSAGE if rest.len() <= MAX_MESSAGE => {
                let mut message = Message::from_bytes(rest).map_err(|error| error.0)?;
                message.cut_texts();
                Ok(Self::Message(message))
            }
            PIECE if rest.len() <= MAX_PIECE => {
                body.drain(..1);
                Ok(Self::Piece(body))
            }
            CHUNK => Err("a chunk is too short"),
            _ => Err("a frame is of an unknown kind, or too long"),
        }
    }
}

/// What the head of a chunk says.
fn entry(head: &[u8]) -> Option<Entry> {
    let (id, rest) = head.split_first_chunk::<32>()?;
    let (encoding, rest) = rest.split_first_chunk::<2>()?;
    let (stored, rest) = rest.split_first_chunk::<4>()?;
    let (plain, rest) = rest.split_first_chunk::<4>()?;
    let (check, _) = rest.split_first_chunk::<8>()?;
    Some(Entry {
        id: ChunkId(*id),
        encoding: Encoding::from_bytes(*encoding)?,
        pack: 0,
        offset: 0,
        stored_len: u32::from_le_bytes(*stored),
        plain_len: u32::from_le_bytes(*plain),
        check: u64::from_le_bytes(*check),
    })
}

fn framed(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut frame = Vec::with_capacity(4 + 1 + len);
    frame.extend_from_slice(&(1 + len as u32).to_le_bytes());
    frame.push(kind);
    parts.iter().for_each(|part| frame.extend_from_slice(part));
    frame
}

impl Message {
    /// Cuts what the other side has to say to people.
    fn cut_texts(&mut self) {
        match self {
            Self::Refuse { reasons } => cut_reasons(reasons),
            Self::Failed { why } | Self::Abort { why } => cut(why, MAX_REASONS.1),
            Self::Hello { gpucr, .. } => cut(gpucr, MAX_VERSION),
            _ => {}
        }
    }
}

/// Most bytes of a version of gpucr.
const MAX_VERSION: usize = 40;
/// Most reasons that are told, and most bytes of each.
const MAX_REASONS: (usize, usize) = (100, 2000);

/// Cuts what is said against an offer: by who says it, and by who hears it.
pub(super) fn cut_reasons(reasons: &mut Vec<String>) {
    let (most, longest) = MAX_REASONS;
    reasons.truncate(most);
    reasons.iter_mut().for_each(|reason| cut(reason, longest));
}

/// Cuts a text to so many bytes.
fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Compression, Encoder};
    use proptest::prelude::*;

    #[test]
    fn what_is_written_is_read() {
        let messages = [
            Message::Hello { protocol: 1, gpucr: "0.1".into(), manifest: 2 },
            Message::Offer {
                id: [3; 16],
                dry_run: true,
                pids: "x".into(),
                network: "y".into(),
                version: 1,
                cpu: "fpu".into(),
                signatures: String::new(),
                streams: 4,
                host_memory: 5 << 30,
                tight_disk: true,
                relay: 11,
                leads: true,
            },
            Message::Ask { ids: vec![[7; 32]; 3] },
            Message::Want { wanted: vec![true, false] },
            Message::Running {
                pid: 7,
                steps: vec![Step { name: "x".into(), restores: true, ago: 9, length: 2 }],
            },
            Message::Bytes { stream: 1, bytes: vec![7; MAX_PART] },
            Message::Ended { is_known: true, signal: 0, code: 3 },
        ];
        for message in messages {
            let frame = Frame::of_message(&message).unwrap();
            let len = u32::from_le_bytes(frame[..4].try_into().unwrap()) as usize;
            assert_eq!(len, frame.len() - 4);
            assert_eq!(Frame::decode(frame[4..].to_vec()), Ok(Frame::Message(message)));
        }
        let piece = Frame::of_piece(&[1, 2]);
        assert_eq!(Frame::decode(piece[4..].to_vec()), Ok(Frame::Piece(vec![1, 2])));
        let most = Message::Ask { ids: vec![[1; 32]; MAX_ASKED] };
        assert!(Frame::of_message(&most).is_ok(), "the longest question fits");
        let block = LaidOut { process: 1, id: 2, device: [3; 16], size: 4 };
        let most = Message::Layout { blocks: vec![block; MAX_BLOCKS] };
        assert!(Frame::of_message(&most).is_ok(), "the longest layout fits");
        let most = Message::Contents { block: 1, first: 2, ids: vec![[1; 32]; MAX_ASKED] };
        assert!(Frame::of_message(&most).is_ok(), "the most contents fit");
    }

    /// What comes as a chunk, which has at least its begin.
    fn chunk(frame: &[u8]) -> Result<Frame, &'static str> {
        assert!(Frame::has_chunk(&frame[..CHUNK_BEGIN]));
        Frame::with_chunk(&frame[..CHUNK_BEGIN], frame[CHUNK_BEGIN..].to_vec())
    }

    #[test]
    fn a_chunk_that_is_larger_than_a_chunk_can_be_is_none() {
        let mut encoder = Encoder::new(Compression::None);
        let plain = vec![1, 2, 3];
        let encoded = encoder.encode(&plain);
        let entry = |plain_len| Entry {
            id: ChunkId::of(&plain),
            encoding: encoded.encoding,
            pack: 0,
            offset: 0,
            stored_len: 3,
            plain_len,
            check: encoded.check,
        };
        let frame = Frame::of_chunk(&entry(3), &plain);
        assert_eq!(chunk(&frame[4..]), Ok(Frame::Chunk(entry(3), plain.clone())));
        let large = Frame::of_chunk(&entry(MAX_CHUNK as u32 + 1), &plain);
        assert!(chunk(&large[4..]).is_err());
        assert!(chunk(&frame[4..frame.len() - 1]).is_err(), "it is cut");
        assert!(Frame::decode(frame[4..CHUNK_BEGIN].to_vec()).is_err(), "it ends too early");
    }

    #[test]
    fn what_is_told_to_people_is_cut() {
        let long = || "ä".repeat(2000);
        let received = |message: Message| {
            let decoded = Frame::decode([&[MESSAGE][..], &message.to_bytes()].concat());
            let Ok(Frame::Message(message)) = decoded else { panic!("a message") };
            message
        };
        let whys = [Message::Failed { why: long() }, Message::Abort { why: long() }];
        for message in whys {
            let (Message::Failed { why } | Message::Abort { why }) = received(message) else {
                panic!("as it was sent")
            };
            assert!(why.len() == MAX_REASONS.1 && why.starts_with('ä'));
        }
        let reasons = vec!["ä".repeat(1500); 101];
        let Message::Refuse { reasons } = received(Message::Refuse { reasons }) else { panic!() };
        assert!(reasons.len() == MAX_REASONS.0 && reasons.iter().all(|r| r.len() == 2000));
        let hello = Message::Hello { protocol: 1, gpucr: long(), manifest: 2 };
        let Message::Hello { gpucr, .. } = received(hello) else { panic!("as it was sent") };
        assert_eq!(gpucr.len(), MAX_VERSION);
    }

    proptest! {
        #[test]
        fn any_bytes_are_safe(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), is_chunk: bool) {
            bytes.iter_mut().take(usize::from(is_chunk)).for_each(|kind| *kind = CHUNK);
            let _ = Frame::decode(bytes.clone());
            let has_chunk = bytes.len() >= CHUNK_BEGIN && Frame::has_chunk(&bytes[..CHUNK_BEGIN]);
            if has_chunk && let Ok(Frame::Chunk(entry, stored)) = chunk(&bytes) {
                prop_assert_eq!(entry.stored_len as usize, stored.len());
            }
        }
    }
}
