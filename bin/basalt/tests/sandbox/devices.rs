//! Cases about the host's devices, as the daemon tells of them through the command line. What is done with them is for the daemon's own
//! tests, on a kernel in memory: no test takes a device from the host that it runs on.

use serde_json::Value;

use crate::world::{World, text};

pub(crate) const CASES: &[(&str, fn())] = &[
    (
        "devices_are_listed_as_sysfs_has_them",
        devices_are_listed_as_sysfs_has_them,
    ),
    ("what_is_no_device_is_refused", what_is_no_device_is_refused),
    (
        "a_name_that_no_specification_has_is_refused_with_what_there_is",
        a_name_that_no_specification_has_is_refused_with_what_there_is,
    ),
    (
        "memory_and_start_policies_that_cannot_be_are_refused_with_what_can",
        memory_and_start_policies_that_cannot_be_are_refused_with_what_can,
    ),
];

/// What this host has none of: no bus has so many functions.
const NOWHERE: &str = "ffff:ff:1f.7";

fn devices_are_listed_as_sysfs_has_them() {
    let world = World::new("");
    let listed = world.verb(&["device", "ls", "--json"]);
    assert_eq!(listed.status.code(), Some(0), "{}", text(&listed.stderr));
    let listed: Vec<Value> = serde_json::from_str(&text(&listed.stdout)).unwrap();
    let mut there: Vec<String> = std::fs::read_dir("/sys/bus/pci/devices")
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    there.sort();
    let addresses: Vec<&str> = listed.iter().filter_map(|device| device["address"].as_str()).collect();
    assert_eq!(addresses, there);
    assert!(listed.iter().all(|device| device["state"] == "host"), "{listed:?}");
    let table = text(&world.verb(&["device", "ls"]).stdout);
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].starts_with("ADDRESS") && lines.len() == there.len() + 1,
        "{table}"
    );
}

fn what_is_no_device_is_refused() {
    let world = World::new("");
    for verb in [
        &["device", "bind", NOWHERE][..],
        &["device", "unbind", NOWHERE],
        &["device", "vfs", NOWHERE, "2"],
    ] {
        let refused = world.verb(verb);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(1), "{verb:?}: {said}");
        assert!(said.contains(NOWHERE) && said.contains("basalt device ls"), "{said}");
        assert!(refused.stdout.is_empty(), "{verb:?}");
    }
    for wrong in ["nvme0", "../../x", "0000:01:00.8", ""] {
        let refused = world.verb(&["device", "bind", wrong]);
        assert_eq!(refused.status.code(), Some(2), "{wrong}");
        assert!(
            text(&refused.stderr).contains("such as 0000:01:00.0"),
            "{}",
            text(&refused.stderr)
        );
    }
    let refused = world.verb(&["device", "vfs", NOWHERE, "-1"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}

fn a_name_that_no_specification_has_is_refused_with_what_there_is() {
    let world = World::new("");
    let name = "nobody.example.com/disk=none";
    let refused = world.run(&["--device", name, "tiny", "--", "true"]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(125), "{said}");
    assert!(
        said.contains(&format!("no specification has the device {name}")),
        "{said}"
    );
    for wrong in ["nobody.example.com/disk", "disk=", "a/b/c=d", "/dev/vfio/1"] {
        let refused = world.run(&["--device", wrong, "tiny", "--", "true"]);
        let said = text(&refused.stderr);
        assert!(
            !refused.status.success() && said.contains("VENDOR/CLASS=NAME"),
            "{said}"
        );
    }
    // Nothing is bound.
    let refused = world.verb(&["device", "cdi"]);
    let said = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("basalt device bind ADDRESS"), "{said}");
    let refused = world.verb(&["device", "cdi", "--kind", "disk"]);
    assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stderr));
}

fn memory_and_start_policies_that_cannot_be_are_refused_with_what_can() {
    let world = World::new("");
    for (flags, wanted) in [
        (&["--device-start", "late"][..], "--device ADDRESS"),
        (&["--device-start", "Lazy"], "eager, late, async, async-balloon or lazy"),
        (
            &["--device-start", "balloon"],
            "eager, late, async, async-balloon or lazy",
        ),
        (
            &["--device-start", "lazy", "--boot-memory", "64m"],
            "has all of its memory when it boots",
        ),
        (&["--boot-memory", "1g"], "--boot-memory than with --memory"),
        (&["--boot-memory", "1k"], "at least 32 MiB"),
        (&["--max-memory", "64m"], "--max-memory than with --memory"),
        (&["--memory", "513m", "--boot-memory", "512m"], "multiples of 2 MiB"),
        (&["--max-memory", "1g", "--class", "bare"], "--class bare"),
        (&["--memory-ready"], "--boot-memory SIZE"),
        (
            &["--device", NOWHERE, "--device-start", "eager", "--boot-memory", "256m"],
            "--device-start async",
        ),
    ] {
        let refused = world.run(&[flags, &["tiny", "--", "true"]].concat());
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(125), "{flags:?}: {said}");
        assert!(said.contains(wanted), "{flags:?}: {said}");
    }
    let fixed = world.verb(&[
        "run", "-d", "--disk", "0", "--name", "box", "tiny", "--", "sleep", "1000",
    ]);
    assert!(fixed.status.success(), "{}", text(&fixed.stderr));
    for (words, code, wanted) in [
        (&["update", "box", "--memory", "1g"][..], 1, "--max-memory SIZE"),
        (&["update", "nobody", "--memory", "1g"], 1, "nobody"),
        (&["update", "box"], 2, "--memory"),
        (&["update", "box", "--memory", "1"], 2, "at least 32 MiB"),
    ] {
        let refused = world.verb(words);
        let said = text(&refused.stderr);
        assert_eq!(refused.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(wanted), "{words:?}: {said}");
    }
    let listed: Vec<Value> = serde_json::from_slice(&world.verb(&["ps", "--json"]).stdout).unwrap();
    assert!(listed[0].get("memory_state").is_none(), "{listed:?}");
    assert!(world.verb(&["rm", "--force", "box"]).status.success());
}
