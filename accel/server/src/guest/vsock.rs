//! A stream to a port of the guest's, through the unix socket that its VMM has for that (docs/devices/vsock.md).

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent_api::accelerator::ACCELERATOR_PORT;

/// How long the VMM, and the guest, have to answer.
const ANSWER: Duration = Duration::from_secs(3);

/// Dials the agent's port for accelerators.
pub(super) fn dial(path: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER))?;
    writeln!(stream, "CONNECT {ACCELERATOR_PORT}")?;
    // The answer is one line, and what follows is the agent's.
    let mut byte = [0];
    while byte != *b"\n" {
        stream.read_exact(&mut byte).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::ErrorKind::ConnectionRefused.into(),
            _ => error,
        })?;
    }
    stream.set_read_timeout(None)?;
    Ok(stream)
}
