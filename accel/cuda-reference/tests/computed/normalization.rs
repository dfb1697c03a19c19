//! Batch normalization: for training, for inference, and backwards, where differences of the loss are the second formula.

use accel_proto::cuda::*;
use accel_proto::{List, SvmAddress};

use crate::convolution::{Layout, handle};
use crate::device::{Device, Kind, Random, close, int};
use crate::networks::{blend, dims};

const EPSILON: f64 = 1e-3;
const FACTOR: f64 = 0.25;

/// A tensor and its parameters.
struct Batch {
    mode: i32,
    x: Layout,
    parameters: Layout,
    values: Vec<f64>,
    scale: Vec<f64>,
    bias: Vec<f64>,
}

impl Batch {
    fn random(random: &mut Random, kind: Kind, mode: i32) -> Self {
        let mut size = dims(random);
        // Of one element a batch has no variance.
        size[0] += 1;
        let [_, c, h, w] = size;
        let parameters = if mode == 0 { [1, c, h, w] } else { [1, c, 1, 1] };
        let x = Layout::random(random, kind, size);
        // Parameters of halves are floats.
        let computed = if kind == Kind::F64 { Kind::F64 } else { Kind::F32 };
        let parameters = Layout::dense(computed, parameters);
        Self {
            mode,
            values: random.numbers(x.length),
            scale: random.numbers(parameters.length),
            bias: random.numbers(parameters.length),
            x,
            parameters,
        }
    }

    fn group(&self, [_, c, h, w]: [usize; 4]) -> usize {
        if self.mode == 0 {
            self.parameters.at([0, c, h, w])
        } else {
            c
        }
    }

    /// Mean and variance of each group, and how many elements it has.
    fn moments(&self, values: &[f64]) -> (Vec<f64>, Vec<f64>, f64) {
        let groups = self.parameters.length;
        let (mut means, mut variances) = (vec![0.0; groups], vec![0.0; groups]);
        let count = f64::from(int(self.x.all().count() / groups));
        self.x
            .all()
            .for_each(|at| means[self.group(at)] += values[self.x.at(at)] / count);
        for at in self.x.all() {
            variances[self.group(at)] += (values[self.x.at(at)] - means[self.group(at)]).powi(2) / count;
        }
        (means, variances, count)
    }

    /// What training keeps: running mean and variance, and the mean and the inverse deviation of the batch.
    fn kept(&self, running: &[f64]) -> [Vec<f64>; 4] {
        let (means, variances, count) = self.moments(&self.values);
        let mixed = |(now, before): (f64, &f64)| before * (1.0 - FACTOR) + now * FACTOR;
        let unbiased = variances.iter().map(|variance| variance * count / (count - 1.0));
        let running_variances = unbiased.zip(running).map(mixed).collect();
        let running_means = means.iter().copied().zip(running).map(mixed).collect();
        let inverse = variances
            .iter()
            .map(|variance| (variance + EPSILON).powf(-0.5))
            .collect();
        [running_means, running_variances, means, inverse]
    }

    /// What is wanted of training, in the layout's order.
    fn normalized(&self, values: &[f64], scale: &[f64], bias: &[f64]) -> Vec<f64> {
        let (means, variances, _) = self.moments(values);
        let of = |at: [usize; 4]| {
            let group = self.group(at);
            let normal = (values[self.x.at(at)] - means[group]) / (variances[group] + EPSILON).sqrt();
            scale[group] * normal + bias[group]
        };
        self.x.all().map(of).collect()
    }
}

#[test]
fn training_is_that_of_the_formula() {
    let random = &mut Random(31);
    for round in 0..60 {
        let kind = Kind::ALL[round % 4];
        let (computed, batch) = (
            if kind == Kind::F64 { Kind::F64 } else { Kind::F32 },
            Batch::random(random, kind, int(round / 4 % 3)),
        );
        let groups = batch.parameters.length;
        let scalars = [random.number(), random.number()];
        let y = Layout::random(random, kind, batch.x.dims);
        let before = random.numbers(y.length);
        let running: Vec<f64> = random.numbers(groups).into_iter().map(f64::abs).collect();
        let mut device = Device::new();
        let handle = handle(&mut device);
        let (alpha, beta) = (kind.scalar(scalars[0]), kind.scalar(scalars[1]));
        let (alpha, beta) = (List::new(&alpha), List::new(&beta));
        let (x_at, y_at) = (device.elements(kind, &batch.values), device.elements(kind, &before));
        let parameters = [&batch.scale, &batch.bias, &running, &running, &running, &running];
        let [scale, bias, running_mean, running_variance, saved_mean, saved_variance] =
            parameters.map(|values| device.elements(computed, values));
        let has_kept = round % 5 != 0;
        let kept = |at: SvmAddress| if has_kept { at } else { SvmAddress::NULL };
        let plain = CudnnBatchNormalizationForwardTraining {
            handle,
            mode: batch.mode,
            alpha,
            beta,
            x_desc: batch.x.list(),
            x: x_at,
            y_desc: y.list(),
            y: y_at,
            bn_scale_bias_mean_var_desc: batch.parameters.list(),
            bn_scale: scale,
            bn_bias: bias,
            exponential_average_factor: FACTOR.to_bits(),
            result_running_mean: kept(running_mean),
            result_running_variance: kept(running_variance),
            epsilon: EPSILON.to_bits(),
            result_save_mean: kept(saved_mean),
            result_save_inv_variance: kept(saved_variance),
        };
        let call = if round % 2 == 0 {
            AnyCall::CudnnBatchNormalizationForwardTraining(plain)
        } else {
            extended(plain)
        };
        device.put(&call).unwrap();
        let normalized = batch.normalized(&batch.values, &batch.scale, &batch.bias);
        let wanted = blend(&y, scalars, &normalized, &before);
        close(kind, &device.wide(y_at, kind, y.length), &wanted, "training");
        let wanted = if has_kept {
            batch.kept(&running)
        } else {
            [(); 4].map(|()| running.clone())
        };
        for (at, wanted) in [running_mean, running_variance, saved_mean, saved_variance]
            .into_iter()
            .zip(&wanted)
        {
            close(
                computed,
                &device.wide(at, computed, groups),
                wanted,
                "what training keeps",
            );
        }
    }
}

#[test]
fn inference_is_that_of_the_formula() {
    let random = &mut Random(34);
    for round in 0..24 {
        let kind = Kind::ALL[round % 4];
        let batch = Batch::random(random, kind, int(round / 4 % 3));
        let scalars = [random.number(), random.number()];
        let y = Layout::random(random, kind, batch.x.dims);
        let before = random.numbers(y.length);
        let means = random.numbers(batch.parameters.length);
        let variances: Vec<f64> = random.numbers(means.len()).into_iter().map(f64::abs).collect();
        let mut device = Device::new();
        let handle = handle(&mut device);
        let (alpha, beta) = (kind.scalar(scalars[0]), kind.scalar(scalars[1]));
        let computed = if kind == Kind::F64 { Kind::F64 } else { Kind::F32 };
        let parameters = [&batch.scale, &batch.bias, &means, &variances];
        let [bn_scale, bn_bias, estimated_mean, estimated_variance] =
            parameters.map(|values| device.elements(computed, values));
        let call = CudnnBatchNormalizationForwardInference {
            handle,
            mode: batch.mode,
            alpha: List::new(&alpha),
            beta: List::new(&beta),
            x_desc: batch.x.list(),
            x: device.elements(kind, &batch.values),
            y_desc: y.list(),
            y: device.elements(kind, &before),
            bn_scale_bias_mean_var_desc: batch.parameters.list(),
            bn_scale,
            bn_bias,
            estimated_mean,
            estimated_variance,
            epsilon: EPSILON.to_bits(),
        };
        device
            .put(&AnyCall::CudnnBatchNormalizationForwardInference(call))
            .unwrap();
        let of = |at: [usize; 4]| {
            let group = batch.group(at);
            let normal = (batch.values[batch.x.at(at)] - means[group]) / (variances[group] + EPSILON).sqrt();
            batch.scale[group] * normal + batch.bias[group]
        };
        let inferred: Vec<f64> = batch.x.all().map(of).collect();
        let inferred = blend(&y, scalars, &inferred, &before);
        close(kind, &device.wide(call.y, kind, y.length), &inferred, "inference");
    }
}

/// The same by the other call, without activation and addition.
fn extended(call: CudnnBatchNormalizationForwardTraining<'_>) -> AnyCall<'_> {
    AnyCall::CudnnBatchNormalizationForwardTrainingEx(CudnnBatchNormalizationForwardTrainingEx {
        handle: call.handle,
        mode: call.mode,
        bn_ops: 0,
        alpha: call.alpha,
        beta: call.beta,
        x_desc: call.x_desc,
        x_data: call.x,
        z_desc: List::new(&[]),
        z_data: SvmAddress::NULL,
        y_desc: call.y_desc,
        y_data: call.y,
        bn_scale_bias_mean_var_desc: call.bn_scale_bias_mean_var_desc,
        bn_scale: call.bn_scale,
        bn_bias: call.bn_bias,
        exponential_average_factor: call.exponential_average_factor,
        result_running_mean: call.result_running_mean,
        result_running_variance: call.result_running_variance,
        epsilon: call.epsilon,
        result_save_mean: call.result_save_mean,
        result_save_inv_variance: call.result_save_inv_variance,
        activation_desc: List::new(&[]),
        workspace: SvmAddress::NULL,
        work_space_size_in_bytes: 0,
        reserve_space: SvmAddress::NULL,
        reserve_space_size_in_bytes: 0,
    })
}

/// The derivative of a loss that is the sum of what comes out times what is given.
fn difference(batch: &Batch, given: &[f64], change: impl Fn(&mut [Vec<f64>; 3], f64)) -> f64 {
    const STEP: f64 = 1e-5;
    let loss = |step: f64| {
        let mut numbers = [batch.values.clone(), batch.scale.clone(), batch.bias.clone()];
        change(&mut numbers, step);
        let [values, scale, bias] = &numbers;
        batch
            .normalized(values, scale, bias)
            .iter()
            .zip(given)
            .map(|(out, given)| out * given)
            .sum::<f64>()
    };
    (loss(STEP) - loss(-STEP)) / (2.0 * STEP)
}

#[test]
fn gradients_are_the_differences_of_the_loss() {
    let random = &mut Random(32);
    for round in 0..24 {
        let kind = Kind::F64;
        let batch = Batch::random(random, kind, int(round % 3));
        let groups = batch.parameters.length;
        let (data, gradients) = ([random.number(), random.number()], [random.number(), random.number()]);
        let dy = Layout::random(random, kind, batch.x.dims);
        let given_values = random.numbers(dy.length);
        let given: Vec<f64> = dy.all().map(|at| given_values[dy.at(at)]).collect();
        let dx_before = random.numbers(batch.x.length);
        let mut device = Device::new();
        let handle = handle(&mut device);
        let scalars = [data[0], data[1], gradients[0], gradients[1]].map(|value| kind.scalar(value));
        let [a, b, c, d] = [0, 1, 2, 3].map(|at| List::new(&scalars[at][..]));
        let (means, variances, _) = batch.moments(&batch.values);
        let inverse: Vec<f64> = variances
            .iter()
            .map(|variance| (variance + EPSILON).powf(-0.5))
            .collect();
        let has_saved = round % 2 == 0;
        let mut saved = |values: &[f64]| {
            let at = device.elements(kind, values);
            if has_saved { at } else { SvmAddress::NULL }
        };
        let (saved_mean, saved_inv_variance) = (saved(&means), saved(&inverse));
        let mut upload = |values: &[f64]| device.elements(kind, values);
        let call = CudnnBatchNormalizationBackward {
            handle,
            mode: batch.mode,
            alpha_data_diff: a,
            beta_data_diff: b,
            alpha_param_diff: c,
            beta_param_diff: d,
            x_desc: batch.x.list(),
            x: upload(&batch.values),
            dy_desc: dy.list(),
            dy: upload(&given_values),
            dx_desc: batch.x.list(),
            dx: upload(&dx_before),
            d_bn_scale_bias_desc: batch.parameters.list(),
            bn_scale: upload(&batch.scale),
            d_bn_scale_result: upload(&batch.scale),
            d_bn_bias_result: upload(&batch.bias),
            epsilon: EPSILON.to_bits(),
            saved_mean,
            saved_inv_variance,
        };
        let any = if round % 4 < 2 {
            AnyCall::CudnnBatchNormalizationBackward(call)
        } else {
            extended_backward(call)
        };
        device.put(&any).unwrap();
        let near = |computed: Vec<f64>, wanted: Vec<f64>, what: &str| {
            for (computed, wanted) in computed.iter().zip(&wanted) {
                assert!(
                    (computed - wanted).abs() < 1e-6 * (1.0 + wanted.abs()),
                    "{what}: {computed} {wanted}"
                );
            }
        };
        let slopes: Vec<f64> = batch
            .x
            .all()
            .map(|at| difference(&batch, &given, |numbers, step| numbers[0][batch.x.at(at)] += step))
            .collect();
        let wanted = blend(&batch.x, data, &slopes, &dx_before);
        near(device.wide(call.dx, kind, batch.x.length), wanted, "data");
        for (which, at, before) in [
            (1, call.d_bn_scale_result, &batch.scale),
            (2, call.d_bn_bias_result, &batch.bias),
        ] {
            let slope = |group: usize| difference(&batch, &given, |numbers, step| numbers[which][group] += step);
            let wanted = (0..groups)
                .map(|group| gradients[0] * slope(group) + gradients[1] * before[group])
                .collect();
            near(device.wide(at, kind, groups), wanted, "parameters");
        }
    }
}

fn extended_backward(call: CudnnBatchNormalizationBackward<'_>) -> AnyCall<'_> {
    let (none, nowhere) = (List::new(&[]), SvmAddress::NULL);
    AnyCall::CudnnBatchNormalizationBackwardEx(CudnnBatchNormalizationBackwardEx {
        handle: call.handle,
        mode: call.mode,
        bn_ops: 0,
        alpha_data_diff: call.alpha_data_diff,
        beta_data_diff: call.beta_data_diff,
        alpha_param_diff: call.alpha_param_diff,
        beta_param_diff: call.beta_param_diff,
        x_desc: call.x_desc,
        x_data: call.x,
        y_desc: none,
        y_data: nowhere,
        dy_desc: call.dy_desc,
        dy_data: call.dy,
        dz_desc: none,
        dz_data: nowhere,
        dx_desc: call.dx_desc,
        dx_data: call.dx,
        d_bn_scale_bias_desc: call.d_bn_scale_bias_desc,
        bn_scale_data: call.bn_scale,
        bn_bias_data: nowhere,
        d_bn_scale_data: call.d_bn_scale_result,
        d_bn_bias_data: call.d_bn_bias_result,
        epsilon: call.epsilon,
        saved_mean: call.saved_mean,
        saved_inv_variance: call.saved_inv_variance,
        activation_desc: none,
        work_space: nowhere,
        work_space_size_in_bytes: 0,
        reserve_space: nowhere,
        reserve_space_size_in_bytes: 0,
    })
}

#[test]
fn what_does_not_fit_or_is_not_computed_is_refused() {
    let kind = Kind::F32;
    let batch = Batch::random(&mut Random(33), kind, 1);
    let mut device = Device::new();
    let handle = handle(&mut device);
    let one = kind.scalar(1.0);
    let x = device.elements(kind, &batch.values);
    let scale = device.elements(kind, &batch.scale);
    let call = CudnnBatchNormalizationForwardInference {
        handle,
        mode: 1,
        alpha: List::new(&one),
        beta: List::new(&one),
        x_desc: batch.x.list(),
        x,
        y_desc: batch.x.list(),
        y: x,
        bn_scale_bias_mean_var_desc: batch.parameters.list(),
        bn_scale: scale,
        bn_bias: scale,
        estimated_mean: scale,
        estimated_variance: scale,
        epsilon: 0,
    };
    let mut code = |call| {
        device
            .put(&AnyCall::CudnnBatchNormalizationForwardInference(call))
            .map_err(|error| error.code())
    };
    assert_eq!(code(call), Ok(()));
    assert_eq!(
        code(CudnnBatchNormalizationForwardInference { mode: 3, ..call }),
        Err(1)
    );
    let of_x = batch.x.list();
    let call_of_x = CudnnBatchNormalizationForwardInference {
        bn_scale_bias_mean_var_desc: of_x,
        ..call
    };
    assert_eq!(code(call_of_x), Err(1));
    let nowhere = SvmAddress::NULL;
    assert_eq!(
        code(CudnnBatchNormalizationForwardInference {
            bn_scale: nowhere,
            ..call
        }),
        Err(700)
    );
}
