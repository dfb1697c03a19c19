//! CUDA in a sandbox: programs that nvcc has made, which judge their own results, find the libraries by their environment and compute on the
//! back end `reference`, in the sandbox's server. Two at once, as another user, and one of an image that says where libraries are itself; a
//! program behind a server that is killed; and what a sandbox without it has. A sandbox with a model that is trained is saved, and its clone
//! infers at once.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::nvme_disk::tell;
use crate::basalt::expect_code;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "cuda",
    limit: Duration::from_secs(400),
    host,
    guest: None,
};

/// Where `xtask` puts the programs, beside ours.
const PROGRAMS: &str = "basalt-cuda-programs";

fn host(host: &Host) -> Result<()> {
    let programs = host.binaries.join(PROGRAMS);
    let names = names(&programs)?;
    let daemon = Daemon::with_templates(host)?;
    let volume = format!("{}:/cuda:ro", programs.display());
    let run = |name: &str, accelerator: &str| {
        let words = ["run", "-d", "--name", name, "--memory", "256m", "-v", &volume];
        let accelerator = ["--accel", accelerator, daemon.image(), "--", "sleep", "10000"];
        daemon.ok(&[&words[..], &accelerator].concat())
    };
    run("cuda", "reference:window=64m,memory=256m")?;
    for name in &names {
        let said = daemon.ok(&["exec", "cuda", &format!("/cuda/{name}")])?;
        is_right(name, &said)?;
        tell(said.trim());
    }
    beside_each_other(&daemon)?;
    daemon.ok(&["rm", "-f", "cuda"])?;
    a_model_is_cloned(&daemon, &volume)?;

    // Nothing is computed, so that the program sees that its results are wrong; the libraries are there all the same.
    run("null", "null:window=32m,memory=64m")?;
    let output = daemon.run(&["exec", "null", "/cuda/saxpy"])?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.code() == Some(1) && said.starts_with("wrong: y[0]"),
        "on null: {said}"
    );
    daemon.ok(&["rm", "-f", "null"])?;
    let output = daemon.run(&["run", "-v", &volume, daemon.image(), "--", "/cuda/saxpy"])?;
    expect_code(&output, 127).context("without an accelerator")?;
    daemon.end()
}

/// The programs, by their names.
fn names(programs: &Path) -> Result<Vec<String>> {
    let listed = fs::read_dir(programs);
    let listed = listed.with_context(|| format!("{}: `cargo xtask test --only cases` makes it", programs.display()))?;
    let mut names: Vec<_> = listed
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    names.sort();
    ensure!(names.iter().any(|name| name == "saxpy"), "there are {names:?}");
    Ok(names)
}

/// A program's last line.
fn is_right(name: &str, said: &str) -> Result<()> {
    let last = said.trim().lines().last().unwrap_or_default();
    ensure!(last.starts_with(&format!("{name}: right")), "{name} said {said:?}");
    Ok(())
}

/// Two programs at once, of which one is another user's and has an environment that names libraries already.
fn beside_each_other(daemon: &Daemon<'_>) -> Result<()> {
    let long = daemon.start(&["exec", "cuda", "/cuda/lenet"])?;
    let environment = "LD_LIBRARY_PATH=/nowhere";
    let said = daemon.ok(&[
        "exec",
        "--user",
        "nobody",
        "--env",
        environment,
        "cuda",
        "/cuda/softmax",
    ])?;
    is_right("softmax", &said)?;
    let output = long.wait_with_output()?;
    expect_code(&output, 0).context("beside another program")?;
    is_right("lenet", &String::from_utf8_lossy(&output.stdout))
}

/// What a sandbox's model says of a batch: the loss, as it is written, and the time in microseconds.
fn infer(daemon: &Daemon<'_>, sandbox: &str, batch: u32) -> Result<(String, u64)> {
    let ask = format!("cd /tmp; echo {batch} > ask; cat answer");
    let said = daemon.ok(&["exec", sandbox, "sh", "-c", &ask])?;
    let answer = said.trim().split_once(' ');
    let (loss, time) = answer.with_context(|| format!("{sandbox} says {said:?}"))?;
    let is_number = loss.parse::<f64>().is_ok_and(f64::is_finite);
    ensure!(is_number, "{sandbox} says {said:?}");
    Ok((loss.to_owned(), time.parse()?))
}

/// A model is trained; clones of its sandbox have it, and go on from there, each by itself.
fn a_model_is_cloned(daemon: &Daemon<'_>, volume: &str) -> Result<()> {
    let words = ["run", "-d", "--name", "model", "--memory", "256m", "-v", volume];
    let accelerator = ["--accel", "reference:window=64m,memory=256m", daemon.image()];
    let program = ["--", "sh", "-c", "cd /tmp && exec /cuda/lenet keep"];
    let begun = Instant::now();
    daemon.ok(&[&words[..], &accelerator, &program].concat())?;
    let wait = "until [ -e /tmp/ready ]; do sleep 0.05; done";
    daemon.ok(&["exec", "model", "sh", "-c", wait])?;
    let made = begun.elapsed();
    let cold = infer(daemon, "model", 1)?;
    let other = infer(daemon, "model", 2)?.0;
    ensure!(other != cold.0, "all batches have the same loss");
    let times = (0..5).map(|_| Ok(infer(daemon, "model", 1)?.1));
    let warm = times
        .collect::<Result<Vec<u64>>>()?
        .into_iter()
        .min()
        .unwrap_or_default();

    daemon.ok(&["snapshot", "create", "model", "trained"])?;
    let begun = Instant::now();
    daemon.ok(&["clone", "--name", "twin", "trained"])?;
    let cloned = begun.elapsed();
    let first = infer(daemon, "twin", 1)?;
    let second = infer(daemon, "twin", 2)?;
    ensure!(
        (&first.0, &second.0) == (&cold.0, &other),
        "its clone says {first:?} and {second:?}, and it {cold:?} and {other}"
    );
    tell(&format!(
        "a model was trained in {} ms; an inference takes {warm} us when it is warm, its clone was there after {} ms, and its first \
         inference took {} us, {:.2} of a warm one",
        made.as_millis(),
        cloned.as_millis(),
        first.1,
        first.1 as f64 / warm.max(1) as f64
    ));
    // Its programs are other ones than the parent's from here on.
    daemon.ok(&["rm", "-f", "model"])?;
    ensure!(
        infer(daemon, "twin", 1)?.0 == cold.0,
        "it does not go on without its parent"
    );
    daemon.ok(&["rm", "-f", "twin"])?;
    daemon.ok(&["snapshot", "rm", "trained"])?;
    Ok(())
}
