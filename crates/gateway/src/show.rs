//! The node's sandboxes as the API tells of them. Asks nobody.

use base::Cidr;
use node_api::{NetworkMode, OnTimeout, Sandbox};

use crate::api::models::{
    Lifecycle, ListedSandbox, NetworkDetail, Sandbox as SandboxModel, SandboxDetail, SandboxVolumeMount, State,
};
use crate::domain_name::Domain;
use crate::gateway::Gateway;
use crate::labels::Said;
use crate::launch::is_paused;
use crate::time_text;
use crate::tokens::TokenKind;
use crate::volumes::mounted;

/// Clients of before want to see a client; it has no meaning.
pub(crate) const CLIENT: &str = "basalt";

impl Gateway {
    /// One that was made, or connected to.
    pub(crate) fn show(&self, sandbox: &Sandbox) -> SandboxModel {
        let said = Said::of(sandbox);
        let traffic = || self.tokens.token(TokenKind::Traffic, &sandbox.id);
        SandboxModel {
            template_id: said.template,
            sandbox_id: sandbox.id.clone(),
            client_id: CLIENT,
            envd_version: self.envd.version().to_owned(),
            alias: said.alias,
            envd_access_token: Some(self.tokens.token(TokenKind::Envd, &sandbox.id)),
            traffic_access_token: said.private_traffic.then(traffic),
            domain: self.domain.as_ref().map(Domain::to_string),
        }
    }

    /// One of a list.
    pub(crate) fn show_listed(&self, sandbox: &Sandbox) -> ListedSandbox {
        let said = Said::of(sandbox);
        let resources = &sandbox.config.resources;
        let end = match is_paused(sandbox.state) {
            true => sandbox.ends_ns.or(sandbox.ended_ns).or(Some(sandbox.created_ns)),
            false => sandbox.ends_ns,
        };
        ListedSandbox {
            template_id: said.template,
            alias: said.alias,
            sandbox_id: sandbox.id.clone(),
            client_id: CLIENT,
            started_at: time_text::text(sandbox.created_ns),
            end_at: end.map_or_else(time_text::never, time_text::text),
            cpu_count: resources.cpus,
            memory_mb: resources.memory.bytes() >> 20,
            disk_size_mb: resources.disk.map_or(0, |disk| disk.bytes() >> 20),
            metadata: said.metadata,
            state: match is_paused(sandbox.state) {
                true => State::Paused,
                false => State::Running,
            },
            envd_version: self.envd.version().to_owned(),
            volume_mounts: mounted(&sandbox.config.volumes)
                .map(|(name, path)| SandboxVolumeMount {
                    name: name.to_owned(),
                    path: path.to_owned(),
                })
                .collect(),
        }
    }

    /// All of one.
    pub(crate) fn show_detail(&self, sandbox: &Sandbox) -> SandboxDetail {
        let said = Said::of(sandbox);
        let suspends = sandbox
            .config
            .time_limit
            .is_some_and(|limit| limit.then == OnTimeout::Suspend);
        SandboxDetail {
            listed: self.show_listed(sandbox),
            envd_access_token: self.tokens.token(TokenKind::Envd, &sandbox.id),
            allow_internet_access: internet(sandbox, said.internet),
            domain: self.domain.as_ref().map(Domain::to_string),
            network: NetworkDetail {
                allow_public_traffic: !said.private_traffic,
                allow_out: texts(sandbox.config.egress.allow()),
                deny_out: texts(sandbox.config.egress.deny()),
            },
            lifecycle: Lifecycle {
                auto_resume: said.auto_resume,
                on_timeout: if suspends { "pause" } else { "kill" },
            },
            pause_mode: is_paused(sandbox.state).then_some("full"),
        }
    }
}

/// Whether it has the internet: what is so now, or else what its user has asked for.
fn internet(sandbox: &Sandbox, asked: Option<bool>) -> Option<bool> {
    let has_none = sandbox.config.network == NetworkMode::None || sandbox.config.egress.is_nothing();
    match has_none {
        true => Some(false),
        // The rules may have changed since.
        false => asked.filter(|asked| *asked),
    }
}

fn texts(ranges: &[Cidr]) -> Option<Vec<String>> {
    (!ranges.is_empty()).then(|| ranges.iter().map(Cidr::to_string).collect())
}
