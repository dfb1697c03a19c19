//! What is asked wrongly, or cannot work, ends with one clear sentence, a sensible exit code and nothing left behind.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::archive;
use crate::basalt::{expect_refusal, finish, run};
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const REFUSALS: Case = Case {
    name: "refusals",
    limit: Duration::from_secs(200),
    host: refusals,
    guest: None,
};

pub(crate) const BROKEN_GUESTS: Case = Case {
    name: "broken-guests",
    limit: Duration::from_secs(300),
    host: broken_guests,
    guest: None,
};

pub(crate) const BROKEN_HOSTS: Case = Case {
    name: "broken-hosts",
    limit: Duration::from_secs(200),
    host: broken_hosts,
    guest: None,
};

fn refusals(host: &Host) -> Result<()> {
    let wrong: [(&[&str], i32, &[&str]); 9] = [
        (
            &["run", "no-such-image", "--", "true"],
            125,
            &["no-such-image", "basalt import"],
        ),
        (
            &["run", "--cpus", "0", host.digest.as_str(), "--", "true"],
            125,
            &["CPU"],
        ),
        (
            &["run", "--cpus", "1000", host.digest.as_str(), "--", "true"],
            125,
            &["1000"],
        ),
        (
            &["run", "--memory", "900t", host.digest.as_str(), "--", "true"],
            125,
            &["host has"],
        ),
        (
            &["run", "--memory", "1m", host.digest.as_str(), "--", "true"],
            125,
            &["32 MiB"],
        ),
        (
            &["run", "--no-such-flag", host.digest.as_str()],
            125,
            &["--no-such-flag"],
        ),
        (&["import", "/no/such/file"], 1, &["/no/such/file", "podman save"]),
        (
            &["run", "--user", "no-such-user", host.digest.as_str(), "--", "true"],
            125,
            &["no-such-user", "or a number"],
        ),
        (
            &["run", "--workdir", "/no/such/place", host.digest.as_str(), "--", "true"],
            125,
            &["/no/such/place", "give one that exists"],
        ),
    ];
    for (arguments, code, words) in wrong {
        expect_refusal(&run(host, arguments, b"")?, code, words).with_context(|| format!("basalt {arguments:?}"))?;
    }
    Ok(())
}

/// A directory of assets in which some are replaced.
fn assets(host: &Host, name: &str, replaced: &[(&str, &[u8])]) -> Result<PathBuf> {
    let directory = host.scratch.join(name);
    fs::create_dir(&directory)?;
    for entry in fs::read_dir(host.binaries.join("basalt-assets"))? {
        let entry = entry?;
        symlink(entry.path().canonicalize()?, directory.join(entry.file_name()))?;
    }
    for (name, bytes) in replaced {
        let path = directory.join(name);
        if path.symlink_metadata().is_ok() {
            fs::remove_file(&path)?;
        }
        fs::write(path, bytes)?;
    }
    Ok(directory)
}

/// A run by a daemon of its own that has these assets.
fn run_with(host: &Host, assets: &Path) -> Result<std::process::Output> {
    let daemon = Daemon::with_templates(host)?;
    let mut command = daemon.command(&["run", host.digest.as_str(), "--", "true"]);
    let output = command.env("BASALT_ASSETS", assets).output()?;
    daemon.end()?;
    fs::remove_dir_all(host.scratch.join("state"))?;
    Ok(output)
}

fn broken_guests(host: &Host) -> Result<()> {
    let kernel = fs::read(host.asset("vmlinux"))?;
    let half = kernel.get(..kernel.len() / 2).context("an empty kernel")?;
    let output = run_with(host, &assets(host, "half-kernel", &[("vmlinux", half)])?)?;
    expect_refusal(&output, 125, &["kernel"]).context("a truncated kernel")?;
    // Without an init the kernel panics, having found nothing to mount either.
    let output = run_with(host, &assets(host, "no-init", &[("initramfs.cpio", b"")])?)?;
    expect_refusal(&output, 125, &["panic"]).context("a guest whose kernel panics")?;
    let output = run_with(host, &assets(host, "no-assets", &[])?.join("nowhere"))?;
    expect_refusal(&output, 125, &["BASALT_ASSETS"]).context("no assets")?;
    halted_guests(host)
}

/// reboot(2), `LINUX_REBOOT_CMD_HALT`: what `halt -f` does.
const HALT: &str = "import ctypes; ctypes.CDLL(None).reboot(0xcdef0123)";

/// A guest that halts has ended; one that only has nothing to do has not.
fn halted_guests(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    daemon.idle("idle")?;
    let image = host.digest.as_str();
    for cpus in ["1", "2"] {
        daemon.ok(&[
            "run", "-d", "--name", cpus, "--cpus", cpus, "--memory", "128m", image, "--", "python3", "-c", HALT,
        ])?;
    }
    for cpus in ["1", "2"] {
        ensure!(
            daemon.ok(&["wait", cpus])? == "125\n",
            "it did not fail with {cpus} CPUs"
        );
        let sandbox = daemon.find(cpus)?.context("it is gone")?;
        let told = sandbox["ended"].to_string();
        ensure!(
            sandbox["state"] == "exited" && told.contains("the guest halted its processors"),
            "with {cpus} CPUs it is {sandbox}"
        );
    }
    let idle = daemon.find("idle")?.context("it is gone")?;
    ensure!(idle["state"] == "running", "the idle one is {idle}");
    daemon.end()
}

fn broken_hosts(host: &Host) -> Result<()> {
    // /dev/kvm is hidden in a mount namespace of the command's own. Without -n the first `mount` after the host's start
    // would leave a /run/mount behind.
    let basalt = host.binaries.join("basalt");
    let script = format!(
        "mount -n --bind /dev/null /dev/kvm && exec {} run --rm --network none {} -- true",
        basalt.display(),
        host.digest
    );
    let daemon = Daemon::with_templates(host)?;
    let output = finish(
        Command::new("unshare")
            .args(["--mount", "sh", "-c", &script])
            .env("BASALT_ENGINE", "kvm")
            .env("BASALT_STATE", &daemon.state),
        b"",
    )?;
    daemon.end()?;
    expect_refusal(&output, 125, &["KVM", "basalt doctor"]).context("KVM that is none")?;

    // A store on a file system that is too small for the image. The mount goes with the namespace.
    let archive = host.scratch.join("image.tar");
    archive::make(&archive, "big", &[("data", &vec![7; 2 << 20])])?;
    let state = host.scratch.join("small");
    fs::create_dir(&state)?;
    let script = format!(
        "mount -n -t tmpfs -o size=256k none {0} && BASALT_STATE={0} {1} import --name big {2}; code=$?; \
         find {0} -type f -size +0 | grep -v -E 'names.json|lock' | sed 's/^/left: /' >&2; exit $code",
        state.display(),
        basalt.display(),
        archive.display()
    );
    let output = finish(Command::new("unshare").args(["--mount", "sh", "-c", &script]), b"")?;
    expect_refusal(&output, 1, &["space"]).context("no space left")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(!text.contains("left: "), "files are left behind: {text}");
    Ok(())
}
