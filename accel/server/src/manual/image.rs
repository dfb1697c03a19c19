//! Images: how many bytes of the arena belong to one, or to a region of it, is compared with what the client says.

use accel_proto::opencl::{
    Context, CreateImage, CreateImage2D, CreateImage3D, CreateImageWithProperties, EnqueueReadImage, EnqueueWriteImage,
    ImageDesc, ImageFormat, Mem,
};
use accel_proto::{Handle, List, Span};

use super::event::waits;
use super::image_memory;
use super::memory::{Contents, without_host};
use crate::api::{Code, P, check};
use crate::marshal::{Bytes, Properties};
use crate::objects::{Form, Held, MaybeHeld};
use crate::quota::Charge;
use crate::session::Session;

/// Numbers of the API (cl.h).
const IMAGE2D: u32 = 0x10f1;
const IMAGE3D: u32 = 0x10f2;
const IMAGE2D_ARRAY: u32 = 0x10f3;
const IMAGE1D_ARRAY: u32 = 0x10f5;
const MEM_TYPE: u32 = 0x1100;
const MEM_SIZE: u32 = 0x1102;
const IMAGE_ELEMENT_SIZE: u32 = 0x1111;
const INVALID_HOST_PTR: Code = Code(-37);

/// An image that is to be made.
struct Wanted<'a> {
    context: Handle<Context>,
    properties: Option<&'a List<'a, u64>>,
    flags: u64,
    format: Option<ImageFormat>,
    description: Option<ImageDesc>,
    host: Option<Span>,
    name: Handle<Mem>,
}

/// `clCreateImage`.
pub(crate) fn create_image(cx: &mut Session<'_>, call: &CreateImage) -> Result<(), Code> {
    let wanted = Wanted {
        context: call.context,
        properties: None,
        flags: call.flags,
        format: call.image_format,
        description: call.image_desc,
        host: call.host_ptr,
        name: call.returned,
    };
    create(cx, &wanted)
}

/// `clCreateImageWithProperties`.
pub(crate) fn create_image_with_properties(
    cx: &mut Session<'_>,
    call: &CreateImageWithProperties<'_>,
) -> Result<(), Code> {
    let wanted = Wanted {
        context: call.context,
        properties: call.properties.as_ref(),
        flags: call.flags,
        format: call.image_format,
        description: call.image_desc,
        host: call.host_ptr,
        name: call.returned,
    };
    create(cx, &wanted)
}

/// What is in all descriptions of one thing alone.
fn description(image_type: u32, [image_width, image_height, image_depth]: [u64; 3], pitches: [u64; 2]) -> ImageDesc {
    let [image_row_pitch, image_slice_pitch] = pitches;
    ImageDesc {
        image_type,
        image_width,
        image_height,
        image_depth,
        image_array_size: 0,
        image_row_pitch,
        image_slice_pitch,
        num_mip_levels: 0,
        num_samples: 0,
        mem_object: Handle::NULL,
    }
}

/// What an image of two dimensions is like whose rows have no gaps.
pub(crate) fn description2d(call: &CreateImage2D) -> ImageDesc {
    description(IMAGE2D, [call.image_width, call.image_height, 0], [0; 2])
}

/// The same of one of three.
pub(crate) fn description3d(call: &CreateImage3D) -> ImageDesc {
    let size = [call.image_width, call.image_height, call.image_depth];
    description(IMAGE3D, size, [0; 2])
}

/// All of an image, as a region.
pub(crate) fn image_region(of: &ImageDesc) -> [u64; 3] {
    let rows = of.image_height.max(1);
    match of.image_type {
        IMAGE2D => [of.image_width, rows, 1],
        IMAGE3D => [of.image_width, rows, of.image_depth.max(1)],
        IMAGE2D_ARRAY => [of.image_width, rows, of.image_array_size.max(1)],
        IMAGE1D_ARRAY => [of.image_width, of.image_array_size.max(1), 1],
        _ => [of.image_width, 1, 1],
    }
}

/// `clCreateImage2D`, which is what `clCreateImage` does since OpenCL 1.2.
pub(crate) fn create_image2d(cx: &mut Session<'_>, call: &CreateImage2D) -> Result<(), Code> {
    let size = [call.image_width, call.image_height, 0];
    let wanted = Wanted {
        context: call.context,
        properties: None,
        flags: call.flags,
        format: call.image_format,
        description: Some(description(IMAGE2D, size, [call.image_row_pitch, 0])),
        host: call.host_ptr,
        name: call.returned,
    };
    create(cx, &wanted)
}

/// `clCreateImage3D`, as [`create_image2d`].
pub(crate) fn create_image3d(cx: &mut Session<'_>, call: &CreateImage3D) -> Result<(), Code> {
    let size = [call.image_width, call.image_height, call.image_depth];
    let pitches = [call.image_row_pitch, call.image_slice_pitch];
    let wanted = Wanted {
        context: call.context,
        properties: None,
        flags: call.flags,
        format: call.image_format,
        description: Some(description(IMAGE3D, size, pitches)),
        host: call.host_ptr,
        name: call.returned,
    };
    create(cx, &wanted)
}

fn create(cx: &mut Session<'_>, wanted: &Wanted<'_>) -> Result<(), Code> {
    let context = cx.object(wanted.context)?;
    let properties = cx.properties(wanted.properties, &[])?;
    let names = wanted
        .description
        .map_or(Handle::NULL, |description| description.mem_object);
    let part_of = cx.optional(names)?;
    let mut charge = charge(cx, wanted, &part_of)?;
    if let (Some(span), Some(description)) = (wanted.host, wanted.description) {
        let length = bytes_of(cx, &context, wanted, &description)?;
        if span.length < length {
            return Err(INVALID_HOST_PTR);
        }
    }
    let lengths = (empty(wanted, &part_of), whole(wanted));
    let contents = Contents::of_image(cx, wanted.flags, wanted.host, lengths)?;
    let form = (contents.flags, &properties);
    let description = wanted.description.map(|description| in_c(&description, part_of.raw()));
    let made = make(cx, &context, form, (wanted.format, description), contents.at)?;
    if let Some(charge) = &mut charge {
        // A back end's rows can be longer than their elements.
        if let Err(code) = number(cx, made, MEM_SIZE).and_then(|bytes| charge.raise(bytes)) {
            release(cx, made)?;
            return Err(code);
        }
    }
    let owners: Vec<&Held> = std::iter::once(&context).chain(part_of.0.as_ref()).collect();
    cx.insert_memory(wanted.name, made, &owners, (Form::Image, charge))
}

/// What of the quota an image takes; nothing if its memory is another object's.
fn charge(cx: &Session<'_>, wanted: &Wanted<'_>, part_of: &MaybeHeld) -> Result<Option<Charge>, Code> {
    let (Some(description), None) = (wanted.description, &part_of.0) else {
        return Ok(None);
    };
    let bytes = image_memory::all(&description, wanted.format).ok_or(Code::MEM_OBJECT_ALLOCATION_FAILURE)?;
    cx.charge(bytes).map(Some)
}

/// Bytes of zeroes that an image is made of which is given none; nothing where the API lets it be given none.
fn empty(wanted: &Wanted<'_>, part_of: &MaybeHeld) -> u64 {
    let (Some(description), None) = (wanted.description, &part_of.0) else {
        return 0;
    };
    let plain = [description.image_row_pitch, description.image_slice_pitch] == [0, 0]
        && description.num_mip_levels == 0
        && description.num_samples == 0;
    let bytes = image_memory::all(&description, wanted.format);
    bytes.filter(|_| plain).unwrap_or_default()
}

/// Bytes of an image whose rows and slices have no gaps; nothing if they are said to have some, or may have.
fn whole(wanted: &Wanted<'_>) -> Option<u64> {
    let dense = |of: &ImageDesc| [of.image_row_pitch, of.image_slice_pitch] == [0, 0];
    let description = wanted.description.filter(dense)?;
    image_memory::all(&description, wanted.format)
}

/// Releases an image that no client has heard of.
fn release(cx: &Session<'_>, raw: P) -> Result<(), Code> {
    let function = cx.api().clReleaseMemObject()?;
    // SAFETY: 1. this module made it, and has told nobody of it.
    check(unsafe { function(raw) })
}

/// A cl_image_desc.
fn in_c(of: &ImageDesc, part_of: P) -> Bytes {
    let sizes = [of.image_width, of.image_height, of.image_depth, of.image_array_size];
    let levels = u64::from(of.num_samples) << 32 | u64::from(of.num_mip_levels);
    let mut words = vec![u64::from(of.image_type)];
    words.extend(sizes);
    words.extend([of.image_row_pitch, of.image_slice_pitch, levels]);
    words.push(part_of.expose_provenance() as u64);
    Bytes::new(Some(&List::new(&words)))
}

/// Makes one.
fn make(
    cx: &Session<'_>,
    context: &Held,
    (flags, properties): (u64, &Properties),
    (format, description): (Option<ImageFormat>, Option<Bytes>),
    host: P,
) -> Result<P, Code> {
    let format = format.map(|format| [format]);
    let format = Bytes::new(format.as_ref().map(|format| List::new(format)).as_ref());
    let description = description.as_ref().map_or(std::ptr::null_mut(), Bytes::pointer);
    let mut status = 0_i32;
    let place = (&raw mut status).cast();
    let made = if properties.words.is_some() {
        let function = cx.api().clCreateImageWithProperties()?;
        // SAFETY: 1. to 3. as above; the back end copies what is in the arena before it returns.
        unsafe {
            function(
                context.raw(),
                properties.pointer(),
                flags,
                format.pointer(),
                description,
                host,
                place,
            )
        }
    } else {
        let function = cx.api().clCreateImage()?;
        // SAFETY: as the other one.
        unsafe { function(context.raw(), flags, format.pointer(), description, host, place) }
    };
    check(status)?;
    Ok(made)
}

/// How many bytes of the client's belong to an image (OpenCL API, clCreateImage). How long an element is only the back end knows of all
/// formats: it is asked of an image without contents.
fn bytes_of(cx: &Session<'_>, context: &Held, wanted: &Wanted<'_>, of: &ImageDesc) -> Result<u64, Code> {
    let probe = ImageDesc {
        image_row_pitch: 0,
        image_slice_pitch: 0,
        ..*of
    };
    let none = Properties {
        words: None,
        _held: Vec::new(),
    };
    let form = (without_host(wanted.flags), &none);
    let what = (wanted.format, Some(in_c(&probe, std::ptr::null_mut())));
    let raw = make(cx, context, form, what, std::ptr::null_mut())?;
    let element = number(cx, raw, IMAGE_ELEMENT_SIZE);
    release(cx, raw)?;
    let rows = match of.image_type {
        IMAGE2D | IMAGE3D | IMAGE2D_ARRAY => of.image_height,
        _ => 1,
    };
    let slices = match of.image_type {
        IMAGE3D => of.image_depth,
        IMAGE1D_ARRAY | IMAGE2D_ARRAY => of.image_array_size,
        _ => 1,
    };
    let row = of
        .image_width
        .checked_mul(element?)
        .map(|row| row.max(of.image_row_pitch));
    let slice = row
        .and_then(|row| row.checked_mul(rows))
        .map(|slice| slice.max(of.image_slice_pitch));
    slice
        .and_then(|slice| slice.checked_mul(slices))
        .ok_or(INVALID_HOST_PTR)
}

/// A number that the back end knows of an image; numbers of 32 bits, too.
fn number(cx: &Session<'_>, image: P, name: u32) -> Result<u64, Code> {
    let function = match name {
        MEM_TYPE | MEM_SIZE => cx.api().clGetMemObjectInfo()?,
        _ => cx.api().clGetImageInfo()?,
    };
    let length = if name == MEM_TYPE { 4 } else { 8 };
    let mut value = 0_u64;
    let place = (&raw mut value).cast();
    // SAFETY: 1. and 2. as above; 3. the place has eight bytes.
    check(unsafe { function(image, name, length, place, std::ptr::null_mut()) })?;
    Ok(value)
}

/// Bytes of a region in the client's memory, with rows and slices of these pitches, or as long as the region where they are zero (OpenCL
/// API, clEnqueueReadImage).
pub(super) fn region_bytes(cx: &Session<'_>, image: &Held, region: [u64; 3], pitches: [u64; 2]) -> Result<u64, Code> {
    if image.memory()?.form != Form::Image {
        return Err(Code::INVALID_MEM_OBJECT);
    }
    let [width, rows, slices] = region;
    if region.contains(&0) {
        return Ok(0);
    }
    let [row_pitch, slice_pitch] = pitches;
    let length = number(cx, image.raw(), IMAGE_ELEMENT_SIZE)?.checked_mul(width);
    let all = length.and_then(|length| {
        let row = row_pitch.max(length);
        // An array of lines has its slices where others have rows.
        let row = if slices == 1 { row.max(slice_pitch) } else { row };
        let slice = row.checked_mul(rows)?.max(slice_pitch);
        let before = (slices - 1)
            .checked_mul(slice)?
            .checked_add((rows - 1).checked_mul(row)?)?;
        before.checked_add(length)
    });
    all.ok_or(Code::INVALID_VALUE)
}

/// Pitches that the client is told of for a map, in which rows and slices follow each other.
pub(super) fn pitches(cx: &Session<'_>, image: &Held, [width, rows, _]: [u64; 3]) -> Result<[u64; 2], Code> {
    let row = number(cx, image.raw(), IMAGE_ELEMENT_SIZE)?.checked_mul(width);
    let row = row.ok_or(Code::INVALID_VALUE)?;
    let kind = number(cx, image.raw(), MEM_TYPE)?;
    let slice = match u32::try_from(kind).unwrap_or_default() {
        IMAGE3D | IMAGE2D_ARRAY => row.checked_mul(rows).ok_or(Code::INVALID_VALUE)?,
        IMAGE1D_ARRAY => row,
        _ => 0,
    };
    Ok([row, slice])
}

/// Three numbers.
pub(super) fn three(list: &List<'_, u64>) -> [u64; 3] {
    std::array::from_fn(|index| list.get(index).unwrap_or_default())
}

/// Whether the client has as many bytes as a region is.
fn check_span(
    cx: &Session<'_>,
    image: &Held,
    (region, pitches): (&List<'_, u64>, [u64; 2]),
    span: Option<Span>,
) -> Result<(), Code> {
    let needed = region_bytes(cx, image, three(region), pitches)?;
    match span {
        Some(span) if span.length < needed => Err(Code::INVALID_VALUE),
        _ => Ok(()),
    }
}

/// Whether a region's pixels, without gaps, are within a buffer from an offset on.
pub(crate) fn pixels_in_bounds(
    cx: &Session<'_>,
    image: &Held,
    region: &List<'_, u64>,
    (buffer, offset): (&Held, u64),
) -> Result<(), Code> {
    let bytes = region_bytes(cx, image, three(region), [0, 0])?;
    buffer.in_bounds((offset, bytes))
}

/// `clEnqueueReadImage`.
pub(crate) fn enqueue_read_image(cx: &mut Session<'_>, call: &EnqueueReadImage<'_>) -> Result<(), Code> {
    let (queue, image) = (cx.object(call.command_queue)?, cx.object(call.image)?);
    let pitches = [call.row_pitch, call.slice_pitch];
    check_span(cx, &image, (&call.region, pitches), call.ptr)?;
    let (origin, region) = (Bytes::new(Some(&call.origin)), Bytes::new(Some(&call.region)));
    let count = call.num_events_in_wait_list;
    let waits = waits(cx, count, call.event_wait_list.as_ref())?;
    let mut event = cx.place(call.event);
    let at = cx.arena(call.ptr)?;
    let function = cx.api().clEnqueueReadImage()?;
    // SAFETY: 1. to 3. as above; the place in the arena is as long as the region is.
    let status = unsafe {
        function(
            queue.raw(),
            image.raw(),
            call.blocking_read,
            origin.pointer(),
            region.pointer(),
            call.row_pitch,
            call.slice_pitch,
            at,
            count,
            waits.pointer(),
            event.pointer(),
        )
    };
    check(status)?;
    cx.insert(call.event, event.raw(), &[&queue])
}

/// `clEnqueueWriteImage`.
pub(crate) fn enqueue_write_image(cx: &mut Session<'_>, call: &EnqueueWriteImage<'_>) -> Result<(), Code> {
    let (queue, image) = (cx.object(call.command_queue)?, cx.object(call.image)?);
    let pitches = [call.input_row_pitch, call.input_slice_pitch];
    check_span(cx, &image, (&call.region, pitches), call.ptr)?;
    let (origin, region) = (Bytes::new(Some(&call.origin)), Bytes::new(Some(&call.region)));
    let count = call.num_events_in_wait_list;
    let waits = waits(cx, count, call.event_wait_list.as_ref())?;
    let mut event = cx.place(call.event);
    let at = cx.arena(call.ptr)?;
    let function = cx.api().clEnqueueWriteImage()?;
    // SAFETY: 1. to 3. as above; the place in the arena is as long as the region is.
    let status = unsafe {
        function(
            queue.raw(),
            image.raw(),
            call.blocking_write,
            origin.pointer(),
            region.pointer(),
            call.input_row_pitch,
            call.input_slice_pitch,
            at,
            count,
            waits.pointer(),
            event.pointer(),
        )
    };
    check(status)?;
    cx.insert(call.event, event.raw(), &[&queue])
}
