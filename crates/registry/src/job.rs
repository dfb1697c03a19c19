//! One pull or push as a whole: how long it may take, how long a peer may be silent, how often something is tried again,
//! and how it is cancelled.
//!
//! Knows nothing of images. A thread watches the flag and the deadline and closes all connections, so that whoever waits
//! for one goes on at once; only a name look-up or a connection being made is waited for, at most [`CONNECT`].

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use ureq::Agent;

use crate::{Credentials, Error};

/// For a name look-up, and for a connection with its TLS handshake.
pub(crate) const CONNECT: Duration = Duration::from_secs(10);
/// How often the watching thread looks, and a waiting one.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// Between attempts: the first wait, doubled each time, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// A registry may ask for a longer one (`Retry-After`), but not for any.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// Nobody answers: tried this often.
const CONNECT_ATTEMPTS: u32 = 3;

/// A flag that ends an operation from another thread.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Ends every operation that was given this flag.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether somebody has.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A registry or a mirror of one.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// Of a mirror: `HOST[:PORT][/PREFIX]`. Of the registry itself it is the location's, and this is not read.
    pub host: String,
    /// Who we are to it.
    pub credentials: Option<Credentials>,
    /// No TLS is needed, and no certificate is looked at. Without this, plain HTTP is spoken with this machine only.
    pub insecure: bool,
}

/// How to pull or push.
#[derive(Debug, Clone)]
pub struct Options {
    /// The registry that the location names.
    pub registry: Peer,
    /// Asked before it by a pull, in this order. A push does not use them.
    pub mirrors: Vec<Peer>,
    /// For all of it.
    pub deadline: Duration,
    /// For a peer that says nothing and takes nothing.
    pub stall: Duration,
    /// Blobs at a time.
    pub parallel: usize,
    /// How often something is tried that fails as if it could succeed the next time. A blob of which something has come
    /// begins to count again.
    pub attempts: u32,
    /// Directories with a directory for each registry, with `*.crt` in it.
    pub certificates: Vec<PathBuf>,
    /// Directories with `*.crt` in them, for whoever is asked.
    pub authorities: Vec<PathBuf>,
    /// Ends it.
    pub cancel: Cancel,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            registry: Peer::default(),
            mirrors: Vec::new(),
            deadline: Duration::from_secs(3600),
            stall: Duration::from_secs(30),
            parallel: 3,
            attempts: 6,
            certificates: ["/etc/containers/certs.d", "/etc/docker/certs.d"]
                .map(PathBuf::from)
                .to_vec(),
            authorities: Vec::new(),
            cancel: Cancel::default(),
        }
    }
}

/// A running operation.
pub(crate) struct Job<'a> {
    pub(crate) options: &'a Options,
    ends: Instant,
    /// One of its threads has failed: the others need not go on.
    failed: AtomicBool,
    finished: AtomicBool,
    agents: Mutex<Vec<Agent>>,
}

/// Why an attempt failed.
pub(crate) enum Failure {
    /// It may succeed the next time, perhaps only after so long.
    Transient(Error, Option<Duration>),
    /// Nobody was there.
    Connect(Error),
    /// It will not.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Final(error)
    }
}

impl From<image::Error> for Failure {
    fn from(error: image::Error) -> Self {
        Self::Final(error.into())
    }
}

impl<'a> Job<'a> {
    /// Runs `work` with a job whose end is watched.
    pub(crate) fn run<T>(options: &'a Options, work: impl FnOnce(&Self) -> Result<T, Error>) -> Result<T, Error> {
        let job = Self {
            options,
            ends: Instant::now() + options.deadline,
            failed: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            agents: Mutex::default(),
        };
        thread::scope(|scope| {
            let watcher = scope.spawn(|| job.watch());
            // Also if `work` panics, or the watching thread would be waited for without end.
            let _finish = Finish(&job.finished, watcher.thread().clone());
            let done = work(&job);
            // What a closed connection looks like is not why it was closed.
            done.map_err(|error| match error {
                Error::Image(image::Error::Stopped) => job.over().err().unwrap_or(Error::Cancelled),
                error if error.another_may_do() => job.over().err().unwrap_or(error),
                error => error,
            })
        })
    }

    fn watch(&self) {
        while !self.finished.load(Ordering::Acquire) {
            if self.stopped().is_err() {
                for agent in self.agents.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
                    agent.shutdown();
                }
            }
            thread::park_timeout(TICK);
        }
    }

    /// Connections of this agent are closed when the job is over.
    pub(crate) fn watch_over(&self, agent: &Agent) {
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        agents.push(agent.clone());
    }

    /// Forgets that one of its threads has failed: another peer is tried.
    pub(crate) fn begin_again(&self) {
        self.failed.store(false, Ordering::Relaxed);
    }

    /// Whether it was cancelled or is out of time.
    pub(crate) fn over(&self) -> Result<(), Error> {
        if self.options.cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if Instant::now() >= self.ends {
            let seconds = self.options.deadline.as_secs();
            return Err(Error::Deadline { seconds });
        }
        Ok(())
    }

    /// The same, or whether another thread has failed.
    pub(crate) fn stopped(&self) -> Result<(), Error> {
        self.over()?;
        if self.failed.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        Ok(())
    }

    /// What is left of the time.
    pub(crate) fn left(&self) -> Duration {
        // Zero would mean no limit to some.
        self.ends
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1))
    }

    /// Says when the store is to stop working for this job.
    pub(crate) fn stop(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let (cancel, ends) = (self.options.cancel.clone(), self.ends);
        move || cancel.is_cancelled() || Instant::now() >= ends
    }

    /// Waits, unless the job ends.
    pub(crate) fn wait(&self, time: Duration) -> Result<(), Error> {
        let until = Instant::now() + time;
        loop {
            self.stopped()?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(TICK));
        }
    }

    /// Does `work` for all of `queue`, last first, several at a time. After an error the others stop as soon as they can.
    pub(crate) fn in_parallel<I: Send, T: Send>(
        &self,
        queue: Vec<I>,
        work: impl Fn(&I) -> Result<T, Error> + Sync,
    ) -> Result<Vec<T>, Error> {
        let workers = self.options.parallel.clamp(1, queue.len().max(1));
        let (queue, done, failed) = (Mutex::new(queue), Mutex::new(Vec::new()), Mutex::new(None));
        let worker = || {
            loop {
                let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let Some(item) = next else { return };
                match work(&item) {
                    Ok(value) => done.lock().unwrap_or_else(PoisonError::into_inner).push(value),
                    Err(error) => {
                        // The first error is the reason; the others are its consequences.
                        failed
                            .lock()
                            .unwrap_or_else(PoisonError::into_inner)
                            .get_or_insert(error);
                        self.failed.store(true, Ordering::Relaxed);
                        return;
                    }
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(worker);
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Tries until it succeeds, cannot, or has failed too often. `attempt` says whether it has got any further, which
    /// begins the counting again.
    pub(crate) fn retry<T>(
        &self,
        mut attempt: impl FnMut(&mut bool) -> Result<T, Failure>,
        broken: impl Fn(u32, Error) -> Error,
    ) -> Result<T, Error> {
        let (mut failures, mut wait) = (0, BACKOFF.0);
        loop {
            self.stopped()?;
            let mut progress = false;
            let (error, most, asked) = match attempt(&mut progress) {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Connect(error)) => (error, CONNECT_ATTEMPTS.min(self.options.attempts), None),
                Err(Failure::Transient(error, after)) => (error, self.options.attempts, after),
            };
            self.stopped()?;
            if progress {
                (failures, wait) = (0, BACKOFF.0);
            }
            failures += 1;
            if failures >= most {
                return Err(broken(failures, error));
            }
            log::info!("attempt {failures} failed, trying again: {error}");
            self.wait(asked.map_or(wait, |asked| asked.clamp(wait, LONGEST_WAIT)))?;
            wait = (wait * 2).min(BACKOFF.1);
        }
    }
}

struct Finish<'a>(&'a AtomicBool, Thread);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
        self.1.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> Error {
        Error::Unreachable {
            host: String::new(),
            problem: String::new(),
        }
    }

    #[test]
    fn attempts_are_counted_from_the_last_progress() {
        let options = Options {
            attempts: 3,
            ..Options::default()
        };
        let mut calls = 0;
        let ended = Job::run(&options, |job| {
            job.retry(
                |progress| {
                    calls += 1;
                    *progress = calls == 2;
                    Err::<(), _>(Failure::Transient(failure(), None))
                },
                |attempts, _| Error::Deadline {
                    seconds: attempts.into(),
                },
            )
        });
        assert_eq!(calls, 4);
        assert!(matches!(ended, Err(Error::Deadline { seconds: 3 })));
    }

    #[test]
    fn waiting_ends_with_the_deadline_and_when_cancelled() {
        let begun = Instant::now();
        let options = Options {
            deadline: Duration::from_millis(100),
            ..Options::default()
        };
        let ended = Job::run(&options, |job| job.wait(Duration::from_secs(3600)));
        assert!(matches!(ended, Err(Error::Deadline { .. })));
        let options = Options::default();
        let cancel = options.cancel.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            cancel.cancel();
        });
        let ended = Job::run(&options, |job| job.wait(Duration::from_secs(3600)));
        assert!(matches!(ended, Err(Error::Cancelled)));
        assert!(begun.elapsed() < Duration::from_secs(90));
    }
}
