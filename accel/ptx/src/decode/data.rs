//! Loads, stores, atomic accesses, moves, and what tells state spaces apart.

use super::Work;
use crate::error::Refused;
use crate::exec::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::inst::{Access, Address, Atomic, Int, Int2, NOWHERE, Op, Src};
use crate::parse::{Operand, Symbol};
use crate::types::{Space, Type};

/// Hints and orderings that change nothing where threads run one after the other in one memory.
const HINTS: [&str; 32] = [
    "nc",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "volatile",
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "sc",
    "weak",
    "mmio",
    "cta",
    "cluster",
    "gpu",
    "sys",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "L2::evict_last",
    "L2::evict_normal",
    "L2::evict_first",
    "noftz",
];

pub(super) fn decode(work: &mut Work<'_, '_>, entry: bool) -> Result<(), Refused> {
    match work.statement.opcode {
        "mov" => moved(work),
        "cvta" => cvta(work),
        "isspacep" => {
            let Some(space) = take_space(work) else {
                return work.unknown();
            };
            work.done(2)?;
            let (d, a) = (work.pred_dest(0)?, work.source(1, Type::U64)?);
            work.push(Op::Isspacep { space, d, a });
            Ok(())
        }
        "prefetch" | "prefetchu" | "discard" => {
            work.push(Op::Nop);
            Ok(())
        }
        "ld" | "ldu" => load(work, entry),
        "st" => store(work, entry),
        _ => atomic(work),
    }
}

fn take_space(work: &mut Work<'_, '_>) -> Option<Space> {
    work.take_first(|word| match word {
        "global" | "const" => Some(Space::Global),
        "shared" | "shared::cta" => Some(Space::Shared),
        "local" => Some(Space::Local),
        "param" | "param::entry" | "param::func" => Some(Space::Param),
        _ => None,
    })
}

fn take_hints(work: &mut Work<'_, '_>) {
    work.statement.modifiers.retain(|word| !HINTS.contains(word));
}

fn take_count(work: &mut Work<'_, '_>) -> usize {
    let count = work.take_first(|word| match word {
        "v2" => Some(2),
        "v4" => Some(4),
        "v8" => Some(8),
        _ => None,
    });
    count.unwrap_or(1)
}

/// Where an access goes: parameters of a function that is no kernel are in its frame.
fn place(work: &Work<'_, '_>, index: usize, space: Option<Space>, entry: bool) -> Result<(Space, Address), Refused> {
    let (address, named) = work.address(index)?;
    let space = match (space, named) {
        (Some(Space::Param), Some(Space::Local)) => Space::Local,
        (Some(Space::Param), None) if !entry => Space::Local,
        (Some(space), None) => space,
        (Some(space), Some(named)) if space == named => space,
        (None, None) => Space::Generic,
        (None, Some(Space::Global)) => Space::Global,
        _ => return work.refuse("an address of another state space than the instruction's", super::WRONG),
    };
    Ok((space, address))
}

/// What loads and stores say before their two operands: the state space, how many values, and their type.
fn access_words(work: &mut Work<'_, '_>) -> Result<(Option<Space>, usize, Type), Refused> {
    take_hints(work);
    let space = take_space(work);
    let count = take_count(work);
    let t = work.take_type()?;
    if work.statement.operands.len() == 3 {
        // A cache policy.
        work.take("L2::cache_hint");
        work.statement.operands.truncate(2);
    }
    work.done(2)?;
    Ok((space, count, t))
}

fn load(work: &mut Work<'_, '_>, entry: bool) -> Result<(), Refused> {
    let (space, count, t) = access_words(work)?;
    let (space, address) = place(work, 1, space, entry)?;
    let access = Access {
        space,
        t,
        count: u8::try_from(count).unwrap_or(1),
        address,
    };
    if count == 1 {
        let d = match work.operand(0)? {
            Operand::Vector(list) if list.len() == 1 => match list[0] {
                Operand::Reg(reg, _) => reg,
                _ => return work.wrong(0),
            },
            _ => work.dest(0)?,
        };
        work.push(Op::Load1 { access, d });
        return Ok(());
    }
    let Operand::Vector(list) = work.operand(0)? else {
        return work.wrong(0);
    };
    let registers: Option<Vec<_>> = list.iter().map(register).collect();
    let Some(registers) = registers.filter(|registers| registers.len() == count) else {
        return work.wrong(0);
    };
    let targets = work.side_targets(&registers);
    work.push(Op::Load { access, targets });
    Ok(())
}

const fn register(operand: &Operand<'_>) -> Option<u32> {
    match *operand {
        Operand::Reg(_, Type::Pred) => None,
        Operand::Reg(reg, _) => Some(reg),
        Operand::Sink => Some(NOWHERE),
        _ => None,
    }
}

/// The operands of a vector, or the one that is none.
fn sources(work: &Work<'_, '_>, index: usize, t: Type) -> Result<Vec<Src>, Refused> {
    let sources: Option<Vec<_>> = match work.operand(index)? {
        Operand::Vector(list) => list.iter().map(|operand| operand.source(t)).collect(),
        operand => operand.source(t).map(|source| vec![source]),
    };
    match sources {
        Some(sources) => Ok(sources),
        None => work.wrong(index),
    }
}

fn store(work: &mut Work<'_, '_>, entry: bool) -> Result<(), Refused> {
    let (space, count, t) = access_words(work)?;
    let (space, address) = place(work, 0, space, entry)?;
    if space == Space::Param {
        return work.refuse("a store into a kernel's parameters", super::WRONG);
    }
    let list = sources(work, 1, t)?;
    if list.len() != count {
        return work.wrong(1);
    }
    let operands = work.side(&list);
    let access = Access {
        space,
        t,
        count: u8::try_from(count).unwrap_or(1),
        address,
    };
    work.push(Op::Store { access, operands });
    Ok(())
}

fn atomic(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let red = work.statement.opcode == "red";
    take_hints(work);
    let space = take_space(work);
    let f = work.take_first(|word| {
        Some(match word {
            "add" => Atomic::Add,
            "min" => Atomic::Min,
            "max" => Atomic::Max,
            "and" => Atomic::And,
            "or" => Atomic::Or,
            "xor" => Atomic::Xor,
            "exch" => Atomic::Exch,
            "cas" => Atomic::Cas,
            "inc" => Atomic::Inc,
            "dec" => Atomic::Dec,
            _ => return None,
        })
    });
    let (Some(f), t) = (f, work.take_type()?) else {
        return work.unknown();
    };
    let first = usize::from(!red);
    let values = if f == Atomic::Cas { 2 } else { 1 };
    work.done(first + 1 + values)?;
    let float = matches!(t, Type::F32 | Type::F64 | Type::F16 | Type::Bf16);
    let sound = match f {
        Atomic::Add => float || Int::of(t).is_some_and(|_| t.bytes() >= 4),
        Atomic::Exch | Atomic::Cas => Int::of(t).is_some(),
        _ => Int::of(t).is_some_and(|_| t.bytes() >= 4),
    };
    if !sound {
        return work.unknown();
    }
    let (space, address) = place(work, first, space, true)?;
    if space == Space::Param || space == Space::Local {
        return work.unknown();
    }
    let d = if red { NOWHERE } else { work.dest(0)? };
    let mut list = vec![work.source(first + 1, t)?];
    if values == 2 {
        list.push(work.source(first + 2, t)?);
    }
    let operands = work.side(&list);
    work.push(Op::Atomic {
        f,
        space,
        t,
        d,
        address,
        operands,
    });
    Ok(())
}

fn moved(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let t = work.take_type()?;
    work.done(2)?;
    if t == Type::Pred {
        let d = work.pred_dest(0)?;
        let op = match *work.operand(1)? {
            Operand::Literal(literal) => Op::PredImm {
                d,
                value: literal.bits(Type::U32) != 0,
            },
            _ => Op::PredMov {
                d,
                a: work.predicate(1)?,
            },
        };
        work.push(op);
        return Ok(());
    }
    if let Operand::Vector(list) = work.operand(0)? {
        let registers: Option<Vec<_>> = list.iter().map(register).collect();
        let (Some(registers), a) = (registers, work.source(1, t)?) else {
            return work.wrong(0);
        };
        let (bits, count) = parts(work, t, registers.len())?;
        let targets = work.side_targets(&registers);
        work.push(Op::Unpack {
            bits,
            count,
            targets,
            a,
        });
        return Ok(());
    }
    let d = work.dest(0)?;
    if let Operand::Vector(list) = work.operand(1)? {
        let count = list.len();
        let list = sources(work, 1, t)?;
        let (bits, count) = parts(work, t, count)?;
        let operands = work.side(&list);
        work.push(Op::Pack {
            d,
            bits,
            count,
            operands,
        });
        return Ok(());
    }
    if let Operand::Symbol(symbol, add) = *work.operand(1)? {
        if matches!(symbol, Symbol::Function(_)) {
            return work.refuse(
                "the address of a function",
                "pointers to functions and virtual functions are not interpreted: call by name",
            );
        }
        if add != 0 {
            let Some(a) = Operand::Symbol(symbol, 0).source(t) else {
                return work.wrong(1);
            };
            work.push(Op::Int2 {
                f: Int2::Add,
                t: Int::U64,
                d,
                a,
                b: Src::Imm(add.cast_unsigned()),
            });
            return Ok(());
        }
    }
    let a = work.source(1, t)?;
    work.push(Op::Mov { d, a });
    Ok(())
}

fn parts(work: &Work<'_, '_>, t: Type, count: usize) -> Result<(u8, u8), Refused> {
    match (t.bytes(), count) {
        (2, 2) => Ok((8, 2)),
        (4, 2) => Ok((16, 2)),
        (4, 4) => Ok((8, 4)),
        (8, 2) => Ok((32, 2)),
        (8, 4) => Ok((16, 4)),
        _ => work.wrong(0),
    }
}

/// Between a space's own addresses and generic ones.
fn cvta(work: &mut Work<'_, '_>) -> Result<(), Refused> {
    let to = work.take("to");
    let Some(space) = take_space(work) else {
        return work.unknown();
    };
    if work.take_type()?.bytes() != 8 {
        return work.unknown();
    }
    work.done(2)?;
    let (d, a) = (work.dest(0)?, work.source(1, Type::U64)?);
    let window = match space {
        Space::Generic | Space::Global => 0,
        Space::Shared => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
    };
    if window == 0 {
        work.push(Op::Mov { d, a });
        return Ok(());
    }
    let f = if to { Int2::Sub } else { Int2::Add };
    let b = Src::Imm(window);
    work.push(Op::Int2 {
        f,
        t: Int::U64,
        d,
        a,
        b,
    });
    Ok(())
}
