//! Kernels that nvcc made, carried out and compared with what the CPU computes. How their PTX was made is in docs/accel-ptx.md.

mod basics;
mod device;
mod language;
mod lenet;
mod text;
