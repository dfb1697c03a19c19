//! Standard input, output and error of a sandbox: apart, binary-clean, of any length, ended when they end.

use std::time::Duration;

use anyhow::{Result, ensure};

use crate::basalt::{expect_code, sandbox};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "streams",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

fn host(host: &Host) -> Result<()> {
    let every: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let output = sandbox(host, &["cat"], &every)?;
    expect_code(&output, 0)?;
    ensure!(
        output.stdout == every,
        "{} of {} bytes came back, or changed",
        output.stdout.len(),
        every.len()
    );
    ensure!(
        output.stderr.is_empty(),
        "standard error: {}",
        String::from_utf8_lossy(&output.stderr)
    );

    let script = "printf 'out\\000\\377'; printf 'err\\000\\376' >&2; cat >/dev/null; printf end";
    let output = sandbox(host, &["sh", "-c", script], b"to the end")?;
    expect_code(&output, 0)?;
    ensure!(output.stdout == b"out\0\xffend", "standard output: {:?}", output.stdout);
    ensure!(output.stderr == b"err\0\xfe", "standard error: {:?}", output.stderr);

    // A command that ends without reading its input ends all the same.
    let output = sandbox(host, &["true"], &every)?;
    expect_code(&output, 0)
}
