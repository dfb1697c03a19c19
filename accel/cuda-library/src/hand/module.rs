//! Modules, kernels and launches.
#![allow(non_snake_case, reason = "names are C's")]

use accel_proto::cuda as calls;

use crate::Libraries;
use crate::failure::Failure;
use crate::state::Context;

/// Those of a client.
#[derive(Debug, Default)]
pub(crate) struct Modules {}

impl Modules {
    pub(crate) fn end(&mut self, _: &Libraries) {}
}

pub(crate) fn basaltModuleLoad(_: &mut Context<'_>, _: &calls::BasaltModuleLoad) -> Result<(), Failure> {
    Err(Failure::NotServed)
}
pub(crate) fn basaltModuleGetFunction(_: &mut Context<'_>, _: &calls::BasaltModuleGetFunction) -> Result<(), Failure> {
    Err(Failure::NotServed)
}
pub(crate) fn cudaLaunchKernel(_: &mut Context<'_>, _: &calls::CudaLaunchKernel) -> Result<(), Failure> {
    Err(Failure::NotServed)
}
