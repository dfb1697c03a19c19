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

/// Requests that are no numbers: that the server says a line to its console, and that it sleeps.
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

/// Runs the server of this number in this CPU's place; one of `BASALT_ENTERED_*`.
pub(super) fn enter(index: u64) -> u64 {
    vmmcall(ENTER, index)
}

/// The mapped file.
pub(super) struct Words(NonNull<AtomicU64>);

impl Words {
    /// Mounts the window, if it is not, and maps its file. For as long as the program runs.
    pub(super) fn map() -> Result<Self> {
        let directory = Path::new("/tmp/window");
        let path = directory.join("words");
        if !path.exists() {
            fs::create_dir_all(directory)?;
            mount("/dev/pmem0", directory, c"ext4", MountFlags::empty(), c"dax=always").context("/dev/pmem0 by DAX")?;
        }
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
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
        let mut console = OpenOptions::new().write(true).open("/dev/kmsg").context("/dev/kmsg")?;
        loop {
            if vmmcall(WAIT, 0) != 0 {
                // It is no server yet.
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            match self.at(REQUEST).load(Ordering::SeqCst) {
                HALT => std::thread::sleep(Duration::from_secs(3600)),
                // As what nobody may miss, which the console shows at once.
                ASK => std::io::Write::write_all(&mut console, format!("<0>{ASKED}").as_bytes())?,
                request => self.at(ANSWER).store(answer_to(request), Ordering::SeqCst),
            }
        }
    }
}
