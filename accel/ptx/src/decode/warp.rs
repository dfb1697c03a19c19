//! Barriers, and what the threads of a warp do together.

use super::Work;
use crate::error::Refused;
use crate::inst::{Bar, Barrier, Collective, Int, NOWHERE, Op, Pred, Reg, Src, Together};
use crate::parse::Operand;
use crate::types::Type;

const NONE: Pred = Pred {
    reg: NOWHERE,
    not: false,
};

pub(super) fn decode(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    match work.statement.opcode {
        // Threads run one after the other in one memory, so whatever one wrote the next one sees.
        "membar" | "fence" | "nanosleep" => {
            if work.has("proxy") || work.has("alias") {
                return work.unknown();
            }
            work.push(Op::Nop);
            Ok(())
        }
        "activemask" => {
            work.take_type()?;
            work.done(1)?;
            let d = work.dest(0)?;
            work.push(Op::ActiveMask { d });
            Ok(())
        }
        "bar" | "barrier" => barrier(work),
        _ => {
            if !work.take("sync") {
                let advice =
                    "use the form with .sync: compile for compute_70 or newer, or with __shfl_sync and its like";
                return work.refuse(format!("'{}' without a mask of threads", work.shown()), advice);
            }
            match work.statement.opcode {
                "shfl" => shuffle(work),
                "vote" => vote(work),
                "match" => matched(work),
                _ => reduce(work),
            }
        }
    }
}

fn collective(work: &mut Work<'_, '_>, collective: Collective) {
    let number = u32::try_from(work.program.code.collectives.len()).unwrap_or(u32::MAX);
    work.program.code.collectives.push(collective);
    work.push(Op::Together { collective: number });
}

const fn empty(what: Together, mask: Src) -> Collective {
    Collective {
        what,
        d: NOWHERE,
        p: NOWHERE,
        a: Src::Imm(0),
        b: Src::Imm(0),
        c: Src::Imm(0),
        q: NONE,
        mask,
    }
}

fn barrier(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    work.take("cta");
    work.take("aligned");
    if work.take("warp") {
        work.take("sync");
        work.done(1)?;
        let mask = work.source(0, Type::U32)?;
        collective(work, empty(Together::Sync, mask));
        return Ok(());
    }
    let mut kind = Barrier::Sync;
    if work.take("arrive") {
        kind = Barrier::Arrive;
    } else if work.take("red") {
        kind = match work.take_first(|word| match word {
            "popc" => Some(Barrier::Popc),
            "and" => Some(Barrier::And),
            "or" => Some(Barrier::Or),
            _ => None,
        }) {
            Some(kind) => kind,
            None => return work.unknown(),
        };
        work.take_type()?;
    } else if !work.take("sync") {
        return work.unknown();
    }
    let result = usize::from(matches!(kind, Barrier::Popc | Barrier::And | Barrier::Or));
    let d: Reg = match kind {
        Barrier::Popc => work.dest(0)?,
        Barrier::And | Barrier::Or => work.pred_dest(0)?,
        Barrier::Sync | Barrier::Arrive => NOWHERE,
    };
    let total = work.statement.operands.len();
    let counted = match total.checked_sub(2 * result) {
        Some(1) => false,
        Some(2) => true,
        _ => return work.unknown(),
    };
    work.done(total)?;
    let q = if result == 1 { work.predicate(total - 1)? } else { NONE };
    let id = work.source(result, Type::U32)?;
    let count = if counted {
        Some(work.source(result + 1, Type::U32)?)
    } else {
        None
    };
    if kind == Barrier::Arrive && count.is_none() {
        return work.unknown();
    }
    let bar = u32::try_from(work.program.code.bars.len()).unwrap_or(u32::MAX);
    work.program.code.bars.push(Bar { kind, id, count, d, q });
    work.push(Op::Bar { bar });
    Ok(())
}

/// `%r1` or `%r1|%p1`.
fn pair(work: &Work<'_, '_>) -> Result<(Reg, Reg), Refused> {
    match work.operand(0)? {
        Operand::Pair(first, second) => match (&**first, &**second) {
            (Operand::Reg(_, Type::Pred), _) => work.wrong(0),
            (&Operand::Reg(d, _), &Operand::Reg(p, Type::Pred)) => Ok((d, p)),
            (&Operand::Sink, &Operand::Reg(p, Type::Pred)) => Ok((NOWHERE, p)),
            (&Operand::Reg(d, _), &Operand::Sink) => Ok((d, NOWHERE)),
            _ => work.wrong(0),
        },
        _ => Ok((work.dest(0)?, NOWHERE)),
    }
}

fn shuffle(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let what = match work.take_first(|word| match word {
        "up" => Some(Together::ShflUp),
        "down" => Some(Together::ShflDown),
        "bfly" => Some(Together::ShflBfly),
        "idx" => Some(Together::ShflIdx),
        _ => None,
    }) {
        Some(what) => what,
        None => return work.unknown(),
    };
    if work.take_type()?.bytes() != 4 {
        return work.unknown();
    }
    work.done(5)?;
    let (d, p) = pair(work)?;
    let mut shuffle = empty(what, work.source(4, Type::U32)?);
    (shuffle.d, shuffle.p) = (d, p);
    shuffle.a = work.source(1, Type::B32)?;
    shuffle.b = work.source(2, Type::U32)?;
    shuffle.c = work.source(3, Type::U32)?;
    collective(work, shuffle);
    Ok(())
}

fn vote(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let what = match work.take_first(|word| match word {
        "all" => Some(Together::VoteAll),
        "any" => Some(Together::VoteAny),
        "uni" => Some(Together::VoteUni),
        "ballot" => Some(Together::Ballot),
        _ => None,
    }) {
        Some(what) => what,
        None => return work.unknown(),
    };
    work.take_type()?;
    work.done(3)?;
    let mut vote = empty(what, work.source(2, Type::U32)?);
    // `mov.pred` of a constant is not needed: a predicate of a vote may be one.
    match work.operand(1)? {
        Operand::Literal(literal) => vote.a = Src::Imm(u64::from(literal.bits(Type::U32) != 0)),
        _ => vote.q = work.predicate(1)?,
    }
    if what == Together::Ballot {
        vote.d = work.dest(0)?;
    } else {
        vote.p = work.pred_dest(0)?;
    }
    collective(work, vote);
    Ok(())
}

fn matched(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let all = work.take("all");
    if !all && !work.take("any") {
        return work.unknown();
    }
    let t = work.take_type()?;
    if !matches!(t, Type::B32 | Type::B64) {
        return work.unknown();
    }
    work.done(3)?;
    let what = if all {
        Together::MatchAll(t)
    } else {
        Together::MatchAny(t)
    };
    let mut matched = empty(what, work.source(2, Type::U32)?);
    (matched.d, matched.p) = pair(work)?;
    matched.a = work.source(1, t)?;
    collective(work, matched);
    Ok(())
}

fn reduce(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let word = work.take_first(|word| matches!(word, "add" | "min" | "max" | "and" | "or" | "xor").then_some(word));
    let t = work.take_type()?;
    let what = match (word, Int::of(t)) {
        (Some("add"), Some(Int::U32 | Int::S32)) => Together::ReduceAdd,
        (Some("min"), Some(int @ (Int::U32 | Int::S32))) => Together::ReduceMin(int),
        (Some("max"), Some(int @ (Int::U32 | Int::S32))) => Together::ReduceMax(int),
        (Some("and"), Some(Int::U32)) => Together::ReduceAnd,
        (Some("or"), Some(Int::U32)) => Together::ReduceOr,
        (Some("xor"), Some(Int::U32)) => Together::ReduceXor,
        _ => return work.unknown(),
    };
    work.done(3)?;
    let mut reduce = empty(what, work.source(2, Type::U32)?);
    reduce.d = work.dest(0)?;
    reduce.a = work.source(1, Type::U32)?;
    collective(work, reduce);
    Ok(())
}
