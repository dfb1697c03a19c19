//! A guest that owns its CPU tries what no guest may: real basalt.ko, in the lab. Each attempt is a few instructions in a machine of
//! two megabytes. What becomes of it is known beforehand, the host's CPU stays its own, and the host's kernel has nothing to say.
//!
//! ```text
//!  attempt ─► goes on: out 0x10 │ faults: out 0x11 with the vector │ is called out │ ends the guest
//! ```

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use base::EventFd;
use claim::Device;
use engine::state::{GeneralRegisters, Segment, SystemRegisters, Table, gpr};
use engine::{BootState, CpuModel, Engine, Exit, MsiMessage, Vcpu, Vm};
use engine_bare::BareEngine;
use vm_memory::{Bytes, GuestAddress, GuestRegionMmap, MemoryRegionAddress, MmapRegion};

use super::bare::{CPU, Module, in_lab, online, wait_online};
use crate::kernel_log::{complaints, kernel_log};
use crate::{Case, Host};

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
        let claim = device.claim(&[CPU])?;
        let engine = BareEngine::from_fd(claim.into())?;
        let vm = engine.create_vm(CpuModel::Host)?;
        let memory = GuestRegionMmap::new(MmapRegion::new(MEMORY)?, GuestAddress(0)).context("a region at 0")?;
        let memory = Arc::new(memory);
        vm.map_ram(0, Arc::clone(&memory))?;
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
        self.vcpu.set_boot_state(&long_mode(gprs))?;
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

    fn refused(&self) -> Result<u64> {
        self.vm.counts().refused.context("an engine that does not count")
    }
}

fn long_mode(gpr: [u64; 16]) -> BootState {
    let segment = |rights, selector| Segment {
        limit: u32::MAX,
        rights,
        selector,
        ..Segment::default()
    };
    let (code, data) = (segment(0xa9b, 8), segment(0xc93, 0));
    BootState {
        general: GeneralRegisters {
            gpr,
            rip: CODE,
            rflags: 2,
        },
        system: SystemRegisters {
            segments: [code, data, data, data, data, data],
            tr: segment(0x8b, 0),
            ldtr: segment(0x82, 0),
            gdt: Table { base: GDT, limit: 15 },
            idt: Table {
                base: IDT,
                limit: 0xfff,
            },
            // PG, NE, ET, PE; PAE; LMA, LME.
            cr: [0x8000_0031, 0, TABLES, 0x20, 0],
            efer: 0x500,
            ..SystemRegisters::default()
        },
    }
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
    let attempts: [(&str, Attempt); 7] = [
        ("instructions", instructions),
        ("registers", registers),
        ("interrupts", interrupts),
        ("ports", ports),
        ("memory", memory),
        ("storms", storms),
        ("events", events),
    ];
    for (name, attempt) in attempts {
        let (mut attacker, own) = Attacker::new(&device)?;
        attacker.prepare(false)?;
        let began = Instant::now();
        attempt(&mut attacker, own).context(name)?;
        log::info!("{name}: {} refused, in {:?}", attacker.refused()?, began.elapsed());
        drop(attacker);
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

/// What is for whoever has guests, and what would change the CPU under others.
fn instructions(guest: &mut Attacker, _: u32) -> Result<()> {
    let undefined = Outcome::Fault(INVALID_OPCODE);
    let refused: [(&str, &[u8]); 7] = [
        ("vmrun", &[0x0f, 0x01, 0xd8]),
        ("vmload", &[0x0f, 0x01, 0xda]),
        ("vmsave", &[0x0f, 0x01, 0xdb]),
        ("stgi", &[0x0f, 0x01, 0xdc]),
        ("clgi", &[0x0f, 0x01, 0xdd]),
        ("skinit", &[0x0f, 0x01, 0xde]),
        ("invlpga", &[0x0f, 0x01, 0xdf]),
    ];
    for (name, code) in refused {
        let before = guest.refused()?;
        guest.expect(name, code, &[], Outcome::Fault(INVALID_OPCODE))?;
        ensure!(guest.refused()? == before + 1, "{name} was not counted");
    }
    guest.expect("rdpmc", &[0x0f, 0x33], &[], Outcome::Fault(PROTECTION))?;
    guest.expect("rsm", &[0x0f, 0xaa], &[], undefined)?;
    for (name, code) in [
        ("wbinvd", &[0x0f, 0x09][..]),
        ("invd", &[0x0f, 0x08]),
        ("vmmcall", &[0x0f, 0x01, 0xd9]),
    ] {
        guest.expect(name, code, &[], Outcome::WentOn)?;
    }
    // mov cr4, rax with what there is not: a processor refuses that, an emulated one not before it enters the guest again.
    let outcome = guest.tries(&[0x0f, 0x22, 0xe0], &[(gpr::RAX, 1 << 40)])?;
    ensure!(
        matches!(outcome, Outcome::Fault(PROTECTION) | Outcome::Ended),
        "cr4: {outcome:?}"
    );
    // lidt of nothing, and a fault.
    guest.write(&[0; 10], 0xe000)?;
    let triple = [0x0f, 0x01, 0x1c, 0x25, 0, 0xe0, 0, 0, 0x0f, 0x0b];
    guest.expect("a triple fault", &triple, &[], Outcome::Ended)?;
    // cli; hlt; jmp: what called it before may come late.
    guest.expect("cli; hlt", &[0xfa, 0xf4, 0xeb, 0xfd], &[], Outcome::Called)?;
    guest.expect("a loop with interrupts off", &[0xfa, 0xeb, 0xfe], &[], Outcome::Called)
}

/// Reads and writes all that there could be.
fn registers(guest: &mut Attacker, _: u32) -> Result<()> {
    let write = |index, value: u64| {
        [
            (gpr::RCX, index),
            (gpr::RAX, value & 0xffff_ffff),
            (gpr::RDX, value >> 32),
        ]
    };
    let refused = Outcome::Fault(PROTECTION);
    guest.expect("EFER.SVME", &WRMSR, &write(EFER, 0x1500), refused)?;
    for (what, value) in [
        ("off", 0xfee0_0000),
        ("in the other mode", 0xfee0_0900),
        ("elsewhere", 0xd000_0d00),
    ] {
        let what = format!("an APIC that is {what}");
        guest.expect(&what, &WRMSR, &write(APIC_BASE, value), Outcome::Fault(PROTECTION))?;
    }
    // VM_CR, VM_HSAVE_PA, PRED_CMD, the microcode's loader, the host's syscfg.
    for index in [0xc001_0114, 0xc001_0117, 0x49, 0xc001_0020, 0xc001_0061] {
        guest.expect(
            &format!("{index:#x}"),
            &WRMSR,
            &write(index, 1),
            Outcome::Fault(PROTECTION),
        )?;
    }
    guest.prepare(true)?;
    let before = guest.refused()?;
    // rdmsr; inc ecx; cmp ecx, r8d; jne
    let read_all = [0x0f, 0x32, 0xff, 0xc1, 0x44, 0x39, 0xc1, 0x75, 0xf7];
    for (from, to) in [
        (0, 0x2000),
        (0x4000_0000, 0x4000_0100),
        (0xc000_0000, 0xc000_0400),
        (0xc001_0000, 0xc001_2000),
    ] {
        let range = format!("reading {from:#x} to {to:#x}");
        guest.patiently(&range, &read_all, &[(gpr::RCX, from), (8, to)])?;
    }
    ensure!(
        guest.refused()? > before + 0x3000,
        "registers that are not there were not refused"
    );
    // mov eax, r9d; mov edx, r9d; wrmsr; inc ecx; cmp ecx, r8d; jne
    let write_all = [
        0x44, 0x89, 0xc8, 0x44, 0x89, 0xca, 0x0f, 0x30, 0xff, 0xc1, 0x44, 0x39, 0xc1, 0x75, 0xf1,
    ];
    for value in [0, u64::from(u32::MAX)] {
        // But for EFER, which has ended it by then, and the pages of the clock.
        for (from, to) in [
            (0x10, 0x800),
            (0x840, 0x1000),
            (0xc000_0081, 0xc000_0200),
            (0xc001_0000, 0xc001_0200),
        ] {
            let range = format!("writing {value:#x} to {from:#x} to {to:#x}");
            guest.patiently(&range, &write_all, &[(gpr::RCX, from), (8, to), (9, value)])?;
        }
    }
    guest.prepare(false)?;
    // Its own long mode it may break, and is over then, or not.
    guest.tries(&WRMSR, &write(EFER, 0)).map(drop)
}

impl Attacker {
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
}

/// Every kind of interrupt to everybody, the host's CPU above all.
fn interrupts(guest: &mut Attacker, own: u32) -> Result<()> {
    // wrmsr; inc edx; cmp edx, r8d; jne
    let to_all = [0x0f, 0x30, 0xff, 0xc2, 0x44, 0x39, 0xc2, 0x75, 0xf7];
    let own = u64::from(own);
    // Fixed, lowest priority, SMI, one that there is not, NMI, INIT, startup, external; with a vector, and physical or logical.
    for mode in 0..8 {
        for logical in [0, 1 << 11] {
            for (from, to) in [(0, own), (own + 1, 0x200), (0xffff_ff00, 0xffff_ffff)] {
                // Logically it would name itself.
                if from == to || (logical != 0 && from < 0x200) {
                    continue;
                }
                let low = mode << 8 | logical | 0xd1;
                let what = format!("{low:#x} to {from:#x} up to {to:#x}");
                guest.patiently(
                    &what,
                    &to_all,
                    &[(gpr::RCX, ICR), (gpr::RAX, low), (gpr::RDX, from), (8, to)],
                )?;
            }
        }
    }
    let before = guest.refused()?;
    // To all but itself, in every mode; SMIs and what there is not to itself as well.
    for mode in 0..8_u64 {
        let low = 3 << 18 | mode << 8 | 0xd1;
        guest.expect(
            &format!("{low:#x}"),
            &WRMSR,
            &[(gpr::RCX, ICR), (gpr::RAX, low)],
            Outcome::WentOn,
        )?;
    }
    for mode in [2, 3, 7_u64] {
        let low = 1 << 18 | mode << 8 | 0xd1;
        guest.expect(
            &format!("{low:#x}"),
            &WRMSR,
            &[(gpr::RCX, ICR), (gpr::RAX, low)],
            Outcome::WentOn,
        )?;
    }
    ensure!(guest.refused()? >= before + 11, "not all of it was counted");
    // An NMI to itself is its own, whether by its id or among all.
    for low in [own << 32 | 0x400, 1 << 18 | 0x400, 2 << 18 | 0x400] {
        let registers = [(gpr::RCX, ICR), (gpr::RAX, low & 0xffff_ffff), (gpr::RDX, low >> 32)];
        guest.expect(&format!("an NMI by {low:#x}"), &WRMSR, &registers, Outcome::Fault(NMI))?;
    }
    // Vectors that are none.
    guest.expect("vector 3", &WRMSR, &[(gpr::RCX, ICR), (gpr::RAX, 3)], Outcome::WentOn)?;
    // INIT to itself resets its machine.
    let registers = [(gpr::RCX, ICR), (gpr::RAX, 1 << 18 | 0x500)];
    guest.expect("INIT to itself", &WRMSR, &registers, Outcome::Ended)
}

/// All of them come out, whatever is behind them on this host.
fn ports(guest: &mut Attacker, _: u32) -> Result<()> {
    // in al, dx; inc dx; cmp edx, r8d; jne
    let read_all = [0xec, 0x66, 0xff, 0xc2, 0x44, 0x39, 0xc2, 0x75, 0xf7];
    for (from, to) in [(0, 0x1000), (0xff00, 0xffff)] {
        let what = format!("ports from {from:#x} to {to:#x}");
        guest.patiently(&what, &read_all, &[(gpr::RDX, from), (8, to)])?;
        let all = (from..to).all(|port| u16::try_from(port).is_ok_and(|port| guest.ports.contains(&port)));
        ensure!(all, "{what}: some did not come out");
    }
    // The host's reset, by its keyboard controller and by its chipset: out dx, al.
    for (port, value) in [(0x64_u16, 0xfe), (0xcf9, 0x06), (0x604, 0x34)] {
        guest.ports.clear();
        let registers = [(gpr::RDX, port.into()), (gpr::RAX, value)];
        guest.expect(&format!("port {port:#x}"), &[0xee], &registers, Outcome::WentOn)?;
        ensure!(guest.ports.contains(&port), "port {port:#x} did not come out");
    }
    // rep insb is for nobody here.
    guest.expect(
        "rep insb",
        &[0xf3, 0x6c],
        &[(gpr::RCX, 4), (gpr::RDI, 0xe000)],
        Outcome::Ended,
    )
}

/// What is not its own is not there.
fn memory(guest: &mut Attacker, _: u32) -> Result<()> {
    // mov al, [rdi]; mov [rdi], al. The host's memory, its I/O APIC, its local APIC, the end.
    for address in [MEMORY as u64, 0x1000_0000, 0xfec0_0000, 0xfee0_0300, 0xffff_fff0] {
        for (what, code) in [("read", [0x8a, 0x07]), ("written", [0x88, 0x07])] {
            let what = format!("{address:#x} {what}");
            guest.expect(&what, &code, &[(gpr::RDI, address)], Outcome::Outside(address))?;
        }
    }
    // Page tables that point outside, and to themselves; where its code is they stay.
    guest.write_words([MEMORY as u64 | 7], TABLES + 0x1000 + 8)?;
    let outside = guest.tries(&[0x8a, 0x07], &[(gpr::RDI, 1 << 30)])?;
    ensure!(
        matches!(outside, Outcome::Ended | Outcome::Outside(_) | Outcome::Fault(_)),
        "tables outside of its memory: {outside:?}"
    );
    guest.prepare(false)?;
    guest.write_words([(TABLES + 0x1000) | 7], TABLES + 8)?;
    // mov rax, [rdi] through a directory that is its own page.
    let itself = guest.tries(&[0x48, 0x8b, 0x07], &[(gpr::RDI, 1 << 39)])?;
    ensure!(
        matches!(itself, Outcome::WentOn | Outcome::Fault(_) | Outcome::Outside(_)),
        "tables that are their own pages: {itself:?}"
    );
    Ok(())
}

/// It cannot be kept from being called out, nor keep others from anything.
fn storms(guest: &mut Attacker, _: u32) -> Result<()> {
    // wrmsr; dec r8d; jne: commands to the host's CPU.
    let flood = [0x0f, 0x30, 0x41, 0xff, 0xc8, 0x75, 0xf9];
    let registers = [(gpr::RCX, ICR), (gpr::RAX, 0xd1), (8, 200_000)];
    guest.patiently("a flood of interrupts to others", &flood, &registers)?;
    let nmis = [(gpr::RCX, ICR), (gpr::RAX, 0x4d1), (8, 2000)];
    guest.patiently("a flood of NMIs to others", &flood, &nmis)?;
    // mov eax, 0x1ff; wrmsr; mov ecx, ebx; mov eax, 0x50; wrmsr; sti; hlt; jmp: the APIC is switched on, and its handler sends itself the
    // next interrupt.
    let storm = [
        0xb8, 0xff, 1, 0, 0, 0x0f, 0x30, 0x89, 0xd9, 0xb8, 0x50, 0, 0, 0, 0x0f, 0x30, 0xfb, 0xf4, 0xeb, 0xfd,
    ];
    guest.write(&[0; 4], COUNT)?;
    let registers = [(gpr::RCX, SPIV), (gpr::RBX, SELF_IPI)];
    guest.expect("a storm of its own", &storm, &registers, Outcome::Called)?;
    let count: u32 = guest.memory.read_obj(MemoryRegionAddress(COUNT))?;
    ensure!(count > 100, "a storm of {count} interrupts is none");
    log::info!("a storm of {count} interrupts in {ALONE:?}");
    Ok(())
}

/// A device of the host's interrupts it by events: each is one interrupt, and none while nobody has said where it goes.
fn events(guest: &mut Attacker, own: u32) -> Result<()> {
    // The handler counts and ends the interrupt, no more; mov eax, 0x1ff; wrmsr; sti; hlt; jmp.
    guest.write(&[0x48, 0xcf], HANDLERS + 32 * 32 + 18)?;
    let waits = [0xb8, 0xff, 1, 0, 0, 0x0f, 0x30, 0xfb, 0xf4, 0xeb, 0xfd];
    let (interrupt, event) = (guest.vm.create_interrupt(), EventFd::new()?);
    interrupt.attach(event.try_clone()?)?;
    ensure!(interrupt.attach(event.try_clone()?).is_err(), "it took two events");
    event.signal();
    ensure!(interrupt.is_pending(), "what nobody has taken does not wait");
    let address = 0xfee0_0000 | u64::from(own) << 12;
    let device = thread::spawn(move || {
        thread::sleep(ALONE / 3);
        // Vectors of exceptions are none for devices, and the event waits on.
        interrupt.route(Some(MsiMessage { address, data: 3 }));
        let waits = interrupt.is_pending();
        interrupt.route(Some(MsiMessage { address, data: 0x51 }));
        let taken = !interrupt.is_pending();
        thread::sleep(ALONE / 10);
        event.signal();
        interrupt.route(None);
        event.signal();
        waits && taken && interrupt.is_pending()
    });
    guest.expect("waiting for events", &waits, &[(gpr::RCX, SPIV)], Outcome::Called)?;
    ensure!(device.join().is_ok_and(|as_told| as_told), "an event was lost");
    let count: u32 = guest.memory.read_obj(MemoryRegionAddress(COUNT))?;
    ensure!(count == 2, "two events were {count} interrupts");
    Ok(())
}
