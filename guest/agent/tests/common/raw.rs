//! A connection without a client: its frames.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use agent_api::Duplex;
use agent_api::message::{Reply, Request, kind};
use wire::{FrameReader, FrameWriter};

use super::connect;

/// How long an answer may take.
const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

pub(crate) fn raw() -> (FrameReader<UnixStream>, FrameWriter<UnixStream>) {
    let stream = connect().into_stream();
    stream.set_read_timeout(LIMIT).unwrap();
    let writer = FrameWriter::new(Duplex::try_clone(&stream).unwrap());
    (FrameReader::new(stream), writer)
}

pub(crate) fn ask(writer: &FrameWriter<UnixStream>, request: &Request) {
    let json = serde_json::to_vec(request).unwrap();
    writer.send(kind::CONTROL, 0, &json).unwrap();
}

pub(crate) fn reply(reader: &mut FrameReader<UnixStream>) -> Reply {
    let frame = reader.read().unwrap().unwrap();
    serde_json::from_slice(frame.payload).unwrap()
}
