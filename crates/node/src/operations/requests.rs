//! What can be asked of a sandbox that runs: a connection to its agent, a pause, what it uses.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use agent_api::ExecRequest;
use base::{CpuSet, points};
use node_api::{BriefUsage, Device, EventKind, MemoryState, Sample, Sandbox, State, Traffic, Usage, Used};
use vmm_api::{MetricSample, VmmClient};

use crate::Error;
use crate::node::Node;
use crate::resources::{cpus, limits, memory_state};
use crate::sandbox::entry::Entry;
use crate::sandbox::lifecycle::Verb;
use crate::saved::memory_files;
use crate::store::operation::Operation;
use crate::vmm::accelerator_stats::PATIENCE;

/// What a VMM counts of attempts.
const REFUSED: &str = "engine_refused_total";

impl Node {
    /// A connection to the agent with its version, and what is common to all commands of the sandbox.
    pub(crate) fn exec(&self, entry: &Entry) -> Result<(OwnedFd, u16, ExecRequest), Error> {
        // While it is held for a snapshot its agent starts nothing; what a longer hold means is told by the agent.
        entry.wait(Some(self.config.limits.answer), |inner| !inner.stored.is_held());
        let agent = entry.vm_for(Verb::Exec)?.agent()?;
        self.points.at(points::EXEC_CONNECTED);
        let command = ExecRequest {
            argv: Vec::new(),
            main: false,
            ..entry.stored().command
        };
        let version = agent.version();
        let stream = agent.into_stream().into_stream();
        let stream = stream.map_err(Error::host("handing the agent's connection over"))?;
        Ok((stream.into(), version, command))
    }

    /// Stops the vCPUs and devices.
    pub(crate) fn pause(&self, entry: &Entry) -> Result<(), Error> {
        let _operation = self.turn(entry)?;
        let vm = entry.vm_for(Verb::Pause)?;
        let sandbox = entry.stored().sandbox;
        // One that its VMM has stopped goes on by itself.
        if sandbox.state == State::Paused && sandbox.pause_reason.is_none() {
            return Ok(());
        }
        vm.ask("it was paused", VmmClient::pause)?;
        self.points.at(points::PAUSE_PAUSED);
        self.note_change(entry, |stored| {
            // It does not go on by itself any more.
            (stored.sandbox.state, stored.sandbox.pause_reason) = (State::Paused, None);
        })?;
        self.events.tell(EventKind::Pause, &entry.stored().sandbox);
        Ok(())
    }

    /// Lets them go on, or one that is suspended.
    pub(crate) fn resume(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        if entry.state() == State::Suspended {
            return self.resume_suspended(entry);
        }
        let _operation = entry.operate();
        let stored = entry.stored();
        let vm = entry.vm_for(Verb::Unpause)?;
        if stored.sandbox.state == State::Running && !stored.is_held() {
            return Ok(());
        }
        match stored.is_held() {
            // A snapshot has left it so.
            true => self.let_go_on(&stored, &vm)?,
            false => vm.ask("it was resumed", VmmClient::resume)?,
        }
        self.points.at(points::PAUSE_RESUMED);
        self.note_change(entry, |stored| {
            stored.rests_as(State::Running);
        })?;
        if matches!(stored.operation, Some(Operation::Resume { .. })) {
            self.forget_suspended(entry)?;
        }
        self.events.tell(EventKind::Resume, &entry.stored().sandbox);
        if !stored.is_held() {
            self.tell_time_in_thread(entry);
        }
        Ok(())
    }

    /// A sandbox, with what is to be found out of it now.
    pub(crate) fn inspect(&self, entry: &Entry) -> Sandbox {
        let sandbox = entry.stored().sandbox;
        let class = sandbox.config.resources.class;
        // One that is busy, or about to end, tells it the next time.
        let metrics = entry
            .vm()
            .filter(|_| class.is_bare())
            .and_then(|vm| vm.metrics_now()?.ok());
        let refused = metrics.and_then(|all| all.into_iter().find(|sample| sample.name == REFUSED));
        Sandbox {
            refused: refused.map(|sample| sample.value),
            memory_state: self.memory_state(entry),
            owned_cpus: match class.is_standard() {
                true => CpuSet::default(),
                false => cpus::owned_by(&sandbox.id),
            },
            ..sandbox
        }
    }

    /// How much of its memory, and which of its devices, a sandbox has, where that can change.
    pub(crate) fn memory_state(&self, entry: &Entry) -> Option<MemoryState> {
        memory_state::of(entry, !self.devices.of(&entry.id).is_empty(), self.dma_faults.is_on())
    }

    /// Tells that its memory or its devices are there, and how that went.
    pub(crate) fn tell_memory(&self, kind: EventKind, entry: &Entry) {
        let memory = self.memory_state(entry);
        self.events.tell_memory(kind, &entry.stored().sandbox, memory);
    }

    /// The host's devices, with what is to be known of those that come to a sandbox behind its start, or did not.
    pub(crate) fn list_devices(&self) -> Result<Vec<Device>, Error> {
        let mut devices = self.devices.list(&self.sandboxes)?;
        let entries: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        for entry in entries {
            let inner = entry.lock();
            let sandbox = &inner.stored.sandbox;
            for device in devices.iter_mut().filter(|device| device.why.is_none()) {
                let was_to_come = sandbox.config.devices.contains(&device.address);
                device.why = match &inner.not_come {
                    _ if inner.coming.contains(&device.address) => Some(format!(
                        "it comes to sandbox {} when memory is mapped for it",
                        sandbox.name
                    )),
                    Some(why) if was_to_come => Some(format!("sandbox {} was to have it: {why}", sandbox.name)),
                    _ => None,
                };
            }
        }
        Ok(devices)
    }

    /// What a sandbox uses now.
    pub(crate) fn sample(&self, entry: &Entry) -> Result<Sample, Error> {
        let stored = entry.stored();
        let (sandbox, zeroed) = (stored.sandbox, stored.came_zeroed.bytes);
        let mut usage = Usage {
            disk: memory_files::own_bytes(&self.sandbox_paths(entry).directory),
            ..Usage::default()
        };
        if let Some(cgroup) = self.cgroup(entry)? {
            let used = cgroup.usage()?;
            usage.cpu_usec = used.cpu_usec;
            usage.cpu_throttled_usec = used.cpu_throttled_usec.unwrap_or(0);
            usage.memory = used
                .memory
                .map_or(0, |memory| memory_state::with_zeroed(memory, zeroed).current);
            usage.memory_limit = used.memory.map(|_| limits::memory_max(&sandbox.config));
            usage.pids = used.pids.unwrap_or(0);
        }
        usage.memory_state = self.memory_state(entry).map(Box::new);
        usage.accelerator = self.accelerator_stats(entry, PATIENCE).and_then(|told| {
            // `basalt accel ls` tells why; the rest is known nevertheless.
            told.inspect_err(|why| log::info!("sandbox {}: {why}", entry.id))
                .ok()
                .map(Box::new)
        });
        if let Some(vm) = entry.vm() {
            // One that writes a snapshot, or does not answer, tells nothing now; what its cgroup says is known nevertheless.
            let Some(metrics) = vm.metrics_in_time("its metrics were read")? else {
                usage.vmm_busy = true;
                return Ok(Sample {
                    id: sandbox.id,
                    name: sandbox.name,
                    usage,
                });
            };
            usage.block = traffic(
                &metrics,
                ["block_bytes_total", "block_requests_total"],
                ["read", "write"],
            );
            usage.network = traffic(
                &metrics,
                ["net_bytes_total", "net_packets_total"],
                ["receive", "transmit"],
            );
            let named = |sample: vmm_api::MetricSample| {
                let labels: BTreeMap<String, String> = sample.labels.into_iter().collect();
                let labels: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
                (format!("{}{{{}}}", sample.name, labels.join(",")), sample.value)
            };
            usage.vmm = metrics.into_iter().map(named).collect();
        }
        Ok(Sample {
            id: sandbox.id,
            name: sandbox.name,
            usage,
        })
    }

    /// What a sandbox uses now, as its cgroup and its directory tell it. Somebody asks this of all sandboxes every few seconds.
    pub(crate) fn brief_usage(&self, entry: &Entry) -> BriefUsage {
        BriefUsage {
            id: entry.id.clone(),
            used: self.used(entry),
        }
    }

    fn used(&self, entry: &Entry) -> Option<Used> {
        let (started_ns, zeroed) = {
            let inner = entry.lock();
            let sandbox = &inner.stored.sandbox;
            if !sandbox.state.has_vm() {
                return None;
            }
            let started_ns = sandbox.started_ns.unwrap_or(sandbox.created_ns);
            (started_ns, inner.stored.came_zeroed.bytes)
        };
        // One that ends just now has no cgroup any more, and where there are none, or no controller for memory, nothing is counted.
        let told = self
            .cgroup(entry)
            .and_then(|cgroup| Ok(cgroup.map(|cgroup| cgroup.usage()).transpose()?));
        let told = told.inspect_err(|error| log::debug!("what sandbox {} uses is not known: {error}", entry.id));
        let told = told.ok()??;
        Some(Used {
            started_ns,
            cpu_usec: told.cpu_usec,
            memory: memory_state::with_zeroed(told.memory?, zeroed).current,
            disk: memory_files::own_bytes(&self.sandbox_paths(entry).directory),
        })
    }

    /// Removes all that have exited; which.
    pub(crate) fn prune(&self) -> Result<Vec<String>, Error> {
        let all: Vec<Arc<Entry>> = self.entries().values().cloned().collect();
        let mut removed = Vec::new();
        for entry in all.into_iter().filter(|entry| entry.state() == State::Exited) {
            match self.remove(&entry, false) {
                Ok(()) => removed.push(entry.id.clone()),
                // Somebody has started it meanwhile.
                Err(Error::WrongState { .. }) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(removed)
    }
}

/// The sums over all devices of a VMM's counters for bytes and operations, whose labels say in (first) or out.
fn traffic(metrics: &[MetricSample], [bytes, operations]: [&str; 2], [inwards, outwards]: [&str; 2]) -> Traffic {
    let sum = |name: &str, direction: &str| {
        let counts =
            |sample: &&MetricSample| sample.name == name && sample.labels.iter().any(|(_, value)| value == direction);
        metrics.iter().filter(counts).map(|sample| sample.value).sum()
    };
    Traffic {
        bytes_in: sum(bytes, inwards),
        bytes_out: sum(bytes, outwards),
        operations_in: sum(operations, inwards),
        operations_out: sum(operations, outwards),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_all_devices_are_added_up() {
        let sample = |name: &str, label: (&str, &str), device: &str, value| MetricSample {
            name: name.into(),
            labels: vec![
                ("device".to_owned(), device.to_owned()),
                (label.0.to_owned(), label.1.to_owned()),
            ],
            value,
        };
        let metrics = [
            sample("block_bytes_total", ("direction", "read"), "root", 100),
            sample("block_bytes_total", ("direction", "read"), "writable", 10),
            sample("block_bytes_total", ("direction", "write"), "writable", 7),
            sample("block_requests_total", ("kind", "read"), "root", 3),
            sample("block_requests_total", ("kind", "write"), "writable", 2),
            sample("block_requests_total", ("kind", "flush"), "writable", 50),
            sample("net_bytes_total", ("direction", "read"), "net", 1000),
        ];
        let found = traffic(
            &metrics,
            ["block_bytes_total", "block_requests_total"],
            ["read", "write"],
        );
        let wanted = Traffic {
            bytes_in: 110,
            bytes_out: 7,
            operations_in: 3,
            operations_out: 2,
        };
        assert_eq!(found, wanted);
    }
}
