//! Which sandbox is meant: by the name that `run --name` has given it, its id, or the beginning of one.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use gateway_client::{Access, ListedSandbox};

use super::{NAME, Remote};

/// Both states that a sandbox can be in.
pub(super) const ALL: [&str; 2] = ["running", "paused"];

/// The shortest text that is asked for as an id before it is looked for as a name.
const LIKELY_ID: usize = 12;

impl Remote<'_> {
    /// The sandbox that is called so.
    pub(super) fn find(&self, text: &str) -> Result<(ListedSandbox, Access)> {
        let is_word = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if is_word
            && text.len() >= LIKELY_ID
            && let Some(found) = self.by_id(text)?
        {
            return Ok(found);
        }
        let named = self.client.sandboxes(&[(NAME.to_owned(), text.to_owned())], &ALL)?;
        let found = match named.as_slice() {
            [] => self.by_beginning(text)?,
            [one] => one.sandbox_id.clone(),
            several => bail!(
                "{} sandboxes are called `{text}`: say which by its id, {}",
                several.len(),
                several
                    .iter()
                    .map(|one| one.sandbox_id.as_str())
                    .collect::<Vec<_>>()
                    .join(" or ")
            ),
        };
        Ok(self.client.sandbox(&found)?)
    }

    fn by_id(&self, id: &str) -> Result<Option<(ListedSandbox, Access)>> {
        match self.client.sandbox(id) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn by_beginning(&self, text: &str) -> Result<String> {
        let all = self.client.sandboxes(&[], &ALL)?;
        let mut found = all
            .iter()
            .filter(|one| !text.is_empty() && one.sandbox_id.starts_with(text));
        match (found.next(), found.next()) {
            (Some(one), None) => Ok(one.sandbox_id.clone()),
            (Some(_), Some(_)) => bail!("several sandboxes have an id that begins with `{text}`: give more of it"),
            (None, _) => bail!(
                "there is no sandbox `{text}` at {}: `basalt ps` lists those that this key has",
                self.client.server()
            ),
        }
    }

    /// Nobody else is called so. Two that ask at once may both be told that: then the id says which is meant.
    pub(super) fn check_free(&self, name: &str) -> Result<()> {
        match self
            .client
            .sandboxes(&[(NAME.to_owned(), name.to_owned())], &ALL)?
            .first()
        {
            None => Ok(()),
            Some(there) => bail!(
                "a sandbox `{name}` is there already ({}): give this one another name, or remove that one with `basalt rm --force {name}`",
                there.sandbox_id
            ),
        }
    }
}

/// What it is called, or its id.
pub(super) fn name_of(sandbox: &ListedSandbox) -> String {
    let name = sandbox.metadata.as_ref().and_then(|metadata| metadata.get(NAME));
    name.unwrap_or(&sandbox.sandbox_id).clone()
}

/// Its labels.
pub(super) fn labels_of(sandbox: &ListedSandbox) -> BTreeMap<String, String> {
    let mut labels = sandbox.metadata.clone().unwrap_or_default();
    labels.remove(NAME);
    labels
}
