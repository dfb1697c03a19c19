//! Pooling, activations, softmax, addition, gradients of a bias, and batch normalization.

use accel_proto::List;
use accel_proto::cuda::*;

use crate::convolution::{Layout, handle};
use crate::device::{Device, Kind, Random, close, int};

pub(crate) fn dims(random: &mut Random) -> [usize; 4] {
    [
        random.size(1, 3),
        random.size(1, 4),
        random.size(1, 9),
        random.size(1, 9),
    ]
}

/// `alpha * result + beta * before`, where results are in the order of the layout's elements.
pub(crate) fn blend(layout: &Layout, [alpha, beta]: [f64; 2], result: &[f64], before: &[f64]) -> Vec<f64> {
    let mut blended = before.to_vec();
    for (index, result) in layout.all().zip(result) {
        let place = layout.at(index);
        blended[place] = alpha * result + beta * before[place];
    }
    blended
}

/// Elements in the layout's order.
fn dense(layout: &Layout, values: &[f64]) -> Vec<f64> {
    layout.all().map(|index| values[layout.at(index)]).collect()
}

struct Pooling {
    mode: i32,
    window: [usize; 2],
    pad: [usize; 2],
    stride: [usize; 2],
}

impl Pooling {
    /// The places that a window sees, and what a sum of them is divided by.
    fn seen(&self, x: &Layout, [image, channel, row, column]: [usize; 4]) -> (Vec<[usize; 4]>, f64) {
        let mut seen = Vec::new();
        for (i, j) in (0..self.window[0]).flat_map(|i| (0..self.window[1]).map(move |j| (i, j))) {
            let y = (row * self.stride[0] + i).wrapping_sub(self.pad[0]);
            let x_place = (column * self.stride[1] + j).wrapping_sub(self.pad[1]);
            if y < x.dims[2] && x_place < x.dims[3] {
                seen.push([image, channel, y, x_place]);
            }
        }
        let count = if self.mode == 1 {
            self.window[0] * self.window[1]
        } else {
            seen.len()
        };
        (seen, f64::from(int(count)))
    }
}

#[test]
fn pooling_is_that_of_loops_and_its_gradient_goes_where_it_came_from() {
    let random = &mut Random(21);
    for round in 0..120 {
        let kind = Kind::ALL[round % 4];
        let window = [random.size(1, 4), random.size(1, 4)];
        let pooling = Pooling {
            mode: int(random.below(4)),
            window,
            pad: window.map(|window| random.below(window.min(3))),
            stride: [random.size(1, 3), random.size(1, 3)],
        };
        let input = window.map(|window| window + random.below(6));
        let out = |way: usize| (input[way] + 2 * pooling.pad[way] - window[way]) / pooling.stride[way] + 1;
        let [n, c] = [random.size(1, 2), random.size(1, 3)];
        let x = Layout::random(random, kind, [n, c, input[0], input[1]]);
        let y = Layout::random(random, kind, [n, c, out(0), out(1)]);
        let scalars = [random.number(), random.number()];
        let (x_values, y_values) = (random.numbers(x.length), random.numbers(y.length));
        let mut words = vec![parts::CUDNN_SET_POOLING2D_DESCRIPTOR, 8, pooling.mode, 0];
        words.extend([window, pooling.pad, pooling.stride].concat().into_iter().map(int));
        let (mut result, mut gradient) = (Vec::new(), vec![0.0; x.length]);
        for index in y.all() {
            let (seen, divisor) = pooling.seen(&x, index);
            let value = |place: &[usize; 4]| x_values[x.at(*place)];
            let given = y_values[y.at(index)];
            if matches!(pooling.mode, 0 | 3) {
                let most = seen.iter().map(value).fold(f64::NEG_INFINITY, f64::max);
                let first = seen.iter().find(|place| value(place) == most).unwrap();
                result.push(most);
                gradient[x.at(*first)] += given;
            } else {
                result.push(seen.iter().map(value).sum::<f64>() / divisor);
                seen.iter().for_each(|place| gradient[x.at(*place)] += given / divisor);
            }
        }
        let mut device = Device::new();
        let handle = handle(&mut device);
        let (alpha, beta) = (kind.scalar(scalars[0]), kind.scalar(scalars[1]));
        let (alpha, beta, pooling_desc) = (List::new(&alpha), List::new(&beta), List::new(&words));
        let (x_desc, y_desc) = (x.list(), y.list());
        let [x_at, dx] = [(); 2].map(|()| device.elements(kind, &x_values));
        let [y_at, dy] = [(); 2].map(|()| device.elements(kind, &y_values));
        let forward = CudnnPoolingForward {
            handle,
            pooling_desc,
            alpha,
            x_desc,
            x: x_at,
            beta,
            y_desc,
            y: y_at,
        };
        device.put(&AnyCall::CudnnPoolingForward(forward)).unwrap();
        let wanted = blend(&y, scalars, &result, &y_values);
        close(kind, &device.wide(y_at, kind, y.length), &wanted, "pooling");
        let backward = CudnnPoolingBackward {
            handle,
            pooling_desc,
            alpha,
            y_desc,
            y: y_at,
            dy_desc: y_desc,
            dy,
            x_desc,
            x: x_at,
            beta,
            dx_desc: x_desc,
            dx,
        };
        device.put(&AnyCall::CudnnPoolingBackward(backward)).unwrap();
        let wanted = blend(&x, scalars, &dense(&x, &gradient), &x_values);
        close(kind, &device.wide(dx, kind, x.length), &wanted, "pooling's gradient");
    }
}

#[test]
fn the_largest_may_be_none_and_windows_beyond_the_tensor_are_refused() {
    let kind = Kind::F32;
    let x = Layout::dense(kind, [1, 1, 1, 4]);
    let one = kind.scalar(1.0);
    let zero = kind.scalar(0.0);
    let run_to = |width: usize, words: &[i32], device: &mut Device| {
        let y = Layout::dense(kind, [1, 1, 1, width]);
        let handle = handle(device);
        let x_at = device.upload(&[f32::NAN, 1.0, 2.0, f32::NAN]);
        let y_at = device.upload(&vec![0_f32; width]);
        let call = CudnnPoolingForward {
            handle,
            pooling_desc: List::new(words),
            alpha: List::new(&one),
            x_desc: x.list(),
            x: x_at,
            beta: List::new(&zero),
            y_desc: y.list(),
            y: y_at,
        };
        let done = device.put(&AnyCall::CudnnPoolingForward(call));
        done.map(|()| device.download::<f32>(y_at, width))
    };
    let run = |words: &[i32], device: &mut Device| run_to(2, words, device);
    let words = |nan, pad_w, window_w| {
        [
            parts::CUDNN_SET_POOLING2D_DESCRIPTOR,
            8,
            0,
            nan,
            1,
            window_w,
            0,
            pad_w,
            1,
            2,
        ]
    };
    assert_eq!(run(&words(0, 0, 2), &mut Device::new()).unwrap(), [1.0, 2.0]);
    assert!(
        run(&words(1, 0, 2), &mut Device::new())
            .unwrap()
            .iter()
            .all(|value| value.is_nan())
    );
    for (pad, window) in [(2, 2), (0, 5), (0, i32::MAX), (i32::MAX, i32::MAX), (0, 0), (-1, 2)] {
        assert_eq!(
            run(&words(0, pad, window), &mut Device::new()).unwrap_err().code(),
            1,
            "{pad} {window}"
        );
    }
    // The first and the last window would see padding alone.
    let error = run_to(4, &words(0, 2, 2), &mut Device::new()).unwrap_err();
    assert_eq!(error.code(), 1);
}

/// Value and slope of an activation, by its definition.
fn activation(mode: i32, coefficient: f64, x: f64) -> (f64, f64) {
    match mode {
        0 => {
            let y = 1.0 / (1.0 + (-x).exp());
            (y, y * (1.0 - y))
        }
        1 => (x.max(0.0), if x > 0.0 { 1.0 } else { 0.0 }),
        2 => (x.tanh(), x.cosh().powi(-2)),
        3 => (
            x.clamp(0.0, coefficient),
            if x > 0.0 && x < coefficient { 1.0 } else { 0.0 },
        ),
        4 if x < 0.0 => (coefficient * (x.exp() - 1.0), coefficient * x.exp()),
        _ => (x, 1.0),
    }
}

#[test]
fn activations_and_their_slopes_are_those_of_their_definitions() {
    let random = &mut Random(22);
    for round in 0..60 {
        let kind = [Kind::F32, Kind::F64][round % 2];
        let (mode, coefficient) = (int(round / 2 % 6), f64::from(int(random.size(1, 3))) / 2.0);
        let size = dims(random);
        let [x, y] = [(); 2].map(|()| Layout::random(random, kind, size));
        let scalars = [random.number(), random.number()];
        let (x_values, y_before) = (random.numbers(x.length), random.numbers(y.length));
        let bits = coefficient.to_bits().to_le_bytes();
        let [low, high] = [0, 4].map(|at| i32::from_le_bytes(bits[at..at + 4].try_into().unwrap()));
        let words = [parts::CUDNN_SET_ACTIVATION_DESCRIPTOR, 4, mode, 0, low, high];
        let both: Vec<(f64, f64)> = dense(&x, &x_values)
            .into_iter()
            .map(|x| activation(mode, coefficient, x))
            .collect();
        let mut device = Device::new();
        let handle = handle(&mut device);
        let (alpha, beta) = (kind.scalar(scalars[0]), kind.scalar(scalars[1]));
        let (alpha, beta, activation_desc) = (List::new(&alpha), List::new(&beta), List::new(&words));
        let (x_desc, y_desc) = (x.list(), y.list());
        let [x_at, dx] = [(); 2].map(|()| device.elements(kind, &x_values));
        let [y_at, dy] = [(); 2].map(|()| device.elements(kind, &y_before));
        let call = CudnnActivationForward {
            handle,
            activation_desc,
            alpha,
            x_desc,
            x: x_at,
            beta,
            y_desc,
            y: y_at,
        };
        device.put(&AnyCall::CudnnActivationForward(call)).unwrap();
        let values: Vec<f64> = both.iter().map(|(value, _)| *value).collect();
        let wanted = blend(&y, scalars, &values, &y_before);
        close(kind, &device.wide(y_at, kind, y.length), &wanted, "activation");
        // Backwards y is what the activation gives, without scalars.
        let mut exact = y_before.clone();
        y.all()
            .zip(&values)
            .for_each(|(index, value)| exact[y.at(index)] = *value);
        let y_at = device.elements(kind, &exact);
        let call = CudnnActivationBackward {
            handle,
            activation_desc,
            alpha,
            y_desc,
            y: y_at,
            dy_desc: y_desc,
            dy,
            x_desc,
            x: x_at,
            beta,
            dx_desc: x_desc,
            dx,
        };
        device.put(&AnyCall::CudnnActivationBackward(call)).unwrap();
        let given = dense(&y, &y_before);
        let slopes: Vec<f64> = both
            .iter()
            .zip(given)
            .map(|((_, slope), given)| slope * given)
            .collect();
        let wanted = blend(&x, scalars, &slopes, &x_values);
        close(kind, &device.wide(dx, kind, x.length), &wanted, "activation's gradient");
    }
}

#[test]
fn softmax_and_its_gradient_are_those_of_their_definitions() {
    let random = &mut Random(23);
    for round in 0..60 {
        let kind = [Kind::F32, Kind::F64][round % 2];
        let (algo, mode) = (int(round / 2 % 3), int(round / 6 % 2));
        let size = dims(random);
        let [x, y] = [(); 2].map(|()| Layout::random(random, kind, size));
        let scalars = [random.number(), random.number()];
        let (x_values, y_before) = (random.numbers(x.length), random.numbers(y.length));
        let inputs = dense(&x, &x_values);
        let groups: Vec<[usize; 3]> = x
            .all()
            .map(|[n, _, h, w]| if mode == 0 { [n, 0, 0] } else { [n, h, w] })
            .collect();
        let sum_of = |of: &dyn Fn(usize) -> f64, at: usize| {
            let others = (0..groups.len()).filter(|other| groups[*other] == groups[at]);
            others.map(of).sum::<f64>()
        };
        let softmax: Vec<f64> = (0..groups.len())
            .map(|at| inputs[at].exp() / sum_of(&|other| inputs[other].exp(), at))
            .collect();
        let values: Vec<f64> = softmax
            .iter()
            .map(|value| if algo == 2 { value.ln() } else { *value })
            .collect();
        let mut device = Device::new();
        let handle = handle(&mut device);
        let (alpha, beta) = (kind.scalar(scalars[0]), kind.scalar(scalars[1]));
        let (alpha, beta) = (List::new(&alpha), List::new(&beta));
        let (x_desc, y_desc) = (x.list(), y.list());
        let [x_at, dx] = [(); 2].map(|()| device.elements(kind, &x_values));
        let [y_at, dy] = [(); 2].map(|()| device.elements(kind, &y_before));
        let call = CudnnSoftmaxForward {
            handle,
            algo,
            mode,
            alpha,
            x_desc,
            x: x_at,
            beta,
            y_desc,
            y: y_at,
        };
        device.put(&AnyCall::CudnnSoftmaxForward(call)).unwrap();
        let wanted = blend(&y, scalars, &values, &y_before);
        close(kind, &device.wide(y_at, kind, y.length), &wanted, "softmax");
        let mut exact = y_before.clone();
        y.all()
            .zip(&values)
            .for_each(|(index, value)| exact[y.at(index)] = *value);
        let y_at = device.elements(kind, &exact);
        let call = CudnnSoftmaxBackward {
            handle,
            algo,
            mode,
            alpha,
            y_desc,
            y: y_at,
            dy_desc: y_desc,
            dy,
            beta,
            dx_desc: x_desc,
            dx,
        };
        device.put(&AnyCall::CudnnSoftmaxBackward(call)).unwrap();
        // By the matrix of all derivatives: of a softmax y (1 - y) on its diagonal and -y y' beside it, of its logarithm 1 - y' and -y'.
        let given = dense(&y, &y_before);
        let slope = |other: usize, at: usize| {
            let own = if other == at { 1.0 } else { 0.0 };
            if algo == 2 {
                own - softmax[at]
            } else {
                softmax[other] * (own - softmax[at])
            }
        };
        let gradients: Vec<f64> = (0..groups.len())
            .map(|at| sum_of(&|other| given[other] * slope(other, at), at))
            .collect();
        let wanted = blend(&x, scalars, &gradients, &x_values);
        close(kind, &device.wide(dx, kind, x.length), &wanted, "softmax' gradient");
    }
}

#[test]
fn a_bias_is_added_by_channels_and_its_gradient_is_the_sum() {
    let random = &mut Random(24);
    for round in 0..40 {
        let kind = Kind::ALL[round % 4];
        let size = dims(random);
        let all = Layout::random(random, kind, size);
        let part = size.map(|size| if random.below(2) == 0 { 1 } else { size });
        let some = Layout::random(random, kind, part);
        let scalars = [random.number(), random.number()];
        let (values, added) = (random.numbers(all.length), random.numbers(some.length));
        let mut device = Device::new();
        let handle = handle(&mut device);
        let (alpha, beta) = (kind.scalar(scalars[0]), kind.scalar(scalars[1]));
        let (alpha, beta) = (List::new(&alpha), List::new(&beta));
        let [a, c] = [&added, &values].map(|values| device.elements(kind, values));
        let call = CudnnAddTensor {
            handle,
            alpha,
            a_desc: some.list(),
            a,
            beta,
            c_desc: all.list(),
            c,
        };
        device.put(&AnyCall::CudnnAddTensor(call)).unwrap();
        let result: Vec<f64> = all
            .all()
            .map(|[n, c, h, w]| added[some.at([n % part[0], c % part[1], h % part[2], w % part[3]])])
            .collect();
        let wanted = blend(&all, scalars, &result, &values);
        close(kind, &device.wide(c, kind, all.length), &wanted, "addition");
        let bias = Layout::dense(kind, [1, size[1], 1, 1]);
        let before = random.numbers(size[1]);
        let db = device.elements(kind, &before);
        let dy = device.elements(kind, &values);
        let call = CudnnConvolutionBackwardBias {
            handle,
            alpha,
            dy_desc: all.list(),
            dy,
            beta,
            db_desc: bias.list(),
            db,
        };
        device.put(&AnyCall::CudnnConvolutionBackwardBias(call)).unwrap();
        let mut sums = vec![0.0; size[1]];
        all.all().for_each(|at| sums[at[1]] += values[all.at(at)]);
        let wanted = blend(&bias, scalars, &sums, &before);
        close(kind, &device.wide(db, kind, size[1]), &wanted, "bias");
    }
}
