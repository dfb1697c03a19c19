//! `process.Process`: processes are started, found again, written to, signalled and listened to. Each is a command that the agent keeps;
//! whoever asks may leave. Knows no file.

mod end;
mod input;
mod kept;
mod launch;
mod messages;
mod output;

use std::sync::Arc;

use axum::body::Body;
use http::{Request, Response};

use crate::access;
use crate::connect;
use crate::error::Error;
use crate::state::State;

pub use kept::note_of_shell;
use messages::{CloseStdin, Connect, List, SendInput, SendSignal, Start, Update};

/// Answers a call of the service.
pub(crate) async fn serve(state: &Arc<State>, request: Request<Body>) -> Response<Body> {
    let method = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let user = match access::user(request.headers()) {
        Ok(user) => user,
        Err(error) => return connect::refuse_call(request.headers(), &error),
    };
    match method.as_str() {
        "List" => connect::unary(&state.memory, request, async |_: List| kept::list(state).await).await,
        "Start" => {
            connect::server_stream(&state.memory, request, move |start: Start, limit| {
                launch::start(state, user, start, limit)
            })
            .await
        }
        "Connect" => {
            connect::server_stream(&state.memory, request, move |connect: Connect, _| {
                output::connect(state, connect)
            })
            .await
        }
        "Update" => {
            connect::unary(&state.memory, request, async |update: Update| {
                input::update(state, update).await
            })
            .await
        }
        "StreamInput" => {
            connect::client_stream(&state.memory, request, input::IDLE, move |messages| {
                input::stream(state, messages)
            })
            .await
        }
        "SendInput" => {
            connect::unary(&state.memory, request, async |send: SendInput| {
                input::send(state, send).await
            })
            .await
        }
        "SendSignal" => {
            connect::unary(&state.memory, request, async |signal: SendSignal| {
                input::signal(state, signal).await
            })
            .await
        }
        "CloseStdin" => {
            connect::unary(&state.memory, request, async |close: CloseStdin| {
                input::close(state, close).await
            })
            .await
        }
        other => {
            let error = Error::Unimplemented(format!("process.Process has no method {other:?}"));
            connect::refuse_call(request.headers(), &error)
        }
    }
}
