//! A function's body: scopes, registers, local and shared variables, labels, statements. What an instruction means is `decode`'s.

use std::collections::HashMap;

use super::operand::{Cursor, Names};
use super::variable::{Declared, place};
use super::{MAX_INSTRUCTIONS, MAX_LOCAL, MAX_PARAMETERS, MAX_REGISTERS, MAX_SHARED, Reader, Symbol};
use crate::decode::{self, Decoder};
use crate::error::Refused;
use crate::inst::{Inst, NOWHERE, Op, Pred};
use crate::lex::{Token, cut};
use crate::program::Slot;
use crate::types::Type;

/// What a function's head says.
#[derive(Debug, Default)]
pub(super) struct Formal<'a> {
    pub(super) results: Vec<Declared<'a>>,
    pub(super) parameters: Vec<Declared<'a>>,
}

/// No statement has more tokens; a table of branch targets is the longest.
const MAX_TOKENS: usize = 16_384;
/// No block is deeper in others.
const MAX_SCOPES: usize = 64;

/// Where parameters lie, one after the other, and where they end.
pub(super) fn layout(declared: &[Declared<'_>], mut end: u32) -> (Vec<Slot>, u32) {
    let mut slots = Vec::with_capacity(declared.len());
    for one in declared {
        let (offset, next) = place(end, one);
        slots.push(Slot {
            offset,
            size: next - offset,
        });
        end = next;
    }
    (slots, end)
}

/// Names of one block: registers one by one, and families such as `%r<40>`.
#[derive(Debug, Default)]
struct Scope<'a> {
    names: HashMap<&'a str, Symbol>,
    families: HashMap<&'a str, (u32, u32, Type)>,
}

/// What is known while a body is read.
struct Body<'a> {
    scopes: Vec<Scope<'a>>,
    module: HashMap<&'a str, Symbol>,
    registers: u32,
    local: u32,
    shared: u32,
    entry: bool,
    labels: HashMap<&'a str, u32>,
    /// `.branchtargets` by their label.
    tables: HashMap<&'a str, Vec<&'a str>>,
    refused: Option<Refused>,
}

impl<'a> Names<'a> for Body<'a> {
    fn symbol(&self, name: &'a str) -> Option<Symbol> {
        let stem = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
        let number = name[stem.len()..].parse::<u32>().ok();
        for scope in self.scopes.iter().rev() {
            if let Some(&symbol) = scope.names.get(name) {
                return Some(symbol);
            }
            if let (Some(number), Some(&(first, count, t))) = (number, scope.families.get(stem))
                && number < count
            {
                return Some(Symbol::Register(first + number, t));
            }
        }
        self.module.get(name).copied()
    }
}

impl<'a> Body<'a> {
    fn declare(&mut self, name: &'a str, symbol: Symbol) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.names.insert(name, symbol);
        }
    }
}

impl<'a> Reader<'a> {
    /// Reads a body, after its opening brace, up to and with its closing one.
    pub(super) fn body(&mut self, index: u32, entry: bool, formal: &Formal<'a>) -> Result<(), Refused> {
        let mut body = Body {
            scopes: vec![Scope::default()],
            module: std::mem::take(&mut self.symbols),
            registers: 0,
            local: 0,
            shared: 0,
            entry,
            labels: HashMap::new(),
            tables: HashMap::new(),
            refused: None,
        };
        let (mut parameters, mut results) = (Vec::new(), Vec::new());
        if entry {
            let (slots, _) = layout(&formal.parameters, 0);
            for (slot, declared) in slots.iter().zip(&formal.parameters) {
                body.declare(declared.name, Symbol::KernelParameter(slot.offset));
            }
        } else {
            let (slots, end) = layout(&formal.parameters, 0);
            let (outs, end) = layout(&formal.results, end);
            body.local = end;
            let declared = formal.parameters.iter().chain(&formal.results);
            for (slot, declared) in slots.iter().chain(&outs).zip(declared) {
                body.declare(declared.name, Symbol::Local(slot.offset));
            }
            (parameters, results) = (slots, outs);
        }
        let first = self.program.code.insts.len();
        let mut decoder = Decoder::new(index, entry);
        let read = self.statements(&mut body, &mut decoder);
        self.symbols = std::mem::take(&mut body.module);
        read?;
        self.push(Op::Ret)?;
        self.resolve(&mut body, &decoder);
        if parameters.iter().chain(&results).map(|slot| slot.size).sum::<u32>() > MAX_PARAMETERS {
            let what = format!("more than {MAX_PARAMETERS} bytes of parameters of a function");
            return self.lexer.refuse(what, "pass a pointer to them");
        }
        if body.local > MAX_LOCAL {
            let what = format!("{} bytes of local memory, {MAX_LOCAL} are allowed", body.local);
            return self.lexer.refuse(what, "use global memory");
        }
        let function = &mut self.program.functions[index as usize];
        function.entry = u32::try_from(first).unwrap_or(u32::MAX);
        function.registers = body.registers;
        function.local_bytes = (body.local + 127) & !127;
        function.shared_bytes = body.shared;
        function.parameters = parameters;
        function.results = results;
        function.calls = decoder.calls;
        function.refused = body.refused;
        function.defined = true;
        Ok(())
    }

    fn push(&mut self, op: Op) -> Result<(), Refused> {
        if self.program.code.insts.len() >= MAX_INSTRUCTIONS {
            return self.lexer.refuse(
                format!("more than {MAX_INSTRUCTIONS} instructions"),
                "divide the module",
            );
        }
        self.program.code.insts.push(Inst {
            op,
            guard: Pred {
                reg: NOWHERE,
                not: false,
            },
            line: self.lexer.line(),
        });
        Ok(())
    }

    fn statements(&mut self, body: &mut Body<'a>, decoder: &mut Decoder<'a>) -> Result<(), Refused> {
        let mut tokens = Vec::new();
        loop {
            match self.lexer.next()? {
                Token::Mark('}') => {
                    body.scopes.pop();
                    if body.scopes.is_empty() {
                        return Ok(());
                    }
                }
                Token::Mark('{') => {
                    body.scopes.push(Scope::default());
                    if body.scopes.len() > MAX_SCOPES {
                        return self
                            .lexer
                            .refuse(format!("more than {MAX_SCOPES} nested blocks"), "flatten them");
                    }
                }
                Token::Mark(';') => {}
                Token::Dot(word) => self.local_directive(word, body)?,
                Token::Mark('@') => {
                    let not = self.lexer.accept('!')?;
                    let name = self.lexer.name()?;
                    let Some(Symbol::Register(reg, Type::Pred)) = body.symbol(name) else {
                        let what = format!("'{}' is no predicate", cut(name));
                        return self.lexer.refuse(what, "declare it as .reg .pred");
                    };
                    let opcode = self.lexer.name()?;
                    self.statement(opcode, Pred { reg, not }, body, decoder, &mut tokens)?;
                }
                Token::Name(name) => {
                    if self.lexer.accept(':')? {
                        self.label(name, body)?;
                    } else {
                        let always = Pred {
                            reg: NOWHERE,
                            not: false,
                        };
                        self.statement(name, always, body, decoder, &mut tokens)?;
                    }
                }
                other => return self.lexer.unexpected(other, "an instruction or '}'"),
            }
        }
    }

    fn label(&mut self, name: &'a str, body: &mut Body<'a>) -> Result<(), Refused> {
        match self.lexer.peek()? {
            Token::Dot("branchtargets") => {
                self.lexer.next()?;
                let mut targets = Vec::new();
                loop {
                    targets.push(self.lexer.name()?);
                    if targets.len() > MAX_TOKENS {
                        return self.lexer.refuse("too many branch targets", "divide the switch");
                    }
                    if !self.lexer.accept(',')? {
                        break;
                    }
                }
                body.tables.insert(name, targets);
                return self.lexer.expect(';');
            }
            // Of indirect calls, which are refused where they are.
            Token::Dot("callprototype" | "calltargets") => return self.skip_statement(),
            _ => {}
        }
        let here = u32::try_from(self.program.code.insts.len()).unwrap_or(u32::MAX);
        if body.labels.insert(name, here).is_some() {
            return self.lexer.refuse(
                format!("label '{}' is there twice", cut(name)),
                "give labels names of their own",
            );
        }
        Ok(())
    }

    fn local_directive(&mut self, word: &'a str, body: &mut Body<'a>) -> Result<(), Refused> {
        match word {
            "loc" | "file" => {
                self.lexer.skip_line();
                Ok(())
            }
            "pragma" => self.skip_statement(),
            "reg" => self.registers(body),
            "local" | "param" => {
                let declared = self.declaration()?;
                let (offset, end) = place(body.local, &declared);
                if end > MAX_LOCAL {
                    let what = format!("{end} bytes of local memory, {MAX_LOCAL} are allowed");
                    return self.lexer.refuse(what, "use global memory");
                }
                body.local = end;
                body.declare(declared.name, Symbol::Local(offset));
                self.lexer.expect(';')
            }
            "shared" => {
                let declared = self.declaration()?;
                let symbol = if declared.open {
                    Symbol::SharedDynamic
                } else if body.entry {
                    let (offset, end) = place(body.shared, &declared);
                    if end > MAX_SHARED {
                        let what = format!("{end} bytes of shared memory, {MAX_SHARED} are allowed");
                        return self.lexer.refuse(what, "use less");
                    }
                    body.shared = end;
                    Symbol::SharedKernel(offset)
                } else {
                    Symbol::SharedModule(self.shared_at_module(&declared)?)
                };
                body.declare(declared.name, symbol);
                self.lexer.expect(';')
            }
            "extern" => match self.lexer.next()? {
                Token::Dot("shared") => {
                    let declared = self.declaration()?;
                    body.declare(declared.name, Symbol::SharedDynamic);
                    self.lexer.expect(';')
                }
                other => self.lexer.unexpected(other, ".shared"),
            },
            "global" | "const" => {
                let declared = self.declaration()?;
                let index = self.add_variable(word, &declared)?;
                body.declare(declared.name, Symbol::Variable(index));
                if self.lexer.accept('=')? {
                    self.initial(index, &declared)?;
                }
                self.lexer.expect(';')
            }
            _ => self.lexer.refuse(
                format!("directive '.{}' in a function", cut(word)),
                "compile with nvcc 12 or 13 without it",
            ),
        }
    }

    /// `.reg .f32 %f<40>;` or `.reg .b32 a, b;`.
    fn registers(&mut self, body: &mut Body<'a>) -> Result<(), Refused> {
        let t = match self.lexer.next()? {
            Token::Dot(name) => match Type::parse(name) {
                Some(t) => t,
                None => {
                    let what = format!("registers of type '.{}'", cut(name));
                    return self.lexer.refuse(what, "use types of at most 64 bits");
                }
            },
            other => return self.lexer.unexpected(other, "a type"),
        };
        loop {
            let name = self.lexer.name()?;
            let mut count = 1;
            let family = self.lexer.accept('<')?;
            if family {
                count = u32::try_from(self.lexer.count()?).unwrap_or(u32::MAX);
                self.lexer.expect('>')?;
            }
            let first = body.registers;
            body.registers = first.saturating_add(count);
            if body.registers > MAX_REGISTERS {
                let what = format!("more than {MAX_REGISTERS} registers in one function");
                return self.lexer.refuse(what, "divide the function");
            }
            if let Some(scope) = body.scopes.last_mut() {
                if family {
                    scope.families.insert(name, (first, count, t));
                } else {
                    scope.names.insert(name, Symbol::Register(first, t));
                }
            }
            if !self.lexer.accept(',')? {
                return self.lexer.expect(';');
            }
        }
    }

    /// One instruction. What cannot be interpreted is remembered, and the kernels that reach it do not run.
    fn statement(
        &mut self,
        opcode: &'a str,
        guard: Pred,
        body: &mut Body<'a>,
        decoder: &mut Decoder<'a>,
        tokens: &mut Vec<Token<'a>>,
    ) -> Result<(), Refused> {
        let line = self.lexer.line();
        tokens.clear();
        loop {
            match self.lexer.next()? {
                Token::Mark(';') => break,
                Token::End => return self.lexer.unexpected(Token::End, "';'"),
                token => tokens.push(token),
            }
            if tokens.len() > MAX_TOKENS {
                return self.lexer.refuse("a statement that is too long", "divide it");
            }
        }
        let words = tokens.iter().take_while(|token| matches!(token, Token::Dot(_))).count();
        let modifiers: Vec<&'a str> = tokens[..words]
            .iter()
            .filter_map(|token| match token {
                Token::Dot(word) => Some(*word),
                _ => None,
            })
            .collect();
        let mut cursor = Cursor {
            tokens: &tokens[words..],
            line,
        };
        let first = self.program.code.insts.len();
        let operands = decode::refuse_family(opcode, line).and_then(|()| cursor.operands(body));
        let decoded = operands.and_then(|operands| {
            let statement = decode::Statement {
                line,
                opcode,
                modifiers,
                operands,
            };
            decoder.statement(statement, &mut self.program)
        });
        match decoded {
            Ok(()) => {}
            Err(refused) => {
                self.program.code.insts.truncate(first);
                body.refused.get_or_insert(refused);
                self.push(Op::Trap)?;
            }
        }
        for inst in &mut self.program.code.insts[first..] {
            inst.line = line;
            if guard.reg != NOWHERE {
                inst.guard = guard;
            }
        }
        if self.program.code.insts.len() > MAX_INSTRUCTIONS {
            return self.lexer.refuse(
                format!("more than {MAX_INSTRUCTIONS} instructions"),
                "divide the module",
            );
        }
        Ok(())
    }

    /// Fills in where branches go, now that all labels are known.
    fn resolve(&mut self, body: &mut Body<'a>, decoder: &Decoder<'a>) {
        for &(at, label, line) in &decoder.branches {
            if let Some(&target) = body.labels.get(label) {
                if let Some(inst) = self.program.code.insts.get_mut(at as usize) {
                    inst.op = Op::Bra { target };
                }
            } else {
                body.refused.get_or_insert(no_label(label, line));
            }
        }
        for &(table, label, line) in &decoder.tables {
            let Some(labels) = body.tables.get(label) else {
                body.refused.get_or_insert(no_label(label, line));
                continue;
            };
            let mut targets = Vec::with_capacity(labels.len());
            for label in labels {
                match body.labels.get(label) {
                    Some(&target) => targets.push(target),
                    None => {
                        body.refused.get_or_insert(no_label(label, line));
                    }
                }
            }
            if let Some(table) = self.program.code.tables.get_mut(table as usize) {
                *table = targets;
            }
        }
    }
}

fn no_label(label: &str, line: u32) -> Refused {
    Refused::new(
        line,
        format!("no label '{}' in this function", cut(label)),
        "compile the source again with nvcc 12 or 13",
    )
}
