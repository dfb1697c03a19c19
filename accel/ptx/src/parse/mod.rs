//! A module's directives: versions, functions, variables at module scope. Bodies are `body`'s, instructions `decode`'s.

mod body;
mod operand;
mod variable;

use std::collections::HashMap;

pub(crate) use operand::Operand;
pub(crate) use variable::Declared;

use crate::error::Refused;
use crate::lex::{Lexer, Token, cut};
use crate::program::{Function, Kernel, Parameter, Program};
use crate::types::Type;

/// No module's text is longer.
pub const MAX_TEXT: usize = 64 << 20;
/// No module has more instructions.
pub(crate) const MAX_INSTRUCTIONS: usize = 1 << 20;
/// No function has more registers.
pub(crate) const MAX_REGISTERS: u32 = 16_384;
/// No module has more functions, nor more variables.
const MAX_SYMBOLS: usize = 65_536;
/// A thread has no more local memory, as in CUDA.
pub(crate) const MAX_LOCAL: u32 = 512 << 10;
/// A block has no more shared memory: what compute capability 9.0 gives.
pub(crate) const MAX_SHARED: u32 = 227 << 10;
/// A kernel's parameters are no longer.
const MAX_PARAMETERS: u32 = 32_764;
/// All variables of a module together are no larger.
const MAX_VARIABLES: u64 = 1 << 30;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symbol {
    /// A variable that the host can reach.
    Variable(u32),
    /// Shared memory that all functions of the module see.
    SharedModule(u32),
    /// Shared memory of one kernel.
    SharedKernel(u32),
    /// Shared memory whose size the launch says.
    SharedDynamic,
    /// In the local memory of the function's frame.
    Local(u32),
    /// A parameter of the kernel.
    KernelParameter(u32),
    Function(u32),
    Register(u32, Type),
}

/// The reading of one module.
pub(crate) struct Reader<'a> {
    pub(crate) lexer: Lexer<'a>,
    pub(crate) program: Program,
    pub(crate) symbols: HashMap<&'a str, Symbol>,
    /// Bytes of shared memory at module scope.
    pub(crate) module_shared: u32,
    variable_bytes: u64,
}

/// Reads a module.
pub(crate) fn module(text: &str) -> Result<Program, Refused> {
    if text.len() > MAX_TEXT {
        return Err(Refused::new(
            1,
            format!("{} bytes of text, {MAX_TEXT} are allowed", text.len()),
            "divide the module",
        ));
    }
    let mut reader = Reader {
        lexer: Lexer::new(text),
        program: Program::default(),
        symbols: HashMap::new(),
        module_shared: 0,
        variable_bytes: 0,
    };
    reader.header()?;
    while reader.item()? {}
    let shared = reader.module_shared;
    for kernel in &mut reader.program.kernels {
        let own = reader.program.functions[kernel.function as usize].shared_bytes;
        kernel.static_shared = if shared == 0 { own } else { shared_aligned(own) + shared };
    }
    Ok(reader.program)
}

/// Where the next part of a block's shared memory begins: no variable asks for more.
pub(crate) const fn shared_aligned(end: u32) -> u32 {
    (end + 127) & !127
}

impl<'a> Reader<'a> {
    fn header(&mut self) -> Result<(), Refused> {
        match self.lexer.next()? {
            Token::Dot("version") => {}
            other => return self.lexer.unexpected(other, ".version"),
        }
        let version = match self.lexer.next()? {
            Token::Double(bits) => f64::from_bits(bits),
            other => return self.lexer.unexpected(other, "a version such as 9.0"),
        };
        let tenths = (version * 10.0).round();
        if !(70.0..100.0).contains(&tenths) {
            return self.lexer.refuse(
                format!("PTX {version} is not interpreted"),
                "7.0 to 9.x are; nvcc 12 and 13 make them",
            );
        }
        let mut whole = 6;
        while f64::from(whole + 1) * 10.0 <= tenths {
            whole += 1;
        }
        let mut part = 0;
        while f64::from(whole * 10 + part) < tenths {
            part += 1;
        }
        self.program.version = (whole, part);
        Ok(())
    }

    /// One directive at module scope; false at the end.
    fn item(&mut self) -> Result<bool, Refused> {
        match self.lexer.next()? {
            Token::End => return Ok(false),
            Token::Mark(';') => {}
            // The zero bytes that end a text in a fat binary.
            Token::Mark('\0') => {}
            Token::Dot("target") => self.target()?,
            Token::Dot("address_size") => {
                let bits = self.lexer.count()?;
                if bits != 64 {
                    return self
                        .lexer
                        .refuse(format!("addresses of {bits} bits"), "compile for 64 bits (-m64)");
                }
            }
            Token::Dot("file" | "loc") => self.lexer.skip_line(),
            Token::Dot("section") => self.skip_braces()?,
            Token::Dot("pragma") => self.skip_statement()?,
            Token::Dot("alias") => {
                return self
                    .lexer
                    .refuse("an alias of a function", "call the function by its own name");
            }
            Token::Dot("visible" | "weak" | "common") => self.linked(false)?,
            Token::Dot("extern") => self.linked(true)?,
            Token::Dot(word) => self.defined(word, false)?,
            other => return self.lexer.unexpected(other, "a directive"),
        }
        Ok(true)
    }

    fn linked(&mut self, external: bool) -> Result<(), Refused> {
        match self.lexer.next()? {
            Token::Dot(word) => self.defined(word, external),
            other => self.lexer.unexpected(other, "a directive"),
        }
    }

    fn defined(&mut self, word: &'a str, external: bool) -> Result<(), Refused> {
        match word {
            "entry" => self.function(true),
            "func" => self.function(false),
            "global" | "const" | "shared" => self.variable_at_module(word, external),
            "tex" | "texref" | "samplerref" | "surfref" => self.lexer.refuse(
                format!("'.{word}': textures and surfaces are not interpreted"),
                "read from global memory",
            ),
            _ => self.lexer.refuse(
                format!("directive '.{}' is not known", cut(word)),
                "compile with nvcc 12 or 13 without it",
            ),
        }
    }

    fn target(&mut self) -> Result<(), Refused> {
        let name = self.lexer.name()?;
        let digits = name
            .strip_prefix("sm_")
            .unwrap_or_default()
            .trim_end_matches(['a', 'f']);
        match digits.parse::<u32>() {
            Ok(number) if (50..1000).contains(&number) => self.program.target = number,
            _ => {
                return self
                    .lexer
                    .refuse(format!("target '{}'", cut(name)), "compile for compute_50 or newer");
            }
        }
        while self.lexer.accept(',')? {
            match self.lexer.name()? {
                "debug" => {}
                other => {
                    let what = format!("target option '{}'", cut(other));
                    return self.lexer.refuse(what, "compile without it");
                }
            }
        }
        Ok(())
    }

    pub(crate) fn skip_statement(&mut self) -> Result<(), Refused> {
        loop {
            match self.lexer.next()? {
                Token::Mark(';') => return Ok(()),
                Token::End => return self.lexer.unexpected(Token::End, "';'"),
                _ => {}
            }
        }
    }

    fn skip_braces(&mut self) -> Result<(), Refused> {
        loop {
            match self.lexer.next()? {
                Token::Mark('}') => return Ok(()),
                Token::End => return self.lexer.unexpected(Token::End, "'}'"),
                _ => {}
            }
        }
    }

    /// The index that `name` has among functions, whether it was declared before or not.
    fn function_index(&mut self, name: &'a str) -> Result<u32, Refused> {
        if let Some(&symbol) = self.symbols.get(name) {
            return match symbol {
                Symbol::Function(index) => Ok(index),
                _ => self
                    .lexer
                    .refuse(format!("'{}' is a variable, too", cut(name)), "name them differently"),
            };
        }
        if self.program.functions.len() >= MAX_SYMBOLS {
            return self.lexer.refuse("too many functions", "divide the module");
        }
        let index = u32::try_from(self.program.functions.len()).unwrap_or(u32::MAX);
        self.program.functions.push(Function {
            name: name.to_owned(),
            line: self.lexer.line(),
            ..Function::default()
        });
        self.symbols.insert(name, Symbol::Function(index));
        Ok(index)
    }

    fn function(&mut self, entry: bool) -> Result<(), Refused> {
        let mut formal = body::Formal::default();
        if !entry && self.lexer.accept('(')? {
            formal.results = self.parameters()?;
        }
        let name = self.lexer.name()?;
        let index = self.function_index(name)?;
        if self.lexer.accept('(')? {
            formal.parameters = self.parameters()?;
        }
        let max_threads = self.performance()?;
        if self.lexer.accept(';')? {
            return Ok(());
        }
        if self.program.functions[index as usize].defined {
            return self
                .lexer
                .refuse(format!("'{}' is defined twice", cut(name)), "name them differently");
        }
        self.lexer.expect('{')?;
        self.body(index, entry, &formal)?;
        if entry {
            self.kernel(index, name, &formal, max_threads)?;
        }
        Ok(())
    }

    fn kernel(&mut self, index: u32, name: &str, formal: &body::Formal<'a>, max: Option<u32>) -> Result<(), Refused> {
        let (slots, bytes) = body::layout(&formal.parameters, 0);
        if bytes > MAX_PARAMETERS {
            return self.lexer.refuse(
                format!("{bytes} bytes of parameters, {MAX_PARAMETERS} are allowed"),
                "pass a pointer to them",
            );
        }
        let function = &self.program.functions[index as usize];
        let parameters = slots.iter().zip(&formal.parameters);
        let number = u32::try_from(self.program.kernels.len()).unwrap_or(u32::MAX);
        self.program.kernels.push(Kernel {
            name: name.to_owned(),
            parameters: parameters
                .map(|(slot, declared)| Parameter {
                    offset: slot.offset,
                    size: slot.size,
                    align: declared.align,
                })
                .collect(),
            parameter_bytes: bytes,
            static_shared: 0,
            max_threads: max,
            registers: function.registers,
            local_bytes: function.local_bytes,
            function: index,
        });
        self.program.kernel_names.insert(name.to_owned(), number);
        Ok(())
    }

    /// `.param` declarations up to the closing parenthesis.
    fn parameters(&mut self) -> Result<Vec<Declared<'a>>, Refused> {
        let mut declared = Vec::new();
        if self.lexer.accept(')')? {
            return Ok(declared);
        }
        loop {
            match self.lexer.next()? {
                Token::Dot("param") => declared.push(self.declaration()?),
                Token::Dot("reg") => {
                    return self.lexer.refuse(
                        "a parameter in a register",
                        "compile with nvcc, which passes parameters in .param",
                    );
                }
                other => return self.lexer.unexpected(other, ".param"),
            }
            if declared.len() > 4096 {
                return self.lexer.refuse("more than 4096 parameters", "pass a pointer to them");
            }
            if !self.lexer.accept(',')? {
                self.lexer.expect(')')?;
                return Ok(declared);
            }
        }
    }

    /// Directives between a function's head and its body; how many threads a block may have, if one says so.
    fn performance(&mut self) -> Result<Option<u32>, Refused> {
        let mut threads = None;
        loop {
            match self.lexer.peek()? {
                Token::Dot("maxntid" | "reqntid") => {
                    self.lexer.next()?;
                    let mut product = self.lexer.count()?;
                    while self.lexer.accept(',')? {
                        product = product.saturating_mul(self.lexer.count()?);
                    }
                    threads = Some(u32::try_from(product).unwrap_or(u32::MAX));
                }
                Token::Dot("minnctapersm" | "maxnreg" | "maxnctapersm") => {
                    self.lexer.next()?;
                    self.lexer.count()?;
                }
                Token::Dot("noreturn" | "blocksareclusters") => {
                    self.lexer.next()?;
                }
                Token::Dot("pragma") => {
                    self.lexer.next()?;
                    self.skip_statement()?;
                }
                Token::Dot(word @ ("reqnctapercluster" | "explicitcluster" | "maxclusterrank")) => {
                    return self.lexer.refuse(
                        format!("'.{word}': clusters are not interpreted"),
                        "launch without clusters",
                    );
                }
                _ => return Ok(threads),
            }
        }
    }
}
