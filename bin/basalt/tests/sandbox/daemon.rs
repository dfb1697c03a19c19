//! The daemon of a test: crate `node` as `basaltd` wires it, but for users and namespaces, which a stand-in has no need of.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use node::{Config, Endpoint, Node, Server, TimeLimits};

/// Asks for the end of all sandboxes, of which there are to be three.
pub(crate) const END: &str = "--end-sandboxes";

/// Longer than they need.
const GRACE: Duration = Duration::from_secs(90);

/// Serves until it is told to end, or ends all sandboxes.
pub(crate) fn serve(arguments: &[String]) -> ExitCode {
    let value = |flag: &str| {
        let at = arguments.iter().position(|argument| argument == flag).expect(flag);
        PathBuf::from(&arguments[at + 1])
    };
    let assets = value("--assets");
    let config = Config {
        state: value("--state"),
        kernel: assets.join("vmlinux"),
        initramfs: assets.join("initramfs.cpio"),
        vmm: assets.join("basalt-vmm"),
        kvm: value("--kvm"),
        cpu_model: node_api::CpuModel::V2,
        users: None,
        log_level: log::LevelFilter::Warn,
        managed: false,
        cgroup: None,
        limits: TimeLimits::REAL,
        spans: otlp::Exporter::from_environment("test").expect("a collector"),
    };
    let opened = Node::open(config);
    let done = if arguments.iter().any(|argument| argument == END) {
        let ended = opened.and_then(|node| node.end_all(GRACE));
        ended.map(|ending| assert_eq!((ending.ended, ending.failed), (3, 0)))
    } else {
        opened.and_then(|node| {
            let _metrics = Endpoint::bind(&node, None)?;
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
