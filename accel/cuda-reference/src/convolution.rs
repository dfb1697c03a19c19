//! cuDNN's convolutions of two dimensions, forwards and backwards, as products of matrices.
//!
//! ```text
//!   pixels of y, in pieces ── columns: for each pixel what the filter sees of x ── a product with the filter ──▶ y, dw
//!                                        dw, dx ◀── the same backwards: products are added where they were seen
//! ```
//!
//! What the filter sees of many pixels may be far more than all tensors are, so that pieces have a bounded size.

use std::ops::Range;

use accel_proto::List;
use accel_proto::cuda::{CudnnConvolutionBackwardData, CudnnConvolutionBackwardFilter, CudnnConvolutionForward};

use crate::Error;
use crate::descriptor::{Descriptor, count, size};
use crate::memory::Memory;
use crate::numeric::{Matrix, Real, Stop, Type, multiply, room};
use crate::tensor::{Tensor, scalar};
use accel_proto::cuda::parts::{CUDNN_SET_CONVOLUTION_GROUP_COUNT, CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR};

/// Elements of a piece's columns, if one pixel has not more.
const PIECE: usize = 1 << 19;

/// A `cudnnConvolutionDescriptor_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Convolution {
    pad: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    is_flipped: bool,
    groups: usize,
}

impl Convolution {
    fn of(words: &List<'_, i32>) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::Invalid("a convolution's descriptor that nothing was put into");
        let words = descriptor.find(CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR).ok_or(unset)?;
        let &[2, pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w, mode, _] = words else {
            return Err(Error::NotComputed("a convolution of other than two dimensions"));
        };
        let groups = match descriptor.find(CUDNN_SET_CONVOLUTION_GROUP_COUNT) {
            Some([groups]) => size(*groups)?,
            _ => 1,
        };
        Ok(Self {
            pad: [count(pad_h)?, count(pad_w)?],
            stride: [size(stride_h)?, size(stride_w)?],
            dilation: [size(dilation_h)?, size(dilation_w)?],
            is_flipped: match mode {
                // CUDNN_CONVOLUTION, CUDNN_CROSS_CORRELATION
                0 => true,
                1 => false,
                _ => return Err(Error::Invalid("a mode that no convolution has")),
            },
            groups,
        })
    }
}

/// The sizes of a convolution whose tensors fit together.
#[derive(Debug, Clone, Copy)]
struct Shape {
    convolution: Convolution,
    images: usize,
    /// Channels of each side in one group.
    inputs: usize,
    outputs: usize,
    input: [usize; 2],
    filter: [usize; 2],
    output: [usize; 2],
}

impl Shape {
    fn new(words: &List<'_, i32>, x: &Tensor, w: &Tensor, y: &Tensor) -> Result<Self, Error> {
        let convolution = Convolution::of(words)?;
        let ([n, c, h, wide], [k, by_group, r, s], [images, outputs, p, q]) = (x.dims, w.dims, y.dims);
        let groups = convolution.groups;
        let fits = n == images && k == outputs && by_group.checked_mul(groups) == Some(c) && k % groups == 0;
        let wanted = [
            convolution.outputs(h, r, 0).ok_or(TOO_LARGE)?,
            convolution.outputs(wide, s, 1).ok_or(TOO_LARGE)?,
        ];
        if !fits || [p, q] != wanted {
            return Err(Error::Invalid("tensors and a filter whose sizes do not fit together"));
        }
        Ok(Self {
            convolution,
            images,
            inputs: by_group,
            outputs: k / groups,
            input: [h, wide],
            filter: [r, s],
            output: [p, q],
        })
    }

    /// Elements of the filter that one output sees.
    fn seen(&self) -> usize {
        self.inputs * self.filter[0] * self.filter[1]
    }

    fn pixels(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Pixels of a piece.
    fn piece(&self) -> usize {
        (PIECE / self.seen()).clamp(1, self.pixels())
    }

    /// The pieces of all images and groups: image, group, first pixel, pixels.
    fn pieces(&self) -> impl Iterator<Item = (usize, usize, usize, usize)> + use<> {
        let (groups, pixels, piece) = (self.convolution.groups, self.pixels(), self.piece());
        (0..self.images).flat_map(move |image| {
            (0..groups).flat_map(move |group| {
                let begins = (0..pixels).step_by(piece);
                begins.map(move |begin| (image, group, begin, piece.min(pixels - begin)))
            })
        })
    }

    /// Where a group of an image begins in x, and in y.
    fn begins(&self, image: usize, group: usize) -> [usize; 2] {
        let index = image * self.convolution.groups + group;
        let [h, w] = self.input;
        [index * self.inputs * h * w, index * self.outputs * self.pixels()]
    }

    /// For each element of the filter and each run of pixels that see something, or nothing, of one row of x: where the run is in the piece's
    /// columns, and where in the group of x its first pixel sees, and how far the next one does behind it.
    fn each_seen(
        &self,
        (begin, pixels): (usize, usize),
        stop: Stop<'_>,
        mut each: impl FnMut(Range<usize>, Option<(usize, usize)>),
    ) -> Result<(), Error> {
        let ([h, w], [r, s], [_, q]) = (self.input, self.filter, self.output);
        let Convolution {
            pad, stride, dilation, ..
        } = self.convolution;
        let elements = (0..self.inputs)
            .flat_map(|channel| (0..r).flat_map(move |row| (0..s).map(move |column| (channel, row, column))));
        for (element, (channel, row, column)) in elements.enumerate() {
            stop.check()?;
            // Pixels of a row from `first` to `end` see something of x; padding is on both sides.
            let shift = column * dilation[1];
            let first = pad[1].saturating_sub(shift).div_ceil(stride[1]);
            let end = (w + pad[1]).saturating_sub(shift).div_ceil(stride[1]);
            let mut pixel = 0;
            while pixel < pixels {
                let (out_row, from) = ((begin + pixel) / q, (begin + pixel) % q);
                let to = q.min(from + pixels - pixel);
                let y = (out_row * stride[0] + row * dilation[0])
                    .checked_sub(pad[0])
                    .filter(|y| *y < h);
                let (first, end) = match y {
                    Some(_) => (first.clamp(from, to), end.clamp(from, to).max(first.clamp(from, to))),
                    None => (to, to),
                };
                let at = element * pixels + pixel;
                let mut run = |from: usize, to: usize, place| {
                    if from < to {
                        each(at + from..at + to, place);
                    }
                };
                let x = (first * stride[1] + shift).saturating_sub(pad[1]);
                let place = y.map(|y| ((channel * h + y) * w + x, stride[1]));
                run(0, first - from, None);
                run(first - from, end - from, place);
                run(end - from, to - from, None);
                pixel += to - from;
            }
        }
        Ok(())
    }

    /// What the filter sees of a piece: a row for each of its elements, a column for each pixel.
    fn columns<T: Real>(&self, x: &[T], piece: (usize, usize), columns: &mut [T], stop: Stop<'_>) -> Result<(), Error> {
        self.each_seen(piece, stop, |run, place| {
            let run = &mut columns[run];
            match place {
                None => run.fill(T::default()),
                Some((begin, 1)) => run.copy_from_slice(&x[begin..begin + run.len()]),
                Some((begin, step)) => {
                    let seen = x[begin..].iter().step_by(step);
                    run.iter_mut().zip(seen).for_each(|(place, seen)| *place = *seen);
                }
            }
        })
    }

    /// Room for the columns of a piece.
    fn room<T: Real>(&self) -> Result<Vec<T>, Error> {
        room(self.seen().checked_mul(self.piece()).ok_or(TOO_LARGE)?)
    }

    /// A filter turned by half a turn, if that is what is asked for; the other way it is the same.
    fn turn<T: Real>(&self, filter: &mut [T]) {
        if self.convolution.is_flipped {
            let [r, s] = self.filter;
            filter.chunks_exact_mut(r * s).for_each(<[T]>::reverse);
        }
    }
}

const TOO_LARGE: Error = Error::Invalid("a convolution that is larger than any memory");

impl Convolution {
    /// Outputs along one dimension; none if there is not one, or sizes are beyond what is counted with.
    fn outputs(&self, input: usize, filter: usize, way: usize) -> Option<usize> {
        let covered = (filter - 1).checked_mul(self.dilation[way])?.checked_add(1)?;
        let padded = self.pad[way].checked_mul(2)?.checked_add(input)?;
        Some(padded.checked_sub(covered)? / self.stride[way] + 1)
    }
}

/// `cudnnConvolutionForward`.
pub(crate) fn forward(call: &CudnnConvolutionForward<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    let x = Tensor::of(&call.x_desc)?;
    match x.kind {
        Type::F64 => forward_in::<f64>(call, &x, memory, stop),
        _ => forward_in::<f32>(call, &x, memory, stop),
    }
}

fn forward_in<T: Real>(
    call: &CudnnConvolutionForward<'_>,
    x: &Tensor,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let (w, y) = (Tensor::of_filter(&call.w_desc)?, Tensor::of(&call.y_desc)?);
    let shape = Shape::new(&call.conv_desc, x, &w, &y)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let (values, mut filter) = (x.read::<T>(memory, call.x)?, w.read::<T>(memory, call.w)?);
    shape.turn(&mut filter);
    y.check(memory, call.y)?;
    let (mut result, mut columns) = (room::<T>(y.count())?, shape.room::<T>()?);
    let (seen, pixels) = (shape.seen(), shape.pixels());
    for (image, group, begin, count) in shape.pieces() {
        let [x_at, y_at] = shape.begins(image, group);
        shape.columns(&values[x_at..], (begin, count), &mut columns, stop)?;
        let filter = Matrix::new(&filter[group * shape.outputs * seen..], [seen, 1]);
        let columns = Matrix::new(&columns[..], [count, 1]);
        let result = Matrix::new(&mut result[y_at + begin..], [pixels, 1]);
        let sizes = [shape.outputs, seen, count];
        multiply(sizes, (T::ONE, filter), columns, (T::default(), result), stop)?;
    }
    y.write(memory, call.y, scalars, result)
}

/// `cudnnConvolutionBackwardData`.
pub(crate) fn backward_data(
    call: &CudnnConvolutionBackwardData<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let dx = Tensor::of(&call.dx_desc)?;
    match dx.kind {
        Type::F64 => backward_data_in::<f64>(call, &dx, memory, stop),
        _ => backward_data_in::<f32>(call, &dx, memory, stop),
    }
}

fn backward_data_in<T: Real>(
    call: &CudnnConvolutionBackwardData<'_>,
    dx: &Tensor,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let (w, dy) = (Tensor::of_filter(&call.w_desc)?, Tensor::of(&call.dy_desc)?);
    let shape = Shape::new(&call.conv_desc, dx, &w, &dy)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let (values, mut filter) = (dy.read::<T>(memory, call.dy)?, w.read::<T>(memory, call.w)?);
    shape.turn(&mut filter);
    dx.check(memory, call.dx)?;
    let (mut result, mut columns) = (room::<T>(dx.count())?, shape.room::<T>()?);
    let (seen, pixels) = (shape.seen(), shape.pixels());
    for (image, group, begin, count) in shape.pieces() {
        let [x_at, y_at] = shape.begins(image, group);
        let filter = Matrix::new(&filter[group * shape.outputs * seen..], [1, seen]);
        let given = Matrix::new(&values[y_at + begin..], [pixels, 1]);
        let place = Matrix::new(&mut columns[..], [count, 1]);
        let sizes = [seen, shape.outputs, count];
        multiply(sizes, (T::ONE, filter), given, (T::default(), place), stop)?;
        let result = &mut result[x_at..];
        shape.each_seen((begin, count), stop, |run, place| {
            if let Some((begin, step)) = place {
                let places = result[begin..].iter_mut().step_by(step);
                places.zip(&columns[run]).for_each(|(place, given)| *place += *given);
            }
        })?;
    }
    dx.write(memory, call.dx, scalars, result)
}

/// `cudnnConvolutionBackwardFilter`.
pub(crate) fn backward_filter(
    call: &CudnnConvolutionBackwardFilter<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let x = Tensor::of(&call.x_desc)?;
    match x.kind {
        Type::F64 => backward_filter_in::<f64>(call, &x, memory, stop),
        _ => backward_filter_in::<f32>(call, &x, memory, stop),
    }
}

fn backward_filter_in<T: Real>(
    call: &CudnnConvolutionBackwardFilter<'_>,
    x: &Tensor,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let (dw, dy) = (Tensor::of_filter(&call.dw_desc)?, Tensor::of(&call.dy_desc)?);
    let shape = Shape::new(&call.conv_desc, x, &dw, &dy)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let (values, given) = (x.read::<T>(memory, call.x)?, dy.read::<T>(memory, call.dy)?);
    dw.check(memory, call.dw)?;
    let (mut result, mut columns) = (room::<T>(dw.count())?, shape.room::<T>()?);
    let (seen, pixels) = (shape.seen(), shape.pixels());
    for (image, group, begin, count) in shape.pieces() {
        let [x_at, y_at] = shape.begins(image, group);
        shape.columns(&values[x_at..], (begin, count), &mut columns, stop)?;
        let given = Matrix::new(&given[y_at + begin..], [pixels, 1]);
        let columns = Matrix::new(&columns[..], [1, count]);
        let result = Matrix::new(&mut result[group * shape.outputs * seen..], [seen, 1]);
        let sizes = [shape.outputs, count, seen];
        multiply(sizes, (T::ONE, given), columns, (T::ONE, result), stop)?;
    }
    shape.turn(&mut result);
    dw.write(memory, call.dw, scalars, result)
}
