//! What every store has to do: one test-suite, for whatever [`ControlStore`](crate::ControlStore) a factory makes. A store's module says
//! `suite!(open())`, where `open()` makes an empty one with whatever has to live as long.

mod builds;

pub(crate) use builds::*;

use crate::quota::{Amount, Claim, InUse, Quota, RESERVED, SETTLED};
use crate::{Alias, AuditEntry, ControlStore, Error, KeyInfo, Secret};

/// Makes a test of each of the suite's checks.
macro_rules! suite {
    ($open:expr) => {
        $crate::suite::suite!($open;
            tenants_are_made_once,
            keys_are_found_until_they_are_revoked,
            the_last_use_is_written_once_a_minute,
            quotas_count_claims_and_what_there_is,
            a_claim_goes_by_itself,
            names_are_each_tenants_own,
            the_newest_of_the_audit_log_comes_first,
            templates_are_each_tenants_own,
            a_build_begins_once_and_has_its_tags_when_it_is_ready,
            a_tag_stays_with_the_build_that_was_asked_for_last,
            a_build_that_would_have_too_many_tags_is_refused,
            a_build_without_a_tag_is_of_no_use,
            what_does_not_come_to_its_end_is_bounded_and_goes,
            files_are_found_by_tenant_and_hash);
    };
    ($open:expr; $($check:ident),*) => {
        $(
            #[test]
            fn $check() {
                let (_lives, store) = $open;
                $crate::suite::$check(&store);
            }
        )*
    };
}
pub(crate) use suite;

fn info(secret: &Secret, tenant: &str, created: u64) -> KeyInfo {
    KeyInfo {
        id: secret.id.clone(),
        tenant: tenant.into(),
        name: "ci".into(),
        created,
        last_used: None,
        revoked: None,
    }
}

pub(crate) fn tenants_are_made_once(store: &impl ControlStore) {
    let made = store.make_tenant("b", 5).unwrap();
    assert_eq!((made.created, made.quota), (5, Quota::default()));
    let quota = Quota {
        sandboxes: Some(3),
        vcpus: None,
        memory: Some(u64::MAX >> 1),
        volumes: Some(7),
        volume_space: Some(1 << 40),
    };
    store.set_quota("b", quota).unwrap();
    store.make_tenant("a", 6).unwrap();
    let again = store.make_tenant("b", 7).unwrap();
    assert_eq!((again.created, again.quota), (5, quota));
    assert_eq!(store.quota("b").unwrap(), quota);
    assert!(quota.is_limited() && !store.quota("a").unwrap().is_limited());
    assert!(matches!(store.quota("c"), Err(Error::NoTenant(_))));
    let names: Vec<String> = store.tenants().unwrap().into_iter().map(|one| one.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert!(matches!(store.make_tenant("No", 1), Err(Error::TenantName(_))));
    assert!(matches!(store.set_quota("c", quota), Err(Error::NoTenant(_))));
}

pub(crate) fn keys_are_found_until_they_are_revoked(store: &impl ControlStore) {
    let (one, other) = (Secret::new().unwrap(), Secret::new().unwrap());
    assert!(matches!(
        store.add_key(&info(&one, "a", 1), &one.hash),
        Err(Error::NoTenant(_))
    ));
    for name in ["a", "b"] {
        store.make_tenant(name, 1).unwrap();
    }
    store.add_key(&info(&one, "a", 10), &one.hash).unwrap();
    store.add_key(&info(&other, "b", 9), &other.hash).unwrap();
    assert_eq!(store.find_key(&one.hash).unwrap(), Some(info(&one, "a", 10)));
    assert_eq!(store.find_key(&Secret::new().unwrap().hash).unwrap(), None);
    let ids = |tenant| -> Vec<String> { store.keys(tenant).unwrap().into_iter().map(|key| key.id).collect() };
    assert_eq!(ids(None), [other.id.clone(), one.id.clone()]);
    assert_eq!(ids(Some("a")).concat(), one.id);
    assert!(store.revoke_key(&one.id, 20).unwrap());
    assert!(!store.revoke_key(&one.id, 30).unwrap());
    assert!(!store.revoke_key("0000000000000000", 30).unwrap());
    assert_eq!(store.find_key(&one.hash).unwrap(), None);
    assert_eq!(store.keys(Some("a")).unwrap()[0].revoked, Some(20));
    assert!(store.find_key(&other.hash).unwrap().is_some());
}

pub(crate) fn the_last_use_is_written_once_a_minute(store: &impl ControlStore) {
    let secret = Secret::new().unwrap();
    store.make_tenant("a", 1).unwrap();
    store.add_key(&info(&secret, "a", 1), &secret.hash).unwrap();
    let last = || store.find_key(&secret.hash).unwrap().unwrap().last_used;
    assert_eq!(last(), None);
    for (now, seen) in [(100, 100), (159, 100), (160, 160), (161, 160)] {
        store.touch_key(&secret.id, now).unwrap();
        assert_eq!(last(), Some(seen), "at {now}");
    }
}

const ONE: Amount = Amount {
    sandboxes: 1,
    vcpus: 1,
    memory: 1 << 20,
};

fn claim(id: &str, tenant: &str) -> Claim {
    Claim {
        id: id.into(),
        tenant: tenant.into(),
        sandbox: None,
        amount: ONE,
    }
}

fn two_at_most(store: &impl ControlStore) {
    store.make_tenant("a", 1).unwrap();
    store.make_tenant("b", 1).unwrap();
    let quota = Quota {
        sandboxes: Some(2),
        ..Quota::default()
    };
    store.set_quota("a", quota).unwrap();
}

pub(crate) fn quotas_count_claims_and_what_there_is(store: &impl ControlStore) {
    two_at_most(store);
    let short = |claim: &Claim, in_use: &[InUse], now| match store.reserve(claim, in_use, now) {
        Ok(()) => false,
        Err(Error::Quota(shortage)) => {
            assert_eq!((shortage.what, shortage.limit), ("sandboxes", 2));
            true
        }
        Err(other) => panic!("{other}"),
    };
    let there = [InUse {
        sandbox: "s".into(),
        amount: ONE,
    }];
    assert!(!short(&claim("1", "a"), &there, 10));
    assert!(short(&claim("2", "a"), &there, 10), "one is there and one is claimed");
    assert!(!short(&claim("3", "b"), &there, 10), "others count for themselves");
    store.settle("1", "t", 11).unwrap();
    assert!(short(&claim("2", "a"), &there, 11), "it is made, and not seen yet");
    let both = [
        there[0].clone(),
        InUse {
            sandbox: "t".into(),
            ..there[0].clone()
        },
    ];
    assert!(short(&claim("2", "a"), &both, 11), "it is seen");
    store.release("t").unwrap();
    assert!(!short(&claim("2", "a"), &there, 11), "it is gone again");
    store.drop_claim("2").unwrap();
    assert!(!short(&claim("4", "a"), &there, 11), "nothing has become of it");
    assert!(matches!(
        store.reserve(&claim("5", "c"), &[], 1),
        Err(Error::NoTenant(_))
    ));
}

pub(crate) fn a_claim_goes_by_itself(store: &impl ControlStore) {
    two_at_most(store);
    store.reserve(&claim("1", "a"), &[], 100).unwrap();
    store.reserve(&claim("2", "a"), &[], 100).unwrap();
    store.settle("2", "s", 100).unwrap();
    let refused = |id: &str, now| store.reserve(&claim(id, "a"), &[], now).is_err();
    let settled = 100 + SETTLED.as_secs();
    assert!(refused("3", settled - 1));
    assert!(!refused("3", settled), "a sandbox that is there is seen by then");
    let reserved = 100 + RESERVED.as_secs();
    assert!(refused("4", reserved - 1));
    assert!(!refused("4", reserved), "whoever claimed it is gone");
}

pub(crate) fn names_are_each_tenants_own(store: &impl ControlStore) {
    let alias = |name: &str, tag: &str, target: &str| Alias {
        name: name.into(),
        tag: tag.into(),
        target: target.into(),
        assigned: 7,
    };
    for name in ["a", "b"] {
        store.make_tenant(name, 1).unwrap();
    }
    for (tenant, one) in [
        ("a", alias("web", "v1", "t1")),
        ("a", alias("web", "default", "t1")),
        ("b", alias("web", "default", "t9")),
        ("a", alias("web", "default", "t2")),
        ("a", alias("api", "default", "t2")),
    ] {
        store.set_alias(tenant, &one).unwrap();
    }
    let target = |tenant, name, tag| store.alias(tenant, name, tag).unwrap().map(|alias| alias.target);
    assert_eq!(target("a", "web", "default").as_deref(), Some("t2"));
    assert_eq!(target("a", "web", "v1").as_deref(), Some("t1"));
    assert_eq!(target("b", "web", "default").as_deref(), Some("t9"));
    assert_eq!(target("b", "web", "v1"), None);
    let all = store.aliases("a").unwrap();
    assert_eq!(
        all,
        [
            alias("api", "default", "t2"),
            alias("web", "default", "t2"),
            alias("web", "v1", "t1")
        ]
    );
    store.forget_target("a", "t2").unwrap();
    assert_eq!(store.aliases("a").unwrap(), [alias("web", "v1", "t1")]);
    assert_eq!(store.aliases("b").unwrap().len(), 1);
    assert!(store.set_alias("c", &alias("x", "default", "t")).is_err());
}

pub(crate) fn the_newest_of_the_audit_log_comes_first(store: &impl ControlStore) {
    let entry = |time_ns, tenant: &str| AuditEntry {
        time_ns,
        tenant: tenant.into(),
        key: "k".into(),
        action: "DELETE /sandboxes/{sandboxID}".into(),
        object: "0123456789ab".into(),
        outcome: 204,
    };
    for (time, tenant) in [(1, "a"), (2, "b"), (2, "a"), (3, "a")] {
        store.audit(&entry(time, tenant)).unwrap();
    }
    let times = |tenant, limit| -> Vec<u64> {
        let rows = store.audited(tenant, limit).unwrap();
        rows.into_iter().map(|row| row.time_ns).collect()
    };
    assert_eq!(times(None, 10), [3, 2, 2, 1]);
    assert_eq!(times(Some("a"), 2), [3, 2]);
    assert_eq!(store.audited(Some("b"), 10).unwrap(), [entry(2, "b")]);
}
