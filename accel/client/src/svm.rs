//! Shared virtual memory of coarse grain (OpenCL API, section 5.6): the same addresses for the application and for kernels.
//!
//! ```text
//!   alloc: the server allocates ─▶ memory is reserved here at the same address; if something is there, another one is asked for
//!   map:   the server copies into the arena ─▶ from there to this process' memory, as of a read (`transfer`)
//!   unmap: what was mapped for writing goes the other way
//!   free:  when the commands before are complete, here and there
//! ```
//!
//! Knows no ring; what is reserved and mapped, `regions` knows.

use std::sync::Arc;

use accel_proto::{Call, Handle, List, Memory, SvmAddress, opencl as calls};

use crate::arguments::{In, Objects, Opaque, Out, Ref, list};
use crate::bulk::Shape;
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::info::Query;
use crate::notify::{self, Notice};
use crate::object::{Object, handle_of_made};
use crate::pending::{self, Delivery, Left};
use crate::regions::Mapped;
use crate::transfer::{Transfer, Way, pieces};
use crate::{checks, event, guarded, queue, status};

/// `CL_MEM_READ_WRITE`, `CL_MEM_WRITE_ONLY`, `CL_MEM_READ_ONLY`: of coarse grain no other flag is.
const FLAGS: u64 = 7;
/// `CL_MAP_READ`, which alone changes nothing, and `CL_MAP_WRITE_INVALIDATE_REGION`, for which nothing is read.
const MAP_READ: u64 = 1;
const MAP_WRITE_INVALIDATE_REGION: u64 = 4;
/// All flags of a map.
const MAP_FLAGS: u64 = 7;
/// `CL_DEVICE_SVM_CAPABILITIES`, of which `CL_DEVICE_SVM_COARSE_GRAIN_BUFFER`.
const CAPABILITIES: u32 = 0x1053;
const COARSE_GRAIN_BUFFER: u8 = 1;
/// Addresses that are tried until there is one at which this process has nothing.
const TRIES: usize = 16;

/// What commands are, as their events tell (`CL_COMMAND_SVM_FREE` and so on).
const FREE: u32 = 0x1209;
const MEMCPY: u32 = 0x120a;
const MEMFILL: u32 = 0x120b;
const MAP: u32 = 0x120c;
const UNMAP: u32 = 0x120d;
const MIGRATE_MEM: u32 = 0x120e;

/// `CL_MIGRATE_MEM_OBJECT_HOST` and `CL_MIGRATE_MEM_OBJECT_CONTENT_UNDEFINED`.
const MIGRATE_FLAGS: u64 = 3;

/// `pfn_free_func`: the queue, how many addresses, the addresses, and the application's data.
type FreeFunction = extern "C" fn(Ref, u32, *mut Opaque, Opaque);

/// Whether the device that an object is of has shared virtual memory.
fn is_there(object: &Object) -> Result<(), Code> {
    let Some(device) = object.parent::<calls::Device>() else {
        // Which devices a context has that was made of a type, the server knows.
        return Ok(());
    };
    let query = Query {
        command: "clGetDeviceInfo",
        object: device,
        param_name: CAPABILITIES,
        depends: Vec::new(),
        keeps: true,
    };
    let bits = query.value(|connection, size| {
        let make = |reply| calls::GetDeviceInfo {
            device: device.handle(),
            param_name: CAPABILITIES,
            param_value_size: size,
            param_value: true,
            param_value_size_ret: true,
            reply,
        };
        let (call, answer) = connection.call(make, &Touched::new(&[device], &[]), false)?;
        let value = answer.success(&call)?.param_value;
        Ok(value.map(|value| value.bytes().to_vec()).unwrap_or_default())
    })?;
    let is_there = bits.first().is_some_and(|bits| bits & COARSE_GRAIN_BUFFER != 0);
    is_there.then_some(()).ok_or(Code::INVALID_OPERATION)
}

/// A new allocation of the server's.
fn allocated(connection: &'static Connection, context: &Object, call: calls::SVMAlloc) -> Result<SvmAddress, Code> {
    let (call, answer) = connection.call(|_| call, &Touched::new(&[context], &[]), false)?;
    Ok(answer.success(&call)?.returned)
}

/// The server gets an allocation back.
fn returned(connection: &'static Connection, context: &Object, svm_pointer: SvmAddress) -> Result<(), Code> {
    let call = calls::SVMFree {
        context: context.handle(),
        svm_pointer,
    };
    connection.send(&call, &Touched::new(&[context], &[]))
}

/// `clSVMAlloc`.
pub(crate) extern "C" fn svm_alloc(context: Ref, flags: u64, size: u64, alignment: u32) -> Opaque {
    let done = guarded(|| {
        let context = context.object::<calls::Context>()?;
        let connection = context.connection()?;
        if size == 0 || flags & !FLAGS != 0 || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(Code::INVALID_VALUE);
        }
        let call = calls::SVMAlloc {
            context: context.handle(),
            flags,
            size,
            alignment,
        };
        let mut refused = Vec::new();
        let mut found = Err(Code::OUT_OF_RESOURCES);
        for _ in 0..TRIES {
            let address = match allocated(connection, context, call) {
                // What is freed when its commands are complete may be all that is in the way.
                Err(Code::MEM_OBJECT_ALLOCATION_FAILURE) => {
                    pending::reclaim(connection)?;
                    allocated(connection, context, call)
                }
                address => address,
            };
            found = address;
            let Ok(address) = address else { break };
            if connection.regions.reserve(at(address), size) {
                break;
            }
            // It is kept until there is one that can be had, so that the next one is elsewhere.
            refused.push(address);
            found = Err(Code::OUT_OF_RESOURCES);
        }
        for address in refused {
            returned(connection, context, address)?;
        }
        found.map(at)
    });
    std::ptr::with_exposed_provenance_mut(done.unwrap_or_default())
}

fn at(address: SvmAddress) -> usize {
    usize::try_from(address.0).unwrap_or_default()
}

/// Frees an allocation that no command works with any more.
pub(crate) fn free(context: &Object, address: usize) -> Result<(), Code> {
    let connection = context.connection()?;
    // Data of a map that nobody has waited for would go where nothing is.
    if !connection.pending.give_back(&connection.regions, address) {
        return Err(Code::INVALID_VALUE);
    }
    returned(connection, context, SvmAddress(address as u64))
}

/// `clSVMFree`.
pub(crate) extern "C" fn svm_free(context: Ref, svm_pointer: Opaque) {
    // There is nobody who could be told that it was none.
    _ = guarded(|| free(context.object::<calls::Context>()?, svm_pointer.addr()));
}

/// A command that is about to be put in a queue.
struct Command<'a> {
    queue: &'a Object,
    waits: Objects<'a, calls::Event>,
    count: u32,
    /// What its event says that it is.
    kind: u32,
}

impl<'a> Command<'a> {
    fn new(command_queue: &'a Ref, kind: u32, list: &'a In<Ref>, count: u32) -> Result<Self, Code> {
        let queue = command_queue.object::<calls::CommandQueue>()?;
        is_there(queue)?;
        Ok(Self {
            queue,
            waits: event::wait_list(list, count)?,
            count,
            kind,
        })
    }

    /// Puts it; `make` makes the call, of its event's name.
    fn put<'c, C: Call<'c> + Copy>(
        &self,
        told: Option<&Arc<Object>>,
        waits: bool,
        make: impl FnOnce(Handle<calls::Event>) -> C,
    ) -> Result<(), Code> {
        let connection = self.queue.connection()?;
        let call = make(handle_of_made(told));
        let made: Vec<&Object> = told.into_iter().map(AsRef::as_ref).collect();
        let (objects, lists) = ([self.queue], [self.waits.objects.as_slice(), &made]);
        let touched = Touched::new(&objects, &lists);
        let mark = connection.pending.mark();
        if waits {
            let (call, answer) = connection.call(|_| call, &touched, true)?;
            answer.success(&call)?;
        } else {
            connection.send(&call, &touched)?;
        }
        if let Some(told) = told {
            event::is_of_kind(told, self.kind);
            told.exists_from_now_on();
            if waits {
                event::is_complete_now(told);
            }
        }
        match waits {
            true => {
                let finished = queue::is_in_order(self.queue).then_some((self.queue, mark));
                pending::settle(connection, finished)
            }
            false => Ok(()),
        }
    }

    /// The same, with an event for the application if it wants one.
    fn put_for<'c, C: Call<'c> + Copy>(
        &self,
        event: Out<Ref>,
        waits: bool,
        make: impl FnOnce(Handle<calls::Event>) -> C,
    ) -> Result<(), Code> {
        let told = event::wanted(self.queue.connection()?, self.queue, event)?;
        self.put(told.as_ref(), waits, make)?;
        event::give(told, event);
        Ok(())
    }

    /// Nothing, in its place in the queue.
    fn marker(&self, event: Handle<calls::Event>) -> calls::EnqueueMarkerWithWaitList<'_> {
        calls::EnqueueMarkerWithWaitList {
            command_queue: self.queue.handle(),
            num_events_in_wait_list: self.count,
            event_wait_list: self.waits.list(),
            event,
        }
    }

    /// Nothing, and if somebody waits, until all that is before it has ended.
    fn nothing(&self, waits: bool, event: Out<Ref>) -> Result<(), Code> {
        self.put_for(event, false, |event| self.marker(event))?;
        if waits { queue::finish_queue(self.queue) } else { Ok(()) }
    }

    /// Copies between shared memory and memory of this process, which may have the same address.
    fn copy(
        &self,
        way: Way,
        (own, shared): (usize, usize),
        size: u64,
        waits: bool,
        event: Out<Ref>,
    ) -> Result<(), Code> {
        let waits_for_it = waits && event.is_null();
        let pieces: Vec<_> = pieces(self.queue.connection()?, own, size, waits_for_it).collect();
        for (index, &(begin, length)) in pieces.iter().enumerate() {
            let is_last = index + 1 == pieces.len();
            let transfer = Transfer {
                queue: self.queue,
                memory: None,
                waits: &self.waits,
                blocking: waits || !is_last,
                way,
                address: own + usize::try_from(begin).map_err(|_| Code::INVALID_VALUE)?,
                shape: Shape::line(length),
                kind: Some(self.kind),
                may_go_ahead: false,
            };
            transfer.run(if is_last { event } else { Out::NULL }, |span, event| {
                let (arena, shared) = (Memory::Arena(span), Memory::Svm(SvmAddress(shared as u64 + begin)));
                let (dst_ptr, src_ptr) = match way {
                    Way::ToServer => (shared, arena),
                    Way::FromServer => (arena, shared),
                };
                self.memcpy((dst_ptr, src_ptr), length, transfer.blocking, event)
            })?;
        }
        Ok(())
    }

    fn memcpy(
        &self,
        (dst_ptr, src_ptr): (Memory, Memory),
        size: u64,
        blocks: bool,
        event: Handle<calls::Event>,
    ) -> calls::EnqueueSVMMemcpy<'_> {
        calls::EnqueueSVMMemcpy {
            command_queue: self.queue.handle(),
            blocking_copy: blocks.into(),
            dst_ptr,
            src_ptr,
            size,
            num_events_in_wait_list: self.count,
            event_wait_list: self.waits.list(),
            event,
        }
    }
}

/// `clEnqueueSVMFree`. A marker tells when the commands before it are complete; what is freed then is freed by whoever learns of it first.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn enqueue_svm_free(
    command_queue: Ref,
    num_svm_pointers: u32,
    svm_pointers: In<Opaque>,
    pfn_free_func: Option<FreeFunction>,
    user_data: Opaque,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let command = Command::new(&command_queue, FREE, &event_wait_list, num_events_in_wait_list)?;
        if (num_svm_pointers == 0) != svm_pointers.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let pointers = svm_pointers.list(num_svm_pointers.into())?.unwrap_or_default();
        let connection = command.queue.connection()?;
        let told = event::made(connection, command.queue)?;
        command.put(Some(&told), false, |event| command.marker(event))?;
        match pfn_free_func {
            Some(function) => {
                let freed = Freed {
                    queue: command.queue.share(),
                    pointers: pointers.into(),
                    function,
                    user_data,
                };
                notify::when(&told, 0, Notice::Free(freed))?;
            }
            None => connection.pending.push(Left {
                queue: command.queue.share(),
                event: Some(told.clone()),
                block: None,
                delivery: None,
                frees: pointers.iter().map(|pointer| pointer.addr()).collect(),
            }),
        }
        if !event.is_null() {
            event.put(told.publish());
        }
        Ok(())
    })
}

/// Addresses that a function of the application's is to free.
#[derive(Debug)]
pub(crate) struct Freed {
    queue: Arc<Object>,
    pointers: Box<[Opaque]>,
    function: FreeFunction,
    user_data: Opaque,
}

impl Freed {
    /// The commands before are complete.
    pub(crate) fn call(mut self) {
        let count = u32::try_from(self.pointers.len()).unwrap_or(u32::MAX);
        let pointers = self.pointers.as_mut_ptr();
        (self.function)(self.queue.as_ref().as_ref(), count, pointers, self.user_data);
    }
}

/// `clEnqueueSVMMemcpy`. What is in no allocation is the application's own memory.
pub(crate) extern "C" fn enqueue_svm_memcpy(
    command_queue: Ref,
    blocking_copy: u32,
    dst_ptr: Out<u8>,
    src_ptr: In<u8>,
    size: u64,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let command = Command::new(&command_queue, MEMCPY, &event_wait_list, num_events_in_wait_list)?;
        if size == 0 || dst_ptr.is_null() || src_ptr.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let regions = &command.queue.connection()?.regions;
        let (to, from, waits) = (dst_ptr.address(), src_ptr.address(), blocking_copy != 0);
        if (to.abs_diff(from) as u64) < size {
            return Err(Code::MEM_COPY_OVERLAP);
        }
        match (regions.has(to, size), regions.has(from, size)) {
            (true, true) => command.put_for(event, waits, |event| {
                let shared = |address: usize| Memory::Svm(SvmAddress(address as u64));
                command.memcpy((shared(to), shared(from)), size, waits, event)
            }),
            (true, false) => command.copy(Way::ToServer, (from, to), size, waits, event),
            (false, true) => command.copy(Way::FromServer, (to, from), size, waits, event),
            (false, false) => {
                // Both are here: in its place in the queue is when all before it has ended.
                command.nothing(true, Out::NULL)?;
                dst_ptr.put_bytes(src_ptr.required(size)?, size);
                command.nothing(waits, event)
            }
        }
    })
}

/// `clEnqueueSVMMemFill`.
pub(crate) extern "C" fn enqueue_svm_mem_fill(
    command_queue: Ref,
    svm_ptr: Opaque,
    pattern: In<u8>,
    pattern_size: u64,
    size: u64,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let command = Command::new(&command_queue, MEMFILL, &event_wait_list, num_events_in_wait_list)?;
        let is_known = command.queue.connection()?.regions.has(svm_ptr.addr(), size);
        let pattern = pattern.list(pattern_size)?;
        checks::pattern(pattern, pattern_size, svm_ptr.addr() as u64, size)?;
        if size == 0 || !is_known {
            return Err(Code::INVALID_VALUE);
        }
        command.put_for(event, false, |event| calls::EnqueueSVMMemFill {
            command_queue: command.queue.handle(),
            svm_ptr: SvmAddress(svm_ptr.addr() as u64),
            pattern: list(pattern),
            pattern_size,
            size,
            num_events_in_wait_list,
            event_wait_list: command.waits.list(),
            event,
        })
    })
}

/// `clEnqueueSVMMap`.
pub(crate) extern "C" fn enqueue_svm_map(
    command_queue: Ref,
    blocking_map: u32,
    flags: u64,
    svm_ptr: Opaque,
    size: u64,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let command = Command::new(&command_queue, MAP, &event_wait_list, num_events_in_wait_list)?;
        let (address, regions) = (svm_ptr.addr(), &command.queue.connection()?.regions);
        let is_invalid =
            flags & !MAP_FLAGS != 0 || flags & MAP_WRITE_INVALIDATE_REGION != 0 && flags != MAP_WRITE_INVALIDATE_REGION;
        if size == 0 || is_invalid || !regions.has(address, size) {
            return Err(Code::INVALID_VALUE);
        }
        let waits = blocking_map != 0;
        match flags {
            MAP_WRITE_INVALIDATE_REGION => command.nothing(waits, event)?,
            _ => command.copy(Way::FromServer, (address, address), size, waits, event)?,
        }
        regions.map(Mapped {
            address,
            size,
            writes: flags & !MAP_READ != 0,
        });
        Ok(())
    })
}

/// `clEnqueueSVMUnmap`.
pub(crate) extern "C" fn enqueue_svm_unmap(
    command_queue: Ref,
    svm_ptr: Opaque,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let command = Command::new(&command_queue, UNMAP, &event_wait_list, num_events_in_wait_list)?;
        let (address, connection) = (svm_ptr.addr(), command.queue.connection()?);
        let mapped = connection.regions.unmap(address).ok_or(Code::INVALID_VALUE)?;
        let is_of_map = |delivery: &Delivery| delivery.goes_to(address, mapped.size) && delivery.kind == Some(MAP);
        // What another command brings there is written back with the rest.
        let is_of_other = |delivery: &Delivery| mapped.writes && !is_of_map(delivery);
        if let Err(code) = pending::bring(connection, address, mapped.size, is_of_other) {
            connection.regions.map(mapped);
            return Err(code);
        }
        // As long as the application cannot know that it is mapped it has written nothing, and what is here is not what is there.
        let is_unknown = mapped.writes && connection.pending.has(is_of_map);
        let unmapped = match mapped.writes && !is_unknown {
            true => command.copy(Way::ToServer, (address, address), mapped.size, false, event),
            false => command.nothing(false, event),
        };
        match &unmapped {
            Ok(()) if is_unknown => connection.pending.forget(is_of_map),
            Ok(()) => {}
            Err(_) => connection.regions.map(mapped),
        }
        unmapped
    })
}

/// `clEnqueueSVMMigrateMem`.
pub(crate) extern "C" fn enqueue_svm_migrate_mem(
    command_queue: Ref,
    num_svm_pointers: u32,
    svm_pointers: In<Opaque>,
    sizes: In<u64>,
    flags: u64,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let command = Command::new(&command_queue, MIGRATE_MEM, &event_wait_list, num_events_in_wait_list)?;
        let pointers = svm_pointers.required(num_svm_pointers.into())?;
        let pointers: Vec<_> = pointers
            .iter()
            .map(|pointer| SvmAddress(pointer.addr() as u64))
            .collect();
        let sizes = sizes.list(num_svm_pointers.into())?;
        checks::bits(flags, MIGRATE_FLAGS)?;
        if pointers.is_empty() {
            return Err(Code::INVALID_VALUE);
        }
        command.put_for(event, false, |event| calls::EnqueueSVMMigrateMem {
            command_queue: command.queue.handle(),
            num_svm_pointers,
            svm_pointers: Some(List::new(&pointers)),
            sizes: sizes.map(List::new),
            flags,
            num_events_in_wait_list,
            event_wait_list: command.waits.list(),
            event,
        })
    })
}
