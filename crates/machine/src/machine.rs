//! Building a machine and moving it through its states.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use base::{ByteSize, EventFd};
use boot::{Board, Source};
use engine::{Counts, CpuModel, Engine, Presence, Vcpu, VcpuState, Vm};
use memory::layout::MemorySize;
use memory::{HugeBytes, Layers, Ram, layout};
use observe::Registry;
use pci::PciBus;
use virtio::VirtioPciDevice;

use crate::devices::Devices;
use crate::error::MachineError;
use crate::exits::ExitCounters;
use crate::functions::{self, HostFunctions};
use crate::halt::{Watch, process_time};
use crate::platform::{
    Event, EventDevice, IoApic, PINS, PORTS, PlatformState, Power, SerialPort, write_new_generation,
};
use crate::ram::map_ahead;
use crate::root::{add_devices, root};
use crate::run_control::RunRequest;
use crate::saved::Quiesced;
use crate::servers::Links;
use crate::vcpu::{End, Shared, VcpuCommand, VcpuThread};

/// The size of a machine.
#[derive(Debug)]
pub struct MachineConfig {
    /// Number of vCPUs, 1 to 64.
    pub cpus: u32,
    /// Guest memory: what it boots with, and what can be plugged, which is the affair of one of its devices.
    pub memory: MemorySize,
    /// The proximity domain of what can be plugged.
    pub hotplug_node: u16,
    /// Nobody translates the guest's addresses: its memory is where the engine has reserved it.
    pub identity_memory: bool,
    /// Its guest is told by ACPI of functions that come to its bus while it runs, and leave it.
    pub acpi_hotplug: bool,
    /// Which processor its guest is shown.
    pub cpu: CpuModel,
    /// Where serial output goes.
    pub serial: Option<OwnedFd>,
    /// How many of its last bytes a file there keeps; all when not given.
    pub serial_keep: Option<u64>,
}

/// The board's own devices that are more than a handler on a bus.
pub(crate) struct Platform {
    pub(crate) ioapic: Arc<IoApic>,
    pub(crate) serial: Arc<SerialPort>,
    pub(crate) events: Arc<EventDevice>,
    /// Where the generation ID is, if the guest was told of one.
    pub(crate) generation: Option<u64>,
}

/// What a machine is put together from.
pub(crate) struct Parts {
    pub(crate) threads: Vec<VcpuThread>,
    pub(crate) shared: Shared,
    pub(crate) devices: Vec<Arc<VirtioPciDevice>>,
    pub(crate) platform: Platform,
    pub(crate) pci: Arc<PciBus>,
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) ram: Ram,
    pub(crate) cpu: CpuModel,
    pub(crate) functions: HostFunctions,
}

/// A virtual machine, in the state that its last transition left it in.
pub struct Machine {
    // Fields are dropped in this order: nothing may run in the guest when its devices and memory go.
    pub(crate) threads: Vec<VcpuThread>,
    pub(crate) shared: Shared,
    pub(crate) devices: Vec<Arc<VirtioPciDevice>>,
    pub(crate) platform: Platform,
    pub(crate) pci: Arc<PciBus>,
    pub(crate) vm: Arc<dyn Vm>,
    pub(crate) ram: Ram,
    /// Which processor its guest was shown.
    pub(crate) cpu: CpuModel,
    /// The host's functions that its guest has.
    pub(crate) functions: HostFunctions,
    /// vCPUs and devices have stopped.
    pub(crate) paused: bool,
    /// It has not run since it was made, restored or put back.
    pub(crate) fresh: bool,
    /// Which servers its guest can enter.
    pub(crate) links: Links,
    /// When it is looked whether its guest has halted.
    watch: Watch,
}

/// As much as threads have by default: formats of kernels are parsed by code that is not ours.
const LOADER_STACK: usize = 2 << 20;

impl Machine {
    /// Builds a machine whose vCPUs wait before their first instruction. Functions of the host's come behind all other devices; a
    /// machine that has some cannot be saved, as they cannot.
    ///
    /// # Errors
    /// The engine, the host or the boot source refused; nothing is left behind.
    pub fn build(
        engine: &dyn Engine,
        config: MachineConfig,
        source: Source<'_>,
        Devices {
            devices,
            functions,
            pluggable,
            ballooned,
            iommu,
            pmem,
            pins,
        }: Devices,
        registry: &Registry,
    ) -> Result<Self, MachineError> {
        let (placed, ram) = crate::ram::make(engine, &config, pins, registry)?;
        let ram = crate::ram::with_pmem(ram, pmem, !functions.is_empty())?;
        let shared = Shared::new()?;
        let board = Board {
            apic_ids: (0..config.cpus).collect(),
            root: root(&ram),
            ports: PORTS,
            hotplug_node: config.hotplug_node,
            acpi_hotplug: config.acpi_hotplug,
            iommu: iommu.as_ref().and_then(|iommu| iommu.place_among(&devices)),
        };
        // Making a VM waits for the host's kernel, loading a guest for memory: neither needs the other.
        let (made, loaded) = std::thread::scope(|scope| {
            let load = || boot::load(&ram, source, &board);
            let loader = base::thread::spawn_scoped(scope, "loader", LOADER_STACK, load).map_err(host("a thread"))?;
            let made = placed.map_or_else(|| engine.create_vm(config.cpu), Ok);
            let made = made.map_err(MachineError::from).and_then(|vm| {
                map_memory(vm.as_ref(), &ram)?;
                observe::marks::mark("VM made");
                let mut platform = add_platform(vm.as_ref(), &shared, (config.serial, config.serial_keep), None)?;
                // It is for guests that go on from a state of before.
                platform.generation = platform.generation.filter(|_| ram.identity_layout().is_none());
                let devices = add_devices(&vm, &ram, &shared, devices, registry)?;
                let mut of_host = HostFunctions::new(pluggable, config.cpus)?.with_ballooned(ballooned, config.cpus);
                of_host.set_iommu(iommu.map(|iommu| iommu.endpoints));
                let memory = of_host.memory(&ram, config.cpus);
                let board = functions::Board {
                    vm: &vm,
                    bus: &devices.1,
                    ioapic: &platform.ioapic,
                    memory: &memory,
                };
                for function in functions {
                    of_host.build(function, board)?;
                }
                Ok((vm, platform, devices, of_host))
            });
            let loaded = loader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok::<_, MachineError>((made, loaded))
        })?;
        let ((vm, platform, (devices, pci), functions), boot) = (made?, loaded?);
        if let Some(address) = platform.generation {
            write_new_generation(ram.guest(), address)?;
        }
        observe::marks::mark("guest loaded");
        let threads = start_threads(vm.as_ref(), config.cpus, &shared, registry, |id, vcpu| match id {
            0 => vcpu.set_boot_state(&boot),
            _ => Ok(()),
        })?;
        Ok(Self::assemble(Parts {
            threads,
            shared,
            devices,
            platform,
            pci,
            vm,
            ram,
            cpu: config.cpu,
            functions,
        }))
    }

    pub(crate) fn assemble(parts: Parts) -> Self {
        Self {
            threads: parts.threads,
            shared: parts.shared,
            devices: parts.devices,
            platform: parts.platform,
            pci: parts.pci,
            vm: parts.vm,
            ram: parts.ram,
            cpu: parts.cpu,
            functions: parts.functions,
            paused: false,
            fresh: true,
            links: Links::default(),
            watch: Watch::new(),
        }
    }

    /// Lets the vCPUs run, for the first time or again after [`Machine::pause`].
    ///
    /// # Errors
    /// A device could not go on; the vCPUs and the other devices stand still again.
    pub fn run(&mut self) -> Result<(), MachineError> {
        self.paused = false;
        self.watch = Watch::new();
        // Of one that begins the guest is waited for: it begins before the threads of its devices do, and what it asks of a device
        // meanwhile waits for that. Of one that was paused our answer is waited for, which a guest at work would delay.
        let begins = std::mem::take(&mut self.fresh);
        if begins {
            self.shared.run.request(RunRequest::Run);
        }
        let failed = self.devices.iter().find_map(|device| {
            let source = device.resume().err()?;
            let id = device.id().to_owned();
            Some(MachineError::Device { id, source })
        });
        if let Some(failed) = failed {
            self.pause();
            return Err(failed);
        }
        if !begins {
            self.shared.run.request(RunRequest::Run);
        }
        Ok(())
    }

    /// Stops vCPUs, then devices; returns when all have stopped.
    pub fn pause(&mut self) {
        self.shared.run.request(RunRequest::Pause);
        self.kick();
        self.shared.run.wait_parked(self.threads.len());
        for device in &self.devices {
            device.pause();
        }
        self.paused = true;
    }

    /// Does something while all stand still, which go on then if they did before. A device that cannot is the machine's end.
    pub(crate) fn standing_still<T>(&mut self, act: impl FnOnce(&Self) -> T) -> T {
        let goes_on = !self.paused;
        if goes_on {
            self.pause();
        }
        let done = act(self);
        if goes_on && let Err(error) = self.run() {
            self.shared.ending.report(End::Failed(error.to_string()));
        }
        done
    }

    /// The machine as one that can be saved, if it is paused and the guest has not ended.
    pub fn quiesced(&self) -> Option<Quiesced<'_>> {
        (self.paused && self.end().is_none()).then(|| Quiesced::new(self))
    }

    /// The files that its memory is mapped from, if it is.
    pub fn layers(&self) -> Option<&Layers> {
        self.ram.layers()
    }

    /// As [`Ram::write_set`].
    ///
    /// # Errors
    /// As there.
    pub fn write_set(&self, pagemap: Option<&File>, most: u64) -> Result<Vec<(u64, u64)>, MachineError> {
        Ok(self.ram.write_set(pagemap, most)?)
    }

    /// As [`Ram::page_order`].
    pub fn page_order(&self) -> Vec<(u64, u64)> {
        self.ram.page_order()
    }

    /// Copies pages before the guest writes to them ([`Ram::populate_write`]), and maps them for it where the engine can. It must be
    /// paused. Nothing of it is an error: what is not done now is done when a page is touched.
    pub fn populate_write(&self, runs: &[(u64, u64)]) {
        self.ram.populate_write(runs);
        map_ahead(self.vm.as_ref(), &self.ram, runs);
    }

    /// Has its memory mapped from files that hold what is in it. It must be paused.
    ///
    /// # Errors
    /// The host refused; the memory's content is what it was.
    pub fn rebase(&mut self, layers: Layers) -> Result<(), MachineError> {
        debug_assert!(self.paused, "somebody may access the memory");
        Ok(self.ram.rebase(layers)?)
    }

    /// Looks whether the guest has halted for good, if it is time; when to call this next, if ever. A guest that has is one that has
    /// ended.
    pub fn look_for_halt(&mut self) -> Option<Duration> {
        let report = self.threads.iter().all(|vcpu| vcpu.reports_halts);
        if !report || !self.shared.run.may_run() || self.end().is_some() {
            return None;
        }
        let now = Instant::now();
        if self.watch.due_in(now).is_zero() {
            let (threads, shared) = (&self.threads, &self.shared);
            let kick = || threads.iter().for_each(|vcpu| vcpu.kicker.kick());
            let all_have = || shared.halts.all_have(threads.len(), kick);
            if self.watch.look(now, process_time(), all_have) {
                self.shared.ending.report(End::Halted);
                self.shared.run.request(RunRequest::Pause);
                return None;
            }
        }
        Some(self.watch.due_in(now))
    }

    /// Readable once the guest has ended.
    pub fn ended(&self) -> &EventFd {
        self.shared.ending.event()
    }

    /// Why the guest has ended, if it has.
    pub fn end(&self) -> Option<&End> {
        self.shared.ending.reason()
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        self.platform.events.raise(Event::PowerButton);
    }

    /// It goes on from a state of before.
    pub(crate) fn new_generation(&self) -> Result<(), MachineError> {
        match self.platform.generation {
            Some(address) => write_new_generation(self.ram.guest(), address),
            None => Ok(()),
        }
    }

    /// Notifies the kernel of a machine that was restored or rolled back of its new generation, if it knows of a generation ID: it reseeds its random
    /// generator by itself.
    pub fn notify_generation(&self) {
        if self.platform.generation.is_some() {
            self.platform.events.raise(Event::NewGeneration);
        }
    }

    /// As [`Vm::counts`].
    pub fn counts(&self) -> Counts {
        self.vm.counts()
    }

    /// The size of guest memory, without what can be plugged.
    pub fn memory(&self) -> ByteSize {
        self.ram.size()
    }

    /// The same, and how much can be plugged.
    pub fn memory_sizes(&self) -> MemorySize {
        self.ram.sizes()
    }

    /// Has each vCPU's thread, which is parked, execute a command; what each replies. `command` gives `None` where there is none for it.
    pub(crate) fn command_vcpus(
        &self,
        mut command: impl FnMut(usize) -> Option<VcpuCommand>,
    ) -> Result<Vec<Option<VcpuState>>, MachineError> {
        for (index, vcpu) in self.threads.iter().enumerate() {
            vcpu.leave(command(index).ok_or(MachineError::Vcpus(index))?);
        }
        self.shared.run.execute_all(self.threads.len());
        let replies = self.threads.iter().map(VcpuThread::take_reply);
        replies.map(|reply| Ok(reply.ok_or(MachineError::VcpuGone)??)).collect()
    }

    fn kick(&self) {
        for vcpu in &self.threads {
            vcpu.kicker.kick();
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // A vCPU, or a device that is reset, may wait for it.
        self.functions.give_up();
        self.shared.run.request(RunRequest::Exit);
        self.kick();
        for vcpu in self.threads.drain(..) {
            if vcpu.thread.join().is_err() {
                log::error!("a vCPU's thread panicked");
            }
        }
        for device in &self.devices {
            device.reset();
        }
    }
}

/// Gives a VM its memory, and the board's interrupt pins.
pub(crate) fn map_memory(vm: &dyn Vm, ram: &Ram) -> Result<(), MachineError> {
    vm.reserve_ioapic_pins(u32::from(PINS))?;
    // Huge pages of the host's are there and filled.
    let presence = match ram.huge() == HugeBytes::default() {
        true => Presence::WhenTouched,
        false => Presence::AtOnce,
    };
    for (slot, region) in (0..).zip(ram.regions().iter().chain(ram.pmem())) {
        vm.map_ram(slot, Arc::clone(region), presence)?;
    }
    Ok(())
}

pub(crate) fn host(what: &'static str) -> impl Fn(std::io::Error) -> MachineError {
    move |source| MachineError::Host { what, source }
}

/// Puts the board's own devices on the buses.
pub(crate) fn add_platform(
    vm: &dyn Vm,
    shared: &Shared,
    (serial, keep): (Option<OwnedFd>, Option<u64>),
    saved: Option<&PlatformState>,
) -> Result<Platform, MachineError> {
    let ioapic = IoApic::new(vm);
    let pin = |number| ioapic.pin(number).unwrap_or_else(|| vm.create_interrupt());
    let registers = saved.map(|saved| &saved.serial);
    let serial = SerialPort::new(pin(PORTS.serial_pin), serial, keep, registers).map_err(|source| {
        let what = "the serial port";
        match source.kind() {
            std::io::ErrorKind::InvalidData => MachineError::Damaged { what, source },
            _ => MachineError::Host { what, source },
        }
    })?;
    let events = EventDevice::new(pin(PORTS.events_pin));
    if let Some(saved) = saved {
        events.restore(saved.events);
        ioapic.restore(&saved.ioapic);
    }
    let ending = Arc::clone(&shared.ending);
    let power = Arc::new(Power::new(move |request| ending.report(End::from(request))));
    shared
        .ports
        .insert(u64::from(PORTS.serial), 8, Arc::<SerialPort>::clone(&serial))?;
    shared.ports.insert(u64::from(PORTS.sleep_control), 3, power)?;
    shared
        .ports
        .insert(u64::from(PORTS.events), 1, Arc::<EventDevice>::clone(&events))?;
    shared.mmio.insert(
        layout::IOAPIC.start,
        layout::IOAPIC.length,
        Arc::<IoApic>::clone(&ioapic),
    )?;
    *shared.ioapic.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&ioapic));
    Ok(Platform {
        ioapic,
        serial,
        events,
        generation: saved.map_or(Some(boot::GENERATION_ID), |saved| saved.generation),
    })
}

/// Makes the vCPUs, has each prepared, and their threads, which are parked.
pub(crate) fn start_threads(
    vm: &dyn Vm,
    count: u32,
    shared: &Shared,
    registry: &Registry,
    mut prepare: impl FnMut(u32, &mut dyn Vcpu) -> engine::Result<()>,
) -> Result<Vec<VcpuThread>, MachineError> {
    let mut threads = Vec::new();
    for id in 0..count {
        let started = vm
            .create_vcpu(id, count)
            .map_err(MachineError::from)
            .and_then(|mut vcpu| {
                prepare(id, vcpu.as_mut())?;
                let counters = ExitCounters::new(registry, id);
                VcpuThread::spawn(id, vcpu, shared.clone(), counters).map_err(host("a thread for a vCPU"))
            });
        match started {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                // The threads so far are parked: let them go, or they would wait for ever.
                shared.run.request(RunRequest::Exit);
                return Err(error);
            }
        }
    }
    Ok(threads)
}
