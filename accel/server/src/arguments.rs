//! What arguments a kernel takes, as far as the back end tells, and whether what a client sends is one of them.
//!
//! A back end takes the bytes of an argument that is an object for the object's address. So bytes are let through only where no object is
//! expected. Knows no table.
#![allow(unsafe_code, reason = "asks functions of a C API")]

use std::ffi::c_void;

use crate::api::{Backend, Code, P};
use crate::objects::{Form, Object, Sort, State};

/// What an argument is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parameter {
    /// A value.
    Bytes,
    /// Memory of a work-group, which has a size alone.
    Local,
    /// A buffer, or none.
    Buffer,
    Image,
    Pipe,
    Sampler,
    Queue,
    /// The back end does not tell.
    Unknown,
}

/// What is to be an argument.
#[derive(Debug)]
pub(crate) enum Argument<'a> {
    /// So many bytes of nothing.
    Nothing,
    /// So many bytes.
    Bytes(u64),
    /// The same, all of them zero, which no object's address is: a client that knows no arguments has no other way to say NULL.
    Zeroes(u64),
    /// No object.
    Null,
    /// An object of a sort.
    Object(Sort, &'a Object),
}

/// Bytes of an address.
const ADDRESS: u64 = size_of::<P>() as u64;

impl Parameter {
    /// Whether it takes that. What is left to the back end is whether the number of bytes is right.
    pub(crate) fn takes(self, argument: &Argument<'_>) -> Result<(), Code> {
        let fits = match (self, argument) {
            (Self::Bytes, Argument::Bytes(_) | Argument::Zeroes(_)) | (Self::Local, Argument::Nothing) => true,
            (Self::Buffer, Argument::Zeroes(length)) => *length == ADDRESS,
            // Bytes that are no address hurt nobody.
            (Self::Unknown, Argument::Bytes(length)) => *length != ADDRESS,
            (Self::Unknown, _) | (Self::Buffer, Argument::Null | Argument::Nothing) => true,
            (Self::Sampler, Argument::Object(Sort::Sampler, _))
            | (Self::Queue, Argument::Object(Sort::CommandQueue, _)) => true,
            (_, Argument::Object(Sort::Mem, object)) => {
                let form = object.memory()?.form;
                matches!(
                    (self, form),
                    (Self::Buffer, Form::Buffer(_)) | (Self::Image, Form::Image) | (Self::Pipe, Form::Pipe)
                )
            }
            _ => false,
        };
        match (fits, argument) {
            (true, _) => Ok(()),
            // As a back end says it, which is not asked.
            (false, Argument::Bytes(length) | Argument::Zeroes(length)) if self.is_object() && *length != ADDRESS => {
                Err(Code::INVALID_ARG_SIZE)
            }
            (false, _) => Err(Code::INVALID_ARG_VALUE),
        }
    }

    /// Whether nothing but an object can be it.
    fn is_object(self) -> bool {
        matches!(
            self,
            Self::Buffer | Self::Image | Self::Pipe | Self::Sampler | Self::Queue
        )
    }
}

/// Numbers of queries (cl.h).
const KERNEL_NUM_ARGS: u32 = 0x1191;
const ARG_ADDRESS_QUALIFIER: u32 = 0x1196;
const ARG_ACCESS_QUALIFIER: u32 = 0x1197;
const ARG_TYPE_NAME: u32 = 0x1198;
const ARG_TYPE_QUALIFIER: u32 = 0x1199;

/// Most arguments of a kernel that are asked about.
const MOST: u32 = 4096;

/// What the server knows of a new object of a sort.
pub(crate) fn state_of(backend: &Backend, sort: Sort, raw: P) -> State {
    match sort {
        Sort::CommandQueue => State::queue(true, None),
        Sort::Kernel => State::kernel(backend.looks_at_arguments.then(|| parameters(backend, raw))),
        _ => State::Plain,
    }
}

/// All parameters of a kernel.
fn parameters(backend: &Backend, kernel: P) -> Vec<Parameter> {
    let mut count = [0; 4];
    if let Ok(function) = backend.api.clGetKernelInfo() {
        let at = count.as_mut_ptr().cast::<c_void>();
        // SAFETY: 1. the kernel was made a moment ago and is nobody else's yet; 2. the place has the four bytes that are said.
        let status = unsafe { function(kernel, KERNEL_NUM_ARGS, 4, at, std::ptr::null_mut()) };
        if status != 0 {
            return Vec::new();
        }
    }
    let count = u32::from_ne_bytes(count).min(MOST);
    (0..count).map(|index| parameter(backend, kernel, index)).collect()
}

/// One of them: by its address space, its access, and for the rest by the name of its type (OpenCL C, 6.3.3 and 6.7).
fn parameter(backend: &Backend, kernel: P, index: u32) -> Parameter {
    let ask = |name: u32, bytes: &mut [u8]| {
        let Ok(function) = backend.api.clGetKernelArgInfo() else {
            return false;
        };
        let (length, at) = (bytes.len() as u64, bytes.as_mut_ptr().cast::<c_void>());
        // SAFETY: 1. as in `parameters`; 2. the place has as many bytes as are said.
        unsafe { function(kernel, index, name, length, at, std::ptr::null_mut()) == 0 }
    };
    let number = |name| {
        let mut bytes = [0; 4];
        ask(name, &mut bytes).then(|| u32::from_ne_bytes(bytes))
    };
    let (Some(space), Some(access)) = (number(ARG_ADDRESS_QUALIFIER), number(ARG_ACCESS_QUALIFIER)) else {
        return Parameter::Unknown;
    };
    let mut qualifiers = [0; 8];
    let is_pipe = ask(ARG_TYPE_QUALIFIER, &mut qualifiers) && u64::from_ne_bytes(qualifiers) & 8 != 0;
    let mut type_name = [0; 64];
    // A longer name is none of the types that matter.
    let named = ask(ARG_TYPE_NAME, &mut type_name);
    let is = |part: &str| named && String::from_utf8_lossy(&type_name).contains(part);
    match (space, access) {
        _ if is_pipe || is("pipe ") => Parameter::Pipe,
        // CL_KERNEL_ARG_ACCESS_READ_ONLY, WRITE_ONLY, READ_WRITE
        (_, 0x11a0..=0x11a2) => Parameter::Image,
        _ if is("sampler_t") => Parameter::Sampler,
        _ if is("queue_t") => Parameter::Queue,
        // CL_KERNEL_ARG_ADDRESS_GLOBAL, LOCAL, CONSTANT, PRIVATE
        (0x119b | 0x119d, _) => Parameter::Buffer,
        (0x119c, _) => Parameter::Local,
        (0x119e, _) => Parameter::Bytes,
        _ => Parameter::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_never_taken_for_an_object() {
        let bytes = Argument::Bytes(ADDRESS);
        for parameter in [
            Parameter::Buffer,
            Parameter::Image,
            Parameter::Pipe,
            Parameter::Sampler,
            Parameter::Queue,
            Parameter::Local,
            Parameter::Unknown,
        ] {
            assert_eq!(parameter.takes(&bytes), Err(Code::INVALID_ARG_VALUE), "{parameter:?}");
        }
        assert_eq!(Parameter::Bytes.takes(&bytes), Ok(()));
        assert_eq!(Parameter::Unknown.takes(&Argument::Bytes(4)), Ok(()));
        assert_eq!(Parameter::Buffer.takes(&Argument::Null), Ok(()));
        assert_eq!(Parameter::Buffer.takes(&Argument::Zeroes(ADDRESS)), Ok(()));
        for wrong in [Parameter::Buffer, Parameter::Image] {
            assert_eq!(wrong.takes(&Argument::Zeroes(16)), Err(Code::INVALID_ARG_SIZE));
        }
        for parameter in [Parameter::Buffer, Parameter::Sampler] {
            assert_eq!(parameter.takes(&Argument::Bytes(9)), Err(Code::INVALID_ARG_SIZE));
        }
        assert_eq!(Parameter::Bytes.takes(&Argument::Null), Err(Code::INVALID_ARG_VALUE));
    }
}
