//! The TAPs of the VM's interfaces, kept for whoever takes an interface's place in a rollback: a TAP with one queue cannot be
//! opened twice. Knows nothing of what interfaces do with them.

use std::os::fd::OwnedFd;

use device::FdTable;
use vmm_api::devices::{DeviceConfig, NetConfig};
use vmm_api::{ApiError, DeviceSpec, ErrorKind, FdRef};

use crate::refusal::refuse;

/// Copies of the descriptors, by the interfaces' names.
#[derive(Default)]
pub(crate) struct Taps(Vec<(String, Vec<OwnedFd>)>);

impl Taps {
    /// Of the devices that are to be made with these descriptors. What is wrong with a configuration is said by who makes
    /// its device.
    pub(crate) fn of(specs: &[DeviceSpec], fds: &FdTable) -> Result<Self, ApiError> {
        let mut all = Vec::new();
        for (spec, config) in specs.iter().filter_map(interface) {
            let taps = config.taps.iter().filter_map(|tap| fds.peek(*tap));
            let copies = taps.map(|tap| rustix::io::fcntl_dupfd_cloexec(tap, 3).map_err(no_copy));
            all.push((spec.id.clone(), copies.collect::<Result<_, _>>()?));
        }
        Ok(Self(all))
    }

    /// The devices that take the place of those that there are; interfaces that come without TAPs get those of the one of
    /// their name, as further descriptors.
    pub(crate) fn give(&self, specs: &[DeviceSpec], fds: &mut Vec<OwnedFd>) -> Result<Vec<DeviceSpec>, ApiError> {
        let mut specs = specs.to_vec();
        for spec in &mut specs {
            let Some((_, mut config)) = interface(spec).filter(|(_, config)| config.taps.is_empty()) else {
                continue;
            };
            let kept = self.0.iter().find(|(id, _)| *id == spec.id);
            for tap in kept.iter().flat_map(|(_, taps)| taps) {
                config.taps.push(FdRef(u32::try_from(fds.len()).unwrap_or(u32::MAX)));
                fds.push(rustix::io::fcntl_dupfd_cloexec(tap, 3).map_err(no_copy)?);
            }
            *spec = DeviceSpec::new(&spec.id, &config).map_err(|error| refuse(ErrorKind::Internal, error))?;
        }
        Ok(specs)
    }
}

fn interface(spec: &DeviceSpec) -> Option<(&DeviceSpec, NetConfig)> {
    let config = (spec.kind == NetConfig::KIND).then(|| device::parse_config(spec).ok());
    config.flatten().map(|config| (spec, config))
}

fn no_copy(error: rustix::io::Errno) -> ApiError {
    refuse(ErrorKind::Host, format!("copying a TAP's descriptor: {error}"))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use vmm_api::devices::{MacAddress, NetLimits};

    use super::*;

    fn net(id: &str, taps: &[u32]) -> DeviceSpec {
        let config = NetConfig {
            taps: taps.iter().copied().map(FdRef).collect(),
            mac: MacAddress([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            limits: NetLimits::default(),
        };
        DeviceSpec::new(id, &config).unwrap()
    }

    fn null() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    fn taps(spec: &DeviceSpec) -> Vec<FdRef> {
        interface(spec).unwrap().1.taps
    }

    #[test]
    fn an_interface_without_taps_gets_those_of_its_name() {
        let other = DeviceSpec {
            id: "rng".into(),
            kind: "rng".into(),
            config: serde_json::json!({}),
        };
        let specs = [net("one", &[0]), other.clone(), net("two", &[1, 2])];
        let kept = Taps::of(&specs, &FdTable::new(vec![null(), null(), null()])).unwrap();
        let mut fds = vec![null()];
        let given = kept
            .give(&[net("two", &[]), other.clone(), net("one", &[0])], &mut fds)
            .unwrap();
        assert_eq!(taps(&given[0]), [FdRef(1), FdRef(2)]);
        assert_eq!((&given[1], taps(&given[2])), (&other, vec![FdRef(0)]));
        assert_eq!(fds.len(), 3);
        // Copies: they can be given again.
        let kept_numbers: Vec<_> = kept
            .0
            .iter()
            .flat_map(|(_, taps)| taps)
            .map(AsRawFd::as_raw_fd)
            .collect();
        assert!(fds.iter().all(|fd| !kept_numbers.contains(&fd.as_raw_fd())));
    }

    #[test]
    fn a_name_that_nobody_had_gets_none() {
        let kept = Taps::of(&[net("one", &[0])], &FdTable::new(vec![null()])).unwrap();
        let given = kept.give(&[net("other", &[])], &mut Vec::new()).unwrap();
        assert_eq!(taps(&given[0]), []);
    }
}
