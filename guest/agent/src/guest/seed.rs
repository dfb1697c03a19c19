//! What a guest cannot know by itself: the time, randomness and its name. All come from the host.

use std::fs::File;
use std::os::fd::AsRawFd;

use rustix::time::{ClockId, Timespec, clock_settime};

use crate::Error;

/// `RNDADDENTROPY`, linux/random.h: `_IOW('R', 3, int[2])`.
const RNDADDENTROPY: libc::Ioctl = 0x4008_5203;

/// `RNDRESEEDCRNG`, linux/random.h: `_IO('R', 7)`.
const RNDRESEEDCRNG: libc::Ioctl = 0x5207;

/// Fewest bytes that make the kernel's generator ready (256 bits).
const MINIMUM: usize = 32;

/// Most bytes that are used.
const MAXIMUM: usize = 512;

/// Mixes the bytes in and credits them, so that nobody in the guest waits for randomness.
pub(crate) fn add_entropy(bytes: &[u8]) -> Result<(), Error> {
    if bytes.len() < MINIMUM {
        return Err(Error::Refused(format!(
            "{} random bytes are too few; {MINIMUM} are needed",
            bytes.len()
        )));
    }
    // struct rand_pool_info: bits credited, bytes that follow, the bytes. In words, for their alignment.
    let words: Vec<u32> = bytes.chunks_exact(4).take(MAXIMUM / 4).map(word).collect();
    let size = u32::try_from(words.len() * 4).unwrap_or(0);
    let mut pool = vec![size * 8, size];
    pool.extend(words);
    let device = generator()?;
    // SAFETY: 1. `pool` is laid out as the request wants it and as long as it says in its second word.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, pool.as_ptr()) };
    if result < 0 {
        return Err(Error::system("adding random bytes")(std::io::Error::last_os_error()));
    }
    Ok(())
}

/// Makes the kernel's generator use what was mixed in: everything that anybody reads from now on comes of it.
pub(crate) fn reseed() -> Result<(), Error> {
    let device = generator()?;
    // SAFETY: 1. The request has no argument.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG) };
    if result < 0 {
        return Err(Error::system("reseeding the random generator")(
            std::io::Error::last_os_error(),
        ));
    }
    Ok(())
}

fn generator() -> Result<File, Error> {
    File::options()
        .write(true)
        .open("/dev/urandom")
        .map_err(Error::system("opening /dev/urandom"))
}

fn word(chunk: &[u8]) -> u32 {
    chunk.iter().fold(0, |word, byte| (word << 8) | u32::from(*byte))
}

/// Tells the kernel the host name.
pub(crate) fn set_hostname(name: &str) -> Result<(), Error> {
    rustix::system::sethostname(name.as_bytes()).map_err(Error::system(format!("setting the host name {name:?}")))
}

/// Sets the time of day.
pub(crate) fn set_clock(unix_ns: u64) -> Result<(), Error> {
    const SECOND: u64 = 1_000_000_000;
    let out_of_range = |_| Error::Refused(format!("{unix_ns} ns since 1970 is no time of day"));
    let time = Timespec {
        tv_sec: i64::try_from(unix_ns / SECOND).map_err(out_of_range)?,
        tv_nsec: i64::try_from(unix_ns % SECOND).map_err(out_of_range)?,
    };
    clock_settime(ClockId::Realtime, time).map_err(Error::system("setting the clock"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_takes_what_is_enough() {
        let error = add_entropy(&[1; MINIMUM - 1]).unwrap_err().to_string();
        assert!(error.contains("31 random bytes are too few"), "{error}");
        for length in [MINIMUM, MAXIMUM + 100] {
            add_entropy(&vec![1; length]).unwrap();
            reseed().unwrap();
        }
    }

    #[test]
    fn a_time_that_is_none_is_refused() {
        // The clock of this machine is not ours to set: what is not refused here would be.
        let error = set_clock(u64::MAX).unwrap_err().to_string();
        assert!(error.contains("setting the clock"), "{error}");
    }
}
