//! Where a client runs: natively on a driver, or on the library with a server that has the driver.
//!
//! Knows programs and their environment, and no client.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::context::Context;
use crate::runner::Task;

/// How long a server may take to be there: a loader and a driver are opened, on a machine that does other work.
const START: Duration = Duration::from_secs(60);
/// What is left to a client between SIGTERM and SIGKILL.
const GRACE: &str = "--kill-after=10";
/// Beside `timeout`'s own limit, which ends a client and tells so.
const MARGIN: Duration = Duration::from_secs(60);
/// timeout(1): what it ends with when the time is over, and when SIGTERM was not enough.
const OVERDUE: [i32; 2] = [124, 137];

/// What was built of ours.
#[derive(Debug, Clone)]
pub(super) struct Programs {
    pub(super) server: PathBuf,
    pub(super) library: PathBuf,
    /// The examples that measure transfers and launches; built for the figures alone.
    pub(super) transfer: PathBuf,
    pub(super) launch: PathBuf,
}

/// Directories of one command's run.
#[derive(Debug, Clone)]
pub(super) struct Places {
    /// What the recipe has made.
    pub(super) artefact: PathBuf,
    /// Made anew for each run.
    pub(super) scratch: PathBuf,
    /// Kernels that PoCL has compiled, which stay.
    kernels: PathBuf,
    /// Files of the checkout: the plugin of pytest.
    pub(super) sources: PathBuf,
    /// PoCL's device, if it is not the default.
    pub(super) devices: Option<&'static str>,
}

impl Places {
    pub(super) fn new(context: &Context, artefact: PathBuf, name: &str) -> Result<Self> {
        let scratch = super::scratch(context, name);
        if scratch.exists() {
            fs::remove_dir_all(&scratch).with_context(|| format!("cannot remove {}", scratch.display()))?;
        }
        fs::create_dir_all(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
        Ok(Self {
            artefact,
            scratch,
            kernels: context.cache.join("accel-clients-kernels"),
            sources: context.root.join(super::DIRECTORY),
            devices: None,
        })
    }

    /// A directory in which a loader finds one driver, for OCL_ICD_VENDORS.
    fn vendors(&self, name: &str, driver: &Path) -> Result<PathBuf> {
        let directory = self.scratch.join("vendors").join(name);
        fs::create_dir_all(&directory)?;
        fs::write(directory.join("one.icd"), format!("{}\n", driver.display()))?;
        Ok(directory)
    }

    /// The driver of a back end.
    fn driver(&self, backend: &str) -> Result<PathBuf> {
        match backend {
            "pocl" => {
                let file = Path::new("/etc/OpenCL/vendors/pocl.icd");
                let text = fs::read_to_string(file)
                    .with_context(|| format!("cannot read {}; install pocl-opencl-icd", file.display()))?;
                Ok(text.trim().into())
            }
            "oclgrind" => Ok(self.artefact.join("root/usr/lib/oclgrind/liboclgrind-rt-icd.so")),
            other => bail!(
                "there is no back end {other}; there are {}",
                super::BACKENDS.join(" and ")
            ),
        }
    }

    /// The unpacked libraries.
    pub(super) fn libraries(&self) -> PathBuf {
        self.artefact.join("root/usr/lib/x86_64-linux-gnu")
    }

    /// A program with the unpacked libraries, whose loader finds these drivers alone.
    fn program(&self, program: impl AsRef<OsStr>, vendors: &Path) -> Command {
        let libraries = self.libraries();
        let libraries = ["", "blas", "piglit/lib"].map(|part| libraries.join(part).display().to_string());
        let libraries = libraries.join(":");
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", libraries)
            .env("OCL_ICD_VENDORS", vendors)
            .env("POCL_CACHE_DIR", &self.kernels);
        if let Some(devices) = self.devices {
            command.env("POCL_DEVICES", devices);
        }
        command
    }
}

/// A server with one back end; it ends with this.
pub(super) struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    /// Starts one and waits for its socket. Its messages are in the file `server.log` of `directory`.
    pub(super) fn start(places: &Places, programs: &Programs, backend: &str, directory: &Path) -> Result<Self> {
        fs::create_dir_all(&places.kernels)?;
        let vendors = places.vendors(backend, &places.driver(backend)?)?;
        let (socket, log) = (directory.join("socket"), directory.join("server.log"));
        // Another server's, which would look like this one's.
        if socket.exists() {
            fs::remove_file(&socket)?;
        }
        // It ends with this process, however that does. setpriv(1) changes nothing else.
        let mut command = places.program("setpriv", &vendors);
        command.args(["--pdeathsig", "KILL", "--"]).arg(&programs.server);
        command.arg("--socket").arg(&socket).args(["--backend", "opencl"]);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?);
        let child = command
            .process_group(0)
            .spawn()
            .context("cannot start setpriv (util-linux)")?;
        let mut server = Self { child, socket };
        let begun = Instant::now();
        while !server.socket.exists() {
            if let Some(end) = server.ended()? {
                bail!("the server of {backend} {end} at once; {} says why", log.display());
            }
            if begun.elapsed() > START {
                bail!(
                    "the server of {backend} has no socket after {} s; see {}",
                    START.as_secs(),
                    log.display()
                );
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&mut self) -> Result<Option<String>> {
        let status = self.child.try_wait()?;
        Ok(status.map(|status| format!("ended with {status}")))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One client's place on one side, and what runs commands there.
pub(super) struct Side<'a> {
    pub(super) places: &'a Places,
    pub(super) backend: &'static str,
    /// What the client may fill: home, caches, files.
    pub(super) directory: PathBuf,
    vendors: PathBuf,
    server: Option<Server>,
    task: &'a mut Task,
}

/// A client that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) out: Vec<String>,
    /// `exit status: 0`, or a signal, or that it took too long.
    pub(super) how: String,
}

impl<'a> Side<'a> {
    /// The client on the driver itself, or, with programs of ours, on the library.
    pub(super) fn new(
        places: &'a Places,
        programs: Option<&Programs>,
        of: (&str, &'static str),
        task: &'a mut Task,
    ) -> Result<Self> {
        let (client, backend) = of;
        let name = if programs.is_some() { "forwarded" } else { "native" };
        let directory = places.scratch.join(format!("{client}-{backend}")).join(name);
        fs::create_dir_all(directory.join("home"))?;
        let (vendors, server) = match programs {
            Some(programs) => {
                let server = Server::start(places, programs, backend, &directory)?;
                (places.vendors("basalt", &programs.library)?, Some(server))
            }
            None => (places.vendors(backend, &places.driver(backend)?)?, None),
        };
        task.say(&format!("{client} on {backend}, {name}"))?;
        Ok(Self {
            places,
            backend,
            directory,
            vendors,
            server,
            task,
        })
    }

    /// A program of the recipe's, of the machine's or of a path, which is ended after so many seconds.
    pub(super) fn command(&self, program: &str, seconds: u64) -> Command {
        let unpacked = self.places.artefact.join("root/usr/bin").join(program);
        let mut command = self.places.program("timeout", &self.vendors);
        command.args([GRACE, &seconds.to_string()]);
        command.arg(if unpacked.exists() {
            unpacked.as_os_str()
        } else {
            OsStr::new(program)
        });
        let home = self.directory.join("home");
        command.current_dir(&self.directory).env("HOME", &home);
        for cache in ["XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"] {
            command.env(cache, &home);
        }
        if let Some(server) = &self.server {
            command
                .env("BASALT_ACCEL_SOCKET", &server.socket)
                .env("BASALT_ACCEL_DEBUG", "1");
        }
        command
    }

    /// Runs one to its end, whatever that is.
    pub(super) fn run(&mut self, command: &mut Command, seconds: u64) -> Result<Ended> {
        let limit = Duration::from_secs(seconds) + MARGIN;
        let finished = self.task.finish_within(command, limit)?;
        let overdue = finished.status.code().is_some_and(|code| OVERDUE.contains(&code));
        let how = if overdue {
            format!("was ended after {seconds} s")
        } else {
            finished.status.to_string()
        };
        Ok(Ended { out: finished.out, how })
    }

    /// How its server has ended, if it has one and that should not have been.
    pub(super) fn server_ended(&mut self) -> Result<Option<String>> {
        self.server.as_mut().map_or(Ok(None), Server::ended)
    }
}
