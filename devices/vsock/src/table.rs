//! The table of connections: slots with generations, found by ports; the round of those with something to send, and
//! the line of those that wait for an answer.
//!
//! Knows of a connection only whether it is in either, and how much room it was promised.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use crate::connection::Connection;
use crate::credit::Budget;

/// The most connections at once, those still greeting or closing included.
pub(crate) const MAX_CONNECTIONS: usize = 1024;

/// What tells connections apart on the wire; the other half of each address is fixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ports {
    pub(crate) guest: u32,
    pub(crate) host: u32,
}

/// Names a connection for as long as it lives, and nothing afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    slot: u32,
    generation: u32,
}

impl Key {
    /// As an epoll token: never below 2^32, which leaves the small ones for others.
    pub(crate) fn token(self) -> u64 {
        (u64::from(self.generation) << 32) | u64::from(self.slot)
    }

    /// Out of an epoll token.
    pub(crate) fn from_token(token: u64) -> Self {
        Self {
            slot: u32::try_from(token & 0xffff_ffff).unwrap_or(u32::MAX),
            generation: u32::try_from(token >> 32).unwrap_or(u32::MAX),
        }
    }
}

#[derive(Debug)]
struct Slot {
    generation: u32,
    connection: Option<Connection>,
}

/// All connections of a guest.
#[derive(Debug, Default)]
pub(crate) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    by_ports: HashMap<Ports, Key>,
    round: VecDeque<Key>,
    // Whose time ends first comes first.
    waiting: VecDeque<(Instant, Key)>,
    budget: Budget,
}

impl Table {
    /// Whether no connection can be added.
    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() >= MAX_CONNECTIONS
    }

    /// Adds a connection that has no ports yet, and promises it room. `None` when the table is full.
    pub(crate) fn insert(&mut self, mut connection: Connection) -> Option<Key> {
        if self.is_full() {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(Slot {
                    generation: 1,
                    connection: None,
                });
                u32::try_from(self.slots.len() - 1).ok()?
            }
        };
        let place = self.slots.get_mut(slot as usize)?;
        connection.credit.promise(self.budget.grant());
        place.connection = Some(connection);
        Some(Key {
            slot,
            generation: place.generation,
        })
    }

    /// The connection `key`, if it still lives.
    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut Connection> {
        self.slots
            .get_mut(key.slot as usize)
            .filter(|slot| slot.generation == key.generation)
            .and_then(|slot| slot.connection.as_mut())
    }

    /// The connection with these ports.
    pub(crate) fn find(&self, ports: Ports) -> Option<Key> {
        self.by_ports.get(&ports).copied()
    }

    /// Lets the connection be found by its ports.
    pub(crate) fn bind(&mut self, key: Key, ports: Ports) {
        if let Some(connection) = self.get_mut(key) {
            connection.ports = ports;
            self.by_ports.insert(ports, key);
        }
    }

    /// Lets the connection be found no longer; the guest may use its ports again.
    pub(crate) fn unbind(&mut self, key: Key, ports: Ports) {
        if self.find(ports) == Some(key) {
            self.by_ports.remove(&ports);
        }
    }

    /// Takes a connection out. Its descriptor leaves the epoll set when it is closed, as nobody else has it.
    pub(crate) fn remove(&mut self, key: Key) -> Option<Connection> {
        let slot = self
            .slots
            .get_mut(key.slot as usize)
            .filter(|slot| slot.generation == key.generation)?;
        let connection = slot.connection.take()?;
        // Zero would make tokens that look like the fixed ones.
        slot.generation = slot.generation.wrapping_add(1).max(1);
        self.free.push(key.slot);
        self.budget.take_back(connection.credit.alloc());
        self.unbind(key, connection.ports);
        if connection.queued {
            self.round.retain(|&other| other != key);
        }
        if connection.deadline.is_some() {
            self.waiting.retain(|&(_, other)| other != key);
        }
        Some(connection)
    }

    /// Every connection's key.
    pub(crate) fn keys(&self) -> Vec<Key> {
        let live = (0_u32..).zip(&self.slots).filter(|(_, slot)| slot.connection.is_some());
        live.map(|(slot, place)| Key {
            slot,
            generation: place.generation,
        })
        .collect()
    }

    /// Puts a connection at the end of the round, if it is not in it.
    pub(crate) fn enqueue(&mut self, key: Key) {
        if let Some(connection) = self.get_mut(key)
            && !std::mem::replace(&mut connection.queued, true)
        {
            self.round.push_back(key);
        }
    }

    /// Takes the next of the round.
    pub(crate) fn dequeue(&mut self) -> Option<Key> {
        let key = self.round.pop_front()?;
        if let Some(connection) = self.get_mut(key) {
            connection.queued = false;
        }
        Some(key)
    }

    /// Whether nobody is in the round.
    pub(crate) fn is_idle(&self) -> bool {
        self.round.is_empty()
    }

    /// How many are in the round.
    pub(crate) fn round_len(&self) -> usize {
        self.round.len()
    }

    /// Who has the `place`th turn from now.
    pub(crate) fn round_at(&self, place: usize) -> Option<Key> {
        self.round.get(place).copied()
    }

    /// The connection has until `deadline` for its next step; `None`: for ever.
    pub(crate) fn set_deadline(&mut self, key: Key, deadline: Option<Instant>) {
        let Some(connection) = self.get_mut(key) else { return };
        if std::mem::replace(&mut connection.deadline, deadline).is_some() {
            self.waiting.retain(|&(_, other)| other != key);
        }
        if let Some(deadline) = deadline {
            let place = self.waiting.partition_point(|&(other, _)| other <= deadline);
            self.waiting.insert(place, (deadline, key));
        }
    }

    /// Whose time ends next, and when.
    pub(crate) fn next_deadline(&self) -> Option<(Instant, Key)> {
        self.waiting.front().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Stage;

    fn table_of(count: usize) -> (Table, Vec<Key>) {
        let mut table = Table::default();
        let keys = (0..count).map_while(|_| table.insert(Connection::new(Stage::Established, None)));
        let keys = keys.collect();
        (table, keys)
    }

    #[test]
    fn it_holds_so_many_and_no_more() {
        let (mut table, keys) = table_of(MAX_CONNECTIONS + 1);
        assert_eq!(keys.len(), MAX_CONNECTIONS);
        assert!(table.is_full());
        table.remove(keys[17]);
        assert!(table.insert(Connection::new(Stage::Established, None)).is_some());
    }

    #[test]
    fn a_stale_key_finds_nobody() {
        let (mut table, keys) = table_of(1);
        let ports = Ports { guest: 1, host: 2 };
        table.bind(keys[0], ports);
        assert_eq!(table.find(ports), Some(keys[0]));
        table.remove(keys[0]);
        assert_eq!(table.find(ports), None);
        let again = table.insert(Connection::new(Stage::Established, None)).unwrap();
        assert!(table.get_mut(keys[0]).is_none());
        assert_eq!(Key::from_token(again.token()), again);
        assert!(again.token() > u64::from(u32::MAX));
    }

    #[test]
    fn nothing_is_left_of_the_gone() {
        let (mut table, keys) = table_of(2);
        let now = Instant::now();
        for &key in &keys {
            table.set_deadline(key, Some(now));
            table.set_deadline(key, Some(now));
            table.enqueue(key);
        }
        assert_eq!((table.waiting.len(), table.round.len()), (2, 2));
        table.remove(keys[0]);
        assert_eq!((table.waiting.len(), table.round.len()), (1, 1));
        assert_eq!(table.next_deadline(), Some((now, keys[1])));
        table.set_deadline(keys[1], None);
        assert_eq!(table.next_deadline(), None);
    }

    #[test]
    fn whose_time_ends_first_is_first_whenever_it_came() {
        let (mut table, keys) = table_of(3);
        let now = Instant::now();
        for (key, seconds) in keys.iter().zip([30, 10, 20]) {
            table.set_deadline(*key, Some(now + std::time::Duration::from_secs(seconds)));
        }
        let order = std::iter::from_fn(|| {
            let (_, key) = table.next_deadline()?;
            table.remove(key);
            Some(key)
        });
        assert_eq!(order.collect::<Vec<_>>(), [keys[1], keys[2], keys[0]]);
    }

    #[test]
    fn a_connection_that_is_gone_gives_its_room_back() {
        let (mut table, keys) = table_of(MAX_CONNECTIONS);
        let room = |table: &mut Table, key| table.get_mut(key).unwrap().credit.alloc();
        let (first, last) = (room(&mut table, keys[0]), room(&mut table, keys[MAX_CONNECTIONS - 1]));
        assert!(first > last && last > 0, "{first} {last}");
        table.remove(keys[0]);
        let again = table.insert(Connection::new(Stage::Established, None)).unwrap();
        assert_eq!(room(&mut table, again), first);
    }

    #[test]
    fn the_round_is_fair_and_skips_the_gone() {
        let (mut table, keys) = table_of(3);
        for key in [keys[0], keys[1], keys[0], keys[2]] {
            table.enqueue(key);
        }
        table.remove(keys[1]);
        assert_eq!(table.dequeue(), Some(keys[0]));
        table.enqueue(keys[0]);
        assert_eq!(table.dequeue(), Some(keys[2]));
        assert_eq!(table.dequeue(), Some(keys[0]));
        assert_eq!(table.dequeue(), None);
        assert!(table.is_idle());
    }
}
