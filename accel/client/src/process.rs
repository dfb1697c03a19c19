//! What this library has for the whole process: the connection to the server, and the platforms and devices that it told of.
//!
//! A process has one connection at a time; one that is over is replaced when something asks for the server again. A child of fork(2)
//! has nothing of its parent's but the addresses: it begins anew, and what it has inherited answers CL_OUT_OF_RESOURCES. Nothing is
//! freed then, or when a server has died: the application may still have addresses in the memory that was shared.
#![allow(
    unsafe_code,
    reason = "that a process has been forked is told by pthread_atfork(3) alone"
)]

use std::env;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, Once};

use accel_transport::Place;

use crate::codes::Code;
use crate::connection::Connection;
use crate::lock;
use crate::notify::Notifier;
use crate::platform::{self, Told};

/// If it is set, why there is no server is said once.
const DEBUG: &str = "BASALT_ACCEL_DEBUG";

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());
static FORKS: AtomicU32 = AtomicU32::new(0);
/// The socket of the connection, for a child that must not keep it open; -1 for none.
static OPEN: AtomicI32 = AtomicI32::new(-1);

/// The application's platforms and devices, which a child of the process has as well. The lock is held for moments alone, and no call is waited
/// for with it.
static TOLD: Mutex<Told> = Mutex::new(Told::NONE);

/// What servers have told of.
pub(crate) fn told<T>(with: impl FnOnce(&mut Told) -> T) -> T {
    with(&mut lock(&TOLD))
}

/// What there is for a process.
#[derive(Debug, Default)]
pub(crate) struct Process {
    current: Mutex<Option<&'static Connection>>,
    pub(crate) notifier: Notifier,
    has_complained: AtomicBool,
}

/// How often this process, or one that it comes from, has been forked with the library in it.
pub(crate) fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// That of this process.
pub(crate) fn process() -> &'static Process {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: 1. the handler is a function that stays for as long as the library, whose unloading takes it out again; 2. it does what
        // a child of a process with threads may do: stores of atomics, and close(2).
        unsafe { libc::pthread_atfork(None, None, Some(begin_anew)) };
    });
    let fresh = || Box::into_raw(Box::<Process>::default());
    let mut found = PROCESS.load(Ordering::Acquire);
    if found.is_null() {
        let made = fresh();
        found = match PROCESS.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => made,
            // Another thread was first; what was made here is a few words, and stays.
            Err(other) => other,
        };
    }
    // SAFETY: it is one that was made by `fresh`, and none is ever freed.
    unsafe { &*found }
}

/// In the child of a fork.
extern "C" fn begin_anew() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    PROCESS.store(ptr::null_mut(), Ordering::Release);
    let open = OPEN.swap(-1, Ordering::Relaxed);
    if open >= 0 {
        // The server sees its client's end by the socket, which must not outlive the parent here.
        // SAFETY: 1. the descriptor is the connection's, which has no other owner in this process: it is over here and never dropped.
        unsafe { libc::close(open) };
    }
}

impl Process {
    /// The connection; one is made if there is none that lasts.
    ///
    /// # Errors
    /// There is no server.
    pub(crate) fn connection(&self) -> Result<&'static Connection, Code> {
        let mut current = lock(&self.current);
        if let Some(connection) = *current
            && !connection.is_over()
        {
            return Ok(connection);
        }
        let server = Place::of_environment().map_err(|reason| self.complain(&reason))?;
        let (connection, descriptor) = Connection::open(&server).map_err(|reason| {
            let named_by = server.named_by();
            self.complain(&format!(
                "no accelerator at {server}: {reason}; {named_by} names the server"
            ))
        })?;
        let connection: &'static Connection = Box::leak(Box::new(connection));
        platform::refresh(connection).map_err(|code| {
            self.complain(&format!(
                "the accelerator's server at {server} tells of no platforms: error {}",
                code.0
            ))
        })?;
        OPEN.store(descriptor, Ordering::Relaxed);
        *current = Some(connection);
        Ok(connection)
    }

    /// Says once why there is nothing, to who has asked to hear it.
    fn complain(&self, why: &str) -> Code {
        if env::var_os(DEBUG).is_some() && !self.has_complained.swap(true, Ordering::Relaxed) {
            eprintln!("basalt-opencl: {why}");
        }
        Code::DEVICE_NOT_AVAILABLE
    }
}
