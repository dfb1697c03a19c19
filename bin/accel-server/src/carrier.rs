//! Who carries calls out: the back ends by the names that `--backend` has.
//!
//! Knows no other option.

use std::path::{Path, PathBuf};

use accel_server::Backend;
use anyhow::{Result, bail};

/// The loader's name, which dlopen(3) looks for.
pub(crate) const LIBRARY: &str = "libOpenCL.so.1";

/// A back end that is not there yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Carrier {
    /// The library.
    Opencl(PathBuf),
    /// Nobody.
    Null,
    /// The CPU, for CUDA.
    Reference,
}

impl Carrier {
    /// By its name; a library is for one of them.
    pub(crate) fn named(name: Option<&str>, library: Option<PathBuf>) -> Result<Self> {
        match (name, library) {
            (Some("opencl"), library) => Ok(Self::Opencl(library.unwrap_or_else(|| LIBRARY.into()))),
            (Some("null"), None) => Ok(Self::Null),
            (Some("reference"), None) => Ok(Self::Reference),
            (Some("null" | "reference"), Some(_)) => {
                bail!("--library is for --backend opencl; leave one of the two out")
            }
            (Some(other), _) => bail!("--backend {other}: there are opencl, reference and null"),
            (None, _) => {
                bail!("--backend is missing: opencl, reference, or null to try without a driver; --help shows examples")
            }
        }
    }

    /// The library that carries calls out, if one does.
    pub(crate) fn library(&self) -> Option<&Path> {
        match self {
            Self::Opencl(library) => Some(library),
            Self::Null | Self::Reference => None,
        }
    }

    /// Makes it. Drivers have threads: nothing forks behind this.
    pub(crate) fn open(&self) -> Result<Backend> {
        match self {
            Self::Opencl(library) => Ok(Backend::opencl(library)?),
            Self::Null => Ok(Backend::null()),
            Self::Reference => Ok(Backend::reference()),
        }
    }
}
