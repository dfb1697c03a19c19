//! What of a host matters to a machine that goes on from files: its kernel and its processor. A VMM compares what its
//! engine offers exactly when it restores; this is what can be said sooner, of a template that somebody wants to know
//! about. Knows no engine.

use std::fs;
use std::sync::OnceLock;

use node_api::{CpuModel, HostTraits};
use sha2::{Digest, Sha256};

/// This host; it stays the same for as long as a daemon runs.
pub(crate) fn here() -> &'static HostTraits {
    static HERE: OnceLock<HostTraits> = OnceLock::new();
    HERE.get_or_init(|| {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_else(|error| {
            log::warn!("what processor this host has cannot be read in /proc/cpuinfo: {error}");
            String::new()
        });
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        of(kernel, &cpuinfo)
    })
}

/// By the first processor of `/proc/cpuinfo`: a host has one kind.
fn of(kernel: String, cpuinfo: &str) -> HostTraits {
    let field = |wanted: &str| {
        let mut fields = cpuinfo.lines().take_while(|line| !line.is_empty());
        let value = fields.find_map(|line| {
            let (name, value) = line.split_once(':')?;
            (name.trim() == wanted).then(|| value.trim().to_owned())
        });
        value.unwrap_or_default()
    };
    let mut flags: Vec<String> = field("flags").split(' ').map(str::to_owned).collect();
    flags.sort();
    let hash = Sha256::digest(flags.join(" "));
    HostTraits {
        kernel,
        vendor: field("vendor_id"),
        processor: format!(
            "{} ({}/{}/{})",
            field("model name"),
            field("cpu family"),
            field("model"),
            field("stepping")
        ),
        features: hash.iter().map(|byte| format!("{byte:02x}")).collect(),
    }
}

/// Why a machine that was made on one of them does not go on on the other; `None` where nothing speaks against it. The models `host`
/// and `common` have shown it what there is. Of what the others show a vendor's hosts have more or less: the VMM finds out.
pub(crate) fn difference(made_on: &HostTraits, here: &HostTraits, model: CpuModel) -> Option<String> {
    let differs = |what: &str, made_on: &str, here: &str| {
        (made_on != here).then(|| format!("a host with another {what} ({made_on}; here {here})"))
    };
    if !matches!(model, CpuModel::Host | CpuModel::Common) {
        return differs("processor", &made_on.vendor, &here.vendor);
    }
    let features = || (made_on.features != here.features).then(|| "a host with other processor features".to_owned());
    differs("kernel", &made_on.kernel, &here.kernel)
        .or_else(|| differs("processor", &made_on.processor, &here.processor))
        .or_else(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPUINFO: &str = "\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 23
model\t\t: 49
model name\t: AMD EPYC-Rome Processor
stepping\t: 0
flags\t\t: fpu vme avx2

processor\t: 1
vendor_id\t: other
";

    #[test]
    fn a_host_is_known_by_its_first_processor() {
        let found = of("6.1".into(), CPUINFO);
        assert_eq!((found.vendor.as_str(), found.kernel.as_str()), ("AuthenticAMD", "6.1"));
        assert_eq!(found.processor, "AMD EPYC-Rome Processor (23/49/0)");
        // The order in which features are told says nothing.
        assert_eq!(of("6.1".into(), &CPUINFO.replace("fpu vme", "vme fpu")), found);
        assert_ne!(of("6.1".into(), &CPUINFO.replace(" avx2", "")).features, found.features);
        assert_eq!(difference(here(), here(), CpuModel::Host), None);
    }

    #[test]
    fn a_model_needs_the_vendor_and_the_host_itself_everything() {
        let here = of("6.1".into(), CPUINFO);
        let change = |from: &str, to: &str| of("6.1".into(), &CPUINFO.replace(from, to));
        let kernel = of("6.2".into(), CPUINFO);
        let on_host = |made_on: &HostTraits| difference(made_on, &here, CpuModel::Host).unwrap_or_default();
        assert_eq!(on_host(&here), "");
        assert_eq!(on_host(&kernel), "a host with another kernel (6.2; here 6.1)");
        assert!(on_host(&change("49", "1")).contains("another processor (AMD EPYC-Rome Processor (23/1/0); here"));
        assert_eq!(on_host(&change(" avx2", "")), "a host with other processor features");
        let of_model = |made_on: &HostTraits| difference(made_on, &here, CpuModel::V2);
        for alike in [kernel, change("49", "1"), change(" avx2", "")] {
            assert_eq!(of_model(&alike), None);
        }
        let other = of_model(&change("AuthenticAMD", "GenuineIntel")).unwrap();
        assert_eq!(other, "a host with another processor (GenuineIntel; here AuthenticAMD)");
    }
}
