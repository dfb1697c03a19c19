//! cuDNN's activations, softmax, addition of a tensor that is broadcast, and the gradient of a bias.

use accel_proto::List;
use accel_proto::cuda::{
    CudnnActivationBackward, CudnnActivationForward, CudnnAddTensor, CudnnConvolutionBackwardBias,
    CudnnSoftmaxBackward, CudnnSoftmaxForward,
};

use crate::Error;
use crate::descriptor::{Descriptor, long};
use crate::memory::Memory;
use crate::normalization::same;
use crate::numeric::{Real, Stop, Type, room};
use crate::tensor::{Tensor, scalar};
use accel_proto::cuda::parts::CUDNN_SET_ACTIVATION_DESCRIPTOR;

/// A `cudnnActivationDescriptor_t`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Activation {
    Sigmoid,
    Relu,
    Tanh,
    /// Relu that is no more than that.
    Clipped(f64),
    Elu(f64),
    Identity,
}

impl Activation {
    fn of(words: &List<'_, i32>) -> Result<Self, Error> {
        let descriptor = Descriptor::new(words)?;
        let unset = Error::Invalid("an activation's descriptor that nothing was put into");
        let &[mode, _, low, high] = descriptor.find(CUDNN_SET_ACTIVATION_DESCRIPTOR).ok_or(unset)? else {
            return Err(Error::Invalid("an activation's descriptor of another length"));
        };
        let coefficient = f64::from_bits(long(low, high));
        // cudnnActivationMode_t
        match mode {
            0 => Ok(Self::Sigmoid),
            1 => Ok(Self::Relu),
            2 => Ok(Self::Tanh),
            3 => Ok(Self::Clipped(coefficient)),
            4 => Ok(Self::Elu(coefficient)),
            5 => Ok(Self::Identity),
            _ => Err(Error::NotComputed(
                "an activation other than sigmoid, relu, tanh, clipped relu, elu and identity",
            )),
        }
    }

    fn of_value(self, x: f64) -> f64 {
        match self {
            Self::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            // What is no number stays none.
            Self::Relu if x < 0.0 => 0.0,
            Self::Clipped(most) if x > most => most,
            Self::Clipped(_) if x < 0.0 => 0.0,
            Self::Tanh => x.tanh(),
            Self::Elu(by) if x < 0.0 => by * x.exp_m1(),
            Self::Relu | Self::Clipped(_) | Self::Elu(_) | Self::Identity => x,
        }
    }

    /// The derivative at x, whose value is y.
    fn slope(self, x: f64, y: f64) -> f64 {
        let step = |is_on: bool| if is_on { 1.0 } else { 0.0 };
        match self {
            Self::Sigmoid => y * (1.0 - y),
            Self::Relu => step(x > 0.0),
            Self::Tanh => 1.0 - y * y,
            Self::Clipped(most) => step(x > 0.0 && x < most),
            Self::Elu(by) if x < 0.0 => y + by,
            Self::Elu(_) | Self::Identity => 1.0,
        }
    }
}

/// Has a call carried out in the type that its tensor has.
macro_rules! in_its_type {
    ($tensor:expr, $function:ident, $($argument:expr),*) => {{
        let tensor = Tensor::of($tensor)?;
        match tensor.kind {
            Type::F64 => $function::<f64>($($argument),*, &tensor),
            _ => $function::<f32>($($argument),*, &tensor),
        }
    }};
}

/// `cudnnActivationForward`.
pub(crate) fn activate(call: &CudnnActivationForward<'_>, memory: &mut Memory) -> Result<(), Error> {
    in_its_type!(&call.x_desc, activate_in, call, memory)
}

fn activate_in<T: Real>(call: &CudnnActivationForward<'_>, memory: &mut Memory, x: &Tensor) -> Result<(), Error> {
    let (activation, y) = (Activation::of(&call.activation_desc)?, Tensor::of(&call.y_desc)?);
    same(x, &y)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let mut values = x.read::<T>(memory, call.x)?;
    values
        .iter_mut()
        .for_each(|value| *value = T::of(activation.of_value(value.wide())));
    y.write(memory, call.y, scalars, values)
}

/// `cudnnActivationBackward`.
pub(crate) fn activate_backward(call: &CudnnActivationBackward<'_>, memory: &mut Memory) -> Result<(), Error> {
    in_its_type!(&call.x_desc, activate_backward_in, call, memory)
}

fn activate_backward_in<T: Real>(
    call: &CudnnActivationBackward<'_>,
    memory: &mut Memory,
    x: &Tensor,
) -> Result<(), Error> {
    let activation = Activation::of(&call.activation_desc)?;
    let (y, dy, dx) = (
        Tensor::of(&call.y_desc)?,
        Tensor::of(&call.dy_desc)?,
        Tensor::of(&call.dx_desc)?,
    );
    for other in [&y, &dy, &dx] {
        same(x, other)?;
    }
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let (x_values, y_values) = (x.read::<T>(memory, call.x)?, y.read::<T>(memory, call.y)?);
    let mut values = dy.read::<T>(memory, call.dy)?;
    for (value, (x, y)) in values.iter_mut().zip(x_values.iter().zip(&y_values)) {
        *value = T::of(value.wide() * activation.slope(x.wide(), y.wide()));
    }
    dx.write(memory, call.dx, scalars, values)
}

/// How softmax is computed, and over which elements.
#[derive(Debug, Clone, Copy)]
struct Softmax {
    is_log: bool,
    /// Groups that have a sum together: how many, how many elements each has, and how many elements of others are between two of them.
    groups: [usize; 2],
    size: usize,
}

impl Softmax {
    fn new(algorithm: i32, mode: i32, x: &Tensor) -> Result<Self, Error> {
        let is_log = match algorithm {
            // CUDNN_SOFTMAX_FAST, _ACCURATE, _LOG: the first is computed as the second is.
            0 | 1 => false,
            2 => true,
            _ => return Err(Error::Invalid("an algorithm that softmax does not have")),
        };
        let [n, c, h, w] = x.dims;
        let (groups, size) = match mode {
            // CUDNN_SOFTMAX_MODE_INSTANCE, _CHANNEL
            0 => ([n, 1], c * h * w),
            1 => ([n, h * w], c),
            _ => return Err(Error::Invalid("a mode that softmax does not have")),
        };
        Ok(Self { is_log, groups, size })
    }

    /// For each group: where its first element is, and how far the next one is.
    fn each(&self, stop: Stop<'_>, mut each: impl FnMut(&[usize])) -> Result<(), Error> {
        let [outer, inner] = self.groups;
        let mut places = Vec::new();
        places.try_reserve_exact(self.size)?;
        for group in 0..outer {
            for place in 0..inner {
                stop.check()?;
                places.clear();
                places.extend((0..self.size).map(|element| (group * self.size + element) * inner + place));
                each(&places);
            }
        }
        Ok(())
    }
}

/// `cudnnSoftmaxForward`.
pub(crate) fn softmax(call: &CudnnSoftmaxForward<'_>, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
    in_its_type!(&call.x_desc, softmax_in, call, memory, stop)
}

fn softmax_in<T: Real>(
    call: &CudnnSoftmaxForward<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
    x: &Tensor,
) -> Result<(), Error> {
    let (softmax, y) = (Softmax::new(call.algo, call.mode, x)?, Tensor::of(&call.y_desc)?);
    same(x, &y)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let mut values = x.read::<T>(memory, call.x)?;
    softmax.each(stop, |places| {
        let most = places
            .iter()
            .map(|at| values[*at].wide())
            .fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = places.iter().map(|at| (values[*at].wide() - most).exp()).sum();
        for at in places {
            let above = values[*at].wide() - most;
            values[*at] = T::of(if softmax.is_log {
                above - sum.ln()
            } else {
                above.exp() / sum
            });
        }
    })?;
    y.write(memory, call.y, scalars, values)
}

/// `cudnnSoftmaxBackward`.
pub(crate) fn softmax_backward(
    call: &CudnnSoftmaxBackward<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    in_its_type!(&call.y_desc, softmax_backward_in, call, memory, stop)
}

fn softmax_backward_in<T: Real>(
    call: &CudnnSoftmaxBackward<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
    y: &Tensor,
) -> Result<(), Error> {
    let softmax = Softmax::new(call.algo, call.mode, y)?;
    let (dy, dx) = (Tensor::of(&call.dy_desc)?, Tensor::of(&call.dx_desc)?);
    same(y, &dy)?;
    same(y, &dx)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let (y_values, mut values) = (y.read::<T>(memory, call.y)?, dy.read::<T>(memory, call.dy)?);
    softmax.each(stop, |places| {
        let weight = |at: usize| if softmax.is_log { 1.0 } else { y_values[at].wide() };
        let sum: f64 = places.iter().map(|at| weight(*at) * values[*at].wide()).sum();
        for at in places {
            let (y, dy) = (y_values[*at].wide(), values[*at].wide());
            values[*at] = T::of(if softmax.is_log {
                dy - y.exp() * sum
            } else {
                y * (dy - sum)
            });
        }
    })?;
    dx.write(memory, call.dx, scalars, values)
}

/// `cudnnAddTensor`: sizes of one are broadcast.
pub(crate) fn add(call: &CudnnAddTensor<'_>, memory: &mut Memory) -> Result<(), Error> {
    in_its_type!(&call.c_desc, add_in, call, memory)
}

fn add_in<T: Real>(call: &CudnnAddTensor<'_>, memory: &mut Memory, c: &Tensor) -> Result<(), Error> {
    let a = Tensor::of(&call.a_desc)?;
    if a.dims.iter().zip(c.dims).any(|(one, all)| *one != 1 && *one != all) {
        return Err(Error::Invalid(
            "a tensor to add whose sizes are neither one nor the other tensor's",
        ));
    }
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let values = a.read::<T>(memory, call.a)?;
    c.check(memory, call.c)?;
    let mut result = room::<T>(c.count())?;
    let [_, channels, rows, columns] = a.dims;
    let [_, all_channels, all_rows, all_columns] = c.dims;
    for (at, place) in result.iter_mut().enumerate() {
        let (column, at) = (at % all_columns, at / all_columns);
        let (row, at) = (at % all_rows, at / all_rows);
        let (channel, image) = (at % all_channels, at / all_channels);
        let [image, channel, row, column] =
            [(image, a.dims[0]), (channel, channels), (row, rows), (column, columns)].map(|(at, size)| at % size);
        *place = values[((image * channels + channel) * rows + row) * columns + column];
    }
    c.write(memory, call.c, scalars, result)
}

/// `cudnnConvolutionBackwardBias`.
pub(crate) fn bias_backward(call: &CudnnConvolutionBackwardBias<'_>, memory: &mut Memory) -> Result<(), Error> {
    in_its_type!(&call.dy_desc, bias_backward_in, call, memory)
}

fn bias_backward_in<T: Real>(
    call: &CudnnConvolutionBackwardBias<'_>,
    memory: &mut Memory,
    dy: &Tensor,
) -> Result<(), Error> {
    let db = Tensor::of(&call.db_desc)?;
    let [_, channels, rows, columns] = dy.dims;
    if db.dims != [1, channels, 1, 1] {
        return Err(Error::Invalid("a bias whose size is not the number of channels"));
    }
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let values = dy.read::<T>(memory, call.dy)?;
    let mut sums = room::<f64>(channels)?;
    for (index, plane) in values.chunks_exact(rows * columns).enumerate() {
        sums[index % channels] += plane.iter().map(|value| value.wide()).sum::<f64>();
    }
    db.write(memory, call.db, scalars, sums.into_iter().map(T::of).collect())
}
