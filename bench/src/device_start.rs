//! Starts of guests that have a function of the host's, by when and how their memory is mapped for it, beside QEMU's. Owns the ways and
//! the order of starts; what is made of the times is `device_tables`' affair.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::{ByteSize, PciAddress};
use serde_json::json;
use vmm_api::devices::{BalloonConfig, BalloonDma, MEM_MIN_BLOCK, MEM_SECTION, MemConfig, VfioPciConfig};
use vmm_api::{DeviceSpec, VmmClient};

use crate::device_progress::{Moments, Seen, Start, counts, is_present, seen, sound};
use crate::device_tables::{Starts, eager_grows, figures};
use crate::figures::{Bench, MARKER, command_line, scrub, tell};
use crate::function::Bound;
use crate::kept::available;
use crate::machine::{Devices, Machine, Parts, Setup, Walls, now_ns, qemu_arguments_with};
use crate::monitor::Monitor;
use crate::world::World;
use crate::zeroed::Zeroed;

/// What a guest of asynchronous mapping boots with, MiB.
const BOOT: u64 = 512;

/// Host memory beside a guest's, MiB: VMM, page tables, what [`scrub`] writes to.
const BESIDE: u64 = 768;

/// Sizes of guests, MiB: what can be plugged comes in whole sections.
const STEP: u64 = MEM_SECTION.bytes() >> 20;
const MOST: u64 = 256 << 10;

/// How long all of a start may take, and how often is asked how far it is.
const PATIENCE: Duration = Duration::from_secs(180);
const PERIOD: Duration = Duration::from_millis(5);

/// QEMU's machine: the smallest whose PCI bus takes functions of the host's.
const Q35: &str = "q35,sata=off,smbus=off,usb=off,vmport=off,smm=off,hpet=off";

/// What is measured of functions of the host's.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// device-start: memory of the guests, in MiB; what the host has no memory for is left out
    #[arg(long, value_name = "MIB,...", value_delimiter = ',', default_values_t = [512, 1024, 2048, 4096], value_parser = size)]
    pub(crate) sizes: Vec<u64>,

    /// device-start, device-rounds: the PCI function that guests are given [default: the host's NVMe disk]
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) device: Option<PciAddress>,

    /// device-start: which ways of a start, beside those without a device and eager [default: all]
    #[arg(long, value_name = "WAY,...", value_delimiter = ',', value_parser = way)]
    pub(crate) policies: Vec<Way>,

    /// device-start: QEMU's machine
    #[arg(long, value_name = "MACHINE", default_value = Q35)]
    pub(crate) qemu_machine: String,

    /// device-rounds: how often a guest gets the function and gives it back
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    pub(crate) rounds: u16,
}

fn size(text: &str) -> Result<u64, String> {
    match text.trim().parse::<u64>() {
        Ok(size) if (STEP..=MOST).contains(&size) && size.is_multiple_of(STEP) => Ok(size),
        _ => Err(format!("write a number of MiB, a multiple of {STEP} up to {MOST}")),
    }
}

/// How a guest is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Way {
    /// Without a function.
    Plain,
    /// All memory is mapped before the guest runs.
    Eager,
    /// The guest runs with all its memory, which is mapped meanwhile; then the function comes.
    Late,
    /// The guest runs with a part, and gets the rest as it is mapped.
    Async,
    /// The same, mapped when the guest plugs it, and not before.
    AsyncOnDemand,
    /// The same as asynchronous, of memory that was zeroed before anybody waited.
    AsyncZeroed,
    /// The guest has all its memory, and does without a part of it until that is mapped.
    Balloon,
    /// The same, each 2 MiB mapped by a call of its own.
    BalloonByUnits,
    /// The same, mapped when the guest takes it back, and not before.
    BalloonOnDemand,
    /// QEMU, which maps all memory before.
    QemuEager,
    /// QEMU with a part, the rest by virtio-mem.
    QemuMem,
}

impl Way {
    /// As tables have them.
    pub(crate) const ALL: [Self; 11] = [
        Self::Plain,
        Self::Eager,
        Self::Late,
        Self::Async,
        Self::AsyncOnDemand,
        Self::AsyncZeroed,
        Self::Balloon,
        Self::BalloonByUnits,
        Self::BalloonOnDemand,
        Self::QemuEager,
        Self::QemuMem,
    ];

    /// Those that are judged come after QEMU: a guest started right after another of ours is slower in the emulator.
    const IN_TURN: [Self; 11] = [
        Self::Plain,
        Self::QemuEager,
        Self::Async,
        Self::QemuMem,
        Self::Balloon,
        Self::Eager,
        Self::AsyncZeroed,
        Self::BalloonByUnits,
        Self::Late,
        Self::AsyncOnDemand,
        Self::BalloonOnDemand,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Plain => "Basalt, no device",
            Self::Eager => "Basalt, eager",
            Self::Late => "Basalt, late",
            Self::Async => "Basalt, async",
            Self::AsyncOnDemand => "Basalt, async, not ahead",
            Self::AsyncZeroed => "Basalt, async, zeroed ahead",
            Self::Balloon => "Basalt, async-balloon",
            Self::BalloonByUnits => "Basalt, async-balloon, neighbours apart",
            Self::BalloonOnDemand => "Basalt, async-balloon, not ahead",
            Self::QemuEager => "QEMU, vfio-pci",
            Self::QemuMem => "QEMU, vfio-pci and virtio-mem",
        }
    }

    /// What `--policies` calls it.
    fn word(self) -> &'static str {
        match self {
            Self::Plain => "none",
            Self::Eager => "eager",
            Self::Late => "late",
            Self::Async => "async",
            Self::AsyncOnDemand => "async-on-demand",
            Self::AsyncZeroed => "async-zeroed",
            Self::Balloon => "async-balloon",
            Self::BalloonByUnits => "async-balloon-by-units",
            Self::BalloonOnDemand => "async-balloon-on-demand",
            Self::QemuEager => "qemu-eager",
            Self::QemuMem => "qemu-mem",
        }
    }

    /// A guest that has nothing to plug, or to do without, is another way's.
    pub(crate) fn has(self, size: u64) -> bool {
        !matches!(self, Self::QemuMem | Self::AsyncOnDemand | Self::AsyncZeroed) && self.balloon().is_none()
            || size > BOOT
    }

    /// MiB that the guest boots with, and that it gets later.
    fn parts(self, size: u64) -> (u64, u64) {
        match self {
            Self::Plain | Self::Eager | Self::Late | Self::QemuEager => (size, 0),
            _ => (size.min(BOOT), size.saturating_sub(BOOT)),
        }
    }
}

impl Way {
    /// How what leaves the balloon is mapped, where there is one.
    fn balloon(self) -> Option<BalloonDma> {
        let (merge, map_ahead) = match self {
            Self::Balloon => (true, true),
            Self::BalloonByUnits => (false, true),
            Self::BalloonOnDemand => (true, false),
            _ => return None,
        };
        Some(BalloonDma { merge, map_ahead })
    }
}

/// Those that are asked for, or all; those without a device, and eager ones, always, as others are held against them.
fn chosen(asked: &[Way], size: u64) -> impl Iterator<Item = Way> {
    let is_asked = move |way: &Way| {
        let always = matches!(way, Way::Plain | Way::Eager);
        way.has(size) && (asked.is_empty() || always || asked.contains(way))
    };
    Way::IN_TURN.into_iter().filter(is_asked)
}

fn way(text: &str) -> Result<Way, String> {
    let found = Way::ALL.into_iter().find(|way| way.word() == text);
    found.ok_or_else(|| format!("write some of {}", Way::ALL.map(Way::word).join(", ")))
}

/// What starts need that is the same for all.
struct Starter<'a> {
    world: &'a World,
    setup: Setup,
    function: Bound,
    qemu_machine: &'a str,
}

impl Starter<'_> {
    fn start(&self, way: Way, size: u64) -> Result<Start> {
        scrub();
        match way {
            Way::QemuEager | Way::QemuMem => self.qemu(way, size),
            _ => self.basalt(way, size),
        }
    }

    fn basalt(&self, way: Way, size: u64) -> Result<Start> {
        let (boot, later) = way.parts(size);
        let (reader, writer) = std::io::pipe()?;
        let (mut parts, mut attached) = (Parts::default(), Parts::default());
        let (mut config, _) = parts.config(&self.setup, &Devices::Serial, writer.into())?;
        config.memory = ByteSize::mib(boot);
        if let Some(dma) = way.balloon() {
            config.memory = ByteSize::mib(size);
            let balloon = BalloonConfig {
                target: ByteSize::mib(later),
                free_page_reporting: false,
                dma: Some(dma),
                ..BalloonConfig::default()
            };
            config.devices.push(DeviceSpec::new("balloon", &balloon)?);
        } else if later > 0 {
            let region = MemConfig {
                region_size: ByteSize::mib(later),
                max_size: None,
                requested_size: ByteSize(0),
                block_size: MEM_MIN_BLOCK,
                node_id: None,
            };
            config.devices.push(DeviceSpec::new("memory", &region)?);
        }
        if way == Way::Eager {
            config.devices.push(spec(&self.function, &mut parts)?);
        }
        let function = match way {
            Way::Plain | Way::Eager => None,
            _ => Some(spec(&self.function, &mut attached)?),
        };
        let zeroed = match way {
            Way::AsyncZeroed => Some(Zeroed::fill(ByteSize::mib(later))?),
            _ => None,
        };
        let mut machine = Machine::without_guest(&self.world.vmm, &Walls::JailThatLocks, reader)?;
        let client = machine.client()?;
        client.create(config, &parts.fds())?;
        let created_ns = now_ns();
        client.start()?;
        if let Some(zeroed) = &zeroed {
            zeroed.give(client)?;
        }
        if let Some(function) = function {
            client.attach(function, &attached.fds())?;
        }
        if later > 0 && matches!(way, Way::Async | Way::AsyncZeroed) {
            client.map_ahead(ByteSize::mib(later))?;
        }
        // The VMM's copies alone are left, so that the function is nobody's when it ends.
        let zeroing = zeroed.map(|zeroed| zeroed.milliseconds);
        drop((parts, attached));
        let start = follow(
            &mut machine,
            way,
            created_ns,
            |machine| {
                let client = machine.client()?;
                let functions = sound(client.functions()?)?;
                let plugged = match way.balloon() {
                    Some(_) => deflated(client, ByteSize::mib(later).bytes())?,
                    None => plugged(client)?,
                };
                Ok(seen(ByteSize::mib(later).bytes(), &functions, plugged))
            },
            |machine| match later {
                _ if way.balloon().is_some() => Ok(()),
                0 => Ok(()),
                // As a node does when the agent answers.
                _ => Ok(machine.client()?.resize_memory(ByteSize::mib(later))?),
            },
        )?;
        if way == Way::Plain {
            return Ok(Start { device: None, ..start });
        }
        let functions = sound(machine.client()?.functions()?)?;
        ensure!(is_present(&functions), "the guest has no function: {functions:?}");
        if way == Way::AsyncZeroed {
            let taken = functions.zeroed_memory;
            ensure!(
                taken == Some(ByteSize::mib(later).bytes()),
                "the VMM has taken {taken:?} bytes that were zeroed ahead, of {later} MiB"
            );
        }
        let counts = Some(counts(way, later, &functions)?);
        Ok(Start {
            counts,
            zeroing,
            ..start
        })
    }

    fn qemu(&self, way: Way, size: u64) -> Result<Start> {
        let path = self.socket();
        let mut machine = Machine::qemu(&self.words(way, size))?;
        let mut monitor = Monitor::connect(path, || machine.check_alive())?;
        let created_ns = now_ns();
        let (_, later) = way.parts(size);
        let start = follow(
            &mut machine,
            way,
            created_ns,
            |_| {
                // QEMU's other guest is asked as often.
                let answer = monitor.say(&match way {
                    Way::QemuMem => json!({
                        "execute": "qom-get",
                        "arguments": { "path": "/machine/peripheral/vm0", "property": "size" }
                    }),
                    _ => json!({ "execute": "query-status" }),
                })?;
                let memory = answer.as_u64() == Some(ByteSize::mib(later).bytes());
                Ok(Seen { device: true, memory })
            },
            |_| Ok(()),
        )?;
        Ok(Start { device: None, ..start })
    }

    fn socket(&self) -> PathBuf {
        self.world.scratch.join("qmp")
    }

    fn words(&self, way: Way, size: u64) -> Vec<String> {
        let (boot, later) = way.parts(size);
        let memory = match later {
            0 => format!("{boot}M"),
            _ => format!("{boot}M,slots=1,maxmem={size}M"),
        };
        let socket = format!("unix:{},server=on,wait=off", self.socket().display());
        let function = format!("vfio-pci,host={}", self.function.address());
        let backend = format!("memory-backend-ram,id=m,size={later}M");
        let device = format!("virtio-mem-pci,id=vm0,memdev=m,requested-size={later}M,block-size=2M");
        let mut more = vec!["-qmp", &socket, "-device", &function];
        if later > 0 {
            more.extend(["-object", &backend, "-device", &device]);
        }
        qemu_arguments_with(&self.setup, self.qemu_machine, &memory, &more)
    }
}

/// The function as a device, with its descriptors.
pub(crate) fn spec(function: &Bound, parts: &mut Parts) -> Result<DeviceSpec> {
    let (group, container) = function.open()?;
    let config = VfioPciConfig {
        name: function.address().to_string(),
        group: Some(parts.add(group)?),
        container: Some(parts.add(container)?),
        ..VfioPciConfig::default()
    };
    Ok(DeviceSpec::new("function", &config)?)
}

fn plugged(client: &mut VmmClient) -> Result<u64> {
    Ok(client.info()?.hotplug_memory.map_or(0, |memory| memory.plugged))
}

/// What has left the balloon of what was in it before the function came.
fn deflated(client: &mut VmmClient, inflated: u64) -> Result<u64> {
    let balloon = client.info()?.balloon.context("the guest has no balloon")?;
    ensure!(!balloon.fell_back, "the guest did not fill its balloon: {balloon:?}");
    Ok(inflated.saturating_sub(balloon.inflated.max(balloon.target)))
}

/// Asks again and again until all is there; when the guest's init runs, so is what waits for that.
fn follow(
    machine: &mut Machine,
    way: Way,
    created_ns: u64,
    mut ask: impl FnMut(&mut Machine) -> Result<Seen>,
    when_init_runs: impl FnOnce(&mut Machine) -> Result<()>,
) -> Result<Start> {
    let mut when_init_runs = Some(when_init_runs);
    let deadline = Instant::now() + PATIENCE;
    let (mut moments, mut marker) = (Moments::of_made(way, created_ns), None);
    loop {
        let seen = ask(machine)?;
        moments.note(now_ns(), seen);
        match (marker, moments.both()) {
            (Some(init_ns), Some(both)) => return Ok(Start::of(machine.started_ns, created_ns, init_ns, both)),
            (None, _) => {
                marker = machine.wait_within(MARKER, PERIOD)?.map(|line| line.time_ns);
                if let Some(act) = when_init_runs.take_if(|_| marker.is_some()) {
                    act(machine)?;
                }
            }
            _ => std::thread::sleep(PERIOD),
        }
        if Instant::now() > deadline {
            let init = if marker.is_some() { "runs" } else { "does not run" };
            bail!("not all is there after {PATIENCE:?}: the guest's init {init}, {seen:?}");
        }
    }
}

/// Those that the host has memory for, from the smallest up, and the others.
fn fitting(sizes: &[u64], available: u64) -> (Vec<u64>, Vec<u64>) {
    let mut sizes = sizes.to_vec();
    sizes.sort_unstable();
    sizes.dedup();
    sizes.into_iter().partition(|size| size + BESIDE <= available >> 20)
}

impl Bench<'_> {
    /// Guests with a function of the host's, by when their memory is mapped, and by size.
    pub(crate) fn device_start(&mut self) -> Result<()> {
        let available = available()?;
        let (sizes, left_out) = fitting(&self.device.sizes, available);
        for size in left_out {
            let what = format!(
                "{} MiB are available, a guest and what is beside it take {}",
                available >> 20,
                size + BESIDE
            );
            eprintln!("device-start: {} is left out: {what}", ByteSize::mib(size));
            self.fact(&format!("device-start, {}: left out", ByteSize::mib(size)), &what);
        }
        let largest = *sizes.last().context(
            "the host has memory for a guest of none of these sizes: `basalt-lab up --memory`, or smaller --sizes",
        )?;
        let starter = Starter {
            world: self.world,
            setup: self.world.agent(&self.world.kernel),
            function: Bound::take(self.device.device)?,
            qemu_machine: &self.device.qemu_machine,
        };
        self.fact("device-start: function", &starter.function.address().to_string());
        self.warm_up(&starter, largest)?;
        let mut starts = Starts::default();
        for round in 0..self.runs {
            for &size in &sizes {
                for way in chosen(&self.device.policies, size) {
                    let who = format!("{}, {}", way.name(), ByteSize::mib(size));
                    let start = self.again("device-start", &who, || starter.start(way, size))?;
                    tell("device-start", round, &who, start.init, "ms");
                    starts.entry((way, size)).or_default().push(start);
                }
            }
        }
        // Nobody has it while the tables are made.
        drop(starter);
        let figures = figures(&starts, &sizes);
        let grows = sizes.len() < 2 || eager_grows(&figures);
        self.report.figures.extend(figures);
        ensure!(
            grows,
            "eager starts do not take longer with more memory, so that nothing can be held against their slope: measure larger --sizes"
        );
        Ok(())
    }

    /// Memory that the emulated host touches for the first time costs the emulator; and what does not work at all is known before.
    fn warm_up(&mut self, starter: &Starter<'_>, largest: u64) -> Result<()> {
        for way in chosen(&self.device.policies, largest) {
            if matches!(way, Way::QemuEager | Way::QemuMem) {
                let words = command_line(&starter.words(way, largest));
                self.fact(&format!("{}: command line", way.name()), &words);
            }
            let who = format!("{}, {}, to warm up", way.name(), ByteSize::mib(largest));
            let start = self.again("device-start", &who, || starter.start(way, largest));
            let start = start.with_context(|| who.clone())?;
            eprintln!(
                "device-start: {who}: {:.1} ms to init, {:.1} ms to all memory",
                start.init, start.memory
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    fn parse(words: &[&str]) -> Result<Arguments, clap::Error> {
        Line::try_parse_from([&["bench"], words].concat()).map(|line| line.arguments)
    }

    #[test]
    fn the_arguments() {
        let arguments = parse(&[]).unwrap();
        assert_eq!(arguments.sizes, [512, 1024, 2048, 4096]);
        assert_eq!((arguments.device, arguments.rounds), (None, 200));
        let arguments = parse(&["--sizes", "1024,12288", "--device", "00:04.0", "--rounds", "3"]).unwrap();
        assert_eq!(arguments.sizes, [1024, 12288]);
        assert_eq!(arguments.device.unwrap().to_string(), "0000:00:04.0");
        for wrong in ["0", "64", "1000", "1G", "", "524288", "512,"] {
            let told = parse(&["--sizes", wrong]).unwrap_err().to_string();
            assert!(told.contains("multiple of 128"), "{wrong}: {told}");
        }
        assert!(
            parse(&["--device", "nvme0"])
                .unwrap_err()
                .to_string()
                .contains("lspci -D")
        );
        parse(&["--rounds", "0"]).unwrap_err();
        let asked = parse(&["--policies", "async-balloon,late"]).unwrap().policies;
        let ways: Vec<_> = chosen(&asked, 1024).collect();
        assert_eq!(ways, [Way::Plain, Way::Balloon, Way::Eager, Way::Late]);
        assert_eq!(chosen(&[], 1024).count(), Way::ALL.len());
        let told = parse(&["--policies", "lazy"]).unwrap_err().to_string();
        assert!(told.contains("async-balloon-on-demand"), "{told}");
    }

    #[test]
    fn what_the_host_has_no_memory_for_is_left_out() {
        let available = (4096 + BESIDE) << 20;
        assert_eq!(
            fitting(&[4096, 512, 8192, 512], available),
            (vec![512, 4096], vec![8192])
        );
        assert_eq!(fitting(&[4096], available - 1), (vec![], vec![4096]));
    }

    #[test]
    fn everybody_has_a_turn_and_a_row() {
        for way in Way::ALL {
            assert_eq!(Way::IN_TURN.iter().filter(|other| **other == way).count(), 1);
            let (boot, later) = way.parts(4096);
            assert_eq!(boot + later, 4096, "{way:?}");
            assert_eq!(way.parts(256), (256, 0), "{way:?}");
        }
        assert_eq!(Way::Async.parts(4096), (512, 3584));
        assert_eq!(Way::Eager.parts(4096), (4096, 0));
        assert!(Way::Async.has(512) && !Way::QemuMem.has(512) && Way::QemuMem.has(1024));
    }
}
