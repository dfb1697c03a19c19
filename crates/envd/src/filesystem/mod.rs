//! `filesystem.Filesystem`: what is in a sandbox is looked at, listed, made, moved, removed and watched, as one of its users. Knows no
//! process, and no file's bytes.

mod entry;
mod messages;
mod polled;
mod service;
mod watch;

use std::sync::Arc;

use axum::body::Body;
use http::{Request, Response};

use crate::access;
use crate::connect::{refuse_call, server_stream, unary};
use crate::error::Error;
use crate::state::State;

pub(crate) use polled::Watchers;
pub(crate) use service::{ask, ask_on, base_name};

use messages::{CreateWatcher, ListDir, MakeDir, Move, Path, WatchDir, Watcher};
use service::Asker;

/// Answers a call of the service.
pub(crate) async fn serve(state: &Arc<State>, request: Request<Body>) -> Response<Body> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let user = match access::user(request.headers()) {
        Ok(user) => user,
        Err(error) => return refuse_call(request.headers(), &error),
    };
    let asker = Asker { state, user };
    match method.as_str() {
        "Stat" => unary(&state.memory, request, async |stat: Path| asker.stat(stat).await).await,
        "MakeDir" => unary(&state.memory, request, async |make: MakeDir| asker.make_dir(make).await).await,
        "Move" => unary(&state.memory, request, async |paths: Move| asker.rename(paths).await).await,
        "ListDir" => unary(&state.memory, request, async |list: ListDir| asker.list(list).await).await,
        "Remove" => unary(&state.memory, request, async |remove: Path| asker.remove(remove).await).await,
        "WatchDir" => {
            server_stream(&state.memory, request, move |watch: WatchDir, _| {
                watch::stream(state, asker.user, watch)
            })
            .await
        }
        "CreateWatcher" => {
            unary(&state.memory, request, async |create: CreateWatcher| {
                polled::create(state, asker.user, create).await
            })
            .await
        }
        "GetWatcherEvents" => {
            unary(&state.memory, request, async |watcher: Watcher| {
                state.watchers.poll(&watcher.watcher_id).await
            })
            .await
        }
        "RemoveWatcher" => {
            unary(&state.memory, request, async |watcher: Watcher| {
                state.watchers.remove(&watcher.watcher_id)
            })
            .await
        }
        other => {
            let error = Error::Unimplemented(format!("filesystem.Filesystem has no method {other:?}"));
            refuse_call(request.headers(), &error)
        }
    }
}
