//! Records and a configuration for this crate's tests.

use std::collections::BTreeMap;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;

use agent_api::ExecRequest;
use base::ByteSize;
use node_api::{CpuModel, ProcessConfig, Resources, Sandbox, SandboxConfig, State};

use crate::config::{Config, Programs, TimeLimits, Zeroing};
use crate::resources::budget::{Overcommit, ThisHost};
use crate::store::database::{CameZeroed, Stored};

#[path = "../../../bin/basalt/tests/support/mod.rs"]
#[allow(dead_code, reason = "others use all of it")]
pub(crate) mod support;

/// A small machine of the usual kind, without a disk of its own.
pub(crate) fn resources() -> Resources {
    Resources {
        cpus: 1,
        memory: ByteSize::mib(128),
        boot_memory: None,
        max_memory: None,
        held_memory: None,
        inflated: None,
        disk: None,
        cpu_model: None,
        class: node_api::Class::Standard,
        idle: node_api::Idle::Halt,
        memory_mode: node_api::MemoryMode::Translated,
        free_page_reporting: false,
        guest_iommu: false,
    }
}

/// A sandbox that has exited.
pub(crate) fn stored(id: &str, name: &str) -> Stored {
    Stored {
        sandbox: Sandbox {
            id: id.into(),
            name: name.into(),
            state: State::Exited,
            pause_reason: None,
            config: SandboxConfig {
                name: None,
                image: "python".into(),
                process: ProcessConfig::default(),
                resources: resources(),
                limits: node_api::Limits::default(),
                tmpfs: Vec::new(),
                egress: base::Egress::default(),
                network: node_api::NetworkMode::None,
                ports: Vec::new(),
                volumes: Vec::new(),
                devices: Vec::new(),
                cdi_devices: Vec::new(),
                device_start: None,
                accelerator: None,
                time_limit: None,
                memory_ready: false,
                hostname: None,
                boot: false,
                paging: node_api::Paging::Mapped,
                template: None,
                remove: false,
                detach: true,
                labels: BTreeMap::new(),
                owner: None,
            },
            digest: "00".into(),
            created_ns: 1,
            started_ns: None,
            ends_ns: None,
            ended_ns: None,
            ended: None,
            vmm: None,
            accelerator: None,
            accelerator_ended: None,
            volumes: Vec::new(),
            restarts: 0,
            clone_of: None,
            template: None,
            refused: None,
            owned_cpus: base::CpuSet::default(),
            memory_state: None,
        },
        generation: 0,
        acknowledged: false,
        slot: 0,
        command: ExecRequest::default(),
        stopped: false,
        operation: None,
        building: false,
        share_slots: 0,
        detached: Vec::new(),
        was_suspended: false,
        memory_is_private: false,
        came_zeroed: CameZeroed::default(),
        networked: false,
        log_from: 0,
    }
}

/// What a node below this directory is started with.
pub(crate) fn config(directory: &Path) -> Config {
    Config {
        state: directory.join("state"),
        kernel: directory.join("vmlinux"),
        initramfs: directory.join("initramfs.cpio"),
        programs: Programs {
            vmm: directory.join("vmm"),
            ..Programs::default()
        },
        kvm: "/dev/null".into(),
        cpu_model: CpuModel::Common,
        users: None,
        log_level: log::LevelFilter::Warn,
        sockets: crate::Sockets::default(),
        managed: true,
        cgroup: None,
        limits: TimeLimits::REAL,
        spans: None,
        host: Arc::new(ThisHost),
        overcommit: Overcommit::default(),
        zeroing: Zeroing::default(),
    }
}

/// A small file system in memory, below a directory that goes with it.
pub(crate) struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// # Panics
    /// Only root can mount one, as which these tests run.
    pub(crate) fn of(size: ByteSize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = std::ffi::CString::new(format!("size={}", size.bytes())).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", directory.path(), "tmpfs", flags, options.as_c_str()).unwrap();
        Self(directory)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Takes all of its space.
    pub(crate) fn fill(&self) {
        fill(&self.0.path().join("filling"));
    }

    /// Gives it back.
    pub(crate) fn empty(&self) {
        std::fs::remove_file(self.0.path().join("filling")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
}

/// Takes all the space there is for a file of this name.
pub(crate) fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    let free = base::space::available(path).unwrap();
    // Whoever fills it may be a thread that gets little of the processor; what this does not take is written.
    let taken = rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, free);
    if taken.is_ok() {
        file.seek(SeekFrom::End(0)).unwrap();
    }
    let block = vec![1; 64 << 10];
    let full = loop {
        if let Err(error) = file.write_all(&block) {
            break error;
        }
    };
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
}
