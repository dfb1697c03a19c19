//! What a client and its server say to each other, in the one file of the window, and the call by which they change places.
#![allow(
    unsafe_code,
    reason = "shared memory is mapped, and a hypercall is made; each block says what it relies on"
)]

use std::arch::asm;
use std::fs::{self, OpenOptions};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::mount::{MountFlags, mount};

/// What the file begins with.
pub(super) const MARK: &[u8] = b"what the words' file is found by";

/// Where the words are behind that, in words.
const REQUEST: usize = 8;
const ANSWER: usize = 9;

const PAGE: usize = 4096;

/// Requests that are no numbers: that the server writes a line to a port, and that it sleeps.
pub(super) const ASK: u64 = u64::MAX - 1;
pub(super) const HALT: u64 = u64::MAX;

/// The line.
pub(super) const ASKED: &str = "a frozen guest has something to say";

/// `BASALT_CALL_WAIT` and `BASALT_CALL_ENTER` of kmod/uapi/basalt.h.
const WAIT: u64 = 0x6261_7361_746c_0001;
const ENTER: u64 = 0x6261_7361_746c_0002;

/// What answers a number.
pub(super) fn answer_to(request: u64) -> u64 {
    request.wrapping_mul(3) + 1
}

fn vmmcall(call: u64, index: u64) -> u64 {
    let status;
    // SAFETY: all that it changes is RAX, by basalt.ko's own contract, and memory that is read as what others write.
    unsafe { asm!("vmmcall", inlateout("rax") call => status, in("rcx") index, options(nostack)) };
    status
}

/// What is written there is in a VM's early output, by its VMM: the serial port's register for what is sent.
const PORT: u16 = 0x3f8;

fn may_use_port() -> Result<()> {
    // SAFETY: it changes nothing but what this thread may do.
    match unsafe { libc::syscall(libc::SYS_ioperm, libc::c_ulong::from(PORT), 1, 1) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()).context("ioperm"),
    }
}

fn write_port(byte: u8) {
    // SAFETY: the port is the serial port's, which no driver uses meanwhile: the guest's kernel has another console.
    unsafe { asm!("out dx, al", in("dx") PORT, in("al") byte, options(nostack, nomem)) };
}

/// Runs the server of this number in this CPU's place; one of `BASALT_ENTERED_*`.
pub(super) fn enter(index: u64) -> u64 {
    vmmcall(ENTER, index)
}

/// Where the window is, and its file.
const WINDOW: &str = "/tmp/window";
const FILE: &str = "/tmp/window/words";

/// Mounts the window, if it is not.
pub(super) fn mount_window() -> Result<()> {
    if Path::new(FILE).exists() {
        return Ok(());
    }
    fs::create_dir_all(WINDOW)?;
    mount("/dev/pmem0", WINDOW, c"ext4", MountFlags::empty(), c"dax=always").context("/dev/pmem0 by DAX")
}

/// The mapped file.
pub(super) struct Words(NonNull<AtomicU64>);

impl Words {
    /// Mounts the window, if it is not, and maps its file. For as long as the program runs.
    pub(super) fn map() -> Result<Self> {
        mount_window()?;
        let file = OpenOptions::new().read(true).write(true).open(FILE)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which is never given back.
        let place = unsafe { mmap(std::ptr::null_mut(), PAGE, access, MapFlags::SHARED, &file, 0) }?;
        let words = Self(NonNull::new(place.cast()).context("a mapping at 0")?);
        // Its pages are there, and written to, before nobody is there to ask for them.
        words.at(ANSWER).store(0, Ordering::SeqCst);
        Ok(words)
    }

    fn at(&self, index: usize) -> &AtomicU64 {
        // SAFETY: the mapping has a page of words.
        let word = unsafe { self.0.add(index % (PAGE / 8)) };
        // SAFETY: 1. the mapping stays; 2. nobody accesses it but by atomics, on either side.
        unsafe { word.as_ref() }
    }

    pub(super) fn ask(&self, request: u64) {
        self.at(REQUEST).store(request, Ordering::SeqCst);
    }

    pub(super) fn answer(&self) -> u64 {
        self.at(ANSWER).load(Ordering::SeqCst)
    }

    /// Waits to be entered, does what was asked, and waits again.
    pub(super) fn serve(&self) -> Result<()> {
        may_use_port()?;
        loop {
            if vmmcall(WAIT, 0) != 0 {
                // It is no server yet.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            match self.at(REQUEST).load(Ordering::SeqCst) {
                HALT => std::thread::sleep(Duration::from_secs(3600)),
                ASK => ASKED.bytes().for_each(write_port),
                request => self.at(ANSWER).store(answer_to(request), Ordering::SeqCst),
            }
        }
    }
}
