//! A connection to the server of a sandbox's accelerator. That process runs code of its sandbox's programs, and is trusted with nothing:
//! whatever it does, or does not do, everything that is asked of it by one connection ends at one time.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent_api::Duplex as _;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::deadline_stream::{Timed, too_late};

/// A connection to the server that listens at `path`, to be read for so long at most.
///
/// # Errors
/// Nobody listens, or it has not answered those that have asked before.
pub(crate) fn connect(path: &Path, limit: Duration) -> io::Result<Timed> {
    let directory = node_api::client::directory(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &node_api::client::address(path, &directory)?) {
        Err(Errno::AGAIN) => return Err(too_late()),
        connected => connected?,
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    // Whoever asks writes a few bytes.
    stream.set_write_timeout(Some(limit))?;
    let timed = Timed::new(stream);
    timed.set_read_timeout(Some(limit))?;
    Ok(timed)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;
    use std::time::Instant;

    use super::*;

    /// What comes of reading all that somebody says to whoever connects.
    fn heard(limit: Duration, says: impl FnOnce(UnixStream) + Send) -> io::Result<Vec<u8>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("accelerator");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| says(listener.accept().unwrap().0));
            let mut all = Vec::new();
            connect(&path, limit)?.read_to_end(&mut all).map(|_| all)
        })
    }

    /// A byte every so often, until the other side hangs up.
    fn dribble(mut stream: &UnixStream, pause: Duration) {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(pause);
        }
    }

    #[test]
    fn what_is_said_is_heard_until_the_end_of_the_time_however_slowly_or_fast() {
        let all = heard(Duration::from_secs(30), |mut stream| stream.write_all(b"all").unwrap());
        assert_eq!(all.unwrap(), b"all");
        let limit = Duration::from_millis(100);
        for pause in [Duration::from_millis(10), Duration::ZERO] {
            let begin = Instant::now();
            let error = heard(limit, |stream| dribble(&stream, pause)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
            assert!(begin.elapsed() >= limit);
        }
    }

    #[test]
    fn one_that_accepts_nobody_holds_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("accelerator");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let limit = Duration::from_secs(30);
        let first = connect(&path, limit).unwrap();
        assert_eq!(connect(&path, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop((first, listener));
        assert_eq!(
            connect(&path, limit).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
    }
}
