//! Talks to a running lab: connects with its token, runs commands in it, asks it to power off. Knows no emulator.

use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use agent_api::{Connection, ExecRequest, LocalIo, PowerAction, Shutdown, Signals, Token};
use anyhow::{Context, Result};

use crate::standstill::Watch;
use crate::state::{Lab, State};

/// How long the emulator may take to accept a connection; it does so itself, before the lab sees it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a lab that took a connection may think about a question that needs no thought.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Where programs are found in the lab, ours first.
pub(crate) const PATH: &str = "PATH=/opt/basalt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A connection to the lab's agent.
pub(crate) type Remote = Connection<TcpStream>;

/// Connects to a lab.
pub(crate) fn connect(lab: &Lab) -> Result<Remote> {
    let address: SocketAddr = lab
        .address
        .parse()
        .with_context(|| format!("{:?} is no address", lab.address))?;
    let stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)
        .with_context(|| format!("cannot connect to the lab at {address}"))?;
    stream.set_nodelay(true)?;
    Connection::new(stream, Some(&read_token(&lab.token_file)?)).with_context(|| {
        format!("the lab at {address} does not answer as it should; `basalt-lab up --fresh` starts it afresh")
    })
}

/// Has the lab give a sign of life.
pub(crate) fn ask(lab: &Lab) -> Result<()> {
    let mut remote = connect(lab)?;
    remote.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    Ok(remote.ping()?)
}

/// Writes a new token, and gives it as text.
pub(crate) fn new_token(path: &Path) -> Result<String> {
    let mut bytes = [0_u8; Token::LEN];
    let got = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    anyhow::ensure!(
        got == bytes.len(),
        "the kernel gave {got} of {} random bytes",
        bytes.len()
    );
    let text = bytes
        .iter()
        .fold(String::new(), |text, byte| format!("{text}{byte:02x}"));
    crate::state::write_new(path, text.as_bytes())?;
    Ok(text)
}

fn read_token(path: &Path) -> Result<Token> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read the token {}", path.display()))?;
    Token::from_hex(text.trim()).with_context(|| format!("{} holds no token", path.display()))
}

/// A command for the lab.
pub(crate) struct Job {
    pub(crate) argv: Vec<std::ffi::OsString>,
    pub(crate) env: Vec<std::ffi::OsString>,
    pub(crate) cwd: String,
    pub(crate) tty: bool,
    pub(crate) stdin: bool,
}

/// Runs a command in the lab with this process's streams, and says the exit code that it ended with. A lab that stands
/// still meanwhile is an error.
pub(crate) fn run(state: &State, lab: &Lab, job: &Job) -> Result<u8> {
    // Before the terminal's size is read, so that no change of it is missed.
    let signals = Signals::install()?;
    let mut remote = connect(lab)?;
    let watch = Watch::begin(state, lab, remote.stream().try_clone()?)?;
    let mut env = vec![PATH.into()];
    env.extend(job.env.iter().map(|entry| entry.as_os_str().into()));
    let request = ExecRequest {
        argv: job.argv.iter().map(|argument| argument.as_os_str().into()).collect(),
        env,
        cwd: job.cwd.as_str().into(),
        tty: job.tty.then(agent_api::local_tty),
        stdin: job.stdin,
        ..ExecRequest::default()
    };
    let status = remote
        .exec(&request)
        .and_then(|running| agent_api::pump(running, &LocalIo::std(job.stdin, job.tty), &signals));
    match status {
        Ok(status) => Ok(status.exit_code()),
        Err(agent_api::Error::Exec(failure)) => {
            eprintln!("basalt-lab: {failure}");
            Ok(failure.kind.exit_code())
        }
        Err(error) if watch.found() => {
            Err(error).context("the lab stands still: nothing in it answers; `basalt-lab up --fresh` starts it afresh")
        }
        Err(error @ (agent_api::Error::Closed(_) | agent_api::Error::Wire(_))) => {
            Err(error).context("the lab ended while the command ran; `basalt-lab logs` shows its console")
        }
        Err(error) => Err(error.into()),
    }
}

/// Asks the lab to end its processes, write everything back and power off; returns when it has begun.
pub(crate) fn power_off(lab: &Lab, answer_within: Duration) -> Result<()> {
    let mut remote = connect(lab)?;
    remote.set_read_timeout(Some(answer_within))?;
    remote.shutdown(Shutdown {
        how: PowerAction::PowerOff,
        grace_ms: 500,
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_new_token_is_private_and_readable_by_its_owner_only() {
        let path = std::env::temp_dir().join(format!("basalt-lab-token-{}", std::process::id()));
        let text = new_token(&path).unwrap();
        assert_eq!(text.len(), 64);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let expected: Vec<u8> = (0..32)
            .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
            .collect();
        assert!(
            read_token(&path)
                .unwrap()
                .matches(expected.as_slice().try_into().unwrap())
        );
        let again = new_token(&path).unwrap();
        assert_ne!(text, again);
        fs::write(&path, "nonsense").unwrap();
        assert!(read_token(&path).unwrap_err().to_string().ends_with("holds no token"));
        fs::remove_file(&path).unwrap();
    }
}
