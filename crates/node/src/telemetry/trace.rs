//! What a node's operations are called in a trace, and the parts of a start that others know: the jail's steps, what the
//! VMM and the guest's agent say of themselves. Does not know who looks at it.

use std::time::Duration;

use agent_api::Connection;
use host::jail::Timing;
use node_api::tenant_volume::TenantVolumeRequest;
use node_api::{DeviceRequest, Request};
use observe::Span;
use observe::span::{self, now_ns};
use otlp::Exporter;
use vmm_api::VmmClient;

use crate::deadline_stream::Timed;
use crate::telemetry::metrics::Metrics;
use crate::vmm::vm::Vm;

/// This program in a trace.
pub(crate) const SERVICE: &str = "basaltd";
const VMM: &str = "basalt-vmm";
const GUEST: &str = "guest";
const AGENT: &str = "basalt-agent";

/// The operations that end with a sandbox that runs.
pub(crate) const STARTS: [&str; 2] = ["create and start", "start"];

/// The parts of a start that this program does or waits for.
pub(crate) const PHASES: [&str; 21] = [
    "image",
    "network set-up",
    "record",
    "directory and record",
    "template",
    "disk",
    "volumes and control socket",
    "network",
    "sockets and files",
    "CPUs",
    "cgroup",
    "VMM process",
    "record and connect",
    "VM made",
    "VM restored",
    "VM started",
    "guest boots",
    "agent greeted",
    "guest prepared",
    "guest re-identified",
    "command and record",
];

/// What is taken of what others say of themselves.
const MAX_MARKS: usize = 32;
const MAX_NAME: usize = 64;

/// What an agent reaches first when its guest is made one of its own; as one in an older snapshot calls it, too.
const REIDENTIFICATION: [&str; 2] = ["re-identify asked", "renew asked"];

/// What an operation is called; those that only look at things are none.
pub(crate) fn name(request: &Request) -> Option<&'static str> {
    Some(match request {
        Request::Run(_) => "create and start",
        Request::Start { .. } => "start",
        Request::Exec { .. } => "connect to the agent",
        Request::Stop { .. } => "stop",
        Request::Kill { .. } => "kill",
        Request::Restart { .. } => "restart",
        Request::Remove { .. } => "remove",
        Request::Pause { .. } => "pause",
        Request::Resume { .. } => "resume",
        Request::Suspend { .. } => "suspend",
        Request::Prune => "prune",
        Request::MakeVolume { .. } => "make a volume",
        Request::RemoveVolume { .. } => "remove a volume",
        Request::Quarantine { delete: true } => "delete the quarantine",
        Request::PruneVolumes => "prune volumes",
        Request::TenantVolume(TenantVolumeRequest::Make { .. }) => "make a tenant's volume",
        Request::TenantVolume(TenantVolumeRequest::Remove { .. }) => "remove a tenant's volume",
        Request::MakeSnapshot(_) => "take a snapshot",
        Request::RemoveSnapshot { .. } => "remove a snapshot",
        Request::BuildTemplate(_) => "begin a template",
        Request::KeepTemplate => "save a template",
        Request::RemoveTemplate { .. } => "remove a template",
        Request::PruneTemplates { .. } => "prune templates",
        Request::Clone(_) => "clone",
        Request::Rollback(_) => "roll back",
        Request::Move(_) => "move",
        Request::UpdateMemory { .. } => "update memory",
        Request::SetTimeLimit { .. } => "set time limit",
        Request::UpdateNetwork { .. } => "update network",
        Request::IsolateCpus { .. } => "isolate CPUs",
        Request::ReleaseCpus { .. } => "release CPUs",
        Request::Devices(DeviceRequest::Bind { .. }) => "bind a device",
        Request::Devices(DeviceRequest::Unbind { .. }) => "unbind a device",
        Request::Devices(DeviceRequest::Attach { .. }) => "attach devices",
        Request::Devices(DeviceRequest::Detach { .. }) => "detach devices",
        Request::Devices(DeviceRequest::MakeVfs { .. }) => "make virtual functions",
        Request::Finish => "finish",
        Request::Info
        | Request::List(_)
        | Request::Inspect { .. }
        | Request::ListAccelerators
        | Request::ListCpus
        | Request::Devices(DeviceRequest::List)
        | Request::ListVolumes
        | Request::TenantVolume(_)
        | Request::InspectVolume { .. }
        | Request::ListSnapshots
        | Request::InspectSnapshot { .. }
        | Request::Verify { .. }
        | Request::OpenFiles { .. }
        | Request::Load(_)
        | Request::ListTemplates
        | Request::InspectTemplate { .. }
        | Request::Logs { .. }
        | Request::Wait { .. }
        | Request::Stats { .. }
        | Request::ListUsage
        | Request::ListPools
        | Request::Trace { .. }
        | Request::Events
        | Request::Quarantine { delete: false }
        | Request::Quit { .. } => return None,
    })
}

/// An operation is over: its times are counted, and told to who collects them.
pub(crate) fn operation_ended(name: &'static str, spans: &[Span], metrics: &Metrics, exporter: Option<&Exporter>) {
    metrics.operation(name, spans);
    if let Some(exporter) = exporter {
        exporter.export(spans.to_vec());
    }
}

/// The steps of the jail, which have just been done.
pub(crate) fn jail(timing: Timing) {
    let nanoseconds = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let steps = [
        ("clone into namespaces", timing.clone),
        ("identity", timing.identity),
        ("exec", timing.exec),
    ];
    let whole: u64 = steps.iter().map(|(_, duration)| nanoseconds(*duration)).sum();
    let mut at = now_ns().saturating_sub(whole);
    for (name, duration) in steps {
        let end = at + nanoseconds(duration);
        span::past(SERVICE, name, at, end);
        at = end;
    }
}

/// What the VMM has reached, one part from each mark to the next; asked only where somebody looks at it.
pub(crate) fn vmm(vm: &Vm) {
    if !span::is_detailed() {
        return;
    }
    let info = {
        let _span = span::span("VMM asked about its start");
        vm.ask("it was asked about its start", VmmClient::info)
    };
    match info {
        Ok(info) => {
            let marks: Vec<(&str, u64)> = info.marks.iter().map(|mark| (mark.name.as_str(), mark.at_ns)).collect();
            between(VMM, &marks);
        }
        Err(error) => log::info!("a start's trace lacks the VMM's part: {error}"),
    }
}

/// The same of the agent, of a clone's from its re-identification on: what it has reached before was another's. Its clock is another
/// one: the two are compared by one question and its answer.
///
/// # Errors
/// The connection is of no use any more: an answer that came late would be taken for that to the next question.
pub(crate) fn agent(agent: &mut Connection<Timed>, limit: Duration, cloned: bool) -> Result<(), agent_api::Error> {
    if !span::is_detailed() {
        return Ok(());
    }
    let asked = now_ns();
    let hello = {
        let _span = span::span("agent asked about its start");
        let limited = agent.set_read_timeout(Some(limit));
        let hello = limited.and_then(|()| agent.hello());
        agent.set_read_timeout(None)?;
        hello
    };
    match hello {
        Ok(info) => {
            let here = asked / 2 + now_ns() / 2;
            let zero = here.saturating_sub(info.now_ns);
            let marks = info
                .marks
                .iter()
                .skip_while(|(name, _)| cloned && !REIDENTIFICATION.contains(&name.as_str()));
            let marks: Vec<(&str, u64)> = marks
                .map(|(name, at)| (name.as_str(), zero.saturating_add(*at)))
                .collect();
            if let Some((_, first)) = marks.first().filter(|_| !cloned) {
                let first = (*first).min(now_ns());
                span::past(GUEST, "guest's kernel, from its clock's zero to its init", zero, first);
            }
            between(AGENT, &marks);
        }
        // It has answered.
        Err(error @ agent_api::Error::Refused(_)) => log::info!("a start's trace lacks the agent's part: {error}"),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// A part ends with the mark that it is called after. VMM and guest are not to be trusted: few marks, short names, and no
/// time that is yet to come.
fn between(service: &str, marks: &[(&str, u64)]) {
    let now = now_ns();
    for (before, after) in marks.iter().zip(marks.iter().skip(1)).take(MAX_MARKS) {
        let name: String = after.0.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
        span::past(service, &name, before.1.min(now), after.1.min(now));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use observe::span::{Operation, record};

    use super::*;

    #[test]
    fn an_agent_that_is_late_is_asked_nothing_more() {
        let (near, mut far) = UnixStream::pair().unwrap();
        // Holds the connection, and says nothing after the greeting.
        let silent = std::thread::spawn(move || wire::accept(&mut far, agent_api::PROTOCOL, None).map(|_| far));
        let mut connection = Connection::new(Timed::new(near), None).unwrap();
        let _far = silent.join().unwrap().unwrap();
        let operation = Operation {
            service: SERVICE,
            name: "start",
            parent: None,
            detailed: true,
            began_ns: None,
        };
        let (asked, _) = record(operation, || agent(&mut connection, Duration::from_millis(100), false));
        assert!(matches!(asked, Err(agent_api::Error::TimedOut)), "{asked:?}");
        // Without anybody who looks it is asked nothing.
        agent(&mut connection, Duration::from_millis(100), false).unwrap();
    }
}
