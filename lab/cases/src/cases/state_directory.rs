//! A state directory on ext4, which most hosts have and which has no reflinks: import, list, run, remove.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::archive;
use crate::basalt::{command, expect_code, finish};
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "state-on-ext4",
    limit: Duration::from_secs(120),
    host,
    guest: None,
};

/// Where the lab host has its ext4 disk (docs/lab.md).
const EXT4: &str = "/mnt/ext4";

fn host(host: &Host) -> Result<()> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    let is_ext4 = |line: &str| line.split(' ').skip(1).take(2).eq([EXT4, "ext4"]);
    ensure!(mounts.lines().any(is_ext4), "there is no ext4 at {EXT4}");
    let state = Path::new(EXT4).join(format!("state-{}", std::process::id()));
    let daemon = Daemon::at(host, &state)?;
    let result = life_of_an_image(host, &state);
    daemon.end()?;
    fs::remove_dir_all(&state).context("the state directory")?;
    result
}

fn life_of_an_image(host: &Host, state: &Path) -> Result<()> {
    // The program in it is this one, which needs nothing else.
    let own = fs::read("/proc/self/exe")?;
    let file = host.scratch.join("own.tar");
    archive::make(&file, "own", &[("cases", &own)])?;
    let basalt = |arguments: &[&str]| {
        let output = finish(command(host, arguments).env("BASALT_STATE", state), b"")?;
        expect_code(&output, 0).with_context(|| format!("basalt {arguments:?}"))?;
        anyhow::Ok(String::from_utf8(output.stdout)?)
    };
    basalt(&["import", file.to_str().context("a path that is no text")?])?;
    let images: serde_json::Value = serde_json::from_str(&basalt(&["images", "--json"])?)?;
    ensure!(images[0]["names"][0] == "own:latest", "the store has {images}");

    let blobs = state.join("images/blobs");
    for entry in fs::read_dir(&blobs)? {
        let entry = entry?;
        ensure!(
            entry.metadata()?.dev() == fs::metadata(EXT4)?.dev(),
            "{} is elsewhere",
            entry.path().display()
        );
    }
    let listed = basalt(&["run", "own", "--", "/cases", "list"])?;
    ensure!(
        listed.lines().any(|line| line == CASE.name),
        "the guest wrote:\n{listed}"
    );

    basalt(&["rmi", "own"])?;
    let left = fs::read_dir(&blobs)?.count();
    ensure!(left == 0, "{left} files are left of a removed image");
    Ok(())
}
