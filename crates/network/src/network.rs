//! The network as its callers see it: opened once, then slots attached, published and detached.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_api::{Address, Gateway, GuestNetwork};

use crate::egress::Egresses;
use crate::inside::Inside;
use crate::plan::{
    DNS_V6, GATEWAY_MAC, GATEWAY_V4, GATEWAY_V6, GUEST_MAC, GUEST_V4, GUEST_V6, PREFIX_V4, Ranges, UPLINK_V6,
};
use crate::ports::PortMapping;
use crate::published::Published;
use crate::resolvers::Resolvers;
use crate::rules::{self, HostTable, TAP, UPLINK};
use crate::{Error, host, ports, quoted, tap};
use netlink::links::{Link, Links, whole_v4, whole_v6};

mod egress;
mod release;
mod restore;

pub use restore::Ports;

/// The most queues of one TAP.
const MOST_QUEUES: usize = 64;

/// What a network is made from.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Names the namespace, the host's table and the host's link; two on one host must differ.
    pub instance: String,
    /// Where sandboxes are on the host's side; one that the host has no route to is chosen when not given.
    pub ranges: Option<Ranges>,
    /// The largest packet; that of the link of the host's default route when not given.
    pub mtu: Option<u16>,
    /// The host's name servers.
    pub resolvers: Resolvers,
    /// How many connections of one slot the host tracks at a time; [`default_connections`] when not given.
    pub connections: Option<u32>,
}

impl NetworkConfig {
    /// The usual one: the host's own name servers, all else as it fits the host.
    pub fn new(instance: &str) -> Self {
        Self {
            instance: instance.to_owned(),
            ranges: None,
            mtu: None,
            resolvers: Resolvers::of_host(),
            connections: None,
        }
    }
}

/// How many connections of one slot the host tracks at a time: 4096, or a sixteenth of the host's table where that is less, so that one
/// sandbox cannot fill it. The kernel walks over all of a slot's for a new one, which bounds it from above.
pub fn default_connections() -> u32 {
    const MOST: u32 = 4096;
    let table = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_max").ok();
    let table = table.and_then(|text| text.trim().parse::<u32>().ok());
    table.map_or(MOST, |table| (table / 16).clamp(1, MOST))
}

/// What a guest's interface is made from.
#[derive(Debug)]
pub struct Attachment {
    /// The TAP's queues.
    pub taps: Vec<OwnedFd>,
    /// The guest's Ethernet address.
    pub mac: [u8; 6],
    /// The largest packet.
    pub mtu: u16,
    /// What the agent sets up.
    pub guest: GuestNetwork,
}

/// What there is of a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotState {
    /// Its number.
    pub slot: u32,
    /// Some process has the TAP open. A slot that is neither in use nor published is part of the pool.
    pub in_use: bool,
    /// What is published of it.
    pub published: Vec<PortMapping>,
}

/// The node's network.
#[derive(Debug)]
pub struct Network {
    config: NetworkConfig,
    ranges: Ranges,
    mtu: u16,
    host_link: String,
    host: Links,
    inside: Inside,
    inner: Arc<Links>,
    /// TAPs that are made can have several queues, as the last guest wanted.
    several: AtomicBool,
    /// Slots whose TAPs the namespace's table knows. Held while TAPs change, and while the namespace is asked.
    known: Mutex<BTreeSet<u32>>,
    /// Slots whose connections were forgotten since they were attached or published last. Changed while `known` is held.
    released: Mutex<BTreeSet<u32>>,
    /// Slots that the namespace's table restricts. Changed while `table` is held.
    restricted: Mutex<BTreeSet<u32>>,
    /// Held while the host's table is read and changed, and while the namespace's is but for its TAPs: that takes nft tens of milliseconds,
    /// for which no TAP has to wait. Taken before `known` where both are.
    table: Mutex<()>,
}

impl Network {
    /// Sets the network up, or what is missing of it, with slots that send where `egresses` says. This thread's namespace is the host's.
    ///
    /// # Errors
    /// See [`Error`]; what was set up so far stays, and the next call goes on from there.
    pub fn open(config: &NetworkConfig, egresses: &Egresses) -> Result<Self, Error> {
        host::check_instance(&config.instance)?;
        let host = Links::open().map_err(Error::host("opening a netlink socket"))?;
        let inside = Inside::enter(&config.instance)?;
        let inner = inside.run(|| {
            settings_inside()?;
            Links::open().map_err(Error::host("opening a netlink socket"))
        })?;
        let host_link = host::link_name(&config.instance);
        let link = host.find(&host_link).map_err(Error::host("listing links"))?;
        let ranges = host::choose(&host, &config.instance, link.map(|link| link.index), config.ranges)?;
        let mtu = match config.mtu {
            Some(mtu) => mtu,
            None => host::uplink_mtu(&host)?,
        };
        let network = Self {
            config: config.clone(),
            ranges,
            mtu,
            host_link,
            host,
            inside,
            inner: Arc::new(inner),
            several: AtomicBool::new(false),
            known: Mutex::default(),
            released: Mutex::default(),
            restricted: Mutex::default(),
            table: Mutex::default(),
        };
        network.set_up(egresses)?;
        Ok(network)
    }

    /// The rules first: nothing is connected before it is restricted.
    fn set_up(&self, egresses: &Egresses) -> Result<(), Error> {
        let _table = self.lock_table();
        let mut known = self.lock();
        let published = Published::read(&self.config.instance)?;
        self.apply_host(&published)?;
        let links = self
            .inner
            .list()
            .map_err(Error::host("listing the namespace's links"))?;
        *known = links.iter().filter_map(slot_of).collect();
        self.apply_inside(&known, &self.with_unknown(egresses, &links)?)?;
        // Not those of slots of which nothing is told: their sandboxes may be found later, with connections that they may have.
        if let Err(error) = self.end_all_unreachable(egresses, &links) {
            log::error!("sandboxes may have connections to where they cannot send any more: {error}");
        }
        let has_uplink = links.iter().any(|link| link.name == UPLINK);
        let peer = (UPLINK, has_uplink);
        let namespace = self.inside.namespace();
        let index = host::pair(&self.host, &self.host_link, peer, namespace, self.mtu)?;
        host::set_up(&self.host, &self.host_link, index, (&self.ranges, self.mtu))?;
        self.set_up_uplink()?;
        for &slot in &*known {
            self.set_up_tap(slot)?;
        }
        host::forward()
    }

    /// Makes the namespace's table anew.
    fn apply_inside(&self, known: &BTreeSet<u32>, egresses: &Egresses) -> Result<(), Error> {
        let slots: Vec<u32> = known.iter().copied().collect();
        let table = rules::inside(&self.ranges, &self.config.resolvers, &slots, egresses)?;
        *self.restricted() = egresses
            .iter()
            .filter_map(|(&slot, egress)| egress.restricts().then_some(slot))
            .collect();
        self.inside.run(move || {
            rules::apply("the namespace", &table)?;
            quoted::fill().map_err(Error::host("making the rules for what ICMP errors quote"))
        })
    }

    /// Makes the host's table anew. A kernel that cannot count connections (`CONFIG_NFT_CONNLIMIT`) does without.
    fn apply_host(&self, published: &Published) -> Result<(), Error> {
        let most = self.config.connections.unwrap_or_else(default_connections);
        let counted = rules::apply("the host", &self.host_table(Some(most)).text(published));
        let Err(error) = counted else { return Ok(()) };
        rules::apply("the host", &self.host_table(None).text(published))?;
        log::warn!("how many connections a sandbox has is not limited on this host: {error}");
        Ok(())
    }

    fn set_up_uplink(&self) -> Result<(), Error> {
        let links = self
            .inner
            .list()
            .map_err(Error::host("listing the namespace's links"))?;
        let index = |name| links.iter().find(|link| link.name == name).map(|link| link.index);
        let (Some(lo), Some(uplink)) = (index("lo"), index(UPLINK)) else {
            return Err(Error::Answer("the namespace's links"));
        };
        let step = |result: std::io::Result<()>| result.map_err(Error::host("setting up the namespace's uplink"));
        let ranges = &self.ranges;
        step(self.inner.up(lo, None, None))?;
        step(self.inner.up(uplink, Some(self.mtu), None))?;
        step(self.inner.address(lo, IpAddr::V4(GATEWAY_V4), 32))?;
        step(self.inner.address(uplink, IpAddr::V4(ranges.namespace_v4()), 30))?;
        let default = (IpAddr::V4([0; 4].into()), 0);
        step(self.inner.route(default, uplink, Some(IpAddr::V4(ranges.host_v4()))))?;
        if host::has_v6() {
            step(self.inner.address(lo, IpAddr::V6(DNS_V6), 128))?;
            step(self.inner.address(uplink, IpAddr::V6(UPLINK_V6), 64))?;
            step(self.inner.address(uplink, IpAddr::V6(ranges.namespace_v6()), 126))?;
            let default = (IpAddr::V6([0; 16].into()), 0);
            step(self.inner.route(default, uplink, Some(IpAddr::V6(ranges.host_v6()))))?;
        }
        Ok(())
    }

    /// Those of these slots that have no TAP yet.
    pub fn missing(&self, slots: &[u32]) -> Vec<u32> {
        let known = self.lock();
        slots.iter().copied().filter(|slot| !known.contains(slot)).collect()
    }

    /// Makes TAPs ahead, so that attaching is a matter of opening them. nft is called once.
    ///
    /// # Errors
    /// A slot is out of range, or the kernel refuses.
    pub fn prepare(&self, slots: impl IntoIterator<Item = u32>) -> Result<(), Error> {
        let mut known = self.lock();
        let slots: Vec<u32> = slots.into_iter().collect();
        self.prepare_locked(&mut known, &slots)
    }

    fn prepare_locked(&self, known: &mut BTreeSet<u32>, slots: &[u32]) -> Result<(), Error> {
        let new: Vec<u32> = slots.iter().copied().filter(|slot| !known.contains(slot)).collect();
        let elements = rules::elements(&self.ranges, &new)?;
        for &slot in slots {
            match self.make_tap(slot, self.several.load(Ordering::Relaxed)) {
                // It is there: in use, or of the other kind, and whoever takes it sees whether that does.
                Err(error) if has_code(&error, libc::EBUSY) || has_code(&error, libc::EINVAL) => {
                    self.set_up_tap(slot)?;
                }
                other => other?,
            }
        }
        if !new.is_empty() {
            self.inside.run(move || rules::apply("new TAPs", &elements))?;
            known.extend(new);
        }
        Ok(())
    }

    fn make_tap(&self, slot: u32, several: bool) -> Result<(), Error> {
        let name = tap_name(slot);
        self.inside.run(move || {
            let failed = |what: &str| Error::host(format!("{what} the TAP {name}"));
            let made = tap::open(&name, several).map_err(failed("making"))?;
            tap::persist(&made).map_err(failed("keeping"))
        })?;
        self.set_up_tap(slot)
    }

    /// Addresses and routes of a TAP that is there.
    fn set_up_tap(&self, slot: u32) -> Result<(), Error> {
        let name = tap_name(slot);
        let (v4, v6) = (self.ranges.slot_v4(slot)?, self.ranges.slot_v6(slot)?);
        let step = |result: std::io::Result<()>| result.map_err(Error::host(format!("setting up the TAP {name}")));
        let index = self
            .inner
            .index(&name)
            .map_err(Error::host(format!("finding the TAP {name}")))?;
        let links = &self.inner;
        // Before it is up, which is when it would get its own.
        step(links.noqueue(index))?;
        step(links.up(index, Some(self.mtu), Some(GATEWAY_MAC)))?;
        step(links.route(whole_v4(v4), index, None))?;
        step(links.neighbour(index, IpAddr::V4(GUEST_V4), GUEST_MAC))?;
        if host::has_v6() {
            step(links.address(index, IpAddr::V6(GATEWAY_V6), 64))?;
            step(links.route(whole_v6(v6), index, None))?;
            step(links.neighbour(index, IpAddr::V6(GUEST_V6), GUEST_MAC))?;
        }
        Ok(())
    }

    /// Opens the slot's TAP with so many queues; it is made if it is not there, and anew if it has one queue and several are
    /// wanted, which takes ten times as long. Those that are made ahead from here on have several if this one has.
    ///
    /// # Errors
    /// The slot is in use or out of range, or the kernel refuses.
    pub fn attach(&self, slot: u32, queues: usize) -> Result<Attachment, Error> {
        if queues == 0 || queues > MOST_QUEUES {
            return Err(Error::Queues(queues));
        }
        self.ranges.slot_v4(slot)?;
        let several = queues > 1;
        let mut known = self.lock();
        self.released().remove(&slot);
        self.several.store(several, Ordering::Relaxed);
        match self.state_of(&tap_name(slot))? {
            Some(link) if link.carrier => return Err(Error::InUse(slot)),
            Some(_) if known.contains(&slot) => {}
            _ => self.prepare_locked(&mut known, &[slot])?,
        }
        let taps = match self.open_taps(slot, queues, several) {
            // It is of the other kind (`TUNSETIFF`).
            Err(error) if has_code(&error, libc::EINVAL) && !several => self.open_taps(slot, queues, true),
            Err(error) if has_code(&error, libc::EINVAL) => {
                let name = tap_name(slot);
                let removed = self.inner.index(&name).and_then(|index| self.inner.remove(index));
                removed.map_err(Error::host(format!("removing the TAP {name}")))?;
                self.make_tap(slot, several)?;
                self.open_taps(slot, queues, several)
            }
            other => other,
        };
        Ok(Attachment {
            taps: taps?,
            ..self.attachment()
        })
    }

    /// What an interface is made from that takes the place of one of the same guest, but for the TAP's queues, which whoever
    /// has the guest keeps.
    pub fn attachment(&self) -> Attachment {
        Attachment {
            taps: Vec::new(),
            mac: GUEST_MAC,
            mtu: self.mtu,
            guest: self.guest(),
        }
    }

    fn open_taps(&self, slot: u32, queues: usize, several: bool) -> Result<Vec<OwnedFd>, Error> {
        let name = tap_name(slot);
        self.inside.run(move || {
            let open = |_| tap::open(&name, several).map_err(Error::host(format!("opening the TAP {name}")));
            (0..queues).map(open).collect()
        })
    }

    /// What the agent sets up, in every guest the same.
    pub fn guest(&self) -> GuestNetwork {
        let resolvers = &self.config.resolvers;
        let address = |address, prefix| Address { address, prefix };
        let gateway = |address| Gateway {
            address,
            mac: GATEWAY_MAC,
        };
        let dns4 = resolvers.v4.map(|_| IpAddr::V4(GATEWAY_V4));
        let dns6 = resolvers.v6.map(|_| IpAddr::V6(DNS_V6));
        let mut guest = GuestNetwork {
            addresses: vec![address(IpAddr::V4(GUEST_V4), PREFIX_V4)],
            gateways: vec![gateway(IpAddr::V4(GATEWAY_V4))],
            dns: dns4.into_iter().chain(dns6).collect(),
            search: resolvers.search.clone(),
            mtu: self.mtu,
        };
        if host::has_v6() {
            guest.addresses.push(address(IpAddr::V6(GUEST_V6), 128));
            guest.gateways.push(gateway(IpAddr::V6(GATEWAY_V6)));
        }
        guest
    }

    /// Publishes ports of the slot, all of them or none. What the slot has published already is no error.
    ///
    /// # Errors
    /// A port is taken, by another sandbox or by a program of the host, or an address is not the host's.
    pub fn publish(&self, slot: u32, mappings: &[PortMapping]) -> Result<(), Error> {
        // nft takes tens of milliseconds even to say that there is nothing.
        if mappings.is_empty() {
            return Ok(());
        }
        let _table = self.lock_table();
        let mut table = Published::read(&self.config.instance)?.by_slot(&self.ranges);
        let mut new = Published::default();
        for mapping in mappings {
            if table.get(&slot).is_some_and(|own| own.contains(mapping)) {
                continue;
            }
            let other = table
                .iter()
                .find(|(_, theirs)| theirs.iter().any(|one| one.conflicts_with(mapping)));
            if let Some((&slot, _)) = other {
                return Err(Error::PortPublished {
                    mapping: mapping.clone(),
                    slot,
                });
            }
            ports::check_free(mapping)?;
            new.extend(Published::of(mapping, &self.ranges, slot)?);
            table.entry(slot).or_default().push(mapping.clone());
        }
        if new.is_empty() {
            return Ok(());
        }
        rules::apply("published ports", &new.add(&self.config.instance))
    }

    /// What there is, as the kernel has it.
    ///
    /// # Errors
    /// The kernel or nft cannot be asked.
    pub fn slots(&self) -> Result<Vec<SlotState>, Error> {
        let table = self.lock_table();
        let mut published = Published::read(&self.config.instance)?.by_slot(&self.ranges);
        drop(table);
        let _known = self.lock();
        let links = self
            .inner
            .list()
            .map_err(Error::host("listing the namespace's links"))?;
        let mut slots: BTreeMap<u32, SlotState> = BTreeMap::new();
        for link in &links {
            let Some(slot) = slot_of(link) else { continue };
            let state = SlotState {
                slot,
                in_use: link.carrier,
                published: published.remove(&slot).unwrap_or_default(),
            };
            slots.insert(slot, state);
        }
        for (slot, published) in published {
            let in_use = false;
            slots.insert(
                slot,
                SlotState {
                    slot,
                    in_use,
                    published,
                },
            );
        }
        Ok(slots.into_values().collect())
    }

    /// The ranges in use.
    pub fn ranges(&self) -> &Ranges {
        &self.ranges
    }

    /// Removes everything: TAPs, namespace, links, table. Forwarding stays on, as others may rely on it by now.
    ///
    /// # Errors
    /// The kernel refuses; call it again.
    pub fn teardown(self) -> Result<(), Error> {
        let links = self
            .inner
            .list()
            .map_err(Error::host("listing the namespace's links"))?;
        for link in links.iter().filter(|link| slot_of(link).is_some()) {
            let removed = self.inner.remove(link.index);
            removed.map_err(Error::host(format!("removing the TAP {}", link.name)))?;
        }
        if let Some(link) = self.host.find(&self.host_link).map_err(Error::host("listing links"))? {
            let removed = self.host.remove(link.index);
            removed.map_err(Error::host(format!("removing the link {}", link.name)))?;
        }
        let name = &self.config.instance;
        rules::apply("the end", &format!("add table inet {name}\ndelete table inet {name}\n"))?;
        self.inside.remove()
    }

    /// Takes a TAP out of the namespace's table.
    #[cfg(test)]
    pub(crate) fn forget_for_test(&self, slot: u32) {
        self.lock().remove(&slot);
        let script = rules::forget(slot);
        self.inside.run(move || rules::apply("a test", &script)).unwrap();
    }

    /// Takes all tables out of the namespace.
    #[cfg(test)]
    pub(crate) fn flush_for_test(&self) {
        self.inside.run(|| rules::apply("a test", "flush ruleset")).unwrap();
    }

    /// A slot's TAP.
    #[cfg(test)]
    pub(crate) fn tap_for_test(&self, slot: u32) -> Link {
        self.state_of(&tap_name(slot)).unwrap().unwrap()
    }

    fn state_of(&self, name: &str) -> Result<Option<Link>, Error> {
        self.inner
            .get(name)
            .map_err(Error::host(format!("looking at the TAP {name}")))
    }

    fn host_table(&self, connections: Option<u32>) -> HostTable<'_> {
        HostTable {
            connections,
            name: &self.config.instance,
            link: &self.host_link,
            ranges: &self.ranges,
            resolvers: &self.config.resolvers,
        }
    }

    fn lock_table(&self) -> MutexGuard<'_, ()> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn restricted(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.restricted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn released(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.released.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Settings of the namespace: it routes, believes no router, and does not care where packets come from, as its table does.
fn settings_inside() -> Result<(), Error> {
    for (name, value) in [
        ("ip_forward", "1"),
        ("conf/all/rp_filter", "0"),
        ("conf/default/rp_filter", "0"),
        ("conf/all/send_redirects", "0"),
        ("conf/default/send_redirects", "0"),
        ("conf/all/accept_redirects", "0"),
        ("conf/default/accept_redirects", "0"),
    ] {
        host::sysctl(&format!("net/ipv4/{name}"), value)?;
    }
    if host::has_v6() {
        for (name, value) in [
            ("all/forwarding", "1"),
            ("all/accept_ra", "0"),
            ("default/accept_ra", "0"),
            ("all/accept_redirects", "0"),
            ("default/accept_redirects", "0"),
            // No address but those that are given: all TAPs have the same Ethernet address.
            ("default/addr_gen_mode", "1"),
            ("default/accept_dad", "0"),
        ] {
            host::sysctl(&format!("net/ipv6/conf/{name}"), value)?;
        }
    }
    Ok(())
}

fn has_code(error: &Error, code: i32) -> bool {
    matches!(error, Error::Host { source, .. } if source.raw_os_error() == Some(code))
}

fn tap_name(slot: u32) -> String {
    format!("{TAP}{slot}")
}

fn slot_of(link: &Link) -> Option<u32> {
    link.name.strip_prefix(TAP)?.parse().ok()
}
