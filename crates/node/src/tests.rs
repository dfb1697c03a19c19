//! Sandboxes against a simulated VMM and a simulated agent: every way in which one of them can leave.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use agent_api::message::{ExecFailure, FailureKind, Reply as AgentReply, Request as AgentRequest, kind};
use agent_api::{ExecRequest, ExitStatus, LocalIo, PROTOCOL, Signals, VSOCK_PORT};
use base::ByteSize;
use vmm_api::devices::{ConsoleConfig, DeviceConfig, VsockConfig};
use vmm_api::{ApiError, ErrorKind, Event, ExitReason, FdRef, Packet, Reply, Request, VmConfig, VmmClient};
use wire::packet::PacketSocket;
use wire::{FrameReader, FrameWriter};

use crate::launch::prepare;
use crate::sandbox::Boot;
use crate::vmm::VmmProcess;
use crate::{Error, Finished, Sandbox, SandboxSpec, command_line};

/// What the simulated VMM and guest do.
#[derive(Clone, Copy, PartialEq)]
enum Play {
    /// Everything right.
    Good,
    /// The VMM refuses to create.
    Refuse,
    /// The guest panics while booting.
    Panic,
    /// The guest boots and never dials.
    Silent,
    /// The VMM closes its socket when it is started.
    Gone,
    /// The agent starts the command, and then the guest powers off.
    EndsMidCommand,
    /// The agent starts the command, and then the VMM is gone.
    GoneMidCommand,
    /// The agent starts the command, and then the VMM says that the guest has reset, and hangs.
    HangsMidCommand,
    /// The agent knows no such command.
    NoCommand,
    /// The command never ends by itself.
    Sleeps,
}

struct Stage {
    directory: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["root", "kernel", "initramfs", "kvm"] {
            fs::write(directory.path().join(name), name).unwrap();
        }
        Self { directory }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    /// A program that takes whatever arguments a VMM is given.
    fn program(&self, script: &str) -> std::path::PathBuf {
        // Written by another process: a descriptor of ours that is open for writing could be inherited by what another
        // test starts just then, and the program would be busy (ETXTBSY).
        const WRITE: &str = r#"printf '#!/bin/sh\n%s\n' "$1" > "$0"; chmod 755 "$0""#;
        let path = self.path("vmm");
        let written = std::process::Command::new("sh")
            .arg("-c")
            .arg(WRITE)
            .arg(&path)
            .arg(script)
            .status();
        assert!(written.unwrap().success());
        path
    }

    fn spec(&self) -> SandboxSpec {
        SandboxSpec {
            root: File::open(self.path("root")).unwrap(),
            cpus: 1,
            memory: ByteSize::mib(64),
            hostname: "test".into(),
            kernel: self.path("kernel"),
            initramfs: self.path("initramfs"),
            kvm: self.path("kvm"),
            vmm: self.path("vmm"),
            cmdline: command_line(log::LevelFilter::Warn),
            boot_limit: Duration::from_secs(20),
            console_copy: None,
        }
    }

    /// Boots against the simulation; the process is a real one that sleeps.
    fn boot(&self, play: Play, limit: Duration) -> (Result<Sandbox, Error>, JoinHandle<()>) {
        let (near, far) = PacketSocket::pair().unwrap();
        let (unused, _) = PacketSocket::pair().unwrap();
        let process = VmmProcess::spawn(&self.program("exec sleep 1000"), unused.into()).unwrap();
        let prepared = prepare(self.spec()).unwrap();
        let vmm = std::thread::spawn(move || simulate(play, &far));
        let boot = Boot {
            limit,
            hostname: "test".into(),
            signals: None,
        };
        (Sandbox::boot(process, VmmClient::new(near), prepared, &boot), vmm)
    }
}

fn simulate(play: Play, control: &PacketSocket) {
    let (config, mut fds) = answer_create(play, control);
    let Some(config) = config else { return };
    answer(control, Ok(Reply::Done));
    let mut take = |at: FdRef| fds[at.0 as usize].take().unwrap();
    let console: ConsoleConfig = device(&config);
    let vsock: VsockConfig = device(&config);
    let mut console = File::from(take(console.output.unwrap()));
    let acceptor = PacketSocket::from_fd(take(vsock.acceptor.unwrap()));
    // The other side may have left already, having heard enough.
    let ended = |reason| drop(control.send(&serde_json::to_vec(&Packet::Event(Event::Ended(reason))).unwrap(), &[]));
    match play {
        Play::Panic => {
            writeln!(
                console,
                "[ 0.1] Kernel panic - not syncing: No working init found.\x1b[2J"
            )
            .unwrap();
            ended(ExitReason::Reset);
        }
        Play::Gone => (),
        Play::Silent => drop(control.receive()),
        _ => {
            let (ours, theirs) = UnixStream::pair().unwrap();
            acceptor
                .send(&VSOCK_PORT.to_le_bytes(), &[std::os::fd::AsFd::as_fd(&theirs)])
                .unwrap();
            drop(theirs);
            // What a VMM that hangs would keep open.
            let kept = ours.try_clone().unwrap();
            simulate_agent(play, ours);
            if play == Play::HangsMidCommand {
                ended(ExitReason::Reset);
                drop(control.receive());
            }
            drop(kept);
            if !matches!(play, Play::GoneMidCommand | Play::HangsMidCommand) {
                ended(ExitReason::PowerOff);
            }
        }
    }
}

fn answer_create(play: Play, control: &PacketSocket) -> (Option<VmConfig>, Vec<Option<OwnedFd>>) {
    let (bytes, fds) = control.receive().unwrap();
    let Packet::Request {
        id,
        request: Request::Create(config),
        ..
    } = serde_json::from_slice(&bytes).unwrap()
    else {
        panic!("create comes first")
    };
    config.validate().unwrap();
    if play == Play::Refuse {
        let error = ApiError {
            kind: ErrorKind::Boot,
            message: "the kernel is truncated".into(),
        };
        reply(control, id, Err(error));
        return (None, Vec::new());
    }
    reply(control, id, Ok(Reply::Done));
    (Some(*config), fds.into_iter().map(Some).collect())
}

fn answer(control: &PacketSocket, result: Result<Reply, ApiError>) {
    let (bytes, _) = control.receive().unwrap();
    let Packet::Request { id, .. } = serde_json::from_slice(&bytes).unwrap() else {
        panic!()
    };
    reply(control, id, result);
}

fn reply(control: &PacketSocket, id: u64, result: Result<Reply, ApiError>) {
    control
        .send(&serde_json::to_vec(&Packet::Reply { id, result }).unwrap(), &[])
        .unwrap();
}

fn device<C: DeviceConfig>(config: &VmConfig) -> C {
    let spec = config.devices.iter().find(|device| device.kind == C::KIND).unwrap();
    serde_json::from_value(spec.config.clone()).unwrap()
}

fn simulate_agent(play: Play, mut stream: UnixStream) {
    wire::accept(&mut stream, PROTOCOL, None).unwrap();
    let writer = FrameWriter::new(stream.try_clone().unwrap());
    let send = |reply: &AgentReply| {
        writer
            .send(kind::CONTROL, 0, &serde_json::to_vec(reply).unwrap())
            .unwrap()
    };
    let mut reader = FrameReader::new(stream);
    while let Ok(Some(frame)) = reader.read() {
        if frame.kind != kind::CONTROL {
            continue;
        }
        match serde_json::from_slice(frame.payload).unwrap() {
            AgentRequest::Prepare(prepare) => {
                assert_eq!((prepare.hostname.as_str(), prepare.entropy.len()), ("test", 64));
                send(&AgentReply::Done);
            }
            AgentRequest::Exec(_) if play == Play::NoCommand => {
                send(&AgentReply::Failed(ExecFailure {
                    kind: FailureKind::NotFound,
                    message: "no `x`".into(),
                }));
            }
            AgentRequest::Exec(_) => {
                send(&AgentReply::Started { pid: 2 });
                match play {
                    Play::Good => {
                        writer.send(kind::STDOUT, 0, b"42\n").unwrap();
                        send(&AgentReply::Exited(ExitStatus::Code(3)));
                    }
                    Play::Sleeps => (),
                    _ => return,
                }
            }
            AgentRequest::Signal { number } => {
                send(&AgentReply::Exited(ExitStatus::Signal(u8::try_from(number).unwrap())))
            }
            AgentRequest::Shutdown(_) => {
                send(&AgentReply::Done);
                return;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs a command whose output goes to a file; `Signals` exist once in a process, hence the lock.
fn run(sandbox: &mut Sandbox, limit: Option<Duration>) -> (Result<Finished, Error>, Vec<u8>) {
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let signals = Signals::install().unwrap();
    let mut out = tempfile::tempfile().unwrap();
    let err = tempfile::tempfile().unwrap();
    let io = LocalIo {
        stdin: None,
        stdout: std::os::fd::AsFd::as_fd(&out),
        stderr: std::os::fd::AsFd::as_fd(&err),
        tty: false,
    };
    let result = sandbox.run(
        &ExecRequest {
            argv: vec!["x".into()],
            ..ExecRequest::default()
        },
        &io,
        &signals,
        limit,
    );
    let mut text = Vec::new();
    std::io::Seek::rewind(&mut out).unwrap();
    std::io::Read::read_to_end(&mut out, &mut text).unwrap();
    (result, text)
}

fn fails(play: Play) -> String {
    let stage = Stage::new();
    let (result, vmm) = stage.boot(play, Duration::from_millis(700));
    let error = result.unwrap_err();
    vmm.join().unwrap();
    assert_eq!(error.exit_code(), 125);
    error.to_string()
}

fn fails_in_command(play: Play) -> (Error, String) {
    let stage = Stage::new();
    let (result, vmm) = stage.boot(play, Duration::from_secs(20));
    let mut sandbox = result.unwrap();
    let (result, _) = run(&mut sandbox, None);
    let error = result.unwrap_err();
    drop(sandbox);
    vmm.join().unwrap();
    let text = error.to_string();
    (error, text)
}

#[test]
fn a_command_runs_and_the_guest_powers_off() {
    let stage = Stage::new();
    let (result, vmm) = stage.boot(Play::Good, Duration::from_secs(20));
    let mut sandbox = result.unwrap();
    let (result, out) = run(&mut sandbox, None);
    assert_eq!(result.unwrap(), Finished::Exited(ExitStatus::Code(3)));
    assert_eq!(out, b"42\n");
    sandbox.power_off(Duration::from_secs(1)).unwrap();
    vmm.join().unwrap();
}

#[test]
fn a_refusal_is_passed_on_in_the_vmms_words() {
    assert!(fails(Play::Refuse).starts_with("the VM cannot be made: the kernel is truncated"));
}

#[test]
fn a_panic_is_shown_with_the_kernels_words_and_without_its_control_characters() {
    let text = fails(Play::Panic);
    assert!(text.contains("the guest's kernel panicked"), "{text}");
    assert!(
        text.contains("| [ 0.1] Kernel panic - not syncing: No working init found.[2J"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn a_silent_guest_is_given_up_after_the_limit() {
    assert!(fails(Play::Silent).contains("did not answer within 700ms"));
}

#[test]
fn a_vmm_that_is_gone_while_booting_is_named() {
    assert!(fails(Play::Gone).starts_with("the VMM died while the guest booted"));
}

#[test]
fn a_guest_that_ends_takes_the_command_with_it() {
    let (_, text) = fails_in_command(Play::EndsMidCommand);
    assert!(
        text.starts_with("the guest powered off while the command was running"),
        "{text}"
    );
}

#[test]
fn a_vmm_that_is_gone_takes_the_command_with_it() {
    let (error, text) = fails_in_command(Play::GoneMidCommand);
    assert!(matches!(error, Error::VmmDied { .. }), "{error:?}");
    assert!(text.contains("the VMM died while the command was running"), "{text}");
}

#[test]
fn a_vmm_that_hangs_after_the_guests_end_keeps_nobody_waiting() {
    let (_, text) = fails_in_command(Play::HangsMidCommand);
    assert!(
        text.starts_with("the guest reset while the command was running"),
        "{text}"
    );
}

#[test]
fn a_missing_command_is_127() {
    let (error, text) = fails_in_command(Play::NoCommand);
    assert_eq!((error.exit_code(), text.as_str()), (127, "no `x`"));
}

#[test]
fn a_command_whose_time_is_over_is_ended() {
    let stage = Stage::new();
    let (result, vmm) = stage.boot(Play::Sleeps, Duration::from_secs(20));
    let mut sandbox = result.unwrap();
    let begun = Instant::now();
    let (result, _) = run(&mut sandbox, Some(Duration::from_millis(50)));
    assert_eq!(result.unwrap(), Finished::TimedOut);
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "SIGTERM must have been enough"
    );
    drop(sandbox);
    vmm.join().unwrap();
}

#[test]
fn a_vmm_that_fails_at_once_says_why() {
    let stage = Stage::new();
    let (control, theirs) = PacketSocket::pair().unwrap();
    let program = stage.program("echo no luck today >&2; exit 7");
    let process = VmmProcess::spawn(&program, theirs.into()).unwrap();
    let prepared = prepare(stage.spec()).unwrap();
    let boot = Boot {
        limit: Duration::from_secs(20),
        hostname: "test".into(),
        signals: None,
    };
    let error = Sandbox::boot(process, VmmClient::new(control), prepared, &boot)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("the VMM died") && error.contains("exit status: 7"),
        "{error}"
    );
    assert!(error.contains("| no luck today"), "{error}");
}

#[test]
fn a_program_that_cannot_be_started_is_named() {
    let (_, theirs) = PacketSocket::pair().unwrap();
    let error = VmmProcess::spawn(Path::new("/nonexistent/vmm"), theirs.into())
        .unwrap_err()
        .to_string();
    assert!(error.contains("/nonexistent/vmm cannot be started"), "{error}");
}

#[test]
fn files_that_are_missing_are_named_with_the_next_step() {
    let stage = Stage::new();
    fs::remove_file(stage.path("kernel")).unwrap();
    let error = prepare(stage.spec()).unwrap_err().to_string();
    assert!(
        error.contains("the guest kernel") && error.contains("make run"),
        "{error}"
    );
    let stage = Stage::new();
    let spec = SandboxSpec {
        kvm: stage.path("no-kvm"),
        ..stage.spec()
    };
    let error = prepare(spec).unwrap_err().to_string();
    assert!(
        error.contains("no-kvm cannot be opened") && error.contains("basalt doctor"),
        "{error}"
    );
}

#[test]
fn dropping_kills_and_reaps_the_process() {
    let stage = Stage::new();
    let (_, theirs) = PacketSocket::pair().unwrap();
    let pid_file = stage.path("pid");
    let script = format!("echo $$ > {}; exec sleep 1000", pid_file.display());
    let process = VmmProcess::spawn(&stage.program(&script), theirs.into()).unwrap();
    let pid = loop {
        match fs::read_to_string(&pid_file) {
            Ok(text) if text.ends_with('\n') => break text.trim().to_owned(),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let proc = format!("/proc/{pid}");
    assert!(Path::new(&proc).exists());
    drop(process);
    assert!(!Path::new(&proc).exists(), "neither running nor a zombie");
}

#[test]
fn no_cause_is_said_twice() {
    let stage = Stage::new();
    fs::remove_file(stage.path("kernel")).unwrap();
    let error = prepare(stage.spec()).unwrap_err();
    assert!(
        std::error::Error::source(&error).is_none(),
        "whoever prints the chain would repeat it"
    );
}
