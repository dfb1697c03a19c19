//! The one VM of this process and the requests that act on it.

mod servers;
mod told;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::ByteSize;
use device::{CreateError, FdTable, SpaceAlarm};
use engine::Engine;
use machine::{End, Machine, MachineConfig, MachineError};
use memory::Pins;
use memory::layout::MemorySize;
use observe::{Registry, marks};
use snapshot::Layers;
use vmm_api::devices::MemConfig;
use vmm_api::{
    ApiError, DeviceSpec, ErrorKind, ExitReason, FdRef, MAX_ORDER, MAX_WRITE_SET, MemoryMode, PageRuns, Reply, Request,
    RestoreConfig, SnapshotConfig, StopReason, VERSION, VmConfig, VmState, Written,
};

use crate::balloon::Balloon;
use crate::bare;
use crate::devices::{Surroundings, create_devices, create_functions};
use crate::functions::{self, Functions};
use crate::kvm::KvmSource;
use crate::made::Made;
use crate::refusal::{from_machine, from_snapshot, refuse};
use crate::request_fds::all_used;
use crate::restore::Received;
use crate::restore::ahead::{Ahead, Files};
use crate::shared::{enclose, shared_directories};
use crate::taps::Taps;

pub(crate) use servers::Answer;

/// What tells a snapshot which pages of memory were touched; without it all of them are read.
pub(crate) fn pagemap() -> Option<File> {
    let opened = File::open("/proc/self/pagemap");
    opened
        .inspect_err(|error| log::info!("snapshots will read all memory: /proc/self/pagemap: {error}"))
        .ok()
}

/// The package's version, and what tells builds apart that save otherwise: a checksum of which samples of saved states there are.
pub(crate) const VMM_VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("BASALT_STATES"));

/// The VM, if there is one, and what is known of it.
pub(crate) struct Vm {
    kvm: KvmSource,
    pagemap: Option<File>,
    machine: Option<Machine>,
    state: VmState,
    /// Why it is paused, if nobody has asked for that.
    stopped: Option<StopReason>,
    /// Raised by disks for whose requests the host has no space.
    no_space: Option<SpaceAlarm>,
    cpus: u32,
    engine: Option<Arc<dyn Engine>>,
    engine_name: &'static str,
    /// The memory's files by the last snapshot, as long as nothing has run since.
    written: Option<Layers>,
    /// It was started, or resumed after it was restored.
    has_run: bool,
    registry: Registry,
    taps: Taps,
    balloon: Balloon,
    /// What is made of what was inherited.
    ahead: Ahead,
    functions: Functions,
}

impl Vm {
    pub(crate) fn new() -> Self {
        Self {
            kvm: KvmSource::default(),
            pagemap: None,
            machine: None,
            state: VmState::Empty,
            stopped: None,
            no_space: None,
            cpus: 0,
            engine: None,
            engine_name: "",
            written: None,
            has_run: false,
            registry: Registry::new(),
            taps: Taps::default(),
            balloon: Balloon::default(),
            ahead: Ahead::default(),
            functions: Functions::default(),
        }
    }

    /// One that can open nothing itself.
    pub(crate) fn jailed(pagemap: Option<File>) -> Self {
        let mut vm = Self::new();
        (vm.kvm.jailed, vm.pagemap) = (true, pagemap);
        vm
    }

    /// The same, whose vCPUs need not leave their CPUs to others.
    pub(crate) fn on_own_cpus(mut self) -> Self {
        self.kvm.own_cpus = true;
        self
    }

    /// The same with an inherited KVM: a VM to restore is made at once, and the snapshot in these files is read. Where that cannot be,
    /// `restore` says why.
    pub(crate) fn with_kvm(mut self, kvm: OwnedFd, files: Option<Files>) -> Self {
        self.kvm.inherited = Some(kvm);
        match self.kvm.open(None) {
            Ok(engine) => self.ahead = Ahead::begin(&engine, files),
            Err(error) => log::warn!("no VM is made ahead: {}", error.message),
        }
        self
    }

    /// What becomes readable when the guest ends.
    pub(crate) fn ended(&self) -> Option<&base::EventFd> {
        self.machine.as_ref().map(Machine::ended)
    }

    /// As [`Machine::look_for_halt`].
    pub(crate) fn look_for_halt(&mut self) -> Option<std::time::Duration> {
        self.machine.as_mut()?.look_for_halt()
    }

    /// What becomes readable when a disk has no space left on the host.
    pub(crate) fn no_space(&self) -> Option<&base::EventFd> {
        self.no_space.as_ref().map(SpaceAlarm::event)
    }

    /// Pauses a VM that runs and has a disk without space, so that its guest neither sees an error nor waits in its own time; why,
    /// if it was paused by this call.
    pub(crate) fn stop_for_space(&mut self) -> Option<StopReason> {
        self.follow_freezing();
        let alarm = self.no_space.as_ref()?;
        alarm.event().consume();
        if self.state != VmState::Running {
            // The requests are kept: they begin anew when the VM goes on, and raise the alarm again if need be.
            return None;
        }
        let disks = alarm.disks();
        match self.machine.as_mut().map(Machine::try_pause).transpose() {
            Ok(Some(true) | None) => {}
            Ok(Some(false)) => return None,
            Err(error) => {
                log::error!("the thread of a frozen VM does not go on: {error}");
                return None;
            }
        }
        log::warn!(
            "the VM is paused: no space left on the host for what its guest writes ({})",
            disks.join(", ")
        );
        self.state = VmState::Paused;
        self.stopped = Some(StopReason::NoSpace { disks });
        self.stopped.clone()
    }

    /// Why the guest has ended, if it has.
    pub(crate) fn exit_reason(&self) -> Option<ExitReason> {
        let end = self.machine.as_ref()?.end()?;
        Some(match end {
            End::PowerOff => ExitReason::PowerOff,
            End::Halted => ExitReason::Halted,
            End::Reset => ExitReason::Reset,
            End::Failed(why) => ExitReason::Failed(why.clone()),
        })
    }

    /// Carries one request out.
    pub(crate) fn handle(&mut self, version: u32, request: Request, fds: Vec<OwnedFd>) -> Result<Answer, ApiError> {
        if version != VERSION {
            let message = format!(
                "the driver speaks version {version} of the VMM's API, this VMM version {VERSION}: use basalt and \
                 basalt-vmm of one build"
            );
            return Err(refuse(ErrorKind::Invalid, message));
        }
        self.follow_freezing();
        let reply = match request {
            Request::Freeze(config) => return self.freeze(config),
            Request::Link(config) => self.link(config, fds).map(|()| Reply::Done),
            Request::Create(config) => self.create(*config, fds).map(|()| Reply::Done),
            Request::Restore(config) => self.restore(&config, fds).map(|()| Reply::Done),
            Request::Rollback(config) => self.roll_back(&config, fds).map(|()| Reply::Done),
            Request::Snapshot(config) => self.snapshot(&config, fds).map(Reply::Written),
            Request::Rebase(memory) => self.rebase(memory, fds).map(|()| Reply::Done),
            Request::WriteSet => self.write_set().map(Reply::WriteSet),
            Request::PageOrder => self.page_order().map(Reply::PageOrder),
            Request::Start => self.go(VmState::Created, "start"),
            Request::Resume => self.go(VmState::Paused, "resume"),
            Request::Pause => self.pause(),
            Request::Attach(device) => self.attach(&device, fds).map(|()| Reply::Done),
            Request::Detach(id) => self.detach(&id).map(|()| Reply::Done),
            Request::Functions => self.told_functions().map(Reply::Functions),
            Request::ResizeMemory(size) => self.resize_memory(|machine| machine.resize_memory(size.bytes())),
            Request::MapAhead(size) => self.resize_memory(|machine| machine.map_ahead(size.bytes())),
            Request::AddZeroedMemory(files) => functions::add_zeroed(self.its_machine()?, &files, fds),
            Request::ResizeBalloon(size) => self.resize_balloon(size).map(|()| Reply::Done),
            Request::PressPowerButton => self.press_power_button(),
            Request::Stop => {
                self.machine = None;
                self.state = VmState::Ended;
                Ok(Reply::Done)
            }
            Request::Info => Ok(Reply::Info(self.info())),
            Request::Metrics => Ok(Reply::Metrics(self.metrics())),
        }?;
        Ok(reply.into())
    }

    /// Whether it was ever started.
    pub(crate) fn has_run(&self) -> bool {
        self.has_run
    }

    /// Whether there will never be anything to do again.
    pub(crate) fn is_over(&self) -> bool {
        self.state == VmState::Ended
    }

    fn create(&mut self, config: VmConfig, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
        self.expect(VmState::Empty, "create")?;
        marks::mark("create received");
        let registry = Registry::new();
        config.validate().map_err(|error| refuse(ErrorKind::Invalid, error))?;
        let mut fds = FdTable::new(fds);
        let mut take = |fd: FdRef| fds.take(fd).map_err(|error| refuse(ErrorKind::Invalid, error));
        let mut kernel = File::from(take(config.kernel)?);
        let mut initramfs = config.initramfs.map(&mut take).transpose()?.map(File::from);
        let kvm = config.kvm.map(&mut take).transpose()?;
        let reservation = config.reservation.map(&mut take).transpose()?;
        let serial = config.serial.map(&mut take).transpose()?;
        // Its VM is none that boots.
        self.ahead = Ahead::default();
        let engine: Arc<dyn Engine> = match reservation {
            Some(reservation) => bare::engine(reservation, config.busy_poll_us)?,
            None => Arc::new(self.kvm.open(kvm)?),
        };
        marks::mark("engine open");
        let shared = shared_directories(&config.devices, &fds)?;
        let taps = Taps::of(&config.devices, &fds)?;
        let iommu = vmm_api::iommu_device(&config.devices).map_err(|error| refuse(ErrorKind::Invalid, error))?;
        self.functions = Functions::of_guest(iommu.is_some());
        let functions = create_functions(&config.devices, &mut fds, &mut self.functions.spaces)?;
        let no_space = SpaceAlarm::new().map_err(|error| refuse(ErrorKind::Host, error))?;
        let mem = vmm_api::mem_device(&config.devices).map_err(|error| refuse(ErrorKind::Invalid, error))?;
        let mem = mem.map(|(_, config)| config);
        let memory = MemorySize {
            boot: config.memory,
            hotplug: mem.as_ref().map_or(ByteSize(0), MemConfig::max_size),
            hotplug_region: mem.as_ref().map_or(ByteSize(0), |mem| mem.region_size),
        };
        let pins = Pins::default();
        let surroundings = Surroundings {
            registry: &registry,
            no_space: &no_space,
            memory,
            pins: &pins,
        };
        let created = create_devices(&config.devices, &mut fds, surroundings)?;
        marks::mark("devices made");
        all_used(&fds)?;
        let source = boot::Source {
            kernel: &mut kernel,
            initramfs: initramfs.as_mut(),
            cmdline: &config.cmdline,
        };
        let size = MachineConfig {
            cpus: config.cpus,
            memory,
            hotplug_node: mem.and_then(|mem| mem.node_id).unwrap_or(0),
            acpi_hotplug: config.acpi_hotplug,
            identity_memory: config.memory_mode == MemoryMode::Identity,
            cpu: config.cpu,
            serial,
            serial_keep: config.serial_keep,
        };
        let (devices, balloon) = created.beside(functions, pins);
        let machine =
            Machine::build(engine.as_ref(), size, source, devices, &registry).map_err(|error| from_machine(&error))?;
        // Last, as it cannot be taken back for another `create`.
        enclose(shared)?;
        marks::mark("machine built");
        let made = Made {
            machine,
            no_space,
            taps,
            balloon: Balloon(balloon),
            cpus: config.cpus,
            engine,
            registry,
        };
        self.take_over(made, VmState::Created);
        Ok(())
    }

    fn take_over(&mut self, made: Made, state: VmState) {
        self.machine = Some(made.machine);
        self.no_space = Some(made.no_space);
        self.taps = made.taps;
        self.balloon = made.balloon;
        self.cpus = made.cpus;
        self.engine_name = made.engine.name();
        self.engine = Some(made.engine);
        self.registry = made.registry;
        self.state = state;
    }

    fn restore(&mut self, config: &RestoreConfig, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
        self.expect(VmState::Empty, "restore")?;
        marks::mark("restore received");
        let made = Received::check(config)?
            .take(fds)?
            .open_engine(&self.kvm, &mut self.ahead)?
            .read_state()?
            .make_devices()?
            .build()?
            .finish()?;
        self.functions = Functions::of_guest(made.machine.has_iommu());
        self.take_over(made, VmState::Paused);
        Ok(())
    }

    /// Nothing of the VM is touched before all that can be told to be wrong was.
    fn roll_back(&mut self, config: &RestoreConfig, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
        if self.state != VmState::Running {
            self.expect(VmState::Paused, "rollback")?;
        }
        let received = Received::check(config)?.check_in_place()?;
        self.can_map_anew("rolled back in place: restore another VM")?;
        let inputs = received.take_with(&self.taps, fds)?;
        let over = || refuse(ErrorKind::WrongState, "the guest has ended: restore another VM");
        let (Some(engine), Some(machine), Some(no_space)) = (&self.engine, &mut self.machine, &self.no_space) else {
            return Err(over());
        };
        let replacement = inputs
            .match_machine(engine.as_ref(), machine)?
            .make_devices(machine, no_space)?;
        machine.pause();
        self.state = VmState::Paused;
        self.written = None;
        if machine.end().is_some() {
            return Err(over());
        }
        let opened = if self.kvm.jailed { None } else { pagemap() };
        let pagemap = self.pagemap.as_ref().or(opened.as_ref());
        let applied = match replacement.apply(machine, pagemap) {
            Ok(applied) => applied,
            Err(error) => {
                self.machine = None;
                self.state = VmState::Ended;
                return Err(refuse(ErrorKind::Internal, error));
            }
        };
        // The requests for which there was no space went with the devices that kept them.
        no_space.clear();
        self.stopped = None;
        self.taps = applied.taps;
        self.balloon = applied.balloon;
        self.registry.replace("device", &applied.registry);
        Ok(())
    }

    fn snapshot(&mut self, config: &SnapshotConfig, fds: Vec<OwnedFd>) -> Result<Written, ApiError> {
        self.expect(VmState::Paused, "snapshot")?;
        let mut fds = FdTable::new(fds);
        let mut take = |fd: FdRef| {
            let fd = fds.take(fd).map_err(|error| refuse(ErrorKind::Invalid, error));
            fd.map(File::from)
        };
        let target = snapshot::Target {
            state: take(config.state)?,
            memory: take(config.memory)?,
            base: config.base.iter().map(|fd| take(*fd)).collect::<Result<_, _>>()?,
        };
        all_used(&fds)?;
        let (Some(engine), Some(machine)) = (&self.engine, self.machine.as_ref().and_then(Machine::quiesced)) else {
            return Err(refuse(
                ErrorKind::WrongState,
                "the guest has ended: there is nothing to save",
            ));
        };
        let opened = if self.kvm.jailed { None } else { pagemap() };
        let pagemap = self.pagemap.as_ref().or(opened.as_ref());
        let layers = snapshot::host_traits(engine.as_ref(), VMM_VERSION)
            .and_then(|here| snapshot::write(&machine, here.fingerprint, target, pagemap))
            .map_err(|error| from_snapshot(&error))?;
        let files = layers.files().len();
        self.written = Some(layers);
        Ok(Written { files })
    }

    fn rebase(&mut self, memory: FdRef, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
        self.expect(VmState::Paused, "rebase")?;
        self.can_map_anew("mapped from its snapshot: leave it as it is")?;
        let mut fds = FdTable::new(fds);
        let memory = fds.take(memory).map_err(|error| refuse(ErrorKind::Invalid, error))?;
        all_used(&fds)?;
        let (Some(layers), Some(machine)) = (self.written.take(), &mut self.machine) else {
            let message = "no snapshot was written since the VM was paused: take one first";
            return Err(refuse(ErrorKind::WrongState, message));
        };
        // Whoever writes no more should not be able to.
        let rebased = layers.with_newest(File::from(memory)).map_err(MachineError::from);
        let rebased = rebased.and_then(|layers| machine.rebase(layers));
        rebased.map_err(|error| from_machine(&error))
    }

    /// Anybody may write meanwhile: it is a help, and need not be exact.
    fn write_set(&self) -> Result<PageRuns, ApiError> {
        let machine = self.its_machine()?;
        let opened = if self.kvm.jailed { None } else { pagemap() };
        let runs = machine.write_set(self.pagemap.as_ref().or(opened.as_ref()), MAX_WRITE_SET);
        runs.map_err(|error| from_machine(&error))
    }

    fn page_order(&self) -> Result<PageRuns, ApiError> {
        let mut order = self.its_machine()?.page_order();
        order.truncate(MAX_ORDER);
        Ok(order)
    }

    /// What becomes readable when memory is mapped for a function of the host's.
    pub(crate) fn mapped_event(&self) -> Option<&base::EventFd> {
        self.machine.as_ref().map(Machine::mapped_event)
    }

    /// There is none before `create`.
    pub(crate) fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// As [`Machine::plug_mapped`].
    pub(crate) fn plug_mapped(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.plug_mapped();
            self.functions.follow(machine);
        }
    }

    fn attach(&mut self, device: &DeviceSpec, fds: Vec<OwnedFd>) -> Result<(), ApiError> {
        self.is_no_server()?;
        let machine = self.machine.as_mut();
        let machine = machine.filter(|machine| machine.end().is_none());
        let machine =
            machine.ok_or_else(|| refuse(ErrorKind::WrongState, "there is no VM that could have a function"))?;
        // What was written of it is without the function.
        self.written = None;
        let opened = if self.kvm.jailed { None } else { pagemap() };
        let pagemap = self.pagemap.as_ref().or(opened.as_ref());
        self.functions.attach(machine, device, fds, pagemap)
    }

    fn told_functions(&mut self) -> Result<vmm_api::Functions, ApiError> {
        let machine = self.machine.as_mut();
        let machine = machine.ok_or_else(|| refuse(ErrorKind::WrongState, "there is no VM: create or restore one"))?;
        let told = functions::told(machine, self.functions.spaces.has_iommufd());
        // One that has left may be closed by now.
        self.functions.follow(machine);
        Ok(told)
    }

    fn detach(&mut self, id: &str) -> Result<(), ApiError> {
        self.is_no_server()?;
        let machine = self.machine.as_mut();
        let machine = machine.ok_or_else(|| refuse(ErrorKind::WrongState, "there is no VM"))?;
        machine.detach(id).map_err(|error| from_machine(&error))?;
        self.functions.follow(machine);
        Ok(())
    }

    /// Whether the process may map other memory in the place of its guest's.
    fn can_map_anew(&self, not: &str) -> Result<(), ApiError> {
        if self.machine.as_ref().is_some_and(Machine::is_pinned) {
            let message = format!(
                "the guest's memory stays where it is as long as the VM has a PCI function of the host's, and cannot be {not}"
            );
            return Err(refuse(ErrorKind::WrongState, message));
        }
        match &self.engine {
            Some(engine) if engine.pins_memory() => Err(refuse(
                ErrorKind::WrongState,
                format!("memory of a guest that owns its CPUs stays where it is, and cannot be {not}"),
            )),
            _ if self.machine.as_ref().is_some_and(|machine| machine.pins().is_pinned()) => Err(refuse(
                ErrorKind::WrongState,
                format!(
                    "the host's IOMMU did not let go of the guest's memory, which stays where it is and cannot be {not}"
                ),
            )),
            _ => Ok(()),
        }
    }

    fn its_machine(&self) -> Result<&Machine, ApiError> {
        let machine = self.machine.as_ref();
        machine.ok_or_else(|| refuse(ErrorKind::WrongState, "there is no VM: create or restore one"))
    }

    fn expect(&self, state: VmState, verb: &str) -> Result<(), ApiError> {
        if self.state == state {
            return Ok(());
        }
        self.not_frozen()?;
        Err(refuse(
            ErrorKind::WrongState,
            format!("`{verb}` needs a VM that is {state}; this one is {}", self.state),
        ))
    }

    fn go(&mut self, from: VmState, verb: &str) -> Result<Reply, ApiError> {
        self.expect(from, verb)?;
        marks::mark("start received");
        if let Some(alarm) = &self.no_space {
            alarm.clear();
        }
        if let Some(machine) = &mut self.machine {
            machine.run().map_err(|error| from_machine(&error))?;
        }
        self.written = None;
        self.stopped = None;
        self.state = VmState::Running;
        self.has_run = true;
        Ok(Reply::Done)
    }

    fn pause(&mut self) -> Result<Reply, ApiError> {
        if self.stopped.take().is_some() {
            return Ok(Reply::Done);
        }
        self.expect(VmState::Running, "pause")?;
        if let Some(machine) = &mut self.machine
            && !machine.try_pause().map_err(|error| from_machine(&error))?
        {
            return Err(from_machine(&MachineError::Frozen));
        }
        self.state = VmState::Paused;
        Ok(Reply::Done)
    }

    fn press_power_button(&mut self) -> Result<Reply, ApiError> {
        self.expect(VmState::Running, "press-power-button")?;
        if let Some(machine) = &self.machine {
            machine.press_power_button();
        }
        Ok(Reply::Done)
    }

    /// In any state: a device that sleeps tells its driver when it goes on.
    fn resize_memory(
        &mut self,
        resize: impl FnOnce(&mut Machine) -> Option<Result<(), CreateError>>,
    ) -> Result<Reply, ApiError> {
        self.its_machine()?;
        let resized = self.machine.as_mut().and_then(resize);
        let resized = resized.ok_or_else(|| {
            let message = "the VM has no memory that can be plugged: make one with a device of kind `mem`";
            refuse(ErrorKind::WrongState, message)
        })?;
        resized.map_err(|error| refuse(ErrorKind::Invalid, error))?;
        Ok(Reply::Done)
    }

    /// In any state, as with memory that can be plugged.
    fn resize_balloon(&mut self, size: ByteSize) -> Result<(), ApiError> {
        let memory = self.its_machine()?.memory();
        self.balloon.check(size, memory)?;
        match self
            .machine
            .as_mut()
            .and_then(|machine| machine.resize_balloon(size.bytes()))
        {
            Some(resized) => resized.map_err(|error| refuse(ErrorKind::Invalid, error)),
            None => self.balloon.resize(size, memory),
        }
    }
}
