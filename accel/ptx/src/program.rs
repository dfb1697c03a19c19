//! A module as it was read: kernels, functions, variables, code. Knows no memory and no thread.

use std::collections::HashMap;

use crate::error::{LaunchError, Refused};
use crate::inst::Code;

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Where it is in the kernel's parameters.
    pub offset: u32,
    /// Its size in bytes.
    pub size: u32,
    /// Its alignment.
    pub align: u32,
}

/// A function that a host can start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its name, as it is in the text (mangled, where C++ was).
    pub name: String,
    /// Its parameters, in order.
    pub parameters: Vec<Parameter>,
    /// The size of all parameters together.
    pub parameter_bytes: u32,
    /// Bytes of shared memory that the text declares.
    pub static_shared: u32,
    /// The threads that a block may have at most (`.maxntid`), or must have (`.reqntid`).
    pub max_threads: Option<u32>,
    /// Registers of one thread, each of 64 bits here.
    pub registers: u32,
    /// Bytes of local memory of one thread, without what it calls.
    pub local_bytes: u32,
    pub(crate) function: u32,
}

/// Which memory a variable is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VariableKind {
    /// `__device__`.
    Global,
    /// `__constant__`.
    Constant,
}

/// A variable of the module that the host can reach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Which memory it is in.
    pub kind: VariableKind,
    /// Its size in bytes.
    pub size: u64,
    /// Its alignment.
    pub align: u32,
    /// What it begins with; what is missing at the end is zero.
    pub initial: Vec<u8>,
    pub(crate) addresses: Vec<Relocation>,
}

/// The address of a variable, in the first bytes of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Relocation {
    pub(crate) at: u64,
    pub(crate) variable: u32,
    pub(crate) add: i64,
}

/// Bytes that go from a caller's frame to a callee's, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Slot {
    pub(crate) offset: u32,
    pub(crate) size: u32,
}

/// A function's frame and where its code begins.
#[derive(Debug, Clone, Default)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) line: u32,
    pub(crate) entry: u32,
    pub(crate) registers: u32,
    pub(crate) local_bytes: u32,
    pub(crate) parameters: Vec<Slot>,
    pub(crate) results: Vec<Slot>,
    pub(crate) shared_bytes: u32,
    pub(crate) calls: Vec<u32>,
    pub(crate) refused: Option<Refused>,
    pub(crate) defined: bool,
}

/// A module that was read and decoded.
#[derive(Debug, Clone, Default)]
pub struct Program {
    pub(crate) code: Code,
    pub(crate) functions: Vec<Function>,
    pub(crate) kernels: Vec<Kernel>,
    pub(crate) kernel_names: HashMap<String, u32>,
    pub(crate) variables: Vec<Variable>,
    pub(crate) version: (u32, u32),
    pub(crate) target: u32,
}

impl Program {
    /// Reads a module.
    ///
    /// # Errors
    ///
    /// The text is not PTX, or declares what is not interpreted. An instruction that is not interpreted only keeps the
    /// kernels from running that reach it ([`Program::kernel`]).
    pub fn parse(text: &str) -> Result<Self, Refused> {
        crate::parse::module(text)
    }

    /// The kernels, in the text's order.
    #[must_use]
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// The variables that a host can reach, in the text's order.
    #[must_use]
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// The version of PTX that the text has.
    #[must_use]
    pub const fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The compute capability that the text was made for: 75 for `sm_75`.
    #[must_use]
    pub const fn target(&self) -> u32 {
        self.target
    }

    /// A kernel that can be run.
    ///
    /// # Errors
    ///
    /// There is none of the name, or it reaches what is not interpreted.
    pub fn kernel(&self, name: &str) -> Result<&Kernel, LaunchError> {
        let Some(&index) = self.kernel_names.get(name) else {
            return Err(LaunchError::NoKernel(name.to_owned()));
        };
        let kernel = &self.kernels[index as usize];
        let mut seen = vec![false; self.functions.len()];
        let mut left = vec![kernel.function];
        while let Some(function) = left.pop() {
            if std::mem::replace(&mut seen[function as usize], true) {
                continue;
            }
            let function = &self.functions[function as usize];
            if let Some(refused) = function.unusable() {
                return Err(LaunchError::NotInterpreted {
                    kernel: name.to_owned(),
                    refused,
                });
            }
            left.extend(&function.calls);
        }
        Ok(kernel)
    }
}

impl Function {
    fn unusable(&self) -> Option<Refused> {
        if self.defined {
            return self.refused.clone();
        }
        Some(Refused::new(
            self.line,
            format!("function '{}' has no body here", self.name),
            "build without it (printf and malloc of the device are not served), or link with relocatable device code off",
        ))
    }
}
