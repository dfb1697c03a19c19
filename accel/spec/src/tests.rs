//! Tests of the whole: the tree's annotations are accepted and complete, and each way to break one is refused by name.

use std::path::Path;

use sha2::{Digest, Sha256};

use super::*;

const REGISTRY: &str = include_str!("../opencl/cl.xml");

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn whole() -> Api {
    opencl(root()).unwrap()
}

/// The tree's files of annotations, by name.
fn files() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(root().join("accel/spec/opencl")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let names = paths.map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), path));
    names
        .filter(|(name, _)| name.ends_with(".toml"))
        .map(|(name, path)| (name, std::fs::read_to_string(path).unwrap()))
        .collect()
}

/// What is said of annotations that are wrong.
fn refused(shape: &Shape, files: &[(String, String)]) -> String {
    let files: Vec<_> = (files.iter())
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    together("opencl", "cl", shape, &files).unwrap_err().to_string()
}

/// The files, with something else in place of a command's own table.
fn replaced(files: &[(String, String)], command: &str, table: &str) -> Vec<(String, String)> {
    let mut files = files.to_vec();
    for (_, text) in &mut files {
        let header = format!("[{command}]\n");
        let Some(at) = text.find(&header) else {
            continue;
        };
        let begin = at + header.len();
        let end = text[begin..].find("\n[").map_or(text.len(), |end| begin + end);
        text.replace_range(begin..end, table);
    }
    files
}

#[test]
fn every_command_of_the_core_is_annotated_or_unsupported_with_a_reason() {
    let api = whole();
    let core: Vec<_> = api
        .commands
        .iter()
        .filter(|command| !command.since.contains('_'))
        .collect();
    assert_eq!(core.len(), 115);
    let count = |wanted: fn(&Service) -> bool| core.iter().filter(|command| wanted(&command.service)).count();
    let unsupported = count(|service| matches!(service, Service::Unsupported { reason, .. } if !reason.is_empty()));
    let generated = count(|service| *service == Service::Generated);
    let manual = count(|service| matches!(service, Service::Manual(_)));
    assert_eq!((generated, manual, unsupported), (87, 27, 1));
    assert_eq!(api.commands.len() - core.len(), 8);
    assert_eq!(api.handles.len(), 9);
}

#[test]
fn the_registry_is_the_one_that_the_readme_names() {
    let sum = hex::encode(Sha256::digest(REGISTRY));
    assert!(include_str!("../README.md").contains(&sum), "{sum}");
}

#[test]
fn what_is_said_of_a_write_is_understood() {
    let api = whole();
    let write = api
        .commands
        .iter()
        .find(|command| command.name == "clEnqueueWriteBuffer")
        .unwrap();
    let kind = |name: &str| &write.params.iter().find(|param| param.name == name).unwrap().kind;
    assert_eq!(
        write.flow,
        Flow::Async {
            queue: Some("command_queue".into()),
            sync_if: Some("blocking_write".into())
        }
    );
    assert!(matches!(kind("size"), Kind::Scalar { counts: true, .. }));
    assert!(matches!(kind("offset"), Kind::Scalar { counts: false, .. }));
    assert!(matches!(kind("ptr"), Kind::Bulk { direction: Direction::In, length } if length.parameters() == ["size"]));
    assert!(matches!(kind("event"), Kind::Handle { life: Life::Shadow, .. }));
    let effects = [
        Effect::Uses("command_queue".into()),
        Effect::Creates("event".into()),
        Effect::Content("buffer".into()),
    ];
    assert!(effects.iter().all(|effect| write.effects.contains(effect)));
    assert!(!write.effects.contains(&Effect::Uses("buffer".into())));
    let since = |name: &str| &api.commands.iter().find(|command| command.name == name).unwrap().since;
    assert_eq!(
        (since("clCreateImage").as_str(), since("clTerminateContextKHR").as_str()),
        ("1.2", "cl_khr_terminate_context")
    );
}

/// Each line: a command, what is said of it instead, and what the error must name.
const BROKEN: &[(&str, &str, &[&str])] = &[
    (
        "clFinish",
        "flow = 'sync'\nparams.queue = 'use'",
        &["queue.toml: clFinish: parameter queue:", "no parameter of it"],
    ),
    ("clFinish", "flow = 'sink'", &["clFinish: \"sink\" is no flow"]),
    ("clFinish", "", &["clFinish: has no flow"]),
    ("clFinish", "flow = 'cached'", &["say until"]),
    (
        "clFinish",
        "flow = 'cached'\nuntil = ['clStop']",
        &["clStop is no annotated command"],
    ),
    ("clFinish", "flow = 'async(queue)'", &["parameter queue: is no object"]),
    ("clFinish", "flow = 'sync'\nsync_if = 'command_queue'", &["sync_if"]),
    (
        "clFinish",
        "flow = 'sync'\nmanual = 'x'\nalias = 'clFlush'",
        &["keep one"],
    ),
    ("clFinish", "alias = 'clGetPlatformIDs'", &["whose parameters differ"]),
    (
        "clFinish",
        "flow = 'sync'\nchecks = ['in_bounds(command_queue)']",
        &["no check", "in_bounds of 3"],
    ),
    (
        "clFinish",
        "flow = 'sync'\neffects = ['breaks(command_queue)']",
        &["no effect"],
    ),
    (
        "clFinish",
        "flow = 'sync'\neffects = ['changes(queue)']",
        &["parameter queue: is no parameter"],
    ),
    (
        "clFinish",
        "unsupported = { code = 'CL_NOTHING', reason = 'x' }",
        &["CL_NOTHING is no constant"],
    ),
    (
        "clRetainContext",
        "flow = 'async'\nparams.context = 'retain'",
        &["parameter context", "the flow is local"],
    ),
    (
        "clReleaseKernel",
        "flow = 'async'\nparams.kernel = 'create'",
        &["parameter kernel", "there already"],
    ),
    (
        "clReleaseKernel",
        "flow = 'async'\nparams.kernel = { handle = 'forget' }",
        &["\"forget\" is no life"],
    ),
    (
        "clReleaseSampler",
        "flow = 'async'",
        &["parameter sampler: is an object without a life"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'",
        &["parameter event_list: is a pointer without a direction"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { in = 'num_events' }",
        &["parameter event_list: is an object without a life"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { in = '', handle = 'use' }",
        &["direction without a length"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { in = 'count', handle = 'use' }",
        &["count, which is no parameter"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { in = 'num(events)', handle = 'use' }",
        &["no known length"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { in = 'num_events', out = '1', handle = 'use' }",
        &["two directions"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { out = 'num_events', handle = 'get' }",
        &["const"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { in = 'num_events', handle = 'create' }",
        &["contradict"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.event_list = { long = 'num_events' }",
        &["parameter event_list", "unknown field `long`"],
    ),
    (
        "clWaitForEvents",
        "flow = 'sync'\nparams.num_events = 'use'",
        &["parameter num_events", "nothing to say"],
    ),
    (
        "clGetHostTimer",
        "flow = 'async'\nparams.host_timestamp = { out = '1' }",
        &["parameter host_timestamp", "cannot be async"],
    ),
    (
        "clCreateUserEvent",
        "flow = 'async'\nparams.returned = 'create'",
        &["parameter returned", "cannot be async"],
    ),
    (
        "clCreateUserEvent",
        "flow = 'async'",
        &["parameter returned: is an object without a life"],
    ),
    (
        "clSetEventCallback",
        "flow = 'async'\nparams.event = 'use'\nparams.pfn_notify = 'use'",
        &["parameter pfn_notify: is a function"],
    ),
    (
        "clSVMAlloc",
        "flow = 'sync'",
        &["parameter returned: is an address that nothing is said of"],
    ),
    (
        "clSVMAlloc",
        "flow = 'sync'\nparams.returned = { svm = 'list' }",
        &["svm cannot be"],
    ),
    (
        "clEnqueueSVMMigrateMem",
        "flow = 'async'\nparams.sizes = { in = 'num_svm_pointers' }\nparams.svm_pointers = { in = 'num_svm_pointers' }",
        &["parameter svm_pointers: points to pointers"],
    ),
    (
        "clCreateContext",
        "flow = 'sync'\nparams.returned = 'create'\nparams.properties = { in = 'zero', keys = { CL_PLATFORM = 'cl_platform_id' } }",
        &["parameter properties: CL_PLATFORM is no constant"],
    ),
    (
        "clCreateBuffer",
        "flow = 'sync'\nparams.returned = 'create'\nparams.host_ptr = { in = 'flags * size + 1', bulk = true }",
        &["parameter host_ptr", "neither a number"],
    ),
    (
        "clCreateBuffer",
        "flow = 'sync'\nparams.returned = 'create'\nparams.host_ptr = { in = 'context', bulk = true }",
        &["cannot be computed from context"],
    ),
    (
        "clCreateBuffer",
        "flow = 'sync'\nparams.returned = 'create'\nparams.host_ptr = { in = 'size', as = 'cl_thing', bulk = true }",
        &["cl_thing has no size"],
    ),
];

#[test]
fn whatever_is_wrong_is_refused_with_file_command_parameter_and_what() {
    let shape = Shape::parse("cl.xml", REGISTRY).unwrap();
    let files = files();
    for (command, table, parts) in BROKEN {
        let error = refused(&shape, &replaced(&files, command, table));
        assert!(
            error.contains(&format!(".toml: {command}: ")),
            "{command} {table}: {error}"
        );
        for part in *parts {
            assert!(error.contains(part), "{command} {table}: {error}");
        }
    }
}

#[test]
fn a_command_that_is_missing_or_unknown_or_said_twice_is_named() {
    let shape = Shape::parse("cl.xml", REGISTRY).unwrap();
    let said = |files: &[(&str, &str)]| together("opencl", "cl", &shape, files).unwrap_err().to_string();
    assert!(said(&[]).contains("clGetPlatformIDs: is in the core and not annotated"));
    let error = said(&[("a.toml", "[clStop]\nflow = 'sync'")]);
    assert_eq!(error, "a.toml: clStop: is no command of the registry; mend its name");
    let error = said(&[
        ("a.toml", "[clFinish]\nflow = 'sync'"),
        ("b.toml", "[clFinish]\nflow = 'sync'"),
    ]);
    assert!(error.contains("b.toml: clFinish: is annotated in a.toml"), "{error}");
    let error = said(&[("a.toml", "[clFinish]\nflaw = 'sync'")]);
    assert!(error.starts_with("a.toml: ") && error.contains("flaw"), "{error}");
}

#[test]
fn a_default_that_nobody_needs_is_refused() {
    let mut files = files();
    for (name, text) in &mut files {
        if name == "defaults.toml" {
            text.push_str("\"colour*\" = 'local'\n");
        }
    }
    let error = refused(&Shape::parse("cl.xml", REGISTRY).unwrap(), &files);
    assert!(
        error.contains("colour*") && error.contains("no command uses"),
        "{error}"
    );
}
