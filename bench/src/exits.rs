//! How often guests leave their CPUs and why, and what they get done, by class and load. Standard guests' exits are counted by the host's
//! KVM, those of bare ones by basalt.ko; what Linux interrupts itself for is the guest's own count.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::class::{CLASSES, Class, Counters, Exits, Module, STANDARD, between, sum};
use crate::figures::{Bench, tell};
use crate::report::{Figure, cell};
use crate::run::Node;
use crate::stats::Target;

/// How many vCPUs a guest has.
pub(crate) const VCPUS: usize = 2;

/// How long one is watched, and how long it is left alone before.
pub(crate) const WATCHED: Duration = Duration::from_secs(20);
pub(crate) const SETTLED: Duration = Duration::from_secs(6);

/// How long a guest has something to do about a question after its answer.
const ANSWERED: Duration = Duration::from_secs(2);

/// How long a program may take to say what it has done after that.
const PATIENCE: Duration = Duration::from_secs(60);

/// Each boots, and is watched under each load.
const MOST_RUNS: usize = 3;

const NAME: &str = Node::CLONE;

/// What a guest is busy with.
pub(crate) struct Load {
    pub(crate) name: &'static str,
    /// Scripts that run beside each other. Each notes its process by which it is ended.
    pub(crate) scripts: &'static [&'static str],
    /// Says how much has been done so far, or at the end of it all at once.
    pub(crate) done: Option<Done>,
    pub(crate) target: Reached,
}

#[derive(Clone, Copy)]
pub(crate) enum Done {
    /// A script that says how much it was until now.
    Soon(&'static str),
    /// One that says how much it was a second, when the load is over.
    Late(&'static str),
}

/// What guests that own their CPUs are to reach.
#[derive(Clone, Copy)]
pub(crate) enum Reached {
    /// No exit.
    None,
    /// A thousandth of the standard's.
    Thousandth,
}

const COMMANDS: Done = Done::Soon("redis-cli info stats | sed -n 's/^total_commands_processed://p'");
const REQUESTS: Done = Done::Late("sed -n 's/^Requests.sec: *//p' /run/wrk");
const COMPILED: Done = Done::Soon("cat /run/compiled-* | wc -l");

const BUSY: &str = "while :; do :; done";
const STRESS: &str = "exec stress-ng --quiet --cpu 1 --switch 1 --vm 1 --vm-bytes 64m --timeout 60";

pub(crate) const LOADS: [Load; 8] = [
    Load {
        name: "idle",
        scripts: &[],
        done: None,
        target: Reached::None,
    },
    Load {
        name: "busy",
        scripts: &[BUSY; VCPUS],
        done: None,
        target: Reached::None,
    },
    Load {
        name: "Redis",
        scripts: &[
            "exec redis-server --save '' --daemonize no",
            "sleep 2; exec redis-benchmark -q -l -c 8 -t set,get",
        ],
        done: Some(COMMANDS),
        target: Reached::Thousandth,
    },
    Load {
        name: "Redis, pinned",
        scripts: &[
            "exec taskset -c 0 redis-server --save '' --daemonize no",
            "sleep 2; exec taskset -c 1 redis-benchmark -q -l -c 8 -t set,get",
        ],
        done: Some(COMMANDS),
        target: Reached::Thousandth,
    },
    Load {
        name: "nginx",
        scripts: &[
            "exec nginx -c /load/nginx.conf",
            "sleep 2; exec wrk -t 1 -c 8 -d 30 http://127.0.0.1:8080/page >/run/wrk",
        ],
        done: Some(REQUESTS),
        target: Reached::Thousandth,
    },
    Load {
        name: "nginx, pinned",
        scripts: &[
            "exec taskset -c 0 nginx -c /load/nginx.conf",
            "sleep 2; exec taskset -c 1 wrk -t 1 -c 8 -d 30 http://127.0.0.1:8080/page >/run/wrk",
        ],
        done: Some(REQUESTS),
        target: Reached::Thousandth,
    },
    Load {
        name: "stress-ng",
        scripts: &[STRESS],
        done: None,
        target: Reached::Thousandth,
    },
    Load {
        name: "compiling",
        scripts: &[
            "while :; do gcc -O1 -c /load/program.c -o /run/a.o && echo >>/run/compiled-a; done",
            "while :; do gcc -O1 -c /load/program.c -o /run/b.o && echo >>/run/compiled-b; done",
        ],
        done: Some(COMPILED),
        target: Reached::Thousandth,
    },
];

/// A script's process is one that its group ends with.
const START: &str = "echo $$ >>/run/load; ";
const STOP: &str = "for leader in $(cat /run/load); do kill -9 -- -$leader 2>/dev/null || kill -9 $leader; done; \
                    rm -f /run/load /run/wrk /run/compiled-*";

/// The guest's own clock, and what it was interrupted for.
const INTERRUPTS: &str = "cut -d' ' -f1 /proc/uptime; cat /proc/interrupts";

/// The rows of `/proc/interrupts` that processors have of each other and of themselves.
const OWN_INTERRUPTS: [(&str, &str); 5] = [
    ("LOC:", "timer"),
    ("RES:", "reschedule"),
    ("CAL:", "call a function"),
    ("TLB:", "flush a TLB"),
    ("IWI:", "work for itself"),
];

/// What one guest was seen to do, by row; all of it a second.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) exits: Vec<(String, f64)>,
    pub(crate) reasons: Vec<(String, f64)>,
    pub(crate) interrupts: Vec<(String, f64)>,
    pub(crate) done: Vec<(String, f64)>,
}

/// What the guest has counted until one moment.
struct Counted {
    seconds: f64,
    interrupts: BTreeMap<&'static str, u64>,
}

impl Counted {
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let seconds = lines.next()?.trim().parse().ok()?;
        let mut interrupts = BTreeMap::new();
        for line in lines {
            let mut words = line.split_whitespace();
            let Some(first) = words.next() else { continue };
            let Some((_, name)) = OWN_INTERRUPTS.iter().find(|(row, _)| *row == first) else {
                continue;
            };
            interrupts.insert(*name, words.map_while(|word| word.parse::<u64>().ok()).sum());
        }
        Some(Self { seconds, interrupts })
    }
}

pub(crate) struct Stage<'b> {
    node: &'b Node,
    counters: &'b Counters<'b>,
    image: String,
    /// How much a guest has, as `basalt run` takes it.
    memory: &'static str,
    /// More words of `basalt run`.
    words: Vec<String>,
}

impl<'b> Stage<'b> {
    pub(crate) fn new(node: &'b Node, counters: &'b Counters<'b>, image: String, memory: &'static str) -> Self {
        Self {
            node,
            counters,
            image,
            memory,
            words: Vec::new(),
        }
    }

    /// Guests that are made with these words, too.
    pub(crate) fn with(mut self, words: &[&str]) -> Self {
        self.words.extend(words.iter().map(|&word| word.to_owned()));
        self
    }
}

impl Stage<'_> {
    /// How much of one load a new guest does a second.
    pub(crate) fn rate(&self, class: &Class, load: &Load) -> Result<f64> {
        // What an attempt that failed has left; usually there is none.
        drop(self.node.ok(&["rm", "--force", NAME]));
        self.boot(class)?;
        let mut seen = Seen::default();
        self.load(class, load, &mut seen)?;
        self.node.ok(&["rm", "--force", NAME])?;
        let done = seen.done.first().map(|(_, rate)| *rate);
        done.with_context(|| format!("{} counts nothing", load.name))
    }

    fn boot(&self, class: &Class) -> Result<()> {
        let cpus = VCPUS.to_string();
        let sized = ["run", "--detach", "--boot", "--name", NAME, "--cpus", &cpus];
        let rest = ["--memory", self.memory, &self.image, "--", "sleep", "100000"];
        let more: Vec<&str> = self.words.iter().map(String::as_str).collect();
        self.node.ok(&[&sized[..], class.words, &more, &rest].concat())?;
        thread::sleep(SETTLED);
        Ok(())
    }

    pub(crate) fn ask(&self, script: &str) -> Result<String> {
        self.node.said(&["exec", NAME, "sh", "-c", script])
    }

    fn counted(&self) -> Result<Counted> {
        let said = self.ask(INTERRUPTS)?;
        Counted::parse(&said).with_context(|| format!("the guest says {said:?}"))
    }

    fn number(&self, script: &str) -> Result<f64> {
        let said = self.ask(script)?;
        said.trim().parse().with_context(|| format!("{script} says {said:?}"))
    }

    /// What a program says of itself as soon as it is over.
    fn late(&self, script: &str) -> Result<f64> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let found = self.number(script);
            if found.is_ok() || Instant::now() > deadline {
                return found;
            }
            thread::sleep(Duration::from_secs(1));
        }
    }

    /// Exits by reason while nobody asks it anything, and the seconds that it was.
    fn watch(&self, class: &Class) -> Result<(Exits, f64)> {
        let (before, began) = (self.counters.exits(class, NAME)?, Instant::now());
        thread::sleep(WATCHED);
        let after = self.counters.exits(class, NAME)?;
        Ok((between(&before, &after), began.elapsed().as_secs_f64()))
    }

    #[allow(clippy::cast_precision_loss, reason = "far below 2^53 of anything")]
    fn load(&self, class: &Class, load: &Load, seen: &mut Seen) -> Result<()> {
        for script in load.scripts {
            let script = format!("{START}{script}");
            self.node.ok(&["exec", "--detach", NAME, "sh", "-c", &script])?;
        }
        thread::sleep(SETTLED);
        let so_far = match load.done {
            Some(Done::Soon(script)) => Some((script, self.number(script)?)),
            _ => None,
        };
        let before = self.counted()?;
        // Nothing of that answer is under way any more.
        thread::sleep(ANSWERED);
        let (exits, seconds) = self.watch(class)?;
        let after = self.counted()?;
        let passed = after.seconds - before.seconds;
        seen.exits.push((load.name.to_owned(), sum(&exits) as f64 / seconds));
        for (reason, count) in exits {
            seen.reasons.push((cell(load.name, &reason), count as f64 / seconds));
        }
        for (name, count) in &after.interrupts {
            let new = count - before.interrupts.get(name).copied().unwrap_or_default();
            if new > 0 {
                seen.interrupts.push((cell(load.name, name), new as f64 / passed));
            }
        }
        let rate = match (load.done, so_far) {
            (Some(Done::Late(script)), _) => Some(self.late(script)?),
            (_, Some((script, so_far))) => Some((self.number(script)? - so_far) / passed),
            _ => None,
        };
        if let Some(rate) = rate {
            ensure!(rate > 0.0, "{} has done nothing", load.name);
            seen.done.push((load.name.to_owned(), rate));
        }
        if !load.scripts.is_empty() {
            self.ask(STOP)?;
        }
        Ok(())
    }

    /// What a new guest does and is seen to do, under each load in turn; before the first, what `prepare` has it do.
    pub(crate) fn guest(
        &self,
        round: usize,
        class: &Class,
        loads: &[Load],
        prepare: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<Seen> {
        // What an attempt that failed has left; usually there is none.
        drop(self.node.ok(&["rm", "--force", NAME]));
        self.boot(class)?;
        prepare(self)?;
        let mut seen = Seen::default();
        for load in loads {
            self.load(class, load, &mut seen)
                .with_context(|| format!("under the load {}", load.name))?;
            if let Some((name, rate)) = seen.exits.last() {
                tell("exits", round, class.name, *rate, &format!("exits/s, {name}"));
            }
        }
        self.node.ok(&["rm", "--force", NAME])?;
        Ok(seen)
    }
}

/// The tables.
struct Tables {
    exits: Figure,
    reasons: Figure,
    interrupts: Figure,
    done: Figure,
}

impl Tables {
    fn new() -> Self {
        let of = |name: &str| Figure::beside(name, "a second", CLASSES.iter().map(|class| class.name));
        Self {
            exits: of(&format!("Exits, {VCPUS} vCPUs")),
            reasons: of("Exits by reason"),
            interrupts: of("Interrupts that Linux has of its own, by the guest's count"),
            done: of("What was done: Redis' commands, nginx' requests, files compiled"),
        }
    }

    fn take(&mut self, class: &Class, seen: Seen) {
        for (figure, rows) in [
            (&mut self.exits, seen.exits),
            (&mut self.reasons, seen.reasons),
            (&mut self.interrupts, seen.interrupts),
            (&mut self.done, seen.done),
        ] {
            for (row, rate) in rows {
                figure.put(&row, class.name, rate);
            }
        }
    }

    /// Holds those that own their CPUs against what is to be reached.
    fn judge(&mut self) {
        for class in CLASSES.iter().filter(|class| class.owns) {
            for load in &LOADS {
                let (own, standard) = (cell(load.name, class.name), cell(load.name, STANDARD));
                match load.target {
                    Reached::None => self.exits.absolute(&own, Target::AtMost(0.0)),
                    Reached::Thousandth => self.exits.ratio(&own, &standard, Target::AtMost(0.001)),
                }
                self.done.ratio(&own, &standard, Target::AtLeast(1.0));
            }
        }
    }
}

impl Bench<'_> {
    /// Guests of each class, in turn.
    pub(crate) fn exits(&mut self) -> Result<()> {
        ensure!(
            thread::available_parallelism()?.get() > VCPUS,
            "a bare guest needs CPUs beside the first: `basalt-lab up --cpus 4`"
        );
        let _module = Module::load(&self.world.binaries.join("basalt-assets"), "basalt", "")?;
        let node = Node::with_images(self.world, &PathBuf::from("/var/lib/basalt/images"))?;
        let counters = Counters::new(&node)?;
        let stage = Stage::new(&node, &counters, node.image("load", "load-entrypoint")?, "512m");
        let mut tables = Tables::new();
        for round in 0..self.runs.min(MOST_RUNS) {
            for class in &CLASSES {
                let seen = self.again("exits", class.name, || stage.guest(round, class, &LOADS, |_| Ok(())))?;
                tables.take(class, seen);
            }
        }
        tables.judge();
        let Tables {
            exits,
            reasons,
            interrupts,
            done,
        } = tables;
        self.report.figures.extend([exits, reasons, interrupts, done]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_counts_are_read() {
        let text = "12.50\n           CPU0       CPU1\n  1:   9   9  IO-APIC\nRES:   3   4   Rescheduling interrupts\nLOC: 10 20 Local\n";
        let counted = Counted::parse(text).unwrap();
        assert!((counted.seconds - 12.5).abs() < 1e-9);
        assert_eq!(counted.interrupts, BTreeMap::from([("reschedule", 7), ("timer", 30)]));
        assert!(Counted::parse("").is_none());
    }

    #[test]
    fn loads_are_held_against_their_targets() {
        let mut tables = Tables::new();
        for (class, rate) in CLASSES.iter().zip([1000.0, 500.0, 2.0, 1.5, 0.5]) {
            let seen = Seen {
                exits: vec![("Redis".to_owned(), rate)],
                ..Seen::default()
            };
            tables.take(class, seen);
        }
        tables.judge();
        let reached: Vec<_> = tables.exits.verdicts.iter().map(|verdict| verdict.reached).collect();
        assert_eq!(reached, [false, false, true], "of those that own their CPUs");
    }
}
