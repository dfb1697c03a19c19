//! Places for connections: so many at each listener, and so many of one address where strangers come. Knows no connection.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::limits::{Seat, Seats};

/// The places of a listener.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    free: Arc<Semaphore>,
    most: u32,
    addresses: Seats,
    per_address: Option<usize>,
}

/// A connection's place, until the last clone is dropped: a connection that has changed its protocol keeps it.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    _all: Arc<(OwnedSemaphorePermit, Option<Seat>)>,
}

/// By what an address is counted: its network where a client has a whole one.
pub(crate) fn counted_as(address: IpAddr) -> String {
    match address.to_canonical() {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).to_string(),
    }
}

impl Places {
    /// So many, and so many of one address.
    pub(crate) fn new(most: usize, per_address: Option<usize>) -> Self {
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        Self {
            free: Arc::new(Semaphore::new(most as usize)),
            most,
            addresses: Seats::default(),
            per_address,
        }
    }

    /// Waits for a place that nobody has. Nothing closes them, so that there always is one in the end.
    pub(crate) async fn free(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.free).acquire_owned().await.ok()
    }

    /// The place of a client of this address; `None` if that address has as many as it may have.
    pub(crate) fn take(&self, free: OwnedSemaphorePermit, address: IpAddr) -> Option<Place> {
        let seat = match self.per_address {
            Some(most) => Some(self.addresses.take(&counted_as(address), most)?),
            None => None,
        };
        let _all = Arc::new((free, seat));
        Some(Place { _all })
    }

    /// Waits until nobody has one.
    pub(crate) async fn all_free(&self) {
        // Nobody closes it.
        drop(self.free.acquire_many(self.most).await);
    }

    /// How many are taken.
    pub(crate) fn taken(&self) -> usize {
        (self.most as usize).saturating_sub(self.free.available_permits())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_one_client() {
        let is = |text: &str| counted_as(text.parse().unwrap());
        assert_eq!(is("192.0.2.1"), "192.0.2.1");
        assert_eq!(is("::ffff:192.0.2.1"), "192.0.2.1");
        assert_eq!(is("2001:db8:1:2:3:4:5:6"), is("2001:db8:1:2::1"));
        assert_ne!(is("2001:db8:1:3::1"), is("2001:db8:1:2::1"));
    }

    #[tokio::test]
    async fn a_place_is_taken_until_the_last_of_its_owners_is_gone() {
        let places = Places::new(3, Some(1));
        let (one, other) = ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap());
        let take = async |address| places.take(places.free().await.unwrap(), address);
        let first = take(one).await.unwrap();
        let upgraded = first.clone();
        drop(first);
        assert!(take(one).await.is_none() && take(other).await.is_some());
        assert_eq!(places.taken(), 1);
        drop(upgraded);
        assert!(take(one).await.is_some());
        places.all_free().await;
        assert_eq!(places.taken(), 0);
    }
}
