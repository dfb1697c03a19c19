//! What clients say a sandbox may reach, as the node understands it. Asks nobody.

use base::egress::MAX_RANGES;
use base::{Cidr, Egress};
use serde_json::Value;

use crate::Error;
use crate::api::models::{Network, NetworkUpdate};

/// Rules as clients write them.
#[derive(Debug, Default)]
struct Asked<'a> {
    allow_out: Option<&'a [String]>,
    deny_out: Option<&'a [String]>,
    internet: Option<bool>,
}

/// Rules of a sandbox that is to be made; `None` where nothing is said.
pub(crate) fn of_new(network: Option<&Network>, internet: Option<bool>) -> Result<Option<Egress>, Error> {
    let asked = Asked {
        allow_out: network.and_then(|network| network.allow_out.as_deref()),
        deny_out: network.and_then(|network| network.deny_out.as_deref()),
        internet,
    };
    asked.says().then(|| asked.egress()).transpose()
}

/// Rules in place of those that a sandbox has: of what is left out nothing stays.
pub(crate) fn of_update(asked: &NetworkUpdate) -> Result<Egress, Error> {
    refuse_unserved(&[
        (has(asked.dns_servers.as_deref()), "dnsServers"),
        (says(asked.egress_proxy.as_ref()), "egressProxy"),
        (says(asked.rules.as_ref()), "rules"),
    ])?;
    let asked = Asked {
        allow_out: asked.allow_out.as_deref(),
        deny_out: asked.deny_out.as_deref(),
        internet: asked.allow_internet_access,
    };
    asked.egress()
}

impl Asked<'_> {
    /// That it has the internet is what some clients say of each: what a snapshot denies is not lifted by that.
    fn says(&self) -> bool {
        has(self.allow_out) || has(self.deny_out) || self.internet == Some(false)
    }

    fn egress(&self) -> Result<Egress, Error> {
        let (allow, deny) = (self.allow_out.unwrap_or_default(), self.deny_out.unwrap_or_default());
        let count = allow.len() + deny.len();
        if count > MAX_RANGES {
            return Err(Error::invalid(format!(
                "`network` has {count} addresses and ranges: `allowOut` and `denyOut` may have {MAX_RANGES} together"
            )));
        }
        let allow = ranges("allowOut", allow)?;
        let mut deny = ranges("denyOut", deny)?;
        if self.internet == Some(false) && !deny.contains(&Cidr::ALL_V4) {
            deny.push(Cidr::ALL_V4);
        }
        Egress::new(allow, deny).map_err(|error| Error::invalid(error.to_string()))
    }
}

/// The ranges of a list. Names are not among them: whom a name stands for is known to who reads what is sent, which nobody does here.
fn ranges(list: &str, texts: &[String]) -> Result<Vec<Cidr>, Error> {
    let range = |text: &String| {
        text.parse().map_err(|error| match is_name(text) {
            true => Error::invalid(format!(
                "`network.{list}` has a name of hosts, {text:?}, which is not served by this version of Basalt: give addresses and ranges of them"
            )),
            false => Error::invalid(format!("`network.{list}`: {error}")),
        })
    };
    texts.iter().map(range).collect()
}

/// It looks like one, with a wildcard or without.
fn is_name(text: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_*".contains(&byte))
    };
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    text.len() <= 253 && text.split('.').all(is_part) && !text.split('.').all(is_number)
}

/// There is something in a list.
pub(crate) fn has<T>(list: Option<&[T]>) -> bool {
    list.is_some_and(|list| !list.is_empty())
}

/// There is something in it.
pub(crate) fn says(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null) => false,
        Some(Value::Object(map)) => !map.is_empty(),
        Some(Value::Array(list)) => !list.is_empty(),
        Some(_) => true,
    }
}

/// Fields of `network` that can only be left out; the first that is there is named.
pub(crate) fn refuse_unserved(fields: &[(bool, &str)]) -> Result<(), Error> {
    match fields.iter().find(|(is_there, _)| *is_there) {
        Some((_, what)) => Err(Error::invalid(format!(
            "`network.{what}` is not served by this version of Basalt: leave it out"
        ))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn new(mut asked: Value) -> Result<Option<Egress>, Error> {
        let internet = asked["internet"].take().as_bool();
        of_new(Some(&serde_json::from_value(asked).unwrap()), internet)
    }

    fn update(asked: Value) -> Result<Egress, Error> {
        of_update(&serde_json::from_value(asked).unwrap())
    }

    fn shown(egress: &Egress) -> Value {
        serde_json::to_value(egress).unwrap()
    }

    #[test]
    fn what_is_said_is_what_is_kept() {
        assert_eq!(of_new(None, None).unwrap(), None);
        assert_eq!(new(json!({"allowOut": [], "denyOut": []})).unwrap(), None);
        let lists = json!({"allowOut": ["1.1.1.1", "8.8.8.0/24"], "denyOut": ["0.0.0.0/0"]});
        let both = new(lists.clone()).unwrap().unwrap();
        assert_eq!(
            shown(&both),
            json!({"allow": ["1.1.1.1", "8.8.8.0/24"], "deny": ["0.0.0.0/0"]})
        );
        assert_eq!(update(lists).unwrap(), both);
        // Beside a list it denies the rest, and a second time nothing.
        let listed = new(json!({"allowOut": ["1.1.1.1"], "internet": false}))
            .unwrap()
            .unwrap();
        assert_eq!(shown(&listed), json!({"allow": ["1.1.1.1"], "deny": ["0.0.0.0/0"]}));
        let twice = new(json!({"denyOut": ["0.0.0.0/0"], "internet": false}))
            .unwrap()
            .unwrap();
        assert!(twice.is_nothing() && twice.deny().len() == 1);
        assert_eq!(of_new(None, Some(true)).unwrap(), None);
        // What an update leaves out is gone.
        assert_eq!(update(json!({})).unwrap(), Egress::default());
        assert_eq!(
            update(json!({"allow_internet_access": true})).unwrap(),
            Egress::default()
        );
        assert!(update(json!({"allow_internet_access": false})).unwrap().is_nothing());
    }

    #[test]
    fn what_cannot_be_a_rule_is_named() {
        let refusal = |asked: Value| {
            let error = new(asked.clone()).unwrap_err();
            assert_eq!(error.status(), 400, "{asked}");
            assert_eq!(update(asked).unwrap_err().to_string(), error.to_string());
            error.to_string()
        };
        for name in ["example.com", "*.example.com", "localhost", "1.1.1.x"] {
            let told = refusal(json!({"allowOut": [name], "denyOut": ["0.0.0.0/0"]}));
            assert!(told.contains(name) && told.contains("name of hosts"), "{told}");
        }
        assert!(refusal(json!({"denyOut": ["example.com"]})).contains("`network.denyOut`"));
        for wrong in ["", "1.1.1", "1.1.1.1/33", "1.1.1.1:80", "x y", "\u{1b}[31m"] {
            let told = refusal(json!({"denyOut": [wrong]}));
            assert!(told.contains("10.0.0.0/8") && !told.contains('\u{1b}'), "{told}");
        }
        assert!(refusal(json!({"denyOut": ["10.1.2.3/8"]})).contains("write 10.0.0.0/8"));
        assert!(refusal(json!({"allowOut": ["::ffff:1.2.3.4"]})).contains("write it as IPv4"));
        let many = vec!["1.1.1.1"; 10_000];
        assert!(refusal(json!({"allowOut": many})).contains("10000"));
        let most = vec!["1.1.1.1"; MAX_RANGES];
        assert!(new(json!({"denyOut": most})).is_ok());
        assert!(refusal(json!({"denyOut": most, "allowOut": ["1.1.1.1"]})).contains("513"));
        // The one that denies the rest counts, too.
        assert!(
            new(json!({"denyOut": most, "internet": false}))
                .unwrap_err()
                .to_string()
                .contains("513")
        );
    }

    #[test]
    fn what_an_update_cannot_do_is_refused() {
        for (asked, name) in [
            (json!({"dnsServers": ["1.1.1.1"]}), "network.dnsServers"),
            (json!({"egressProxy": {"address": "a:1"}}), "network.egressProxy"),
            (json!({"rules": {"a": [{}]}}), "network.rules"),
        ] {
            let told = update(asked).unwrap_err().to_string();
            assert!(told.contains(name), "{told}");
        }
        assert!(update(json!({"dnsServers": [], "egressProxy": null, "rules": {}})).is_ok());
    }
}
