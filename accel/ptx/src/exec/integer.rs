//! Integers and bits. Every function has an answer for every operand: what PTX leaves open is what NVIDIA's processors are
//! documented to give, or zero.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "a register's upper bits are not part of a narrower number, and signs are a matter of the type"
)]

use super::Cx;
use super::warp::{Step, Warp};
use crate::inst::{Carry, Int, Int1, Int2, Int3, Reg, Src};

/// An integer type of PTX.
trait Word: Copy + Ord {
    const BITS: u32;
    const SIGNED: bool;
    fn get(bits: u64) -> Self;
    fn put(self) -> u64;
    fn wide(self) -> i128;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn rem(self, other: Self) -> Self;
    fn shr(self, by: u32) -> Self;
}

macro_rules! word {
    ($t:ty, $unsigned:ty, $signed:expr) => {
        impl Word for $t {
            const BITS: u32 = <$t>::BITS;
            const SIGNED: bool = $signed;
            #[inline(always)]
            fn get(bits: u64) -> Self {
                bits as Self
            }
            #[inline(always)]
            fn put(self) -> u64 {
                u64::from(self as $unsigned)
            }
            #[inline(always)]
            fn wide(self) -> i128 {
                i128::from(self)
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                if other == 0 { !0 } else { self.wrapping_div(other) }
            }
            #[inline(always)]
            fn rem(self, other: Self) -> Self {
                if other == 0 {
                    self
                } else {
                    self.wrapping_rem(other)
                }
            }
            #[inline(always)]
            fn shr(self, by: u32) -> Self {
                let most = Self::BITS - 1;
                if $signed || by <= most {
                    self >> by.min(most)
                } else {
                    0
                }
            }
        }
    };
}

word!(u16, u16, false);
word!(u32, u32, false);
word!(u64, u64, false);
word!(i16, u16, true);
word!(i32, u32, true);
word!(i64, u64, true);

/// Calls a generic method with the type that the instruction has.
macro_rules! by_type {
    ($t:expr, $self:ident . $method:ident ( $($argument:expr),* )) => {
        match $t {
            Int::U16 => $self.$method::<u16>($($argument),*),
            Int::U32 => $self.$method::<u32>($($argument),*),
            Int::U64 => $self.$method::<u64>($($argument),*),
            Int::S16 => $self.$method::<i16>($($argument),*),
            Int::S32 => $self.$method::<i32>($($argument),*),
            Int::S64 => $self.$method::<i64>($($argument),*),
        }
    };
}

/// The bits of a type, from the lowest.
const fn ones(bits: u32) -> u64 {
    if bits == 0 { 0 } else { u64::MAX >> (64 - bits) }
}

impl Warp {
    pub(super) fn int1(&mut self, cx: &Cx<'_>, step: Step, (f, t): (Int1, Int), d: Reg, a: Src) {
        by_type!(t, self.one(cx, step, f, d, a));
    }

    pub(super) fn int2(&mut self, cx: &Cx<'_>, step: Step, (f, t): (Int2, Int), d: Reg, sources: [Src; 2]) {
        by_type!(t, self.two(cx, step, f, d, sources));
    }

    pub(super) fn int3(&mut self, cx: &Cx<'_>, step: Step, (f, t): (Int3, Int), d: Reg, sources: [Src; 3]) {
        match f {
            Int3::MadLo | Int3::MadHi | Int3::MadHiSat | Int3::MadWide | Int3::Sad | Int3::Bfe => {
                by_type!(t, self.three(cx, step, f, d, sources));
            }
            _ => self.bits(cx, step, f, d, sources),
        }
    }

    fn one<T: Word>(&mut self, cx: &Cx<'_>, step: Step, f: Int1, d: Reg, a: Src) {
        let all = ones(T::BITS);
        match f {
            Int1::Neg => self.map(cx, step, d, [a], |[a]| T::get(0).sub(T::get(a)).put()),
            Int1::Abs => self.map(cx, step, d, [a], |[a]| {
                let a = T::get(a);
                if a < T::get(0) { T::get(0).sub(a).put() } else { a.put() }
            }),
            Int1::Not => self.map(cx, step, d, [a], |[a]| !a & all),
            Int1::Cnot => self.map(cx, step, d, [a], |[a]| u64::from(a & all == 0)),
            Int1::Popc => self.map(cx, step, d, [a], |[a]| u64::from((a & all).count_ones())),
            Int1::Clz => self.map(cx, step, d, [a], |[a]| {
                u64::from((a & all).leading_zeros() + T::BITS - 64)
            }),
            Int1::Brev => self.map(cx, step, d, [a], |[a]| a.reverse_bits() >> (64 - T::BITS)),
            Int1::Bfind | Int1::BfindShift => self.map(cx, step, d, [a], |[a]| {
                let bits = if T::SIGNED && T::get(a) < T::get(0) {
                    !a & all
                } else {
                    a & all
                };
                if bits == 0 {
                    return ones(32);
                }
                let highest = 63 - bits.leading_zeros();
                u64::from(if f == Int1::Bfind {
                    highest
                } else {
                    T::BITS - 1 - highest
                })
            }),
        }
    }

    fn two<T: Word>(&mut self, cx: &Cx<'_>, step: Step, f: Int2, d: Reg, sources: [Src; 2]) {
        let clamped = |value: i64| u64::from(value.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32 as u32);
        let signed = |value: u64| i64::from(value as u32 as i32);
        match f {
            Int2::Add => self.map(cx, step, d, sources, |[a, b]| T::get(a).add(T::get(b)).put()),
            Int2::Sub => self.map(cx, step, d, sources, |[a, b]| T::get(a).sub(T::get(b)).put()),
            Int2::AddSat => self.map(cx, step, d, sources, |[a, b]| clamped(signed(a) + signed(b))),
            Int2::SubSat => self.map(cx, step, d, sources, |[a, b]| clamped(signed(a) - signed(b))),
            Int2::MulLo => self.map(cx, step, d, sources, |[a, b]| T::get(a).mul(T::get(b)).put()),
            Int2::MulHi => self.map(cx, step, d, sources, |[a, b]| high::<T>(a, b).put()),
            Int2::MulWide => self.map(cx, step, d, sources, |[a, b]| product::<T>(a, b)),
            Int2::Mul24Lo => self.map(cx, step, d, sources, |[a, b]| {
                let part = |value: u64| {
                    if T::SIGNED {
                        i64::from((value as i32) << 8 >> 8)
                    } else {
                        (value & ones(24)) as i64
                    }
                };
                part(a).wrapping_mul(part(b)) as u64 & ones(32)
            }),
            Int2::Div => self.map(cx, step, d, sources, |[a, b]| T::get(a).div(T::get(b)).put()),
            Int2::Rem => self.map(cx, step, d, sources, |[a, b]| T::get(a).rem(T::get(b)).put()),
            Int2::Min => self.map(cx, step, d, sources, |[a, b]| T::get(a).min(T::get(b)).put()),
            Int2::Max => self.map(cx, step, d, sources, |[a, b]| T::get(a).max(T::get(b)).put()),
            Int2::And => self.map(cx, step, d, sources, |[a, b]| a & b),
            Int2::Or => self.map(cx, step, d, sources, |[a, b]| a | b),
            Int2::Xor => self.map(cx, step, d, sources, |[a, b]| a ^ b),
            Int2::Shl => self.map(cx, step, d, sources, |[a, b]| {
                let by = b as u32;
                if by < T::BITS { a << by & ones(T::BITS) } else { 0 }
            }),
            Int2::Shr => self.map(cx, step, d, sources, |[a, b]| T::get(a).shr(b as u32).put()),
        }
    }

    fn three<T: Word>(&mut self, cx: &Cx<'_>, step: Step, f: Int3, d: Reg, sources: [Src; 3]) {
        match f {
            Int3::MadLo => self.map(cx, step, d, sources, |[a, b, c]| {
                T::get(a).mul(T::get(b)).add(T::get(c)).put()
            }),
            Int3::MadHi => self.map(cx, step, d, sources, |[a, b, c]| high::<T>(a, b).add(T::get(c)).put()),
            Int3::MadHiSat => self.map(cx, step, d, sources, |[a, b, c]| {
                let sum = high::<T>(a, b).wide() + T::get(c).wide();
                u64::from(sum.clamp(i128::from(i32::MIN), i128::from(i32::MAX)) as i32 as u32)
            }),
            Int3::MadWide => self.map(cx, step, d, sources, |[a, b, c]| product::<T>(a, b).wrapping_add(c)),
            Int3::Sad => self.map(cx, step, d, sources, |[a, b, c]| {
                let (a, b) = (T::get(a), T::get(b));
                let distance = if a < b { b.sub(a) } else { a.sub(b) };
                T::get(c).add(distance).put()
            }),
            _ => self.map(cx, step, d, sources, |[a, b, c]| {
                field::<T>(a, b as u32 & 0xff, c as u32 & 0xff)
            }),
        }
    }

    /// Those that are for 32 bits without a sign only.
    fn bits(&mut self, cx: &Cx<'_>, step: Step, f: Int3, d: Reg, sources: [Src; 3]) {
        let joined = |low: u64, high: u64| (high & ones(32)) << 32 | low & ones(32);
        match f {
            Int3::ShfLeftWrap => self.map(cx, step, d, sources, |[a, b, c]| joined(a, b) << (c & 31) >> 32),
            Int3::ShfLeftClamp => self.map(cx, step, d, sources, |[a, b, c]| {
                let by = (c & ones(32)).min(32);
                ((u128::from(joined(a, b)) << by) >> 32) as u64 & ones(32)
            }),
            Int3::ShfRightWrap => self.map(cx, step, d, sources, |[a, b, c]| joined(a, b) >> (c & 31) & ones(32)),
            Int3::ShfRightClamp => self.map(cx, step, d, sources, |[a, b, c]| {
                joined(a, b) >> (c & ones(32)).min(32) & ones(32)
            }),
            Int3::Lop3(table) => self.map(cx, step, d, sources, |[a, b, c]| logic(table, a, b, c) & ones(32)),
            Int3::Dp4aSS | Int3::Dp4aSU | Int3::Dp4aUS | Int3::Dp4aUU => {
                let (a_signed, b_signed) = (
                    matches!(f, Int3::Dp4aSS | Int3::Dp4aSU),
                    matches!(f, Int3::Dp4aSS | Int3::Dp4aUS),
                );
                let part = |value: u64, index: u32, signed: bool| {
                    let byte = (value >> (8 * index)) as u8;
                    if signed { i64::from(byte as i8) } else { i64::from(byte) }
                };
                self.map(cx, step, d, sources, |[a, b, c]| {
                    let sum: i64 = (0..4)
                        .map(|index| part(a, index, a_signed) * part(b, index, b_signed))
                        .sum();
                    (c as i64).wrapping_add(sum) as u64 & ones(32)
                });
            }
            _ => self.map(cx, step, d, sources, |[a, b, c]| permuted(f, joined(a, b), c)),
        }
    }

    /// Bits of the first source, into the second one.
    pub(super) fn bfi(&mut self, cx: &Cx<'_>, step: Step, t: Int, d: Reg, [a, b, c, e]: [Src; 4]) {
        let bits = if t == Int::U64 { 64 } else { 32 };
        let lengths = *self.fetch(cx, step, e, &mut [0; super::WARP]);
        let inserted = |[a, b, at]: [u64; 3], length: u64| {
            let (at, length) = (at as u32 & 0xff, (length as u32 & 0xff).min(bits));
            if at >= bits || length == 0 {
                return b & ones(bits);
            }
            let mask = ones(length) << at & ones(bits);
            (b & !mask | a << at & mask) & ones(bits)
        };
        let first = lengths[step.active.trailing_zeros() as usize & 31];
        if super::warp::lanes(step.active).all(|lane| lengths[lane] == first) {
            self.map(cx, step, d, [a, b, c], |sources| inserted(sources, first));
            return;
        }
        for lane in super::warp::lanes(step.active) {
            let one = Step {
                active: 1 << lane,
                base: step.base,
            };
            self.map(cx, one, d, [a, b, c], |sources| inserted(sources, lengths[lane]));
        }
    }

    pub(super) fn add_carry(
        &mut self,
        cx: &Cx<'_>,
        step: Step,
        (carry, subtract, t): (Carry, bool, Int),
        d: Reg,
        sources: [Src; 2],
    ) {
        let bits = if matches!(t, Int::U64 | Int::S64) { 64 } else { 32 };
        let total = |a: u64, b: u64, carried: bool| {
            let (a, b) = (u128::from(a & ones(bits)), u128::from(b & ones(bits)));
            // Taking away is adding the complement and one: the flag is set where nothing was borrowed. PTX's manual calls the flag
            // "borrow", but code that nvcc makes (division of 128 bits) reads it by `addc` after `subc.cc`, and counts on this.
            if subtract {
                a + u128::from(!(b as u64) & ones(bits)) + u128::from(carried || !carry.reads)
            } else {
                a + b + u128::from(carried)
            }
        };
        self.carried(
            cx,
            step,
            (carry, bits, d),
            [sources[0], sources[1], Src::Imm(0)],
            |[a, b, _], carried| total(a, b, carried),
        );
    }

    pub(super) fn mad_carry(
        &mut self,
        cx: &Cx<'_>,
        step: Step,
        (carry, upper, t): (Carry, bool, Int),
        d: Reg,
        sources: [Src; 3],
    ) {
        let bits = if matches!(t, Int::U64 | Int::S64) { 64 } else { 32 };
        let part = |a: u64, b: u64| -> u64 {
            match (t, upper) {
                (Int::S32, true) => high::<i32>(a, b).put(),
                (Int::S64, true) => high::<i64>(a, b).put(),
                (Int::U64, true) => high::<u64>(a, b).put(),
                (_, true) => high::<u32>(a, b).put(),
                (_, false) => a.wrapping_mul(b) & ones(bits),
            }
        };
        self.carried(cx, step, (carry, bits, d), sources, |[a, b, c], carried| {
            u128::from(part(a, b)) + u128::from(c & ones(bits)) + u128::from(carried)
        });
    }

    /// A sum whose bit beyond the type is the carry flag.
    fn carried(
        &mut self,
        cx: &Cx<'_>,
        step: Step,
        (carry, bits, d): (Carry, u32, Reg),
        sources: [Src; 3],
        total: impl Fn([u64; 3], bool) -> u128,
    ) {
        let rows = sources.map(|source| *self.fetch(cx, step, source, &mut [0; super::WARP]));
        let (mut values, mut flags) = ([0; super::WARP], 0);
        for lane in 0..super::WARP {
            let carried = carry.reads && self.carry >> lane & 1 == 1;
            let total = total([rows[0][lane], rows[1][lane], rows[2][lane]], carried);
            values[lane] = total as u64 & ones(bits);
            flags |= u32::from(total >> bits & 1 == 1) << lane;
        }
        self.put(step, d, &values);
        if carry.writes {
            self.carry = (self.carry & !step.active) | (flags & step.active);
        }
    }
}

#[inline(always)]
fn high<T: Word>(a: u64, b: u64) -> T {
    T::get((T::get(a).wide().wrapping_mul(T::get(b).wide()) >> T::BITS) as u64)
}

/// A product that is twice as wide.
#[inline(always)]
fn product<T: Word>(a: u64, b: u64) -> u64 {
    if T::SIGNED {
        let sign = |value: u64| ((value << (64 - T::BITS)) as i64) >> (64 - T::BITS);
        (sign(a).wrapping_mul(sign(b))) as u64
    } else {
        (a & ones(T::BITS)).wrapping_mul(b & ones(T::BITS))
    }
}

/// Bits out of a number; what is beyond its end is its sign.
fn field<T: Word>(a: u64, at: u32, length: u32) -> u64 {
    let highest = T::BITS - 1;
    let sign = if T::SIGNED && length != 0 {
        a >> at.saturating_add(length - 1).min(highest) & 1
    } else {
        0
    };
    let filling = if sign == 1 { u64::MAX } else { 0 };
    let mut value = if at > highest {
        filling
    } else {
        (a & ones(T::BITS)) >> at
    };
    let there = length.min(T::BITS.saturating_sub(at));
    value = value & ones(there) | filling & !ones(there);
    value & ones(T::BITS)
}

fn logic(table: u8, a: u64, b: u64, c: u64) -> u64 {
    let mut result = 0;
    for case in 0..8u32 {
        if table >> case & 1 == 1 {
            let pick = |value: u64, bit: u32| if case >> bit & 1 == 1 { value } else { !value };
            result |= pick(a, 2) & pick(b, 1) & pick(c, 0);
        }
    }
    result
}

/// Bytes chosen from eight.
fn permuted(f: Int3, bytes: u64, selector: u64) -> u64 {
    let by = selector as u32 & 3;
    let chosen = |index: u32| -> u64 {
        let (byte, sign) = match f {
            Int3::PrmtF4e => (by + index, false),
            Int3::PrmtB4e => ((by + 8 - index) & 7, false),
            Int3::PrmtRc8 => (by, false),
            Int3::PrmtEcl => (by.max(index), false),
            Int3::PrmtEcr => (by.min(index), false),
            Int3::PrmtRc16 => ((by & 1) * 2 + (index & 1), false),
            _ => {
                let nibble = (selector >> (4 * index)) as u32 & 15;
                (nibble & 7, nibble & 8 != 0)
            }
        };
        let byte = bytes >> (8 * byte) & 0xff;
        if sign {
            if byte & 0x80 == 0 { 0 } else { 0xff }
        } else {
            byte
        }
    };
    (0..4).fold(0, |all, index| all | chosen(index) << (8 * index))
}
