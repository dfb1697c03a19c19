//! CUDA computed on the CPU, with right results: a client's memory, kernels in PTX, and the calls of cuBLAS, cuDNN and cuRAND that neural
//! networks need. For tests without a GPU; docs/accel-cuda-reference.md says what is computed and how exact it is.
//!
//! ```text
//!   AnyCall ──▶ objects ──▶ copies, modules and launches, libraries ──▶ AnyReply
//!                 └── a failure that nobody waited for is told by the next call that waits; what a kernel did wrong, by all ──┘
//! ```
//!
//! A call is carried out when it comes, in the thread that brings it, so that streams are in order and events complete. Everything in it is
//! a stranger's: sizes are counted with care, every operand is within an allocation, room is made for no more than that, and what takes
//! long looks whether the client is still there. Knows no ring, no window and no server.

mod blas;
mod convolution;
mod copies;
mod descriptor;
mod elementwise;
mod error;
mod events;
mod lt;
mod memory;
mod modules;
mod normalization;
mod numeric;
mod pooling;
mod random;
mod saved;
mod state;
mod tensor;
mod vectors;

pub use error::Error;
pub use saved::Saved;
pub use state::{Client, DEVICE_NAME, State, TOTAL_MEMORY};
