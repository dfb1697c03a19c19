//! The state of a sandbox's accelerator in a snapshot: the server of it sends the bytes, and this writes the file. What is in it is the
//! servers' to understand.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use agent_api::Duplex as _;
use agent_api::accelerator_state::{Asked, Said, ask, hear};
use node_api::Accelerator;
use wire::{FrameReader, FrameWriter};

use crate::Error;
use crate::accelerator_socket;
use crate::deadline_stream::Timed;

/// How long commands of the accelerator may take to end, for which the machine stands still.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why nothing is saved.
pub(crate) fn refused(name: &str, why: impl std::fmt::Display) -> Error {
    Error::NotToBeKept {
        name: name.to_owned(),
        why: format!("the state of its accelerator cannot be saved: {why}"),
    }
}

/// Has the server at a socket, within a time, do what takes long and can be done while its sandbox's machine runs.
pub(crate) fn prepare(name: &str, socket: &Path, limit: Duration) -> Result<(), Error> {
    let (writer, mut reader) = connect(name, socket, limit)?;
    ask(&writer, Asked::Prepare).map_err(|error| refused(name, error))?;
    match hear(&mut reader).map_err(|error| refused(name, error))? {
        Some(Said::Prepared) => Ok(()),
        Some(Said::Refused(why)) => Err(refused(name, why)),
        Some(_) => Err(refused(name, "its server answers something else")),
        None => Err(refused(name, "its server has ended")),
    }
}

/// The two halves of a connection to a server.
type Halves = (FrameWriter<Timed>, FrameReader<Timed>);

fn connect(name: &str, socket: &Path, limit: Duration) -> Result<Halves, Error> {
    let stream = accelerator_socket::connect(socket, limit);
    let stream = stream.map_err(|error| refused(name, format!("its server does not answer ({error})")))?;
    let copied = stream.try_clone();
    let copied = copied.map_err(Error::host("asking an accelerator's server for its state"))?;
    Ok((FrameWriter::new(copied), FrameReader::new(stream)))
}

/// Writes the state that the server at a socket tells to the file at a path, within a time. The sandbox's machine stands still.
pub(crate) fn save(
    (name, accelerator): (&str, &Accelerator),
    socket: &Path,
    (file, path): (&File, &Path),
    limit: Duration,
) -> Result<(), Error> {
    let (writer, mut reader) = connect(name, socket, limit)?;
    ask(&writer, Asked::Save(PATIENCE.min(limit))).map_err(|error| refused(name, error))?;
    let most = accelerator.most_saved();
    loop {
        match hear(&mut reader).map_err(|error| refused(name, error))? {
            Some(Said::Bytes(at, bytes)) => {
                let end = at.checked_add(bytes.len() as u64);
                if end.is_none_or(|end| end > most) {
                    return Err(refused(
                        name,
                        format!("its server sends more than the {most} bytes that there can be"),
                    ));
                }
                file.write_all_at(bytes, at).map_err(Error::file("write", path))?;
            }
            Some(Said::Saved) => return Ok(()),
            Some(Said::Refused(why)) => return Err(refused(name, why)),
            Some(Said::Prepared) => return Err(refused(name, "its server answers something else")),
            None => return Err(refused(name, "its server has ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::time::Instant;

    use agent_api::accelerator_state::{asked, tell_bytes, tell_end, tell_prepared};

    use super::*;

    /// What comes of what a server says.
    fn saved(says: impl FnOnce(&FrameWriter<UnixStream>) + Send) -> (Result<(), Error>, Vec<u8>) {
        saved_within(Duration::from_secs(20), says)
    }

    fn saved_within(
        limit: Duration,
        says: impl FnOnce(&FrameWriter<UnixStream>) + Send,
    ) -> (Result<(), Error>, Vec<u8>) {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("accelerator");
        let listener = UnixListener::bind(&socket).unwrap();
        let file = tempfile::tempfile().unwrap();
        let accelerator = "null:window=32m,memory=1m".parse().unwrap();
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                let (stream, _) = listener.accept().unwrap();
                let mut reader = FrameReader::new(stream.try_clone().unwrap());
                assert!(asked(&mut reader).unwrap().is_some());
                says(&FrameWriter::new(stream));
            });
            save(("web", &accelerator), &socket, (&file, Path::new("state")), limit)
        });
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        (outcome, bytes)
    }

    #[test]
    fn a_server_prepares_or_says_that_it_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("accelerator");
        let listener = UnixListener::bind(&socket).unwrap();
        let prepared = |answers: bool| {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (stream, _) = listener.accept().unwrap();
                    let mut reader = FrameReader::new(stream.try_clone().unwrap());
                    assert_eq!(asked(&mut reader).unwrap(), Some(Asked::Prepare));
                    if answers {
                        tell_prepared(&FrameWriter::new(stream)).unwrap();
                    }
                });
                prepare("web", &socket, Duration::from_secs(20))
            })
        };
        prepared(true).unwrap();
        let told = prepared(false).unwrap_err().to_string();
        assert!(told.contains("its server has ended"), "{told}");
    }

    #[test]
    fn what_the_server_says_is_written_where_it_says() {
        let (outcome, bytes) = saved(|writer| {
            tell_bytes(writer, 5, b"end").unwrap();
            tell_bytes(writer, 0, b"begin").unwrap();
            tell_end(writer, None).unwrap();
        });
        outcome.unwrap();
        assert_eq!(bytes, b"beginend");
    }

    #[test]
    fn a_server_that_refuses_ends_or_sends_without_end_is_told_of() {
        let refusal = |says: fn(&FrameWriter<UnixStream>)| saved(says).0.unwrap_err().to_string();
        let told = refusal(|writer| tell_end(writer, Some("a kernel runs; try again later")).unwrap());
        assert!(
            told.contains("web") && told.contains("a kernel runs; try again later"),
            "{told}"
        );
        assert!(refusal(|_| ()).contains("its server has ended"));
        let told = refusal(|writer| tell_bytes(writer, u64::MAX - 1, b"far").unwrap());
        assert!(told.contains("sends more than"), "{told}");
        let told = refusal(|writer| tell_bytes(writer, 4 << 30, b"far").unwrap());
        assert!(told.contains("sends more than"), "{told}");
        let told = refusal(|writer| tell_prepared(writer).unwrap());
        assert!(told.contains("answers something else"), "{told}");
        let nobody = save(
            ("web", &"null".parse().unwrap()),
            Path::new("/nowhere/accelerator"),
            (&tempfile::tempfile().unwrap(), Path::new("state")),
            Duration::from_secs(1),
        );
        assert!(nobody.unwrap_err().to_string().contains("does not answer"));
    }

    #[test]
    fn a_server_that_says_a_little_again_and_again_holds_nobody_longer_than_the_limit() {
        let limit = Duration::from_millis(200);
        let begin = Instant::now();
        let (outcome, bytes) = saved_within(limit, |writer| {
            // Until the other side hangs up.
            while tell_bytes(writer, 0, b"again").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let told = outcome.unwrap_err().to_string();
        assert!(told.contains("has not answered in time"), "{told}");
        assert_eq!(bytes, b"again");
        assert!(begin.elapsed() >= limit);
    }
}
