//! The way into the lab: the one part that knows `basalt-lab`.
//!
//! A sandbox runs in the lab as it would here: this program is executed there with the same meaning, over the agent
//! protocol, after the lab has been brought up and has been given the programs and the image that it lacks. Knows
//! nothing of emulators, and not why sandboxes are there ([`crate::site`]).

mod carry;
mod images;
mod ports;
mod volumes;
mod words;

use std::ffi::OsString;
use std::fs;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use agent_api::{Connection, ExecRequest, ExitStatus, LocalIo, OsText, Signals, Token, local_tty, pump};
use anyhow::{Context, Result, bail};
use observe::span::{now_ns, span};
use serde::Deserialize;

pub(crate) use carry::{Far, Reached};

use crate::cli::{BuildArgs, CloneArgs, CpArgs, ExecArgs, LogLevel, RunArgs};
use crate::images::Opened;
use crate::output::Output;
use crate::run::environment;
use crate::{copy, images as near_images, places, template_build, trace};
use images::send_image;
use ports::Reservation;
use volumes::with_served_volumes;

/// Where this program is in the lab.
const PROGRAM: &str = "/opt/basalt/bin/basalt";

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

/// What `basalt-lab ready` says.
#[derive(Debug, Deserialize)]
struct Ready {
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

/// Runs a sandbox in the lab; the code is the command's. `called` is the image's name as it was given.
pub(crate) fn run(
    args: &RunArgs,
    (called, image): (&str, &Opened),
    set: &[String],
    log_level: LogLevel,
    output: &Output,
) -> Result<u8> {
    // Until the command runs, a signal ends this program as it ends any: nothing of ours is left in the lab by it.
    let lab = bring_up(output)?;
    let _ports = Reservation::new(None, &args.publish)?;
    let mut connection = connect(&lab)?;
    send_image(&mut connection, image, output)?;
    let args = with_served_volumes(args)?;
    let argv = words::run(&args, Some((called, &image.digest())), log_level, output.json())?;
    execute(&mut connection, argv, set, Streams::of(&args))
}

/// The same of a template that is there.
pub(crate) fn run_of_template(args: &RunArgs, set: &[String], log_level: LogLevel, output: &Output) -> Result<u8> {
    let lab = up("templates: `basalt template build` brings it up")?;
    let _ports = Reservation::new(None, &args.publish)?;
    let mut connection = connect(&lab)?;
    let args = with_served_volumes(args)?;
    let argv = words::run(&args, None, log_level, output.json())?;
    execute(&mut connection, argv, set, Streams::of(&args))
}

/// `basalt template build` there: the image is sent, files and this environment's variables are read here.
pub(crate) fn build(args: &BuildArgs, output: &Output) -> Result<u8> {
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let image = near_images::open(&near_images::fetched(&args.from, args.pull, output)?)?;
    let lab = bring_up(output)?;
    let mut connection = connect(&lab)?;
    send_image(&mut connection, &image, output)?;
    let mut argv = vec![PROGRAM.to_owned()];
    argv.extend(output.json().then(|| "--json".to_owned()));
    argv.extend(template_build::words(args, &image.digest()));
    execute(&mut connection, argv, &set, Streams::default())
}

/// `basalt clone` there.
pub(crate) fn clone(args: &CloneArgs, log_level: LogLevel, output: &Output) -> Result<u8> {
    let lab = up(SANDBOXES)?;
    let _ports = Reservation::new(None, &args.publish)?;
    let argv = words::clone(args, log_level, output.json())?;
    execute(&mut connect(&lab)?, argv, &[], Streams::default())
}

/// A verb that lets sandboxes go on which have ended, maybe: their ports are this machine's before they do.
pub(crate) fn restart(sandboxes: &[String], words: &[OsString]) -> Result<u8> {
    let lab = up(SANDBOXES)?;
    let _ports = ports::of_sandboxes(&mut connect(&lab)?, sandboxes)?;
    in_lab(&lab, words, &[], Streams::default())
}

/// Any other verb in the lab, with the same words. A lab that is down has no sandboxes, and is not brought up for them.
pub(crate) fn verb(words: &[OsString], streams: Streams) -> Result<u8> {
    in_lab(&up(SANDBOXES)?, words, &[], streams)
}

fn in_lab(lab: &Lab, words: &[OsString], set: &[String], streams: Streams) -> Result<u8> {
    let mut argv = vec![PROGRAM.to_owned()];
    for word in words {
        let word = word.to_str().context("the lab takes words of UTF-8 text only")?;
        argv.push(word.to_owned());
    }
    execute(&mut connect(lab)?, argv, set, streams)
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
    in_lab(&up(SANDBOXES)?, &words, &set, streams)
}

/// `basalt cp`: files are read and written here; a program in the lab has only the streams of the sandbox's agent.
pub(crate) fn cp(args: &CpArgs, output: &Output) -> Result<u8> {
    let lab = up(SANDBOXES)?;
    copy::copy(args, &|sandbox| carry::agent(&lab, sandbox), output)
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
    let starting = span("lab: basalt started there");
    let running = match connection.exec(&request) {
        Err(agent_api::Error::Exec(failure)) => {
            bail!("the lab cannot run {PROGRAM} ({failure}): `basalt lab sync` sends it again")
        }
        other => other.context(DURING)?,
    };
    drop(starting);
    let started_ns = now_ns();
    let status = pump(running, &LocalIo::std(stdin, tty), &signals).context(DURING)?;
    trace::output(started_ns);
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

/// What a lab that is down does not have.
const SANDBOXES: &str = "sandboxes: `basalt run` brings it up";

/// The lab that is up, with the current programs in it.
fn up(what: &str) -> Result<Lab> {
    ready()?.with_context(|| format!("the lab is down, so it has no {what}"))
}

/// Brings the lab up, with the current programs in it; quick where it is up already.
fn bring_up(output: &Output) -> Result<Lab> {
    if let Some(lab) = ready()? {
        return Ok(lab);
    }
    output.note("starting the lab, an emulated host; it stays up until `basalt lab down`");
    let status = Command::new(program()?)
        .arg("up")
        .stdin(Stdio::null())
        // Its results are not for our standard output, which is the command's.
        .stdout(Stdio::null())
        .status()
        .context("basalt-lab cannot be started")?;
    if !status.success() {
        bail!("`basalt lab up` failed ({status}), so there is no lab to run in; `basalt lab logs` shows its console");
    }
    ready()?.context("the lab ended right after its start; `basalt lab logs` shows its console")
}

/// The running lab, if one runs, with the current programs in it.
fn ready() -> Result<Option<Lab>> {
    let _span = span("lab: found, programs compared");
    let output = Command::new(program()?)
        .arg("ready")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("basalt-lab cannot be started")?;
    let ready: Ready = serde_json::from_slice(&output.stdout).with_context(|| {
        format!(
            "`basalt lab ready` failed ({}): `basalt lab status` tells how the lab is, `basalt lab down` and `basalt lab up` \
             start it afresh",
            output.status
        )
    })?;
    Ok(ready.lab)
}

fn connect(lab: &Lab) -> Result<Connection<TcpStream>> {
    let _span = span("lab: connection");
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
