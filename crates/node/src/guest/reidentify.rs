//! What makes a guest a machine of its own when it goes on from a state of before: who it is, and what it has that no template
//! has. Data only; asking the agent for it is the use cases' affair.

use std::time::Duration;

use agent_api::{Environment, Identity, Share, TmpfsMount};
use node_api::{SandboxConfig, Tmpfs, VolumeMount};

/// What a re-identified guest gets besides time and randomness.
#[derive(Debug, Default)]
pub(crate) struct Reidentification {
    /// Who it is from now on; `None` leaves it who it was.
    pub(crate) identity: Option<Identity>,
    /// How long each of its hooks may take; zero runs none.
    pub(crate) hooks: Duration,
    /// What it gets besides.
    pub(crate) own: Own,
    /// What its programs are told that ask for their environment; filled in when it goes on.
    pub(crate) environment: Option<Environment>,
    /// It was restored, and commands ran in it when it was saved.
    pub(crate) restored: bool,
}

impl Reidentification {
    /// Of one that goes on from when it was suspended: it is the same one, and the only one, so that no hook has anything to mend. But nobody
    /// knows how long it stood still.
    pub(crate) fn later() -> Self {
        Self {
            restored: true,
            ..Self::default()
        }
    }
}

/// What a sandbox has and no template, so that no clone inherits it; as its agent is told.
#[derive(Debug, Default)]
pub(crate) struct Own {
    /// A limit of its processes.
    pub(crate) pids_max: Option<u64>,
    /// What is mounted over its root; so are the shares.
    pub(crate) tmpfs: Vec<TmpfsMount>,
    pub(crate) shared_directories: Vec<Share>,
}

impl Own {
    pub(crate) fn of(config: &SandboxConfig) -> Self {
        Self {
            pids_max: config.limits.pids,
            tmpfs: config.tmpfs.iter().map(tmpfs).collect(),
            shared_directories: shared_directories(&config.volumes),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pids_max.is_none() && self.tmpfs.is_empty() && self.shared_directories.is_empty()
    }
}

fn tmpfs(tmpfs: &Tmpfs) -> TmpfsMount {
    TmpfsMount {
        path: tmpfs.path.clone(),
        bytes: tmpfs.size.map(base::ByteSize::bytes),
        mode: tmpfs.mode,
        exec: tmpfs.exec,
    }
}

/// What the guest knows a shared directory by.
pub(crate) fn share_tag(index: usize) -> String {
    format!("volume{index}")
}

/// What the guest is to mount; the agent finds the order.
pub(crate) fn shared_directories(volumes: &[VolumeMount]) -> Vec<Share> {
    let share = |(index, volume): (usize, &VolumeMount)| Share {
        tag: share_tag(index),
        path: volume.target.clone(),
        read_only: volume.read_only,
    };
    volumes.iter().enumerate().map(share).collect()
}
