//! cublasLt's products with their epilogues.

use accel_proto::cuda::*;
use accel_proto::{List, Span, SvmAddress};

use crate::device::{Device, Kind, Random, close, int};

/// A number of 64 bits as two words.
fn words(number: u64) -> [i32; 2] {
    let bytes = number.to_le_bytes();
    [0, 4].map(|at| i32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
}

/// What setting an attribute of four bytes puts, or of eight.
fn attribute(function: i32, attribute: i32, value: i32) -> Vec<i32> {
    vec![function, 4, attribute, value, 4, 0]
}

fn long_attribute(function: i32, attribute: i32, value: u64) -> Vec<i32> {
    let [low, high] = words(value);
    vec![function, 5, attribute, low, high, 8, 0]
}

fn layout(kind: Kind, [rows, columns, leading]: [usize; 3], batch: Option<(usize, usize)>) -> Vec<i32> {
    let mut list = vec![parts::CUBLAS_LT_MATRIX_LAYOUT_CREATE, 7, kind.cuda()];
    for size in [rows, columns, leading] {
        list.extend(words(size as u64));
    }
    if let Some((count, stride)) = batch {
        let set = parts::CUBLAS_LT_MATRIX_LAYOUT_SET_ATTRIBUTE;
        list.extend(attribute(set, 5, int(count)));
        list.extend(long_attribute(set, 6, stride as u64));
    }
    list
}

fn description(kind: Kind, transposed: [bool; 2], epilogue: i32, bias: SvmAddress) -> Vec<i32> {
    let compute = if kind == Kind::F64 { 70 } else { 68 };
    let scale = if kind == Kind::F64 { 1 } else { 0 };
    let set = parts::CUBLAS_LT_MATMUL_DESC_SET_ATTRIBUTE;
    let mut list = vec![parts::CUBLAS_LT_MATMUL_DESC_CREATE, 2, compute, scale];
    list.extend(attribute(set, 3, i32::from(transposed[0])));
    list.extend(attribute(set, 4, i32::from(transposed[1])));
    list.extend(attribute(set, 7, epilogue));
    if epilogue & 4 != 0 {
        list.extend(long_attribute(set, 8, bias.0));
    }
    list
}

fn then(epilogue: i32, x: f64) -> f64 {
    match epilogue & !4 {
        2 => x.max(0.0),
        32 => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()),
        _ => x,
    }
}

#[test]
fn products_with_epilogues_are_those_of_loops() {
    let random = &mut Random(41);
    for round in 0..72 {
        let kind = Kind::ALL[round % 4];
        let epilogue = [1, 2, 4, 6, 32, 36][round / 4 % 6];
        let [m, k, n] = [(); 3].map(|()| random.size(1, 20));
        let transposed = [(); 2].map(|()| random.below(2) == 0);
        let stored = |size: [usize; 2], is_transposed: bool| if is_transposed { [size[1], size[0]] } else { size };
        let sizes = [
            stored([m, k], transposed[0]),
            stored([k, n], transposed[1]),
            [m, n],
            [m, n],
        ];
        let batch = if round % 3 == 0 { random.size(2, 3) } else { 1 };
        let leading = sizes.map(|[rows, _]| rows + random.below(3));
        let strides = [0, 1, 2, 3].map(|at: usize| leading[at] * sizes[at][1] + random.below(3));
        let values = strides.map(|stride| random.numbers(stride * batch));
        let bias = random.numbers(m);
        let [alpha, beta] = [random.number(), random.number()];
        let mut wanted = values[3].clone();
        for (matrix, row, column) in
            (0..batch).flat_map(|matrix| (0..m).flat_map(move |row| (0..n).map(move |column| (matrix, row, column))))
        {
            let at = |which: usize, row: usize, column: usize| {
                let (row, column) = if which < 2 && transposed[which] {
                    (column, row)
                } else {
                    (row, column)
                };
                matrix * strides[which] + column * leading[which] + row
            };
            let sum: f64 = (0..k)
                .map(|inner| values[0][at(0, row, inner)] * values[1][at(1, inner, column)])
                .sum();
            let added = if epilogue & 4 != 0 { bias[row] } else { 0.0 };
            let before = alpha * sum + beta * values[2][at(2, row, column)] + added;
            wanted[at(3, row, column)] = then(epilogue, before);
        }
        let mut device = Device::new();
        let [a, b, c, d] = [0, 1, 2, 3].map(|at| device.elements(kind, &values[at]));
        let bias = device.elements(kind, &bias);
        let layouts = [0, 1, 2, 3].map(|at| {
            let several = (batch > 1).then_some((batch, strides[at]));
            layout(kind, [sizes[at][0], sizes[at][1], leading[at]], several)
        });
        let description = description(kind, transposed, epilogue, bias);
        let scalars = [alpha, beta].map(|value| kind.scalar(value));
        let call = AnyCall::CublasLtMatmul(CublasLtMatmul {
            compute_desc: List::new(&description),
            alpha: List::new(&scalars[0]),
            a,
            adesc: List::new(&layouts[0]),
            b,
            bdesc: List::new(&layouts[1]),
            beta: List::new(&scalars[1]),
            c,
            cdesc: List::new(&layouts[2]),
            d,
            ddesc: List::new(&layouts[3]),
            algo: None,
            workspace: SvmAddress::NULL,
            workspace_size_in_bytes: 0,
            stream: accel_proto::Handle::NULL,
        });
        device.put(&call).unwrap();
        close(kind, &device.wide(d, kind, wanted.len()), &wanted, "matmul");
    }
}

#[test]
fn an_algorithm_is_found_for_what_is_computed_alone() {
    let kind = Kind::F32;
    let square = layout(kind, [2, 2, 2], None);
    let mut device = Device::new();
    let mut found = |description: &[i32], a: &[i32]| {
        let other = layout(kind, [2, 2, 2], None);
        let call = AnyCall::CublasLtMatmulAlgoGetHeuristic(CublasLtMatmulAlgoGetHeuristic {
            operation_desc: List::new(description),
            adesc: List::new(a),
            bdesc: List::new(&other),
            cdesc: List::new(&other),
            ddesc: List::new(&other),
            preference: List::new(&[]),
            requested_algo_count: 1,
            reply: Span { offset: 0, length: 0 },
        });
        device.ask(&call, |reply| match reply {
            AnyReply::CublasLtMatmulAlgoGetHeuristic(reply) => (reply.status, reply.return_algo_count),
            other => panic!("{other:?}"),
        })
    };
    let plain = description(kind, [false; 2], 1, SvmAddress::NULL);
    assert_eq!(found(&plain, &square), (0, 1));
    let set = parts::CUBLAS_LT_MATMUL_DESC_SET_ATTRIBUTE;
    for more in [
        attribute(set, 7, 130),
        attribute(set, 2, 1),
        long_attribute(set, 17, 1),
        vec![set, 4, 25, 1, 1, 0],
    ] {
        assert_eq!(
            found(&[plain.clone(), more.clone()].concat(), &square),
            (801, 0),
            "{more:?}"
        );
    }
    let rows = [
        square.clone(),
        attribute(parts::CUBLAS_LT_MATRIX_LAYOUT_SET_ATTRIBUTE, 1, 1),
    ]
    .concat();
    assert_eq!(found(&plain, &rows), (801, 0));
    assert_eq!(found(&plain, &layout(kind, [2, 3, 2], None)), (1, 0));
    assert_eq!(found(&[], &square), (1, 0));
}
