//! The guest's interfaces: loopback, and `eth0` if the host gives it a network. Nothing is asked of the link: addresses,
//! routes and the routers' Ethernet addresses all come from the host.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use agent_api::GuestNetwork;
use netlink::Links;

use crate::Error;

/// The interface's name, as the kernel gives it to the first one.
const INTERFACE: &str = "eth0";

/// How long it may take to appear, with a driver that is a module.
const WAIT: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(5);

/// Of the interface's IPv6 (`ip-sysctl.rst`): addresses are used at once, routers are the host's to name, and its multicast
/// groups, which the node carries nothing of, are reported at once and not within a second, when a clone may run already.
const SETTINGS: [(&str, &str); 3] = [
    ("accept_dad", "0"),
    ("accept_ra", "0"),
    ("mldv2_unsolicited_report_interval", "1"),
];

/// Brings the interfaces up.
pub(crate) fn set_up(network: Option<&GuestNetwork>) -> Result<(), Error> {
    let links = Links::open().map_err(Error::system("opening a netlink socket"))?;
    let lo = links
        .index("lo")
        .map_err(Error::system("finding the loopback interface"))?;
    links
        .up(lo, None, None)
        .map_err(Error::system("bringing the loopback interface up"))?;
    network.map_or(Ok(()), |network| interface(&links, network))
}

fn interface(links: &Links, network: &GuestNetwork) -> Result<(), Error> {
    let failed = || Error::system(format!("setting {INTERFACE} up"));
    let index = wait(links)?;
    for (setting, value) in SETTINGS {
        let path = Path::new("/proc/sys/net/ipv6/conf").join(INTERFACE).join(setting);
        // A kernel without IPv6 has no such file.
        if path.exists() {
            fs::write(&path, value).map_err(Error::system(format!("writing {}", path.display())))?;
        }
    }
    links.up(index, Some(network.mtu), None).map_err(failed())?;
    for address in &network.addresses {
        links
            .address(index, address.address, address.prefix)
            .map_err(failed())?;
    }
    for gateway in &network.gateways {
        links.neighbour(index, gateway.address, gateway.mac).map_err(failed())?;
        let all = match gateway.address {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        links.route((all, 0), index, Some(gateway.address)).map_err(failed())?;
    }
    Ok(())
}

fn wait(links: &Links) -> Result<u32, Error> {
    let end = Instant::now() + WAIT;
    loop {
        let found = links.get(INTERFACE).map_err(Error::system("listing interfaces"))?;
        if let Some(link) = found {
            return Ok(link.index);
        }
        if Instant::now() >= end {
            return Err(Error::Refused(format!(
                "no interface {INTERFACE} appeared within {WAIT:?}"
            )));
        }
        thread::sleep(STEP);
    }
}

/// The text of resolv.conf(5); `None` leaves the image's own.
pub(crate) fn resolv_conf(network: Option<&GuestNetwork>) -> Option<String> {
    let network = network?;
    if network.dns.is_empty() {
        return None;
    }
    let mut text: String = network
        .dns
        .iter()
        .map(|server| format!("nameserver {server}\n"))
        .collect();
    if !network.search.is_empty() {
        text.push_str(&format!("search {}\n", network.search.join(" ")));
    }
    Some(text)
}

/// The address that the host name stands for in `/etc/hosts`: one that others can reach, if there is one.
pub(crate) fn own_address(network: Option<&GuestNetwork>) -> IpAddr {
    let first = network.and_then(|network| network.addresses.first());
    first.map_or(IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1)), |address| address.address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use agent_api::Address;

    #[test]
    fn files_say_what_the_host_says() {
        let mut network = GuestNetwork {
            addresses: vec![Address {
                address: "192.0.2.9".parse().unwrap(),
                prefix: 24,
            }],
            dns: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            search: vec!["a.example".into(), "b".into()],
            ..GuestNetwork::default()
        };
        let text = resolv_conf(Some(&network)).unwrap();
        assert_eq!(
            text,
            "nameserver 192.0.2.1\nnameserver 2001:db8::1\nsearch a.example b\n"
        );
        assert_eq!(own_address(Some(&network)).to_string(), "192.0.2.9");
        assert_eq!(own_address(None).to_string(), "127.0.1.1");
        network.dns.clear();
        assert_eq!(resolv_conf(Some(&network)), None);
        assert_eq!(resolv_conf(None), None);
    }
}
