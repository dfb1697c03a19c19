//! `/dev/basalt`, and reservations: CPUs that Linux gives up as long as a descriptor is open.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use crate::uapi;

/// Why CPUs cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ReservationError {
    /// The module is not there.
    #[error("{path} cannot be opened ({source}): load basalt.ko (`modprobe basalt`), as root")]
    Open {
        /// What was opened.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// Another version of the module.
    #[error(
        "basalt.ko speaks version {found} of its interface, this program version {}: use module and programs of one build",
        uapi::API_VERSION
    )]
    Version {
        /// The module's.
        found: u32,
    },
    /// The host's processors have nothing that the module knows.
    #[error("this host's processors have no virtualization that basalt.ko knows (AMD's SVM): guests cannot own them")]
    Vendor,
    /// More than one reservation can have.
    #[error("{asked} CPUs are more than one reservation can have, which is {}", uapi::MAX_CPUS)]
    TooMany {
        /// How many were asked for.
        asked: usize,
    },
    /// One cannot be had.
    #[error("CPU {cpu} cannot be reserved ({source}): it must be online, no other VM's, and not the host's first")]
    Cpu {
        /// Which.
        cpu: u32,
        /// Why.
        source: io::Error,
    },
    /// The module does not say what it has.
    #[error("basalt.ko cannot be asked what it has: {0}")]
    Info(io::Error),
    /// The call failed otherwise.
    #[error("CPUs cannot be reserved: {0}")]
    Call(io::Error),
}

/// Memory that is reserved for guests whose memory is not translated, but for what of it is below 1 MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservedMemory {
    /// Bytes; zero where none was reserved.
    pub total: u64,
    /// The most that one more guest can have now, in one piece.
    pub free: u64,
}

impl ReservedMemory {
    fn of(info: &uapi::Info) -> Self {
        Self {
            total: info.memory,
            free: info.memory_free,
        }
    }
}

/// The module.
#[derive(Debug)]
pub struct Device(File);

impl Device {
    /// Where it is.
    pub const PATH: &'static str = "/dev/basalt";

    /// Opens it.
    ///
    /// # Errors
    /// It is not there, is of another version, or can do nothing on this host.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ReservationError> {
        let path = path.as_ref();
        let file = File::options().read(true).write(true).open(path);
        let file = file.map_err(|source| ReservationError::Open {
            path: path.display().to_string(),
            source,
        })?;
        let info = uapi::get_info(&file).map_err(ReservationError::Info)?;
        if info.version != uapi::API_VERSION {
            return Err(ReservationError::Version { found: info.version });
        }
        if info.vendor != uapi::VENDOR_AMD {
            return Err(ReservationError::Vendor);
        }
        Ok(Self(file))
    }

    /// What memory is reserved for guests whose memory is not translated, as of now: others may take of it at once.
    ///
    /// # Errors
    /// The call failed.
    pub fn reserved_memory(&self) -> Result<ReservedMemory, ReservationError> {
        let info = uapi::get_info(&self.0).map_err(ReservationError::Info)?;
        Ok(ReservedMemory::of(&info))
    }

    /// Takes these CPUs, all or none, from Linux.
    ///
    /// # Errors
    /// Which of them cannot be had, and why.
    pub fn reserve(&self, cpus: &[u32]) -> Result<Reservation, ReservationError> {
        let mut request = uapi::ClaimRequest::default();
        if cpus.len() > request.cpus.len() {
            return Err(ReservationError::TooMany { asked: cpus.len() });
        }
        for (to, from) in request.cpus.iter_mut().zip(cpus) {
            *to = *from;
            request.count += 1;
        }
        let fd = uapi::claim(&self.0, &mut request).map_err(|source| match source.raw_os_error() {
            Some(libc::ENODEV | libc::EBUSY | libc::EIO) => ReservationError::Cpu {
                cpu: request.failed,
                source,
            },
            _ => ReservationError::Call(source),
        })?;
        Reservation::from_fd(fd).map_err(ReservationError::Call)
    }
}

/// CPUs that are Linux's again when the last copy of this descriptor is closed, by whomever and however.
#[derive(Debug)]
pub struct Reservation {
    fd: OwnedFd,
    /// As Linux counts them.
    cpus: Vec<u32>,
    tsc_khz: u32,
}

impl Reservation {
    /// Asks what a reservation's descriptor is of.
    ///
    /// # Errors
    /// It is none.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let reserved = uapi::get_claimed(&fd)?;
        let count = usize::try_from(reserved.count).unwrap_or(0);
        Ok(Self {
            fd,
            cpus: reserved.cpus.iter().copied().take(count).collect(),
            tsc_khz: reserved.tsc_khz,
        })
    }

    /// Their numbers, as Linux counts them.
    pub fn cpus(&self) -> impl Iterator<Item = u32> + '_ {
        self.cpus.iter().copied()
    }

    /// How fast this host's time stamp counters count, in kHz.
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// As [`Device::reserved_memory`], for whoever has only the reservation.
    ///
    /// # Errors
    /// The call failed.
    pub fn reserved_memory(&self) -> io::Result<ReservedMemory> {
        Ok(ReservedMemory::of(&uapi::get_info(&self.fd)?))
    }

    /// The CPU of a vCPU.
    pub fn cpu(&self, vcpu: u32) -> Option<u32> {
        self.cpus.get(usize::try_from(vcpu).ok()?).copied()
    }
}

impl From<Reservation> for OwnedFd {
    fn from(reservation: Reservation) -> Self {
        reservation.fd
    }
}

impl AsFd for Reservation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_module_the_error_says_what_to_do() {
        let error = Device::open("/nonexistent/basalt").unwrap_err().to_string();
        assert!(error.contains("modprobe basalt"), "{error}");
        assert!(Device::open("/dev/null").is_err(), "no such request there");
    }
}
