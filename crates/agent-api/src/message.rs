//! The messages: plain data, JSON in control frames; streams of bytes in data frames. `docs/agent.md` describes the
//! sequence. Knows neither how a client sends them nor what the agent does with them.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use wire::Protocol;

use crate::OsText;
pub use crate::exec::{
    Environment, ExecFailure, ExecRequest, ExitStatus, FailureKind, Kept, KeptCommand, MAX_KEPT, MAX_KEPT_TEXT, Tty,
    Which, WinSize,
};
pub use crate::failure::{RequestFailure, RequestFailureKind};
pub use crate::files::{FileInfo, UnpackTarget, Upload};
pub use crate::fs::{Entry, EntryKind, FsRequest, WatchEvent, WatchEventKind};
pub use crate::pci::{PciDevice, PciRequest};
pub use crate::reidentify::{Identity, Reidentify};

/// Name and versions in the handshake. The version changes with every change that an older side would misread; snapshots and suspended
/// sandboxes have agents of older releases, which therefore are understood for as long as can be. Version 3 came with commands that are
/// kept ([`ExecRequest::kept`]), [`Request::Fs`] and [`Request::Connect`].
pub const PROTOCOL: Protocol = Protocol {
    name: "basalt.agent",
    oldest: 2,
    version: 3,
};

/// The vsock port: a host listens on it for its guest's first connection, a guest for later ones.
pub const VSOCK_PORT: u32 = 1024;

/// Largest data frame that either side sends.
pub const DATA_CHUNK: usize = 64 * 1024;

/// Bytes of standard input that may be under way: sent, but not yet taken by the command.
pub const STDIN_WINDOW: usize = 128 * 1024;

/// Kinds of frames.
pub mod kind {
    /// A [`Request`](super::Request) or a [`Reply`](super::Reply) in JSON.
    pub const CONTROL: u16 = 1;
    /// Bytes for the command's standard input (client to agent).
    pub const STDIN: u16 = 2;
    /// Bytes of the command's standard output, or of its terminal (agent to client).
    pub const STDOUT: u16 = 3;
    /// Bytes of the command's standard error (agent to client).
    pub const STDERR: u16 = 4;
    /// Bytes of a file that is being uploaded (client to agent), or of a tree that is being copied (either way).
    pub const FILE: u16 = 5;
}

/// Client to agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Who are you? Answered by [`Reply::Hello`].
    Hello,
    /// Are you there? Answered by [`Reply::Done`].
    Ping,
    /// Make the container's root, once, before the first exec. Answered by [`Reply::Done`].
    Prepare(Box<Prepare>),
    /// Run a command. Answered by [`Reply::Started`] or [`Reply::Failed`].
    Exec(ExecRequest),
    /// During an exec: the terminal's new size.
    Resize(WinSize),
    /// During an exec: send a signal.
    Signal {
        /// Linux's number for x86-64.
        number: i32,
    },
    /// During an exec: no more standard input.
    CloseStdin,
    /// During an exec: nobody reads this stream any more; the command gets `SIGPIPE` if it writes on.
    CloseOutput {
        /// Which one.
        stream: OutputStream,
    },
    /// Store a file. Answered by [`Reply::Done`]; then `size` bytes in `FILE` frames; then [`Reply::Done`] again.
    Upload(Upload),
    /// What is at this path? Answered by [`Reply::File`].
    Stat {
        /// Absolute path.
        path: OsText,
        /// Also compute the SHA-256 of a regular file.
        digest: bool,
    },
    /// Send the tree at this path as a tar stream. Answered by [`Reply::Packing`]; then the stream in `FILE` frames; then
    /// [`Reply::Copied`].
    Pack {
        /// Absolute path. A link is not followed.
        path: OsText,
        /// What the tree's root is called in the stream.
        name: OsText,
    },
    /// Unpack a tar stream. Answered by [`Reply::Done`]; then the stream in `FILE` frames, an empty one at its end; then
    /// [`Reply::Copied`]. A refusal may come in the midst of the stream, of which the rest is thrown away.
    Unpack {
        /// Where to, an absolute path.
        path: OsText,
        /// What that is.
        target: UnpackTarget,
        /// Users and groups are the stream's; otherwise all belongs to root.
        keep_owner: bool,
    },
    /// The commands that are kept. Answered by [`Reply::Kept`].
    ListKept,
    /// Be where one that is kept was started: what it writes comes from now on, and what is sent goes to it, as during an exec. It
    /// runs on when this connection ends. Answered by [`Reply::Started`] or [`Reply::RequestFailed`].
    Attach {
        /// Which.
        command: Which,
        /// Its output is wanted, and [`Reply::Exited`]. If not, only input is sent, until [`Request::Detach`].
        output: bool,
    },
    /// End an [`Request::Attach`] or the exec of a command that is kept. Answered by [`Reply::Done`], when all input that was sent before
    /// is queued for the command.
    Detach,
    /// Something about files, as a user. Answered as [`FsRequest`] says, or by [`Reply::RequestFailed`].
    Fs {
        /// Whose: a path that is not absolute begins in this user's home, as `~` does, and what is made is this user's.
        /// `name|uid[:group|gid]`; `None` is root.
        user: Option<String>,
        /// What.
        request: FsRequest,
    },
    /// What programs in the machine are told that ask for the sandbox's environment (`GET /envs` at 127.0.0.1:49983). Answered by
    /// [`Reply::Done`].
    Environment(Environment),
    /// Connect to a TCP port of the machine's loopback addresses. Answered by [`Reply::Done`], and the connection is the port's from then
    /// on; or by [`Reply::RequestFailed`].
    Connect {
        /// Which port.
        port: u16,
    },
    /// Send a signal to the sandbox's own command (see [`ExecRequest::main`]). Answered by [`Reply::Done`].
    SignalMain {
        /// Linux's number for x86-64.
        number: i32,
    },
    /// Drop caches and clear free memory, so that a snapshot is small; commands run on. Answered by [`Reply::Done`].
    Settle,
    /// Let all commands stand still and the disks be consistent, for a snapshot. Answered by [`Reply::Done`].
    Freeze,
    /// After a restore: become a machine of its own, then let the commands go on. Answered by [`Reply::Reidentified`].
    #[serde(rename = "renew")]
    Reidentify(Box<Reidentify>),
    /// Set the time of day, to nanoseconds since 1970, as the host's was set. Answered by [`Reply::Done`].
    SetClock(u64),
    /// A function has come to the machine's PCI bus, or is to leave it. Answered by [`Reply::Pci`].
    Pci(PciRequest),
    /// End all processes, write everything back, and leave. Answered by [`Reply::Done`] just before.
    Shutdown(Shutdown),
}

/// Agent to client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Answer to [`Request::Hello`].
    Hello(AgentInfo),
    /// It is done.
    Done,
    /// It could not be done; the connection stays usable.
    Refused {
        /// One sentence.
        message: String,
    },
    /// It could not be done, for a reason that has a name; the connection stays usable.
    RequestFailed(RequestFailure),
    /// The command runs.
    Started {
        /// Its process id.
        pid: u32,
    },
    /// The command could not be started.
    Failed(ExecFailure),
    /// During an exec: so many bytes of standard input went to the command; the client may send as many more.
    StdinTaken {
        /// Bytes since the last such message.
        bytes: u32,
    },
    /// During an exec: nobody in the command reads standard input any more; what is sent is thrown away.
    StdinClosed,
    /// During an exec: the command (and all it started) has closed this stream.
    OutputClosed {
        /// Which one.
        stream: OutputStream,
    },
    /// The command has ended and all its output was sent before this. The connection is idle again.
    Exited(ExitStatus),
    /// Answer to [`Request::Stat`]; `None` if nothing is there.
    File(Option<FileInfo>),
    /// Answer to [`Request::Pack`], before the stream.
    Packing {
        /// The tree is a directory, and not a single file or link.
        directory: bool,
        /// Bytes in its files, about.
        bytes: u64,
    },
    /// A tree was copied.
    Copied {
        /// Devices, pipes and sockets, which are not copied.
        left_out: u64,
        /// Files that became shorter while they were read.
        changed: u64,
    },
    /// Answer to [`Request::ListKept`], in the order of their starts.
    Kept {
        /// Some of them.
        commands: Vec<KeptCommand>,
        /// Another such answer follows.
        more: bool,
    },
    /// Answer to several of [`FsRequest`]: what is there now.
    Entry(Box<Entry>),
    /// Answer to [`FsRequest::List`].
    Entries {
        /// Some of them.
        entries: Vec<Entry>,
        /// Another such answer follows.
        more: bool,
    },
    /// Answer to [`FsRequest::Read`], before its bytes.
    Reading {
        /// The file.
        entry: Box<Entry>,
        /// How many bytes follow.
        bytes: u64,
    },
    /// During an [`FsRequest::Watch`]: what happened.
    Watched(Vec<WatchEvent>),
    /// Answer to [`Request::Pci`]: what is there now.
    Pci(Option<PciDevice>),
    /// Answer to [`Request::Reidentify`].
    #[serde(rename = "renewed")]
    Reidentified {
        /// What `/proc/sys/kernel/random/boot_id` says from now on.
        boot_id: String,
    },
}

/// One of the two output streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output, or the terminal.
    Stdout,
    /// Standard error.
    Stderr,
}

/// What an agent says about itself and its machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentInfo {
    /// Version of the agent's package.
    pub agent_version: String,
    /// `uname -r`.
    pub kernel_release: String,
    /// `CLOCK_BOOTTIME` at the agent's first instruction.
    pub started_ns: u64,
    /// `CLOCK_BOOTTIME` now.
    pub now_ns: u64,
    /// `MemTotal` of `/proc/meminfo`, in KiB.
    pub mem_total_kib: u64,
    /// `MemFree`, in KiB.
    pub mem_free_kib: u64,
    /// `MemAvailable`, in KiB.
    pub mem_available_kib: u64,
    /// `Cached`, in KiB. Here and below, 0 is what agents say that are older.
    #[serde(default)]
    pub mem_cached_kib: u64,
    /// Processors that run.
    #[serde(default)]
    pub cpus: u32,
    /// Size of the file system at `/`.
    #[serde(default)]
    pub disk_total_bytes: u64,
    /// How much of it is in use.
    #[serde(default)]
    pub disk_used_bytes: u64,
    /// What the agent has reached, and when by `CLOCK_MONOTONIC`, in this order.
    #[serde(default)]
    pub marks: Vec<(String, u64)>,
}

/// How a guest's root comes to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    /// The image.
    pub root: RootDisk,
    /// The disk that holds the writable layer; `None` keeps it in the guest's memory.
    #[serde(default)]
    pub writable: Option<RootDisk>,
    /// Limit of a writable layer in memory, in bytes; `None` is half of the guest's memory.
    pub overlay_bytes: Option<u64>,
    /// The guest's host name.
    pub hostname: String,
    /// What `/etc/machine-id` says: 32 lower-case hexadecimal digits (machine-id(5)); `None` leaves it to the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// The host's time, in nanoseconds since 1970; the guest has no clock of its own.
    pub clock_ns: u64,
    /// Random bytes for the guest's generator, at least 32.
    pub entropy: Vec<u8>,
    /// How its interface is set up; `None` if it has no network but itself.
    pub network: Option<GuestNetwork>,
    /// File systems in memory, over the root.
    #[serde(default)]
    pub tmpfs: Vec<TmpfsMount>,
    /// The most processes and threads that all commands may have together.
    #[serde(default)]
    pub pids_max: Option<u64>,
    /// Directories that it shares with its host.
    // The word of earlier agents, which snapshots have.
    #[serde(rename = "shares", default, skip_serializing_if = "Vec::is_empty")]
    pub shared_directories: Vec<Share>,
    /// The accelerator that it has by forwarded calls, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<Accelerator>,
}

/// An accelerator whose calls are forwarded. A file system in memory that guest and host share (virtio-pmem) has the files that programs
/// get memory by, and the drivers' libraries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accelerator {
    /// The file system's label.
    pub label: String,
    /// OpenCL's driver, as a file of it; the loader of a program finds it by a file in `/etc/OpenCL/vendors`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opencl: Option<String>,
    /// The same for an image whose C library is musl. If it is missing, such an image's programs find none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opencl_musl: Option<String>,
    /// CUDA's libraries, for an image with glibc.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda: Option<CudaLibraries>,
}

/// CUDA's libraries: one file, and the names by which programs look for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CudaLibraries {
    /// The file, of the accelerator's file system.
    pub file: String,
    /// The names.
    pub names: Vec<String>,
}

/// A directory that a guest shares with its host (virtio-fs).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// What the device calls it.
    pub tag: String,
    /// Where it is mounted: an absolute path in the container's root, made if it is missing.
    pub path: String,
    /// Nothing can be changed there.
    pub read_only: bool,
}

/// A file system in the guest's memory. Its directory is made if it is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TmpfsMount {
    /// Where; an absolute path.
    pub path: String,
    /// The most that it holds; `None` is half of the guest's memory.
    pub bytes: Option<u64>,
    /// Permission bits of its root.
    pub mode: u32,
    /// Programs in it can be executed.
    pub exec: bool,
}

/// The set-up of the guest's one interface, `eth0`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestNetwork {
    /// The guest's addresses.
    pub addresses: Vec<Address>,
    /// Where everything else is sent, one of each family at most.
    pub gateways: Vec<Gateway>,
    /// Name servers, for `/etc/resolv.conf`.
    pub dns: Vec<IpAddr>,
    /// Domains that short names are looked up in.
    pub search: Vec<String>,
    /// The largest packet.
    pub mtu: u16,
}

/// An address and how many of its bits are the link's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// Length of the prefix.
    pub prefix: u8,
}

/// A router on the link.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gateway {
    /// Its address.
    pub address: IpAddr,
    /// Its Ethernet address, so that nobody has to ask for it.
    pub mac: [u8; 6],
}

/// The disk with the image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RootDisk {
    /// Which disk.
    pub disk: DiskName,
    /// File system, for instance `erofs`.
    pub fs: String,
}

/// How a disk is found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskName {
    /// A device node, for instance `/dev/vda`.
    Path(String),
    /// The serial number that the virtio block device gives.
    Serial(String),
}

/// How to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shutdown {
    /// What the machine does afterwards.
    pub how: PowerAction,
    /// How long processes may take to end after `SIGTERM`; 0 sends only `SIGKILL`.
    pub grace_ms: u32,
}

/// The last thing a machine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerAction {
    /// Power off.
    PowerOff,
    /// Reboot.
    Reboot,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn round_trip<T: Serialize + for<'a> Deserialize<'a> + PartialEq + std::fmt::Debug>(
        message: &T,
    ) -> String {
        let json = serde_json::to_string(message).unwrap();
        assert_eq!(&serde_json::from_str::<T>(&json).unwrap(), message);
        json
    }

    #[test]
    fn requests_look_as_documented() {
        assert_eq!(round_trip(&Request::Ping), r#""ping""#);
        assert_eq!(
            round_trip(&Request::Signal { number: 15 }),
            r#"{"signal":{"number":15}}"#
        );
        let exec = ExecRequest {
            argv: vec!["stty".into(), vec![0xff].into()],
            env: vec!["A=b".into()],
            cwd: "/".into(),
            user: Some("nobody".into()),
            tty: Some(Tty {
                size: WinSize { rows: 24, cols: 80 },
                term: Some("xterm".into()),
            }),
            stdin: true,
            main: true,
            detached: false,
            kept: None,
        };
        assert_eq!(
            round_trip(&Request::Exec(exec)),
            r#"{"exec":{"argv":["stty",[255]],"env":["A=b"],"cwd":"/","user":"nobody","tty":{"size":{"rows":24,"cols":80},"term":"xterm"},"stdin":true,"main":true,"detached":false}}"#
        );
        let unpack = Request::Unpack {
            path: "/srv".into(),
            target: UnpackTarget::Into,
            keep_owner: false,
        };
        assert_eq!(
            round_trip(&unpack),
            r#"{"unpack":{"path":"/srv","target":"into","keep_owner":false}}"#
        );
        let prepare = Prepare {
            root: RootDisk {
                disk: DiskName::Serial("root".into()),
                fs: "erofs".into(),
            },
            writable: None,
            overlay_bytes: None,
            hostname: "sandbox".into(),
            machine_id: None,
            clock_ns: 1,
            entropy: vec![1, 2],
            network: None,
            shared_directories: Vec::new(),
            tmpfs: vec![TmpfsMount {
                path: "/run".into(),
                bytes: Some(4096),
                mode: 0o755,
                exec: false,
            }],
            pids_max: Some(9),
            accelerator: None,
        };
        let shared = Prepare {
            shared_directories: vec![Share {
                tag: "volume0".into(),
                path: "/src".into(),
                read_only: true,
            }],
            ..prepare.clone()
        };
        assert!(
            round_trip(&Request::Prepare(Box::new(shared)))
                .ends_with(r#""pids_max":9,"shares":[{"tag":"volume0","path":"/src","read_only":true}]}}"#)
        );
        assert_eq!(
            round_trip(&Request::Prepare(Box::new(prepare))),
            r#"{"prepare":{"root":{"disk":{"serial":"root"},"fs":"erofs"},"writable":null,"overlay_bytes":null,"hostname":"sandbox","clock_ns":1,"entropy":[1,2],"network":null,"tmpfs":[{"path":"/run","bytes":4096,"mode":493,"exec":false}],"pids_max":9}}"#
        );
    }

    #[test]
    fn replies_look_as_documented() {
        assert_eq!(round_trip(&Reply::Done), r#""done""#);
        assert_eq!(round_trip(&Reply::Started { pid: 7 }), r#"{"started":{"pid":7}}"#);
        assert_eq!(
            round_trip(&Reply::Exited(ExitStatus::Signal(9))),
            r#"{"exited":{"signal":9}}"#
        );
        let failed = ExecFailure {
            kind: FailureKind::NotFound,
            message: "no".into(),
        };
        assert_eq!(
            round_trip(&Reply::Failed(failed)),
            r#"{"failed":{"kind":"not_found","message":"no"}}"#
        );
        assert_eq!(
            round_trip(&Reply::OutputClosed {
                stream: OutputStream::Stderr
            }),
            r#"{"output_closed":{"stream":"stderr"}}"#
        );
        assert_eq!(round_trip(&Reply::File(None)), r#"{"file":null}"#);
        assert_eq!(
            round_trip(&Reply::Copied {
                left_out: 1,
                changed: 0
            }),
            r#"{"copied":{"left_out":1,"changed":0}}"#
        );
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        assert_eq!(ExitStatus::Code(3).exit_code(), 3);
        assert_eq!(ExitStatus::Signal(15).exit_code(), 143);
        assert_eq!(FailureKind::NotFound.exit_code(), 127);
        assert_eq!(FailureKind::NotExecutable.exit_code(), 126);
    }

    #[test]
    fn garbage_is_an_error() {
        for text in [
            "",
            "{",
            "[]",
            r#"{"exec":{}}"#,
            r#"{"signal":{"number":"9"}}"#,
            "\"fly\"",
            "\u{0}",
        ] {
            assert!(serde_json::from_str::<Request>(text).is_err(), "{text}");
        }
    }
}
