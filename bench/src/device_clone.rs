//! Clones of templates that get a PCI function of the host's: how long until their agent and command run, and until the function is there,
//! beside clones without. All by requests to the daemon of a node of the run's own, as a command line makes them.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use base::{ByteSize, PciAddress};
use node_api::{Client, DeviceStart, Reply, Request, Resources, Sandbox, SandboxConfig};

use crate::class::run;
use crate::clone::{asked, remove};
use crate::device_io::{PATIENCE, Turn};
use crate::figures::{Bench, tell};
use crate::function;
use crate::report::Figure;
use crate::run::Node;
use crate::stats::Target;
use crate::trace::milliseconds;
use crate::waterfall;

/// More than a guest boots with to which memory is plugged (`DeviceStart::Async`).
const MEMORY: ByteSize = ByteSize::mib(1024);

/// Between two questions for the function, which cost the daemon and the VMM a part of a millisecond each.
const PERIOD: Duration = Duration::from_millis(2);

const CLONE: &str = Node::CLONE;

/// What a clone is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Plain,
    /// Its guest reports free pages, which are the host's then.
    Reporting,
    With(DeviceStart),
}

impl Way {
    const ALL: [Self; 5] = [
        Self::Plain,
        Self::With(DeviceStart::Late),
        Self::With(DeviceStart::Async),
        Self::With(DeviceStart::Lazy),
        Self::Reporting,
    ];

    fn name(self) -> String {
        match self {
            Self::Plain => "no device".to_owned(),
            Self::Reporting => "no device, free pages reported".to_owned(),
            Self::With(start) => start.name().to_owned(),
        }
    }

    fn config(self, plain: SandboxConfig, function: PciAddress) -> SandboxConfig {
        let resources = Resources {
            memory: MEMORY,
            free_page_reporting: self == Self::Reporting,
            ..plain.resources
        };
        let (devices, device_start) = match self {
            Self::With(start) => (vec![function], Some(start)),
            _ => (Vec::new(), None),
        };
        SandboxConfig {
            resources,
            devices,
            device_start,
            ..plain
        }
    }
}

/// Milliseconds from the request.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// To the answer: the agent has answered, and the command is started. With `async` and `lazy` the function is there before it.
    command: f64,
    /// To a function that the guest's agent has seen.
    device: f64,
}

/// Starts one; it was a clone.
fn start(client: &mut Client, config: SandboxConfig) -> Result<Times> {
    let begun = Instant::now();
    let (command, reply) = asked(client, Request::Run(Box::new(config)))?;
    ensure!(is_clone(&reply), "it was no clone: {reply:?}");
    wait_for_all(client)?;
    let device = milliseconds(u64::try_from(begun.elapsed().as_nanos())?);
    Ok(Times { command, device })
}

fn wait_for_all(client: &mut Client) -> Result<()> {
    let begun = Instant::now();
    while !has_all(client)? {
        ensure!(
            begun.elapsed() < PATIENCE,
            "its function has not come after {PATIENCE:?}"
        );
        thread::sleep(PERIOD);
    }
    Ok(())
}

fn is_clone(reply: &Reply) -> bool {
    matches!(reply, Reply::Started { sandbox, .. } if sandbox.template.is_some())
}

/// Whether it has all of its functions.
fn has_all(client: &mut Client) -> Result<bool> {
    let inspect = Request::Inspect { sandbox: CLONE.into() };
    let (Reply::Sandbox(sandbox), _) = client.ask(inspect)? else {
        bail!("a question for a sandbox is answered with something else")
    };
    let Sandbox {
        memory_state, config, ..
    } = *sandbox;
    if config.devices.is_empty() {
        return Ok(true);
    }
    // Its VMM had no time to say.
    let Some(state) = memory_state else { return Ok(false) };
    if let Some(why) = state.failed {
        bail!("its function does not come: {why}");
    }
    Ok(state.coming.is_empty())
}

/// Boots what a template is made of, and again until one is cloned.
fn has_template(client: &mut Client, config: &SandboxConfig) -> Result<()> {
    let begun = Instant::now();
    loop {
        let (reply, _) = client.ask(Request::Run(Box::new(config.clone())))?;
        let is_one = is_clone(&reply);
        remove(client, CLONE)?;
        if is_one {
            return Ok(());
        }
        ensure!(begun.elapsed() < 6 * PATIENCE, "there is no template of it: {config:?}");
        thread::sleep(Duration::from_secs(1));
    }
}

impl Bench<'_> {
    /// Clones of a template with a function and without.
    pub(crate) fn device_clone(&mut self) -> Result<()> {
        run("modprobe", &["vfio-pci"])?;
        let node = Node::new(self.world)?;
        node.originate()?;
        let address = function::find(self.device.device)?;
        self.fact("device-clone: function", &address.to_string());
        self.fact("device-clone: memory of each", &MEMORY.to_string());
        let turn = Turn::begin(&node, address)?;
        turn.guests(|| self.clones_of(&node, address))
    }

    fn clones_of(&mut self, node: &Node, function: PciAddress) -> Result<()> {
        let mut client = Client::connect(&node.socket())?;
        let plain = node.config(CLONE, false)?;
        let ways = Way::ALL.map(|way| (way, way.config(plain.clone(), function)));
        for (_, config) in &ways {
            has_template(&mut client, config)?;
        }
        let mut command = Figure::new("A clone of a template, from the request to its command", "ms");
        let mut device = Figure::new("The same to a function of the host's in its guest", "ms");
        let mut samples = ways.each_ref().map(|_| Vec::new());
        for round in 0..self.runs {
            for ((way, config), samples) in ways.iter().zip(&mut samples) {
                let times = self.again("device-clone", &way.name(), || {
                    // What an attempt that failed has left; usually there is none.
                    drop(remove(&mut client, CLONE));
                    let times = start(&mut client, config.clone())?;
                    remove(&mut client, CLONE)?;
                    Ok(times)
                })?;
                tell("device-clone", round, &way.name(), times.command, "ms to the command");
                tell("device-clone", round, &way.name(), times.device, "ms to the device");
                samples.push(times);
            }
        }
        for ((way, _), samples) in ways.iter().zip(samples) {
            command.add(&way.name(), samples.iter().map(|times| times.command).collect());
            if matches!(way, Way::With(_)) {
                device.add(&way.name(), samples.iter().map(|times| times.device).collect());
            }
        }
        for way in [Way::With(DeviceStart::Late), Way::Reporting] {
            command.ratio(&way.name(), &Way::Plain.name(), Target::AtMost(1.05));
        }
        self.report.figures.extend([command, device]);
        self.steps_of_clones(&mut client, &ways[..2])
    }

    /// What stands between the request and the command, step by step: recording that costs some time of its own.
    fn steps_of_clones(&mut self, client: &mut Client, ways: &[(Way, SandboxConfig)]) -> Result<()> {
        for (way, config) in ways {
            let what = format!("a clone of a template, {}", way.name());
            let mut figure = waterfall::figure_of(&what);
            for _ in 0..self.runs {
                let spans = self.again("device-clone", &what, || {
                    drop(remove(client, CLONE));
                    let run = Request::Run(Box::new(config.clone()));
                    let spans = waterfall::recorded(client, "a clone of a template", run)?;
                    wait_for_all(client)?;
                    remove(client, CLONE)?;
                    Ok(spans)
                })?;
                waterfall::put(&mut figure, &spans);
            }
            self.report.figures.push(figure);
        }
        Ok(())
    }
}
