//! Making images and moving their pixels (OpenCL API, section 5.3): what no annotation says is how long pixels are in memory. Knows no ring.

use accel_proto::{List, opencl as calls};

use crate::arguments::{ImageDesc, ImageFormat, In, Out, Ref, list};
use crate::bulk::Shape;
use crate::codes::Code;
use crate::connection::Touched;
use crate::info::Query;
use crate::mapping::{Image, MemState};
use crate::memory::{check_host, crossing, host_ptr, make};
use crate::object::Object;
use crate::transfer::{Transfer, Way, may_go, three};
use crate::{checks, event, returned, status};

/// `CL_IMAGE_ELEMENT_SIZE`.
const ELEMENT_SIZE: u32 = 0x1111;
/// `CL_MEM_TYPE`, of which `CL_MEM_OBJECT_IMAGE1D_ARRAY`.
const MEM_TYPE: u32 = 0x1100;
const IMAGE1D_ARRAY: u32 = 0x10f5;
/// Other kinds.
const IMAGE2D: u32 = 0x10f1;
const IMAGE3D: u32 = 0x10f2;
const IMAGE2D_ARRAY: u32 = 0x10f3;
const IMAGE1D: u32 = 0x10f4;
const IMAGE1D_BUFFER: u32 = 0x10f6;

/// Bytes of a pixel; nothing for formats that there are not (OpenCL API, tables 5.6 to 5.8).
fn pixel(format: ImageFormat) -> Option<u64> {
    let channels = match format.order {
        // R, A, INTENSITY, LUMINANCE, DEPTH; RG, RA, Rx; RGB and RGx, sRGB; RGBA, BGRA, ARGB, ABGR, sRGBA, sBGRA, RGBx.
        0x10b0 | 0x10b1 | 0x10b8 | 0x10b9 | 0x10bd => 1,
        0x10b2 | 0x10b3 | 0x10ba => 2,
        0x10b4 | 0x10bb | 0x10bf => 3,
        0x10b5..=0x10b7 | 0x10bc | 0x10c0..=0x10c3 => 4,
        _ => return None,
    };
    Some(match format.data_type {
        // SNORM_INT8, UNORM_INT8, SIGNED_INT8, UNSIGNED_INT8
        0x10d0 | 0x10d2 | 0x10d7 | 0x10da => channels,
        // SNORM_INT16, UNORM_INT16, SIGNED_INT16, UNSIGNED_INT16, HALF_FLOAT
        0x10d1 | 0x10d3 | 0x10d8 | 0x10db | 0x10dd => 2 * channels,
        // SIGNED_INT32, UNSIGNED_INT32, FLOAT
        0x10d9 | 0x10dc | 0x10de => 4 * channels,
        // UNORM_SHORT_565, UNORM_SHORT_555: all channels in one
        0x10d4 | 0x10d5 => 2,
        // UNORM_INT_101010, UNORM_INT24, UNORM_INT_101010_2
        0x10d6 | 0x10df | 0x10e0 => 4,
        _ => return None,
    })
}

/// How the pixels of a new image lie in the application's memory.
fn host_shape(format: ImageFormat, desc: &ImageDesc) -> Result<Shape, Code> {
    let pixel = pixel(format).ok_or(Code::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
    let width = desc.width.checked_mul(pixel).ok_or(Code::INVALID_IMAGE_DESCRIPTOR)?;
    let (rows, slices) = match desc.image_type {
        IMAGE1D | IMAGE1D_BUFFER => (1, 1),
        IMAGE2D => (desc.height, 1),
        IMAGE3D => (desc.height, desc.depth),
        IMAGE1D_ARRAY => (1, desc.array_size),
        IMAGE2D_ARRAY => (desc.height, desc.array_size),
        _ => return Err(Code::INVALID_IMAGE_DESCRIPTOR),
    };
    let slice_pitch = match (desc.slice_pitch, desc.image_type) {
        (0, _) | (_, IMAGE1D | IMAGE1D_BUFFER | IMAGE2D) => 0,
        (pitch, _) => pitch,
    };
    Shape::rows([width, rows, slices], desc.row_pitch, slice_pitch).map_err(|_| Code::INVALID_IMAGE_DESCRIPTOR)
}

/// Pixels each way. What the kind of image has no use for counts as one; where it has mip levels, one of these numbers is a level
/// (cl_khr_mipmap_image), so nothing is said.
fn extent(desc: &ImageDesc) -> [u64; 3] {
    match desc.image_type {
        _ if desc.num_mip_levels > 1 => [u64::MAX; 3],
        IMAGE2D => [desc.width, desc.height, 1],
        IMAGE3D => [desc.width, desc.height, desc.depth],
        IMAGE1D_ARRAY => [desc.width, desc.array_size, 1],
        IMAGE2D_ARRAY => [desc.width, desc.height, desc.array_size],
        _ => [desc.width, 1, 1],
    }
}

/// Makes an image, whichever call it was.
fn create(
    context: Ref,
    properties: Option<In<u64>>,
    flags: u64,
    (format, desc): (ImageFormat, ImageDesc),
    host: In<u8>,
) -> Result<Ref, Code> {
    let context = context.object::<calls::Context>()?;
    check_host(flags, host.address())?;
    let of = desc.mem_object.optional::<calls::Mem>()?;
    let shape = match host.is_null() {
        true => Shape::line(0),
        false => host_shape(format, &desc)?,
    };
    let (wire_format, wire_desc) = (Some(format.wire()), Some(desc.wire()?));
    let image = Image {
        format,
        extent: extent(&desc),
    };
    let data = MemState::of_image(flags, image, host_ptr(flags, host.address()));
    let parents: Vec<&Object> = [Some(context), of].into_iter().flatten().collect();
    let host = (host.address(), shape);
    match properties {
        None => make(context, &parents, host, data, |host_ptr, returned| calls::CreateImage {
            context: context.handle(),
            flags: crossing(flags),
            image_format: wire_format,
            image_desc: wire_desc,
            host_ptr,
            returned,
        }),
        Some(properties) => {
            let properties = properties.terminated(2)?;
            make(context, &parents, host, data, |host_ptr, returned| {
                calls::CreateImageWithProperties {
                    context: context.handle(),
                    properties: list(properties),
                    flags: crossing(flags),
                    image_format: wire_format,
                    image_desc: wire_desc,
                    host_ptr,
                    returned,
                }
            })
        }
    }
}

fn given(format: &In<ImageFormat>, desc: &In<ImageDesc>) -> Result<(ImageFormat, ImageDesc), Code> {
    let format = format.one()?.ok_or(Code::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
    let desc = desc.one()?.ok_or(Code::INVALID_IMAGE_DESCRIPTOR)?;
    Ok((*format, *desc))
}

/// `clCreateImage`.
pub(crate) extern "C" fn create_image(
    context: Ref,
    flags: u64,
    image_format: In<ImageFormat>,
    image_desc: In<ImageDesc>,
    host: In<u8>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        create(context, None, flags, given(&image_format, &image_desc)?, host)
    })
}

/// `clCreateImageWithProperties`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn create_image_with_properties(
    context: Ref,
    properties: In<u64>,
    flags: u64,
    image_format: In<ImageFormat>,
    image_desc: In<ImageDesc>,
    host: In<u8>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        create(
            context,
            Some(properties),
            flags,
            given(&image_format, &image_desc)?,
            host,
        )
    })
}

/// A description with the numbers that the calls of OpenCL 1.1 have.
fn plain(image_type: u32, size: [u64; 3], pitches: [u64; 2]) -> ImageDesc {
    let [width, height, depth] = size;
    let [row_pitch, slice_pitch] = pitches;
    ImageDesc {
        image_type,
        width,
        height,
        depth,
        array_size: 0,
        row_pitch,
        slice_pitch,
        num_mip_levels: 0,
        num_samples: 0,
        mem_object: Ref::NULL,
    }
}

/// `clCreateImage2D`, which is short for `clCreateImage`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn create_image2d(
    context: Ref,
    flags: u64,
    image_format: In<ImageFormat>,
    width: u64,
    height: u64,
    row_pitch: u64,
    host: In<u8>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let format = *image_format.one()?.ok_or(Code::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
        let desc = plain(IMAGE2D, [width, height, 1], [row_pitch, 0]);
        create(context, None, flags, (format, desc), host)
    })
}

/// `clCreateImage3D`, which is short for `clCreateImage`.
#[allow(clippy::too_many_arguments, reason = "the API's own")]
pub(crate) extern "C" fn create_image3d(
    context: Ref,
    flags: u64,
    image_format: In<ImageFormat>,
    width: u64,
    height: u64,
    depth: u64,
    row_pitch: u64,
    slice_pitch: u64,
    host: In<u8>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let format = *image_format.one()?.ok_or(Code::INVALID_IMAGE_FORMAT_DESCRIPTOR)?;
        let desc = plain(IMAGE3D, [width, height, depth], [row_pitch, slice_pitch]);
        create(context, None, flags, (format, desc), host)
    })
}

/// A number that an image has for as long as it lives.
fn number(image: &Object, command: &'static str, param_name: u32) -> Result<u64, Code> {
    let query = Query {
        command,
        object: image,
        param_name,
        depends: Vec::new(),
        keeps: true,
    };
    let bytes = query.value(|connection, size| {
        let touched = [image];
        let touched = Touched::new(&touched, &[]);
        let value = match command {
            "clGetImageInfo" => {
                let make = |reply| calls::GetImageInfo {
                    image: image.handle(),
                    param_name,
                    param_value_size: size,
                    param_value: true,
                    param_value_size_ret: true,
                    reply,
                };
                let (call, answer) = connection.call(make, &touched, false)?;
                answer.success(&call)?.param_value.map(|value| value.bytes().to_vec())
            }
            _ => {
                let make = |reply| calls::GetMemObjectInfo {
                    memobj: image.handle(),
                    param_name,
                    param_value_size: size,
                    param_value: true,
                    param_value_size_ret: true,
                    reply,
                };
                let (call, answer) = connection.call(make, &touched, false)?;
                answer.success(&call)?.param_value.map(|value| value.bytes().to_vec())
            }
        };
        Ok(value.unwrap_or_default())
    })?;
    let mut number = [0; 8];
    let length = bytes.len().min(8);
    number[..length].copy_from_slice(&bytes[..length]);
    Ok(u64::from_le_bytes(number))
}

/// How a region of an image lies in memory.
pub(crate) fn shape(image: &Object, region: [u64; 3], row_pitch: u64, slice_pitch: u64) -> Result<Shape, Code> {
    let pixel = number(image, "clGetImageInfo", ELEMENT_SIZE)?;
    let kind = number(image, "clGetMemObjectInfo", MEM_TYPE)?;
    let [width, rows, slices] = region;
    let width = width.checked_mul(pixel).ok_or(Code::INVALID_VALUE)?;
    // Images of a 1D array are a slice each, and the region's second number counts them.
    match kind == u64::from(IMAGE1D_ARRAY) {
        true => Shape::rows([width, 1, rows], row_pitch, slice_pitch),
        false => Shape::rows([width, rows, slices], row_pitch, slice_pitch),
    }
}

macro_rules! image_transfer {
    ($(#[$doc:meta])* $function:ident $call:ident $blocking:ident $row:ident $slice:ident $way:expr) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments, reason = "the API's own")]
        pub(crate) extern "C" fn $function(
            command_queue: Ref,
            image: Ref,
            $blocking: u32,
            origin: In<u64>,
            region: In<u64>,
            $row: u64,
            $slice: u64,
            ptr: In<u8>,
            num_events_in_wait_list: u32,
            event_wait_list: In<Ref>,
            event: Out<Ref>,
        ) -> i32 {
            status(|| {
                let queue = command_queue.object::<calls::CommandQueue>()?;
                let memory = image.object::<calls::Mem>()?;
                let waits = event::wait_list(&event_wait_list, num_events_in_wait_list)?;
                let (origin, region) = (three(&origin)?, three(&region)?);
                checks::image_region(memory, &origin, &region)?;
                may_go(memory, $way)?;
                if ptr.is_null() {
                    return Err(Code::INVALID_VALUE);
                }
                let transfer = Transfer {
                    queue,
                    memory: Some(memory),
                    waits: &waits,
                    blocking: $blocking != 0,
                    way: $way,
                    address: ptr.address(),
                    shape: shape(memory, region, $row, $slice)?,
                    kind: None,
                    may_go_ahead: false,
                };
                transfer.run(event, |span, event| calls::$call {
                    command_queue: queue.handle(),
                    image: memory.handle(),
                    $blocking,
                    origin: List::new(&origin),
                    region: List::new(&region),
                    $row,
                    $slice,
                    ptr: Some(span),
                    num_events_in_wait_list,
                    event_wait_list: waits.list(),
                    event,
                })
            })
        }
    };
}

image_transfer! {
    /// `clEnqueueReadImage`.
    enqueue_read_image EnqueueReadImage blocking_read row_pitch slice_pitch Way::FromServer
}
image_transfer! {
    /// `clEnqueueWriteImage`.
    enqueue_write_image EnqueueWriteImage blocking_write input_row_pitch input_slice_pitch Way::ToServer
}

/// `clGetSupportedImageFormats`.
pub(crate) extern "C" fn get_supported_image_formats(
    context: Ref,
    flags: u64,
    image_type: u32,
    num_entries: u32,
    image_formats: Out<ImageFormat>,
    num_image_formats: Out<u32>,
) -> i32 {
    status(|| {
        let context = context.object::<calls::Context>()?;
        if num_entries == 0 && !image_formats.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let connection = context.connection()?;
        let make = |reply| calls::GetSupportedImageFormats {
            context: context.handle(),
            flags,
            image_type,
            num_entries: if image_formats.is_null() { 0 } else { num_entries },
            image_formats: !image_formats.is_null(),
            num_image_formats: true,
            reply,
        };
        let (call, answer) = connection.call(make, &Touched::new(&[context], &[]), false)?;
        let reply = answer.success(&call)?;
        if let Some(formats) = reply.image_formats {
            image_formats.put_list(formats.iter().map(ImageFormat::came), num_entries.into());
        }
        num_image_formats.put(reply.num_image_formats.unwrap_or_default());
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pixels_and_rows_are_as_long_as_the_format_says() {
        let rgba = ImageFormat {
            order: 0x10b5,
            data_type: 0x10de,
        };
        assert_eq!(pixel(rgba), Some(16));
        let short = ImageFormat {
            order: 0x10b4,
            data_type: 0x10d4,
        };
        assert_eq!(pixel(short), Some(2));
        assert_eq!(
            pixel(ImageFormat {
                order: 1,
                data_type: 0x10de
            }),
            None
        );
        let flat = host_shape(rgba, &plain(IMAGE2D, [4, 3, 0], [100, 0])).unwrap();
        assert_eq!(
            (flat.width, flat.rows, flat.row_pitch, flat.extent()),
            (64, 3, 100, Some(264))
        );
        let mut layers = plain(IMAGE1D_ARRAY, [4, 0, 0], [0, 0]);
        layers.array_size = 5;
        assert_eq!(host_shape(rgba, &layers).unwrap().extent(), Some(320));
        assert_eq!(
            host_shape(rgba, &plain(7, [1; 3], [0; 2])),
            Err(Code::INVALID_IMAGE_DESCRIPTOR)
        );
    }
}
