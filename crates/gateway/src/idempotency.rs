//! Requests that are sent twice and done once: what became of the first is kept under the key that the client has sent with both. In
//! memory, for a day: a gateway that is restarted knows none. Knows no endpoint.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::Error;

/// How long an outcome is kept.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// So many are kept; the oldest go.
const MOST: usize = 10_000;

/// The longest key.
const MAX_KEY: usize = 255;

/// Outcomes by tenant and key.
#[derive(Debug, Default)]
pub(crate) struct Idempotency(Mutex<HashMap<(String, String), Entry>>);

#[derive(Debug)]
struct Entry {
    begun: Instant,
    request: [u8; 32],
    /// The sandbox that was made; `None` as long as it is being made.
    sandbox: Option<String>,
}

/// What is to be done with a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn<'a> {
    /// Carry it out.
    First(Begun<'a>),
    /// It was carried out: this sandbox was made.
    Again(String),
}

/// A request that is being carried out. If nothing is said of it, it was not, and may be tried again.
#[derive(Debug)]
pub(crate) struct Begun<'a> {
    all: &'a Idempotency,
    key: Option<(String, String)>,
}

impl PartialEq for Begun<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.key == other.key
    }
}

impl Eq for Begun<'_> {}

impl Idempotency {
    /// A request of this body, with the key that came with it.
    pub(crate) fn begin(&self, tenant: &str, key: Option<&str>, body: &[u8]) -> Result<Turn<'_>, Error> {
        let Some(key) = key else {
            return Ok(Turn::First(Begun { all: self, key: None }));
        };
        check(key)?;
        let (name, request) = ((tenant.to_owned(), key.to_owned()), Sha256::digest(body).into());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        match all.get(&name).filter(|entry| now.duration_since(entry.begun) < KEPT) {
            Some(entry) if entry.request != request => return Err(Error::OtherRequest),
            Some(Entry { sandbox: None, .. }) => return Err(Error::InProgress),
            Some(Entry { sandbox: Some(id), .. }) => return Ok(Turn::Again(id.clone())),
            None => (),
        }
        if all.len() >= MOST {
            forget_oldest(&mut all);
        }
        let entry = Entry {
            begun: now,
            request,
            sandbox: None,
        };
        all.insert(name.clone(), entry);
        Ok(Turn::First(Begun {
            all: self,
            key: Some(name),
        }))
    }
}

/// Those go that are done, the older half of them.
fn forget_oldest(all: &mut HashMap<(String, String), Entry>) {
    let mut times: Vec<Instant> = all.values().map(|entry| entry.begun).collect();
    times.sort_unstable();
    if let Some(middle) = times.get(times.len() / 2).copied() {
        all.retain(|_, entry| entry.begun > middle || entry.sandbox.is_none());
    }
}

impl Begun<'_> {
    /// It was carried out.
    pub(crate) fn made(mut self, id: &str) {
        if let Some(key) = self.key.take() {
            let mut all = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(entry) = all.get_mut(&key) {
                entry.sandbox = Some(id.to_owned());
            }
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.all.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        }
    }
}

fn check(key: &str) -> Result<(), Error> {
    match (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Ok(()),
        false => Err(Error::invalid(
            "the Idempotency-Key is to have 1 to 255 printable characters without blanks",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first<'a>(all: &'a Idempotency, tenant: &str, key: &str) -> Begun<'a> {
        match all.begin(tenant, Some(key), b"x") {
            Ok(Turn::First(begun)) => begun,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_is_carried_out_once() {
        let all = Idempotency::default();
        let begun = first(&all, "a", "k");
        assert!(matches!(all.begin("a", Some("k"), b"x"), Err(Error::InProgress)));
        drop(first(&all, "b", "k"));
        begun.made("id");
        assert_eq!(all.begin("a", Some("k"), b"x").unwrap(), Turn::Again("id".into()));
        assert!(matches!(all.begin("a", Some("k"), b"y"), Err(Error::OtherRequest)));
        assert!(all.begin("a", Some(""), b"x").is_err());
        assert!(all.begin("a", Some("a b"), b"x").is_err());
    }

    #[test]
    fn what_failed_may_be_tried_again() {
        let all = Idempotency::default();
        drop(first(&all, "a", "k"));
        drop(first(&all, "a", "k"));
        assert!(all.0.lock().unwrap().is_empty());
        assert!(matches!(all.begin("a", None, b"x"), Ok(Turn::First(_))));
    }

    #[test]
    fn only_so_many_are_kept() {
        let all = Idempotency::default();
        let held = first(&all, "a", "held");
        for n in 0..=MOST {
            first(&all, "a", &n.to_string()).made("id");
        }
        assert!(all.0.lock().unwrap().len() <= MOST);
        assert!(matches!(all.begin("a", Some("held"), b"x"), Err(Error::InProgress)));
        held.made("id");
    }
}
