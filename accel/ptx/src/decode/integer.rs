//! Integers, bits, and predicates.

use super::Work;
use crate::error::Refused;
use crate::inst::{Carry, Int, Int1, Int2, Int3, Op, Pred};
use crate::types::{Boolean, Type};

pub(super) fn decode(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    match work.statement.opcode {
        "and" | "or" | "xor" | "not" if work.has("pred") => predicates(work),
        "prmt" => permute(work),
        "shf" => funnel(work),
        "lop3" => lop3(work),
        "dp4a" => dp4a(work),
        "bfi" => {
            let t = integer(work)?;
            work.done(5)?;
            let wide = wide(t);
            let list = [
                work.source(1, wide)?,
                work.source(2, wide)?,
                work.source(3, Type::U32)?,
                work.source(4, Type::U32)?,
            ];
            let (d, operands) = (work.dest(0)?, work.side(&list));
            work.push(Op::Bfi { t, d, operands });
            Ok(())
        }
        "bfe" | "sad" => {
            let f = if work.statement.opcode == "bfe" {
                Int3::Bfe
            } else {
                Int3::Sad
            };
            let t = integer(work)?;
            three(work, f, t)
        }
        "add" | "addc" | "sub" | "subc" => sum(work),
        "mad" | "madc" | "mad24" => multiply_add(work),
        "mul" | "mul24" => multiply(work),
        "div" | "rem" | "min" | "max" | "and" | "or" | "xor" | "shl" | "shr" => {
            let f = match work.statement.opcode {
                "div" => Int2::Div,
                "rem" => Int2::Rem,
                "min" => Int2::Min,
                "max" => Int2::Max,
                "and" => Int2::And,
                "or" => Int2::Or,
                "xor" => Int2::Xor,
                "shl" => Int2::Shl,
                _ => Int2::Shr,
            };
            let t = integer(work)?;
            two(work, f, t)
        }
        _ => one(work),
    }
}

fn integer(work: &mut Work<'_, '_>) -> Result<Int, Refused> {
    match Int::of(work.take_type()?) {
        Some(t) => Ok(t),
        None => work.unknown(),
    }
}

/// The type that an operand of this width is written in.
const fn wide(t: Int) -> Type {
    match t {
        Int::U16 | Int::S16 => Type::U16,
        Int::U32 | Int::S32 => Type::U32,
        Int::U64 | Int::S64 => Type::U64,
    }
}

fn one(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let shift = work.take("shiftamt");
    let f = match work.statement.opcode {
        "bfind" if shift => Int1::BfindShift,
        _ if shift => return work.unknown(),
        "neg" => Int1::Neg,
        "abs" => Int1::Abs,
        "not" => Int1::Not,
        "cnot" => Int1::Cnot,
        "popc" => Int1::Popc,
        "clz" => Int1::Clz,
        "brev" => Int1::Brev,
        "bfind" => Int1::Bfind,
        _ => return work.unknown(),
    };
    let t = integer(work)?;
    work.done(2)?;
    let (d, a) = (work.dest(0)?, work.source(1, wide(t))?);
    work.push(Op::Int1 { f, t, d, a });
    Ok(())
}

fn two(work: &mut Work<'_, '_>, f: Int2, t: Int) -> Result<(), Refused> {
    work.done(3)?;
    let (d, a, b) = (work.dest(0)?, work.source(1, wide(t))?, work.source(2, wide(t))?);
    work.push(Op::Int2 { f, t, d, a, b });
    Ok(())
}

fn three(work: &mut Work<'_, '_>, f: Int3, t: Int) -> Result<(), Refused> {
    work.done(4)?;
    let w = wide(t);
    let (d, a, b, c) = (
        work.dest(0)?,
        work.source(1, w)?,
        work.source(2, w)?,
        work.source(3, w)?,
    );
    work.push(Op::Int3 { f, t, d, a, b, c });
    Ok(())
}

fn predicates(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    work.take("pred");
    let d = work.pred_dest(0)?;
    let a = work.predicate(1)?;
    if work.statement.opcode == "not" {
        work.done(2)?;
        let a = Pred { not: !a.not, ..a };
        work.push(Op::PredMov { d, a });
        return Ok(());
    }
    work.done(3)?;
    let Some(f) = Boolean::parse(work.statement.opcode) else {
        return work.unknown();
    };
    let b = work.predicate(2)?;
    work.push(Op::Preds { f, d, a, b });
    Ok(())
}

fn permute(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let mode = work.take_first(|word| {
        Some(match word {
            "f4e" => Int3::PrmtF4e,
            "b4e" => Int3::PrmtB4e,
            "rc8" => Int3::PrmtRc8,
            "ecl" => Int3::PrmtEcl,
            "ecr" => Int3::PrmtEcr,
            "rc16" => Int3::PrmtRc16,
            _ => return None,
        })
    });
    if integer(work)? != Int::U32 {
        return work.unknown();
    }
    three(work, mode.unwrap_or(Int3::Prmt), Int::U32)
}

fn funnel(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let left = work.take("l");
    if !left && !work.take("r") {
        return work.unknown();
    }
    let wrap = work.take("wrap");
    if !wrap && !work.take("clamp") {
        return work.unknown();
    }
    if integer(work)? != Int::U32 {
        return work.unknown();
    }
    let f = match (left, wrap) {
        (true, true) => Int3::ShfLeftWrap,
        (true, false) => Int3::ShfLeftClamp,
        (false, true) => Int3::ShfRightWrap,
        (false, false) => Int3::ShfRightClamp,
    };
    three(work, f, Int::U32)
}

fn lop3(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    if integer(work)? != Int::U32 {
        return work.unknown();
    }
    work.done(5)?;
    let table = match work.source(4, Type::U32)? {
        crate::inst::Src::Imm(table) => u8::try_from(table).ok(),
        _ => None,
    };
    let Some(table) = table else {
        return work.wrong(4);
    };
    work.statement.operands.truncate(4);
    three(work, Int3::Lop3(table), Int::U32)
}

fn dp4a(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let (a, b) = (integer(work)?, integer(work)?);
    let f = match (a, b) {
        (Int::S32, Int::S32) => Int3::Dp4aSS,
        (Int::S32, Int::U32) => Int3::Dp4aSU,
        (Int::U32, Int::S32) => Int3::Dp4aUS,
        (Int::U32, Int::U32) => Int3::Dp4aUU,
        _ => return work.unknown(),
    };
    three(work, f, Int::U32)
}

fn sum(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let (subtract, reads) = match work.statement.opcode {
        "add" => (false, false),
        "addc" => (false, true),
        "sub" => (true, false),
        _ => (true, true),
    };
    let writes = work.take("cc");
    let sat = work.take("sat");
    let t = integer(work)?;
    if reads || writes {
        if sat || matches!(t, Int::U16 | Int::S16) {
            return work.unknown();
        }
        work.done(3)?;
        let (d, a, b) = (work.dest(0)?, work.source(1, wide(t))?, work.source(2, wide(t))?);
        let carry = Carry { reads, writes };
        work.push(Op::AddCarry {
            carry,
            subtract,
            t,
            d,
            a,
            b,
        });
        return Ok(());
    }
    if sat && t != Int::S32 {
        return work.unknown();
    }
    let f = match (subtract, sat) {
        (false, false) => Int2::Add,
        (false, true) => Int2::AddSat,
        (true, false) => Int2::Sub,
        (true, true) => Int2::SubSat,
    };
    two(work, f, t)
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Low,
    High,
    Wide,
}

fn part(word: &str) -> Option<Part> {
    Some(match word {
        "lo" => Part::Low,
        "hi" => Part::High,
        "wide" => Part::Wide,
        _ => return None,
    })
}

fn multiply(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let Some(part) = work.take_first(part) else {
        return work.unknown();
    };
    let t = integer(work)?;
    let f = match (work.statement.opcode, part) {
        ("mul24", Part::Low) if matches!(t, Int::U32 | Int::S32) => Int2::Mul24Lo,
        ("mul24", _) => return work.unknown(),
        (_, Part::Low) => Int2::MulLo,
        (_, Part::High) => Int2::MulHi,
        (_, Part::Wide) if matches!(t, Int::U64 | Int::S64) => return work.unknown(),
        (_, Part::Wide) => Int2::MulWide,
    };
    two(work, f, t)
}

fn multiply_add(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let Some(part) = work.take_first(part) else {
        return work.unknown();
    };
    let writes = work.take("cc");
    let sat = work.take("sat");
    let t = integer(work)?;
    let reads = work.statement.opcode == "madc";
    if work.statement.opcode == "mad24" {
        return work.unknown();
    }
    let w = wide(t);
    // The sum of a wide product is as wide as that.
    let c = match (part, t) {
        (Part::Wide, Int::U16 | Int::S16) => Type::U32,
        (Part::Wide, _) => Type::U64,
        _ => w,
    };
    work.done(4)?;
    let d = work.dest(0)?;
    let (a, b, c) = (work.source(1, w)?, work.source(2, w)?, work.source(3, c)?);
    if reads || writes {
        if sat || part == Part::Wide || matches!(t, Int::U16 | Int::S16) {
            return work.unknown();
        }
        let operands = work.side(&[a, b, c]);
        work.push(Op::MadCarry {
            carry: Carry { reads, writes },
            high: part == Part::High,
            t,
            d,
            operands,
        });
        return Ok(());
    }
    let f = match (part, sat) {
        (Part::Low, false) => Int3::MadLo,
        (Part::High, false) => Int3::MadHi,
        (Part::High, true) if t == Int::S32 => Int3::MadHiSat,
        (Part::Wide, false) if !matches!(t, Int::U64 | Int::S64) => Int3::MadWide,
        _ => return work.unknown(),
    };
    work.push(Op::Int3 { f, t, d, a, b, c });
    Ok(())
}
