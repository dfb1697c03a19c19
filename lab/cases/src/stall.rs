//! Guests that stop early in their boot, or reset by themselves, which the emulated host does to them now and then
//! (docs/lab.md, traps): what can be learnt of one before it is killed, and how the runner knows one by a case's output.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// What [`crate::vm`] says of a VM that ended while its case still needed it.
pub(crate) const BY_ITSELF: &str = "the VM ended by itself: ";

/// In the output of a case in which a guest never came to its agent: by a case's own VM, by `basalt run`, and by a
/// guest of which only the console is seen. And of a guest that reset, which no case's guest does unasked.
const SIGNS: [&str; 5] = [
    "the VM ended by itself: the guest reset",
    "the guest did not dial port",
    "the guest's agent did not answer within",
    "the guest reset while the guest booted",
    "`basalt-agent` is not on the console:\n\n",
];

/// Whether a failed case's output tells of a guest that stopped before its agent ran.
pub(crate) fn tells(output: &str) -> bool {
    SIGNS.iter().any(|sign| output.contains(sign))
}

/// What each thread of process `pid` is doing, looked at twice: a vCPU's that sleeps, runs or is stuck differ in it.
pub(crate) fn evidence(pid: u32) -> String {
    let mut text = String::new();
    for look in 1..=2 {
        if look == 2 {
            std::thread::sleep(Duration::from_secs(1));
        }
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else {
            return format!("process {pid} is gone");
        };
        for task in tasks.flatten() {
            let part = |name: &str| read(&task.path().join(name));
            // Whoever formats a string into a string cannot fail.
            let _ = writeln!(text, "look {look}, thread {}: {}", part("comm"), part("stat"));
            let _ = writeln!(text, "  wchan {}, syscall {}", part("wchan"), part("syscall"));
            let _ = writeln!(text, "  {}", part("stack").replace('\n', "\n  "));
        }
    }
    text
}

/// A thread may end between two reads: then there is nothing to tell.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stalled_guest_is_known_by_the_words_of_its_case() {
        assert!(tells(
            "basalt: the guest's agent did not answer within 60s; run it again"
        ));
        assert!(tells(&format!("{BY_ITSELF}{}", vmm_api::ExitReason::Reset)));
        assert!(!tells(&format!("{BY_ITSELF}{}", vmm_api::ExitReason::PowerOff)));
        assert!(!tells("the case is wrong: 3 is not 4"));
    }

    #[test]
    fn the_evidence_names_this_thread() {
        let text = evidence(std::process::id());
        assert!(text.contains("look 2") && text.contains("wchan"), "{text}");
    }
}
