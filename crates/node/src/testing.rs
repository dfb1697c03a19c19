//! Records for this crate's tests.

use std::collections::BTreeMap;

use agent_api::ExecRequest;
use base::ByteSize;
use node_api::{ProcessConfig, Resources, Sandbox, SandboxConfig, State};

use crate::store::database::Stored;

/// A sandbox that has exited.
pub(crate) fn stored(id: &str, name: &str) -> Stored {
    Stored {
        sandbox: Sandbox {
            id: id.into(),
            name: name.into(),
            state: State::Exited,
            config: SandboxConfig {
                name: None,
                image: "python".into(),
                process: ProcessConfig::default(),
                resources: Resources {
                    cpus: 1,
                    memory: ByteSize::mib(128),
                    disk: None,
                    cpu_model: None,
                    class: node_api::Class::Standard,
                    idle: node_api::Idle::Halt,
                    memory_mode: node_api::MemoryMode::Translated,
                },
                limits: node_api::Limits::default(),
                tmpfs: Vec::new(),
                network: node_api::NetworkMode::None,
                ports: Vec::new(),
                volumes: Vec::new(),
                hostname: None,
                boot: false,
                paging: node_api::Paging::Mapped,
                template: None,
                remove: false,
                detach: true,
                labels: BTreeMap::new(),
            },
            digest: "00".into(),
            created_ns: 1,
            started_ns: None,
            ended_ns: None,
            ended: None,
            vmm: None,
            volumes: Vec::new(),
            restarts: 0,
            clone_of: None,
            template: None,
            refused: None,
            owned_cpus: base::CpuSet::default(),
        },
        generation: 0,
        acknowledged: false,
        slot: 0,
        command: ExecRequest::default(),
        stopped: false,
        held: false,
        building: false,
        share_slots: 0,
        networked: false,
        log_from: 0,
    }
}
