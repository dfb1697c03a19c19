//! Products of matrices and vectors, and vectors.

use accel_proto::cuda::*;
use accel_proto::{Handle, List, SvmAddress};

use crate::device::{Device, Kind, Random, close, int};

fn handle(device: &mut Device) -> Handle<CublasHandleT> {
    let handle = Handle::from_raw(5000);
    device.put(&AnyCall::CublasCreateV2(CublasCreateV2 { handle })).unwrap();
    handle
}

/// `alpha * op(a) * op(b) + beta * c`, all in columns.
struct Gemm {
    kinds: [Kind; 3],
    operations: [i32; 2],
    sizes: [usize; 3],
    leading: [usize; 3],
    /// Elements between matrices, and how many there are.
    strides: [usize; 3],
    batch: usize,
    scalars: [f64; 2],
}

impl Gemm {
    fn random(random: &mut Random, kinds: [Kind; 3], batch: usize) -> Self {
        let [m, k, n] = [(); 3].map(|()| random.size(1, 40));
        let operations = [(); 2].map(|()| int(random.below(3)));
        let stored = |operation: i32, size: [usize; 2]| if operation == 0 { size } else { [size[1], size[0]] };
        let [a, b, c] = [stored(operations[0], [m, k]), stored(operations[1], [k, n]), [m, n]];
        let leading = [a, b, c].map(|[rows, _]| rows + random.below(3));
        let columns = [a[1], b[1], c[1]];
        let strides = [0, 1, 2].map(|at| leading[at] * columns[at] + random.below(5));
        Self {
            kinds,
            operations,
            sizes: [m, k, n],
            leading,
            strides,
            batch,
            scalars: [random.number(), random.number()],
        }
    }

    fn wanted(&self, [a, b, c]: &[Vec<f64>; 3]) -> Vec<f64> {
        let ([m, k, n], [lda, ldb, ldc]) = (self.sizes, self.leading);
        let mut result = c.clone();
        for matrix in 0..self.batch {
            let at = |operation: i32, leading: usize, row: usize, column: usize| {
                if operation == 0 {
                    column * leading + row
                } else {
                    row * leading + column
                }
            };
            for (row, column) in (0..m).flat_map(|row| (0..n).map(move |column| (row, column))) {
                let product = |inner: usize| {
                    a[matrix * self.strides[0] + at(self.operations[0], lda, row, inner)]
                        * b[matrix * self.strides[1] + at(self.operations[1], ldb, inner, column)]
                };
                let sum: f64 = (0..k).map(product).sum();
                let place = matrix * self.strides[2] + column * ldc + row;
                result[place] = self.scalars[0] * sum + self.scalars[1] * c[place];
            }
        }
        result
    }

    fn check(&self, random: &mut Random, name: &str) {
        let mut device = Device::new();
        let handle = handle(&mut device);
        let values = [0, 1, 2].map(|at| random.numbers(self.strides[at] * self.batch));
        let [a, b, c] = [0, 1, 2].map(|at| device.elements(self.kinds[at], &values[at]));
        let computes = if self.kinds[2] == Kind::F64 {
            Kind::F64
        } else {
            Kind::F32
        };
        let (alpha, beta) = (computes.scalar(self.scalars[0]), computes.scalar(self.scalars[1]));
        let ([m, k, n], [lda, ldb, ldc]) = (self.sizes.map(int), self.leading.map(int));
        let [stride_a, stride_b, stride_c] = self.strides.map(|stride| stride as i64);
        let [transa, transb] = self.operations;
        let (alpha, beta) = (List::new(&alpha), List::new(&beta));
        let (batch_count, algo) = (int(self.batch), -1);
        let [atype, btype, ctype] = self.kinds.map(Kind::cuda);
        let compute_type = if computes == Kind::F64 { 70 } else { 68 };
        macro_rules! call {
            ($name:ident { $($more:ident),* }) => {
                AnyCall::$name($name { handle, transa, transb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, $($more),* })
            };
        }
        let call = match name {
            "sgemm" => call!(CublasSgemmV2 {}),
            "dgemm" => call!(CublasDgemmV2 {}),
            "sgemm batched" => call!(CublasSgemmStridedBatched {
                stride_a,
                stride_b,
                stride_c,
                batch_count
            }),
            "dgemm batched" => call!(CublasDgemmStridedBatched {
                stride_a,
                stride_b,
                stride_c,
                batch_count
            }),
            "ex" => call!(CublasGemmEx {
                atype,
                btype,
                ctype,
                compute_type,
                algo
            }),
            _ => call!(CublasGemmStridedBatchedEx {
                atype,
                btype,
                ctype,
                stride_a,
                stride_b,
                stride_c,
                batch_count,
                compute_type,
                algo
            }),
        };
        device.put(&call).unwrap();
        let computed = device.wide(c, self.kinds[2], values[2].len());
        close(self.kinds[2], &computed, &self.wanted(&values), name);
    }
}

#[test]
fn products_are_those_of_loops_whatever_their_types_and_layout() {
    let random = &mut Random(1);
    for _ in 0..30 {
        for (kind, name) in [(Kind::F32, "sgemm"), (Kind::F64, "dgemm")] {
            Gemm::random(random, [kind; 3], 1).check(random, name);
            let batch = random.size(1, 4);
            Gemm::random(random, [kind; 3], batch).check(random, &format!("{name} batched"));
        }
        for kind in Kind::ALL {
            Gemm::random(random, [kind; 3], 1).check(random, "ex");
            let batch = random.size(1, 4);
            Gemm::random(random, [kind; 3], batch).check(random, "ex batched");
        }
        Gemm::random(random, [Kind::F16, Kind::F16, Kind::F32], 1).check(random, "ex");
        Gemm::random(random, [Kind::Bf16, Kind::Bf16, Kind::F32], 1).check(random, "ex");
    }
}

/// A small product whose arguments a test changes.
fn product(a: SvmAddress, b: SvmAddress, c: SvmAddress) -> CublasSgemmV2<'static> {
    const ONE: List<'static, u8> = List::new(&[0, 0, 0x80, 0x3f]);
    CublasSgemmV2 {
        handle: Handle::from_raw(5000),
        transa: 0,
        transb: 0,
        m: 2,
        n: 2,
        k: 2,
        alpha: ONE,
        a,
        lda: 2,
        b,
        ldb: 2,
        beta: List::new(&[0; 4]),
        c,
        ldc: 2,
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_and_nothing_is_written() {
    let mut device = Device::new();
    handle(&mut device);
    let [a, b, c] = [(); 3].map(|()| device.upload(&[7_f32; 4]));
    let right = product(a, b, c);
    device.put(&AnyCall::CublasSgemmV2(right)).unwrap();
    assert_eq!(device.download::<f32>(c, 4), [98.0; 4]);
    let wrong = |code: i32, change: &dyn Fn(&mut CublasSgemmV2<'static>)| {
        let mut call = product(a, b, c);
        change(&mut call);
        (code, call)
    };
    for (code, call) in [
        wrong(1, &|call| call.m = -1),
        wrong(1, &|call| call.lda = 1),
        wrong(1, &|call| call.ldc = 0),
        wrong(1, &|call| call.transa = 3),
        wrong(1, &|call| call.alpha = List::new(&[0; 3])),
        wrong(700, &|call| (call.k, call.ldb) = (3, 3)),
        wrong(700, &|call| (call.n, call.k) = (i32::MAX, 0)),
        wrong(700, &|call| {
            (call.m, call.lda, call.ldc) = (i32::MAX, i32::MAX, i32::MAX)
        }),
        wrong(700, &|call| call.ldc = i32::MAX),
        wrong(700, &|call| call.c = SvmAddress(c.0 + 4)),
        wrong(700, &|call| call.a = SvmAddress(u64::MAX)),
    ] {
        let mut device = Device::new();
        handle(&mut device);
        for _ in 0..3 {
            device.upload(&[7_f32; 4]);
        }
        let error = device.put(&AnyCall::CublasSgemmV2(call)).unwrap_err();
        assert_eq!(error.code(), code, "{call:?}: {error}");
        if code == 1 {
            assert_eq!(device.synchronize(), 1, "it is told");
            assert_eq!(device.synchronize(), 0, "once");
            assert_eq!(device.download::<f32>(c, 4), [7.0; 4]);
        }
    }
}

#[test]
fn what_is_not_a_number_comes_from_nothing_that_is_not_looked_at() {
    let mut device = Device::new();
    handle(&mut device);
    let nan = device.upload(&[f32::NAN; 4]);
    let (ones, c) = (device.upload(&[1_f32; 4]), device.upload(&[f32::NAN; 4]));
    // Without beta, c is nothing; without alpha, a and b are.
    device.put(&AnyCall::CublasSgemmV2(product(ones, ones, c))).unwrap();
    assert_eq!(device.download::<f32>(c, 4), [2.0; 4]);
    let half = 0.5_f32.to_le_bytes();
    let call = CublasSgemmV2 {
        alpha: List::new(&[0; 4]),
        beta: List::new(&half),
        ..product(nan, nan, c)
    };
    device.put(&AnyCall::CublasSgemmV2(call)).unwrap();
    assert_eq!(device.download::<f32>(c, 4), [1.0; 4]);
    // An operand that is the result, too, is what it was before.
    let c = device.upload(&[1_f32, 2.0, 3.0, 4.0]);
    device.put(&AnyCall::CublasSgemmV2(product(c, c, c))).unwrap();
    assert_eq!(device.download::<f32>(c, 4), [7.0, 10.0, 15.0, 22.0]);
}

#[test]
fn what_is_not_computed_is_refused() {
    let mut device = Device::new();
    let handle = handle(&mut device);
    let at = device.upload(&[0_u8; 64]);
    for (atype, compute_type) in [(4, 68), (10, 68), (3, 72), (0, 72), (1, 68), (0, 70)] {
        let call = CublasGemmEx {
            handle,
            transa: 0,
            transb: 0,
            m: 1,
            n: 1,
            k: 1,
            alpha: List::new(&[0; 4]),
            a: at,
            atype,
            lda: 1,
            b: at,
            btype: atype,
            ldb: 1,
            beta: List::new(&[0; 4]),
            c: at,
            ctype: atype,
            ldc: 1,
            compute_type,
            algo: -1,
        };
        let error = device.put(&AnyCall::CublasGemmEx(call)).unwrap_err();
        assert_eq!(error.code(), 801, "{atype} {compute_type}: {error}");
        assert_eq!(device.synchronize(), 801);
    }
}

/// Elements of a vector, from behind where its distance is negative.
fn elements(values: &[f64], count: usize, step: i32) -> Vec<usize> {
    let distance = usize::try_from(step.unsigned_abs()).unwrap();
    assert!(values.len() > (count.max(1) - 1) * distance);
    let places = (0..count).map(|at| at * distance);
    if step < 0 {
        places.rev().collect()
    } else {
        places.collect()
    }
}

#[test]
fn a_matrix_times_a_vector_is_that_of_loops() {
    let random = &mut Random(2);
    for round in 0..60 {
        let kind = if round % 2 == 0 { Kind::F32 } else { Kind::F64 };
        let mut device = Device::new();
        let handle = handle(&mut device);
        let [rows, columns] = [(); 2].map(|()| random.size(1, 30));
        let lda = rows + random.below(3);
        let trans = int(random.below(3));
        let (m, k) = if trans == 0 { (rows, columns) } else { (columns, rows) };
        let [incx, incy] = [(); 2].map(|()| [1, 2, -1, -3][random.below(4)]);
        let length = |count: usize, step: i32| count * usize::try_from(step.unsigned_abs()).unwrap();
        let (matrix, x) = (random.numbers(lda * columns), random.numbers(length(k, incx)));
        let y = random.numbers(length(m, incy));
        let [alpha, beta] = [random.number(), random.number()];
        let [a_at, x_at, y_at] = [&matrix, &x, &y].map(|values| device.elements(kind, values));
        let mut wanted = y.clone();
        for (row, place) in elements(&y, m, incy).into_iter().enumerate() {
            let inner = |(at, place): (usize, usize)| {
                let at = if trans == 0 { at * lda + row } else { row * lda + at };
                matrix[at] * x[place]
            };
            let sum: f64 = elements(&x, k, incx).into_iter().enumerate().map(inner).sum();
            wanted[place] = alpha * sum + beta * y[place];
        }
        let (alpha, beta) = (kind.scalar(alpha), kind.scalar(beta));
        macro_rules! call {
            ($name:ident) => {
                AnyCall::$name($name {
                    handle,
                    trans,
                    m: int(rows),
                    n: int(columns),
                    alpha: List::new(&alpha),
                    a: a_at,
                    lda: int(lda),
                    x: x_at,
                    incx,
                    beta: List::new(&beta),
                    y: y_at,
                    incy,
                })
            };
        }
        device
            .put(&if kind == Kind::F32 {
                call!(CublasSgemvV2)
            } else {
                call!(CublasDgemvV2)
            })
            .unwrap();
        close(kind, &device.wide(y_at, kind, y.len()), &wanted, "gemv");
    }
}

#[test]
fn vectors_are_added_scaled_copied_and_summed_as_by_loops() {
    let random = &mut Random(3);
    for round in 0..60 {
        let kind = if round % 2 == 0 { Kind::F32 } else { Kind::F64 };
        let mut device = Device::new();
        let handle = handle(&mut device);
        let count = random.size(1, 50);
        let n = int(count);
        let [incx, incy] = [(); 2].map(|()| [1, 2, -1, -3][random.below(4)]);
        let (x_values, y_values) = (random.numbers(count * 3), random.numbers(count * 3));
        let (xs, ys) = (elements(&x_values, count, incx), elements(&y_values, count, incy));
        let alpha_value = random.number();
        let alpha_bytes = kind.scalar(alpha_value);
        let alpha = List::new(&alpha_bytes);
        let (x, y, z) = (
            device.elements(kind, &x_values),
            device.elements(kind, &y_values),
            device.elements(kind, &y_values),
        );
        macro_rules! put {
            ($single:ident, $double:ident { $($field:ident $(: $value:expr)?),* }) => {
                device.put(&match kind {
                    Kind::F32 => AnyCall::$single($single { handle, n, $($field $(: $value)?),* }),
                    _ => AnyCall::$double($double { handle, n, $($field $(: $value)?),* }),
                }).unwrap()
            };
        }
        macro_rules! ask {
            ($single:ident, $double:ident { $($field:ident),* }) => {
                match kind {
                    Kind::F32 => device.ask(&AnyCall::$single($single { handle, n, $($field),* }), |reply| match reply {
                        AnyReply::$single(reply) => f64::from(f32::from_bits(reply.result)),
                        other => panic!("{other:?}"),
                    }),
                    _ => device.ask(&AnyCall::$double($double { handle, n, $($field),* }), |reply| match reply {
                        AnyReply::$double(reply) => f64::from_bits(reply.result),
                        other => panic!("{other:?}"),
                    }),
                }
            };
        }
        let pairs = || xs.iter().map(|at| x_values[*at]).zip(ys.iter().map(|at| y_values[*at]));
        let dot: f64 = pairs().map(|(x, y)| x * y).sum();
        close(
            kind,
            &[ask!(CublasSdotV2, CublasDdotV2 { x, incx, y, incy })],
            &[dot],
            "dot",
        );
        let norm: f64 = pairs().map(|(x, _)| x * x).sum::<f64>().sqrt();
        close(kind, &[ask!(CublasSnrm2V2, CublasDnrm2V2 { x, incx })], &[norm], "nrm2");
        let sum: f64 = pairs().map(|(x, _)| x.abs()).sum();
        close(kind, &[ask!(CublasSasumV2, CublasDasumV2 { x, incx })], &[sum], "asum");
        let largest = match kind {
            Kind::F32 => device.ask(
                &AnyCall::CublasIsamaxV2(CublasIsamaxV2 { handle, n, x, incx }),
                |reply| match reply {
                    AnyReply::CublasIsamaxV2(reply) => reply.result,
                    other => panic!("{other:?}"),
                },
            ),
            _ => device.ask(
                &AnyCall::CublasIdamaxV2(CublasIdamaxV2 { handle, n, x, incx }),
                |reply| match reply {
                    AnyReply::CublasIdamaxV2(reply) => reply.result,
                    other => panic!("{other:?}"),
                },
            ),
        };
        let most = pairs().map(|(x, _)| x.abs()).fold(0.0, f64::max);
        let wanted = pairs().position(|(x, _)| x.abs() == most).unwrap() + 1;
        assert_eq!(largest, int(wanted));
        put!(
            CublasSaxpyV2,
            CublasDaxpyV2 {
                alpha,
                x,
                incx,
                y,
                incy
            }
        );
        let mut wanted = y_values.clone();
        xs.iter()
            .zip(&ys)
            .for_each(|(x, y)| wanted[*y] += alpha_value * x_values[*x]);
        close(kind, &device.wide(y, kind, count * 3), &wanted, "axpy");
        put!(CublasScopyV2, CublasDcopyV2 { x, incx, y: z, incy });
        let mut wanted = y_values.clone();
        xs.iter().zip(&ys).for_each(|(x, y)| wanted[*y] = x_values[*x]);
        close(kind, &device.wide(z, kind, count * 3), &wanted, "copy");
        put!(CublasSscalV2, CublasDscalV2 { alpha, x, incx });
        let mut wanted = x_values.clone();
        xs.iter().for_each(|x| wanted[*x] *= alpha_value);
        close(kind, &device.wide(x, kind, count * 3), &wanted, "scal");
    }
}

#[test]
fn an_outer_product_is_that_of_loops() {
    let random = &mut Random(4);
    for round in 0..20 {
        let kind = if round % 2 == 0 { Kind::F32 } else { Kind::F64 };
        let mut device = Device::new();
        let handle = handle(&mut device);
        let [m, n] = [(); 2].map(|()| random.size(1, 20));
        let lda = m + random.below(3);
        let (x, y, a) = (random.numbers(m), random.numbers(n), random.numbers(lda * n));
        let alpha = random.number();
        let mut wanted = a.clone();
        (0..m * n).for_each(|at| wanted[at / m * lda + at % m] += alpha * x[at % m] * y[at / m]);
        let [x, y, at] = [&x, &y, &a].map(|values| device.elements(kind, values));
        let alpha = kind.scalar(alpha);
        macro_rules! call {
            ($name:ident) => {
                AnyCall::$name($name {
                    handle,
                    m: int(m),
                    n: int(n),
                    alpha: List::new(&alpha),
                    x,
                    incx: 1,
                    y,
                    incy: 1,
                    a: at,
                    lda: int(lda),
                })
            };
        }
        device
            .put(&if kind == Kind::F32 {
                call!(CublasSgerV2)
            } else {
                call!(CublasDgerV2)
            })
            .unwrap();
        close(kind, &device.wide(at, kind, a.len()), &wanted, "ger");
    }
}

#[test]
fn norms_of_numbers_whose_squares_are_beyond_all() {
    let mut device = Device::new();
    let handle = handle(&mut device);
    let x = device.upload(&[3e300_f64, -4e300]);
    let call = AnyCall::CublasDnrm2V2(CublasDnrm2V2 {
        handle,
        n: 2,
        x,
        incx: 1,
    });
    let norm = device.ask(&call, |reply| match reply {
        AnyReply::CublasDnrm2V2(reply) => f64::from_bits(reply.result),
        other => panic!("{other:?}"),
    });
    assert!((norm / 5e300 - 1.0).abs() < 1e-15, "{norm}");
    for (n, incx, code) in [(1, 0, 1), (i32::MAX, i32::MAX, 1), (i32::MAX, 1, 700), (3, 1, 700)] {
        let call = AnyCall::CublasDnrm2V2(CublasDnrm2V2 { handle, n, x, incx });
        let mut device = Device::new();
        self::handle(&mut device);
        device.upload(&[1.0_f64, 2.0]);
        assert_eq!(device.status(&call), code, "{n} {incx}");
    }
}
