//! The server of a sandbox's forwarded accelerator: a process beside the VMM, which has what the machine shares with it and the socket of
//! its vsock. Starts it; what it does is its own affair (docs/accel-server.md).

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use agent_api::CudaLibraries;
use agent_api::accelerator::{CUDA_DRIVER, CUDA_NAMES, LABEL, OPENCL_DRIVER, OPENCL_DRIVER_MUSL};
use host::jail::{self, Identity, Isolation, Launch};
use node_api::{Accelerator, AcceleratorApi};
use rustix::fs::{Mode, OFlags};
use rustix::net::SocketType;

use crate::Error;
use crate::config::Config;
use crate::resources::space;
use crate::store::database::Stored;
use crate::store::paths::SandboxPaths;
use crate::vmm::files;
use crate::vmm::launch;
use crate::vmm::process;

const NO_ACCELERATOR: &str = "run `make run` in Basalt's source tree, which builds it, or set BASALT_ASSETS (basaltd: --assets) to the directory that has it";

/// How much of the server's log is told where it does not start.
const LAST_WORDS: usize = 2048;

/// What a machine and its accelerator's server share, before either has it.
#[derive(Debug)]
pub(crate) struct Window(File);

impl Window {
    /// For a sandbox that has an accelerator.
    pub(crate) fn of(stored: &Stored) -> Result<Option<Self>, Error> {
        let window = |accelerator: Accelerator| base::memfd::sized("accelerator-window", accelerator.window.bytes());
        let made = stored.sandbox.config.accelerator.map(window).transpose();
        Ok(made
            .map_err(Error::host("having memory for the accelerator's window"))?
            .map(Self))
    }

    /// Its file again, for the machine.
    pub(crate) fn file(&self) -> Result<File, Error> {
        self.0.try_clone().map_err(Error::host("copying a descriptor"))
    }
}

/// What its guest's agent is told.
pub(crate) fn of_guest(stored: &Stored) -> Option<agent_api::Accelerator> {
    stored.sandbox.config.accelerator.map(|accelerator| {
        let (opencl, cuda) = apis(accelerator.api);
        agent_api::Accelerator {
            label: LABEL.to_owned(),
            opencl: opencl.then(|| OPENCL_DRIVER.to_owned()),
            opencl_musl: opencl.then(|| OPENCL_DRIVER_MUSL.to_owned()),
            cuda: cuda.then(|| CudaLibraries {
                file: CUDA_DRIVER.to_owned(),
                names: CUDA_NAMES.iter().map(|name| (*name).to_owned()).collect(),
            }),
        }
    })
}

/// Whether programs of a guest find OpenCL's driver, and CUDA's libraries.
fn apis(api: AcceleratorApi) -> (bool, bool) {
    match api {
        AcceleratorApi::Opencl => (true, false),
        AcceleratorApi::Reference => (false, true),
        AcceleratorApi::Null => (true, true),
    }
}

/// A server that serves nobody before it is told that it is known: if nobody does, it ends.
#[derive(Debug)]
pub(crate) struct Launched {
    pub(crate) child: jail::Child,
    /// Where it is told.
    known: Option<UnixStream>,
    /// It goes on from a state.
    restores: bool,
}

/// A server that makes again what was saved.
#[derive(Debug)]
pub(crate) struct Restoring(UnixStream);

impl Restoring {
    /// Waits until it has.
    pub(crate) fn wait(self, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        let mut said = Vec::new();
        let mut byte = [0];
        // A line, of no more than a reason has.
        while !said.ends_with(b"\n") && said.len() < LAST_WORDS {
            let left = deadline.saturating_duration_since(Instant::now());
            if !process::readable(&self.0, left) {
                return Err(Error::Deadline {
                    what: "making again what was saved of the accelerator",
                    limit,
                });
            }
            match (&self.0).read(&mut byte) {
                Ok(1..) => said.push(byte[0]),
                Ok(0) | Err(_) => break,
            }
        }
        let said = String::from_utf8_lossy(&said);
        match (&*said, said.strip_prefix("lost ")) {
            ("restored\n", _) => Ok(()),
            (_, Some(reason)) => Err(Error::AcceleratorLost(reason.trim_end().to_owned())),
            _ => Err(Error::AcceleratorLost(
                "its server has ended before it was done".to_owned(),
            )),
        }
    }
}

impl Launched {
    /// For a server that is none; who says how going on from a state ends, if it is to go on from one.
    #[cfg(test)]
    pub(crate) fn of(child: jail::Child, restores: Option<UnixStream>) -> Self {
        Self {
            child,
            restores: restores.is_some(),
            known: restores,
        }
    }

    /// Tells it that it is known; what is to be waited for, if it goes on from a state.
    pub(crate) fn tell_known(self) -> Result<Option<Restoring>, Error> {
        let Some(mut stream) = self.known else { return Ok(None) };
        stream
            .write_all(b"known\n")
            .map_err(Error::host("telling an accelerator's server to begin"))?;
        Ok(self.restores.then_some(Restoring(stream)))
    }
}

/// Starts the server; the window has its file system when this returns.
pub(crate) fn launch(
    config: &Config,
    stored: &Stored,
    paths: &SandboxPaths,
    (window, saved): (&Window, Option<File>),
    cgroup: Option<&Path>,
) -> Result<Launched, Error> {
    let Some(accelerator) = stored.sandbox.config.accelerator else {
        return Err(Error::host("starting an accelerator's server")(io::Error::other(
            "the sandbox has none",
        )));
    };
    let program = &config.programs.accelerator;
    let program_file = files::open("the accelerator's server", program, NO_ACCELERATOR)?;
    let drivers = [&config.programs.opencl, &config.programs.opencl_musl];
    let [driver, musl] = drivers.map(|path| files::open("the accelerator's driver for guests", path, NO_ACCELERATOR));
    let (driver, musl) = (driver?, musl?);
    let cuda = apis(accelerator.api).1.then_some(&config.programs.cuda);
    let cuda = cuda.map(|path| files::open("CUDA's libraries for guests", path, NO_ACCELERATOR));
    let cuda = cuda.transpose()?;
    let identity = launch::identity(config, stored);
    let vsock = vsock(identity, paths)?;
    let (own, theirs) = UnixStream::pair().map_err(Error::host("having a pair of sockets"))?;
    let log = files::append(&paths.accelerator_log())?;
    let save = files::listen(&paths.accelerator_save(), SocketType::STREAM)?;
    let arbiter = arbiter(identity, paths)?;
    // It listens already, for this daemon and the next one alone.
    let control = files::listen(&paths.accelerator(), SocketType::STREAM)?;
    let mut inherited = vec![
        ("--vsock-fd", vsock.as_fd()),
        ("--window-fd", window.0.as_fd()),
        ("--driver-fd", driver.as_fd()),
        ("--musl-driver-fd", musl.as_fd()),
        ("--ready-fd", theirs.as_fd()),
        ("--save-fd", save.as_fd()),
        ("--control-fd", control.as_fd()),
    ];
    inherited.extend(cuda.as_ref().map(|cuda| ("--cuda-driver-fd", cuda.as_fd())));
    inherited.extend(saved.as_ref().map(|saved| ("--restore-fd", saved.as_fd())));
    inherited.extend(arbiter.as_ref().map(|arbiter| ("--arbiter-fd", arbiter.as_fd())));
    let (options, descriptors): (Vec<_>, Vec<_>) = inherited.into_iter().unzip();
    let mut words: Vec<String> = vec![program.display().to_string()];
    for (index, option) in options.into_iter().enumerate() {
        words.extend([option.to_owned(), jail::number_of(index).to_string()]);
    }
    words.extend(["--memory".to_owned(), accelerator.memory.bytes().to_string()]);
    words.extend(["--backend".to_owned(), accelerator.api.to_string()]);
    words.extend(["--log-level".to_owned(), config.log_level.as_str().to_ascii_lowercase()]);
    if let Some(transport) = accelerator.transport {
        words.extend(["--transports".to_owned(), transport.to_string()]);
    }
    if let Some(micros) = accelerator.poll_us {
        words.extend(["--busy-poll".to_owned(), micros.to_string()]);
    }
    // Memory of such a machine stays where it is.
    words.extend(
        stored
            .sandbox
            .config
            .resources
            .class
            .is_bare()
            .then(|| "--pinned".to_owned()),
    );
    words.extend(identity.map(|_| "--jail".to_owned()));
    let arguments: Vec<CString> = words.into_iter().filter_map(|word| CString::new(word).ok()).collect();
    let cgroup = cgroup.map(File::open).transpose();
    let cgroup = cgroup.map_err(Error::host("opening the sandbox's cgroup"))?;
    let child = jail::spawn(&Launch {
        program: program_file.as_fd(),
        arguments: &arguments,
        environment: &[],
        descriptors: &descriptors,
        log: log.as_fd(),
        cgroup: cgroup.as_ref().map(AsFd::as_fd),
        isolation: identity.map_or(Isolation::None, Isolation::Full),
        open_files: None,
        locks_memory: false,
    })?;
    drop(theirs);
    // It fills the window before.
    let limit = config.limits.answer + space::time_for(saved.as_ref().map_or(0, |_| accelerator.window.bytes()));
    wait(&own, limit, paths).inspect_err(|_| {
        // It has ended, or is of no use; nobody knows of it yet.
        let killed = child.kill().and_then(|()| child.wait());
        if let Err(error) = killed {
            log::error!("an accelerator's server that did not start cannot be reaped: {error}");
        }
    })?;
    Ok(Launched {
        child,
        known: Some(own),
        restores: saved.is_some(),
    })
}

/// The socket by which the VMM connects to its guest. For a server in a jail it is that user's as whom it runs.
fn vsock(identity: Option<Identity>, paths: &SandboxPaths) -> Result<OwnedFd, Error> {
    let path = paths.vsock();
    if let Some(identity) = identity {
        chown(&path, Some(identity.uid), Some(identity.gid)).map_err(Error::file("change the owner of", &path))?;
    }
    for_server(identity, &path)
}

/// The directory with the arbiter's socket, if the server's time is divided; that is the server's user's already.
fn arbiter(identity: Option<Identity>, paths: &SandboxPaths) -> Result<Option<OwnedFd>, Error> {
    let path = paths.arbiter();
    path.is_dir().then(|| for_server(identity, &path)).transpose()
}

/// What is at a path, to which a server in a jail has no way; for one it is a mount, which can be brought into a root of its own.
fn for_server(identity: Option<Identity>, path: &Path) -> Result<OwnedFd, Error> {
    let opened = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let opened = opened.map_err(Error::file("open", path))?;
    match identity {
        Some(_) => Ok(host::share::read_only(opened.as_fd(), path)?),
        None => Ok(opened),
    }
}

/// Until it says that the window is ready.
fn wait(mut ready: &UnixStream, limit: Duration, paths: &SandboxPaths) -> Result<(), Error> {
    if !process::readable(ready, limit) {
        return Err(Error::Deadline {
            what: "the accelerator's server",
            limit,
        });
    }
    let mut said = [0; 6];
    let read = ready.read_exact(&mut said);
    if read.is_ok() && &said == b"ready\n" {
        return Ok(());
    }
    let log = std::fs::read(paths.accelerator_log()).unwrap_or_default();
    let last = String::from_utf8_lossy(&log[log.len().saturating_sub(LAST_WORDS)..]);
    Err(Error::AcceleratorEnded(match last.trim() {
        "" => "it said nothing; `basalt-accel-server --version` shows whether it can be started at all".to_owned(),
        words => words.to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How going on from a state ends if its server says this, and if that is all that it says.
    fn waited(says: &str, ends: bool) -> Result<(), String> {
        let (own, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(says.as_bytes()).unwrap();
        let theirs = (!ends).then_some(theirs);
        let waited = Restoring(own).wait(Duration::from_millis(100));
        drop(theirs);
        waited.map_err(|error| error.to_string())
    }

    #[test]
    fn a_server_that_has_not_made_again_what_was_saved_is_told_of() {
        assert_eq!(waited("restored\n", false), Ok(()));
        let told = waited("lost a program is not built\n", false).unwrap_err();
        assert!(told.ends_with("cannot be made again: a program is not built"), "{told}");
        for said in ["", "restored", "known\n"] {
            let told = waited(said, true).unwrap_err();
            assert!(
                told.contains("its server has ended before it was done"),
                "{said}: {told}"
            );
        }
        let told = waited("resto", false).unwrap_err();
        assert!(told.contains("took longer than"), "{told}");
        assert!(waited(&"x".repeat(LAST_WORDS), false).is_err());
    }
}
