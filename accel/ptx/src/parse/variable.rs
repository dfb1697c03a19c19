//! Declarations of variables and parameters: type, alignment, size, initial value. Knows no instruction.

use super::{MAX_SHARED, MAX_SYMBOLS, MAX_VARIABLES, Reader, Symbol};
use crate::error::Refused;
use crate::lex::{Token, cut};
use crate::program::{Relocation, Variable, VariableKind};
use crate::types::Type;

/// What a declaration says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Declared<'a> {
    pub(crate) name: &'a str,
    pub(crate) align: u32,
    pub(crate) element: u32,
    pub(crate) size: u64,
    /// `name[]`: the size comes from elsewhere.
    pub(crate) open: bool,
    pub(crate) float: bool,
}

impl<'a> Reader<'a> {
    /// `.align 4 .b8 name[16]`, after the state space.
    pub(super) fn declaration(&mut self) -> Result<Declared<'a>, Refused> {
        let mut align = 0;
        let mut element = None;
        let mut vector = 1;
        let mut pointer = false;
        loop {
            match self.lexer.peek()? {
                Token::Dot("align") => {
                    self.lexer.next()?;
                    let given = self.alignment()?;
                    // Behind `.ptr` it is that of what the parameter points to.
                    if !pointer {
                        align = given;
                    }
                }
                Token::Dot("ptr") => {
                    self.lexer.next()?;
                    pointer = true;
                }
                Token::Dot("v2") => {
                    self.lexer.next()?;
                    vector = 2;
                }
                Token::Dot("v4") => {
                    self.lexer.next()?;
                    vector = 4;
                }
                // Where a pointer parameter points to.
                Token::Dot("const" | "global" | "shared" | "local") if pointer => {
                    self.lexer.next()?;
                }
                Token::Dot("attribute") => {
                    self.lexer.next()?;
                    return self.lexer.refuse(
                        "an attribute of a variable",
                        "use neither managed nor unified variables",
                    );
                }
                Token::Dot(word @ ("texref" | "samplerref" | "surfref")) => {
                    let advice = "textures and surfaces are not interpreted: read from global memory";
                    return self.lexer.refuse(format!("a variable of type '.{word}'"), advice);
                }
                Token::Dot(word) => {
                    self.lexer.next()?;
                    let Some(t) = Type::parse(word).filter(|&t| t != Type::Pred) else {
                        let what = format!("a variable of type '.{}'", cut(word));
                        return self.lexer.refuse(what, "use a type of 8 to 64 bits");
                    };
                    element = Some(t);
                }
                _ => break,
            }
        }
        let Some(t) = element else {
            let found = self.lexer.next()?;
            return self.lexer.unexpected(found, "a type");
        };
        let name = self.lexer.name()?;
        let element = t.bytes();
        let mut size = u64::from(element) * vector;
        let mut open = false;
        while self.lexer.accept('[')? {
            if self.lexer.accept(']')? {
                open = true;
                continue;
            }
            size = size.saturating_mul(self.lexer.count()?);
            self.lexer.expect(']')?;
        }
        if size > MAX_VARIABLES {
            let what = format!("'{}' has {size} bytes, {MAX_VARIABLES} are allowed", cut(name));
            return self.lexer.refuse(what, "allocate it at run time");
        }
        let natural = element * u32::try_from(vector).unwrap_or(1);
        Ok(Declared {
            name,
            align: if align == 0 { natural } else { align },
            element,
            size,
            open,
            float: t.is_float(),
        })
    }

    fn alignment(&mut self) -> Result<u32, Refused> {
        let align = self.lexer.count()?;
        match u32::try_from(align) {
            Ok(align) if align.is_power_of_two() && align <= 128 => Ok(align),
            _ => self
                .lexer
                .refuse(format!("alignment {align}"), "use a power of two up to 128"),
        }
    }

    pub(super) fn variable_at_module(&mut self, space: &str, external: bool) -> Result<(), Refused> {
        let declared = self.declaration()?;
        if self.symbols.contains_key(declared.name) && !external {
            let what = format!("'{}' is declared twice", cut(declared.name));
            return self.lexer.refuse(what, "name them differently");
        }
        if space == "shared" {
            self.lexer.expect(';')?;
            let symbol = if external || declared.open {
                Symbol::SharedDynamic
            } else {
                Symbol::SharedModule(self.shared_at_module(&declared)?)
            };
            self.symbols.insert(declared.name, symbol);
            return Ok(());
        }
        if external {
            let what = format!("variable '{}' is defined in another module", cut(declared.name));
            return self
                .lexer
                .refuse(what, "compile as one module, without relocatable device code");
        }
        let index = self.add_variable(space, &declared)?;
        if self.lexer.accept('=')? {
            self.initial(index, &declared)?;
        }
        self.lexer.expect(';')
    }

    /// Room in the shared memory that all functions of the module see.
    pub(super) fn shared_at_module(&mut self, declared: &Declared<'_>) -> Result<u32, Refused> {
        let (offset, end) = place(self.module_shared, declared);
        if end > MAX_SHARED {
            let what = format!("{end} bytes of shared memory, {MAX_SHARED} are allowed");
            return self.lexer.refuse(what, "use less");
        }
        self.module_shared = end;
        Ok(offset)
    }

    pub(super) fn add_variable(&mut self, space: &str, declared: &Declared<'a>) -> Result<u32, Refused> {
        self.variable_bytes = self.variable_bytes.saturating_add(declared.size);
        if self.variable_bytes > MAX_VARIABLES || self.program.variables.len() >= MAX_SYMBOLS {
            return self
                .lexer
                .refuse("too many or too large variables", "allocate them at run time");
        }
        let index = u32::try_from(self.program.variables.len()).unwrap_or(u32::MAX);
        self.program.variables.push(Variable {
            name: declared.name.to_owned(),
            kind: if space == "const" {
                VariableKind::Constant
            } else {
                VariableKind::Global
            },
            size: declared.size,
            align: declared.align,
            initial: Vec::new(),
            addresses: Vec::new(),
        });
        self.symbols.insert(declared.name, Symbol::Variable(index));
        Ok(index)
    }

    pub(super) fn initial(&mut self, index: u32, declared: &Declared<'a>) -> Result<(), Refused> {
        let mut depth = 0;
        loop {
            if self.lexer.accept('{')? {
                depth += 1;
                if depth > 8 {
                    return self
                        .lexer
                        .refuse("an initial value in more than 8 braces", "flatten it");
                }
                continue;
            }
            if self.lexer.accept('}')? {
                depth -= 1;
            } else {
                self.element(index, declared)?;
            }
            if depth <= 0 {
                return Ok(());
            }
            self.lexer.accept(',')?;
        }
    }

    fn element(&mut self, index: u32, declared: &Declared<'a>) -> Result<(), Refused> {
        let negative = self.lexer.accept('-')?;
        let (bits, relocation) = match self.lexer.next()? {
            Token::Integer(number) if declared.float && !negative => (number, None),
            Token::Integer(number) => (if negative { number.wrapping_neg() } else { number }, None),
            Token::Single(bits) => (u64::from(bits), None),
            Token::Double(bits) => (bits, None),
            Token::Name(name) => (0, Some(self.relocation(name)?)),
            other => return self.lexer.unexpected(other, "a number or the name of a variable"),
        };
        let variable = &mut self.program.variables[index as usize];
        let at = variable.initial.len() as u64;
        if at + u64::from(declared.element) > variable.size {
            let what = format!("'{}' has more initial values than room", cut(declared.name));
            return self.lexer.refuse(what, "declare it larger");
        }
        variable
            .initial
            .extend(&bits.to_le_bytes()[..declared.element as usize]);
        if let Some((symbol, add)) = relocation {
            if declared.element != 8 {
                return self
                    .lexer
                    .refuse("an address in less than 64 bits", "declare the variable as .u64");
            }
            variable.addresses.push(Relocation {
                at,
                variable: symbol,
                add,
            });
        }
        Ok(())
    }

    /// `name`, `name+4`, `generic(name)+4`.
    fn relocation(&mut self, name: &'a str) -> Result<(u32, i64), Refused> {
        let mut target = name;
        if name == "generic" {
            self.lexer.expect('(')?;
            target = self.lexer.name()?;
            self.lexer.expect(')')?;
        }
        let mut add = 0;
        if self.lexer.accept('+')? {
            add = i64::try_from(self.lexer.count()?).unwrap_or(i64::MAX);
        }
        match self.symbols.get(target) {
            Some(&Symbol::Variable(index)) => Ok((index, add)),
            Some(Symbol::Function(_)) => self.lexer.refuse(
                format!("the address of function '{}'", cut(target)),
                "call functions by name; pointers to functions and virtual functions are not interpreted",
            ),
            _ => self.lexer.refuse(
                format!("'{}' is no variable", cut(target)),
                "declare it before it is used",
            ),
        }
    }
}

/// Where a variable comes in a space that is used up to `from`, and the new end; what is too large ends beyond every limit.
pub(super) fn place(from: u32, declared: &Declared<'_>) -> (u32, u32) {
    let offset = from.saturating_add(declared.align - 1) & !(declared.align - 1);
    let size = u32::try_from(declared.size).unwrap_or(u32::MAX);
    (offset, offset.saturating_add(size))
}
