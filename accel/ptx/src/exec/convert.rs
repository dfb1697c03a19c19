//! Conversions between types.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "that is what conversions do, and how is said where it is done"
)]

use super::Cx;
use super::float::{flushed, half, saturated, single, to_half};
use super::numbers::{F32, NAN32, odd, round, whole};
use super::warp::{Step, Warp};
use crate::inst::{Convert, Reg, Src};
use crate::types::{Rounding, Type};

impl Warp {
    pub(super) fn convert(&mut self, cx: &Cx<'_>, step: Step, c: Convert, d: Reg, a: Src) {
        match (c.from, c.to) {
            (Type::U32 | Type::B32, Type::U64 | Type::S64 | Type::B64) if !c.sat => {
                self.map(cx, step, d, [a], |[a]| a & 0xffff_ffff);
            }
            (Type::S32, Type::U64 | Type::S64 | Type::B64) if !c.sat => {
                self.map(cx, step, d, [a], |[a]| {
                    i64::from((a as u32).cast_signed()).cast_unsigned()
                });
            }
            (Type::S32, Type::F32) if c.rounding == Rounding::Nearest && !c.sat => {
                self.map(cx, step, d, [a], |[a]| {
                    u64::from(((a as u32).cast_signed() as f32).to_bits())
                });
            }
            _ => self.map_each(cx, step, d, [a], |[a]| converted(c, a)),
        }
    }

    /// Two binary32 to a register of two halves: the first source becomes the upper one.
    pub(super) fn convert_pair(&mut self, cx: &Cx<'_>, step: Step, c: Convert, d: Reg, sources: [Src; 2]) {
        self.map_each(cx, step, d, sources, |[upper, lower]| {
            let one = |bits: u64| u64::from(to_half(c.to, clamped(c, f64::from(single(bits))), c.rounding));
            one(upper) << 16 | one(lower)
        });
    }
}

fn clamped(c: Convert, mut value: f64) -> f64 {
    if c.sat {
        value = saturated(value);
    }
    if c.relu && (value < 0.0 || value.is_nan()) {
        value = if value.is_nan() { value } else { 0.0 };
    }
    value
}

/// An integer's value.
fn integer(t: Type, bits: u64) -> i128 {
    let width = 8 * t.bytes();
    let shifted = bits << (64 - width);
    if t.is_signed() {
        i128::from(shifted.cast_signed() >> (64 - width))
    } else {
        i128::from(shifted >> (64 - width))
    }
}

/// The least and greatest number of an integer type.
const fn range(t: Type) -> (i128, i128) {
    let width = 8 * t.bytes();
    if t.is_signed() {
        (-(1i128 << (width - 1)), (1i128 << (width - 1)) - 1)
    } else {
        (0, (1i128 << width) - 1)
    }
}

fn converted(c: Convert, bits: u64) -> u64 {
    if c.from.is_float() {
        let value = match c.from {
            Type::F64 => f64::from_bits(bits),
            Type::F32 => f64::from(if c.ftz { flushed(single(bits)) } else { single(bits) }),
            _ => half(c.from, bits as u16),
        };
        return if c.to.is_float() {
            between(c, value)
        } else {
            to_integer(c, value)
        };
    }
    let value = integer(c.from, bits);
    if c.to.is_float() {
        return from_integer(c, value);
    }
    let (least, most) = range(c.to);
    let value = if c.sat { value.clamp(least, most) } else { value };
    // Bits beyond the type are its sign, or nothing: a wider register has the number, too.
    let kept = value as u64;
    let width = 8 * c.to.bytes();
    let shifted = kept << (64 - width);
    if c.to.is_signed() {
        (shifted.cast_signed() >> (64 - width)).cast_unsigned()
    } else {
        shifted >> (64 - width)
    }
}

fn to_integer(c: Convert, value: f64) -> u64 {
    if value.is_nan() {
        return 0;
    }
    let (least, most) = range(c.to);
    // Beyond the type's range it is the nearest number of the type.
    let value = (whole(value, c.rounding) as i128).clamp(least, most);
    value as u64
}

fn from_integer(c: Convert, value: i128) -> u64 {
    let nearest = value as f64;
    let error = (value - nearest as i128) as f64;
    match c.to {
        Type::F64 => toward(nearest, error, c.rounding).to_bits(),
        Type::F32 => {
            let rounded = round(odd(nearest, error), F32, c.rounding);
            u64::from((clamped(c, rounded) as f32).to_bits())
        }
        _ => u64::from(to_half(c.to, clamped(c, odd(nearest, error)), c.rounding)),
    }
}

/// The neighbour of `nearest` that the rounding wants, where `error` is what `nearest` lacks.
fn toward(nearest: f64, error: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Down if error < 0.0 => nearest.next_down(),
        Rounding::Up if error > 0.0 => nearest.next_up(),
        Rounding::Zero if error < 0.0 && nearest > 0.0 => nearest.next_down(),
        Rounding::Zero if error > 0.0 && nearest < 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

fn between(c: Convert, value: f64) -> u64 {
    let value = if c.whole { whole(value, c.rounding) } else { value };
    let value = clamped(c, value);
    match c.to {
        Type::F64 => value.to_bits(),
        Type::F32 => {
            let rounded = if c.whole || c.rounding == Rounding::Nearest {
                value as f32
            } else {
                round(value, F32, c.rounding) as f32
            };
            let rounded = if c.ftz { flushed(rounded) } else { rounded };
            u64::from(if rounded.is_nan() { NAN32 } else { rounded.to_bits() })
        }
        _ => u64::from(to_half(
            c.to,
            value,
            if c.whole { Rounding::Nearest } else { c.rounding },
        )),
    }
}
