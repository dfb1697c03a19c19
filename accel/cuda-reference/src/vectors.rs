//! cuBLAS' operations on vectors. As in BLAS, a vector with a negative distance is taken from behind.

use accel_proto::cuda::{AnyCall, AnyReply};
use accel_proto::cuda::{
    CublasDasumV2Reply, CublasDdotV2Reply, CublasDnrm2V2Reply, CublasIdamaxV2Reply, CublasIsamaxV2Reply,
    CublasSasumV2Reply, CublasSdotV2Reply, CublasSnrm2V2Reply,
};
use accel_proto::{List, SvmAddress};

use crate::Error;
use crate::blas::{Operand, Vector};
use crate::descriptor::count;
use crate::memory::Memory;
use crate::numeric::{Real, Type};
use crate::tensor::scalar;

/// A vector as a call names it. Fewer than one element are none (BLAS).
fn vector(kind: Type, elements: i32, (at, step): (SvmAddress, i32)) -> Vector {
    Vector {
        at,
        kind,
        count: usize::try_from(elements).unwrap_or_default(),
        step,
    }
}

macro_rules! x {
    ($call:ident, $kind:ident) => {
        vector(Type::$kind, $call.n, ($call.x, $call.incx))
    };
}

macro_rules! y {
    ($call:ident, $kind:ident) => {
        vector(Type::$kind, $call.n, ($call.y, $call.incy))
    };
}

/// Carries a call out if it is one of those that write.
pub(crate) fn change(call: &AnyCall<'_>, memory: &mut Memory) -> Option<Result<(), Error>> {
    Some(match call {
        AnyCall::CublasSaxpyV2(call) => axpy::<f32>(&call.alpha, [x!(call, F32), y!(call, F32)], memory),
        AnyCall::CublasDaxpyV2(call) => axpy::<f64>(&call.alpha, [x!(call, F64), y!(call, F64)], memory),
        AnyCall::CublasScopyV2(call) => copy::<f32>([x!(call, F32), y!(call, F32)], memory),
        AnyCall::CublasDcopyV2(call) => copy::<f64>([x!(call, F64), y!(call, F64)], memory),
        AnyCall::CublasSscalV2(call) => scale::<f32>(&call.alpha, x!(call, F32), memory),
        AnyCall::CublasDscalV2(call) => scale::<f64>(&call.alpha, x!(call, F64), memory),
        AnyCall::CublasSgerV2(call) => {
            let x = vector(Type::F32, call.m, (call.x, call.incx));
            outer::<f32>(&call.alpha, [x, y!(call, F32)], (call.a, call.lda), memory)
        }
        AnyCall::CublasDgerV2(call) => {
            let x = vector(Type::F64, call.m, (call.x, call.incx));
            outer::<f64>(&call.alpha, [x, y!(call, F64)], (call.a, call.lda), memory)
        }
        _ => return None,
    })
}

/// The reply to a call if it is one of those that have a number as their result.
pub(crate) fn ask(call: &AnyCall<'_>, memory: &Memory) -> Option<Result<AnyReply<'static>, Error>> {
    /// A reply with a result that is made of what was computed.
    macro_rules! reply {
        ($name:ident, $reply:ident, $result:expr, $as:expr) => {
            $result.map(|result| {
                AnyReply::$name($reply {
                    status: 0,
                    result: $as(result),
                })
            })
        };
    }
    let place = |place: i32| place;
    Some(match call {
        AnyCall::CublasSdotV2(call) => {
            let sum = dot([x!(call, F32), y!(call, F32)], memory);
            reply!(CublasSdotV2, CublasSdotV2Reply, sum, single)
        }
        AnyCall::CublasDdotV2(call) => {
            let sum = dot([x!(call, F64), y!(call, F64)], memory);
            reply!(CublasDdotV2, CublasDdotV2Reply, sum, f64::to_bits)
        }
        AnyCall::CublasSnrm2V2(call) => {
            reply!(CublasSnrm2V2, CublasSnrm2V2Reply, norm(x!(call, F32), memory), single)
        }
        AnyCall::CublasDnrm2V2(call) => {
            reply!(
                CublasDnrm2V2,
                CublasDnrm2V2Reply,
                norm(x!(call, F64), memory),
                f64::to_bits
            )
        }
        AnyCall::CublasSasumV2(call) => {
            reply!(
                CublasSasumV2,
                CublasSasumV2Reply,
                magnitudes(x!(call, F32), memory),
                single
            )
        }
        AnyCall::CublasDasumV2(call) => {
            reply!(
                CublasDasumV2,
                CublasDasumV2Reply,
                magnitudes(x!(call, F64), memory),
                f64::to_bits
            )
        }
        AnyCall::CublasIsamaxV2(call) => {
            reply!(
                CublasIsamaxV2,
                CublasIsamaxV2Reply,
                largest(x!(call, F32), memory),
                place
            )
        }
        AnyCall::CublasIdamaxV2(call) => {
            reply!(
                CublasIdamaxV2,
                CublasIdamaxV2Reply,
                largest(x!(call, F64), memory),
                place
            )
        }
        _ => return None,
    })
}

/// The bits of the nearest single precision number.
fn single(value: f64) -> u32 {
    f32::of(value).to_bits()
}

fn axpy<T: Real>(alpha: &List<'_, u8>, [x, y]: [Vector; 2], memory: &mut Memory) -> Result<(), Error> {
    let (alpha, mut values) = (scalar::<T>(alpha)?, y.read::<T>(memory)?);
    for (value, x) in values.iter_mut().zip(x.read::<T>(memory)?) {
        *value += alpha * x;
    }
    y.write(memory, values)
}

fn copy<T: Real>([x, y]: [Vector; 2], memory: &mut Memory) -> Result<(), Error> {
    let values = x.read::<T>(memory)?;
    y.write(memory, values)
}

fn scale<T: Real>(alpha: &List<'_, u8>, x: Vector, memory: &mut Memory) -> Result<(), Error> {
    let (alpha, mut values) = (scalar::<T>(alpha)?, x.read::<T>(memory)?);
    values.iter_mut().for_each(|value| *value = *value * alpha);
    x.write(memory, values)
}

fn dot([x, y]: [Vector; 2], memory: &Memory) -> Result<f64, Error> {
    let (x, y) = (x.read::<f64>(memory)?, y.read::<f64>(memory)?);
    Ok(x.iter().zip(&y).map(|(x, y)| x * y).sum())
}

/// By the largest element, so that no square is beyond what a number can be.
fn norm(x: Vector, memory: &Memory) -> Result<f64, Error> {
    let values = x.read::<f64>(memory)?;
    let most = values.iter().fold(0.0_f64, |most, value| most.max(value.abs()));
    if most == 0.0 || !most.is_finite() {
        return Ok(values.iter().map(|value| value.abs()).sum());
    }
    Ok(values.iter().map(|value| (value / most).powi(2)).sum::<f64>().sqrt() * most)
}

fn magnitudes(x: Vector, memory: &Memory) -> Result<f64, Error> {
    Ok(x.read::<f64>(memory)?.iter().map(|value| value.abs()).sum())
}

/// The place, from one on, of the first of the elements that are largest; zero if there is none.
fn largest(x: Vector, memory: &Memory) -> Result<i32, Error> {
    let mut found = (0, f64::NEG_INFINITY);
    for (place, value) in (1..).zip(x.read::<f64>(memory)?) {
        if value.abs() > found.1 {
            found = (place, value.abs());
        }
    }
    Ok(found.0)
}

/// A matrix plus alpha times a column times a row.
fn outer<T: Real>(
    alpha: &List<'_, u8>,
    [x, y]: [Vector; 2],
    (at, leading): (SvmAddress, i32),
    memory: &mut Memory,
) -> Result<(), Error> {
    let matrix = Operand {
        at,
        kind: x.kind,
        leading: count(leading)?,
        is_transposed: false,
        stride: 0,
    };
    let sizes = [x.count, y.count];
    let alpha = scalar::<T>(alpha)?;
    let mut values = matrix.read::<T>(memory, 0, sizes)?;
    if values.is_empty() {
        return Ok(());
    }
    let (rows, columns) = (x.read::<T>(memory)?, y.read::<T>(memory)?);
    for (column, y) in values.chunks_exact_mut(rows.len()).zip(columns) {
        column
            .iter_mut()
            .zip(&rows)
            .for_each(|(place, x)| *place += alpha * *x * y);
    }
    matrix.write(memory, 0, sizes, &values)
}
