//! Numbers: halves, directed roundings, what sums and products are before they are rounded. Pure functions; knows no register.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "conversions between formats of numbers are what this file is about"
)]

use crate::types::Rounding;

/// The NaN that PTX's binary32 arithmetic makes.
pub(super) const NAN32: u32 = 0x7fff_ffff;

/// A binary format, by its precision.
#[derive(Clone, Copy)]
pub(super) struct Format {
    /// Bits after the point.
    fraction: i32,
    /// The least exponent of a normal number.
    least: i32,
    /// The greatest number.
    max: f64,
}

pub(super) const F16: Format = Format {
    fraction: 10,
    least: -14,
    max: 65504.0,
};
pub(super) const BF16: Format = Format {
    fraction: 7,
    least: -126,
    max: f32::from_bits(0x7f7f_0000) as f64,
};
pub(super) const F32: Format = Format {
    fraction: 23,
    least: -126,
    max: f32::MAX as f64,
};

/// `2^exponent`, for exponents of normal binary64 numbers.
fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// To a whole number.
pub(super) fn whole(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}

/// The number of the format that `value` is rounded to.
pub(super) fn round(value: f64, format: Format, rounding: Rounding) -> f64 {
    if !value.is_finite() || value == 0.0 {
        return value;
    }
    let exponent = ((value.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let step = power(exponent.max(format.least) - format.fraction);
    let rounded = whole(value / step, rounding) * step;
    if rounded.abs() <= format.max {
        return if rounded == 0.0 {
            0.0f64.copysign(value)
        } else {
            rounded
        };
    }
    let infinite = match rounding {
        Rounding::Nearest => true,
        Rounding::Zero => false,
        Rounding::Down => value < 0.0,
        Rounding::Up => value > 0.0,
    };
    (if infinite { f64::INFINITY } else { format.max }).copysign(value)
}

/// `sum` with its last bit set if it is not exact (`error` is what is missing): rounding that once more to fewer bits is as
/// rounding the exact number.
#[inline(always)]
pub(super) fn odd(sum: f64, error: f64) -> f64 {
    let bits = sum.to_bits();
    let inexact = error != 0.0 && sum.is_finite() && bits & 1 == 0 && sum != 0.0;
    let outwards = (error > 0.0) == (sum > 0.0);
    let other = if outwards {
        bits.wrapping_add(1)
    } else {
        bits.wrapping_sub(1)
    };
    f64::from_bits(if inexact { other } else { bits })
}

/// A sum, rounded to odd.
#[inline(always)]
pub(super) fn sum(a: f64, b: f64) -> f64 {
    let sum = a + b;
    let part = sum - a;
    let error = (a - (sum - part)) + (b - part);
    odd(sum, error)
}

/// A quotient, rounded to odd; good for operands of binary32 and less.
pub(super) fn quotient(a: f64, b: f64) -> f64 {
    let quotient = a / b;
    if !quotient.is_finite() || b.is_infinite() {
        return quotient;
    }
    odd(quotient, (-quotient).mul_add(b, a) / b)
}

/// A square root, rounded to odd; good for operands of binary32 and less.
pub(super) fn root(a: f64) -> f64 {
    let root = a.sqrt();
    odd(root, (-root).mul_add(root, a))
}

/// `a * b + c` in binary32, and whether that may have been rounded twice: the product of two binary32 is exact in binary64, so the sum
/// is rounded to binary64 and then to binary32. That is once too often only where the first made a number halfway between two
/// binary32 ([`fma32`] knows which is right), or where the second makes a subnormal one.
#[inline(always)]
pub(super) fn fma32_fast(a: f32, b: f32, c: f32) -> (f32, bool) {
    let sum = f64::from(a) * f64::from(b) + f64::from(c);
    let bits = sum.to_bits();
    let halfway = (bits as u32) << 3 == 1 << 31;
    // Zero is exact.
    let small = (bits >> 52) as u32 & 0x7ff <= 1023 - 126 && sum != 0.0;
    (sum as f32, halfway | small)
}

/// `a * b + c` in binary32, rounded once.
pub(super) fn fma32(a: f32, b: f32, c: f32) -> f32 {
    sum(f64::from(a) * f64::from(b), f64::from(c)) as f32
}

pub(super) fn from_f16(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let fraction = f64::from(bits & 0x3ff);
    let value = match (bits >> 10) & 0x1f {
        0 => fraction * power(-24),
        31 if fraction == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        exponent => (1024.0 + fraction) * power(i32::from(exponent) - 25),
    };
    sign * value
}

/// Of a number that the format has.
pub(super) fn to_f16(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    let size = value.abs();
    if size.is_nan() {
        return 0x7fff;
    }
    if size > F16.max {
        return sign | 0x7c00;
    }
    if size < power(-14) {
        return sign | (size * power(24)) as u16;
    }
    let exponent = ((size.to_bits() >> 52) & 0x7ff) as i32 - 1023;
    let fraction = (size.to_bits() >> 42) as u16 & 0x3ff;
    sign | (((exponent + 15) as u16) << 10) | fraction
}

pub(super) fn from_bf16(bits: u16) -> f64 {
    f64::from(f32::from_bits(u32::from(bits) << 16))
}

/// Of a number that the format has.
pub(super) fn to_bf16(value: f64) -> u16 {
    if value.is_nan() {
        return 0x7fff;
    }
    ((value as f32).to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_what_it_was_after_both_ways() {
        for bits in 0..=u16::MAX {
            let value = from_f16(bits);
            if value.is_nan() {
                continue;
            }
            assert_eq!(to_f16(round(value, F16, Rounding::Nearest)), bits);
            let brain = from_bf16(bits);
            if !brain.is_nan() {
                assert_eq!(to_bf16(round(brain, BF16, Rounding::Down)), bits);
            }
        }
    }

    #[test]
    fn rounding_to_binary32_is_the_processors() {
        let mut state = 1u64;
        for _ in 0..100_000 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let exponent = 1023 - 160 + (state >> 33) % 300;
            let value = f64::from_bits((state & 0x800f_ffff_ffff_ffff) | (exponent << 52));
            let nearest = value as f32;
            assert_eq!(round(value, F32, Rounding::Nearest) as f32, nearest, "{value:e}");
            let (down, up) = (round(value, F32, Rounding::Down), round(value, F32, Rounding::Up));
            assert!(down <= value && value <= up, "{value:e}: {down:e} {up:e}");
            assert!(down == up || (down as f32).next_up() == up as f32 || up.is_infinite() || down.is_infinite());
        }
    }

    #[test]
    fn a_product_and_a_sum_are_rounded_once() {
        // Half of the last place, and a little more or less: rounding in two steps loses what decides.
        let (a, b) = (1.0f32 + f32::EPSILON, 1.0f32 - f32::EPSILON / 2.0);
        for c in [
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE,
            1e-30,
            3.0e-8,
            5.960_464_5e-8,
            -1.0,
        ] {
            assert_eq!(fma32(a, b, c), a.mul_add(b, c), "{c:e}");
        }
        let mut state = 7u64;
        for _ in 0..100_000 {
            let mut next = || {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let exponent = 100 + (state >> 40) as u32 % 54;
                f32::from_bits((((state >> 20) as u32) & 0x807f_ffff) | (exponent << 23))
            };
            let (a, b, c) = (next(), next(), next());
            assert_eq!(fma32(a, b, c), a.mul_add(b, c), "{a:e} {b:e} {c:e}");
            let (fast, doubtful) = fma32_fast(a, b, c);
            assert!(doubtful || fast == a.mul_add(b, c), "{a:e} {b:e} {c:e}");
        }
    }

    #[test]
    fn directed_quotients_and_roots_enclose_the_exact_ones() {
        for (a, b) in [(1.0, 3.0), (-1.0, 3.0), (2.0, 7.0), (10.0, -3.0)] {
            let down = round(quotient(a, b), F32, Rounding::Down) as f32;
            let up = round(quotient(a, b), F32, Rounding::Up) as f32;
            assert_eq!(down.next_up(), up);
            assert!(f64::from(down) < a / b && a / b < f64::from(up));
        }
        assert_eq!(round(root(4.0), F32, Rounding::Up), 2.0);
        assert!(round(root(2.0), F32, Rounding::Down) < 2f64.sqrt());
    }
}
