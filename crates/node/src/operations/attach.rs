//! Devices of the host's that come to a sandbox that runs, and leave it.
//!
//! ```text
//!  claim ─► VMM: memory is mapped beside the guest ─► on the guest's bus ─► its Linux looks for it
//!  its Linux lets go of it ─► VMM: off the bus, closed ─► given back, and reset
//! ```
//! Where an attach fails, what had come is taken away again. A daemon that dies on the way is followed by one that takes back what the VMM
//! does not have ([`Node::give_back_what_did_not_come`]). Opens VFIO's files; what is in them is the VMM's.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use agent_api::{PciDevice, PciRequest};
use base::points::{DEVICE_ATTACHED, DEVICE_DETACHED};
use base::{ByteSize, PciAddress};
use node_api::{Class, GuestDevice};
use observe::span::span;
use vmm_api::{DeviceSpec, FunctionState, VmmClient};

use crate::Error;
use crate::node::Node;
use crate::operations::device_start::is_ending;
use crate::operations::snapshot::of_all_memory;
use crate::resources::budget::Changed;
use crate::resources::devices::{DevicesError, FunctionFiles};
use crate::sandbox::entry::{Entry, Inner};
use crate::sandbox::lifecycle::Verb;
use crate::store::database::Stored;
use crate::vmm::process::readable;
use crate::vmm::vm::Vm;

/// Between two looks how far memory is mapped.
const PAUSE: Duration = Duration::from_millis(10);

/// How long the guest's driver may take to name a disk or an interface.
const NAME_MS: u32 = 3000;

/// What is locked of a VMM besides its guest's memory, in bytes: rings of disks.
const BESIDES: u64 = 64 << 20;

/// Whether a guest has let go of devices that are taken from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LetGo {
    All,
    /// It may have them still, or not have been told of them.
    Unknown,
}

/// Who waits for memory to be mapped for devices of a sandbox, or to be plugged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Waits<'f> {
    /// Whoever has its turn, which whoever stops it does not wait for; until its asker hangs up, where that can be told.
    InTurn(Option<BorrowedFd<'f>>),
    /// Who has not, and keeps nobody waiting.
    Aside,
}

impl Waits<'_> {
    /// Its asker is gone.
    pub(crate) fn has_hung_up(self) -> bool {
        match self {
            Self::InTurn(asker) => asker.is_some_and(|asker| readable(asker, Duration::ZERO)),
            Self::Aside => false,
        }
    }

    pub(crate) fn gives_up(self, inner: &Inner) -> bool {
        matches!(self, Self::InTurn(_)) && inner.is_to_stop()
    }
}

impl Node {
    /// Gives devices to a sandbox that runs, all of them or none; where its guest has them.
    pub(crate) fn attach_devices(
        &self,
        entry: &Arc<Entry>,
        addresses: &[PciAddress],
    ) -> Result<Vec<GuestDevice>, Error> {
        let detached = entry.stored().detached;
        let _operation = self.turn(entry)?;
        let vm = entry.vm_for(Verb::Attach)?;
        // Its turn has brought back what was detached for an operation that had not come to rest, and may have been asked for by whoever was told so.
        let has = self.devices.of(&entry.id);
        let came_back = |address: &PciAddress| detached.contains(address) && has.contains(address);
        let (back, wanted): (Vec<_>, Vec<_>) = addresses.iter().copied().partition(came_back);
        let mut given = match back.is_empty() {
            true => Vec::new(),
            false => self.show_to_guest(&vm, &self.await_presence(entry, &vm, &back, Waits::InTurn(None))?)?,
        };
        given.extend(self.give_devices(entry, &vm, &wanted, None)?);
        Ok(given)
    }

    /// The same for who has its turn, and its machine; `cancel` hangs up when nobody wants it any more.
    pub(crate) fn give_devices(
        &self,
        entry: &Entry,
        vm: &Vm,
        addresses: &[PciAddress],
        cancel: Option<BorrowedFd<'_>>,
    ) -> Result<Vec<GuestDevice>, Error> {
        if addresses.is_empty() {
            return Ok(Vec::new());
        }
        let _span = span("devices");
        let claimed = self.claim_and_hand_over(entry, vm, addresses)?;
        self.bring(entry, vm, &claimed, cancel)
    }

    /// Claims devices, and has its VMM take them over and map memory for them.
    pub(crate) fn claim_and_hand_over(
        &self,
        entry: &Entry,
        vm: &Vm,
        addresses: &[PciAddress],
    ) -> Result<Vec<PciAddress>, Error> {
        let claimed = self.claim_devices(entry, vm, addresses)?;
        self.hand_over_claimed(entry, vm, &claimed)?;
        Ok(claimed)
    }

    /// Claims devices for a machine whose VMM is to take them over, with what is admitted and recorded for that.
    pub(crate) fn claim_devices(
        &self,
        entry: &Entry,
        vm: &Vm,
        addresses: &[PciAddress],
    ) -> Result<Vec<PciAddress>, Error> {
        let stored = entry.stored();
        can_have_devices(&stored)?;
        let before = self.devices.of(&entry.id);
        if let Some(&address) = addresses.iter().find(|address| before.contains(address)) {
            let sandbox = stored.sandbox.name;
            return Err(DevicesError::HasAlready { address, sandbox }.into());
        }
        let private = self.admit_private(entry)?;
        let claimed = self.devices.claim(&entry.id, addresses)?.functions;
        match self.becomes_private(entry, private) {
            Ok(()) => Ok(claimed),
            Err(error) => Err(error.after_undo(self.take_devices_back(entry, vm, &claimed))),
        }
    }

    /// Has its VMM take over what was claimed for it, or takes that back.
    fn hand_over_claimed(&self, entry: &Entry, vm: &Vm, claimed: &[PciAddress]) -> Result<(), Error> {
        let handed = self.hand_over(entry, vm, claimed);
        handed.map_err(|error| error.after_undo(self.take_devices_back(entry, vm, claimed)))
    }

    /// The same for those of `wanted` that are the sandbox's, and that its VMM does not have: opening a device resets it, which the command of a
    /// late start does not wait for.
    pub(crate) fn hand_over_behind(&self, entry: &Entry, vm: &Vm, wanted: &[PciAddress]) -> Result<(), Error> {
        let its = self.devices.of(&entry.id);
        let mut lacking: Vec<_> = wanted.iter().copied().filter(|address| its.contains(address)).collect();
        if lacking.is_empty() {
            return Ok(());
        }
        let told = vm.ask("it was asked for its devices", VmmClient::functions)?;
        lacking.retain(|address| told.functions.iter().all(|function| function.id != address.to_string()));
        match lacking.is_empty() {
            true => Ok(()),
            false => self.hand_over_claimed(entry, vm, &lacking),
        }
    }

    /// The record says so before the first page is copied: nobody finds out later which were.
    fn becomes_private(&self, entry: &Entry, private: Option<Changed>) -> Result<(), Error> {
        let Some(private) = private else { return Ok(()) };
        self.update(entry, |stored| stored.memory_is_private = true)?;
        private.keep();
        Ok(())
    }

    /// Waits until the guest's bus has what its VMM was given, and shows it to the guest. What does not come is taken back.
    pub(crate) fn bring(
        &self,
        entry: &Entry,
        vm: &Vm,
        claimed: &[PciAddress],
        cancel: Option<BorrowedFd<'_>>,
    ) -> Result<Vec<GuestDevice>, Error> {
        let given = self
            .await_presence(entry, vm, claimed, Waits::InTurn(cancel))
            .and_then(|slots| self.show_to_guest(vm, &slots));
        given.map_err(|error| error.after_undo(self.take_devices_back(entry, vm, claimed)))
    }

    /// Takes back what its guest may have.
    pub(crate) fn take_devices_back(&self, entry: &Entry, vm: &Vm, claimed: &[PciAddress]) -> Result<(), Error> {
        self.take_devices(entry, vm, claimed, LetGo::Unknown)
    }

    /// Lets its VMM lock all memory that its guest may ever have: what it has is limited by its cgroup.
    fn let_lock(&self, stored: &Stored) -> Result<(), Error> {
        let process = stored.sandbox.vmm;
        // All memory of a bare one is locked anyhow.
        let Some(process) = process.filter(|_| stored.sandbox.config.resources.class != Class::Bare) else {
            return Ok(());
        };
        let resources = &stored.sandbox.config.resources;
        let region = resources.region().unwrap_or(ByteSize(0)).bytes();
        // Each of several address spaces counts what is mapped there.
        let spaces = match resources.guest_iommu {
            true => self.devices.of(&stored.sandbox.id).len().max(1) as u64,
            false => 1,
        };
        let bytes = resources
            .boots_with()
            .bytes()
            .saturating_add(region)
            .saturating_mul(spaces)
            .saturating_add(BESIDES);
        let allowed = self.devices.vfio().allow_locking(process.pid, bytes);
        allowed.map_err(Error::host("letting the VMM lock its guest's memory"))
    }

    /// Has the VMM take them over, which maps the guest's memory for the first.
    pub(super) fn hand_over(&self, entry: &Entry, vm: &Vm, claimed: &[PciAddress]) -> Result<(), Error> {
        let stored = entry.stored();
        let host = self.devices.vfio();
        let of_vfio = |error| Error::from(DevicesError::Vfio(error));
        self.let_lock(&stored)?;
        // What it has is not what it was promised, where an earlier attempt was not taken back.
        let told = vm.ask("it was asked for its devices", VmmClient::functions)?;
        self.give_zeroed_memory(entry, vm, &told)?;
        let has = told.functions.iter().filter_map(|function| function.id.parse().ok());
        let mut files = FunctionFiles::of_vm(&told)
            .behind_iommu(stored.sandbox.config.resources.guest_iommu)
            .filled_at(self.config.zeroing.rate);
        for address in has {
            files.groups.extend(self.devices.group(address)?);
        }
        let limit = self.config.limits.answer + of_all_memory(&stored);
        for &address in claimed {
            let place = self.devices.place(address)?;
            let (config, fds) = files.open(host, place).map_err(of_vfio)?;
            let device = DeviceSpec::new(&config.name, &config)
                .map_err(|error| Error::host("writing a device's configuration")(std::io::Error::other(error)))?;
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            // An address space that has memory mapped maps it for a group behind another IOMMU as well.
            vm.ask_within(limit, "it was given a device", |client| client.attach(device, &fds))?;
        }
        Ok(())
    }

    /// Waits until they are on the guest's bus; the device number of each.
    pub(crate) fn await_presence(
        &self,
        entry: &Entry,
        vm: &Vm,
        claimed: &[PciAddress],
        waits: Waits<'_>,
    ) -> Result<Vec<(PciAddress, u8)>, Error> {
        let _span = span("memory mapped");
        let limit = self.config.limits.boot + of_all_memory(&entry.stored());
        let begun = Instant::now();
        loop {
            let told = vm.ask("it was asked how far its memory is mapped", VmmClient::functions)?;
            let mut present = Vec::new();
            for &address in claimed {
                let name = address.to_string();
                match told
                    .functions
                    .iter()
                    .find(|function| function.id == name)
                    .map(|function| &function.state)
                {
                    Some(FunctionState::Present { slot }) => present.push((address, *slot)),
                    Some(FunctionState::Failed(why)) => {
                        let why = why.clone();
                        return Err(DevicesError::NotGiven { address, why }.into());
                    }
                    Some(FunctionState::Mapping) => (),
                    Some(FunctionState::Leaving) | None => {
                        let why = "the VMM does not have it".to_owned();
                        return Err(DevicesError::NotGiven { address, why }.into());
                    }
                }
            }
            if present.len() == claimed.len() {
                return Ok(present);
            }
            if begun.elapsed() > limit {
                let (mapped, total) = (told.mapped >> 20, told.total >> 20);
                return Err(DevicesError::Slow { mapped, total, limit }.into());
            }
            // Whoever ends it wants no device any more.
            if waits.has_hung_up() || entry.wait(Some(PAUSE), is_ending) {
                return Err(Error::Cancelled);
            }
            if waits.gives_up(&entry.lock()) {
                return Err(Error::GivenUp);
            }
        }
    }

    pub(crate) fn show_to_guest(&self, vm: &Vm, slots: &[(PciAddress, u8)]) -> Result<Vec<GuestDevice>, Error> {
        let _span = span("guest looks");
        let failed = |error| vm.diagnose("its guest was to look for a device", error);
        let mut agent = vm.agent()?;
        agent
            .set_read_timeout(Some(
                self.config.limits.answer + Duration::from_millis(u64::from(NAME_MS)),
            ))
            .map_err(failed)?;
        let mut found = Vec::new();
        for &(host, slot) in slots {
            let request = PciRequest::Add {
                address: in_guest(slot),
                wait_ms: NAME_MS,
            };
            let device = agent.pci(&request).map_err(failed)?.ok_or_else(|| {
                let why = "its guest's Linux does not have it".to_owned();
                DevicesError::NotGiven { address: host, why }
            })?;
            found.push(shown(host, device));
        }
        self.points.at(DEVICE_ATTACHED);
        Ok(found)
    }

    /// Takes devices from a sandbox that runs. Its guest lets go of them first; by `force` also where it does not.
    pub(crate) fn detach_devices(
        &self,
        entry: &Arc<Entry>,
        addresses: &[PciAddress],
        force: bool,
    ) -> Result<(), Error> {
        let _operation = self.turn(entry)?;
        let vm = entry.vm_for(Verb::Detach)?;
        // Named twice, or by its group's name as well.
        let addresses: Vec<_> = BTreeSet::from_iter(addresses.iter().copied()).into_iter().collect();
        let addresses = addresses.as_slice();
        let its = self.devices.of(&entry.id);
        if let Some(&address) = addresses.iter().find(|address| !its.contains(address)) {
            let sandbox = entry.stored().sandbox.name;
            return Err(DevicesError::NotIts { address, sandbox }.into());
        }
        let told = vm.ask("it was asked for its devices", VmmClient::functions)?;
        let mut left = Vec::new();
        for &address in addresses {
            let name = address.to_string();
            let state = told.functions.iter().find(|function| function.id == name);
            let Some(FunctionState::Present { slot }) = state.map(|function| &function.state) else {
                continue;
            };
            match self.leave_guest(&vm, *slot) {
                Ok(()) => left.push(address),
                Err(error) if force => log::warn!(
                    "the guest of sandbox {} did not let go of {address}, which is taken from it: {error}",
                    entry.id
                ),
                Err(source) => {
                    let why = source.to_string();
                    let held = Error::from(DevicesError::Held { address, why });
                    // Those that its guest has let go of are taken.
                    let taken = self.take_devices(entry, &vm, &left, LetGo::All);
                    return Err(held.after_undo(taken));
                }
            }
        }
        let let_go = if force { LetGo::Unknown } else { LetGo::All };
        self.take_devices(entry, &vm, addresses, let_go)
    }

    pub(super) fn leave_guest(&self, vm: &Vm, slot: u8) -> Result<(), Error> {
        let failed = |error| vm.diagnose("its guest was to let go of a device", error);
        let mut agent = vm.agent()?;
        agent
            .set_read_timeout(Some(self.config.limits.answer))
            .map_err(failed)?;
        let request = PciRequest::Remove {
            address: in_guest(slot),
        };
        match agent.pci(&request).map_err(failed)? {
            None => Ok(()),
            Some(device) => Err(Error::host("letting go of a device")(std::io::Error::other(format!(
                "{} is still on the guest's bus",
                device.address
            )))),
        }
    }

    /// Takes devices from a VMM that may have them, and gives them back. They are a sandbox's no more even if its VMM is gone.
    fn take_devices(&self, entry: &Entry, vm: &Vm, addresses: &[PciAddress], let_go: LetGo) -> Result<(), Error> {
        if addresses.is_empty() {
            return Ok(());
        }
        match self.take_from_vmm(entry, vm, addresses, let_go) {
            Ok(()) => (),
            // With it all that it had open is closed.
            Err(_) if vm.wait(Duration::ZERO) => (),
            Err(error) => return Err(error),
        }
        self.points.at(DEVICE_DETACHED);
        self.devices.release_some(&entry.id, addresses)
    }

    pub(super) fn take_from_vmm(
        &self,
        entry: &Entry,
        vm: &Vm,
        addresses: &[PciAddress],
        let_go: LetGo,
    ) -> Result<(), Error> {
        let limit = self.config.limits.answer + of_all_memory(&entry.stored());
        let functions = || vm.ask("it was asked for its devices", VmmClient::functions);
        entry.lock().devices_taken += 1;
        self.let_zeroed_memory_go(entry)?;
        let told = functions()?;
        let mut kept = Vec::new();
        for name in addresses.iter().map(PciAddress::to_string) {
            let Some(function) = told.functions.iter().find(|function| function.id == name) else {
                continue;
            };
            if let (FunctionState::Present { slot }, LetGo::Unknown) = (&function.state, let_go) {
                kept.push(*slot);
            }
            vm.ask_within(limit, "a device was taken from it", |client| client.detach(&name))?;
        }
        // Until it is closed, and with the last one memory is unmapped, its group is open.
        let begun = Instant::now();
        loop {
            let told = functions()?;
            let has = |address: &PciAddress| {
                let name = address.to_string();
                told.functions.iter().any(|function| function.id == name)
            };
            let unmaps = told.functions.is_empty() && told.busy;
            if !unmaps && !addresses.iter().any(has) {
                break;
            }
            if begun.elapsed() > limit {
                let devices = names(addresses);
                return Err(DevicesError::StaysOpen { devices, limit }.into());
            }
            std::thread::sleep(PAUSE);
        }
        // Its Linux would take the next device in this place for the one that has gone.
        for slot in kept {
            if let Err(error) = self.leave_guest(vm, slot) {
                log::warn!(
                    "the guest of sandbox {} may keep a device that was taken from it, at {}: {error}",
                    entry.id,
                    in_guest(slot)
                );
            }
        }
        Ok(())
    }

    /// After a daemon that died: what a sandbox has by the database, and its VMM has not, is given back. What its VMM has, and whether
    /// any of it was not on the guest's bus yet.
    pub(crate) fn give_back_what_did_not_come(&self, entry: &Entry, vm: &Vm) -> Result<(Vec<PciAddress>, bool), Error> {
        let _turn = entry.operate();
        let its = self.devices.of(&entry.id);
        if its.is_empty() {
            return Ok((Vec::new(), false));
        }
        let told = vm.ask("it was asked for its devices", VmmClient::functions)?;
        let has = |address: &PciAddress| {
            let name = address.to_string();
            let found = told.functions.iter().find(|function| function.id == name);
            found.is_some_and(|function| !matches!(function.state, FunctionState::Failed(_)))
        };
        let (has, lacks): (Vec<_>, Vec<_>) = its.into_iter().partition(has);
        if !lacks.is_empty() {
            log::warn!(
                "sandbox {} was to get devices when the daemon ended, and did not: they are given back ({})",
                entry.id,
                names(&lacks)
            );
            self.take_devices(entry, vm, &lacks, LetGo::Unknown)?;
        }
        let is_mapping = |function: &vmm_api::FunctionInfo| function.state == FunctionState::Mapping;
        Ok((has, told.functions.iter().any(is_mapping)))
    }
}

/// A guest whose memory is not translated reaches all of the host's, and so would its device.
pub(super) fn can_have_devices(stored: &Stored) -> Result<(), Error> {
    match stored.sandbox.config.resources.memory_mode.is_translated() {
        true => Ok(()),
        false => Err(DevicesError::Untranslated(stored.sandbox.name.clone()).into()),
    }
}

/// Device number `slot` of bus 0 has function 0 alone.
fn in_guest(slot: u8) -> String {
    format!("0000:00:{slot:02x}.0")
}

fn shown(host: PciAddress, device: PciDevice) -> GuestDevice {
    GuestDevice {
        host,
        guest: device.address,
        driver: device.driver,
        names: device.names,
    }
}

pub(super) fn names(addresses: &[PciAddress]) -> String {
    let names: Vec<_> = addresses.iter().map(PciAddress::to_string).collect();
    names.join(" ")
}
