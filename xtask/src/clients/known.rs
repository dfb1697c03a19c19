//! The clients: unmodified programs, each with what it is asked to do and what of its words is compared.
//!
//! Knows no comparison. A client is run in the same way on both sides.

use std::fs;

use anyhow::{Context as _, Result};

use super::results::{self, Results};
use super::side::Side;

/// A client.
pub(super) struct Client {
    pub(super) name: &'static str,
    /// What it is and does here.
    pub(super) about: &'static str,
    /// Whether it is one of those that `make test` runs.
    pub(super) quick: bool,
    /// A back end that cannot run it natively, and why.
    pub(super) cannot: Option<(&'static str, &'static str)>,
    /// Runs it all, or what takes little time.
    pub(super) run: fn(&mut Side, Extent) -> Result<Results>,
}

/// How much of a client is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    All,
    Quick,
}

/// All of them.
pub(super) const CLIENTS: &[Client] = &[
    Client {
        name: "clinfo",
        about: "every property of platform and device",
        quick: true,
        cannot: None,
        run: clinfo,
    },
    Client {
        name: "pyopencl",
        about: "PyOpenCL's own tests, a process for each file",
        quick: true,
        cannot: None,
        run: pyopencl,
    },
    Client {
        name: "hcxkeys",
        about: "keys of WPA networks (PBKDF2), compared with those of its program for CPUs",
        quick: true,
        cannot: None,
        run: hcxkeys,
    },
    Client {
        name: "piglit",
        about: "piglit's tests of the API, most of which look for the codes of wrong arguments",
        quick: true,
        cannot: Some(("oclgrind", "it does not outlive arguments that are wrong")),
        run: piglit,
    },
    Client {
        name: "clpeak",
        about: "bandwidth, arithmetic, latency: that each is measured",
        quick: false,
        cannot: None,
        run: clpeak,
    },
    Client {
        name: "clblast",
        about: "CLBlast's tests of linear algebra, compared with a BLAS for CPUs",
        quick: false,
        cannot: None,
        run: clblast,
    },
    Client {
        name: "clfft",
        about: "Fourier transforms of several lengths, which clFFT checks itself",
        quick: false,
        cannot: None,
        run: clfft,
    },
    Client {
        name: "hashcat",
        about: "a mask attack on an MD5",
        quick: false,
        cannot: Some(("oclgrind", "its device has 128 MB, and hashcat wants more")),
        run: hashcat,
    },
];

/// PyOpenCL's test files.
const FILES: &[&str] = &[
    "wrapper",
    "enqueue_copy",
    "arrays_in_structs",
    "clrandom",
    "clmath",
    "algorithm",
    "array",
];

/// Tests of `algorithm` that oclgrind, which interprets kernels, does not end within a quarter of an hour: scans, and what is made
/// of them. For pytest's `-k`.
const TOO_SLOW: &str =
    "not scan and not copy_if and not partition and not unique and not index and not sort and not builder";

/// How piglit's programs are named that are tests by themselves.
const PIGLIT: [&str; 4] = [
    "cl-api-",
    "cl-custom-",
    "cl-program-max-work-item-sizes",
    "cl-program-predefined-macros",
];

/// The one of them with which PoCL ends the process, as it makes a queue on the device.
const ABORTS: &str = "cl-api-create-command-queue";

/// How each command ended is a result, too.
fn note_end(results: &mut Results, of: &str, how: &str) {
    results.insert(format!("{of}: end"), how.to_owned());
}

fn clinfo(side: &mut Side, _: Extent) -> Result<Results> {
    let seconds = 60;
    let mut command = side.command("clinfo", seconds);
    let ended = side.run(command.arg("--raw"), seconds)?;
    let mut results = results::clinfo(&ended.out);
    note_end(&mut results, "clinfo", &ended.how);
    Ok(results)
}

fn clpeak(side: &mut Side, _: Extent) -> Result<Results> {
    let seconds = 900;
    let mut command = side.command("clpeak", seconds);
    if side.backend == "oclgrind" {
        // It interprets kernels, and would need hours for the others.
        command.args(["--kernel-latency", "--transfer-bandwidth"]);
    }
    let ended = side.run(&mut command, seconds)?;
    let mut results = results::clpeak(&ended.out);
    note_end(&mut results, "clpeak", &ended.how);
    Ok(results)
}

fn pyopencl(side: &mut Side, extent: Extent) -> Result<Results> {
    let seconds = 1200;
    let python = side.places.artefact.join("python/bin/python");
    let mut all = Results::new();
    let files = if extent == Extent::Quick { &FILES[..1] } else { FILES };
    for file in files {
        let told = side.directory.join(file);
        let test = side.places.artefact.join(format!("pyopencl/test_{file}.py"));
        let mut command = side.command(&python.to_string_lossy(), seconds);
        command
            .env("PYTHONPATH", &side.places.sources)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("BASALT_RESULTS", &told)
            .args([
                "-m",
                "pytest",
                "-p",
                "basalt_results",
                "-p",
                "no:cacheprovider",
                "--tb=short",
                "--quiet",
                // Tests are named from here, wherever the cache is.
                "--rootdir",
            ])
            .arg(side.places.artefact.join("pyopencl"))
            .arg(&test);
        if side.backend == "oclgrind" && *file == "algorithm" {
            command.args(["-k", TOO_SLOW]);
        }
        let ended = side.run(&mut command, seconds)?;
        let text = fs::read_to_string(&told)
            .with_context(|| format!("pytest wrote no results of {}; the step's log says why", test.display()))?;
        all.append(&mut results::pytest(&text));
        note_end(&mut all, file, &ended.how);
    }
    Ok(all)
}

fn piglit(side: &mut Side, _: Extent) -> Result<Results> {
    let seconds = 120;
    let directory = side.places.libraries().join("piglit/bin");
    let read = fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?;
    let names = read.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.retain(|name| PIGLIT.iter().any(|begin| name.starts_with(begin)) && name != ABORTS);
    names.sort();
    let mut all = Results::new();
    for name in names {
        let mut command = side.command(&directory.join(&name).to_string_lossy(), seconds);
        // Where it would look for scripts of tests; these programs have none.
        command.env("PIGLIT_SOURCE_DIR", &side.directory);
        let ended = side.run(&mut command, seconds)?;
        all.append(&mut results::piglit(&name, &ended.out)?);
        note_end(&mut all, &name, &ended.how);
    }
    Ok(all)
}

fn hashcat(side: &mut Side, _: Extent) -> Result<Results> {
    // The MD5 of `abz`.
    const HASH: &str = "00b03726ba42c3aeaf53df65552eff92";
    let seconds = 900;
    let program = side.places.artefact.join("hashcat/hashcat");
    // It looks for its kernels beside itself, and keeps what it has compiled in its home.
    let mut command = side.command(&program.to_string_lossy(), seconds);
    command
        .args([
            "--hash-type",
            "0",
            "--attack-mode",
            "3",
            "--force",
            "--self-test-disable",
        ])
        .args([
            "--potfile-disable",
            "--logfile-disable",
            "--restore-disable",
            "--optimized-kernel-enable",
        ])
        .args([HASH, "?l?l?l"]);
    let ended = side.run(&mut command, seconds)?;
    let mut results = results::hashcat(&ended.out, HASH);
    note_end(&mut results, "hashcat", &ended.how);
    Ok(results)
}

fn clblast(side: &mut Side, _: Extent) -> Result<Results> {
    let seconds = 600;
    let mut all = Results::new();
    let routines = ["xaxpy", "xdot", "xgemv", "xgemm"];
    // Products of matrices are too much for an interpreter.
    let count = if side.backend == "oclgrind" { 2 } else { routines.len() };
    for routine in &routines[..count] {
        let mut command = side.command(&format!("clblast_test_{routine}"), seconds);
        let ended = side.run(command.args(["-platform", "0", "-device", "0"]), seconds)?;
        all.append(&mut results::clblast(&ended.out));
        note_end(&mut all, routine, &ended.how);
    }
    Ok(all)
}

fn clfft(side: &mut Side, _: Extent) -> Result<Results> {
    let seconds = 300;
    let mut all = Results::new();
    let shapes: [&[&str]; 3] = [
        &["--lenX", "1024"],
        &["--lenX", "64", "--lenY", "12"],
        &["--lenX", "16", "--lenY", "16", "--lenZ", "4", "--outPlace"],
    ];
    for shape in shapes {
        let name = shape.join(" ");
        let mut command = side.command("clFFT-client", seconds);
        let ended = side.run(command.args(shape), seconds)?;
        all.append(&mut results::clfft(&name, &ended.out));
        note_end(&mut all, &name, &ended.how);
    }
    Ok(all)
}

fn hcxkeys(side: &mut Side, _: Extent) -> Result<Results> {
    let seconds = 300;
    let list = side.directory.join("passwords");
    // Each is 16 384 times SHA-1.
    let count = if side.backend == "oclgrind" { 1 } else { 64 };
    let passwords: Vec<_> = (0..count).map(|number| format!("password-{number:02}\n")).collect();
    fs::write(&list, passwords.concat())?;
    let mut keys = Vec::new();
    let mut results = Results::new();
    for program in ["wlangenpmkocl", "wlangenpmk"] {
        let file = side.directory.join(program);
        let mut command = side.command(program, seconds);
        command
            .args(["-e", "network"])
            .arg("-i")
            .arg(&list)
            .arg("-A")
            .arg(&file);
        let ended = side.run(&mut command, seconds)?;
        note_end(&mut results, program, &ended.how);
        keys.push(fs::read_to_string(&file).unwrap_or_default());
    }
    for line in keys[0].lines() {
        let (key, password) = line.split_once(':').unwrap_or((line, "no password"));
        results.insert(password.to_owned(), key.to_owned());
    }
    let same = keys[0] == keys[1] && keys[0].lines().count() == passwords.len();
    results.insert("keys are the CPU's".into(), same.to_string());
    Ok(results)
}
