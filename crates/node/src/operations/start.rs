//! How a sandbox comes to run.
//!
//! ```text
//!  register ─► directory ─► disk ─┐
//!                   start again ──┴─► boots ───────────────────────┬─► command
//!  register ─► directory ─► VMM ─► a template's disk ─► restored ──┘
//! ```
//! What fails on the way takes everything back (`undo`): a sandbox that never ran is gone, one that is started again has exited.

use std::fs::{self, File};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use agent_api::{ExecRequest, Identity};
use base::{ByteSize, points};
use network::{Attachment, PortMapping};
use node_api::transfer::Kind;
use node_api::{EventKind, NetworkMode, Resources, Sandbox, SandboxConfig, State};
use observe::span::{self, span};

use crate::guest::reidentify::{Own, Reidentification};
use crate::ids;
use crate::node::Node;
use crate::operations::clone;
use crate::operations::stages::{Machine, Started, ToBoot, ToRestore};
use crate::resources::budget::{Promise, Start};
use crate::resources::limits;
use crate::resources::space::{self, OF_A_SANDBOX};
use crate::resources::volume_shares;
use crate::sandbox::command;
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::disk;
use crate::saved::snapshots::Place;
use crate::saved::templates::Found;
use crate::store::database::{CameZeroed, Stored};
use crate::store::operation::Operation;
use crate::store::records::{self, Reach};
use crate::telemetry::trace;
use crate::vmm::launch::{self, Outside};
use crate::vmm::monitor::MonitorEvent;
use crate::vmm::vm::Vm;
use crate::{Error, clock, thread};

/// Said as long as nobody's end can be waited for.
static NOT_WAITED: observe::Repeated = observe::Repeated::new(Duration::from_secs(10));

impl Node {
    /// Makes a sandbox and starts it; `cancel` hangs up when nobody wants it any more.
    pub(crate) fn run(
        self: &Arc<Self>,
        config: SandboxConfig,
        cancel: BorrowedFd<'_>,
    ) -> Result<(Arc<Entry>, Started), Error> {
        self.run_for(config, false, cancel)
    }

    /// The same, maybe for somebody who builds a template in it.
    pub(crate) fn run_for(
        self: &Arc<Self>,
        mut config: SandboxConfig,
        building: bool,
        cancel: BorrowedFd<'_>,
    ) -> Result<(Arc<Entry>, Started), Error> {
        config.name_accelerator()?;
        config.validate()?;
        self.look_names_up(&mut config)?;
        // What follows from the rest is nobody's to say.
        config.resources.inflated = None;
        config.choose_iommu();
        config.choose_boot_memory();
        config.resources = config.resources.holding(ByteSize(0));
        limits::check(&config, self.cgroups.as_ref())?;
        launch::check_paging(config.paging)?;
        // Of a template it is the template's.
        if config.template.is_none() {
            config.resources.cpu_model.get_or_insert(self.config.cpu_model);
        }
        let chosen = match config.template.clone() {
            Some(wanted) => Some(self.choose(&wanted, &mut config)?),
            None => None,
        };
        let looking = span("image");
        let image = self.images.get(&config.image)?;
        let command = command::command(&image.config, &config.process)?;
        drop(looking);
        self.require_space(&config.resources, chosen.as_ref().map(|chosen| &chosen.place))?;
        let networked = {
            let _span = span("network set-up");
            match &chosen {
                // What is wrong with its ports is better said before anything is made.
                Some(chosen) => parse_ports(&config.ports).map(|_| chosen.networked)?,
                None => self.wants_network(&config)?,
            }
        };
        let name = config.name.clone();
        // Whether there is a template of its shape is found out when it is known; one that boots then asks for more.
        let start = if building || config.boot {
            Start::Boot
        } else {
            Start::Restore
        };
        let mut stored = new_sandbox(config, image.digest, command, networked)?;
        stored.building = building;
        if let Some(chosen) = &chosen {
            stored.share_slots = chosen.share_slots;
        } else if building || stored.sandbox.config.owner.is_some() {
            // Of what a tenant runs snapshots are taken, whose clones may have some.
            stored.share_slots = stored.share_slots.max(volume_shares::SLOTS);
        }
        let entry = {
            let _span = span("record");
            let admitted = self.admit(&stored, name.as_deref(), start)?;
            let entry = self.register(stored, name.as_deref())?;
            admitted.give(&entry);
            entry
        };
        span::attribute("basalt.sandbox", entry.id.as_str());
        let operation = entry.operate();
        {
            let mut inner = entry.lock();
            inner.attached = !inner.stored.sandbox.config.detach;
        }
        let started = self.carry_out(&entry, || {
            self.create(&entry)?;
            let machine = match &chosen {
                Some(chosen) => self.cloned(&entry, &chosen.id, &chosen.place, clone::HOOKS)?,
                None => self.machine(&entry, cancel)?,
            };
            self.before_command(&entry, &machine.vm, Some(cancel))?;
            machine.start_command(self, &entry)
        });
        if started.is_ok() {
            self.follow_start(&entry);
        }
        if let (Ok(_), Some(chosen)) = (&started, &chosen) {
            self.verify_later(Kind::Template, &chosen.id, &chosen.place);
        }
        drop(operation);
        Ok((entry, started?))
    }

    /// What names stand for now is what it gets each time. Its asker's variables come behind theirs, and count.
    fn look_names_up(&self, config: &mut SandboxConfig) -> Result<(), Error> {
        let resolved = self.devices.resolve(&config.cdi_devices)?;
        for function in resolved.functions {
            if !config.devices.contains(&function) {
                config.devices.push(function);
            }
        }
        // What its asker counts as such is its asker's.
        config.process.device_env = 0;
        config.process.set_device_env(resolved.env);
        Ok(())
    }

    /// Refuses a sandbox of this size for which there is no space. Its disk is a copy of what is at `from`, or a new one.
    pub(crate) fn require_space(&self, resources: &Resources, from: Option<&Place>) -> Result<(), Error> {
        let disk = match (resources.disk, from) {
            (None, _) => 0,
            (Some(_), Some(place)) => disk::copy_takes(&place.disk(), self.paths.state()).bytes(),
            (Some(size), None) => disk::new_takes(&self.paths.disks(), size).bytes(),
        };
        let needed = ByteSize(OF_A_SANDBOX.bytes() + disk);
        space::require(self.paths.state(), needed, "a sandbox")
    }

    /// A machine with its root, in which nothing runs yet: a clone of a template where there is one of its shape.
    fn machine(self: &Arc<Self>, entry: &Arc<Entry>, cancel: BorrowedFd<'_>) -> Result<Machine, Error> {
        let look = || {
            let _span = span("template");
            self.template_for(&entry.stored())
        };
        let own = || Own::of(&entry.stored().sandbox.config);
        let mut found = look()?;
        if let Found::Ready { id, place } = &found {
            // Nothing is there yet that could have kept anything.
            match self.cloned(entry, id, place, Duration::ZERO) {
                Ok(machine) => {
                    self.templates.note_success(id);
                    self.verify_later(Kind::Template, id, place);
                    return Ok(machine);
                }
                // It would fail as well if it booted; or somebody has ended it.
                Err(error) if !error.is_of_machine() || entry.stored().stopped => return Err(error),
                Err(error) => {
                    // While its cgroup tells.
                    let error = self.with_cause(entry, error);
                    log::warn!(
                        "sandbox {} boots, as it cannot be cloned of a template: {error}",
                        entry.id
                    );
                    // What it alone was to get may be why.
                    let blamed = error.is_of_files() && (own().is_empty() || !error.is_agents_refusal());
                    if blamed || !place.is_whole(&entry.stored().sandbox.config.resources) {
                        self.templates.give_up(id);
                    } else if !error.is_of_files() {
                        self.templates.note_failure_of_host(id);
                    }
                    let disk = self.sandbox_paths(entry).disk();
                    let cleared = self.clear(entry).and_then(|()| disk::remove(&disk));
                    if cleared.is_err() {
                        return Err(error.after_undo(cleared));
                    }
                    found = look()?;
                }
            }
        }
        self.make_disk(entry, None)?;
        let Found::Missing(mut lease) = found else {
            return ToBoot::launch(self, entry)?.boot(self, entry, own(), Some(cancel));
        };
        // A clone would inherit it.
        let waiting = ToBoot::launch(self, entry)?.for_template();
        let Machine { vm, agent } = waiting.boot(self, entry, Own::default(), Some(cancel))?;
        // As in a snapshot: a clone would deal with its end.
        let hung_up = agent
            .set_read_timeout(Some(self.config.limits.answer))
            .and_then(|()| agent.hang_up())
            .map_err(|error| vm.diagnose("its agent was to hang up", error));
        match hung_up {
            Ok(()) => self.save_template(entry, &vm, *lease)?,
            // It is there still, and may answer others: whether it does is found out below.
            Err(error @ (Error::Agent { .. } | Error::GuestSilent { .. })) => {
                log::warn!("no template can be made of sandbox {}: {error}", entry.id);
                lease.give_up();
            }
            Err(error) => return Err(error),
        }
        let own = own();
        if !own.is_empty() {
            let _span = span("limits and mounts");
            let reidentification = Reidentification {
                own,
                ..Reidentification::default()
            };
            self.reidentify(&vm, reidentification)?;
        }
        let agent = vm.agent()?;
        Ok(Machine { vm, agent })
    }

    fn cloned(&self, entry: &Arc<Entry>, template: &str, place: &Place, hooks: Duration) -> Result<Machine, Error> {
        let stored = entry.stored();
        let reidentification = Reidentification {
            identity: Some(identity(&stored)?),
            hooks,
            own: Own::of(&stored.sandbox.config),
            // In one that nobody has built no command has run.
            restored: !hooks.is_zero(),
            ..Reidentification::default()
        };
        let waiting = ToRestore::launch(self, entry, place)?;
        self.make_disk(entry, Some(place))?;
        let restored = waiting.restore(self, entry, place, reidentification)?;
        let claims = self.claims_beside(entry);
        let claim = claims.then_some(|vm: &Vm| self.claim_devices(entry, vm, &stored.sandbox.config.devices).map(drop));
        let Machine { vm, mut agent } = restored.go_on_beside(self, entry, place, claim)?;
        agent
            .set_read_timeout(Some(self.config.limits.answer))
            .map_err(|error| vm.diagnose("its agent was to start its command", error))?;
        trace::agent(&mut agent, self.config.limits.answer, true)
            .map_err(|error| vm.diagnose("its agent was asked about its start", error))?;
        self.update(entry, |stored| stored.sandbox.template = Some(template.to_owned()))?;
        Ok(Machine { vm, agent })
    }

    /// Starts one that has exited.
    pub(crate) fn start(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<Started, Error> {
        let _operation = self.turn(entry)?;
        self.start_again(entry, None)
    }

    /// The same for who has its turn already, and maybe holds what its last machine was promised.
    pub(crate) fn start_again(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        held: Option<Arc<Promise>>,
    ) -> Result<Started, Error> {
        let sandbox = entry.stored().sandbox;
        Verb::Start.check(&sandbox)?;
        limits::check(&sandbox.config, self.cgroups.as_ref())?;
        let promise = match held {
            Some(promise) => promise,
            None => self.admit_again("start", entry, Start::Boot)?,
        };
        self.forget_suspended(entry)?;
        self.update(entry, |stored| {
            stored.operation = Some(Operation::Start);
            stored.sandbox.restarts += 1;
            let config = &mut stored.sandbox.config;
            (config.detach, config.resources) = (true, config.resources.holding(ByteSize(0)));
            stored.sandbox.template = None;
            stored.memory_is_private = false;
        })?;
        entry.promise(promise);
        self.carry_out(entry, || {
            let waiting = ToBoot::launch(self, entry)?;
            let machine = waiting.boot(self, entry, Own::of(&sandbox.config), None)?;
            self.before_command(entry, &machine.vm, None)?;
            machine.start_command(self, entry)
        })
        .inspect(|_| self.follow_start(entry))
    }

    /// Whether it gets a place in the node's network.
    pub(crate) fn wants_network(&self, config: &SandboxConfig) -> Result<bool, Error> {
        // What is wrong with them is better said before anything is made.
        parse_ports(&config.ports)?;
        match config.network {
            NetworkMode::None => Ok(false),
            NetworkMode::Auto if !self.network.is_possible() && config.ports.is_empty() => Ok(false),
            NetworkMode::Auto | NetworkMode::Node => self.network.get().map(|_| true),
        }
    }

    /// Its place in the network, with its ports published.
    pub(crate) fn attach(&self, stored: &Stored) -> Result<Option<Attachment>, Error> {
        if !stored.networked {
            return Ok(None);
        }
        let network = self.network.get()?;
        // Nothing is connected before it is restricted.
        self.network.restore()?;
        self.network.restrict(stored.slot, &stored.sandbox.config.egress)?;
        let queues = usize::from(launch::queues(&stored.sandbox.config.resources));
        let attachment = network.attach(stored.slot, queues)?;
        let ports = parse_ports(&stored.sandbox.config.ports)?;
        self.network.publish(stored.slot, ports)?;
        Ok(Some(attachment))
    }

    /// The same for one that has it: the device that takes the place of the one that it has keeps that one's TAP.
    pub(crate) fn attachment(&self, stored: &Stored) -> Result<Option<Attachment>, Error> {
        stored
            .networked
            .then(|| Ok(self.network.get()?.attachment()))
            .transpose()
    }

    /// What its VMM has of the host.
    pub(crate) fn outside<'a>(
        &'a self,
        image: &'a Path,
        attachment: Option<Attachment>,
        window: Option<File>,
    ) -> Outside<'a> {
        Outside {
            image,
            attachment,
            cpus: &*self.cpus,
            window,
        }
    }

    /// Its directory.
    pub(crate) fn create(&self, entry: &Entry) -> Result<(), Error> {
        self.points.at(points::CREATE_RECORDED);
        let _span = span("directory and record");
        let (paths, stored) = (self.sandbox_paths(entry), entry.stored());
        fs::create_dir_all(&paths.directory).map_err(Error::file("make", &paths.directory))?;
        records::write(&paths.directory, &stored, Reach::Kernel)?;
        self.points.at(points::CREATE_DIRECTORY);
        self.events.tell(EventKind::Create, &stored.sandbox);
        Ok(())
    }

    /// Its disk; that of a clone is its snapshot's, or its template's.
    pub(crate) fn make_disk(&self, entry: &Entry, from: Option<&Place>) -> Result<(), Error> {
        let _span = span("disk");
        let path = self.sandbox_paths(entry).disk();
        if let Some(size) = entry.stored().sandbox.config.resources.disk {
            match from {
                Some(place) => disk::replace(&place.disk(), &path)?,
                None => disk::create(&self.paths.disks(), size, &path)?,
            }
        }
        self.points.at(points::CREATE_DISK);
        Ok(())
    }

    /// The image's file system.
    pub(crate) fn image_of(&self, stored: &Stored) -> Result<std::path::PathBuf, Error> {
        Ok(self.images.get(&stored.sandbox.digest)?.path)
    }

    /// Waits for the end of VMMs from here on.
    pub(crate) fn start_monitor(self: &Arc<Self>) -> Result<(), Error> {
        let node = Arc::clone(self);
        let work = move || {
            while !node.monitor.is_closed() {
                match node.monitor.wait() {
                    Ok(told) => told.into_iter().for_each(|told| match told {
                        MonitorEvent::Ended(id) => node.settle_in_thread(id),
                        MonitorEvent::Readable(id) => node.hear(&id),
                        MonitorEvent::AcceleratorEnded(id) => node.accelerator_ended_in_thread(id),
                    }),
                    Err(error) => {
                        NOT_WAITED.say(|more| log::error!("VMMs cannot be waited for: {error}{more}"));
                        std::thread::sleep(Duration::from_secs(1));
                    }
                }
            }
        };
        thread::spawn("monitor", work)
    }

    /// A VMM has ended: others may end meanwhile.
    fn settle_in_thread(self: &Arc<Self>, id: String) {
        let node = Arc::clone(self);
        let name = id.clone();
        let work = move || {
            let _lease = node.lease_to_settle(&id);
            if let Ok(entry) = node.find(&id)
                && let Err(error) = node.settle(&entry)
            {
                log::error!("the end of sandbox {id} cannot be dealt with: {error}");
            }
        };
        if let Err(error) = thread::spawn("settle", work) {
            log::error!("the end of sandbox {name} is not dealt with: {error}");
        }
    }
}

/// What a sandbox is called inside, and a machine id that nobody else has.
pub(crate) fn identity(stored: &Stored) -> Result<Identity, Error> {
    Ok(Identity {
        hostname: stored.sandbox.host_name().to_owned(),
        machine_id: ids::machine()?,
    })
}

pub(crate) fn parse_ports(ports: &[String]) -> Result<Vec<PortMapping>, Error> {
    Ok(ports
        .iter()
        .map(|text| text.parse())
        .collect::<Result<_, network::Error>>()?)
}

/// The record of a sandbox that is about to be; it has neither name nor slot.
pub(crate) fn new_sandbox(
    config: SandboxConfig,
    digest: String,
    command: ExecRequest,
    networked: bool,
) -> Result<Stored, Error> {
    let sandbox = Sandbox {
        id: ids::sandbox()?,
        name: String::new(),
        state: State::Creating,
        pause_reason: None,
        config,
        digest,
        created_ns: clock::now_ns(),
        started_ns: None,
        ends_ns: None,
        ended_ns: None,
        ended: None,
        vmm: None,
        accelerator: None,
        accelerator_ended: None,
        volumes: Vec::new(),
        restarts: 0,
        clone_of: None,
        template: None,
        refused: None,
        owned_cpus: base::CpuSet::default(),
        memory_state: None,
    };
    Ok(Stored {
        share_slots: volume_shares::slots(&sandbox.config.volumes),
        detached: Vec::new(),
        was_suspended: false,
        memory_is_private: false,
        came_zeroed: CameZeroed::default(),
        sandbox,
        generation: 0,
        acknowledged: false,
        slot: 0,
        command,
        networked,
        log_from: 0,
        stopped: false,
        operation: Some(Operation::Start),
        building: false,
    })
}
