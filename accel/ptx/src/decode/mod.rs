//! Statements into instructions: which opcode with which modifiers and operands is what. What is not listed is refused, so that
//! nothing is carried out differently from what its text says. Knows no thread and no memory.

mod control;
mod data;
mod float;
mod integer;
mod warp;

use std::collections::HashMap;

use crate::error::Refused;
use crate::inst::{Address, Inst, NOWHERE, Op, Pred, Reg, Src};
use crate::lex::cut;
use crate::parse::{Operand, Symbol};
use crate::program::Program;
use crate::types::{Space, Type};

/// An instruction as it was written.
pub(crate) struct Statement<'a> {
    pub(crate) line: u32,
    pub(crate) opcode: &'a str,
    pub(crate) modifiers: Vec<&'a str>,
    pub(crate) operands: Vec<Operand<'a>>,
}

/// What a function's instructions leave to be done at its end.
pub(crate) struct Decoder<'a> {
    function: u32,
    entry: bool,
    /// Functions that are called.
    pub(crate) calls: Vec<u32>,
    /// Branches, by instruction and label.
    pub(crate) branches: Vec<(u32, &'a str, u32)>,
    /// Tables of branches, by the name of the list.
    pub(crate) tables: Vec<(u32, &'a str, u32)>,
    /// The table of each list: a list is resolved once, however many branches use it.
    known_tables: HashMap<&'a str, u32>,
}

/// One statement while it is decoded: modifiers are taken away, and none may be left.
struct Work<'s, 'a> {
    statement: &'s mut Statement<'a>,
    program: &'s mut Program,
}

const WRONG: &str = "compile the source again with nvcc 12 or 13, without inline assembler of this kind";

/// Families of instructions of which none is interpreted; their operands may have forms that no other has.
fn whole_family(opcode: &str) -> Option<&'static str> {
    Some(match opcode {
        "wmma" | "mma" | "wgmma" | "ldmatrix" | "stmatrix" | "tcgen05" | "movmatrix" => {
            "tensor cores are not interpreted: compile the kernel without them"
        }
        "tex" | "tld4" | "txq" | "suld" | "sust" | "sured" | "suq" => {
            "textures and surfaces are not interpreted: read from global memory"
        }
        "cp" | "mbarrier" | "tensormap" | "multimem" => {
            "asynchronous copies are not interpreted: compile the kernel without them, or for compute_75"
        }
        _ => return None,
    })
}

/// Refuses an instruction by its name, before its operands are looked at.
pub(crate) fn refuse_family(opcode: &str, line: u32) -> Result<(), Refused> {
    match whole_family(opcode) {
        Some(advice) => Err(Refused::new(
            line,
            format!("instruction '{opcode}' is not interpreted"),
            advice,
        )),
        None => Ok(()),
    }
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(function: u32, entry: bool) -> Self {
        Self {
            function,
            entry,
            calls: Vec::new(),
            branches: Vec::new(),
            tables: Vec::new(),
            known_tables: HashMap::new(),
        }
    }

    /// Adds the instructions of one statement to the program.
    pub(crate) fn statement(&mut self, mut statement: Statement<'a>, program: &mut Program) -> Result<(), Refused> {
        let opcode = statement.opcode;
        let mut work = Work {
            statement: &mut statement,
            program,
        };
        match opcode {
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" => control::decode(self, &mut work),
            "bar" | "barrier" | "shfl" | "vote" | "match" | "redux" | "activemask" | "membar" | "fence"
            | "nanosleep" => warp::decode(&mut work),
            "ld" | "ldu" | "st" | "atom" | "red" | "mov" | "cvta" | "isspacep" | "prefetch" | "prefetchu"
            | "discard" => data::decode(&mut work, self.entry),
            "cvt" | "setp" | "set" | "selp" | "slct" | "testp" => float::convert_and_compare(&mut work),
            _ if work.is_float() => float::decode(&mut work),
            _ => integer::decode(&mut work),
        }
    }

    pub(crate) const fn function(&self) -> u32 {
        self.function
    }
}

impl<'a> Work<'_, 'a> {
    fn refuse<T>(&self, what: impl Into<String>, advice: &str) -> Result<T, Refused> {
        Err(Refused::new(self.statement.line, what, advice))
    }

    /// The instruction as it was written, for messages.
    fn shown(&self) -> String {
        let mut text = self.statement.opcode.to_owned();
        for word in &self.statement.modifiers {
            text.push('.');
            text.push_str(word);
        }
        cut(&text).to_owned()
    }

    fn unknown<T>(&self) -> Result<T, Refused> {
        let advice = whole_family(self.statement.opcode)
            .unwrap_or("compile the kernel without it; docs/accel-ptx.md lists what is interpreted");
        self.refuse(format!("instruction '{}' is not interpreted", self.shown()), advice)
    }

    fn has(&self, word: &str) -> bool {
        self.statement.modifiers.contains(&word)
    }

    /// Takes a modifier, if it is there.
    fn take(&mut self, word: &str) -> bool {
        let found = self.statement.modifiers.iter().position(|&modifier| modifier == word);
        if let Some(at) = found {
            self.statement.modifiers.remove(at);
        }
        found.is_some()
    }

    /// Takes the first modifier that `parse` knows.
    fn take_first<T>(&mut self, parse: impl Fn(&'a str) -> Option<T>) -> Option<T> {
        let found = self.statement.modifiers.iter().enumerate();
        let (at, value) = found.filter_map(|(at, word)| Some((at, parse(word)?))).next()?;
        self.statement.modifiers.remove(at);
        Some(value)
    }

    /// Takes the type, which every instruction of this kind has.
    fn take_type(&mut self) -> Result<Type, Refused> {
        match self.take_first(Type::parse) {
            Some(t) => Ok(t),
            None => self.unknown(),
        }
    }

    /// Whether the first type is floating point: then the instruction is one of these.
    fn is_float(&self) -> bool {
        let mut words = self.statement.modifiers.iter();
        words.find_map(|word| Type::parse(word)).is_some_and(Type::is_float)
    }

    /// Nothing of the instruction may be left unread.
    fn done(&self, operands: usize) -> Result<(), Refused> {
        if !self.statement.modifiers.is_empty() {
            return self.unknown();
        }
        if self.statement.operands.len() != operands {
            let what = format!(
                "'{}' has {} operands, not {operands}",
                self.statement.opcode,
                self.statement.operands.len()
            );
            return self.refuse(what, WRONG);
        }
        Ok(())
    }

    fn push(&mut self, op: Op) {
        self.program.code.insts.push(Inst {
            op,
            guard: Pred {
                reg: NOWHERE,
                not: false,
            },
            line: self.statement.line,
        });
    }

    fn operand(&self, index: usize) -> Result<&Operand<'a>, Refused> {
        match self.statement.operands.get(index) {
            Some(operand) => Ok(operand),
            None => self.refuse(format!("'{}' lacks an operand", self.statement.opcode), WRONG),
        }
    }

    fn wrong<T>(&self, index: usize) -> Result<T, Refused> {
        self.refuse(
            format!(
                "operand {} of '{}' is not what it takes",
                index + 1,
                self.statement.opcode
            ),
            WRONG,
        )
    }

    /// A register that is written.
    fn dest(&self, index: usize) -> Result<Reg, Refused> {
        match self.operand(index)? {
            Operand::Reg(_, Type::Pred) => self.wrong(index),
            Operand::Reg(reg, _) => Ok(*reg),
            Operand::Sink => Ok(NOWHERE),
            _ => self.wrong(index),
        }
    }

    /// A predicate that is written.
    fn pred_dest(&self, index: usize) -> Result<Reg, Refused> {
        match self.operand(index)? {
            Operand::Reg(reg, Type::Pred) => Ok(*reg),
            Operand::Sink => Ok(NOWHERE),
            _ => self.wrong(index),
        }
    }

    fn source(&self, index: usize, t: Type) -> Result<Src, Refused> {
        match self.operand(index)?.source(t) {
            Some(source) => Ok(source),
            None => self.wrong(index),
        }
    }

    fn predicate(&self, index: usize) -> Result<Pred, Refused> {
        match self.operand(index)?.predicate() {
            Some(predicate) => Ok(predicate),
            None => self.wrong(index),
        }
    }

    /// Several sources, kept in the side table; where they begin.
    fn side(&mut self, sources: &[Src]) -> u32 {
        let operands = &mut self.program.code.operands;
        let first = u32::try_from(operands.len()).unwrap_or(u32::MAX);
        operands.extend_from_slice(sources);
        first
    }

    /// Several registers that are written.
    fn side_targets(&mut self, registers: &[Reg]) -> u32 {
        let targets = &mut self.program.code.targets;
        let first = u32::try_from(targets.len()).unwrap_or(u32::MAX);
        targets.extend_from_slice(registers);
        first
    }

    /// `[…]`, and the space that the name in it has, if it is one.
    fn address(&self, index: usize) -> Result<(Address, Option<Space>), Refused> {
        let Operand::Address(base, offset) = self.operand(index)? else {
            return self.wrong(index);
        };
        let (base, more, space) = match **base {
            Operand::Reg(_, Type::Pred) => return self.wrong(index),
            Operand::Reg(reg, _) => (Src::Reg(reg), 0, None),
            Operand::Literal(literal) => (Src::Imm(literal.bits(Type::U64)), 0, None),
            Operand::Symbol(symbol, more) => {
                let (base, space) = match symbol {
                    Symbol::Variable(index) => (Src::Symbol(index), Space::Global),
                    Symbol::SharedModule(offset) => (Src::Shared(offset), Space::Shared),
                    Symbol::SharedKernel(offset) => (Src::Imm(u64::from(offset)), Space::Shared),
                    Symbol::SharedDynamic => (Src::Dynamic, Space::Shared),
                    Symbol::Local(offset) => (Src::Local(offset), Space::Local),
                    Symbol::KernelParameter(offset) => (Src::Imm(u64::from(offset)), Space::Param),
                    Symbol::Function(_) | Symbol::Register(..) => return self.wrong(index),
                };
                (base, more, Some(space))
            }
            _ => return self.wrong(index),
        };
        let offset = offset.wrapping_add(more);
        Ok((Address { base, offset }, space))
    }
}
