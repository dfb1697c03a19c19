//! `basalt run`, `exec` and `clone` by a gateway: a sandbox is made, which has no command of its own, and commands are run in it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use agent_api::Signals;
use anyhow::{Context, Result, bail};
use gateway_client::{Access, Event, NewSandbox, Start, State, VolumeMount};
use node_api::{OnTimeout, VolumeSource};

use super::attached::{self, Finished, SHORTLY};
use super::names::name_of;
use super::sandboxes::rules;
use super::{NAME, Remote};
use crate::cli::{CloneArgs, ExecArgs, ProcessArgs, RunArgs};
use crate::interrupt::Interrupted;
use crate::run::environment;

/// How long a sandbox runs that is told no time: the longest that others than Basalt's gateways give.
pub(super) const TIME: Duration = Duration::from_secs(24 * 3600);

/// One that this program waits for has so long, and is given it again and again: if this program is gone, so is the sandbox soon.
const LEASE: Duration = Duration::from_secs(300);
const RENEWAL: Duration = Duration::from_secs(60);

/// `--timeout` ended the command (the code of timeout(1)).
const EXIT_TIMED_OUT: u8 = 124;

/// Basalt itself failed.
const EXIT_FAILED: u8 = 125;

/// A sandbox was ended while its command ran, as by SIGKILL.
const EXIT_ENDED: u8 = 137;

/// Variables as the API has them.
fn variables(set: &[String]) -> BTreeMap<String, String> {
    let pairs = set.iter().filter_map(|variable| variable.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

fn metadata(name: Option<&String>, labels: &[(String, String)]) -> Result<BTreeMap<String, String>> {
    let mut metadata: BTreeMap<String, String> = labels.iter().cloned().collect();
    if metadata.contains_key(NAME) {
        bail!("the label {NAME} has a sandbox's name over --host: give that with --name");
    }
    metadata.extend(name.map(|name| (NAME.to_owned(), name.clone())));
    Ok(metadata)
}

fn volumes(args: &RunArgs) -> Result<Vec<VolumeMount>> {
    let one = |mount: &node_api::VolumeMount| match &mount.source {
        VolumeSource::Named(name) if !mount.read_only => Ok(VolumeMount {
            name: name.clone(),
            path: mount.target.clone(),
        }),
        VolumeSource::Named(_) => bail!("a volume cannot be read-only over --host: leave `:ro` out"),
        _ => bail!(
            "directories of this machine cannot be shared over --host: copy files with `basalt cp`, or use a volume (NAME:GUEST)"
        ),
    };
    args.volume.iter().map(one).collect()
}

/// A command as it is to be started.
fn command(argv: &[String], process: &ProcessArgs, set: &[String], (tty, stdin): (bool, bool)) -> Result<Start> {
    if process.user.as_deref().is_some_and(|user| user.contains(':')) {
        bail!("a group cannot be chosen over --host: give --user alone");
    }
    let mut envs = variables(set);
    if tty && let Ok(term) = std::env::var("TERM") {
        envs.entry("TERM".to_owned()).or_insert(term);
    }
    Ok(Start {
        argv: argv.to_vec(),
        envs,
        cwd: process.workdir.clone(),
        user: process.user.clone(),
        terminal: tty.then(attached::terminal),
        stdin,
    })
}

/// `basalt run`.
pub(super) fn run(remote: &Remote<'_>, args: &RunArgs) -> Result<u8> {
    let argv = args.command();
    if !args.detach && argv.is_empty() {
        bail!(
            "a command is missing: sandboxes of a gateway have none of their own; write it behind the template's name"
        );
    }
    if args.detach && args.rm {
        bail!(
            "--rm with --detach cannot be had over --host: a sandbox there is removed when its time is over; say that with --timeout"
        );
    }
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let start = command(&argv, &args.process, &set, (args.tty, args.interactive && !args.detach))?;
    let egress = args.limits.egress.given()?;
    let wanted = NewSandbox {
        template_id: args.template.as_deref().or(args.image()).unwrap_or_default().to_owned(),
        timeout: match args.detach {
            true => args.timeout.unwrap_or(TIME).as_secs().max(1),
            false => LEASE.as_secs(),
        },
        auto_pause: args.on_timeout == Some(OnTimeout::Suspend),
        metadata: metadata(args.name.as_ref(), &args.label)?,
        env_vars: variables(&set),
        network: egress.as_ref().map(rules),
        volume_mounts: volumes(args)?,
    };
    if let Some(name) = &args.name {
        remote.check_free(name)?;
    }
    // Before anything is made, so that a signal that comes meanwhile ends it in order.
    let signals = Signals::install()?;
    let made = create(remote, wanted, &signals)?;
    let name = args.name.clone().unwrap_or_else(|| made.id().to_owned());
    let removed = Removed {
        remote,
        made: &made,
        wanted: true,
    };
    if args.detach {
        if !argv.is_empty() && !args.no_command {
            begin(remote, &made, &start)?;
        }
        removed.keep();
        remote
            .output
            .result(&serde_json::json!({ "id": made.id(), "name": name }), || {
                format!("{}\n", made.id())
            })?;
        return Ok(0);
    }
    let _removed = match args.rm {
        true => Some(removed),
        false => {
            removed.keep();
            None
        }
    };
    let finished = leased(remote, &made, || {
        attached::run(&remote.client, &made, &start, &signals, args.timeout)
    });
    conclude(remote, &name, &made, finished?, args.timeout)
}

/// Makes a sandbox. A signal that comes meanwhile has it removed as soon as it is there; a second one does not wait for that.
fn create(remote: &Remote<'_>, wanted: NewSandbox, signals: &Signals) -> Result<Access> {
    let (tell, told) = channel();
    let client = Arc::clone(&remote.client);
    thread::spawn(move || tell.send(client.create(&wanted)));
    let mut caught = None;
    loop {
        match (told.recv_timeout(SHORTLY), caught) {
            (Ok(made), None) => return Ok(made?),
            (Ok(made), Some(number)) => {
                remote.client.kill(made?.id())?;
                bail!(Interrupted::by(number));
            }
            (Err(RecvTimeoutError::Disconnected), _) => {
                bail!("a sandbox could not be asked for: this is a bug of basalt, please report it")
            }
            (Err(RecvTimeoutError::Timeout), _) => {}
        }
        while let Some(number) = signals.take() {
            match caught {
                _ if number == libc::SIGWINCH => {}
                None => caught = Some(number),
                Some(_) => bail!(Interrupted::by(number)),
            }
        }
    }
}

/// A sandbox that is removed when this is dropped.
struct Removed<'r> {
    remote: &'r Remote<'r>,
    made: &'r Access,
    wanted: bool,
}

impl Removed<'_> {
    /// It stays.
    fn keep(mut self) {
        self.wanted = false;
    }
}

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        if self.wanted
            && let Err(error) = self.remote.client.kill(self.made.id())
            && !error.is_not_found()
        {
            let id = self.made.id();
            self.remote.output.warning(&anyhow::anyhow!(
                "sandbox {id} was not removed, and goes when its time is over: {error}"
            ));
        }
    }
}

/// Starts a command that nobody waits for.
fn begin(remote: &Remote<'_>, to: &Access, start: &Start) -> Result<()> {
    match remote.client.start(to, start)?.wait()? {
        Event::Started(_) => Ok(()),
        other => bail!(
            "{} told {other:?} of a command before its start: is it a gateway?",
            remote.client.server()
        ),
    }
}

/// Does something while the sandbox is kept alive.
fn leased<T>(remote: &Remote<'_>, made: &Access, work: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (over, wait) = channel::<()>();
        scope.spawn(move || {
            while wait.recv_timeout(RENEWAL) == Err(RecvTimeoutError::Timeout) {
                if let Err(error) = remote.client.set_timeout(made.id(), LEASE.as_secs()) {
                    log::info!("the sandbox's time was not prolonged: {error}");
                }
            }
        });
        let done = work();
        drop(over);
        done
    })
}

/// `basalt exec`.
pub(super) fn exec(remote: &Remote<'_>, args: &ExecArgs) -> Result<u8> {
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let start = command(
        &args.command,
        &args.process,
        &set,
        (args.tty, args.interactive && !args.detach),
    )?;
    let to = remote.running(&args.sandbox)?;
    if args.detach {
        begin(remote, &to, &start)?;
        return Ok(0);
    }
    let signals = Signals::install()?;
    let finished = attached::run(&remote.client, &to, &start, &signals, None)?;
    conclude(remote, &args.sandbox, &to, finished, None)
}

impl Remote<'_> {
    /// A sandbox in which something can be done.
    pub(super) fn running(&self, name: &str) -> Result<Access> {
        let (sandbox, access) = self.find(name)?;
        match sandbox.state {
            State::Running => Ok(access),
            State::Paused => bail!("sandbox {name} is suspended: let it go on with `basalt resume {name}`"),
        }
    }
}

/// The exit code, and a word where there is something to say.
fn conclude(remote: &Remote<'_>, name: &str, to: &Access, finished: Finished, limit: Option<Duration>) -> Result<u8> {
    match finished {
        Finished::Exited(code) => Ok(code),
        Finished::TimedOut => {
            let limit = limit.unwrap_or_default();
            remote.output.error(&anyhow::anyhow!(
                "the command was ended after {limit:?}, as --timeout says"
            ));
            Ok(EXIT_TIMED_OUT)
        }
        Finished::Refused(code, error) => {
            remote.output.error(&error.into());
            Ok(code)
        }
        Finished::Lost(error) => match remote.client.sandbox(to.id()) {
            Err(gone) if gone.is_not_found() => {
                remote
                    .output
                    .error(&anyhow::anyhow!("sandbox {name} has ended, and with it this command"));
                Ok(EXIT_ENDED)
            }
            Ok((sandbox, _)) if sandbox.state == State::Paused => {
                remote.output.error(&anyhow::anyhow!(
                    "sandbox {name} was suspended with this command in it, which goes on after `basalt resume {name}`"
                ));
                Ok(EXIT_FAILED)
            }
            _ => Err(error).with_context(|| {
                format!(
                    "the command in sandbox {name} is out of sight, and may run on: look with `basalt exec {name} ps`"
                )
            }),
        },
    }
}

/// `basalt clone`.
pub(super) fn clone(remote: &Remote<'_>, args: &CloneArgs) -> Result<u8> {
    let egress = args.egress.given()?;
    let wanted = NewSandbox {
        template_id: args.snapshot.clone(),
        timeout: TIME.as_secs(),
        metadata: metadata(args.name.as_ref(), &args.label)?,
        network: egress.as_ref().map(rules),
        ..NewSandbox::default()
    };
    if let Some(name) = &args.name {
        remote.check_free(name)?;
    }
    let made = remote.client.create(&wanted)?;
    let (sandbox, _) = remote.client.sandbox(made.id())?;
    let shown = serde_json::json!({ "id": made.id(), "name": name_of(&sandbox) });
    remote.output.result(&shown, || format!("{}\n", made.id()))?;
    Ok(0)
}
