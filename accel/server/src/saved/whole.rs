//! All of a server: its clients one after the other, the window, and the file.
#![allow(unsafe_code, reason = "maps the file")]

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use accel_transport::{Agreement, Position};
use accel_window::{Geometry, Window};
use rustix::mm::{MapFlags, ProtFlags};

use super::devices::Devices;
use super::state::{Bytes, ClientState, MAGIC, State, TRAILER, VERSION, Writing};
use super::{Output, Refusal, restore, save};
use crate::api::{Backend, P};
use crate::guest::{Slot, Slots, Taken, data};
use crate::session::Client;
use crate::tenant::Tenant;

/// How often it is looked whether a thread is between two records.
const LOOK: Duration = Duration::from_micros(100);

/// A client that is served, as it is to be saved.
#[derive(Debug, Clone)]
pub(crate) struct Saving {
    /// The agent's number of it.
    pub(crate) number: u64,
    /// Its part of the window, if it has one.
    pub(crate) slot: Option<String>,
    pub(crate) agreed: Agreement,
    pub(crate) client: Arc<Client>,
}

/// A client that was saved, with its objects.
#[derive(Debug)]
pub(crate) struct Resumed {
    pub(crate) number: u64,
    pub(crate) agreed: Agreement,
    pub(crate) window: Window,
    pub(crate) positions: Vec<Position>,
    pub(crate) client: Arc<Client>,
    /// Its part of the window, which goes last: it is emptied when all else is gone.
    pub(crate) slot: Taken,
}

/// Saves clients, none of whose threads goes on before the result of this is dropped. The window at the file's beginning is written last.
pub(crate) fn save_all<'c>(
    backend: &Arc<Backend>,
    clients: &'c [Saving],
    (output, slots): (&mut dyn Output, &Slots),
    deadline: Instant,
) -> Result<Vec<MutexGuard<'c, Option<Position>>>, Refusal> {
    let mut held = Vec::new();
    let mut states = Vec::new();
    let mut file = Writing::new(output, slots.length());
    let devices = Devices::of(backend).map_err(Refusal::code)?;
    // All of them, as they can wait for each other's commands on one device.
    for saving in clients {
        saving.client.completions.hurry(true);
    }
    let turns = clients
        .iter()
        .map(|saving| turns(&saving.client, deadline))
        .collect::<Result<Vec<_>, _>>();
    for saving in clients {
        saving.client.completions.hurry(false);
    }
    for (saving, turns) in clients.iter().zip(turns?) {
        let Saving {
            number,
            slot,
            agreed,
            client,
        } = saving;
        let positions: Option<Vec<Position>> = turns.iter().map(|turn| **turn).collect();
        let (Some(slot), Some(window), Some(positions)) = (slot, &client.window, positions) else {
            return Err(Refusal::Stream);
        };
        held.extend(turns);
        save::drain(client, deadline)?;
        states.push(ClientState {
            number: *number,
            slot: slot.clone(),
            transport: agreed.transport,
            busy_poll_us: u64::try_from(agreed.busy_poll.as_micros()).unwrap_or(u64::MAX),
            pairs: agreed.pairs,
            records: window.geometry().records(),
            arena: window.geometry().arena(),
            positions,
            objects: save::objects(client, &devices, &mut file)?,
        });
    }
    let state = State {
        version: VERSION,
        backend: backend.name().to_owned(),
        devices: devices.identities(backend).map_err(Refusal::code)?,
        slots: slots.all().to_vec(),
        window: slots.length(),
        clients: states,
    };
    file.finish(&state)?;
    // Behind the last byte that a thread or a command has written there.
    slots.save(output)?;
    Ok(held)
}

/// All threads of a client, each between two records.
fn turns(client: &Client, deadline: Instant) -> Result<Vec<MutexGuard<'_, Option<Position>>>, Refusal> {
    let mut held = Vec::new();
    for turn in &client.turns {
        loop {
            match turn.try_lock() {
                Ok(guard) => break held.push(guard),
                Err(TryLockError::Poisoned(guard)) => break held.push(guard.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return Err(Refusal::Busy),
                Err(TryLockError::WouldBlock) => std::thread::sleep(LOOK),
            }
        }
    }
    Ok(held)
}

/// Gives a window that is all zeroes the bytes that one had when it was saved. Where its parts are.
///
/// # Errors
/// [`Refusal`].
pub fn fill_window(state: &File, window: &File) -> Result<Vec<Slot>, Refusal> {
    let image = Image::new(state)?;
    let saved = image.state()?;
    let length = window.metadata()?.len();
    if saved.window != length {
        let reason = format!("its window has {} bytes, the machine's {length}", saved.window);
        return Err(Refusal::Format(reason));
    }
    let region = accel_window::map(window).map_err(|error| Refusal::Format(error.to_string()))?;
    let mut at = 0;
    while let Some((begin, end)) = data(state, at)?.filter(|(begin, _)| *begin < length) {
        let length = end.min(length) - begin;
        let bytes = image.bytes(Bytes { at: begin, length })?;
        region
            .write(begin, bytes)
            .map_err(|error| Refusal::Format(error.to_string()))?;
        at = end;
    }
    Ok(saved.slots)
}

/// Makes the clients of a file again. `slot` takes a part of the window, whose bytes are as they were, by its name, once.
pub(crate) fn restore_all(
    (backend, tenant): (&Arc<Backend>, &Arc<Tenant>),
    file: &File,
    slot: &dyn Fn(&str) -> Option<Taken>,
) -> Result<Vec<Resumed>, Refusal> {
    let image = Arc::new(Image::new(file)?);
    let state = image.state()?;
    let devices = Devices::of(backend).map_err(Refusal::code)?;
    let here = devices.identities(backend).map_err(Refusal::code)?;
    if (&state.backend, &state.devices) != (&backend.name().to_owned(), &here) {
        let said = |name: &str, devices: &[Vec<[String; 3]>]| {
            let devices: Vec<String> = devices.iter().flatten().map(|device| device.join(", ")).collect();
            format!("{name} ({})", devices.join("; "))
        };
        return Err(Refusal::OtherDevice {
            saved: said(&state.backend, &state.devices),
            here: said(backend.name(), &here),
        });
    }
    let mut resumed = Vec::new();
    for saved in state.clients {
        let format = |what: &str| Refusal::Format(what.to_owned());
        let geometry =
            Geometry::new(saved.pairs, saved.records, saved.arena).map_err(|error| format(&error.to_string()))?;
        let slot = slot(&saved.slot);
        let slot =
            slot.ok_or_else(|| format("it names a part of the window that is not there, or is another client's"))?;
        let region = slot.region().map_err(|error| format(&error.to_string()))?;
        let window = Window::resume(region, geometry).map_err(|error| format(&error.to_string()))?;
        let client = Client::new(Arc::clone(backend), Arc::clone(tenant), Some(window.clone()));
        let client = Arc::new(client.saved(saved.pairs as usize, Some(Arc::clone(&image))));
        restore::objects(&client, &saved.objects, &devices, &image).inspect_err(|_| client.end())?;
        resumed.push(Resumed {
            number: saved.number,
            slot,
            agreed: Agreement {
                transport: saved.transport,
                pairs: saved.pairs,
                busy_poll: Duration::from_micros(saved.busy_poll_us),
                arena: saved.arena,
            },
            window,
            positions: saved.positions,
            client,
        });
    }
    Ok(resumed)
}

/// The file in memory: what is written there is this process's own.
#[derive(Debug)]
pub(crate) struct Image {
    at: NonNull<std::ffi::c_void>,
    length: usize,
}

// SAFETY: 1. the address is of no thread; 2. what is written there is written by the back end, as OpenCL lets the memory of a buffer be.
unsafe impl Send for Image {}
// SAFETY: as for Send.
unsafe impl Sync for Image {}

impl Image {
    pub(super) fn new(file: &File) -> Result<Self, Refusal> {
        let length = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        if (length as u64) < TRAILER {
            return Err(Refusal::Format("it is too short".to_owned()));
        }
        let (access, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: 1. a new mapping, at an address that the kernel chooses; 2. it is this value's until it is dropped.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, access, flags, file.as_fd(), 0) };
        let at = at.map_err(|error| Refusal::Io(error.into()))?;
        let at = NonNull::new(at).ok_or_else(|| Refusal::Format("it is mapped at zero".to_owned()))?;
        Ok(Self { at, length })
    }

    /// Where bytes are.
    pub(super) fn place(&self, bytes: Bytes) -> Result<P, Refusal> {
        let end = bytes
            .at
            .checked_add(bytes.length)
            .filter(|end| *end <= self.length as u64);
        let at = usize::try_from(bytes.at).ok().filter(|_| end.is_some());
        at.map(|at| self.at.as_ptr().wrapping_byte_add(at))
            .ok_or_else(|| Refusal::Format("it names bytes that it does not have".to_owned()))
    }

    /// Bytes that are nobody's memory.
    pub(super) fn bytes(&self, bytes: Bytes) -> Result<&[u8], Refusal> {
        let at = self.place(bytes)?;
        let length = usize::try_from(bytes.length).unwrap_or_default();
        // SAFETY: 1. the bytes are in the mapping, which lives as long as this value; 2. nobody writes there: the back end has no objects yet
        // that are made of other parts and are worked with.
        Ok(unsafe { std::slice::from_raw_parts(at.cast::<u8>().cast_const(), length) })
    }

    fn state(&self) -> Result<State, Refusal> {
        let end = self.bytes(Bytes {
            at: self.length as u64 - TRAILER,
            length: TRAILER,
        })?;
        let number = |at: usize| {
            let bytes = end.get(at..).and_then(|bytes| bytes.first_chunk());
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        if !end.ends_with(&MAGIC) {
            return Err(Refusal::Format("it is no saved state of an accelerator".to_owned()));
        }
        let json = self.bytes(Bytes {
            at: number(0),
            length: number(8),
        })?;
        let state: State = serde_json::from_slice(json).map_err(|error| Refusal::Format(error.to_string()))?;
        match state.version {
            VERSION => Ok(state),
            other => Err(Refusal::Format(format!(
                "it has version {other}, this release knows {VERSION}"
            ))),
        }
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: 1. the mapping is this value's, and what was made of it is gone: clients hold it, and release their objects before.
        if let Err(error) = unsafe { rustix::mm::munmap(self.at.as_ptr(), self.length) } {
            log::error!("{} bytes of saved memory stay mapped: {error}", self.length);
        }
    }
}
