//! What sandboxes of the class bare need of this host, as lines of `basalt doctor`; none where the kernel module is not loaded.

use std::fs;
use std::path::Path;

use host::Check;

const NAME: &str = "ipi-broadcast";
const DEVICE: &str = "dev/basalt";
const COMMAND_LINE: &str = "proc/cmdline";
const PRESENT: &str = "sys/devices/system/cpu/present";

/// What is seen below `root`, which is `/`.
pub(crate) fn checks(root: &Path) -> Vec<Check> {
    if !root.join(DEVICE).exists() {
        return Vec::new();
    }
    let read = |name: &str| fs::read_to_string(root.join(name)).map_err(|error| format!("/{name}: {error}"));
    let seen = read(PRESENT).and_then(|present| Ok((present, read(COMMAND_LINE)?)));
    vec![match seen {
        Ok((present, words)) => broadcast(&present, &words),
        Err(error) => Check::warn(NAME, format!("unknown: {error}"), "mount /proc and /sys"),
    }]
}

/// A broadcast of Linux's reaches processors that a guest owns (docs/bare.md). With two processors it has none to send: one is the guest's.
fn broadcast(present: &str, words: &str) -> Check {
    let last = present.trim().rsplit(['-', ',']).next();
    let has_few = last
        .and_then(|last| last.parse::<u32>().ok())
        .is_some_and(|last| last < 2);
    if has_few {
        return Check::ok(
            NAME,
            "not sent: where a guest owns a processor, Linux has no second one",
        );
    }
    match is_off(words) {
        true => Check::ok(NAME, "off"),
        false => Check::warn(
            NAME,
            "on: sandboxes of the class bare take interrupts that Linux sends to all processors (vector 0xfc)",
            "boot with no_ipi_broadcast=1",
        ),
    }
}

/// The kernel's parameter is a number, and the last one counts.
fn is_off(words: &str) -> bool {
    let values = words.split_ascii_whitespace().take_while(|word| *word != "--");
    let last = values.filter_map(|word| word.strip_prefix("no_ipi_broadcast=")).last();
    last.is_some_and(|value| value.parse().is_ok_and(|value: i64| value != 0))
}

#[cfg(test)]
mod tests {
    use host::Status;

    use super::*;

    #[test]
    fn broadcasts_are_off_by_the_last_number_that_the_kernel_was_given() {
        for (words, off) in [
            ("quiet no_ipi_broadcast=1", true),
            ("no_ipi_broadcast=0 no_ipi_broadcast=2\n", true),
            ("no_ipi_broadcast=1 no_ipi_broadcast=0", false),
            ("no_ipi_broadcast", false),
            ("xno_ipi_broadcast=1", false),
            ("quiet -- no_ipi_broadcast=1", false),
        ] {
            assert_eq!(is_off(words), off, "{words}");
        }
    }

    #[test]
    fn only_a_host_with_the_module_and_three_processors_is_told_what_to_do() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(checks(root.path()), []);
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(DEVICE, "");
        let unknown = checks(root.path());
        assert!(unknown[0].found.contains("sys/devices"), "{unknown:?}");
        for (present, words, status) in [
            ("0-1\n", "quiet\n", Status::Ok),
            ("0\n", "quiet\n", Status::Ok),
            ("0-2\n", "quiet\n", Status::Warn),
            ("0,2\n", "quiet\n", Status::Warn),
            ("0-127\n", "quiet no_ipi_broadcast=1\n", Status::Ok),
            ("\n", "quiet\n", Status::Warn),
        ] {
            write(PRESENT, present);
            write(COMMAND_LINE, words);
            assert_eq!(checks(root.path())[0].status, status, "{present}{words}");
        }
    }
}
