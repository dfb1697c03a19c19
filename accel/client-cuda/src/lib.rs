//! CUDA's libraries for programs whose accelerator is elsewhere: the runtime, cuBLAS and cuDNN at their own level, for programs that are as
//! they are.
//!
//! ```text
//!   program ── libcudart.so.13, libcublas.so.13, ... (one file by many names) ── generated: a function of C for each ── stub
//!      local: device, last error, configuration of launches, descriptors, addresses         answered here
//!      async: launches, library calls, copies to the device, allocations                    a record, and on
//!      sync:  what asks whether something is done, and copies from the device               a record, and its answer
//! ```
//!
//! The library is linked from this crate by `cargo xtask torch`, which gives the functions their names and versions
//! (docs/accel-cuda.md). Knows no server's object, and not how records travel.

mod abi;
mod connection;
mod cublas;
mod cublas_lt;
mod cuda;
mod cudart;
mod cudnn;
mod curand;
mod cusparse;
mod descriptor;
mod fatbin;
mod generated;
mod handles;
mod layout;
mod memory;
mod nccl;
mod nvml;
mod nvrtc;
mod registry;
mod reserved;
mod stub;
mod version;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder has panicked is as good as before: each change of what is behind ours is complete by itself.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
