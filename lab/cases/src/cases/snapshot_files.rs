//! The files of a snapshot that a case takes of its own VM: where they are, how they are written and opened. Knows no guest.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::Host;
use crate::vm::Vm;

/// The files of one snapshot.
pub(super) struct Files {
    pub(super) state: PathBuf,
    /// The one that was written for it.
    pub(super) memory: PathBuf,
    /// Those that lie below it, the lowest first.
    pub(super) below: Vec<PathBuf>,
}

impl Files {
    pub(super) fn new(host: &Host, name: &str) -> Self {
        Self {
            state: host.scratch.join(format!("{name}.state")),
            memory: host.scratch.join(format!("{name}.memory")),
            below: Vec::new(),
        }
    }

    /// State and memory, to be read.
    pub(super) fn open(&self) -> Result<(File, Vec<File>)> {
        let memory = self.below.iter().chain([&self.memory]).map(File::open);
        Ok((File::open(&self.state)?, memory.collect::<Result<_, _>>()?))
    }

    /// Saves the machine, beside the files that lie below: false if they were of no use, and lie below no more.
    pub(super) fn take(&mut self, machine: &mut Vm) -> Result<bool> {
        let new = |path: &Path| OpenOptions::new().read(true).write(true).create_new(true).open(path);
        let (state, memory) = (new(&self.state)?, new(&self.memory)?);
        let below = self.below.iter().map(File::open).collect::<Result<Vec<_>, _>>()?;
        let below: Vec<_> = below.iter().map(AsFd::as_fd).collect();
        let written = machine.vmm.client.snapshot(state.as_fd(), memory.as_fd(), &below)?;
        let beside = written.files == below.len() + 1;
        if !beside {
            self.below.clear();
        }
        Ok(beside)
    }
}
