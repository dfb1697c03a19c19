//! The lab as a user meets it: whoever runs a sandbox there uses this machine's ports, paths, terminal and signals, and sees the
//! names that were given. Calls the programs as a person would, from outside of the lab.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::process::Command;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::Value;

use super::sandbox::{basalt, only_with_a_lab};
use crate::context::Context;
use crate::runner::{Counts, Finished, Step, Task};

/// One command, on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);
/// For a server in a guest to listen, and for a port to be taken back.
const SOON: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);

/// Sandboxes and snapshots of this step.
const WEB: &str = "xtask-web";
const OTHER: &str = "xtask-other";
const CLONE: &str = "xtask-clone";
const READY: &str = "xtask-ready";

/// Says `web` to whoever connects by TCP, and sends back what comes by UDP.
const SERVER: &str = "\
import socket, threading
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(('', 81))
def echo():
    while True:
        data, address = udp.recvfrom(99)
        udp.sendto(data, address)
threading.Thread(target=echo, daemon=True).start()
tcp = socket.create_server(('', 80))
while True:
    connection, _ = tcp.accept()
    connection.sendall(b'web')
    connection.close()
";

/// Prints the size of its terminal, now and when that changes.
const SIZES: &str = "trap 'stty size; exit 7' WINCH; stty size; while :; do sleep 0.1; done";

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

/// The step.
pub(crate) fn lab_site() -> Step {
    Step::new("lab-site", |context, task| {
        let mut user = User {
            context,
            task,
            checks: 0,
        };
        user.tidy()?;
        let done = user.everything();
        let tidied = user.tidy();
        done.and(tidied)?;
        let counts = Counts {
            passed: user.checks,
            ..Counts::default()
        };
        Ok(counts.into())
    })
    .plan(only_with_a_lab)
    .check()
    .hint("the log has each command; `logs/ports.log` in the lab's directory tells of forwarded ports")
}

/// Somebody at this machine.
struct User<'a> {
    context: &'a Context,
    task: &'a mut Task,
    checks: u64,
}

impl User<'_> {
    fn everything(&mut self) -> Result<()> {
        let (web, udp) = (free_tcp()?, free_udp()?);
        self.ports_answer(web, udp)?;
        self.names_are_shown(web)?;
        self.clashes_are_errors(web)?;
        self.clones_have_ports()?;
        self.starting_again_has_ports(web)?;
        self.streams()?;
        self.terminal_and_signals()?;
        self.paths()?;
        self.ports_end_with_their_sandbox(web, udp)
    }

    fn ports_answer(&mut self, web: u16, udp: u16) -> Result<()> {
        let (of_web, of_udp) = (format!("127.0.0.1:{web}:80"), format!("{udp}:81/udp"));
        let words = ["run", "-d", "--name", WEB, "-p", &of_web, "-p", &of_udp, "python", "--"];
        self.good(&[&words[..], &["python3", "-c", SERVER]].concat())?;
        // Without an attempt more: who starts a detached sandbox may connect at once, and waits for its server only.
        ensure!(
            connects(web),
            "nobody listens on port {web} after `run -d` has returned"
        );
        answers(web)?;
        echoes(udp)?;
        self.checks += 3;
        Ok(())
    }

    fn names_are_shown(&mut self, web: u16) -> Result<()> {
        let listed = self.good(&["ps"])?.out;
        let line = listed
            .iter()
            .find(|line| line.contains(WEB))
            .context("ps does not list it")?;
        let words: Vec<&str> = line.split_whitespace().collect();
        ensure!(words.get(2) == Some(&"python"), "ps shows another image: {line}");
        ensure!(
            line.contains(&format!("127.0.0.1:{web}->80/tcp")),
            "ps shows other ports: {line}"
        );
        let inspected = self.good(&["inspect", WEB])?.out.join("\n");
        let inspected: Value = serde_json::from_str(&inspected)?;
        let config = &inspected[0]["config"];
        ensure!(
            config["image"] == "python",
            "inspect shows the image {}",
            config["image"]
        );
        ensure!(
            config["ports"][0] == format!("127.0.0.1:{web}:80"),
            "inspect shows the ports {}",
            config["ports"]
        );
        ensure!(
            config["labels"] == serde_json::json!({}),
            "inspect shows the labels {}",
            config["labels"]
        );
        self.checks += 2;
        Ok(())
    }

    fn clashes_are_errors(&mut self, web: u16) -> Result<()> {
        let held = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let taken = held.local_addr()?.port();
        for (port, who) in [
            (web, "published by the sandbox xtask-web"),
            (taken, "taken by a program"),
        ] {
            let published = format!("{port}:80");
            let words = [
                "run", "-d", "--name", OTHER, "-p", &published, "python", "--", "sleep", "60",
            ];
            let refused = self.finish(&words)?;
            let told = refused.err.join("\n");
            ensure!(
                refused.status.code() == Some(125) && told.contains(&format!("port {port}")) && told.contains(who),
                "a second sandbox with port {port} ended with {} and said {told:?}",
                refused.status
            );
        }
        let listed = self.good(&["ps", "--all"])?.out.join("\n");
        ensure!(
            !listed.contains(OTHER),
            "a sandbox was made whose port was taken:\n{listed}"
        );
        answers(web)?;
        self.checks += 3;
        Ok(())
    }

    fn clones_have_ports(&mut self) -> Result<()> {
        let port = free_tcp()?;
        let published = format!("{port}:80");
        self.good(&["snapshot", "create", WEB, READY])?;
        self.good(&["clone", "--name", CLONE, "-p", &published, READY])?;
        answers(port)?;
        let listed = self.good(&["ps"])?.out.join("\n");
        let line = listed.lines().find(|line| line.contains(CLONE)).unwrap_or_default();
        ensure!(
            line.contains("python") && line.contains(&format!("{port}->80/tcp")) && !line.contains("127.0.0.1"),
            "ps shows the clone so: {line}"
        );
        self.good(&["rm", "-f", CLONE])?;
        is_closed(port)?;
        self.checks += 3;
        Ok(())
    }

    fn starting_again_has_ports(&mut self, web: u16) -> Result<()> {
        self.good(&["kill", WEB])?;
        self.good(&["wait", WEB])?;
        is_closed(web)?;
        let held = TcpListener::bind((Ipv4Addr::LOCALHOST, web)).context("the port of a sandbox that has ended")?;
        let refused = self.finish(&["start", WEB])?;
        let told = refused.err.join("\n");
        ensure!(
            !refused.status.success() && told.contains(&format!("port {web}")),
            "a start whose port was taken ended with {} and said {told:?}",
            refused.status
        );
        drop(held);
        self.good(&["start", WEB])?;
        answers(web)?;
        self.good(&["restart", "-t", "0", WEB])?;
        answers(web)?;
        self.checks += 4;
        Ok(())
    }

    /// Bytes in and out, both outputs, and the code, all as they are.
    fn streams(&mut self) -> Result<()> {
        let script = "printf 'a\\0b\\377' | \"$0\" exec xtask-web -- sh -c 'cat; echo err >&2; exit 42' 2>\"$1\" | od -An -tx1; \
                      echo \"${PIPESTATUS[1]} $(cat \"$1\"; rm \"$1\")\"";
        let beside = std::env::temp_dir().join(format!("xtask-lab-site-{}", std::process::id()));
        let out = self.script(script, &[&beside.to_string_lossy()])?.out;
        ensure!(
            out == [" 61 00 62 ff", "42 err"],
            "streams and the code came as {out:?}"
        );
        self.checks += 1;
        Ok(())
    }

    fn terminal_and_signals(&mut self) -> Result<()> {
        self.terminal()?;
        let signalled = "coproc \"$0\" exec xtask-web -- sh -c 'trap \"exit 43\" TERM; echo ready; while :; do sleep 0.1; done'; \
                         pid=$COPROC_PID; read -r line <&\"${COPROC[0]}\"; kill -TERM \"$pid\"; wait \"$pid\"; echo \"$line $?\"";
        let out = self.script(signalled, &[])?.out;
        ensure!(out == ["ready 43"], "SIGTERM went through as {out:?}");
        self.checks += 2;
        Ok(())
    }

    /// The command's terminal is as large as this side's, from the beginning and after a change.
    fn terminal(&mut self) -> Result<()> {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&terminal)?;
        unlockpt(&terminal)?;
        let other = ptsname(&terminal, Vec::new())?;
        let other = File::options()
            .read(true)
            .write(true)
            .open(OsStr::from_bytes(other.as_bytes()))?;
        tcsetwinsize(&terminal, size(33, 77))?;
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait"])
            .arg(self.context.release().join("basalt"));
        command.args(["exec", "-t", WEB, "--", "sh", "-c", SIZES]);
        command
            .stdin(other.try_clone()?)
            .stdout(other.try_clone()?)
            .stderr(other);
        let mut child = command.spawn()?;
        // It has the only descriptors of the other side from here on, so that its end ends what is read.
        drop(command);
        let (tell, told) = mpsc::channel();
        let mut reader = File::from(terminal.try_clone()?);
        let read = move || {
            let mut buffer = [0; 999];
            // An error is the end of the other side.
            while let Ok(got @ 1..) = reader.read(&mut buffer) {
                if tell.send(String::from_utf8_lossy(&buffer[..got]).into_owned()).is_err() {
                    return;
                }
            }
        };
        let reading = std::thread::spawn(read);
        let (started, mut seen, mut changed) = (Instant::now(), String::new(), false);
        let status = loop {
            if let Ok(more) = told.recv_timeout(PAUSE) {
                seen.push_str(&more);
            }
            if seen.contains("33 77") && !changed {
                tcsetwinsize(&terminal, size(20, 60))?;
                changed = true;
            }
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if started.elapsed() > LIMIT {
                child.kill()?;
                break child.wait()?;
            }
        };
        let ended = reading.join().is_ok();
        seen.extend(told.try_iter());
        ensure!(
            ended && status.code() == Some(7) && seen.split_whitespace().eq(["33", "77", "20", "60"]),
            "the terminal's sizes came as {seen:?}, and {status}"
        );
        Ok(())
    }

    /// Relative paths are this directory's, of files and of directories.
    fn paths(&mut self) -> Result<()> {
        let script = "set -e; dir=$(mktemp -d); trap 'rm -rf \"$dir\"' EXIT; cd \"$dir\"; mkdir sub; echo here > sub/file; \
                      echo A=from-file > env; \
                      \"$0\" run --rm --env-file env -v ./sub:/there python -- sh -c 'cat /there/file; echo $A; echo back > /there/back'; \
                      cat sub/back; \"$0\" cp sub/file xtask-web:/tmp/copy; \"$0\" cp xtask-web:/tmp/copy .; cat copy";
        let out = self.script(script, &[])?.out;
        let seen: Vec<&str> = out.iter().map(String::as_str).filter(|line| !line.is_empty()).collect();
        ensure!(
            seen == ["here", "from-file", "back", "here"],
            "paths went through as {seen:?}"
        );
        self.checks += 2;
        Ok(())
    }

    /// However that ends: by itself, stopped, or removed.
    fn ports_end_with_their_sandbox(&mut self, web: u16, udp: u16) -> Result<()> {
        let port = free_tcp()?;
        let published = format!("127.0.0.1:{port}:80");
        let words = [
            "run", "-d", "--rm", "--name", OTHER, "-p", &published, "python", "--", "sleep", "1",
        ];
        self.good(&words)?;
        is_closed(port)?;
        self.is_removed(OTHER)?;
        self.good(&["rm", "-f", WEB])?;
        is_closed(web)?;
        let (started, mut free) = (Instant::now(), false);
        while !free && started.elapsed() < SOON {
            free = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, udp)).is_ok();
            std::thread::sleep(PAUSE);
        }
        ensure!(free, "the UDP port {udp} stays forwarded");
        self.checks += 3;
        Ok(())
    }

    /// The daemon removes by itself what was started with `--rm`; it frees the ports first.
    fn is_removed(&mut self, name: &str) -> Result<()> {
        let started = Instant::now();
        loop {
            let listed = self.good(&["ps", "--all"])?.out.join("\n");
            if !listed.contains(name) {
                return Ok(());
            }
            ensure!(started.elapsed() < SOON, "it was not removed:\n{listed}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Removes what this step, or one that was interrupted, has made.
    fn tidy(&mut self) -> Result<()> {
        for name in [WEB, OTHER, CLONE] {
            self.finish(&["rm", "-f", name])?;
        }
        self.finish(&["snapshot", "rm", READY])?;
        Ok(())
    }

    fn finish(&mut self, words: &[&str]) -> Result<Finished> {
        self.task.finish_within(&mut basalt(self.context, words), LIMIT)
    }

    fn good(&mut self, words: &[&str]) -> Result<Finished> {
        self.task.run_within(&mut basalt(self.context, words), LIMIT)
    }

    fn script(&mut self, script: &str, words: &[&str]) -> Result<Finished> {
        let finished = self.finish_script(script, words)?;
        if !finished.status.success() {
            bail!("a script ended with {} and said {:?}", finished.status, finished.err);
        }
        Ok(finished)
    }

    /// `$0` is `basalt`, the words follow.
    fn finish_script(&mut self, script: &str, words: &[&str]) -> Result<Finished> {
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(self.context.release().join("basalt"));
        self.task
            .finish_within(command.args(words).current_dir(&self.context.root), LIMIT)
    }
}

fn free_tcp() -> Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

fn free_udp() -> Result<u16> {
    Ok(UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port())
}

fn connects(port: u16) -> bool {
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The server in the guest says its word, soon.
fn answers(port: u16) -> Result<()> {
    let place = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let ask = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect_timeout(&place, SOON)?;
        stream.set_read_timeout(Some(SOON))?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        Ok(said)
    };
    let started = Instant::now();
    loop {
        match ask() {
            Ok(said) if said == "web" => return Ok(()),
            // Until its server listens, the guest refuses.
            said if started.elapsed() > SOON => bail!("the sandbox at port {port} answered {said:?}"),
            _ => std::thread::sleep(PAUSE),
        }
    }
}

fn echoes(port: u16) -> Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    let started = Instant::now();
    loop {
        socket.send_to(b"echo", (Ipv4Addr::LOCALHOST, port))?;
        let mut buffer = [0; 99];
        match socket.recv(&mut buffer) {
            Ok(4) if buffer.starts_with(b"echo") => return Ok(()),
            other if started.elapsed() > SOON => bail!("the sandbox at UDP port {port} answered {other:?}"),
            _ => {}
        }
    }
}

/// Nobody listens any more, soon.
fn is_closed(port: u16) -> Result<()> {
    let started = Instant::now();
    while connects(port) {
        ensure!(started.elapsed() < SOON, "port {port} stays forwarded");
        std::thread::sleep(PAUSE);
    }
    Ok(())
}
