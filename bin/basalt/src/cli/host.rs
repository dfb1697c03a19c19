//! The arguments of `basalt host`.

use base::CpuSet;
use clap::{Args, Subcommand};

/// `basalt host ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum HostVerb {
    /// List the host's CPUs, and who has them.
    Cpus,
    /// Keep CPUs free of tasks, interrupts and timers, for sandboxes that will own them.
    #[command(after_help = EXAMPLES)]
    Isolate(IsolateArgs),
    /// Give CPUs back to everything; those that a sandbox owns, when it ends.
    #[command(after_help = EXAMPLES)]
    Release(ReleaseArgs),
}

/// Which to isolate.
#[derive(Args, Debug)]
pub(crate) struct IsolateArgs {
    /// Numbers and ranges, as Linux counts them, such as 2 or 4-7,12.
    #[arg(value_name = "CPUS")]
    pub(crate) cpus: CpuSet,
}

/// Which to release.
#[derive(Args, Debug)]
pub(crate) struct ReleaseArgs {
    /// Numbers and ranges; all that are isolated when left out.
    #[arg(value_name = "CPUS")]
    pub(crate) cpus: Option<CpuSet>,
}

const EXAMPLES: &str = "\
Examples:
  basalt host cpus                           who has which
  basalt host isolate 4-7                    keep four free
  basalt run -d --class dedicated --cpus 2 redis
                                             takes two of them
  basalt host release                        all are everybody's again, when redis has ended";
