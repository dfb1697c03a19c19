//! Figures against a peer, alternating, in one boot of the lab host: `basalt-bench all` prints every table of the issue.
//!
//! Runs inside the lab (`basalt-lab exec -- /opt/basalt/bin/basalt-bench all`), as root. The same program is PID 1 of the
//! guests whose disks are measured. See docs/benchmarks.md.

mod class;
mod clone;
mod device_clone;
mod device_io;
mod device_model;
mod device_port;
mod device_progress;
mod device_rounds;
mod device_start;
mod device_tables;
mod exits;
mod figures;
mod function;
mod gateway;
mod guard;
mod guest;
mod http;
mod image_root;
mod kept;
mod latency;
mod life;
mod machine;
mod monitor;
mod net;
mod page;
mod paging;
mod reasons;
mod report;
mod run;
mod scratch;
mod shapes;
mod smaps;
mod stall;
mod stats;
mod steps;
mod throughput;
mod trace;
mod waterfall;
mod world;
mod zeroed;

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};

use crate::figures::Bench;
use crate::report::{Printed, Report};
use crate::world::World;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Subject {
    /// Everything but `exits`, `throughput`, `latency` and `life`, which need kernel modules, more CPUs and an image, those of devices,
    /// which take one from the host, and `gateway`
    All,
    /// VMM exec to the first KVM_RUN
    Start,
    /// VMM exec to the agent, the VMM's memory and the guest's
    Boot,
    /// Exits to user space until the agent runs
    BootExits,
    /// `basalt run` to its command's first output, beside the start of such a VM alone
    Run,
    /// Clones of templates and snapshots, beside QEMU's restore
    Clone,
    /// What clones and rollbacks are made of, step by step
    Waterfall,
    /// Snapshots of clones: time and size, by the guest's size and by what has changed
    Snapshot,
    /// The host's memory that many idle clones take
    Density,
    /// Clones of several sizes, beside what hotplug would take at least
    Shapes,
    /// Clones whose memory is mapped, or comes eagerly, or on demand
    Paging,
    /// Exits of guests by class, load and reason
    Exits,
    /// Redis' commands on the host and in guests by class
    Throughput,
    /// What timers, interrupts, registers and doorbells cost on the host and in guests by class
    Latency,
    /// Reservations of CPUs, starts and ends of sandboxes that own some, and how long the host stands still meanwhile
    Life,
    /// Starts with a PCI function of the host's, by when memory is mapped for it, and by memory, beside QEMU's
    DeviceStart,
    /// A guest that gets such a function and gives it back, again and again, and what stays pinned
    DeviceRounds,
    /// Clones of templates with such a function and without: to their command, and to the function
    DeviceClone,
    /// Reads of such a function's disk on the host and in guests by class, and their exits
    DeviceDisk,
    /// TCP by a virtual function of the host's network device, on the host and in guests by class, and their exits
    DeviceNetwork,
    /// Reads of a disk
    Disk,
    /// TCP streams, requests and responses
    Network,
    /// Sandboxes, commands, files and pauses through the gateway, beside `basalt`
    Gateway,
}

type Measure = fn(&mut Bench<'_>) -> Result<()>;

/// All that is measured, in its order.
const MEASURED: [(Subject, Measure); 22] = [
    (Subject::Start, |bench| bench.start()),
    (Subject::Boot, |bench| bench.boot()),
    (Subject::BootExits, |bench| bench.boot_exits()),
    (Subject::Run, |bench| bench.run()),
    (Subject::Clone, |bench| bench.clone()),
    (Subject::Waterfall, |bench| bench.waterfall()),
    (Subject::Snapshot, |bench| bench.snapshot()),
    (Subject::Density, |bench| bench.density()),
    (Subject::Shapes, |bench| bench.shapes()),
    (Subject::Paging, |bench| bench.paging()),
    (Subject::Exits, |bench| bench.exits()),
    (Subject::Throughput, |bench| bench.throughput()),
    (Subject::Latency, |bench| bench.latency()),
    (Subject::Life, |bench| bench.life()),
    (Subject::DeviceStart, |bench| bench.device_start()),
    (Subject::DeviceRounds, |bench| bench.device_rounds()),
    (Subject::DeviceClone, |bench| bench.device_clone()),
    (Subject::DeviceDisk, |bench| bench.device_disk()),
    (Subject::DeviceNetwork, |bench| bench.device_network()),
    (Subject::Disk, |bench| bench.disk()),
    (Subject::Network, |bench| bench.network()),
    (Subject::Gateway, |bench| bench.gateway()),
];

/// What `all` leaves out.
const LEFT_OUT: [Subject; 10] = [
    Subject::Exits,
    Subject::Throughput,
    Subject::Latency,
    Subject::Life,
    Subject::DeviceStart,
    Subject::DeviceRounds,
    Subject::DeviceClone,
    Subject::DeviceDisk,
    Subject::DeviceNetwork,
    Subject::Gateway,
];

/// Measures Basalt beside QEMU's microvm, in turn, and prints tables.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// What to measure
    #[arg(value_enum, default_value = "all")]
    subjects: Vec<Subject>,

    /// Runs of each contender
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=1000))]
    runs: u16,

    /// Print one JSON document instead of Markdown
    #[arg(long)]
    json: bool,

    /// Measure nothing: print the table of docs/benchmarks.md, of reports that --json has printed
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["subjects", "json"])]
    page: Vec<PathBuf>,

    /// Measure nothing: print how long guests of large hosts would wait for memory that a device reaches, by a model
    #[arg(long, conflicts_with_all = ["subjects", "json", "page"])]
    device_model: bool,

    /// The directory with basalt-vmm and basalt-assets [default: where this program is]
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,

    /// The kernel that the peer boots in one of the figures
    #[arg(long, value_name = "FILE", default_value = "/boot/vmlinuz")]
    debian_kernel: PathBuf,

    /// Where files of the run are made, and removed after it; the disk's speed is that of this file system's page cache
    #[arg(long, value_name = "DIR", default_value = "/mnt/xfs")]
    scratch: PathBuf,

    #[command(flatten)]
    device: device_start::Arguments,
}

fn main() -> Result<()> {
    if std::process::id() == 1 {
        if foreign::is_init() {
            let Err(error) = foreign::become_agent();
            guest::say(&format!("basalt-bench: failed: {error}"));
            guest::power_off();
        }
        guest::run_as_init();
    }
    match std::env::args().nth(1).as_deref() {
        Some(run::SAY) => return run::say(),
        Some(run::IDLE) => run::idle(),
        Some(run::DIRTY) => return run::dirty(),
        Some(shapes::ONLINE) => return shapes::online(),
        Some(latency::ASK) => return latency::ask(),
        Some(stall::WATCH) => return stall::watch(),
        Some(guard::GUARD) => return guard::guard(&std::env::args().nth(2).unwrap_or_default()),
        _ => (),
    }
    let options = Options::parse();
    if !options.page.is_empty() {
        return print(&page::page(&options.page)?);
    }
    if options.device_model {
        return print(&device_model::table());
    }
    let binaries = match options.binaries {
        Some(directory) => directory,
        None => std::env::current_exe()?
            .parent()
            .context("this program is in no directory")?
            .to_owned(),
    };
    guard::begin()?;
    let world = World::new(&binaries, &options.debian_kernel, &options.scratch)?;
    let mut report = Report {
        facts: world.facts()?,
        ..Report::default()
    };
    let mut printed = Printed::default();
    for (subject, measure) in MEASURED {
        let of_all = options.subjects.contains(&Subject::All) && !LEFT_OUT.contains(&subject);
        if !options.subjects.contains(&subject) && !of_all {
            continue;
        }
        let measured = measure(&mut Bench {
            world: &world,
            runs: usize::from(options.runs),
            report: &mut report,
            device: &options.device,
        });
        // What others come to is not to be lost with it.
        if let Err(error) = measured {
            let name = subject
                .to_possible_value()
                .map_or_else(String::new, |value| value.get_name().to_owned());
            eprintln!("{name} failed: {error:#}");
            report.failed.push(format!("{name}: {error:#}"));
        }
        // At once: an emulated host that dies takes nothing along that was measured.
        if !options.json {
            print(&report.news(&mut printed)?)?;
        }
    }
    print(&if options.json {
        format!("{}\n", serde_json::to_string_pretty(&report)?)
    } else {
        report.end()?
    })?;
    ensure!(
        report.failed.is_empty(),
        "not measured whole: {}",
        report.failed.join("; ")
    );
    Ok(())
}

fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory;
        Options::command().debug_assert();
        let options = Options::try_parse_from(["basalt-bench"]).unwrap();
        assert_eq!(options.subjects, [Subject::All]);
        assert!(Options::try_parse_from(["basalt-bench", "--runs", "0"]).is_err());
        assert!(Options::try_parse_from(["basalt-bench", "nothing"]).is_err());
    }
}
