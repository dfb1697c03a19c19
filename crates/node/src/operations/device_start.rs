//! When a sandbox gets the devices that it is started with, and the memory that it does not boot with.
//!
//! ```text
//!  eager  made ─► devices given ─► all is mapped ─► started ─► shown to the guest ─► command
//!  async  made ─► started ─► devices given ─► boot memory is mapped, then more ─► shown ─► command ─► the rest is plugged as it is mapped
//!  async-balloon  as async, of which the balloon is full first; the rest leaves the balloon as it is mapped
//!  lazy   made ─► started ─► devices given, and there ─► shown ─► command; the guest maps what it wants to, as long as it runs
//!  late   made ─► started ─► devices given ─► command ─► all is mapped ─► shown
//!         restored ─► devices claimed ─► command ─► devices given ─► all is mapped ─► shown
//! ```
//! What comes behind the command is followed by a thread without the sandbox's turn: whoever ends the sandbox does not wait for it, and it
//! gives up. Memory is followed as long as the machine is there. So is what a daemon finds that another one has left on the way. `async` without a region of memory that is plugged is `late`
//! whose command waits; a machine that goes on from a template has no first instruction, so `eager` is the same there.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use base::PciAddress;
use base::points::MEMORY_ASKED;
use node_api::{DeviceStart, EventKind, Resources, SandboxConfig, State};
use observe::span::span;
use vmm_api::devices::BALLOON_PAGE;
use vmm_api::{HotplugMemory, Info, VmmClient};

use crate::error::words::with_causes;
use crate::node::Node;
use crate::operations::attach::Waits;
use crate::operations::snapshot::of_all_memory;
use crate::resources::devices::DevicesError;
use crate::resources::limits;
use crate::sandbox::entry::{Entry, Inner};
use crate::vmm::vm::Vm;
use crate::{Error, thread};

/// Between two looks how much is plugged: at first, and in the end.
const PAUSE: Duration = Duration::from_millis(20);
const LONG_PAUSE: Duration = Duration::from_secs(60);

/// A guest that has not come to its size by then may never: the log tells it once.
const LATE: Duration = Duration::from_secs(600);

impl Node {
    /// What is done with a machine that was made to boot, and does not run yet; `cancel` hangs up when nobody wants it any more.
    pub(crate) fn before_first_instruction(
        &self,
        entry: &Entry,
        vm: &Vm,
        cancel: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        let config = entry.stored().sandbox.config;
        if config.devices.is_empty() {
            return Ok(());
        }
        match config.device_start() {
            DeviceStart::Eager => {
                let claimed = self.claim_and_hand_over(entry, vm, &config.devices)?;
                let waits = Waits::InTurn(cancel);
                self.await_presence(entry, vm, &claimed, waits).map(drop)
            }
            DeviceStart::Async | DeviceStart::AsyncBalloon | DeviceStart::Late | DeviceStart::Lazy => Ok(()),
        }
    }

    /// What is done while its guest boots: a device that is opened is reset, which nobody has to wait for.
    pub(crate) fn behind_first_instruction(&self, entry: &Entry, vm: &Vm) -> Result<(), Error> {
        let config = entry.stored().sandbox.config;
        if config.devices.is_empty() || config.device_start() == DeviceStart::Eager {
            return Ok(());
        }
        self.claim_and_hand_over(entry, vm, &config.devices)?;
        match config.resources.region() {
            // A guest that boots has other things to do than to plug it.
            Some(_) => {
                let size = config.resources.plugged();
                vm.ask("its memory was to be mapped", |client| client.map_ahead(size))
            }
            None => Ok(()),
        }
    }

    /// Whether a clone claims its devices while its guest becomes a machine of its own: they are given behind its command.
    pub(crate) fn claims_beside(&self, entry: &Entry) -> bool {
        let config = entry.stored().sandbox.config;
        !config.devices.is_empty() && !waits_for_devices(&config)
    }

    /// What is done before the command of a machine whose agent answers.
    pub(crate) fn before_command(&self, entry: &Entry, vm: &Vm, cancel: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        let config = entry.stored().sandbox.config;
        let waits = waits_for_devices(&config);
        if !config.devices.is_empty() {
            let _span = span("devices");
            let mut given = self.devices.of(&entry.id);
            if given.is_empty() {
                given = match waits {
                    true => self.claim_and_hand_over(entry, vm, &config.devices)?,
                    false => self.claim_devices(entry, vm, &config.devices)?,
                };
            }
            if waits {
                self.bring(entry, vm, &given, cancel)?;
            }
        }
        if limits::plugs_before_command(&config) {
            let size = config.resources.plugged();
            vm.ask("its memory was to be plugged", |client| client.resize_memory(size))?;
        }
        match config.memory_ready {
            true => self.await_memory(entry, vm, cancel),
            false => Ok(()),
        }
    }

    /// Waits until all of its memory is there.
    fn await_memory(&self, entry: &Entry, vm: &Vm, cancel: Option<BorrowedFd<'_>>) -> Result<(), Error> {
        let _span = span("memory plugged");
        let limit = self.config.limits.boot + of_all_memory(&entry.stored());
        match self.await_plugged(entry, vm, limit, Waits::InTurn(cancel))? {
            Plugged::All => Ok(()),
            Plugged::Over if entry.lock().is_to_stop() => Err(Error::GivenUp),
            Plugged::Over => Err(Error::Cancelled),
            Plugged::Some(has) => Err(DevicesError::NotPlugged {
                plugged: has.plugged >> 20,
                target: has.target >> 20,
                limit,
            }
            .into()),
        }
    }

    /// Waits until as much is plugged as the sandbox is to have at that time, or nobody waits any more.
    pub(crate) fn await_plugged(
        &self,
        entry: &Entry,
        vm: &Vm,
        limit: Duration,
        waits: Waits<'_>,
    ) -> Result<Plugged, Error> {
        let begun = Instant::now();
        loop {
            let info = vm.ask("it was asked how much memory its guest has", VmmClient::info)?;
            let resources = entry.stored().sandbox.config.resources;
            let Some(memory) = info.hotplug_memory.or_else(|| out_of_balloon(&info, &resources)) else {
                return Ok(Plugged::All);
            };
            let all = match info.hotplug_memory {
                Some(_) => resources.plugged().bytes(),
                None => memory.target,
            };
            if memory.plugged == all {
                return Ok(Plugged::All);
            }
            if begun.elapsed() > limit {
                return Ok(Plugged::Some(memory));
            }
            let left = limit.saturating_sub(begun.elapsed());
            let is_over = |inner: &Inner| is_ending(inner) || waits.gives_up(inner);
            if waits.has_hung_up() || entry.wait(Some(pause_after(begun.elapsed()).min(left)), is_over) {
                return Ok(Plugged::Over);
            }
        }
    }

    /// What comes behind the command of a sandbox that runs now.
    pub(crate) fn follow_start(self: &Arc<Self>, entry: &Arc<Entry>) {
        let config = entry.stored().sandbox.config;
        let late = !waits_for_devices(&config);
        let coming = match late {
            true => config.devices,
            false => Vec::new(),
        };
        if !coming.is_empty() || memory_comes(&config.resources) {
            self.follow_in_thread(entry, Coming::These(coming));
        }
    }

    /// The same for one that this daemon has found running.
    pub(crate) fn follow_found(self: &Arc<Self>, entry: &Arc<Entry>) {
        let stored = entry.stored();
        if memory_comes(&stored.sandbox.config.resources)
            || !stored.detached.is_empty()
            || !self.devices.of(&entry.id).is_empty()
        {
            self.follow_in_thread(entry, Coming::WhatItsVmmHas);
        }
    }

    /// The same for one that goes on with another machine, whose devices are seen to by whoever has its turn.
    pub(crate) fn follow_size(self: &Arc<Self>, entry: &Arc<Entry>) {
        if entry.stored().sandbox.config.resources.region().is_some() {
            self.follow_in_thread(entry, Coming::These(Vec::new()));
        }
    }

    fn follow_in_thread(self: &Arc<Self>, entry: &Arc<Entry>, coming: Coming) {
        // It has ended just now.
        let Some(vm) = entry.vm() else { return };
        {
            let mut inner = entry.lock();
            (inner.not_come, inner.memory_failed) = (None, None);
            if let Coming::These(coming) = &coming {
                // Known before anybody can ask.
                inner.coming.clone_from(coming);
            }
        }
        let (node, followed) = (Arc::clone(self), Arc::clone(entry));
        let work = move || {
            let failed = node.follow(&followed, &vm, coming);
            // Of another machine other ones come.
            if entry_has(&followed, &vm) {
                followed.lock().coming.clear();
            }
            match failed {
                Err(error) if !is_over(&followed, &vm) => node.did_not_come(&followed, &error),
                _ => (),
            }
            node.follow_memory(&followed, &vm);
        };
        if let Err(error) = thread::spawn("device start", work) {
            self.did_not_come(entry, &error);
        }
    }

    pub(super) fn did_not_come(&self, entry: &Entry, error: &Error) {
        let why = with_causes(error);
        log::error!("devices of sandbox {} are not as they were to be: {why}", entry.id);
        let mut inner = entry.lock();
        inner.coming.clear();
        inner.not_come = Some(why.clone());
        let sandbox = inner.stored.sandbox.clone();
        drop(inner);
        self.events.tell_why(EventKind::DevicesFailed, &sandbox, why);
    }

    fn follow(&self, entry: &Arc<Entry>, vm: &Arc<Vm>, coming: Coming) -> Result<(), Error> {
        if let Some(_turn) = self.turn_while_it_runs(entry, vm) {
            // Whoever follows its memory tries that again.
            if let Err(error) = self.ask_for_memory(entry, vm)
                && !is_over(entry, vm)
            {
                self.memory_failed(entry, &error);
            }
            self.return_left_devices(entry);
            let config = entry.stored().sandbox.config;
            if config.device_start() == DeviceStart::Late {
                self.hand_over_behind(entry, vm, &config.devices)?;
            }
        }
        let (coming, is_news) = match coming {
            Coming::These(coming) => (coming, true),
            Coming::WhatItsVmmHas => self.give_back_what_did_not_come(entry, vm)?,
        };
        if is_news {
            entry.lock().coming.clone_from(&coming);
        }
        if !coming.is_empty() && self.bring_behind(entry, vm, &coming)? && is_news {
            self.tell_memory(EventKind::DevicesPresent, entry);
        }
        Ok(())
    }

    /// Tells that its memory is not of its size, and why, if that was not told of this machine before.
    fn memory_failed(&self, entry: &Entry, error: &Error) {
        let why = with_causes(error);
        let mut inner = entry.lock();
        let known = inner.memory_failed.replace(why.clone()).is_some();
        let sandbox = inner.stored.sandbox.clone();
        drop(inner);
        if !known {
            log::error!(
                "the memory of sandbox {} cannot be brought to its size, which is tried again: {why}",
                entry.id
            );
            self.events.tell(EventKind::MemoryFailed, &sandbox);
        }
    }

    /// Has the VMM know how much its guest is to have, as a daemon that died on the way may not have told it; what the guest has now.
    fn ask_for_memory(&self, entry: &Entry, vm: &Vm) -> Result<Option<HotplugMemory>, Error> {
        let Some(memory) = self.hotplug_memory(vm)? else {
            return Ok(None);
        };
        let size = entry.stored().sandbox.config.resources.plugged();
        if self.devices.of(&entry.id).is_empty() {
            self.let_zeroed_memory_go(entry)?;
        }
        self.limit_memory(entry)?;
        if memory.target == size.bytes() {
            return Ok(Some(memory));
        }
        vm.ask("its memory was to be of another size", |client| {
            client.resize_memory(size)
        })?;
        self.points.at(MEMORY_ASKED);
        self.hotplug_memory(vm)
    }

    fn hotplug_memory(&self, vm: &Vm) -> Result<Option<HotplugMemory>, Error> {
        let info = vm.ask("it was asked how much memory its guest has", VmmClient::info)?;
        Ok(info.hotplug_memory)
    }

    /// Brings devices while others may do with the sandbox what they like; false when it has none of them any more, or ends.
    fn bring_behind(&self, entry: &Arc<Entry>, vm: &Arc<Vm>, coming: &[PciAddress]) -> Result<bool, Error> {
        loop {
            let its = self.devices.of(&entry.id);
            let taken = entry.lock().devices_taken;
            let wanted: Vec<_> = coming.iter().copied().filter(|one| its.contains(one)).collect();
            if wanted.is_empty() || is_over(entry, vm) {
                return Ok(false);
            }
            let brought = self.await_presence(entry, vm, &wanted, Waits::Aside).and_then(|slots| {
                let _turn = self.turn_while_it_runs(entry, vm).ok_or(Error::Cancelled)?;
                self.show_to_guest(vm, &slots)
            });
            let Err(error) = brought else { return Ok(true) };
            if is_over(entry, vm) {
                return Ok(false);
            }
            let _turn = entry.operate();
            // Somebody has taken one of them meanwhile, and maybe given it again.
            if entry.lock().devices_taken != taken {
                continue;
            }
            let undone = self.take_devices_back(entry, vm, &wanted);
            return Err(error.after_undo(undone));
        }
    }

    /// Tells when all of its memory is there, and has its limits be no more than that: as long as this machine is there, and it may be.
    pub(crate) fn follow_memory(&self, entry: &Arc<Entry>, vm: &Arc<Vm>) {
        let machine = Arc::downgrade(vm);
        {
            let mut inner = entry.lock();
            let comes = memory_comes(&inner.stored.sandbox.config.resources);
            if !comes || inner.memory_followed.as_ref().is_some_and(|its| its.ptr_eq(&machine)) {
                return;
            }
            inner.memory_followed = Some(machine.clone());
        }
        if !self.follow_to_its_size(entry, vm) {
            // That of another machine goes on.
            entry.lock().memory_followed.take_if(|its| its.ptr_eq(&machine));
        }
    }

    /// Whether it has come there, and is noted as not followed any more.
    fn follow_to_its_size(&self, entry: &Arc<Entry>, vm: &Arc<Vm>) -> bool {
        let (mut since, mut told) = (Instant::now(), false);
        loop {
            let wanted = entry.stored().sandbox.config.resources.memory;
            match self.has_come_to_its_size(entry, vm) {
                Ok(Look::There) => return true,
                Ok(Look::Over) => return false,
                Ok(Look::Waits) => (),
                Err(_) if is_over(entry, vm) => return false,
                Err(error) => self.memory_failed(entry, &error),
            }
            if since.elapsed() > LATE && !told {
                told = true;
                log::warn!(
                    "the guest of sandbox {} has not come to {wanted} of memory after {LATE:?}; it may still",
                    entry.id
                );
            }
            let is_other = |inner: &Inner| inner.stored.sandbox.config.resources.memory != wanted;
            if entry.wait(Some(pause_after(since.elapsed())), |inner| {
                is_over_now(inner, vm) || is_other(inner)
            }) {
                (since, told) = (Instant::now(), false);
            }
            if is_over(entry, vm) {
                return false;
            }
        }
    }

    fn has_come_to_its_size(&self, entry: &Arc<Entry>, vm: &Arc<Vm>) -> Result<Look, Error> {
        if entry.stored().sandbox.config.resources.inflated.is_some() {
            return self.has_left_its_balloon(entry, vm);
        }
        let Some(memory) = self.hotplug_memory(vm)? else {
            return Ok(Look::Over);
        };
        let resources = entry.stored().sandbox.config.resources;
        let size = resources.plugged().bytes();
        let holds_more = resources.holding(resources.memory) != resources;
        // A piece that is mapped as a whole is unmapped as a whole, which may be long.
        let waits = match memory.plugged == size || holds_more {
            true => self.gives_back(entry, vm, memory)?,
            false => true,
        };
        if memory.target == size && waits {
            return Ok(Look::Waits);
        }
        let Some(_turn) = self.turn_while_it_runs(entry, vm) else {
            return Ok(Look::Over);
        };
        // Whoever had its turn before may have asked for another size.
        let Some(memory) = self.ask_for_memory(entry, vm)? else {
            return Ok(Look::Over);
        };
        if self.gives_back(entry, vm, memory)? {
            return Ok(Look::Waits);
        }
        self.fit_limits(entry)?;
        if memory.plugged != entry.stored().sandbox.config.resources.plugged().bytes() {
            return Ok(Look::Waits);
        }
        Ok(self.memory_is_there(entry))
    }

    /// The same of memory that leaves a balloon as it is mapped, for which nobody asks.
    fn has_left_its_balloon(&self, entry: &Entry, vm: &Vm) -> Result<Look, Error> {
        let info = vm.ask("it was asked how much memory its guest has", VmmClient::info)?;
        match out_of_balloon(&info, &entry.stored().sandbox.config.resources) {
            Some(memory) if memory.plugged < memory.target => Ok(Look::Waits),
            Some(_) => Ok(self.memory_is_there(entry)),
            None => Ok(Look::Over),
        }
    }

    fn memory_is_there(&self, entry: &Entry) -> Look {
        let mut inner = entry.lock();
        // Whoever has its turn next and asks for another size follows that.
        (inner.memory_followed, inner.memory_failed) = (None, None);
        drop(inner);
        self.tell_memory(EventKind::MemoryReady, entry);
        Look::There
    }

    /// Its turn, when its guest runs; `None` when it ends, or has another machine.
    fn turn_while_it_runs<'e>(&self, entry: &'e Arc<Entry>, vm: &Arc<Vm>) -> Option<MutexGuard<'e, ()>> {
        loop {
            let runs = |inner: &Inner| inner.stored.sandbox.state == State::Running && !inner.stored.is_held();
            entry.wait(None, |inner| is_ending(inner) || runs(inner));
            let turn = entry.operate();
            if is_over(entry, vm) {
                return None;
            }
            if runs(&entry.lock()) {
                return Some(turn);
            }
        }
    }
}

/// Whether its command waits for its devices.
fn waits_for_devices(config: &SandboxConfig) -> bool {
    config.memory_ready || config.device_start() != DeviceStart::Late
}

/// Whether some of its memory comes behind its command.
fn memory_comes(resources: &Resources) -> bool {
    resources.region().is_some() || resources.inflated.is_some()
}

/// What has left a balloon that was full before its devices came, as if it had been plugged.
fn out_of_balloon(info: &Info, resources: &Resources) -> Option<HotplugMemory> {
    let (region, balloon) = (resources.inflated?.bytes(), info.balloon?);
    let without = |bytes: u64| region.saturating_sub(bytes);
    Some(HotplugMemory {
        region,
        block: BALLOON_PAGE.bytes(),
        requested: without(balloon.target),
        plugged: without(balloon.inflated.max(balloon.target)),
        target: region,
    })
}

/// Which devices are to come.
enum Coming {
    These(Vec<PciAddress>),
    /// After a daemon that died: what the VMM was given; what it was not is given back.
    WhatItsVmmHas,
}

/// What a look at a guest's memory has shown.
enum Look {
    /// All is there, and nobody looks any more.
    There,
    Waits,
    /// There is nothing to look at, or nobody has that machine any more.
    Over,
}

/// How much of its memory a guest has.
#[derive(Debug)]
pub(crate) enum Plugged {
    All,
    /// Not all within the limit.
    Some(HotplugMemory),
    /// Nobody waits for it any more.
    Over,
}

pub(super) fn is_ending(inner: &Inner) -> bool {
    inner.stored.stopped || inner.has_ended()
}

/// It has this machine, or none.
fn entry_has(entry: &Entry, vm: &Arc<Vm>) -> bool {
    let inner = entry.lock();
    inner.vm.as_ref().is_none_or(|its| Arc::ptr_eq(its, vm))
}

/// It ends, or has another machine than this one.
fn is_over(entry: &Entry, vm: &Arc<Vm>) -> bool {
    is_over_now(&entry.lock(), vm)
}

fn is_over_now(inner: &Inner, vm: &Arc<Vm>) -> bool {
    is_ending(inner) || inner.vm.as_ref().is_none_or(|its| !Arc::ptr_eq(its, vm))
}

/// How long to wait until the next look at a guest that has been waited for so long.
fn pause_after(waited: Duration) -> Duration {
    (waited / 8).clamp(PAUSE, LONG_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_a_balloon_counts_as_plugged_when_it_is_asked_for_and_gone() {
        let mut resources = crate::testing::stored("id", "name").sandbox.config.resources;
        let info = |target: u64, inflated: u64| -> Info {
            serde_json::from_value(serde_json::json!({
                "api_version": 1, "vmm_version": "", "pid": 1, "engine": "", "state": "running", "cpus": 1, "memory": 0,
                "balloon": {"target": target, "inflated": inflated, "reported": 0, "discarded": 0},
            }))
            .unwrap()
        };
        assert_eq!(out_of_balloon(&info(0, 0), &resources), None);
        resources.inflated = Some(base::ByteSize::mib(96));
        let plugged = |target: u64, inflated: u64| {
            let told = out_of_balloon(&info(target << 20, inflated << 20), &resources).unwrap();
            (told.plugged >> 20, told.target >> 20)
        };
        assert_eq!(
            plugged(96, 0),
            (0, 96),
            "nobody has asked for it yet, and it may not even be full"
        );
        assert_eq!(plugged(32, 40), (56, 96));
        assert_eq!(plugged(0, 0), (96, 96));
    }

    #[test]
    fn the_longer_a_guest_is_waited_for_the_seldomer_it_is_looked_at_but_it_is() {
        let looks = |until: u64| {
            let (mut waited, mut looks) = (Duration::ZERO, 0);
            while waited < Duration::from_secs(until) {
                waited += pause_after(waited);
                looks += 1;
            }
            looks
        };
        assert_eq!(pause_after(Duration::ZERO), PAUSE);
        assert!((30..60).contains(&looks(8)), "{}", looks(8));
        let day = looks(86400) - looks(600);
        assert_eq!(day, (86400 - 600) / 60, "once a minute behind the first minutes");
    }
}
