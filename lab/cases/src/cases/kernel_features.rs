//! What people run in sandboxes finds what it needs in the guest kernel: `basalt-kernel-check` uses each feature, in a
//! sandbox of `basalt run`. Which features those are, that program knows.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::basalt::{expect_code, sandbox};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "kernel-features",
    limit: Duration::from_secs(240),
    host,
    guest: None,
};

/// The program arrives on standard input and is run from a file system that allows it.
const SCRIPT: &str = "cat >/tmp/check && chmod 755 /tmp/check && exec /tmp/check";

fn host(host: &Host) -> Result<()> {
    let path = host.binaries.join("basalt-kernel-check");
    let program = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let output = sandbox(host, &["sh", "-c", SCRIPT], &program)?;
    expect_code(&output, 0)?;
    let report = String::from_utf8_lossy(&output.stdout);
    let (passed, failed) = counts(&report).with_context(|| format!("no summary in {report:?}"))?;
    ensure!(passed > 0 && failed == 0, "{report}");
    Ok(())
}

/// `kernel-check: 74 passed, 0 failed`
fn counts(report: &str) -> Option<(u32, u32)> {
    let (passed, failed) = report
        .lines()
        .last()?
        .strip_prefix("kernel-check: ")?
        .split_once(" passed, ")?;
    Some((passed.parse().ok()?, failed.strip_suffix(" failed")?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_without_a_summary_is_none() {
        assert_eq!(counts("x\nkernel-check: 74 passed, 1 failed\n"), Some((74, 1)));
        for bad in ["", "kernel-check: fuse: No such device\n", "74 passed, 0 failed"] {
            assert_eq!(counts(bad), None, "{bad:?}");
        }
    }
}
