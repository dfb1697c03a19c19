//! Files from and for the client: upload, and what is at a path. Runs no command.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use agent_api::message::{DATA_CHUNK, Reply, Upload, kind};
use agent_api::{Duplex, FileInfo, OsText};
use sha2::{Digest, Sha256};
use wire::{FrameReader, FrameWriter};

use crate::{Error, send_reply};

/// What is at `path`; `None` if nothing is.
pub(crate) fn stat(path: &OsText, digest: bool) -> Result<Option<FileInfo>, Error> {
    let path = Path::new(path.as_os_str());
    let data = match fs::metadata(path) {
        Ok(data) => data,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(Error::system(format!("looking at {}", path.display()))(error)),
    };
    let sha256 = (digest && data.is_file()).then(|| hash(path)).transpose()?;
    Ok(Some(FileInfo {
        size: data.size(),
        mode: data.mode(),
        sha256,
    }))
}

fn hash(path: &Path) -> Result<String, Error> {
    let fail = || Error::system(format!("reading {}", path.display()));
    let mut file = File::open(path).map_err(fail())?;
    let mut digest = Sha256::new();
    let mut buffer = vec![0; DATA_CHUNK];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(got) => digest.update(buffer.get(..got).unwrap_or_default()),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(fail()(error)),
        }
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A file that is being written beside its place; removed again unless it is completed.
pub(crate) struct Target {
    file: File,
    part: PathBuf,
    path: PathBuf,
    mode: u32,
    complete: bool,
}

impl Target {
    /// Makes the directories and the file beside.
    pub(crate) fn create(upload: &Upload) -> Result<Self, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let path = PathBuf::from(upload.path.as_os_str());
        let name = path.file_name().filter(|_| path.is_absolute());
        let (Some(name), Some(dir)) = (name, path.parent()) else {
            return Err(Error::Refused(format!(
                "{} is not an absolute path of a file",
                path.display()
            )));
        };
        fs::create_dir_all(dir).map_err(Error::system(format!("making {}", dir.display())))?;
        let mut part_name = std::ffi::OsString::from(".");
        part_name.push(name);
        part_name.push(format!(
            ".{}.{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::SeqCst)
        ));
        let part = dir.join(part_name);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&part);
        let file = file.map_err(Error::system(format!("creating {}", part.display())))?;
        Ok(Self {
            file,
            part,
            path,
            mode: upload.mode & 0o7777,
            complete: false,
        })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all(bytes)
            .map_err(Error::system(format!("writing {}", self.part.display())))
    }

    fn finish(mut self) -> Result<(), Error> {
        let fail = || Error::system(format!("completing {}", self.path.display()));
        self.file
            .set_permissions(fs::Permissions::from_mode(self.mode))
            .map_err(fail())?;
        fs::rename(&self.part, &self.path).map_err(fail())?;
        self.complete = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.complete
            && let Err(error) = fs::remove_file(&self.part)
        {
            crate::say(format_args!("{} is left over: {error}", self.part.display()));
        }
    }
}

/// The dialogue of an upload. After a failure the rest of the data is read and thrown away, so that the connection stays
/// usable; an error is returned only for the connection itself.
pub(crate) fn receive<S: Duplex>(
    target: Result<Target, Error>,
    size: u64,
    reader: &mut FrameReader<S>,
    writer: &FrameWriter<S>,
) -> Result<(), Error> {
    let mut target = match target {
        Ok(target) => target,
        Err(error) => {
            return send_reply(
                writer,
                &Reply::Refused {
                    message: error.to_string(),
                },
            );
        }
    };
    send_reply(writer, &Reply::Done)?;
    let mut left = size;
    let mut failure = None;
    while left > 0 {
        let frame = reader.read()?.ok_or(wire::Error::Truncated {
            what: "an upload",
            got: usize::try_from(size - left).unwrap_or(usize::MAX),
            want: usize::try_from(size).unwrap_or(usize::MAX),
        })?;
        let length = u64::try_from(frame.payload.len()).unwrap_or(u64::MAX);
        if frame.kind != kind::FILE || length > left {
            return Err(Error::UnexpectedFrame {
                kind: frame.kind,
                length: frame.payload.len(),
            });
        }
        left -= length;
        if failure.is_none() {
            failure = target.write(frame.payload).err();
        }
    }
    let result = match failure {
        Some(error) => Err(error),
        None => target.finish(),
    };
    let reply = match result {
        Ok(()) => Reply::Done,
        Err(error) => Reply::Refused {
            message: error.to_string(),
        },
    };
    send_reply(writer, &reply)
}
