//! The daemon of a test: crate `node` as `basaltd` wires it, but for users and namespaces, which a stand-in has no need of.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use base::ByteSize;
use host::MemInfo;
use node::{Config, HostNumbers, Node, Overcommit, Server, Space, ThisHost, TimeLimits, Zeroing};

/// Asks for the end of all sandboxes, of which there are to be three.
pub(crate) const END: &str = "--end-sandboxes";

/// Set where the daemon's group may ask it, too.
pub(crate) const GROUP: &str = "BASALT_TEST_GROUP";

/// Longer than they need.
const GRACE: Duration = Duration::from_secs(90);

/// Serves until it is told to end, or ends all sandboxes.
pub(crate) fn serve(arguments: &[String]) -> ExitCode {
    let given = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag)?;
        Some(&arguments[at + 1])
    };
    let value = |flag: &str| PathBuf::from(given(flag).expect(flag));
    node::keep_private();
    let level = given("--log-level").and_then(|level| level.parse().ok());
    observe::logger::init("basaltd: ", level.unwrap_or(log::LevelFilter::Warn)).expect("no logger yet");
    base::open_files::raise().expect("the hard limit of open files");
    let assets = value("--assets");
    let config = Config {
        state: value("--state"),
        kernel: assets.join("vmlinux"),
        initramfs: assets.join("initramfs.cpio"),
        programs: node::Programs {
            vmm: assets.join("basalt-vmm"),
            ..node::Programs::default()
        },
        kvm: value("--kvm"),
        cpu_model: node_api::CpuModel::V2,
        users: None,
        log_level: log::LevelFilter::Warn,
        // Its own, which it may give files to whoever it is.
        sockets: node::Sockets {
            group: std::env::var_os(GROUP).map(|_| rustix::process::getegid().as_raw()),
            ..node::Sockets::default()
        },
        managed: false,
        cgroup: None,
        limits: TimeLimits::REAL,
        spans: otlp::Exporter::from_environment("test").expect("a collector"),
        host: Arc::new(SmallHost),
        overcommit: Overcommit {
            memory: given("--memory-overcommit").map_or(Overcommit::default().memory, |text| text.parse().expect(text)),
            ..Overcommit::default()
        },
        zeroing: Zeroing::default(),
    };
    let opened = Node::open(config);
    let done = if arguments.iter().any(|argument| argument == END) {
        let ended = opened.and_then(|node| node.end_all(GRACE));
        ended.map(|ending| assert_eq!((ending.ended, ending.failed), (3, 0)))
    } else {
        opened.and_then(|node| {
            let _metrics = node.serve_metrics(None)?;
            Server::bind(node)?.serve()
        })
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("basaltd: {error}");
            ExitCode::FAILURE
        }
    }
}

/// This host, but for what a test says that it has: `BASALT_TEST_MEMORY` and `BASALT_TEST_DISK`, sizes.
#[derive(Debug)]
struct SmallHost;

impl SmallHost {
    fn said(name: &str) -> Option<ByteSize> {
        Some(std::env::var(name).ok()?.parse().expect(name))
    }
}

impl HostNumbers for SmallHost {
    fn memory(&self) -> io::Result<MemInfo> {
        let here = ThisHost.memory()?;
        Ok(match Self::said("BASALT_TEST_MEMORY") {
            Some(total) => MemInfo {
                total,
                available: total,
                huge: ByteSize(0),
            },
            None => here,
        })
    }

    fn reserved_memory(&self) -> Option<ByteSize> {
        ThisHost.reserved_memory()
    }

    fn space(&self, path: &Path) -> io::Result<Space> {
        match Self::said("BASALT_TEST_DISK") {
            Some(ByteSize(size)) => Ok(Space { size, free: size }),
            None => ThisHost.space(path),
        }
    }

    fn descriptors(&self) -> u64 {
        ThisHost.descriptors()
    }
}
