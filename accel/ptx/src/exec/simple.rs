//! Instructions that neither branch nor wait: which of them is carried out where.

use super::warp::{Step, Warp};
use super::{Cx, Fault, data};
use crate::inst::{Access, Op, Src};
use crate::memory::Memory;
use crate::types::{Boolean, Type};

impl Warp {
    /// Carries one out for the threads that are active.
    pub(super) fn simple<M: Memory + ?Sized>(
        &mut self,
        cx: &mut Cx<'_>,
        memory: &mut M,
        step: Step,
        (op, line): (&Op, u32),
    ) -> Result<(), Fault> {
        match *op {
            Op::Load1 { ref access, d } => return self.load_one(cx, memory, step, (access, d, line)),
            Op::Load { ref access, targets } => return self.load(cx, memory, step, (access, targets, line)),
            Op::Store { ref access, operands } => return self.store(cx, memory, step, (access, operands, line)),
            Op::Atomic {
                f,
                space,
                t,
                d,
                address,
                operands,
            } => {
                let access = Access {
                    space,
                    t,
                    count: 1,
                    address,
                };
                return self.atomic(cx, memory, step, (f, &access, d, operands, line));
            }
            Op::Mov { d, a } => self.map(cx, step, d, [a], |[a]| a),
            Op::Int1 { f, t, d, a } => self.int1(cx, step, (f, t), d, a),
            Op::Int2 { f, t, d, a, b } => self.int2(cx, step, (f, t), d, [a, b]),
            Op::Int3 { f, t, d, a, b, c } => self.int3(cx, step, (f, t), d, [a, b, c]),
            Op::Bfi { t, d, operands } => {
                let sources = four(cx, operands);
                self.bfi(cx, step, t, d, sources);
            }
            Op::AddCarry {
                carry,
                subtract,
                t,
                d,
                a,
                b,
            } => self.add_carry(cx, step, (carry, subtract, t), d, [a, b]),
            Op::MadCarry {
                carry,
                high,
                t,
                d,
                operands,
            } => {
                let [a, b, c, _] = four(cx, operands);
                self.mad_carry(cx, step, (carry, high, t), d, [a, b, c]);
            }
            Op::Float1 { f, m, d, a } => self.float1(cx, step, (f, m), d, a),
            Op::Float2 { f, m, d, a, b } => self.float2(cx, step, (f, m), d, [a, b]),
            Op::Fma { m, d, a, b, c } => self.fma(cx, step, m, d, [a, b, c]),
            Op::Cvt { c, d, a } => self.convert(cx, step, c, d, a),
            Op::CvtPair { c, d, a, b } => self.convert_pair(cx, step, c, d, [a, b]),
            Op::Testp { kind, t, d, a } => self.testp(cx, step, (kind, t), d, a),
            ref other => self.choices(cx, step, other),
        }
        Ok(())
    }

    /// Comparisons, predicates, and what moves bits about.
    fn choices(&mut self, cx: &Cx<'_>, step: Step, op: &Op) {
        match *op {
            Op::Setp {
                cmp,
                t,
                ftz,
                join,
                d,
                q,
                a,
                b,
            } => {
                let held = self.compare(cx, step, (cmp, t, ftz), [a, b]);
                let join = join.map(|(boolean, pred)| (boolean, self.pred(pred, step.base)));
                self.set_pred(step, d, joined(held, join));
                self.set_pred(step, q, joined(!held, join));
            }
            Op::Set {
                cmp,
                t,
                to,
                ftz,
                d,
                a,
                b,
            } => self.set(cx, step, (cmp, t, to, ftz), d, [a, b]),
            Op::Slct { t, d, a, b, c } => {
                self.map(cx, step, d, [a, b, c], |[a, b, c]| if chosen(t, c) { a } else { b })
            }
            Op::Selp { d, a, b, p } => self.select(cx, step, d, ([a, b], self.pred(p, step.base))),
            Op::Preds { f, d, a, b } => {
                let (a, b) = (self.pred(a, step.base), self.pred(b, step.base));
                self.set_pred(step, d, joined(a, Some((f, b))));
            }
            Op::PredMov { d, a } => self.set_pred(step, d, self.pred(a, step.base)),
            Op::PredImm { d, value } => self.set_pred(step, d, if value { u32::MAX } else { 0 }),
            Op::Isspacep { space, d, a } => {
                let held = self.test(cx, step, [a], |[a]| data::is_in(space, a));
                self.set_pred(step, d, held);
            }
            Op::Pack {
                d,
                bits,
                count,
                operands,
            } => self.pack(cx, step, d, (bits, count, operands)),
            Op::Unpack {
                bits,
                count,
                targets,
                a,
            } => self.unpack(cx, step, a, (bits, count, targets)),
            Op::ActiveMask { d } => self.map(cx, step, d, [], |[]| u64::from(step.active)),
            // The others are carried out before, or where threads are told apart.
            _ => {}
        }
    }

    fn select(&mut self, cx: &Cx<'_>, step: Step, d: u32, ([a, b], held): ([Src; 2], u32)) {
        let mut values = [0; super::WARP];
        {
            let (mut first, mut second) = ([0; super::WARP], [0; super::WARP]);
            let a = self.fetch(cx, step, a, &mut first);
            let b = self.fetch(cx, step, b, &mut second);
            for lane in 0..super::WARP {
                values[lane] = if held >> lane & 1 == 1 { a[lane] } else { b[lane] };
            }
        }
        self.put(step, d, &values);
    }

    fn pack(&mut self, cx: &Cx<'_>, step: Step, d: u32, (bits, count, operands): (u8, u8, u32)) {
        let mut values = [0; super::WARP];
        let mask = u64::MAX >> (64 - bits);
        for part in 0..count {
            let source = cx.program.code.operands[operands as usize + usize::from(part)];
            let mut room = [0; super::WARP];
            let source = self.fetch(cx, step, source, &mut room);
            for lane in 0..super::WARP {
                values[lane] |= (source[lane] & mask) << (u32::from(part) * u32::from(bits));
            }
        }
        self.put(step, d, &values);
    }

    fn unpack(&mut self, cx: &Cx<'_>, step: Step, a: Src, (bits, count, targets): (u8, u8, u32)) {
        let source = *self.fetch(cx, step, a, &mut [0; super::WARP]);
        let mask = u64::MAX >> (64 - bits);
        for part in 0..count {
            let target = cx.program.code.targets[targets as usize + usize::from(part)];
            let shift = u32::from(part) * u32::from(bits);
            self.put(step, target, &source.map(|value| value >> shift & mask));
        }
    }
}

/// Operands in the side table; what is beyond it is zero.
fn four(cx: &Cx<'_>, first: u32) -> [Src; 4] {
    let operands = &cx.program.code.operands;
    std::array::from_fn(|index| operands.get(first as usize + index).copied().unwrap_or(Src::Imm(0)))
}

const fn joined(held: u32, join: Option<(Boolean, u32)>) -> u32 {
    match join {
        None => held,
        Some((Boolean::And, other)) => held & other,
        Some((Boolean::Or, other)) => held | other,
        Some((Boolean::Xor, other)) => held ^ other,
    }
}

/// Whether `slct` takes its first value.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the number is in the register's lower half"
)]
fn chosen(t: Type, c: u64) -> bool {
    match t {
        Type::F32 => f32::from_bits(c as u32) >= 0.0,
        _ => (c as u32).cast_signed() >= 0,
    }
}
