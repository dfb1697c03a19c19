//! `basalt run`: the main job, exit codes, and every setting that a user can give.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::basalt::{command, expect_code, finish, run, sandbox};
use crate::{Case, Host};

pub(crate) const COMMANDS: Case = Case {
    name: "run-commands",
    limit: Duration::from_secs(400),
    host: commands,
    guest: None,
};

pub(crate) const SETTINGS: Case = Case {
    name: "run-settings",
    limit: Duration::from_secs(500),
    host: settings,
    guest: None,
};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn commands(host: &Host) -> Result<()> {
    let output = sandbox(host, &["python3", "-c", "print(6*7)"], b"")?;
    expect_code(&output, 0)?;
    ensure!(text(&output.stdout) == "42\n", "it printed {:?}", text(&output.stdout));
    expect_code(&sandbox(host, &["sh", "-c", "exit 3"], b"")?, 3)?;
    expect_code(&sandbox(host, &["sh", "-c", "kill -9 $$"], b"")?, 128 + 9)?;
    let missing = sandbox(host, &["no-such-command"], b"")?;
    expect_code(&missing, 127)?;
    ensure!(
        text(&missing.stderr).contains("no-such-command"),
        "{}",
        text(&missing.stderr)
    );
    expect_code(&sandbox(host, &["/etc/passwd"], b"")?, 126)?;
    expect_code(&sandbox(host, &["/etc"], b"")?, 126)?;
    // The image's own command is python3, which reads its program from standard input.
    let output = run(host, &["run", &host.digest], b"print(1 + 1)\n")?;
    expect_code(&output, 0)?;
    ensure!(
        text(&output.stdout) == "2\n",
        "the image's command printed {:?}",
        text(&output.stdout)
    );
    Ok(())
}

fn settings(host: &Host) -> Result<()> {
    let script = "nproc; sed -n 's/MemTotal: *//p' /proc/meminfo; echo $GREETING; echo $FROM_HOST; pwd; id -un; hostname; \
                  id -u; touch /tmp/x && echo writable";
    let arguments = [
        "run",
        "--cpus",
        "2",
        "--memory",
        "384m",
        "--env",
        "GREETING=good day",
        "-e",
        "FROM_HOST",
        "--workdir",
        "/usr",
        "--user",
        "nobody",
        "--hostname",
        "wren",
        &host.digest,
        "--",
        "sh",
        "-c",
        script,
    ];
    let output = finish(command(host, &arguments).env("FROM_HOST", "yes"), b"")?;
    expect_code(&output, 0)?;
    let stdout = text(&output.stdout);
    let lines: Vec<_> = stdout.lines().collect();
    let [
        cpus,
        memory,
        greeting,
        from_host,
        directory,
        user,
        hostname,
        uid,
        writable,
    ] = lines.as_slice()
    else {
        anyhow::bail!("it printed {stdout:?}");
    };
    ensure!(*cpus == "2", "nproc says {cpus}");
    let memory: u64 = memory.trim_end_matches(" kB").trim().parse().context("MemTotal")?;
    ensure!((300_000..=384 << 10).contains(&memory), "MemTotal is {memory} kB");
    ensure!(
        (*greeting, *from_host) == ("good day", "yes"),
        "the environment is {greeting:?}, {from_host:?}"
    );
    ensure!(*directory == "/usr", "the directory is {directory}");
    ensure!((*user, *uid) == ("nobody", "65534"), "the user is {user} ({uid})");
    ensure!(*hostname == "wren", "the host name is {hostname}");
    ensure!(*writable == "writable", "/tmp is not writable");
    // What one sandbox writes, the next does not see: the image is not changed.
    expect_code(
        &sandbox(host, &["sh", "-c", "echo x > /etc/marker && test -e /etc/marker"], b"")?,
        0,
    )?;
    expect_code(&sandbox(host, &["test", "-e", "/etc/marker"], b"")?, 1)?;
    Ok(())
}
