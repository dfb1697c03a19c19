//! Is there a KVM that can really run a guest?
//!
//! `KVM_CREATE_VM` succeeding proves nothing: a KVM that works in software has the same interface, emulates guest
//! kernels instruction by instruction and stops at the first one it does not know. So three things must hold: the
//! device opens with the API version that has been final since Linux 2.6.22, the CPU says that it virtualizes, and a
//! small guest runs to its end. Does not know what Basalt runs on it.

use std::fs;
use std::io::{self, Read};
use std::time::Duration;

use kvm_ioctls::Kvm;
use rustix::fs::{Mode, OFlags};
use serde::Serialize;

use crate::check::Check;
use crate::verdict_cache as cache;

/// The device.
pub const DEVICE: &str = "/dev/kvm";

/// The only API version there is (Linux, Documentation/virt/kvm/api.rst, 4.1).
pub const API_VERSION: i32 = 12;

/// How long the trial guest may take. It needs milliseconds on hardware.
pub const TRIAL_LIMIT: Duration = Duration::from_secs(2);

/// The same where the host itself is emulated; there it was seen to take more than a second.
pub const TRIAL_LIMIT_EMULATED: Duration = Duration::from_secs(30);

/// Why KVM cannot be used here.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// There is no such device.
    #[error("{DEVICE} does not exist")]
    Missing,
    /// The device is there but not for us.
    #[error("{DEVICE} cannot be opened: {0}")]
    Open(io::Error),
    /// A different API.
    #[error("{DEVICE} has API version {0}, not {API_VERSION}")]
    ApiVersion(i32),
    /// The CPU does not virtualize; the KVM is one in software.
    #[error("the CPU flags show neither vmx nor svm{}", software_hint(.module.as_deref()))]
    NoHardware {
        /// The module that offers the device, where one was recognised.
        module: Option<String>,
    },
    /// The trial guest did not end.
    #[error("the trial guest did not end within {0:?}")]
    TrialHung(Duration),
    /// KVM refused a step of the trial.
    #[error("the trial guest could not be run: {step} failed: {cause}")]
    TrialSetup {
        /// The step, named after its ioctl or call.
        step: &'static str,
        /// What the kernel said.
        cause: io::Error,
    },
    /// The guest did something else than it should.
    #[error("the trial guest failed: {0}")]
    Trial(String),
}

fn software_hint(module: Option<&str>) -> String {
    module
        .map(|m| format!("; the module {m} is a KVM in software"))
        .unwrap_or_default()
}

impl Unusable {
    /// What a person can do about it.
    pub fn next_step(&self) -> String {
        match self {
            Self::Missing => "load kvm_intel or kvm_amd, and enable virtualization in the firmware or, in a virtual \
                              machine, nested virtualization"
                .into(),
            Self::Open(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                "join the group that owns it (`sudo usermod -aG kvm $USER`, then log in again) or run as root".into()
            }
            Self::Open(_) => "see what holds it, and `dmesg | grep -i kvm`".into(),
            Self::ApiVersion(_) => "use a Linux kernel of this century's second decade or later".into(),
            Self::NoHardware { .. } => "enable virtualization in the firmware (or nested virtualization in the \
                                        machine's hypervisor); until then sandboxes run in the lab"
                .into(),
            Self::TrialHung(_) | Self::TrialSetup { .. } | Self::Trial(_) => {
                "see `dmesg | grep -i kvm`; until it works sandboxes run in the lab".into()
            }
        }
    }
}

/// Where a sandbox can run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "engine", content = "reason", rename_all = "kebab-case")]
pub enum Verdict {
    /// On this host's own KVM.
    Kvm,
    /// Only in the lab, and why.
    Lab(String),
}

/// The question of `basalt run`. The device is opened each time; the trial guest is run once in each boot, and its
/// result is remembered where root or the user may keep run-time state.
pub fn usable_kvm() -> Verdict {
    match device().and_then(|kvm| hardware().map(|_| kvm)) {
        Err(why) => Verdict::Lab(why.to_string()),
        Ok(kvm) => cache::remembered().unwrap_or_else(|| {
            let verdict = match crate::trial::run(&kvm, trial_limit()) {
                Ok(_) => Verdict::Kvm,
                Err(why) => Verdict::Lab(why.to_string()),
            };
            cache::remember(&verdict);
            verdict
        }),
    }
}

/// The checks about KVM and the verdict that follows; never answered from memory.
pub(crate) fn checks() -> (Verdict, Vec<Check>) {
    let mut checks = Vec::new();
    let mut worst: Option<String> = None;
    let mut failed = |name: &'static str, why: &Unusable| {
        worst.get_or_insert_with(|| why.to_string());
        Check::fail(name, why.to_string(), why.next_step())
    };
    let device = device();
    checks.push(match &device {
        Ok(_) => Check::ok("kvm-device", format!("{DEVICE} opens, API version {API_VERSION}")),
        Err(why) => failed("kvm-device", why),
    });
    // The flags are named first in the verdict: where they are missing, the trial's failure is only a symptom.
    checks.push(match hardware() {
        Ok(flag) => Check::ok("cpu-virtualization", format!("the CPU flags show {flag}")),
        Err(why) => failed("cpu-virtualization", &why),
    });
    if let Ok(kvm) = &device {
        checks.push(match crate::trial::run(kvm, trial_limit()) {
            Ok(took) => Check::ok(
                "kvm-trial",
                format!("a small guest ran in {:.1} ms", took.as_secs_f64() * 1e3),
            ),
            Err(why) => failed("kvm-trial", &why),
        });
    }
    let verdict = worst.map_or(Verdict::Kvm, Verdict::Lab);
    cache::remember(&verdict);
    (verdict, checks)
}

fn trial_limit() -> Duration {
    if emulated() { TRIAL_LIMIT_EMULATED } else { TRIAL_LIMIT }
}

/// This machine is emulated instruction by instruction (QEMU's TCG): everything takes many times as long.
pub fn emulated() -> bool {
    // CPUID.40000000h: the hypervisor's signature in EBX, ECX, EDX, where CPUID.1:ECX[31] says that there is one.
    const TCG: [u8; 12] = *b"TCGTCGTCGTCG";
    let leaf = |number| std::arch::x86_64::__cpuid(number);
    if leaf(1).ecx >> 31 == 0 {
        return false;
    }
    let signature = leaf(0x4000_0000);
    let words = [signature.ebx, signature.ecx, signature.edx];
    words.iter().flat_map(|word| word.to_le_bytes()).eq(TCG)
}

fn device() -> Result<Kvm, Unusable> {
    let fd = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|e| match e {
        rustix::io::Errno::NOENT => Unusable::Missing,
        other => Unusable::Open(other.into()),
    })?;
    let kvm = crate::trial::kvm_from(fd);
    match kvm.get_api_version() {
        API_VERSION => Ok(kvm),
        other => Err(Unusable::ApiVersion(other)),
    }
}

fn hardware() -> Result<&'static str, Unusable> {
    let flags = first_cpu().unwrap_or_default();
    virtualization_flag(&flags).ok_or_else(|| Unusable::NoHardware {
        module: software_module(),
    })
}

/// The first CPU's paragraph of /proc/cpuinfo; the whole file is long on a large host and costs milliseconds.
fn first_cpu() -> io::Result<String> {
    let mut text = String::new();
    fs::File::open("/proc/cpuinfo")?
        .take(16 << 10)
        .read_to_string(&mut text)?;
    Ok(text)
}

fn virtualization_flag(cpuinfo: &str) -> Option<&'static str> {
    let flags = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("flags")?.split_once(':').map(|(_, f)| f))?;
    flags.split_ascii_whitespace().find_map(|flag| match flag {
        "vmx" => Some("vmx"),
        "svm" => Some("svm"),
        _ => None,
    })
}

/// A KVM vendor module that is none of the two that use the CPU's own virtualization.
fn software_module() -> Option<String> {
    let entries = fs::read_dir("/sys/module").ok()?;
    entries.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        (name.starts_with("kvm_") && !matches!(name.as_str(), "kvm_intel" | "kvm_amd")).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_a_word_of_the_flags_line() {
        let text =
            |flags: &str| format!("processor\t: 0\nmodel name\t: svm in the name\nflags\t\t: {flags}\nbugs\t: x\n");
        assert_eq!(virtualization_flag(&text("fpu vmx sse")), Some("vmx"));
        assert_eq!(virtualization_flag(&text("fpu svm npt")), Some("svm"));
        assert_eq!(virtualization_flag(&text("fpu vmxoff svm_lock hypervisor")), None);
        assert_eq!(virtualization_flag(""), None);
    }

    #[test]
    fn fast_and_thorough_agree() {
        let (thorough, checks) = checks();
        assert!(checks.len() >= 2, "{checks:?}");
        // Running the trial anew and remembering it must come to the same: only the wording of a failure may differ.
        assert_eq!(matches!(usable_kvm(), Verdict::Kvm), matches!(thorough, Verdict::Kvm));
    }

    #[test]
    fn without_the_cpu_flag_the_answer_is_the_lab_and_says_why() {
        if hardware().is_ok() {
            // A machine with vmx or svm: the trial decides, and this sentence cannot be provoked.
            assert!(virtualization_flag(&first_cpu().unwrap()).is_some());
            return;
        }
        let Verdict::Lab(reason) = usable_kvm() else {
            panic!("no vmx, no svm, and yet KVM is called usable")
        };
        assert!(reason.contains("vmx nor svm") || reason.contains(DEVICE), "{reason}");
    }
}
