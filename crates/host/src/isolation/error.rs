//! Why CPUs cannot be had, or not be given back.

use std::io;
use std::path::{Path, PathBuf};

use base::CpuSet;

/// Why CPUs cannot be had, or not be given back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host has fewer than are asked for, and keeps one.
    #[error(
        "{wanted} CPUs are wanted, and {spare} of this host's can be spared: ask for fewer, or end what owns others (`basalt host cpus` \
         shows it)"
    )]
    Spare {
        /// How many are wanted.
        wanted: usize,
        /// How many can be had.
        spare: usize,
    },
    /// They are not there.
    #[error("no CPU {0} is online here: `basalt host cpus` lists those that are")]
    NotOnline(CpuSet),
    /// The host cannot do without.
    #[error("CPU {0} is the one that the host keeps for everything else: leave it out")]
    First(u32),
    /// Nobody has isolated them.
    #[error("CPU {0} is not isolated: `basalt host cpus` lists those that are")]
    NotIsolated(CpuSet),
    /// A sandbox has it.
    #[error("CPU {cpu} is sandbox {sandbox}'s until that ends: `basalt stop {sandbox}`")]
    Owned {
        /// Which.
        cpu: u32,
        /// Whose.
        sandbox: String,
    },
    /// A file by which the kernel is told.
    #[error("{operation} {}", path.display())]
    File {
        /// Such as `write`.
        operation: &'static str,
        /// Which.
        path: PathBuf,
        /// What the kernel says.
        #[source]
        cause: io::Error,
    },
    /// A file that says what nobody understands.
    #[error("{} is not understood: {why}", path.display())]
    Format {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// The kernel does not keep tasks off CPUs.
    #[error(
        "tasks cannot be kept off CPUs: the controller `cpuset` is not available in {} ({why}): it is not when a cgroup v1 hierarchy has it",
        path.display()
    )]
    NoCpuset {
        /// Where.
        path: PathBuf,
        /// Why, as far as is known.
        why: io::Error,
    },
    /// Of the cgroups.
    #[error(transparent)]
    Cgroup(#[from] crate::Error),
}

impl Error {
    pub(super) fn file(operation: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |cause| Self::File { operation, path, cause }
    }

    pub(super) fn owned((cpu, sandbox): (u32, &str)) -> Self {
        let sandbox = sandbox.to_owned();
        Self::Owned { cpu, sandbox }
    }
}
