//! Domains (5.13.6): which functions are attached to which, and what is mapped there. What the host maps for a function is at any time what
//! is mapped in its domain. Knows no queue and no layout of a request.
//!
//! ```text
//!  no domain ── ATTACH of the first ──▶ domain ── MAP, UNMAP ──▶ domain ── DETACH of the last, or it is gone ──▶ no domain
//! ```
//! Each function has an address space of its own: of a domain with several each has all of its mappings.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use ::device::{DmaAccess, EndpointDma, EndpointError, Endpoints, MSI_WINDOW};
use memory::layout::Range;

use crate::metrics::Metrics;
use crate::protocol::{
    INPUT_RANGE, PAGE, Request, Reserved, Status, VIRTIO_IOMMU_MAP_F_READ, VIRTIO_IOMMU_MAP_F_WRITE, Virt,
};

/// What a request of the guest's has come to, if it was not done.
type Outcome<T> = Result<T, Status>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    end: u64,
    phys_start: u64,
    access: DmaAccess,
}

impl Mapping {
    /// Bytes of one that begins there. It is no larger than the input range.
    fn length(&self, start: u64) -> u64 {
        self.end - start + 1
    }
}

#[derive(Default)]
struct Domain {
    /// By the first address.
    mappings: BTreeMap<u64, Mapping>,
    endpoints: BTreeMap<u32, Weak<EndpointDma>>,
}

impl Domain {
    /// Those of its functions that there are.
    fn endpoints(&self) -> Vec<Arc<EndpointDma>> {
        self.endpoints.values().filter_map(Weak::upgrade).collect()
    }
}

/// All of a guest's; the device's thread has them while there is one.
pub(crate) struct Domains {
    endpoints: Endpoints,
    domains: BTreeMap<u32, Domain>,
    /// How many bytes the host was asked to map, for each function; whoever reads it begins anew.
    pub(crate) asked: u64,
    pub(crate) metrics: Arc<Metrics>,
}

impl Domains {
    pub(crate) fn new(endpoints: Endpoints, metrics: Arc<Metrics>) -> Self {
        Self {
            endpoints,
            domains: BTreeMap::new(),
            asked: 0,
            metrics,
        }
    }

    /// Serves a request but a probe; what is wrong with it, if anything is.
    pub(crate) fn serve(&mut self, request: Request) -> Outcome<()> {
        self.forget_those_that_left();
        match request {
            // Flags are those of features that are not offered.
            Request::Attach { flags, reserved, .. } if flags != 0 || reserved => Err(Status::Inval),
            Request::Detach { reserved: true, .. } => Err(Status::Inval),
            Request::Attach { domain, endpoint, .. } => self.attach(domain, endpoint),
            Request::Detach { domain, endpoint, .. } => self.detach(domain, endpoint),
            Request::Map {
                domain,
                virt,
                phys_start,
                flags,
            } => self.map(domain, virt, phys_start, flags),
            Request::Unmap { domain, virt } => self.unmap(domain, virt),
            Request::Probe { endpoint } => self.reserved(endpoint).map(drop),
        }
    }

    /// What a function's driver must not map (5.13.6.7).
    pub(crate) fn reserved(&self, endpoint: u32) -> Outcome<Vec<Reserved>> {
        let endpoint = self.endpoints.find(endpoint).ok_or(Status::NoEnt)?;
        let within = |range: &std::ops::RangeInclusive<u64>| {
            let (start, end) = (*range.start(), *range.end().min(INPUT_RANGE.end()));
            (start <= end).then_some(Reserved::Memory(start..=end))
        };
        let msi = std::iter::once(Reserved::Msi(MSI_WINDOW));
        Ok(msi.chain(endpoint.reserved().iter().filter_map(within)).collect())
    }

    /// 5.13.6.3. A function that is attached elsewhere is detached there first, and stays so if this fails.
    fn attach(&mut self, domain: u32, id: u32) -> Outcome<()> {
        let endpoint = self.endpoints.find(id).ok_or(Status::NoEnt)?;
        match self.domain_of(id) {
            Some(its) if its == domain => return Ok(()),
            Some(its) => self.leave(its, id)?,
            None => (),
        }
        let known = self.domains.entry(domain).or_default();
        for (start, mapping) in &known.mappings {
            self.asked += mapping.length(*start);
            if let Err(error) = map(&endpoint, *start, *mapping) {
                let status = self.refused(&error);
                if let Err(error) = endpoint.unmap_all() {
                    self.metrics.warn(&error);
                }
                return Err(status);
            }
        }
        known.endpoints.insert(id, Arc::downgrade(&endpoint));
        Ok(())
    }

    /// 5.13.6.4.
    fn detach(&mut self, domain: u32, id: u32) -> Outcome<()> {
        if self.endpoints.find(id).is_none() {
            return Err(Status::NoEnt);
        }
        match self.domain_of(id) {
            Some(its) if its == domain => self.leave(domain, id),
            _ => Err(Status::Inval),
        }
    }

    /// 5.13.6.5. All functions of the domain have it then, or none.
    fn map(&mut self, domain: u32, virt: Virt, phys_start: u64, flags: u32) -> Outcome<()> {
        let access = match flags {
            VIRTIO_IOMMU_MAP_F_READ => DmaAccess::Read,
            // IOMMUs of today have no pages that can only be written to.
            _ if flags & !VIRTIO_IOMMU_MAP_F_READ == VIRTIO_IOMMU_MAP_F_WRITE => DmaAccess::ReadWrite,
            0 => return Err(Status::Unsupp),
            _ => return Err(Status::Inval),
        };
        let known = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        check_range(virt, phys_start)?;
        let Virt { start, end } = virt;
        let before = known.mappings.range(..=end).next_back();
        if before.is_some_and(|(_, mapping)| mapping.end >= start) {
            return Err(Status::Inval);
        }
        let mapping = Mapping {
            end,
            phys_start,
            access,
        };
        let endpoints = known.endpoints();
        let overlaps = |range: &std::ops::RangeInclusive<u64>| start <= *range.end() && *range.start() <= end;
        if overlaps(&MSI_WINDOW) || endpoints.iter().any(|one| one.reserved().iter().any(overlaps)) {
            return Err(Status::Range);
        }
        for (index, endpoint) in endpoints.iter().enumerate() {
            self.asked += mapping.length(start);
            if let Err(error) = map(endpoint, start, mapping) {
                let undone = endpoints[..index].iter().map(|endpoint| endpoint.unmap(start));
                undone
                    .filter_map(Result::err)
                    .for_each(|error| self.metrics.warn(&error));
                return Err(self.refused(&error));
            }
        }
        known.mappings.insert(start, mapping);
        Ok(())
    }

    /// 5.13.6.6: whole mappings that lie in the range; nothing of it need be mapped.
    fn unmap(&mut self, domain: u32, Virt { start, end }: Virt) -> Outcome<()> {
        let known = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        if start > end {
            return Err(Status::Range);
        }
        let is_cut_at = |at: u64| {
            let before = known.mappings.range(..at).next_back();
            before.is_some_and(|(_, mapping)| mapping.end >= at)
        };
        if is_cut_at(start) || end.checked_add(1).is_some_and(is_cut_at) {
            return Err(Status::Range);
        }
        let endpoints = known.endpoints();
        let within: Vec<u64> = known.mappings.range(start..=end).map(|(start, _)| *start).collect();
        let mut outcome = Ok(());
        for mapping in within {
            let failed: Vec<_> = endpoints
                .iter()
                .filter_map(|endpoint| endpoint.unmap(mapping).err())
                .collect();
            if failed.is_empty() {
                known.mappings.remove(&mapping);
                continue;
            }
            failed.iter().for_each(|error| self.metrics.warn(error));
            outcome = Err(Status::DevErr);
        }
        outcome
    }

    /// Nothing is attached and nothing mapped any more: the driver starts anew.
    pub(crate) fn clear(&mut self) {
        for domain in std::mem::take(&mut self.domains).into_values() {
            for endpoint in domain.endpoints() {
                if let Err(error) = endpoint.unmap_all() {
                    self.metrics.warn(&error);
                }
            }
        }
    }

    /// No function is attached, so that nothing is mapped. Whoever asks has no part in any of them: with the last handle all is unmapped, which
    /// not every thread may do.
    pub(crate) fn is_empty(&self) -> bool {
        let endpoints = self.domains.values().flat_map(|domain| domain.endpoints.values());
        endpoints.map(Weak::strong_count).all(|handles| handles == 0)
    }

    /// Functions that are closed have left their domains, and so have those whose number another one has: what is mapped for these stays until
    /// they are closed.
    fn forget_those_that_left(&mut self) {
        let has_another = |id: u32, endpoint: &Weak<EndpointDma>| {
            let now = self.endpoints.find(id);
            now.is_some_and(|now| Arc::as_ptr(&now) != endpoint.as_ptr())
        };
        self.domains.retain(|_, domain| {
            let known = &mut domain.endpoints;
            known.retain(|id, endpoint| endpoint.strong_count() > 0 && !has_another(*id, endpoint));
            !known.is_empty()
        });
    }

    fn domain_of(&self, id: u32) -> Option<u32> {
        let has = |(number, domain): (&u32, &Domain)| domain.endpoints.contains_key(&id).then_some(*number);
        self.domains.iter().find_map(has)
    }

    /// Takes all that is mapped from a function, which is in the domain no more then; a domain without any is none.
    fn leave(&mut self, domain: u32, id: u32) -> Outcome<()> {
        let Some(known) = self.domains.get_mut(&domain) else {
            return Ok(());
        };
        if let Some(endpoint) = known.endpoints.get(&id).and_then(Weak::upgrade)
            && let Err(error) = endpoint.unmap_all()
        {
            self.metrics.warn(&error);
            return Err(Status::DevErr);
        }
        known.endpoints.remove(&id);
        if known.endpoints.is_empty() {
            self.domains.remove(&domain);
        }
        Ok(())
    }

    /// What the guest is told of what could not be mapped.
    fn refused(&self, error: &EndpointError) -> Status {
        self.metrics.warn(error);
        match error {
            EndpointError::NotMemory { .. } => Status::Inval,
            _ if error.is_want_of_memory() => Status::NoMem,
            _ => Status::DevErr,
        }
    }
}

fn map(endpoint: &EndpointDma, start: u64, mapping: Mapping) -> Result<(), EndpointError> {
    let range = Range {
        start: mapping.phys_start,
        length: mapping.length(start),
    };
    endpoint.map(start, range, mapping.access)
}

/// A range of whole pages that a function can use.
fn check_range(Virt { start, end }: Virt, phys_start: u64) -> Outcome<()> {
    let is_whole = |at: u64| at.is_multiple_of(PAGE);
    let is_within = INPUT_RANGE.contains(&start) && INPUT_RANGE.contains(&end) && start <= end;
    match is_within && is_whole(start) && is_whole(end + 1) && is_whole(phys_start) {
        true => Ok(()),
        false => Err(Status::Range),
    }
}
