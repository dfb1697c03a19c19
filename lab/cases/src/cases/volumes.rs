//! Directories of the host and named volumes in sandboxes: used as programs use files, by two sandboxes at once, through
//! deaths of the daemon and of a VMM. The guest's half is `volumes.py` beside this file.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::basalt::{expect_code, expect_refusal};
use crate::daemon::{Daemon, kill, wait_for};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "volumes",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// What the threads that serve directories keep: CAP_CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID
/// (linux/capability.h: 0, 1, 3, 4, 6, 7).
const FILES: u64 = 0b1101_1011;

const BIG: usize = 2 << 20;

fn host(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let shared = host.scratch.join("shared");
    let read_only = host.scratch.join("ro");
    prepare(host, &shared, &read_only)?;
    refusals(&daemon, host)?;

    let image = host.digest.as_str();
    let link = format!("{}:/shared", host.scratch.join("link").display());
    let ro = format!("{}:/ro/:ro", read_only.display());
    let run = |name: &str| {
        let words = ["run", "-d", "--name", name, "--memory", "192m", "-v", &link, "-v", &ro];
        let words = words
            .into_iter()
            .chain(["-v", "kept:/data", image, "--", "sleep", "10000"]);
        daemon.ok(&words.collect::<Vec<_>>())
    };
    let first = run("one")?.trim().to_owned();
    let found = daemon.find("one")?.context("it is gone")?;
    ensure!(
        found["volumes"][0]["directory"] == shared.display().to_string(),
        "a link is resolved once, and told: {}",
        found["volumes"]
    );
    jail(&daemon, 6)?;
    let said = daemon.ok(&["exec", "one", "python3", "/shared/volumes.py"])?;
    ensure!(said == "all is well\n", "the guest's half said {said:?}");
    found_on_the_host(&shared)?;
    ensure!(fs::read(host.scratch.join("secret"))? == b"secret", "something got out");

    // Another sandbox has the same; what one writes the other sees, as soon as it may not believe its cache any more.
    let second = run("two")?.trim().to_owned();
    daemon.ok(&[
        "exec",
        "two",
        "sh",
        "-c",
        "cat /data/kept && echo from two > /shared/news",
    ])?;
    wait_for("news of another sandbox", || {
        Ok(daemon.run(&["exec", "one", "cat", "/shared/news"])?.stdout == b"from two\n")
    })?;
    fs::write(shared.join("news"), "from the host\n")?;
    wait_for("news of the host", || {
        Ok(daemon.run(&["exec", "one", "cat", "/shared/news"])?.stdout == b"from the host\n")
    })?;

    // The daemon's death is not noticed, nor a VMM's by another sandbox with the same directory.
    daemon.kill()?;
    daemon.ok(&["exec", "one", "sh", "-c", "echo on >> /shared/news; sync"])?;
    ensure!(
        fs::read(shared.join("news"))? == b"from the host\non\n",
        "writing stopped with the daemon"
    );
    daemon.ok(&["pause", "one"])?;
    daemon.ok(&["unpause", "one"])?;
    expect_code(&daemon.run(&["exec", "one", "cat", "/ro/file"])?, 0)?;
    let vmm = found["vmm"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    kill(vmm.and_then(rustix::process::Pid::from_raw).context("no VMM")?)?;
    wait_for("the dead one's end", || {
        Ok(daemon.find("one")?.is_some_and(|one| one["state"] == "exited"))
    })?;
    expect_code(&daemon.run(&["exec", "two", "cat", "/shared/news"])?, 0)?;
    // A mount that is in no namespace ends with the last descriptor of it: the daemon keeps none. This daemon's first VMM has it
    // make the jails' network namespace, which it keeps.
    let three = || {
        run("three")?;
        daemon.ok(&["rm", "--force", "three"])
    };
    three()?;
    let before = daemon.descriptors()?;
    three()?;
    wait_for("the daemon to have what it had open before", || {
        Ok(daemon.descriptors()? <= before)
    })?;
    daemon.expect_no_strangers(&[&first, &second])?;

    named(&daemon, image)?;
    daemon.end()
}

fn prepare(host: &Host, shared: &Path, read_only: &Path) -> Result<()> {
    fs::create_dir(shared)?;
    fs::create_dir(read_only)?;
    symlink(shared, host.scratch.join("link"))?;
    fs::write(read_only.join("file"), "read me")?;
    fs::write(host.scratch.join("secret"), "secret")?;
    fs::write(host.scratch.join("file"), "no directory")?;
    symlink("../secret", shared.join("out"))?;
    symlink(host.scratch.join("secret"), shared.join("out2"))?;
    symlink("/proc/1/root/var/lib/basalt", shared.join("magic"))?;
    fs::write(shared.join("volumes.py"), include_str!("volumes.py"))?;
    let mut big = vec![0; BIG];
    let mut state = 1_u32;
    for byte in &mut big {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = state.to_be_bytes()[0];
    }
    fs::write(shared.join("big"), &big)?;
    fs::write(shared.join("big.sha256"), sum(&shared.join("big"))?)?;
    big.reverse();
    fs::write(host.scratch.join("big.reversed"), &big)?;
    Ok(())
}

fn sum(path: &Path) -> Result<String> {
    let output = Command::new("sha256sum").arg(path).output()?;
    expect_code(&output, 0)?;
    let text = String::from_utf8(output.stdout)?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}

fn found_on_the_host(shared: &Path) -> Result<()> {
    let reversed = shared.with_file_name("big.reversed");
    ensure!(
        sum(&shared.join("big.back"))? == sum(&reversed)?,
        "what came back is not what went"
    );
    let owner = |name: &str| -> Result<(u32, u32, u32)> {
        let found = fs::symlink_metadata(shared.join(name))?;
        Ok((found.uid(), found.gid(), found.mode() & 0o7777))
    };
    for (name, wanted) in [
        ("file", (1234, 5678, 0o6755)),
        ("theirs", (1000, 1000, 0o755)),
        ("theirs/made", (1000, 1000, 0o644)),
        ("private", (0, 0, 0o700)),
    ] {
        ensure!(owner(name)? == wanted, "{name} is {:?} on the host", owner(name)?);
    }
    Ok(())
}

/// Only the threads that serve directories, two for each, have rights to files, and only those.
pub(super) fn jail(daemon: &Daemon<'_>, threads: usize) -> Result<()> {
    let vmm = daemon.processes("basalt-vmm")?;
    let pid = vmm.first().context("no VMM")?.as_raw_nonzero();
    let mut serving = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        let name = fs::read_to_string(task.join("comm"))?;
        let status = fs::read_to_string(task.join("status"))?;
        let value = |key: &str| -> Result<u64> {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(key))
                .context("no such line")?;
            Ok(u64::from_str_radix(line.trim(), 16)?)
        };
        let wanted = match name.trim() {
            name if name.starts_with("fs-q") => {
                serving += 1;
                FILES
            }
            "threads-priv" => FILES,
            _ => 0,
        };
        for set in ["CapEff:", "CapPrm:"] {
            ensure!(
                value(set)? == wanted,
                "{name} has {set} {:x}, not {wanted:x}",
                value(set)?
            );
        }
        ensure!(
            value("CapBnd:")? == 0 && value("CapAmb:")? == 0,
            "{name} could have more"
        );
        ensure!(
            value("NoNewPrivs:")? == 1 && value("Seccomp:")? == 2,
            "{name} is not confined"
        );
    }
    ensure!(serving == threads, "{serving} threads serve directories, not {threads}");
    Ok(())
}

fn refusals(daemon: &Daemon<'_>, host: &Host) -> Result<()> {
    let image = host.digest.as_str();
    let scratch = host.scratch.display().to_string();
    for (volume, words) in [
        (format!("{scratch}/missing:/x"), &["is not there", "mkdir"][..]),
        (format!("{scratch}/file:/x"), &["is no directory"]),
        (format!("{scratch}/shared:x"), &["absolute"]),
        (format!("{scratch}/shared:/proc"), &["/proc"]),
        (format!("{scratch}/shared:/"), &["absolute"]),
        ("-name:/x".to_owned(), &["letters"]),
        ("nothing".to_owned(), &["HOST:GUEST"]),
        ("/proc:/x".to_owned(), &["cannot map owners"]),
    ] {
        let volume = format!("--volume={volume}");
        let output = daemon.run(&["run", &volume, image, "--", "true"])?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(125), "{volume}: {} {text}", output.status);
        for word in words {
            ensure!(
                text.contains(word),
                "{volume}: the message does not say `{word}`: {text}"
            );
        }
    }
    daemon.expect_no_strangers(&[])
}

/// A named volume is there as long as nobody removes it, and nobody does who should not.
fn named(daemon: &Daemon<'_>, image: &str) -> Result<()> {
    expect_refusal(
        &daemon.run(&["volume", "rm", "kept"])?,
        1,
        &["has the volume `kept`", "basalt rm"],
    )?;
    daemon.ok(&["rm", "--force", "one", "two"])?;
    let read = [
        "run",
        "--memory",
        "128m",
        "-v",
        "kept:/data:ro",
        image,
        "--",
        "cat",
        "/data/kept",
    ];
    ensure!(daemon.ok(&read)? == "kept", "a named volume was lost");
    daemon.ok(&["volume", "create", "spare", "kept"])?;
    let listed = daemon.ok(&["volume", "ls"])?;
    ensure!(
        listed.contains("kept") && listed.contains("spare"),
        "volume ls shows {listed}"
    );
    let inspected = daemon.ok(&["volume", "inspect", "kept"])?;
    ensure!(
        inspected.contains("volumes/kept/_data"),
        "volume inspect shows {inspected}"
    );
    daemon.ok(&["volume", "rm", "kept"])?;
    expect_refusal(&daemon.run(&["volume", "rm", "kept"])?, 1, &["no volume `kept`"])?;
    ensure!(
        daemon.ok(&["volume", "prune"])? == "spare\n",
        "prune removed something else"
    );
    ensure!(
        fs::read_dir(daemon.state.join("volumes"))?.next().is_none(),
        "files of volumes are left"
    );
    Ok(())
}
