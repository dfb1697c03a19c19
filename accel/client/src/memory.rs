//! Making buffers (OpenCL API, section 5.2.1), and functions to be called at a memory object's end. Knows no ring.
//!
//! The application's own memory (CL_MEM_USE_HOST_PTR) is copied when the buffer is made, as if CL_MEM_COPY_HOST_PTR had been said, and
//! where the API says that it shows what the buffer has: when it is mapped and unmapped (`mapping`).

use std::sync::Arc;

use accel_proto::{Call, Handle, Memory, Span, SvmAddress, opencl as calls};

use crate::arguments::{BufferRegion, In, Opaque, Out, Ref, list};
use crate::bulk::Shape;
use crate::codes::Code;
use crate::connection::{Connection, Touched};
use crate::mapping::{self, COPY_HOST_PTR, MemState, USE_HOST_PTR};
use crate::notify::Destructor;
use crate::object::{Data, Object};
use crate::transfer::lies;
use crate::{lock, returned, status};

/// Makes a memory object whose contents may be the application's: so many bytes, in rows with gaps or without.
pub(crate) fn make<'c, C: Call<'c>>(
    context: &Object,
    parents: &[&Object],
    host: (usize, Shape),
    data: Data,
    make: impl FnOnce(Option<Span>, Handle<calls::Mem>) -> C,
) -> Result<Ref, Code> {
    let connection = context.connection()?;
    let (address, shape) = host;
    let made = Object::make::<calls::Mem>(connection, parents, data)?;
    let lies = match address {
        0 => None,
        _ => {
            let length = shape.extent().ok_or(Code::INVALID_VALUE)?;
            let lies = lies(connection, address, length)?;
            if matches!(lies, crate::bulk::Lies::Taken(_)) {
                shape.copy_in(connection, lies.offset(), address);
            }
            let offset = lies.offset();
            Some((lies, Span { offset, length }))
        }
    };
    let span = lies.as_ref().map(|(_, span)| *span);
    let call = make(span, made.handle());
    let done = created(connection, (call, span), parents, made);
    if let Some(block) = lies.and_then(|(lies, _)| lies.block()) {
        connection.give_back(block);
    }
    done
}

fn created<'c, C: Call<'c>>(
    connection: &'static Connection,
    (call, contents): (C, Option<Span>),
    parents: &[&Object],
    made: Arc<Object>,
) -> Result<Ref, Code> {
    let touched = Touched::new(parents, &[]).reads(contents);
    let (call, answer) = connection.call(|_| call, &touched, false)?;
    answer.success(&call)?;
    Ok(made.publish())
}

/// Makes a buffer; `make` makes the call, of the flags and the bytes that cross. Shared virtual memory is used in place.
fn make_buffer<'c, C: Call<'c>>(
    context: &Object,
    (flags, size): (u64, u64),
    address: usize,
    make_call: impl FnOnce(u64, Option<Memory>, Handle<calls::Mem>) -> C,
) -> Result<Ref, Code> {
    let connection = context.connection()?;
    if flags & USE_HOST_PTR != 0 && connection.regions.has(address, size) {
        let data = MemState::shared(Some(flags), size, address);
        let made = Object::make::<calls::Mem>(connection, &[context], data)?;
        let shared = Memory::Svm(SvmAddress(address as u64));
        let call = make_call(flags, Some(shared), made.handle());
        return created(connection, (call, None), &[context], made);
    }
    let data = MemState::data(Some(flags), Some(size), host_ptr(flags, address));
    make(
        context,
        &[context],
        (address, Shape::line(size)),
        data,
        |span, returned| make_call(crossing(flags), span.map(Memory::Arena), returned),
    )
}

/// Flags as they cross.
pub(crate) fn crossing(flags: u64) -> u64 {
    match flags & USE_HOST_PTR {
        0 => flags,
        _ => flags & !USE_HOST_PTR | COPY_HOST_PTR,
    }
}

/// What the API says of the application's memory and the flags about it.
pub(crate) fn check_host(flags: u64, address: usize) -> Result<(), Code> {
    let is_asked_for = flags & (USE_HOST_PTR | COPY_HOST_PTR) != 0;
    if flags & USE_HOST_PTR != 0 && flags & (COPY_HOST_PTR | 1 << 4) != 0 {
        return Err(Code::INVALID_VALUE);
    }
    match is_asked_for == (address != 0) {
        true => Ok(()),
        false => Err(Code::INVALID_HOST_PTR),
    }
}

/// The application's memory, if it stays in use.
pub(crate) fn host_ptr(flags: u64, address: usize) -> usize {
    if flags & USE_HOST_PTR == 0 { 0 } else { address }
}

/// `clCreateBuffer`.
pub(crate) extern "C" fn create_buffer(
    context: Ref,
    flags: u64,
    size: u64,
    host: In<u8>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        if size == 0 {
            return Err(Code::INVALID_BUFFER_SIZE);
        }
        check_host(flags, host.address())?;
        make_buffer(context, (flags, size), host.address(), |flags, host_ptr, returned| {
            calls::CreateBuffer {
                context: context.handle(),
                flags,
                size,
                host_ptr,
                returned,
            }
        })
    })
}

/// `clCreateBufferWithProperties`.
pub(crate) extern "C" fn create_buffer_with_properties(
    context: Ref,
    properties: In<u64>,
    flags: u64,
    size: u64,
    host: In<u8>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let context = context.object::<calls::Context>()?;
        if size == 0 {
            return Err(Code::INVALID_BUFFER_SIZE);
        }
        check_host(flags, host.address())?;
        let properties = properties.terminated(2)?;
        make_buffer(context, (flags, size), host.address(), |flags, host_ptr, returned| {
            calls::CreateBufferWithProperties {
                context: context.handle(),
                properties: list(properties),
                flags,
                size,
                host_ptr,
                returned,
            }
        })
    })
}

/// `clCreateSubBuffer`.
pub(crate) extern "C" fn create_sub_buffer(
    buffer: Ref,
    flags: u64,
    buffer_create_type: u32,
    buffer_create_info: In<BufferRegion>,
    errcode_ret: Out<i32>,
) -> Ref {
    returned(errcode_ret, || {
        let buffer = buffer.object::<calls::Mem>()?;
        let region = *buffer_create_info.one()?.ok_or(Code::INVALID_VALUE)?;
        let connection = buffer.connection()?;
        let known = mapping::state(buffer)?;
        let end = region.origin.checked_add(region.size).ok_or(Code::INVALID_VALUE)?;
        if known.size().is_some_and(|size| end > size) {
            return Err(Code::INVALID_VALUE);
        }
        let host_ptr = match known.host_ptr {
            0 => 0,
            begin => begin + usize::try_from(region.origin).map_err(|_| Code::INVALID_VALUE)?,
        };
        // What it inherits (OpenCL API, table 5.2.3) the server knows, but for the application's memory.
        let inherits = known.flags.filter(|_| flags & 7 == 0 && host_ptr != 0);
        let flags_told = inherits.map(|inherited| inherited | flags);
        let data = match known.uses_svm() {
            true => MemState::shared(flags_told, region.size, host_ptr),
            false => MemState::data(flags_told, Some(region.size), host_ptr),
        };
        let made = Object::make::<calls::Mem>(connection, &[buffer], data)?;
        let call = calls::CreateSubBuffer {
            buffer: buffer.handle(),
            flags,
            buffer_create_type,
            buffer_create_info: Some(region.wire()),
            returned: made.handle(),
        };
        created(connection, (call, None), &[buffer], made)
    })
}

/// `clSetMemObjectDestructorCallback`: this library ends the object, so it calls the function.
pub(crate) extern "C" fn set_mem_object_destructor_callback(
    memobj: Ref,
    pfn_notify: Option<extern "C" fn(Ref, Opaque)>,
    user_data: Opaque,
) -> i32 {
    status(|| at_the_end(memobj.object::<calls::Mem>()?, pfn_notify, user_data))
}

/// A function that is called when an object is over.
pub(crate) fn at_the_end(
    object: &Object,
    function: Option<extern "C" fn(Ref, Opaque)>,
    user_data: Opaque,
) -> Result<(), Code> {
    let function = function.ok_or(Code::INVALID_VALUE)?;
    lock(&object.destructors).push(Destructor { function, user_data });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_applications_memory_crosses_as_a_copy() {
        assert_eq!(crossing(1 | USE_HOST_PTR), 1 | COPY_HOST_PTR);
        assert_eq!(crossing(4), 4);
        assert_eq!(check_host(USE_HOST_PTR, 0), Err(Code::INVALID_HOST_PTR));
        assert_eq!(check_host(1, 8), Err(Code::INVALID_HOST_PTR));
        assert_eq!(check_host(USE_HOST_PTR | COPY_HOST_PTR, 8), Err(Code::INVALID_VALUE));
        assert_eq!(check_host(COPY_HOST_PTR, 8), Ok(()));
        assert_eq!((host_ptr(COPY_HOST_PTR, 8), host_ptr(USE_HOST_PTR, 8)), (0, 8));
    }
}
