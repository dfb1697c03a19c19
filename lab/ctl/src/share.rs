//! Directories of this machine for sandboxes in the lab: each is served by a process of its own, which ends with the lab.
//!
//! The lab reaches the process through its emulated network, as a port of this machine's loopback interface, and shows a
//! key of 256 bits: other users of this machine can come to the port, too. The key stands for one directory, in one way.
//! What is served is what crate `fuse` serves anywhere; nothing here looks at it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fuse::{Options, Owners, Server};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open, setrlimit};
use rustix::thread::CapabilitiesSecureBits;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::state::{Lab, State};

/// This machine's loopback interface, as QEMU's user network shows it to the lab.
const HOST: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);

/// How long whoever comes may take to show the key.
const KEY_PATIENCE: Duration = Duration::from_secs(10);

/// How many may be served at a time.
const MOST: usize = 64;

/// What one guest may know of and have open at most.
const FILES: usize = 1 << 16;

/// With fewer descriptors than this a guest is not served.
const FEW: usize = 256;

/// After a connection could not be taken, as with too many descriptors open: others are served meanwhile.
const PAUSE: Duration = Duration::from_millis(100);

/// How a served directory is reached. The first three are what the lab is told.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Shared {
    /// From the lab.
    pub(crate) address: SocketAddr,
    /// What to show there.
    pub(crate) key: String,
    /// Its path on this machine.
    pub(crate) directory: String,
}

/// Has a directory served to the lab; one that is already is not served twice.
pub(crate) fn share(state: &State, lab: &Lab, directory: &Path, read_only: bool) -> Result<Shared> {
    let directory = directory.canonicalize().with_context(|| {
        format!(
            "{} cannot be shared: make it first (mkdir), or leave the slashes out to name a volume",
            directory.display()
        )
    })?;
    ensure!(
        directory.is_dir(),
        "{} is no directory: share the directory that it is in",
        directory.display()
    );
    let text = directory
        .to_str()
        .with_context(|| format!("{} is no UTF-8 text", directory.display()))?;
    // Of this start of the lab: those of earlier ones have ended.
    let name = Sha256::digest(format!("{} {} {read_only} {text}", lab.pid, lab.started));
    let kept = state.shares().join(hex::encode(&name[..8]));
    let _lock = state.lock(Duration::from_secs(60), || ())?;
    if let Some(shared) = known(&kept)? {
        return Ok(shared);
    }
    fs::create_dir_all(state.shares())?;
    let shared = start(state, text, read_only)?;
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&kept)?;
    file.write_all(&serde_json::to_vec(&shared)?)?;
    Ok(shared)
}

/// One that is served already, if whoever serves it is still there.
fn known(kept: &Path) -> Result<Option<Shared>> {
    let Ok(bytes) = fs::read(kept) else { return Ok(None) };
    let Ok(shared) = serde_json::from_slice::<Shared>(&bytes) else {
        return Ok(None);
    };
    let answers = knock(&shared).is_ok();
    if !answers {
        fs::remove_file(kept)?;
    }
    Ok(answers.then_some(shared))
}

/// Shows the key, as the lab will.
fn knock(shared: &Shared) -> Result<()> {
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, shared.address.port()));
    let mut stream = TcpStream::connect_timeout(&here, KEY_PATIENCE)?;
    stream.set_read_timeout(Some(KEY_PATIENCE))?;
    writeln!(stream, "{}", shared.key)?;
    let mut answer = [0; 3];
    stream.read_exact(&mut answer)?;
    ensure!(&answer == b"OK\n", "another process has the port");
    Ok(())
}

fn start(state: &State, directory: &str, read_only: bool) -> Result<Shared> {
    let log = state.shares_log();
    let log = File::options().append(true).create(true).mode(0o600).open(log)?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("serve-share").args(read_only.then_some("--read-only"));
    let mut child = command
        .args(["--", directory])
        .env("BASALT_LAB_STATE", state.directory())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        .spawn()
        .context("basalt-lab cannot be started")?;
    let mut line = String::new();
    let output = child.stdout.take().context("it has no output")?;
    BufReader::new(output).read_line(&mut line)?;
    if line.is_empty() {
        let status = child.wait()?;
        bail!(
            "it cannot be served ({status}); {} says why",
            state.shares_log().display()
        );
    }
    Ok(serde_json::from_str(&line)?)
}

/// Serves a directory until the lab is gone. Prints how it is reached, once it can be.
pub(crate) fn serve(lab: &Lab, directory: &Path, read_only: bool) -> Result<()> {
    // Whoever started it goes on; Ctrl-C is for him.
    rustix::process::setsid()?;
    prepare()?;
    let lab = i32::try_from(lab.pid).ok().and_then(Pid::from_raw);
    let lab = pidfd_open(lab.context("the lab has no process")?, PidfdFlags::empty())?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut key = [0; 32];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())?;
    let shared = Shared {
        address: (HOST, listener.local_addr()?.port()).into(),
        key: hex::encode(key),
        directory: directory.display().to_string(),
    };
    crate::print(&serde_json::to_string(&shared)?)?;
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(1 << 20);
    let places = Arc::new(Amount::new(MOST));
    let served = Arc::new(Served {
        directory: directory.to_owned(),
        key: shared.key,
        read_only,
        // Half is for what the server opens beside: for a moment, for each connection.
        descriptors: Arc::new(Amount::new(usize::try_from(descriptors / 2)?)),
    });
    loop {
        let mut fds = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&lab, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => (),
            Err(error) => return Err(error.into()),
        }
        let over = !fds[1].revents().is_empty();
        if over {
            return Ok(());
        }
        if fds[0].revents().is_empty() {
            continue;
        }
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                eprintln!(
                    "basalt-lab: {}: a connection is not taken: {error}",
                    directory.display()
                );
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let Some(place) = places.take(|left| left.min(1)) else {
            continue;
        };
        let served = Arc::clone(&served);
        let serve = move || {
            if let Err(error) = served.to(stream) {
                eprintln!("basalt-lab: {}: {error:#}", served.directory.display());
            }
            drop(place);
        };
        if let Err(error) = std::thread::Builder::new().name("share".into()).spawn(serve) {
            eprintln!(
                "basalt-lab: {}: a connection is not served: {error}",
                directory.display()
            );
        }
    }
}

/// Something of which there is so much.
struct Amount(Mutex<usize>);

/// A part of it, given back when dropped.
struct Part {
    of: Arc<Amount>,
    size: usize,
}

impl Amount {
    fn new(size: usize) -> Self {
        Self(Mutex::new(size))
    }

    /// A part as large as `wanted` says of what is left; nothing if that is none.
    fn take(self: &Arc<Self>, wanted: impl FnOnce(usize) -> usize) -> Option<Part> {
        let mut left = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let size = wanted(*left).min(*left);
        *left -= size;
        (size > 0).then(|| Part {
            of: Arc::clone(self),
            size,
        })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        *self.of.0.lock().unwrap_or_else(PoisonError::into_inner) += self.size;
    }
}

/// What is true for all that are served.
fn prepare() -> Result<()> {
    // The guest's kernel has applied its own mask.
    rustix::process::umask(Mode::empty());
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit)?;
    if rustix::process::geteuid().is_root() {
        // Acting for a guest's user must not take the right away to find that user's files.
        let bits = rustix::thread::capabilities_secure_bits()?;
        rustix::thread::set_capabilities_secure_bits(bits | CapabilitiesSecureBits::NO_SETUID_FIXUP)?;
    }
    Ok(())
}

/// What a server serves.
struct Served {
    directory: PathBuf,
    key: String,
    read_only: bool,
    descriptors: Arc<Amount>,
}

impl Served {
    fn to(&self, mut stream: TcpStream) -> Result<()> {
        stream.set_nodelay(true)?;
        let shown = read_key(&mut stream, self.key.len() + 1)?;
        // Compared as a whole, so that time tells nothing of how much of it is right.
        let differs = shown
            .iter()
            .zip(self.key.bytes().chain([b'\n']))
            .fold(0, |differs, (a, b)| differs | (a ^ b));
        ensure!(differs == 0, "a client connected without the key");
        // Each takes its part of what is left, so that the first does not leave the next without.
        let part = self.descriptors.take(|left| (left / 4).min(FILES));
        let part = part.filter(|part| part.size >= FEW).with_context(|| {
            "too many sandboxes have it for this process's limit of open files: raise it (`ulimit -Hn`), or share it with fewer"
        })?;
        let server = self.server(part.size)?;
        stream.write_all(b"OK\n")?;
        stream.set_read_timeout(None)?;
        Ok(fuse::stream::serve(&server, &mut stream)?)
    }

    fn server(&self, files: usize) -> Result<Server> {
        let open = |path: &Path| {
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(path, flags, Mode::empty()).with_context(|| format!("cannot open {}", path.display()))
        };
        let (root, descriptors) = (open(&self.directory)?, open(Path::new("/proc/self/fd"))?);
        enclose(&root)?;
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        let options = Options {
            read_only: self.read_only,
            owners: match uid.is_root() {
                true => Owners::Kept,
                false => Owners::One {
                    uid: uid.as_raw(),
                    gid: gid.as_raw(),
                },
            },
            max_nodes: files - files / 8,
            max_handles: files / 8,
        };
        Ok(Server::new(root, descriptors, options)?)
    }
}

/// So many bytes, within [`KEY_PATIENCE`], however few come at a time.
fn read_key(stream: &mut TcpStream, length: usize) -> Result<Vec<u8>> {
    let end = Instant::now() + KEY_PATIENCE;
    let mut shown = vec![0; length];
    let mut rest = shown.as_mut_slice();
    while !rest.is_empty() {
        let left = end.saturating_duration_since(Instant::now());
        ensure!(!left.is_zero(), "a client connected and sent no key in time");
        stream.set_read_timeout(Some(left))?;
        let count = stream.read(rest)?;
        ensure!(count > 0, "a client connected and left without the key");
        rest = rest.split_at_mut(count).1;
    }
    Ok(shown)
}

/// This thread opens files beneath the directory only, where the kernel can see to that.
fn enclose(root: &OwnedFd) -> Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let root = root.try_clone()?;
    host::confine::enclose_files(&[root])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back_and_never_exceeds_what_there_is() {
        let all = Arc::new(Amount::new(4096));
        let quarter = || all.take(|left| left / 4);
        let (first, second) = (quarter().unwrap(), quarter().unwrap());
        assert_eq!((first.size, second.size), (1024, 768));
        drop(first);
        assert_eq!(quarter().unwrap().size, 832);
        assert_eq!(all.take(|_| usize::MAX).unwrap().size, 3328);
        drop(second);
        assert_eq!(all.take(|left| left).unwrap().size, 4096);
        let none = Arc::new(Amount::new(0));
        assert!(none.take(|left| left.min(1)).is_none());
    }

    #[test]
    fn a_key_that_drips_has_one_limit_for_all_of_it() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        client.write_all(b"ab").unwrap();
        assert_eq!(read_key(&mut server, 2).unwrap(), b"ab");
        drop(client);
        assert!(read_key(&mut server, 1).is_err());
    }
}
