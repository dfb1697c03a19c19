//! Which ports are to be forwarded, and for whom: those that the lab says are published, and those that somebody has
//! reserved for what is about to be. The rules are made to agree with it. Does not know where either comes from.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};

use super::forward::{Forward, Rules};

/// A port that is to be forwarded is one of these.
pub(crate) struct Table<R> {
    rules: R,
    /// What the lab says is published, with whose it is.
    published: BTreeMap<Forward, String>,
    /// By the number of the reservation.
    reserved: BTreeMap<u64, BTreeSet<Forward>>,
    /// What is forwarded.
    there: BTreeSet<Forward>,
    /// What could not be forwarded is told once.
    told: BTreeSet<Forward>,
}

impl<R: Rules> Table<R> {
    /// Nothing is published yet, as far as is known; what is forwarded already is looked up.
    pub(crate) fn new(mut rules: R) -> Result<Self> {
        let there = rules.list()?.into_iter().collect();
        Ok(Self {
            rules,
            published: BTreeMap::new(),
            reserved: BTreeMap::new(),
            there,
            told: BTreeSet::new(),
        })
    }

    /// Forwards ports for as long as the reservation lasts, all of them or none. `owner` has them already, maybe.
    ///
    /// # Errors
    /// One is taken: the error names it and says what to do.
    pub(crate) fn reserve(&mut self, number: u64, owner: Option<&str>, ports: &[Forward]) -> Result<()> {
        for port in ports {
            self.check(port, owner)?;
        }
        let mut new = Vec::new();
        for port in ports {
            if self.there.contains(port) {
                continue;
            }
            if let Err(error) = self.rules.add(port) {
                for port in new {
                    self.forget(&port);
                }
                return Err(error);
            }
            self.there.insert(*port);
            new.push(*port);
        }
        self.reserved.insert(number, ports.iter().copied().collect());
        Ok(())
    }

    fn check(&self, port: &Forward, owner: Option<&str>) -> Result<()> {
        let mut published = self.published.iter().filter(|(other, _)| other.conflicts_with(port));
        if let Some((_, other)) = published.find(|(_, other)| Some(other.as_str()) != owner) {
            bail!(
                "port {} of this machine is published by the sandbox {other} already: choose another one, or end that \
                 sandbox (`basalt stop {other}`)",
                port.port
            );
        }
        let mut reserved = self.reserved.values().flatten();
        if reserved.any(|other| other.conflicts_with(port)) {
            bail!(
                "port {} of this machine is about to be published by another sandbox: choose another one",
                port.port
            );
        }
        Ok(())
    }

    /// Whether a reservation of these ports would fail for what is known of the lab, which may have changed.
    pub(crate) fn is_taken(&self, owner: Option<&str>, ports: &[Forward]) -> bool {
        ports.iter().any(|port| {
            let is_stale = !self.is_wanted(port) && self.there.iter().any(|other| other.conflicts_with(port));
            is_stale || self.check(port, owner).is_err()
        })
    }

    /// The reservation is over: only what is published stays forwarded.
    pub(crate) fn release(&mut self, number: u64) {
        self.reserved.remove(&number);
        self.reconcile();
    }

    /// What is published now, with whose it is.
    pub(crate) fn publish(&mut self, published: BTreeMap<Forward, String>) {
        self.published = published;
        self.reconcile();
    }

    /// Nothing is forwarded, and nothing is to be.
    pub(crate) fn is_empty(&self) -> bool {
        self.published.is_empty() && self.reserved.is_empty() && self.there.is_empty()
    }

    fn is_wanted(&self, port: &Forward) -> bool {
        self.published.contains_key(port) || self.reserved.values().any(|ports| ports.contains(port))
    }

    /// Makes the rules agree with the table. What fails is tried again when something changes.
    fn reconcile(&mut self) {
        let unwanted: Vec<Forward> = self
            .there
            .iter()
            .filter(|port| !self.is_wanted(port))
            .copied()
            .collect();
        for port in unwanted {
            self.forget(&port);
        }
        let published: Vec<Forward> = self.published.keys().copied().collect();
        self.told.retain(|port| published.contains(port));
        for port in published {
            if self.there.contains(&port) {
                continue;
            }
            match self.rules.add(&port) {
                Ok(()) => {
                    self.there.insert(port);
                    self.told.remove(&port);
                }
                Err(error) if self.told.insert(port) => eprintln!("basalt-lab: {error:#}"),
                Err(_) => {}
            }
        }
    }

    fn forget(&mut self, port: &Forward) {
        match self.rules.remove(port) {
            Ok(()) => drop(self.there.remove(port)),
            Err(error) => eprintln!("basalt-lab: {error:#}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules in memory; a port of `taken` is another program's.
    #[derive(Default)]
    struct Fake {
        rules: BTreeSet<Forward>,
        taken: BTreeSet<u16>,
    }

    impl Rules for Fake {
        fn list(&mut self) -> Result<Vec<Forward>> {
            Ok(self.rules.iter().copied().collect())
        }

        fn add(&mut self, forward: &Forward) -> Result<()> {
            if self.taken.contains(&forward.port) {
                bail!("port {} of this machine is taken", forward.port);
            }
            assert!(self.rules.insert(*forward), "{forward} is there");
            Ok(())
        }

        fn remove(&mut self, forward: &Forward) -> Result<()> {
            assert!(self.rules.remove(forward), "{forward} is not there");
            Ok(())
        }
    }

    fn port(text: &str) -> Forward {
        text.parse().unwrap()
    }

    fn published(of: &[(&str, &str)]) -> BTreeMap<Forward, String> {
        of.iter()
            .map(|(text, owner)| (port(text), (*owner).to_owned()))
            .collect()
    }

    fn there(table: &Table<Fake>) -> Vec<String> {
        assert_eq!(table.there, table.rules.rules);
        table.there.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_reservation_turns_into_a_published_port_without_a_gap() {
        let mut table = Table::new(Fake::default()).unwrap();
        let web = port("tcp:127.0.0.1:80");
        table.reserve(1, None, &[web]).unwrap();
        assert_eq!(there(&table), ["tcp:127.0.0.1:80"]);
        // Another sandbox's list changes nothing.
        table.publish(published(&[("udp:0.0.0.0:53", "dns")]));
        assert_eq!(there(&table), ["tcp:127.0.0.1:80", "udp:0.0.0.0:53"]);
        table.publish(published(&[("udp:0.0.0.0:53", "dns"), ("tcp:127.0.0.1:80", "web")]));
        table.release(1);
        assert_eq!(there(&table), ["tcp:127.0.0.1:80", "udp:0.0.0.0:53"]);
        table.publish(BTreeMap::new());
        assert!(table.is_empty() && there(&table).is_empty());
    }

    #[test]
    fn a_reservation_that_comes_to_nothing_leaves_nothing() {
        let mut table = Table::new(Fake::default()).unwrap();
        table.reserve(1, None, &[port("tcp:0.0.0.0:80")]).unwrap();
        table.release(1);
        assert!(table.is_empty() && there(&table).is_empty());
        let mut table = Table::new(Fake {
            taken: BTreeSet::from([81]),
            ..Fake::default()
        })
        .unwrap();
        let ports = [port("tcp:0.0.0.0:80"), port("tcp:0.0.0.0:81")];
        let error = table.reserve(1, None, &ports).unwrap_err().to_string();
        assert!(error.contains("81"), "{error}");
        assert!(table.is_empty() && there(&table).is_empty());
    }

    #[test]
    fn two_sandboxes_cannot_have_one_port() {
        let mut table = Table::new(Fake::default()).unwrap();
        table.publish(published(&[("tcp:0.0.0.0:80", "web")]));
        // In the lab it is one port, whatever the address here.
        let error = table
            .reserve(1, None, &[port("tcp:127.0.0.1:80")])
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("port 80") && error.contains("basalt stop web"),
            "{error}"
        );
        table.reserve(1, None, &[port("udp:0.0.0.0:80")]).unwrap();
        let error = table
            .reserve(2, None, &[port("udp:0.0.0.0:80")])
            .unwrap_err()
            .to_string();
        assert!(error.contains("about to be published"), "{error}");
        // Its own port is no other's: it is being started again.
        table.reserve(3, Some("web"), &[port("tcp:0.0.0.0:80")]).unwrap();
        table.publish(BTreeMap::new());
        assert_eq!(there(&table), ["tcp:0.0.0.0:80", "udp:0.0.0.0:80"]);
    }

    #[test]
    fn what_an_earlier_server_has_left_is_kept_if_it_is_wanted() {
        let rules = BTreeSet::from([port("tcp:0.0.0.0:80"), port("tcp:0.0.0.0:81")]);
        let mut table = Table::new(Fake {
            rules,
            ..Fake::default()
        })
        .unwrap();
        assert!(table.is_taken(None, &[port("tcp:127.0.0.1:81")]));
        table.publish(published(&[("tcp:0.0.0.0:80", "web")]));
        assert_eq!(there(&table), ["tcp:0.0.0.0:80"]);
        assert!(!table.is_taken(None, &[port("tcp:127.0.0.1:81")]));
        assert!(table.is_taken(None, &[port("tcp:0.0.0.0:80")]));
        assert!(!table.is_taken(Some("web"), &[port("tcp:0.0.0.0:80")]));
    }

    #[test]
    fn what_could_not_be_forwarded_is_tried_again() {
        let mut table = Table::new(Fake {
            taken: BTreeSet::from([80]),
            ..Fake::default()
        })
        .unwrap();
        let web = published(&[("tcp:0.0.0.0:80", "web")]);
        table.publish(web.clone());
        assert!(there(&table).is_empty());
        table.rules.taken.clear();
        table.publish(web);
        assert_eq!(there(&table), ["tcp:0.0.0.0:80"]);
    }
}
