//! The daemon of a test: crate `node` as `basaltd` wires it, but for users and namespaces, which a stand-in has no need of.

use std::path::PathBuf;

use node::{Config, Endpoint, Node, Server, TimeLimits};

/// Serves until it is told to end.
pub(crate) fn serve(arguments: &[String]) {
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
        users: None,
        log_level: log::LevelFilter::Warn,
        managed: false,
        limits: TimeLimits::REAL,
        spans: otlp::Exporter::from_environment("test").expect("a collector"),
    };
    let served = Node::open(config).and_then(|node| {
        let _metrics = Endpoint::bind(&node, None)?;
        Server::bind(node)?.serve()
    });
    if let Err(error) = served {
        eprintln!("basaltd: {error}");
    }
}
