//! What it takes a guest that owns its CPU to have a disk work for it: an exit for each request, or none where the disk looks for the
//! next one for a while.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use reservation::Device;
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits};

use super::bare::{CPU, Module, in_lab, online, wait_online};
use super::block::find;
use crate::vm::{self, Builder};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-kicks",
    limit: Duration::from_secs(240),
    host,
    guest: Some(guest),
};

/// Requests, one after the other.
const REQUESTS: u64 = 500;

/// Bytes of each.
const BLOCK: usize = 4096;

/// How long the disk looks for the next request: longer than this emulated guest takes to ask, and nothing.
const LONG: Duration = Duration::from_millis(50);

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let path = host.scratch.join("data");
    File::create(&path)?.set_len(REQUESTS * BLOCK as u64)?;
    let kicked = exits(host, &device, Duration::ZERO)?;
    let looked = exits(host, &device, LONG)?;
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("{REQUESTS} requests: {kicked} exits of registers, {looked} where the disk looks for the next one");
    }
    ensure!(
        kicked >= REQUESTS,
        "{kicked} exits for {REQUESTS} requests that each have to ring"
    );
    ensure!(
        looked <= REQUESTS / 4,
        "{looked} exits for {REQUESTS} requests for which the disk looks"
    );
    drop(device);
    module.unload()
}

/// How often a guest's accesses to registers come out while it reads the disk.
fn exits(host: &Host, device: &Device, busy_poll: Duration) -> Result<u64> {
    let all = online()?;
    let reservation = device.reserve(&[CPU])?;
    let mut builder = Builder::new(host)?.busy_poll(busy_poll)?;
    let file = builder.fd(File::open(host.scratch.join("data"))?);
    let config = BlockConfig {
        file,
        read_only: true,
        queues: 1,
        serial: "data".into(),
        engine: BlockEngine::Auto,
        limits: BlockLimits::default(),
    };
    builder.device("data", &config)?;
    let mut machine = builder
        .reservation(reservation.as_fd().try_clone_to_owned()?)?
        .start()?;
    drop(reservation);
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    let mut counted = || -> Result<u64> {
        let samples = machine.vmm.client.metrics()?;
        let of_memory = samples.iter().find(|sample| {
            sample.name == "engine_exits_total" && sample.labels.iter().any(|(_, reason)| reason == "memory")
        });
        Ok(of_memory.context("exits are not counted")?.value)
    };
    let before = counted()?;
    vm::guest_half(&mut agent, CASE.name, &[])?;
    let exits = counted()? - before;
    drop(agent);
    machine.vmm.client.stop()?;
    drop(machine);
    wait_online(&all)?;
    Ok(exits)
}

fn guest(_: &[String]) -> Result<()> {
    let disk = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(find("data")?)?;
    let mut room = vec![0; 2 * BLOCK];
    let start = room.as_ptr().align_offset(BLOCK);
    let block = &mut room[start..start + BLOCK];
    for number in 0..REQUESTS {
        disk.read_exact_at(block, number * BLOCK as u64)?;
    }
    Ok(())
}
