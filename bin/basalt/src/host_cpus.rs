//! `basalt host`: each verb asks the daemon and shows what it says.

use anyhow::{Result, bail};
use base::CpuSet;
use node_api::message::Item;
use node_api::{HostCpu, Reply, Request};

use crate::cli::HostVerb;
use crate::daemon;
use crate::output::{Output, table};

/// `basalt host ...`.
pub(crate) fn host(verb: &HostVerb, output: &Output) -> Result<u8> {
    match verb {
        HostVerb::Cpus => list(output),
        HostVerb::Isolate(args) => {
            let cpus = args.cpus.clone();
            change(Request::IsolateCpus { cpus }, "isolated", output)
        }
        HostVerb::Release(args) => {
            let cpus = args.cpus.clone();
            change(Request::ReleaseCpus { cpus }, "released", output)
        }
    }
}

fn change(request: Request, done: &str, output: &Output) -> Result<u8> {
    let cpus: CpuSet = match daemon::connect()?.ask(request)? {
        (Reply::Cpus(cpus), _) => cpus,
        (other, _) => bail!("the daemon answered {other:?}: use basalt and basaltd of one build"),
    };
    output.result(&cpus, || match cpus.is_empty() {
        true => "no CPU is isolated\n".to_owned(),
        false => format!("{done} {cpus}\n"),
    })?;
    Ok(0)
}

fn list(output: &Output) -> Result<u8> {
    let mut cpus: Vec<HostCpu> = Vec::new();
    daemon::connect()?.ask_each(Request::ListCpus, &mut |item| {
        if let Item::Cpu(cpu) = item {
            cpus.push(cpu);
        }
    })?;
    output.result(&cpus, || {
        let mut rows = vec![["CPU", "NODE", "USED", "SANDBOX", "TICK"].map(str::to_owned).to_vec()];
        rows.extend(cpus.iter().map(|cpu| {
            let sandbox = cpu.name.as_ref().or(cpu.sandbox.as_ref());
            vec![
                cpu.number.to_string(),
                cpu.node.map(|node| node.to_string()).unwrap_or_default(),
                cpu.used.to_string(),
                sandbox.cloned().unwrap_or_default(),
                if cpu.tickless { "no" } else { "yes" }.to_owned(),
            ]
        }));
        table(&rows)
    })?;
    Ok(0)
}
