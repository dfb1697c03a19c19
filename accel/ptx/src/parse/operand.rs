//! Operands of a statement, from its tokens. Knows which name is a register, and no instruction.

use super::Symbol;
use crate::error::Refused;
use crate::inst::{Pred, Reg, Special, Src};
use crate::lex::{Token, cut};
use crate::types::Type;

/// A number as it was written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Literal {
    Integer(u64),
    Single(u32),
    Double(u64),
}

impl Literal {
    /// The bits that an operand of type `t` has.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a decimal fraction in an operand of 32 bits is rounded to it"
    )]
    pub(crate) fn bits(self, t: Type) -> u64 {
        match self {
            Self::Integer(number) => number,
            Self::Single(bits) if t == Type::F64 => f64::from(f32::from_bits(bits)).to_bits(),
            Self::Single(bits) => u64::from(bits),
            Self::Double(bits) if t == Type::F32 => u64::from((f64::from_bits(bits) as f32).to_bits()),
            Self::Double(bits) => bits,
        }
    }
}

/// An operand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Operand<'a> {
    Reg(Reg, Type),
    /// `!%p1`.
    Not(Reg),
    Special(Special),
    Literal(Literal),
    /// A variable, or a parameter, perhaps with something added.
    Symbol(Symbol, i64),
    /// `[…]`.
    Address(Box<Self>, i64),
    Vector(Vec<Self>),
    /// `(…)`, in calls.
    List(Vec<Self>),
    /// `%r1|%p1`.
    Pair(Box<Self>, Box<Self>),
    /// A name that is neither register nor variable: a label, or nothing known.
    Other(&'a str),
    /// `_`.
    Sink,
}

/// Who knows names.
pub(crate) trait Names<'a> {
    fn symbol(&self, name: &'a str) -> Option<Symbol>;
}

/// The tokens of a statement that are left.
pub(crate) struct Cursor<'t, 'a> {
    pub(crate) tokens: &'t [Token<'a>],
    pub(crate) line: u32,
}

impl<'a> Cursor<'_, 'a> {
    fn next(&mut self) -> Option<Token<'a>> {
        let (&first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    pub(crate) fn accept(&mut self, mark: char) -> bool {
        let there = self.tokens.first() == Some(&Token::Mark(mark));
        if there {
            self.next();
        }
        there
    }

    fn refuse<T>(&self, what: &str) -> Result<T, Refused> {
        Err(Refused::new(
            self.line,
            what,
            "compile the source again with nvcc 12 or 13",
        ))
    }

    /// All operands, up to the statement's end.
    pub(crate) fn operands(&mut self, names: &impl Names<'a>) -> Result<Vec<Operand<'a>>, Refused> {
        let mut operands = Vec::new();
        while !self.tokens.is_empty() {
            operands.push(self.operand(names, 0)?);
            if !self.accept(',') && !self.tokens.is_empty() {
                return self.refuse("an operand that is not understood");
            }
        }
        Ok(operands)
    }

    fn operand(&mut self, names: &impl Names<'a>, depth: u32) -> Result<Operand<'a>, Refused> {
        if depth > 4 {
            return self.refuse("operands within operands");
        }
        let first = match self.next() {
            Some(Token::Mark('[')) => return self.address(names, depth),
            Some(Token::Mark('{')) => return Ok(Operand::Vector(self.list(names, depth, '}')?)),
            Some(Token::Mark('(')) => return Ok(Operand::List(self.list(names, depth, ')')?)),
            Some(Token::Mark('!')) => match self.operand(names, depth + 1)? {
                Operand::Reg(reg, Type::Pred) => return Ok(Operand::Not(reg)),
                _ => return self.refuse("'!' before what is no predicate"),
            },
            Some(Token::Mark('-')) => match self.next() {
                Some(Token::Integer(number)) => Operand::Literal(Literal::Integer(number.wrapping_neg())),
                Some(Token::Double(bits)) => Operand::Literal(Literal::Double(bits ^ (1 << 63))),
                _ => return self.refuse("'-' before what is no number"),
            },
            Some(Token::Integer(number)) => Operand::Literal(Literal::Integer(number)),
            Some(Token::Single(bits)) => Operand::Literal(Literal::Single(bits)),
            Some(Token::Double(bits)) => Operand::Literal(Literal::Double(bits)),
            Some(Token::Name(name)) => self.named(name, names)?,
            _ => return self.refuse("an operand that is not understood"),
        };
        if self.accept('|') {
            let second = self.operand(names, depth + 1)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn list(&mut self, names: &impl Names<'a>, depth: u32, end: char) -> Result<Vec<Operand<'a>>, Refused> {
        let mut list = Vec::new();
        if self.accept(end) {
            return Ok(list);
        }
        loop {
            list.push(self.operand(names, depth + 1)?);
            if self.accept(end) {
                return Ok(list);
            }
            if !self.accept(',') {
                return self.refuse("a list without an end");
            }
        }
    }

    fn address(&mut self, names: &impl Names<'a>, depth: u32) -> Result<Operand<'a>, Refused> {
        let base = self.operand(names, depth + 1)?;
        let add = self.added()?;
        if !self.accept(']') {
            return self.refuse("an address that is not understood");
        }
        Ok(Operand::Address(Box::new(base), add))
    }

    /// `+4`, `+-4`, `-4`, or nothing.
    fn added(&mut self) -> Result<i64, Refused> {
        let mut negative = self.accept('-');
        if !negative {
            if !self.accept('+') {
                return Ok(0);
            }
            negative = self.accept('-');
        }
        match self.next() {
            Some(Token::Integer(number)) => {
                let number = number.cast_signed();
                Ok(if negative { number.wrapping_neg() } else { number })
            }
            _ => self.refuse("an offset that is no number"),
        }
    }

    fn named(&mut self, name: &'a str, names: &impl Names<'a>) -> Result<Operand<'a>, Refused> {
        if name == "_" {
            return Ok(Operand::Sink);
        }
        match names.symbol(name) {
            Some(Symbol::Register(reg, t)) => return Ok(Operand::Reg(reg, t)),
            Some(symbol) => {
                let add = if matches!(self.tokens.first(), Some(Token::Mark('+'))) {
                    self.added()?
                } else {
                    0
                };
                return Ok(Operand::Symbol(symbol, add));
            }
            None => {}
        }
        let mut part = None;
        if let Some(&Token::Dot(suffix)) = self.tokens.first() {
            self.next();
            part = Some(suffix);
        }
        if name.starts_with('%') || name == "WARP_SZ" {
            return match special(name, part) {
                Some(special) => Ok(Operand::Special(special)),
                None => self.refuse(&format!(
                    "'{}' is neither a register nor a special one that is interpreted",
                    cut(name)
                )),
            };
        }
        Ok(Operand::Other(name))
    }
}

fn special(name: &str, part: Option<&str>) -> Option<Special> {
    let axis = match part {
        None => None,
        Some("x") => Some(0),
        Some("y") => Some(1),
        Some("z") => Some(2),
        Some(_) => return None,
    };
    Some(match (name, axis) {
        ("%tid", Some(axis)) => Special::Tid(axis),
        ("%ntid", Some(axis)) => Special::Ntid(axis),
        ("%ctaid", Some(axis)) => Special::Ctaid(axis),
        ("%nctaid", Some(axis)) => Special::Nctaid(axis),
        ("%laneid", None) => Special::Lane,
        ("%warpid", None) => Special::Warp,
        ("%nwarpid", None) => Special::Warps,
        ("%lanemask_eq", None) => Special::MaskEq,
        ("%lanemask_le", None) => Special::MaskLe,
        ("%lanemask_lt", None) => Special::MaskLt,
        ("%lanemask_ge", None) => Special::MaskGe,
        ("%lanemask_gt", None) => Special::MaskGt,
        ("%clock" | "%clock64" | "%clock_hi" | "%globaltimer" | "%globaltimer_lo", None) => Special::Clock,
        ("%dynamic_smem_size", None) => Special::DynamicShared,
        ("%total_smem_size", None) => Special::TotalShared,
        ("%smid" | "%gridid", None) => Special::Zero,
        ("%nsmid", None) => Special::One,
        ("WARP_SZ", None) => Special::WarpSize,
        _ => return None,
    })
}

impl Operand<'_> {
    /// As a source of type `t`.
    pub(crate) fn source(&self, t: Type) -> Option<Src> {
        Some(match *self {
            Self::Reg(_, Type::Pred) => return None,
            Self::Reg(reg, _) => Src::Reg(reg),
            Self::Special(special) => Src::Special(special),
            Self::Literal(literal) => Src::Imm(literal.bits(t)),
            Self::Symbol(symbol, 0) => match symbol {
                Symbol::Variable(index) => Src::Symbol(index),
                Symbol::SharedModule(offset) => Src::Shared(offset),
                Symbol::SharedKernel(offset) | Symbol::KernelParameter(offset) => Src::Imm(u64::from(offset)),
                Symbol::SharedDynamic => Src::Dynamic,
                Symbol::Local(offset) => Src::Local(offset),
                Symbol::Function(_) | Symbol::Register(..) => return None,
            },
            _ => return None,
        })
    }

    /// As a predicate that is read.
    pub(crate) const fn predicate(&self) -> Option<Pred> {
        match *self {
            Self::Reg(reg, Type::Pred) => Some(Pred { reg, not: false }),
            Self::Not(reg) => Some(Pred { reg, not: true }),
            _ => None,
        }
    }
}
