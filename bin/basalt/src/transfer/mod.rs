//! Snapshots and templates that leave a node and come to one: `save` and `load` by a file or a pipe, `push` and `pull` ([`remote`])
//! by a registry. Packing and unpacking is done here, with files that the daemon has opened; of what comes in it keeps nothing that
//! it has not looked at, and nothing at all if this program ends before.
//!
//! Knows no layout: that is crate `export`'s. docs/snapshot-file.md says what is in the files.

mod ends;
mod input;
mod remote;

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use export::{Reader, Writer};
use image::{Export, Image, Phase, Store};
use node_api::transfer::{Kind, MOST_RECORD, Transferred};
use serde::Serialize;

use crate::bar::{Bar, Shown};
use crate::cli::{Errand, LoadFrom, SaveTo, Way, Wish};
use crate::interrupt::until_signal;
use crate::lab::Reached;
use crate::output::Output;
use crate::{images, outlet};
use ends::{Goal, Kept, Origin, Piece};
use input::Watched;

/// The member that says what it all is.
const RECORD: &str = "record.json";

/// The member that is the image, an archive as `basalt save` writes it.
const IMAGE: &str = "image.tar";

/// The largest image that is taken from anybody.
const MOST_IMAGE: u64 = 64 << 30;

/// Where the daemon is.
#[derive(Debug)]
enum Side {
    Here,
    Lab(Reached),
}

/// On this host's daemon.
pub(crate) fn here(errand: Errand<'_>, output: &Output) -> Result<u8> {
    carry_out(errand, &Side::Here, output)
}

/// On the lab's; files, registries and images are this side's.
pub(crate) fn in_lab(errand: Errand<'_>, output: &Output) -> Result<u8> {
    let comes = matches!(errand.way, Way::Load(..) | Way::Pull(..));
    let lab = if comes {
        Reached::bring_up(output)
    } else {
        Reached::up()
    };
    carry_out(errand, &Side::Lab(lab?), output)
}

fn carry_out(Errand { kind, way }: Errand<'_>, side: &Side, output: &Output) -> Result<u8> {
    let ground = Ground { kind, side, output };
    match way {
        Way::Save(name, to) => save(name, to, ground),
        Way::Load(wish, from) => load(wish, from, ground),
        Way::Push(name, to) => remote::push(name, to, ground),
        Way::Pull(wish, from) => remote::pull(wish, from, ground),
    }
}

/// What all steps of an errand have in common.
#[derive(Clone, Copy)]
struct Ground<'g> {
    kind: Kind,
    side: &'g Side,
    output: &'g Output,
}

/// One that has been saved, for machines.
#[derive(Debug, Serialize)]
struct Saved<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    template: Option<&'a str>,
    file: &'a Path,
    bytes: u64,
}

/// `save`.
fn save(name: &str, to: &SaveTo, ground: Ground<'_>) -> Result<u8> {
    let Ground { kind, output, .. } = ground;
    let words = format!("basalt {kind} save {name}");
    let bytes = outlet::write(to.output.as_deref(), &words, |out, _| {
        let (origin, record) = Origin::open(ground, name)?;
        let export = match to.without_image {
            true => None,
            false => Some(export(&told_of(kind, &record)?)?),
        };
        let written = pack(out, (origin, &record), export.as_ref(), ground);
        written.map_err(|error| flat(error, &format!("{kind} {name} cannot be saved")))
    })?;
    let file = to.output.as_deref().filter(|path| *path != Path::new("-"));
    if let (Some(file), true) = (file, output.json()) {
        let of = |wanted| (kind == wanted).then_some(name);
        let saved = Saved {
            snapshot: of(Kind::Snapshot),
            template: of(Kind::Template),
            file,
            bytes,
        };
        output.result(&saved, String::new)?;
    }
    Ok(0)
}

/// As one sentence: a broken pipe somewhere in its causes would be taken for a reader of our output who has left.
fn flat(error: anyhow::Error, what: &str) -> anyhow::Error {
    if error
        .downcast_ref::<export::Error>()
        .is_some_and(export::Error::is_disk_full)
    {
        return anyhow!(
            "{what}: {error}; nothing of it stays, make room for it first (`basalt system df` shows what takes it)"
        );
    }
    anyhow!("{what}: {error:#}")
}

fn told_of(kind: Kind, record: &[u8]) -> Result<Transferred> {
    Transferred::of_record(kind, record).context("its record cannot be used: use the version of Basalt that wrote it")
}

/// All that makes its image.
fn export(told: &Transferred) -> Result<Export> {
    let exported = images::store()?.export(told.digest());
    exported.with_context(|| {
        format!(
            "its image {} cannot be put in (`--without-image` leaves it out)",
            named(told)
        )
    })
}

/// Its image, as people know it.
fn named(told: &Transferred) -> String {
    let (image, digest) = (told.image(), told.digest());
    match image.contains(digest) {
        true => image,
        false => format!("{image} (sha256:{digest})"),
    }
}

fn pack(
    out: &mut dyn Write,
    (origin, record): (Origin, &[u8]),
    export: Option<&Export>,
    ground: Ground<'_>,
) -> Result<()> {
    let total = origin.bytes()? + export.map_or(0, Export::archive_bytes);
    let (mut bar, mut done) = (Bar::new(ground.output), 0);
    let mut moved = |bytes| {
        done += bytes;
        bar.show("saving", done, total);
    };
    let mut writer = Writer::new(out, ground.kind.word())?;
    writer.bytes(RECORD, record)?;
    origin.rest(&mut |piece| match piece {
        Piece::File(name, file) => Ok(writer.file(name, file, &mut moved)?),
        Piece::Member(entry, reader) => {
            reader.pass_to(&mut writer)?;
            moved(entry.packed);
            Ok(())
        }
    })?;
    if let Some(export) = export {
        writer.stream(IMAGE, export.archive_bytes(), |out| export.write_archive(out))?;
    }
    writer.finish()?;
    Ok(())
}

/// `load`.
fn load(wish: Wish<'_>, from: &LoadFrom, ground: Ground<'_>) -> Result<u8> {
    let Ground { kind, output, .. } = ground;
    let path = from.input.as_deref().filter(|path| *path != Path::new("-"));
    let from = path.map_or_else(|| PathBuf::from("standard input"), Path::to_owned);
    let loaded = until_signal(|cancel| {
        let (input, length) = match path {
            Some(path) => {
                let file = File::open(path).with_context(|| format!("{} cannot be read", path.display()))?;
                let length = file.metadata()?.len();
                (Watched::new(file.into(), cancel), length)
            }
            None if io::stdin().is_terminal() => {
                bail!("a {kind} does not come from a terminal: name a file with -i, or send one here")
            }
            None => (Watched::of_stdin(cancel)?, 0),
        };
        let mut input = Shown::new(input, Bar::new(output), "loading", length);
        let unpacked = unpack(&mut input, wish, ground);
        unpacked.map_err(|error| flat(error, &format!("{} cannot be loaded", from.display())))
    })?;
    loaded.show(output)
}

/// One that has come, and whether its image is here.
struct Loaded {
    kept: Kept,
    told: Transferred,
    image: bool,
}

impl Loaded {
    fn show(&self, output: &Output) -> Result<u8> {
        if !self.image {
            output.warning(&anyhow!(
                "its image {} is not here: `basalt pull` or `basalt import` it before the first clone",
                named(&self.told)
            ));
        }
        self.kept.show(output)?;
        Ok(0)
    }
}

fn unpack(input: impl Read, wish: Wish<'_>, ground: Ground<'_>) -> Result<Loaded> {
    let kind = ground.kind;
    let mut reader = Reader::new(input, kind.word())?;
    if reader.next_entry()?.is_none_or(|entry| entry.name != RECORD) {
        bail!("it does not begin with a record: it was not written by `basalt {kind} save`");
    }
    let record = reader.contents(MOST_RECORD)?;
    let told = told_of(kind, &record)?;
    let mut coming = Coming::new(&told, ground.output)?;
    let mut goal = Goal::begin(ground, wish, &record)?;
    while let Some(entry) = reader.next_entry()? {
        match told.most_bytes(&entry.name) {
            _ if entry.name == IMAGE => coming.take(&mut reader)?,
            Some(most) if entry.name != RECORD => goal.take(&mut reader, &entry, most)?,
            _ => bail!(
                "{} is no file that this {kind} can have: it was not written by Basalt",
                entry.name
            ),
        }
    }
    keep(goal, told, coming)
}

/// Everything has come and is right: the image first, as nothing is of use without one.
fn keep(goal: Goal<'_>, told: Transferred, coming: Coming<'_>) -> Result<Loaded> {
    let brought = coming.bring()?;
    let image = brought.is_there();
    let kept = goal.keep(image.then_some(told.digest()));
    if kept.is_err()
        && let Err(error) = brought.undo()
    {
        log::info!("the image that came along stays: {error:#}");
    }
    Ok(Loaded {
        kept: kept?,
        told,
        image,
    })
}

/// The image of what comes.
struct Coming<'o> {
    store: Store,
    digest: String,
    known: bool,
    archive: Option<File>,
    output: &'o Output,
}

/// The image once it is all there.
struct Brought {
    store: Store,
    image: Option<Image>,
    /// It was not here before.
    new: bool,
}

impl<'o> Coming<'o> {
    fn new(told: &Transferred, output: &'o Output) -> Result<Self> {
        let digest = told.digest();
        // What is asked for below is a digest and never the beginning of one, nor a name.
        if digest.len() != 64 || !digest.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            bail!("its record names no image by a digest: it was not written by Basalt");
        }
        let store = images::store()?;
        let known = store.get(digest).is_ok();
        Ok(Self {
            digest: digest.to_owned(),
            archive: None,
            known,
            store,
            output,
        })
    }

    /// Keeps the archive until all the rest has come, unless its image is here.
    fn take<R: Read>(&mut self, reader: &mut Reader<R>) -> Result<()> {
        if !self.known {
            let mut file = images::nameless()?;
            reader.copy(&mut file, MOST_IMAGE)?;
            self.archive = Some(file);
        }
        Ok(())
    }

    fn bring(self) -> Result<Brought> {
        let image = match self.archive {
            Some(archive) => {
                let mut bar = Bar::new(self.output);
                let brought = self.store.bring(archive, &self.digest, &mut |progress| {
                    let phase = match progress.phase {
                        Phase::Reading => "reading its image",
                        Phase::Writing => "writing its image",
                    };
                    bar.show(phase, progress.done, progress.total);
                });
                Some(brought?)
            }
            None => self.store.get(&self.digest).ok(),
        };
        Ok(Brought {
            store: self.store,
            image,
            new: !self.known,
        })
    }
}

impl Brought {
    fn is_there(&self) -> bool {
        self.image.is_some()
    }

    /// What it came with is refused: it goes, too, unless somebody has a use for it by now. A daemon that died on the way may have kept
    /// what came all the same.
    fn undo(self) -> Result<()> {
        if let (Some(image), true) = (self.image, self.new) {
            let in_use = images::Known::ask()?.digests();
            // Somebody may have given it a name meanwhile.
            let now = self.store.get(&image.digest)?;
            if now.names.is_empty() && !in_use.contains(&image.digest) {
                self.store.remove_unless(&image.digest, &in_use)?;
            }
        }
        Ok(())
    }
}
