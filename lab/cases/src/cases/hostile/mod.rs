//! A guest that owns its CPU tries what no guest may: real basalt.ko, in the lab. Each attempt is a few instructions in a machine of
//! two megabytes. What becomes of it is known beforehand, the host's CPU stays its own, and the host's kernel has nothing to say.
//!
//! ```text
//!  attempt ─► goes on: out 0x10 │ faults: out 0x11 with the vector │ is called out │ ends the guest
//! ```

mod bits;
mod outside;
mod rewriting;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use engine::state::{Table, gpr};
use engine::{BootState, CpuModel, Engine, Exit, Presence, Vcpu, Vm};
use engine_bare::BareEngine;
use reservation::Device;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion};

use super::bare::{CPU, Module, in_lab, online, wait_online};
use crate::kernel_log::{complaints, kernel_log};
use crate::{Case, Host, long_mode};

pub(crate) const CASE: Case = Case {
    name: "hostile",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// Where things are in the guest's memory.
const MEMORY: usize = 2 << 20;
const TABLES: u64 = 0x1000;
const DIRECTORIES: u64 = 0x3000;
const GDT: u64 = 0x7000;
const IDT: u64 = 0x8000;
const HANDLERS: u64 = 0x9000;
const CODE: u64 = 0xa000;
const STACK: u64 = 0xf000;
/// How many interrupts its handler has had.
const COUNT: u64 = 0xd000;

/// What its code says.
const WENT_ON: u16 = 0x10;
const FAULTED: u16 = 0x11;

/// `out 0x10, al`.
const SAY: [u8; 2] = [0xe6, 0x10];

const INVALID_OPCODE: u8 = 6;
const PROTECTION: u8 = 13;
const NMI: u8 = 2;

/// `IA32_APIC_BASE`, EFER, and the x2APIC's ICR, SELF_IPI and spurious interrupt vector.
const APIC_BASE: u64 = 0x1b;
const EFER: u64 = 0xc000_0080;
const ICR: u64 = 0x830;
const SELF_IPI: u64 = 0x83f;
const SPIV: u64 = 0x80f;

const WRMSR: [u8; 2] = [0x0f, 0x30];

/// How long a guest that does not come out is left alone.
const ALONE: Duration = Duration::from_millis(300);

/// So late may a task of the host's wake that asked for a millisecond, beside an emulator, and while CPUs come and go.
const LATE: Duration = Duration::from_secs(2);

/// What came of an attempt.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// It did something, or nothing, and went on.
    WentOn,
    /// An exception by this vector.
    Fault(u8),
    /// An access to no memory of its own.
    Outside(u64),
    /// It did not come out, until it was called.
    Called,
    /// The guest is over.
    Ended,
}

struct Attacker {
    // Dropped in this order.
    vcpu: Box<dyn Vcpu>,
    vm: Arc<dyn Vm>,
    memory: Arc<GuestRegionMmap<()>>,
    /// Ports that it has read or written since it was last asked.
    ports: BTreeSet<u16>,
}

impl Attacker {
    fn new(device: &Device) -> Result<(Self, u32)> {
        let reservation = device.reserve(&[CPU])?;
        let engine = BareEngine::from_fd(reservation.into())?;
        let vm = engine.create_vm(CpuModel::Host)?;
        let memory = GuestRegionMmap::new(MmapRegion::new(MEMORY)?, GuestAddress(0)).context("a region at 0")?;
        let memory = Arc::new(memory);
        vm.map_ram(0, Arc::clone(&memory), Presence::AtOnce)?;
        let vcpu = vm.create_vcpu(0, 1)?;
        vcpu.kicker().adopt_current_thread();
        let attacker = Self {
            vcpu,
            vm,
            memory,
            ports: BTreeSet::new(),
        };
        // The id of its APIC, whatever that of the CPU is.
        Ok((attacker, 0))
    }

    fn write(&self, bytes: &[u8], at: u64) -> Result<()> {
        Ok(self.memory.write_slice(bytes, MemoryRegionAddress(at))?)
    }

    fn write_words(&self, words: impl IntoIterator<Item = u64>, at: u64) -> Result<()> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        self.write(&bytes, at)
    }

    /// Everything but the code: the first four GiB mapped as they are, and handlers that say which vector it was. With `skips`
    /// the one of general protection goes on behind an instruction of two bytes.
    fn prepare(&self, skips: bool) -> Result<()> {
        self.write_words([(TABLES + 0x1000) | 7], TABLES)?;
        self.write_words((0..4).map(|index| (DIRECTORIES + index * 0x1000) | 7), TABLES + 0x1000)?;
        self.write_words((0..2048).map(|index| (index << 21) | 0x87), DIRECTORIES)?;
        self.write_words([0, 0x00af_9b00_0000_ffff], GDT)?;
        for vector in 0..=u8::MAX {
            let handler = HANDLERS + u64::from(vector.min(32)) * 32;
            self.write_words(
                [handler & 0xffff | 8 << 16 | 0x8e << 40, 0],
                IDT + u64::from(vector) * 16,
            )?;
            let code: &[u8] = match vector {
                // add rsp, 8; add qword [rsp], 2; iretq
                PROTECTION if skips => &[0x48, 0x83, 0xc4, 8, 0x48, 0x83, 0x04, 0x24, 2, 0x48, 0xcf],
                0..32 => &[0xb0, vector, 0xe6, 0x11, 0xf4],
                // Counts, ends the interrupt, and sends itself the next: inc dword [COUNT]; mov ecx, 0x80b; xor eax, eax; xor edx, edx;
                // wrmsr; mov ecx, 0x83f; mov al, 0x50; wrmsr; iretq
                _ => &[
                    0xff, 0x04, 0x25, 0, 0xd0, 0, 0, 0xb9, 0x0b, 8, 0, 0, 0x31, 0xc0, 0x31, 0xd2, 0x0f, 0x30, 0xb9,
                    0x3f, 8, 0, 0, 0xb0, 0x50, 0x0f, 0x30, 0x48, 0xcf,
                ],
            };
            self.write(code, handler)?;
        }
        Ok(())
    }

    /// Executes these instructions in 64-bit mode, with these registers, by their numbers in encodings.
    fn tries(&mut self, code: &[u8], registers: &[(usize, u64)]) -> Result<Outcome> {
        self.write(&[code, &SAY, &[0xf4]].concat(), CODE)?;
        let mut gprs = [0; 16];
        gprs[gpr::RSP] = STACK;
        for (number, value) in registers {
            gprs[*number] = *value;
        }
        self.vcpu.set_boot_state(&begin(gprs))?;
        self.outcome()
    }

    fn outcome(&mut self) -> Result<Outcome> {
        let kick = self.vcpu.kicker();
        let done = Arc::new(AtomicBool::new(false));
        let called = Arc::clone(&done);
        let caller = thread::spawn(move || {
            let end = Instant::now() + ALONE;
            while Instant::now() < end && !called.load(Ordering::SeqCst) {
                thread::sleep(Duration::from_millis(2));
            }
            if !called.load(Ordering::SeqCst) {
                kick.kick();
            }
        });
        let outcome = loop {
            match self.vcpu.run()? {
                Exit::PortWrite { port: WENT_ON, .. } => break Outcome::WentOn,
                Exit::PortWrite {
                    port: FAULTED, data, ..
                } => {
                    break Outcome::Fault(*data.first().context("a write of no bytes")?);
                }
                Exit::PortRead { port, .. } | Exit::PortWrite { port, .. } => drop(self.ports.insert(port)),
                Exit::MmioRead { address, .. } | Exit::MmioWrite { address, .. } => break Outcome::Outside(address),
                Exit::Shutdown | Exit::Failed(_) => break Outcome::Ended,
                Exit::Interrupted => break Outcome::Called,
                other => bail!("the guest came out with {other:?}"),
            }
        };
        done.store(true, Ordering::SeqCst);
        caller
            .join()
            .map_err(|_| anyhow::anyhow!("whoever calls has panicked"))?;
        self.vcpu.kicker().clear();
        Ok(outcome)
    }

    fn expect(&mut self, what: &str, code: &[u8], registers: &[(usize, u64)], wanted: Outcome) -> Result<()> {
        let outcome = self.tries(code, registers).with_context(|| what.to_owned())?;
        ensure!(outcome == wanted, "{what}: {outcome:?}, not {wanted:?}");
        Ok(())
    }

    /// What takes longer than one that hangs may.
    fn patiently(&mut self, what: &str, code: &[u8], registers: &[(usize, u64)]) -> Result<()> {
        let mut outcome = self.tries(code, registers).with_context(|| what.to_owned())?;
        let end = Instant::now() + Duration::from_secs(60);
        while outcome == Outcome::Called && Instant::now() < end {
            outcome = self.outcome().with_context(|| what.to_owned())?;
        }
        ensure!(outcome == Outcome::WentOn, "{what}: {outcome:?}");
        Ok(())
    }

    fn refused(&self) -> Result<u64> {
        self.vm.counts().refused.context("an engine that does not count")
    }
}

/// The registers of a WRMSR.
fn to_msr(index: u64, value: u64) -> [(usize, u64); 3] {
    [
        (gpr::RCX, index),
        (gpr::RAX, value & 0xffff_ffff),
        (gpr::RDX, value >> 32),
    ]
}

/// With these registers, and handlers of its own.
fn begin(gpr: [u64; 16]) -> BootState {
    let mut state = long_mode::at(CODE, GDT, TABLES);
    state.general.gpr = gpr;
    state.system.idt = Table {
        base: IDT,
        limit: 0xfff,
    };
    state
}

/// A task of the host's that wants to run every millisecond, and how late it was at most.
struct Task {
    stop: Arc<AtomicBool>,
    latest_us: Arc<AtomicU64>,
    thread: thread::JoinHandle<()>,
}

impl Task {
    fn start() -> Self {
        let (stop, latest_us) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, latest) = (Arc::clone(&stop), Arc::clone(&latest_us));
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                let began = Instant::now();
                thread::sleep(Duration::from_millis(1));
                let took = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
                latest.fetch_max(took, Ordering::SeqCst);
            }
        });
        Self {
            stop,
            latest_us,
            thread,
        }
    }

    fn end(self) -> Result<Duration> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread
            .join()
            .map_err(|_| anyhow::anyhow!("the task has panicked"))?;
        Ok(Duration::from_micros(self.latest_us.load(Ordering::SeqCst)))
    }
}

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let all = online()?;
    let mut log = kernel_log()?;
    let task = Task::start();
    // A guest after the other: each has the CPU as if nobody had had it before.
    type Attempt = fn(&mut Attacker, u32) -> Result<()>;
    let attempts: [(&str, Attempt); 14] = [
        ("instructions", outside::instructions),
        ("registers", outside::registers),
        ("interrupts", outside::interrupts),
        ("ports", outside::ports),
        ("memory", outside::memory),
        ("storms", outside::storms),
        ("events", outside::events),
        ("EFER", bits::efer),
        ("control registers", bits::control),
        ("XCR0", bits::xcr0),
        ("debug registers", bits::debug),
        ("everything in use", bits::everything),
        ("code", rewriting::code),
        ("page tables", rewriting::page_tables),
    ];
    for (name, attempt) in attempts {
        let (mut attacker, own) = Attacker::new(&device)?;
        attacker.prepare(false)?;
        let began = Instant::now();
        attempt(&mut attacker, own).context(name)?;
        log::info!("{name}: {} refused, in {:?}", attacker.refused()?, began.elapsed());
        drop(attacker);
        wait_online(&all)?;
        bits::next_is_clean(&device).with_context(|| format!("after {name}"))?;
        wait_online(&all)?;
    }
    let latest = task.end()?;
    log::info!("a task of the host's was late by {latest:?} at most");
    ensure!(latest < LATE, "a task of the host's was late by {latest:?}");
    drop(device);
    module.unload()?;
    let complaints = complaints(&mut log)?;
    ensure!(complaints.is_empty(), "the host's kernel says: {complaints:?}");
    Ok(())
}
