//! What a VM tells of itself when it is asked. Changes nothing.

use machine::{GrowthInfo, Machine};
use observe::marks;
use vmm_api::{Info, MetricSample, VERSION};

use super::{VMM_VERSION, Vm};
use crate::counted;

impl Vm {
    fn growth(&self) -> Option<GrowthInfo> {
        self.machine.as_ref().and_then(Machine::growth)
    }

    pub(super) fn info(&self) -> Info {
        Info {
            api_version: VERSION,
            vmm_version: VMM_VERSION.to_owned(),
            pid: std::process::id(),
            engine: self.engine_name.to_owned(),
            state: self.state,
            stopped: self.stopped.clone(),
            cpus: self.cpus,
            memory: self.machine.as_ref().map_or(0, |machine| machine.memory().bytes()),
            hotplug_memory: self.growth().map(|growth| counted::hotplug_memory(&growth)),
            balloon: self.balloon.info(self.machine.as_ref()),
            links: self.machine.as_ref().map(Machine::links).unwrap_or_default(),
            marks: marks::all().into_iter().map(counted::mark).collect(),
        }
    }

    pub(super) fn metrics(&self) -> Vec<MetricSample> {
        let counts = self.machine.as_ref().map(Machine::counts).unwrap_or_default();
        counted::all(
            &self.registry,
            counts,
            self.growth().as_ref(),
            self.balloon.info(self.machine.as_ref()),
        )
    }
}
