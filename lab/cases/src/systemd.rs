//! A Debian system with systemd as its PID 1, in namespaces of its own beside the lab's init: this host's root below, a
//! directory above, a cgroup that is all it sees. It boots, runs commands, powers off and boots again.
//!
//! Does not know what is installed in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use host::cgroup::{Limits, Root};

use crate::basalt::expect_code;

/// What its cgroup is below.
const CGROUPS: &str = "basalt-machines";

/// How long booting and powering off may take on an emulated host.
const PATIENCE: Duration = Duration::from_secs(150);

/// Mounts as a container has them, then systemd in their midst. `$1` is the machine's directory, `$2` its cgroup. The cgroup
/// is entered before its namespace is made, and by this process alone: its root must be empty for systemd to share it out.
/// `mount` without -n would make a /run/mount of this host's. The root is changed by pivot_root: who is in a chroot may make
/// no user namespaces. `/dev/basalt` is there where somebody has loaded its module.
const INIT: &str = r#"
root=$1/root
mount -n --make-rprivate /
mount -n -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$root"
mount -n -t proc proc "$root/proc"
mount -n -t sysfs sysfs "$root/sys"
mount -n -t tmpfs -o mode=755 tmpfs "$root/run"
mount -n -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -n -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/net" "$root/dev/pts" "$root/dev/shm"
devices="null zero full random urandom tty kvm net/tun"
[ ! -e /dev/basalt ] || devices="$devices basalt"
for device in $devices; do
    : >"$root/dev/$device"
    mount -n --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mount -n -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -n -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ip link set lo up
echo 0 >"$2/cgroup.procs"
exec unshare --cgroup sh -euc '
    mount -n -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
    cd "$1"
    pivot_root . mnt
    cd /
    umount -n -l /mnt
    exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd
' sh "$root"
"#;

/// Services of a minimal Debian that only cost time here.
const MASKED: [&str; 7] = [
    "systemd-logind.service",
    "getty.target",
    "console-getty.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "e2scrub_reap.service",
    "systemd-journal-flush.service",
];

/// A machine's files; it does not run.
pub(crate) struct Machine {
    directory: PathBuf,
    cgroups: Root,
}

/// A machine that runs. Dropping it kills it with all that runs in it.
pub(crate) struct Running<'m> {
    machine: &'m Machine,
    /// `unshare`, which dies with its child and the child with it.
    outer: Child,
    /// Its PID 1, as this host numbers it.
    init: i32,
    begun: Instant,
}

impl Machine {
    /// A machine in `directory`, which must be on a file system that can be an overlay's upper layer.
    pub(crate) fn new(directory: &Path) -> Result<Self> {
        for name in ["root", "upper/etc/systemd/system", "work"] {
            fs::create_dir_all(directory.join(name))?;
        }
        for unit in MASKED {
            std::os::unix::fs::symlink("/dev/null", directory.join("upper/etc/systemd/system").join(unit))?;
        }
        Ok(Self {
            directory: directory.to_owned(),
            cgroups: Root::open(CGROUPS)?,
        })
    }

    /// A path of the machine, while it does not run: what was changed of this host's root.
    pub(crate) fn path(&self, path: &str) -> PathBuf {
        self.directory.join("upper").join(path.trim_start_matches('/'))
    }

    /// Starts it, and waits until its systemd has started everything.
    pub(crate) fn boot(&self) -> Result<Running<'_>> {
        self.remove_cgroup()?;
        let cgroup = self.cgroups.create("machine", &Limits::default())?;
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.directory.join("boot.log"))?;
        let mut outer = Command::new("unshare");
        outer
            .args(["--mount", "--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"])
            .args(["sh", "-euxc", INIT, "sh"])
            .args([self.directory.as_path(), cgroup.path()])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let outer = outer.spawn().context("unshare")?;
        let mut running = Running {
            machine: self,
            outer,
            init: 0,
            begun: Instant::now(),
        };
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = running.outer.try_wait()? {
                bail!("the machine ended at once with {status}:\n{}", self.boot_log());
            }
            if running.is_up()? {
                return Ok(running);
            }
            ensure!(
                Instant::now() < end,
                "the machine does not come up:\n{}",
                self.boot_log()
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn boot_log(&self) -> String {
        fs::read_to_string(self.directory.join("boot.log")).unwrap_or_default()
    }

    /// Its cgroup with all that its systemd has left below: a new one could not even enter it.
    fn remove_cgroup(&self) -> Result<()> {
        if let Some(cgroup) = self.cgroups.find("machine")? {
            cgroup.wait_empty(Duration::from_secs(20))?;
            remove_below(cgroup.path())?;
        }
        Ok(self.cgroups.remove("machine")?)
    }

    /// Takes its cgroups away; its files are the case's.
    pub(crate) fn remove(self) -> Result<()> {
        self.remove_cgroup()?;
        Ok(self.cgroups.remove_root()?)
    }
}

/// The cgroups that a systemd has left below its own.
fn remove_below(path: &Path) -> Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_below(&entry.path())?;
            fs::remove_dir(entry.path())?;
        }
    }
    Ok(())
}

impl Running<'_> {
    /// Whether its systemd answers and has nothing left to start.
    fn is_up(&mut self) -> Result<bool> {
        let outer = self.outer.id();
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap_or_default();
        let Some(init) = children.split_whitespace().next() else {
            return Ok(false);
        };
        self.init = init.parse()?;
        let is_systemd = fs::read_to_string(format!("/proc/{init}/comm")).is_ok_and(|name| name.trim() == "systemd");
        if !is_systemd {
            return Ok(false);
        }
        let said = self.run(&["systemctl", "is-system-running"])?;
        let state = String::from_utf8_lossy(&said.stdout).trim().to_owned();
        Ok(state == "running" || state == "degraded")
    }

    /// Runs a command in it, to its end.
    pub(crate) fn run(&self, words: &[&str]) -> Result<Output> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", self.init));
        command.args([
            "--mount", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--root", "--wd",
        ]);
        command
            .args(words)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("BASALT_ENGINE", "kvm");
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        let begun = Instant::now();
        let output = command.stdin(Stdio::null()).output()?;
        let (since, took) = (self.begun.elapsed().as_secs_f32(), begun.elapsed().as_secs_f32());
        let first: String = words.join(" ").chars().take(100).collect();
        #[expect(clippy::print_stderr, reason = "a case's own output, kept beside it")]
        {
            eprintln!("{since:6.2} s: after {took:5.2} s: {first}");
        }
        Ok(output)
    }

    /// Runs a command that must end with 0; what it printed.
    pub(crate) fn ok(&self, words: &[&str]) -> Result<String> {
        let output = self.run(words)?;
        expect_code(&output, 0).with_context(|| words.join(" "))?;
        Ok(String::from_utf8(output.stdout)?.trim_end().to_owned())
    }

    /// Powers it off, as an administrator does; how long that took.
    pub(crate) fn power_off(mut self) -> Result<Duration> {
        let begun = Instant::now();
        self.ok(&["systemctl", "poweroff"])?;
        while self.outer.try_wait()?.is_none() {
            ensure!(begun.elapsed() < PATIENCE, "the machine does not power off");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(begun.elapsed())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // Errors: it has ended, which is what is wanted.
        drop(self.outer.kill());
        drop(self.outer.wait());
        if let Ok(Some(cgroup)) = self.machine.cgroups.find("machine") {
            drop(cgroup.kill());
        }
    }
}
