//! Compiles the system call filters in `seccomp/*.toml` into BPF programs and a table of them, and tells the program which states it saves.
//!
//! At build time, so that a VMM's start costs one system call a filter. Knows the form of the files, not what any thread
//! does.

#[path = "build/filter.rs"]
mod filter;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

/// Every filter of a kind of thread; `vcpu` first, because the rules of the process's filter are tried in this order.
const KINDS: [&str; 20] = [
    "vcpu",
    "block",
    "block-io",
    "net",
    "console",
    "pmem",
    "rng",
    "mem",
    "balloon",
    "iommu",
    "vsock",
    "fs",
    "fs-dormant",
    "main",
    "loader",
    "restorer",
    "pager",
    "pinner",
    "dma-map",
    "dma-zero",
];

/// Part of every filter.
const COMMON: &str = "common";

/// Part of every filter, in builds with glibc.
const GLIBC: &str = "glibc";

/// One file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    thread: String,
    /// What the names of such threads are before their number.
    #[serde(default)]
    names: Vec<String>,
    #[serde(rename = "rule")]
    rules: Vec<Rule>,
}

#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    calls: Vec<String>,
    /// All of these.
    #[serde(default)]
    when: Vec<When>,
    why: String,
    /// For the comparison with what a run used (`basalt-lab-cases audit`).
    #[serde(default)]
    unused: BTreeMap<String, String>,
}

/// A condition on one argument; exactly one of the three.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct When {
    arg: u8,
    #[serde(default)]
    is: Vec<String>,
    without: Option<String>,
    at_most: Option<u64>,
}

type Constants = BTreeMap<String, u64>;

fn read<T: for<'de> Deserialize<'de>>(directory: &Path, name: &str) -> T {
    let path = directory.join(format!("{name}.toml"));
    println!("cargo::rerun-if-changed={}", path.display());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The ways in which a condition can hold: one list of JSON conditions each.
fn ways(when: &When, constants: &Constants) -> Vec<Value> {
    let value = |name: &String| {
        *constants
            .get(name)
            .unwrap_or_else(|| panic!("there is no constant {name}"))
    };
    let condition = |op: Value, value: u64| json!({"index": when.arg, "type": "dword", "op": op, "val": value});
    match when {
        When {
            is,
            without: None,
            at_most: None,
            ..
        } if !is.is_empty() => is.iter().map(|name| condition(json!("eq"), value(name))).collect(),
        When {
            is,
            without: Some(bits),
            at_most: None,
            ..
        } if is.is_empty() => {
            vec![condition(json!({"masked_eq": value(bits)}), 0)]
        }
        When {
            is,
            without: None,
            at_most: Some(most),
            ..
        } if is.is_empty() => vec![condition(json!("le"), *most)],
        _ => panic!(
            "a condition on argument {} is not one of `is`, `without`, `at_most`",
            when.arg
        ),
    }
}

/// One JSON rule for each call and each combination of ways in which its conditions can hold.
fn expand(rule: &Rule, constants: &Constants) -> Vec<(String, Value)> {
    assert!(!rule.why.is_empty(), "{:?}: a rule without a reason", rule.calls);
    let names = rule.when.iter().flat_map(|when| &when.is).chain(&rule.calls);
    let names: Vec<_> = names.collect();
    for name in rule.unused.keys() {
        assert!(names.contains(&name), "`unused` names {name}, which its rule does not");
    }
    let mut combinations: Vec<Vec<Value>> = vec![Vec::new()];
    for when in &rule.when {
        let ways = ways(when, constants);
        combinations = combinations
            .iter()
            .flat_map(|so_far| {
                ways.iter()
                    .map(move |way| [so_far.as_slice(), std::slice::from_ref(way)].concat())
            })
            .collect();
    }
    let one = |call: &String| {
        let rules = combinations.iter().map(|args| match args.as_slice() {
            [] => json!({"syscall": call}),
            args => json!({"syscall": call, "args": args}),
        });
        rules.map(|rule| (call.clone(), rule)).collect::<Vec<_>>()
    };
    rule.calls.iter().flat_map(one).collect()
}

/// A filter's rules, none twice; an unconditional one makes conditional ones of the same call pointless.
fn rules(files: &[&File], constants: &Constants) -> Vec<Value> {
    let all: Vec<_> = files
        .iter()
        .flat_map(|file| &file.rules)
        .flat_map(|rule| expand(rule, constants))
        .collect();
    let free = |call: &str| {
        all.iter()
            .any(|(other, rule)| other == call && rule.get("args").is_none())
    };
    let mut kept: Vec<Value> = Vec::new();
    for (call, rule) in &all {
        if !kept.contains(rule) && (rule.get("args").is_none() || !free(call)) {
            kept.push(rule.clone());
        }
    }
    kept
}

fn compile(rules: &[Value]) -> Vec<u8> {
    let instruction = |i: seccompiler::sock_filter| {
        let [code_low, code_high] = i.code.to_ne_bytes();
        let [a, b, c, d] = i.k.to_ne_bytes();
        [code_low, code_high, i.jt, i.jf, a, b, c, d]
    };
    filter::compile(rules).into_iter().flat_map(instruction).collect()
}

/// A checksum of the list of samples, of which there is one for each kind and version of a saved state (`cargo xtask tidy`).
fn states(root: &Path) -> u32 {
    let path = root.join("golden.lock");
    println!("cargo::rerun-if-changed={}", path.display());
    crc32fast::hash(&std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())))
}

fn main() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let package = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    println!("cargo::rustc-env=BASALT_STATES={:08x}", states(&package.join("../..")));
    let directory = package.join("seccomp");
    let out = PathBuf::from(variable("OUT_DIR"));
    let tables: BTreeMap<String, Constants> = read(&directory, "constants");
    let constants: Constants = tables.into_values().flatten().collect();
    let common: File = read(&directory, COMMON);
    let glibc: File = read(&directory, GLIBC);
    let glibc = (variable("CARGO_CFG_TARGET_ENV") == "gnu").then_some(&glibc);
    let kinds: Vec<File> = KINDS.iter().map(|kind| read(&directory, kind)).collect();

    let mut table = String::from("pub(crate) static TABLE: &[Filter] = &[\n");
    let write = |name: &str, rules: Vec<Value>| {
        let path = out.join(format!("{name}.bpf"));
        std::fs::write(&path, compile(&rules)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        format!("include_bytes!({path:?})")
    };
    for (kind, file) in KINDS.iter().zip(&kinds) {
        assert_eq!(*kind, file.thread, "{kind}.toml is of another thread");
        let parts = [Some(file), Some(&common), glibc];
        let program = write(
            kind,
            rules(&parts.into_iter().flatten().collect::<Vec<_>>(), &constants),
        );
        let names = &file.names;
        writeln!(
            table,
            "    Filter {{ thread: {kind:?}, names: &{names:?}, program: {program} }},"
        )
        .unwrap_or_else(|error| panic!("{error}"));
    }
    let all: Vec<&File> = kinds.iter().chain([&common]).chain(glibc).collect();
    let program = write("process", rules(&all, &constants));
    writeln!(table, "];\n\npub(crate) static PROCESS: &[u8] = {program};").unwrap_or_else(|error| panic!("{error}"));
    std::fs::write(out.join("seccomp_table.rs"), table).unwrap_or_else(|error| panic!("{error}"));
}
