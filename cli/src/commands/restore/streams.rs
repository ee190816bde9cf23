//! What a program gets as standard streams from the gpucr that has started the restore: `--streams IN,OUT,ERR`.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::str::FromStr;
use std::sync::Arc;

use crate::inherited::{self, let_through};
use gpucr_core::restore::Outputs;

/// Numbers of descriptors, each of one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Streams(pub(crate) [Option<i32>; 3]);

impl FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |word: &str| match word {
            "" => Ok(None),
            word => word.parse().ok().filter(|fd| *fd > 2).map(Some).ok_or("it is no descriptor"),
        };
        let words: Vec<&str> = text.split(',').collect();
        let [input, output, error] = words[..] else { return Err("there are three".into()) };
        let streams = [number(input)?, number(output)?, number(error)?];
        let mut named: Vec<i32> = streams.iter().flatten().copied().collect();
        named.sort_unstable();
        // Each is taken over as the only owner of that descriptor.
        match named.windows(2).all(|two| two[0] != two[1]) {
            true => Ok(Self(streams)),
            false => Err("each needs a descriptor of its own".into()),
        }
    }
}

impl std::fmt::Display for Streams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let words = self.0.map(|fd| fd.map_or_else(String::new, |fd| fd.to_string()));
        f.write_str(&words.join(","))
    }
}

impl Streams {
    /// Takes the descriptors over. This can be done once.
    ///
    /// # Errors
    /// One is not open.
    pub(super) fn take(&self) -> io::Result<Outputs> {
        let take = |fd: Option<i32>| -> io::Result<Option<Arc<File>>> {
            Ok(fd.map(inherited::take).transpose()?.map(|fd| Arc::new(File::from(fd))))
        };
        let [stdin, stdout, stderr] = self.0;
        let (stdin, stdout, stderr) = (take(stdin)?, take(stdout)?, take(stderr)?);
        Ok(Outputs { stdin, stdout, stderr, stands_in: true })
    }
}

/// Has a restore, which is to be started now, give the program these as standard streams in the place of pipes. They have
/// to be open until it has started.
pub(crate) fn give(command: &mut Command, streams: [Option<&OwnedFd>; 3]) {
    let numbers = Streams(streams.map(|stream| stream.map(AsRawFd::as_raw_fd)));
    command.args(["--streams", &numbers.to_string()]);
    let_through(command, &streams.into_iter().flatten().collect::<Vec<&OwnedFd>>());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_read_as_they_are_written() {
        let streams = Streams([Some(7), None, Some(9)]);
        assert_eq!(streams.to_string(), "7,,9");
        assert_eq!("7,,9".parse(), Ok(streams));
        for text in ["", "7,8", "7,8,9,10", "7,7,", "0,4,5", "7,x,", "-1,7,8"] {
            assert!(text.parse::<Streams>().is_err(), "{text}");
        }
    }
}
