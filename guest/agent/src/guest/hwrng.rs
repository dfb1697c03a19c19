//! Randomness that the kernel has fetched from the host ahead of time, and that every clone would find in its memory.
//!
//! Linux 6.1 keeps some in two places (`drivers/char/hw_random`). `core.c` holds what a reader of `/dev/hwrng` left of the
//! last 64 bytes. `virtio-rng.c` always has one request of 64 bytes at the device: the moment the last byte of its buffer
//! is taken it asks for the next, so that its buffer cannot be emptied from here. Hence this is done twice. Before a
//! snapshot it takes what is there, which leaves one buffer that nobody has seen; after the restore it takes that one,
//! too, before any process can: the two buffers' length covers what a reader left in the first and all of the second. What
//! the device answers afterwards was asked for in the clone, and is its own.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;

/// The kernel's own reader of the host's entropy.
const DEVICE: &str = "/dev/hwrng";

/// Both buffers are at most this long together: two cache lines (`SMP_CACHE_BYTES` is 64 on x86-64).
const PREFETCHED: usize = 128;

/// A request that is at the device may be answered yet. A host that gives nothing for so long has nothing under way.
const LIMIT: Duration = Duration::from_millis(100);
const STEP: Duration = Duration::from_micros(200);

/// Takes what was fetched ahead of time, and throws it away.
pub(crate) fn discard() -> Result<(), Error> {
    discard_from(Path::new(DEVICE)).map(drop)
}

/// How many bytes were thrown away.
fn discard_from(path: &Path) -> Result<usize, Error> {
    let fail = || Error::system(format!("using up what was prefetched of {}", path.display()));
    let mut device = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path) {
        Ok(device) => device,
        Err(error) if absent(&error) => return Ok(0),
        Err(error) => return Err(fail()(error)),
    };
    let end = Instant::now() + LIMIT;
    let mut buffer = [0; PREFETCHED];
    let mut done = 0;
    while let Some(space) = buffer.get_mut(done..).filter(|space| !space.is_empty()) {
        match device.read(space) {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < end => thread::sleep(STEP),
            Err(error) if error.kind() == ErrorKind::WouldBlock || absent(&error) => break,
            Err(error) => return Err(fail()(error)),
        }
    }
    Ok(done)
}

/// There is no such device, or nothing behind it.
fn absent(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_machine_without_the_device_has_nothing() {
        assert_eq!(discard_from(Path::new("/dev/no-such-thing")).unwrap(), 0);
    }

    #[test]
    fn both_buffers_are_used_up_and_no_more() {
        assert_eq!(discard_from(Path::new("/dev/zero")).unwrap(), PREFETCHED);
    }

    #[test]
    fn a_device_that_is_silent_is_not_waited_for() {
        // A pipe that nobody writes to any more, with little in it.
        let (read, mut write) = std::io::pipe().unwrap();
        write.write_all(&[1; 20]).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read));
        let begun = Instant::now();
        assert_eq!(discard_from(Path::new(&path)).unwrap(), 20);
        assert!(begun.elapsed() >= LIMIT, "it did not wait for what is under way");
    }
}
