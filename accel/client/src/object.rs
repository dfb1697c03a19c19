//! The objects that the application holds: each begins with a pointer to the ICD's dispatch table, and stands for one that the server has
//! under the same name.
//!
//! ```text
//!   made (named, the server may not know it) ──call succeeds──▶ exists ──last reference──▶ released at the server, name comes back
//!                └──────── call fails ──▶ dropped, name comes back at once
//! ```
//!
//! The application's references are counted here. An object is kept, beyond them, by those that were made with it, so that whatever a
//! query names is there; the server hears of its release when nothing here needs it any more. Knows what kinds there are, no call
//! but the releases, and no ring.
#![allow(
    unsafe_code,
    reason = "references that the application holds are raw pointers; each block says what its count rests on"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use accel_proto::{Handle, Kind, Sort, Sorted, opencl as calls};

use crate::arguments::Ref;
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::dispatch::{DISPATCH, Table};
use crate::kernel::KernelState;
use crate::lock;
use crate::mapping::MemState;
use crate::names::Place;
use crate::notify::Destructor;

/// Whether records about an object of this kind keep the application's order, whichever thread puts them: queues keep commands in
/// order, kernels their arguments, and an event has to be made before it is waited for.
pub(crate) fn is_ordered(sort: Sort) -> bool {
    matches!(sort, Sort::CommandQueue | Sort::Kernel | Sort::Event)
}

/// A kind of objects of which there are some here.
pub(crate) trait Typed: Sorted {
    /// What the API says of what is none.
    const INVALID: Code = Code(Self::SORT.invalid());
}

impl<K: Sorted> Typed for K {}

/// What an object of some kind has besides its name.
#[derive(Debug)]
pub(crate) enum Data {
    /// Nothing.
    None,
    /// A context's properties as they were given, with the zero at their end.
    Context(Vec<i64>),
    /// A memory object's mappings and host memory.
    Mem(MemState),
    /// A kernel's arguments.
    Kernel(KernelState),
    /// An event: whether it is known to be complete, which it stays.
    Event(AtomicBool),
}

/// Where an object is.
enum Home {
    /// It was made by this client.
    Made(&'static Connection, u32),
    /// The server told of it; another server tells of it again.
    Told(Mutex<(&'static Connection, u32)>),
}

/// A query: its parameter, and what else its answer depends on.
pub(crate) type CacheKey = (u32, Vec<u64>);

/// An object.
#[repr(C)]
pub(crate) struct Object {
    /// The loader reads it: it is the first member.
    dispatch: &'static Table,
    sort: Sort,
    exists: AtomicBool,
    /// A record that mentions it was put by one end while another's was not done.
    pub(crate) shared: AtomicBool,
    references: AtomicU32,
    /// The last record that mentions it: see [`Object::last`].
    last: AtomicU64,
    home: Home,
    parents: Vec<Arc<Object>>,
    cache: Mutex<BTreeMap<CacheKey, Vec<u8>>>,
    pub(crate) data: Data,
    pub(crate) destructors: Mutex<Vec<Destructor>>,
}

/// Bits of a record's number in [`Object::last`]; an end's index, plus one, is above.
const NUMBER_BITS: u32 = 48;

impl Object {
    fn new(sort: Sort, home: Home, parents: Vec<Arc<Self>>, data: Data) -> Arc<Self> {
        let is_told = matches!(home, Home::Told(_));
        Arc::new(Self {
            dispatch: &DISPATCH,
            sort,
            exists: AtomicBool::new(is_told),
            shared: AtomicBool::new(false),
            references: AtomicU32::new(1),
            last: AtomicU64::new(0),
            home,
            parents,
            cache: Mutex::default(),
            data,
            destructors: Mutex::default(),
        })
    }

    /// One that this client names. It does not exist before [`Object::publish`].
    pub(crate) fn make<K: Typed>(
        connection: &'static Connection,
        parents: &[&Self],
        data: Data,
    ) -> Result<Arc<Self>, Code> {
        let name = connection.take_name::<K>()?;
        let parents = parents.iter().map(|parent| parent.share()).collect();
        Ok(Self::new(K::SORT, Home::Made(connection, name.raw()), parents, data))
    }

    /// One that the server has told of. It stays for as long as the process.
    pub(crate) fn told<K: Typed>(connection: &'static Connection, name: Handle<K>, parents: &[&Self]) -> &'static Self {
        let parents = parents.iter().map(|parent| parent.share()).collect();
        let object = Self::new(
            K::SORT,
            Home::Told(Mutex::new((connection, name.raw()))),
            parents,
            Data::None,
        );
        connection.register(&object);
        // SAFETY: the count that `into_raw` leaves is never given back, so the object lives for as long as the process.
        unsafe { &*Arc::into_raw(object) }
    }

    /// Another server tells of it.
    pub(crate) fn tell_again<K: Typed>(&self, connection: &'static Connection, name: Handle<K>) {
        if let Home::Told(told) = &self.home {
            *lock(told) = (connection, name.raw());
            connection.register(self);
            self.forget_answers();
        }
    }

    /// The server has made it: the application gets its only reference.
    pub(crate) fn publish(self: Arc<Self>) -> Ref {
        self.exists.store(true, Ordering::Release);
        if let Home::Made(connection, _) = self.home {
            connection.register(&self);
        }
        Ref::to(Arc::into_raw(self))
    }

    /// The server has made it, or will have; it is this client's alone.
    pub(crate) fn exists_from_now_on(&self) {
        self.exists.store(true, Ordering::Release);
    }

    /// One more owner.
    pub(crate) fn share(&self) -> Arc<Self> {
        let this: *const Self = self;
        // SAFETY: every object is made by `new`, in an `Arc`; the reference shows that it lives.
        unsafe { Arc::increment_strong_count(this) };
        // SAFETY: the count that was just taken.
        unsafe { Arc::from_raw(this) }
    }

    /// The application has one reference more.
    pub(crate) fn retain(&self) {
        if self.references.fetch_add(1, Ordering::AcqRel) == 0 {
            // What others keep alive is the application's again. Its count is what `release` takes back.
            std::mem::forget(self.share());
        }
    }

    /// The application has one reference less. With the last one the object is over, unless others were made with it.
    pub(crate) fn release(&self) -> Result<(), Code> {
        let before = self
            .references
            .try_update(Ordering::AcqRel, Ordering::Acquire, |count| count.checked_sub(1));
        if before.map_err(|_| Code::INVALID_VALUE)? == 1 {
            // SAFETY: the count that `publish` or `retain` left for the application's references, of which this was the last.
            drop(unsafe { Arc::from_raw(std::ptr::from_ref(self)) });
        }
        Ok(())
    }

    /// How many references the application has.
    pub(crate) fn references(&self) -> u32 {
        self.references.load(Ordering::Acquire)
    }

    pub(crate) fn sort(&self) -> Sort {
        self.sort
    }

    /// Whether it is of that kind. What is no object of this library has another dispatch table.
    pub(crate) fn is<K: Typed>(&self) -> bool {
        std::ptr::eq(self.dispatch, &DISPATCH) && self.sort == K::SORT
    }

    /// As an address.
    pub(crate) fn as_ref(&self) -> Ref {
        Ref::to(self)
    }

    /// The server's name for it.
    pub(crate) fn handle<K: Kind>(&self) -> Handle<K> {
        Handle::from_raw(self.raw())
    }

    pub(crate) fn raw(&self) -> u32 {
        match &self.home {
            Home::Made(_, raw) => *raw,
            Home::Told(told) => lock(told).1,
        }
    }

    /// The connection to the server that has it.
    ///
    /// # Errors
    /// That server is gone. Of what each server tells anew, it is looked for at the next one.
    pub(crate) fn connection(&self) -> Result<&'static Connection, Code> {
        let at = self.home();
        if !at.is_over() {
            return Ok(at);
        }
        match self.home {
            Home::Made(..) => Err(Code::OUT_OF_RESOURCES),
            Home::Told(_) => {
                let next = crate::process::process().connection()?;
                match std::ptr::eq(self.home(), next) {
                    true => Ok(next),
                    false => Err(Code::DEVICE_NOT_AVAILABLE),
                }
            }
        }
    }

    fn home(&self) -> &'static Connection {
        match &self.home {
            Home::Made(connection, _) => connection,
            Home::Told(told) => lock(told).0,
        }
    }

    /// Whether it is at that connection's server.
    pub(crate) fn is_at(&self, connection: &Connection) -> bool {
        std::ptr::eq(self.home(), connection)
    }

    /// What it was made with, of that kind, at any distance.
    pub(crate) fn parent<K: Typed>(&self) -> Option<&Self> {
        let near = self.parents.iter().find(|parent| parent.is::<K>());
        near.map(AsRef::as_ref)
            .or_else(|| self.parents.iter().find_map(|parent| parent.parent::<K>()))
    }

    /// Where the last record about it was put.
    pub(crate) fn last(&self) -> Option<Place> {
        let last = self.last.load(Ordering::Acquire);
        let end = usize::try_from(last >> NUMBER_BITS).ok()?.checked_sub(1)?;
        let number = last & ((1 << NUMBER_BITS) - 1);
        Some(Place { end, number })
    }

    /// A record about it was put.
    pub(crate) fn put_at(&self, place: Place) {
        let end = place.end as u64 + 1;
        self.last.store(end << NUMBER_BITS | place.number, Ordering::Release);
    }

    /// An answer that was kept, for who looks at it.
    pub(crate) fn with_answer<T>(&self, key: &CacheKey, look: impl FnOnce(&[u8]) -> T) -> Option<T> {
        lock(&self.cache).get(key).map(|answer| look(answer))
    }

    /// Keeps an answer.
    pub(crate) fn keep_answer(&self, key: CacheKey, answer: &[u8]) {
        lock(&self.cache).insert(key, answer.to_vec());
    }

    /// Something has changed.
    pub(crate) fn forget_answers(&self) {
        lock(&self.cache).clear();
    }

    /// Whether commands have ended, as far as is known here; of an event.
    pub(crate) fn completion(&self) -> Option<&AtomicBool> {
        match &self.data {
            Data::Event(complete) => Some(complete),
            _ => None,
        }
    }

    fn tell_the_server(&self, connection: &'static Connection) {
        macro_rules! release {
            ($call:ident $parameter:ident) => {{
                let call = calls::$call {
                    $parameter: self.handle(),
                };
                connection.send(&call, &Touched::release(self))
            }};
        }
        let told = match self.sort {
            Sort::Platform => Ok(()),
            Sort::Device => release!(ReleaseDevice device),
            Sort::Context => release!(ReleaseContext context),
            Sort::CommandQueue => release!(ReleaseCommandQueue command_queue),
            Sort::Mem => release!(ReleaseMemObject memobj),
            Sort::Program => release!(ReleaseProgram program),
            Sort::Kernel => release!(ReleaseKernel kernel),
            Sort::Event => release!(ReleaseEvent event),
            Sort::Sampler => release!(ReleaseSampler sampler),
        };
        // A server that is gone has let go of everything.
        if told.is_ok()
            && let Some(place) = self.last()
        {
            connection.release_name(self.sort, self.raw(), place);
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let Home::Made(connection, raw) = self.home else {
            return;
        };
        if !self.exists.load(Ordering::Acquire) {
            connection.give_back_name(self.sort, raw);
            return;
        }
        connection.forget(self);
        if !connection.is_over() {
            self.tell_the_server(connection);
        }
        let destructors = std::mem::take(&mut *lock(&self.destructors));
        // The last that was registered is called first (OpenCL API, clSetMemObjectDestructorCallback).
        for destructor in destructors.into_iter().rev() {
            destructor.call(self.as_ref());
        }
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:#x}", self.sort, self.raw())
    }
}

/// The name of one that may be NULL.
pub(crate) fn handle_of<K: Kind>(object: Option<&Object>) -> Handle<K> {
    object.map_or(Handle::NULL, Object::handle)
}

/// The same of one that is about to be made.
pub(crate) fn handle_of_made<K: Kind>(object: Option<&Arc<Object>>) -> Handle<K> {
    handle_of(object.map(AsRef::as_ref))
}
