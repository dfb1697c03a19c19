//! Numbers of the libraries: types of elements, the two types that are computed in, and products of matrices.
//!
//! Halves are computed in `f32` and rounded to nearest even when they are written. Knows no call and no memory of a client's.
#![allow(
    unsafe_code,
    reason = "products of matrices are a crate's, which takes addresses and strides"
)]
#![allow(
    clippy::cast_possible_truncation,
    reason = "rounding to a shorter type is what is asked for"
)]

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::Error;

/// What elements in memory are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Type {
    F32,
    F64,
    F16,
    Bf16,
}

impl Type {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// `cudaDataType`.
    pub(crate) fn of_cuda(number: i32) -> Result<Self, Error> {
        match number {
            0 => Ok(Self::F32),
            1 => Ok(Self::F64),
            2 => Ok(Self::F16),
            14 => Ok(Self::Bf16),
            _ => Err(Error::NotComputed("a type other than f32, f64, f16 and bf16")),
        }
    }

    /// `cudnnDataType_t`.
    pub(crate) fn of_cudnn(number: i32) -> Result<Self, Error> {
        match number {
            0 => Ok(Self::F32),
            1 => Ok(Self::F64),
            2 => Ok(Self::F16),
            9 => Ok(Self::Bf16),
            _ => Err(Error::NotComputed("a type other than float, double, half and bfloat16")),
        }
    }
}

/// What is computed in.
pub(crate) trait Real:
    Copy
    + Debug
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    const ONE: Self;
    const LOWEST: Self;

    fn of(value: f64) -> Self;
    fn wide(self) -> f64;

    /// Elements one behind the other.
    fn read(kind: Type, bytes: &[u8], into: &mut [Self]);
    fn write(kind: Type, from: &[Self], bytes: &mut [u8]);

    /// # Safety
    ///
    /// Every element that sizes and strides name is within what is pointed to, and `c` overlaps neither.
    unsafe fn product(
        sizes: [usize; 3],
        alpha: Self,
        a: Raw<Self>,
        b: Raw<Self>,
        beta: Self,
        c: (*mut Self, [isize; 2]),
    );

    fn is_zero(self) -> bool {
        self == Self::default()
    }
}

/// A matrix for the crate that multiplies: an address, and how far the next row and the next column are.
pub(crate) type Raw<T> = (*const T, [isize; 2]);

fn half_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits >> 15) << 31;
    let (exponent, fraction) = (u32::from(bits >> 10 & 31), u32::from(bits & 0x3ff));
    match exponent {
        // A multiple of 2^-24.
        0 => f32::from_bits(sign | (fraction as f32 * 2f32.powi(-24)).to_bits()),
        31 => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
    }
}

fn f32_to_half(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let rest = bits & 0x7fff_ffff;
    sign | match rest {
        0x7f80_0001.. => 0x7fff,
        // From 65520 on the nearest is infinity.
        0x477f_f000.. => 0x7c00,
        // Below 2^-14: multiples of 2^-24, which the addition of 0.5 rounds to, as its last bit is 2^-24.
        ..0x3880_0000 => ((f32::from_bits(rest) + 0.5).to_bits() - 0x3f00_0000) as u16,
        _ => {
            let rounded = rest + 0xfff + (rest >> 13 & 1);
            ((rounded >> 13) - (112 << 10)) as u16
        }
    }
}

fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn f32_to_bf16(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

fn each_in<const N: usize, T>(bytes: &[u8], into: &mut [T], get: impl Fn([u8; N]) -> T) {
    let (chunks, _) = bytes.as_chunks::<N>();
    for (place, chunk) in into.iter_mut().zip(chunks) {
        *place = get(*chunk);
    }
}

fn each_out<const N: usize, T: Copy>(from: &[T], bytes: &mut [u8], put: impl Fn(T) -> [u8; N]) {
    let (chunks, _) = bytes.as_chunks_mut::<N>();
    for (value, chunk) in from.iter().zip(chunks) {
        *chunk = put(*value);
    }
}

macro_rules! real {
    ($type:ident, $product:path) => {
        impl Real for $type {
            const ONE: Self = 1.0;
            const LOWEST: Self = Self::NEG_INFINITY;

            fn of(value: f64) -> Self {
                value as Self
            }

            fn wide(self) -> f64 {
                self.into()
            }

            fn read(kind: Type, bytes: &[u8], into: &mut [Self]) {
                match kind {
                    Type::F32 => each_in(bytes, into, |bytes| f32::from_le_bytes(bytes) as Self),
                    Type::F64 => each_in(bytes, into, |bytes| f64::from_le_bytes(bytes) as Self),
                    Type::F16 => each_in(bytes, into, |bytes| {
                        half_to_f32(u16::from_le_bytes(bytes)) as Self
                    }),
                    Type::Bf16 => each_in(bytes, into, |bytes| {
                        bf16_to_f32(u16::from_le_bytes(bytes)) as Self
                    }),
                }
            }

            fn write(kind: Type, from: &[Self], bytes: &mut [u8]) {
                match kind {
                    Type::F32 => each_out(from, bytes, |value| (value as f32).to_le_bytes()),
                    Type::F64 => each_out(from, bytes, |value| (value as f64).to_le_bytes()),
                    Type::F16 => each_out(from, bytes, |value| f32_to_half(value as f32).to_le_bytes()),
                    Type::Bf16 => each_out(from, bytes, |value| f32_to_bf16(value as f32).to_le_bytes()),
                }
            }

            unsafe fn product(
                [m, k, n]: [usize; 3],
                alpha: Self,
                (a, [rsa, csa]): Raw<Self>,
                (b, [rsb, csb]): Raw<Self>,
                beta: Self,
                (c, [rsc, csc]): (*mut Self, [isize; 2]),
            ) {
                // SAFETY: 1. the caller's elements are there; 2. `c` overlaps nothing.
                unsafe { $product(m, k, n, alpha, a, rsa, csa, b, rsb, csb, beta, c, rsc, csc) }
            }
        }
    };
}

real!(f32, matrixmultiply::sgemm);
real!(f64, matrixmultiply::dgemm);

/// Whether whoever asked for a call is gone, which is looked at within calls that may take long.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stop<'a>(pub(crate) &'a AtomicBool);

impl Stop<'_> {
    #[inline]
    pub(crate) fn check(self) -> Result<(), Error> {
        if self.0.load(Ordering::Relaxed) {
            Err(Error::Stopped)
        } else {
            Ok(())
        }
    }
}

/// Room for so many elements, all of them zero.
pub(crate) fn room<T: Real>(count: usize) -> Result<Vec<T>, Error> {
    let mut room = Vec::new();
    room.try_reserve_exact(count)?;
    room.resize(count, T::default());
    Ok(room)
}

/// A matrix whose elements are at `row * rows + column * columns`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<S> {
    pub(crate) data: S,
    pub(crate) strides: [usize; 2],
}

impl<S> Matrix<S> {
    pub(crate) const fn new(data: S, strides: [usize; 2]) -> Self {
        Self { data, strides }
    }

    fn raw_strides(&self) -> [isize; 2] {
        self.strides.map(|stride| isize::try_from(stride).unwrap_or(isize::MAX))
    }
}

/// Multiplications between two looks at whether the client is there: some tens of milliseconds.
const PIECE: usize = 1 << 29;

/// `c = alpha * a * b + beta * c`, of `m * k` and `k * n` elements. Where `beta` is zero, what `c` had is nothing, not even if it is no number.
pub(crate) fn multiply<T: Real>(
    [m, k, n]: [usize; 3],
    (alpha, a): (T, Matrix<&[T]>),
    b: Matrix<&[T]>,
    (beta, c): (T, Matrix<&mut [T]>),
    stop: Stop<'_>,
) -> Result<(), Error> {
    let last = |[rows, columns]: [usize; 2], [by_row, by_column]: [usize; 2]| {
        let row = rows.checked_sub(1)?.checked_mul(by_row)?;
        columns.checked_sub(1)?.checked_mul(by_column)?.checked_add(row)
    };
    if m == 0 || n == 0 {
        return Ok(());
    }
    let is_there = |sizes, strides, length| last(sizes, strides).is_some_and(|last| last < length);
    let inputs = k == 0 || is_there([m, k], a.strides, a.data.len()) && is_there([k, n], b.strides, b.data.len());
    if !inputs || !is_there([m, n], c.strides, c.data.len()) {
        return Err(Error::Invalid("a matrix that is longer than its memory"));
    }
    let columns = (PIECE / m.max(1) / k.max(1)).clamp(1, n);
    let (a_strides, b_strides, c_strides) = (a.raw_strides(), b.raw_strides(), c.raw_strides());
    for begin in (0..n).step_by(columns) {
        stop.check()?;
        let count = columns.min(n - begin);
        // Where k is zero, nothing of either is looked at.
        let b_at = b
            .data
            .as_ptr()
            .wrapping_add(if k == 0 { 0 } else { begin * b.strides[1] });
        let c_at = &mut c.data[begin * c.strides[1]..];
        // SAFETY: 1. the last element of each was compared with the slice's length, and these are some of its columns; 2. `c` is borrowed
        // alone.
        unsafe {
            T::product(
                [m, k, count],
                alpha,
                (a.data.as_ptr(), a_strides),
                (b_at, b_strides),
                beta,
                (c_at.as_mut_ptr(), c_strides),
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number that a half is, by its definition.
    fn half(bits: u16) -> f64 {
        let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
        match exponent {
            0 => sign * fraction * 2f64.powi(-24),
            31 if fraction == 0.0 => sign * f64::INFINITY,
            31 => f64::NAN,
            _ => sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
        }
    }

    #[test]
    fn halves_are_what_they_are_and_rounded_to_the_nearest() {
        let mut before = 0.0;
        for bits in 0..0x7c00_u16 {
            let value = half(bits);
            assert_eq!(f64::from(half_to_f32(bits)), value);
            assert_eq!(f64::from(half_to_f32(bits | 0x8000)), -value);
            assert_eq!(f32_to_half(value as f32), bits);
            if bits > 0 {
                // Between two: to the even one; a little to either side: to that.
                let middle = ((before + value) / 2.0) as f32;
                let even = if bits & 1 == 0 { bits } else { bits - 1 };
                assert_eq!(f32_to_half(middle), even, "{middle}");
                assert_eq!(f32_to_half(middle.next_down()), bits - 1);
                assert_eq!(f32_to_half(-middle.next_up()), bits | 0x8000);
            }
            before = value;
        }
        assert_eq!(
            [65519.0, 65520.0, f32::INFINITY, 1e30].map(f32_to_half),
            [0x7bff, 0x7c00, 0x7c00, 0x7c00]
        );
        assert!(half_to_f32(f32_to_half(f32::NAN)).is_nan());
        assert!(half_to_f32(0x7c01).is_nan() && half_to_f32(0xfc00) == f32::NEG_INFINITY);
    }

    #[test]
    fn bfloats_are_the_upper_half_rounded_to_the_nearest() {
        for bits in [0_u16, 1, 0x3f80, 0x3f81, 0x7f7f, 0x8001, 0xff80] {
            assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits);
        }
        let between = f32::from_bits(0x3f80_8000);
        assert_eq!(
            [between, between.next_up(), -between.next_down()].map(f32_to_bf16),
            [0x3f80, 0x3f81, 0xbf80]
        );
        assert_eq!(f32_to_bf16(f32::from_bits(0x3f81_8000)), 0x3f82);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7f80_0001))).is_nan());
    }

    #[test]
    fn a_product_within_its_memory_is_right_and_any_other_is_refused() {
        let stop = AtomicBool::new(false);
        let (a, b) = ([1.0_f64, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0_f64, -1.0, 0.5, 2.0, 0.0, 1.0]);
        let multiply = |k, c: &mut [f64], beta, stop: &AtomicBool| {
            let (a, b) = (Matrix::new(&a[..], [3, 1]), Matrix::new(&b[..], [2, 1]));
            super::multiply([2, k, 2], (2.0, a), b, (beta, Matrix::new(c, [1, 2])), Stop(stop))
        };
        let mut c = [f64::NAN; 4];
        multiply(3, &mut c, 0.0, &stop).unwrap();
        // [1 2 3; 4 5 6] * [1 -1; 0.5 2; 0 1], twice, by columns.
        assert_eq!(c, [4.0, 13.0, 12.0, 24.0]);
        multiply(0, &mut c, 0.5, &stop).unwrap();
        assert_eq!(c, [2.0, 6.5, 6.0, 12.0]);
        assert!(matches!(multiply(4, &mut c, 0.0, &stop), Err(Error::Invalid(_))));
        assert!(matches!(multiply(3, &mut c[..3], 0.0, &stop), Err(Error::Invalid(_))));
        stop.store(true, Ordering::Relaxed);
        assert_eq!(multiply(3, &mut c, 0.0, &stop), Err(Error::Stopped));
    }
}
