//! Memory that was reserved for guests whose memory is not translated: what a machine has of it, mapped here.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use engine::{EngineError, IdentityMemory, Result, failed};
use reservation::Reservation;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

use crate::module::uapi;

/// How memory is reserved, for messages.
const HOW: &str = "keep some from Linux (boot the host with, say, `memmap=512M$0x100000000 memmap=64K$0x20000`) and name it to the module (`insmod basalt.ko memory=512M@0x100000000 low=64K@0x20000`); docs/bare.md says more";

/// Whole MiB, for messages.
const MIB: u64 = 1 << 20;

/// Makes a machine that has at least so many bytes.
pub(crate) fn create_vm(reservation: &Reservation, size: u64) -> Result<OwnedFd> {
    let pieces = size.max(1).checked_next_multiple_of(uapi::PIECE);
    let memory = pieces.ok_or_else(|| EngineError::Unusable(format!("no host has {size} bytes of memory")))?;
    uapi::create_identity_vm(reservation, memory).map_err(|error| match rustix::io::Errno::from_io_error(&error) {
        Some(rustix::io::Errno::NODEV) => EngineError::Unusable(format!(
            "no memory is reserved for guests whose memory is not translated: {HOW}"
        )),
        Some(rustix::io::Errno::NOSPC) => not_enough(reservation, memory),
        _ => failed("BASALT_CREATE_VM")(error),
    })
}

fn not_enough(reservation: &Reservation, memory: u64) -> EngineError {
    let reserved = match reservation.reserved_memory() {
        Ok(reserved) => reserved,
        Err(error) => return failed("BASALT_GET_INFO")(error),
    };
    let wanted = format!(
        "{} MiB of memory that is not translated are wanted in one piece, and of {} MiB that are reserved",
        memory / MIB,
        reserved.total / MIB
    );
    EngineError::Unusable(match reserved.free / MIB {
        0 => format!(
            "{wanted} there is no piece left, or none below 1 MiB, where each guest needs 32 KiB: end another such guest, or reserve more: {HOW}"
        ),
        free => format!(
            "{wanted} the largest free piece has {free} MiB: ask for less, end another such guest, or reserve more: {HOW}"
        ),
    })
}

/// Maps what the machine has. The mappings keep the machine's descriptor: its memory is nobody else's, and its CPUs are not Linux's,
/// before the last of these regions is dropped.
pub(crate) fn map(vm: &OwnedFd, place: &uapi::Place) -> Result<IdentityMemory> {
    let region = |start, size| -> io::Result<_> {
        // The C library's dup would make another call, which a VMM in its jail may not.
        let copy = rustix::io::fcntl_dupfd_cloexec(vm, 0)?;
        let file = FileOffset::new(File::from(copy), start);
        let size = usize::try_from(size).map_err(io::Error::other)?;
        let mapped = MmapRegion::from_file(file, size).map_err(io::Error::other)?;
        let region = GuestRegionMmap::new(mapped, GuestAddress(start));
        Ok(Arc::new(
            region.ok_or_else(|| io::Error::other("beyond all addresses"))?,
        ))
    };
    Ok(IdentityMemory {
        low: region(place.low_start, place.low_size).map_err(failed("mmap of memory below 1 MiB"))?,
        main: region(place.start, place.size).map_err(failed("mmap of reserved memory"))?,
    })
}

/// Whether these bytes are of the machine's memory.
pub(crate) fn has(place: &uapi::Place, start: u64, size: u64) -> bool {
    let within = |from: u64, length: u64| {
        let offset = start.checked_sub(from);
        offset
            .and_then(|offset| offset.checked_add(size))
            .is_some_and(|end| end <= length)
    };
    within(place.start, place.size) || within(place.low_start, place.low_size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_whole_in_one_piece_is_memory() {
        let place = uapi::Place {
            start: 0x1_0000_0000,
            size: 0x20_0000,
            low_start: 0x2_0000,
            low_size: 0x8000,
            ..uapi::Place::default()
        };
        for (start, size) in [
            (0x1_0000_0000, 0x20_0000),
            (0x1_001f_f000, 0x1000),
            (0x2_0000, 0x8000),
            (0x2_7fff, 1),
        ] {
            assert!(has(&place, start, size), "{start:#x} {size:#x}");
        }
        for (start, size) in [
            (0, 1),
            (0xffff_ffff, 2),
            (0x1_0000_0000, 0x20_0001),
            (0x2_7fff, 2),
            (u64::MAX, u64::MAX),
        ] {
            assert!(!has(&place, start, size), "{start:#x} {size:#x}");
        }
    }
}
