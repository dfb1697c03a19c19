//! A connection to the server of a sandbox's accelerator. That process runs code of its sandbox's programs, and is trusted with nothing:
//! whatever it does, or does not do, everything that is asked of it by one connection ends at one time.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A stream that ends with an error when its time is over.
#[derive(Debug)]
pub(crate) struct Bounded {
    stream: UnixStream,
    end: Instant,
}

impl Bounded {
    /// To the server that listens at `path`, for so long at most.
    ///
    /// # Errors
    /// Nobody listens, or it has not answered those that have asked before.
    pub(crate) fn new(path: &Path, limit: Duration) -> io::Result<Self> {
        let end = Instant::now() + limit;
        let directory = node_api::client::directory(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &node_api::client::address(path, &directory)?) {
            Err(Errno::AGAIN) => return Err(too_late()),
            connected => connected?,
        }
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        Ok(Self { stream, end })
    }

    /// What is left of its time; one that always has more to say ends, too.
    fn left(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(too_late()) } else { Ok(left) }
    }

    /// The same connection again, to write by.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        let (stream, end) = (self.stream.try_clone()?, self.end);
        Ok(Self { stream, end })
    }
}

fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it has not answered in time")
}

fn in_time(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock => too_late(),
        _ => error,
    }
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        (&self.stream).read(buffer).map_err(in_time)
    }
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        (&self.stream).write(bytes).map_err(in_time)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// What comes of reading all that somebody says to whoever connects.
    fn heard(limit: Duration, says: impl FnOnce(UnixStream) + Send) -> io::Result<Vec<u8>> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("accelerator");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| says(listener.accept().unwrap().0));
            let mut all = Vec::new();
            Bounded::new(&path, limit)?.read_to_end(&mut all).map(|_| all)
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
        let first = Bounded::new(&path, limit).unwrap();
        assert_eq!(Bounded::new(&path, limit).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop((first, listener));
        assert_eq!(
            Bounded::new(&path, limit).unwrap_err().kind(),
            io::ErrorKind::ConnectionRefused
        );
    }
}
