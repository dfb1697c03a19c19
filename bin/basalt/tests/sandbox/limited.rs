//! Limits and file systems in memory, as far as they can be seen without a virtual machine.

use serde_json::Value;

use crate::world::{World, text};

pub(crate) fn limits_are_kept_shown_and_refused_where_they_are_nonsense() {
    let world = World::new("can be kept");
    let words = [
        "run",
        "-d",
        "--disk",
        "0",
        "--name",
        "box",
        "--disk-rate",
        "1m/100",
        "--tmpfs",
        "/run:size=1m",
        "tiny",
        "--",
        "sleep",
        "1000",
    ];
    let started = world.verb(&words);
    assert!(started.status.success(), "{}", text(&started.stderr));
    let inspect = || -> Value {
        let output = world.verb(&["inspect", "box"]);
        serde_json::from_slice::<Value>(&output.stdout).unwrap()[0]["config"].take()
    };
    let config = inspect();
    assert_eq!(config["limits"]["disk_write"]["bytes"], 1 << 20, "{config}");
    assert_eq!(config["limits"]["disk_read"]["operations"], 100, "{config}");
    assert_eq!(config["tmpfs"][0]["path"], "/run", "{config}");
    let restarted = world.verb(&["restart", "--time", "0", "box"]);
    assert!(restarted.status.success(), "{}", text(&restarted.stderr));
    assert_eq!(inspect()["limits"], config["limits"]);
    assert!(world.verb(&["rm", "--force", "box"]).status.success());

    for (flags, wanted) in [
        (&["--cpu-limit", "0.001"][..], "0.01 to 1000"),
        (&["--cpu-limit", "much"], "such as 0.5"),
        (&["--cpu-weight", "0"], "1 to 10000"),
        (&["--pids-limit", "0"], "at least 1"),
        (&["--disk-rate", "1"], "at least 65536/10"),
        (&["--net-rate", "1m", "--network", "none"], "--network none"),
        (&["--tmpfs", "run"], "absolute path"),
        (&["--tmpfs", "/run:size=x"], "such as size=64M"),
        (&["--tmpfs", "/run", "--tmpfs", "/run:exec"], "twice"),
    ] {
        let output = world.run(&[flags, &["tiny", "--", "true"]].concat());
        assert_eq!(output.status.code(), Some(125), "{flags:?}");
        let stderr = text(&output.stderr);
        assert!(stderr.contains(wanted), "{flags:?}: {stderr}");
    }
}

/// Where the host has the controller, the limit is set; elsewhere its name is told. Neither is silence.
pub(crate) fn a_limit_that_the_host_cannot_keep_is_refused_by_its_name() {
    let world = World::new("");
    let output = world.run(&["--cpu-limit", "0.5", "tiny", "--", "true"]);
    if output.status.success() {
        return;
    }
    assert_eq!(output.status.code(), Some(125));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("controller `cpu`") && stderr.contains("leave that limit out") || stderr.contains("no cgroups"),
        "{stderr}"
    );
    // Nothing is left of it.
    assert_eq!(text(&world.verb(&["ps", "--all", "--quiet"]).stdout), "");
    // Nor can this guest, whose agent has no cgroups.
    let output = world.run(&["--boot", "--pids-limit", "9", "tiny", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(
        text(&output.stderr).contains("no cgroups to limit processes by"),
        "{output:?}"
    );
}
