//! One command, and a thread that reads what it says.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use agent_api::{Connection, Event, ExecRequest, ExitStatus, OutputStream, Running};

use crate::Error;

/// What is kept of a command's words, for when something is wrong with it.
pub const WORDS: usize = 1000;

/// How a command came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its status.
    pub status: ExitStatus,
    /// The end of what it has written, [`WORDS`] bytes at most.
    pub words: String,
}

/// A command that runs. Dropped before it has ended, its connection ends, and the command with it unless it is kept.
#[derive(Debug)]
pub struct Step {
    begun: Receiver<()>,
    told: Receiver<Result<Ended, Error>>,
    stream: UnixStream,
}

impl Step {
    /// Starts a command on a connection to the agent that is idle; `show` is given what it writes, as it comes.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(
        stream: UnixStream,
        request: ExecRequest,
        show: impl FnMut(OutputStream, &[u8]) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, Error> {
        let (begin, begun) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let second = stream.try_clone().map_err(Error::Thread)?;
        let work = move || {
            // Nobody listens any more where the build is over.
            drop(tell.send(follow(stream, &request, begin, show)));
        };
        let named = thread::Builder::new().name("step".into());
        named.spawn(work).map_err(Error::Thread)?;
        Ok(Self {
            begun,
            told,
            stream: second,
        })
    }

    /// Whether it runs, or has run; false if it does not within the limit. To be asked until it does, and before [`Self::ended`].
    ///
    /// # Errors
    /// It could not be started, or its sandbox is gone.
    pub fn started(&self, limit: Duration) -> Result<bool, Error> {
        match self.begun.recv_timeout(limit) {
            Ok(()) => Ok(true),
            Err(RecvTimeoutError::Timeout) => Ok(false),
            // It never will, and why comes next.
            Err(RecvTimeoutError::Disconnected) => self.ended(None).map(|_| true),
        }
    }

    /// How it has ended; `None` if it has not within the limit.
    ///
    /// # Errors
    /// It could not be started, or its sandbox is gone.
    pub fn ended(&self, limit: Option<Duration>) -> Result<Option<Ended>, Error> {
        let told = match limit {
            Some(limit) => self.told.recv_timeout(limit),
            None => self.told.recv().map_err(RecvTimeoutError::from),
        };
        match told {
            Ok(ended) => ended.map(Some),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(Error::Lost),
        }
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        // One that has ended has no connection any more.
        let _gone = self.stream.shutdown(Shutdown::Both);
    }
}

/// Starts a command, and reads what it says up to its end.
fn follow(
    stream: UnixStream,
    request: &ExecRequest,
    begin: Sender<()>,
    mut show: impl FnMut(OutputStream, &[u8]) -> io::Result<()>,
) -> Result<Ended, Error> {
    let mut connection = Connection::resume(stream).map_err(Error::Broken)?;
    let Running { mut output, input, .. } = match connection.exec(request) {
        Err(agent_api::Error::Exec(failure)) => return Err(Error::Start(failure)),
        running => running.map_err(Error::Broken)?,
    };
    // Not everybody waits for it.
    let _waits = begin.send(());
    let mut words = Vec::new();
    let status = loop {
        let (stream, bytes) = match output.next().map_err(Error::Broken)? {
            Event::Stdout(bytes) => (OutputStream::Stdout, bytes),
            Event::Stderr(bytes) => (OutputStream::Stderr, bytes),
            Event::Closed(_) => continue,
            Event::Exited(status) => break status,
        };
        show(stream, bytes).map_err(Error::Shown)?;
        words.extend_from_slice(bytes);
        words.drain(..words.len().saturating_sub(WORDS));
    };
    drop(input);
    let words = String::from_utf8_lossy(&words).into_owned();
    Ok(Ended { status, words })
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    use agent_api::Kept;

    use super::*;
    use crate::tests::{connect, script};

    #[test]
    fn what_a_command_writes_is_shown_and_its_end_is_told() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let shown = Arc::clone(&seen);
        let show = move |stream, bytes: &[u8]| {
            shown.lock().unwrap().push((stream, bytes.to_vec()));
            Ok(())
        };
        let step = Step::start(connect(), script("echo out; sleep 0.1; echo err >&2; exit 3"), show).unwrap();
        let ended = step.ended(None).unwrap().unwrap();
        assert_eq!(
            (ended.status, ended.words.as_str()),
            (ExitStatus::Code(3), "out\nerr\n")
        );
        let seen = seen.lock().unwrap();
        let both = [
            (OutputStream::Stdout, b"out\n".to_vec()),
            (OutputStream::Stderr, b"err\n".to_vec()),
        ];
        assert_eq!(*seen, both);
        let Err(Error::Code { code: 3, words, .. }) = Error::unless_succeeded("x", &ended) else {
            panic!()
        };
        assert!(words.ends_with("err\n"));
    }

    #[test]
    fn that_a_command_has_started_is_told() {
        let step = Step::start(connect(), script("sleep 100"), |_, _| Ok(())).unwrap();
        assert!(step.started(Duration::from_secs(20)).unwrap());
        assert_eq!(step.ended(Some(Duration::from_millis(1))).unwrap(), None);
        let none = ExecRequest {
            argv: vec!["/no/such/program".into()],
            ..script("")
        };
        let step = Step::start(connect(), none, |_, _| Ok(())).unwrap();
        let refused = step.started(Duration::from_secs(20));
        assert!(matches!(refused, Err(Error::Start(_))), "{refused:?}");
    }

    #[test]
    fn only_the_last_words_are_kept() {
        let step = Step::start(connect(), script("yes | head -c 5000; echo end"), |_, _| Ok(())).unwrap();
        let ended = step.ended(None).unwrap().unwrap();
        assert_eq!(ended.words.len(), WORDS);
        assert!(ended.words.ends_with("end\n"));
    }

    #[test]
    fn a_command_goes_with_its_step_unless_it_is_kept() {
        let directory = std::env::temp_dir().join(format!("template-build-{}", std::process::id()));
        let there = |name: &str| directory.with_extension(name).exists();
        let make = |name: &str| format!("sleep 1; touch {}", directory.with_extension(name).display());
        drop(Step::start(connect(), script(&make("gone")), |_, _| Ok(())).unwrap());
        let kept = ExecRequest {
            kept: Some(Kept::default()),
            ..script(&make("kept"))
        };
        let step = Step::start(connect(), kept, |_, _| Ok(())).unwrap();
        assert_eq!(step.ended(Some(Duration::from_millis(300))).unwrap(), None);
        drop(step);
        let end = Instant::now() + Duration::from_secs(20);
        while !there("kept") {
            assert!(Instant::now() < end, "what is kept went with its step");
            thread::sleep(Duration::from_millis(20));
        }
        thread::sleep(Duration::from_millis(500));
        std::fs::remove_file(directory.with_extension("kept")).unwrap();
        assert!(!there("gone"));
    }
}
