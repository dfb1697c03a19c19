//! Convolutions, forwards and backwards, against seven loops.

use accel_proto::cuda::*;
use accel_proto::{Handle, List, SvmAddress};

use crate::device::{Device, Kind, Random, close, int};

pub(crate) fn handle(device: &mut Device) -> Handle<CudnnHandleT> {
    let handle = Handle::from_raw(6000);
    device.put(&AnyCall::CudnnCreate(CudnnCreate { handle })).unwrap();
    handle
}

/// A tensor's descriptor and how many elements its memory has.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) words: Vec<i32>,
    pub(crate) dims: [usize; 4],
    strides: [usize; 4],
    pub(crate) length: usize,
}

impl Layout {
    /// Of these sizes, with one of several orders and gaps.
    pub(crate) fn random(random: &mut Random, kind: Kind, dims: [usize; 4]) -> Self {
        let [_, c, h, w] = dims;
        let gap = random.below(2);
        let strides = match random.below(3) {
            0 => [c * h * w, h * w, w, 1],
            1 => [c * h * w, 1, w * c, c],
            _ => [c * h * (w + gap) + gap, h * (w + gap), w + gap, 1],
        };
        Self::new(kind, dims, strides)
    }

    pub(crate) fn dense(kind: Kind, dims: [usize; 4]) -> Self {
        let [_, c, h, w] = dims;
        Self::new(kind, dims, [c * h * w, h * w, w, 1])
    }

    fn new(kind: Kind, dims: [usize; 4], strides: [usize; 4]) -> Self {
        let mut words = vec![parts::CUDNN_SET_TENSOR_ND_DESCRIPTOR, 10, kind.cudnn(), 4];
        words.extend(dims.map(int));
        words.extend(strides.map(int));
        let length = dims
            .iter()
            .zip(strides)
            .map(|(size, stride)| (size - 1) * stride)
            .sum::<usize>()
            + 1;
        Self {
            words,
            dims,
            strides,
            length,
        }
    }

    /// A filter, with its channels outside or inside.
    fn filter(kind: Kind, dims: [usize; 4], format: i32) -> Self {
        let [_, c, h, w] = dims;
        let strides = if format == 0 {
            [c * h * w, h * w, w, 1]
        } else {
            [c * h * w, 1, w * c, c]
        };
        let mut layout = Self::new(kind, dims, strides);
        layout.words = vec![parts::CUDNN_SET_FILTER_ND_DESCRIPTOR, 7, kind.cudnn(), format, 4];
        layout.words.extend(dims.map(int));
        layout
    }

    pub(crate) fn list(&self) -> List<'_, i32> {
        List::new(&self.words)
    }

    pub(crate) fn at(&self, index: [usize; 4]) -> usize {
        index
            .iter()
            .zip(self.strides)
            .map(|(index, stride)| index * stride)
            .sum()
    }

    /// All places, in the order of images, channels, rows and columns.
    pub(crate) fn all(&self) -> impl Iterator<Item = [usize; 4]> + use<> {
        let [n, c, h, w] = self.dims;
        (0..n * c * h * w).map(move |at| [at / (c * h * w), at / (h * w) % c, at / w % h, at % w])
    }
}

/// A convolution of random sizes that fit together.
struct Convolution {
    kind: Kind,
    x: Layout,
    w: Layout,
    y: Layout,
    words: Vec<i32>,
    pad: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    groups: usize,
    is_flipped: bool,
    scalars: [f64; 2],
}

impl Convolution {
    fn random(random: &mut Random, kind: Kind) -> Self {
        let groups = random.size(1, 3);
        let [images, inputs, outputs] = [(); 3].map(|()| random.size(1, 3));
        let filter = [(); 2].map(|()| random.size(1, 4));
        let [pad, stride, dilation] =
            [(0, 2), (1, 3), (1, 2)].map(|(least, most)| [(); 2].map(|()| random.size(least, most)));
        let covered = [0, 1].map(|way| (filter[way] - 1) * dilation[way] + 1);
        let input = covered.map(|covered| covered + random.below(7));
        let output = [0, 1].map(|way| (input[way] + 2 * pad[way] - covered[way]) / stride[way] + 1);
        let is_flipped = random.below(2) == 0;
        let list = [pad, stride, dilation].concat();
        let mut words = vec![parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR, 9, 2];
        words.extend(list.into_iter().map(int));
        words.extend([i32::from(!is_flipped), 0]);
        words.extend([parts::CUDNN_SET_CONVOLUTION_GROUP_COUNT, 1, int(groups)]);
        let format = int(random.below(2));
        Self {
            kind,
            x: Layout::random(random, kind, [images, inputs * groups, input[0], input[1]]),
            w: Layout::filter(kind, [outputs * groups, inputs, filter[0], filter[1]], format),
            y: Layout::random(random, kind, [images, outputs * groups, output[0], output[1]]),
            words,
            pad,
            stride,
            dilation,
            groups,
            is_flipped,
            scalars: [random.number(), random.number()],
        }
    }

    /// Each product that there is: where in x, in the filter and in y.
    fn each(&self, mut each: impl FnMut(usize, usize, usize)) {
        let [_, inputs, r, s] = self.w.dims;
        let by_group = self.w.dims[0] / self.groups;
        for [image, k, row, column] in self.y.all() {
            for (c, i, j) in (0..inputs).flat_map(|c| (0..r).flat_map(move |i| (0..s).map(move |j| (c, i, j)))) {
                let y = (row * self.stride[0] + i * self.dilation[0]).wrapping_sub(self.pad[0]);
                let x = (column * self.stride[1] + j * self.dilation[1]).wrapping_sub(self.pad[1]);
                if y >= self.x.dims[2] || x >= self.x.dims[3] {
                    continue;
                }
                let (i, j) = if self.is_flipped {
                    (r - 1 - i, s - 1 - j)
                } else {
                    (i, j)
                };
                let seen = self.x.at([image, k / by_group * inputs + c, y, x]);
                each(seen, self.w.at([k, c, i, j]), self.y.at([image, k, row, column]));
            }
        }
    }

    /// `alpha * result + beta * before` where the layout has elements.
    fn blend(&self, layout: &Layout, result: &[f64], before: &[f64]) -> Vec<f64> {
        let mut blended = before.to_vec();
        for place in layout.all().map(|index| layout.at(index)) {
            blended[place] = self.scalars[0] * result[place] + self.scalars[1] * before[place];
        }
        blended
    }

    fn check(&self, random: &mut Random) {
        let mut device = Device::new();
        let handle = handle(&mut device);
        let layouts = [&self.x, &self.w, &self.y];
        let [x, w, y] = layouts.map(|layout| random.numbers(layout.length));
        let (alpha, beta) = (self.kind.scalar(self.scalars[0]), self.kind.scalar(self.scalars[1]));
        let (alpha, beta) = (List::new(&alpha), List::new(&beta));
        let (x_desc, w_desc, y_desc) = (self.x.list(), self.w.list(), self.y.list());
        let conv_desc = List::new(&self.words);
        let upload = |device: &mut Device, values: &[f64]| device.elements(self.kind, values);
        let [x_at, w_at, y_at] = [&x, &w, &y].map(|values| upload(&mut device, values));
        let (work_space, work_space_size_in_bytes, algo) = (SvmAddress::NULL, 0, 0);
        let mut sums = [vec![0.0; x.len()], vec![0.0; w.len()], vec![0.0; y.len()]];
        self.each(|seen, weight, result| {
            sums[0][seen] += w[weight] * y[result];
            sums[1][weight] += x[seen] * y[result];
            sums[2][result] += x[seen] * w[weight];
        });
        // Gradients and results take the places of others, which are there anew for each call.
        let [dx_at, dw_at] = [&x, &w].map(|values| upload(&mut device, values));
        let calls = [
            AnyCall::CudnnConvolutionBackwardData(CudnnConvolutionBackwardData {
                handle,
                alpha,
                w_desc,
                w: w_at,
                dy_desc: y_desc,
                dy: y_at,
                conv_desc,
                algo,
                work_space,
                work_space_size_in_bytes,
                beta,
                dx_desc: x_desc,
                dx: dx_at,
            }),
            AnyCall::CudnnConvolutionBackwardFilter(CudnnConvolutionBackwardFilter {
                handle,
                alpha,
                x_desc,
                x: x_at,
                dy_desc: y_desc,
                dy: y_at,
                conv_desc,
                algo,
                work_space,
                work_space_size_in_bytes,
                beta,
                dw_desc: w_desc,
                dw: dw_at,
            }),
            AnyCall::CudnnConvolutionForward(CudnnConvolutionForward {
                handle,
                alpha,
                x_desc,
                x: x_at,
                w_desc,
                w: w_at,
                conv_desc,
                algo,
                work_space,
                work_space_size_in_bytes,
                beta,
                y_desc,
                y: y_at,
            }),
        ];
        for call in &calls {
            device.put(call).unwrap();
        }
        let results = [(dx_at, &x, "data"), (dw_at, &w, "filter"), (y_at, &y, "forward")];
        for (((at, before, what), layout), sums) in results.into_iter().zip(layouts).zip(&sums) {
            let wanted = self.blend(layout, sums, before);
            close(self.kind, &device.wide(at, self.kind, before.len()), &wanted, what);
        }
    }
}

#[test]
fn convolutions_are_those_of_loops_in_all_three_directions() {
    let random = &mut Random(11);
    for round in 0..160 {
        let convolution = Convolution::random(random, Kind::ALL[round % 4]);
        convolution.check(random);
    }
}

/// Columns that are more than one piece has: the last piece is a part of one.
#[test]
fn a_convolution_in_pieces_is_the_same() {
    let random = &mut Random(12);
    let kind = Kind::F64;
    let mut convolution = Convolution::random(random, kind);
    (convolution.pad, convolution.stride, convolution.dilation) = ([2; 2], [1; 2], [1; 2]);
    (convolution.groups, convolution.is_flipped) = (1, false);
    convolution.words = vec![parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR, 9, 2, 2, 2, 1, 1, 1, 1, 1, 0];
    convolution.x = Layout::dense(kind, [1, 16, 40, 41]);
    convolution.w = Layout::filter(kind, [3, 16, 5, 5], 0);
    convolution.y = Layout::dense(kind, [1, 3, 40, 41]);
    convolution.check(random);
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let random = &mut Random(13);
    let kind = Kind::F32;
    let base = || {
        let mut convolution = Convolution::random(&mut Random(13), kind);
        (convolution.pad, convolution.stride, convolution.dilation) = ([1; 2], [1; 2], [1; 2]);
        convolution.groups = 1;
        convolution.words = vec![parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR, 9, 2, 1, 1, 1, 1, 1, 1, 1, 0];
        convolution.x = Layout::dense(kind, [2, 3, 6, 6]);
        convolution.w = Layout::filter(kind, [4, 3, 3, 3], 0);
        convolution.y = Layout::dense(kind, [2, 4, 6, 6]);
        convolution
    };
    base().check(random);
    let huge = |layout: &mut Layout, at: usize| layout.words[at] = i32::MAX;
    type Change<'c> = (i32, &'c dyn Fn(&mut Convolution));
    let changes: [Change<'_>; 12] = [
        (1, &|call| call.words[3] = -1),
        (1, &|call| call.words[5] = 0),
        (1, &|call| call.words[9] = 2),
        (801, &|call| {
            call.words = vec![
                parts::CUDNN_SET_CONVOLUTION_ND_DESCRIPTOR,
                12,
                3,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
            ]
        }),
        (1, &|call| {
            call.words.extend([parts::CUDNN_SET_CONVOLUTION_GROUP_COUNT, 1, 2])
        }),
        (1, &|call| call.words.clear()),
        (1, &|call| call.y = Layout::dense(kind, [2, 4, 5, 6])),
        (1, &|call| call.w = Layout::filter(kind, [4, 2, 3, 3], 0)),
        (1, &|call| huge(&mut call.x, 4)),
        (801, &|call| call.x.words[2] = 3),
        (1, &|call| (call.words[3], call.words[5]) = (i32::MAX, i32::MAX)),
        (700, &|call| {
            call.x = Layout::dense(kind, [2, 3, 60, 60]);
            call.y = Layout::dense(kind, [2, 4, 60, 60]);
            call.x.length = 10;
        }),
    ];
    for (number, (code, change)) in changes.into_iter().enumerate() {
        let mut convolution = base();
        change(&mut convolution);
        let mut device = Device::new();
        let handle = handle(&mut device);
        let [x, w, y] = [&convolution.x, &convolution.w, &convolution.y]
            .map(|layout| device.elements(kind, &vec![1.0; layout.length]));
        let one = kind.scalar(1.0);
        let call = AnyCall::CudnnConvolutionForward(CudnnConvolutionForward {
            handle,
            alpha: List::new(&one),
            x_desc: convolution.x.list(),
            x,
            w_desc: convolution.w.list(),
            w,
            conv_desc: List::new(&convolution.words),
            algo: 0,
            work_space: SvmAddress::NULL,
            work_space_size_in_bytes: 0,
            beta: List::new(&one),
            y_desc: convolution.y.list(),
            y,
        });
        let error = device.put(&call).unwrap_err();
        assert_eq!(error.code(), code, "{number}: {error}");
    }
}
