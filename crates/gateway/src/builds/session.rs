//! The steps of a build, carried out in its sandbox through the agent. Blocks: one thread has a session. Knows no store and no HTTP, and
//! what a guest says is bounded in size and time.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use agent_api::{Connection, ExecRequest, Kept, OsText, OutputStream, UnpackTarget};
use control::{LogLevel, Settings};
use flate2::read::MultiGzDecoder;
use template_build::{Ended, Step as Running, wait_until_ready};

use super::log::{Lines, Log};
use super::plan::{CopyStep, MAX_VARIABLES, Plan, Step};
use super::scripts;
use crate::Error;
use crate::error::with_causes;

/// Between two looks whether a build is still wanted.
const LOOK: Duration = Duration::from_millis(200);

/// How long a guest may take for a word about a file, and for what it does with much memory.
const ANSWER: Duration = Duration::from_secs(60);
const SETTLE: Duration = Duration::from_secs(300);

/// What an archive may become when it is unpacked. The disk of the sandbox has less.
const MAX_UNPACKED: u64 = 64 << 30;

/// The most bytes of variables.
const MAX_ENV: usize = 32 << 10;

/// The names of the steps before the first and behind the last, as the SDKs know them.
pub(super) const BASE: &str = "base";
pub(super) const FINALIZE: &str = "finalize";

/// Why a build does not go on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    /// A command has failed.
    #[error(transparent)]
    Command(#[from] template_build::Error),
    /// The agent said no.
    #[error(transparent)]
    Agent(#[from] agent_api::Error),
    /// The gateway, the node or the store, as a tenant may know it.
    #[error("{0}")]
    Gateway(String),
    /// What was uploaded cannot be read.
    #[error("what was uploaded cannot be read ({0}): it is to be a tar archive, maybe compressed by gzip")]
    Archive(#[source] io::Error),
    /// Its environment is too large.
    #[error("the variables of a template may be {MAX_VARIABLES} with {MAX_ENV} bytes together, and these are more")]
    Environment,
    /// It took too long.
    #[error("a build may take {} s, and this one took longer", .0.as_secs())]
    Late(Duration),
    /// Nobody wants it any more.
    #[error("the build was ended")]
    Cancelled,
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Gateway(error.told().message)
    }
}

/// In which step a build has stopped, and why.
#[derive(Debug)]
pub(super) struct Stopped {
    pub(super) step: String,
    /// What the step was, if it is one of the tenant's.
    pub(super) title: Option<String>,
    pub(super) why: Fault,
}

impl Stopped {
    /// For the tenant: with what the command said last.
    pub(super) fn message(&self) -> String {
        let why = with_causes(&self.why);
        let why = match &self.title {
            Some(title) => format!("step {} ({title}) failed: {why}", self.step),
            None => why,
        };
        let words = match &self.why {
            Fault::Command(template_build::Error::Code { words, .. } | template_build::Error::Signal { words, .. }) => {
                words.trim()
            }
            _ => "",
        };
        match words {
            "" => why,
            words => format!("{why}: {words}"),
        }
    }
}

/// What a session is given.
pub(super) struct Parts<'b> {
    /// A new connection to the agent, with what is common to all commands.
    pub(super) connect: &'b dyn Fn() -> Result<(UnixStream, ExecRequest), Error>,
    /// Opens what was uploaded.
    pub(super) open: &'b dyn Fn(&str) -> io::Result<File>,
    pub(super) log: &'b Arc<Log>,
    pub(super) cancelled: &'b AtomicBool,
    /// When the build began, and how long it may take.
    pub(super) began: Instant,
    pub(super) limit: Duration,
    /// How long it may take until a check is content.
    pub(super) ready: Duration,
}

/// A build under way in a sandbox.
pub(super) struct Session<'b> {
    parts: Parts<'b>,
    /// What all commands begin with, but for the settings.
    command: ExecRequest,
    settings: Settings,
    /// Where commands begin: what was set, or the home of whoever runs them.
    cwd: String,
    step: String,
}

/// Whose command it is, and where it begins.
enum As<'s> {
    /// The build's user, in its directory.
    Builder,
    /// This user, in its directory.
    User(&'s str),
    /// The scripts'.
    Root,
}

impl<'b> Session<'b> {
    /// Of a sandbox whose commands have what `settings` say.
    pub(super) fn new(parts: Parts<'b>, settings: Settings) -> Result<Self, Stopped> {
        let begin = || {
            let (stream, command) = (parts.connect)()?;
            // The agent waits for the end of this one.
            drop(stream);
            Ok::<_, Fault>(command)
        };
        let command = begin().map_err(|why| Stopped {
            step: BASE.to_owned(),
            title: None,
            why,
        })?;
        let mut session = Self {
            parts,
            command,
            settings,
            cwd: String::new(),
            step: BASE.to_owned(),
        };
        session.find_cwd().map_err(|why| session.stopped(None, why))?;
        Ok(session)
    }

    fn stopped(&self, title: Option<String>, why: Fault) -> Stopped {
        Stopped {
            step: self.step.clone(),
            title,
            why,
        }
    }

    /// Carries all of it out; what commands in sandboxes of it have then. What runs on has been left alone.
    pub(super) fn carry_out(mut self, plan: &Plan) -> Result<Settings, Stopped> {
        let count = plan.steps.len();
        for (at, step) in plan.steps.iter().enumerate() {
            self.step = (at + 1).to_string();
            self.say(LogLevel::Info, &format!("[{}/{count}] {}", at + 1, step.title()));
            self.one(step).map_err(|why| self.stopped(Some(step.title()), why))?;
        }
        self.step = FINALIZE.to_owned();
        self.finalize(plan).map_err(|why| self.stopped(None, why))?;
        Ok(self.settings)
    }

    fn say(&self, level: LogLevel, message: &str) {
        self.parts.log.say(level, Some(&self.step), message);
    }

    fn one(&mut self, step: &Step) -> Result<(), Fault> {
        match step {
            Step::Run { command, user } => {
                let who = user.as_deref().map_or(As::Builder, As::User);
                let ended = self.finished(self.start(scripts::RUN, &[command], &who, Show::All)?)?;
                Ok(template_build::Error::unless_succeeded(command, &ended)?)
            }
            Step::Copy(copy) => self.copy(copy),
            Step::Env(pairs) => {
                for (name, value) in pairs {
                    let value = expand(value, |name| self.variable(name)).ok_or(Fault::Environment)?;
                    set(&mut self.settings.env, name, &value)?;
                }
                Ok(())
            }
            Step::Workdir(directory) => {
                let directory = absolute(&self.cwd, directory);
                let owner = self.user();
                self.script("WORKDIR", scripts::WORKDIR, &[&directory, &owner])?;
                self.settings.workdir = Some(directory);
                self.find_cwd()
            }
            Step::User(user) => {
                let name = user.split(':').next().unwrap_or_default();
                self.script("USER", scripts::USER, &[name])?;
                self.settings.user = Some(user.clone());
                self.find_cwd()
            }
        }
    }

    /// Who runs commands.
    fn user(&self) -> String {
        let user = self.settings.user.clone().or_else(|| self.command.user.clone());
        user.filter(|user| !user.is_empty())
            .unwrap_or_else(|| "root".to_owned())
    }

    fn variable(&self, name: &str) -> Option<String> {
        let prefix = format!("{name}=");
        let own = self.settings.env.iter().rev();
        let own = own.into_iter().find_map(|variable| variable.strip_prefix(&prefix));
        let of_sandbox = || {
            let mut all = self.command.env.iter().map(ToString::to_string);
            all.find_map(|variable| variable.strip_prefix(&prefix).map(str::to_owned))
        };
        own.map(str::to_owned).or_else(of_sandbox)
    }

    /// Where commands begin from here on: as the façade has it for sandboxes.
    fn find_cwd(&mut self) -> Result<(), Fault> {
        let set = self.settings.workdir.clone();
        let given = set.unwrap_or_else(|| self.command.cwd.to_string());
        if !matches!(given.as_str(), "" | "/") {
            self.cwd = given;
            return Ok(());
        }
        let user = self.user();
        let mut connection = self.connection(ANSWER)?;
        self.cwd = match connection.fs_stat(Some(&user), "~") {
            Ok(entry) => entry.path.to_string(),
            // Whoever has no home.
            Err(agent_api::Error::RequestFailed(_)) => "/".to_owned(),
            Err(error) => return Err(error.into()),
        };
        Ok(())
    }

    fn connection(&self, limit: Duration) -> Result<Connection<UnixStream>, Fault> {
        let (stream, _) = (self.parts.connect)()?;
        let connection = Connection::resume(stream)?;
        connection.set_read_timeout(Some(limit))?;
        Ok(connection)
    }

    /// Starts `sh -c` with this and arguments.
    fn start(&self, script: &str, args: &[&str], who: &As<'_>, show: Show) -> Result<Running, Fault> {
        let request = self.request(script, args, who);
        self.run(request, show)
    }

    fn request(&self, script: &str, args: &[&str], who: &As<'_>) -> ExecRequest {
        let shell = ["sh", "-c", script, "sh"];
        let words = shell.iter().chain(args);
        let user = match who {
            As::Builder => self.user(),
            As::User(user) => (*user).to_owned(),
            As::Root => "root".to_owned(),
        };
        let is_other = user != self.command.user.as_deref().unwrap_or("root");
        // What the sandbox says of its own user is not true of another.
        let is_of_user = |variable: &&OsText| {
            let text = variable.to_string();
            is_other && ["HOME=", "USER=", "LOGNAME="].iter().any(|name| text.starts_with(name))
        };
        let name = |variable: &str| variable.split('=').next().unwrap_or_default().to_owned();
        let set: Vec<String> = self.settings.env.iter().map(|variable| name(variable)).collect();
        let is_set = |variable: &&OsText| set.contains(&name(&variable.to_string()));
        let of_sandbox = self.command.env.iter().filter(|one| !is_of_user(one) && !is_set(one));
        let own = self.settings.env.iter().map(|variable| OsText::from(variable.as_str()));
        ExecRequest {
            argv: words.map(|&word| OsText::from(word)).collect(),
            env: of_sandbox.cloned().chain(own).collect(),
            cwd: match who {
                As::Root => "/".into(),
                As::Builder | As::User(_) => self.cwd.as_str().into(),
            },
            user: Some(user),
            ..ExecRequest::default()
        }
    }

    fn run(&self, request: ExecRequest, show: Show) -> Result<Running, Fault> {
        let (stream, _) = (self.parts.connect)()?;
        let (log, step) = (Arc::clone(self.parts.log), self.step.clone());
        let mut lines = [Lines::default(), Lines::default()];
        let tell = move |stream, bytes: &[u8]| {
            if show == Show::Nothing {
                return Ok(());
            }
            let (level, [out, err]) = match stream {
                OutputStream::Stdout => (LogLevel::Info, &mut lines),
                OutputStream::Stderr => (LogLevel::Warn, &mut lines),
            };
            let lines = if level == LogLevel::Info { out } else { err };
            lines.take(bytes, |line| log.say(level, Some(&step), line));
            Ok(())
        };
        Ok(Running::start(stream, request, tell)?)
    }

    /// Whether it is to go on.
    fn check(&self) -> Result<(), Fault> {
        if self.parts.cancelled.load(Ordering::Relaxed) {
            return Err(Fault::Cancelled);
        }
        match self.parts.began.elapsed() < self.parts.limit {
            true => Ok(()),
            false => Err(Fault::Late(self.parts.limit)),
        }
    }

    fn finished(&self, running: Running) -> Result<Ended, Fault> {
        loop {
            self.check()?;
            if let Some(ended) = running.ended(Some(LOOK))? {
                return Ok(ended);
            }
        }
    }

    /// A script of ours; what it has written at last.
    fn script(&self, name: &str, script: &str, args: &[&str]) -> Result<String, Fault> {
        let ended = self.finished(self.start(script, args, &As::Root, Show::Nothing)?)?;
        template_build::Error::unless_succeeded(name, &ended)?;
        Ok(ended.words.trim().to_owned())
    }

    fn copy(&self, copy: &CopyStep) -> Result<(), Fault> {
        let file = (self.parts.open)(&copy.hash).map_err(Fault::Archive)?;
        let directory = self.script("COPY", scripts::UNPACK, &[])?;
        let mut connection = self.connection(ANSWER)?;
        let mut source = opened(file).map_err(Fault::Archive)?.take(MAX_UNPACKED);
        let unpacked = connection.unpack::<Fault>(directory.as_str(), UnpackTarget::Below, false, |sink| {
            let mut buffer = vec![0; 64 << 10];
            loop {
                self.check()?;
                match source.read(&mut buffer).map_err(Fault::Archive)? {
                    0 => return Ok(()),
                    got => {
                        let bytes = buffer.get(..got).unwrap_or_default();
                        // What the agent says of it counts, which comes next.
                        sink.write_all(bytes).map_err(Fault::Archive)?;
                    }
                }
            }
        });
        let unpacked = unpacked?;
        if unpacked.left_out > 0 {
            self.say(
                LogLevel::Warn,
                &format!("{} devices, pipes or sockets were left out", unpacked.left_out),
            );
        }
        let to = match copy.to.ends_with('/') {
            true => format!("{}/", absolute(&self.cwd, &copy.to).trim_end_matches('/')),
            false => absolute(&self.cwd, &copy.to),
        };
        let owner = copy.owner.clone().unwrap_or_else(|| self.user());
        let mode = copy.mode.as_deref().unwrap_or_default();
        self.script("COPY", scripts::COPY, &[&directory, &copy.from, &to, &owner, mode])?;
        Ok(())
    }

    /// Starts what runs on, waits until it is ready, and has the guest leave nothing in its memory that nobody needs.
    fn finalize(&self, plan: &Plan) -> Result<(), Fault> {
        let mut left = None;
        if let Some(command) = &plan.start {
            self.say(LogLevel::Info, &format!("starting {command}"));
            let note = envd::note_of_shell(command, &self.cwd);
            let request = ExecRequest {
                kept: Some(Kept {
                    note,
                    ..Kept::default()
                }),
                ..self.request(scripts::RUN, &[command], &As::Builder)
            };
            let running = self.run(request, Show::All)?;
            // Where nothing is waited for, the sandbox is kept at once.
            while !running.started(LOOK)? {
                self.check()?;
            }
            left = Some((command.as_str(), running));
        }
        if let Some(check) = &plan.ready {
            self.say(LogLevel::Info, &format!("waiting until it is ready: {check}"));
            let left = left.as_ref().map(|(command, running)| (*command, running));
            let start = |check: &str| self.start(scripts::RUN, &[check], &As::Builder, Show::Nothing);
            let waited = wait_until_ready(check, self.parts.ready, left, start, || self.check())?;
            self.say(LogLevel::Info, &format!("ready after {:.1} s", waited.as_secs_f64()));
        }
        // It is kept by the agent, and runs on without us.
        drop(left);
        match self.connection(SETTLE)?.settle() {
            // It only takes more space then.
            Err(agent_api::Error::Refused(why)) => log::info!("a template is kept as it is: {why}"),
            settled => settled?,
        }
        self.check()
    }
}

/// Whether a command's words are in the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Show {
    All,
    Nothing,
}

/// An archive, decompressed if it is compressed.
fn opened(mut file: File) -> io::Result<Box<dyn Read>> {
    use std::io::Seek;
    const GZIP: [u8; 2] = [0x1f, 0x8b];
    let mut magic = [0; 2];
    let is_gzip = file.read_exact(&mut magic).is_ok() && magic == GZIP;
    file.rewind()?;
    Ok(match is_gzip {
        true => Box::new(MultiGzDecoder::new(io::BufReader::with_capacity(64 << 10, file))),
        false => Box::new(file),
    })
}

/// Sets a variable. It goes to the node with each sandbox, so that all of them are bounded; none is set that is too much.
fn set(env: &mut Vec<String>, name: &str, value: &str) -> Result<(), Fault> {
    let prefix = format!("{name}=");
    env.retain(|variable| !variable.starts_with(&prefix));
    let bytes: usize = env.iter().map(String::len).sum();
    if bytes + prefix.len() + value.len() > MAX_ENV || env.len() >= MAX_VARIABLES {
        return Err(Fault::Environment);
    }
    env.push(prefix + value);
    Ok(())
}

/// A path without `.` and `..`, from the root on.
fn absolute(cwd: &str, path: &str) -> String {
    let whole = match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("{cwd}/{path}"),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => (),
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// A value with the variables in it (`$NAME`, `${NAME}`) replaced, as in a Dockerfile; a backslash takes a dollar its meaning. None if it
/// becomes too large.
fn expand(value: &str, variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let mut out = String::with_capacity(value.len());
    let mut rest = value;
    while let Some(at) = rest.find('$') {
        if out.len() > MAX_ENV {
            return None;
        }
        let (before, behind) = rest.split_at(at);
        if let Some(before) = before.strip_suffix('\\') {
            out.push_str(before);
            out.push('$');
            rest = behind.get(1..).unwrap_or_default();
            continue;
        }
        out.push_str(before);
        let behind = behind.get(1..).unwrap_or_default();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (name, next) = match behind.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            Some((name, next)) if name.chars().all(is_name) => (name, next),
            _ => behind.split_at(behind.find(|c| !is_name(c)).unwrap_or(behind.len())),
        };
        match name.is_empty() {
            true => out.push('$'),
            false => out.push_str(&variable(name).unwrap_or_default()),
        }
        rest = next;
    }
    out.push_str(rest);
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_expanded_as_in_a_dockerfile() {
        let variable = |name: &str| (name == "PATH").then(|| "/bin".to_owned());
        for (value, expanded) in [
            ("/app:$PATH", "/app:/bin"),
            ("${PATH}x$PATH", "/binx/bin"),
            ("$PATHS.", "."),
            ("a\\$PATH", "a$PATH"),
            ("$(id) `id` $", "$(id) `id` $"),
            ("${a b}", "${a b}"),
            ("", ""),
        ] {
            assert_eq!(expand(value, variable).as_deref(), Some(expanded), "{value}");
        }
        let large = |_: &str| Some("x".repeat(MAX_ENV));
        assert_eq!(expand(&"$A".repeat(1000), large), None);
    }

    #[test]
    fn variables_are_bounded_one_by_one() {
        let mut env = Vec::new();
        for number in 0..MAX_VARIABLES {
            set(&mut env, &format!("N{number}"), "x").unwrap();
        }
        set(&mut env, "N1", "another").unwrap();
        assert!(matches!(set(&mut env, "MORE", ""), Err(Fault::Environment)));
        assert_eq!(env.len(), MAX_VARIABLES);
        let mut env = Vec::new();
        set(&mut env, "A", &"x".repeat(MAX_ENV - 2)).unwrap();
        assert!(matches!(set(&mut env, "B", ""), Err(Fault::Environment)));
        assert_eq!(env.len(), 1, "what is too much is not kept");
    }

    #[test]
    fn paths_begin_in_the_directory() {
        for (path, whole) in [
            ("a", "/srv/a"),
            ("./a/", "/srv/a"),
            ("/a//b/.", "/a/b"),
            ("../../../a", "/a"),
            (".", "/srv"),
            ("/", "/"),
        ] {
            assert_eq!(absolute("/srv", path), whole, "{path}");
        }
    }
}
