//! Building a machine and moving it through its states.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::{ByteSize, EventFd};
use boot::{Board, BootError, Source};
use bus::{Bus, BusError};
use engine::{BootState, Engine, EngineError, Vm};
use memory::layout::{self, Range};
use memory::{MemoryError, Ram};
use observe::Registry;
use pci::{PciBus, PciError, Window, WindowKind, Windows};
use virtio::{DeviceError, TransportError, VirtioDevice, VirtioPciDevice};

use crate::exits::ExitCounters;
use crate::gate::{Gate, Wanted};
use crate::platform::{Event, EventDevice, IoApic, PINS, PORTS, Power, SerialPort};
use crate::vcpu::{End, Ending, Shared, VcpuThread};

/// Why a machine could not be built or moved.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The engine refused.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Guest memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// Two platform devices overlap; a bug.
    #[error(transparent)]
    Bus(#[from] BusError),
    /// A device could not be put on the PCI bus.
    #[error("device `{id}`: {source}")]
    Pci {
        /// Its name.
        id: String,
        /// Why.
        source: PciError,
    },
    /// A device could not be given its transport.
    #[error("device `{id}`: {source}")]
    Transport {
        /// Its name.
        id: String,
        /// Why.
        source: TransportError,
    },
    /// A device could not go on.
    #[error("device `{id}`: {source}")]
    Device {
        /// Its name.
        id: String,
        /// Why.
        source: DeviceError,
    },
    /// The host refused a thread or a descriptor.
    #[error("the host refused {what}: {source}")]
    Host {
        /// What was asked for.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// The size of a machine.
#[derive(Debug)]
pub struct MachineConfig {
    /// Number of vCPUs, 1 to 64.
    pub cpus: u32,
    /// Guest memory.
    pub memory: ByteSize,
    /// Where serial output goes.
    pub serial: Option<OwnedFd>,
    /// How many of its last bytes a file there keeps; all when not given.
    pub serial_keep: Option<u64>,
}

/// A device and its name.
pub struct NamedDevice {
    /// Its name within the VM.
    pub id: String,
    /// The device.
    pub device: Box<dyn VirtioDevice>,
}

/// A virtual machine, in the state that its last transition left it in.
pub struct Machine {
    // Fields are dropped in this order: nothing may run in the guest when its devices and memory go.
    threads: Vec<VcpuThread>,
    gate: Arc<Gate>,
    ending: Arc<Ending>,
    devices: Vec<Arc<VirtioPciDevice>>,
    events: Arc<EventDevice>,
    ram: Ram,
}

/// As much as threads have by default: formats of kernels are parsed by code that is not ours.
const LOADER_STACK: usize = 2 << 20;

impl Machine {
    /// Builds a machine whose vCPUs wait before their first instruction.
    ///
    /// # Errors
    /// The engine, the host or the boot source refused; nothing is left behind.
    pub fn build(
        engine: &dyn Engine,
        config: MachineConfig,
        source: Source<'_>,
        devices: Vec<NamedDevice>,
        registry: &Registry,
    ) -> Result<Self, MachineError> {
        let ram = Ram::allocate(config.memory)?;
        let ending = Arc::new(Ending::new().map_err(host("an event fd"))?);
        let shared = Shared {
            gate: Arc::new(Gate::new()),
            ending: Arc::clone(&ending),
            ports: Arc::new(Bus::new()),
            mmio: Arc::new(Bus::new()),
        };
        let pci_window_64 = layout::pci_window_64(config.memory);
        let board = Board {
            cpus: config.cpus,
            pci_window_64,
            ports: PORTS,
        };
        // Making a VM waits for the host's kernel, loading a guest for memory: neither needs the other.
        let (made, loaded) = std::thread::scope(|scope| {
            let load = || boot::load(&ram, source, &board);
            let loader = base::thread::spawn_scoped(scope, "loader", LOADER_STACK, load).map_err(host("a thread"))?;
            let made = create(engine, &ram).and_then(|vm| {
                observe::marks::mark("VM made");
                let events = add_platform(vm.as_ref(), &shared, (config.serial, config.serial_keep))?;
                let devices = add_devices(&vm, &ram, &shared, pci_window_64, devices, registry)?;
                Ok((vm, events, devices))
            });
            let loaded = loader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok::<_, MachineError>((made, loaded))
        })?;
        let ((vm, events, devices), boot) = (made?, loaded?);
        observe::marks::mark("guest loaded");
        let threads = start_threads(vm.as_ref(), config.cpus, &boot, &shared, registry)?;
        Ok(Self {
            threads,
            gate: shared.gate,
            ending,
            devices,
            events,
            ram,
        })
    }

    /// Lets the vCPUs run, for the first time or again after [`Machine::pause`].
    ///
    /// # Errors
    /// A device could not go on; the vCPUs stay where they are.
    pub fn run(&mut self) -> Result<(), MachineError> {
        for device in &self.devices {
            device.resume().map_err(|source| MachineError::Device {
                id: device.id().to_owned(),
                source,
            })?;
        }
        self.gate.set(Wanted::Run);
        Ok(())
    }

    /// Stops vCPUs, then devices; returns when all have stopped.
    pub fn pause(&mut self) {
        self.gate.set(Wanted::Pause);
        self.kick();
        self.gate.wait_parked(self.threads.len());
        for device in &self.devices {
            device.pause();
        }
    }

    /// Readable once the guest has ended.
    pub fn ended(&self) -> &EventFd {
        self.ending.event()
    }

    /// Why the guest has ended, if it has.
    pub fn end(&self) -> Option<&End> {
        self.ending.reason()
    }

    /// Presses the power button.
    pub fn press_power_button(&self) {
        self.events.raise(Event::PowerButton);
    }

    /// The size of guest memory.
    pub fn memory(&self) -> ByteSize {
        self.ram.size()
    }

    fn kick(&self) {
        for vcpu in &self.threads {
            vcpu.kicker.kick();
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.gate.set(Wanted::End);
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

/// A VM with its memory.
fn create(engine: &dyn Engine, ram: &Ram) -> Result<Arc<dyn Vm>, MachineError> {
    let vm = engine.create_vm()?;
    vm.reserve_ioapic_pins(u32::from(PINS))?;
    for (slot, region) in (0..).zip(ram.regions()) {
        vm.map_ram(slot, Arc::clone(region))?;
    }
    Ok(vm)
}

fn host(what: &'static str) -> impl Fn(std::io::Error) -> MachineError {
    move |source| MachineError::Host { what, source }
}

/// Puts the board's own devices on the buses.
fn add_platform(
    vm: &dyn Vm,
    shared: &Shared,
    (serial, keep): (Option<OwnedFd>, Option<u64>),
) -> Result<Arc<EventDevice>, MachineError> {
    let ioapic = IoApic::new(vm);
    let pin = |number| ioapic.pin(number).unwrap_or_else(|| vm.create_interrupt());
    let serial =
        SerialPort::new(pin(PORTS.serial_pin), serial, keep).map_err(host("making the serial output non-blocking"))?;
    let events = EventDevice::new(pin(PORTS.events_pin));
    let ending = Arc::clone(&shared.ending);
    let power = Arc::new(Power::new(move |request| ending.report(End::from(request))));
    shared.ports.insert(u64::from(PORTS.serial), 8, serial)?;
    shared.ports.insert(u64::from(PORTS.sleep_control), 3, power)?;
    shared
        .ports
        .insert(u64::from(PORTS.events), 1, Arc::<EventDevice>::clone(&events))?;
    shared
        .mmio
        .insert(layout::IOAPIC.start, layout::IOAPIC.length, ioapic)?;
    Ok(events)
}

/// Puts PCI and everything on it on the buses.
fn add_devices(
    vm: &Arc<dyn Vm>,
    ram: &Ram,
    shared: &Shared,
    high: Range,
    devices: Vec<NamedDevice>,
    registry: &Registry,
) -> Result<Vec<Arc<VirtioPciDevice>>, MachineError> {
    let low = layout::PCI_WINDOW_32;
    let bus = PciBus::new(Windows {
        low: Window {
            start: low.start,
            length: low.length,
        },
        high: Window {
            start: high.start,
            length: high.length,
        },
    });
    shared.ports.insert(
        u64::from(pci::CONFIG_PORTS),
        u64::from(pci::CONFIG_PORT_COUNT),
        bus.ports(),
    )?;
    shared
        .mmio
        .insert(layout::ECAM.start, layout::ECAM.length, bus.ecam())?;
    shared.mmio.insert(low.start, low.length, bus.window(WindowKind::Low))?;
    shared
        .mmio
        .insert(high.start, high.length, bus.window(WindowKind::High))?;
    let mut transports = Vec::with_capacity(devices.len());
    for NamedDevice { id, device } in devices {
        let transport = VirtioPciDevice::new(&id, device, Arc::clone(vm), Arc::clone(ram.guest()), registry)
            .map_err(|source| MachineError::Transport { id: id.clone(), source })?;
        bus.add(Arc::<VirtioPciDevice>::clone(&transport))
            .map_err(|source| MachineError::Pci { id, source })?;
        transports.push(transport);
    }
    Ok(transports)
}

/// Makes the vCPUs and their threads, which wait at the gate.
fn start_threads(
    vm: &dyn Vm,
    count: u32,
    boot: &BootState,
    shared: &Shared,
    registry: &Registry,
) -> Result<Vec<VcpuThread>, MachineError> {
    let mut threads = Vec::new();
    for id in 0..count {
        let started = vm
            .create_vcpu(id, count)
            .map_err(MachineError::from)
            .and_then(|mut vcpu| {
                if id == 0 {
                    vcpu.set_boot_state(boot)?;
                }
                let counters = ExitCounters::new(registry, id);
                VcpuThread::spawn(id, vcpu, shared.clone(), counters).map_err(host("a thread for a vCPU"))
            });
        match started {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                // The threads so far wait at the gate: let them go, or they would wait for ever.
                shared.gate.set(Wanted::End);
                return Err(error);
            }
        }
    }
    Ok(threads)
}
