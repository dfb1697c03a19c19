//! cuDNN's batch normalization: for inference and training, and backwards.
//!
//! Sums are in `f64`, as a mean of many single precision numbers would not be one.

use accel_proto::cuda::{
    CudnnBatchNormalizationBackward, CudnnBatchNormalizationBackwardEx, CudnnBatchNormalizationForwardInference,
    CudnnBatchNormalizationForwardTraining, CudnnBatchNormalizationForwardTrainingEx,
};
use accel_proto::{List, SvmAddress};

use crate::Error;
use crate::memory::Memory;
use crate::numeric::{Real, Stop, Type, room};
use crate::tensor::{Dims, Tensor, scalar};

/// Which elements have a mean together: of each channel, or of each place.
#[derive(Debug, Clone, Copy)]
struct Groups {
    dims: Dims,
    by_place: bool,
}

impl Groups {
    /// `cudnnBatchNormMode_t`, for tensors of these sizes and parameters of those.
    fn new(mode: i32, x: &Tensor, parameters: &Tensor) -> Result<Self, Error> {
        let by_place = match mode {
            // CUDNN_BATCHNORM_PER_ACTIVATION, _SPATIAL, _SPATIAL_PERSISTENT
            0 => true,
            1 | 2 => false,
            _ => return Err(Error::Invalid("a mode that no batch normalization has")),
        };
        let [_, c, h, w] = x.dims;
        let wanted = if by_place { [1, c, h, w] } else { [1, c, 1, 1] };
        match parameters.dims == wanted {
            true => Ok(Self { dims: x.dims, by_place }),
            false => Err(Error::Invalid(
                "parameters of batch normalization whose sizes do not fit the tensor's",
            )),
        }
    }

    fn count(&self) -> usize {
        let [_, c, h, w] = self.dims;
        if self.by_place { c * h * w } else { c }
    }

    /// How many elements a group has.
    fn size(&self) -> f64 {
        let [n, _, h, w] = self.dims;
        // No tensor in memory has so many that an f64 does not count them to the last.
        (if self.by_place { n } else { n * h * w }) as f64
    }

    /// The group of each element, in their order.
    fn each(&self) -> impl Iterator<Item = usize> + use<> {
        let [n, c, h, w] = self.dims;
        let (plane, by_place) = (h * w, self.by_place);
        (0..n * c * plane).map(move |at| if by_place { at % (c * plane) } else { at / plane % c })
    }

    /// The sum of something of all elements of each group.
    fn sums(&self, stop: Stop<'_>, mut of: impl FnMut(usize, usize) -> f64) -> Result<Vec<f64>, Error> {
        let mut sums = room::<f64>(self.count())?;
        for (at, group) in self.each().enumerate() {
            if at % LOOK == 0 {
                stop.check()?;
            }
            sums[group] += of(at, group);
        }
        Ok(sums)
    }

    /// Mean, and one by the root of the variance and epsilon; with the variance.
    fn moments<T: Real>(&self, x: &[T], epsilon: f64, stop: Stop<'_>) -> Result<[Vec<f64>; 3], Error> {
        let size = self.size();
        let mut means = self.sums(stop, |at, _| x[at].wide())?;
        means.iter_mut().for_each(|mean| *mean /= size);
        let mut variances = self.sums(stop, |at, group| (x[at].wide() - means[group]).powi(2))?;
        variances.iter_mut().for_each(|variance| *variance /= size);
        let inverse = variances
            .iter()
            .map(|variance| 1.0 / (variance + epsilon).sqrt())
            .collect();
        Ok([means, inverse, variances])
    }
}

/// So many elements are between two looks at whether the client is there.
const LOOK: usize = 1 << 20;

/// `cudnnBatchNormOps_t`: without an addition or an activation.
fn plain(ops: i32) -> Result<(), Error> {
    match ops {
        0 => Ok(()),
        _ => Err(Error::NotComputed(
            "batch normalization with an activation or an addition",
        )),
    }
}

/// Elements of parameters, where there are some.
fn optional(tensor: &Tensor, memory: &Memory, at: SvmAddress) -> Result<Option<Vec<f64>>, Error> {
    (at != SvmAddress::NULL)
        .then(|| tensor.read::<f64>(memory, at))
        .transpose()
}

/// `cudnnBatchNormalizationForwardInference`.
pub(crate) fn inference(
    call: &CudnnBatchNormalizationForwardInference<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let x = Tensor::of(&call.x_desc)?;
    match x.kind {
        Type::F64 => inference_in::<f64>(call, &x, memory, stop),
        _ => inference_in::<f32>(call, &x, memory, stop),
    }
}

fn inference_in<T: Real>(
    call: &CudnnBatchNormalizationForwardInference<'_>,
    x: &Tensor,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    let (y, parameters) = (
        Tensor::of(&call.y_desc)?,
        Tensor::of(&call.bn_scale_bias_mean_var_desc)?,
    );
    let groups = Groups::new(call.mode, x, &parameters)?;
    same(x, &y)?;
    let scalars = [scalar::<T>(&call.alpha)?, scalar(&call.beta)?];
    let read = |at| parameters.read::<f64>(memory, at);
    let (scale, bias) = (read(call.bn_scale)?, read(call.bn_bias)?);
    let (mean, variance) = (read(call.estimated_mean)?, read(call.estimated_variance)?);
    let epsilon = f64::from_bits(call.epsilon);
    let mut values = x.read::<T>(memory, call.x)?;
    for (at, (value, group)) in values.iter_mut().zip(groups.each()).enumerate() {
        if at % LOOK == 0 {
            stop.check()?;
        }
        let normal = (value.wide() - mean[group]) / (variance[group] + epsilon).sqrt();
        *value = T::of(scale[group] * normal + bias[group]);
    }
    y.write(memory, call.y, scalars, values)
}

/// What both calls for training have.
pub(crate) struct Training<'a> {
    mode: i32,
    scalars: [&'a List<'a, u8>; 2],
    x: (&'a List<'a, i32>, SvmAddress),
    y: (&'a List<'a, i32>, SvmAddress),
    parameters: &'a List<'a, i32>,
    scale_bias: [SvmAddress; 2],
    running: [SvmAddress; 2],
    saved: [SvmAddress; 2],
    factor: f64,
    epsilon: f64,
}

macro_rules! training {
    ($call:ident, $x:ident, $y:ident) => {
        Training {
            mode: $call.mode,
            scalars: [&$call.alpha, &$call.beta],
            x: (&$call.x_desc, $call.$x),
            y: (&$call.y_desc, $call.$y),
            parameters: &$call.bn_scale_bias_mean_var_desc,
            scale_bias: [$call.bn_scale, $call.bn_bias],
            running: [$call.result_running_mean, $call.result_running_variance],
            saved: [$call.result_save_mean, $call.result_save_inv_variance],
            factor: f64::from_bits($call.exponential_average_factor),
            epsilon: f64::from_bits($call.epsilon),
        }
    };
}

/// `cudnnBatchNormalizationForwardTraining`.
pub(crate) fn training(
    call: &CudnnBatchNormalizationForwardTraining<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    training!(call, x, y).carry_out(memory, stop)
}

/// `cudnnBatchNormalizationForwardTrainingEx`.
pub(crate) fn training_ex(
    call: &CudnnBatchNormalizationForwardTrainingEx<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    plain(call.bn_ops)?;
    training!(call, x_data, y_data).carry_out(memory, stop)
}

impl Training<'_> {
    fn carry_out(&self, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
        let x = Tensor::of(self.x.0)?;
        match x.kind {
            Type::F64 => self.carry_out_in::<f64>(&x, memory, stop),
            _ => self.carry_out_in::<f32>(&x, memory, stop),
        }
    }

    fn carry_out_in<T: Real>(&self, x: &Tensor, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
        let (y, parameters) = (Tensor::of(self.y.0)?, Tensor::of(self.parameters)?);
        let groups = Groups::new(self.mode, x, &parameters)?;
        same(x, &y)?;
        let scalars = [scalar::<T>(self.scalars[0])?, scalar(self.scalars[1])?];
        let read = |at| parameters.read::<f64>(memory, at);
        let [scale, bias] = [read(self.scale_bias[0])?, read(self.scale_bias[1])?];
        let running = [
            optional(&parameters, memory, self.running[0])?,
            optional(&parameters, memory, self.running[1])?,
        ];
        let mut values = x.read::<T>(memory, self.x.1)?;
        let [mean, inverse, variance] = groups.moments(&values, self.epsilon, stop)?;
        for (value, group) in values.iter_mut().zip(groups.each()) {
            *value = T::of(scale[group] * (value.wide() - mean[group]) * inverse[group] + bias[group]);
        }
        y.write(memory, self.y.1, scalars, values)?;
        // The running variance is of what the batch was taken from: divided by one less than there are (cuDNN API).
        let size = groups.size();
        let unbiased = if size > 1.0 { size / (size - 1.0) } else { 1.0 };
        let variance = variance.into_iter().map(|variance| variance * unbiased).collect();
        for ((at, now), before) in self.running.into_iter().zip([&mean, &variance]).zip(running) {
            if let Some(mut before) = before {
                let mixed = |before: f64, now: f64| before * (1.0 - self.factor) + now * self.factor;
                before
                    .iter_mut()
                    .zip(now)
                    .for_each(|(before, now)| *before = mixed(*before, *now));
                parameters.write(memory, at, [1.0, 0.0], before)?;
            }
        }
        for (at, saved) in self.saved.into_iter().zip([mean, inverse]) {
            if at != SvmAddress::NULL {
                parameters.write(memory, at, [1.0, 0.0], saved)?;
            }
        }
        Ok(())
    }
}

/// What both calls for gradients have.
pub(crate) struct Backward<'a> {
    mode: i32,
    data: [&'a List<'a, u8>; 2],
    gradients: [&'a List<'a, u8>; 2],
    x: (&'a List<'a, i32>, SvmAddress),
    dy: (&'a List<'a, i32>, SvmAddress),
    dx: (&'a List<'a, i32>, SvmAddress),
    parameters: &'a List<'a, i32>,
    scale: SvmAddress,
    d_scale_bias: [SvmAddress; 2],
    saved: [SvmAddress; 2],
    epsilon: f64,
}

macro_rules! backward {
    ($call:ident, [$x:ident, $dy:ident, $dx:ident], [$scale:ident, $d_scale:ident, $d_bias:ident]) => {
        Backward {
            mode: $call.mode,
            data: [&$call.alpha_data_diff, &$call.beta_data_diff],
            gradients: [&$call.alpha_param_diff, &$call.beta_param_diff],
            x: (&$call.x_desc, $call.$x),
            dy: (&$call.dy_desc, $call.$dy),
            dx: (&$call.dx_desc, $call.$dx),
            parameters: &$call.d_bn_scale_bias_desc,
            scale: $call.$scale,
            d_scale_bias: [$call.$d_scale, $call.$d_bias],
            saved: [$call.saved_mean, $call.saved_inv_variance],
            epsilon: f64::from_bits($call.epsilon),
        }
    };
}

/// `cudnnBatchNormalizationBackward`.
pub(crate) fn backward(
    call: &CudnnBatchNormalizationBackward<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    backward!(call, [x, dy, dx], [bn_scale, d_bn_scale_result, d_bn_bias_result]).carry_out(memory, stop)
}

/// `cudnnBatchNormalizationBackwardEx`.
pub(crate) fn backward_ex(
    call: &CudnnBatchNormalizationBackwardEx<'_>,
    memory: &mut Memory,
    stop: Stop<'_>,
) -> Result<(), Error> {
    plain(call.bn_ops)?;
    let call = backward!(
        call,
        [x_data, dy_data, dx_data],
        [bn_scale_data, d_bn_scale_data, d_bn_bias_data]
    );
    call.carry_out(memory, stop)
}

impl Backward<'_> {
    fn carry_out(&self, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
        let x = Tensor::of(self.x.0)?;
        match x.kind {
            Type::F64 => self.carry_out_in::<f64>(&x, memory, stop),
            _ => self.carry_out_in::<f32>(&x, memory, stop),
        }
    }

    fn carry_out_in<T: Real>(&self, x: &Tensor, memory: &mut Memory, stop: Stop<'_>) -> Result<(), Error> {
        let (dy, dx) = (Tensor::of(self.dy.0)?, Tensor::of(self.dx.0)?);
        let parameters = Tensor::of(self.parameters)?;
        let groups = Groups::new(self.mode, x, &parameters)?;
        same(x, &dy)?;
        same(x, &dx)?;
        let data = [scalar::<T>(self.data[0])?, scalar(self.data[1])?];
        let gradients = [scalar::<f64>(self.gradients[0])?, scalar(self.gradients[1])?];
        let scale = parameters.read::<f64>(memory, self.scale)?;
        let saved = [
            optional(&parameters, memory, self.saved[0])?,
            optional(&parameters, memory, self.saved[1])?,
        ];
        let (x_values, mut values) = (x.read::<T>(memory, self.x.1)?, dy.read::<T>(memory, self.dy.1)?);
        let [mean, inverse] = match saved {
            [Some(mean), Some(inverse)] => [mean, inverse],
            _ => {
                let [mean, inverse, _] = groups.moments(&x_values, self.epsilon, stop)?;
                [mean, inverse]
            }
        };
        let normal = |at: usize, group: usize| (x_values[at].wide() - mean[group]) * inverse[group];
        let d_bias = groups.sums(stop, |at, _| values[at].wide())?;
        let d_scale = groups.sums(stop, |at, group| values[at].wide() * normal(at, group))?;
        let size = groups.size();
        for (at, (value, group)) in values.iter_mut().zip(groups.each()).enumerate() {
            let less = (d_bias[group] + normal(at, group) * d_scale[group]) / size;
            *value = T::of(scale[group] * inverse[group] * (value.wide() - less));
        }
        dx.write(memory, self.dx.1, data, values)?;
        parameters.write(memory, self.d_scale_bias[0], gradients, d_scale)?;
        parameters.write(memory, self.d_scale_bias[1], gradients, d_bias)
    }
}

/// Tensors that are of one size.
pub(crate) fn same(one: &Tensor, other: &Tensor) -> Result<(), Error> {
    match one.dims == other.dims {
        true => Ok(()),
        false => Err(Error::Invalid("tensors of different sizes")),
    }
}
