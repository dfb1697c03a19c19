//! The host's side: a range that it has no route to, one link, forwarding.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::Error;
use crate::plan::{GATEWAY_V6, Ranges};
use netlink::Links;

/// Interface names have at most 15 bytes (`IFNAMSIZ`).
const NAME_MOST: usize = 15;

/// Checks an instance's name.
pub(crate) fn check_instance(name: &str) -> Result<(), Error> {
    let fits = (1..=48).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if fits {
        Ok(())
    } else {
        Err(Error::Instance(name.to_owned()))
    }
}

/// What the host's end of the pair is called.
pub(crate) fn link_name(instance: &str) -> String {
    let name = format!("v-{instance}");
    if name.len() <= NAME_MOST {
        return name;
    }
    let digest = Sha256::digest(instance);
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("v-{}", &digits[..NAME_MOST - 2])
}

/// The ranges to use: those of the link that is there, else those configured, else the first that the host has no route to.
pub(crate) fn choose(
    links: &Links,
    instance: &str,
    link: Option<u32>,
    configured: Option<Ranges>,
) -> Result<Ranges, Error> {
    let routes = links.routes_v4().map_err(Error::host("listing the host's routes"))?;
    let foreign = routes
        .iter()
        .filter(|(_, length, index)| *length > 0 && Some(*index) != link);
    let is_free = |ranges: &Ranges| {
        !foreign
            .clone()
            .any(|(to, length, _)| ranges.v4.overlaps(u32::from(*to), *length))
    };
    if let Some(ranges) = configured {
        return if is_free(&ranges) {
            Ok(ranges)
        } else {
            Err(Error::Range {
                range: ranges.v4.to_string(),
                why: "this host has a route into it; configure another one",
            })
        };
    }
    let used = |ranges: &Ranges| {
        let own = routes.iter().filter(|(_, _, index)| Some(*index) == link);
        own.into_iter().any(|(to, length, _)| ranges.v4.is(*to, *length))
    };
    if let Some(ranges) = Ranges::candidates(instance).find(used) {
        return Ok(ranges);
    }
    let free = Ranges::candidates(instance).find(is_free);
    free.ok_or_else(|| Error::NoRange {
        tried: Ranges::candidates(instance)
            .map(|ranges| ranges.v4.to_string())
            .collect::<Vec<_>>()
            .join(", "),
    })
}

/// The largest packet that leaves the host whole, as far as the host knows; Ethernet's if it has no default route.
pub(crate) fn uplink_mtu(links: &Links) -> Result<u16, Error> {
    let failed = || Error::host("finding the host's default route");
    let routes = links.routes_v4().map_err(failed())?;
    let default = routes.iter().find(|(_, length, _)| *length == 0);
    let all = links.list().map_err(failed())?;
    let link = default.and_then(|(_, _, index)| all.iter().find(|link| link.index == *index));
    let mtu = link.map_or(ETHERNET, |link| link.mtu);
    // IPv6 wants as much (RFC 8200, 5); larger packets than these gain nothing where segmentation is offloaded.
    Ok(u16::try_from(mtu.clamp(1280, 9000)).unwrap_or(1500))
}

/// The largest packet of a common link.
const ETHERNET: u32 = 1500;

/// Makes the pair of links if it is not there; a host's end whose other end is not in the namespace is of no use.
pub(crate) fn pair(
    links: &Links,
    name: &str,
    peer: (&str, bool),
    namespace: BorrowedFd<'_>,
    mtu: u16,
) -> Result<u32, Error> {
    let failed = |what: &str| format!("{what} the link {name}");
    let found = links.find(name).map_err(Error::host("listing links"))?;
    match found {
        Some(link) if peer.1 => return Ok(link.index),
        Some(link) => links.remove(link.index).map_err(Error::host(failed("removing")))?,
        None => {}
    }
    links
        .pair(name, peer.0, namespace, mtu)
        .map_err(Error::host(failed("making")))?;
    let made = links.find(name).map_err(Error::host("listing links"))?;
    made.map(|link| link.index).ok_or(Error::Answer("links"))
}

/// Sets the host's end up and points the ranges at it.
pub(crate) fn set_up(links: &Links, name: &str, index: u32, plan: (&Ranges, u16)) -> Result<(), Error> {
    let (ranges, mtu) = plan;
    // Connections to published ports of 127.0.0.1 come back by this link.
    sysctl(&format!("net/ipv4/conf/{name}/route_localnet"), "1")?;
    let step = |result: io::Result<()>| result.map_err(Error::host(format!("setting up the link {name}")));
    step(links.up(index, Some(mtu), None))?;
    step(links.address(index, IpAddr::V4(ranges.host_v4()), 30))?;
    let range = (IpAddr::V4(ranges.v4.first()), ranges.v4.length());
    step(links.route(range, index, Some(IpAddr::V4(ranges.namespace_v4()))))?;
    if has_v6() {
        // Without one a link cannot ask for neighbours; not every host gives its links one.
        step(links.address(index, IpAddr::V6(GATEWAY_V6), 64))?;
        step(links.address(index, IpAddr::V6(ranges.host_v6()), 126))?;
        let range = (IpAddr::V6(ranges.v6), 64);
        step(links.route(range, index, Some(IpAddr::V6(ranges.namespace_v6()))))?;
    }
    Ok(())
}

/// Switches forwarding on.
///
/// A host that forwards IPv6 stops listening to routers, by which it may have got its own addresses and routes; links that
/// listened go on doing so.
pub(crate) fn forward() -> Result<(), Error> {
    sysctl("net/ipv4/ip_forward", "1")?;
    const ALL: &str = "net/ipv6/conf/all/forwarding";
    if !has_v6() || read(ALL)? == "1" {
        return Ok(());
    }
    let directory = Path::new("/proc/sys/net/ipv6/conf");
    let failed = |source| Error::File {
        path: directory.to_owned(),
        source,
    };
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let setting = format!("net/ipv6/conf/{}/accept_ra", name.to_string_lossy());
        // A link can vanish meanwhile.
        if read(&setting).is_ok_and(|value| value == "1") {
            sysctl(&setting, "2")?;
        }
    }
    sysctl(ALL, "1")
}

/// Whether this thread's namespace has IPv6.
pub(crate) fn has_v6() -> bool {
    Path::new("/proc/sys/net/ipv6").exists()
}

/// Writes a setting of this thread's namespace, unless it has that value.
pub(crate) fn sysctl(name: &str, value: &str) -> Result<(), Error> {
    if read(name)? == value {
        return Ok(());
    }
    let path = setting(name);
    fs::write(&path, value).map_err(|source| Error::File { path, source })
}

fn read(name: &str) -> Result<String, Error> {
    let path = setting(name);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(source) => Err(Error::File { path, source }),
    }
}

fn setting(name: &str) -> PathBuf {
    Path::new("/proc/sys").join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_and_differ() {
        assert_eq!(link_name("basalt"), "v-basalt");
        let (one, two) = (link_name("basalt-0123456789"), link_name("basalt-0123456788"));
        assert!(one.len() == NAME_MOST && two.len() == NAME_MOST && one != two);
        for name in ["", "Basalt", "1a", "a b", "a/b", "a\"b", &"a".repeat(49)] {
            assert!(check_instance(name).is_err(), "{name}");
        }
        check_instance("basalt-7f").unwrap();
    }
}
