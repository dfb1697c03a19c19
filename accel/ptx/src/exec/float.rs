//! Floating-point arithmetic and comparisons of all formats.

#![expect(
    clippy::cast_possible_truncation,
    reason = "a register's upper bits are not part of a narrower number, and results are rounded to the instruction's format"
)]

use std::cmp::Ordering;

use super::numbers::{
    BF16, F16, F32, NAN32, fma32, fma32_fast, from_bf16, from_f16, quotient, root, round, sum, to_bf16, to_f16,
};
use super::warp::{Step, Warp};
use super::{Cx, WARP};
use crate::inst::{Float1, Float2, Mode, Reg, Src, Testp};
use crate::types::{Compare, Rounding, Type};

#[inline(always)]
pub(super) fn single(bits: u64) -> f32 {
    f32::from_bits(bits as u32)
}

#[inline(always)]
pub(super) fn flushed(value: f32) -> f32 {
    if value.is_subnormal() {
        0.0f32.copysign(value)
    } else {
        value
    }
}

/// A binary32 as it is kept: there is one NaN.
#[inline(always)]
fn kept(value: f32) -> u64 {
    u64::from(if value.is_nan() { NAN32 } else { value.to_bits() })
}

/// Clamped to 0 to 1; no number is 0.
pub(super) fn saturated(value: f64) -> f64 {
    if value > 0.0 { value.min(1.0) } else { 0.0 }
}

/// An operand as the instruction takes it.
#[inline(always)]
fn taken(m: Mode, bits: u64) -> f32 {
    if m.ftz { flushed(single(bits)) } else { single(bits) }
}

/// Two operands' result in binary32, rounded to the nearest one.
#[inline(always)]
fn nearest(f: Float2, a: f32, b: f32) -> f32 {
    match f {
        Float2::Add => a + b,
        Float2::Sub => a - b,
        Float2::Mul => a * b,
        Float2::Div => a / b,
        // One of the two, and so exact.
        _ => before(f, f64::from(a), f64::from(b)) as f32,
    }
}

/// What the instruction's modifiers make of a binary32 result.
fn finished(m: Mode, mut value: f32) -> u64 {
    if m.sat {
        value = saturated(f64::from(value)) as f32;
    }
    if m.relu && value < 0.0 {
        value = 0.0;
    }
    if m.ftz {
        value = flushed(value);
    }
    kept(value)
}

/// The smaller or larger one: no number loses to a number, and -0 is below +0.
fn extreme(f: Float2, a: f64, b: f64) -> f64 {
    let propagates = matches!(f, Float2::MinNan | Float2::MaxNan);
    if a.is_nan() || b.is_nan() {
        return if propagates || (a.is_nan() && b.is_nan()) {
            f64::NAN
        } else if a.is_nan() {
            b
        } else {
            a
        };
    }
    let below = a < b || (a == b && a.is_sign_negative());
    let least = matches!(f, Float2::Min | Float2::MinNan);
    if below == least { a } else { b }
}

/// Two operands' result before rounding, rounded to odd where it is not exact.
fn before(f: Float2, a: f64, b: f64) -> f64 {
    match f {
        Float2::Add => sum(a, b),
        Float2::Sub => sum(a, -b),
        Float2::Mul => a * b,
        Float2::Div => quotient(a, b),
        Float2::Copysign => b.copysign(a),
        Float2::Min | Float2::Max | Float2::MinNan | Float2::MaxNan => extreme(f, a, b),
    }
}

/// A half of either kind, as binary64.
pub(super) fn half(t: Type, bits: u16) -> f64 {
    if matches!(t, Type::F16 | Type::F16x2) {
        from_f16(bits)
    } else {
        from_bf16(bits)
    }
}

/// Rounds to a half of either kind.
pub(super) fn to_half(t: Type, value: f64, rounding: Rounding) -> u16 {
    if matches!(t, Type::F16 | Type::F16x2) {
        to_f16(round(value, F16, rounding))
    } else {
        to_bf16(round(value, BF16, rounding))
    }
}

/// Carries `f` out on a half, or on both halves of a register.
fn halves<const N: usize>(m: Mode, bits: [u64; N], f: impl Fn([f64; N]) -> f64) -> u64 {
    let one = |shift: u32| {
        let mut value = f(bits.map(|bits| half(m.t, (bits >> shift) as u16)));
        if m.sat {
            value = saturated(value);
        }
        if m.relu && value < 0.0 {
            value = 0.0;
        }
        u64::from(to_half(m.t, value, Rounding::Nearest)) << shift
    };
    one(0) | if m.t.is_packed() { one(16) } else { 0 }
}

impl Warp {
    pub(super) fn fma(&mut self, cx: &Cx<'_>, step: Step, m: Mode, d: Reg, sources: [Src; 3]) {
        match m.t {
            Type::F32 if m.rounding == Rounding::Nearest && !m.ftz && !m.sat => {
                self.fma_plain(cx, step, d, sources);
            }
            Type::F32 if m.rounding == Rounding::Nearest => self.map(cx, step, d, sources, |operands| {
                let [a, b, c] = operands.map(|bits| taken(m, bits));
                finished(m, fma32(a, b, c))
            }),
            Type::F32 => self.map_each(cx, step, d, sources, |operands| {
                let [a, b, c] = operands.map(|bits| taken(m, bits));
                let exact = sum(f64::from(a) * f64::from(b), f64::from(c));
                finished(m, round(exact, F32, m.rounding) as f32)
            }),
            Type::F64 => self.map(cx, step, d, sources, |operands| {
                let [a, b, c] = operands.map(f64::from_bits);
                a.mul_add(b, c).to_bits()
            }),
            _ => self.map_each(cx, step, d, sources, |operands| {
                halves(m, operands, |[a, b, c]| sum(a * b, c))
            }),
        }
    }

    /// In binary32 without modifiers, which is what matrix products are made of.
    fn fma_plain(&mut self, cx: &Cx<'_>, step: Step, d: Reg, sources: [Src; 3]) {
        let mut values = [0; WARP];
        {
            let mut room = [[0; WARP]; 3];
            let [first, second, third] = &mut room;
            let a = self.fetch(cx, step, sources[0], first);
            let b = self.fetch(cx, step, sources[1], second);
            let c = self.fetch(cx, step, sources[2], third);
            let mut doubtful = false;
            for lane in 0..WARP {
                let (value, doubt) = fma32_fast(single(a[lane]), single(b[lane]), single(c[lane]));
                values[lane] = kept(value);
                doubtful |= doubt;
            }
            if doubtful {
                for lane in 0..WARP {
                    values[lane] = kept(fma32(single(a[lane]), single(b[lane]), single(c[lane])));
                }
            }
        }
        self.put(step, d, &values);
    }

    pub(super) fn float2(&mut self, cx: &Cx<'_>, step: Step, (f, m): (Float2, Mode), d: Reg, sources: [Src; 2]) {
        let plain = m.rounding == Rounding::Nearest && !m.ftz && !m.sat;
        match (m.t, f) {
            (Type::F32, Float2::Copysign) => self.map(cx, step, d, sources, |[a, b]| {
                u64::from(single(b).copysign(single(a)).to_bits())
            }),
            (Type::F32, Float2::Add) if plain => self.map(cx, step, d, sources, |[a, b]| kept(single(a) + single(b))),
            (Type::F32, Float2::Sub) if plain => self.map(cx, step, d, sources, |[a, b]| kept(single(a) - single(b))),
            (Type::F32, Float2::Mul) if plain => self.map(cx, step, d, sources, |[a, b]| kept(single(a) * single(b))),
            (Type::F32, Float2::Div) if plain => self.map(cx, step, d, sources, |[a, b]| kept(single(a) / single(b))),
            (Type::F32, _) if m.rounding == Rounding::Nearest => self.map(cx, step, d, sources, |operands| {
                let [a, b] = operands.map(|bits| taken(m, bits));
                finished(m, nearest(f, a, b))
            }),
            (Type::F32, _) => self.map_each(cx, step, d, sources, |operands| {
                let [a, b] = operands.map(|bits| f64::from(taken(m, bits)));
                finished(m, round(before(f, a, b), F32, m.rounding) as f32)
            }),
            (Type::F64, Float2::Add) => self.doubles(cx, step, d, sources, |a, b| a + b),
            (Type::F64, Float2::Sub) => self.doubles(cx, step, d, sources, |a, b| a - b),
            (Type::F64, Float2::Mul) => self.doubles(cx, step, d, sources, |a, b| a * b),
            (Type::F64, Float2::Div) => self.doubles(cx, step, d, sources, |a, b| a / b),
            (Type::F64, Float2::Copysign) => self.doubles(cx, step, d, sources, |a, b| b.copysign(a)),
            (Type::F64, _) => self.doubles(cx, step, d, sources, |a, b| extreme(f, a, b)),
            _ => self.map_each(cx, step, d, sources, |operands| {
                halves(m, operands, |[a, b]| before(f, a, b))
            }),
        }
    }

    fn doubles(&mut self, cx: &Cx<'_>, step: Step, d: Reg, sources: [Src; 2], f: impl Fn(f64, f64) -> f64) {
        self.map(cx, step, d, sources, |[a, b]| {
            f(f64::from_bits(a), f64::from_bits(b)).to_bits()
        });
    }

    pub(super) fn float1(&mut self, cx: &Cx<'_>, step: Step, (f, m): (Float1, Mode), d: Reg, a: Src) {
        // Signs are bits, and no arithmetic.
        let signs = match m.t {
            Type::F64 => 1 << 63,
            Type::F32 => 1 << 31,
            Type::F16x2 | Type::Bf16x2 => 0x8000_8000,
            _ => 0x8000,
        };
        match (f, m.t) {
            (Float1::Neg | Float1::Abs, Type::F32) => self.map(cx, step, d, [a], |[a]| {
                let value = taken(m, a);
                let bits = u64::from(value.to_bits());
                if f == Float1::Neg { bits ^ signs } else { bits & !signs }
            }),
            (Float1::Neg, _) => self.map(cx, step, d, [a], |[a]| a ^ signs),
            (Float1::Abs, _) => self.map(cx, step, d, [a], |[a]| a & !signs),
            (_, Type::F64) => self.map_each(cx, step, d, [a], |[a]| unary(f, f64::from_bits(a)).to_bits()),
            (Float1::Sqrt | Float1::Rcp, Type::F32) if m.rounding != Rounding::Nearest => {
                self.map_each(cx, step, d, [a], |[a]| {
                    let a = f64::from(taken(m, a));
                    let exact = if f == Float1::Sqrt { root(a) } else { quotient(1.0, a) };
                    finished(m, round(exact, F32, m.rounding) as f32)
                })
            }
            (Float1::Sqrt, Type::F32) => self.map(cx, step, d, [a], |[a]| finished(m, taken(m, a).sqrt())),
            (_, Type::F32) => self.map_each(cx, step, d, [a], |[a]| {
                let a = taken(m, a);
                finished(m, unary(f, f64::from(a)) as f32)
            }),
            _ => self.map_each(cx, step, d, [a], |operands| halves(m, operands, |[a]| unary(f, a))),
        }
    }

    pub(super) fn testp(&mut self, cx: &Cx<'_>, step: Step, (kind, t): (Testp, Type), d: Reg, a: Src) {
        let held = self.test(cx, step, [a], |[a]| {
            let (value, subnormal, normal) = if t == Type::F64 {
                let value = f64::from_bits(a);
                (value, value.is_subnormal(), value.is_normal())
            } else {
                let value = single(a);
                (f64::from(value), value.is_subnormal(), value.is_normal())
            };
            match kind {
                Testp::Finite => value.is_finite(),
                Testp::Infinite => value.is_infinite(),
                Testp::Number => !value.is_nan(),
                Testp::NotANumber => value.is_nan(),
                Testp::Normal => normal,
                Testp::Subnormal => subnormal,
            }
        });
        self.set_pred(step, d, held);
    }

    /// A bit for each thread whose numbers compare as is asked.
    pub(super) fn compare(
        &self,
        cx: &Cx<'_>,
        step: Step,
        (cmp, t, ftz): (Compare, Type, bool),
        sources: [Src; 2],
    ) -> u32 {
        match t {
            Type::F32 => self.test(cx, step, sources, |operands| {
                let [a, b] = operands.map(|bits| if ftz { flushed(single(bits)) } else { single(bits) });
                cmp.holds(a.partial_cmp(&b))
            }),
            Type::F64 => self.test(cx, step, sources, |[a, b]| {
                cmp.holds(f64::from_bits(a).partial_cmp(&f64::from_bits(b)))
            }),
            Type::F16 | Type::Bf16 | Type::F16x2 | Type::Bf16x2 => {
                self.test(cx, step, sources, |[a, b]| cmp.holds(compared(t, a as u16, b as u16)))
            }
            Type::S32 => self.ordered(cx, step, cmp, sources, |bits| (bits as u32).cast_signed()),
            Type::S16 => self.ordered(cx, step, cmp, sources, |bits| (bits as u16).cast_signed()),
            Type::S64 => self.ordered(cx, step, cmp, sources, u64::cast_signed),
            Type::U16 | Type::B16 => self.ordered(cx, step, cmp, sources, |bits| bits as u16),
            Type::U64 | Type::B64 => self.ordered(cx, step, cmp, sources, |bits| bits),
            _ => self.ordered(cx, step, cmp, sources, |bits| bits as u32),
        }
    }

    #[inline(always)]
    fn ordered<T: Ord>(&self, cx: &Cx<'_>, step: Step, cmp: Compare, sources: [Src; 2], of: impl Fn(u64) -> T) -> u32 {
        match cmp {
            Compare::Eq => self.test(cx, step, sources, |[a, b]| of(a) == of(b)),
            Compare::Ne => self.test(cx, step, sources, |[a, b]| of(a) != of(b)),
            Compare::Lt => self.test(cx, step, sources, |[a, b]| of(a) < of(b)),
            Compare::Le => self.test(cx, step, sources, |[a, b]| of(a) <= of(b)),
            Compare::Gt => self.test(cx, step, sources, |[a, b]| of(a) > of(b)),
            _ => self.test(cx, step, sources, |[a, b]| of(a) >= of(b)),
        }
    }

    /// A comparison whose answer is a number: all ones, or 1.0 in a floating-point format.
    pub(super) fn set(
        &mut self,
        cx: &Cx<'_>,
        step: Step,
        (cmp, t, to, ftz): (Compare, Type, Type, bool),
        d: Reg,
        sources: [Src; 2],
    ) {
        let yes = match to {
            Type::F32 => u64::from(1f32.to_bits()),
            Type::F16 | Type::F16x2 => 0x3c00,
            Type::Bf16 | Type::Bf16x2 => 0x3f80,
            _ => u64::MAX >> (64 - 8 * to.bytes()),
        };
        if t.is_packed() {
            let upper = |bits: u64| (bits >> 16) as u16;
            self.map(cx, step, d, sources, |[a, b]| {
                let low = cmp.holds(compared(t, a as u16, b as u16));
                let high = cmp.holds(compared(t, upper(a), upper(b)));
                (if low { yes } else { 0 }) | (if high { yes << 16 } else { 0 })
            });
            return;
        }
        let held = self.compare(cx, step, (cmp, t, ftz), sources);
        let values = super::warp::row(|lane| if held >> lane & 1 == 1 { yes } else { 0 });
        self.put(step, d, &values);
    }
}

fn compared(t: Type, a: u16, b: u16) -> Option<Ordering> {
    half(t, a).partial_cmp(&half(t, b))
}

fn unary(f: Float1, a: f64) -> f64 {
    match f {
        Float1::Neg => -a,
        Float1::Abs => a.abs(),
        Float1::Sqrt => a.sqrt(),
        Float1::Rcp => 1.0 / a,
        Float1::Rsqrt => 1.0 / a.sqrt(),
        Float1::Sin => a.sin(),
        Float1::Cos => a.cos(),
        Float1::Ex2 => a.exp2(),
        Float1::Lg2 => a.log2(),
        Float1::Tanh => a.tanh(),
    }
}
