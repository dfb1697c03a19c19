//! Objects of a client: what the server knows of each.
//!
//! An object of the back end has one reference, the server's, which is given back when the last holder here lets go: the table, a call
//! that works with it, or an object that was made with it. So one that others need stays, as in the API, and is found by its name for as
//! long; and a call in another thread never loses an object that it works with. Knows no call.
#![allow(
    unsafe_code,
    reason = "objects of a C API are released by its functions, and may be used by all threads"
)]

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accel_proto::{List, rect};
use serde::{Deserialize, Serialize};

pub(crate) use accel_proto::Sort;

use crate::api::{Backend, Code, P};
use crate::arguments::Parameter;
use crate::quota::Charge;
use crate::saved::Logged;
use crate::svm::{Allocation, Used};

/// What the server knows of an object besides what the back end does.
#[derive(Debug)]
pub(crate) enum State {
    /// Nothing.
    Plain,
    /// A memory object.
    Mem(Memory),
    /// A queue.
    Queue(Queue),
    /// A kernel.
    Kernel(Launchable),
    /// An event that the client completes.
    UserEvent,
    /// An event of before the machine was saved.
    Past(Past),
    /// A program that was made of what another server had built; its calls are in its log.
    Rebuilt,
}

/// What is known of a command that was complete when the machine was saved.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Past {
    /// CL_EVENT_COMMAND_TYPE.
    pub(crate) command: u32,
    /// CL_EVENT_COMMAND_EXECUTION_STATUS: complete, or an error.
    pub(crate) status: i32,
    /// When it was queued, submitted, started, ended and complete, where that was measured.
    pub(crate) times: Option<[u64; 5]>,
}

/// A queue.
#[derive(Debug)]
pub(crate) struct Queue {
    /// The first failure of a call that nobody waited for; zero if there was none.
    failed: AtomicI32,
    /// Whether the client may know the times of its commands.
    pub(crate) tells_times: bool,
    /// Properties that the client has asked for, where the back end was asked for others.
    pub(crate) asked: Option<Vec<u64>>,
}

/// A memory object.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) form: Form,
    /// Where it is mapped.
    pub(crate) maps: Mutex<Vec<Map>>,
    /// What of the quota goes with it, where the back end does not tell when it is gone.
    _charge: Option<Charge>,
    /// Shared virtual memory that it is.
    _shared: Option<Arc<Allocation>>,
}

/// What a memory object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// So many bytes.
    Buffer(u64),
    Image,
    Pipe,
}

/// A part that is mapped: while it is, its bytes are in the arena.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Map {
    /// Where in the arena.
    pub(crate) at: u64,
    pub(crate) region: Region,
    /// Whether it goes back to the object in the end.
    pub(crate) writes: bool,
}

/// Which part.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Region {
    Buffer {
        offset: u64,
        length: u64,
    },
    Image {
        origin: [u64; 3],
        region: [u64; 3],
        length: u64,
    },
}

impl Region {
    /// Its bytes in the arena.
    pub(crate) fn length(self) -> u64 {
        let (Self::Buffer { length, .. } | Self::Image { length, .. }) = self;
        length
    }
}

/// A kernel.
#[derive(Debug)]
pub(crate) struct Launchable {
    /// Held by a call that works with it: kernels are not for several threads at once (OpenCL API, clSetKernelArg).
    alone: Mutex<()>,
    /// The first failure of an argument that nobody waited for.
    failed: AtomicI32,
    /// Objects that are its arguments, by their places: a back end need not hold them before a launch, and the client may release them.
    arguments: Mutex<BTreeMap<u32, Held>>,
    /// Shared virtual memory that is.
    memory: Mutex<Used>,
    pub(crate) parameters: Option<Vec<Parameter>>,
}

impl State {
    pub(crate) fn memory(form: Form, charge: Option<Charge>) -> Self {
        Self::Mem(Memory {
            form,
            maps: Mutex::default(),
            _charge: charge,
            _shared: None,
        })
    }

    /// A buffer that is shared virtual memory.
    pub(crate) fn shared(form: Form, memory: Arc<Allocation>) -> Self {
        Self::Mem(Memory {
            form,
            maps: Mutex::default(),
            _charge: None,
            _shared: Some(memory),
        })
    }

    pub(crate) fn queue(tells_times: bool, asked: Option<Vec<u64>>) -> Self {
        Self::Queue(Queue {
            failed: AtomicI32::new(0),
            tells_times,
            asked,
        })
    }

    /// Parameters are not known where the back end does not tell them, or does not look at arguments.
    pub(crate) fn kernel(parameters: Option<Vec<Parameter>>) -> Self {
        Self::Kernel(Launchable {
            alone: Mutex::default(),
            failed: AtomicI32::new(0),
            arguments: Mutex::default(),
            memory: Mutex::default(),
            parameters,
        })
    }

    /// A kernel that was made of another one has its arguments.
    pub(crate) fn inherit(&self, owners: &[&Held]) {
        let State::Kernel(new) = self else { return };
        for owner in owners {
            if let State::Kernel(old) = &owner.state {
                let arguments = old.arguments.lock().unwrap_or_else(PoisonError::into_inner).clone();
                *new.arguments.lock().unwrap_or_else(PoisonError::into_inner) = arguments;
                let memory = old.use_memory(|used| used.clone());
                new.use_memory(|used| *used = memory);
            }
        }
    }
}

impl Launchable {
    /// An argument is an object from now on, or none.
    pub(crate) fn hold(&self, index: u32, object: Option<Held>) {
        let mut arguments = self.arguments.lock().unwrap_or_else(PoisonError::into_inner);
        let before = match object {
            Some(object) => arguments.insert(index, object),
            None => arguments.remove(&index),
        };
        drop(arguments);
        // It may be the last that held it.
        drop(before);
    }

    /// Looks at, or changes, what it has of shared virtual memory.
    pub(crate) fn use_memory<T>(&self, change: impl FnOnce(&mut Used) -> T) -> T {
        change(&mut self.memory.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// An object of the back end, and one reference to it.
#[derive(Debug)]
pub(crate) struct Object {
    raw: P,
    sort: Sort,
    /// Whether the reference is to be given back; platforms and whole devices have none.
    counted: bool,
    pub(crate) state: State,
    backend: Arc<Backend>,
    /// What it was made with, which goes after it.
    owners: Vec<Arc<Self>>,
    /// The name that the client chose; zero if it chose none.
    pub(crate) name: u32,
    /// When it was made, where that is kept.
    pub(crate) order: u64,
    /// The calls that made it and brought it to its state, where they are kept.
    pub(crate) log: Mutex<Vec<Logged>>,
}

// SAFETY: 1. objects of the API may be used from all threads (OpenCL API, "Thread safety"), but for kernels, which `alone` is for; 2. the
// null back end's are numbers.
unsafe impl Send for Object {}
// SAFETY: 1. as for `Send`; 2. its own state is behind locks and atomics.
unsafe impl Sync for Object {}

impl Object {
    pub(crate) fn new(backend: &Arc<Backend>, (sort, raw): (Sort, P), state: State, owners: &[&Held]) -> Self {
        backend.census.made(sort);
        Self {
            raw,
            sort,
            counted: true,
            state,
            backend: Arc::clone(backend),
            owners: owners.iter().map(|owner| Arc::clone(&owner.0)).collect(),
            name: 0,
            order: 0,
            log: Mutex::default(),
        }
    }

    /// One that the back end has told of and that stays for ever.
    pub(crate) fn told(backend: &Arc<Backend>, (sort, raw): (Sort, P)) -> Self {
        Self {
            raw,
            sort,
            counted: false,
            state: State::Plain,
            backend: Arc::clone(backend),
            owners: Vec::new(),
            name: 0,
            order: 0,
            log: Mutex::default(),
        }
    }

    /// As the back end knows it.
    pub(crate) fn raw(&self) -> P {
        self.raw
    }

    pub(crate) fn sort(&self) -> Sort {
        self.sort
    }

    /// Which object it is.
    pub(crate) fn address(&self) -> usize {
        self.raw.addr()
    }

    /// What it needs: what it was made with, and a kernel's arguments.
    pub(crate) fn needs(&self) -> Vec<Arc<Self>> {
        let mut needs = self.owners.clone();
        if let State::Kernel(kernel) = &self.state {
            let arguments = kernel.arguments.lock().unwrap_or_else(PoisonError::into_inner);
            needs.extend(arguments.values().map(|held| Arc::clone(&held.0)));
        }
        needs
    }

    /// What of this sort it was made with.
    pub(crate) fn owner(&self, sort: Sort) -> Option<&Arc<Self>> {
        self.owners.iter().find(|owner| owner.sort == sort)
    }

    /// The failure of a queue or a kernel that nobody has heard of.
    pub(crate) fn untold_failure(&self) -> i32 {
        match &self.state {
            State::Queue(Queue { failed, .. }) | State::Kernel(Launchable { failed, .. }) => {
                failed.load(Ordering::Relaxed)
            }
            _ => 0,
        }
    }

    /// Whose object it is.
    pub(crate) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Whether it was made with another object, at any distance.
    pub(crate) fn is_made_with(&self, other: &Held) -> bool {
        let mut owners = self.owners.iter();
        owners.any(|owner| Arc::ptr_eq(owner, &other.0) || owner.is_made_with(other))
    }

    /// Of an event: the queue of its command; of others none.
    pub(crate) fn queue(&self) -> Option<&Queue> {
        self.owners.iter().find_map(|owner| match &owner.state {
            State::Queue(queue) if self.sort == Sort::Event => Some(queue),
            _ => None,
        })
    }

    /// Of a memory object: what it is.
    pub(crate) fn memory(&self) -> Result<&Memory, Code> {
        match &self.state {
            State::Mem(memory) => Ok(memory),
            _ => Err(Code::INVALID_MEM_OBJECT),
        }
    }

    /// Whether an offset and a length are within the bytes of a buffer.
    pub(crate) fn in_bounds(&self, (offset, length): (u64, u64)) -> Result<(), Code> {
        let Form::Buffer(size) = self.memory()?.form else {
            return Err(Code::INVALID_MEM_OBJECT);
        };
        let end = offset.checked_add(length).filter(|end| *end <= size);
        end.map(|_| ()).ok_or(Code::INVALID_VALUE)
    }

    /// Whether a box of origin and region, with rows and slices of these pitches, is within the bytes of a buffer.
    pub(crate) fn rect_in_bounds(
        &self,
        (origin, region): (&List<'_, u64>, &List<'_, u64>),
        (row_pitch, slice_pitch): (u64, u64),
    ) -> Result<(), Code> {
        let end = rect(origin, region, row_pitch, slice_pitch).ok_or(Code::INVALID_VALUE)?;
        self.in_bounds((0, end))
    }

    /// Of a kernel: until the guard goes, this thread alone works with it.
    pub(crate) fn alone(&self) -> Option<MutexGuard<'_, ()>> {
        match &self.state {
            State::Kernel(kernel) => Some(kernel.alone.lock().unwrap_or_else(PoisonError::into_inner)),
            _ => None,
        }
    }

    /// Remembers the first failure of a call that nobody waited for.
    pub(crate) fn keep_failure(&self, code: Code) {
        if let State::Queue(Queue { failed, .. }) | State::Kernel(Launchable { failed, .. }) = &self.state {
            // One that is there already stays: it is the cause, or at least was before.
            _ = failed.compare_exchange(0, code.0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Tells it, once.
    pub(crate) fn take_failure(&self) -> Result<(), Code> {
        match &self.state {
            State::Queue(Queue { failed, .. }) | State::Kernel(Launchable { failed, .. }) => {
                crate::api::check(failed.swap(0, Ordering::Relaxed))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        if !self.counted {
            return;
        }
        self.backend.census.gone(self.sort);
        let api = &self.backend.api;
        let function = match self.sort {
            Sort::Platform => return,
            Sort::Device => api.clReleaseDevice(),
            Sort::Context => api.clReleaseContext(),
            Sort::CommandQueue => api.clReleaseCommandQueue(),
            Sort::Mem => api.clReleaseMemObject(),
            Sort::Program => api.clReleaseProgram(),
            Sort::Kernel => api.clReleaseKernel(),
            Sort::Event => api.clReleaseEvent(),
            Sort::Sampler => api.clReleaseSampler(),
        };
        if let Ok(function) = function {
            // SAFETY: 1. the object is of this sort, and this is the one reference that the server has; 2. nobody here holds it any more.
            let status = unsafe { function(self.raw) };
            if status != 0 {
                log::warn!("the back end refuses to release {}: {status}", self.sort.c_type());
            }
        }
    }
}

/// An object that somebody here works with.
#[derive(Debug, Clone)]
pub(crate) struct Held(pub(crate) Arc<Object>);

impl Deref for Held {
    type Target = Object;

    fn deref(&self) -> &Object {
        &self.0
    }
}

/// The same, or NULL.
#[derive(Debug, Clone)]
pub(crate) struct MaybeHeld(pub(crate) Option<Held>);

impl MaybeHeld {
    pub(crate) fn raw(&self) -> P {
        self.0.as_ref().map_or(std::ptr::null_mut(), |held| held.raw())
    }
}
