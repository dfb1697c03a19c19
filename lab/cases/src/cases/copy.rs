//! `basalt cp` and `--tmpfs` with real guests: the agent's file system is not ours here.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::limits::start;
use crate::basalt::expect_refusal;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const COPY: Case = Case {
    name: "copy",
    limit: Duration::from_secs(300),
    host: copy,
    guest: None,
};

pub(crate) const TMPFS: Case = Case {
    name: "tmpfs",
    limit: Duration::from_secs(300),
    host: tmpfs,
    guest: None,
};

fn copy(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    start(host, &daemon, "box", &["--disk", "256m"], &["sleep", "10000"])?;
    let run = |script: &str| daemon.ok(&["exec", "box", "sh", "-c", script]);
    let path = |name: &str| host.scratch.join(name).display().to_string();

    // A tree there and back, with a link, a hole, an owner.
    fs::create_dir_all(path("tree/deep"))?;
    fs::write(path("tree/deep/file"), "text")?;
    std::os::unix::fs::symlink("deep/file", path("tree/link"))?;
    let large: Vec<u8> = (0..3_000_000_u32).map(|n| n.to_le_bytes()[1]).collect();
    fs::write(path("tree/large"), &large)?;
    let sparse = fs::File::create(path("tree/sparse"))?;
    sparse.set_len(128 << 20)?;
    drop(sparse);
    daemon.ok(&["cp", &path("tree"), "box:/srv"])?;
    let said =
        run("cd /srv/tree; cat link; readlink link; wc -c < large; stat -c '%s %b %u' sparse; sha256sum < large")?;
    let lines: Vec<_> = said.lines().collect();
    ensure!(
        said.starts_with("textdeep/file\n3000000\n134217728 "),
        "the guest has {said:?}"
    );
    let stat: Vec<u64> = lines[2].split(' ').map(str::parse).collect::<Result<_, _>>()?;
    ensure!(
        stat[1] * 512 < 1 << 20 && stat[2] == 0,
        "the sparse file is {}",
        lines[2]
    );
    run("chown 1234:1235 /srv/tree/large; chmod 4755 /srv/tree/large; mknod /srv/tree/null c 1 3")?;
    let output = daemon.run(&["cp", "box:/srv/tree/.", &path("back")])?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    ensure!(
        String::from_utf8_lossy(&output.stderr).contains("1 devices, pipes"),
        "a device was not spoken of: {output:?}"
    );
    ensure!(fs::read(path("back/large"))? == large, "the large file has changed");
    ensure!(
        fs::read_link(path("back/link"))?.to_str() == Some("deep/file"),
        "the link has changed"
    );
    let (large, sparse) = (fs::metadata(path("back/large"))?, fs::metadata(path("back/sparse"))?);
    ensure!(
        (large.mode() & 0o7777, large.uid()) == (0o755, 0),
        "{:o} of {}",
        large.mode(),
        large.uid()
    );
    ensure!(
        sparse.len() == 128 << 20 && sparse.blocks() * 512 < 1 << 20,
        "{} blocks",
        sparse.blocks()
    );
    ensure!(!host.scratch.join("back/null").exists(), "a device came out of a guest");
    daemon.ok(&["cp", "-a", "box:/srv/tree/large", &path("kept")])?;
    let kept = fs::metadata(path("kept"))?;
    ensure!(
        (kept.mode() & 0o7777, kept.uid(), kept.gid()) == (0o4755, 1234, 1235),
        "{kept:?}"
    );

    // As an archive, between two processes.
    let mut from = daemon
        .command(&["cp", "box:/srv/tree/deep", "-"])
        .stdout(Stdio::piped())
        .spawn()?;
    let pipe = from.stdout.take().context("no output")?;
    let to = daemon.command(&["cp", "-", "box:/tmp"]).stdin(pipe).status()?;
    ensure!(from.wait()?.success() && to.success(), "an archive did not get through");
    ensure!(run("cat /tmp/deep/file")? == "text", "it did not arrive");

    expect_refusal(&daemon.run(&["cp", "box:/no/such", &path("x")])?, 1, &["No such file"])?;
    daemon.ok(&["pause", "box"])?;
    expect_refusal(
        &daemon.run(&["cp", "box:/etc", &path("x")])?,
        1,
        &["box is paused", "basalt unpause"],
    )?;
    daemon.ok(&["unpause", "box"])?;
    daemon.ok(&["kill", "box"])?;
    expect_refusal(
        &daemon.run(&["cp", "box:/etc", &path("x")])?,
        1,
        &["box is exited", "basalt start"],
    )?;
    daemon.end()
}

fn tmpfs(host: &Host) -> Result<()> {
    let daemon = Daemon::with_templates(host)?;
    let flags = [
        "--tmpfs",
        "/fast/deep:size=1m,mode=0750",
        "--tmpfs",
        "/fast:exec",
        "--tmpfs",
        "/tmp",
    ];
    start(host, &daemon, "box", &flags, &["sleep", "10000"])?;
    let run = |script: &str| daemon.ok(&["exec", "box", "sh", "-c", script]);
    let mounts = run("grep tmpfs /proc/mounts")?;
    for (place, wanted, unwanted) in [
        (
            " /fast/deep ",
            &["nosuid", "nodev", "noexec", "size=1024k", "mode=750"][..],
            "exec,size",
        ),
        (" /fast ", &["nosuid", "nodev"], "noexec"),
        (" /tmp ", &["nosuid", "noexec"], "size="),
    ] {
        let line = mounts.lines().find(|line| line.contains(place));
        let line = line.with_context(|| format!("nothing at {place}: {mounts}"))?;
        ensure!(wanted.iter().all(|word| line.contains(word)), "{line}");
        ensure!(place == " /fast/deep " || !line.contains(unwanted), "{line}");
    }
    let modes = run("stat -c %a /fast/deep /fast /tmp")?;
    ensure!(modes == "750\n1777\n1777\n", "the modes are {modes:?}");
    let full = run("dd if=/dev/zero of=/fast/deep/x bs=64k count=32 2>&1; echo; stat -c %s /fast/deep/x")?;
    ensure!(
        full.contains("No space left") && full.ends_with("\n1048576\n"),
        "a full one says {full:?}"
    );
    run("cp /bin/true /fast/true && /fast/true")?;
    let refused = daemon.run(&["exec", "box", "sh", "-c", "cp /bin/true /tmp/true && /tmp/true"])?;
    ensure!(refused.status.code() == Some(126), "it was executed: {refused:?}");
    // What is there already and is no directory cannot be one's place.
    expect_refusal(
        &daemon.run(&["run", "--tmpfs", "/etc/passwd", &host.digest, "--", "true"])?,
        125,
        &["/etc/passwd for a tmpfs"],
    )?;
    daemon.end()
}
