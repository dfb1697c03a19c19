//! `basalt cp` by a gateway: single files as they are (`/files`), trees as tar streams that a `tar` in the sandbox reads and writes. Ours
//! are written beneath the destination and nowhere else, whatever a guest sends.

use std::fs::{self, File, Permissions};
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use archive::{Owner, Target};
use gateway_client::{Access, End, Event, Events, FileKind, Piece, Start};
use registry::Cancel;

use super::Remote;
use crate::bar::{Bar, Shown};
use crate::cli::CpArgs;
use crate::copy::{self, Place, Source, There, place, there_here};
use crate::interrupt::until_signal;

/// Permissions that files have where nobody says others.
const USUAL: u32 = 0o644;

/// Of a stream, read or sent at once; and so many pieces wait.
const CHUNK: usize = 64 << 10;
const WAITING: usize = 8;

/// How often is looked whether a signal came, and how long an archive may come to a halt before that is said.
const LOOK: Duration = Duration::from_millis(100);
const QUIET: Duration = Duration::from_secs(20);

/// The most that is kept of what a `tar` complains of.
const COMPLAINT: usize = 4 << 10;

/// What is said of a copy that was begun.
const UNFINISHED: &str = "the copy was not finished: files that were whole are in their places, the rest is not there";

/// Copies.
pub(super) fn copy(remote: &Remote<'_>, args: &CpArgs) -> Result<u8> {
    let left_out = until_signal(|cancel| match (&args.source, &args.destination) {
        (copy::End::Sandbox { name, path }, copy::End::Local(to)) => {
            to_here(remote, (&remote.running(name)?, path), to, (args.archive, cancel))
        }
        (copy::End::Sandbox { name, path }, copy::End::Stream) => to_stream(remote, &remote.running(name)?, path),
        (copy::End::Local(from), copy::End::Sandbox { name, path }) => {
            from_here(remote, from, (&remote.running(name)?, path), (args.archive, cancel))
        }
        (copy::End::Stream, copy::End::Sandbox { name, path }) => {
            from_stream(remote, &remote.running(name)?, path, (args.archive, cancel))
        }
        (copy::End::Sandbox { .. }, copy::End::Sandbox { .. }) => {
            bail!(
                "from sandbox to sandbox cannot be copied over --host: write `basalt cp A:PATH - | basalt cp - B:DIRECTORY`"
            )
        }
        _ => bail!("neither end is in a sandbox: write one of them as SANDBOX:PATH, such as web:/etc"),
    })?;
    if left_out > 0 {
        remote.output.warning(&anyhow::anyhow!(
            "{left_out} devices, pipes, sockets or kernel file systems were left out"
        ));
    }
    // An archive on standard output is the result.
    if args.destination != copy::End::Stream {
        remote
            .output
            .result(&serde_json::json!({ "left_out": left_out }), String::new)?;
    }
    Ok(0)
}

fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is no UTF-8 text, as paths by a gateway are", path.display()))
}

/// What is at a path in a sandbox.
fn there(remote: &Remote<'_>, to: &Access, path: &Path) -> Result<There> {
    Ok(
        match remote.client.stat(to, text(path)?, None)?.map(|entry| entry.kind) {
            None => There::Nothing,
            Some(FileKind::Directory) => There::Directory,
            Some(_) => There::Other,
        },
    )
}

/// A command in the sandbox that is to succeed.
fn tar(remote: &Remote<'_>, to: &Access, argv: &[&str], stdin: bool) -> Result<(Events, u32)> {
    let start = Start {
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        stdin,
        ..Start::default()
    };
    let mut events = remote.client.start(to, &start)?;
    match events.wait() {
        Ok(Event::Started(pid)) => Ok((events, pid)),
        Ok(other) => bail!(
            "{} told {other:?} of a command before its start: is it a gateway?",
            remote.client.server()
        ),
        Err(error) => Err(error).with_context(|| {
            format!(
                "`{}` cannot be run in the sandbox, which trees are copied with",
                argv[0]
            )
        }),
    }
}

/// What a command writes, as a stream. That it has failed is an error at its end.
struct Written {
    events: Events,
    ready: io::Cursor<Vec<u8>>,
    complaint: Vec<u8>,
    is_over: bool,
}

impl Written {
    fn new(events: Events) -> Self {
        Self {
            events,
            ready: io::Cursor::default(),
            complaint: Vec::new(),
            is_over: false,
        }
    }

    /// Waits for more of it.
    fn more(&mut self) -> Result<()> {
        match self.events.wait()? {
            Event::Output(bytes) => self.ready = io::Cursor::new(bytes),
            Event::Error(bytes) => {
                let left = COMPLAINT.saturating_sub(self.complaint.len());
                self.complaint.extend(bytes.into_iter().take(left));
            }
            Event::Started(_) => {}
            Event::Ended(End::Code(0)) => self.is_over = true,
            Event::Ended(how) => {
                let said = String::from_utf8_lossy(&self.complaint);
                let said: String = said
                    .chars()
                    .map(|char| if char.is_control() { ' ' } else { char })
                    .collect();
                bail!("`tar` in the sandbox has failed ({how:?}): {}", said.trim())
            }
        }
        Ok(())
    }
}

impl Read for Written {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let got = self.ready.read(buffer)?;
            if got > 0 || self.is_over || buffer.is_empty() {
                return Ok(got);
            }
            self.more().map_err(|error| io::Error::other(format!("{error:#}")))?;
        }
    }
}

fn to_here(
    remote: &Remote<'_>,
    (from, path): (&Access, &Path),
    to: &Path,
    (archive, cancel): (bool, &Cancel),
) -> Result<u64> {
    let Some(entry) = remote.client.stat(from, text(path)?, None)? else {
        bail!("{} is not there in the sandbox", path.display())
    };
    let is_directory = entry.kind == FileKind::Directory;
    let target = place(&Source::new(path, is_directory), to, there_here(to)?)?;
    match (entry.kind, target) {
        (FileKind::File, Place::Root(file)) => {
            let bytes = remote.client.read_file(from, text(path)?, None)?;
            let mut bytes = Shown::new(bytes, Bar::new(remote.output), "copying", entry.size);
            receive(&mut bytes, &file, entry.mode, cancel).context(UNFINISHED)?;
            Ok(0)
        }
        (FileKind::Directory, target) => {
            let target = match target {
                // Its root has the name that it has there, and is given another here.
                Place::Root(made) => {
                    fs::create_dir(&made).with_context(|| format!("{} cannot be made", made.display()))?;
                    made
                }
                Place::Into(there) => there,
            };
            let (events, _) = tar(remote, from, &["tar", "-c", "-f", "-", "-C", text(path)?, "."], false)?;
            let mut bytes = Shown::new(Written::new(events), Bar::new(remote.output), "copying", 0);
            let owner = if archive { Owner::Kept } else { Owner::Mine };
            let unpacked = archive::unpack(&mut bytes, &Target::Below(target), owner, &|| cancel.is_cancelled())
                .context(UNFINISHED)?;
            // What follows the archive's end, which says whether all of it was packed.
            io::copy(&mut bytes, &mut io::sink()).context(UNFINISHED)?;
            Ok(unpacked.left_out)
        }
        _ => bail!(
            "{} is neither a file nor a directory, and cannot be copied",
            path.display()
        ),
    }
}

/// A file here, in place of one that was there: whole, or not at all.
fn receive(from: &mut impl Read, to: &Path, mode: u32, cancel: &Cancel) -> Result<()> {
    let name = to
        .file_name()
        .with_context(|| format!("{} names no file", to.display()))?;
    let mut beside = name.to_owned();
    beside.push(format!(".basalt-{}", std::process::id()));
    let partial = to.with_file_name(beside);
    let made = File::options().write(true).create_new(true).mode(0o600).open(&partial);
    let mut file = made.with_context(|| format!("{} cannot be written", partial.display()))?;
    let written = pass(from, &mut file, cancel)
        .and_then(|()| Ok(file.set_permissions(Permissions::from_mode(mode & 0o777))?))
        .and_then(|()| fs::rename(&partial, to).with_context(|| format!("{} cannot be replaced", to.display())));
    if written.is_err() {
        // What could not be written is of no use; that it stays is the lesser trouble.
        drop(fs::remove_file(&partial));
    }
    written
}

fn pass(from: &mut impl Read, to: &mut impl Write, cancel: &Cancel) -> Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        if cancel.is_cancelled() {
            bail!("it was interrupted");
        }
        match from.read(&mut buffer).context("reading")? {
            0 => return Ok(to.flush()?),
            got => to.write_all(buffer.get(..got).unwrap_or_default()).context("writing")?,
        }
    }
}

fn to_stream(remote: &Remote<'_>, from: &Access, path: &Path) -> Result<u64> {
    let mut out = io::stdout().lock();
    if out.is_terminal() {
        bail!("an archive is not written to a terminal: redirect it, as in `basalt cp web:/etc - | tar t`");
    }
    let (directory, name) = match (path.parent(), path.file_name()) {
        (Some(directory), Some(name)) => (text(directory)?, text(Path::new(name))?),
        _ => (text(path)?, "."),
    };
    let (events, _) = tar(
        remote,
        from,
        &["tar", "-c", "-f", "-", "-C", directory, "--", name],
        false,
    )?;
    match io::copy(&mut Written::new(events), &mut out).and_then(|_| out.flush()) {
        // Whoever reads it has seen enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        other => other.map(|()| 0).context("the archive cannot be passed on"),
    }
}

fn from_here(
    remote: &Remote<'_>,
    from: &Path,
    (to, path): (&Access, &Path),
    (archive, cancel): (bool, &Cancel),
) -> Result<u64> {
    let measured = archive::measure(from)?;
    let target = place(&Source::new(from, measured.directory), path, there(remote, to, path)?)?;
    let found = fs::symlink_metadata(from).with_context(|| format!("{} cannot be looked at", from.display()))?;
    if found.is_file()
        && let Place::Root(file) = &target
    {
        let bytes = File::open(from).with_context(|| format!("{} cannot be read", from.display()))?;
        let bytes = Cancelled(
            Shown::new(bytes, Bar::new(remote.output), "copying", found.len()),
            cancel,
        );
        remote.client.write_file(to, text(file)?, None, bytes)?;
        let mode = found.mode() & if archive { 0o7777 } else { 0o777 };
        if mode != USUAL {
            let argv = ["chmod", &format!("{mode:o}"), "--", text(file)?];
            finish(Written::new(tar(remote, to, &argv, false)?.0))?;
        }
        return Ok(0);
    }
    let (directory, name) = match &target {
        Place::Into(directory) => (directory.clone(), PathBuf::from(".")),
        Place::Root(root) => match (root.parent(), root.file_name()) {
            (Some(parent), Some(name)) => (parent.to_owned(), name.into()),
            _ => bail!("{} cannot be replaced", root.display()),
        },
    };
    let (send, pieces) = sync_channel(WAITING);
    let bar = Bar::new(remote.output);
    thread::scope(|scope| {
        let packing = scope.spawn(move || {
            archive::pack(
                from,
                name.as_os_str(),
                Shown::new(Pieces(send), bar, "copying", measured.bytes),
            )
        });
        let fed = feed_tar(remote, to, &directory, archive, pieces, cancel);
        let packed = packing.join().map_err(|_| anyhow::anyhow!("packing has failed"))?;
        // Why `tar` has gone is the better reason where both have failed.
        fed?;
        Ok(packed?.left_out)
    })
}

fn from_stream(remote: &Remote<'_>, to: &Access, path: &Path, (archive, cancel): (bool, &Cancel)) -> Result<u64> {
    if there(remote, to, path)? != There::Directory {
        bail!(
            "{} is no directory of the sandbox: an archive is unpacked into one that is there",
            path.display()
        );
    }
    if io::stdin().is_terminal() {
        bail!(
            "an archive is read from standard input, which is this terminal: send one, as in `tar c . | basalt cp - web:/srv`"
        );
    }
    let (send, pieces) = sync_channel(WAITING);
    thread::spawn(move || io::copy(&mut io::stdin().lock(), &mut Pieces(send)));
    feed_tar(remote, to, path, archive, pieces, cancel)?;
    Ok(0)
}

/// A reader that fails once a signal has come.
struct Cancelled<'c, R>(R, &'c Cancel);

impl<R: Read> Read for Cancelled<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.1.is_cancelled() {
            true => Err(io::Error::other("it was interrupted")),
            false => self.0.read(buffer),
        }
    }
}

/// A writer whose bytes are another thread's input.
struct Pieces(SyncSender<Vec<u8>>);

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let bytes = bytes.get(..bytes.len().min(CHUNK)).unwrap_or_default();
        let sent = self.0.send(bytes.to_vec());
        sent.map(|()| bytes.len()).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Has a `tar` in the sandbox unpack what comes.
fn feed_tar(
    remote: &Remote<'_>,
    to: &Access,
    directory: &Path,
    archive: bool,
    pieces: Receiver<Vec<u8>>,
    cancel: &Cancel,
) -> Result<()> {
    // Without a user that is root's choice, tar keeps owners; `-o` gives all to whoever unpacks.
    let owner = if archive { "-p" } else { "-o" };
    let (events, pid) = tar(
        remote,
        to,
        &["tar", "-x", owner, "-f", "-", "-C", text(directory)?],
        true,
    )?;
    let mut next = || {
        let began = Instant::now();
        loop {
            match pieces.recv_timeout(LOOK) {
                _ if cancel.is_cancelled() => return Err(io::Error::other("it was interrupted")),
                Ok(bytes) => return Ok(Piece::Bytes(bytes)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Piece::End),
                Err(RecvTimeoutError::Timeout) if began.elapsed() >= QUIET => return Ok(Piece::Quiet),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    };
    let fed = remote.client.feed(to, pid, false, &mut next);
    let closed = remote.client.close_input(to, pid);
    finish(Written::new(events)).context(UNFINISHED)?;
    // It has read all that it wanted, and may have ended before it was told that there is no more.
    if let Err(error) = closed {
        log::info!("the end of the archive was not told: {error}");
    }
    match fed {
        Err(error @ gateway_client::Error::Local(_)) => Err(error).context(UNFINISHED),
        _ => Ok(()),
    }
}

/// Waits for a command's end, which is to be a success.
fn finish(mut written: Written) -> Result<()> {
    io::copy(&mut written, &mut io::sink())
        .map(drop)
        .map_err(|error| anyhow::anyhow!("{error}"))
}
