//! Tenants' volumes: asked of the node, which keeps them; the tokens by which their files are reached; and what a new sandbox mounts. Knows no
//! request of HTTP.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::ByteSize;
use node_api::message::Item;
use node_api::tenant_volume::{
    FileEntry, FileRequest, TenantVolume, TenantVolumeItem, TenantVolumeReply, TenantVolumeRequest,
};
use node_api::{Reply, Request, VolumeMount, VolumeSource};

use crate::Error;
use crate::gateway::Gateway;
use crate::node::{Answer, Nodes, Owner, is_missing};
use crate::tokens::{TokenKind, Tokens};

/// What stands between the parts of a token: no tenant's name has it.
const BETWEEN: char = '~';

/// What tenants may have.
#[derive(Clone, Copy, Debug)]
pub struct VolumesConfig {
    /// How large each is.
    pub size: ByteSize,
    /// How many a tenant may have.
    pub most: u32,
}

impl Default for VolumesConfig {
    fn default() -> Self {
        Self {
            size: ByteSize::gib(1),
            most: 20,
        }
    }
}

/// A volume whose token was shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    /// Whose it is.
    pub(crate) tenant: Arc<str>,
    /// Its name.
    pub(crate) name: String,
    /// When it was made, which tells it from a later one.
    pub(crate) created_ns: u64,
}

fn signed(tenant: &str, name: &str, created_ns: u64) -> String {
    format!("{tenant}/{name}/{created_ns}")
}

/// By what a volume's files are reached.
pub(crate) fn token(tokens: &Tokens, tenant: &str, volume: &TenantVolume) -> String {
    let mac = tokens.token(TokenKind::Volume, &signed(tenant, &volume.name, volume.created_ns));
    format!("{tenant}{BETWEEN}{}{BETWEEN}{mac}", volume.created_ns)
}

/// The volume of this name, if this is its token.
pub(crate) fn reached(tokens: &Tokens, name: &str, token: &str) -> Option<Reached> {
    let mut parts = token.splitn(3, BETWEEN);
    let (tenant, created_ns, mac) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
    let is_good = tokens.is_token(TokenKind::Volume, &signed(tenant, name, created_ns), mac.as_bytes());
    is_good.then(|| Reached {
        tenant: tenant.into(),
        name: name.to_owned(),
        created_ns,
    })
}

/// What a sandbox has at a path: a volume of its tenant.
pub(crate) fn mount(name: String, path: String) -> VolumeMount {
    VolumeMount {
        source: VolumeSource::Tenant(name),
        target: path,
        read_only: false,
    }
}

/// The volumes of a sandbox, by name and path.
pub(crate) fn mounted(volumes: &[VolumeMount]) -> impl Iterator<Item = (&str, &str)> {
    volumes.iter().filter_map(|volume| match &volume.source {
        VolumeSource::Tenant(name) => Some((name.as_str(), volume.target.as_str())),
        _ => None,
    })
}

impl Nodes {
    async fn volume(&self, owner: &Owner, asked: TenantVolumeRequest) -> Result<Answer, Error> {
        self.ask(owner, Request::TenantVolume(asked)).await
    }

    async fn one_volume(&self, owner: &Owner, asked: TenantVolumeRequest) -> Result<TenantVolume, Error> {
        match self.volume(owner, asked).await?.reply {
            Reply::TenantVolume(TenantVolumeReply::Volume(volume)) => Ok(volume),
            _ => Err(Error::Unexpected("a volume")),
        }
    }
}

/// One that nobody has, or another tenant.
fn missing(name: &str) -> Error {
    Error::NotFound {
        what: "volume",
        name: name.chars().take(64).collect(),
    }
}

impl Gateway {
    /// Makes a volume, if the tenant may have one more. The node looks once more, as others may be made at the same time.
    pub(crate) async fn make_volume(&self, tenant: &Arc<str>, name: String) -> Result<TenantVolume, Error> {
        let (owner, size) = (Owner::Tenant(Arc::clone(tenant)), self.volumes.size);
        let asked = Arc::clone(tenant);
        let quota = self.store.with(move |store| store.quota(&asked)).await?;
        if quota.volumes.is_some() || quota.volume_space.is_some() {
            let there = self.volumes(&owner).await?;
            // One of the same name is what is wrong then.
            if there.iter().all(|one| one.name != name) {
                let bytes = there.iter().map(|one| one.size.bytes());
                let number = u64::try_from(there.len()).unwrap_or(u64::MAX);
                quota
                    .check_volumes(number.saturating_add(1), bytes.fold(size.bytes(), u64::saturating_add))
                    .map_err(|shortage| Error::Store(control::Error::Quota(shortage)))?;
            }
        }
        let most = quota.volumes.map(|most| u32::try_from(most).unwrap_or(u32::MAX));
        let asked = TenantVolumeRequest::Make {
            name,
            size,
            most: most.unwrap_or(self.volumes.most),
            most_space: quota.volume_space.map(ByteSize),
        };
        self.nodes.one_volume(&owner, asked).await
    }

    /// One of a tenant's.
    pub(crate) async fn find_volume(&self, owner: &Owner, name: String) -> Result<TenantVolume, Error> {
        if node_api::check_name(&name).is_err() {
            return Err(missing(&name));
        }
        let asked = TenantVolumeRequest::Inspect { name: name.clone() };
        match self.nodes.one_volume(owner, asked).await {
            Err(error) if is_missing(&error) => Err(missing(&name)),
            found => found,
        }
    }

    /// All of a tenant's.
    pub(crate) async fn volumes(&self, owner: &Owner) -> Result<Vec<TenantVolume>, Error> {
        let answer = self.nodes.volume(owner, TenantVolumeRequest::List).await?;
        let volume = |item| match item {
            Item::TenantVolume(TenantVolumeItem::Volume(volume)) => Some(volume),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(volume).collect())
    }

    /// Removes one with its files.
    pub(crate) async fn remove_volume(&self, owner: &Owner, name: String) -> Result<(), Error> {
        if node_api::check_name(&name).is_err() {
            return Err(missing(&name));
        }
        let asked = Request::TenantVolume(TenantVolumeRequest::Remove { name: name.clone() });
        match self.nodes.done(owner, asked).await {
            Err(error) if is_missing(&error) => Err(missing(&name)),
            done => done,
        }
    }

    async fn ask_files(&self, volume: &Reached, request: FileRequest) -> Result<Answer, Error> {
        let asked = TenantVolumeRequest::Files {
            name: volume.name.clone(),
            created_ns: Some(volume.created_ns),
            request,
        };
        let owner = Owner::Tenant(Arc::clone(&volume.tenant));
        self.nodes.volume(&owner, asked).await
    }

    /// Something about files of a volume that has no file as its answer.
    pub(crate) async fn change_files(&self, volume: &Reached, request: FileRequest) -> Result<(), Error> {
        match self.ask_files(volume, request).await?.reply {
            Reply::Done => Ok(()),
            _ => Err(Error::Unexpected("done")),
        }
    }

    /// A file of a volume, with its descriptor if it was to be opened.
    pub(crate) async fn volume_file(
        &self,
        volume: &Reached,
        request: FileRequest,
    ) -> Result<(FileEntry, Option<OwnedFd>), Error> {
        let answer = self.ask_files(volume, request).await?;
        match answer.reply {
            Reply::TenantVolume(TenantVolumeReply::File(entry)) => Ok((*entry, answer.fds.into_iter().next())),
            _ => Err(Error::Unexpected("a file")),
        }
    }

    /// Files of a volume.
    pub(crate) async fn list_files(&self, volume: &Reached, request: FileRequest) -> Result<Vec<FileEntry>, Error> {
        let answer = self.ask_files(volume, request).await?;
        let files = |item| match item {
            Item::TenantVolume(TenantVolumeItem::Files(files)) => Some(files),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(files).flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_of_one_volume_of_one_tenant() {
        let directory = tempfile::tempdir().unwrap();
        let tokens = Tokens::open(directory.path()).unwrap();
        let volume = TenantVolume {
            name: "data".into(),
            size: ByteSize::gib(1),
            bytes: 0,
            tenant: "acme.x".into(),
            created_ns: 7,
            used_by: Vec::new(),
        };
        let shown = token(&tokens, "acme.x", &volume);
        let found = reached(&tokens, "data", &shown).unwrap();
        assert_eq!((&*found.tenant, found.created_ns), ("acme.x", 7));
        assert_eq!(reached(&tokens, "other", &shown), None);
        for other in [
            String::new(),
            "~~".into(),
            shown.replace("acme", "else"),
            shown.replace("~7~", "~8~"),
            format!("{shown}0"),
            tokens.token(TokenKind::Volume, "data"),
        ] {
            assert_eq!(reached(&tokens, "data", &other), None, "{other}");
        }
    }
}
