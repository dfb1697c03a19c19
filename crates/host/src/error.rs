//! What can go wrong with cgroups, the jail, confinement and zeroed memory. Knows what failed and what to do about it, not who asked.

use std::io;
use std::path::PathBuf;

/// A failure of [`crate::cgroup`], [`crate::jail`], [`crate::confine`] or [`crate::zeroed_memory`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No cgroup2 file system is mounted.
    #[error(
        "no cgroup v2 hierarchy is mounted: `mount -t cgroup2 cgroup2 /sys/fs/cgroup`, or boot with systemd.unified_cgroup_hierarchy=1"
    )]
    NoCgroup2,
    /// A name that is no single, plain directory name.
    #[error("`{0}` cannot name a cgroup: use letters, digits, `.`, `_` and `-`, and begin with no dot")]
    Name(String),
    /// An operation on a file or directory of a cgroup.
    #[error("{operation} {}", path.display())]
    Cgroup {
        /// Such as `writing`.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
    /// A file of a cgroup does not read as it should.
    #[error("{} says {text:?}, which is not understood", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
    /// A limit was asked for that needs a controller which this host does not give.
    #[error(
        "{limit} cannot be limited: the controller `{controller}` is not available in {} ({reason}): leave that limit out, or \
         have the host give the controller to cgroup v2, as it does when booted with systemd.unified_cgroup_hierarchy=1",
        path.display()
    )]
    NoController {
        /// What was to be limited.
        limit: &'static str,
        /// The controller.
        controller: &'static str,
        /// Where it is missing.
        path: PathBuf,
        /// Why, as far as is known.
        reason: String,
    },
    /// Processes did not leave a cgroup in time.
    #[error("{processes} processes are still in {} after {waited:?}; they may hang in the kernel: see /proc/PID/stack", path.display())]
    StillPopulated {
        /// The cgroup.
        path: PathBuf,
        /// How many.
        processes: usize,
        /// How long was waited.
        waited: std::time::Duration,
    },
    /// A directory cannot be shared.
    #[error("{step} for {}: {why}", path.display())]
    Share {
        /// What was being done.
        step: &'static str,
        /// The directory.
        path: PathBuf,
        /// What the kernel said, and what to do.
        why: String,
    },
    /// The jail needs rights that this process lacks.
    #[error("the jail cannot be built: {why}; {next}")]
    NoJail {
        /// What is missing.
        why: String,
        /// What to do.
        next: &'static str,
    },
    /// A step on the parent's side of a launch.
    #[error("the jail cannot be built: {step}")]
    Launch {
        /// The step.
        step: &'static str,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
    /// A step of the child between clone and exec.
    #[error("the jailed program did not start: {step}")]
    Child {
        /// The step.
        step: &'static str,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
    /// A step of a process that confines itself.
    #[error("this process cannot confine itself: {step}{next}")]
    Confine {
        /// The step.
        step: &'static str,
        /// What to do; begins with its own punctuation, or is empty.
        next: &'static str,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
    /// A part of the root that a process confines itself to.
    #[error("this process cannot confine itself: {step} for {}", path.display())]
    Root {
        /// The step.
        step: &'static str,
        /// What should have been in the root, or is.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
    /// A file of zeroed memory cannot be made, or filled.
    #[error("zeroed memory cannot be made ahead: {step}")]
    ZeroedMemory {
        /// The step.
        step: &'static str,
        /// What the kernel said.
        #[source]
        cause: io::Error,
    },
}
