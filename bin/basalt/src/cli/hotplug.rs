//! The flags that say what of a sandbox's memory is there when it boots, and when its devices are; and those of `basalt update`. What fits
//! together is `node_api`'s to say.

use std::time::Duration;

use base::ByteSize;
use clap::Args;
use node_api::{DeviceStart, OnTimeout, SandboxConfig};

use super::parse;

/// Memory that is plugged while the sandbox runs, and devices that wait for memory.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Memory and devices")]
pub(crate) struct HotplugArgs {
    /// When devices are there: eager, before the guest starts, which waits until all memory is mapped for them; async, before the command,
    /// with the memory that it boots with, and the rest is plugged as it is mapped; async-balloon, the same, but all memory is there from the
    /// start, and the guest keeps out of the rest; late, some time after the command has started, which has all memory from its start; lazy,
    /// before the command, and they reach what the guest's drivers map for them, by an IOMMU that its machine has: its memory stays shared
    /// with its template, and `basalt device attach` gives devices so, too [default: async].
    #[arg(long, value_name = "WHEN")]
    device_start: Option<DeviceStart>,

    /// What of --memory is there when it boots; the rest is plugged then [default: all; with --device and --device-start async or async-balloon at most 1g].
    #[arg(long, value_name = "SIZE", value_parser = parse::memory)]
    boot_memory: Option<ByteSize>,

    /// The most memory that `basalt update` can give it while it runs [default: --memory].
    #[arg(long, value_name = "SIZE", value_parser = parse::memory)]
    max_memory: Option<ByteSize>,

    /// Start the command when all memory, and all devices, are there: for programs that look at their memory once.
    #[arg(long)]
    memory_ready: bool,

    /// Whether its guest reports what is free of its memory, which the host has again then: on or off [default: off].
    #[arg(long, value_name = "on|off", value_parser = parse::switch)]
    free_page_reporting: Option<bool>,
}

impl HotplugArgs {
    /// The same in what the daemon is asked for.
    pub(crate) fn put_into(&self, config: &mut SandboxConfig) {
        (config.device_start, config.memory_ready) = (self.device_start, self.memory_ready);
        (config.resources.boot_memory, config.resources.max_memory) = (self.boot_memory, self.max_memory);
        // A template has its own.
        if let Some(reporting) = self.free_page_reporting {
            config.resources.free_page_reporting = reporting;
        }
    }

    /// The same flags again, for a program elsewhere.
    pub(crate) fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend(self.device_start.map(|start| format!("--device-start={start}")));
        words.extend(self.boot_memory.map(|size| format!("--boot-memory={}", size.bytes())));
        words.extend(self.max_memory.map(|size| format!("--max-memory={}", size.bytes())));
        words.extend(self.memory_ready.then(|| "--memory-ready".to_owned()));
        words.extend(self.free_page_reporting.map(|reporting| {
            let word = if reporting { "on" } else { "off" };
            format!("--free-page-reporting={word}")
        }));
        words
    }
}

const UPDATE_HELP: &str = "\
Examples:
  basalt run -d --name web --memory 1g --max-memory 4g IMAGE
  basalt update web --memory 2g
  basalt update web --memory 512m         where it was made with --boot-memory 512m or less
  basalt update web --timeout 5m          it may run for 5 minutes from now on, and from each of its next starts
  basalt update web --timeout none        as long as it likes

The guest is given more, or gives back what it can spare, for a few seconds; how far that is then, is printed. `basalt stats` shows it later.";

/// `basalt update`.
#[derive(Args, Clone, Debug)]
#[command(after_help = UPDATE_HELP)]
pub(crate) struct UpdateArgs {
    /// The sandbox: a name, or an id or its beginning.
    pub(crate) sandbox: String,

    /// How much memory it is to have, from --boot-memory to --max-memory of its `basalt run`.
    #[arg(short, long, value_name = "SIZE", value_parser = parse::memory, required_unless_present = "timeout")]
    pub(crate) memory: Option<ByteSize>,

    /// For how long it may run from now on, such as 30s or 5m, and from each of its next starts; `none` for ever.
    #[arg(long, value_name = "TIME", value_parser = parse::time_limit)]
    pub(crate) timeout: Option<TimeLimit>,

    /// What is done when that is over: stop, or suspend; if it is not said, what was to be done before.
    #[arg(long, value_name = "WHAT", requires = "timeout")]
    pub(crate) on_timeout: Option<OnTimeout>,
}

/// A time, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeLimit(pub(crate) Option<Duration>);

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: HotplugArgs,
    }

    fn parse(words: &[&str]) -> Result<HotplugArgs, clap::Error> {
        Program::try_parse_from(["x"].iter().chain(words)).map(|program| program.args)
    }

    #[test]
    fn the_far_side_has_the_same() {
        assert!(parse(&[]).unwrap().words().is_empty());
        let args = parse(&[
            "--device-start=late",
            "--boot-memory=64m",
            "--max-memory",
            "2g",
            "--memory-ready",
            "--free-page-reporting=on",
        ])
        .unwrap();
        let words = args.words();
        let far = parse(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        assert_eq!((far.words(), words.len()), (words, 5));
        assert_eq!(far, args);
    }

    #[test]
    fn wrong_values_are_refused_with_what_is_right() {
        for (words, wanted) in [
            (
                ["--device-start", "balloon"],
                "eager, late, async, async-balloon or lazy",
            ),
            (["--device-start", "Lazy"], "eager, late, async, async-balloon or lazy"),
            (["--device-start", ""], "eager, late, async, async-balloon or lazy"),
            (["--boot-memory", "1m"], "at least 32 MiB"),
            (["--boot-memory", "some"], "such as 512M"),
            (["--max-memory", "99999999999t"], "too large"),
            (["--free-page-reporting", "true"], "on or off"),
        ] {
            let error = parse(&words).err().unwrap().to_string();
            assert!(error.contains(wanted), "{words:?}: {error}");
        }
    }
}
