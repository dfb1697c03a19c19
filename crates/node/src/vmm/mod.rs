//! VMMs as processes with a control socket: how one is configured, started, asked, watched and found again. Does not know why.

pub(crate) mod accelerator;
pub(crate) mod accelerator_stats;
pub(crate) mod cmdline;
pub(crate) mod files;
pub(crate) mod launch;
pub(crate) mod line;
pub(crate) mod monitor;
pub(crate) mod process;
pub(crate) mod tail;
pub(crate) mod vm;
