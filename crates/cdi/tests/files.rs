//! Specifications as files: what is read of them, what is wrong with them, and which of several counts.

use std::fs;
use std::path::Path;

use base::CdiName;
use cdi::{ContainerEdits, Device, DeviceNode, Directories, Error, Format, Spec, SpecError};

const YAML: &str = r#"# As a device plugin writes it.
cdiVersion: "0.5.0"
kind: nvidia.com/pgpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/vfio/12
      permissions: rw
- name: "1"
  containerEdits:
    deviceNodes:
    - path: /dev/vfio/13
      hostPath: /dev/vfio/devices/vfio1
    env: ["WHICH=1"]
containerEdits:
  deviceNodes:
  - path: /dev/vfio/vfio
"#;

const JSON: &str = r#"{
    "cdiVersion": "1.1.0",
    "kind": "vendor.com/net",
    "annotations": {"a": "b"},
    "devices": [
        {"name": "card0", "containerEdits": {
            "env": ["CARD=0"],
            "deviceNodes": [{"path": "/dev/card", "type": "c", "major": 10, "minor": 1, "fileMode": 438, "uid": 0, "gid": 5}],
            "mounts": [{"hostPath": "/lib/card", "containerPath": "/lib/card", "options": ["ro", "bind"], "type": "none"}],
            "hooks": [{"hookName": "createContainer", "path": "/bin/card", "args": ["card"], "env": ["A=b"], "timeout": 1}],
            "additionalGids": [7],
            "intelRdt": {"closID": "card"},
            "netDevices": [{"hostInterfaceName": "eth1", "name": "eth0"}]
        }}
    ]
}
"#;

fn name(text: &str) -> CdiName {
    text.parse().unwrap()
}

fn nodes(edits: &ContainerEdits) -> Vec<&str> {
    edits.device_nodes.iter().map(DeviceNode::on_host).collect()
}

#[test]
fn all_that_the_specification_has_is_read_from_both_formats() {
    let spec = Spec::parse(YAML, Format::Yaml).unwrap();
    assert_eq!(
        (spec.kind.to_string(), spec.devices.len()),
        ("nvidia.com/pgpu".to_owned(), 2)
    );
    assert_eq!(nodes(&spec.devices[1].container_edits), ["/dev/vfio/devices/vfio1"]);
    let spec = Spec::parse(JSON, Format::Json).unwrap();
    let edits = &spec.devices[0].container_edits;
    assert_eq!(
        (edits.hooks.len(), edits.mounts.len(), edits.net_devices.len()),
        (1, 1, 1)
    );
    assert_eq!(
        (edits.additional_gids.as_slice(), edits.intel_rdt.is_some()),
        (&[7][..], true)
    );
    // JSON is YAML.
    assert_eq!(Spec::parse(JSON, Format::Yaml).unwrap(), spec);
    let text = serde_json::to_string_pretty(&spec).unwrap();
    assert_eq!(Spec::parse(&text, Format::Json).unwrap(), spec);
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    let place = |text: &str, format| match Spec::parse(text, format).unwrap_err() {
        SpecError::Syntax { line, why, .. } => (line, why),
        other => panic!("{other}"),
    };
    let (line, why) = place(&YAML.replace("permissions: rw", "permission: rw"), Format::Yaml);
    assert!(line == 9 && why.contains("permission"), "{line}: {why}");
    assert!(!why.contains('\n'), "{why}");
    let (line, _) = place(
        &YAML.replace("kind: nvidia.com/pgpu", "kind: [nvidia.com/pgpu"),
        Format::Yaml,
    );
    assert!((3..=20).contains(&line), "{line}");
    let (line, why) = place(&JSON.replace("\"hooks\"", "\"hook\""), Format::Json);
    assert!(
        line == 10 && why.contains("hook") && !why.contains("line"),
        "{line}: {why}"
    );
    let (line, _) = place(&JSON.replace("[7]", "[7"), Format::Json);
    assert_eq!(line, 12);
    let (line, why) = place(&JSON.replace("vendor.com/net", "net"), Format::Json);
    assert!(line == 3 && why.contains("VENDOR/CLASS"), "{line}: {why}");
    place("", Format::Json);
    Spec::parse("", Format::Yaml).unwrap_err();
    // What stands for itself many times over.
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x]\n");
    for depth in 1..12 {
        bomb += &format!(
            "a{depth}: &a{depth} [{}]\n",
            vec![format!("*a{}", depth - 1); 8].join(", ")
        );
    }
    Spec::parse(&bomb, Format::Yaml).unwrap_err();
}

#[test]
fn what_says_something_impossible_is_refused() {
    let refused = |from: &str, to: &str| {
        assert!(JSON.contains(from), "{from}");
        let text = JSON.replace(from, to);
        Spec::parse(&text, Format::Json).unwrap_err().to_string()
    };
    assert!(refused("1.1.0", "1.2.0").contains("cdiVersion `1.2.0`"));
    let old = refused("1.1.0", "0.7.0");
    assert!(old.contains("netDevices") && old.contains("since 1.1.0"), "{old}");
    assert!(refused("card0", "card 0").contains("`card 0`"));
    assert!(refused("CARD=0", "CARD").contains("NAME=value"));
    assert!(refused("\"/dev/card\"", "\"dev/card\"").contains("absolute"));
    let empty = r#"{"cdiVersion": "0.3.0", "kind": "v/c", "devices": []}"#;
    assert_eq!(Spec::parse(empty, Format::Json), Err(SpecError::Empty));
    let nothing = r#"{"cdiVersion": "0.3.0", "kind": "v/c", "devices": [{"name": "a", "containerEdits": {}}]}"#;
    let said = Spec::parse(nothing, Format::Json).unwrap_err().to_string();
    assert!(said.contains("are empty"), "{said}");
    let twice = YAML.replace("\"1\"", "\"0\"");
    assert_eq!(Spec::parse(&twice, Format::Yaml), Err(SpecError::Twice("0".into())));
    let early = YAML.replace("0.5.0", "0.4.0");
    let said = Spec::parse(&early, Format::Yaml).unwrap_err().to_string();
    assert!(said.contains("since 0.5.0"), "{said}");
    // With a letter in front, as some write it.
    Spec::parse(&YAML.replace("\"0.5.0\"", "v0.5.0"), Format::Yaml).unwrap();
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn named(kind: &str, name: &str, node: &str) -> String {
    let node = DeviceNode {
        path: node.to_owned(),
        ..DeviceNode::default()
    };
    let container_edits = ContainerEdits {
        device_nodes: vec![node],
        ..ContainerEdits::default()
    };
    let spec = Spec {
        cdi_version: "0.5.0".to_owned(),
        kind: kind.parse().unwrap(),
        annotations: std::collections::BTreeMap::new(),
        devices: vec![Device {
            name: name.to_owned(),
            annotations: std::collections::BTreeMap::new(),
            container_edits,
        }],
        container_edits: ContainerEdits::default(),
    };
    serde_json::to_string(&spec).unwrap()
}

#[test]
fn the_last_directory_counts_and_two_files_of_one_are_nobodys() {
    let root = tempfile::tempdir().unwrap();
    let (etc, run) = (root.path().join("etc"), root.path().join("run"));
    let directories = Directories::of(vec![etc.clone(), run.clone()]);
    let at = |registry: &cdi::Registry, text: &str| {
        let found = registry.find(&name(text))?;
        Ok::<_, Error>(nodes(&found.edits).join(" "))
    };
    // Neither is there.
    let none = directories.read().find(&name("v.com/c=a")).unwrap_err().to_string();
    assert!(
        none.contains("there is none in") && none.contains("/etc and "),
        "{none}"
    );
    write(&etc.join("one.json"), &named("v.com/c", "a", "/dev/vfio/1"));
    write(&etc.join("gpu.yaml"), YAML);
    assert_eq!(at(&directories.read(), "v.com/c=a").unwrap(), "/dev/vfio/1");
    // What all of a file want comes first.
    assert_eq!(
        at(&directories.read(), "nvidia.com/pgpu=0").unwrap(),
        "/dev/vfio/vfio /dev/vfio/12"
    );
    write(&run.join("two.json"), &named("v.com/c", "a", "/dev/vfio/2"));
    assert_eq!(at(&directories.read(), "v.com/c=a").unwrap(), "/dev/vfio/2");
    write(&run.join("three.json"), &named("v.com/c", "a", "/dev/vfio/3"));
    write(&run.join("four.json"), &named("v.com/c", "b", "/dev/vfio/4"));
    let registry = directories.read();
    let twice = registry.find(&name("v.com/c=a")).unwrap_err().to_string();
    assert!(twice.contains("two.json") && twice.contains("three.json"), "{twice}");
    assert_eq!(at(&registry, "v.com/c=b").unwrap(), "/dev/vfio/4");
    let all: Vec<_> = registry.all().map(|(name, _)| name.to_string()).collect();
    assert_eq!(all, ["nvidia.com/pgpu=0", "nvidia.com/pgpu=1", "v.com/c=b"]);
    // Two of a directory that does not count take nothing away.
    fs::remove_file(run.join("three.json")).unwrap();
    write(&etc.join("five.json"), &named("v.com/c", "a", "/dev/vfio/5"));
    assert_eq!(at(&directories.read(), "v.com/c=a").unwrap(), "/dev/vfio/2");
}

#[test]
fn what_is_missing_is_told_with_what_there_is_and_with_files_that_are_wrong() {
    let root = tempfile::tempdir().unwrap();
    let directories = Directories::of(vec![root.path().to_owned()]);
    write(&root.path().join("gpu.yaml"), YAML);
    write(&root.path().join("card.json"), JSON);
    // Nobody reads these.
    write(&root.path().join("README"), "none");
    write(&root.path().join("below.json/x"), "none");
    let told = |text: &str| directories.read().find(&name(text)).unwrap_err().to_string();
    let said = told("nvidia.com/pgpu=7");
    assert!(
        said.contains("nvidia.com/pgpu=7") && said.ends_with("are 0, 1"),
        "{said}"
    );
    assert!(told("nvidia.com/gpu=0").contains("of the classes pgpu"));
    assert!(told("amd.com/gpu=0").contains("of nvidia.com, vendor.com"));
    assert_eq!(directories.read().broken(), []);
    write(
        &root.path().join("wrong.yaml"),
        "cdiVersion: 0.5.0\nkind: v/c\nnothing: 1\n",
    );
    make_pipe(&root.path().join("pipe.json"));
    write(&root.path().join("long.json"), &" ".repeat((4 << 20) + 1));
    fs::write(root.path().join("bytes.json"), [0xff, 0xfe]).unwrap();
    std::os::unix::fs::symlink("nowhere", root.path().join("link.json")).unwrap();
    let said = told("amd.com/gpu=0");
    for part in [
        "wrong.yaml cannot be used: line 3",
        "pipe.json cannot be used: it is no file",
        "larger than 4 MiB",
        "bytes.json cannot be used",
        "link.json cannot be used",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    directories.read().find(&name("nvidia.com/pgpu=0")).unwrap();
}

fn make_pipe(path: &Path) {
    let made = std::process::Command::new("mkfifo").arg(path).status().unwrap();
    assert!(made.success());
}
