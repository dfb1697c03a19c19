//! cuDNN's functions by hand: versions, and what was told and is asked for.
#![allow(
    unsafe_code,
    reason = "these are functions of a C API, which write where their callers say"
)]
#![allow(non_snake_case, clippy::too_many_arguments, reason = "names and parameters are C's")]

mod shapes;

use std::ffi::CStr;

use accel_proto::Handle;
use accel_proto::cuda::CudnnSetStream;

use crate::abi::{P, address, raw};
use crate::descriptor;
use crate::generated::values::{CUDNN_STATUS_BAD_PARAM, CUDNN_STATUS_NOT_SUPPORTED};
use crate::handles::{Setting, set, setting};
use crate::stub;

pub(crate) use self::shapes::*;

/// The version whose functions these are: 9.19, by which PyTorch 2.11 is built.
const VERSION: usize = 91_900;

pub(crate) unsafe fn cudnnGetVersion() -> usize {
    VERSION
}

pub(crate) unsafe fn cudnnGetCudartVersion() -> usize {
    13_000
}

pub(crate) unsafe fn cudnnGetProperty(type_: i32, value: *mut i32) -> i32 {
    // libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
    let Some(number) = usize::try_from(type_)
        .ok()
        .and_then(|place| [9, 19, 0].get(place).copied())
    else {
        return CUDNN_STATUS_BAD_PARAM;
    };
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(value, number) };
    0
}

pub(crate) unsafe fn cudnnGetErrorString(status: i32) -> *const u8 {
    let text: &CStr = match status {
        0 => c"CUDNN_STATUS_SUCCESS",
        1001 => c"CUDNN_STATUS_NOT_INITIALIZED",
        2000 => c"CUDNN_STATUS_BAD_PARAM",
        CUDNN_STATUS_NOT_SUPPORTED => c"CUDNN_STATUS_NOT_SUPPORTED",
        4000 => c"CUDNN_STATUS_INTERNAL_ERROR",
        5000 => c"CUDNN_STATUS_EXECUTION_FAILED",
        _ => c"CUDNN_UNKNOWN_STATUS",
    };
    text.as_ptr().cast()
}

pub(crate) unsafe fn cudnnGetLastErrorString(message: *mut u8, max_size: usize) {
    if max_size > 0 {
        // SAFETY: 1. the program has room for that many bytes.
        unsafe { stub::put(message, 0) };
    }
}

pub(crate) unsafe fn cudnnSetStream(handle: P, stream_id: P) -> i32 {
    let call = CudnnSetStream {
        handle: Handle::from_raw(raw(handle)),
        stream_id: Handle::from_raw(raw(stream_id)),
    };
    let told = stub::send_once(&call);
    stub::status::cudnn(told.map(|()| set(Setting::Stream, raw(handle), raw(stream_id))))
}

pub(crate) unsafe fn cudnnGetStream(handle: P, stream_id: *mut P) -> i32 {
    let kept = setting(Setting::Stream, raw(handle)).unwrap_or_default();
    // SAFETY: 1. the program has a place for it.
    unsafe { stub::put(stream_id, address(kept)) };
    0
}

pub(crate) unsafe fn cudnnGetTensorNdDescriptor(
    tensor_desc: P,
    nb_dims_requested: i32,
    data_type: *mut i32,
    nb_dims: *mut i32,
    dim_a: *mut i32,
    stride_a: *mut i32,
) -> i32 {
    // SAFETY: 1. the program's descriptor is one that it was given.
    let descriptor = unsafe { descriptor::get(&tensor_desc) };
    let Some([kept_type, count, rest @ ..]) = descriptor.and_then(descriptor::Descriptor::first) else {
        return CUDNN_STATUS_BAD_PARAM;
    };
    let (dims, strides) = rest.split_at(rest.len() / 2);
    // SAFETY: 1. the program has a place for it, or NULL.
    unsafe { stub::put(data_type, *kept_type) };
    // SAFETY: 1. the same.
    unsafe { stub::put(nb_dims, *count) };
    // SAFETY: 1. the list has room for as many as the program asks for.
    unsafe { put_list(dim_a, dims, nb_dims_requested) };
    // SAFETY: 1. the same.
    unsafe { put_list(stride_a, strides, nb_dims_requested) };
    0
}

pub(crate) unsafe fn cudnnGetFilterNdDescriptor(
    filter_desc: P,
    nb_dims_requested: i32,
    data_type: *mut i32,
    format: *mut i32,
    nb_dims: *mut i32,
    filter_dim_a: *mut i32,
) -> i32 {
    // SAFETY: 1. the program's descriptor is one that it was given.
    let descriptor = unsafe { descriptor::get(&filter_desc) };
    let Some([kept_type, kept_format, count, dims @ ..]) = descriptor.and_then(descriptor::Descriptor::first) else {
        return CUDNN_STATUS_BAD_PARAM;
    };
    // SAFETY: 1. the program has a place for it, or NULL.
    unsafe { stub::put(data_type, *kept_type) };
    // SAFETY: 1. the same.
    unsafe { stub::put(format, *kept_format) };
    // SAFETY: 1. the same.
    unsafe { stub::put(nb_dims, *count) };
    // SAFETY: 1. the list has room for as many as the program asks for.
    unsafe { put_list(filter_dim_a, dims, nb_dims_requested) };
    0
}

/// # Safety
///
/// The place is NULL or has room for `most`.
unsafe fn put_list(place: *mut i32, numbers: &[i32], most: i32) {
    let most = usize::try_from(most).unwrap_or_default().min(numbers.len());
    let numbers = accel_proto::List::new(numbers.get(..most).unwrap_or_default());
    // SAFETY: 1. the caller's place has room for as many.
    unsafe { stub::put_all(place, numbers) };
}
