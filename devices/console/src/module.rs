//! The module: makes consoles out of their configuration.

use std::os::fd::OwnedFd;

use device::{CreateError, DeviceContext, DeviceModule, FdTable};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;
use vmm_api::devices::{ConsoleConfig, DeviceConfig};

use crate::device::Console;
use crate::input::Input;
use crate::metrics::Metrics;
use crate::output::Output;
use crate::worker::Port;

/// The module of kind `console`.
pub static MODULE: Module = Module;

/// Makes consoles.
#[derive(Debug)]
pub struct Module;

impl DeviceModule for Module {
    fn kind(&self) -> &'static str {
        ConsoleConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let config: ConsoleConfig = device::parse_config(spec)?;
        let input = fds.take_optional(config.input)?;
        let output = fds.take_optional(config.output)?;
        do_not_block(input.as_ref(), "making the console's input non-blocking")?;
        do_not_block(output.as_ref(), "making the console's output non-blocking")?;
        Ok(Box::new(Console::new(Port {
            input: Input::new(input),
            output: Output::new(output, config.keep),
            done: 0,
            rest: Vec::new(),
            metrics: Metrics::register(context.metrics, context.id),
        })))
    }
}

fn do_not_block(fd: Option<&OwnedFd>, what: &'static str) -> Result<(), CreateError> {
    let Some(fd) = fd else { return Ok(()) };
    rustix::io::ioctl_fionbio(fd, true).map_err(|error| CreateError::Host {
        what,
        source: error.into(),
    })
}
