//! `basalt exec`: another command in a sandbox that runs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use agent_api::{Connection, ExecRequest, OsText, Signals, local_tty};
use anyhow::{Context, Result, bail};
use node_api::{Reply, Request};

use crate::attached::{self, Finished};
use crate::cli::ExecArgs;
use crate::daemon;
use crate::output::Output;
use crate::run::{Fate, environment, fate};

/// Runs the command; the code is its own.
pub(crate) fn exec(args: &ExecArgs, output: &Output) -> Result<u8> {
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let signals = Signals::install()?;
    let mut client = daemon::connect()?;
    let sandbox = args.sandbox.clone();
    let (command, restarts, stream) = match client.ask(Request::Exec { sandbox })? {
        (Reply::Agent { command, restarts, .. }, fds) => (command, restarts, fds.into_iter().next()),
        (other, _) => bail!("the daemon answered {other:?} to `exec`: use basalt and basaltd of one build"),
    };
    let stream =
        UnixStream::from(stream.context("the daemon sent no connection: use basalt and basaltd of one build")?);
    let request = ExecRequest {
        argv: args.command.iter().map(|word| OsText::from(word.as_str())).collect(),
        env: environment::merge_texts(&command.env, &set),
        cwd: args.process.workdir.as_deref().map_or(command.cwd, OsText::from),
        user: args.process.user.clone().or(command.user),
        tty: args.tty.then(local_tty),
        stdin: args.interactive && !args.detach,
        main: false,
        detached: args.detach,
        kept: None,
    };
    if args.detach {
        return match Connection::resume(stream)?.exec_detached(&request) {
            Ok(_) => Ok(0),
            Err(agent_api::Error::Exec(failure)) => refused(failure, output),
            Err(error) => Err(error).context("the command was not started"),
        };
    }
    match attached::run(stream, &request, &signals, None)? {
        Finished::Exited(status) => Ok(status.exit_code()),
        Finished::Refused(failure) => refused(failure, output),
        Finished::TimedOut => {
            bail!("the command was ended by a time limit that was not set: this is a bug of basalt, please report it")
        }
        Finished::Lost(error) => {
            let inspect = Request::Inspect {
                sandbox: args.sandbox.clone(),
            };
            let (Reply::Sandbox(sandbox), _) = client.ask(inspect)? else {
                return Err(error).context("the connection to the sandbox broke");
            };
            match fate(&mut client, &sandbox.id, restarts)? {
                Fate::Ended(ended) => {
                    output.error(&anyhow::anyhow!(
                        "sandbox {} has ended, and with it this command",
                        sandbox.name
                    ));
                    Ok(ended.exit_code())
                }
                Fate::Another => bail!(
                    "sandbox {} was rolled back or started again, and this command ended with the machine of before",
                    sandbox.name
                ),
                Fate::Unknown => Err(error).context("the connection to the sandbox broke"),
            }
        }
    }
}

/// A connection to a sandbox's agent that waits for a request.
pub(crate) fn agent(sandbox: &str) -> Result<UnixStream> {
    let sandbox = sandbox.to_owned();
    match daemon::connect()?.ask(Request::Exec { sandbox })? {
        (Reply::Agent { .. }, fds) => {
            let fd = fds.into_iter().next();
            Ok(fd
                .context("the daemon sent no connection: use basalt and basaltd of one build")?
                .into())
        }
        (other, _) => bail!("the daemon answered {other:?} to `exec`: use basalt and basaltd of one build"),
    }
}

/// `basalt agent-stream`: joins standard input and output to the agent, until one of them ends.
pub(crate) fn stream(sandbox: &str) -> Result<u8> {
    let mut to = agent(sandbox)?;
    let mut from = to.try_clone()?;
    let feeder = std::thread::spawn(move || {
        let fed = std::io::copy(&mut std::io::stdin().lock(), &mut to);
        // Whoever is on the other side has gone, or the agent has.
        drop(to.shutdown(std::net::Shutdown::Write));
        fed
    });
    let mut out = std::io::stdout().lock();
    let copied = copy_flushing(&mut from, &mut out);
    // It may still read: this program ends with the agent's stream.
    drop(feeder);
    copied.context("the agent's answers cannot be passed on")?;
    Ok(0)
}

/// What comes is passed on at once: somebody waits for each answer.
fn copy_flushing(from: &mut impl Read, to: &mut impl Write) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            got => {
                to.write_all(buffer.get(..got).unwrap_or_default())?;
                to.flush()?;
            }
        }
    }
}

fn refused(failure: agent_api::ExecFailure, output: &Output) -> Result<u8> {
    let code = failure.kind.exit_code();
    output.error(&failure.into());
    Ok(code)
}
