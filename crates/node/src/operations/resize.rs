//! A sandbox's memory becomes more or less while it is there (`basalt update --memory`).
//!
//! ```text
//!  promised ─► in the record ─► cgroup ─► VMM ─► its guest plugs, or gives back ─► promise and cgroup no more than that
//! ```
//! What is in the record counts: a daemon that dies behind that is followed by one that asks the VMM for it (`device_start`). Of memory that a
//! guest is to give back the host's limit and what it is promised stay as they were until it has: nobody is killed for what a guest
//! does not do.

use std::sync::Arc;
use std::time::Duration;

use base::ByteSize;
use base::points::{MEMORY_ASKED, MEMORY_RECORDED};
use node_api::{ConfigError, Sandbox, SandboxConfig};
use vmm_api::VmmClient;

use crate::node::Node;
use crate::operations::admission::comes_by;
use crate::resources::budget::{Changed, Wish};
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
            let follow = move || {
                if let Err(error) = node.follow_memory(&followed, &machine) {
                    log::warn!(
                        "the memory of sandbox {} is not followed any more: {error}",
                        followed.id
                    );
                }
            };
            thread::spawn("memory", follow)?;
            self.await_plugged(entry, &vm, PATIENCE, &|| false)?;
        }
        Ok(self.inspect(entry))
    }

    /// The same for who has its turn, of one with a machine.
    fn resize(&self, entry: &Entry, vm: &Vm, was: &SandboxConfig, config: SandboxConfig) -> Result<(), Error> {
        let (before, size) = (was.resources.plugged(), config.resources.plugged());
        let most = before.max(size);
        // A guest that gives back still, from a size before, is promised more than both, and has its limits.
        let gives_back = self.gives_back(entry, vm, most)?;
        let promise = match gives_back {
            true => None,
            false => {
                let promise = self.admit_again("update", entry, comes_by(&entry.stored()))?;
                let wish = Wish::new("update", Some(&entry.stored().sandbox.name));
                Some(Changed::new(promise, &wish, &holding(&config, most), None)?)
            }
        };
        self.update(entry, |stored| stored.sandbox.config = config.clone())?;
        self.points.at(MEMORY_RECORDED);
        let limited = match gives_back {
            true => Ok(()),
            false => self.limit_memory(entry, &config, most),
        };
        let resized = limited.and_then(|()| {
            vm.ask("its memory was to be of another size", |client| {
                client.resize_memory(size)
            })
        });
        if let Err(error) = resized {
            // It may have been asked all the same: where it cannot be told otherwise, what is promised and allowed stays.
            let back = vm.ask("its memory was to be as before", |client| client.resize_memory(before));
            if back.is_err() && !vm.wait(Duration::ZERO) {
                if let Some(promise) = promise {
                    promise.keep();
                }
                return Err(error.after_undo(back));
            }
            let noted = self.note_change(entry, |stored| stored.sandbox.config = was.clone());
            let undone = noted.and_then(|()| match gives_back {
                true => Ok(()),
                false => self.limit_memory(entry, was, before),
            });
            return Err(error.after_undo(undone));
        }
        self.points.at(MEMORY_ASKED);
        if let Some(promise) = promise {
            promise.keep();
        }
        Ok(())
    }

    /// Bytes that its guest has plugged.
    pub(crate) fn plugged(&self, vm: &Vm) -> Result<u64, Error> {
        let info = vm.ask("it was asked how much memory its guest has", VmmClient::info)?;
        Ok(info.hotplug_memory.map_or(0, |memory| memory.plugged))
    }

    /// Lets its VMM have what it needs where so much is plugged.
    pub(crate) fn limit_memory(&self, entry: &Entry, config: &SandboxConfig, plugged: ByteSize) -> Result<(), Error> {
        let config = holding(config, plugged);
        if let (Some(root), Some(cgroup)) = (&self.cgroups, self.cgroup(entry)?) {
            cgroup.set_limits(root, &limits::for_cgroup(&config, root))?;
        }
        Ok(())
    }

    /// Whether its guest has more plugged than this, or its VMM has more mapped for devices, which is pinned.
    pub(crate) fn gives_back(&self, entry: &Entry, vm: &Vm, plugged: ByteSize) -> Result<bool, Error> {
        if self.plugged(vm)? > plugged.bytes() {
            return Ok(true);
        }
        if self.devices.of(&entry.id).is_empty() {
            return Ok(false);
        }
        let told = vm.ask("it was asked how much of its memory is mapped", VmmClient::functions)?;
        Ok(told.mapped
            > holding(&entry.stored().sandbox.config, plugged)
                .resources
                .mapped()
                .bytes())
    }

    /// For who has its turn: what it is promised, and may have, is what its record says, unless its guest gives back still. What a VMM says
    /// makes neither more: it may be hostile.
    pub(crate) fn fit_limits(&self, entry: &Entry, vm: &Vm) -> Result<(), Error> {
        let stored = entry.stored();
        let config = &stored.sandbox.config;
        let plugged = config.resources.plugged();
        if self.gives_back(entry, vm, plugged)? {
            return Ok(());
        }
        self.limit_memory(entry, config, plugged)?;
        let promise = self.admit_again("update", entry, comes_by(&stored))?;
        let wish = Wish::new("update", Some(&stored.sandbox.name));
        Changed::new(promise, &wish, config, None)?.keep();
        Ok(())
    }
}

/// What a machine of this configuration has where so much is plugged.
fn holding(config: &SandboxConfig, plugged: ByteSize) -> SandboxConfig {
    let mut holding = config.clone();
    holding.resources.memory = ByteSize(config.resources.boots_with().bytes().saturating_add(plugged.bytes()));
    holding
}
