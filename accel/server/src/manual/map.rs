//! Maps of memory objects. While a part is mapped its bytes are in the arena, where the client has them: mapping reads them, and the end
//! of a map that was for writing writes them back. So no memory of the back end's is ever the client's.

use accel_proto::opencl::{
    CommandQueue, EnqueueMapBuffer, EnqueueMapImage, EnqueueMapImageReply, EnqueueUnmapMemObject, Event,
};
use accel_proto::{Handle, List, Span};

use super::image::{pitches, region_bytes, three};
use crate::api::{Code, P, check};
use crate::marshal::{Bytes, Many, Place};
use crate::objects::{Held, Map, Region};
use crate::session::Session;

/// Flags of a map (cl.h).
const MAP_WRITE: u64 = 1 << 1;
const MAP_WRITE_INVALIDATE_REGION: u64 = 1 << 2;

/// Maps of one object at a time.
const MOST: usize = 4096;

/// A command that is put into a queue.
struct Enqueued {
    queue: Held,
    object: Held,
    waits: Many,
    count: u32,
    /// Whether the call returns when it is done.
    blocks: bool,
    event: Place,
    name: Handle<Event>,
}

impl Enqueued {
    fn new(
        cx: &Session<'_>,
        (queue, object): (Handle<CommandQueue>, Held),
        (count, waits): (u32, Option<&List<'_, Handle<Event>>>),
        event: Handle<Event>,
        blocks: bool,
    ) -> Result<Self, Code> {
        Ok(Self {
            queue: cx.object(queue)?,
            object,
            waits: super::event::waits(cx, count, waits)?,
            count,
            blocks,
            event: cx.place(event),
            name: event,
        })
    }

    /// From the object to the arena.
    fn read(&mut self, cx: &Session<'_>, region: Region, at: P) -> Result<(), Code> {
        let (blocks, waits, event) = (self.blocks.into(), self.waits.pointer(), self.event.pointer());
        let (queue, object, count) = (self.queue.raw(), self.object.raw(), self.count);
        check(match region {
            Region::Buffer { offset, length } => {
                let function = cx.api().clEnqueueReadBuffer()?;
                // SAFETY: 1. to 3. as above; the place in the arena has so many bytes.
                unsafe { function(queue, object, blocks, offset, length, at, count, waits, event) }
            }
            Region::Image { origin, region, .. } => {
                let (origin, region) = (
                    Bytes::new(Some(&List::new(&origin))),
                    Bytes::new(Some(&List::new(&region))),
                );
                let function = cx.api().clEnqueueReadImage()?;
                let (origin, region) = (origin.pointer(), region.pointer());
                // SAFETY: 1. to 3. as above; the place in the arena is as long as the region is.
                unsafe { function(queue, object, blocks, origin, region, 0, 0, at, count, waits, event) }
            }
        })
    }

    /// From the arena to the object.
    fn write(&mut self, cx: &Session<'_>, region: Region, at: P) -> Result<(), Code> {
        let (waits, event) = (self.waits.pointer(), self.event.pointer());
        let (queue, object, count) = (self.queue.raw(), self.object.raw(), self.count);
        check(match region {
            Region::Buffer { offset, length } => {
                let function = cx.api().clEnqueueWriteBuffer()?;
                // SAFETY: 1. to 3. as above; the place in the arena has so many bytes.
                unsafe { function(queue, object, 0, offset, length, at, count, waits, event) }
            }
            Region::Image { origin, region, .. } => {
                let (origin, region) = (
                    Bytes::new(Some(&List::new(&origin))),
                    Bytes::new(Some(&List::new(&region))),
                );
                let function = cx.api().clEnqueueWriteImage()?;
                let (origin, region) = (origin.pointer(), region.pointer());
                // SAFETY: 1. to 3. as above; the place in the arena is as long as the region is.
                unsafe { function(queue, object, 0, origin, region, 0, 0, at, count, waits, event) }
            }
        })
    }

    /// Nothing, in its place in the queue.
    fn mark(&mut self, cx: &Session<'_>) -> Result<(), Code> {
        let function = cx.api().clEnqueueMarkerWithWaitList()?;
        let (waits, event) = (self.waits.pointer(), self.event.pointer());
        // SAFETY: 1. to 3. as above.
        check(unsafe { function(self.queue.raw(), self.count, waits, event) })?;
        if self.blocks {
            let function = cx.api().clFinish()?;
            // SAFETY: 1. and 2. as above.
            check(unsafe { function(self.queue.raw()) })?;
        }
        Ok(())
    }

    /// Its event.
    fn name(&self, cx: &Session<'_>) -> Result<(), Code> {
        cx.insert(self.name, self.event.raw(), &[&self.queue])
    }
}

/// Maps a part.
fn map(cx: &Session<'_>, command: &mut Enqueued, flags: u64, region: Region, place: Span) -> Result<(), Code> {
    let at = cx.arena(Some(place))?;
    let object = command.object.clone();
    let mut maps = object
        .memory()?
        .maps
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if maps.len() >= MOST {
        return Err(Code::OUT_OF_RESOURCES);
    }
    maps.push(Map {
        at: place.offset,
        region,
        writes: flags & (MAP_WRITE | MAP_WRITE_INVALIDATE_REGION) != 0,
    });
    drop(maps);
    let done = if flags & MAP_WRITE_INVALIDATE_REGION != 0 {
        command.mark(cx)
    } else {
        command.read(cx, region, at)
    };
    if done.is_err() {
        take(&object, place.offset)?;
    }
    done
}

/// Takes the last map at a place in the arena out of an object's.
fn take(object: &Held, at: u64) -> Result<Map, Code> {
    let mut maps = object
        .memory()?
        .maps
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let found = maps.iter().rposition(|map| map.at == at).ok_or(Code::INVALID_VALUE)?;
    Ok(maps.swap_remove(found))
}

/// Whether a map of before the machine was saved is within its object, and has as many bytes as its region.
pub(crate) fn check_map(cx: &Session<'_>, object: &Held, map: &Map) -> Result<(), Code> {
    match map.region {
        Region::Buffer { offset, length } => object.in_bounds((offset, length)),
        Region::Image { region, length, .. } => {
            let needed = region_bytes(cx, object, region, [0; 2])?;
            (needed <= length).then_some(()).ok_or(Code::INVALID_VALUE)
        }
    }
}

/// `clEnqueueMapBuffer`.
pub(crate) fn enqueue_map_buffer(cx: &mut Session<'_>, call: &EnqueueMapBuffer<'_>) -> Result<(), Code> {
    let buffer = cx.object(call.buffer)?;
    buffer.in_bounds((call.offset, call.size))?;
    let waits = (call.num_events_in_wait_list, call.event_wait_list.as_ref());
    let mut command = Enqueued::new(
        cx,
        (call.command_queue, buffer),
        waits,
        call.event,
        call.blocking_map != 0,
    )?;
    let region = Region::Buffer {
        offset: call.offset,
        length: call.size,
    };
    map(cx, &mut command, call.map_flags, region, call.returned)?;
    command.name(cx)
}

/// `clEnqueueMapImage`.
pub(crate) fn enqueue_map_image(cx: &mut Session<'_>, call: &EnqueueMapImage<'_>) -> Result<(), Code> {
    let image = cx.object(call.image)?;
    let region = three(&call.region);
    let length = region_bytes(cx, &image, region, [0; 2])?;
    if call.returned.length < length {
        return Err(Code::INVALID_VALUE);
    }
    let [row, slice] = pitches(cx, &image, region)?;
    let waits = (call.num_events_in_wait_list, call.event_wait_list.as_ref());
    let mut command = Enqueued::new(
        cx,
        (call.command_queue, image),
        waits,
        call.event,
        call.blocking_map != 0,
    )?;
    let region = Region::Image {
        origin: three(&call.origin),
        region,
        length,
    };
    map(cx, &mut command, call.map_flags, region, call.returned)?;
    command.name(cx)?;
    let reply = EnqueueMapImageReply {
        status: 0,
        image_row_pitch: call.image_row_pitch.then_some(row),
        image_slice_pitch: call.image_slice_pitch.then_some(slice),
    };
    cx.answer(call, &reply, None)
}

/// `clEnqueueUnmapMemObject`.
pub(crate) fn enqueue_unmap_mem_object(cx: &mut Session<'_>, call: &EnqueueUnmapMemObject<'_>) -> Result<(), Code> {
    let object = cx.object(call.memobj)?;
    let waits = (call.num_events_in_wait_list, call.event_wait_list.as_ref());
    let mut command = Enqueued::new(cx, (call.command_queue, object.clone()), waits, call.event, false)?;
    let map = take(&object, call.mapped_ptr.offset)?;
    if map.writes {
        // It was a part of the arena when it was mapped, and the arena has not changed.
        let place = Span {
            offset: map.at,
            length: map.region.length(),
        };
        let at = cx.arena(Some(place))?;
        command.write(cx, map.region, at)?;
    } else {
        command.mark(cx)?;
    }
    command.name(cx)
}
