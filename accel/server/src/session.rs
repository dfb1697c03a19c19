//! One client, which is a process with its objects and its window, and what a thread of the server carries its calls out with.
//!
//! Obligations of what is `unsafe` here and in generated code: pointers into the arena are handed to a back end that may use them until its
//! work is done. So all of a client's queues are finished before its window goes ([`Client::end`]): those that it still has, and those
//! that it released with work in them ([`Client::retire`]). Knows no call.
#![allow(
    unsafe_code,
    reason = "asks functions of a C API, and hands out addresses in memory that is shared with the client"
)]

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use accel_proto::opencl::{CommandQueue, Event, Mem};
use accel_proto::{AnyHandle, Call, Handle, List, MESSAGE, Pieces, Plain, Reply, Sorted, Span, Writer};
use accel_transport::Position;
use accel_window::Window;

use crate::api::{Api, Backend, Code, P};
use crate::arguments;
use crate::completions::Completions;
use crate::cuda::Cuda;
use crate::marshal::{Answer, Copies, Many, Place, Places, Properties};
use crate::objects::{Form, Held, MaybeHeld, Object, Sort, State};
use crate::quota::Charge;
use crate::saved::{Image, Order, Replay};
use crate::svm::Svm;
use crate::table::Table;
use crate::tenant::Tenant;

/// Numbers of the API (cl.h).
const EVENT_COMMAND_EXECUTION_STATUS: u32 = 0x11d3;
const DEVICE_MAX_MEM_ALLOC_SIZE: u32 = 0x1010;
const DEVICE_GLOBAL_MEM_SIZE: u32 = 0x101f;
const DEVICE_SVM_CAPABILITIES: u32 = 0x1053;
const SVM_COARSE_GRAIN_BUFFER: u64 = 1;
const DEVICE_EXECUTION_CAPABILITIES: u32 = 0x1029;
const EXEC_NATIVE_KERNEL: u64 = 2;

/// The state of an event that nobody will set any more: complete. A failure would be truer, but after one a context may be unusable (OpenCL
/// API, clSetUserEventStatus), and PoCL 3.1 ends the process when a command fails by two of its dependencies. What goes on writes to
/// objects of a client that is gone.
const ABANDONED: i32 = 0;

/// A client and all that is its own.
#[derive(Debug)]
pub(crate) struct Client {
    pub(crate) backend: Arc<Backend>,
    /// What all clients of the server have together.
    pub(crate) tenant: Arc<Tenant>,
    tables: RwLock<[Table; Sort::ALL.len()]>,
    /// Queues that were released with work in them, each with an event that is complete when that is done, if the back end has such.
    pub(crate) retired: Mutex<Vec<(Held, Option<Held>)>>,
    pub(crate) completions: Arc<Completions>,
    pub(crate) svm: Svm,
    /// Set when it is gone, for work that looks at it.
    pub(crate) abandoned: AtomicBool,
    /// Waits end when their time is over: not where its machine is frozen, to which no interrupt comes.
    pub(crate) has_timers: bool,
    /// Calls that make objects are kept, in this order, where the client can be saved.
    pub(crate) order: Option<Order>,
    /// Why it cannot be all the same.
    pub(crate) unsaved: OnceLock<&'static str>,
    /// What it has of CUDA, from its first call of that on.
    pub(crate) cuda: Mutex<Option<Cuda>>,
    /// For each of its threads: held while that works on a record; where it was in its rings after the last one.
    pub(crate) turns: Vec<Mutex<Option<Position>>>,
    /// The last two to go: what memory of a client is made of that was saved, and its window.
    pub(crate) _image: Option<Arc<Image>>,
    pub(crate) window: Option<Window>,
}

impl Client {
    pub(crate) fn new(backend: Arc<Backend>, tenant: Arc<Tenant>, window: Option<Window>) -> Self {
        Self {
            backend,
            tenant,
            tables: RwLock::new(Sort::ALL.map(Table::new)),
            retired: Mutex::default(),
            completions: Arc::default(),
            svm: Svm::default(),
            abandoned: AtomicBool::new(false),
            has_timers: true,
            order: None,
            unsaved: OnceLock::new(),
            cuda: Mutex::default(),
            turns: Vec::new(),
            _image: None,
            window,
        }
    }

    /// Bytes of the arena.
    pub(crate) fn arena(&self) -> u64 {
        self.window.as_ref().map_or(0, |window| window.geometry().arena())
    }

    pub(crate) fn tables(&self) -> RwLockReadGuard<'_, [Table; Sort::ALL.len()]> {
        self.tables.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tables_mut(&self) -> RwLockWriteGuard<'_, [Table; Sort::ALL.len()]> {
        self.tables.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn find(&self, sort: Sort, name: u32) -> Result<Held, Code> {
        let tables = self.tables();
        let table = tables.get(sort as usize).ok_or(Code(sort.invalid()))?;
        table.find(name)
    }

    /// What the client was not told of the failure of: the objects that it goes on with were never made.
    pub(crate) fn fail(&self, object: AnyHandle, code: Code) {
        let mut tables = self.tables_mut();
        if let Some(table) = Sort::of(object.c_type).and_then(|sort| tables.get_mut(sort as usize)) {
            table.fail(object.raw, code);
        }
    }

    /// The client is gone, and sets no event any more: what waits for one of its events goes on. May be called again.
    pub(crate) fn abandon(&self) {
        self.abandoned.store(true, Ordering::SeqCst);
        let tables = self.tables();
        let events: Vec<Held> = tables
            .get(Sort::Event as usize)
            .into_iter()
            .flat_map(Table::all)
            .collect();
        drop(tables);
        let Ok(function) = self.backend.api.clSetUserEventStatus() else {
            return;
        };
        for event in events {
            if matches!(event.state, State::UserEvent) {
                // SAFETY: 1. the event is one of the user's and is held. One that is set already is an error, which is nothing here.
                _ = unsafe { function(event.raw(), ABANDONED) };
            }
        }
    }

    /// Whether it is gone.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// Waits until no work is left, and releases everything: events, kernels and what they need last. No thread works for it any more.
    pub(crate) fn end(&self) {
        self.completions.end();
        self.abandon();
        let queues = self.queues();
        for queue in &queues {
            self.finish(queue);
        }
        self.forget_retired();
        crate::cuda::end(self);
        if let Some(meter) = &self.tenant.meter {
            meter.forget(std::ptr::from_ref(self).addr());
        }
        // What was made with something goes before it; owners would see to it, too.
        for sort in [Sort::Event, Sort::Kernel, Sort::Program, Sort::Sampler, Sort::Mem] {
            drop(self.clear(sort));
        }
        self.svm.end(&self.backend.api);
        drop(queues);
        for sort in [Sort::CommandQueue, Sort::Context, Sort::Device] {
            drop(self.clear(sort));
        }
    }

    fn clear(&self, sort: Sort) -> Vec<Arc<Object>> {
        let mut tables = self.tables_mut();
        tables.get_mut(sort as usize).map(Table::clear).unwrap_or_default()
    }

    /// Waits until a queue's commands are complete; whether that was possible.
    pub(crate) fn finish(&self, queue: &Held) -> bool {
        let Ok(function) = self.backend.api.clFinish() else {
            return false;
        };
        // SAFETY: 1. the queue is held.
        let status = unsafe { function(queue.raw()) };
        if status != 0 {
            log::warn!("a client's queue ends with {status}");
        }
        status == 0
    }

    /// An event that is complete when all is that is in the queue now, if the back end has such.
    pub(crate) fn mark(&self, queue: &Held) -> Option<Held> {
        let api = &self.backend.api;
        let mut raw: P = std::ptr::null_mut();
        let marked = api.clEnqueueMarkerWithWaitList().is_ok_and(|function| {
            // SAFETY: 1. the queue is held; 2. the place has room for an event.
            unsafe { function(queue.raw(), 0, std::ptr::null_mut(), (&raw mut raw).cast()) == 0 }
        });
        let event = (marked && !raw.is_null()).then(|| {
            let event = Object::new(&self.backend, (Sort::Event, raw), State::Plain, &[queue]);
            Held(Arc::new(event))
        });
        if let Ok(function) = api.clFlush() {
            // SAFETY: 1. the queue is held. The marker is submitted.
            _ = unsafe { function(queue.raw()) };
        }
        event
    }

    /// The client releases a queue, which may have work in it. Releasing flushes (OpenCL API, clReleaseCommandQueue).
    fn retire(&self, queue: Held) {
        let api = &self.backend.api;
        if let Ok(function) = api.clFlush() {
            // SAFETY: 1. the queue is held. What fails is told by nobody: the client has let go.
            _ = unsafe { function(queue.raw()) };
        }
        let event = self.mark(&queue);
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.push((queue, event));
        // What is done goes; in most cases that is all.
        let (done, busy) = std::mem::take(&mut *retired)
            .into_iter()
            .partition(|(_, event)| self.is_done(event.as_ref()));
        *retired = busy;
        drop(retired);
        drop::<Vec<_>>(done);
    }

    /// Whether a command is complete.
    pub(crate) fn is_done(&self, event: Option<&Held>) -> bool {
        let (Some(event), Ok(function)) = (event, self.backend.api.clGetEventInfo()) else {
            return false;
        };
        let mut state = 1_i32;
        let at = (&raw mut state).cast::<c_void>();
        // SAFETY: 1. the event is held; 2. the place has the four bytes that are said.
        let status = unsafe { function(event.raw(), EVENT_COMMAND_EXECUTION_STATUS, 4, at, std::ptr::null_mut()) };
        status == 0 && state <= 0
    }
}

/// What a thread carries a client's calls out with, and the reply to the current one.
pub(crate) struct Session<'c> {
    pub(crate) client: &'c Client,
    /// Whether the current call is a command whose time is measured.
    is_command: Cell<bool>,
    /// Its event.
    event: Cell<Option<Held>>,
    /// What is there in place of the arena while calls of before are made again.
    pub(crate) replay: Option<Replay>,
    encoded: Box<[u8]>,
    length: usize,
    /// Where a call is written that is kept; empty until one is.
    pub(crate) scratch: RefCell<Vec<u8>>,
    /// Where in the arena it may go.
    place: Option<Span>,
}

impl std::fmt::Debug for Session<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl<'c> Session<'c> {
    pub(crate) fn new(client: &'c Client) -> Self {
        Self {
            client,
            is_command: Cell::new(false),
            event: Cell::new(None),
            replay: None,
            encoded: vec![0; MESSAGE].into(),
            length: 0,
            scratch: RefCell::default(),
            place: None,
        }
    }

    pub(crate) fn api(&self) -> &'c Api {
        &self.client.backend.api
    }

    /// An object, or the code for one that is none.
    pub(crate) fn object<K: Sorted>(&self, name: Handle<K>) -> Result<Held, Code> {
        self.client.find(K::SORT, name.raw())
    }

    /// An object or NULL.
    pub(crate) fn optional<K: Sorted>(&self, name: Handle<K>) -> Result<MaybeHeld, Code> {
        let found = (!name.is_null()).then(|| self.object(name));
        Ok(MaybeHeld(found.transpose()?))
    }

    /// Several objects.
    pub(crate) fn objects<K: Sorted>(&self, names: Option<&List<'_, Handle<K>>>) -> Result<Many, Code> {
        let Some(names) = names else {
            return Ok(Many::default());
        };
        let held: Result<Vec<_>, _> = names.iter().map(|name| self.object(name)).collect();
        held.map(Many::new)
    }

    /// The current call is a command whose time is measured, until it ends.
    pub(crate) fn begin_command(&self) {
        self.is_command.set(true);
        self.event.set(None);
    }

    /// It has been carried out: its event, if it has one.
    pub(crate) fn end_command(&self) -> Option<Held> {
        self.is_command.set(false);
        self.event.take()
    }

    /// A place for a command's event, which the client has a name for, or which its time is measured by.
    pub(crate) fn place(&self, name: Handle<Event>) -> Place {
        Place::new(name, self.is_command.get())
    }

    /// Something that a call has made, under the name that the client chose; nothing was asked for if there is neither.
    pub(crate) fn insert<K: Sorted>(&self, name: Handle<K>, raw: P, owners: &[&Held]) -> Result<(), Code> {
        let state = (!raw.is_null()).then(|| arguments::state_of(&self.client.backend, K::SORT, raw));
        self.insert_with(name, raw, owners, state.unwrap_or(State::Plain))
    }

    /// The same, of which more is known.
    pub(crate) fn insert_with<K: Sorted>(
        &self,
        name: Handle<K>,
        raw: P,
        owners: &[&Held],
        state: State,
    ) -> Result<(), Code> {
        let is_event = K::SORT == Sort::Event && self.is_command.get();
        match (raw.is_null(), name.is_null()) {
            (true, true) => return Ok(()),
            (false, true) if is_event => {
                let object = Object::new(&self.client.backend, (K::SORT, raw), state, owners);
                self.event.set(Some(Held(Arc::new(object))));
                return Ok(());
            }
            (true, false) => return Err(Code::OUT_OF_RESOURCES),
            (false, _) => {}
        }
        state.inherit(owners);
        let mut object = Object::new(&self.client.backend, (K::SORT, raw), state, owners);
        object.name = name.raw();
        object.order = self.client.order.as_ref().map_or(0, Order::next);
        let object = Arc::new(object);
        if is_event {
            self.event.set(Some(Held(Arc::clone(&object))));
        }
        let inserted = match self.client.tables_mut().get_mut(K::SORT as usize) {
            Some(table) => table.insert(name.raw(), Arc::clone(&object)),
            None => Err(Code::INVALID_VALUE),
        };
        // Refused, it is released here, when the table is no longer locked.
        drop(object);
        if inserted.is_ok() && self.client.abandoned.load(Ordering::SeqCst) {
            self.client.abandon();
        }
        inserted
    }

    /// A new memory object of this form, for which so much is charged; what it was charged for, it has.
    pub(crate) fn insert_memory(
        &self,
        name: Handle<Mem>,
        raw: P,
        owners: &[&Held],
        (form, charge): (Form, Option<Charge>),
    ) -> Result<(), Code> {
        let charge = charge.and_then(|charge| match raw.is_null() {
            true => Some(charge),
            false => charge.until_gone(&self.client.backend, raw),
        });
        self.insert_with(name, raw, owners, State::memory(form, charge))
    }

    /// Several; places that the back end has not filled are none.
    pub(crate) fn insert_all<K: Sorted>(
        &self,
        names: Option<&List<'_, Handle<K>>>,
        places: &Places,
        owners: &[&Held],
    ) -> Result<(), Code> {
        let (Some(names), Some(raws)) = (names, &places.0) else {
            return Ok(());
        };
        let filled = names.iter().zip(raws).filter(|(_, raw)| !raw.is_null());
        // All of them, so that those behind one that is refused are not lost.
        let inserted: Vec<_> = filled.map(|(name, raw)| self.insert(name, *raw, owners)).collect();
        inserted.into_iter().collect()
    }

    /// The client's last reference is gone.
    pub(crate) fn release<K: Sorted>(&self, name: Handle<K>) -> Result<(), Code> {
        let released = match self.client.tables_mut().get_mut(K::SORT as usize) {
            Some(table) => table.release(name.raw()),
            None => Err(Code(K::SORT.invalid())),
        };
        match released? {
            Some(queue) if K::SORT == Sort::CommandQueue => self.client.retire(Held(queue)),
            released => drop(released),
        }
        Ok(())
    }

    /// Names of objects that the client is told of.
    pub(crate) fn tell<K: Sorted>(&self, raws: &[P]) -> Vec<Handle<K>> {
        let mut tables = self.client.tables_mut();
        let Some(table) = tables.get_mut(K::SORT as usize) else {
            return Vec::new();
        };
        let told = raws.iter().map(|raw| {
            let object = || Object::told(&self.client.backend, (K::SORT, *raw));
            Handle::from_raw(table.tell(*raw, object))
        });
        told.collect()
    }

    /// Objects in an answer become their names. One that the client has no name for is NULL, unless it is told of it.
    pub(crate) fn translate(&self, answer: &mut Answer, count: u64, query: u32, objects: &[(i64, Sort)]) {
        let Some((_, sort)) = objects.iter().find(|(name, _)| *name == i64::from(query)) else {
            return;
        };
        let mut tables = self.client.tables_mut();
        let Some(table) = tables.get_mut(*sort as usize) else {
            return;
        };
        answer.replace(count, |word| {
            let raw: P = std::ptr::with_exposed_provenance_mut(usize::try_from(word).unwrap_or_default());
            let name = match sort {
                _ if raw.is_null() => 0,
                Sort::Platform | Sort::Device => table.tell(raw, || Object::told(&self.client.backend, (*sort, raw))),
                _ => table.name_of(raw).unwrap_or_default(),
            };
            name.into()
        });
    }

    /// What devices have and clients have not: shared virtual memory of fine grain, functions of the client's as kernels, memory beyond the quota. The most
    /// of one object is at least a quarter of all memory (OpenCL API, CL_DEVICE_MAX_MEM_ALLOC_SIZE), as it is of the device.
    pub(crate) fn hide(&self, answer: &mut Answer, query: u32) {
        match query {
            DEVICE_MAX_MEM_ALLOC_SIZE | DEVICE_GLOBAL_MEM_SIZE => {
                answer.replace(u64::MAX, |bytes| self.client.tenant.quota.lower(bytes));
            }
            DEVICE_SVM_CAPABILITIES => answer.replace(u64::MAX, |word| word & SVM_COARSE_GRAIN_BUFFER),
            DEVICE_EXECUTION_CAPABILITIES => answer.replace(u64::MAX, |word| word & !EXEC_NATIVE_KERNEL),
            _ => {}
        }
    }

    /// Where bytes of the arena are. They are the client's to change at any time.
    pub(crate) fn arena(&self, span: Option<Span>) -> Result<P, Code> {
        let Some(span @ Span { offset, length }) = span else {
            return Ok(std::ptr::null_mut());
        };
        if let Some(replay) = &self.replay {
            return replay.find(span).map(|bytes| bytes.as_ptr().cast_mut().cast());
        }
        match &self.client.window {
            Some(window) => {
                let region = window.slice(offset, length).map_err(|_| Code::INVALID_VALUE)?;
                Ok(region.as_ptr().cast())
            }
            // No bytes, of a client without memory: an address that nobody looks at.
            None if length == 0 => Ok(std::ptr::dangling_mut::<u64>().cast()),
            None => Err(Code::OUT_OF_RESOURCES),
        }
    }

    /// Bytes of the arena, copied.
    pub(crate) fn copy(&self, span: Span) -> Result<Vec<u8>, Code> {
        if let Some(replay) = &self.replay {
            return replay.find(span).map(<[u8]>::to_vec);
        }
        let mut bytes = Vec::new();
        let length = usize::try_from(span.length).map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
        bytes
            .try_reserve_exact(length + 1)
            .map_err(|_| Code::OUT_OF_HOST_MEMORY)?;
        bytes.resize(length, 0);
        if let Some(window) = &self.client.window {
            let region = window
                .slice(span.offset, span.length)
                .map_err(|_| Code::INVALID_VALUE)?;
            region.read(0, &mut bytes).map_err(|_| Code::INVALID_VALUE)?;
        }
        Ok(bytes)
    }

    /// Bytes for a part of the arena, if there is one.
    pub(crate) fn give(&self, span: Option<Span>, bytes: &[u8]) -> Result<(), Code> {
        let (Some(span), Some(window)) = (span, &self.client.window) else {
            return Ok(());
        };
        let region = window
            .slice(span.offset, span.length)
            .map_err(|_| Code::INVALID_VALUE)?;
        region.write(0, bytes).map_err(|_| Code::INVALID_VALUE)
    }

    /// Pieces of the arena, copied: a compiler reads them more than once.
    pub(crate) fn pieces(&self, pieces: Option<&Pieces<'_>>) -> Result<Copies, Code> {
        Copies::new(pieces, |span| self.copy(span))
    }

    /// Properties with objects for the values of these keys.
    pub(crate) fn properties<T: Plain>(
        &self,
        list: Option<&List<'_, T>>,
        keys: &[(i64, Sort)],
    ) -> Result<Properties, Code> {
        let mut held = Vec::new();
        let Some(list) = list else {
            return Ok(Properties {
                words: None,
                _held: held,
            });
        };
        let words: Vec<u64> = list.iter().map(word).collect();
        let mut found = Vec::new();
        for pair in words.chunks(2) {
            let &[key, value] = pair else { break };
            if key == 0 {
                break;
            }
            let sort = keys.iter().find(|(known, _)| known.cast_unsigned() == key);
            let value = match sort {
                Some((_, sort)) if value != 0 => {
                    let name = u32::try_from(value).map_err(|_| Code(sort.invalid()))?;
                    let object = self.client.find(*sort, name)?;
                    let address = object.raw().expose_provenance();
                    held.push(object);
                    address as u64
                }
                _ => value,
            };
            found.extend([key, value]);
        }
        found.push(0);
        Ok(Properties {
            words: Some(found),
            _held: held,
        })
    }

    /// The reply to the call.
    pub(crate) fn answer<'a, 'r, C: Call<'a>, R: Reply<'r, C>>(
        &mut self,
        _: &C,
        reply: &R,
        place: Option<Span>,
    ) -> Result<(), Code> {
        let mut writer = Writer::new(&mut self.encoded);
        reply.write(&mut writer);
        self.length = writer.finish().map_err(|_| Code::OUT_OF_RESOURCES)?;
        self.place = place;
        Ok(())
    }

    /// The same by something that writes it; nothing if it does not fit.
    pub(crate) fn encode(&mut self, write: impl FnOnce(&mut Writer<'_>)) {
        let mut writer = Writer::new(&mut self.encoded);
        write(&mut writer);
        self.length = writer.finish().unwrap_or_default();
        self.place = None;
    }

    /// The place in the arena for a reply that is encoded and longer than a record.
    pub(crate) fn answer_goes_to(&mut self, place: Option<Span>) {
        self.place = place;
    }

    /// No reply yet.
    pub(crate) fn clear(&mut self) {
        self.length = 0;
        self.place = None;
    }

    /// The reply, and where in the arena it may go.
    pub(crate) fn encoded(&self) -> (&[u8], Option<Span>) {
        (self.encoded.get(..self.length).unwrap_or_default(), self.place)
    }

    /// A queue's failure that was not told yet.
    pub(crate) fn queue(&self, name: Handle<CommandQueue>) -> Option<Held> {
        self.object(name).ok()
    }
}

/// A property's key or value.
fn word<T: Plain>(value: T) -> u64 {
    let mut bytes = [0; 8];
    value.put(&mut bytes);
    u64::from_le_bytes(bytes)
}
