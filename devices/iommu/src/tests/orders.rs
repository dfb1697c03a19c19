//! Any order of requests, of functions that come and leave, and of a host that refuses now and then: at any time each function reaches exactly
//! what is mapped in its domain, by another account of that.

use std::collections::BTreeMap;

use vfio::fake::Op;
use vfio::fake::random::Random;

use super::*;
use crate::domains::Domains;
use crate::metrics::Metrics;
use crate::protocol::{Request, Status, Virt};

/// Pages that functions use, from [`IOVA`] on, and functions, whose numbers are from 40 on.
const PAGES: u64 = 24;
const FUNCTIONS: usize = 3;
const FIRST: u32 = 40;

/// By the first page: how many pages, and the guest's first one.
type Mappings = BTreeMap<u64, (u64, u64)>;

/// What is to be so, kept as simply as can be.
#[derive(Default)]
struct Account {
    domains: BTreeMap<u32, Mappings>,
    /// Where each function is attached.
    attached: [Option<u32>; FUNCTIONS],
}

impl Account {
    fn leave(&mut self, function: usize) {
        if let Some(domain) = self.attached[function].take()
            && !self.attached.contains(&Some(domain))
        {
            self.domains.remove(&domain);
        }
    }

    /// Which page of the guest's a function reaches at a page of its own.
    fn reaches(&self, function: usize, page: u64) -> Option<u64> {
        let mappings = &self.domains[&self.attached[function]?];
        let (first, (pages, guest)) = mappings.range(..=page).next_back()?;
        (page - first < *pages).then_some(guest + page - first)
    }
}

struct World {
    domains: Domains,
    endpoints: Endpoints,
    functions: Vec<Option<Function>>,
    account: Account,
    ram: Ram,
}

fn virt(page: u64, pages: u64) -> Virt {
    let start = IOVA + page * PAGE;
    Virt {
        start,
        end: start + pages * PAGE - 1,
    }
}

impl World {
    fn new() -> Self {
        let endpoints = Endpoints::default();
        Self {
            domains: Domains::new(endpoints.clone(), Arc::new(Metrics::new(&Registry::new(), "iommu"))),
            endpoints,
            functions: (0..FUNCTIONS).map(|_| None).collect(),
            account: Account::default(),
            ram: ram(),
        }
    }

    fn step(&mut self, random: &mut Random) {
        let function = usize::try_from(random.below(FUNCTIONS as u64)).unwrap();
        let (id, domain) = (
            FIRST + u32::try_from(function).unwrap(),
            u32::try_from(random.below(3)).unwrap(),
        );
        let is_there = self.functions[function].is_some();
        match random.below(12) {
            0 if !is_there => self.functions[function] = Some(super::function(&self.endpoints, id, &self.ram)),
            1 if is_there => {
                self.endpoints.remove(id);
                let gone = self.functions[function].take().unwrap();
                let fake = Arc::clone(&gone.fake);
                drop(gone);
                assert_eq!(fake.mapped_bytes(), 0, "what is mapped goes with a function");
                self.account.leave(function);
            }
            2 | 3 => self.attach(function, id, domain, random),
            4 => {
                let served = self.domains.serve(Request::Detach {
                    domain,
                    endpoint: id,
                    reserved: false,
                });
                assert_eq!(served.is_ok(), self.account.attached[function] == Some(domain));
                if served.is_ok() {
                    self.account.leave(function);
                }
            }
            5..=8 => self.map(domain, random),
            9 | 10 => self.unmap(domain, random),
            11 if random.below(10) == 0 => {
                self.domains.clear();
                self.account = Account::default();
            }
            _ => (),
        }
    }

    /// A function of the domain, if one is to have its host refuse the next mapping.
    fn refusing(&self, domain: u32, random: &mut Random) -> bool {
        let mut its = (0..FUNCTIONS).filter(|function| self.account.attached[*function] == Some(domain));
        let Some(function) = its.next_back().filter(|_| random.below(5) == 0) else {
            return false;
        };
        self.functions[function].as_ref().unwrap().fake.fail(Op::Map, 1);
        true
    }

    fn attach(&mut self, function: usize, id: u32, domain: u32, random: &mut Random) {
        let before = self.account.attached[function];
        let has_mappings = (self.account.domains.get(&domain)).is_some_and(|mappings| !mappings.is_empty());
        let refuses = match &self.functions[function] {
            Some(there) if before != Some(domain) && has_mappings && random.below(4) == 0 => {
                there.fake.fail(Op::Map, 1);
                true
            }
            _ => false,
        };
        let served = self.domains.serve(Request::Attach {
            domain,
            endpoint: id,
            flags: 0,
            reserved: false,
        });
        if self.functions[function].is_none() {
            assert_eq!(served, Err(Status::NoEnt));
            return;
        }
        assert_eq!(served.is_err(), refuses, "{served:?}");
        if before != Some(domain) {
            self.account.leave(function);
        }
        if served.is_ok() {
            self.account.domains.entry(domain).or_default();
            self.account.attached[function] = Some(domain);
        }
    }

    fn map(&mut self, domain: u32, random: &mut Random) {
        let (page, pages, guest) = (random.below(PAGES), 1 + random.below(6), random.below(1000));
        let refuses = self.refusing(domain, random);
        let served = self.domains.serve(Request::Map {
            domain,
            virt: virt(page, pages),
            phys_start: guest * PAGE,
            flags: 3,
        });
        let Some(mappings) = self.account.domains.get_mut(&domain) else {
            assert_eq!(served, Err(Status::NoEnt));
            return;
        };
        let overlaps = |(first, (count, _)): (&u64, &(u64, u64))| *first < page + pages && page < first + count;
        let expected = match (mappings.iter().any(overlaps), refuses) {
            (true, _) => Err(Status::Inval),
            (false, true) => Err(Status::NoMem),
            (false, false) => Ok(()),
        };
        assert_eq!(served, expected);
        if served.is_ok() {
            mappings.insert(page, (pages, guest));
        } else if refuses && expected == Err(Status::Inval) {
            // The host was not asked, and refuses nothing any more.
            for there in self.functions.iter().flatten() {
                there.fake.fail(Op::Map, u64::MAX);
            }
        }
    }

    fn unmap(&mut self, domain: u32, random: &mut Random) {
        let (page, pages) = (random.below(PAGES), 1 + random.below(10));
        let served = self.domains.serve(Request::Unmap {
            domain,
            virt: virt(page, pages),
        });
        let Some(mappings) = self.account.domains.get_mut(&domain) else {
            assert_eq!(served, Err(Status::NoEnt));
            return;
        };
        let end = page + pages;
        let cut = mappings.iter().any(|(first, (count, _))| {
            let last = first + count;
            (*first < page && page < last) || (*first < end && end < last)
        });
        assert_eq!(served, if cut { Err(Status::Range) } else { Ok(()) });
        if !cut {
            mappings.retain(|first, _| !(page..end).contains(first));
        }
    }

    fn compare(&self, seed: u64) {
        let base = self.ram.regions()[0].as_ptr() as u64;
        for (number, there) in self.functions.iter().enumerate() {
            let Some(there) = there else { continue };
            let mut bytes = 0;
            for page in 0..PAGES + 6 {
                let expected = self.account.reaches(number, page);
                bytes += u64::from(expected.is_some()) * PAGE;
                let found = there.fake.translate(IOVA + page * PAGE, PAGE).ok();
                assert_eq!(
                    found,
                    expected.map(|guest| base + guest * PAGE),
                    "page {page} of function {number}, seed {seed}"
                );
            }
            assert_eq!(there.fake.mapped_bytes(), bytes, "nothing else is mapped, seed {seed}");
        }
        let any = self
            .functions
            .iter()
            .flatten()
            .any(|there| there.fake.mapped_bytes() > 0);
        assert_eq!(
            self.ram.pins().is_pinned(),
            any,
            "pages stay while they are mapped, seed {seed}"
        );
    }
}

#[test]
fn at_any_time_a_function_reaches_exactly_what_is_mapped_in_its_domain() {
    let mut mapped = 0;
    for seed in 0..60 {
        let (mut world, mut random) = (World::new(), Random(seed));
        for _ in 0..120 {
            world.step(&mut random);
            world.compare(seed);
            mapped += world.endpoints.mapped();
        }
        world.domains.clear();
        world.account = Account::default();
        world.compare(seed);
    }
    assert!(mapped > 0, "nothing was ever mapped");
}
