//! A stream to the guest's agent, through the unix socket that its VMM has for its vsock.

use std::io;
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
    agent_api::ask_for_port(&mut stream, ACCELERATOR_PORT)?;
    stream.set_read_timeout(None)?;
    Ok(stream)
}
