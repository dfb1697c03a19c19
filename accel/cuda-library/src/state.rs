//! A client: its objects, its memory, its descriptors, and how its calls are carried out.
//!
//! ```text
//!   call ── carried out ──▶ answered, when what was copied from the arena is done
//!             └── fails, and nobody waits: every later call that is waited for tells it, as the runtime's sticky errors are told ──┘
//!   end  ── the device is waited for ──▶ descriptors, handles of libraries, events, streams, modules, memory
//! ```
//!
//! Knows no call by name.
#![allow(unsafe_code, reason = "objects end by functions of C")]

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use accel_cuda_null::Quota;
use accel_proto::cuda::{AnyCall, AnyReply, CudaStreamT};
use accel_proto::{Handle, Kind, List, Span, SvmAddress};

use crate::Libraries;
use crate::bytes::Bytes;
use crate::copies::Copies;
use crate::descriptor::Descriptors;
use crate::failure::{Failure, Group, check, of_another};
use crate::generated;
use crate::memory::Memory;
use crate::table::P;

/// Objects of a client at a time.
const MOST: usize = 1 << 20;
/// Names that each stream has without being made: NULL, the legacy one, and the thread's own.
const OWN_STREAMS: u32 = 3;
/// Opaque values that a client was told and may give back; what was told before these is refused.
const MOST_TOLD: usize = 1 << 14;
/// Bytes of each (`cublasLtMatmulAlgo_t`), with which each result of a heuristic begins.
const OPAQUE: usize = 64;
const RESULT: usize = 96;
/// Types of which each object takes memory of the device's that is not charged, and how many of each a client has at a time.
const HANDLES: [&str; 3] = ["cudnnHandle_t", "cublasHandle_t", "curandGenerator_t"];
const MOST_HANDLES: usize = 64;
/// In which order objects end that a client has left: those first that have others.
const ENDS: [&str; 5] = [
    "cudnnHandle_t",
    "cublasHandle_t",
    "curandGenerator_t",
    "cudaEvent_t",
    "cudaStream_t",
];

/// Memory that is shared with the client.
pub trait Arena {
    /// Where bytes of it are, which may change at any time; nothing if they are not in it. It stays until [`State::end`].
    fn address(&self, span: Span) -> Option<*mut u8>;

    /// Copies bytes of it; whether they are in it.
    fn read(&self, span: Span, into: &mut [u8]) -> bool;

    /// How many bytes it has.
    fn length(&self) -> u64;
}

/// A client's.
#[derive(Debug)]
pub struct State {
    /// Bytes of the device's memory that it may have, or as many as there are.
    quota: u64,
    objects: BTreeMap<(&'static str, u32), usize>,
    pub(crate) memory: Memory,
    descriptors: Descriptors,
    pub(crate) copies: Copies,
    told: VecDeque<[u8; OPAQUE]>,
    /// A handle for calls of cublasLt, which name none.
    light: Option<usize>,
    pub(crate) modules: crate::hand::Modules,
    /// The arena, if the runtime has it pinned.
    pinned: Option<Option<usize>>,
    /// The first failure of a call that nobody waited for.
    failed: Option<(Group, i32)>,
}

/// What a call is carried out with.
pub(crate) struct Context<'a> {
    pub(crate) libraries: &'a Libraries,
    pub(crate) state: &'a mut State,
    pub(crate) quota: &'a mut dyn Quota,
    arena: &'a dyn Arena,
    answer: &'a mut dyn FnMut(&AnyReply<'_>),
    is_answered: bool,
}

/// An address of the device's or of an object's as C has it.
pub(crate) fn address(address: u64) -> P {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or_default())
}

impl State {
    /// Of a client that may have so many bytes of memory.
    #[must_use]
    pub fn new(quota: u64) -> Self {
        Self {
            quota,
            objects: BTreeMap::new(),
            memory: Memory::default(),
            descriptors: Descriptors::default(),
            copies: Copies::default(),
            told: VecDeque::new(),
            light: None,
            modules: crate::hand::Modules::default(),
            pinned: None,
            failed: None,
        }
    }

    /// Carries a call out; if somebody `waits`, `answer` has the reply. What failed now, as the library of the call says it.
    pub fn carry_out(
        &mut self,
        (libraries, quota, arena): (&Libraries, &mut dyn Quota, &dyn Arena),
        call: &AnyCall<'_>,
        waits: bool,
        answer: &mut dyn FnMut(&AnyReply<'_>),
    ) -> Option<i32> {
        self.descriptors.trim(libraries);
        if waits && let Err(failure) = self.copies.wait(&libraries.runtime) {
            // What the device tells later, it tells of all before.
            self.fail(Group::Cudart, failure.code(Group::Cudart));
        }
        let failed = self.failed;
        // A call that succeeds is answered by an error all the same if one of before has failed.
        let mut unless_failed = |reply: &AnyReply<'_>| {
            if failed.is_none() {
                answer(reply);
            }
        };
        let mut cx = Context {
            libraries,
            state: self,
            quota,
            arena,
            answer: &mut unless_failed,
            is_answered: false,
        };
        let begin = log::log_enabled!(log::Level::Trace).then(Instant::now);
        let (group, result) = generated::carry_out(&mut cx, call);
        let is_answered = cx.is_answered;
        let code = result.err().map(|failure| failure.code(group));
        if let Some(begin) = begin {
            trace(call, waits, begin.elapsed(), code);
        }
        if !waits {
            if let Some(code) = code {
                self.fail(group, code);
            }
            return code;
        }
        let told = match failed {
            Some((of, code)) if of == group => Some(code),
            Some(_) => Some(of_another(group)),
            None => code,
        };
        match told {
            Some(code) => answer(&call.failed(code)),
            None if !is_answered => answer(&call.failed(0)),
            None => {}
        }
        code
    }

    fn fail(&mut self, group: Group, code: i32) {
        log::debug!("a call that nobody waits for has failed with {code} of {group:?}");
        self.failed.get_or_insert((group, code));
    }

    /// Bytes that the client has.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.memory.used()
    }

    /// The client has ended: everything of it is given back. Its arena can go.
    pub fn end(&mut self, libraries: &Libraries, quota: &mut dyn Quota) {
        libraries.synchronize();
        self.copies.end(&libraries.runtime);
        self.descriptors.clear(libraries);
        let mut objects = std::mem::take(&mut self.objects);
        if let Some(light) = self.light.take() {
            objects.insert(("cublasHandle_t", 0), light);
        }
        for c_type in ENDS {
            for ((_, _), object) in objects.extract_if(.., |(of, _), _| *of == c_type) {
                end(libraries, c_type, object);
            }
        }
        self.modules.end(libraries);
        if let Some(Some(pinned)) = self.pinned.take() {
            let unpinned = libraries.runtime.cudaHostUnregister().and_then(|function| {
                // SAFETY: 1. the function has this type; 2. the arena was registered there, and nothing reads it any more.
                check(unsafe { function(std::ptr::with_exposed_provenance_mut(pinned)) })
            });
            if let Err(failure) = unpinned {
                log::warn!("a client's arena stays pinned: {failure:?}");
            }
        }
        for (begin, length) in self.memory.take_all() {
            let freed = libraries.runtime.cudaFree().and_then(|function| {
                // SAFETY: 1. the function has this type; 2. the client had it allocated, and is gone.
                check(unsafe { function(address(begin)) })
            });
            if let Err(failure) = freed {
                log::warn!("{length} bytes of the device's memory cannot be given back: {failure:?}");
            }
            quota.give_back(length);
        }
        // A library may keep what nobody waits for until the next call; there may be none for long.
        libraries.synchronize();
    }
}

/// A line of a trace, which accel/clients/gpu/run.py reads: number, bytes that it is about, whether somebody waits, nanoseconds, code.
fn trace(call: &AnyCall<'_>, waits: bool, took: Duration, code: Option<i32>) {
    let size = match call {
        AnyCall::BasaltMalloc(call) => call.size,
        AnyCall::BasaltModuleData(call) => call.count,
        AnyCall::CudaLaunchKernel(call) => call.args.len() as u64,
        AnyCall::CudaMemcpyAsync(call) => call.count,
        AnyCall::CudaMemcpy2DAsync(call) => call.width.saturating_mul(call.height),
        AnyCall::CudaMemset(call) => call.count,
        AnyCall::CudaMemsetAsync(call) => call.count,
        _ => 0,
    };
    let waits = if waits { "waits" } else { "goes-on" };
    log::trace!(
        "call {:#06x} {size} {waits} {} {}",
        call.op(),
        took.as_nanos(),
        code.unwrap_or_default()
    );
}

/// An object that a client has left ends.
fn end(libraries: &Libraries, c_type: &str, object: usize) {
    let Some(function) = generated::end_of(libraries, c_type) else {
        return;
    };
    // SAFETY: 1. the function has this type; 2. the object was made by the same library, and this is its last use.
    let status = unsafe { function(std::ptr::with_exposed_provenance_mut(object)) };
    if status != 0 {
        log::warn!("a {c_type} cannot be given back: {status}");
    }
}

impl Context<'_> {
    /// The reply of a call that succeeds and gives something.
    pub(crate) fn answer(&mut self, reply: &AnyReply<'_>) {
        self.is_answered = true;
        (self.answer)(reply);
    }

    /// An object of the client's.
    pub(crate) fn object<K: Kind>(&self, name: Handle<K>) -> Result<P, Failure> {
        if K::C_TYPE == CudaStreamT::C_TYPE && name.raw() < OWN_STREAMS {
            return Ok(std::ptr::without_provenance_mut(name.raw() as usize));
        }
        let object = self.state.objects.get(&(K::C_TYPE, name.raw()));
        let object = object.ok_or(Failure::InvalidHandle)?;
        Ok(std::ptr::with_exposed_provenance_mut(*object))
    }

    /// An object that ends with this call.
    pub(crate) fn take<K: Kind>(&mut self, name: Handle<K>) -> Result<P, Failure> {
        let object = self.state.objects.remove(&(K::C_TYPE, name.raw()));
        let object = std::ptr::with_exposed_provenance_mut(object.ok_or(Failure::InvalidHandle)?);
        if K::C_TYPE == CudaStreamT::C_TYPE
            && let Err(failure) = self.state.copies.left(&self.libraries.runtime, object)
        {
            // The stream ends all the same; what the device tells later, it tells of all before.
            self.state.fail(Group::Cudart, failure.code(Group::Cudart));
        }
        Ok(object)
    }

    /// Whether there can be an object of that name: there is none, and not too many are there.
    pub(crate) fn can_make<K: Kind>(&self, name: Handle<K>) -> Result<(), Failure> {
        let is_own = K::C_TYPE == CudaStreamT::C_TYPE && name.raw() < OWN_STREAMS;
        let of_type = || {
            let objects = &self.state.objects;
            objects.range((K::C_TYPE, 0)..=(K::C_TYPE, u32::MAX)).count()
        };
        match self.state.objects.len() {
            _ if is_own || self.state.objects.contains_key(&(K::C_TYPE, name.raw())) => Err(Failure::InvalidValue),
            MOST.. => Err(Failure::OutOfMemory),
            _ if HANDLES.contains(&K::C_TYPE) && of_type() >= MOST_HANDLES => Err(Failure::OutOfMemory),
            _ => Ok(()),
        }
    }

    /// It is there.
    pub(crate) fn made<K: Kind>(&mut self, name: Handle<K>, object: P) {
        let key = (K::C_TYPE, name.raw());
        self.state.objects.insert(key, object.expose_provenance());
    }

    /// An address in an allocation of the client's, or NULL.
    pub(crate) fn device(&self, of: SvmAddress) -> Result<P, Failure> {
        self.device_of(of, 1)
    }

    /// So many bytes of one allocation of the client's, or NULL.
    pub(crate) fn device_of(&self, of: SvmAddress, length: u64) -> Result<P, Failure> {
        if of != SvmAddress::NULL {
            self.state.memory.check(of.0, length.max(1))?;
        }
        Ok(address(of.0))
    }

    /// Bytes of the arena. It is pinned when the first are copied, if the runtime can: then the device reads and writes it itself.
    pub(crate) fn arena(&mut self, span: Span) -> Result<P, Failure> {
        let place = self.arena.address(span).ok_or(Failure::InvalidValue)?;
        if self.state.pinned.is_none() {
            self.state.pinned = Some(self.pin());
        }
        Ok(place.cast())
    }

    /// Copies bytes of the arena; whether they are in it.
    pub(crate) fn read(&self, span: Span, into: &mut [u8]) -> bool {
        self.arena.read(span, into)
    }

    fn pin(&self) -> Option<usize> {
        let length = self.arena.length();
        let place = self.arena.address(Span { offset: 0, length })?;
        let function = self.libraries.runtime.cudaHostRegister().ok()?;
        let length = usize::try_from(length).ok()?;
        // SAFETY: 1. the function has these types; 2. the arena has so many bytes, and stays until `State::end`, which undoes this.
        let status = unsafe { function(place.cast(), length, 0) };
        if status != 0 {
            log::info!("a client's arena is not pinned: {status}; its copies are slower");
            return None;
        }
        Some(place.expose_provenance())
    }

    /// A descriptor of the client's.
    pub(crate) fn descriptor(&mut self, c_type: &'static str, content: &List<'_, i32>) -> Result<P, Failure> {
        self.state.descriptors.get(self.libraries, c_type, content)
    }

    /// Something opaque that a library has told this client: whatever else it gives back, the library would take for its own.
    pub(crate) fn opaque(&self, list: Option<&List<'_, u8>>) -> Result<Bytes, Failure> {
        if let Some(list) = list
            && !self.state.told.iter().any(|told| told == list.bytes())
        {
            return Err(Failure::InvalidValue);
        }
        Ok(Bytes::of(list))
    }

    /// A library has told so many results; those behind them are zeroes.
    pub(crate) fn told(&mut self, results: &[u8], count: i32) {
        let count = usize::try_from(count).unwrap_or_default();
        for result in results.chunks_exact(RESULT).take(count) {
            let Some(opaque) = result.first_chunk::<OPAQUE>() else {
                continue;
            };
            if self.state.told.contains(opaque) {
                continue;
            }
            if self.state.told.len() >= MOST_TOLD {
                self.state.told.pop_front();
            }
            self.state.told.push_back(*opaque);
        }
    }

    /// A handle for calls of cublasLt, which takes cuBLAS' handles as well as its own.
    pub(crate) fn light_handle(&mut self) -> Result<P, Failure> {
        if let Some(light) = self.state.light {
            return Ok(std::ptr::with_exposed_provenance_mut(light));
        }
        let function = self.libraries.cublas()?.cublasCreate_v2()?;
        let mut made: P = std::ptr::null_mut();
        // SAFETY: 1. the function has this type; 2. there is a place for the handle.
        check(unsafe { function((&raw mut made).cast()) })?;
        self.state.light = Some(made.expose_provenance());
        Ok(made)
    }

    /// Bytes of the device's memory that the client may have.
    pub(crate) fn total(&self) -> Result<u64, Failure> {
        let (_, total) = self.libraries.memory()?;
        Ok(total.min(self.state.quota))
    }
}
