//! Each operation against a second, plain formula in loops of `f64`, with random sizes from a fixed seed; and what is asked for wrongly.

mod blas;
mod convolution;
mod device;
mod kernels;
mod lt;
mod networks;
mod normalization;
mod random;
mod runtime;
mod saved;
