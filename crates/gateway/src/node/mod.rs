//! The node, asked from asynchronous code: trait [`Node`] blocks, [`Nodes`] carries that out on threads that may, and turns replies into
//! what was asked for. Knows no HTTP. Who asks ([`Owner`]) goes along with each request, in one place: [`SocketNode`].

mod socket;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use node_api::message::Item;
use node_api::{
    BriefUsage, ClientError, CloneConfig, ListConfig, Pool, Reply, Request, Sample, Sandbox, SandboxConfig, Snapshot,
    SnapshotConfig, Template,
};
use observe::Span;
use tokio::sync::Semaphore;

pub use socket::SocketNode;

use crate::Error;
use crate::locks::Locks;

/// So many requests are under way at once; each takes a thread here and one of the daemon's.
const AT_ONCE: usize = 128;

/// So many connections to one sandbox's agent are being made at once, each of which takes a turn.
const AGENTS: usize = 8;

/// How long a sandbox that is about to run is waited for, and how often it is looked at.
const STARTS: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);

/// How long a request waits for its turn.
const TURN: Duration = Duration::from_secs(10);

/// On whose behalf something is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A tenant's, whose key was shown: what others have is not found.
    Tenant(Arc<str>),
    /// The gateway's own, for what shows a sandbox's token or is public: a request to a sandbox's port.
    Gateway,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// What came before the reply.
    pub items: Vec<Item>,
    /// The reply.
    pub reply: Reply,
    /// What came with it.
    pub fds: Vec<OwnedFd>,
}

/// A node. Methods block.
pub trait Node: Send + Sync + 'static {
    /// Asks for something.
    ///
    /// # Errors
    /// The node refuses, or cannot be asked.
    fn ask(&self, owner: &Owner, request: Request) -> Result<Answer, ClientError>;
}

/// A node, for those who must not block.
#[derive(Clone)]
pub(crate) struct Nodes {
    node: Arc<dyn Node>,
    turns: Arc<Semaphore>,
    /// For connections to agents: one that is silent must not keep all of them.
    agents: Arc<Locks>,
}

impl Nodes {
    pub(crate) fn new(node: Arc<dyn Node>) -> Self {
        Self {
            node,
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            agents: Arc::new(Locks::new(AGENTS)),
        }
    }

    /// Asks. A request that has begun is carried out also if nobody waits for it any more.
    pub(crate) async fn ask(&self, owner: &Owner, request: Request) -> Result<Answer, Error> {
        let agent = match &request {
            Request::Exec { sandbox } => {
                let its = tokio::time::timeout(TURN, self.agents.lock(sandbox)).await;
                its.map_err(|_| Error::Busy("too many connections to this sandbox are being made"))?
            }
            _ => None,
        };
        let turn = tokio::time::timeout(TURN, Arc::clone(&self.turns).acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(Error::Busy("too much is being asked of the node"));
        };
        let (node, owner) = (Arc::clone(&self.node), owner.clone());
        let asked = tokio::task::spawn_blocking(move || {
            let answer = node.ask(&owner, request);
            drop((turn, agent));
            answer
        });
        match asked.await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(ClientError::Refused(refused))) => Err(refused.into()),
            Ok(Err(other)) => Err(Error::NodeGone(other)),
            Err(error) => Err(Error::Task(error.to_string())),
        }
    }

    async fn reply(&self, owner: &Owner, request: Request) -> Result<Reply, Error> {
        Ok(self.ask(owner, request).await?.reply)
    }

    /// The same of one that is about to run, when it does or it is known that it will not.
    pub(crate) async fn inspect_settled(&self, owner: &Owner, id: &str) -> Result<Sandbox, Error> {
        let end = tokio::time::Instant::now() + STARTS;
        loop {
            let sandbox = self.inspect(owner, id).await?;
            let starts = matches!(sandbox.state, node_api::State::Creating | node_api::State::Starting);
            if !starts || tokio::time::Instant::now() >= end {
                return Ok(sandbox);
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Something that is only done.
    pub(crate) async fn done(&self, owner: &Owner, request: Request) -> Result<(), Error> {
        match self.reply(owner, request).await? {
            Reply::Done => Ok(()),
            _ => Err(Error::Unexpected("done")),
        }
    }

    /// A new sandbox.
    pub(crate) async fn run(&self, owner: &Owner, config: SandboxConfig) -> Result<Sandbox, Error> {
        started(self.reply(owner, Request::Run(Box::new(config))).await?)
    }

    /// One that goes on from a snapshot.
    pub(crate) async fn clone_of(&self, owner: &Owner, config: CloneConfig) -> Result<Sandbox, Error> {
        started(self.reply(owner, Request::Clone(config)).await?)
    }

    /// The sandbox with this id.
    pub(crate) async fn inspect(&self, owner: &Owner, id: &str) -> Result<Sandbox, Error> {
        let asked = Request::Inspect { sandbox: id.to_owned() };
        match self.reply(owner, asked).await {
            // It may have been found by a name.
            Ok(Reply::Sandbox(sandbox)) if sandbox.id == id => Ok(*sandbox),
            Ok(Reply::Sandbox(_)) => Err(Error::NoSandbox(id.to_owned())),
            Ok(_) => Err(Error::Unexpected("inspect")),
            Err(error) if is_missing(&error) => Err(Error::NoSandbox(id.to_owned())),
            Err(error) => Err(error),
        }
    }

    /// Something that has a sandbox as its answer.
    pub(crate) async fn changed(&self, owner: &Owner, request: Request) -> Result<Sandbox, Error> {
        match self.reply(owner, request).await? {
            Reply::Sandbox(sandbox) => Ok(*sandbox),
            _ => Err(Error::Unexpected("a sandbox")),
        }
    }

    /// Some sandboxes.
    pub(crate) async fn list(&self, owner: &Owner, list: ListConfig) -> Result<Vec<Sandbox>, Error> {
        let answer = self.ask(owner, Request::List(list)).await?;
        let sandbox = |item| match item {
            Item::Sandbox(sandbox) => Some(*sandbox),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(sandbox).collect())
    }

    /// What a sandbox uses.
    pub(crate) async fn stats(&self, owner: &Owner, sandbox: String) -> Result<Vec<Sample>, Error> {
        let request = Request::Stats { sandbox: Some(sandbox) };
        let answer = self.ask(owner, request).await?;
        let sample = |item| match item {
            Item::Sample(sample) => Some(sample),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(sample).collect())
    }

    /// What all sandboxes use, in short.
    pub(crate) async fn usage(&self, owner: &Owner) -> Result<Vec<BriefUsage>, Error> {
        let answer = self.ask(owner, Request::ListUsage).await?;
        let some = |item| match item {
            Item::BriefUsage(some) => some,
            _ => Vec::new(),
        };
        Ok(answer.items.into_iter().flat_map(some).collect())
    }

    /// What is ready for sandboxes to come.
    pub(crate) async fn pools(&self, owner: &Owner) -> Result<Vec<Pool>, Error> {
        let answer = self.ask(owner, Request::ListPools).await?;
        let pool = |item| match item {
            Item::Pool(pool) => Some(pool),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(pool).collect())
    }

    /// What a sandbox's last start was made of.
    pub(crate) async fn trace(&self, owner: &Owner, id: &str) -> Result<Vec<Span>, Error> {
        match self.reply(owner, Request::Trace { sandbox: id.to_owned() }).await? {
            Reply::Trace(spans) => Ok(spans),
            _ => Err(Error::Unexpected("trace")),
        }
    }

    /// A new snapshot.
    pub(crate) async fn snapshot(&self, owner: &Owner, config: SnapshotConfig) -> Result<Snapshot, Error> {
        match self.reply(owner, Request::MakeSnapshot(config)).await? {
            Reply::Snapshot(snapshot) => Ok(*snapshot),
            _ => Err(Error::Unexpected("make-snapshot")),
        }
    }

    /// The snapshot of this name, if there is one.
    pub(crate) async fn find_snapshot(&self, owner: &Owner, name: &str) -> Result<Option<Snapshot>, Error> {
        if node_api::check_snapshot_name(name).is_err() {
            return Ok(None);
        }
        let name = name.to_owned();
        match self.reply(owner, Request::InspectSnapshot { name }).await {
            Ok(Reply::Snapshot(snapshot)) => Ok(Some(*snapshot)),
            Ok(_) => Err(Error::Unexpected("inspect-snapshot")),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All snapshots.
    pub(crate) async fn snapshots(&self, owner: &Owner) -> Result<Vec<Snapshot>, Error> {
        let answer = self.ask(owner, Request::ListSnapshots).await?;
        let snapshot = |item| match item {
            Item::Snapshot(snapshot) => Some(*snapshot),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(snapshot).collect())
    }

    /// The template of this name or id, if there is one.
    pub(crate) async fn find_template(&self, owner: &Owner, name: &str) -> Result<Option<Template>, Error> {
        // What is no name may be an id, or the beginning of one.
        let is_id = (12..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !is_id && node_api::check_template_name(name).is_err() {
            return Ok(None);
        }
        let template = name.to_owned();
        match self.reply(owner, Request::InspectTemplate { template }).await {
            Ok(Reply::Template(template)) => Ok(Some(*template)),
            Ok(_) => Err(Error::Unexpected("inspect-template")),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All templates.
    pub(crate) async fn templates(&self, owner: &Owner) -> Result<Vec<Template>, Error> {
        let answer = self.ask(owner, Request::ListTemplates).await?;
        let template = |item| match item {
            Item::Template(template) => Some(*template),
            _ => None,
        };
        Ok(answer.items.into_iter().filter_map(template).collect())
    }
}

fn started(reply: Reply) -> Result<Sandbox, Error> {
    match reply {
        Reply::Started { sandbox, .. } => Ok(*sandbox),
        _ => Err(Error::Unexpected("started")),
    }
}

/// The node knows no such thing.
pub(crate) fn is_missing(error: &Error) -> bool {
    matches!(error, Error::Refused(refused) if refused.kind == node_api::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// One whose agents say nothing until it is told that they may.
    #[derive(Default)]
    struct Silent {
        may_speak: Mutex<bool>,
        told: Condvar,
    }

    impl Node for Silent {
        fn ask(&self, _: &Owner, request: Request) -> Result<Answer, ClientError> {
            if matches!(request, Request::Exec { .. }) {
                let may_speak = self.may_speak.lock().unwrap();
                drop(self.told.wait_while(may_speak, |may| !*may).unwrap());
            }
            Ok(Answer {
                items: Vec::new(),
                reply: Reply::Done,
                fds: Vec::new(),
            })
        }
    }

    /// Also when nobody waits for it any more: a client that is gone gives back its seat, and not what it has begun.
    #[tokio::test]
    async fn a_silent_agent_keeps_few_turns() {
        let silent = Arc::new(Silent::default());
        let nodes = Nodes::new(Arc::clone(&silent) as _);
        let exec = || Request::Exec { sandbox: "a".into() };
        for _ in 0..3 * AT_ONCE {
            let asked = tokio::time::timeout(Duration::from_millis(1), nodes.ask(&Owner::Gateway, exec()));
            assert!(asked.await.is_err());
        }
        assert_eq!(nodes.turns.available_permits(), AT_ONCE - AGENTS);
        nodes.done(&Owner::Gateway, Request::Prune).await.unwrap();
        *silent.may_speak.lock().unwrap() = true;
        silent.told.notify_all();
        nodes.ask(&Owner::Gateway, exec()).await.unwrap();
    }
}
