//! Branches, calls, ends.

use super::{Decoder, WRONG, Work};
use crate::error::Refused;
use crate::inst::{CallSite, Op};
use crate::lex::cut;
use crate::parse::{Operand, Symbol};
use crate::types::Type;

pub(super) fn decode<'a>(decoder: &mut Decoder<'a>, work: &mut Work<'_, 'a>) -> Result<(), Refused> {
    work.take("uni");
    match work.statement.opcode {
        "bra" => {
            work.done(1)?;
            let Operand::Other(label) = *work.operand(0)? else {
                return work.wrong(0);
            };
            let at = u32::try_from(work.program.code.insts.len()).unwrap_or(u32::MAX);
            decoder.branches.push((at, label, work.statement.line));
            work.push(Op::Bra { target: 0 });
        }
        "brx" => {
            work.take("idx");
            work.done(2)?;
            let a = work.source(0, Type::U32)?;
            let Operand::Other(label) = *work.operand(1)? else {
                return work.wrong(1);
            };
            let next = u32::try_from(work.program.code.tables.len()).unwrap_or(u32::MAX);
            let table = *decoder.known_tables.entry(label).or_insert(next);
            if table == next {
                work.program.code.tables.push(Vec::new());
                decoder.tables.push((table, label, work.statement.line));
            }
            work.push(Op::BraIdx { table, a });
        }
        "call" => call(decoder, work)?,
        "ret" => {
            work.done(0)?;
            work.push(Op::Ret);
        }
        "exit" => {
            work.done(0)?;
            work.push(Op::Exit);
        }
        _ => {
            work.done(0)?;
            work.push(Op::Trap);
        }
    }
    Ok(())
}

/// `call (results), function, (arguments)`; both lists may be missing.
fn call<'a>(decoder: &mut Decoder<'a>, work: &mut Work<'_, 'a>) -> Result<(), Refused> {
    if !work.statement.modifiers.is_empty() {
        return work.unknown();
    }
    let mut operands = work.statement.operands.iter();
    let mut next = operands.next();
    let mut results = &[][..];
    if let Some(Operand::List(list)) = next {
        results = list;
        next = operands.next();
    }
    let function = match next {
        Some(&Operand::Symbol(Symbol::Function(index), 0)) => index,
        Some(Operand::Other(name)) => {
            return work.refuse(format!("function '{}' is not declared", cut(name)), WRONG);
        }
        _ => {
            return work.refuse(
                "a call through a pointer",
                "pointers to functions and virtual functions are not interpreted: call by name",
            );
        }
    };
    let arguments = match operands.next() {
        Some(Operand::List(list)) => list,
        Some(_) => return work.wrong(2),
        None => &[][..],
    };
    let offsets = |list: &[Operand<'a>]| -> Option<Vec<u32>> {
        let offset = |operand: &Operand<'a>| match *operand {
            Operand::Symbol(Symbol::Local(offset), 0) => Some(offset),
            _ => None,
        };
        list.iter().map(offset).collect()
    };
    let (Some(arguments), Some(results)) = (offsets(arguments), offsets(results)) else {
        return work.refuse("a call with operands that are no .param variables", WRONG);
    };
    if work.program.functions[function as usize].name == "__assertfail" {
        work.push(Op::AssertFail);
        return Ok(());
    }
    decoder.calls.push(function);
    let site = u32::try_from(work.program.code.calls.len()).unwrap_or(u32::MAX);
    work.program.code.calls.push(CallSite {
        caller: decoder.function(),
        function,
        arguments,
        results,
    });
    work.push(Op::Call { site });
    Ok(())
}
