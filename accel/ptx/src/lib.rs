//! PTX carried out on the CPU: a module's text is read and decoded once ([`Program`]), its variables get addresses ([`Module`]), and
//! kernels run over global memory that whoever launches them provides ([`Memory`]). PTX in what nvcc links into a program is found by
//! [`fatbin`]. For the reference back end of CUDA; docs/accel-ptx.md says what is interpreted and how exact it is.
//!
//! A module, a fat binary and a launch are a stranger's. Reading them panics on no bytes, and memory and time are bounded by the text's
//! length and by limits that are written where they are kept; running ends with its budget of instructions. Knows no client, no server
//! and no transport.

mod decode;
mod error;
mod exec;
pub mod fatbin;
mod inst;
mod lex;
mod memory;
mod parse;
mod program;
mod types;

pub use error::{LaunchError, Refused, ThreadId};
pub use exec::{Launch, Module, Statistics};
pub use memory::{Memory, OutOfRange, Regions};
pub use parse::MAX_TEXT;
pub use program::{Kernel, Parameter, Program, Variable, VariableKind};
