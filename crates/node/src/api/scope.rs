//! Who may ask for what. Whoever reaches the daemon's own socket may ask for anything, for a tenant too; a gateway, which serves strangers and
//! is nobody's root, asks on a socket of its own: for tenants, and for nothing that reaches the host. Knows requests, and not how they are
//! carried out.
//!
//! ```text
//!                                           sandboxes and snapshots that are there
//!  socket        scope    requests          for a tenant    for nobody in particular
//!  basaltd.sock  Admin    any               the tenant's    all
//!  gateway.sock  Gateway  is_for_gateways   the tenant's    those that are a tenant's
//! ```

use std::sync::Arc;

use node_api::{Idle, Request, SandboxConfig, Snapshot, VolumeMount, VolumeSource};

use crate::Error;
use crate::node::Node;
use crate::sandbox::entry::Entry;

/// The longest name of a tenant.
const MAX_TENANT: usize = 64;

/// What may be asked on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// Anything: who asks can become root by it.
    Admin,
    /// What a gateway asks for tenants.
    Gateway,
}

/// Who asks.
#[derive(Clone, Debug)]
pub(super) struct Caller {
    scope: Scope,
    tenant: Option<String>,
}

impl Caller {
    /// Somebody on a socket of this scope, for a tenant if one is named.
    ///
    /// # Errors
    /// It is no tenant's name.
    pub(super) fn new(scope: Scope, tenant: Option<String>) -> Result<Self, Error> {
        match &tenant {
            Some(name) if !is_tenant(name) => Err(invalid(format!(
                "`{name}` is no tenant: 1 to {MAX_TENANT} letters, digits, `_`, `.` and `-`"
            ))),
            _ => Ok(Self { scope, tenant }),
        }
    }

    /// Checks that this may be asked, and fills in whose it is to be that is made.
    ///
    /// # Errors
    /// It may not.
    pub(super) fn admit(&self, request: &mut Request) -> Result<(), Error> {
        if self.scope == Scope::Gateway && !is_for_gateways(request) {
            return Err(invalid(
                "this socket is for gateways, which do not ask for that: ask on basaltd.sock of the state directory"
                    .into(),
            ));
        }
        let makes = matches!(
            request,
            Request::Run(_) | Request::Clone(_) | Request::MakeSnapshot(_) | Request::Rollback(_)
        );
        if self.scope == Scope::Gateway && makes && self.tenant.is_none() {
            return Err(invalid(
                "whoever makes something on this socket names its tenant".into(),
            ));
        }
        match request {
            Request::Run(config) => {
                if self.scope == Scope::Gateway {
                    check(config)?;
                }
                config.owner.clone_from(&self.tenant);
            }
            Request::Clone(config) if self.scope == Scope::Gateway && !config.ports.is_empty() => {
                return Err(not_for_gateways("publishes ports of the host"));
            }
            Request::Clone(config) if self.scope == Scope::Gateway && !config.volumes.iter().all(is_tenants) => {
                return Err(not_for_gateways(OF_HOST));
            }
            _ => (),
        }
        Ok(())
    }

    /// The tenant for whom is asked.
    ///
    /// # Errors
    /// None was named.
    pub(super) fn tenant(&self) -> Result<&str, Error> {
        let nobody = || invalid("whoever asks about volumes of a tenant names the tenant".into());
        self.tenant.as_deref().ok_or_else(nobody)
    }

    /// Whoever asks has the node, and asks for no tenant.
    pub(super) fn is_administrator(&self) -> bool {
        self.scope == Scope::Admin && self.tenant.is_none()
    }

    /// A sandbox that is there for who asks.
    ///
    /// # Errors
    /// [`Error::NotFound`], as of one that nobody has.
    pub(super) fn find(&self, node: &Node, wanted: &str) -> Result<Arc<Entry>, Error> {
        let entry = node.find(wanted)?;
        let owned = self.owns(entry.lock().stored.sandbox.config.owner.as_deref());
        match owned {
            true => Ok(entry),
            false => Err(Error::NotFound(wanted.to_owned())),
        }
    }

    /// A snapshot that is there for who asks.
    ///
    /// # Errors
    /// As of one that nobody has.
    pub(super) fn find_snapshot(&self, node: &Node, name: &str) -> Result<Snapshot, Error> {
        let snapshot = node.inspect_snapshot(name)?;
        match self.owns(snapshot.config.owner.as_deref()) {
            true => Ok(snapshot),
            false => Err(Error::NoSnapshot(name.to_owned())),
        }
    }

    /// All snapshots that are there for who asks.
    ///
    /// # Errors
    /// They cannot be read.
    pub(super) fn snapshots(&self, node: &Node) -> Result<Vec<Snapshot>, Error> {
        let mut all = node.list_snapshots()?;
        all.retain(|snapshot| self.owns(snapshot.config.owner.as_deref()));
        Ok(all)
    }

    /// Whether what is this owner's is there for who asks.
    pub(super) fn owns(&self, owner: Option<&str>) -> bool {
        match &self.tenant {
            Some(tenant) => Some(tenant.as_str()) == owner,
            None => self.scope == Scope::Admin || owner.is_some(),
        }
    }
}

fn is_tenant(name: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    !name.is_empty() && name.len() <= MAX_TENANT && name.bytes().all(is_letter)
}

fn invalid(why: String) -> Error {
    Error::Invalid(why)
}

/// Whether a gateway may ask for this. What is not listed may reach the host or others' sandboxes.
fn is_for_gateways(request: &Request) -> bool {
    matches!(
        request,
        Request::Info
            | Request::Run(_)
            | Request::Start { .. }
            | Request::Exec { .. }
            | Request::List(_)
            | Request::Inspect { .. }
            | Request::Logs { .. }
            | Request::Wait { .. }
            | Request::Stop { .. }
            | Request::Kill { .. }
            | Request::Remove { .. }
            | Request::Pause { .. }
            | Request::Suspend { .. }
            | Request::Resume { .. }
            | Request::Stats { .. }
            | Request::ListUsage
            | Request::ListPools
            | Request::Trace { .. }
            | Request::MakeSnapshot(_)
            | Request::ListSnapshots
            | Request::InspectSnapshot { .. }
            | Request::RemoveSnapshot { .. }
            | Request::InspectTemplate { .. }
            | Request::ListTemplates
            | Request::Clone(_)
            | Request::Rollback(_)
            | Request::SetTimeLimit { .. }
            | Request::UpdateNetwork { .. }
            | Request::TenantVolume(_)
    )
}

const OF_HOST: &str = "has volumes of the host";

fn is_tenants(volume: &VolumeMount) -> bool {
    matches!(volume.source, VolumeSource::Tenant(_))
}

/// What a sandbox has of its host besides time and space is for its administrator to give.
fn check(config: &SandboxConfig) -> Result<(), Error> {
    let resources = &config.resources;
    let refused = if !config.detach {
        "is not detached"
    } else if !config.volumes.iter().all(is_tenants) {
        OF_HOST
    } else if !config.devices.is_empty() || !config.cdi_devices.is_empty() {
        "has devices of the host"
    } else if config.accelerator.is_some() {
        "has an accelerator"
    } else if !config.ports.is_empty() {
        "publishes ports of the host"
    } else if !resources.class.is_standard() || resources.idle != Idle::default() {
        "has the host's processors to itself"
    } else if config.boot || !resources.memory_mode.is_translated() {
        "boots a kernel of its own"
    } else {
        return Ok(());
    };
    Err(not_for_gateways(refused))
}

fn not_for_gateways(refused: &str) -> Error {
    invalid(format!(
        "a sandbox that {refused} is not for gateways to ask for: ask on basaltd.sock of the state directory"
    ))
}

#[cfg(test)]
mod tests {
    use node_api::tenant_volume::TenantVolumeRequest;
    use node_api::{CloneConfig, ListConfig, NetworkMode};

    use super::*;
    use crate::testing::stored;

    fn config() -> SandboxConfig {
        SandboxConfig {
            detach: true,
            ..stored("aaaaaaaaaaaa", "web").sandbox.config
        }
    }

    fn gateway() -> Caller {
        Caller::new(Scope::Gateway, Some("t1".into())).unwrap()
    }

    #[test]
    fn what_a_gateway_makes_is_a_tenants() {
        let mut run = Request::Run(Box::new(config()));
        let nobody = Caller::new(Scope::Gateway, None).unwrap();
        assert!(nobody.admit(&mut run).is_err());
        gateway().admit(&mut run).unwrap();
        let mut clone = Request::Clone(CloneConfig::default());
        assert!(nobody.admit(&mut clone).is_err());
        let mut publishes = Request::Clone(CloneConfig {
            ports: vec!["80:80".to_owned()],
            ..CloneConfig::default()
        });
        assert!(gateway().admit(&mut publishes).is_err());
        let of_host = |source| {
            Request::Clone(CloneConfig {
                volumes: vec![VolumeMount {
                    source,
                    target: "/a".into(),
                    read_only: false,
                }],
                ..CloneConfig::default()
            })
        };
        assert!(gateway().admit(&mut of_host(VolumeSource::Named("a".into()))).is_err());
        gateway().admit(&mut of_host(VolumeSource::Tenant("a".into()))).unwrap();
        for name in ["", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(Caller::new(Scope::Admin, Some(name.into())).is_err(), "{name:?}");
        }
    }

    #[test]
    fn a_gateway_asks_for_nothing_that_reaches_the_host() {
        let (sandbox, name) = (String::from("web"), String::from("s"));
        let mut refused = vec![
            Request::Quit { clean: false },
            Request::Prune,
            Request::Quarantine { delete: true },
            Request::MakeVolume { name: name.clone() },
            Request::ListVolumes,
            Request::PruneTemplates { all: true },
            Request::RemoveTemplate { template: name.clone() },
            Request::ListCpus,
            Request::ReleaseCpus { cpus: None },
            Request::KeepTemplate,
            Request::Finish,
        ];
        for request in &mut refused {
            assert!(gateway().admit(request).is_err(), "{request:?}");
            let admin = Caller::new(Scope::Admin, None).unwrap();
            admin.admit(request).unwrap();
        }
        let mut served = vec![
            Request::List(ListConfig::all()),
            Request::Exec {
                sandbox: sandbox.clone(),
            },
            Request::Suspend {
                sandbox: sandbox.clone(),
            },
            Request::UpdateNetwork {
                sandbox: sandbox.clone(),
                egress: base::Egress::nothing(),
            },
            Request::Trace { sandbox },
            Request::ListUsage,
            Request::ListPools,
            Request::TenantVolume(TenantVolumeRequest::List),
            Request::Clone(CloneConfig::default()),
        ];
        for request in &mut served {
            gateway().admit(request).unwrap();
        }
    }

    #[test]
    fn what_a_gateway_runs_has_nothing_of_the_host_and_is_its_tenants() {
        let mut run = Request::Run(Box::new(SandboxConfig {
            owner: Some("somebody".into()),
            network: NetworkMode::Auto,
            ..config()
        }));
        gateway().admit(&mut run).unwrap();
        let Request::Run(made) = &run else { panic!() };
        assert_eq!(made.owner.as_deref(), Some("t1"));
        type Change = fn(&mut SandboxConfig);
        let changes: [Change; 8] = [
            |c| c.detach = false,
            |c| c.volumes = vec!["/etc:/etc".parse::<VolumeMount>().unwrap()],
            |c| c.devices = vec!["0000:01:00.0".parse().unwrap()],
            |c| c.cdi_devices = vec!["a.b/c=d".parse().unwrap()],
            |c| c.ports = vec!["80:80".into()],
            |c| c.resources.class = node_api::Class::Dedicated,
            |c| c.accelerator = Some("null".parse().unwrap()),
            |c| c.boot = true,
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut asked = config();
            change(&mut asked);
            let mut run = Request::Run(Box::new(asked));
            assert!(gateway().admit(&mut run).is_err(), "change {number}");
            Caller::new(Scope::Admin, None).unwrap().admit(&mut run).unwrap();
        }
    }

    #[test]
    fn what_is_anothers_is_not_there() {
        assert!(gateway().owns(Some("t1")));
        assert!(!gateway().owns(Some("t2")) && !gateway().owns(None));
        let [admin, nobody] = [Scope::Admin, Scope::Gateway].map(|scope| Caller::new(scope, None).unwrap());
        assert!(admin.owns(Some("t1")) && admin.owns(None));
        assert!(nobody.owns(Some("t1")) && !nobody.owns(None));
        assert!(admin.is_administrator() && !nobody.is_administrator());
        let for_one = Caller::new(Scope::Admin, Some("t1".into())).unwrap();
        assert!(!for_one.is_administrator() && for_one.tenant().unwrap() == "t1");
    }
}
