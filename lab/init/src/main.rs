//! PID 1 of the lab host: modules, file systems, network, then the agent protocol for whoever knows the token.
//!
//! ```text
//!  initramfs: /dev /proc /sys ─► early modules ─► root image ─► run-time mounts ─┬─► data disks ─┬─► serve ─► power off
//!                                                                                └─► network, KVM ┘
//! ```
//! Each step is a line on the console, which is a file outside. A step that fails ends the lab: the line says why.
//! This program does not know what the lab is used for.

mod disks;
mod modules;
mod mounts;
mod net;
mod serve;

use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::thread;

use anyhow::{Context, Result, anyhow};
use rustix::system::RebootCommand;
use rustix::time::ClockId;
use wire::Token;

use lab_init::contract;
use modules::Modules;

/// The emulator's user network gives these (QEMU's documentation of `-netdev user`); asking by DHCP would take seconds.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 15);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 2, 2);
const PREFIX: u8 = 24;

/// Needed to reach the root image. (A kernel's checksum code asks for `crc32c_generic` by an alias.)
const EARLY: [&str; 5] = ["virtio_pci", "virtio_blk", "crc32c_generic", "erofs", "overlay"];

/// For the data disks.
const STORAGE: [&str; 2] = ["xfs", "ext4"];

/// For what runs in the host: its network, and virtual machines with theirs.
const HOST: [&str; 5] = ["virtio_net", "kvm-amd", "tun", "loop", "nvme"];

/// Where programs are found, ours first.
const PATH: &str = "/opt/basalt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn main() {
    if std::process::id() != 1 {
        log("is the first process of the lab host; `basalt-lab up` starts it there");
        return;
    }
    if let Err(error) = run() {
        say(contract::FAILED_PREFIX, &format!("{error:#}"));
    }
    mounts::leave();
    // Returning would make the kernel panic, so if this fails there is nothing better to do than to return.
    if let Err(error) = rustix::system::reboot(RebootCommand::PowerOff) {
        say(contract::FAILED_PREFIX, &format!("cannot power off: {error}"));
    }
}

fn run() -> Result<()> {
    let started_ns = agent::boottime_ns();
    mounts::kernel()?;
    log("kernel is up");
    let token = read_token()?;
    load(&EARLY)?;
    mounts::enter_root()?;
    mounts::modules()?;
    mounts::runtime()?;
    hostname()?;
    log("root image is mounted");
    let modules = Modules::of_running_kernel()?;
    thread::scope(|scope| {
        let storage = scope.spawn(|| {
            STORAGE.iter().try_for_each(|name| modules.load(name))?;
            mounts::data()?;
            log("data disks are mounted");
            Ok(())
        });
        let host = host(&modules);
        let storage = storage
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the thread that mounts the data disks panicked")));
        host.and(storage)
    })?;
    serve::serve(token, started_ns)
}

/// Network and KVM, while the data disks are mounted.
fn host(modules: &Modules) -> Result<()> {
    HOST.iter().try_for_each(|name| modules.load(name))?;
    let route = net::Route::open()?;
    route.up("lo")?;
    let eth0 = route.up("eth0")?;
    route.address(eth0, ADDRESS, PREFIX)?;
    route.default_route(eth0, GATEWAY)?;
    log("network is up, KVM is loaded");
    Ok(())
}

fn load(names: &[&str]) -> Result<()> {
    let modules = Modules::of_running_kernel()?;
    names.iter().try_for_each(|name| modules.load(name))
}

/// The token from the initramfs, which nobody in the lab sees: it is gone when the root image is entered.
fn read_token() -> Result<Token> {
    let text = fs::read_to_string(contract::TOKEN_FILE).context("the initramfs has no token")?;
    Token::from_hex(text.trim()).context("the token in the initramfs is not 64 hexadecimal digits")
}

fn hostname() -> Result<()> {
    let name = fs::read_to_string("/etc/hostname").context("the root image has no /etc/hostname")?;
    rustix::system::sethostname(name.trim().as_bytes()).context("cannot set the host name")
}

/// A line on the console, with the seconds since the kernel started.
fn log(message: &str) {
    say(contract::LOG_PREFIX, message);
}

fn say(prefix: &str, message: &str) {
    let now = rustix::time::clock_gettime(ClockId::Boottime);
    let line = format!("{prefix}{message} [{}.{:02} s]\n", now.tv_sec, now.tv_nsec / 10_000_000);
    // The console is the only place to report to; a console that fails cannot be told.
    drop(std::io::stderr().write_all(line.as_bytes()));
}
