//! Settling before a snapshot, and becoming a machine of its own after a restore: the steps that need the machine, in their
//! order. Commands stand still meanwhile; letting them is not done here.

use std::collections::BTreeSet;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use agent_api::{GuestNetwork, Reidentify};
use observe::marks;

use super::boot_id::BootId;
use super::{LogAhead, connections, early, hwrng, mounts, names, net, seed, shed};
use crate::Error;
use crate::clones::{Clones, Reidentified};

/// Where an image has its hooks.
const HOOKS: &str = "/etc/basalt/on-clone.d";

/// The container's root, which this process is in.
const ROOT: &str = "/";

/// What a guest keeps for its re-identifications.
pub(crate) struct Reidentification {
    boot_id: BootId,
    own: Mutex<IpAddr>,
    log: Arc<LogAhead>,
    /// A directory of the disk that takes what is written, where there is one.
    disk: Mutex<Option<File>>,
    /// Where re-identifications have mounted something.
    mounted: Mutex<BTreeSet<String>>,
}

impl Reidentification {
    /// While this process is still in its initial root.
    pub(crate) fn new(log: Arc<LogAhead>) -> Result<Self, Error> {
        Ok(Self {
            log,
            boot_id: BootId::in_initial_root()?,
            own: Mutex::new(net::own_address(None)),
            disk: Mutex::new(None),
            mounted: Mutex::default(),
        })
    }

    /// Notes the network that the guest was given; it stays the same in all clones.
    pub(crate) fn note(&self, network: Option<&GuestNetwork>) {
        *self.own.lock().unwrap_or_else(PoisonError::into_inner) = net::own_address(network);
    }

    /// Notes the disk that takes what is written, which cannot be reached by a path any more.
    pub(crate) fn note_disk(&self, disk: Option<File>) {
        *self.disk.lock().unwrap_or_else(PoisonError::into_inner) = disk;
    }

    /// For the server.
    pub(crate) fn clones(this: Arc<Self>) -> Clones {
        let (with_disk, with_boot_id) = (Arc::clone(&this), Arc::clone(&this));
        Clones {
            shed: Box::new(move || {
                let disk = with_disk.disk.lock().unwrap_or_else(PoisonError::into_inner);
                shed::shed(disk.as_ref())
            }),
            settle: Box::new(move || with_boot_id.settle()),
            reidentify: Box::new(move |request| this.reidentify(request)),
            set_clock: Box::new(seed::set_clock),
            hooks: PathBuf::from(HOOKS),
        }
    }

    fn reidentify(&self, request: &Reidentify) -> Result<Reidentified, Error> {
        if let Some(identity) = &request.identity {
            names::check(identity)?;
        }
        // The host answers while the rest is done.
        self.log.begin_again();
        seed::set_clock(request.clock_ns)?;
        marks::mark("re-identify: clock set");
        hwrng::discard()?;
        marks::mark("re-identify: prefetched randomness used up");
        seed::add_entropy(&request.entropy)?;
        seed::reseed()?;
        marks::mark("re-identify: entropy added");
        if let Some(identity) = &request.identity {
            seed::set_hostname(&identity.hostname)?;
            let own = *self.own.lock().unwrap_or_else(PoisonError::into_inner);
            names::write(Path::new(ROOT), identity, own)?;
            marks::mark("re-identify: names written");
        }
        if request.restored {
            connections::end_inherited(Path::new(early::CGROUPS));
            marks::mark("re-identify: inherited connections ended");
        }
        let boot_id = self.boot_id.reidentify()?;
        marks::mark("re-identify: boot id changed");
        let mut mounted = self.mounted.lock().unwrap_or_else(PoisonError::into_inner);
        mounts::mount_all(&request.tmpfs, &request.shared_directories, &mut mounted)?;
        drop(mounted);
        marks::mark("re-identify: mounted");
        let machine_id = names::machine_id(Path::new(ROOT));
        Ok(Reidentified { boot_id, machine_id })
    }

    /// Everything that was written is on the disks, and nothing that was fetched for readers is left over. What each clone would
    /// have to do is done.
    fn settle(&self) -> Result<(), Error> {
        self.boot_id.prepare()?;
        rustix::fs::sync();
        marks::mark("disks written");
        hwrng::discard()?;
        marks::mark("prefetched randomness used up");
        Ok(())
    }
}
