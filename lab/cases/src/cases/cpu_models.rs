//! A guest of a CPU model sees that and no more, and goes on where another kernel runs on another processor, as far as that has
//! what the guest was shown: the other host is this one with another fingerprint.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::time::Duration;

use agent_api::{Collected, Connection, ExecRequest, VSOCK_PORT};
use anyhow::{Context, Result, ensure};
use engine::VcpuState;
use state::Container;
use vmm_api::CpuModel;

use super::snapshot_files::Files;
use super::vsock::connect;
use crate::vm::{Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "cpu-models",
    limit: Duration::from_secs(240),
    host,
    guest: None,
};

/// How long a guest may take to answer, in an emulated host.
const PATIENCE: Duration = Duration::from_secs(60);

/// CPUID.7:EBX, AVX512F, which the emulated host has not.
const AVX512F: u32 = 1 << 16;

fn host(host: &Host) -> Result<()> {
    let refused = Builder::new(host)?.cpu(CpuModel::V4).start().err();
    let refused = format!("{:#}", refused.context("a model that the host cannot show")?);
    ensure!(
        refused.contains("this host's CPU lacks avx512f, ") && refused.contains("choose x86-64-v3, x86-64-v2 or host"),
        "{refused}"
    );
    for (model, has, has_not) in [
        (CpuModel::V2, "sse4_2", &["avx", "avx2", "aes", "xsave", "svm"][..]),
        (CpuModel::V3, "avx2", &["avx512f", "xsavec", "svm", "npt", "rdseed"]),
    ] {
        of_model(host, model, has, has_not).with_context(|| format!("the model {model}"))?;
    }
    Ok(())
}

fn of_model(host: &Host, model: CpuModel, has: &str, has_not: &[&str]) -> Result<()> {
    let address = SocketAddr::from_abstract_name(format!("basalt-case-cpu-{model}-{}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&address)?;
    let builder = || anyhow::Ok(Builder::new(host)?.cpus(2).cpu(model));
    let mut machine = builder()?.start_listening(Some(listener.try_clone()?.into()))?;
    // Prepares the root; the others come by the listener.
    drop(machine.agent()?);
    let before = cpuinfo(&address)?;
    let flags = field(&before, "flags")?;
    ensure!(flags.contains(&has), "it has not {has}: {flags:?}");
    let more = has_not.iter().find(|flag| flags.contains(flag));
    ensure!(more.is_none(), "it has {more:?}: {flags:?}");
    let name = field(&before, "model name")?.join(" ");
    ensure!(name == format!("Basalt {model}"), "it is called {name}");

    let mut files = Files::new(host, model.name());
    machine.vmm.client.pause()?;
    files.take(&mut machine)?;
    drop(machine);
    let state = Container::parse(&fs::read(&files.state)?)?;
    let restore = |state: &Container| -> Result<Vm> {
        fs::write(&files.state, state.to_bytes()?)?;
        let (state, memory) = files.open()?;
        builder()?.restore(listener.try_clone()?.into(), state, memory)
    };

    let mut elsewhere = state.clone();
    elsewhere.fingerprint.cpuid ^= 1;
    elsewhere.fingerprint.kernel = "2.6.20".into();
    let mut machine = restore(&elsewhere).context("another host that has all of it")?;
    machine.vmm.client.resume()?;
    let after = cpuinfo(&address)?;
    ensure!(field(&after, "flags")? == flags, "the flags have changed: {after}");
    machine.vmm.client.stop()?;

    let mut more = state;
    let mut vcpu: VcpuState = more.take("vcpu1")?;
    caches_are_its_own(&vcpu)?;
    let features = vcpu.cpuid.iter_mut().find(|leaf| (leaf.function, leaf.index) == (7, 0));
    features.context("a guest without leaf 7")?.registers[1] |= AVX512F;
    more.put("vcpu1", &vcpu)?;
    let refused = format!("{:#}", restore(&more).err().context("it goes on without a feature")?);
    ensure!(
        refused.contains("this host's CPU lacks avx512f, which the snapshot's VM was shown"),
        "{refused}"
    );
    Ok(())
}

/// Of AMD's caches a guest with two vCPUs is told that two processors share those of the third level and none the others, however many
/// the host has.
fn caches_are_its_own(vcpu: &VcpuState) -> Result<()> {
    for leaf in vcpu.cpuid.iter().filter(|leaf| leaf.function == 0x8000_001d) {
        let [eax, ..] = leaf.registers;
        let (kind, level, sharing) = (eax & 0x1f, eax >> 5 & 0x7, 1 + (eax >> 14 & 0xfff));
        let expected = if level == 3 { 2 } else { 1 };
        ensure!(
            kind == 0 || sharing == expected,
            "{sharing} processors share a cache of level {level}: {leaf:x?}"
        );
    }
    Ok(())
}

fn cpuinfo(address: &SocketAddr) -> Result<String> {
    let stream = connect(address, VSOCK_PORT)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut agent = Connection::new(stream, None)?;
    let argv = ["cat", "/proc/cpuinfo"].map(Into::into).to_vec();
    let request = ExecRequest {
        argv,
        ..ExecRequest::default()
    };
    let Collected { stdout, .. } = agent.exec(&request)?.collect()?;
    Ok(String::from_utf8(stdout)?)
}

/// The words of a line of the first processor.
fn field<'a>(cpuinfo: &'a str, name: &str) -> Result<Vec<&'a str>> {
    let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(key, _)| key.trim() == name);
    let (_, value) = found.with_context(|| format!("no `{name}` in {cpuinfo}"))?;
    Ok(value.split_ascii_whitespace().collect())
}
