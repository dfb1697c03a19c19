//! A sandbox as it was asked for outside of the lab, where the image has a name and a port an address. In the lab the image is known by
//! its digest, and a port is published at all addresses; what was asked for goes along as labels, which are taken off
//! again wherever a sandbox is shown.

use std::net::IpAddr;

use anyhow::{Result, bail};
use network::{PortMapping, Protocol};
use node_api::SandboxConfig;

/// The image's name.
const IMAGE: &str = "basalt.lab/image";

/// The published ports, with commas between them; empty if there are none, as a clone has its snapshot's labels.
const PORTS: &str = "basalt.lab/ports";

/// The labels, as `--label` takes them.
pub(crate) fn image_label(name: &str) -> String {
    format!("--label={IMAGE}={name}")
}

/// The same of the published ports.
pub(crate) fn ports_label(ports: &[String]) -> String {
    format!("--label={PORTS}={}", ports.join(","))
}

/// A sandbox's configuration as it was asked for.
pub(crate) fn as_asked(config: &mut SandboxConfig) {
    if let Some(image) = config.labels.remove(IMAGE) {
        config.image = image;
    }
    if let Some(ports) = config.labels.remove(PORTS).filter(|ports| !ports.is_empty()) {
        config.ports = ports.split(',').map(str::to_owned).collect();
    }
}

/// A published port in the words of `basalt-lab`: where it is on this machine.
pub(crate) fn forward(published: &str) -> Result<String> {
    let port: PortMapping = published.parse()?;
    let protocol = match port.protocol {
        Protocol::Tcp => "tcp",
        Protocol::Udp => "udp",
    };
    match port.host_ip {
        None => Ok(format!("{protocol}:0.0.0.0:{}", port.host_port)),
        Some(IpAddr::V4(address)) => Ok(format!("{protocol}:{address}:{}", port.host_port)),
        Some(IpAddr::V6(address)) => bail!(
            "port {} cannot be published at [{address}], as the lab has no IPv6: give an IPv4 address, or none",
            port.host_port
        ),
    }
}

/// A published port as a table shows it.
pub(crate) fn shown(published: &str) -> String {
    let Ok(port) = published.parse::<PortMapping>() else {
        return published.to_owned();
    };
    let text = port.to_string();
    match text.rsplit_once(':') {
        Some((host, guest)) => format!("{host}->{guest}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_told_and_shown_with_its_address_and_protocol() {
        assert_eq!(forward("18080:80").unwrap(), "tcp:0.0.0.0:18080");
        assert_eq!(forward("127.0.0.1:53:5353/udp").unwrap(), "udp:127.0.0.1:53");
        let error = forward("[fd00::1]:80:80").unwrap_err().to_string();
        assert!(error.contains("[fd00::1]") && error.contains("IPv4"), "{error}");
        assert!(forward("80").unwrap_err().to_string().contains("`80`"));
        assert_eq!(shown("18080:80"), "18080->80/tcp");
        assert_eq!(shown("127.0.0.1:53:5353/udp"), "127.0.0.1:53->5353/udp");
    }
}
