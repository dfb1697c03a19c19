//! The classes that guests of a node can have, as data, and how their exits are counted: those of guests that own their CPUs by
//! basalt.ko, those of others by the host's KVM.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::guard::Kept;
use crate::reasons::Histograms;
use crate::run::Node;

/// How a guest has the host's processors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Class {
    pub(crate) name: &'static str,
    /// The words by which `basalt run` makes one.
    pub(crate) words: &'static [&'static str],
    /// It runs on basalt.ko, and is held against what is to be reached.
    pub(crate) owns: bool,
}

impl Class {
    /// Its vCPUs idle as those of the other classes do.
    pub(crate) fn is_plain(&self) -> bool {
        !self.words.contains(&"--idle")
    }
}

/// Against which the others are held.
pub(crate) const STANDARD: &str = "standard";

/// All that are measured, in turn.
pub(crate) const CLASSES: [Class; 5] = [
    Class {
        name: STANDARD,
        words: &["--class", "standard"],
        owns: false,
    },
    Class {
        name: "dedicated",
        words: &["--class", "dedicated"],
        owns: false,
    },
    Class {
        name: "bare",
        words: &["--class", "bare"],
        owns: true,
    },
    Class {
        name: "bare, waiting",
        words: &["--class", "bare", "--idle", "wait"],
        owns: true,
    },
    Class {
        name: "bare, polling",
        words: &["--class", "bare", "--idle", "poll"],
        owns: true,
    },
];

/// Bare, its memory out of what the host has reserved, and not translated.
pub(crate) const UNTRANSLATED: Class = Class {
    name: "bare, not translated",
    words: &["--class", "bare", "--memory-mode", "identity"],
    owns: true,
};

/// basalt.ko's parameters for memory that this host's Linux was told to leave alone (`memmap=SIZE$START`); `None` if it has been told of none.
pub(crate) fn reserved(command_line: &str) -> Option<String> {
    let ranges = command_line
        .split_whitespace()
        .filter_map(|word| word.strip_prefix("memmap=")?.split_once('$'));
    let (mut memory, mut low) = (None, None);
    for (size, start) in ranges {
        let at = u64::from_str_radix(start.strip_prefix("0x")?, 16).ok()?;
        let range = if at < 1 << 20 { &mut low } else { &mut memory };
        range.get_or_insert(format!("{size}@{start}"));
    }
    Some(format!("memory={} low={}", memory?, low?))
}

/// A kernel module, loaded while this lives.
pub(crate) struct Module(&'static str);

impl Module {
    /// The file is called like the module.
    pub(crate) fn load(assets: &Path, name: &'static str, parameters: &str) -> Result<Self> {
        let path = assets.join(format!("{name}.ko"));
        let image = fs::read(&path).with_context(|| {
            format!(
                "{} cannot be read: `cargo xtask test --only module` makes it",
                path.display()
            )
        })?;
        let parameters = std::ffi::CString::new(parameters)?;
        rustix::system::init_module(&image, &parameters).with_context(|| format!("{name} cannot be loaded"))?;
        Kept::Module(name.to_owned()).tell(true);
        Ok(Self(name))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Err(error) = run("rmmod", &[self.0]) {
            eprintln!("the module {} stays: {error:#}", self.0);
        }
        Kept::Module(self.0.to_owned()).tell(false);
    }
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .context(program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Exits by reason.
pub(crate) type Exits = BTreeMap<String, u64>;

/// Who counts a node's guest's exits. The host has no other guest meanwhile.
pub(crate) struct Counters<'n> {
    node: &'n Node,
    kvm: Histograms,
}

impl<'n> Counters<'n> {
    pub(crate) fn new(node: &'n Node) -> Result<Self> {
        // Loaded by whoever needs it first, and its events are not there before.
        for module in ["kvm_amd", "kvm_intel"] {
            drop(run("modprobe", &[module]));
        }
        Ok(Self {
            node,
            kvm: Histograms::start()?,
        })
    }

    /// Of the guest that is called so, since it was made; of one that does not own its CPUs since this was.
    pub(crate) fn exits(&self, class: &Class, name: &str) -> Result<Exits> {
        if !class.owns {
            return self.kvm.exits();
        }
        let text = self.node.said(&["--json", "stats", "--no-stream", name])?;
        let found: Value = serde_json::from_str(&text)?;
        let all = found
            .pointer("/0/usage/vmm")
            .and_then(Value::as_object)
            .context("no counters")?;
        Ok(of_engine(
            all.iter()
                .filter_map(|(name, count)| Some((name.as_str(), count.as_u64()?))),
        ))
    }
}

/// `engine_exits_total{reason="icr",vcpu="0"}` and the like, summed up by reason.
fn of_engine<'a>(counters: impl Iterator<Item = (&'a str, u64)>) -> Exits {
    let mut exits = Exits::new();
    for (name, count) in counters {
        let Some(labels) = name.strip_prefix("engine_exits_total{") else {
            continue;
        };
        let reason = labels.split_once("reason=").map_or("all", |(_, rest)| rest);
        let end = |letter: char| matches!(letter, ',' | '}');
        let reason = reason.split(end).next().unwrap_or_default().trim_matches('"');
        *exits.entry(reason.to_owned()).or_default() += count;
    }
    exits
}

/// How many came between two counts.
pub(crate) fn between(before: &Exits, after: &Exits) -> Exits {
    let new = |(reason, &count): (&String, &u64)| {
        let old = before.get(reason).copied().unwrap_or_default();
        (reason.clone(), count.saturating_sub(old))
    };
    after.iter().map(new).filter(|(_, count)| *count > 0).collect()
}

pub(crate) fn sum(exits: &Exits) -> u64 {
    exits.values().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_summed_up_by_reason() {
        let counters = [
            ("engine_exits_total{vcpu=\"0\",reason=\"icr\"}", 3),
            ("engine_exits_total{reason=\"icr\",vcpu=\"1\"}", 4),
            ("engine_exits_total{reason=\"port\"}", 1),
            ("engine_refused_total", 9),
        ];
        let exits = of_engine(counters.into_iter());
        assert_eq!(exits, Exits::from([("icr".to_owned(), 7), ("port".to_owned(), 1)]));
        assert_eq!(sum(&exits), 8);
        let later = Exits::from([("icr".to_owned(), 9), ("port".to_owned(), 1)]);
        assert_eq!(between(&exits, &later), Exits::from([("icr".to_owned(), 2)]));
    }

    #[test]
    fn memory_that_is_reserved_is_what_the_kernel_was_told() {
        let line = "console=ttyS0 memmap=288M$0x100000000 memmap=64K$0x20000 quiet";
        assert_eq!(
            reserved(line).as_deref(),
            Some("memory=288M@0x100000000 low=64K@0x20000")
        );
        assert_eq!(reserved("memmap=288M$0x100000000"), None);
        assert_eq!(reserved("quiet"), None);
    }

    #[test]
    fn classes_have_names_of_their_own_and_one_is_the_standard() {
        let mut names: Vec<_> = CLASSES.iter().map(|class| class.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), CLASSES.len());
        assert_eq!(CLASSES[0].name, STANDARD);
    }
}
