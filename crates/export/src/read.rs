//! A stream becomes members again, one after the other. What one says of itself is not believed: sizes are for the caller to
//! allow, sums are compared with what came.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Chain, Cursor, Read, Write};
use std::os::unix::fs::FileExt;

use sha2::{Digest as _, Sha256};
use zstd::stream::read::Decoder;

use crate::head::{self, Described};
use crate::sparse::{self, Part};
use crate::write::{self, Writer};
use crate::{CHUNK, Error, FORMAT, HEAD, Head, KINDS, MOST_MEMBERS, MOST_TEXT, SUMS, Sum, Sums};

/// The largest window that is made room for, as a power of two: what is written needs 2 MiB.
const WINDOW_LOG: u32 = 23;

/// What is left a hole if it is zero; a file system's block.
const BLOCK: usize = 4096;

/// A member that has come up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name: letters, digits, `.` and `-`.
    pub name: String,
    /// The size of the file that it is.
    pub size: u64,
    /// Bytes of it in the archive.
    pub packed: u64,
}

/// An export on its way in.
pub struct Reader<R: Read> {
    input: Input<R>,
    kind: String,
    /// A blob has neither head nor sums.
    blob: bool,
    now: Option<Member>,
    came: Sums,
    over: bool,
}

type Input<R> = BufReader<Decoder<'static, BufReader<Chain<Cursor<Vec<u8>>, R>>>>;

/// What zstd's frames begin with (RFC 8878, 3.1.1).
const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// The member whose content comes next.
struct Member {
    described: Described,
    hash: Sha256,
    left: u64,
}

impl<R: Read> Reader<R> {
    /// Reads the head of an export of this kind.
    ///
    /// # Errors
    /// It is none, or of another kind or version.
    pub fn new(input: R, kind: &str) -> Result<Self, Error> {
        let mut reader = Self::open(input, kind, false)?;
        let foreign = || Error::Foreign { kind: kind.to_owned() };
        reader.input.fill_buf().map_err(Error::decoding)?;
        // What is decoded well and does not begin as an export does is something else.
        let head = match reader.advance() {
            Err(Error::Damaged(_)) | Ok(None) => return Err(foreign()),
            other => other?,
        };
        if head.as_ref().is_none_or(|entry| entry.name != HEAD) {
            return Err(foreign());
        }
        let bytes = reader.contents(MOST_TEXT)?;
        let head: Head = serde_json::from_slice(&bytes).map_err(|_| foreign())?;
        if head.kind != kind {
            // Only a word of ours is repeated.
            return Err(match KINDS.into_iter().find(|known| *known == head.kind) {
                Some(found) => Error::OtherKind {
                    wanted: kind.to_owned(),
                    found,
                },
                None => foreign(),
            });
        }
        if head.format != FORMAT {
            return Err(Error::Format { found: head.format });
        }
        Ok(reader)
    }

    /// Reads a blob, which has one member and is checked by whoever has it.
    ///
    /// # Errors
    /// There is no room for a decoder.
    pub fn of_blob(input: R, kind: &str) -> Result<Self, Error> {
        Self::open(input, kind, true)
    }

    fn open(mut input: R, kind: &str, blob: bool) -> Result<Self, Error> {
        let mut first = Vec::new();
        let read = (&mut input).take(MAGIC.len() as u64).read_to_end(&mut first);
        read.map_err(Error::Stream)?;
        if !MAGIC.starts_with(&first) {
            return Err(Error::Foreign { kind: kind.to_owned() });
        }
        let whole = BufReader::with_capacity(CHUNK, Cursor::new(first).chain(input));
        let mut decoder = Decoder::with_buffer(whole).map_err(Error::decoding)?;
        decoder.window_log_max(WINDOW_LOG).map_err(Error::decoding)?;
        Ok(Self {
            input: BufReader::with_capacity(CHUNK, decoder),
            kind: kind.to_owned(),
            blob,
            now: None,
            came: Sums::default(),
            over: false,
        })
    }

    /// The next member; `None` once all of it has come and is right. What is left of the one before is passed over.
    ///
    /// # Errors
    /// It ends too early, or is not what was written.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, Error> {
        if self.over {
            return Ok(None);
        }
        let entry = self.advance()?;
        match entry {
            Some(entry) if entry.name == SUMS && !self.blob => {
                let bytes = self.contents(MOST_TEXT)?;
                let sums: Sums = serde_json::from_slice(&bytes).map_err(|_| Error::damaged("its sums are none"))?;
                if let Some(wrong) = differs(&sums, &self.came) {
                    return Err(Error::Damaged(format!("{wrong} is not what was saved")));
                }
                match self.advance()? {
                    None => self.end(),
                    Some(_) => Err(Error::damaged("something comes after its end")),
                }
            }
            Some(entry) if entry.name == HEAD && !self.came.members.is_empty() => {
                Err(Error::damaged("it begins twice"))
            }
            Some(entry) => Ok(Some(entry)),
            None if self.blob => self.end(),
            None => Err(Error::Truncated),
        }
    }

    /// Finishes the member before, and reads the next one's header.
    fn advance(&mut self) -> Result<Option<Entry>, Error> {
        self.finish_member()?;
        let Some(described) = head::read(&mut self.input)? else {
            return Ok(None);
        };
        if self.came.members.len() > MOST_MEMBERS || self.came.members.iter().any(|sum| sum.name == described.name) {
            return Err(Error::Damaged(format!(
                "{} is there twice, or too much is",
                described.name
            )));
        }
        let entry = Entry {
            name: described.name.clone(),
            size: described.sparse.unwrap_or(described.packed),
            packed: described.packed,
        };
        self.now = Some(Member {
            left: described.packed,
            hash: Sha256::new(),
            described,
        });
        Ok(Some(entry))
    }

    fn finish_member(&mut self) -> Result<(), Error> {
        let Some(member) = &self.now else { return Ok(()) };
        if member.left > 0 {
            write::pass(&mut self.content(), &mut io::sink()).map_err(Error::decoding)?;
        }
        if let Some(member) = self.now.take() {
            head::skip_padding(&mut self.input, member.described.packed)?;
            self.came.members.push(Sum {
                name: member.described.name,
                bytes: member.described.packed,
                sha256: hex::encode(member.hash.finalize()),
            });
        }
        Ok(())
    }

    /// After the archive's end, of which one block has been read, nothing may come; and what checks zstd's frame comes last.
    fn end(&mut self) -> Result<Option<Entry>, Error> {
        let mut rest = Vec::new();
        let limit = head::BLOCK as u64 + 1;
        let read = (&mut self.input).take(limit).read_to_end(&mut rest);
        read.map_err(Error::decoding)?;
        if rest.len() != head::BLOCK || rest.iter().any(|&byte| byte != 0) {
            return Err(match rest.len() < head::BLOCK {
                true => Error::Truncated,
                false => Error::damaged("something comes after its end"),
            });
        }
        self.over = true;
        Ok(None)
    }

    fn content(&mut self) -> Content<'_, R> {
        Content { reader: self }
    }

    fn described(&self) -> Result<Described, Error> {
        let member = self.now.as_ref();
        let described = member.map(|member| member.described.clone());
        described.ok_or_else(|| Error::damaged("a member is missing"))
    }

    /// All of a small member, which is at most `most` bytes long.
    ///
    /// # Errors
    /// It is longer, or broken.
    pub fn contents(&mut self, most: u64) -> Result<Vec<u8>, Error> {
        let described = self.described()?;
        if described.sparse.is_some() {
            return Err(Error::Damaged(format!("{} has holes", described.name)));
        }
        check(&described.name, described.packed, most)?;
        let mut bytes = Vec::new();
        let read = self.content().read_to_end(&mut bytes);
        read.map_err(Error::decoding)?;
        Ok(bytes)
    }

    /// Writes the member to an empty file, which may become `most` bytes long. What is zero stays a hole.
    ///
    /// # Errors
    /// It is longer, or broken, or the file cannot be written.
    pub fn extract(&mut self, file: &File, most: u64) -> Result<(), Error> {
        let described = self.described()?;
        let size = described.sparse.unwrap_or(described.packed);
        check(&described.name, size, most)?;
        let parts = match described.sparse {
            Some(size) => sparse::read_map(&mut self.content(), size, described.packed)?.0,
            None => vec![Part {
                offset: 0,
                length: size,
            }],
        };
        let failed = || Error::file("writing", &described.name);
        // First, so that no write makes it longer: file systems take more room in advance then.
        file.set_len(size).map_err(failed())?;
        let mut buffer = vec![0; CHUNK];
        for part in parts {
            let (mut at, mut left) = (part.offset, part.length);
            while left > 0 {
                let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
                let space = buffer.get_mut(..most).unwrap_or_default();
                self.content().read_exact(space).map_err(Error::decoding)?;
                for block in space.chunks(BLOCK) {
                    if block.iter().any(|&byte| byte != 0) {
                        file.write_all_at(block, at).map_err(failed())?;
                    }
                    at += block.len() as u64;
                }
                left -= most as u64;
            }
        }
        Ok(())
    }

    /// Writes a member of bytes to `out`.
    ///
    /// # Errors
    /// It is longer than `most`, or broken, or `out` does not take it.
    pub fn copy(&mut self, out: &mut dyn Write, most: u64) -> Result<(), Error> {
        let described = self.described()?;
        if described.sparse.is_some() {
            return Err(Error::Damaged(format!("{} has holes", described.name)));
        }
        check(&described.name, described.packed, most)?;
        let mut buffer = vec![0; CHUNK];
        loop {
            match self.content().read(&mut buffer).map_err(Error::decoding)? {
                0 => return Ok(()),
                got => {
                    let bytes = buffer.get(..got).unwrap_or_default();
                    out.write_all(bytes).map_err(Error::file("writing", &described.name))?;
                }
            }
        }
    }

    /// Writes the member to another export as it is.
    ///
    /// # Errors
    /// It is broken, or the other one does not take it.
    pub fn pass_to<W: Write>(&mut self, writer: &mut Writer<W>) -> Result<(), Error> {
        let described = self.described()?;
        let mut content = self.content();
        let passed = writer.member(&described, |out| write::pass(&mut content, out));
        passed.map_err(Error::passing)
    }

    /// Writes the member to a blob as it is.
    ///
    /// # Errors
    /// It is broken, or `out` does not take it.
    pub fn pass_to_blob<W: Write>(&mut self, out: W) -> Result<W, Error> {
        let described = self.described()?;
        let mut content = self.content();
        let passed = write::write_blob_of(out, &described, |out| write::pass(&mut content, out));
        passed.map_err(Error::passing)
    }

    /// What it is of.
    pub fn kind(&self) -> &str {
        &self.kind
    }
}

fn check(name: &str, found: u64, most: u64) -> Result<(), Error> {
    if found <= most {
        return Ok(());
    }
    Err(Error::TooLarge {
        name: name.to_owned(),
        found,
        most,
    })
}

/// The first member that is not the same on both sides.
fn differs(said: &Sums, came: &Sums) -> Option<String> {
    let pairs = said.members.iter().zip(&came.members);
    let mut wrong = pairs
        .filter(|(said, came)| said != came)
        .map(|(said, _)| said.name.clone());
    let count = (said.members.len() != came.members.len()).then(|| "the number of its members".to_owned());
    wrong.next().or(count)
}

/// What is left of the member, hashed on its way.
struct Content<'r, R: Read> {
    reader: &'r mut Reader<R>,
}

impl<R: Read> Read for Content<'_, R> {
    fn read(&mut self, space: &mut [u8]) -> io::Result<usize> {
        let Some(member) = &mut self.reader.now else {
            return Ok(0);
        };
        let most = usize::try_from(member.left).unwrap_or(usize::MAX).min(space.len());
        if most == 0 {
            return Ok(0);
        }
        let space = space.get_mut(..most).unwrap_or_default();
        let got = self.reader.input.read(space)?;
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        member.left -= got as u64;
        member.hash.update(space.get(..got).unwrap_or_default());
        Ok(got)
    }
}
