//! The methods that are one question to the agent: look, list, make, move, remove. Knows no watching and no bytes.

use std::sync::Arc;

use agent_api::message::{Reply, Request};
use agent_api::{Entry, FsRequest};

use super::messages::{Empty, EntryInfo, ListDir, Listed, MakeDir, Move, One, Path};
use crate::agent::{Channel, unexpected};
use crate::error::Error;
use crate::state::State;

/// The most that a list has.
const MAX_ENTRIES: usize = 100_000;

/// The most bytes that the names in a list have together, and everything else of them.
const MAX_LISTED: usize = 32 * 1024 * 1024;

/// Asks the agent something about files as a user of the sandbox; its default one if `user` is none. The answer, and the channel for
/// whatever follows.
pub(crate) async fn ask(
    state: &State,
    user: Option<&str>,
    request: FsRequest,
) -> Result<(Channel, Option<String>, Reply), Error> {
    let (mut channel, command) = state.open().await?;
    let user = user.map(str::to_owned).or(command.user);
    let reply = ask_on(&mut channel, user.as_deref(), request).await?;
    Ok((channel, user, reply))
}

/// The same on a channel that there is.
pub(crate) async fn ask_on(channel: &mut Channel, user: Option<&str>, request: FsRequest) -> Result<Reply, Error> {
    let ask = |request| Request::Fs {
        user: user.map(str::to_owned),
        request,
    };
    let error = match channel.ask(&ask(request)).await {
        Ok(reply) => return Ok(reply),
        Err(error) => error,
    };
    // The agent says the same of a missing user; then the root directory is missing, too.
    if error.is_missing()
        && let Some(name) = user
    {
        let root = channel.ask(&ask(FsRequest::Stat { path: "/".into() })).await;
        if root.is_err_and(|error| error.is_missing()) {
            return Err(Error::NoUser(name.to_owned()));
        }
    }
    Err(error)
}

/// A path's last name; the path itself where it has none.
pub(crate) fn base_name(path: &str) -> &str {
    let trimmed = path.trim_end_matches('/');
    match trimmed.rsplit('/').next() {
        Some(name) if !name.is_empty() => name,
        _ => path,
    }
}

/// Who asks, and whom.
pub(super) struct Asker<'a> {
    pub(super) state: &'a Arc<State>,
    pub(super) user: Option<String>,
}

impl Asker<'_> {
    async fn entry(&self, request: FsRequest) -> Result<One, Error> {
        match ask(self.state, self.user.as_deref(), request).await?.2 {
            Reply::Entry(entry) => Ok(One {
                entry: EntryInfo::from(*entry),
            }),
            other => Err(unexpected(&other)),
        }
    }

    pub(super) async fn stat(&self, stat: Path) -> Result<One, Error> {
        self.entry(FsRequest::Stat { path: home(stat.path) }).await
    }

    pub(super) async fn make_dir(&self, make: MakeDir) -> Result<One, Error> {
        self.entry(FsRequest::MakeDir { path: home(make.path) }).await
    }

    pub(super) async fn rename(&self, paths: Move) -> Result<One, Error> {
        let (from, to) = (given(paths.source, "source")?, given(paths.destination, "destination")?);
        self.entry(FsRequest::Rename { from, to }).await
    }

    pub(super) async fn remove(&self, remove: Path) -> Result<Empty, Error> {
        let request = FsRequest::Remove {
            path: given(remove.path, "path")?,
        };
        match ask(self.state, self.user.as_deref(), request).await?.2 {
            Reply::Done => Ok(Empty {}),
            other => Err(unexpected(&other)),
        }
    }

    pub(super) async fn list(&self, list: ListDir) -> Result<Listed, Error> {
        let request = FsRequest::List {
            path: home(list.path),
            // Not saying how deep is the directory itself.
            depth: list.depth.0.max(1),
        };
        let (mut channel, _, mut reply) = ask(self.state, self.user.as_deref(), request).await?;
        let (mut entries, mut bytes) = (Vec::new(), 0);
        let mut held = self.state.memory.nothing();
        loop {
            let (some, more) = match reply {
                Reply::Entries { entries, more } => (entries, more),
                other => return Err(unexpected(&other)),
            };
            bytes += some.iter().map(weight).sum::<usize>();
            held.grow_to(bytes)?;
            if entries.len() + some.len() > MAX_ENTRIES || bytes > MAX_LISTED {
                return Err(Error::TooMuch(format!(
                    "there is more than the {MAX_ENTRIES} files and directories that a list may have; ask for less depth, or for the \
                     directories in it one by one"
                )));
            }
            entries.extend(some.into_iter().map(EntryInfo::from));
            if !more {
                return Ok(Listed { entries, _held: held });
            }
            reply = channel.answer().await?;
        }
    }
}

/// What an entry takes of memory, about.
fn weight(entry: &Entry) -> usize {
    let metadata = entry.metadata.iter().map(|(key, value)| key.len() + value.len());
    let target = entry.target.as_ref().map_or(0, |target| target.as_bytes().len());
    entry.path.as_bytes().len() + entry.owner.len() + entry.group.len() + target + metadata.sum::<usize>() + 128
}

/// A path; the user's home where it is empty.
pub(super) fn home(path: String) -> agent_api::OsText {
    if path.is_empty() { "~".into() } else { path.into() }
}

/// A path that must be there: an empty one is a mistake, and means the user's whole home.
fn given(path: String, what: &str) -> Result<agent_api::OsText, Error> {
    if path.is_empty() {
        return Err(Error::Invalid(format!("`{what}` is missing")));
    }
    Ok(path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_is_behind_the_last_slash() {
        for (path, name) in [("/a/b", "b"), ("/a/b/", "b"), ("b", "b"), ("/", "/"), ("", "")] {
            assert_eq!(base_name(path), name, "{path:?}");
        }
    }

    #[test]
    fn what_changes_something_wants_a_path() {
        assert_eq!(
            given(String::new(), "path").unwrap_err().code().name(),
            "invalid_argument"
        );
        assert_eq!(home(String::new()), "~".into());
        assert_eq!(home("a".to_owned()), "a".into());
    }
}
