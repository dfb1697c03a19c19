//! How a sandbox comes to run.
//!
//! ```text
//!  register ─► directory ─► disk ─┐
//!                   start again ──┴─► sockets ─► cgroup ─► VMM ─► VM ─► agent ─► root ─┬─► command
//!  register ─► directory ─► cgroup ─► VMM ─► a template's disk, sockets ─► VM restored ─► renewed ─┘
//! ```
//! What fails on the way takes everything back: a sandbox that never ran is gone, one that is started again has exited.

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use agent_api::{Connection, ExecRequest, Identity};
use base::{ByteSize, points};
use network::{Attachment, PortMapping};
use node_api::portable::Kind;
use node_api::sandbox::Process;
use node_api::{Class, EventKind, NetworkMode, Resources, Sandbox, SandboxConfig, State};
use observe::span::{self, span};

use crate::guest::deadline_stream::Timed;
use crate::guest::reidentify::{Own, Renewal};
use crate::ids;
use crate::node::{Node, to_run, wrong_state};
use crate::operations::clone;
use crate::resources::budget::{Promise, Start};
use crate::resources::cpus;
use crate::resources::limits;
use crate::resources::space::{self, OF_A_SANDBOX};
use crate::resources::volume_shares::{self, Opened};
use crate::sandbox::command;
use crate::sandbox::entry::Entry;
use crate::saved::disk;
use crate::saved::snapshots::Place;
use crate::saved::templates::Found;
use crate::store::database::Stored;
use crate::store::records::{self, Reach};
use crate::telemetry::trace;
use crate::vmm::launch::{self, Inherited};
use crate::vmm::monitor::Told;
use crate::vmm::process;
use crate::vmm::vm::Vm;
use crate::{Error, clock, thread};

/// Said as long as nobody's end can be waited for.
static NOT_WAITED: observe::Repeated = observe::Repeated::new(Duration::from_secs(10));

/// A VM with its root, and a connection to its agent.
pub(crate) type Machine = (Arc<Vm>, Connection<Timed>);

/// A sandbox that runs, and what its asker needs.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) sandbox: Sandbox,
    /// For one that is not detached: where and what its asker is to start.
    pub(crate) command: Option<(UnixStream, ExecRequest)>,
}

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
        config.validate()?;
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
        } else if building {
            stored.share_slots = volume_shares::SLOTS;
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
        let started = self
            .create(&entry)
            .and_then(|()| match &chosen {
                Some(chosen) => self.cloned(&entry, &chosen.id, &chosen.place, clone::HOOKS),
                None => self.machine(&entry, cancel),
            })
            .and_then(|(vm, agent)| self.start_command(&entry, &vm, agent));
        if let (Ok(_), Some(chosen)) = (&started, &chosen) {
            self.verify_later(Kind::Template, &chosen.id, &chosen.place);
        }
        let started = started.map_err(|error| error.after_undo(self.destroy(&entry)));
        drop(operation);
        Ok((entry, started?))
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
            self.template(&entry.stored())
        };
        let own = || Own::of(&entry.stored().sandbox.config);
        let mut found = look()?;
        if let Found::Ready { id, place } = &found {
            // Nothing is there yet that could have kept anything.
            match self.cloned(entry, id, place, Duration::ZERO) {
                Ok(machine) => {
                    self.template_is_good(id);
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
                        self.give_template_up(id);
                    } else if !error.is_of_files() {
                        self.blame_host_for(id);
                    }
                    self.clear(entry)?;
                    disk::remove(&self.sandbox_paths(entry).disk())?;
                    found = look()?;
                }
            }
        }
        self.make_disk(entry, None)?;
        let Found::Missing(mut lease) = found else {
            return self.boot(entry, own(), Some(cancel));
        };
        // A clone would inherit it.
        let (vm, agent) = self.boot(entry, Own::default(), Some(cancel))?;
        // As in a snapshot: a clone would deal with its end.
        let hung_up = agent
            .set_read_timeout(Some(self.config.limits.answer))
            .and_then(|()| agent.hang_up())
            .map_err(|error| vm.diagnose("its agent was to hang up", error));
        match hung_up {
            Ok(()) => self.keep_template(entry, &vm, lease)?,
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
            let renewal = Renewal {
                own,
                ..Renewal::default()
            };
            self.renew(&vm, renewal)?;
        }
        let agent = vm.agent()?;
        Ok((vm, agent))
    }

    fn cloned(&self, entry: &Arc<Entry>, template: &str, place: &Place, hooks: Duration) -> Result<Machine, Error> {
        let stored = entry.stored();
        let renewal = Renewal {
            identity: Some(identity(&stored)?),
            hooks,
            own: Own::of(&stored.sandbox.config),
            // In one that nobody has built no command has run.
            restored: !hooks.is_zero(),
        };
        let waiting = self.begin_restore(entry)?;
        self.make_disk(entry, Some(place))?;
        let (vm, mut agent) = self.restored(entry, waiting, place, renewal)?;
        agent
            .set_read_timeout(Some(self.config.limits.answer))
            .map_err(|error| vm.diagnose("its agent was to start its command", error))?;
        trace::agent(&mut agent, self.config.limits.answer, true)
            .map_err(|error| vm.diagnose("its agent was asked about its start", error))?;
        self.update(entry, |stored| stored.sandbox.template = Some(template.to_owned()))?;
        Ok((vm, agent))
    }

    /// Starts one that has exited.
    pub(crate) fn start(&self, entry: &Arc<Entry>) -> Result<Started, Error> {
        let _operation = entry.operate();
        self.start_again(entry, None)
    }

    /// The same for who has its turn already, and maybe holds what its last machine was promised.
    pub(crate) fn start_again(&self, entry: &Arc<Entry>, held: Option<Arc<Promise>>) -> Result<Started, Error> {
        let sandbox = entry.stored().sandbox;
        if sandbox.state != State::Exited {
            let next = match sandbox.state {
                State::Running => "it runs already",
                state => to_run(state),
            };
            return Err(wrong_state(&sandbox, next));
        }
        limits::check(&sandbox.config, self.cgroups.as_ref())?;
        let promise = match held {
            Some(promise) => promise,
            None => self.admit_again("start", entry, Start::Boot)?,
        };
        self.update(entry, |stored| {
            stored.sandbox.restarts += 1;
            stored.sandbox.config.detach = true;
            stored.sandbox.template = None;
        })?;
        entry.promise(promise);
        let started = self
            .boot(entry, Own::of(&sandbox.config), None)
            .and_then(|(vm, agent)| self.start_command(entry, &vm, agent));
        started.map_err(|error| {
            let exited = self
                .clear(entry)
                .and_then(|()| self.exited(entry, node_api::Ended::Failed(error.to_string())));
            error.after_undo(exited)
        })
    }

    /// Whether it gets a place in the node's network.
    pub(crate) fn wants_network(&self, config: &SandboxConfig) -> Result<bool, Error> {
        // What is wrong with them is better said before anything is made.
        parse_ports(&config.ports)?;
        match config.network {
            NetworkMode::None => Ok(false),
            NetworkMode::Auto if self.config.users.is_none() && config.ports.is_empty() => Ok(false),
            NetworkMode::Auto | NetworkMode::Node => self.network().map(|_| true),
        }
    }

    /// Its place in the network, with its ports published.
    pub(crate) fn attach(&self, stored: &Stored) -> Result<Option<Attachment>, Error> {
        if !stored.networked {
            return Ok(None);
        }
        let network = self.network()?;
        // Nothing is connected before it is restricted.
        self.restore_network()?;
        let queues = usize::from(launch::queues(&stored.sandbox.config.resources));
        let attachment = network.attach(stored.slot, queues)?;
        network.publish(stored.slot, &parse_ports(&stored.sandbox.config.ports)?)?;
        Ok(Some(attachment))
    }

    /// The same for one that has it: the device that takes the place of the one that it has keeps that one's TAP.
    pub(crate) fn attachment(&self, stored: &Stored) -> Result<Option<Attachment>, Error> {
        stored.networked.then(|| Ok(self.network()?.attachment())).transpose()
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

    /// Everything from a made sandbox to one whose machine has booted and has its root.
    fn boot(&self, entry: &Arc<Entry>, own: Own, cancel: Option<BorrowedFd<'_>>) -> Result<Machine, Error> {
        let stored = entry.stored();
        self.admit_boot(entry, &stored)?;
        let attachment = {
            let _span = span("network");
            self.attach(&stored)?
        };
        self.points.at(points::START_NETWORK);
        let guest = attachment.as_ref().map(|attachment| attachment.guest.clone());
        let (volumes, mut prepared) = {
            let _span = span("sockets and files");
            let volumes = self.open_volumes(&stored.sandbox.config.volumes)?;
            let (paths, image) = (self.sandbox_paths(entry), self.image_of(&stored)?);
            let prepared = launch::prepare(&self.config, &stored, &paths, (&image, attachment))?;
            (volumes, prepared)
        };
        self.points.at(points::START_SOCKETS);
        let (vm, pid) = self.spawn(entry, &stored, &prepared.inherited, &volumes)?;
        // Their owners are mapped into the VMM's user namespace, which is there now.
        let shared = volume_shares::share(&volumes, pid, launch::identity(&self.config, &stored))?;
        prepared.share(shared, stored.share_slots)?;
        let mut agent = vm.boot(prepared, cancel, &|point| {
            if point == points::START_CREATED {
                self.place_vcpus(entry, pid)?;
            }
            self.points.at(point);
            Ok(())
        })?;
        {
            let _span = span("guest prepared");
            vm.prepare(&mut agent, &stored, guest, own)?;
        }
        self.points.at(points::START_PREPARED);
        trace::agent(&mut agent, self.config.limits.answer, false)
            .map_err(|error| vm.diagnose("its agent was asked about its start", error))?;
        trace::vmm(&vm);
        Ok((vm, agent))
    }

    /// The last steps, whichever way its machine was made.
    fn start_command(&self, entry: &Entry, vm: &Vm, mut agent: Connection<Timed>) -> Result<Started, Error> {
        let stored = entry.stored();
        let _span = span("command and record");
        let command = if stored.sandbox.config.detach {
            let request = detached(&stored);
            agent
                .exec_detached(&request)
                .map_err(|error| vm.diagnose("its command was started", error))?;
            None
        } else {
            let stream = agent.into_stream().into_stream();
            let stream = stream.map_err(Error::host("handing the agent's connection over"))?;
            Some((stream, stored.command))
        };
        self.points.at(points::START_COMMAND);
        let sandbox = self.runs(entry, vm)?;
        Ok(Started { sandbox, command })
    }

    /// It runs: keeps that, and waits for its end from here on.
    pub(crate) fn runs(&self, entry: &Entry, vm: &Vm) -> Result<Sandbox, Error> {
        let is_new = !entry.stored().is_acknowledged();
        self.update(entry, |stored| {
            (stored.sandbox.state, stored.acknowledged) = (State::Running, true);
        })?;
        if is_new {
            let _span = span("record and disk reach the disk");
            self.store.reaches_disk(&entry.stored())?;
        }
        if let Some(promise) = entry.promised() {
            promise.runs();
        }
        self.points.at(points::START_RUNNING);
        vm.watch(&self.monitor, &entry.id)
            .map_err(Error::host("waiting for the VMM's end"))?;
        let sandbox = entry.stored().sandbox;
        self.events.tell(EventKind::Start, &sandbox);
        Ok(sandbox)
    }

    /// Starts the VMM. The database knows of it, and which directories it will have, before it has a VM.
    pub(crate) fn spawn(
        &self,
        entry: &Entry,
        stored: &Stored,
        inherited: &Inherited,
        volumes: &[Opened],
    ) -> Result<(Arc<Vm>, u32), Error> {
        let paths = self.sandbox_paths(entry);
        let cgroup = {
            let _span = span("cgroup");
            self.make_cgroup(entry, stored)?
        };
        self.points.at(points::START_CGROUP);
        let child = {
            let _span = span("VMM process");
            let child = launch::spawn(&self.config, stored, &paths, inherited, cgroup.as_deref())?;
            trace::jail(child.timing);
            child
        };
        self.points.at(points::START_SPAWNED);
        let _span = span("record and connect");
        // The VMM cannot be told from another by its number alone. If it is gone already, that is found out below.
        let number = i32::try_from(child.pid).unwrap_or(0);
        let process = process::identify(number).unwrap_or(Process { pid: number, start: 0 });
        let pid = child.pid;
        let log_from = std::fs::metadata(paths.log()).map_or(0, |metadata| metadata.len());
        let recorded = self.update(entry, |stored| {
            (stored.log_from, stored.held) = (log_from, false);
            let sandbox = &mut stored.sandbox;
            (sandbox.state, sandbox.vmm) = (State::Starting, Some(process));
            sandbox.volumes = volumes.iter().map(|volume| volume.mounted.clone()).collect();
            (sandbox.started_ns, sandbox.ended_ns, sandbox.ended) = (Some(clock::now_ns()), None, None);
            stored.stopped = false;
        });
        let connected = recorded.and_then(|()| Vm::connect(child.pidfd, &paths, self.config.limits));
        let vm = Arc::new(connected?);
        entry.lock().vm = Some(Arc::clone(&vm));
        self.points.at(points::START_RECORDED);
        Ok((vm, pid))
    }

    /// Its cgroup, with the CPUs that it is to have, and where in it its VMM begins; nothing where there are no cgroups.
    fn make_cgroup(&self, entry: &Entry, stored: &Stored) -> Result<Option<PathBuf>, Error> {
        let config = &stored.sandbox.config;
        let Some(root) = &self.cgroups else {
            return match config.resources.class {
                Class::Dedicated => Err(cpus::Error::NoCgroups.into()),
                Class::Standard | Class::Bare => Ok(None),
            };
        };
        let cgroup = root.create(&entry.id, &limits::for_cgroup(config, root))?;
        Ok(Some(cpus::cgroup_of_vmm(stored, &cgroup)?))
    }

    /// The image's file system.
    pub(crate) fn image_of(&self, stored: &Stored) -> Result<std::path::PathBuf, Error> {
        Ok(self.images.get(&stored.sandbox.digest)?.path)
    }

    /// Waits for the end of VMMs from here on.
    pub(crate) fn start_monitor(self: &Arc<Self>) -> Result<(), Error> {
        let node = Arc::clone(self);
        let work = move || {
            loop {
                match node.monitor.wait() {
                    Ok(told) => told.into_iter().for_each(|told| match told {
                        Told::Ended(id) => node.settle_in_thread(id),
                        Told::Said(id) => node.hear(&id),
                    }),
                    Err(error) => {
                        if let Some(left_out) = NOT_WAITED.due() {
                            log::error!(
                                "VMMs cannot be waited for: {error} (and {left_out} times more since this was said last)"
                            );
                        }
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

/// What a detached sandbox runs.
fn detached(stored: &Stored) -> ExecRequest {
    ExecRequest {
        tty: stored.sandbox.config.process.tty.then_some(agent_api::Tty {
            size: agent_api::WinSize { rows: 24, cols: 80 },
            term: None,
        }),
        ..stored.command.clone()
    }
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
        ended_ns: None,
        ended: None,
        vmm: None,
        volumes: Vec::new(),
        restarts: 0,
        clone_of: None,
        template: None,
        refused: None,
        owned_cpus: base::CpuSet::default(),
    };
    Ok(Stored {
        share_slots: volume_shares::slots(&sandbox.config.volumes),
        sandbox,
        generation: 0,
        acknowledged: false,
        slot: 0,
        command,
        networked,
        log_from: 0,
        stopped: false,
        held: false,
        building: false,
    })
}
