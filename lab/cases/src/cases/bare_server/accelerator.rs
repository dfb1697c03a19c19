//! The accelerator's server in a frozen guest, and an OpenCL program of another guest that runs it: the unmodified client library, which is
//! told of a window and a link by its environment, and the null back end. The programs are those of the case `accelerator`.

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use agent_api::{Collected, ExecRequest, OsText, Upload};
use anyhow::{Context, Result, bail, ensure};
use reservation::Device;

use super::super::bare::{Module, in_lab, online, wait_online};
use super::super::nvme_disk::tell;
use super::{Agent, Windows, apart, exits, freeze, start};
use crate::vm::{self, BOOT};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-accelerator",
    limit: Duration::from_secs(300),
    host,
    guest: Some(super::guest),
};

/// The window: rings, and an arena.
const WINDOW: u64 = 16 << 20;

/// Calls that are waited for, and the most entries for each, as what is for the client's machine ends one.
const CALLS: u64 = 300;
const MOST: u64 = 2;

/// What programs with OpenCL are loaded with, on the lab's host.
const LOADER: &str = "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1";

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let all = online()?;
    let windows = Windows::new(host, WINDOW)?;
    let (mut server, mut agent) = start(&apart(host)?, &device, windows.servers)?;
    upload(&mut agent, &host.asset("basalt-accel-server"), "/accel-server")?;
    vm::guest_half(&mut agent, CASE.name, &["mount"])?;
    let words = [
        "/accel-server",
        "--backend",
        "null",
        "--threads",
        "4",
        "--arena",
        "8m",
        "--passive",
        "/tmp/window/words",
    ];
    agent.exec_detached(&ExecRequest {
        argv: words.map(OsText::from).to_vec(),
        ..ExecRequest::default()
    })?;
    let link = freeze(&mut server)?;
    wait_online(&all).context("the CPU of a frozen server")?;
    let (mut client, mut agent) = start(host, &device, windows.clients)?;
    client.vmm.client.link(0, Some(std::os::fd::AsFd::as_fd(&link)))?;
    prepare(host, &mut agent)?;
    let mut entries = |calls: u64| -> Result<u64> {
        let before = exits(&mut client, "hypercall")?;
        let said = calls_of(&mut agent, calls)?.with_context(|| format!("{calls} calls"))?;
        let after = exits(&mut client, "hypercall")?;
        tell(&format!(
            "{calls} calls: {} entries, {} ns each",
            after - before,
            said.trim()
        ));
        Ok(after - before)
    };
    let few = entries(10)?;
    let many = entries(10 + CALLS)?;
    let for_them = many.saturating_sub(few);
    ensure!(
        (CALLS..=MOST * CALLS).contains(&for_them),
        "{CALLS} calls more are {for_them} entries more"
    );
    // A server that ends is an error of the API, and soon.
    server.vmm.client.stop()?;
    ensure!(server.vmm.wait(BOOT)?, "the server's VMM did not end well");
    drop(server);
    let begun = Instant::now();
    match calls_of(&mut agent, 10)? {
        Some(said) => bail!("calls to nobody are answered: {said}"),
        None => tell(&format!("without a server a program fails after {:?}", begun.elapsed())),
    }
    drop(agent);
    client.vmm.client.stop()?;
    drop(client);
    wait_online(&all)?;
    drop((link, device));
    module.unload()
}

fn upload(agent: &mut Agent, from: &Path, to: &str) -> Result<()> {
    let mut file = File::open(from).with_context(|| from.display().to_string())?;
    let upload = Upload {
        path: to.into(),
        mode: 0o755,
        size: file.metadata()?.len(),
    };
    Ok(agent.upload(&upload, &mut file)?)
}

/// The client's window, and what its program needs.
fn prepare(host: &Host, agent: &mut Agent) -> Result<()> {
    vm::guest_half(agent, CASE.name, &["mount"])?;
    vm::guest_half(agent, CASE.name, &["directory", "/cl/vendors"])?;
    upload(agent, Path::new(LOADER), "/cl/libOpenCL.so.1")?;
    upload(agent, &host.asset("libbasalt_opencl.so"), "/cl/libbasalt_opencl.so")?;
    let program = host.scratch.join("accelerator.py");
    fs::write(&program, include_str!("../accelerator.py"))?;
    upload(agent, &program, "/cl/accelerator.py")?;
    let icd = host.scratch.join("basalt.icd");
    fs::write(&icd, "/cl/libbasalt_opencl.so\n")?;
    upload(agent, &icd, "/cl/vendors/basalt.icd")
}

/// So many calls that are waited for, of a program that begins with them; what it says of them, or nothing if it has failed.
fn calls_of(agent: &mut Agent, calls: u64) -> Result<Option<String>> {
    let argv = ["/usr/bin/python3", "/cl/accelerator.py", "call", &calls.to_string()].map(OsText::from);
    let env = [
        "OCL_ICD_VENDORS=/cl/vendors",
        "BASALT_ACCEL=enter:0:/tmp/window/words",
        "BASALT_ACCEL_DEBUG=1",
    ];
    let Collected { status, stdout, stderr } = agent
        .exec(&ExecRequest {
            argv: argv.to_vec(),
            env: env.map(OsText::from).to_vec(),
            ..ExecRequest::default()
        })?
        .collect()?;
    if status.exit_code() != 0 {
        tell(&format!("the program says {}", String::from_utf8_lossy(&stderr).trim()));
        return Ok(None);
    }
    Ok(Some(String::from_utf8_lossy(&stdout).into_owned()))
}
