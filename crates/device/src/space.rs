//! How a disk tells that the host has no space left for what its guest writes. Knows neither disks nor what is done about it.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;

/// One alarm for all disks of a VM. A disk that has raised it keeps the requests that failed and begins them anew when it is
/// activated the next time; whoever owns the VM is expected to stop the vCPUs until there is space again.
#[derive(Clone, Debug)]
pub struct SpaceAlarm(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    event: EventFd,
    disks: Mutex<BTreeSet<String>>,
}

impl SpaceAlarm {
    /// One that nobody has raised.
    ///
    /// # Errors
    /// The host has no event fd left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(Inner {
            event: EventFd::new()?,
            disks: Mutex::default(),
        })))
    }

    /// The disk of this name keeps a request for which there is no space.
    pub fn raise(&self, disk: &str) {
        self.names().insert(disk.to_owned());
        self.0.event.signal();
    }

    /// Readable since it was raised.
    pub fn event(&self) -> &EventFd {
        &self.0.event
    }

    /// Which disks have raised it.
    pub fn disks(&self) -> Vec<String> {
        self.names().iter().cloned().collect()
    }

    /// Forgets who has raised it: the disks are about to try again.
    pub fn clear(&self) {
        self.names().clear();
        self.0.event.consume();
    }

    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The host has no space left, or the owner of the file has used up its quota: the same request may succeed later.
pub fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alarm_names_its_disks_until_it_is_cleared() {
        let alarm = SpaceAlarm::new().unwrap();
        let disk = alarm.clone();
        disk.raise("writable");
        disk.raise("data");
        disk.raise("writable");
        assert_eq!(alarm.disks(), ["data", "writable"]);
        alarm.clear();
        assert!(alarm.disks().is_empty());
        assert!(!alarm.event().consume());
        disk.raise("data");
        assert!(alarm.event().consume());
    }

    #[test]
    fn a_full_disk_and_a_used_up_quota_are_told_from_other_errors() {
        // Linux's numbers of ENOSPC, EDQUOT, EIO and EFBIG.
        let told = [28, 122, 5, 27].map(|errno| is_no_space(&io::Error::from_raw_os_error(errno)));
        assert_eq!(told, [true, true, false, false]);
    }
}
