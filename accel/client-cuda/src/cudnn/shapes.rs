//! Descriptors with their sizes one by one, as programs in C have them. What goes to the server is what the functions for lists of sizes put
//! into descriptors, so that it knows one form of each.
//!
//! Knows no operation.

use accel_proto::cuda::parts;

use crate::abi::P;
use crate::descriptor::{self, Descriptor, Words};
use crate::generated::values::{CUDNN_STATUS_BAD_PARAM, CUDNN_STATUS_NOT_SUPPORTED};
use crate::stub;

/// `cudnnTensorFormat_t`.
const NCHW: i32 = 0;
const NHWC: i32 = 1;
/// `cudnnBatchNormMode_t`: each element by itself; all others are by channel.
const PER_ACTIVATION: i32 = 0;

/// Puts what a function for lists has as arguments.
///
/// # Safety
///
/// The address is NULL or a descriptor's, and no other thread uses it.
unsafe fn set(descriptor: P, function: i32, numbers: &[i32]) -> i32 {
    let mut words = Words::default();
    words.list(numbers);
    let function = u16::try_from(function).unwrap_or_default();
    // SAFETY: 1. the caller's.
    stub::status::cudnn(unsafe { descriptor::set(descriptor, function, 0, words) })
}

/// What a function for lists has put.
fn of(descriptor: Option<&Descriptor>, function: i32) -> Option<&[i32]> {
    descriptor?.part(u16::try_from(function).ok()?)
}

/// Data type, sizes and strides of a tensor.
fn tensor(descriptor: Option<&Descriptor>) -> Option<(i32, [i32; 4], [i32; 4])> {
    let [data_type, 4, rest @ ..] = of(descriptor, parts::CUDNN_SET_TENSOR_ND_DESCRIPTOR)? else {
        return None;
    };
    let (dims, strides) = rest.split_first_chunk::<4>()?;
    Some((*data_type, *dims, *strides.first_chunk()?))
}

/// Strides of a tensor whose elements lie one behind the other, with the last of the sizes in `order` the nearest.
fn strides(dims: [i32; 4], order: [usize; 4]) -> Option<[i32; 4]> {
    let mut strides = [0; 4];
    let mut stride = 1_i32;
    for dimension in order.into_iter().rev() {
        strides[dimension] = stride;
        stride = stride.checked_mul(dims[dimension]).filter(|_| dims[dimension] > 0)?;
    }
    Some(strides)
}

unsafe fn set_tensor(descriptor: P, data_type: i32, dims: [i32; 4], strides: [i32; 4]) -> i32 {
    let mut numbers = vec![data_type, 4];
    numbers.extend(dims.into_iter().chain(strides));
    // SAFETY: 1. the caller's.
    unsafe { set(descriptor, parts::CUDNN_SET_TENSOR_ND_DESCRIPTOR, &numbers) }
}

pub(crate) unsafe fn cudnnSetTensor4dDescriptor(tensor_desc: P, format: i32, data_type: i32, dims: [i32; 4]) -> i32 {
    let order = match format {
        NCHW => [0, 1, 2, 3],
        NHWC => [0, 2, 3, 1],
        _ => return CUDNN_STATUS_NOT_SUPPORTED,
    };
    match strides(dims, order) {
        // SAFETY: 1. the program's descriptor is one that it was given.
        Some(strides) => unsafe { set_tensor(tensor_desc, data_type, dims, strides) },
        None => CUDNN_STATUS_BAD_PARAM,
    }
}

pub(crate) unsafe fn cudnnSetTensor4dDescriptorEx(
    tensor_desc: P,
    data_type: i32,
    dims: [i32; 4],
    strides: [i32; 4],
) -> i32 {
    if dims.iter().any(|size| *size <= 0) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    // SAFETY: 1. the program's descriptor is one that it was given.
    unsafe { set_tensor(tensor_desc, data_type, dims, strides) }
}

pub(crate) unsafe fn cudnnGetTensor4dDescriptor(tensor_desc: P, data_type: *mut i32, places: [*mut i32; 8]) -> i32 {
    // SAFETY: 1. the program's descriptor is one that it was given.
    let Some((kept, dims, strides)) = tensor(unsafe { descriptor::get(&tensor_desc) }) else {
        return CUDNN_STATUS_BAD_PARAM;
    };
    // SAFETY: 1. the program has a place for it, or NULL.
    unsafe { stub::put(data_type, kept) };
    for (place, number) in places.into_iter().zip(dims.into_iter().chain(strides)) {
        // SAFETY: 1. the same.
        unsafe { stub::put(place, number) };
    }
    0
}

pub(crate) unsafe fn cudnnDeriveBNTensorDescriptor(derived_bn_desc: P, x_desc: P, mode: i32) -> i32 {
    // SAFETY: 1. the program's descriptor is one that it was given.
    let Some((data_type, [_, c, h, w], _)) = tensor(unsafe { descriptor::get(&x_desc) }) else {
        return CUDNN_STATUS_BAD_PARAM;
    };
    let dims = if mode == PER_ACTIVATION {
        [1, c, h, w]
    } else {
        [1, c, 1, 1]
    };
    // CUDNN_DATA_DOUBLE stays; statistics of all other types are CUDNN_DATA_FLOAT.
    let data_type = i32::from(data_type == 1);
    match strides(dims, [0, 1, 2, 3]) {
        // SAFETY: 1. the program's descriptor is one that it was given.
        Some(strides) => unsafe { set_tensor(derived_bn_desc, data_type, dims, strides) },
        None => CUDNN_STATUS_BAD_PARAM,
    }
}

pub(crate) unsafe fn cudnnSetFilter4dDescriptor(
    filter_desc: P,
    data_type: i32,
    format: i32,
    [k, c, h, w]: [i32; 4],
) -> i32 {
    if [k, c, h, w].iter().any(|size| *size <= 0) {
        return CUDNN_STATUS_BAD_PARAM;
    }
    let numbers = [data_type, format, 4, k, c, h, w];
    // SAFETY: 1. the program's descriptor is one that it was given.
    unsafe { set(filter_desc, parts::CUDNN_SET_FILTER_ND_DESCRIPTOR, &numbers) }
}

pub(crate) unsafe fn cudnnSetConvolution2dDescriptor(
    conv_desc: P,
    [pad_h, pad_w, u, v, dilation_h, dilation_w]: [i32; 6],
    mode: i32,
    compute_type: i32,
) -> i32 {
    let is_wrong = pad_h < 0 || pad_w < 0 || [u, v, dilation_h, dilation_w].iter().any(|number| *number <= 0);
    if is_wrong {
        return CUDNN_STATUS_BAD_PARAM;
    }
    let numbers = [2, pad_h, pad_w, u, v, dilation_h, dilation_w, mode, compute_type];
    // SAFETY: 1. the program's descriptor is one that it was given.
    unsafe { set(conv_desc, parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR, &numbers) }
}

/// How many places a window has along one side.
fn positions(size: i32, pad: i32, window: i32, stride: i32) -> Option<i32> {
    let free = pad.checked_mul(2)?.checked_add(size)?.checked_sub(window)?;
    (free >= 0).then(|| free.checked_div(stride)?.checked_add(1)).flatten()
}

/// # Safety
///
/// The program has places for them.
unsafe fn put_shape(to: [*mut i32; 4], shape: Option<[i32; 4]>) -> i32 {
    let Some(shape) = shape else {
        return CUDNN_STATUS_BAD_PARAM;
    };
    for (place, number) in to.into_iter().zip(shape) {
        // SAFETY: 1. the caller's.
        unsafe { stub::put(place, number) };
    }
    0
}

/// What a convolution gives.
fn convolved(convolution: &[i32], [n, _, h, w]: [i32; 4], filter: &[i32]) -> Option<[i32; 4]> {
    let [2, pad_h, pad_w, u, v, dilation_h, dilation_w, ..] = *convolution else {
        return None;
    };
    let [_, _, 4, k, _, filter_h, filter_w] = *filter else {
        return None;
    };
    let spread = |size: i32, dilation: i32| size.checked_sub(1)?.checked_mul(dilation)?.checked_add(1);
    let height = positions(h, pad_h, spread(filter_h, dilation_h)?, u)?;
    Some([n, k, height, positions(w, pad_w, spread(filter_w, dilation_w)?, v)?])
}

pub(crate) unsafe fn cudnnGetConvolution2dForwardOutputDim(
    conv_desc: P,
    input_tensor_desc: P,
    filter_desc: P,
    places: [*mut i32; 4],
) -> i32 {
    // SAFETY: 1. the program's descriptors are those that it was given.
    let convolution = unsafe { descriptor::get(&conv_desc) };
    // SAFETY: 1. the same.
    let input = unsafe { descriptor::get(&input_tensor_desc) };
    // SAFETY: 1. the same.
    let filter = unsafe { descriptor::get(&filter_desc) };
    let shape = || {
        let convolution = of(convolution, parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR)?;
        let filter = of(filter, parts::CUDNN_SET_FILTER_ND_DESCRIPTOR)?;
        convolved(convolution, tensor(input)?.1, filter)
    };
    // SAFETY: 1. the program has places for them.
    unsafe { put_shape(places, shape()) }
}

/// What pooling gives.
fn pooled(pooling: &[i32], [n, c, h, w]: [i32; 4]) -> Option<[i32; 4]> {
    let [_, _, window_h, window_w, pad_h, pad_w, stride_h, stride_w] = *pooling else {
        return None;
    };
    let height = positions(h, pad_h, window_h, stride_h)?;
    Some([n, c, height, positions(w, pad_w, window_w, stride_w)?])
}

pub(crate) unsafe fn cudnnGetPooling2dForwardOutputDim(
    pooling_desc: P,
    input_tensor_desc: P,
    places: [*mut i32; 4],
) -> i32 {
    // SAFETY: 1. the program's descriptors are those that it was given.
    let pooling = unsafe { descriptor::get(&pooling_desc) };
    // SAFETY: 1. the same.
    let input = unsafe { descriptor::get(&input_tensor_desc) };
    let shape = || {
        let pooling = of(pooling, parts::CUDNN_SET_POOLING2D_DESCRIPTOR)?;
        pooled(pooling, tensor(input)?.1)
    };
    // SAFETY: 1. the program has places for them.
    unsafe { put_shape(places, shape()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_follow_from_the_format() {
        assert_eq!(strides([2, 3, 4, 5], [0, 1, 2, 3]), Some([60, 20, 5, 1]));
        assert_eq!(strides([2, 3, 4, 5], [0, 2, 3, 1]), Some([60, 1, 15, 3]));
        assert_eq!(strides([2, 0, 4, 5], [0, 1, 2, 3]), None);
        assert_eq!(strides([i32::MAX, i32::MAX, 4, 5], [0, 1, 2, 3]), None);
    }

    #[test]
    fn what_convolutions_and_pooling_give_follows_from_their_sizes() {
        let filter = |size| [0, 0, 4, 6, 1, size, size];
        let of = |numbers: [i32; 6], filter: &[i32]| {
            let mut convolution = vec![2];
            convolution.extend(numbers);
            convolution.extend([0, 0]);
            convolved(&convolution, [8, 1, 28, 30], filter)
        };
        assert_eq!(of([0, 0, 1, 1, 1, 1], &filter(5)), Some([8, 6, 24, 26]));
        assert_eq!(of([2, 1, 2, 2, 2, 1], &filter(3)), Some([8, 6, 14, 15]));
        assert_eq!(of([0, 0, 1, 1, 1, 1], &filter(31)), None);
        assert_eq!(of([0, 0, 0, 1, 1, 1], &filter(5)), None, "a stride of 0");
        assert_eq!(pooled(&[0, 0, 2, 2, 0, 0, 2, 2], [8, 6, 24, 25]), Some([8, 6, 12, 12]));
        assert_eq!(pooled(&[0, 0, 2, 2, i32::MAX, 0, 2, 2], [8, 6, 24, 25]), None);
    }

    #[test]
    fn a_tensor_is_got_as_it_was_set() {
        let descriptor = descriptor::create(0, Words::default());
        // SAFETY: 1. it was made above, and is this thread's.
        let set = unsafe { cudnnSetTensor4dDescriptor(descriptor, NHWC, 1, [2, 3, 4, 5]) };
        // SAFETY: 1. the same.
        let got = tensor(unsafe { descriptor::get(&descriptor) });
        assert_eq!((set, got), (0, Some((1, [2, 3, 4, 5], [60, 1, 15, 3]))));
        assert_eq!(descriptor::scalar(descriptor), 8);
        let none = std::ptr::null_mut();
        // SAFETY: 1. no place is written.
        let refused = unsafe { cudnnGetPooling2dForwardOutputDim(descriptor, descriptor, [none; 4]) };
        assert_eq!(refused, CUDNN_STATUS_BAD_PARAM);
        // SAFETY: 1. it was made above, and is not used any more.
        unsafe { descriptor::destroy(descriptor) };
    }
}
