//! Why a function of the host's cannot be given to guests, or not be given back: what is in the way, and the command that ends it.

use std::io;
use std::path::{Path, PathBuf};

use base::PciAddress;

use super::checks::Objection;

/// An error of what is done with the host's functions.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A file of the kernel's.
    #[error("cannot {operation} {}", path.display())]
    File {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// There is no such function.
    #[error("this host has no PCI function {0}: `basalt device ls` lists them")]
    NotFound(PciAddress),
    /// It cannot be bound as things are.
    #[error("the PCI function {address} cannot be bound to vfio-pci: {}", list(objections))]
    Refused {
        /// Which.
        address: PciAddress,
        /// All that is in the way.
        objections: Vec<Objection>,
    },
    /// The kernel was asked for a driver, and gave another.
    #[error(
        "the PCI function {address} should have come to {wanted} and is {found}'s: see what the kernel says of it (`dmesg | grep {address}`)"
    )]
    OtherDriver {
        /// Which.
        address: PciAddress,
        /// The driver that it should have; `nobody` for none.
        wanted: String,
        /// The driver that it has; `nobody` for none.
        found: String,
    },
    /// It cannot be reset.
    #[error("the PCI function {0} cannot be reset: the kernel knows no way (its reset_method is empty)")]
    NoReset(PciAddress),
    /// It makes no virtual functions.
    #[error(
        "the PCI function {0} has no virtual functions to give (it has no SR-IOV capability): `basalt device ls` shows which have (VFS)"
    )]
    NoSrIov(PciAddress),
    /// It makes fewer.
    #[error("the PCI function {address} makes {total} virtual functions at most, not {wanted}")]
    TooManyVfs {
        /// Which.
        address: PciAddress,
        /// How many it can make.
        total: u32,
        /// How many are wanted.
        wanted: u32,
    },
    /// Nothing of this host's is behind a file of VFIO's.
    #[error(
        "there is no {0} on this host: its number is of another host, or of another boot (`basalt device ls` shows the groups)"
    )]
    NoNode(String),
    /// It would give nothing away.
    #[error("vfio-pci has no function that is behind {file}: bind what is (`basalt device bind`): {others}")]
    EmptyNode {
        /// The file.
        file: String,
        /// What is behind it.
        others: String,
    },
    /// Its driver makes none.
    #[error(
        "the driver of the PCI function {address} ({driver}) makes no virtual functions: give it the driver of its maker (`basalt device \
         unbind {address}`, `modprobe`)"
    )]
    NoVfDriver {
        /// Which.
        address: PciAddress,
        /// Its driver; `nobody` for none.
        driver: String,
    },
}

impl DeviceError {
    pub(super) fn file(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::File {
            operation,
            path,
            source,
        }
    }
}

fn list(objections: &[Objection]) -> String {
    let all: Vec<_> = objections.iter().map(ToString::to_string).collect();
    all.join("; ")
}
