//! The flags that say what a sandbox may use, besides its size. What the numbers mean and which are sense is `node_api`'s.

use clap::Args;
use node_api::{Limits, Rate};

use super::network::EgressArgs;
use super::parse;

/// Limits of `basalt run`.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
#[command(next_help_heading = "Limits")]
pub(crate) struct LimitArgs {
    /// Processor time that it may take, in processors, such as 0.5.
    #[arg(long, value_name = "CPUS", value_parser = parse::cpu_limit)]
    cpu_limit: Option<u64>,

    /// Its share where processors are short, 1 to 10000; others have 100.
    #[arg(long, value_name = "N")]
    cpu_weight: Option<u64>,

    /// Processes and threads in the guest.
    #[arg(long, value_name = "N")]
    pids_limit: Option<u64>,

    /// Each disk's reads, and its writes, a second: BYTES, /OPERATIONS or both, such as 10M/100.
    #[arg(long, value_name = "RATE")]
    disk_rate: Option<Rate>,

    /// Reads alone.
    #[arg(long, value_name = "RATE")]
    disk_read_rate: Option<Rate>,

    /// Writes alone.
    #[arg(long, value_name = "RATE")]
    disk_write_rate: Option<Rate>,

    /// The network in each direction, a second: BYTES, /PACKETS or both, such as 10M.
    #[arg(long, value_name = "RATE")]
    net_rate: Option<Rate>,

    /// What comes alone.
    #[arg(long, value_name = "RATE")]
    net_in_rate: Option<Rate>,

    /// What is sent alone.
    #[arg(long, value_name = "RATE")]
    net_out_rate: Option<Rate>,

    /// Where it may send.
    #[command(flatten)]
    pub(crate) egress: EgressArgs,
}

impl LimitArgs {
    /// The limits; a flag for one direction wins over that for both.
    pub(crate) fn limits(&self) -> Limits {
        let of = |one: Option<Rate>, both: Option<Rate>| one.or(both).unwrap_or_default();
        Limits {
            cpu_millis: self.cpu_limit,
            cpu_weight: self.cpu_weight,
            pids: self.pids_limit,
            disk_read: of(self.disk_read_rate, self.disk_rate),
            disk_write: of(self.disk_write_rate, self.disk_rate),
            net_receive: of(self.net_in_rate, self.net_rate),
            net_transmit: of(self.net_out_rate, self.net_rate),
        }
    }

    /// The same flags again, for a program elsewhere.
    pub(crate) fn words(&self) -> Vec<String> {
        let limits = self.limits();
        let cpus = limits
            .cpu_millis
            .map(|millis| format!("--cpu-limit={}.{:03}", millis / 1000, millis % 1000));
        let weight = limits.cpu_weight.map(|weight| format!("--cpu-weight={weight}"));
        let pids = limits.pids.map(|pids| format!("--pids-limit={pids}"));
        let rates = [
            ("disk-read-rate", limits.disk_read),
            ("disk-write-rate", limits.disk_write),
            ("net-in-rate", limits.net_receive),
            ("net-out-rate", limits.net_transmit),
        ];
        let rates = rates.into_iter().filter(|(_, rate)| rate.is_limited());
        let rates = rates.map(|(name, rate)| format!("--{name}={rate}"));
        let egress = self.egress.words();
        let limits = cpus.into_iter().chain(weight).chain(pids).chain(rates);
        limits.chain(egress).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        limits: LimitArgs,
    }

    fn parse(words: &[&str]) -> Result<LimitArgs, clap::Error> {
        Program::try_parse_from(["x"].iter().chain(words)).map(|program| program.limits)
    }

    #[test]
    fn one_direction_wins_over_both() {
        let args = parse(&[
            "--disk-rate",
            "1M/10",
            "--disk-read-rate",
            "/20",
            "--net-out-rate",
            "5k",
        ])
        .unwrap();
        let limits = args.limits();
        assert_eq!(limits.disk_read.to_string(), "/20");
        assert_eq!(limits.disk_write.to_string(), "1048576/10");
        assert!(!limits.net_receive.is_limited());
        assert_eq!(limits.net_transmit.to_string(), "5120");
    }

    #[test]
    fn the_far_side_has_the_same_limits() {
        assert!(parse(&[]).unwrap().words().is_empty());
        let args = parse(&[
            "--cpu-limit=1.05",
            "--cpu-weight=7",
            "--pids-limit=9",
            "--disk-rate=1M",
            "--net-rate=2M/3",
            "--egress-deny=0.0.0.0/0",
            "--egress-allow=10.0.0.0/8",
        ])
        .unwrap();
        let words = args.words();
        let far = parse(&words.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        assert_eq!(far.limits(), args.limits());
        assert_eq!((&far.egress, far.egress.words().len()), (&args.egress, 2));
        assert_eq!(args.limits().cpu_millis, Some(1050));
    }

    #[test]
    fn what_is_no_limit_is_refused_with_what_is_one() {
        for (words, wanted) in [
            (["--cpu-limit", "half"], "such as 0.5"),
            (["--cpu-limit", "0"], "0.01 to 1000"),
            (["--disk-rate", "fast"], "10M/100"),
            (["--net-rate", "0/"], "10M/100"),
            (["--pids-limit", "many"], "--pids-limit"),
        ] {
            let error = parse(&words).unwrap_err().to_string();
            assert!(error.contains(wanted), "{words:?}: {error}");
        }
    }
}
