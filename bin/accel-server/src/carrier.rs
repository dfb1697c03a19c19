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
    /// CUDA's libraries, in these directories or where the loader finds them.
    Cuda(Vec<PathBuf>),
}

impl Carrier {
    /// By its name; a library is for two of them.
    pub(crate) fn named(name: Option<&str>, library: Option<PathBuf>) -> Result<Self> {
        match (name, library) {
            (Some("opencl"), library) => Ok(Self::Opencl(library.unwrap_or_else(|| LIBRARY.into()))),
            (Some("null"), None) => Ok(Self::Null),
            (Some("reference"), None) => Ok(Self::Reference),
            (Some("cuda"), library) => Ok(Self::Cuda(directories(library.as_deref())?)),
            (Some("null" | "reference"), Some(_)) => {
                bail!("--library is for --backend opencl and cuda; leave one of the two out")
            }
            (Some(other), _) => bail!("--backend {other}: there are opencl, cuda, reference and null"),
            (None, _) => {
                bail!(
                    "--backend is missing: opencl, cuda, reference, or null to try without a driver; --help shows examples"
                )
            }
        }
    }

    /// The library that carries calls out, if one does.
    pub(crate) fn library(&self) -> Option<&Path> {
        match self {
            Self::Opencl(library) => Some(library),
            Self::Null | Self::Reference | Self::Cuda(_) => None,
        }
    }

    /// Directories of libraries, which a jail is to have.
    pub(crate) fn directories(&self) -> &[PathBuf] {
        match self {
            Self::Cuda(directories) => directories,
            Self::Opencl(_) | Self::Null | Self::Reference => &[],
        }
    }

    /// Makes it. Drivers have threads: nothing forks behind this.
    pub(crate) fn open(&self) -> Result<Backend> {
        match self {
            Self::Opencl(library) => Ok(Backend::opencl(library)?),
            Self::Null => Ok(Backend::null()),
            Self::Reference => Ok(Backend::reference()),
            Self::Cuda(directories) => Ok(Backend::cuda(directories)?),
        }
    }
}

/// Directories with colons between them, which mean the same in a jail.
fn directories(paths: Option<&Path>) -> Result<Vec<PathBuf>> {
    let paths: Vec<_> = paths
        .map(|paths| std::env::split_paths(paths).collect())
        .unwrap_or_default();
    match paths.iter().find(|path| !path.is_absolute()) {
        Some(path) => bail!("--library {}: with cuda, give directories from / on", path.display()),
        None => Ok(paths),
    }
}
