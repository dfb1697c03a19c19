//! One guest that gets a function of the host's and gives it back, again and again: how long each takes, and what of its memory stays
//! pinned or locked after the last time.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base::ByteSize;
use vmm_api::Functions;

use crate::device_progress::{is_present, sound};
use crate::device_start::spec;
use crate::figures::{Bench, MARKER, scrub};
use crate::function::Bound;
use crate::machine::{Devices, Machine, Parts, Walls, now_ns};
use crate::report::Figure;
use crate::stats::Target;
use crate::trace::milliseconds;

const MEMORY: ByteSize = ByteSize::mib(256);
const PAGE: u64 = 4096;

/// How long a round may take, and how often is asked how far it is.
const PATIENCE: Duration = Duration::from_secs(60);
const PERIOD: Duration = Duration::from_millis(5);

/// Read by the kernel to add up what each CPU has counted for itself (Linux, Documentation/admin-guide/sysctl/vm.rst).
const REFRESH: &str = "/proc/sys/vm/stat_refresh";
const VMSTAT: &str = "/proc/vmstat";

const COLUMNS: [&str; 2] = ["attach", "detach"];
const ROW: &str = "Basalt, 256 MiB";

/// What is held in memory, in pages of the whole host and in KiB of the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    pages: i64,
    locked_kib: u64,
}

impl Held {
    fn now(vmm: u32) -> Result<Self> {
        fs::read(REFRESH).with_context(|| format!("cannot read {REFRESH}"))?;
        Ok(Self {
            pages: pinned(&fs::read_to_string(VMSTAT)?)?,
            locked_kib: locked(&fs::read_to_string(format!("/proc/{vmm}/status"))?)?,
        })
    }
}

/// Pages that are pinned, of /proc/vmstat.
fn pinned(vmstat: &str) -> Result<i64> {
    let count = |name: &str| -> Result<i64> {
        let value = vmstat
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = value.with_context(|| format!("{VMSTAT} has no {name}: it takes Linux 5.7 or later"))?;
        Ok(value.trim().parse()?)
    };
    Ok(count("nr_foll_pin_acquired")? - count("nr_foll_pin_released")?)
}

/// KiB that are locked or pinned, of /proc/PID/status.
fn locked(status: &str) -> Result<u64> {
    let field = |name: &str| -> Result<u64> {
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        let value = value.and_then(|value| value.split_whitespace().next());
        Ok(value.with_context(|| format!("a process without {name}"))?.parse()?)
    };
    Ok(field("VmLck:")? + field("VmPin:")?)
}

/// Milliseconds until `done`.
fn until(machine: &mut Machine, begun_ns: u64, done: fn(&Functions) -> bool) -> Result<f64> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let functions = sound(machine.client()?.functions()?)?;
        if done(&functions) {
            return Ok(milliseconds(now_ns() - begun_ns));
        }
        ensure!(Instant::now() < deadline, "after {PATIENCE:?} it is at {functions:?}");
        std::thread::sleep(PERIOD);
    }
}

fn attach(machine: &mut Machine, function: &Bound) -> Result<f64> {
    let mut parts = Parts::default();
    let spec = spec(function, &mut parts)?;
    let begun_ns = now_ns();
    machine.client()?.attach(spec, &parts.fds())?;
    drop(parts);
    until(machine, begun_ns, is_present)
}

fn detach(machine: &mut Machine) -> Result<f64> {
    let begun_ns = now_ns();
    machine.client()?.detach("function")?;
    until(machine, begun_ns, |functions| {
        functions.functions.is_empty() && !functions.busy
    })
}

/// The tables: times by round, and what is held beyond what was held before.
fn figures(times: &[(f64, f64)], before: Held, after: Held) -> [Figure; 2] {
    let mut figure = Figure::beside(
        "A function of the host's that a running guest gets, and gives back",
        "ms",
        COLUMNS,
    );
    for &(attach, detach) in times {
        for (column, time) in COLUMNS.into_iter().zip([attach, detach]) {
            figure.put(ROW, column, time);
        }
    }
    let name = format!(
        "Pinned and locked after {} rounds of that, beyond what was before",
        times.len()
    );
    let mut held = Figure::new(&name, "pages");
    let locked = i128::from(after.locked_kib) - i128::from(before.locked_kib);
    let rows = [
        (
            "nr_foll_pin_acquired less nr_foll_pin_released",
            i128::from(after.pages) - i128::from(before.pages),
        ),
        ("VmLck and VmPin of the VMM", locked * 1024 / i128::from(PAGE)),
    ];
    for (who, pages) in rows {
        #[allow(clippy::cast_precision_loss, reason = "pages of one host")]
        held.add(who, vec![pages as f64]);
        held.absolute(who, Target::AtMost(0.0));
    }
    [figure, held]
}

impl Bench<'_> {
    /// Rounds of attach and detach, and what stays.
    pub(crate) fn device_rounds(&mut self) -> Result<()> {
        let function = Bound::take(self.device.device)?;
        self.fact("device-rounds: function", &function.address().to_string());
        scrub();
        let (reader, writer) = std::io::pipe()?;
        let mut parts = Parts::default();
        let setup = self.world.agent(&self.world.kernel);
        let (mut config, _) = parts.config(&setup, &Devices::Serial, writer.into())?;
        config.memory = MEMORY;
        let mut machine = Machine::without_guest(&self.world.vmm, &Walls::JailThatLocks, reader)?;
        machine.client()?.create(config, &parts.fds())?;
        drop(parts);
        machine.client()?.start()?;
        machine.wait_for(MARKER)?;
        let before = Held::now(machine.pid())?;
        let mut times = Vec::new();
        for round in 0..self.device.rounds {
            let attach = attach(&mut machine, &function).with_context(|| format!("attach {}", round + 1))?;
            if round == 0 {
                meanwhile(before, Held::now(machine.pid())?)?;
            }
            let detach = detach(&mut machine).with_context(|| format!("detach {}", round + 1))?;
            eprintln!("device-rounds: round {}: {attach:.1} ms, {detach:.1} ms", round + 1);
            times.push((attach, detach));
        }
        let after = Held::now(machine.pid())?;
        self.report.figures.extend(figures(&times, before, after));
        Ok(())
    }
}

/// What counts nothing while memory is pinned would count nothing that stays, either.
fn meanwhile(before: Held, during: Held) -> Result<()> {
    let pages = i64::try_from(MEMORY.bytes() / PAGE)?;
    ensure!(
        during.pages - before.pages >= pages,
        "{pages} pages are pinned, and {VMSTAT} has counted {}",
        during.pages - before.pages
    );
    ensure!(
        during.locked_kib - before.locked_kib >= MEMORY.bytes() >> 10,
        "{MEMORY} are pinned, and the VMM has {} KiB locked, of {} before",
        during.locked_kib,
        before.locked_kib
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pinned_is_read() {
        let text = "nr_foll_pin_acquired_x 9\nnr_foll_pin_acquired 70000\nnr_foll_pin_released 69000\nnr_dirty 3\n";
        assert_eq!(pinned(text).unwrap(), 1000);
        let told = pinned("nr_foll_pin_acquired 1\n").unwrap_err().to_string();
        assert!(told.contains("no nr_foll_pin_released"), "{told}");
        let status = "VmPeak:\t  9 kB\nVmLck:\t  262144 kB\nVmPin:\t       8 kB\n";
        assert_eq!(locked(status).unwrap(), 262_152);
        locked("VmLck:\t 1 kB\n").unwrap_err();
    }

    const BEFORE: Held = Held {
        pages: 100,
        locked_kib: 64,
    };

    #[test]
    fn one_page_that_stays_is_one_too_many() {
        let after = Held {
            pages: 101,
            locked_kib: 72,
        };
        let [times, held] = figures(&[(300.0, 40.0), (100.0, 20.0), (200.0, 30.0)], BEFORE, after);
        assert_eq!(times.median("Basalt, 256 MiB, attach"), Some(200.0));
        assert_eq!(times.median("Basalt, 256 MiB, detach"), Some(30.0));
        assert!(held.name.contains("after 3 rounds"));
        let values: Vec<_> = held
            .verdicts
            .iter()
            .map(|verdict| (verdict.value, verdict.reached))
            .collect();
        assert_eq!(values, [(1.0, false), (2.0, false)]);
        let [_, held] = figures(&[], BEFORE, BEFORE);
        assert!(held.verdicts.iter().all(|verdict| verdict.reached));
    }

    #[test]
    fn counters_that_do_not_count_are_no_proof() {
        let pages = i64::try_from(MEMORY.bytes() / PAGE).unwrap();
        let during = |pages: i64, kib: u64| Held {
            pages: BEFORE.pages + pages,
            locked_kib: BEFORE.locked_kib + kib,
        };
        meanwhile(BEFORE, during(pages, 256 << 10)).unwrap();
        assert!(meanwhile(BEFORE, during(pages - 1, 256 << 10)).is_err());
        assert!(meanwhile(BEFORE, during(pages, (256 << 10) - 1)).is_err());
    }
}
