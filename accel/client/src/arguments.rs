//! What the application passes: pointers of C, each with what may be done with it. All of the crate's looks at the application's memory
//! are in here.
//!
//! These types are parameters of the C functions and made by their callers alone, so that each stands for the application's promises of
//! the API's specification. Obligations of the blocks below, and who discharges each:
//!
//! 1. *What is pointed to is there, for as many elements as the call's numbers say.* The application, by the specification of the call;
//!    NULL is looked for here. Numbers that name a length are bounded here where the API bounds them.
//! 2. *It is aligned for its type.* The application, as its compiler does; bytes need none.
//! 3. *Nobody else writes it meanwhile.* The application, by the API's rules for threads.
//! 4. *An object lives for as long as the call.* The application, which holds a reference to it.
#![allow(
    unsafe_code,
    reason = "the API is one of C pointers; each block says which obligations it rests on"
)]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use accel_proto::{Handle, Kind, List, Plain};

use crate::codes::Code;
use crate::object::{Object, Typed};

/// An object, or NULL, or whatever the application passes for one.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Ref(*const Object);

impl Ref {
    /// NULL, as calls return it.
    pub(crate) const NULL: Self = Self(std::ptr::null());

    /// To the application, which holds a reference from now on.
    pub(crate) fn to(object: *const Object) -> Self {
        Self(object)
    }

    /// Its address, as values of properties and arguments of kernels have it.
    pub(crate) fn address(self) -> u64 {
        self.0 as u64
    }

    /// Of an address, within properties.
    pub(crate) fn at(address: u64) -> Self {
        Self(std::ptr::with_exposed_provenance(
            usize::try_from(address).unwrap_or_default(),
        ))
    }

    /// The object, if it is one of that kind.
    pub(crate) fn object<K: Typed>(&self) -> Result<&Object, Code> {
        self.optional::<K>()?.ok_or(K::INVALID)
    }

    /// The same where NULL means something.
    pub(crate) fn optional<K: Typed>(&self) -> Result<Option<&Object>, Code> {
        let Some(at) = NonNull::new(self.0.cast_mut()) else {
            return Ok(None);
        };
        if !at.is_aligned() {
            return Err(K::INVALID);
        }
        // SAFETY: 1. and 4. the application's; 2. looked for above; 3. objects are changed by atomics and locks alone.
        let object = unsafe { at.as_ref() };
        match object.is::<K>() {
            true => Ok(Some(object)),
            false => Err(K::INVALID),
        }
    }
}

/// Something to be read.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl In<u8> {
    /// Bytes that are this library's own, or that the application has named by an address.
    pub(crate) fn at(address: usize) -> Self {
        Self(std::ptr::with_exposed_provenance(address))
    }
}

impl<T> In<T> {
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Its address.
    pub(crate) fn address(self) -> usize {
        self.0.addr()
    }

    /// So many elements; nothing if it is NULL.
    pub(crate) fn list(&self, length: u64) -> Result<Option<&[T]>, Code> {
        let length = bounded::<T>(length)?;
        let at = NonNull::new(self.0.cast_mut()).filter(|at| at.is_aligned());
        // SAFETY: 1. and 3. the application's, and the length is one that memory can have; 2. looked for above.
        Ok(at.map(|at| unsafe { std::slice::from_raw_parts(at.as_ptr(), length) }))
    }

    /// The same where NULL is wrong.
    pub(crate) fn required(&self, length: u64) -> Result<&[T], Code> {
        self.list(length)?.ok_or(Code::INVALID_VALUE)
    }

    /// One element.
    pub(crate) fn one(&self) -> Result<Option<&T>, Code> {
        Ok(self.list(1)?.and_then(<[T]>::first))
    }
}

impl<T: Copy + Default + PartialEq> In<T> {
    /// Elements up to the first zero, which is the last of them.
    pub(crate) fn terminated(&self, stride: usize) -> Result<Option<&[T]>, Code> {
        if self.0.is_null() {
            return Ok(None);
        }
        let mut length = 0;
        // SAFETY: 1. each is read only if those before are no end, and the list has one; 2. and 3. the application's.
        while unsafe { self.0.wrapping_add(length).read() } != T::default() {
            length += stride;
        }
        self.list(length as u64 + 1)
    }
}

impl In<c_char> {
    /// Its bytes, for who knows their number.
    pub(crate) fn bytes(self) -> In<u8> {
        In(self.0.cast())
    }

    /// A string.
    pub(crate) fn text(&self) -> Option<&CStr> {
        // SAFETY: 1. to 3. the application's: a string of C ends with a zero byte.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) })
    }
}

impl In<Ref> {
    /// A list of objects; NULL and none go together, and neither alone, or it is that error.
    pub(crate) fn objects<K: Typed>(&self, count: u32, mismatch: Code, invalid: Code) -> Result<Objects<'_, K>, Code> {
        let list = match (count, self.0.is_null()) {
            (0, true) => return Ok(Objects::default()),
            (0, false) | (_, true) => return Err(mismatch),
            (_, false) => self.required(count.into())?,
        };
        let objects: Result<Vec<_>, _> = list.iter().map(|one| one.object::<K>().map_err(|_| invalid)).collect();
        let objects = objects?;
        let handles = objects.iter().map(|object| object.handle()).collect();
        Ok(Objects { objects, handles })
    }
}

/// Objects of a list, and their names.
#[derive(Debug)]
pub(crate) struct Objects<'a, K> {
    pub(crate) objects: Vec<&'a Object>,
    handles: Vec<Handle<K>>,
}

impl<K> Default for Objects<'_, K> {
    fn default() -> Self {
        Self {
            objects: Vec::new(),
            handles: Vec::new(),
        }
    }
}

impl<K: Kind> Objects<'_, K> {
    /// For a call; nothing if it is empty.
    pub(crate) fn list(&self) -> Option<List<'_, Handle<K>>> {
        (!self.handles.is_empty()).then(|| List::new(&self.handles))
    }
}

/// Something to be written.
#[derive(Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T: Copy> Out<T> {
    /// Of memory of a test's own.
    #[cfg(test)]
    pub(crate) fn of(memory: &mut [T]) -> Self {
        Self(memory.as_mut_ptr())
    }

    /// NULL.
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());

    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Its address.
    pub(crate) fn address(self) -> usize {
        self.0.addr()
    }

    /// Writes it, unless it is NULL.
    pub(crate) fn put(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: 1. to 3. the application's: where a call gives one value there is space for one.
            unsafe { self.0.write(value) };
        }
    }

    /// Writes elements, unless it is NULL; there is space for `space` of them.
    pub(crate) fn put_list(self, values: impl Iterator<Item = T>, space: u64) {
        if self.0.is_null() {
            return;
        }
        let space = usize::try_from(space).unwrap_or(usize::MAX);
        for (index, value) in values.take(space).enumerate() {
            // SAFETY: 1. less than `space`, for which there is space by the call's numbers; 2. and 3. the application's.
            unsafe { self.0.wrapping_add(index).write(value) };
        }
    }
}

impl Out<u8> {
    /// The same for bytes.
    pub(crate) fn put_bytes(self, bytes: &[u8], space: u64) {
        let length = bytes.len().min(usize::try_from(space).unwrap_or(usize::MAX));
        if !self.0.is_null() {
            // SAFETY: 1. `length` is within both: the bytes' own length, and the space that the call's numbers say; 2. bytes; 3. the
            // application's, and what it names is not this library's own memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0, length) };
        }
    }
}

impl Out<u8> {
    /// It is a list of so many places that the application has, each for bytes of its own, or NULL.
    pub(crate) fn places(self, count: usize) -> impl Iterator<Item = Self> {
        let list = In::<Self>(self.0.cast());
        // The list is the application's, as a list that goes in is; one that is not aligned has nothing to be filled.
        let places: Vec<Self> = list.list(count as u64).ok().flatten().unwrap_or_default().to_vec();
        places.into_iter()
    }
}

impl Out<i32> {
    /// The error code of a call that returns something else.
    pub(crate) fn status(self, done: Result<Ref, Code>) -> Ref {
        self.put(done.as_ref().err().map_or(0, |code| code.0));
        done.unwrap_or(Ref::NULL)
    }
}

/// An address that the application gets back as it is.
pub(crate) type Opaque = *mut c_void;

/// How many elements of a type memory can have.
fn bounded<T>(length: u64) -> Result<usize, Code> {
    let most = isize::MAX as usize / size_of::<T>().max(1);
    let length = usize::try_from(length).ok().filter(|length| *length <= most);
    length.ok_or(Code::INVALID_VALUE)
}

/// Numbers of a list on the wire, if it is there.
pub(crate) fn list<T: Plain>(values: Option<&[T]>) -> Option<List<'_, T>> {
    values.map(List::new)
}

/// `cl_image_format` in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct ImageFormat {
    pub(crate) order: u32,
    pub(crate) data_type: u32,
}

/// `cl_image_desc` in memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ImageDesc {
    pub(crate) image_type: u32,
    pub(crate) width: u64,
    pub(crate) height: u64,
    pub(crate) depth: u64,
    pub(crate) array_size: u64,
    pub(crate) row_pitch: u64,
    pub(crate) slice_pitch: u64,
    pub(crate) num_mip_levels: u32,
    pub(crate) num_samples: u32,
    pub(crate) mem_object: Ref,
}

/// `cl_buffer_region` in memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct BufferRegion {
    pub(crate) origin: u64,
    pub(crate) size: u64,
}

impl BufferRegion {
    /// As it travels.
    pub(crate) fn wire(self) -> accel_proto::opencl::BufferRegion {
        let Self { origin, size } = self;
        accel_proto::opencl::BufferRegion { origin, size }
    }
}

impl ImageFormat {
    /// As it travels.
    pub(crate) fn wire(self) -> accel_proto::opencl::ImageFormat {
        accel_proto::opencl::ImageFormat {
            image_channel_order: self.order,
            image_channel_data_type: self.data_type,
        }
    }

    /// As it came.
    pub(crate) fn came(format: accel_proto::opencl::ImageFormat) -> Self {
        Self {
            order: format.image_channel_order,
            data_type: format.image_channel_data_type,
        }
    }
}

impl ImageDesc {
    /// As it travels; nothing if its object is none.
    pub(crate) fn wire(self) -> Result<accel_proto::opencl::ImageDesc, Code> {
        let object = self.mem_object.optional::<accel_proto::opencl::Mem>()?;
        Ok(accel_proto::opencl::ImageDesc {
            image_type: self.image_type,
            image_width: self.width,
            image_height: self.height,
            image_depth: self.depth,
            image_array_size: self.array_size,
            image_row_pitch: self.row_pitch,
            image_slice_pitch: self.slice_pitch,
            num_mip_levels: self.num_mip_levels,
            num_samples: self.num_samples,
            mem_object: crate::object::handle_of(object),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_end_where_they_say() {
        let values = [5_i64, 6, 0, 7];
        let list = In(values.as_ptr());
        assert_eq!(list.terminated(1).unwrap().unwrap(), [5, 6, 0]);
        // A zero that is a value, as of a key that turns something off, ends nothing.
        let pairs = [5_i64, 0, 6, 1, 0];
        assert_eq!(In(pairs.as_ptr()).terminated(2).unwrap().unwrap(), pairs);
        assert!(In::<i64>(std::ptr::null()).terminated(2).unwrap().is_none());
        assert_eq!(list.list(u64::MAX).unwrap_err(), Code::INVALID_VALUE);
        assert_eq!(
            In::<i64>(std::ptr::null()).required(1).unwrap_err(),
            Code::INVALID_VALUE
        );
        let objects = In::<Ref>(std::ptr::null());
        let found = objects.objects::<accel_proto::opencl::Event>(1, Code::INVALID_VALUE, Code::INVALID_EVENT);
        assert_eq!(found.unwrap_err(), Code::INVALID_VALUE);
    }

    #[test]
    fn no_more_is_written_than_there_is_space_for() {
        let mut values = [0_u32; 4];
        Out(values.as_mut_ptr()).put_list([1, 2, 3, 4, 5].into_iter(), 3);
        assert_eq!(values, [1, 2, 3, 0]);
        let mut bytes = [0_u8; 4];
        Out(bytes.as_mut_ptr()).put_bytes(&[1, 2, 3, 4, 5], 2);
        assert_eq!(bytes, [1, 2, 0, 0]);
        Out::<u32>(std::ptr::null_mut()).put(7);
    }
}
