//! A VMM process in its jail, as a node's daemon starts it: namespaces, a user, a cgroup of its own, nothing inherited
//! but its control socket. Traced, when the runner wants to know which system calls it makes.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child as Tracer, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use host::cgroup::{Limits, Root};
use host::jail::{Child, Isolation, Launch, Pool, argument, spawn};
use rustix::process::WaitIdStatus;
use vmm_api::VmmClient;
use wire::packet::PacketSocket;

use crate::vm::readable;

/// The cgroup above those of the cases' VMMs.
const CGROUPS: &str = "basalt-cases";

/// By this variable `audit` tells where traces go.
pub(crate) const TRACES: &str = "BASALT_CASE_TRACES";

/// Far more than killed processes take.
const GONE: Duration = Duration::from_secs(20);

/// The host's KVM, for a VMM that cannot open it.
pub(crate) fn kvm() -> Result<File> {
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened.context("/dev/kvm cannot be opened")
}

/// A VMM process and its client.
pub(crate) struct Vmm {
    pub(crate) client: VmmClient,
    process: Child,
    status: Option<WaitIdStatus>,
    cgroup: String,
    tracer: Option<Tracer>,
}

impl Vmm {
    /// Starts one that waits for orders; its words go to a file.
    pub(crate) fn spawn(binaries: &Path, log: &PathBuf) -> Result<Self> {
        Self::spawn_with(binaries, log, None)
    }

    /// The same, maybe with something open that is said to be KVM.
    pub(crate) fn spawn_with(binaries: &Path, log: &PathBuf, kvm: Option<BorrowedFd<'_>>) -> Result<Self> {
        let inherited: Vec<_> = kvm.into_iter().map(|kvm| ("--kvm-fd", kvm)).collect();
        Self::spawn_as(binaries, log, &inherited, false)
    }

    /// The same, with KVM and the files of a snapshot, the state first, which it reads before it is asked to.
    pub(crate) fn spawn_ahead(binaries: &Path, log: &PathBuf, files: &[File]) -> Result<Self> {
        let kvm = kvm()?;
        let mut inherited = vec![("--kvm-fd", kvm.as_fd())];
        for (index, file) in files.iter().enumerate() {
            let option = if index == 0 { "--state-fd" } else { "--memory-fd" };
            inherited.push((option, file.as_fd()));
        }
        Self::spawn_as(binaries, log, &inherited, false)
    }

    /// The same, for a guest whose memory is pinned.
    pub(crate) fn spawn_pinned(binaries: &Path, log: &PathBuf) -> Result<Self> {
        Self::spawn_as(binaries, log, &[], true)
    }

    fn spawn_as(
        binaries: &Path,
        log: &PathBuf,
        inherited: &[(&str, BorrowedFd<'_>)],
        locks_memory: bool,
    ) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (near, far) = PacketSocket::pair()?;
        let far = OwnedFd::from(far);
        let log = File::create(log)?;
        let program = File::open(binaries.join("basalt-vmm")).context("basalt-vmm cannot be opened")?;
        let number = std::process::id() * 16 + COUNT.fetch_add(1, Ordering::Relaxed);
        let pool = Pool::default();
        let identity = pool.identity(number % pool.count).context("no user for a VMM")?;
        let cgroup = format!("vm-{number}");
        let words = ["basalt-vmm", "--control-fd", "3", "--jail", "--log-level", "info"];
        let mut words = words.map(str::to_owned).to_vec();
        for (number, (option, _)) in (4..).zip(inherited) {
            words.extend([(*option).to_owned(), number.to_string()]);
        }
        let arguments = words.iter().map(|word| argument(word));
        let fds = inherited.iter().map(|(_, fd)| *fd);
        let process = spawn(&Launch {
            program: program.as_fd(),
            arguments: &arguments.collect::<Result<Vec<_>, _>>()?,
            environment: &[],
            descriptors: &std::iter::once(far.as_fd()).chain(fds).collect::<Vec<_>>(),
            log: log.as_fd(),
            cgroup: Some(Root::open(CGROUPS)?.create(&cgroup, &Limits::default())?.as_fd()),
            isolation: Isolation::Full(identity),
            open_files: None,
            locks_memory,
        })
        .context("basalt-vmm cannot be started")?;
        drop(far);
        let mut vmm = Self {
            client: VmmClient::new(near),
            process,
            status: None,
            cgroup,
            tracer: None,
        };
        if let Some(directory) = std::env::var_os(TRACES) {
            vmm.tracer = Some(trace(vmm.pid(), Path::new(&directory))?);
        }
        Ok(vmm)
    }

    /// The process's number.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Waits for the process's end; tells whether it was a success.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<bool> {
        Ok(self.wait_status(limit)?.exit_status() == Some(0))
    }

    /// Waits for the process's end; tells how it was.
    pub(crate) fn wait_status(&mut self, limit: Duration) -> Result<WaitIdStatus> {
        if let Some(status) = &self.status {
            return Ok(*status);
        }
        ensure!(
            readable(&self.process.pidfd, limit)?,
            "the VMM is still there after {limit:?}"
        );
        let status = self.process.wait()?;
        self.status = Some(status);
        Ok(status)
    }

    fn clean_up(&mut self) -> Result<()> {
        let root = Root::open(CGROUPS)?;
        if let Some(cgroup) = root.find(&self.cgroup)? {
            cgroup.kill()?;
            self.wait_status(GONE)?;
            cgroup.wait_empty(GONE)?;
        }
        if let Some(tracer) = &mut self.tracer {
            tracer.wait()?;
        }
        root.remove(&self.cgroup)?;
        if root.list()?.is_empty() {
            root.remove_root()?;
        }
        Ok(())
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        if let Err(error) = self.clean_up() {
            eprintln!("a VMM was not cleaned up: {error:#}");
        }
    }
}

/// Has strace write down what a process calls, from now on.
fn trace(pid: u32, directory: &Path) -> Result<Tracer> {
    let process = Command::new("strace")
        .args(["-f", "--decode-pids=comm", "-p", &pid.to_string(), "-o"])
        .arg(directory.join(pid.to_string()))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("strace cannot be started")?;
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let mut tasks = std::fs::read_dir(format!("/proc/{pid}/task"))?.peekable();
        ensure!(tasks.peek().is_some(), "the process to be traced is gone");
        let traced = |task: std::io::Result<std::fs::DirEntry>| -> Result<bool> {
            let status = std::fs::read_to_string(task?.path().join("status"))?;
            Ok(!status.contains("TracerPid:\t0\n"))
        };
        if tasks
            .map(traced)
            .collect::<Result<Vec<_>>>()?
            .into_iter()
            .all(|yes| yes)
        {
            return Ok(process);
        }
        if Instant::now() > deadline {
            bail!("strace has not begun to trace process {pid}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
