//! The figures of the issue, each measured with its peers in turn. Owns the order of runs and the targets.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmm_api::devices::{BlockEngine, MacAddress};
use vmm_api::{Mark, MetricSample};

use crate::device_start::Arguments;
use crate::guest::{END, RESULT, Reading, WORKLOADS};
use crate::machine::{Devices, MEMORY, MICROVM, MICROVM_PCI, Machine, QEMU, Setup, Walls, jailed_name, qemu_arguments};
use crate::net;
use crate::report::{Figure, Report};
use crate::smaps;
use crate::stats::Target;
use crate::steps::Steps;
use crate::trace::{Trace, exec_to_run, exits_by_reason, milliseconds};
use crate::world::World;

/// What the agent's marker begins with.
pub(crate) const MARKER: &str = "basalt-agent: up ";

const BASALT: &str = "Basalt";
const BASALT_OPEN: &str = "Basalt, no jail";
pub(crate) const BASALT_SANDBOX: &str = "Basalt, a sandbox's devices";
const PEER: &str = "QEMU microvm";
const PEER_MMIO: &str = "QEMU microvm, mmio, io_uring";
const PEER_PCI: &str = "QEMU microvm, pci, io_uring";
const PEER_DEBIAN: &str = "QEMU microvm, Debian's kernel";

/// What the peer's network card needs of the host's kernel with `vhost=on`.
const VHOST: &str = "/dev/vhost-net";

/// How often what hardly differs, or is not judged, is measured.
pub(crate) const COUNTED_RUNS: usize = 3;

/// What each figure needs.
pub(crate) struct Bench<'a> {
    pub(crate) world: &'a World,
    pub(crate) runs: usize,
    pub(crate) report: &'a mut Report,
    pub(crate) device: &'a Arguments,
}

/// Samples by who they are of.
#[derive(Default)]
struct Samples(BTreeMap<String, Vec<f64>>);

impl Samples {
    fn put(&mut self, who: &str, value: f64) {
        self.0.entry(who.to_owned()).or_default().push(value);
    }

    fn take(&mut self, who: &str) -> Vec<f64> {
        self.0.remove(who).unwrap_or_default()
    }
}

/// One of those that take turns: its name and how it is started.
pub(crate) struct Contender {
    who: &'static str,
    program: String,
    start: Box<dyn Fn() -> Result<Machine>>,
}

impl Bench<'_> {
    /// From the exec of the VMM to the first entry into the guest, by the host kernel's events.
    pub(crate) fn start(&mut self) -> Result<()> {
        let _tap = net::Tap::new()?;
        // The peer between ours: a guest started right after another of ours is slower in the emulator (docs/benchmarks/history.md).
        let contenders = self.contenders(&[BASALT, PEER, BASALT_SANDBOX, PEER, BASALT_OPEN, PEER])?;
        let (mut samples, mut steps) = (Samples::default(), Steps::default());
        for (round, contender) in turns(&contenders, self.runs) {
            let (value, marks) = self.twice("start", contender, start_once)?;
            tell("start", round, contender.who, value, "ms");
            samples.put(contender.who, value);
            steps.put(contender.who, value, &marks);
        }
        let mut figure = Figure::new("VMM exec to first KVM_RUN", "ms");
        for who in [BASALT, BASALT_SANDBOX, BASALT_OPEN, PEER] {
            figure.add(who, samples.take(who));
        }
        for who in [BASALT, BASALT_SANDBOX] {
            figure.ratio(who, PEER, Target::AtMost(0.15));
        }
        self.report.figures.push(figure);
        for who in [BASALT, BASALT_SANDBOX, BASALT_OPEN] {
            self.report.figures.extend(steps.take(who));
        }
        Ok(())
    }

    /// From the start of the VMM to the agent's marker, and what both hold in memory then.
    pub(crate) fn boot(&mut self) -> Result<()> {
        let _tap = net::Tap::new()?;
        let contenders = self.contenders(&[BASALT, PEER, BASALT_SANDBOX, PEER_DEBIAN])?;
        let (mut times, mut rss, mut anonymous) = (Samples::default(), Samples::default(), Samples::default());
        let (mut used, mut unavailable) = (Samples::default(), Samples::default());
        for (round, contender) in turns(&contenders, self.runs) {
            let who = contender.who;
            let booted = self.twice("boot", contender, boot_once)?;
            let (value, own, marker) = (booted.milliseconds, booted.own, booted.marker);
            tell("boot", round, who, value, "ms");
            times.put(who, value);
            rss.put(who, mebi(own.rss_kib));
            anonymous.put(who, mebi(own.anonymous_kib));
            used.put(who, mebi((MEMORY.bytes() >> 10) - marker.free_kib));
            unavailable.put(who, mebi((MEMORY.bytes() >> 10) - marker.available_kib));
        }
        let all = [BASALT, BASALT_SANDBOX, PEER, PEER_DEBIAN];
        let figure = |name: &str, unit: &str, samples: &mut Samples| {
            let mut figure = Figure::new(name, unit);
            for who in all {
                figure.add(who, samples.take(who));
            }
            figure
        };
        let mut first = figure("VMM exec to the agent's first instruction", "ms", &mut times);
        first.ratio(BASALT, PEER, Target::AtMost(0.85));
        first.ratio(BASALT, PEER_DEBIAN, Target::AtMost(0.45));
        let mut own = figure("The VMM's own memory: resident, less the guest's RAM", "MiB", &mut rss);
        let mut part = figure("The anonymous part of it", "MiB", &mut anonymous);
        for who in [BASALT, BASALT_SANDBOX] {
            own.absolute(who, Target::Under(3.0));
            part.absolute(who, Target::Under(0.6));
        }
        let mut guest = figure(
            "Guest memory used when the agent is ready: 128 MiB less MemFree",
            "MiB",
            &mut used,
        );
        guest.absolute(BASALT, Target::Under(24.0));
        guest.absolute(BASALT_SANDBOX, Target::Under(24.0));
        let less = figure("The same: 128 MiB less MemAvailable", "MiB", &mut unavailable);
        self.report.figures.extend([first, own, part, guest, less]);
        Ok(())
    }

    /// How often a guest leaves to user space until the agent runs: by the VMM's counters, and by the host kernel's.
    pub(crate) fn boot_exits(&mut self) -> Result<()> {
        let _tap = net::Tap::new()?;
        let contenders = self.contenders(&[BASALT_SANDBOX, BASALT, PEER])?;
        let mut counted: BTreeMap<&str, Samples> = BTreeMap::new();
        for (round, contender) in turns(&contenders, COUNTED_RUNS.min(self.runs)) {
            let samples = counted.entry(contender.who).or_default();
            for (name, count) in self.twice("exits", contender, exits_once)? {
                samples.put(&name, float(count));
            }
            eprintln!("exits: round {}, {}", round + 1, contender.who);
        }
        for contender in &contenders {
            let mut figure = Figure::new(
                &format!("Exits to user space until the agent runs: {}", contender.who),
                "exits",
            );
            for (name, values) in counted.remove(contender.who).unwrap_or_default().0 {
                figure.add(&name, values);
            }
            self.report.figures.push(figure);
        }
        Ok(())
    }

    /// Reads of a disk, timed inside the guest.
    pub(crate) fn disk(&mut self) -> Result<()> {
        let setup = self.world.reader()?;
        let disk = self.world.disk()?;
        let drive = |aio: &str| {
            format!(
                "if=none,id=disk,file={},format=raw,readonly=on,cache=writeback,aio={aio}",
                disk.display()
            )
        };
        let (ring, pool) = (drive("io_uring"), drive("threads"));
        let mmio = "virtio-blk-device,drive=disk";
        let pci = "virtio-blk-pci,drive=disk";
        let basalt = |engine| Devices::Disk(disk.clone(), engine);
        let mut peer = |who, machine, drive: &str, device| {
            self.peer(
                who,
                qemu_arguments(&setup, machine, &["-drive", drive, "-device", device]),
            )
        };
        let peers = [PEER_MMIO, PEER_PCI];
        let peer_mmio = peer(PEER_MMIO, MICROVM, &ring, mmio);
        let peer_pci = peer(PEER_PCI, MICROVM_PCI, &ring, pci);
        let peer_threads = peer("QEMU microvm, mmio, threads", MICROVM, &pool, mmio);
        let contenders = [
            self.basalt(BASALT, setup.clone(), basalt(BlockEngine::Auto)),
            peer_mmio,
            peer_pci,
            self.basalt("Basalt, threads", setup.clone(), basalt(BlockEngine::Threads)),
            peer_threads,
        ];
        // Who is judged takes all turns; the two slower back ends a few, to show that they are.
        let (judged, aside) = contenders.split_at(3);
        let mut rates: BTreeMap<String, Samples> = BTreeMap::new();
        let all = turns(judged, self.runs).chain(turns(aside, COUNTED_RUNS.min(self.runs)));
        for (round, contender) in all {
            for reading in self.twice("disk", contender, disk_once)? {
                tell("disk", round, contender.who, reading.rate(), &reading.name);
                let samples = rates.entry(reading.name.clone()).or_default();
                samples.put(contender.who, reading.rate());
            }
        }
        for workload in WORKLOADS {
            let samples = rates.entry(workload.name.to_owned()).or_default();
            let mut figure = Figure::new(&format!("virtio-block, {}", workload.name), "reads/s");
            for contender in &contenders {
                figure.add(contender.who, samples.take(contender.who));
            }
            for who in peers {
                figure.ratio(BASALT, who, Target::AtLeast(0.95));
            }
            self.report.figures.push(figure);
        }
        Ok(())
    }

    /// TCP over one TAP, timed inside the guest.
    pub(crate) fn network(&mut self) -> Result<()> {
        let mut setup = self.world.reader()?;
        setup.cmdline = format!("{} {}", setup.cmdline, net::WORD);
        let _side = net::HostSide::new()?;
        let mac = MacAddress(net::MAC);
        let backend = |vhost| format!("tap,id=net,ifname={},script=no,downscript=no,vhost={vhost}", net::TAP);
        let mut peer = |who, machine, device: &str, vhost| {
            let device = format!("{device},netdev=net,mac={mac}");
            let more = ["-netdev", &backend(vhost), "-device", &device];
            self.peer(who, qemu_arguments(&setup, machine, &more))
        };
        let peers = ["QEMU microvm, mmio", "QEMU microvm, pci"];
        let peer_mmio = peer(peers[0], MICROVM, "virtio-net-device", "off");
        let peer_pci = peer(peers[1], MICROVM_PCI, "virtio-net-pci", "off");
        let peer_vhost = peer("QEMU microvm, pci, vhost", MICROVM_PCI, "virtio-net-pci", "on");
        let contenders = [
            self.basalt(BASALT, setup.clone(), Devices::Network),
            peer_mmio,
            peer_pci,
            peer_vhost,
        ];
        // The kernel's own back end is shown, not judged, where the host has it: it is not what Basalt has.
        let (judged, mut aside) = contenders.split_at(3);
        if !Path::new(VHOST).exists() {
            eprintln!("network: this host has no {VHOST}, and the peer is not measured with it");
            aside = &[];
        }
        let mut rates: BTreeMap<String, Samples> = BTreeMap::new();
        let all = turns(judged, self.runs).chain(turns(aside, COUNTED_RUNS.min(self.runs)));
        for (round, contender) in all {
            for reading in self.twice("network", contender, network_once)? {
                tell("network", round, contender.who, reading.rate(), &reading.name);
                let samples = rates.entry(reading.name.clone()).or_default();
                samples.put(contender.who, reading.rate());
            }
        }
        for workload in net::WORKLOADS {
            let samples = rates.entry(workload.name.to_owned()).or_default();
            let mut figure = Figure::new(&format!("virtio-net, {}", workload.name), workload.unit());
            for contender in &contenders {
                figure.add(contender.who, samples.take(contender.who));
            }
            for who in peers {
                figure.ratio(BASALT, who, Target::AtLeast(0.95));
            }
            self.report.figures.push(figure);
        }
        Ok(())
    }

    fn contenders(&mut self, wanted: &[&'static str]) -> Result<Vec<Contender>> {
        wanted.iter().map(|&who| self.contender(who)).collect()
    }

    pub(crate) fn contender(&mut self, who: &'static str) -> Result<Contender> {
        let kernel = if who == PEER_DEBIAN {
            &self.world.debian_kernel
        } else {
            &self.world.kernel
        };
        let setup = self.world.agent(kernel);
        if who == PEER || who == PEER_DEBIAN {
            return Ok(self.peer(who, qemu_arguments(&setup, MICROVM, &[])));
        }
        let (setup, devices) = if who == BASALT_SANDBOX {
            let devices = Devices::Sandbox(self.world.root()?, self.world.writable()?);
            (self.world.sandbox(), devices)
        } else {
            (setup, Devices::Serial)
        };
        self.fact(&format!("{who}: guest's command line"), &setup.cmdline);
        Ok(self.basalt(who, setup, devices))
    }

    fn basalt(&self, who: &'static str, setup: Setup, devices: Devices) -> Contender {
        let vmm = self.world.vmm.clone();
        let (walls, program) = if who == BASALT_OPEN {
            (Walls::None, vmm.to_string_lossy().into_owned())
        } else {
            (Walls::Jail, jailed_name())
        };
        Contender {
            who,
            program,
            start: Box::new(move || Machine::basalt(&vmm, &setup, &devices, &walls)),
        }
    }

    fn peer(&mut self, who: &'static str, arguments: Vec<String>) -> Contender {
        self.fact(&format!("{who}: command line"), &command_line(&arguments));
        Contender {
            who,
            program: QEMU.to_owned(),
            start: Box::new(move || Machine::qemu(&arguments)),
        }
    }

    /// Measures once, and once more if that fails, which the report says: emulated guests die now and then.
    fn twice<T>(&mut self, figure: &str, who: &Contender, once: fn(&Contender) -> Result<T>) -> Result<T> {
        self.again(figure, who.who, || once(who))
    }

    /// The same for who is no contender.
    pub(crate) fn again<T>(&mut self, figure: &str, who: &str, mut once: impl FnMut() -> Result<T>) -> Result<T> {
        once().or_else(|error| {
            let why = format!("{figure}, {who}: {error:#}");
            eprintln!("{why}; once more");
            self.report.retried.push(why);
            once()
        })
    }

    /// Each fact once, however many figures stand on it.
    pub(crate) fn fact(&mut self, name: &str, value: &str) {
        let fact = (name.to_owned(), value.to_owned());
        if !self.report.facts.contains(&fact) {
            self.report.facts.push(fact);
        }
    }
}

/// Overwrites the free memory that is given out next, several times a guest's. An emulator keeps what it has translated of
/// a dead guest's code, and takes a hundred milliseconds to drop it when the next guest's memory is written over that.
pub(crate) fn scrub() {
    std::hint::black_box(vec![1_u8; 512 << 20]);
}

fn start_once(contender: &Contender) -> Result<(f64, Vec<Mark>)> {
    scrub();
    let trace = Trace::start(&["sched/sched_process_exec", "kvm/kvm_entry"], 256)?;
    let mut machine = (contender.start)()?;
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        // Looking costs time too; as a rule the event is past when it begins.
        std::thread::sleep(Duration::from_millis(700));
        if trace.has_seen("kvm_entry:")? {
            break;
        }
        if Instant::now() > deadline {
            bail!("it has not entered its guest within a minute");
        }
    }
    let value = exec_to_run(&trace.stop()?, &contender.program)?;
    let marks = machine.marks()?;
    drop(machine);
    Ok((value, marks))
}

/// What is known when the marker is there.
pub(crate) struct Booted {
    pub(crate) milliseconds: f64,
    own: smaps::Own,
    marker: Marker,
}

pub(crate) fn boot_once(contender: &Contender) -> Result<Booted> {
    scrub();
    let mut machine = (contender.start)()?;
    let line = machine.wait_for(MARKER)?;
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", machine.pid()))?;
    Ok(Booted {
        milliseconds: milliseconds(line.time_ns - machine.started_ns),
        own: smaps::own(&smaps, MEMORY.bytes() >> 10)?,
        marker: Marker::parse(&line.text).with_context(|| format!("no marker: `{}`", line.text))?,
    })
}

/// By the VMM's counters, where it has some, and by the host kernel's events.
fn exits_once(contender: &Contender) -> Result<Vec<(String, u64)>> {
    let trace = Trace::start(&["kvm/kvm_userspace_exit"], 16 << 10)?;
    let mut machine = (contender.start)()?;
    let line = machine.wait_for(MARKER)?;
    let mut counts: Vec<_> = machine
        .metrics()?
        .iter()
        .filter_map(|sample| Some((exit_counter(sample)?, sample.value)))
        .collect();
    drop(machine);
    let mut total = 0;
    for (reason, count) in exits_by_reason(&trace.stop()?, line.time_ns) {
        counts.push((format!("host's kernel: {reason}"), count));
        total += count;
    }
    counts.push(("host's kernel: all".to_owned(), total));
    Ok(counts)
}

fn disk_once(contender: &Contender) -> Result<Vec<Reading>> {
    readings(contender, &WORKLOADS.map(|workload| workload.name))
}

fn network_once(contender: &Contender) -> Result<Vec<Reading>> {
    readings(contender, &net::WORKLOADS.map(|workload| workload.name))
}

/// What a guest whose init is this program says, in the order of the names.
fn readings(contender: &Contender, names: &[&str]) -> Result<Vec<Reading>> {
    let mut machine = (contender.start)()?;
    let mut readings = Vec::new();
    for name in names {
        let line = machine.wait_for(RESULT)?;
        let reading = Reading::parse(&line.text).with_context(|| format!("no result: `{}`", line.text))?;
        ensure!(reading.name == *name, "{} came out of turn", reading.name);
        readings.push(reading);
    }
    machine.wait_for(END)?;
    Ok(readings)
}

/// Everybody in turn, so often, always in the same order: each is measured after the same other. What a guest has left in
/// the host's free memory and in the emulator's caches is part of what the next one finds.
fn turns(contenders: &[Contender], rounds: usize) -> impl Iterator<Item = (usize, &Contender)> {
    (0..rounds).flat_map(move |round| contenders.iter().map(move |contender| (round, contender)))
}

/// Progress, on standard error.
pub(crate) fn tell(figure: &str, round: usize, who: &str, value: f64, unit: &str) {
    eprintln!("{figure}: round {}, {who}: {value:.1} {unit}", round + 1);
}

/// A command line as a shell would take it.
pub(crate) fn command_line(arguments: &[String]) -> String {
    let mut text = QEMU.to_owned();
    for argument in arguments {
        text.push(' ');
        if argument.contains(' ') {
            text.push_str(&format!("'{argument}'"));
        } else {
            text.push_str(argument);
        }
    }
    text
}

/// The name of a counter that counts exits: `vcpu_exits_total` by reason, notifications by device.
fn exit_counter(sample: &MetricSample) -> Option<String> {
    let label = |wanted: &str| {
        let found = sample.labels.iter().find(|(name, _)| name == wanted);
        found.map_or("all", |(_, value)| value.as_str())
    };
    match sample.name.as_str() {
        "vcpu_exits_total" if sample.value > 0 => Some(format!("VMM: {}", label("reason"))),
        "virtio_notify_exits_total" if sample.value > 0 => Some(format!("VMM: notifications of {}", label("device"))),
        _ => None,
    }
}

/// The agent's marker: `basalt-agent: up NS free KIB avail KIB`.
#[derive(Debug, PartialEq, Eq)]
struct Marker {
    free_kib: u64,
    available_kib: u64,
}

impl Marker {
    fn parse(line: &str) -> Option<Self> {
        let at = line.find(MARKER)?;
        let words: Vec<_> = line[at + MARKER.len()..].split_whitespace().collect();
        let [_, "free", free, "avail", available] = words.as_slice() else {
            return None;
        };
        Some(Self {
            free_kib: free.parse().ok()?,
            available_kib: available.parse().ok()?,
        })
    }
}

#[allow(clippy::cast_precision_loss, reason = "counts and sizes in KiB are far below 2^53")]
fn float(value: u64) -> f64 {
    value as f64
}

fn mebi(kib: u64) -> f64 {
    float(kib) / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_marker_is_read_whatever_stands_before_it() {
        let line = "[    0.9] basalt-agent: up 2501159453 free 110512 avail 108588";
        let marker = Marker {
            free_kib: 110_512,
            available_kib: 108_588,
        };
        assert_eq!(Marker::parse(line), Some(marker));
        for bad in [
            "basalt-agent: up 1 free 2",
            "basalt-agent: up 1 free x avail 2",
            "up 1 free 2 avail 3",
        ] {
            assert_eq!(Marker::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn everybody_takes_turns() {
        let contender = |who| Contender {
            who,
            program: String::new(),
            start: Box::new(|| bail!("not started here")),
        };
        let contenders = [contender("a"), contender("b"), contender("c")];
        let order: String = turns(&contenders, 3).map(|(_, contender)| contender.who).collect();
        assert_eq!(order, "abcabcabc");
    }

    #[test]
    fn command_lines_can_be_pasted() {
        let words = ["-m", "128", "-append", "console=ttyS0 quiet"].map(str::to_owned);
        assert_eq!(
            command_line(&words),
            "/usr/bin/qemu-system-x86_64 -m 128 -append 'console=ttyS0 quiet'"
        );
    }

    #[test]
    fn counters_are_named_by_what_they_count() {
        let mut sample = MetricSample {
            name: "vcpu_exits_total".into(),
            labels: vec![("vcpu".into(), "0".into()), ("reason".into(), "serial".into())],
            value: 3,
        };
        assert_eq!(exit_counter(&sample).as_deref(), Some("VMM: serial"));
        sample.value = 0;
        assert_eq!(exit_counter(&sample), None);
        sample.name = "block_reads_total".into();
        sample.value = 1;
        assert_eq!(exit_counter(&sample), None);
    }
}
