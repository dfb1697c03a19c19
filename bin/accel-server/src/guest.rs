//! A server whose clients are in a virtual machine: what it inherits, the window's file system, and processes that serve, one after the
//! other.
//!
//! ```text
//!   this process ── formats the window ── ready ── known ── forks ──▶ a process that serves, until it ends
//!                                                      └──────── waits for it ────────┘
//! ```
//! A back end compiles and runs what clients send, and may bring its process down; then another one has the same window, and clients
//! that call anew are served by it. Of what comes from the guest this process reads nothing but a saved state (`--restore-fd`): where
//! things lie in the window, and the window's bytes, which it only copies.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_server::{Guest, Output, Slot, Slots};
use accel_window::image::{self, Layout};
use agent_api::accelerator::{CUDA_DRIVER, OPENCL_DRIVER, OPENCL_DRIVER_MUSL};
use agent_api::accelerator_state::{self, Asked};
use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions, waitpid};
use wire::{FrameReader, FrameWriter};

use crate::confine::{self, Confined};
use crate::options::{ARBITER, GuestFds, Options};

/// What the library's length is made a multiple of: with another version of it the slots are where they were.
const DRIVER_UNIT: usize = 4 << 20;

/// After a process that has ended sooner than this the next one waits as long.
const PAUSE: Duration = Duration::from_secs(1);

/// What was inherited.
#[derive(Debug)]
pub(crate) struct Inherited {
    /// None where it has become a mount of the jail's.
    vsock: Option<OwnedFd>,
    window: File,
    driver: File,
    musl_driver: File,
    /// CUDA's libraries.
    cuda_driver: Option<File>,
    ready: File,
    /// Where it is asked for its state.
    save: Option<UnixListener>,
    /// The state that it goes on from.
    restore: Option<File>,
    /// The directory of an arbiter's socket. None where there is none, and where it has become a mount of the jail's.
    arbiter: Option<OwnedFd>,
    /// Where statistics are told.
    control: Option<UnixListener>,
}

impl Inherited {
    /// Takes over what the parent left open. Nothing else in this process may have opened a descriptor yet.
    pub(crate) fn take(fds: GuestFds) -> Result<Self> {
        let mut taken = Vec::new();
        let mut take = |option, number| inherited(option, number, &mut taken);
        Ok(Self {
            vsock: Some(take("--vsock-fd", fds.vsock)?),
            window: take("--window-fd", fds.window)?.into(),
            driver: take("--driver-fd", fds.driver)?.into(),
            musl_driver: take("--musl-driver-fd", fds.musl_driver)?.into(),
            ready: take("--ready-fd", fds.ready)?.into(),
            cuda_driver: (fds.cuda_driver)
                .map(|fd| take("--cuda-driver-fd", fd))
                .transpose()?
                .map(Into::into),
            save: fds.save.map(|fd| take("--save-fd", fd)).transpose()?.map(Into::into),
            restore: fds
                .restore
                .map(|fd| take("--restore-fd", fd))
                .transpose()?
                .map(Into::into),
            arbiter: fds.arbiter.map(|number| take("--arbiter-fd", number)).transpose()?,
            control: (fds.control)
                .map(|number| take("--control-fd", number))
                .transpose()?
                .map(UnixListener::from),
        })
    }

    /// What is mounted in a jail, and where it is there.
    pub(crate) fn take_mounts(&mut self) -> Vec<(OwnedFd, &'static str)> {
        let mounts = [(self.vsock.take(), confine::VSOCK), (self.arbiter.take(), ARBITER)];
        let there = mounts.into_iter().filter_map(|(mount, at)| Some((mount?, at)));
        there.collect()
    }

    /// Where statistics are told.
    pub(crate) fn take_control(&mut self) -> Option<UnixListener> {
        self.control.take()
    }
}

#[allow(unsafe_code, reason = "an inherited descriptor is a bare number")]
fn inherited(option: &str, number: RawFd, taken: &mut Vec<RawFd>) -> Result<OwnedFd> {
    if number < 3 || taken.contains(&number) {
        bail!("{option} {number}: give numbers from 3 on, each one once");
    }
    // SAFETY: nothing in this process has opened a descriptor yet, so whatever this number is belongs to nobody else, and none is taken
    // twice; that it is open at all is checked next.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    if let Err(error) = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC) {
        std::mem::forget(fd);
        bail!("{option} {number} is not open: {error}");
    }
    taken.push(number);
    Ok(fd)
}

/// Makes the window's file system, tells that it is there, and waits to be known. Where its slots are.
pub(crate) fn format(inherited: &mut Inherited) -> Result<Vec<Slot>> {
    let window = &inherited.window;
    // One that could be shrunk is not taken: its machine could end this process by that.
    drop(accel_window::map(window).context("--window-fd")?);
    let size = window.metadata().context("--window-fd")?.len();
    let mut drivers = vec![
        padded("--driver-fd", OPENCL_DRIVER, &mut inherited.driver)?,
        padded("--musl-driver-fd", OPENCL_DRIVER_MUSL, &mut inherited.musl_driver)?,
    ];
    if let Some(cuda) = &mut inherited.cuda_driver {
        drivers.push(padded("--cuda-driver-fd", CUDA_DRIVER, cuda)?);
    }
    let slots = match &inherited.restore {
        // Its guest has it mounted, and its programs have the libraries of then.
        Some(state) => accel_server::fill_window(state, window).context("--restore-fd")?,
        None => make_file_system(window, &drivers, size)?,
    };
    inherited.ready.write_all(b"ready\n").context("--ready-fd")?;
    // Whoever has started this process knows it from then on, and ends it. One that has died before never will.
    let mut known = [0; 6];
    inherited
        .ready
        .read_exact(&mut known)
        .context("--ready-fd: whoever started this server has ended")?;
    Ok(slots)
}

/// The window's file system, with the libraries. Where its slots are.
fn make_file_system(window: &File, libraries: &[Library], size: u64) -> Result<Vec<Slot>> {
    let files: Vec<_> = libraries
        .iter()
        .map(|(name, bytes)| (*name, 0o644, bytes.len() as u64))
        .collect();
    let layout = Layout::new(size, &files)?;
    let contents: Vec<_> = libraries.iter().map(|(_, bytes)| bytes.as_slice()).collect();
    image::write(window, &layout, &contents)?;
    let slot = |entry: &image::Entry| Slot {
        name: entry.name.clone(),
        offset: entry.offset,
        length: entry.length,
    };
    Ok(layout.slots().iter().map(slot).collect())
}

/// A library's name in the file system, and its bytes with zeroes behind them.
type Library = (&'static str, Vec<u8>);

fn padded(option: &str, name: &'static str, file: &mut File) -> Result<Library> {
    let mut library = Vec::new();
    file.read_to_end(&mut library)
        .with_context(|| format!("{option} cannot be read"))?;
    library.resize(library.len().next_multiple_of(DRIVER_UNIT), 0);
    Ok((name, library))
}

/// Has processes serve, for ever; each tells how many there were before it. Everything that was decided for this one counts for them.
pub(crate) fn supervise(
    (options, control): (&Options, Option<&UnixListener>),
    inherited: &Inherited,
    slots: &[Slot],
    confined: Option<&Confined>,
) -> Result<()> {
    let mut restore = inherited.restore.as_ref();
    for restarts in 0.. {
        let begun = Instant::now();
        let Some(child) = fork().context("no process to serve the guest")? else {
            let control = control.map(|control| (control, restarts));
            return serve((options, control), inherited, slots, restore);
        };
        let status = loop {
            match waitpid(Some(child), WaitOptions::empty()) {
                Err(rustix::io::Errno::INTR) => (),
                Ok(Some((_, status))) => break status,
                Ok(None) => (),
                Err(error) => bail!("a process that serves cannot be waited for: {error}"),
            }
        };
        log::error!(
            "the process that served the guest has ended ({}); the programs that used it have errors, and another one serves the next",
            match (status.exit_status(), status.terminating_signal()) {
                (_, Some(signal)) => format!("signal {signal}"),
                (code, None) => format!("exit code {}", code.unwrap_or_default()),
            }
        );
        if let Some(confined) = confined {
            confined.remove_leftovers();
        }
        // What was to be gone on with is lost with the first process; it may have ended before clients could see an end.
        if restore.take().is_some() {
            slots_of(inherited, slots, options)?.abandon().context("--window-fd")?;
            // It may have been heard already, or by nobody.
            drop((&inherited.ready).write_all(b"lost the process that made it again has ended\n"));
        }
        std::thread::sleep(PAUSE.saturating_sub(begun.elapsed()));
    }
    bail!("no number is left for another process that serves")
}

/// Another process like this one, which ends when this one does; `None` in that process.
#[allow(unsafe_code, reason = "fork(2) has no safe wrapper")]
fn fork() -> std::io::Result<Option<Pid>> {
    let parent = rustix::process::getpid();
    // SAFETY: this process has one thread, so that nothing is held in the child by one that is not there.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have ended before that was said.
            match rustix::process::getppid() == Some(parent) {
                true => Ok(None),
                false => Err(std::io::Error::other("the process that started it has ended")),
            }
        }
        child => Ok(Pid::from_raw(child)),
    }
}

fn slots_of(inherited: &Inherited, slots: &[Slot], options: &Options) -> Result<Slots> {
    let slots = Slots::new(inherited.window.try_clone()?, slots.to_vec()).context("--window-fd")?;
    Ok(slots.pinned(options.pinned))
}

fn serve(
    (options, control): (&Options, Option<(&UnixListener, u64)>),
    inherited: &Inherited,
    slots: &[Slot],
    restore: Option<&File>,
) -> Result<()> {
    let backend = options.backend.open()?;
    log::info!("{} is served to a guest", backend.name());
    let server = crate::server(options, backend, control)?;
    let slots = slots_of(inherited, slots, options)?;
    // A socket is connected to by a path, which this is of a descriptor (proc(5), /proc/PID/fd).
    let vsock = match &inherited.vsock {
        Some(vsock) => PathBuf::from(format!("/proc/self/fd/{}", vsock.as_raw_fd())),
        None => confine::VSOCK.into(),
    };
    let guest = Arc::new(Guest::new(server, slots, vsock));
    if let Some(state) = restore {
        let outcome = guest.restore(state);
        let said = match &outcome {
            Ok(()) => "restored\n".to_owned(),
            Err(refusal) => format!("lost {}\n", refusal.to_string().replace('\n', " ")),
        };
        if let Err(refusal) = outcome {
            log::error!("programs that used the accelerator when their machine was saved have errors: {refusal}");
            guest.abandon().context("--window-fd")?;
        }
        // Whoever has restored the machine may have ended meanwhile.
        if let Err(error) = (&inherited.ready).write_all(said.as_bytes()) {
            log::debug!("nobody hears that the state is restored: {error}");
        }
    }
    if let Some(save) = &inherited.save {
        let (guest, save) = (Arc::clone(&guest), save.try_clone()?);
        let work = move || serve_saves(&guest, &save);
        std::thread::Builder::new().name("accel-save".into()).spawn(work)?;
    }
    guest.serve()
}

/// Writes its state for whoever connects, one after the other.
fn serve_saves(guest: &Guest, listener: &UnixListener) {
    for stream in listener.incoming() {
        let saved = stream
            .map_err(anyhow::Error::from)
            .and_then(|stream| save(guest, stream));
        if let Err(error) = saved {
            log::warn!("the accelerator's state was not saved: {error:#}");
            // A lasting failure must not spin.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Where bytes of the state go.
struct ToNode<'w>(&'w FrameWriter<UnixStream>);

impl Output for ToNode<'_> {
    fn put(&mut self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        let mut at = at;
        for chunk in bytes.chunks(accelerator_state::CHUNK) {
            accelerator_state::tell_bytes(self.0, at, chunk).map_err(std::io::Error::other)?;
            at += chunk.len() as u64;
        }
        Ok(())
    }
}

/// Writes it; its clients go on when the other side hangs up.
fn save(guest: &Guest, stream: UnixStream) -> Result<()> {
    let mut reader = FrameReader::new(stream.try_clone()?);
    let writer = FrameWriter::new(stream);
    let patience = match accelerator_state::asked(&mut reader)? {
        Some(Asked::Save(patience)) => patience,
        Some(Asked::Prepare) => {
            guest.prepare_save();
            return Ok(accelerator_state::tell_prepared(&writer)?);
        }
        None => return Ok(()),
    };
    let mut told = Ok(());
    guest.save(&mut ToNode(&writer), patience, |outcome| {
        let refused = outcome.as_ref().err().map(ToString::to_string);
        told = accelerator_state::tell_end(&writer, refused.as_deref());
        // Its end, or an error, which is one.
        if told.is_ok() {
            drop(accelerator_state::asked(&mut reader));
        }
    });
    Ok(told?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_guests_agent_finds_what_is_made_here() {
        assert_eq!(agent_api::accelerator::LABEL, accel_window::image::LABEL);
    }
}
