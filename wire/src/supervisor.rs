//! What a program says to the `gpucr run` that watches over it, and its answers; and what a gpucr says that ends the
//! program.
//!
//! That process listens on an abstract socket whose name is random, and in the environment of the program
//! ([`ENV_SUPERVISOR`]). A process of the program that has something to say connects, sends one request, gets one reply, and the connection ends:
//! nobody is connected to the outside for long, since CRIU could not save that. The shim does so inside the gate, so
//! that no connection is there when a program stands still for a dump.

use crate::codec::Stream;
use crate::wire_enum;

/// Environment variable with the name (without the leading NUL) of the abstract socket.
pub const ENV_SUPERVISOR: &str = "GPUCR_SUPERVISOR";

/// What these names begin with.
pub const SUPERVISOR: &str = "gpucr-run";

/// Bytes of the longest request, and of the longest reply.
pub const LONGEST: u32 = 1024;

/// Bytes of the longest reason that a reply has room for.
pub const LONGEST_REASON: usize = 512;

/// What `gpucr_checkpoint` gives back. These are the numbers of `gpucr.h`.
pub mod code {
    /// There is an image, and the program has gone on.
    pub const SAVED: i32 = 0;
    /// The program was restored from an image that was made during the call.
    pub const RESTORED: i32 = 1;
    /// Nobody watches over the program, or does so any more.
    pub const NOT_WATCHED: i32 = -1;
    /// The process does not use CUDA yet, or not under gpucr.
    pub const NO_CUDA: i32 = -2;
    /// The thread has a stream capture under way.
    pub const CAPTURING: i32 = -3;
    /// This cannot be the name of an image.
    pub const BAD_NAME: i32 = -4;
    /// The store has an image of that name.
    pub const TAKEN: i32 = -5;
    /// Too much was asked for at the same time.
    pub const BUSY: i32 = -6;
    /// The dump has failed, and the program runs on.
    pub const NOT_SAVED: i32 = -7;
    /// The program was asked to end, and is not saved any more.
    pub const ENDING: i32 = -8;
}

/// A name that nobody can take beforehand.
///
/// # Errors
/// The kernel has no random numbers.
pub fn supervisor_socket() -> std::io::Result<String> {
    let mut random = [0; 16];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!("{SUPERVISOR}-{:032x}", u128::from_ne_bytes(random)))
}

/// A second name of a `gpucr run`, by which a gpucr finds it that knows its pid: the pid is the one that it sees itself,
/// in the pid namespace of that number. Whoever connects looks whether the listener is that process.
pub fn supervisor_socket_of(namespace: u64, pid: u32) -> String {
    format!("{SUPERVISOR}-{namespace}-{pid}")
}

/// Whether a process could have been given this name: what stands in an environment may be anything.
pub fn is_supervisor(name: &str) -> bool {
    let random = name.strip_prefix(SUPERVISOR).and_then(|rest| rest.strip_prefix('-'));
    random.is_some_and(|random| {
        random.len() == 32 && random.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

wire_enum! {
    /// From a process of the program, or from a gpucr that is about to end it.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum SupervisorRequest {
        /// A context is broken for good: each call gives this error from now on.
        0 => Broken {
            /// The driver's error.
            code: u32,
        },
        /// From a gpucr: a dump of the program, or of a part of it, begins that ends it, if all goes well. What comes of it
        /// is said on the same connection. If that ends before, nobody knows.
        1 => Ending {
            /// The pid namespace of its root.
            namespace: u64,
            /// The root's pid there.
            pid: u32,
        },
        /// The second request on that connection: the program was saved, and has been ended.
        2 => Ended {},
        /// The same: the program was not saved. If it has ended, it did so by itself.
        3 => NotEnded {},
        /// From a process of the program: save the program, and let it run on.
        4 => Save {
            /// The name of the image; an empty one is made up.
            name: String,
        },
        /// What has become of that?
        5 => Ask {
            /// From the answer to `Save`.
            ticket: u64,
        },
    }
}

wire_enum! {
    /// The answer to a [`SupervisorRequest`].
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum SupervisorReply {
        /// It was noted.
        0 => Noted {},
        /// To `Save`: it will be done. Others may have the same ticket.
        1 => Accepted {
            /// Names it.
            ticket: u64,
        },
        /// To `Ask`: it is not done yet.
        2 => Pending {},
        /// To `Ask`: there is an image.
        3 => Saved {},
        /// To `Save` and `Ask`: there is none. To `Ending`: it is another program.
        4 => Refused {
            /// One of [`code`]'s numbers.
            code: i32,
            /// Why, for people.
            why: String,
        },
    }
}

impl Stream for SupervisorRequest {}
impl Stream for SupervisorReply {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        for request in [
            SupervisorRequest::Broken { code: 700 },
            SupervisorRequest::Ending { namespace: 4_026_531_836, pid: 7 },
            SupervisorRequest::Save { name: "step-7".into() },
            SupervisorRequest::Ask { ticket: u64::MAX },
        ] {
            assert_eq!(SupervisorRequest::from_bytes(&request.to_bytes()), Ok(request));
        }
        let why = "w".repeat(LONGEST_REASON);
        for reply in [
            SupervisorReply::Noted {},
            SupervisorReply::Accepted { ticket: 7 },
            SupervisorReply::Refused { code: code::NOT_SAVED, why },
        ] {
            let bytes = reply.to_bytes();
            assert!(bytes.len() <= LONGEST as usize);
            assert_eq!(SupervisorReply::from_bytes(&bytes), Ok(reply));
        }
    }

    #[test]
    fn names_are_not_alike() {
        let (one, other) = (supervisor_socket().unwrap(), supervisor_socket().unwrap());
        assert!(is_supervisor(&one) && is_supervisor(&other), "{one} {other}");
        assert!(!is_supervisor(SUPERVISOR) && !is_supervisor(&one[1..]) && !is_supervisor(""));
        assert_ne!(one, other);
    }
}
