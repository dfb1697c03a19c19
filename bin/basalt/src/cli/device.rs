//! The arguments of `basalt device`.

use std::fmt;
use std::str::FromStr;

use base::{CdiKind, CdiName, CdiNameError, PciAddress, PciAddressError};
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
    /// Print a specification of the Container Device Interface, by which the devices that sandboxes can have are called by names.
    #[command(after_help = CDI_HELP)]
    Cdi(CdiArgs),
}

/// A device as it is named: where it is, or what a specification calls it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceName {
    /// Where it is.
    Address(PciAddress),
    /// What it is called.
    Cdi(CdiName),
}

impl DeviceName {
    /// Those of the two kinds.
    pub(crate) fn split(names: &[Self]) -> (Vec<PciAddress>, Vec<CdiName>) {
        let (mut addresses, mut called) = (Vec::new(), Vec::new());
        for name in names {
            match name {
                Self::Address(address) => addresses.push(*address),
                Self::Cdi(name) => called.push(name.clone()),
            }
        }
        (addresses, called)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Cdi(name) => name.fmt(f),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // No address has one of these.
        match text.contains('=') || text.contains('/') {
            true => text
                .parse()
                .map(Self::Cdi)
                .map_err(|error: CdiNameError| error.to_string()),
            false => text
                .parse()
                .map(Self::Address)
                .map_err(|error: PciAddressError| error.to_string()),
        }
    }
}

/// Which devices, and what they are called.
#[derive(Args, Debug)]
pub(crate) struct CdiArgs {
    /// What they are: their names are this, `=` and their addresses.
    #[arg(long, value_name = "VENDOR/CLASS", default_value = "basalt/pci")]
    pub(crate) kind: CdiKind,

    /// Their addresses; all that sandboxes can have, or have, when not given.
    #[arg(value_name = "ADDRESS")]
    pub(crate) addresses: Vec<PciAddress>,
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

    /// Their addresses, such as 0000:01:00.0, or names by the Container Device Interface, such as vendor.com/net=card0.
    #[arg(value_name = "DEVICE", required = true)]
    pub(crate) devices: Vec<DeviceName>,
}

/// Which to take from whom.
#[derive(Args, Debug)]
pub(crate) struct DetachArgs {
    /// The sandbox: a name, or an id or its beginning.
    #[arg(value_name = "SANDBOX")]
    pub(crate) sandbox: String,

    /// Their addresses, such as 0000:01:00.0, or names by the Container Device Interface, such as vendor.com/net=card0.
    #[arg(value_name = "DEVICE", required = true)]
    pub(crate) devices: Vec<DeviceName>,

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
  basalt run --device 0000:01:00.0 IMAGE     a sandbox that has it from its start on
  basalt run --device vendor.com/net=card0 IMAGE
                                             the same by a name, which /etc/cdi or /var/run/cdi has";

const CDI_HELP: &str = "\
A name stands for the IOMMU group of its device, all of which goes to one sandbox.

Examples:
  basalt device bind 0000:01:00.0
  basalt device cdi > /etc/cdi/basalt.json
  basalt run --device basalt/pci=0000:01:00.0 IMAGE";

const BIND_HELP: &str = "\
A device of which something is in use (a mounted disk, the default route) is refused, with the command that ends the use.

Examples:
  basalt device bind 0000:01:00.0            take it until the host is booted again
  basalt device bind --persist 0000:01:00.0  take it after each boot, too";
