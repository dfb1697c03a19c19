//! The way into the lab: the one file that knows `basalt-lab`.
//!
//! A sandbox runs in the lab as it would here: this program is executed there with the same meaning, over the agent
//! protocol, after the lab has been brought up and has been given the programs and the image that it lacks. Knows
//! nothing of emulators.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use agent_api::{
    Connection, Event, ExecRequest, ExitStatus, LocalIo, OsText, Running, Signals, Token, Upload, local_tty, pump,
};
use anyhow::{Context, Result, bail};
use node_api::volume::Served;
use node_api::{VolumeMount, VolumeSource};
use serde::Deserialize;

use crate::bar::{Bar, Shown};
use crate::cli::{BuildArgs, CpArgs, ExecArgs, LogLevel, RunArgs};
use crate::images::Opened;
use crate::output::Output;
use crate::places;
use crate::run::environment;
use crate::{copy, images, template_build};

/// Where the programs are in the lab.
const PROGRAM: &str = "/opt/basalt/bin/basalt";

/// Where the images are in the lab.
const IMAGES: &str = "/var/lib/basalt/images";

/// The environment of the program in the lab. KVM works there, which its `doctor` would have to find out first.
const ENVIRONMENT: [&str; 3] = [
    "BASALT_ENGINE=kvm",
    "HOME=/root",
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
];

/// How long an answer that needs no work may take, on a lab that is busy.
const PATIENCE: Duration = Duration::from_secs(60);

const DURING: &str = "the lab does not answer any more: run the command again, which starts the lab if it is down \
                      (`basalt lab logs` shows its console)";

/// What `basalt-lab status --json` says.
#[derive(Debug, Deserialize)]
struct Status {
    lab: Option<Lab>,
}

/// How the running lab is reached.
#[derive(Debug, Deserialize)]
struct Lab {
    address: String,
    token_file: PathBuf,
}

/// `basalt lab ...`: becomes basalt-lab.
pub(crate) fn forward(arguments: &[OsString]) -> Result<u8> {
    let program = program()?;
    let error = Command::new(&program).args(arguments).exec();
    Err(error).with_context(|| format!("{} cannot be started", program.display()))
}

/// Runs a sandbox in the lab; the code is the command's.
pub(crate) fn run(args: &RunArgs, image: &Opened, set: &[String], log_level: LogLevel, output: &Output) -> Result<u8> {
    // Until the command runs, a signal ends this program as it ends any: nothing of ours is left in the lab by it.
    let lab = bring_up(output)?;
    let mut connection = connect(&lab)?;
    send_image(&mut connection, image, output)?;
    let args = with_served_volumes(args)?;
    let argv = far_argv(&args, Some(&image.digest()), log_level, output.json())?;
    execute(&mut connection, argv, set, Streams::of(&args))
}

/// The same of a template that is there.
pub(crate) fn run_of_template(args: &RunArgs, set: &[String], log_level: LogLevel, output: &Output) -> Result<u8> {
    let mut connection = connect_if_up("templates: `basalt template build` brings it up")?;
    let args = with_served_volumes(args)?;
    let argv = far_argv(&args, None, log_level, output.json())?;
    execute(&mut connection, argv, set, Streams::of(&args))
}

/// The same, with directories of this machine as they are found there.
fn with_served_volumes(args: &RunArgs) -> Result<RunArgs> {
    let mut args = args.clone();
    let volumes = args.volume.drain(..);
    args.volume_json = volumes.map(|one| served(&one)).collect::<Result<_>>()?;
    Ok(args)
}

/// `basalt template build` there: the image is sent, files and this environment's variables are read here.
pub(crate) fn build(args: &BuildArgs, output: &Output) -> Result<u8> {
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let image = images::open(&images::fetched(&args.from, args.pull, output)?)?;
    let lab = bring_up(output)?;
    let mut connection = connect(&lab)?;
    send_image(&mut connection, &image, output)?;
    let mut argv = vec![PROGRAM.to_owned()];
    argv.extend(output.json().then(|| "--json".to_owned()));
    argv.extend(template_build::words(args, &image.digest()));
    execute(&mut connection, argv, &set, Streams::default())
}

/// A connection to the lab, if it is up, with the current programs in it.
fn connect_if_up(what: &str) -> Result<Connection<TcpStream>> {
    let Some(lab) = status()? else {
        bail!("the lab is down, so it has no {what}");
    };
    step("sync", &["--json"])?;
    connect(&lab)
}

/// Any other verb in the lab, with the same words. A lab that is down has no sandboxes, and is not brought up for them.
pub(crate) fn verb(words: &[OsString], set: &[String], streams: Streams) -> Result<u8> {
    let mut connection = connect_if_up("sandboxes: `basalt run` brings it up")?;
    let mut argv = vec![PROGRAM.to_owned()];
    for word in words {
        let word = word.to_str().context("the lab takes words of UTF-8 text only")?;
        argv.push(word.to_owned());
    }
    execute(&mut connection, argv, set, streams)
}

/// `basalt exec` there: files and this environment's variables are read here.
pub(crate) fn exec(args: &ExecArgs, output: &Output) -> Result<u8> {
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let mut words: Vec<String> = Vec::new();
    words.extend(output.json().then(|| "--json".to_owned()));
    words.push("exec".into());
    words.extend(args.tty.then(|| "--tty".to_owned()));
    words.extend(args.detach.then(|| "--detach".to_owned()));
    words.push(format!("--interactive={}", args.interactive));
    words.extend(args.process.words());
    words.extend(["--".into(), args.sandbox.clone()]);
    words.extend(args.command.iter().cloned());
    let words: Vec<OsString> = words.into_iter().map(OsString::from).collect();
    let streams = Streams {
        tty: args.tty,
        stdin: args.interactive && !args.detach,
    };
    verb(&words, &set, streams)
}

/// The lab, for verbs whose files are on this side.
#[derive(Debug)]
pub(crate) struct Reached(Lab);

impl Reached {
    /// The one that is up. A lab that is down has no sandboxes.
    pub(crate) fn up() -> Result<Self> {
        let Some(lab) = status()? else {
            bail!("the lab is down, so it has no sandboxes: `basalt run` brings it up");
        };
        step("sync", &["--json"])?;
        Ok(Self(lab))
    }

    /// The same, brought up if it is down.
    pub(crate) fn bring_up(output: &Output) -> Result<Self> {
        bring_up(output).map(Self)
    }

    /// Starts this program there with these words.
    pub(crate) fn start(&self, words: &[&str]) -> Result<Far> {
        let mut connection = connect(&self.0)?;
        connection.set_read_timeout(None)?;
        let words = [PROGRAM].iter().chain(words).map(|word| (*word).to_owned());
        let request = far_request(words.collect());
        let (ours, theirs) = UnixStream::pair().context("making a socket")?;
        let carry = move || carry(&mut connection, &request, theirs);
        let carrier = thread::Builder::new().name("far".into()).spawn(carry);
        Ok(Far {
            stream: ours,
            carrier: carrier.context("starting a thread")?,
        })
    }

    /// Sends it an image that it lacks.
    pub(crate) fn send_image(&self, image: &Opened, output: &Output) -> Result<()> {
        send_image(&mut connect(&self.0)?, image, output)
    }
}

/// This program in the lab; its standard input and output are a stream here.
#[derive(Debug)]
pub(crate) struct Far {
    pub(crate) stream: UnixStream,
    carrier: thread::JoinHandle<Result<ExitStatus>>,
}

impl Far {
    /// Waits for its end, which must be a good one; it has said itself what was wrong.
    pub(crate) fn end(self) -> Result<()> {
        drop(self.stream);
        match self.carrier.join() {
            Ok(Ok(ExitStatus::Code(0))) => Ok(()),
            Ok(Ok(_)) => bail!("basalt in the lab has failed, as it says above"),
            Ok(Err(error)) => Err(error).context(DURING),
            Err(_) => bail!(DURING),
        }
    }
}

/// `basalt cp`: files are read and written here; a program in the lab has only the streams of the sandbox's agent.
pub(crate) fn cp(args: &CpArgs, output: &Output) -> Result<u8> {
    let Some(lab) = status()? else {
        bail!("the lab is down, so it has no sandboxes: `basalt run` brings it up");
    };
    step("sync", &["--json"])?;
    copy::copy(args, &|sandbox| agent(&lab, sandbox), output)
}

/// A connection to the agent of a sandbox in the lab.
fn agent(lab: &Lab, sandbox: &str) -> Result<UnixStream> {
    let mut connection = connect(lab)?;
    connection.set_read_timeout(None)?;
    let request = far_request(vec![PROGRAM.into(), "agent-stream".into(), "--".into(), sandbox.into()]);
    let (ours, theirs) = UnixStream::pair().context("making a socket")?;
    let carry = move || {
        if let Err(error) = carry(&mut connection, &request, theirs) {
            log::info!("the stream to the sandbox's agent has ended: {error:#}");
        }
    };
    thread::Builder::new()
        .name("agent".into())
        .spawn(carry)
        .context("starting a thread")?;
    Ok(ours)
}

/// Joins `theirs` to a program in the lab; what it says is said here.
fn carry(connection: &mut Connection<TcpStream>, request: &ExecRequest, theirs: UnixStream) -> Result<ExitStatus> {
    let Running { mut output, input, .. } = connection.exec(&ExecRequest {
        stdin: true,
        ..request.clone()
    })?;
    let (mut from, mut to) = (theirs.try_clone()?, &theirs);
    let mut feed = move || -> Result<()> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            match from.read(&mut buffer)? {
                0 => return Ok(input.close()?),
                got => input.write(buffer.get(..got).unwrap_or_default())?,
            }
        }
    };
    thread::Builder::new().name("agent-input".into()).spawn(move || {
        if let Err(error) = feed() {
            log::info!("nothing more is sent to the sandbox's agent: {error:#}");
        }
    })?;
    loop {
        match output.next()? {
            Event::Stdout(bytes) => to.write_all(bytes)?,
            Event::Stderr(bytes) => io::stderr().lock().write_all(bytes)?,
            Event::Closed(_) => (),
            Event::Exited(status) => {
                theirs.shutdown(std::net::Shutdown::Both)?;
                return Ok(status);
            }
        }
    }
}

/// What is run there, as this program would be run by hand.
fn far_request(argv: Vec<String>) -> ExecRequest {
    ExecRequest {
        argv: argv.into_iter().map(OsText::from).collect(),
        env: ENVIRONMENT.into_iter().map(OsText::from).collect(),
        cwd: OsText::from("/"),
        ..ExecRequest::default()
    }
}

/// Which of this program's streams a command in the lab gets besides output and errors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Streams {
    /// It has this terminal.
    pub(crate) tty: bool,
    /// It reads standard input.
    pub(crate) stdin: bool,
}

impl Streams {
    fn of(args: &RunArgs) -> Self {
        Self {
            tty: args.tty,
            stdin: args.interactive,
        }
    }
}

/// Runs this program there, with the variables that it is to set; the code is its own.
fn execute(connection: &mut Connection<TcpStream>, argv: Vec<String>, set: &[String], streams: Streams) -> Result<u8> {
    let Streams { tty, stdin } = streams;
    let signals = Signals::install()?;
    let mut request = far_request(argv);
    (request.tty, request.stdin) = (tty.then(local_tty), stdin);
    request.env.extend(environment::passed(set).map(OsText::from));
    connection.set_read_timeout(None)?;
    let running = match connection.exec(&request) {
        Err(agent_api::Error::Exec(failure)) => bail!(
            "the lab cannot run {PROGRAM} ({failure}): `basalt lab down`, and the same command again sends it anew"
        ),
        other => other.context(DURING)?,
    };
    let status = pump(running, &LocalIo::std(stdin, tty), &signals).context(DURING)?;
    if let ExitStatus::Signal(number) = status {
        bail!("basalt in the lab was ended by signal {number}; `basalt lab status` tells how the lab is");
    }
    Ok(status.exit_code())
}

fn program() -> Result<PathBuf> {
    places::lab().context(
        "the lab's program basalt-lab is not beside this one: run `make run` in Basalt's source tree, which makes both",
    )
}

/// Brings the lab up, with the current programs in it; quick where it is up already.
fn bring_up(output: &Output) -> Result<Lab> {
    let lab = match status()? {
        Some(lab) => lab,
        None => {
            output.note("starting the lab, an emulated host; it stays up until `basalt lab down`");
            step("up", &[])?;
            status()?.context("the lab ended right after its start; `basalt lab logs` shows its console")?
        }
    };
    step("sync", &["--json"])?;
    Ok(lab)
}

/// One step of basalt-lab. Its progress is for our standard error; its results are not for our standard output, which is
/// the command's.
fn step(verb: &str, flags: &[&str]) -> Result<()> {
    let status = Command::new(program()?)
        .arg(verb)
        .args(flags)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context("basalt-lab cannot be started")?;
    if !status.success() {
        bail!(
            "`basalt lab {verb}` failed ({status}), so there is no lab to run in; `basalt lab logs` shows its console"
        );
    }
    Ok(())
}

/// The running lab, if one runs.
fn status() -> Result<Option<Lab>> {
    let output = Command::new(program()?)
        .args(["status", "--json"])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("basalt-lab cannot be started")?;
    let status: Status = serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "`basalt lab status` failed ({}): `basalt lab down` and `basalt lab up` start it afresh",
            output.status
        )
    })?;
    Ok(status.lab)
}

fn connect(lab: &Lab) -> Result<Connection<TcpStream>> {
    let token = read_token(&lab.token_file)?;
    let stream =
        TcpStream::connect(&lab.address).with_context(|| format!("{} does not answer: {DURING}", lab.address))?;
    stream.set_nodelay(true)?;
    let connection = Connection::new(stream, Some(&token)).context(DURING)?;
    connection.set_read_timeout(Some(PATIENCE))?;
    Ok(connection)
}

fn read_token(path: &Path) -> Result<Token> {
    let text =
        fs::read_to_string(path).with_context(|| format!("the lab's token {} cannot be read", path.display()))?;
    Token::from_hex(text.trim()).with_context(|| format!("{} is not 64 hexadecimal digits", path.display()))
}

/// Sends the image's files that the lab lacks. They are named by digest, so what is there under its name is right.
fn send_image(connection: &mut Connection<TcpStream>, image: &Opened, output: &Output) -> Result<()> {
    for file in image.files() {
        let target = format!("{IMAGES}/{}", file.name);
        let local = File::open(&file.path).with_context(|| format!("{} cannot be read", file.path.display()))?;
        let size = local.metadata()?.len();
        let there = connection.stat(target.as_str(), false).context(DURING)?;
        if there.is_some_and(|there| there.size == size) {
            continue;
        }
        if size > 1 << 20 {
            output.note(&format!("sending the image to the lab ({})", base::ByteSize(size)));
        }
        let upload = Upload {
            path: OsText::from(target.as_str()),
            mode: 0o600,
            size,
        };
        connection
            .upload(
                &upload,
                &mut Shown::new(&local, Bar::new(output), "sending the image", size),
            )
            .context(DURING)?;
    }
    Ok(())
}

/// A volume as the lab can have it: a directory of this machine is served to it, for as long as the lab is up.
fn served(volume: &VolumeMount) -> Result<VolumeMount> {
    let VolumeSource::Directory(directory) = &volume.source else {
        return Ok(volume.clone());
    };
    let mut words = vec!["share", "--json"];
    words.extend(volume.read_only.then_some("--read-only"));
    words.extend(["--", directory]);
    let output = Command::new(program()?)
        .args(words)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("basalt-lab cannot be started")?;
    if !output.status.success() {
        bail!("{directory} cannot be shared with the lab: basalt-lab says why above");
    }
    let served: Served = serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "`basalt-lab share` printed {:?}: use basalt and basalt-lab of one build",
            String::from_utf8_lossy(&output.stdout)
        )
    })?;
    Ok(VolumeMount {
        source: VolumeSource::Served(served),
        ..volume.clone()
    })
}

/// The same run for the program in the lab: files and this environment's variables have been read and are passed otherwise,
/// the image is named by its digest.
fn far_argv(args: &RunArgs, digest: Option<&str>, log_level: LogLevel, json: bool) -> Result<Vec<String>> {
    let level = log::LevelFilter::from(log_level).as_str().to_ascii_lowercase();
    let mut argv = vec![PROGRAM.to_owned(), format!("--log-level={level}")];
    argv.extend(json.then(|| "--json".to_owned()));
    argv.push("run".into());
    argv.extend(args.tty.then(|| "--tty".to_owned()));
    argv.push(format!("--interactive={}", args.interactive));
    argv.extend(args.size.words());
    argv.push(format!("--network={}", args.network.word()));
    argv.extend(args.limits.words());
    argv.extend(args.tmpfs.iter().map(|tmpfs| format!("--tmpfs={tmpfs}")));
    argv.extend(args.publish.iter().map(|ports| format!("--publish={ports}")));
    for volume in args.volume.iter().chain(&args.volume_json) {
        argv.push(format!("--volume-json={}", serde_json::to_string(volume)?));
    }
    argv.push(format!("--paging={}", args.paging));
    argv.extend([format!("--class={}", args.class), format!("--idle={}", args.idle)]);
    argv.push(format!("--memory-mode={}", args.memory_mode));
    argv.extend(args.boot.then(|| "--boot".to_owned()));
    argv.extend(args.rm.then(|| "--rm".to_owned()));
    argv.extend(args.trace.then(|| "--trace".to_owned()));
    argv.extend(args.detach.then(|| "--detach".to_owned()));
    argv.extend(args.label.iter().map(|(key, value)| format!("--label={key}={value}")));
    argv.extend(args.process.words());
    let mut option = |name: &str, value: Option<&str>| argv.extend(value.map(|value| format!("--{name}={value}")));
    option("template", args.template.as_deref());
    option("hostname", args.hostname.as_deref());
    option("name", args.name.as_deref());
    option("entrypoint", args.entrypoint.as_deref());
    option(
        "timeout",
        args.timeout
            .map(|timeout| format!("{}ms", timeout.as_millis()))
            .as_deref(),
    );
    argv.push("--".into());
    argv.extend(digest.map(str::to_owned));
    argv.extend(args.command());
    Ok(argv)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Verb};
    use clap::Parser;

    fn parse<S: AsRef<str>>(argv: &[S]) -> (RunArgs, Cli) {
        let cli = Cli::try_parse_from(argv.iter().map(AsRef::as_ref)).unwrap();
        let Verb::Run(args) = &cli.verb else { panic!("{cli:?}") };
        ((**args).clone(), cli)
    }

    #[test]
    fn the_far_side_understands_the_same() {
        let near = [
            "basalt",
            "run",
            "-t",
            "--interactive=false",
            "--cpus",
            "3",
            "-m",
            "100m",
            "-w",
            "/x",
            "-u",
            "1:2",
            "--entrypoint=",
            "--hostname=h",
            "--name",
            "n",
            "--rm",
            "--boot",
            "--paging=eager",
            "--class=bare",
            "--idle=poll",
            "--memory-mode=identity",
            "--disk",
            "1g",
            "--tmpfs",
            "/run:size=1m",
            "--cpu-limit",
            "0.5",
            "-l",
            "k=v",
            "-v",
            "cache:/c:ro",
            "-v",
            "/a:b:/d",
            "--timeout",
            "1500ms",
            "--env",
            "A",
            "--env-file",
            "/f",
            "python",
            "--",
            "sh",
            "--",
            "--cpus",
            "-c",
            "exit 3",
        ];
        let (near, _) = parse(&near);
        let argv = far_argv(&near, Some("sha256:00"), LogLevel::Info, true).unwrap();
        let (far, cli) = parse(&argv);
        assert!(cli.json && cli.log_level == LogLevel::Info);
        assert!(far.process.env.is_empty() && far.process.env_file.is_empty());
        assert_eq!(far.image(), Some("sha256:00"));
        let same = |a: &RunArgs| {
            (
                (a.tty, a.interactive, a.rm, a.detach, a.boot),
                (a.paging, a.class, a.idle, a.memory_mode),
                (a.size.resources(), a.limits.limits(), a.tmpfs.clone()),
                (a.process.workdir.clone(), a.process.user.clone(), a.entrypoint.clone()),
                (
                    a.name.clone(),
                    a.label.clone(),
                    [a.volume.clone(), a.volume_json.clone()].concat(),
                ),
            )
        };
        assert_eq!(same(&near), same(&far));
        assert_eq!(
            (&near.hostname, near.timeout, near.command()),
            (&far.hostname, far.timeout, far.command())
        );
        assert_eq!(far.command(), ["sh", "--", "--cpus", "-c", "exit 3"]);
    }

    #[test]
    fn no_command_stays_none() {
        let (near, _) = parse(&["basalt", "run", "python"]);
        let (far, _) = parse(&far_argv(&near, Some("d"), LogLevel::Warn, false).unwrap());
        assert!(far.command().is_empty() && far.entrypoint.is_none() && far.timeout.is_none());
    }

    #[test]
    fn a_template_takes_the_images_place() {
        let (near, _) = parse(&["basalt", "run", "--template", "web", "-m", "1g", "sh", "-c", "x"]);
        let (far, _) = parse(&far_argv(&near, None, LogLevel::Warn, false).unwrap());
        assert_eq!((far.template.as_deref(), far.image()), (Some("web"), None));
        assert_eq!(far.command(), ["sh", "-c", "x"]);
        // What was not given is the template's.
        assert!(far.size.cpus.is_none() && far.size.disk.is_none() && far.size.memory.is_some());
    }
}
