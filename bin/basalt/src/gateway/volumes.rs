//! `basalt volume` by a gateway.

use anyhow::Result;

use super::Remote;
use crate::output::table;

/// `basalt volume create`: it is fine if they are there.
pub(super) fn create(remote: &Remote<'_>, names: &[String]) -> Result<u8> {
    let there = remote.client.volumes()?;
    remote.for_each(names, |name| match there.iter().any(|volume| volume.name == name) {
        true => Ok(()),
        false => Ok(remote.client.create_volume(name).map(drop)?),
    })
}

/// `basalt volume rm`.
pub(super) fn remove(remote: &Remote<'_>, names: &[String]) -> Result<u8> {
    let there = remote.client.volumes()?;
    remote.for_each(names, |name| {
        let found = there.iter().find(|volume| volume.name == name);
        Ok(remote.client.remove_volume(found.map_or(name, |volume| &volume.id))?)
    })
}

/// `basalt volume ls`.
pub(super) fn list(remote: &Remote<'_>) -> Result<u8> {
    let volumes = remote.client.volumes()?;
    let shown: Vec<_> = volumes
        .iter()
        .map(|one| serde_json::json!({ "name": one.name, "id": one.id }))
        .collect();
    remote.output.result(&shown, || {
        let mut rows = vec![["NAME", "ID"].map(str::to_owned).to_vec()];
        rows.extend(volumes.iter().map(|one| vec![one.name.clone(), one.id.clone()]));
        table(&rows)
    })?;
    Ok(0)
}
