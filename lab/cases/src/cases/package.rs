//! The Debian package under a real systemd: installed, upgraded with sandboxes that run, the host shut down and booted with
//! them, removed, purged. Needs no network and leaves the lab's own system as it is.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::bare::{Module, in_lab};
use crate::basalt::expect_code;
use crate::daemon::wait_for;
use crate::systemd::{Machine, Running};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "package",
    limit: Duration::from_secs(600),
    host,
    guest: None,
};

/// Where `xtask` puts the packages, beside the programs.
const PACKAGES: &str = "basalt-packages";

const UNITS: [&str; 3] = ["basaltd.socket", "basaltd.service", "basalt-sandboxes.service"];

/// The one that is started by whoever wants it.
const GATEWAY: &str = "basalt-gateway.service";

/// Gives the gateway names until the next boot, and starts it.
const GATEWAY_STARTS: &str = "directory=/run/systemd/system/basalt-gateway.service.d; mkdir -p $directory && \
    printf '[Service]\\nEnvironment=\"OPTIONS=--domain sb.localhost --dns 127.0.0.55:53\"\\n' >$directory/names.conf && \
    systemctl daemon-reload && systemctl start basalt-gateway.service";

/// The first line of what the gateway answers to who has the key `$1`.
const ASKS: &str = r#"exec 3<>/dev/tcp/127.0.0.1/3000 &&
    printf 'GET /v2/sandboxes HTTP/1.1\r\nHost: a\r\nX-API-Key: %s\r\nConnection: close\r\n\r\n' "$1" >&3 && head -n 1 <&3"#;

/// Where sandboxes' cgroups are.
const CGROUP: &str = "/system.slice/basalt-sandboxes.service/basalt-node/";

/// Has systemd start the holder of sandboxes' cgroup again at once, and not any more.
const SOON: &str = "directory=/run/systemd/system/basalt-sandboxes.service.d; mkdir -p $directory && \
    printf '[Service]\\nRestartSec=1\\n' >$directory/soon.conf && systemctl daemon-reload";
const NOT_SOON: &str = "rm -r /run/systemd/system/basalt-sandboxes.service.d && systemctl daemon-reload";

/// Ends in order when it is asked to.
const POLITE: &str = "trap 'echo bye; exit 4' TERM; echo hello; while :; do sleep 0.1; done";

fn host(host: &Host) -> Result<()> {
    let machine = Machine::new(&host.scratch.join("machine"))?;
    let packages = host.binaries.join(PACKAGES);
    let seen = machine.path("/opt/packages");
    std::fs::create_dir_all(&seen)?;
    for name in ["old.deb", "new.deb"] {
        let from = packages.join(name);
        std::fs::copy(&from, seen.join(name))
            .with_context(|| format!("{}: `cargo xtask test --only cases` makes it", from.display()))?;
    }
    take_image(&machine.path("/var/lib/basalt"))?;
    let module = if in_lab()? { Some(Module::load(host)?) } else { None };
    let result = life(&machine, &host.digest, module.is_some());
    machine.remove()?;
    result?;
    module.map_or(Ok(()), Module::unload)
}

/// The images that sandboxes run, at once: they lie on the same file system.
fn take_image(state: &Path) -> Result<()> {
    std::fs::create_dir_all(state)?;
    let mut copy = Command::new("cp");
    let output = copy
        .args(["-a", "--reflink=auto", "/var/lib/basalt/images"])
        .arg(state)
        .output()?;
    expect_code(&output, 0).context("the images")
}

fn life(machine: &Machine, image: &str, with_module: bool) -> Result<()> {
    let up = machine.boot()?;
    install(&up, "old.deb")?;
    for unit in UNITS {
        ensure!(is_active(&up, unit)?, "{unit} is not active:\n{}", status(&up, unit)?);
    }
    members_may_ask(&up)?;
    a_gateway_serves(&up)?;
    run(&up, image, "polite", &[], &["sh", "-c", POLITE])?;
    run(&up, image, "passing", &["--rm"], &["sleep", "10000"])?;
    let polite = vmm(&up, "polite")?;
    let cgroup = up.ok(&["cat", &format!("/proc/{polite}/cgroup")])?;
    ensure!(cgroup.contains(CGROUP), "a VMM is in {cgroup}");

    if with_module {
        // The unit lets the daemon have the module's device.
        let class = ["--rm", "--class", "bare", "--memory", "128m", image, "--", "true"];
        up.ok(&[&["basalt", "run"], &class[..]].concat())?;
    }
    restarts(&up, polite)?;
    upgrade(&up, polite)?;

    up.power_off()?;
    goodbye(machine)?;
    let up = machine.boot()?;
    ensure!(
        is_active(&up, "basaltd.service")?,
        "the daemon is not started with the host"
    );
    let known = sandboxes(&up)?;
    ensure!(
        known.len() == 1 && known[0]["name"] == "polite" && known[0]["state"] == "exited",
        "after a boot there are {known:?}"
    );
    ensure!(up.ok(&["basalt", "wait", "polite"])? == "4", "how it ended is lost");

    removal(&up)?;
    up.power_off()?;
    Ok(())
}

fn install(up: &Running<'_>, name: &str) -> Result<()> {
    up.ok(&[
        "dpkg",
        "--force-unsafe-io",
        "--install",
        &format!("/opt/packages/{name}"),
    ])?;
    Ok(())
}

/// The package's group reaches the socket, and nobody else but root does.
fn members_may_ask(up: &Running<'_>) -> Result<()> {
    let group = up.ok(&["sh", "-c", "getent group basalt | cut -d : -f 3"])?;
    let modes = up.ok(&[
        "stat",
        "-c",
        "%a %U %G",
        "/var/lib/basalt",
        "/var/lib/basalt/basaltd.sock",
    ])?;
    ensure!(
        modes == "710 root basalt\n660 root basalt",
        "the state and its socket are {modes}"
    );
    let nobody = ["setpriv", "--reuid=65534", "--regid=65534"];
    let groups = format!("--groups={group}");
    let member = [&nobody[..], &[&groups, "env", "HOME=/", "basalt", "ps"]].concat();
    ensure!(
        up.ok(&member)?.contains("COMMAND"),
        "a member of the group asks the daemon in vain"
    );
    let list = [&nobody[..], &[&groups, "ls", "/var/lib/basalt"]].concat();
    ensure!(
        !up.run(&list)?.status.success(),
        "a member of the group lists the state"
    );
    let asks = [
        "--clear-groups",
        "env",
        "HOME=/",
        "BASALT_STATE=/var/lib/basalt",
        "BASALT_ENGINE=kvm",
        "basalt",
        "ps",
    ];
    let stranger = [&nobody[..], &asks].concat();
    let said = up.run(&stranger)?;
    ensure!(!said.status.success(), "whoever is no member asks the daemon");
    Ok(())
}

/// The gateway serves when somebody wants it, by TLS at port 443 too, as a user who has nothing but its own and reaches the daemon at its
/// socket for that.
fn a_gateway_serves(up: &Running<'_>) -> Result<()> {
    ensure!(!is_active(up, GATEWAY)?, "the gateway was started by itself");
    up.ok(&["sh", "-c", GATEWAY_STARTS])?;
    wait_for("the gateway to say where it serves", || {
        let said = up.run(&["test", "-e", "/var/lib/basalt-gateway/serving.json"])?;
        Ok(said.status.success())
    })
    .with_context(|| status(up, GATEWAY).unwrap_or_default())?;
    // By root, who is the gateway's user for that.
    let told = up.ok(&["basalt-gateway", "env", "--json"]);
    let told: Value = serde_json::from_str(&told.with_context(|| status(up, GATEWAY).unwrap_or_default())?)?;
    ensure!(told["E2B_DOMAIN"] == "sb.localhost", "programs are told {told}");
    let key = told["E2B_API_KEY"].as_str().context("programs are told no key")?;
    let answered = up.ok(&["bash", "-c", ASKS, "bash", key])?;
    ensure!(
        answered.contains(" 200 "),
        "the gateway answers {answered}:\n{}",
        status(up, GATEWAY)?
    );
    let owners = up.ok(&[
        "sh",
        "-c",
        "cd /var/lib/basalt-gateway && stat -c '%a %U %n' . control.db authority-*.json",
    ])?;
    let expected =
        "700 basalt-gateway .\n600 basalt-gateway control.db\n600 basalt-gateway authority-sb.localhost.json";
    ensure!(owners == expected, "the gateway's state is {owners}");
    let socket = up.ok(&["stat", "-c", "%a %U %G", "/run/basalt-gateway/basaltd.sock"])?;
    ensure!(
        socket == "660 root basalt-gateway",
        "the socket for gateways is {socket}"
    );
    let bundle = told["SSL_CERT_FILE"]
        .as_str()
        .context("programs are told of no certificates")?;
    up.ok(&[
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "cat",
        bundle,
    ])?;
    Ok(())
}

fn run(up: &Running<'_>, image: &str, name: &str, flags: &[&str], command: &[&str]) -> Result<()> {
    let mut words = vec!["basalt", "run", "-d", "--memory", "128m", "--name", name];
    words.extend(flags);
    words.extend([image, "--"]);
    words.extend(command);
    up.ok(&words).map(drop)
}

/// A daemon that is stopped, killed or asked for anew: sandboxes do not notice, and askers find one.
fn restarts(up: &Running<'_>, polite: i64) -> Result<()> {
    let first = daemon(up)?;
    up.ok(&["systemctl", "restart", "basaltd.service"])?;
    let second = daemon(up)?;
    ensure!(first != second, "the daemon was not restarted");
    up.ok(&["kill", "-9", &second.to_string()])?;
    wait_for("systemd to start the daemon again", || {
        Ok(is_active(up, "basaltd.service")? && daemon(up)? != second)
    })?;
    alive(up, polite)?;
    up.ok(&["systemctl", "stop", "basaltd.service"])?;
    ensure!(!is_active(up, "basaltd.service")?, "it is not stopped");
    // The socket is there still, and asking starts it.
    alive(up, polite)?;
    up.ok(&["systemctl", "stop", "basaltd.socket", "basaltd.service"])?;
    // Nobody listens: then `basalt` has systemd start it.
    alive(up, polite)?;
    ensure!(is_active(up, "basaltd.service")?, "a daemon was started past systemd");
    Ok(())
}

fn upgrade(up: &Running<'_>, polite: i64) -> Result<()> {
    let before = (daemon(up)?, version(up)?);
    install(up, "new.deb")?;
    let after = (daemon(up)?, version(up)?);
    ensure!(
        before.0 != after.0 && before.1 != after.1,
        "before {before:?}, after {after:?}"
    );
    let program = up.ok(&["readlink", &format!("/proc/{}/exe", after.0)])?;
    ensure!(program == "/usr/sbin/basaltd", "the daemon's program is {program}");
    let gateway = up.ok(&["systemctl", "show", "--property=MainPID", "--value", GATEWAY])?;
    let program = up.ok(&["readlink", &format!("/proc/{gateway}/exe")])?;
    ensure!(
        program == "/usr/sbin/basalt-gateway",
        "the gateway's program is {program}"
    );
    alive(up, polite)
}

/// The sandboxes run, in the processes that they had, and do as they are told.
fn alive(up: &Running<'_>, polite: i64) -> Result<()> {
    let states: Vec<_> = sandboxes(up)?.iter().map(|sandbox| sandbox["state"].clone()).collect();
    ensure!(states == ["running", "running"], "sandboxes are {states:?}");
    ensure!(vmm(up, "polite")? == polite, "it has another VMM");
    let said = up.ok(&["basalt", "exec", "passing", "echo", "here"])?;
    ensure!(said == "here", "exec printed {said}");
    Ok(())
}

/// What the shutdown has left of the sandboxes: one had its time to say goodbye.
fn goodbye(machine: &Machine) -> Result<()> {
    let mut logs = Vec::new();
    for entry in std::fs::read_dir(machine.path("/var/lib/basalt/sandboxes"))? {
        logs.push(std::fs::read_to_string(entry?.path().join("log"))?);
    }
    ensure!(logs.len() == 1 && logs[0].contains("bye"), "the logs say {logs:?}");
    Ok(())
}

fn removal(up: &Running<'_>) -> Result<()> {
    // With a gateway that serves.
    up.ok(&["systemctl", "start", GATEWAY])?;
    up.ok(&["basalt", "start", "polite"])?;
    loses_its_holder(up)?;
    let told = dpkg(up, "--remove")?;
    for unit in UNITS.into_iter().chain([GATEWAY]) {
        ensure!(!is_active(up, unit)?, "{unit} outlives its package");
    }
    nothing_in_the_kernel(up).context(told)?;
    up.ok(&["test", "-e", "/var/lib/basalt/node.db"])
        .context("the state is kept")?;
    up.ok(&["test", "-e", "/var/lib/basalt-gateway/control.db"])
        .context("the gateway's state is kept")?;
    install(up, "new.deb")?;
    let known = sandboxes(up)?;
    ensure!(
        known.len() == 1 && known[0]["state"] == "exited",
        "after a new installation there are {known:?}"
    );
    up.ok(&["basalt", "start", "polite"])?;
    loses_its_holder(up)?;
    // Nobody sees the last sandbox's end: what the kernel still has of it is the package's to take away.
    let last = vmm(up, "polite")?.to_string();
    up.ok(&["systemctl", "stop", "basaltd.socket", "basaltd.service"])?;
    up.ok(&["kill", "-9", &last])?;
    let told = dpkg(up, "--purge")?;
    nothing_in_the_kernel(up).context(told)?;
    let left = found(
        up,
        "/var/lib /var/cache /run /etc /lib/systemd /usr/lib /usr/share /var/lib/systemd",
    )?;
    ensure!(left.is_empty(), "the purge has left:\n{left}");
    Ok(())
}

/// Takes the package away, and gives what was said meanwhile.
fn dpkg(up: &Running<'_>, how: &str) -> Result<String> {
    up.ok(&["sh", "-c", &format!("dpkg {how} basalt 2>&1")])
}

/// The process that keeps the sandboxes' cgroup dies: they run on, with this daemon and the next.
fn loses_its_holder(up: &Running<'_>) -> Result<()> {
    // Who restarts the daemon waits until systemd has tried once to start the holder again, 20 seconds behind its end.
    up.ok(&["sh", "-c", SOON])?;
    let before = vmm(up, "polite")?;
    let holder = up.ok(&[
        "systemctl",
        "show",
        "--property=MainPID",
        "--value",
        "basalt-sandboxes.service",
    ])?;
    up.ok(&["kill", "-9", &holder])?;
    wait_for("the holder's end to be noticed", || {
        Ok(!is_active(up, "basalt-sandboxes.service")?)
    })?;
    up.ok(&["systemctl", "restart", "basaltd.service"])?;
    ensure!(vmm(up, "polite")? == before, "the sandbox died with the holder");
    up.ok(&["basalt", "exec", "polite", "true"])?;
    up.ok(&["sh", "-c", NOT_SOON])?;
    Ok(())
}

/// No process, cgroup, network namespace, link or table of ours.
fn nothing_in_the_kernel(up: &Running<'_>) -> Result<()> {
    let processes = up.ok(&["ps", "-e", "-o", "comm="])?;
    ensure!(!processes.contains("basalt"), "processes are left:\n{processes}");
    let places = found(up, "/sys/fs/cgroup /sys/class/net /run/netns")?;
    ensure!(places.is_empty(), "left are:\n{places}");
    let tables = up.ok(&["nft", "list", "tables"])?;
    ensure!(!tables.contains("basalt"), "tables are left:\n{tables}");
    Ok(())
}

/// What has our name below these directories, which need not all exist.
fn found(up: &Running<'_>, directories: &str) -> Result<String> {
    // dpkg itself remembers a package until it is purged, and a file of its own list longer.
    let script =
        format!("find {directories} -path /var/lib/dpkg -prune -o -name '*basalt*' -print 2>/dev/null || true");
    up.ok(&["sh", "-c", &script])
}

fn sandboxes(up: &Running<'_>) -> Result<Vec<Value>> {
    Ok(serde_json::from_str(&up.ok(&["basalt", "--json", "ps", "--all"])?)?)
}

/// The process of a sandbox's VMM, as the machine numbers it.
fn vmm(up: &Running<'_>, name: &str) -> Result<i64> {
    let sandbox: Value = serde_json::from_str(&up.ok(&["basalt", "--json", "inspect", name])?)?;
    sandbox[0]["vmm"]["pid"]
        .as_i64()
        .with_context(|| format!("{name} has no VMM: {sandbox}"))
}

fn daemon(up: &Running<'_>) -> Result<i64> {
    Ok(up
        .ok(&["systemctl", "show", "--property=MainPID", "--value", "basaltd.service"])?
        .parse()?)
}

fn version(up: &Running<'_>) -> Result<String> {
    up.ok(&["dpkg-query", "--show", "--showformat=${Version}", "basalt"])
}

fn is_active(up: &Running<'_>, unit: &str) -> Result<bool> {
    Ok(up.run(&["systemctl", "is-active", "--quiet", unit])?.status.success())
}

fn status(up: &Running<'_>, unit: &str) -> Result<String> {
    let output = up.run(&["systemctl", "status", "--no-pager", "--lines=30", unit])?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
