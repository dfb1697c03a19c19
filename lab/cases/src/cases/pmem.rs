//! A file of the host's as memory of a guest's (virtio-pmem): the guest has a file system there by DAX, and host and guest answer each other by
//! words in a file of it, without an exit to the VMM. What the guest has synchronized is on the file. The VM goes on when it was saved.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::mount::{MountFlags, mount, unmount};
use vmm_api::devices::PmemConfig;

use super::bare::run;
use super::nvme_disk::tell;
use super::snapshot_files::Files;
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "pmem",
    limit: Duration::from_secs(200),
    host,
    guest: Some(guest),
};

/// The file, and how often both sides answer each other in it.
const BYTES: u64 = 32 << 20;
const ROUNDS: u64 = 5000;

/// What the file of the guest's begins with: two words, of the host's and of the guest's rounds, and then what it is found by.
const HOSTS: u64 = 0;
const GUESTS: u64 = 8;
const MARK_AT: u64 = 64;
const MARK: &[u8; 33] = b"what the guest's file is found by";
const PAGE: usize = 4096;

fn host(host: &Host) -> Result<()> {
    let image = host.scratch.join("pmem.ext4");
    File::create(&image)?.set_len(BYTES)?;
    run("mkfs.ext4", &["-q", "-b", "4096", &image.to_string_lossy()])?;
    let file = base::memfd::sized("window", BYTES)?;
    file.write_all_at(&fs::read(&image)?, 0)?;
    fs::remove_file(&image)?;

    let mut builder = Builder::new(host)?;
    let config = PmemConfig {
        file: builder.fd(file.try_clone()?),
        private: false,
        parts: Vec::new(),
    };
    builder.device("window", &config)?;
    let mut machine = builder.start()?;
    let mut agent = machine.agent()?;
    vm::install(&mut agent)?;
    let mut half = vm::start_guest_half(agent, CASE.name);
    half.wait_for("ready")?;
    let place = find(&file)?;
    // It answers behind that.
    is_saved(host, &mut machine)?;
    answer_each_other(&mut machine, &file, place)?;
    half.finish()?;
    ensure!(
        counted(&mut machine, "pmem_flushes_total")? > 0,
        "what the guest has synchronized was never brought to the file"
    );
    Ok(())
}

/// Where in the file the page of the guest's lies.
fn find(file: &File) -> Result<u64> {
    let mut page = [0; PAGE];
    let mark = usize::try_from(MARK_AT)?;
    for place in (0..BYTES).step_by(PAGE) {
        file.read_exact_at(&mut page, place)?;
        if page[mark..mark + MARK.len()] == *MARK {
            return Ok(place);
        }
    }
    bail!("what the guest has written is nowhere in the host's file")
}

fn answer_each_other(machine: &mut Vm, file: &File, place: u64) -> Result<()> {
    let before = counted(machine, "vcpu_exits_total")?;
    let began = Instant::now();
    for round in 1..=ROUNDS {
        file.write_all_at(&round.to_le_bytes(), place + HOSTS)?;
        wait_for_word(file, place + GUESTS, round).context("the guest's answer")?;
    }
    let (took, exits) = (began.elapsed(), counted(machine, "vcpu_exits_total")? - before);
    tell(&format!("{ROUNDS} answers within {took:?}, {exits} exits to the VMM"));
    ensure!(exits < ROUNDS / 10, "{ROUNDS} answers took {exits} exits");
    Ok(())
}

fn wait_for_word(file: &File, place: u64, wanted: u64) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(30);
    let mut word = [0; 8];
    loop {
        file.read_exact_at(&mut word, place)?;
        let word = u64::from_le_bytes(word);
        match word == wanted {
            true => return Ok(()),
            false if Instant::now() > end => bail!("it is {word} still, and not {wanted}"),
            false => std::hint::spin_loop(),
        }
    }
}

fn counted(machine: &mut Vm, name: &str) -> Result<u64> {
    let samples = machine.vmm.client.metrics()?;
    Ok(samples.iter().filter(|it| it.name == name).map(|it| it.value).sum())
}

/// Saving leaves the file to whoever has it; the case `accelerator` has machines that go on from there.
fn is_saved(host: &Host, machine: &mut Vm) -> Result<()> {
    machine.vmm.client.pause()?;
    Files::new(host, "saved").take(machine)?;
    Ok(machine.vmm.client.resume()?)
}

/// In the guest: mounts what is there, and answers.
fn guest(_: &[String]) -> Result<()> {
    let directory = Path::new("/tmp/window");
    fs::create_dir_all(directory)?;
    mount("/dev/pmem0", directory, c"ext4", MountFlags::empty(), c"dax=always").context("/dev/pmem0 by DAX")?;
    let path = directory.join("words");
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path)?;
    let mut page = [0; PAGE];
    let mark = usize::try_from(MARK_AT)?;
    page[mark..mark + MARK.len()].copy_from_slice(MARK);
    file.write_all_at(&page, 0)?;
    file.sync_all()?;
    tell("ready");
    for round in 1..=ROUNDS {
        wait_for_word(&file, HOSTS, round).context("the host's word")?;
        file.write_all_at(&round.to_le_bytes(), GUESTS)?;
    }
    file.sync_all()?;
    drop(file);
    Ok(unmount(directory, rustix::mount::UnmountFlags::empty())?)
}
