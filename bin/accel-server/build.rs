//! Compiles the system call filters in `seccomp/*.toml` into BPF programs, by seccompiler.
//!
//! There are two, of which the kernel takes the stricter answer: one that allows what is listed and has the rest fail, one
//! that ends the process. Knows the form of the files, not what a call does.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use seccompiler::{BpfMap, TargetArch, compile_from_json};
use serde::Deserialize;
use serde_json::{Value, json};

/// ENOSYS (asm-generic/errno.h).
const NO_SUCH_CALL: u32 = 38;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    constants: BTreeMap<String, u64>,
    #[serde(rename = "rule")]
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    calls: Vec<String>,
    /// All of these.
    #[serde(default)]
    when: Vec<When>,
    why: String,
}

/// What is asked of one argument: to be one of `is`, as far as `mask` goes; to have none of the bits `without`; to have
/// at least one of `bits`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct When {
    arg: u8,
    #[serde(default)]
    is: Vec<String>,
    mask: Option<String>,
    without: Option<String>,
    #[serde(default)]
    bits: Vec<String>,
}

fn read(directory: &Path, name: &str) -> File {
    let path = directory.join(format!("{name}.toml"));
    println!("cargo::rerun-if-changed={}", path.display());
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl File {
    fn value(&self, name: &str) -> u64 {
        let value = self.constants.get(name);
        *value.unwrap_or_else(|| panic!("there is no constant {name}"))
    }

    /// The ways in which a condition can hold.
    fn ways(&self, when: &When) -> Vec<Value> {
        let one =
            |operation: Value, value: u64| json!({"index": when.arg, "type": "dword", "op": operation, "val": value});
        match (&when.is[..], &when.mask, &when.without, &when.bits[..]) {
            ([_, ..], None, None, []) => when.is.iter().map(|name| one(json!("eq"), self.value(name))).collect(),
            ([_, ..], Some(mask), None, []) => {
                let masked = json!({"masked_eq": self.value(mask)});
                let names = when.is.iter();
                names.map(|name| one(masked.clone(), self.value(name))).collect()
            }
            ([], None, Some(bits), []) => vec![one(json!({"masked_eq": self.value(bits)}), 0)],
            ([], None, None, [_, ..]) => {
                let values = when.bits.iter().map(|name| self.value(name));
                values.map(|bit| one(json!({"masked_eq": bit}), bit)).collect()
            }
            _ => panic!("a condition on argument {} is not understood", when.arg),
        }
    }

    /// For each call each combination of ways in which its conditions can hold.
    fn rules(&self) -> Vec<Value> {
        let of = |rule: &Rule| {
            assert!(!rule.why.is_empty(), "{:?}: a rule without a reason", rule.calls);
            let mut combinations = vec![Vec::new()];
            for when in &rule.when {
                let ways = self.ways(when);
                let with = |so_far: &Vec<Value>| {
                    let with_one = |way: &Value| [so_far.as_slice(), std::slice::from_ref(way)].concat();
                    ways.iter().map(with_one).collect::<Vec<_>>()
                };
                combinations = combinations.iter().flat_map(with).collect();
            }
            let one = |call: &String| {
                let rule = |args: &Vec<Value>| match args.as_slice() {
                    [] => json!({"syscall": call}),
                    args => json!({"syscall": call, "args": args}),
                };
                combinations.iter().map(rule).collect::<Vec<_>>()
            };
            rule.calls.iter().flat_map(one).collect::<Vec<_>>()
        };
        self.rules.iter().flat_map(of).collect()
    }
}

/// An unconditional rule makes conditional ones of the same call pointless, and seccompiler refuses both.
fn without_pointless(rules: Vec<Value>) -> Vec<Value> {
    let free = |rule: &Value| rule.get("args").is_none();
    let pointless = |rule: &Value| {
        !free(rule)
            && rules
                .iter()
                .any(|other| free(other) && other["syscall"] == rule["syscall"])
    };
    rules.iter().filter(|rule| !pointless(rule)).cloned().collect()
}

fn compile(listed: &str, otherwise: Value, rules: Vec<Value>) -> Vec<u8> {
    let filter =
        json!({"f": {"match_action": listed, "mismatch_action": otherwise, "filter": without_pointless(rules)}});
    let mut compiled: BpfMap = compile_from_json(filter.to_string().as_bytes(), TargetArch::x86_64)
        .unwrap_or_else(|error| panic!("a filter does not compile: {error}"));
    let program = compiled.remove("f").unwrap_or_else(|| panic!("a filter is lost"));
    let instruction = |i: seccompiler::sock_filter| {
        let [code_low, code_high] = i.code.to_ne_bytes();
        let [a, b, c, d] = i.k.to_ne_bytes();
        [code_low, code_high, i.jt, i.jf, a, b, c, d]
    };
    program.into_iter().flat_map(instruction).collect()
}

fn main() {
    let variable = |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}")));
    let directory = variable("CARGO_MANIFEST_DIR").join("seccomp");
    let out = variable("OUT_DIR");
    let write = |name: &str, program: Vec<u8>| {
        let path = out.join(format!("{name}.bpf"));
        std::fs::write(&path, program).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    };
    let (allowed, devices) = (read(&directory, "allowed").rules(), read(&directory, "devices").rules());
    let otherwise = json!({"errno": NO_SUCH_CALL});
    let with_devices = [allowed.clone(), devices].concat();
    for (name, rules) in [("allowed", allowed), ("allowed-with-devices", with_devices)] {
        let listening = rules.iter().filter(|rule| rule["syscall"] != "connect").cloned();
        let listening = compile("allow", otherwise.clone(), listening.collect());
        write(&format!("{name}-listening"), listening);
        write(name, compile("allow", otherwise.clone(), rules));
    }
    write(
        "fatal",
        compile("kill_process", json!("allow"), read(&directory, "fatal").rules()),
    );
}
