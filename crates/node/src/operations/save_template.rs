//! Templates that `run` makes by itself: of a sandbox for whose shape there is none, once it has its root.
//!
//! ```text
//!  lease ─► boots ─► root ─► state, memory, disk ─► goes on ─► its command
//!                                                └─► in a thread: record ─► on the disk ─► named ─► others find it
//! ```
//! That none can be saved is no failure of the sandbox. Which templates there are, and who has the lease, is known in
//! `saved/templates`; those that somebody builds are `build_template`'s affair.

use std::sync::Arc;

use node_api::DeviceStart;
use observe::span::span;

use crate::Error;
use crate::node::Node;
use crate::resources::{limits, volume_shares};
use crate::sandbox::entry::Entry;
use crate::saved::host_traits;
use crate::saved::programs::Files;
use crate::saved::snapshots::Begun;
use crate::saved::templates::record::Record;
use crate::saved::templates::{Found, Lease, TemplateContext};
use crate::store::database::Stored;
use crate::thread;
use crate::vmm::vm::Vm;

impl Node {
    /// What tells whether a template is of use now.
    pub(crate) fn template_context(&self) -> TemplateContext<'_> {
        TemplateContext {
            config: &self.config,
            hashes: &self.hashes,
            images: &self.images,
            host: host_traits::here(),
        }
    }

    /// What there is for a sandbox that is about to be made.
    pub(crate) fn template_for(&self, stored: &Stored) -> Result<Found, Error> {
        let config = &stored.sandbox.config;
        // What has a device before its first instruction is saved nowhere, and what fills a balloon as it boots has to boot.
        let eager = !config.devices.is_empty()
            && matches!(config.device_start(), DeviceStart::Eager | DeviceStart::AsyncBalloon);
        // Nor is what shares memory with its accelerator's server.
        // Of one whose memory waits for nothing some is plugged.
        let plugs_early = config.resources.region().is_some() && !limits::plugs_before_command(config);
        if config.boot
            || eager
            || config.accelerator.is_some()
            || plugs_early
            || config.resources.boots()
            || config.volumes.len() > volume_shares::SLOTS
        {
            return Ok(Found::Nothing);
        }
        let shape = self.shape_of(
            &stored.sandbox.digest,
            &config.resources,
            stored.networked,
            stored.share_slots,
        )?;
        Ok(self.templates.of_shape(shape, self.template_context()))
    }

    /// Saves a machine that has its root and runs nothing yet; it goes on. That it cannot be saved is no failure of it.
    pub(crate) fn save_template(self: &Arc<Self>, entry: &Entry, vm: &Vm, mut lease: Lease) -> Result<(), Error> {
        let stored = entry.stored();
        let _span = span("template saved");
        let name = stored.sandbox.name.clone();
        let mut give_up = |error| {
            log::warn!("no template can be made of sandbox {name}: {error}");
            lease.give_up();
        };
        let begun = match Begun::new(self.templates.directory()) {
            Ok(begun) => begun,
            Err(error) => {
                give_up(error);
                return Ok(());
            }
        };
        let line = vm.line()?;
        let saved = self.save_all(vm, &stored, &begun.place);
        let gone_on = self.go_on_after(saved.as_ref().err(), vm, line);
        if let Err(error) = saved {
            give_up(error);
            return gone_on;
        }
        if let Err(error) = gone_on {
            lease.give_up();
            return Err(error);
        }
        // The command does not wait for the rest.
        let node = Arc::clone(self);
        let work = move || {
            if let Err(error) = node.name_template(&stored, begun, &lease) {
                log::warn!("there is no template of sandbox {name}: {error}");
                lease.give_up();
            }
        };
        if let Err(error) = thread::spawn("template", work) {
            log::warn!("a template is given up: {error}");
        }
        Ok(())
    }

    /// Everything from files to a template that others find.
    fn name_template(&self, stored: &Stored, begun: Begun, lease: &Lease) -> Result<(), Error> {
        let sandbox = &stored.sandbox;
        let (files, programs) = (Files::of(&self.config), self.hashes.of(&self.config, sandbox));
        let known = programs.vmm.is_some() && programs.kernel.is_some() && programs.initramfs.is_some();
        if !known || programs != self.hashes.now(&self.config) {
            // A program was replaced meanwhile, or its VM is gone already: the next sandbox is another try.
            return Ok(());
        }
        let record = Record::of(stored, lease.shape().clone(), files, programs, None);
        if !self.templates.save(begun, &record)? {
            return Ok(());
        }
        log::info!("sandboxes like {} are cloned from now on", sandbox.name);
        self.templates.add(record)
    }
}
