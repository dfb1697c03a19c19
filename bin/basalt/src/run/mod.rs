//! `basalt run`: on this host it asks the daemon for a sandbox and starts the command in it; elsewhere the lab does. Where that
//! is has been decided before ([`crate::site`]).

pub(crate) mod environment;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use agent_api::{ExecRequest, Signals, local_tty};
use anyhow::{Context, Result, bail};
use node_api::{
    Client, Ended, NetworkMode, ProcessConfig, Reply, Request, Resources, Sandbox, SandboxConfig, Secrets as _,
    TimeLimit,
};
use observe::span::span;
use rustix::event::{PollFd, PollFlags, poll};

use crate::attached::{self, Finished};
use crate::cli::{DeviceName, LogLevel, RunArgs};
use crate::output::Output;
use crate::sandboxes::millis;
use crate::{daemon, images, lab, template_build};

/// `--timeout` ended the command (the code of timeout(1)).
const EXIT_TIMED_OUT: u8 = 124;

/// How long a sandbox whose command's connection broke may take to be known as ended.
const END_LIMIT: Duration = Duration::from_secs(10);

/// What was asked for, with this side's variables and files read.
struct Wish {
    set: Vec<String>,
    config: SandboxConfig,
    /// The image's name, or the digest by which it is here; none where there is a template.
    image: Option<String>,
}

impl Wish {
    fn of(args: &RunArgs, output: &Output) -> Result<Self> {
        let _span = span("arguments and image");
        let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
        let config = configure(args, &set, args.size.resources())?;
        // Before an image is fetched for it, or the lab brought up.
        config.validate()?;
        let fetch = |image| images::fetched(image, args.pull, output);
        let image = args.image().map(fetch).transpose()?;
        Ok(Self { set, config, image })
    }
}

/// Runs a command in a sandbox on this host; the code is the command's.
pub(crate) fn here(args: &RunArgs, output: &Output) -> Result<u8> {
    let Wish { set, config, image } = Wish::of(args, output)?;
    match image {
        Some(image) => attached_here(args, SandboxConfig { image, ..config }, output),
        None => of_template(args, &set, output),
    }
}

/// The same in the lab; `why` not here.
pub(crate) fn in_lab(args: &RunArgs, why: &str, log_level: LogLevel, output: &Output) -> Result<u8> {
    let Wish { set, image, .. } = Wish::of(args, output)?;
    let opened = image.as_deref().map(images::open).transpose()?;
    output.note(&format!("no usable KVM ({why}); running in the lab"));
    match (image, opened) {
        (Some(name), Some(image)) => lab::run(args, (&name, &image), &set, log_level, output),
        _ => lab::run_of_template(args, &set, log_level, output),
    }
}

/// On this host, of a template.
fn of_template(args: &RunArgs, set: &[String], output: &Output) -> Result<u8> {
    let wanted = args.template.as_deref().unwrap_or_default();
    let template = {
        let _span = span("template");
        let template = template_build::up_to_date(wanted, output)?;
        let resources = args.size.over(template.resources.clone());
        // What the daemon refuses all the same is not worth a build.
        let fits = match args.network.mode() {
            NetworkMode::Auto => true,
            NetworkMode::None => !template.networked,
            NetworkMode::Node => template.networked,
        };
        match !args.class.is_bare() && args.idle.halts() && fits {
            true => template_build::in_size(template, &resources, output)?,
            false => template,
        }
    };
    let config = SandboxConfig {
        image: format!("sha256:{}", template.digest),
        // A name may be another template's by then, and that is meant; an id may have changed.
        template: Some(match template.names.iter().any(|name| name == wanted) {
            true => wanted.to_owned(),
            false => template.id.clone(),
        }),
        ..configure(args, set, args.size.over(template.resources))?
    };
    attached_here(args, config, output)
}

/// What the daemon is asked for.
pub(crate) fn configure(args: &RunArgs, set: &[String], resources: Resources) -> Result<SandboxConfig> {
    let entrypoint = args.entrypoint.as_deref().map(parse_entrypoint).transpose()?;
    let labels: BTreeMap<String, String> = args.label.iter().cloned().collect();
    let (devices, cdi_devices) = DeviceName::split(&args.device);
    let mut config = SandboxConfig {
        name: args.name.clone(),
        image: args.image().unwrap_or_default().to_owned(),
        process: ProcessConfig {
            entrypoint,
            command: args.command(),
            env: set.to_vec(),
            device_env: 0,
            workdir: args.process.workdir.clone(),
            user: args.process.user.clone(),
            tty: args.tty,
            idle: args.no_command,
        },
        resources: Resources {
            class: args.class,
            idle: args.idle,
            memory_mode: args.memory_mode,
            ..resources
        },
        limits: args.limits.limits(),
        tmpfs: args.tmpfs.clone(),
        network: args.network.mode(),
        egress: args.limits.egress.egress()?,
        ports: args.publish.clone(),
        volumes: args.volume.iter().chain(&args.volume_json).cloned().collect(),
        devices,
        cdi_devices,
        device_start: None,
        accelerator: args.accel,
        memory_ready: false,
        hostname: args.hostname.clone(),
        boot: args.boot,
        paging: args.paging,
        template: args.template.clone(),
        time_limit: args.timeout.filter(|_| args.detach).map(|time| TimeLimit {
            ms: millis(time),
            then: args.on_timeout.unwrap_or_default(),
        }),
        remove: args.rm,
        detach: args.detach,
        labels,
        owner: None,
    };
    args.hotplug.put_into(&mut config);
    config.name_accelerator()?;
    Ok(config)
}

/// A path, or a JSON array of words; nothing at all is no entrypoint.
fn parse_entrypoint(text: &str) -> Result<Vec<String>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if text.starts_with('[') {
        return serde_json::from_str(text).with_context(|| {
            format!("--entrypoint `{text}` is no JSON array of words: write a path, or [\"sh\", \"-c\"]")
        });
    }
    Ok(vec![text.to_owned()])
}

/// Asks this host's daemon for the sandbox, and joins its command to this terminal.
fn attached_here(args: &RunArgs, config: SandboxConfig, output: &Output) -> Result<u8> {
    // Before anything is started, so that a signal that comes while the guest boots ends the sandbox in order.
    let signals = Signals::install()?;
    let mut client = {
        let _span = span("daemon found");
        daemon::connect()?
    };
    let asked = span("daemon asked");
    client.send(Request::Run(Box::new(config)))?;
    if let Some(number) = interrupted(&client, &signals, args.detach)? {
        // The daemon sees this connection go, and takes back what it has begun.
        drop(client);
        bail_interrupted(number, output);
        return Ok(u8::try_from(number).unwrap_or(0).saturating_add(128));
    }
    let (sandbox, command) = match client.receive(&mut |_| ())? {
        (Reply::Started { sandbox, command }, fds) => (sandbox, command.zip(fds.into_iter().next())),
        (other, _) => bail!("the daemon answered {other:?} to `run`: use basalt and basaltd of one build"),
    };
    drop(asked);
    match command {
        None => {
            let sandbox = sandbox.redacted();
            output.result(&sandbox, || format!("{}\n", sandbox.id))?;
            Ok(0)
        }
        Some((command, fd)) => {
            let request = ExecRequest {
                tty: args.tty.then(local_tty),
                stdin: args.interactive,
                ..*command
            };
            let finished = attached::run(UnixStream::from(fd), &request, &signals, args.timeout)?;
            let code = conclude(finished, &mut client, &sandbox, args.timeout, output)?;
            if let Err(error) = client.ask(Request::Finish) {
                // The command has ended as it should, and the next daemon sees that its sandbox has.
                log::warn!("the daemon was not notified: {error}");
            }
            Ok(code)
        }
    }
}

fn bail_interrupted(number: i32, output: &Output) {
    output.error(&anyhow::anyhow!(
        "interrupted by signal {number} before the command had started"
    ));
}

/// Waits for the daemon's answer; tells of a signal that comes before. One that is detached boots on by itself.
fn interrupted(client: &Client, signals: &Signals, detached: bool) -> Result<Option<i32>> {
    loop {
        let (answer, signal) = (client.as_fd(), signals.as_fd());
        let mut fds = [PollFd::new(&answer, PollFlags::IN), PollFd::new(&signal, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(error).context("waiting for the daemon"),
        }
        let answered = !fds[0].revents().is_empty();
        while let Some(number) = signals.take() {
            if number != libc::SIGWINCH {
                log::info!("signal {number} came while the sandbox was made (detached: {detached})");
                return Ok(Some(number));
            }
        }
        if answered {
            return Ok(None);
        }
    }
}

/// The exit code, and a word where there is something to say.
fn conclude(
    finished: Finished,
    client: &mut Client,
    sandbox: &Sandbox,
    limit: Option<Duration>,
    output: &Output,
) -> Result<u8> {
    match finished {
        Finished::Exited(status) => Ok(status.exit_code()),
        Finished::TimedOut => {
            let limit = limit.unwrap_or_default();
            output.error(&anyhow::anyhow!(
                "the command was ended after {limit:?}, as --timeout says"
            ));
            Ok(EXIT_TIMED_OUT)
        }
        Finished::Refused(failure) => {
            let code = failure.kind.exit_code();
            output.error(&failure.into());
            Ok(code)
        }
        Finished::Lost(error) => match fate(client, &sandbox.id, Some(sandbox.restarts))? {
            Fate::Ended(Ended::Command(status)) => Ok(status.exit_code()),
            Fate::Ended(Ended::Failed(why)) => {
                output.error(&anyhow::anyhow!(why));
                Ok(125)
            }
            Fate::Ended(Ended::Stopped) => {
                output.error(&anyhow::anyhow!(
                    "sandbox {} was stopped by another client",
                    sandbox.name
                ));
                Ok(Ended::Stopped.exit_code())
            }
            Fate::Another => bail!(
                "sandbox {0} was rolled back or started again by another client; what it says since is in `basalt logs -f {0}`",
                sandbox.name
            ),
            Fate::Unknown => Err(error).context("the connection to the sandbox broke; run it again"),
        },
    }
}

/// What has become of a sandbox whose agent has closed a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has ended.
    Ended(Ended),
    /// It has another machine by now, and goes on.
    Another,
    /// The daemon has seen nothing of it.
    Unknown,
}

/// Asks the daemon, which may learn of an end later than this program, about a sandbox that had been started again so often before.
pub(crate) fn fate(client: &mut Client, id: &str, restarts: Option<u32>) -> Result<Fate> {
    let end = Instant::now() + END_LIMIT;
    let inspect = Request::Inspect { sandbox: id.to_owned() };
    loop {
        let now = match client.ask(inspect.clone()) {
            Ok((Reply::Sandbox(now), _)) => Some(now),
            Ok(_) => None,
            // Somebody has removed it.
            Err(node_api::ClientError::Refused(error)) if error.kind == node_api::ErrorKind::NotFound => {
                return Ok(Fate::Ended(Ended::Stopped));
            }
            Err(error) => return Err(error.into()),
        };
        if let Some(fate) = now.and_then(|now| fate_of(restarts, now.restarts, now.ended)) {
            return Ok(fate);
        }
        if Instant::now() >= end {
            return Ok(Fate::Unknown);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// By how often it was started again before, where that is known, and has been by now, and how it has ended; `None` if nothing is known yet. An
/// end of another machine says nothing of the one before, whose end nobody tells any more.
fn fate_of(before: Option<u32>, restarts: u32, ended: Option<Ended>) -> Option<Fate> {
    match before {
        Some(before) if before != restarts => Some(Fate::Another),
        _ => ended.map(Fate::Ended),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_machine_is_told_from_an_end_and_from_nothing() {
        assert_eq!(fate_of(Some(1), 1, None), None);
        assert_eq!(
            fate_of(Some(1), 1, Some(Ended::Stopped)),
            Some(Fate::Ended(Ended::Stopped))
        );
        // Rolled back, and rolled back and ended since.
        assert_eq!(fate_of(Some(1), 2, None), Some(Fate::Another));
        assert_eq!(fate_of(Some(1), 2, Some(Ended::Stopped)), Some(Fate::Another));
        // A daemon of before does not tell.
        assert_eq!(fate_of(None, 2, None), None);
        assert_eq!(
            fate_of(None, 2, Some(Ended::Stopped)),
            Some(Fate::Ended(Ended::Stopped))
        );
    }
}
