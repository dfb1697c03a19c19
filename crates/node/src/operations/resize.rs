//! A sandbox's memory becomes more or less while it is there (`basalt update --memory`).
//!
//! ```text
//!  promised ─► in the record ─► cgroup ─► VMM ─► its guest plugs, or gives back ─► record, cgroup and promise no more than that
//! ```
//! What is in the record counts: a daemon that dies behind that is followed by one that asks the VMM for it (`device_start`). There are two
//! sizes: what it is to have, and what it holds (`held_memory`), which is more while its guest is to give back. Promise and cgroup go by
//! what it holds, wherever its machine goes on: nobody is killed for what a guest does not do.

use std::sync::Arc;
use std::time::Duration;

use base::ByteSize;
use base::points::{MEMORY_ASKED, MEMORY_FITTED, MEMORY_RECORDED};
use node_api::{ConfigError, Sandbox, SandboxConfig};
use vmm_api::{HotplugMemory, VmmClient};

use crate::node::Node;
use crate::operations::attach::Waits;
use crate::resources::limits;
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::vmm::vm::Vm;
use crate::{Error, thread};

/// How long whoever asks waits for the guest.
const PATIENCE: Duration = Duration::from_secs(5);

impl Node {
    /// Has a sandbox's memory be of this size; what it has of it after a moment.
    pub(crate) fn update_memory(self: &Arc<Self>, entry: &Arc<Entry>, size: ByteSize) -> Result<Sandbox, Error> {
        let vm = {
            let _operation = self.turn(entry)?;
            let sandbox = entry.stored().sandbox;
            Verb::Update.check(&sandbox)?;
            let resources = sandbox.config.resources.resized(size).map_err(ConfigError::from)?;
            let config = SandboxConfig {
                resources,
                ..sandbox.config.clone()
            };
            config.validate()?;
            limits::check(&config, self.cgroups.as_ref())?;
            match entry.vm() {
                // It has it from its next start on.
                None => {
                    let resources = config.resources.holding(size);
                    let config = SandboxConfig { resources, ..config };
                    self.update(entry, |stored| stored.sandbox.config = config)?;
                    None
                }
                Some(vm) => {
                    self.resize(entry, &vm, &sandbox.config, config)?;
                    Some(vm)
                }
            }
        };
        if let Some(vm) = vm {
            let node = Arc::clone(self);
            let followed = Arc::clone(entry);
            let machine = Arc::clone(&vm);
            thread::spawn("memory", move || node.follow_memory(&followed, &machine))?;
            self.await_plugged(entry, &vm, PATIENCE, Waits::Aside)?;
        }
        Ok(self.inspect(entry))
    }

    /// The same for who has its turn, of one with a machine.
    fn resize(&self, entry: &Entry, vm: &Vm, was: &SandboxConfig, config: SandboxConfig) -> Result<(), Error> {
        let (before, size) = (was.resources.plugged(), config.resources.plugged());
        let promise = self.admit_other("update", entry, &config, None)?;
        self.update(entry, |stored| {
            // What is given back and taken again is charged to its own cgroup.
            stored.came_zeroed.stays &= size >= before;
            stored.sandbox.config = config;
        })?;
        self.points.at(MEMORY_RECORDED);
        let limited = self.limit_memory(entry);
        let resized = limited.and_then(|()| {
            vm.ask("its memory was to be of another size", |client| {
                client.resize_memory(size)
            })
        });
        if let Err(error) = resized {
            // It may have been asked all the same: where it cannot be told otherwise, what is promised and allowed stays.
            let back = vm.ask("its memory was to be as before", |client| client.resize_memory(before));
            if back.is_err() && !vm.wait(Duration::ZERO) {
                promise.keep();
                return Err(error.after_undo(back));
            }
            let noted = self.note_change(entry, |stored| stored.sandbox.config = was.clone());
            let undone = noted.and_then(|()| self.limit_memory(entry));
            return Err(error.after_undo(undone));
        }
        self.points.at(MEMORY_ASKED);
        promise.keep();
        Ok(())
    }

    /// Lets its VMM have what its record says that it holds.
    pub(crate) fn limit_memory(&self, entry: &Entry) -> Result<(), Error> {
        let stored = entry.stored();
        if let (Some(root), Some(cgroup)) = (&self.cgroups, self.cgroup(entry)?) {
            cgroup.set_limits(root, &limits::of_machine(&stored, root))?;
        }
        Ok(())
    }

    /// Whether its guest has more plugged than it is to have, or its VMM has more mapped for devices, which is pinned.
    pub(crate) fn gives_back(&self, entry: &Entry, vm: &Vm, memory: HotplugMemory) -> Result<bool, Error> {
        let resources = entry.stored().sandbox.config.resources;
        if memory.plugged > resources.plugged().bytes() {
            return Ok(true);
        }
        if self.devices.of(&entry.id).is_empty() {
            return Ok(false);
        }
        let told = vm.ask("it was asked how much of its memory is mapped", VmmClient::functions)?;
        Ok(told.mapped > resources.holding(resources.memory).mapped().bytes())
    }

    /// For who has its turn, and knows that its guest gives back no more: it holds what it is to have. That makes it no more than it was,
    /// whatever its VMM says, which may be hostile.
    pub(crate) fn fit_limits(&self, entry: &Entry) -> Result<(), Error> {
        let resources = entry.stored().sandbox.config.resources;
        let fitting = resources.holding(resources.memory);
        if fitting != resources {
            let plugged = fitting.mapped().bytes() - fitting.boots_with().bytes();
            self.update(entry, |stored| {
                stored.sandbox.config.resources = fitting;
                stored.came_zeroed.bytes = stored.came_zeroed.bytes.min(plugged);
            })?;
            self.points.at(MEMORY_FITTED);
        }
        self.limit_memory(entry)?;
        self.admit_other("update", entry, &entry.stored().sandbox.config, None)?
            .keep();
        Ok(())
    }
}
