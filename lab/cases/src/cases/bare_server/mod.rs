//! A whole guest that serves without a CPU, and one that runs it: VMMs as a node has them, Linux in both, and programs of user space that wait
//! and enter. What they say to each other is in a file that is memory of both (virtio-pmem, of which the server's has a part that is the
//! client's).
//!
//! ```text
//!  server: CPU 1 ─► its program waits, is refused, waits ─► freeze ─► CPU 1 is Linux's
//!  client: CPU 1 ─► link ─► its program enters: one exit each ─► a question of the server's, a halt, its end
//! ```

pub(crate) mod accelerator;
mod words;

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use agent_api::{Connection, ExecRequest, OsText};
use anyhow::{Context, Result, bail, ensure};
use reservation::Device;
use vmm_api::devices::{PmemConfig, PmemPartConfig};
use vmm_api::{ClientError, ErrorKind, Event, VmState};

use self::words::{ASK, HALT, MARK, Words, answer_to};
use super::bare::{CPU, Module, in_lab, online, run, wait_online};
use super::nvme_disk::tell;
use super::snapshot_files::Files;
use crate::kernel_log::{complaints, kernel_log};
use crate::vm::{self, BOOT, Builder, GUEST_HALF, Vm, readable};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-server",
    limit: Duration::from_secs(300),
    host,
    guest: Some(guest),
};

/// The file, and a page of it.
const BYTES: u64 = 32 << 20;
const PAGE: u64 = 4096;

const BUDGET_US: u32 = 2_000_000;

/// Calls that are counted.
const CALLS: u64 = 2000;

/// As long as the server's program is told that it is none, before it is one.
const REFUSED: Duration = Duration::from_secs(1);

/// What a client is answered (`BASALT_ENTERED_*` of kmod/uapi/basalt.h).
const DONE: u64 = 0;
const INTERRUPTED: u64 = 1;
const BUSY: u64 = 2;
const HALTED: u64 = 4;
const GONE: u64 = 5;
const NONE: u64 = 6;

type Agent = Connection<std::os::unix::net::UnixStream>;

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let mut log = kernel_log()?;
    let device = Device::open(Device::PATH)?;
    let all = online()?;
    let windows = Windows::new(host, PAGE)?;
    let (mut server, link) = serve(host, &device, windows.servers)?;
    wait_online(&all).context("the CPU of a frozen server")?;
    refuses(&mut server)?;
    let (mut client, mut agent) = start(host, &device, windows.clients)?;
    let status =
        |agent: &mut Agent| -> Result<u64> { Ok(vm::guest_half(agent, CASE.name, &["enter"])?.trim().parse()?) };
    ensure!(status(&mut agent)? == NONE, "it has a server before it is linked");
    client.vmm.client.link(0, Some(link.as_fd()))?;
    let twice = client.vmm.client.link(0, Some(link.as_fd()));
    refused(twice, ErrorKind::Invalid, "by the number 0 already")?;
    let null = File::open("/dev/null")?;
    refused(
        client.vmm.client.link(1, Some(null.as_fd())),
        ErrorKind::Host,
        "BASALT_LINK",
    )?;
    ensure!(
        client.vmm.client.info()?.links == [0],
        "{:?}",
        client.vmm.client.info()?.links
    );
    calls(&mut client, &mut agent, &mut server)?;
    is_not_saved(host, &mut client)?;
    asks(&mut agent, &mut server)?;
    vm::guest_half(&mut agent, CASE.name, &["order", &HALT.to_string()])?;
    for _ in 0..2 {
        let halted = status(&mut agent)?;
        ensure!(halted == HALTED, "a server that sleeps was left with {halted}");
    }
    ends(&mut client, server, &link, || status(&mut agent))?;
    drop(agent);
    client.vmm.client.stop()?;
    drop(client);
    wait_online(&all)?;
    // It keeps nothing but the module.
    drop((link, device));
    module.unload()?;
    let complaints = complaints(&mut log)?;
    ensure!(complaints.is_empty(), "the host's kernel says: {complaints:?}");
    Ok(())
}

/// The memory of the client that is the server's as well, each in a file system of its own.
struct Windows {
    clients: Window,
    servers: Window,
}

/// A window's file, and which parts of it are another's.
struct Window {
    file: File,
    other: Option<File>,
    /// Where they begin, and their bytes.
    parts: Vec<(u64, u64)>,
}

impl Windows {
    /// Two file systems alike, of which the one file, of so many bytes, is the same memory.
    fn new(host: &Host, length: u64) -> Result<Self> {
        let (image, root) = (host.scratch.join("window.ext4"), host.scratch.join("root"));
        fs::create_dir(&root)?;
        let page_bytes = usize::try_from(PAGE)?;
        let marked = |number: u64| {
            let mut page = vec![0; page_bytes];
            page[..MARK.len()].copy_from_slice(MARK);
            page[page_bytes - 8..].copy_from_slice(&number.to_le_bytes());
            page
        };
        let pages = length / PAGE;
        fs::write(root.join("words"), (0..pages).flat_map(marked).collect::<Vec<u8>>())?;
        File::create(&image)?.set_len(BYTES)?;
        let options = ["-q", "-b", "4096", "-O", "^has_journal", "-d"];
        let (root, path) = (root.to_string_lossy(), image.to_string_lossy());
        run("mkfs.ext4", &[options.as_slice(), &[&root, &path]].concat())?;
        let bytes = fs::read(&image)?;
        fs::remove_file(&image)?;
        // The file's pages, wherever they are.
        let mut parts: Vec<(u64, u64)> = Vec::new();
        for (page, at) in bytes.chunks(page_bytes).zip((0..).step_by(page_bytes)) {
            match parts.last_mut() {
                _ if !page.starts_with(MARK) => (),
                Some((begin, length)) if *begin + *length == at => *length += PAGE,
                _ => parts.push((at, PAGE)),
            }
        }
        let found: u64 = parts.iter().map(|(_, length)| length).sum();
        ensure!(found == length, "{found} bytes of {length} are in the file system");
        let file = |name| -> Result<File> {
            let file = base::memfd::sized(name, BYTES)?;
            file.write_all_at(&bytes, 0)?;
            for (at, length) in &parts {
                file.write_all_at(&vec![0; usize::try_from(*length)?], *at)?;
            }
            Ok(file)
        };
        // What is in the server's own in those places nobody sees.
        let (clients, servers) = (file("client")?, file("server")?);
        Ok(Self {
            servers: Window {
                file: servers,
                other: Some(clients.try_clone()?),
                parts,
            },
            clients: Window {
                file: clients,
                other: None,
                parts: Vec::new(),
            },
        })
    }
}

/// A guest of this class with a window, on the one CPU that Linux gives up.
fn start(host: &Host, device: &Device, window: Window) -> Result<(Vm, Agent)> {
    let mut builder = Builder::new(host)?;
    let mut parts = Vec::new();
    for (at, length) in window.parts {
        let other = window.other.as_ref().context("parts of no file")?;
        parts.push(PmemPartConfig {
            file: builder.fd(other.try_clone()?),
            offset: at,
            at,
            length,
        });
    }
    let config = PmemConfig {
        file: builder.fd(window.file),
        private: false,
        parts,
    };
    builder.device("window", &config)?;
    let reservation = OwnedFd::from(device.reserve(&[CPU])?);
    let machine = builder.reservation(reservation)?.start()?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    Ok((machine, agent))
}

/// A guest whose program waits, frozen as soon as that was asked for, and what others are linked to it by.
fn serve(host: &Host, device: &Device, window: Window) -> Result<(Vm, OwnedFd)> {
    let (mut machine, mut agent) = start(&apart(host)?, device, window)?;
    let argv = [GUEST_HALF, "guest", CASE.name, "serve"].map(OsText::from).to_vec();
    agent.exec_detached(&ExecRequest {
        argv,
        ..ExecRequest::default()
    })?;
    let client = &mut machine.vmm.client;
    ensure!(
        !readable(client, REFUSED)?,
        "it says something that nobody has asked for"
    );
    ensure!(client.info()?.state == VmState::Running, "it was frozen unasked");
    let link = freeze(&mut machine)?;
    Ok((machine, link))
}

/// Logs beside those of the client.
fn apart(host: &Host) -> Result<Host> {
    let logs = host.logs.join("server");
    fs::create_dir_all(&logs)?;
    Ok(Host { logs, ..host.clone() })
}

/// Has a machine freeze when its guest waits, and gives what others are linked to it by.
fn freeze(machine: &mut Vm) -> Result<OwnedFd> {
    let client = &mut machine.vmm.client;
    let early = client.freeze(BUDGET_US)?;
    ensure!(early.is_none(), "it was frozen before its guest could wait");
    ensure!(readable(client, BOOT)?, "its guest does not wait");
    let event = client.wait_event()?;
    ensure!(event == Event::Frozen, "it says {event:?}");
    let link = client.freeze(BUDGET_US)?;
    link.context("it is frozen, and has no descriptor")
}

fn refused<T>(result: Result<T, ClientError>, kind: ErrorKind, words: &str) -> Result<()> {
    match result {
        Err(ClientError::Refused(error)) if error.kind == kind && error.message.contains(words) => Ok(()),
        Err(error) => bail!("`{words}` was due, not {error}"),
        Ok(_) => bail!("`{words}` was due"),
    }
}

/// What a frozen machine cannot do.
fn refuses(server: &mut Vm) -> Result<()> {
    let client = &mut server.vmm.client;
    let info = client.info()?;
    ensure!(
        (info.state, info.engine.as_str()) == (VmState::Frozen, "bare"),
        "{info:?}"
    );
    let words = "the VM is frozen";
    refused(client.pause(), ErrorKind::WrongState, words)?;
    refused(client.resume(), ErrorKind::WrongState, words)?;
    refused(client.press_power_button(), ErrorKind::WrongState, words)?;
    let null = File::open("/dev/null")?;
    refused(
        client.snapshot(null.as_fd(), null.as_fd(), &[]),
        ErrorKind::WrongState,
        words,
    )?;
    refused(client.freeze(BUDGET_US + 1), ErrorKind::WrongState, "a budget of 2s")?;
    refused(
        client.link(0, Some(null.as_fd())),
        ErrorKind::WrongState,
        "enters no other",
    )
}

/// How often a machine's vCPU has come out for this reason.
fn exits(machine: &mut Vm, reason: &str) -> Result<u64> {
    let samples = machine.vmm.client.metrics()?;
    let found = samples
        .iter()
        .find(|sample| sample.name == "engine_exits_total" && sample.labels.iter().any(|(_, value)| value == reason));
    Ok(found
        .with_context(|| format!("exits by `{reason}` are not counted"))?
        .value)
}

/// One exit of the client's for each time that its program enters, and the answers are right.
fn calls(client: &mut Vm, agent: &mut Agent, server: &mut Vm) -> Result<()> {
    let before = (exits(client, "hypercall")?, exits(server, "hypercall")?);
    let said = vm::guest_half(agent, CASE.name, &["call", &CALLS.to_string()])?;
    let made = (
        exits(client, "hypercall")? - before.0,
        exits(server, "hypercall")? - before.1,
    );
    tell(&format!(
        "{CALLS} calls: {said}exits by VMMCALL: {} of the client, {} of the server",
        made.0, made.1
    ));
    let again: u64 = said
        .split_whitespace()
        .filter_map(|word| word.parse::<u64>().ok())
        .sum();
    ensure!(
        made.0 == CALLS + again,
        "{} exits for {CALLS} calls and {again} entered again",
        made.0
    );
    ensure!(made.1 == CALLS, "the server came out {} times", made.1);
    Ok(())
}

/// A client can be paused, and goes on; it is saved without its link alone.
fn is_not_saved(host: &Host, client: &mut Vm) -> Result<()> {
    client.vmm.client.pause()?;
    let saved = Files::new(host, "saved").take(client);
    let error = saved.err().context("a client was saved with its link")?.to_string();
    ensure!(error.contains("linked to a server"), "{error}");
    Ok(client.vmm.client.resume()?)
}

/// What the server asks of its VMM is done while the client goes on.
fn asks(agent: &mut Agent, server: &mut Vm) -> Result<()> {
    let before = exits(server, "port")?;
    let said = vm::guest_half(agent, CASE.name, &["order", &ASK.to_string()])?;
    server.wait_console(words::ASKED, BOOT)?;
    let asked = exits(server, "port")? - before;
    tell(&format!("a server's line to a port: {asked} exits; its client {said}"));
    ensure!(
        asked == words::ASKED.len() as u64,
        "it came out {asked} times for as many bytes"
    );
    let said = vm::guest_half(agent, CASE.name, &["call", "10"])?;
    ensure!(!said.is_empty(), "it says nothing");
    Ok(())
}

/// The end of the server is an answer to its client, and no link to it can be made any more, whoever has its descriptor.
fn ends(client: &mut Vm, mut server: Vm, link: &OwnedFd, mut status: impl FnMut() -> Result<u64>) -> Result<()> {
    server.vmm.client.stop()?;
    ensure!(server.vmm.wait(BOOT)?, "the server's VMM did not end well");
    drop(server);
    let gone = status()?;
    ensure!(gone == GONE, "a server that has ended is answered for by {gone}");
    refused(
        client.vmm.client.link(1, Some(link.as_fd())),
        ErrorKind::Host,
        "BASALT_LINK",
    )?;
    client.vmm.client.link(0, None)?;
    refused(
        client.vmm.client.link(0, None),
        ErrorKind::Invalid,
        "no link of the number 0",
    )?;
    let none = status()?;
    ensure!(none == NONE, "a link that has ended was answered {none}");
    Ok(())
}

/// In both guests.
fn guest(arguments: &[String]) -> Result<()> {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["serve"] => Words::map()?.serve(),
        ["mount"] => words::mount_window(),
        ["directory", path] => Ok(fs::create_dir_all(path)?),
        ["enter"] => {
            tell(&words::enter(0).to_string());
            Ok(())
        }
        ["call", count] => call(count.parse()?),
        ["order", what] => order(what.parse()?),
        other => bail!("there is no guest half {other:?}"),
    }
}

/// Enters until the server has answered, or cannot; how that ended, and how often it was interrupted and found at work.
fn enter_until_done() -> (u64, u64, u64) {
    let (mut interrupted, mut busy) = (0, 0);
    loop {
        match words::enter(0) {
            INTERRUPTED => interrupted += 1,
            BUSY => {
                busy += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            other => return (other, interrupted, busy),
        }
    }
}

fn call(count: u64) -> Result<()> {
    let words = Words::map()?;
    let (mut interrupted, mut busy) = (0, 0);
    for request in 1..=count {
        words.ask(request);
        let (status, by_interrupts, at_work) = enter_until_done();
        ensure!(status == DONE, "call {request} was answered {status}");
        (interrupted, busy) = (interrupted + by_interrupts, busy + at_work);
        let answer = words.answer();
        ensure!(answer == answer_to(request), "the answer to {request} is {answer}");
    }
    tell(&format!("{interrupted} interrupted, {busy} busy"));
    Ok(())
}

fn order(what: u64) -> Result<()> {
    Words::map()?.ask(what);
    let (status, interrupted, busy) = enter_until_done();
    tell(&format!(
        "was answered {status}, interrupted {interrupted} and found it busy {busy} times"
    ));
    Ok(())
}
