//! Volumes of the node without machines: directories, in which the node's own code does what is asked about files.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;

use base::ByteSize;
use host::volume_files::{Done, VolumeFiles};
use node_api::message::Item;
use node_api::tenant_volume::{FileRequest, TenantVolume, TenantVolumeItem, TenantVolumeReply, TenantVolumeRequest};
use node_api::{ApiError, ErrorKind, Reply, Sandbox};

use super::{missing, now_ns, refusal};

#[derive(Debug, Default)]
pub(super) struct Volumes(BTreeMap<(String, String), Volume>);

#[derive(Debug)]
struct Volume {
    size: ByteSize,
    created_ns: u64,
    directory: tempfile::TempDir,
}

impl Volume {
    fn new(size: ByteSize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["root", "trash"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        Self {
            size,
            created_ns: now_ns(),
            directory,
        }
    }

    fn show(&self, tenant: &str, name: &str) -> TenantVolume {
        TenantVolume {
            name: name.to_owned(),
            size: self.size,
            bytes: 0,
            tenant: tenant.to_owned(),
            created_ns: self.created_ns,
            used_by: Vec::new(),
        }
    }

    fn carry_out(&self, request: &FileRequest) -> Result<Done, ApiError> {
        let path = self.directory.path();
        let files = VolumeFiles::open(&path.join("root"), &path.join("trash")).unwrap();
        files
            .carry_out(request)
            .map_err(|error| refusal(error.kind(), &error.to_string()))
    }
}

impl Volumes {
    pub(super) fn reply(
        &mut self,
        tenant: Option<&str>,
        asked: TenantVolumeRequest,
        sandboxes: &BTreeMap<String, Sandbox>,
        (items, fds): (&mut Vec<Item>, &mut Vec<OwnedFd>),
    ) -> Result<Reply, ApiError> {
        let tenant = tenant.ok_or_else(|| refusal(ErrorKind::Invalid, "no tenant is named"))?;
        let key = |name: &str| (tenant.to_owned(), name.to_owned());
        let volume = |volume| Ok(Reply::TenantVolume(TenantVolumeReply::Volume(volume)));
        match asked {
            TenantVolumeRequest::Make {
                name,
                size,
                most,
                most_space,
            } => {
                node_api::check_name(&name).map_err(|error| refusal(ErrorKind::Invalid, &error.to_string()))?;
                let its = self.0.iter().filter(|((owner, _), _)| owner == tenant);
                let (number, bytes) = its.fold((1, size.bytes()), |(number, bytes), (_, one)| {
                    (number + 1, bytes + one.size.bytes())
                });
                let is_too_large = most_space.is_some_and(|most| bytes > most.bytes());
                if self.0.contains_key(&key(&name)) || number > most || is_too_large {
                    return Err(refusal(ErrorKind::Conflict, "there is one already, or too many"));
                }
                volume(
                    self.0
                        .entry(key(&name))
                        .or_insert(Volume::new(size))
                        .show(tenant, &name),
                )
            }
            TenantVolumeRequest::List => {
                let its = self.0.iter().filter(|((owner, _), _)| owner == tenant);
                items.extend(
                    its.map(|((_, name), one)| Item::TenantVolume(TenantVolumeItem::Volume(one.show(tenant, name)))),
                );
                Ok(Reply::Done)
            }
            TenantVolumeRequest::Inspect { name } => volume(self.find(&key(&name))?.show(tenant, &name)),
            TenantVolumeRequest::Remove { name } => {
                self.find(&key(&name))?;
                let mut volumes = sandboxes.values().flat_map(|one| &one.config.volumes);
                if volumes.any(|one| one.source == node_api::VolumeSource::Tenant(name.clone())) {
                    return Err(refusal(ErrorKind::Conflict, "a sandbox has it"));
                }
                self.0.remove(&key(&name));
                Ok(Reply::Done)
            }
            TenantVolumeRequest::Files {
                name,
                created_ns,
                request,
            } => {
                let found = self.find(&key(&name))?;
                if created_ns.is_some_and(|created| created != found.created_ns) {
                    return Err(missing("volume"));
                }
                match found.carry_out(&request)? {
                    Done::Nothing => Ok(Reply::Done),
                    Done::File(entry, fd) => {
                        fds.extend(fd);
                        Ok(Reply::TenantVolume(TenantVolumeReply::File(entry)))
                    }
                    Done::List(entries) => {
                        items.push(Item::TenantVolume(TenantVolumeItem::Files(entries)));
                        Ok(Reply::Done)
                    }
                }
            }
        }
    }

    fn find(&self, key: &(String, String)) -> Result<&Volume, ApiError> {
        self.0.get(key).ok_or_else(|| missing("volume"))
    }
}
