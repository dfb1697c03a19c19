//! What a sandbox may use, written into its cgroup. Does not know why it may.

use super::Missing;
use super::file::Directory;
use crate::Error;

/// The period of `cpu.max` in microseconds; the kernel's default.
const PERIOD_US: u64 = 100_000;

/// The kernel takes no smaller quota (`cpu-v2`: 1 ms).
const LEAST_QUOTA_US: u64 = 1_000;

/// Limits; what is `None` is not limited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Thousandths of a processor (`cpu.max`).
    pub cpu_millis: Option<u64>,
    /// The share when processors are short, 1 to 10000; the kernel's default is 100 (`cpu.weight`).
    pub cpu_weight: Option<u64>,
    /// Bytes of memory beyond which the whole sandbox is killed (`memory.max`, `memory.oom.group`).
    pub memory_max: Option<u64>,
    /// Bytes of memory beyond which it is slowed down and reclaimed from (`memory.high`).
    pub memory_high: Option<u64>,
    /// Threads (`pids.max`).
    pub pids_max: Option<u64>,
    /// Block devices (`io.max`).
    pub io: Vec<IoLimit>,
}

/// Rates of one whole block device; what is `None` is not limited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IoLimit {
    /// The device's major number.
    pub major: u32,
    /// Its minor number.
    pub minor: u32,
    /// Bytes read a second.
    pub rbps: Option<u64>,
    /// Bytes written a second.
    pub wbps: Option<u64>,
    /// Reads a second.
    pub riops: Option<u64>,
    /// Writes a second.
    pub wiops: Option<u64>,
}

fn or_max(value: Option<u64>) -> String {
    value.map_or_else(|| "max".to_owned(), |value| value.to_string())
}

impl IoLimit {
    fn line(&self) -> String {
        format!(
            "{}:{} rbps={} wbps={} riops={} wiops={}",
            self.major,
            self.minor,
            or_max(self.rbps),
            or_max(self.wbps),
            or_max(self.riops),
            or_max(self.wiops)
        )
    }
}

/// One file to be written: whose it is, and whether anybody asked for it.
struct Setting {
    limit: &'static str,
    controller: &'static str,
    file: &'static str,
    text: String,
    wanted: bool,
}

impl Limits {
    fn settings(&self) -> Vec<Setting> {
        let setting = |limit, controller, file, text, wanted| Setting {
            limit,
            controller,
            file,
            text,
            wanted,
        };
        let quota = self
            .cpu_millis
            .map(|millis| millis.saturating_mul(PERIOD_US / 1000).max(LEAST_QUOTA_US));
        let mut settings = vec![
            setting(
                "processor time",
                "cpu",
                "cpu.max",
                format!("{} {PERIOD_US}", or_max(quota)),
                quota.is_some(),
            ),
            setting(
                "processor time",
                "cpu",
                "cpu.weight",
                self.cpu_weight.unwrap_or(100).to_string(),
                self.cpu_weight.is_some(),
            ),
            setting(
                "memory",
                "memory",
                "memory.high",
                or_max(self.memory_high),
                self.memory_high.is_some(),
            ),
            setting(
                "memory",
                "memory",
                "memory.max",
                or_max(self.memory_max),
                self.memory_max.is_some(),
            ),
            // A VMM whose thread is killed is no VMM: all of it goes, or nothing.
            setting(
                "memory",
                "memory",
                "memory.oom.group",
                "1".to_owned(),
                self.memory_max.is_some(),
            ),
            setting(
                "the number of threads",
                "pids",
                "pids.max",
                or_max(self.pids_max),
                self.pids_max.is_some(),
            ),
        ];
        settings.extend(
            self.io
                .iter()
                .map(|io| setting("disk traffic", "io", "io.max", io.line(), true)),
        );
        settings
    }

    /// Those that can be written; a controller that is missing matters only where a limit needs it.
    fn possible(&self, directory: &Directory, missing: &[Missing]) -> Result<Vec<Setting>, Error> {
        let mut possible = Vec::new();
        for setting in self.settings() {
            match missing.iter().find(|missing| missing.controller == setting.controller) {
                None => possible.push(setting),
                Some(_) if !setting.wanted => (),
                Some(missing) => {
                    return Err(Error::NoController {
                        limit: setting.limit,
                        controller: setting.controller,
                        path: directory.path().to_owned(),
                        reason: missing.reason.clone(),
                    });
                }
            }
        }
        Ok(possible)
    }

    /// Tells whether `apply` would have all the controllers that it needs.
    pub(super) fn check(&self, directory: &Directory, missing: &[Missing]) -> Result<(), Error> {
        self.possible(directory, missing).map(drop)
    }

    /// Writes them all, or none where one lacks its controller.
    pub(super) fn apply(&self, directory: &Directory, missing: &[Missing]) -> Result<(), Error> {
        for setting in self.possible(directory, missing)? {
            directory.write(setting.file, &setting.text)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(limits: &Limits, file: &str) -> String {
        let settings = limits.settings();
        settings.into_iter().find(|setting| setting.file == file).unwrap().text
    }

    #[test]
    fn limits_are_written_in_the_kernels_words() {
        let limits = Limits {
            cpu_millis: Some(1500),
            memory_max: Some(1 << 30),
            io: vec![IoLimit {
                major: 8,
                minor: 16,
                wbps: Some(1_000_000),
                riops: Some(50),
                ..IoLimit::default()
            }],
            ..Limits::default()
        };
        assert_eq!(text(&limits, "cpu.max"), "150000 100000");
        assert_eq!(text(&limits, "cpu.weight"), "100");
        assert_eq!(text(&limits, "memory.max"), "1073741824");
        assert_eq!(text(&limits, "memory.high"), "max");
        assert_eq!(text(&limits, "io.max"), "8:16 rbps=max wbps=1000000 riops=50 wiops=max");
    }

    #[test]
    fn a_sliver_of_a_processor_is_as_much_as_the_kernel_takes() {
        let limits = Limits {
            cpu_millis: Some(1),
            ..Limits::default()
        };
        assert_eq!(text(&limits, "cpu.max"), "1000 100000");
    }
}
