//! The Connect protocol (connectrpc.com), its server's half, with messages in JSON: unary calls, streams from the server and streams from
//! the client. Written out because it is little, and because what there is of it for Rust wants protobuf's compiler. Knows no service.

mod call;
mod code;
mod envelope;
pub(crate) mod json;
mod stream;

pub(crate) use call::{NotRunning, collect, refuse_call, unary};
pub(crate) use code::Code;
pub(crate) use envelope::Envelopes;
pub(crate) use stream::{Events, client_stream, server_stream};
