//! `basalt cp`: trees between this host and sandboxes, as tar streams. The guest's side is its agent's; ours writes beneath the
//! destination and nowhere else, whatever a guest sends.

mod ends;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use agent_api::{Connection, Copied, Packing, UnpackTarget};
use anyhow::{Context, Result, bail};
use archive::{Owner, ROOT, Target};
use registry::Cancel;

use crate::bar::{Bar, Shown};
use crate::cli::CpArgs;
use crate::interrupt::until_signal;
use crate::output::Output;

pub(crate) use ends::{End, Place, Source, There, parse, place};

/// How long an agent may say nothing.
const SILENCE: Duration = Duration::from_secs(60);

/// How often is looked whether a signal came.
const LOOK: Duration = Duration::from_millis(100);

/// What is said of a copy that was begun.
const UNFINISHED: &str = "the copy was not finished: files that were whole are in their places, the rest is not there";

/// The type bits of `st_mode` and a directory's (inode(7)).
const TYPE: u32 = 0o170_000;
const DIRECTORY: u32 = 0o040_000;

type Agent = Connection<UnixStream>;

/// How a sandbox's agent is reached: by the daemon of this host, or by that of the lab.
pub(crate) type Dial<'d> = &'d dyn Fn(&str) -> Result<UnixStream>;

/// Copies.
pub(crate) fn copy(args: &CpArgs, dial: Dial<'_>, output: &Output) -> Result<u8> {
    let copied = match (&args.source, &args.destination) {
        (End::Sandbox { name, path }, End::Local(to)) => with_agent(dial, name, |agent, cancel| {
            to_here((agent, cancel), path, to, args.archive, output)
        }),
        (End::Sandbox { name, path }, End::Stream) => with_agent(dial, name, |agent, _| to_stream(agent, path, output)),
        (End::Local(from), End::Sandbox { name, path }) => with_agent(dial, name, |agent, _| {
            from_here(agent, from, path, args.archive, output)
        }),
        (End::Stream, End::Sandbox { name, path }) => {
            with_agent(dial, name, |agent, _| from_stream(agent, path, args.archive, output))
        }
        (End::Sandbox { name, path }, End::Sandbox { name: other, path: to }) => with_agent(dial, name, |from, _| {
            with_agent_again(dial, other, |agent, _| {
                across(from, path, agent, to, args.archive, output)
            })
        }),
        _ => bail!("neither end is in a sandbox: write one of them as SANDBOX:PATH, such as web:/etc"),
    }?;
    for (count, what) in [
        (
            copied.left_out,
            "devices, pipes, sockets or kernel file systems were left out",
        ),
        (
            copied.changed,
            "files became shorter while they were read; their ends are zeroes",
        ),
    ] {
        if count > 0 {
            output.warning(&anyhow::anyhow!("{count} {what}"));
        }
    }
    // An archive on standard output is the result.
    if args.destination != End::Stream {
        let value = serde_json::json!({ "left_out": copied.left_out, "changed": copied.changed });
        output.result(&value, String::new)?;
    }
    Ok(0)
}

/// Does something with a sandbox's agent, until a signal ends it.
fn with_agent(dial: Dial<'_>, name: &str, work: impl FnOnce(&mut Agent, &Cancel) -> Result<Copied>) -> Result<Copied> {
    until_signal(|cancel| closing(dial(name)?, cancel, work))
}

/// The same for a second one: the first has the signals, and ends first.
fn with_agent_again(
    dial: Dial<'_>,
    name: &str,
    work: impl FnOnce(&mut Agent, &Cancel) -> Result<Copied>,
) -> Result<Copied> {
    closing(dial(name)?, &Cancel::default(), work)
}

/// Closes the connection once `cancel` says so: whoever waits for it goes on, and fails.
fn closing(
    stream: UnixStream,
    cancel: &Cancel,
    work: impl FnOnce(&mut Agent, &Cancel) -> Result<Copied>,
) -> Result<Copied> {
    let again = stream.try_clone().context("a connection to the sandbox")?;
    let mut agent = Connection::resume(stream)?;
    agent.set_read_timeout(Some(SILENCE))?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = || {
            while !over.load(Ordering::Acquire) {
                if cancel.is_cancelled() {
                    agent_api::Duplex::close(&again);
                    return;
                }
                thread::park_timeout(LOOK);
            }
        };
        let watcher = thread::Builder::new().name("cancel".into()).spawn_scoped(scope, watch);
        let watcher = watcher.context("starting a thread")?;
        let outcome = work(&mut agent, cancel);
        over.store(true, Ordering::Release);
        watcher.thread().unpark();
        // As a sentence: a broken pipe somewhere in its causes would be taken for a reader of our output who has left.
        outcome.map_err(|error| anyhow::anyhow!("{error:#}"))
    })
}

/// What is at a path in a sandbox.
fn there_in(agent: &mut Agent, path: &Path) -> Result<There> {
    let found = agent.stat(path.as_os_str(), false)?;
    Ok(match found.map(|found| found.mode & TYPE) {
        None => There::Nothing,
        Some(DIRECTORY) => There::Directory,
        Some(_) => There::Other,
    })
}

pub(crate) fn there_here(path: &Path) -> Result<There> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(There::Directory),
        Ok(_) => Ok(There::Other),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            // A link that leads nowhere is something: it would be replaced.
            Ok(if fs::symlink_metadata(path).is_ok() {
                There::Other
            } else {
                There::Nothing
            })
        }
        Err(error) => Err(error).with_context(|| format!("{} cannot be looked at", path.display())),
    }
}

fn request(place: Place) -> (OsString, UnpackTarget) {
    match place {
        Place::Root(path) => (path.into(), UnpackTarget::Root),
        Place::Into(path) => (path.into(), UnpackTarget::Into),
    }
}

fn owner(archive: bool) -> Owner {
    if archive { Owner::Kept } else { Owner::Mine }
}

fn to_here(
    (agent, cancel): (&mut Agent, &Cancel),
    from: &Path,
    to: &Path,
    archive: bool,
    output: &Output,
) -> Result<Copied> {
    let packing = agent.pack(from.as_os_str(), OsStr::new(ROOT))?;
    let source = Source::new(from, packing.directory);
    let target = match place(&source, to, there_here(to)?)? {
        Place::Root(path) => Target::Root(path),
        Place::Into(path) => Target::Into(path),
    };
    let mut shown = shown(packing, output);
    match archive::unpack(&mut shown, &target, owner(archive), &|| cancel.is_cancelled()) {
        Ok(unpacked) => {
            let mut copied = shown.into_inner().finish()?;
            copied.left_out += unpacked.left_out;
            Ok(copied)
        }
        // The agent knows better why its stream broke off, if it still says so.
        Err(error) if error.is_of_stream() => {
            shown.into_inner().finish().context(UNFINISHED)?;
            Err(error).context(UNFINISHED)
        }
        Err(error) => Err(error).context(UNFINISHED),
    }
}

/// Has the agent unpack what `write` writes; an error after its beginning says that there was one.
fn send(
    agent: &mut Agent,
    place: (OsString, UnpackTarget),
    archive: bool,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<Copied> {
    let mut begun = false;
    let sent = agent.unpack(place.0, place.1, archive, |sink| -> Result<()> {
        begun = true;
        write(sink)
    });
    sent.map_err(|error| if begun { error.context(UNFINISHED) } else { error })
}

/// A stream from an agent, with a bar.
fn shown<'c>(packing: Packing<'c, UnixStream>, output: &Output) -> Shown<Packing<'c, UnixStream>> {
    let bytes = packing.bytes;
    Shown::new(packing, Bar::new(output), "copying", bytes)
}

fn to_stream(agent: &mut Agent, from: &Path, output: &Output) -> Result<Copied> {
    let mut out = io::stdout().lock();
    if out.is_terminal() {
        bail!(
            "an archive is nothing for a terminal: send it to a file or a program, as in `basalt cp web:/etc - | tar t`"
        );
    }
    let name = from.file_name().unwrap_or(OsStr::new(ROOT));
    let mut shown = shown(agent.pack(from.as_os_str(), name)?, output);
    match io::copy(&mut shown, &mut out).and_then(|_| out.flush()) {
        // Whoever reads it has seen enough. What comes from the agent is never an error of this kind.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Copied::default()),
        Err(error) => Err(error).context("the archive cannot be passed on"),
        Ok(()) => Ok(shown.into_inner().finish()?),
    }
}

fn from_here(agent: &mut Agent, from: &Path, to: &Path, archive: bool, output: &Output) -> Result<Copied> {
    let measured = archive::measure(from)?;
    let there = there_in(agent, to)?;
    let place = request(place(&Source::new(from, measured.directory), to, there)?);
    let bar = Bar::new(output);
    let mut changed = 0;
    let mut left_out = 0;
    let mut copied = send(agent, place, archive, |sink| {
        let packed = archive::pack(from, OsStr::new(ROOT), Shown::new(sink, bar, "copying", measured.bytes))?;
        (changed, left_out) = (packed.changed, packed.left_out);
        Ok(())
    })?;
    copied.changed += changed;
    copied.left_out += left_out;
    Ok(copied)
}

fn from_stream(agent: &mut Agent, to: &Path, archive: bool, output: &Output) -> Result<Copied> {
    if there_in(agent, to)? != There::Directory {
        bail!(
            "{} is no directory of the sandbox: an archive is unpacked into one that is there",
            to.display()
        );
    }
    let input = io::stdin().lock();
    if input.is_terminal() {
        bail!(
            "an archive is read from standard input, which is this terminal: send one, as in `tar c . | basalt cp - web:/srv`"
        );
    }
    let mut shown = Shown::new(input, Bar::new(output), "copying", 0);
    let place = (to.into(), UnpackTarget::Below);
    send(agent, place, archive, |mut sink| pass(&mut shown, &mut sink))
}

fn pass(from: &mut impl Read, to: &mut impl Write) -> Result<()> {
    io::copy(from, to).context("the archive cannot be passed on")?;
    Ok(())
}

fn across(
    from: &mut Agent,
    path: &Path,
    agent: &mut Agent,
    to: &Path,
    archive: bool,
    output: &Output,
) -> Result<Copied> {
    let packing = from.pack(path.as_os_str(), OsStr::new(ROOT))?;
    let source = Source::new(path, packing.directory);
    let place = request(place(&source, to, there_in(agent, to)?)?);
    let mut shown = shown(packing, output);
    let mut copied = send(agent, place, archive, |mut sink| pass(&mut shown, &mut sink))?;
    let packed = shown.into_inner().finish()?;
    copied.left_out += packed.left_out;
    copied.changed += packed.changed;
    Ok(copied)
}
