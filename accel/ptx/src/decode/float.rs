//! Floating point, conversions, comparisons and choices.

use super::Work;
use crate::error::Refused;
use crate::inst::{Convert, Float1, Float2, Int, Mode, NOWHERE, Op, Src, Testp};
use crate::parse::Operand;
use crate::types::{Boolean, Compare, Rounding, Type};

fn rounding(word: &str) -> Option<Rounding> {
    Some(match word {
        "rn" => Rounding::Nearest,
        "rz" => Rounding::Zero,
        "rm" => Rounding::Down,
        "rp" => Rounding::Up,
        _ => return None,
    })
}

fn whole_rounding(word: &str) -> Option<Rounding> {
    Some(match word {
        "rni" => Rounding::Nearest,
        "rzi" => Rounding::Zero,
        "rmi" => Rounding::Down,
        "rpi" => Rounding::Up,
        _ => return None,
    })
}

fn mode(work: &mut Work<'_, '_>) -> Result<Mode, Refused> {
    let rounding = work.take_first(rounding).unwrap_or(Rounding::Nearest);
    let ftz = work.take("ftz");
    let sat = work.take("sat");
    let relu = work.take("relu");
    let t = work.take_type()?;
    if rounding != Rounding::Nearest && t != Type::F32 {
        return work.refuse(
            format!("'{}' with a directed rounding", work.shown()),
            "directed roundings are interpreted for f32 and in conversions only",
        );
    }
    Ok(Mode {
        t,
        rounding,
        ftz,
        sat,
        relu,
    })
}

pub(super) fn decode(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let opcode = work.statement.opcode;
    if work.take("approx") || work.take("full") {
        if !matches!(
            opcode,
            "div" | "sqrt" | "rcp" | "rsqrt" | "sin" | "cos" | "ex2" | "lg2" | "tanh"
        ) {
            return work.unknown();
        }
    } else if matches!(opcode, "sin" | "cos" | "lg2" | "rsqrt") {
        return work.unknown();
    }
    let nan = work.take("NaN");
    let mut m = mode(work)?;
    if opcode == "mad" || opcode == "fma" {
        work.done(4)?;
        let (d, a, b, c) = (
            work.dest(0)?,
            work.source(1, m.t)?,
            work.source(2, m.t)?,
            work.source(3, m.t)?,
        );
        work.push(Op::Fma { m, d, a, b, c });
        return Ok(());
    }
    let two = match opcode {
        "add" => Some(Float2::Add),
        "sub" => Some(Float2::Sub),
        "mul" => Some(Float2::Mul),
        "div" => Some(Float2::Div),
        "min" if nan => Some(Float2::MinNan),
        "max" if nan => Some(Float2::MaxNan),
        "min" => Some(Float2::Min),
        "max" => Some(Float2::Max),
        "copysign" => Some(Float2::Copysign),
        _ => None,
    };
    if let Some(f) = two {
        work.done(3)?;
        let (d, a, b) = (work.dest(0)?, work.source(1, m.t)?, work.source(2, m.t)?);
        work.push(Op::Float2 { f, m, d, a, b });
        return Ok(());
    }
    let f = match opcode {
        "neg" => Float1::Neg,
        "abs" => Float1::Abs,
        "sqrt" => Float1::Sqrt,
        "rcp" => Float1::Rcp,
        "rsqrt" => Float1::Rsqrt,
        "sin" => Float1::Sin,
        "cos" => Float1::Cos,
        "ex2" => Float1::Ex2,
        "lg2" => Float1::Lg2,
        "tanh" => Float1::Tanh,
        _ => return work.unknown(),
    };
    let whole = matches!(
        f,
        Float1::Neg | Float1::Abs | Float1::Sqrt | Float1::Rcp | Float1::Rsqrt
    );
    if m.t == Type::F64 && !whole {
        return work.unknown();
    }
    m.sat &= !matches!(f, Float1::Neg | Float1::Abs);
    work.done(2)?;
    let (d, a) = (work.dest(0)?, work.source(1, m.t)?);
    work.push(Op::Float1 { f, m, d, a });
    Ok(())
}

pub(super) fn convert_and_compare(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    match work.statement.opcode {
        "cvt" => convert(work),
        "setp" | "set" => compare(work),
        "selp" => {
            let t = work.take_type()?;
            work.done(4)?;
            let (d, a, b, p) = (
                work.dest(0)?,
                work.source(1, t)?,
                work.source(2, t)?,
                work.predicate(3)?,
            );
            work.push(Op::Selp { d, a, b, p });
            Ok(())
        }
        "slct" => {
            work.take("ftz");
            let t = work.take_type()?;
            let by = work.take_type()?;
            if by != Type::S32 && by != Type::F32 {
                return work.unknown();
            }
            work.done(4)?;
            let (d, a, b, c) = (
                work.dest(0)?,
                work.source(1, t)?,
                work.source(2, t)?,
                work.source(3, by)?,
            );
            work.push(Op::Slct { t: by, d, a, b, c });
            Ok(())
        }
        _ => {
            let kind = work.take_first(|word| {
                Some(match word {
                    "finite" => Testp::Finite,
                    "infinite" => Testp::Infinite,
                    "number" => Testp::Number,
                    "notanumber" => Testp::NotANumber,
                    "normal" => Testp::Normal,
                    "subnormal" => Testp::Subnormal,
                    _ => return None,
                })
            });
            let (Some(kind), t) = (kind, work.take_type()?) else {
                return work.unknown();
            };
            if t != Type::F32 && t != Type::F64 {
                return work.unknown();
            }
            work.done(2)?;
            let (d, a) = (work.pred_dest(0)?, work.source(1, t)?);
            work.push(Op::Testp { kind, t, d, a });
            Ok(())
        }
    }
}

fn convert(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let whole = work.take_first(whole_rounding);
    let plain = work.take_first(rounding);
    let ftz = work.take("ftz");
    let sat = work.take("sat");
    let relu = work.take("relu");
    let to = work.take_type()?;
    let from = work.take_type()?;
    let c = Convert {
        to,
        from,
        whole: whole.is_some() || (from.is_float() && !to.is_float()),
        rounding: whole.or(plain).unwrap_or(if to.is_float() {
            Rounding::Nearest
        } else {
            Rounding::Zero
        }),
        ftz,
        sat,
        relu,
    };
    if from == Type::Pred || to == Type::Pred || from.is_packed() || (relu && !matches!(to.bytes(), 2 | 4)) {
        return work.unknown();
    }
    if to.is_packed() {
        work.done(3)?;
        if from != Type::F32 {
            return work.unknown();
        }
        let (d, a, b) = (work.dest(0)?, work.source(1, from)?, work.source(2, from)?);
        work.push(Op::CvtPair { c, d, a, b });
        return Ok(());
    }
    work.done(2)?;
    let (d, a) = (work.dest(0)?, work.source(1, from)?);
    work.push(Op::Cvt { c, d, a });
    Ok(())
}

/// Of several types a comparison has the last one, and `set`'s first is the result's.
fn compare(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let set = work.statement.opcode == "set";
    let Some(cmp) = work.take_first(Compare::parse) else {
        return work.unknown();
    };
    let boolean = work.take_first(Boolean::parse);
    let ftz = work.take("ftz");
    let to = if set { work.take_type()? } else { Type::Pred };
    let t = work.take_type()?;
    let comparable = t.is_float() && (set || !t.is_packed()) || Int::of(t).is_some();
    if !comparable {
        return work.unknown();
    }
    if Int::of(t).is_some() && !cmp_of_integers(cmp) {
        return work.unknown();
    }
    if set {
        if boolean.is_some() || t.is_packed() != to.is_packed() {
            return work.unknown();
        }
        work.done(3)?;
        let (d, a, b) = (work.dest(0)?, work.source(1, t)?, work.source(2, t)?);
        work.push(Op::Set {
            cmp,
            t,
            to,
            ftz,
            d,
            a,
            b,
        });
        return Ok(());
    }
    work.done(if boolean.is_some() { 4 } else { 3 })?;
    let join = match boolean {
        Some(boolean) => Some((boolean, work.predicate(3)?)),
        None => None,
    };
    let (d, q) = match work.operand(0)? {
        Operand::Pair(first, second) => match (&**first, &**second) {
            (&Operand::Reg(d, Type::Pred), &Operand::Reg(q, Type::Pred)) => (d, q),
            (&Operand::Sink, &Operand::Reg(q, Type::Pred)) => (NOWHERE, q),
            (&Operand::Reg(d, Type::Pred), &Operand::Sink) => (d, NOWHERE),
            _ => return work.wrong(0),
        },
        _ => (work.pred_dest(0)?, NOWHERE),
    };
    let (a, b): (Src, Src) = (work.source(1, t)?, work.source(2, t)?);
    work.push(Op::Setp {
        cmp,
        t,
        ftz,
        join,
        d,
        q,
        a,
        b,
    });
    Ok(())
}

const fn cmp_of_integers(cmp: Compare) -> bool {
    matches!(
        cmp,
        Compare::Eq | Compare::Ne | Compare::Lt | Compare::Le | Compare::Gt | Compare::Ge
    )
}
