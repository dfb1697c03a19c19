//! cuDNN's pooling of two dimensions.

use std::ops::Range;

use accel_proto::List;
use accel_proto::cuda::{CudnnPoolingBackward, CudnnPoolingForward};

use crate::Error;
use crate::descriptor::{Descriptor, count, size};
use crate::memory::Memory;
use crate::normalization::same;
use crate::numeric::{Real, Stop, Type, room};
use crate::tensor::{Tensor, scalar};
use accel_proto::cuda::parts::CUDNN_SET_POOLING2D_DESCRIPTOR;

/// `cudnnPoolingMode_t`, of which the first is the one whose gradients are always the same, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Max,
    /// Divided by the window's size, or by how much of it is in the tensor.
    AverageOfWindow,
    AverageOfTensor,
}

/// A `cudnnPoolingDescriptor_t` and the planes that it works on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pooling {
    mode: Mode,
    /// What is no number is the largest.
    propagates_nan: bool,
    window: [usize; 2],
    pad: [usize; 2],
    stride: [usize; 2],
    planes: usize,
    input: [usize; 2],
    output: [usize; 2],
}

impl Pooling {
    pub(crate) fn new(words: &List<'_, i32>, x: &Tensor, y: &Tensor) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::NotComputed("pooling of other than two dimensions");
        let words = descriptor.find(CUDNN_SET_POOLING2D_DESCRIPTOR).ok_or(unset)?;
        let &[mode, nan, window_h, window_w, pad_h, pad_w, stride_h, stride_w] = words else {
            return Err(Error::Invalid("a pooling's descriptor of another length"));
        };
        let mode = match mode {
            0 | 3 => Mode::Max,
            1 => Mode::AverageOfWindow,
            2 => Mode::AverageOfTensor,
            _ => return Err(Error::Invalid("a mode that no pooling has")),
        };
        let ([n, c, h, w], [images, channels, p, q]) = (x.dims, y.dims);
        let pooling = Self {
            mode,
            propagates_nan: nan == 1,
            window: [size(window_h)?, size(window_w)?],
            pad: [count(pad_h)?, count(pad_w)?],
            stride: [size(stride_h)?, size(stride_w)?],
            planes: n * c,
            input: [h, w],
            output: [p, q],
        };
        let fits = (n, c) == (images, channels) && (0..2).all(|way| pooling.outputs(way) == Some(pooling.output[way]));
        match fits {
            true => Ok(pooling),
            false => Err(Error::Invalid("tensors of pooling whose sizes do not fit together")),
        }
    }

    /// Outputs along one dimension, as cuDNN counts them; windows that see nothing of the tensor are refused.
    fn outputs(&self, way: usize) -> Option<usize> {
        let padded = self.pad[way].checked_mul(2)?.checked_add(self.input[way])?;
        let outputs = padded.checked_sub(self.window[way])? / self.stride[way] + 1;
        (self.pad[way] < self.window[way]).then_some(outputs)
    }

    /// What a window sees along one dimension.
    fn seen(&self, way: usize, output: usize) -> Range<usize> {
        let begin = output * self.stride[way];
        let end = (begin + self.window[way]).saturating_sub(self.pad[way]);
        let begin = begin.saturating_sub(self.pad[way]);
        begin..end.min(self.input[way]).max(begin)
    }

    /// Each output with its index and with where in its plane of the input it sees: rows, and columns.
    fn each(
        &self,
        stop: Stop<'_>,
        mut each: impl FnMut(usize, usize, (Range<usize>, Range<usize>)),
    ) -> Result<(), Error> {
        let mut output = 0;
        for plane in 0..self.planes {
            for row in 0..self.output[0] {
                for column in 0..self.output[1] {
                    stop.check()?;
                    let begin = plane * self.input[0] * self.input[1];
                    each(output, begin, (self.seen(0, row), self.seen(1, column)));
                    output += 1;
                }
            }
        }
        Ok(())
    }

    fn is_more<T: Real>(&self, value: T, than: T) -> bool {
        let is_none = |value: T| value.wide().is_nan();
        value > than || self.propagates_nan && is_none(value) && !is_none(than)
    }

    /// The number that an average is divided by.
    fn divisor(&self, seen: &(Range<usize>, Range<usize>)) -> f64 {
        let count = match self.mode {
            Mode::AverageOfWindow => self.window[0].saturating_mul(self.window[1]),
            _ => seen.0.len() * seen.1.len(),
        };
        // No window has so many elements that an f64 does not count them to the last.
        count as f64
    }

    /// Where the largest is of what is seen of a plane: the first of them.
    fn largest<T: Real>(&self, x: &[T], begin: usize, (rows, columns): (Range<usize>, Range<usize>)) -> (usize, T) {
        let (mut place, mut largest) = (None, T::LOWEST);
        for row in rows {
            for column in columns.clone() {
                let at = begin + row * self.input[1] + column;
                if place.is_none() || self.is_more(x[at], largest) {
                    // The first one is what it is; one that is no number is less than any where that is asked for.
                    let is_none = x[at].wide().is_nan() && !self.propagates_nan;
                    (place, largest) = (Some(at), if is_none { T::LOWEST } else { x[at] });
                }
            }
        }
        (place.unwrap_or(begin), largest)
    }

    /// What a tensor's windows give.
    pub(crate) fn forward<T: Real>(&self, x: &[T], count: usize, stop: Stop<'_>) -> Result<Vec<T>, Error> {
        let mut y = room::<T>(count)?;
        self.each(stop, |output, begin, seen| {
            y[output] = match self.mode {
                Mode::Max => self.largest(x, begin, seen).1,
                Mode::AverageOfWindow | Mode::AverageOfTensor => {
                    let divisor = T::of(self.divisor(&seen));
                    let mut sum = T::default();
                    for row in seen.0 {
                        let row = begin + row * self.input[1];
                        x[row + seen.1.start..row + seen.1.end]
                            .iter()
                            .for_each(|value| sum += *value);
                    }
                    sum / divisor
                }
            };
        })?;
        Ok(y)
    }
}

/// `cudnnPoolingForward`.
pub(crate) fn forward(call: &CudnnPoolingForward<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let x = Tensor::of(&call.x_desc)?;
    match x.kind {
        Type::F64 => forward_in::<f64>(call, &x, memory, stop),
        _ => forward_in::<f32>(call, &x, memory, stop),
    }
}

fn forward_in<T: Real>(
    call: &CudnnPoolingForward<'_>,
    x: &Tensor,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let y = Tensor::of(&call.y_desc)?;
    let pooling = Pooling::new(&call.pooling_desc, x, &y)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let values = x.read::<T>(memory, call.x)?;
    y.check(memory, call.y)?;
    let result = pooling.forward(&values, y.count(), stop)?;
    y.write(memory, call.y, scalars, result)
}

/// `cudnnPoolingBackward`.
pub(crate) fn backward(call: &CudnnPoolingBackward<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let x = Tensor::of(&call.x_desc)?;
    match x.kind {
        Type::F64 => backward_in::<f64>(call, &x, memory, stop),
        _ => backward_in::<f32>(call, &x, memory, stop),
    }
}

fn backward_in<T: Real>(
    call: &CudnnPoolingBackward<'_>,
    x: &Tensor,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let (dy, dx) = (Tensor::of(&call.dy_desc)?, Tensor::of(&call.dx_desc)?);
    let pooling = Pooling::new(&call.pooling_desc, x, &dy)?;
    same(x, &dx)?;
    same(&dy, &Tensor::of(&call.y_desc)?)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let (values, given) = (x.read::<T>(memory, call.x)?, dy.read::<T>(memory, call.dy)?);
    let mut result = room::<T>(dx.count())?;
    pooling.each(stop, |output, begin, seen| match pooling.mode {
        Mode::Max => result[pooling.largest(&values, begin, seen).0] += given[output],
        Mode::AverageOfWindow | Mode::AverageOfTensor => {
            let part = given[output] / T::of(pooling.divisor(&seen));
            for row in seen.0 {
                let row = begin + row * pooling.input[1];
                result[row + seen.1.start..row + seen.1.end]
                    .iter_mut()
                    .for_each(|place| *place += part);
            }
        }
    })?;
    dx.write(memory, call.dx, scalars, result)
}
