//! A stream whose time limit is one for everything that is read from then on, not one for each read: a guest, or a server that runs code of
//! one, that sends a byte now and then must not hold up whoever waits for its whole answer. Knows sockets, not messages.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use agent_api::Duplex;

/// The stream and the moment until which it may be waited for.
#[derive(Debug)]
pub(crate) struct Timed {
    /// A second handle shares it, and so needs no descriptor.
    stream: Arc<UnixStream>,
    deadline: Mutex<Option<Instant>>,
}

impl Timed {
    /// Without a limit.
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream: Arc::new(stream),
            deadline: Mutex::default(),
        }
    }

    /// The stream itself, without a limit.
    ///
    /// # Errors
    /// Those of setsockopt(2).
    pub(crate) fn into_stream(self) -> io::Result<UnixStream> {
        self.stream.set_read_timeout(None)?;
        // Where there is another handle, it stays.
        Arc::try_unwrap(self.stream).or_else(|shared| shared.try_clone())
    }
}

/// The other side has not answered within the limit.
pub(crate) fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it has not answered in time")
}

impl Read for Timed {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let deadline = *self.deadline.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(too_late());
            }
            self.stream.set_read_timeout(Some(left))?;
        }
        (&*self.stream).read(space).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => too_late(),
            _ => error,
        })
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.stream).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        (&*self.stream).flush()
    }
}

impl AsFd for Timed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Duplex for Timed {
    /// The second handle has no limit until it is given one.
    fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            stream: Arc::clone(&self.stream),
            deadline: Mutex::default(),
        })
    }

    fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
        match deadline {
            // Each read sets what is left then.
            Some(_) => Ok(()),
            None => self.stream.set_read_timeout(None),
        }
    }

    fn close(&self) {
        Duplex::close(&*self.stream);
    }

    fn close_writing(&self) {
        Duplex::close_writing(&*self.stream);
    }

    fn has_input(&self) -> bool {
        self.stream.has_input()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_trickles_is_waited_for_no_longer_than_who_is_silent() {
        let (near, mut far) = UnixStream::pair().unwrap();
        let trickle = std::thread::spawn(move || {
            while far.write_all(b".").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let mut timed = Timed::new(near);
        timed.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let begun = Instant::now();
        let mut space = [0; 4096];
        let error = timed.read_exact(&mut space).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() >= Duration::from_millis(300));
        // All of it would take 82 seconds.
        assert!(begun.elapsed() < Duration::from_secs(60));
        // A new limit begins anew.
        timed.set_read_timeout(Some(Duration::from_secs(90))).unwrap();
        timed.read_exact(&mut space[..1]).unwrap();
        drop(timed);
        trickle.join().unwrap();
    }

    #[test]
    fn a_second_handle_is_no_second_descriptor() {
        use std::os::fd::AsRawFd;
        let (near, mut far) = UnixStream::pair().unwrap();
        let timed = Timed::new(near);
        let mut second = timed.try_clone().unwrap();
        assert_eq!(second.stream.as_raw_fd(), timed.stream.as_raw_fd());
        second.write_all(b"on").unwrap();
        let mut read = [0; 2];
        far.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"on");
        // Who gets the stream while there is another handle gets a descriptor of its own.
        let mut stream = timed.into_stream().unwrap();
        drop(second);
        stream.write_all(b"go").unwrap();
        far.read_exact(&mut read).unwrap();
        assert_eq!(&read, b"go");
    }

    #[test]
    fn who_gets_the_stream_has_no_limit() {
        let (near, far) = UnixStream::pair().unwrap();
        let mut timed = Timed::new(near);
        timed.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        assert!(timed.read(&mut [0]).is_err());
        let stream = timed.into_stream().unwrap();
        assert_eq!(stream.read_timeout().unwrap(), None);
        drop(far);
    }
}
