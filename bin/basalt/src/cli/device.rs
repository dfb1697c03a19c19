//! The arguments of `basalt device`.

use base::PciAddress;
use clap::{Args, Subcommand};

/// `basalt device ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum DeviceVerb {
    /// List the host's PCI devices: their drivers and IOMMU groups, how they are reset, and who has them.
    #[command(after_help = EXAMPLES)]
    Ls,
    /// Take a device from the host's driver, so that sandboxes can have it.
    #[command(after_help = BIND_HELP)]
    Bind(BindArgs),
    /// Give a device back to the driver that it had.
    #[command(after_help = EXAMPLES)]
    Unbind(UnbindArgs),
    /// Give devices to a sandbox that runs: its memory is pinned and mapped for them, and they appear on its PCI bus.
    #[command(after_help = ATTACH_HELP)]
    Attach(AttachArgs),
    /// Take devices from a sandbox that runs.
    #[command(after_help = ATTACH_HELP)]
    Detach(DetachArgs),
    /// Have a device make virtual functions (SR-IOV), which no driver of the host takes; print their addresses.
    #[command(after_help = EXAMPLES)]
    Vfs(VfsArgs),
}

/// Which to bind, and on which terms.
#[derive(Args, Debug)]
pub(crate) struct BindArgs {
    /// Its address, such as 0000:01:00.0.
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: PciAddress,

    /// Bind it again after each boot of the host, when the daemon starts.
    #[arg(long)]
    pub(crate) persist: bool,

    /// Also if it cannot be reset: the next sandbox finds what the one before has left in it.
    #[arg(long)]
    pub(crate) allow_no_reset: bool,

    /// Also if other devices of its IOMMU group are the host's still, its network interface is up, or it is the display of the
    /// host's firmware. What is mounted, or carries the default route, is never taken.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Which to give back.
#[derive(Args, Debug)]
pub(crate) struct UnbindArgs {
    /// Its address, such as 0000:01:00.0.
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: PciAddress,
}

/// Which to give to whom.
#[derive(Args, Debug)]
pub(crate) struct AttachArgs {
    /// The sandbox: a name, or an id or its beginning.
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: String,

    /// Their addresses, such as 0000:01:00.0.
    #[arg(value_name = "ADDRESS", required = true)]
    pub(crate) addresses: Vec<PciAddress>,
}

/// Which to take from whom.
#[derive(Args, Debug)]
pub(crate) struct DetachArgs {
    /// The sandbox: a name, or an id or its beginning.
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: String,

    /// Their addresses, such as 0000:01:00.0.
    #[arg(value_name = "ADDRESS", required = true)]
    pub(crate) addresses: Vec<PciAddress>,

    /// Also if the guest does not let go of them: for it they are pulled out.
    #[arg(long)]
    pub(crate) force: bool,
}

/// How many to make.
#[derive(Args, Debug)]
pub(crate) struct VfsArgs {
    /// The address of the physical function, such as 0000:02:00.0.
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: PciAddress,

    /// How many, in place of those that there are; 0 removes them.
    #[arg(value_name = "COUNT")]
    pub(crate) count: u32,
}

const EXAMPLES: &str = "\
Examples:
  basalt device ls                           which there are, and whose they are
  basalt device bind 0000:01:00.0            take one for sandboxes
  basalt device vfs 0000:02:00.0 4           make four virtual functions of a network card
  basalt device bind 0000:02:10.0            take the first of them
  basalt device unbind 0000:01:00.0          give the first one back";

const ATTACH_HELP: &str = "\
A sandbox that has devices is saved, rolled back or moved only with --detach-devices, or when they were taken from it. Its memory is all there
and stays where it is as long as it has one.

Examples:
  basalt device bind 0000:01:00.0            take one from the host
  basalt device attach web 0000:01:00.0      give it to the sandbox `web`
  basalt device detach web 0000:01:00.0      take it back; it is reset
  basalt run --device 0000:01:00.0 IMAGE     a sandbox that has it from its start on";

const BIND_HELP: &str = "\
A device of which something is in use (a mounted disk, the default route) is refused, with the command that ends the use.

Examples:
  basalt device bind 0000:01:00.0            take it until the host is booted again
  basalt device bind --persist 0000:01:00.0  take it after each boot, too";
