//! What the client knows of memory objects, and mapping them (OpenCL API, sections 5.2.4 and 5.4.2).
//!
//! ```text
//!   map: a part of the arena is named ─▶ the server copies into it ─▶ the application has its address, or, of memory that is the
//!        application's own (CL_MEM_USE_HOST_PTR), that of its own memory, which is copied to
//!   unmap: the same part is named ─▶ the server copies out of it ─▶ it is given back when the queue's commands have ended
//! ```
//!
//! Knows no ring.

use std::sync::{Arc, Mutex};

use accel_proto::{List, Span, opencl as calls};
use accel_window::Block;

use crate::arguments::{ImageFormat, In, Objects, Opaque, Out, Ref};
use crate::bulk::{Lies, Shape};
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::object::{Data, Object, handle_of_made};
use crate::pending::{self, Delivery, Left};
use crate::transfer::three;
use crate::{checks, event, image, lock, queue, returned, status, stubs, transfer};

/// `CL_MEM_USE_HOST_PTR`, and `CL_MEM_COPY_HOST_PTR`, as which it crosses.
pub(crate) const USE_HOST_PTR: u64 = 1 << 3;
pub(crate) const COPY_HOST_PTR: u64 = 1 << 5;
/// `CL_MAP_READ` alone changes nothing; `CL_MAP_WRITE` and `CL_MAP_WRITE_INVALIDATE_REGION`.
const MAP_READ: u64 = 1;
const MAP_WRITE: u64 = 1 << 1 | 1 << 2;
/// What the application said of its own access: `CL_MEM_HOST_WRITE_ONLY`, `CL_MEM_HOST_READ_ONLY` and `CL_MEM_HOST_NO_ACCESS`.
const HOST_WRITE_ONLY: u64 = 1 << 7;
const HOST_READ_ONLY: u64 = 1 << 8;
const HOST_NO_ACCESS: u64 = 1 << 9;

/// A mapping that is there.
#[derive(Debug)]
struct Mapped {
    /// What the application got.
    address: usize,
    kind: Kind,
}

/// Where a mapping is.
#[derive(Debug)]
enum Kind {
    /// In the arena, as the server knows.
    Arena {
        block: Block,
        shape: Shape,
        /// It is the application's own memory, and has to be copied before it is unmapped.
        copies: bool,
    },
    /// In this process alone, as the arena cannot hold it: the server is asked to read it, and to write it again.
    Apart {
        offset: u64,
        size: u64,
        writes: bool,
        /// Unless it is the application's own.
        _memory: Option<Box<[u8]>>,
    },
}

/// What an image was made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Image {
    /// Of its pixels.
    pub(crate) format: ImageFormat,
    /// Pixels each way, as origins and regions count them: the images of an array are the last that it has.
    pub(crate) extent: [u64; 3],
}

/// What the client knows of a memory object.
#[derive(Debug)]
pub(crate) struct MemState {
    /// As the application said; of a sub-buffer, with its parent's.
    pub(crate) flags: Option<u64>,
    /// Of a buffer.
    bytes: Option<u64>,
    image: Option<Image>,
    /// The application's own memory, or 0.
    pub(crate) host_ptr: usize,
    /// Whether that is shared virtual memory.
    uses_svm: bool,
    mapped: Mutex<Vec<Mapped>>,
}

impl MemState {
    pub(crate) fn data(flags: Option<u64>, bytes: Option<u64>, host_ptr: usize) -> Data {
        Data::Mem(Self {
            flags,
            bytes,
            image: None,
            host_ptr,
            uses_svm: false,
            mapped: Mutex::default(),
        })
    }

    /// An image.
    pub(crate) fn of_image(flags: u64, image: Image, host_ptr: usize) -> Data {
        Data::Mem(Self {
            flags: Some(flags),
            bytes: None,
            image: Some(image),
            host_ptr,
            uses_svm: false,
            mapped: Mutex::default(),
        })
    }

    /// A buffer that is shared virtual memory.
    pub(crate) fn shared(flags: Option<u64>, bytes: u64, host_ptr: usize) -> Data {
        Data::Mem(Self {
            flags,
            bytes: Some(bytes),
            image: None,
            host_ptr,
            uses_svm: true,
            mapped: Mutex::default(),
        })
    }

    /// Whether it is that.
    pub(crate) fn uses_svm(&self) -> bool {
        self.uses_svm
    }

    /// The application does only with it what it said that it would (OpenCL API, sections 5.2.2 and 5.3.4).
    pub(crate) fn may_be_read(&self) -> Result<(), Code> {
        self.has_none_of(HOST_WRITE_ONLY | HOST_NO_ACCESS)
    }

    /// The same of writing.
    pub(crate) fn may_be_written(&self) -> Result<(), Code> {
        self.has_none_of(HOST_READ_ONLY | HOST_NO_ACCESS)
    }

    fn may_be_mapped(&self, map_flags: u64) -> Result<(), Code> {
        if map_flags & MAP_READ != 0 {
            self.may_be_read()?;
        }
        if map_flags & MAP_WRITE != 0 {
            self.may_be_written()?;
        }
        Ok(())
    }

    fn has_none_of(&self, flags: u64) -> Result<(), Code> {
        match self.flags.unwrap_or_default() & flags {
            0 => Ok(()),
            _ => Err(Code::INVALID_OPERATION),
        }
    }

    /// How long a buffer is.
    pub(crate) fn size(&self) -> Option<u64> {
        self.bytes
    }

    /// What an image was made of.
    pub(crate) fn image(&self) -> Option<Image> {
        self.image
    }

    /// What the client answers itself.
    pub(crate) fn own(&self, param_name: u32) -> Option<Vec<u8>> {
        match param_name {
            // CL_MEM_FLAGS: what crossed has another flag for the application's own memory.
            0x1101 => self.flags.map(|flags| flags.to_ne_bytes().to_vec()),
            // CL_MEM_HOST_PTR
            0x1103 => Some(self.host_ptr.to_ne_bytes().to_vec()),
            // CL_MEM_MAP_COUNT
            0x1104 => {
                let count = u32::try_from(lock(&self.mapped).len()).unwrap_or(u32::MAX);
                Some(count.to_ne_bytes().to_vec())
            }
            // CL_MEM_USES_SVM_POINTER
            0x1109 => Some(u32::from(self.uses_svm).to_ne_bytes().to_vec()),
            _ => None,
        }
    }
}

/// What the client knows of a memory object.
pub(crate) fn state(memory: &Object) -> Result<&MemState, Code> {
    match &memory.data {
        Data::Mem(state) => Ok(state),
        _ => Err(Code::INVALID_MEM_OBJECT),
    }
}

/// A mapping that is about to be there.
struct Map<'a> {
    queue: &'a Object,
    memory: &'a Object,
    waits: &'a Objects<'a, calls::Event>,
    flags: u64,
    block: Block,
    /// In the arena.
    shape: Shape,
    /// In the application's memory, if that is used.
    host: Option<usize>,
}

impl Map<'_> {
    fn span(&self) -> Span {
        Span {
            offset: self.block.offset(),
            length: self.block.length(),
        }
    }

    /// The server has copied, or will have: the application gets the address.
    fn there(self, connection: &'static Connection, event: Option<&Arc<Object>>, waited: bool) -> Result<Ref, Code> {
        let offset = self.block.offset();
        let address = self
            .host
            .unwrap_or_else(|| connection.address(offset).expose_provenance());
        if waited && let Some(host) = self.host {
            self.shape.copy_out(connection, offset, host);
        } else if let Some(address) = self.host {
            let shape = self.shape;
            let delivery = Delivery {
                offset,
                address,
                shape,
                kind: None,
            };
            connection.pending.push(Left {
                queue: self.queue.share(),
                event: event.cloned(),
                block: None,
                delivery: Some(delivery),
                frees: Vec::new(),
            });
        } else if !waited {
            connection.pending.put_in_place(self.queue);
        }
        lock(&state(self.memory)?.mapped).push(Mapped {
            address,
            kind: Kind::Arena {
                block: self.block,
                shape: self.shape,
                copies: self.host.is_some() && self.flags != MAP_READ,
            },
        });
        Ok(Ref::at(address as u64))
    }
}

/// `clEnqueueMapBuffer`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn enqueue_map_buffer(
    command_queue: Ref,
    buffer: Ref,
    blocking_map: u32,
    map_flags: u64,
    offset: u64,
    size: u64,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let queue = command_queue.object::<calls::CommandQueue>()?;
        let memory = buffer.object::<calls::Mem>()?;
        let waits = event::wait_list(&event_wait_list, num_events_in_wait_list)?;
        let connection = queue.connection()?;
        let known = state(memory)?;
        known.may_be_mapped(map_flags)?;
        checks::in_bounds(memory, offset, size)?;
        if size == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let host = (known.host_ptr != 0).then(|| known.host_ptr + usize::try_from(offset).unwrap_or_default());
        if size > connection.piece() {
            let waits_for = (num_events_in_wait_list, event_wait_list);
            return apart(
                (command_queue, buffer),
                (offset, size),
                map_flags,
                host,
                waits_for,
                event,
            );
        }
        let is_copied = host.is_some() || connection.is_remote();
        let has_event = !event.is_null() || (is_copied && blocking_map == 0);
        let told = has_event.then(|| event::made(connection, queue)).transpose()?;
        let block = taken(connection, size)?;
        let map = Map {
            queue,
            memory,
            waits: &waits,
            flags: map_flags,
            host: host.or_else(|| own_copy(connection, &block)),
            block,
            shape: Shape::line(size),
        };
        let call = calls::EnqueueMapBuffer {
            command_queue: queue.handle(),
            buffer: memory.handle(),
            blocking_map,
            map_flags,
            offset,
            size,
            num_events_in_wait_list,
            event_wait_list: map.waits.list(),
            event: handle_of_made(told.as_ref()),
            returned: map.span(),
        };
        let made: Vec<&Object> = told.iter().map(AsRef::as_ref).collect();
        let (objects, lists) = ([queue, memory], [map.waits.objects.as_slice(), &made]);
        let touched = Touched::new(&objects, &lists).writes((blocking_map != 0).then(|| map.span()));
        let mark = connection.pending.mark();
        let put = match blocking_map {
            0 => connection.send(&call, &touched),
            _ => connection
                .call(|_| call, &touched, true)
                .and_then(|(call, answer)| answer.success(&call).map(drop)),
        };
        if let Err(code) = put {
            connection.give_back(map.block);
            return Err(code);
        }
        told.iter().for_each(|told| told.exists_from_now_on());
        let address = map.there(connection, told.as_ref(), blocking_map != 0)?;
        if blocking_map != 0 {
            told.iter().for_each(|told| event::is_complete_now(told));
            let finished = queue::is_in_order(queue).then_some((queue, mark));
            pending::settle(connection, finished)?;
        }
        event::give(told.filter(|_| !event.is_null()), event);
        Ok(address)
    })
}

/// Maps what the arena cannot hold; waited for, whatever the application says.
fn apart(
    (command_queue, buffer): (Ref, Ref),
    (offset, size): (u64, u64),
    map_flags: u64,
    host: Option<usize>,
    (count, waits_for): (u32, In<Ref>),
    event: Out<Ref>,
) -> Result<Ref, Code> {
    let length = usize::try_from(size).map_err(|_| Code::MAP_FAILURE)?;
    let mut memory = host.is_none().then(|| vec![0; length].into_boxed_slice());
    let own = memory.as_mut().map(|memory| memory.as_mut_ptr().expose_provenance());
    let address = host.or(own).ok_or(Code::MAP_FAILURE)?;
    let read = transfer::enqueue_read_buffer(
        command_queue,
        buffer,
        1,
        offset,
        size,
        In::at(address),
        count,
        waits_for,
        event,
    );
    Code::check(read)?;
    let kind = Kind::Apart {
        offset,
        size,
        writes: map_flags != MAP_READ,
        _memory: memory,
    };
    lock(&state(buffer.object::<calls::Mem>()?)?.mapped).push(Mapped { address, kind });
    Ok(Ref::at(address as u64))
}

/// `clEnqueueMapImage`. The pitches are known once the server has answered, so it always waits.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn enqueue_map_image(
    command_queue: Ref,
    image: Ref,
    _blocking_map: u32,
    map_flags: u64,
    origin: In<u64>,
    region: In<u64>,
    image_row_pitch: Out<u64>,
    image_slice_pitch: Out<u64>,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let queue = command_queue.object::<calls::CommandQueue>()?;
        let memory = image.object::<calls::Mem>()?;
        let waits = event::wait_list(&event_wait_list, num_events_in_wait_list)?;
        let connection = queue.connection()?;
        let (origin, region) = (three(&origin)?, three(&region)?);
        if image_row_pitch.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        checks::image_region(memory, &origin, &region)?;
        state(memory)?.may_be_mapped(map_flags)?;
        let shape = image::shape(memory, region, 0, 0)?;
        let told = event::wanted(connection, queue, event)?;
        let block = taken(connection, shape.extent().ok_or(Code::INVALID_VALUE)?)?;
        let map = Map {
            queue,
            memory,
            waits: &waits,
            flags: map_flags,
            host: own_copy(connection, &block),
            block,
            shape,
        };
        let call = calls::EnqueueMapImage {
            command_queue: queue.handle(),
            image: memory.handle(),
            blocking_map: 1,
            map_flags,
            origin: List::new(&origin),
            region: List::new(&region),
            image_row_pitch: true,
            image_slice_pitch: !image_slice_pitch.is_null(),
            num_events_in_wait_list,
            event_wait_list: map.waits.list(),
            event: handle_of_made(told.as_ref()),
            returned: map.span(),
        };
        let made: Vec<&Object> = told.iter().map(AsRef::as_ref).collect();
        let (objects, lists) = ([queue, memory], [map.waits.objects.as_slice(), &made]);
        let touched = Touched::new(&objects, &lists).writes(Some(map.span()));
        let asked = connection.call(|_| call, &touched, true);
        let answered = asked.and_then(|(call, answer)| {
            let reply = answer.success(&call)?;
            Ok((reply.image_row_pitch, reply.image_slice_pitch))
        });
        let (row_pitch, slice_pitch) = match answered {
            Ok(pitches) => pitches,
            Err(code) => {
                connection.give_back(map.block);
                return Err(code);
            }
        };
        image_row_pitch.put(row_pitch.unwrap_or(shape.row_pitch));
        image_slice_pitch.put(slice_pitch.unwrap_or_default());
        told.iter().for_each(|told| event::is_complete_now(told));
        pending::settle(connection, None)?;
        let address = map.there(connection, None, true)?;
        event::give(told, event);
        Ok(address)
    })
}

/// `clEnqueueUnmapMemObject`.
pub(crate) extern "C" fn enqueue_unmap_mem_object(
    command_queue: Ref,
    memobj: Ref,
    mapped_ptr: Opaque,
    num_events_in_wait_list: u32,
    event_wait_list: In<Ref>,
    event: Out<Ref>,
) -> i32 {
    status(|| {
        let queue = command_queue.object::<calls::CommandQueue>()?;
        let memory = memobj.object::<calls::Mem>()?;
        let waits = event::wait_list(&event_wait_list, num_events_in_wait_list)?;
        let connection = queue.connection()?;
        let told = event::wanted(connection, queue, event)?;
        let mapped = {
            let mut all = lock(&state(memory)?.mapped);
            let found = all.iter().position(|mapped| mapped.address == mapped_ptr.addr());
            all.remove(found.ok_or(Code::INVALID_VALUE)?)
        };
        let (block, shape, copies) = match mapped.kind {
            Kind::Arena { block, shape, copies } => (block, shape, copies),
            Kind::Apart { .. } => {
                let waits_for = (num_events_in_wait_list, event_wait_list);
                return unmap_apart((command_queue, memobj), mapped, waits_for, event);
            }
        };
        let span = Span {
            offset: block.offset(),
            length: block.length(),
        };
        let is_of_map = |delivery: &Delivery| delivery.offset == span.offset;
        let call = calls::EnqueueUnmapMemObject {
            command_queue: queue.handle(),
            memobj: memory.handle(),
            mapped_ptr: span,
            num_events_in_wait_list,
            event_wait_list: waits.list(),
            event: handle_of_made(told.as_ref()),
        };
        let made: Vec<&Object> = told.iter().map(AsRef::as_ref).collect();
        let (objects, lists) = ([queue, memory], [waits.objects.as_slice(), &made]);
        let put = || {
            // What another command brings there is written back with the rest.
            let is_of_other = |delivery: &Delivery| copies && !is_of_map(delivery);
            pending::bring(
                connection,
                mapped.address,
                shape.extent().unwrap_or_default(),
                is_of_other,
            )?;
            // As long as the application cannot know that it is mapped it has written nothing, and what is here is not what is there.
            let copies = copies && !connection.pending.has(is_of_map);
            if copies {
                shape.copy_in(connection, span.offset, mapped.address);
            }
            let touched = Touched::new(&objects, &lists).reads(copies.then_some(span));
            connection.send(&call, &touched)
        };
        if let Err(code) = put() {
            // It stays mapped, as of a queue of another context.
            let kind = Kind::Arena { block, shape, copies };
            lock(&state(memory)?.mapped).push(Mapped { kind, ..mapped });
            return Err(code);
        }
        // The next one that has this part of the arena is not to get it.
        connection.pending.forget(is_of_map);
        connection.pending.push(Left {
            queue: queue.share(),
            event: told.clone(),
            block: Some(block),
            delivery: None,
            frees: Vec::new(),
        });
        event::give(told, event);
        Ok(())
    })
}

/// Unmaps what the arena cannot hold; waited for, if it has to be written.
fn unmap_apart(
    (command_queue, memobj): (Ref, Ref),
    mapped: Mapped,
    (count, waits_for): (u32, In<Ref>),
    event: Out<Ref>,
) -> Result<(), Code> {
    let Kind::Apart {
        offset, size, writes, ..
    } = mapped.kind
    else {
        return Err(Code::INVALID_VALUE);
    };
    let bytes = In::at(mapped.address);
    let unmapped = Code::check(match writes {
        true => transfer::enqueue_write_buffer(command_queue, memobj, 1, offset, size, bytes, count, waits_for, event),
        false => stubs::enqueue_marker_with_wait_list(command_queue, count, waits_for, event),
    });
    if unmapped.is_err() {
        lock(&state(memobj.object::<calls::Mem>()?)?.mapped).push(mapped);
    }
    unmapped
}

/// Where the server has a copy of the arena: the block in this side's, for which data is fetched and sent as if it were the application's.
fn own_copy(connection: &Connection, block: &Block) -> Option<usize> {
    let address = || connection.address(block.offset()).expose_provenance();
    connection.is_remote().then(address)
}

/// A part of the arena for a mapping; if it is full, commands are waited for.
fn taken(connection: &'static Connection, length: u64) -> Result<Block, Code> {
    // No address of the application's is in the arena at 0 bytes, so what comes is always a part that was taken.
    match crate::transfer::lies(connection, 0, length)? {
        Lies::Taken(block) => Ok(block),
        Lies::InPlace(_) => Err(Code::MAP_FAILURE),
    }
}
