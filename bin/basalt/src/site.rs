//! Where sandboxes are: on this host's KVM, in the lab, or behind a gateway. Decided once, before the verb. Knows none of them.

use anyhow::{Result, bail};
use host::Verdict;

use crate::{gateway, places};

/// The variable that decides it by hand.
const VARIABLE: &str = "BASALT_ENGINE";

/// Where sandboxes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Site {
    /// On this host: its daemon has them.
    Local,
    /// In the lab.
    Lab {
        /// Why not on this host.
        why: String,
    },
    /// Behind the gateway at this address.
    Gateway {
        /// Its address, which was not looked at yet.
        url: String,
    },
}

/// The gateway that was named, by the flag or else by the environment.
pub(crate) fn gateway(flag: Option<&str>) -> Option<String> {
    let variable = || std::env::var(gateway::VARIABLE).ok();
    flag.map(str::to_owned).or_else(variable).filter(|url| !url.is_empty())
}

impl Site {
    /// The gateway, if one was named; else what the environment says; what this host can do, where it says nothing.
    ///
    /// # Errors
    /// The environment says something else.
    pub(crate) fn resolve(gateway: Option<String>) -> Result<Self> {
        if let Some(url) = gateway {
            return Ok(Self::Gateway { url });
        }
        // Who asks the host's daemon need not have the rights to KVM that it has.
        let usable = || match places::is_member() {
            true => Verdict::Kvm,
            false => host::usable_kvm(),
        };
        Self::decide(&std::env::var(VARIABLE).unwrap_or_default(), usable)
    }

    fn decide(wanted: &str, usable: impl FnOnce() -> Verdict) -> Result<Self> {
        match wanted {
            "" => Ok(match usable() {
                Verdict::Kvm => Self::Local,
                Verdict::Lab(why) => Self::Lab { why },
            }),
            "kvm" => Ok(Self::Local),
            "lab" => Ok(Self::Lab {
                why: format!("{VARIABLE} is `lab`"),
            }),
            other => bail!("{VARIABLE} is `{other}`: set it to `kvm` or `lab`, or unset it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lab(why: &str) -> Site {
        Site::Lab { why: why.to_owned() }
    }

    #[test]
    fn the_host_is_asked_only_where_nobody_has_said_it() {
        let never = || -> Verdict { panic!("the host was asked") };
        assert_eq!(Site::decide("kvm", never).unwrap(), Site::Local);
        assert_eq!(Site::decide("lab", never).unwrap(), lab("BASALT_ENGINE is `lab`"));
        assert_eq!(Site::decide("", || Verdict::Kvm).unwrap(), Site::Local);
        assert_eq!(
            Site::decide("", || Verdict::Lab("no svm".into())).unwrap(),
            lab("no svm")
        );
    }

    #[test]
    fn another_word_is_refused_with_those_that_there_are() {
        for wanted in ["KVM", "qemu", "kvm "] {
            let error = Site::decide(wanted, || Verdict::Kvm).unwrap_err().to_string();
            assert!(
                error.contains(&format!("`{wanted}`")) && error.contains("`kvm` or `lab`"),
                "{error}"
            );
        }
    }
}
