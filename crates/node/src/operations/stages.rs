//! How a machine comes up, for whichever use case: stages, each of which takes the one before.
//!
//! ```text
//!  sandbox with its disk ─► ToBoot ─────────────────────────► boot ───┐
//!                           (network, sockets, cgroup, VMM)           ├─► Machine ─┬─► start_command ─┬─► Started
//!  sandbox ─► ToRestore ─► disk ─► restore ─► Restored ─► go_on ──────┘            └─► runs ──────────┘
//!             (cgroup, VMM)        (network, sockets, VM)   (resumed, re-identified)
//! ```
//! A VMM that is to restore is started first: it confines itself, and makes its VM, while the rest is made beside it. What a stage made is
//! the sandbox's, and found by its id: whoever fails between two of them takes it back by [`Node::undo`], as the next daemon does.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use agent_api::{Connection, Environment, ExecRequest, GuestNetwork};
use base::points;
use node_api::sandbox::Process;
use node_api::{Class, EventKind, Paging, Sandbox, State};
use observe::span::{now_ns, past, span};
use vmm_api::VmmClient;

use crate::deadline_stream::Timed;
use crate::guest::reidentify::{Own, Reidentification};
use crate::node::Node;
use crate::operations::snapshot::of_all_memory;
use crate::resources::cpus;
use crate::resources::limits;
use crate::resources::space;
use crate::resources::volume_shares::{self, Opened};
use crate::sandbox::entry::Entry;
use crate::saved::memory_files;
use crate::saved::prefetch;
use crate::saved::snapshots::Place;
use crate::store::database::{CameZeroed, Stored};
use crate::store::operation::Operation;
use crate::telemetry::trace;
use crate::vmm::accelerator::{Restoring, Window};
use crate::vmm::launch::{self, Inherited, Prepared};
use crate::vmm::process;
use crate::vmm::vm::Vm;
use crate::{Error, clock, thread};

/// A VMM that waits for a VM, in the sandbox's record.
struct Launched {
    vm: Arc<Vm>,
    pid: u32,
    /// In which it is.
    cgroup: Option<PathBuf>,
    /// What it will have of the host's directories.
    volumes: Vec<Opened>,
}

/// A VMM with everything that a VM boots with.
pub(crate) struct ToBoot {
    launched: Launched,
    prepared: Prepared,
    /// What the agent is told of the network.
    guest: Option<GuestNetwork>,
    /// It is saved before anything runs in it.
    for_template: bool,
}

/// A VMM that waits for a saved VM.
pub(crate) struct ToRestore(Launched);

/// A VM as it was saved, standing still.
pub(crate) struct Restored {
    vm: Arc<Vm>,
    reidentification: Reidentification,
    /// Its accelerator's server.
    accelerator: Option<Restoring>,
}

/// A VM that goes on, with its root, and a connection to its agent.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) vm: Arc<Vm>,
    pub(crate) agent: Connection<Timed>,
}

/// A sandbox that runs, and what its asker needs.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) sandbox: Sandbox,
    /// For one that is not detached: where and what its asker is to start.
    pub(crate) command: Option<(UnixStream, ExecRequest)>,
}

impl ToBoot {
    /// Of a sandbox that has its disk.
    pub(crate) fn launch(node: &Node, entry: &Entry) -> Result<Self, Error> {
        let stored = entry.stored();
        node.admit_boot(entry, &stored)?;
        let attachment = {
            let _span = span("network");
            node.attach(&stored)?
        };
        node.points.at(points::START_NETWORK);
        let guest = attachment.as_ref().map(|attachment| attachment.guest.clone());
        let window = Window::of(&stored)?;
        let (volumes, mut prepared) = {
            let _span = span("sockets and files");
            let volumes = volume_shares::open_all(&stored.sandbox.config, &node.volumes, &node.sandboxes)?;
            let (paths, image) = (node.sandbox_paths(entry), node.image_of(&stored)?);
            let for_machine = window.as_ref().map(Window::file).transpose()?;
            let outside = node.outside(&image, attachment, for_machine);
            let prepared = launch::prepare(&node.config, &stored, &paths, outside)?;
            (volumes, prepared)
        };
        node.points.at(points::START_SOCKETS);
        let launched = Launched::spawn(node, entry, &stored, &prepared.inherited, volumes)?;
        if let Some(window) = window {
            launched.serve_accelerator(node, entry, (&window, None))?;
        }
        // Their owners are mapped into the VMM's user namespace, which is there now.
        let shared = volume_shares::share(&launched.volumes, launched.pid, launch::identity(&node.config, &stored))?;
        prepared.share(shared, stored.share_slots)?;
        Ok(Self {
            launched,
            prepared,
            guest,
            for_template: false,
        })
    }

    /// The same, to be saved when it has its root: what it is to have of the host's comes after that.
    pub(crate) fn for_template(self) -> Self {
        Self {
            for_template: true,
            ..self
        }
    }

    /// Boots it until it has its root; `cancel` hangs up when nobody wants it any more.
    pub(crate) fn boot(
        self,
        node: &Node,
        entry: &Entry,
        own: Own,
        cancel: Option<BorrowedFd<'_>>,
    ) -> Result<Machine, Error> {
        let Self {
            launched: Launched { vm, pid, .. },
            prepared,
            guest,
            for_template,
        } = self;
        let mut agent = vm.boot(prepared, cancel, &|point| {
            if point == points::START_CREATED {
                place_vcpus(node, entry, pid)?;
            }
            node.points.at(point);
            match point {
                points::START_CREATED => node.before_first_instruction(entry, &vm, cancel),
                points::START_STARTED if !for_template => node.behind_first_instruction(entry, &vm),
                _ => Ok(()),
            }
        })?;
        {
            let _span = span("guest prepared");
            vm.prepare(&mut agent, &entry.stored(), guest, own)?;
        }
        node.points.at(points::START_PREPARED);
        trace::agent(&mut agent, node.config.limits.answer, false)
            .map_err(|error| vm.diagnose("its agent was asked about its start", error))?;
        trace::vmm(&vm);
        Ok(Machine { vm, agent })
    }
}

impl ToRestore {
    /// Of a sandbox whose disk, and everything else that it needs, is made afterwards; what is saved at `place` is read meanwhile.
    pub(crate) fn launch(node: &Node, entry: &Entry, place: &Place) -> Result<Self, Error> {
        let stored = entry.stored();
        let (volumes, inherited) = {
            let _span = span("volumes and control socket");
            let volumes = volume_shares::open_all(&stored.sandbox.config, &node.volumes, &node.sandboxes)?;
            let inherited = Inherited::to_restore(&node.config, &stored, &node.sandbox_paths(entry), place)?;
            (volumes, inherited)
        };
        // With this copy of its control socket open, a VMM that has died already would be waited for.
        let launched = Launched::spawn(node, entry, &stored, &inherited, volumes);
        drop(inherited);
        launched.map(Self)
    }

    /// Has it make the VM that is saved at `place`; the disk is there.
    pub(crate) fn restore(
        self,
        node: &Node,
        entry: &Entry,
        place: &Place,
        reidentification: Reidentification,
    ) -> Result<Restored, Error> {
        let launched = self.0;
        let stored = entry.stored();
        let window = Window::of(&stored)?;
        let attachment = {
            let _span = span("network");
            node.attach(&stored)?
        };
        node.points.at(points::START_NETWORK);
        let mut restoring = {
            let _span = span("sockets and files");
            let (paths, image) = (node.sandbox_paths(entry), node.image_of(&stored)?);
            let for_machine = window.as_ref().map(Window::file).transpose()?;
            let outside = node.outside(&image, attachment, for_machine);
            let restoring = launch::prepare_restore(&node.config, &stored, &paths, outside, place)?;
            restoring.told_if(reidentification.restored)
        };
        node.points.at(points::START_SOCKETS);
        let accelerator = match &window {
            Some(window) => {
                let path = place.accelerator();
                let saved = File::open(&path).map_err(Error::file("open", &path))?;
                launched.serve_accelerator(node, entry, (window, Some(saved)))?
            }
            None => None,
        };
        let Launched { vm, pid, volumes, .. } = launched;
        // As where it boots.
        let shared = volume_shares::share(&volumes, pid, launch::identity(&node.config, &stored))
            .map_err(|error| vm.or_died("it was given its volumes", error))?;
        restoring.share(shared, stored.share_slots)?;
        {
            let _span = span("VM restored");
            let limit = match stored.sandbox.config.paging {
                Paging::Mapped | Paging::OnDemand => node.config.limits.boot,
                Paging::Eager => node.config.limits.boot + of_all_memory(&stored),
            };
            vm.restore(restoring, limit)?;
        }
        place_vcpus(node, entry, pid)?;
        node.points.at(points::RESTORE_MADE);
        Ok(Restored {
            vm,
            reidentification,
            accelerator,
        })
    }
}

impl Restored {
    /// Waits until its accelerator, if it has one, has what was saved: whoever could not go back to that any more begins here.
    pub(crate) fn has_accelerator(&mut self, node: &Node, entry: &Entry) -> Result<(), Error> {
        let of_sandbox = entry.stored().sandbox.config.accelerator;
        let Some((restoring, accelerator)) = self.accelerator.take().zip(of_sandbox) else {
            return Ok(());
        };
        let _span = span("accelerator's state");
        restoring.wait(node.config.limits.boot + space::time_for(accelerator.most_saved()))
    }

    /// Lets it go on, as a machine of its own if it is to be one.
    pub(crate) fn go_on(self, node: &Node, entry: &Entry, place: &Place) -> Result<Machine, Error> {
        self.go_on_beside(node, entry, place, None::<fn(&Vm) -> Result<(), Error>>)
    }

    /// The same; something else is done while its guest becomes a machine of its own.
    pub(crate) fn go_on_beside(
        self,
        node: &Node,
        entry: &Entry,
        place: &Place,
        work: Option<impl FnOnce(&Vm) -> Result<(), Error> + Send>,
    ) -> Result<Machine, Error> {
        let mut restored = self;
        // Before the guest goes on: its programs wait for a server no longer than their time says.
        restored.has_accelerator(node, entry)?;
        let Self {
            vm,
            mut reidentification,
            ..
        } = restored;
        reidentification.environment = told_environment(&entry.stored());
        {
            let _span = span("VM started");
            vm.ask("it was resumed from a snapshot", VmmClient::resume)?;
        }
        node.points.at(points::RESTORE_RESUMED);
        let reidentify = || {
            let _span = span("guest re-identified");
            node.reidentify(&vm, reidentification)
        };
        let agent = match work {
            None => reidentify()?,
            Some(work) => {
                let timed = || {
                    let begun = now_ns();
                    work(&vm).map(|()| (begun, now_ns()))
                };
                let (agent, done) = thread::beside("devices", timed, reidentify);
                let agent = agent?;
                let (begun, ended) = done?;
                past(trace::SERVICE, "devices claimed", begun, ended);
                agent
            }
        };
        node.points.at(points::RESTORE_REIDENTIFIED);
        prefetch::save_first(place, entry.stored().sandbox.config.paging, |question| {
            vm.ask("it was asked what pages it has needed", question)
        });
        // The next snapshot of it needs to have only what it changes.
        if let Err(error) = memory_files::share(place.directory(), &node.sandbox_paths(entry).directory) {
            log::warn!("the next snapshot of sandbox {} will be a whole one: {error}", entry.id);
        }
        trace::vmm(&vm);
        Ok(Machine { vm, agent })
    }
}

impl Machine {
    /// Starts the sandbox's command if it has one, or hands the agent to whoever is to start it; from here on it runs.
    pub(crate) fn start_command(self, node: &Node, entry: &Entry) -> Result<Started, Error> {
        let Self { vm, mut agent } = self;
        let stored = entry.stored();
        let _span = span("command and record");
        let command = if stored.sandbox.config.detach {
            tell_environment(&stored, &vm, &mut agent)?;
            if stored.has_command() {
                let request = detached(&stored);
                agent
                    .exec_detached(&request)
                    .map_err(|error| vm.diagnose("its command was started", error))?;
            }
            None
        } else {
            let stream = agent.into_stream().into_stream();
            let stream = stream.map_err(Error::host("handing the agent's connection over"))?;
            Some((stream, stored.command))
        };
        node.points.at(points::START_COMMAND);
        let sandbox = node.runs(entry, &vm)?;
        Ok(Started { sandbox, command })
    }

    /// Its commands run already.
    pub(crate) fn runs(mut self, node: &Node, entry: &Entry) -> Result<Started, Error> {
        tell_environment(&entry.stored(), &self.vm, &mut self.agent)?;
        let sandbox = node.runs(entry, &self.vm)?;
        Ok(Started { sandbox, command: None })
    }
}

impl Launched {
    /// Starts the VMM. The database knows of it, and which directories it will have, before it has a VM.
    fn spawn(
        node: &Node,
        entry: &Entry,
        stored: &Stored,
        inherited: &Inherited,
        volumes: Vec<Opened>,
    ) -> Result<Self, Error> {
        let paths = node.sandbox_paths(entry);
        let cgroup = {
            let _span = span("cgroup");
            make_cgroup(node, entry, stored)?
        };
        node.points.at(points::START_CGROUP);
        let child = {
            let _span = span("VMM process");
            let child = node
                .launcher
                .launch(&node.config, stored, &paths, inherited, cgroup.as_deref())?;
            trace::jail(child.timing);
            child
        };
        node.points.at(points::START_SPAWNED);
        let _span = span("record and connect");
        // The VMM cannot be told from another by its number alone. If it is gone already, that is found out below.
        let number = i32::try_from(child.pid).unwrap_or(0);
        let process = process::identify(number).unwrap_or(Process { pid: number, start: 0 });
        let pid = child.pid;
        let log_from = std::fs::metadata(paths.log()).map_or(0, |metadata| metadata.len());
        let recorded = node.update(entry, |stored| {
            (stored.log_from, stored.stopped) = (log_from, false);
            stored.came_zeroed = CameZeroed::default();
            let sandbox = &mut stored.sandbox;
            (sandbox.state, sandbox.vmm) = (State::Starting, Some(process));
            sandbox.volumes = volumes.iter().map(|volume| volume.mounted.clone()).collect();
            (sandbox.started_ns, sandbox.ended_ns, sandbox.ended) = (Some(clock::now_ns()), None, None);
        });
        let connected = recorded.and_then(|()| Vm::connect(child.pidfd, &paths, node.config.limits));
        let vm = Arc::new(connected?);
        entry.lock().vm = Some(Arc::clone(&vm));
        node.points.at(points::START_RECORDED);
        Ok(Self {
            vm,
            pid,
            cgroup,
            volumes,
        })
    }

    /// Starts the server of its accelerator. The database knows of it before the machine has it.
    fn serve_accelerator(
        &self,
        node: &Node,
        entry: &Entry,
        window: (&Window, Option<File>),
    ) -> Result<Option<Restoring>, Error> {
        let _span = span("accelerator's server");
        let (stored, paths) = (entry.stored(), node.sandbox_paths(entry));
        let identity = launch::identity(&node.config, &stored);
        node.accelerators.admit(&stored, &paths, identity)?;
        let launched =
            node.launcher
                .launch_accelerator(&node.config, &stored, &paths, window, self.cgroup.as_deref())?;
        let number = i32::try_from(launched.child.pid).unwrap_or(0);
        // One that has gone meanwhile is told from others by this.
        let known = process::identify(number).unwrap_or(Process { pid: number, start: 0 });
        node.update(entry, |stored| {
            (stored.sandbox.accelerator, stored.sandbox.accelerator_ended) = (Some(known), None);
        })?;
        node.watch_accelerator(entry, launched.child.pidfd.as_fd())?;
        launched.tell_known()
    }
}

/// Its cgroup, with the CPUs that it is to have, and where in it its VMM begins; nothing where there are no cgroups.
fn make_cgroup(node: &Node, entry: &Entry, stored: &Stored) -> Result<Option<PathBuf>, Error> {
    let config = &stored.sandbox.config;
    let Some(root) = &node.cgroups else {
        return match config.resources.class {
            Class::Dedicated => Err(cpus::Error::NoCgroups.into()),
            Class::Standard | Class::Bare => Ok(None),
        };
    };
    let cgroup = root.create(&entry.id, &limits::for_cgroup(config, root))?;
    Ok(Some(node.cpus.cgroup_of_vmm(stored, &cgroup)?))
}

/// Takes the threads of its vCPUs to their CPUs, if it has some of its own.
fn place_vcpus(node: &Node, entry: &Entry, pid: u32) -> Result<(), Error> {
    let stored = entry.stored();
    if stored.sandbox.config.resources.class != Class::Dedicated {
        return Ok(());
    }
    let cgroup = node.cgroup(entry)?.ok_or(cpus::Error::NoCgroups)?;
    let placed = node.cpus.place_vcpus(&stored, &cgroup, pid, node.config.limits.answer);
    Ok(placed?)
}

impl Node {
    /// It runs: keeps that, and waits for its end from here on.
    fn runs(&self, entry: &Entry, vm: &Vm) -> Result<Sandbox, Error> {
        let before = entry.stored();
        let is_new = !before.is_acknowledged();
        if is_new {
            let _span = span("disk reaches the disk");
            self.store.disk_reaches_disk(&before)?;
        }
        let begins = matches!(before.under_way(), Some(Operation::Start | Operation::Resume { .. }));
        self.update(entry, |stored| {
            stored.rests_as(State::Running);
            stored.acknowledged = true;
            if begins || stored.sandbox.ends_ns.is_none() {
                stored.begins_time(clock::now_ns());
            }
        })?;
        self.time_limits.tell();
        let running = self.runs_watched(entry, vm, is_new);
        // Nobody is told that it runs: it is taken back as any that failed before.
        running.map_err(|error| {
            let noted = self.note_change(entry, |stored| {
                (stored.operation, stored.acknowledged) = (before.operation.clone(), before.acknowledged);
            });
            error.after_undo(noted)
        })
    }

    /// The rest, of one whose record says so.
    fn runs_watched(&self, entry: &Entry, vm: &Vm, is_new: bool) -> Result<Sandbox, Error> {
        if is_new {
            let _span = span("record reaches the disk");
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
}

/// Where there is no command of its own that would have it, programs are told the sandbox's environment that ask for it.
fn told_environment(stored: &Stored) -> Option<Environment> {
    (!stored.has_command()).then(|| Environment(stored.command.env.clone()))
}

/// The same of a machine that has booted, or whose agent is too old to be told it before its programs go on.
fn tell_environment(stored: &Stored, vm: &Vm, agent: &mut Connection<Timed>) -> Result<(), Error> {
    let Some(environment) = told_environment(stored) else {
        return Ok(());
    };
    let told = agent.tell_environment(&environment.0);
    told.map_err(|error| vm.diagnose("its programs were told their environment", error))
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
