//! What is asked about volumes of tenants. Decides nothing.

use std::os::fd::OwnedFd;

use host::volume_files::Done;
use node_api::tenant_volume::{FileEntry, TenantVolumeItem, TenantVolumeReply, TenantVolumeRequest};

use crate::Error;
use crate::node::Node;
use crate::resources::tenant_volumes::Bound;

/// Bytes of paths that one packet of a list has: with all else, and written as JSON, they fit.
const PACKET: usize = 16 << 10;

/// Items, what the reply has, and what comes with it.
type Answered = (Vec<TenantVolumeItem>, Option<TenantVolumeReply>, Option<OwnedFd>);

/// The volumes of all tenants.
pub(super) fn list_all(node: &Node) -> Result<Vec<TenantVolumeItem>, Error> {
    let all = node.volumes.tenants.list_all(&node.sandboxes)?;
    Ok(all.into_iter().map(TenantVolumeItem::Volume).collect())
}

/// Carries a request out, for a tenant.
pub(super) fn carry_out(node: &Node, tenant: &str, asked: TenantVolumeRequest) -> Result<Answered, Error> {
    let (volumes, sandboxes) = (&node.volumes.tenants, &node.sandboxes);
    let one = |volume| Ok((Vec::new(), Some(TenantVolumeReply::Volume(volume)), None));
    match asked {
        TenantVolumeRequest::Make {
            name,
            size,
            most,
            most_space,
        } => {
            let bound = Bound {
                most,
                space: most_space,
            };
            one(volumes.make(tenant, &name, size, bound)?)
        }
        TenantVolumeRequest::Inspect { name } => one(volumes.find(tenant, &name, sandboxes)?),
        TenantVolumeRequest::List => {
            let all = volumes.list(tenant, sandboxes)?;
            Ok((all.into_iter().map(TenantVolumeItem::Volume).collect(), None, None))
        }
        TenantVolumeRequest::Remove { name } => {
            volumes.remove(tenant, &name, sandboxes)?;
            Ok((Vec::new(), None, None))
        }
        TenantVolumeRequest::Files {
            name,
            created_ns,
            request,
        } => Ok(
            match volumes.carry_out((tenant, &name), created_ns, &request, sandboxes)? {
                Done::Nothing => (Vec::new(), None, None),
                Done::File(entry, fd) => (Vec::new(), Some(TenantVolumeReply::File(entry)), fd),
                Done::List(entries) => (packets(entries), None, None),
            },
        ),
    }
}

/// A list in pieces that fit into packets.
fn packets(entries: Vec<FileEntry>) -> Vec<TenantVolumeItem> {
    let mut pieces: Vec<Vec<FileEntry>> = Vec::new();
    let mut room = 0;
    for entry in entries {
        // Numbers and names of fields are some 250 bytes more.
        let bytes = entry.name.len() + entry.path.len() + entry.target.as_ref().map_or(0, String::len) + 250;
        match pieces.last_mut() {
            Some(piece) if bytes <= room => {
                room -= bytes;
                piece.push(entry);
            }
            _ => {
                room = PACKET.saturating_sub(bytes);
                pieces.push(vec![entry]);
            }
        }
    }
    pieces.into_iter().map(TenantVolumeItem::Files).collect()
}
