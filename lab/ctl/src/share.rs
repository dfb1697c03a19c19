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
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

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

/// What a guest may know of and have open, where there are descriptors for that.
const FILES: u64 = 1 << 17;

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
    // What is left is of labs that are gone, or of servers that were killed.
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
    ensure!(&answer == b"OK\n", "somebody else has the port");
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
    let (directory, key) = (Arc::new(directory.to_owned()), Arc::new(shared.key));
    let serving = Arc::new(AtomicUsize::new(0));
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
        let (stream, _) = listener.accept()?;
        if serving.fetch_add(1, Ordering::SeqCst) >= MOST {
            serving.fetch_sub(1, Ordering::SeqCst);
            continue;
        }
        let (directory, key, serving) = (Arc::clone(&directory), Arc::clone(&key), Arc::clone(&serving));
        std::thread::spawn(move || {
            if let Err(error) = serve_one(stream, &directory, &key, read_only) {
                eprintln!("basalt-lab: {}: {error:#}", directory.display());
            }
            serving.fetch_sub(1, Ordering::SeqCst);
        });
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

fn serve_one(mut stream: TcpStream, directory: &Path, key: &str, read_only: bool) -> Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(KEY_PATIENCE))?;
    let mut shown = vec![0; key.len() + 1];
    stream.read_exact(&mut shown)?;
    // Compared as a whole, so that time tells nothing of how much of it is right.
    let differs = shown
        .iter()
        .zip(key.bytes().chain([b'\n']))
        .fold(0, |differs, (a, b)| differs | (a ^ b));
    ensure!(differs == 0, "somebody came without the key");
    let open = |path: &Path| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(path, flags, Mode::empty()).with_context(|| format!("cannot open {}", path.display()))
    };
    let (root, descriptors) = (open(directory)?, open(&PathBuf::from("/proc/self/fd"))?);
    enclose(&root)?;
    let most = getrlimit(Resource::Nofile).current.unwrap_or(FILES).min(FILES);
    let most = usize::try_from(most / 2)?;
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    let options = Options {
        read_only,
        owners: match uid.is_root() {
            true => Owners::Kept,
            false => Owners::One {
                uid: uid.as_raw(),
                gid: gid.as_raw(),
            },
        },
        max_nodes: most - most / 8,
        max_handles: most / 8,
    };
    let server = Server::new(root, descriptors, options)?;
    stream.write_all(b"OK\n")?;
    stream.set_read_timeout(None)?;
    Ok(fuse::stream::serve(&server, &mut stream)?)
}

/// This thread opens files beneath the directory only, where the kernel can see to that.
fn enclose(root: &OwnedFd) -> Result<()> {
    rustix::thread::set_no_new_privs(true)?;
    let root = root.try_clone()?;
    host::confine::enclose_files(&[root])?;
    Ok(())
}
