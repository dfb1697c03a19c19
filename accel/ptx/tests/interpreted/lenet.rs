//! LeNet trained for some steps, by kernels that nvcc made and by loops in Rust; after each step both have the same loss. Images are
//! random, but each class has a pattern of its own in them, so that there is something to learn.

use crate::device::{Args, Device, Random, close};

const IMAGES: usize = 4;
const STEPS: usize = 5;
const CLASSES: usize = 10;
const RATE: f32 = 0.1;

/// A convolution of squares by squares, without edges.
#[derive(Clone, Copy)]
struct Conv {
    channels: usize,
    size: usize,
    filters: usize,
}

const WIDTH: usize = 5;

impl Conv {
    const fn out(self) -> usize {
        self.size - WIDTH + 1
    }

    const fn inputs(self) -> usize {
        IMAGES * self.channels * self.size * self.size
    }

    const fn outputs(self) -> usize {
        IMAGES * self.filters * self.out() * self.out()
    }

    const fn weights(self) -> usize {
        self.filters * self.channels * WIDTH * WIDTH
    }
}

const CONVS: [Conv; 2] = [
    Conv {
        channels: 1,
        size: 28,
        filters: 6,
    },
    Conv {
        channels: 6,
        size: 12,
        filters: 16,
    },
];
const DENSE: [(usize, usize); 3] = [(256, 120), (120, 84), (84, CLASSES)];

/// Weights and biases of all layers, in order.
fn parameters(random: &mut Random) -> Vec<Vec<f32>> {
    let mut all = Vec::new();
    let mut layer = |weights: usize, fan: usize, out: usize| {
        let scale = (3.0 / fan as f32).sqrt();
        all.push(random.reals(weights).iter().map(|x| x * scale).collect());
        all.push(vec![0.0; out]);
    };
    for conv in CONVS {
        layer(conv.weights(), conv.channels * WIDTH * WIDTH, conv.filters);
    }
    for (input, out) in DENSE {
        layer(input * out, input, out);
    }
    all
}

fn batch(random: &mut Random) -> (Vec<f32>, Vec<i32>) {
    let mut pixels = random.reals(CONVS[0].inputs());
    let mut labels = Vec::new();
    for image in pixels.chunks_exact_mut(28 * 28) {
        let label = random.below(10);
        for (at, pixel) in image.iter_mut().enumerate() {
            let bright = (at / 28 + at % 28 * 3) % 10 == usize::try_from(label).unwrap();
            *pixel = *pixel * 0.2 + f32::from(u8::from(bright));
        }
        labels.push(label);
    }
    (pixels, labels)
}

/// The loops in Rust. Layers keep what they were given and made, for the way back.
mod cpu {
    use super::{Conv, IMAGES, WIDTH};

    pub(super) fn conv(c: Conv, x: &[f32], w: &[f32], bias: &[f32]) -> Vec<f32> {
        let out = c.out();
        let mut y = vec![0.0; c.outputs()];
        for image in 0..IMAGES {
            for filter in 0..c.filters {
                for (row, column) in square(out) {
                    let mut sum = bias[filter];
                    each(c, |channel, wy, wx| {
                        sum +=
                            x[pixel(c, image, channel, row + wy, column + wx)] * w[weight(c, filter, channel, wy, wx)];
                    });
                    y[((image * c.filters + filter) * out + row) * out + column] = sum;
                }
            }
        }
        y
    }

    /// Gradients of the weights, the biases and the input.
    pub(super) fn conv_back(c: Conv, x: &[f32], w: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
        let out = c.out();
        let (mut dw, mut db, mut dx) = (vec![0.0; w.len()], vec![0.0; c.filters], vec![0.0; x.len()]);
        for image in 0..IMAGES {
            for filter in 0..c.filters {
                for (row, column) in square(out) {
                    let d = dy[((image * c.filters + filter) * out + row) * out + column];
                    db[filter] += d;
                    each(c, |channel, wy, wx| {
                        let (at, weight) = (
                            pixel(c, image, channel, row + wy, column + wx),
                            weight(c, filter, channel, wy, wx),
                        );
                        dw[weight] += d * x[at];
                        dx[at] += d * w[weight];
                    });
                }
            }
        }
        [dw, db, dx]
    }

    fn square(size: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..size * size).map(move |at| (at / size, at % size))
    }

    fn each(c: Conv, mut f: impl FnMut(usize, usize, usize)) {
        for channel in 0..c.channels {
            for (wy, wx) in square(WIDTH) {
                f(channel, wy, wx);
            }
        }
    }

    const fn pixel(c: Conv, image: usize, channel: usize, y: usize, x: usize) -> usize {
        ((image * c.channels + channel) * c.size + y) * c.size + x
    }

    const fn weight(c: Conv, filter: usize, channel: usize, y: usize, x: usize) -> usize {
        ((filter * c.channels + channel) * WIDTH + y) * WIDTH + x
    }

    pub(super) fn relu(x: &mut [f32]) {
        for x in x {
            *x = x.max(0.0);
        }
    }

    pub(super) fn relu_back(y: &[f32], d: &mut [f32]) {
        for (d, &y) in d.iter_mut().zip(y) {
            if y <= 0.0 {
                *d = 0.0;
            }
        }
    }

    /// The greatest of each two by two, and where it was.
    pub(super) fn pool(size: usize, x: &[f32]) -> (Vec<f32>, Vec<usize>) {
        let mut chosen = Vec::new();
        for plane in 0..x.len() / (size * size) {
            for (row, column) in square(size / 2) {
                let mut best = plane * size * size + 2 * row * size + 2 * column;
                for at in [best + 1, best + size, best + size + 1] {
                    if x[at] > x[best] {
                        best = at;
                    }
                }
                chosen.push(best);
            }
        }
        (chosen.iter().map(|&at| x[at]).collect(), chosen)
    }

    pub(super) fn pool_back(size: usize, dy: &[f32], chosen: &[usize]) -> Vec<f32> {
        let mut dx = vec![0.0; size];
        for (&d, &at) in dy.iter().zip(chosen) {
            dx[at] += d;
        }
        dx
    }

    pub(super) fn dense((input, out): (usize, usize), x: &[f32], w: &[f32], bias: &[f32]) -> Vec<f32> {
        let mut y = Vec::new();
        for x in x.chunks_exact(input) {
            for o in 0..out {
                let products = x.iter().zip(&w[o * input..]).map(|(x, w)| x * w);
                y.push(bias[o] + products.sum::<f32>());
            }
        }
        y
    }

    pub(super) fn dense_back((input, out): (usize, usize), x: &[f32], w: &[f32], dy: &[f32]) -> [Vec<f32>; 3] {
        let (mut dw, mut db, mut dx) = (vec![0.0; w.len()], vec![0.0; out], vec![0.0; x.len()]);
        for image in 0..IMAGES {
            for o in 0..out {
                let d = dy[image * out + o];
                db[o] += d;
                for i in 0..input {
                    dw[o * input + i] += d * x[image * input + i];
                    dx[image * input + i] += d * w[o * input + i];
                }
            }
        }
        [dw, db, dx]
    }

    /// The mean loss and its gradient.
    pub(super) fn cross_entropy(classes: usize, x: &[f32], labels: &[i32]) -> (f32, Vec<f32>) {
        let (mut loss, mut dx) = (0.0, Vec::new());
        for (x, &label) in x.chunks_exact(classes).zip(labels) {
            let label = usize::try_from(label).unwrap();
            let most = x.iter().copied().fold(f32::MIN, f32::max);
            let sum: f32 = x.iter().map(|x| (x - most).exp()).sum();
            loss += sum.ln() + most - x[label];
            for (class, x) in x.iter().enumerate() {
                let wanted = if class == label { 1.0 } else { 0.0 };
                dx.push(((x - most).exp() / sum - wanted) / IMAGES as f32);
            }
        }
        (loss / IMAGES as f32, dx)
    }
}

/// One step in Rust: the loss before it.
fn step_on_cpu(parameters: &mut [Vec<f32>], pixels: &[f32], labels: &[i32]) -> f32 {
    let mut inputs = vec![pixels.to_vec()];
    let (mut maps, mut places) = (Vec::new(), Vec::new());
    for (layer, conv) in CONVS.into_iter().enumerate() {
        let mut y = cpu::conv(conv, &inputs[layer], &parameters[2 * layer], &parameters[2 * layer + 1]);
        cpu::relu(&mut y);
        let (pooled, chosen) = cpu::pool(conv.out(), &y);
        maps.push(y);
        places.push(chosen);
        inputs.push(pooled);
    }
    for (layer, shape) in DENSE.into_iter().enumerate() {
        let at = 2 * (layer + 2);
        let mut y = cpu::dense(shape, &inputs[layer + 2], &parameters[at], &parameters[at + 1]);
        if layer < 2 {
            cpu::relu(&mut y);
        }
        inputs.push(y);
    }
    let (loss, mut d) = cpu::cross_entropy(CLASSES, &inputs[5], labels);
    let mut gradients = Vec::new();
    for layer in (0..3).rev() {
        if layer < 2 {
            cpu::relu_back(&inputs[layer + 3], &mut d);
        }
        let [dw, db, dx] = cpu::dense_back(DENSE[layer], &inputs[layer + 2], &parameters[2 * (layer + 2)], &d);
        gradients.extend([db, dw]);
        d = dx;
    }
    for layer in (0..2).rev() {
        let mut dy = cpu::pool_back(maps[layer].len(), &d, &places[layer]);
        cpu::relu_back(&maps[layer], &mut dy);
        let [dw, db, dx] = cpu::conv_back(CONVS[layer], &inputs[layer], &parameters[2 * layer], &dy);
        gradients.extend([db, dw]);
        d = dx;
    }
    for (parameters, gradients) in parameters.iter_mut().zip(gradients.iter().rev()) {
        for (parameter, gradient) in parameters.iter_mut().zip(gradients) {
            *parameter -= RATE * gradient;
        }
    }
    loss
}

/// The same on the device: everything stays there but the images and the loss.
struct Trained {
    device: Device,
    /// Addresses of weights and biases, as many gradients, and how many numbers each has.
    parameters: Vec<(u64, u64, usize)>,
    /// What each layer is given, and the gradient of that.
    inputs: Vec<(u64, u64)>,
    maps: Vec<(u64, u64)>,
    chosen: Vec<u64>,
    labels: u64,
    losses: u64,
}

impl Trained {
    fn new(values: &[Vec<f32>]) -> Self {
        let mut device = Device::new(include_str!("../ptx/lenet.ptx"));
        let mut pair = |count: usize| (device.memory.allocate(count * 4), device.memory.allocate(count * 4));
        let parameters = values.iter().map(|values| pair(values.len())).collect::<Vec<_>>();
        let sizes = [
            CONVS[0].inputs(),
            CONVS[1].inputs(),
            IMAGES * 256,
            IMAGES * 120,
            IMAGES * 84,
            IMAGES * 10,
        ];
        let inputs = sizes.map(&mut pair).to_vec();
        let maps = CONVS.map(|conv| pair(conv.outputs())).to_vec();
        let chosen = CONVS.map(|conv| pair(conv.outputs() / 4).0).to_vec();
        let (labels, losses) = pair(IMAGES);
        for (values, &(address, _)) in values.iter().zip(&parameters) {
            device.write(address, values);
        }
        let parameters = parameters
            .iter()
            .zip(values)
            .map(|(&(at, gradient), values)| (at, gradient, values.len()));
        Self {
            parameters: parameters.collect(),
            device,
            inputs,
            maps,
            chosen,
            labels,
            losses,
        }
    }

    /// A kernel over `total` numbers, whose first parameter they are.
    fn run(&mut self, kernel: &str, total: usize, args: impl FnOnce(Args) -> Args) {
        let blocks = u32::try_from(total.div_ceil(128)).unwrap();
        self.device.run(kernel, blocks, 128, &args(Args::new().int(total)));
    }

    fn forward(&mut self) {
        for (layer, conv) in CONVS.into_iter().enumerate() {
            let (x, y, pooled) = (self.inputs[layer].0, self.maps[layer].0, self.inputs[layer + 1].0);
            let (w, bias) = (self.parameters[2 * layer].0, self.parameters[2 * layer + 1].0);
            self.run("convolution", conv.outputs(), |args| {
                shaped(args, conv).pointer(x).pointer(w).pointer(bias).pointer(y)
            });
            self.run("relu", conv.outputs(), |args| args.pointer(y));
            let chosen = self.chosen[layer];
            self.run("pool", conv.outputs() / 4, |args| {
                args.int(conv.out() / 2).pointer(y).pointer(pooled).pointer(chosen)
            });
        }
        for (layer, (input, out)) in DENSE.into_iter().enumerate() {
            let (x, y) = (
                self.inputs[layer + 2].0,
                if layer < 2 {
                    self.inputs[layer + 3].0
                } else {
                    self.inputs[5].0
                },
            );
            let (w, bias) = (
                self.parameters[2 * (layer + 2)].0,
                self.parameters[2 * (layer + 2) + 1].0,
            );
            self.run("dense", IMAGES * out, |args| {
                args.int(input).int(out).pointer(x).pointer(w).pointer(bias).pointer(y)
            });
            if layer < 2 {
                self.run("relu", IMAGES * out, |args| args.pointer(y));
            }
        }
    }

    fn backward(&mut self) {
        for layer in (0..3).rev() {
            let (input, out) = DENSE[layer];
            let ((x, dx), (y, dy)) = (self.inputs[layer + 2], self.inputs[layer + 3]);
            if layer < 2 {
                self.run("relu_input", IMAGES * out, |args| args.pointer(y).pointer(dy));
            }
            let (w, dw, weights) = self.parameters[2 * (layer + 2)];
            let (_, db, _) = self.parameters[2 * (layer + 2) + 1];
            self.run("dense_weights", weights, |args| {
                args.int(IMAGES).int(input).int(out).pointer(x).pointer(dy).pointer(dw)
            });
            self.run("convolution_bias", out, |args| {
                args.int(IMAGES).int(1).pointer(dy).pointer(db)
            });
            self.run("dense_input", IMAGES * input, |args| {
                args.int(input).int(out).pointer(dy).pointer(w).pointer(dx)
            });
        }
        for layer in (0..2).rev() {
            let conv = CONVS[layer];
            let ((x, dx), (y, dy)) = (self.inputs[layer], self.maps[layer]);
            let (pooled, chosen) = (self.inputs[layer + 1].1, self.chosen[layer]);
            self.device.write(dy, &vec![0f32; conv.outputs()]);
            self.run("pool_input", conv.outputs() / 4, |args| {
                args.pointer(pooled).pointer(chosen).pointer(dy)
            });
            self.run("relu_input", conv.outputs(), |args| args.pointer(y).pointer(dy));
            let ((w, dw, weights), (_, db, _)) = (self.parameters[2 * layer], self.parameters[2 * layer + 1]);
            self.run("convolution_weights", weights, |args| {
                shaped(args.int(IMAGES), conv).pointer(x).pointer(dy).pointer(dw)
            });
            self.run("convolution_bias", conv.filters, |args| {
                args.int(IMAGES).int(conv.out() * conv.out()).pointer(dy).pointer(db)
            });
            self.run("convolution_input", conv.inputs(), |args| {
                shaped(args, conv).pointer(dy).pointer(w).pointer(dx)
            });
        }
    }

    fn step(&mut self, pixels: &[f32], labels: &[i32]) -> f32 {
        self.device.write(self.inputs[0].0, pixels);
        self.device.write(self.labels, labels);
        self.forward();
        let (logits, gradient) = self.inputs[5];
        let scale = 1.0 / IMAGES as f32;
        let args = Args::new()
            .int(CLASSES)
            .float(scale)
            .pointer(logits)
            .pointer(self.labels);
        let images = u32::try_from(IMAGES).unwrap();
        self.device.run(
            "cross_entropy",
            images,
            32,
            &args.pointer(self.losses).pointer(gradient),
        );
        self.backward();
        for (at, gradient, count) in self.parameters.clone() {
            self.run("descend", count, |args| args.float(RATE).pointer(gradient).pointer(at));
        }
        self.device.download::<f32>(self.losses, IMAGES).iter().sum::<f32>() * scale
    }
}

fn shaped(args: Args, conv: Conv) -> Args {
    args.int(conv.channels).int(conv.size).int(conv.filters).int(WIDTH)
}

#[test]
fn lenet_learns_as_it_does_in_rust() {
    let mut random = Random(24);
    let mut parameters = parameters(&mut random);
    let mut trained = Trained::new(&parameters);
    let (pixels, labels) = batch(&mut random);
    let (mut on_device, mut on_cpu) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        on_device.push(trained.step(&pixels, &labels));
        on_cpu.push(step_on_cpu(&mut parameters, &pixels, &labels));
    }
    close(&on_device, &on_cpu);
    assert!(on_cpu[STEPS - 1] < on_cpu[0] * 0.9, "nothing was learned: {on_cpu:?}");
    for (values, &(address, _, count)) in parameters.iter().zip(&trained.parameters) {
        close(&trained.device.download::<f32>(address, count), values);
    }
}
