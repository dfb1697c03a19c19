//! The two ends of the way of a snapshot or a template: the daemon of this host, with open files, or this program in the lab, with an export on its
//! standard input or output. Does not know where the other end is.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use export::{Entry, Reader, Writer};
use node_api::transfer::{Kind, MOST_RECORD};
use node_api::{Client, LoadStep, LoadedTemplate, Reply, Request, Secrets as _, Snapshot};

use super::{Ground, RECORD, Side};
use crate::cli::Wish;
use crate::images::short_digest;
use crate::lab::{Far, Reached};
use crate::output::Output;
use crate::{daemon, images};

/// What one that is there is read from.
pub(super) enum Origin {
    /// Its files but for the record.
    Here(Vec<(String, File)>),
    /// An export whose record has been read.
    Lab(Box<Reader<UnixStream>>, Far),
}

/// One of its files: open, or about to come.
pub(super) enum Piece<'p> {
    File(&'p str, &'p File),
    Member(&'p Entry, &'p mut Reader<UnixStream>),
}

impl Origin {
    /// Opens one by its name, and reads its record.
    pub(super) fn open(ground: Ground<'_>, name: &str) -> Result<(Self, Vec<u8>)> {
        match ground.side {
            Side::Here => Self::here(ground.kind, name),
            Side::Lab(lab) => Self::in_lab(lab, name, ground),
        }
    }

    fn here(kind: Kind, name: &str) -> Result<(Self, Vec<u8>)> {
        let name = name.to_owned();
        let (names, fds) = match daemon::connect()?.ask(Request::OpenFiles { kind, name })? {
            (Reply::Files(names), fds) if names.len() == fds.len() => (names, fds),
            (other, _) => return Err(strange(&other)),
        };
        let (mut record, mut files) = (None, Vec::new());
        for (name, fd) in names.into_iter().zip(fds) {
            let file = File::from(fd);
            if name == RECORD {
                let mut text = Vec::new();
                file.take(MOST_RECORD)
                    .read_to_end(&mut text)
                    .context("its record cannot be read")?;
                record = Some(text);
            } else {
                files.push((name, file));
            }
        }
        Ok((Self::Here(files), record.context("it has no record")?))
    }

    fn in_lab(lab: &Reached, name: &str, ground: Ground<'_>) -> Result<(Self, Vec<u8>)> {
        let kind = ground.kind.word();
        let words = [kind, "save", "--without-image", "--", name];
        let far = start(lab, &words, ground.output)?;
        let stream = far.stream.try_clone().context("a stream to the lab")?;
        // It reads nothing.
        stream.shutdown(Shutdown::Write)?;
        let begun = || -> Result<_> {
            let mut reader = Reader::new(stream, kind)?;
            reader.next_entry()?;
            let record = reader.contents(MOST_RECORD)?;
            Ok((reader, record))
        };
        match begun() {
            Ok((reader, record)) => Ok((Self::Lab(Box::new(reader), far), record)),
            Err(error) => {
                // It knows better why there is nothing to read.
                far.end()?;
                Err(error)
            }
        }
    }

    /// Bytes that will come, as far as that is known.
    pub(super) fn bytes(&self) -> Result<u64> {
        let Self::Here(files) = self else { return Ok(0) };
        let bytes = files.iter().map(|(_, file)| export::data_bytes(file));
        Ok(bytes.sum::<std::io::Result<u64>>()?)
    }

    /// Everything but the record.
    pub(super) fn rest(self, each: &mut dyn FnMut(Piece<'_>) -> Result<()>) -> Result<()> {
        match self {
            Self::Here(files) => files.iter().try_for_each(|(name, file)| each(Piece::File(name, file))),
            Self::Lab(mut reader, far) => {
                while let Some(entry) = reader.next_entry()? {
                    each(Piece::Member(&entry, &mut reader))?;
                }
                far.end()
            }
        }
    }
}

/// What one that comes is written to. Dropped before it is kept, nothing of it stays.
pub(super) struct Goal<'s> {
    side: Open<'s>,
    output: &'s Output,
}

enum Open<'s> {
    Here(Client),
    Lab(Box<Writer<UnixStream>>, Option<Far>, &'s Reached),
}

/// One that is kept.
pub(super) enum Kept {
    Snapshot(Box<Snapshot>),
    Template(Box<LoadedTemplate>),
    /// What was said of it there.
    Lab(String),
}

impl<'s> Goal<'s> {
    /// Makes a place for one with this record.
    pub(super) fn begin(ground: Ground<'s>, wish: Wish<'_>, record: &[u8]) -> Result<Self> {
        let Ground { kind, side, output } = ground;
        let side = match side {
            Side::Here => {
                let mut client = daemon::connect()?;
                let name = wish.name.map(str::to_owned);
                let force = wish.force;
                client.ask(Request::Load(LoadStep::Begin { kind, name, force }))?;
                let written = file(&mut client, RECORD)?.write_all(record);
                written.context("its record cannot be written")?;
                Open::Here(client)
            }
            Side::Lab(lab) => {
                let name = wish.name.map(|name| format!("--name={name}"));
                let force = wish.force.then_some("--force");
                let words = [kind.word(), "load"].into_iter().chain(name.as_deref()).chain(force);
                let far = start(lab, &words.collect::<Vec<_>>(), output)?;
                let stream = far.stream.try_clone().context("a stream to the lab")?;
                let begun = Writer::new(stream, kind.word()).and_then(|mut writer| {
                    writer.bytes(RECORD, record)?;
                    Ok(writer)
                });
                let mut far = Some(far);
                Open::Lab(Box::new(begun.or_else(|error| blamed(error, &mut far))?), far, lab)
            }
        };
        Ok(Self { side, output })
    }

    /// Takes the file that comes next, which can have `most` bytes.
    pub(super) fn take<R: Read>(&mut self, reader: &mut Reader<R>, entry: &Entry, most: u64) -> Result<()> {
        match &mut self.side {
            Open::Here(client) => reader.extract(&file(client, &entry.name)?, most)?,
            // As the daemon there would say later.
            Open::Lab(..) if entry.size > most => {
                bail!("{} has {} bytes where {most} are the most", entry.name, entry.size);
            }
            Open::Lab(writer, far, _) => reader.pass_to(writer).or_else(|error| blamed(error, far))?,
        }
        Ok(())
    }

    /// All of it has come and was right. `image` is its image's digest, if that is here.
    pub(super) fn keep(self, image: Option<&str>) -> Result<Kept> {
        match self.side {
            Open::Here(mut client) => match client.ask(Request::Load(LoadStep::Keep))? {
                (Reply::Snapshot(snapshot), _) => Ok(Kept::Snapshot(snapshot)),
                (Reply::LoadedTemplate(loaded), _) => Ok(Kept::Template(loaded)),
                (other, _) => Err(strange(&other)),
            },
            Open::Lab(writer, far, lab) => {
                if let Some(digest) = image {
                    lab.send_image(&images::open(digest)?, self.output)?;
                }
                let mut far = far.context("basalt in the lab has ended")?;
                let mut told = String::new();
                let said = writer.finish().map_err(anyhow::Error::from).and_then(|stream| {
                    stream.shutdown(Shutdown::Write)?;
                    Ok(far.stream.read_to_string(&mut told)?)
                });
                // What it says itself is the better reason.
                far.end()?;
                said?;
                Ok(Kept::Lab(told))
            }
        }
    }
}

/// What is wrong with a stream to the lab is better told by whoever does not read it any more.
fn blamed<T>(error: export::Error, far: &mut Option<Far>) -> Result<T> {
    if let (export::Error::Stream(_), Some(far)) = (&error, far.take()) {
        far.end()?;
    }
    Err(error.into())
}

impl Kept {
    pub(super) fn show(&self, output: &Output) -> Result<()> {
        match self {
            Self::Snapshot(snapshot) => output.result(&snapshot.clone().redacted(), || format!("{}\n", snapshot.name)),
            Self::Template(loaded) => {
                names_of(loaded).iter().for_each(|line| output.note(line));
                // As a build does.
                output.result(&loaded.clone().redacted(), || format!("{}\n", loaded.template.id))
            }
            Self::Lab(told) => {
                std::io::stdout().write_all(told.as_bytes())?;
                Ok(())
            }
        }
    }
}

/// What it is called, and who is not called so any more.
fn names_of(loaded: &LoadedTemplate) -> Vec<String> {
    let LoadedTemplate { template, taken } = loaded;
    let short = short_digest(&template.id);
    let called = match template.names.is_empty() {
        true => format!("the template {short} has no name"),
        false => format!("the template {short} is called {}", template.names.join(", ")),
    };
    let lost = taken.iter().map(|taken| {
        let (name, from) = (&taken.name, short_digest(&taken.from));
        let rest = if taken.gone { "and is gone" } else { "and has others" };
        format!("the template {from} was called {name} until now, {rest}")
    });
    std::iter::once(called).chain(lost).collect()
}

/// An empty file of what is being loaded.
fn file(client: &mut Client, name: &str) -> Result<File> {
    let name = name.to_owned();
    match client.ask(Request::Load(LoadStep::File { name }))? {
        (Reply::Done, fds) => {
            let fd = fds.into_iter().next().context("the daemon has sent no file")?;
            Ok(fd.into())
        }
        (other, _) => Err(strange(&other)),
    }
}

fn start(lab: &Reached, words: &[&str], output: &Output) -> Result<Far> {
    let json = output.json().then_some("--json");
    lab.start(&json.into_iter().chain(words.iter().copied()).collect::<Vec<_>>())
}

fn strange(reply: &Reply) -> anyhow::Error {
    anyhow::anyhow!("the daemon answered {reply:?}: use basalt and basaltd of one build")
}
