//! Where everything is, below one state directory. Makes nothing.
//!
//! ```text
//!  lock             held (flock) by the one daemon of this directory
//!  basaltd.sock     where it is asked
//!  metrics.sock     where it tells its metrics
//!  node.db          its database; node.db.damaged-TIME: one that was set aside
//!  recovery.json    what was wrong at the last start at which anything was
//!  quarantine/      what belongs to nobody
//!  reserve          room for the database and records where there is no other
//!  images/          the image store
//!  disks/           an empty file system of each size, copied for each sandbox
//!  volumes/NAME/    _data: a named volume's files
//!  tenant-volumes/t-TENANT/NAME/    disk, mount: a tenant's volume
//!  snapshots/NAME/  record.json, state, memory, disk, accelerator: a snapshot
//!  templates/ID/    record.json, state, memory, disk: a template
//!  sandboxes/ID/    record.json, disk, log, console.log, vmm.log, accelerator.log: as long as the sandbox is known
//!  run/ID/          accelerator, accelerator-save, arbiter/socket, control, vsock: as long as its VM runs
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;

/// The directory of tenants' volumes.
pub(crate) const TENANT_VOLUMES: &str = "tenant-volumes";

/// The paths below a state directory.
#[derive(Clone, Debug)]
pub(crate) struct Paths(PathBuf);

impl Paths {
    /// Below `state`, an absolute path.
    pub(crate) fn new(state: PathBuf) -> Self {
        Self(state)
    }

    pub(crate) fn state(&self) -> &Path {
        &self.0
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.0.join(node_api::SOCKET)
    }

    pub(crate) fn gateway_socket(&self) -> PathBuf {
        self.0.join(node_api::GATEWAY_SOCKET)
    }

    pub(crate) fn database(&self) -> PathBuf {
        self.0.join("node.db")
    }

    pub(crate) fn quarantine(&self) -> PathBuf {
        self.0.join(node_api::recovery::QUARANTINE)
    }

    pub(crate) fn reserve(&self) -> PathBuf {
        self.0.join("reserve")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.0.join("images")
    }

    pub(crate) fn disks(&self) -> PathBuf {
        self.0.join("disks")
    }

    pub(crate) fn volumes(&self) -> PathBuf {
        self.0.join("volumes")
    }

    pub(crate) fn tenant_volumes(&self) -> PathBuf {
        self.0.join(TENANT_VOLUMES)
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.0.join("snapshots")
    }

    pub(crate) fn templates(&self) -> PathBuf {
        self.0.join("templates")
    }

    pub(crate) fn sandboxes(&self) -> PathBuf {
        self.0.join("sandboxes")
    }

    pub(crate) fn runs(&self) -> PathBuf {
        self.0.join("run")
    }

    pub(crate) fn sandbox(&self, id: &str) -> SandboxPaths {
        SandboxPaths {
            directory: self.sandboxes().join(id),
            run: self.runs().join(id),
        }
    }
}

/// What is in a directory, by name.
pub(crate) fn names(directory: &Path) -> Result<Vec<String>, Error> {
    let entries = fs::read_dir(directory).map_err(Error::file("list", directory))?;
    Ok(entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

/// The paths of one sandbox.
#[derive(Clone, Debug)]
pub(crate) struct SandboxPaths {
    /// What lasts.
    pub(crate) directory: PathBuf,
    /// What belongs to its VM.
    pub(crate) run: PathBuf,
}

impl SandboxPaths {
    pub(crate) fn disk(&self) -> PathBuf {
        self.directory.join("disk")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    pub(crate) fn console(&self) -> PathBuf {
        self.directory.join("console.log")
    }

    pub(crate) fn vmm_log(&self) -> PathBuf {
        self.directory.join("vmm.log")
    }

    pub(crate) fn accelerator_log(&self) -> PathBuf {
        self.directory.join("accelerator.log")
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.run.join("control")
    }

    /// Where its accelerator's server tells statistics.
    pub(crate) fn accelerator(&self) -> PathBuf {
        self.run.join("accelerator")
    }

    /// What its accelerator's server sees of this: a directory that has one socket.
    pub(crate) fn arbiter(&self) -> PathBuf {
        self.run.join("arbiter")
    }

    /// Where that server asks for its part of the accelerator's time.
    pub(crate) fn arbiter_socket(&self) -> PathBuf {
        self.arbiter().join("socket")
    }

    pub(crate) fn vsock(&self) -> PathBuf {
        self.run.join("vsock")
    }

    /// Where the server of its accelerator is asked for its state.
    pub(crate) fn accelerator_save(&self) -> PathBuf {
        self.run.join("accelerator-save")
    }

    /// Where the socket is made that takes the place of the other.
    pub(crate) fn next_vsock(&self) -> PathBuf {
        self.run.join("vsock.next")
    }
}
