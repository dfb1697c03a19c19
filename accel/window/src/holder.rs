//! Who holds a window, written in its header by the server and taken out by the kernel when the server ends, however it ends.
//!
//! The header's word is a robust futex (get_robust_list(2); Linux, Documentation/locking/robust-futexes.rst) that a thread of the server
//! owns. When the thread ends, by `kill -9` as well, the kernel takes its number out of the word, sets `FUTEX_OWNER_DIED`, and every
//! client that has the window mapped sees it by its next load. Clients in virtual machines do, too, as the window's pages are the same.
//!
//! The list's head and its one entry are in this process's own memory; what a client writes into the word can only keep its own news
//! from it. Obligations of the `unsafe` blocks, and who discharges each:
//!
//! 1. *Head and entry are good until the thread ends or has another list*: both are in a `Box` that the worker's body owns, and the list of
//!    the C library is put back before the body returns. On any other way out the process ends, and its memory with it.
//! 2. *The entry's word is mapped meanwhile*: the body owns the [`Word`], which keeps the mapping.
//! 3. *The C library's list is not missed*: it is for robust mutexes, of which this thread locks none.
#![allow(
    unsafe_code,
    reason = "robust lists have system calls and no wrapper; the blocks say which obligations they rest on"
)]

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{SyncSender, sync_channel};

use base::{StopSignal, Worker};
use rustix::event::{PollFd, PollFlags, poll};
use wire::ring::Word;

use crate::{Error, Window};

/// Linux, `struct robust_list`.
#[repr(C)]
struct Entry {
    next: *mut Entry,
}

/// Linux, `struct robust_list_head`.
#[repr(C)]
struct Head {
    list: Entry,
    /// From an entry to its word.
    offset: libc::c_long,
    pending: *mut Entry,
}

/// As a list with one entry.
#[repr(C)]
struct List {
    head: Head,
    entry: Entry,
}

/// A server that holds a window. Clients see it end when this is dropped, or when the process ends.
#[derive(Debug)]
pub struct Holder {
    _worker: Worker<Word>,
}

impl Holder {
    /// Holds it from now on, by a thread that does nothing else.
    ///
    /// # Errors
    /// No thread could be had, or the kernel has no robust futexes.
    pub fn new(window: &Window) -> Result<Self, Error> {
        let (say, said) = sync_channel(1);
        let body = move |word: Word, stop: &StopSignal| {
            hold(&word, stop, &say);
            word
        };
        let worker = Worker::spawn("accel-holder", window.holder()?, body).map_err(Error::io("start a thread"))?;
        let held = said.recv().map_err(io::Error::other);
        held.and_then(|held| held).map_err(Error::io("have a robust futex"))?;
        Ok(Self { _worker: worker })
    }
}

/// The life of the thread: `say` tells whether it holds the word.
fn hold(word: &Word, stop: &StopSignal, say: &SyncSender<io::Result<()>>) {
    let before = match list() {
        Ok(before) => before,
        Err(error) => return tell(say, Err(error)),
    };
    let own = one_entry(word);
    // SAFETY: obligations 1 and 2: `own` and `word` outlive what is between this and the other `set_list`.
    if let Err(error) = unsafe { set_list(&raw const own.head) } {
        return tell(say, Err(error));
    }
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    word.store(thread.unsigned_abs(), Ordering::Release);
    tell(say, Ok(()));
    wait(stop);
    word.store(0, Ordering::Release);
    // SAFETY: the list is the one that the thread began with.
    if let Err(error) = unsafe { set_list(before) } {
        // The kernel would look at memory that is gone; this has never been seen to fail, and the box stays where it is.
        log::error!("the robust list of a thread could not be put back: {error}");
        std::mem::forget(own);
    }
}

/// Whoever made the thread waits for this, unless it panicked.
fn tell(say: &SyncSender<io::Result<()>>, held: io::Result<()>) {
    drop(say.send(held));
}

fn wait(stop: &StopSignal) {
    loop {
        match poll(&mut [PollFd::new(stop.fd(), PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => (),
            Ok(_) => return,
            Err(error) => return log::error!("a window's holder gives it up: poll failed: {error}"),
        }
    }
}

/// The list with the word alone.
fn one_entry(word: &Word) -> Box<List> {
    let nothing = || Entry {
        next: std::ptr::null_mut(),
    };
    let head = Head {
        list: nothing(),
        offset: 0,
        pending: std::ptr::null_mut(),
    };
    let mut own = Box::new(List { head, entry: nothing() });
    // A ring of two: the head, the entry.
    let entry = &raw mut own.entry;
    let head = &raw mut own.head.list;
    own.head.offset = (word.as_ptr().addr() as libc::c_long).wrapping_sub(entry.addr() as libc::c_long);
    own.head.list.next = entry;
    own.entry.next = head;
    own
}

/// The list that this thread has.
fn list() -> io::Result<*const Head> {
    let mut head: *const Head = std::ptr::null();
    let mut length = 0_usize;
    // SAFETY: the kernel writes a pointer and a length, both of which live through the call.
    let result = unsafe { libc::syscall(libc::SYS_get_robust_list, 0, &raw mut head, &raw mut length) };
    match result {
        0 => Ok(head),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Another list for this thread.
///
/// # Safety
/// The list is null, or is good until the thread ends or has another one.
unsafe fn set_list(head: *const Head) -> io::Result<()> {
    // SAFETY: the caller's.
    let result = unsafe { libc::syscall(libc::SYS_set_robust_list, head, size_of::<Head>()) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
