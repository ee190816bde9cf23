//! Work that may never end, because another program decides that.

use std::io;
use std::sync::mpsc;
use std::time::Duration;

/// Does something that may never end on a thread of its own, which is left to itself after `limit`.
///
/// # Errors
/// The errors of the work; [`io::ErrorKind::TimedOut`], with the text `late`, if it has not come to its end in time.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    late: &'static str,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    std::thread::Builder::new().name("time limit".into()).spawn(move || {
        // The caller does not wait any more where this fails.
        let _ = sender.send(work());
    })?;
    let too_late = || io::Error::new(io::ErrorKind::TimedOut, late);
    receiver.recv_timeout(limit).unwrap_or_else(|_| Err(too_late()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_left_to_itself() {
        let (_keep, never) = mpsc::channel::<()>();
        let endless = move || {
            let _ = never.recv();
            Ok(())
        };
        let error = within(Duration::from_millis(50), "too late", endless).unwrap_err();
        assert_eq!((error.kind(), &*error.to_string()), (io::ErrorKind::TimedOut, "too late"));
        assert_eq!(within(Duration::from_secs(60), "too late", || Ok(7)).unwrap(), 7);
    }
}
