//! Why guests of the host's KVM exit, by histograms that the kernel keeps of its own events: in an instance of tracefs of our own, of all
//! of the host's guests.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::class::Exits;
use crate::trace::INSTANCES;
use crate::world::own_name;

/// Exits, by the architecture's number and the processor's own code.
const EXIT: (&str, &str) = ("kvm_exit", "hist:keys=isa,exit_reason");
/// Which register it was that one was for.
const MSR: (&str, &str) = ("kvm_msr", "hist:keys=ecx");

/// `isa` of Intel's VMX and AMD's SVM in the event (arch/x86/include/asm/kvm_host.h).
const VMX: u64 = 1;
const SVM: u64 = 2;

/// Histograms under way; they end when this is dropped.
pub(crate) struct Histograms(PathBuf);

impl Histograms {
    pub(crate) fn start() -> Result<Self> {
        let directory = Path::new(INSTANCES).join(own_name());
        fs::create_dir(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
        let this = Self(directory);
        for (event, trigger) in [EXIT, MSR] {
            this.trigger(event, trigger)?;
        }
        Ok(this)
    }

    fn trigger(&self, event: &str, words: &str) -> Result<()> {
        let path = self.0.join("events/kvm").join(event).join("trigger");
        fs::write(&path, words).with_context(|| format!("cannot write {words} to {}", path.display()))
    }

    fn read(&self, event: &str) -> Result<String> {
        let path = self.0.join("events/kvm").join(event).join("hist");
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// All since the start. Those for registers are named by these.
    pub(crate) fn exits(&self) -> Result<Exits> {
        Ok(named(&self.read(EXIT.0)?, &self.read(MSR.0)?))
    }
}

impl Drop for Histograms {
    fn drop(&mut self) {
        for (event, trigger) in [EXIT, MSR] {
            if let Err(error) = self.trigger(event, &format!("!{trigger}")) {
                eprintln!("a histogram stays: {error:#}");
            }
        }
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("{} stays behind: {error}", self.0.display());
        }
    }
}

fn named(exits: &str, registers: &str) -> Exits {
    let mut named = Exits::new();
    let mut of_registers = 0;
    for (values, count) in registers.lines().filter_map(entry) {
        let register = register(values.first().copied().unwrap_or_default());
        *named.entry(register).or_default() += count;
        of_registers += count;
    }
    for (values, count) in exits.lines().filter_map(entry) {
        let [isa, code] = values.as_slice() else { continue };
        match reason(*isa, *code) {
            // What the other event has no register of was done without it.
            Some(MSR_REASON) => *named.entry("msr: none said".to_owned()).or_default() += count,
            Some(reason) => *named.entry(reason.to_owned()).or_default() += count,
            None => *named.entry(format!("{code:#x}")).or_default() += count,
        }
    }
    if let Some(all) = named.get_mut("msr: none said") {
        *all = all.saturating_sub(of_registers);
    }
    named.retain(|_, count| *count > 0);
    named
}

/// A line such as `{ isa:          2, exit_reason:        120 } hitcount:         16`: the values and the count.
fn entry(line: &str) -> Option<(Vec<u64>, u64)> {
    let (keys, rest) = line.trim().strip_prefix('{')?.split_once('}')?;
    let count = rest.trim().strip_prefix("hitcount:")?.trim().parse().ok()?;
    let value = |key: &str| key.split_once(':')?.1.trim().parse().ok();
    Some((keys.split(',').map(value).collect::<Option<_>>()?, count))
}

const MSR_REASON: &str = "msr";

/// The codes that Linux guests cause (AMD's APM volume 2, appendix C; Intel's SDM volume 3, appendix C).
fn reason(isa: u64, code: u64) -> Option<&'static str> {
    Some(match (isa, code) {
        (SVM, 0x60) | (VMX, 1) => "external interrupt",
        (SVM, 0x61) | (VMX, 0) => "nmi",
        (SVM, 0x64) | (VMX, 7) => "interrupt window",
        (SVM, 0x72) | (VMX, 10) => "cpuid",
        (SVM, 0x77) | (VMX, 40) => "pause",
        (SVM, 0x78) | (VMX, 12) => "hlt",
        (SVM, 0x7b) | (VMX, 30) => "port",
        (SVM, 0x7c) | (VMX, 31 | 32) => MSR_REASON,
        (SVM, 0x81) | (VMX, 18) => "hypercall",
        (SVM, 0x89) | (VMX, 54) => "wbinvd",
        (SVM, 0x400) | (VMX, 48 | 49) => "memory",
        (VMX, 52) => "preemption timer",
        _ => return None,
    })
}

/// The registers by which guests have interrupts (Intel's SDM volume 3, 10.12.1.2).
fn register(number: u64) -> String {
    match number {
        0x6e0 | 0x832 | 0x838 => "msr: timer".to_owned(),
        0x80b => "msr: end of interrupt".to_owned(),
        0x830 => "msr: icr".to_owned(),
        0x83f => "msr: self".to_owned(),
        _ => format!("msr: {number:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXITS: &str = "\
# event histogram
#
# trigger info: hist:keys=isa,exit_reason:vals=hitcount:sort=hitcount:size=2048 [active]
#

{ isa:          2, exit_reason:        124 } hitcount:         12
{ isa:          2, exit_reason:        120 } hitcount:         16
{ isa:          2, exit_reason:         94 } hitcount:          1

Totals:
    Hits: 29
";
    const REGISTERS: &str = "{ ecx:       2104 } hitcount:          7\n{ ecx:        139 } hitcount:          3\n";

    #[test]
    fn reasons_and_registers_have_names() {
        let found = named(EXITS, REGISTERS);
        let expected = [
            ("0x5e", 1),
            ("hlt", 16),
            ("msr: 0x8b", 3),
            ("msr: none said", 2),
            ("msr: timer", 7),
        ];
        assert_eq!(found, expected.map(|(name, count)| (name.to_owned(), count)).into());
    }

    #[test]
    fn the_same_is_called_the_same_on_both() {
        for (svm, vmx) in [(0x60, 1), (0x78, 12), (0x7c, 32), (0x400, 48)] {
            assert_eq!(reason(SVM, svm), reason(VMX, vmx));
        }
        assert_eq!(reason(VMX, 0x60), None);
    }
}
