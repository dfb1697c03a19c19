//! Brings the lab up and down. Owns the order of things; what each is, the other files know.
//!
//! ```text
//!  up:    lock ─► running? done ─► clean what a killed one left ─► token, initramfs, disks ─► emulator ─► console says
//!         ready ─► agent answers ─► lab.json          a failure on the way kills the emulator and cleans
//!  down:  lock ─► ask the agent to power off ─► wait ─► kill if it must be ─► clean
//! ```

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_api::Signals;
use anyhow::{Context, Result, bail};
use cpio::Archive;
use lab_init::contract::TOKEN_FILE;

use crate::console::{Console, Event};
use crate::emulator::{self, Machine};
use crate::parts::{Emulator, HostKernel, Parts};
use crate::progress::Progress;
use crate::remote;
use crate::standstill;
use crate::state::{Lab, State};

/// Another basalt-lab may be starting the lab, and may have to try twice.
const LOCK_PATIENCE: Duration = Duration::from_secs(300);

/// How long a lab may take to end by itself.
const DOWN_PATIENCE: Duration = Duration::from_secs(20);

/// Free space below which a lab is not started: formatting the data disks takes a seventh of it.
const LOWEST_FREE: u64 = 512 << 20;

/// How often the console is looked at.
const TICK: Duration = Duration::from_millis(20);

/// Attempts to find a port that nobody takes between its choice and its use.
const PORT_ATTEMPTS: u32 = 5;

/// What a start needs to know.
pub(crate) struct Wish {
    pub(crate) machine: Machine,
    pub(crate) kernel: HostKernel,
    pub(crate) emulator: Emulator,
    /// A port to use; any free one if `None`.
    pub(crate) port: Option<u16>,
    /// Whether a lab that was made of other parts is to be replaced.
    pub(crate) fresh: bool,
    /// How long one boot may take.
    pub(crate) timeout: Duration,
}

/// A start that ended otherwise than planned.
enum Failure {
    /// A second try may succeed: the emulated machine stood still or crashed.
    Chance(anyhow::Error),
    /// It would fail again.
    Certain(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Certain(error.into())
    }
}

/// Makes the lab run, and says how to reach it. Nothing is done if it runs and answers.
pub(crate) fn up(state: &State, cache: &Path, wish: &Wish, progress: &mut Progress) -> Result<Lab> {
    let _lock = state.lock(LOCK_PATIENCE, || {
        progress.warn("another basalt-lab is at work; waiting for it")
    })?;
    if let Some(lab) = state.running()?
        && ends_a_silent_one(state, &lab, wish, progress)?
    {
        state.kill_emulator()?;
    }
    if let Some(lab) = state.running()? {
        // Where the parts cannot be found, the lab that runs is the best there is.
        let current = Parts::find(cache, wish.kernel, wish.emulator)
            .and_then(|parts| parts.fingerprint())
            .unwrap_or_else(|_| lab.made_of.clone());
        if current == lab.made_of {
            return Ok(lab);
        }
        if !wish.fresh {
            progress.warn("the lab that runs was made of older parts; `basalt-lab up --fresh` starts it anew");
            return Ok(lab);
        }
        progress.step("the lab that runs was made of older parts; ending it");
        end(state, progress)?;
    }
    let signals = Signals::install()?;
    if state.is_stale()? {
        state.forget_synced()?;
        progress.step("the last lab ended without `basalt-lab down`; cleaning up after it");
    }
    // An emulator whose starter was killed before it wrote lab.json is not a lab: nobody knows how far it is.
    state.kill_emulator()?;
    state.clean()?;
    let parts = Parts::find(cache, wish.kernel, wish.emulator)?;
    check_space(state.directory())?;
    emulator::make_disks(state)?;
    match start(state, &parts, wish, &signals, progress) {
        Ok(lab) => Ok(lab),
        Err(Failure::Certain(error)) => Err(error),
        Err(Failure::Chance(error)) => {
            progress.warn(&format!("{}; trying once more", first_line(&error)));
            start(state, &parts, wish, &signals, progress).map_err(|failure| match failure {
                Failure::Chance(error) | Failure::Certain(error) => error,
            })
        }
    }
}

/// Whether the lab is to be ended because it does not answer; an error if it does not and may not be ended.
fn ends_a_silent_one(state: &State, lab: &Lab, wish: &Wish, progress: &mut Progress) -> Result<bool> {
    match remote::ask(lab) {
        Ok(()) => Ok(false),
        Err(error) if wish.fresh => {
            standstill::tell(state);
            progress.warn(&format!("{}; ending it", first_line(&error)));
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

fn first_line(error: &anyhow::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}

fn check_space(directory: &Path) -> Result<()> {
    let space = rustix::fs::statvfs(directory)?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < LOWEST_FREE {
        bail!(
            "only {} MiB are free in {}, and a lab needs {}; make room, or name another place with BASALT_LAB_STATE",
            free >> 20,
            directory.display(),
            LOWEST_FREE >> 20
        );
    }
    Ok(())
}

/// One attempt; leaves nothing behind if it fails.
fn start(
    state: &State,
    parts: &Parts,
    wish: &Wish,
    signals: &Signals,
    progress: &mut Progress,
) -> Result<Lab, Failure> {
    let result = attempt(state, parts, wish, signals, progress);
    if result.is_err() {
        state.kill_emulator()?;
        state.clean()?;
        // A terminal sends Ctrl-C to the emulator too, as long as it is no daemon: its death is then not the reason.
        interruption(signals)?;
    }
    result
}

fn interruption(signals: &Signals) -> Result<(), Failure> {
    match signals.take().filter(|number| *number != libc::SIGWINCH) {
        Some(number) => Err(Failure::Certain(crate::Interrupted(number).into())),
        None => Ok(()),
    }
}

fn attempt(
    state: &State,
    parts: &Parts,
    wish: &Wish,
    signals: &Signals,
    progress: &mut Progress,
) -> Result<Lab, Failure> {
    let token = remote::new_token(&state.token())?;
    let initramfs = initramfs(parts, &token)?;
    crate::state::write_new(&state.initramfs(), &initramfs)?;
    for log in [state.console(), state.emulator_log()] {
        rotate(&log)?;
    }
    progress.step("starting the emulator");
    let port = start_emulator(state, parts, wish)?;
    let pid = state.emulator()?.context("the emulator ended right after its start")?;
    progress.step("booting the emulated host");
    wait_for_ready(state, wish.timeout, signals, progress)?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let lab = Lab {
        address: format!("127.0.0.1:{port}"),
        token_file: state.token(),
        pid,
        started,
        cpus: wish.machine.cpus,
        memory_mib: wish.machine.memory_mib,
        made_of: parts.fingerprint()?,
    };
    let info = remote::connect(&lab)
        .and_then(|mut remote| Ok(remote.hello()?))
        .map_err(Failure::Chance)?;
    fs::remove_file(state.initramfs()).context("cannot remove the initramfs, which holds the token")?;
    state.write_lab(&lab)?;
    progress.step(&format!(
        "the lab answers: Linux {}, at {}",
        info.kernel_release, lab.address
    ));
    Ok(lab)
}

/// The kernel's modules as the recipe packed them, then what changes: our init and the token.
fn initramfs(parts: &Parts, token: &str) -> Result<Vec<u8>> {
    let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    let mut bytes = read(&parts.base)?;
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let mut archive = Archive::default();
    archive.file("init", 0o755, &read(&parts.init)?)?;
    let token_file = Path::new(TOKEN_FILE).strip_prefix("/")?;
    let directory = token_file.parent().context("the token has no directory")?;
    archive.directory(&directory.to_string_lossy(), 0o700)?;
    archive.file(&token_file.to_string_lossy(), 0o600, token.as_bytes())?;
    bytes.extend(archive.finish());
    Ok(bytes)
}

/// Keeps the log of the start before.
fn rotate(log: &Path) -> Result<()> {
    let mut older = log.as_os_str().to_owned();
    older.push(".1");
    match fs::rename(log, &older) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot rename {}", log.display()))
        }
        _ => Ok(()),
    }
}

fn start_emulator(state: &State, parts: &Parts, wish: &Wish) -> Result<u16> {
    if let Some(port) = wish.port {
        emulator::start(state, parts, &wish.machine, port)?;
        return Ok(port);
    }
    let mut attempts = 0;
    loop {
        attempts += 1;
        let port = emulator::free_port()?;
        match emulator::start(state, parts, &wish.machine, port) {
            Ok(()) => return Ok(port),
            // Somebody took it since it was found free.
            Err(error) if attempts < PORT_ATTEMPTS && error.to_string().contains("port is taken") => {}
            Err(error) => return Err(error),
        }
    }
}

fn wait_for_ready(state: &State, timeout: Duration, signals: &Signals, progress: &mut Progress) -> Result<(), Failure> {
    let mut console = Console::new(&state.console());
    let deadline = progress.elapsed() + timeout;
    let chance = |what: String, console: &Console| {
        Failure::Chance(anyhow::anyhow!("{what}; the console's last lines:\n{}", console.tail()))
    };
    loop {
        let alive = state.emulator()?.is_some();
        for event in console.poll()? {
            match event {
                Event::Step(step) => progress.step(&step),
                Event::Ready => return Ok(()),
                Event::Failed(reason) => {
                    return Err(Failure::Certain(anyhow::anyhow!("the lab's start failed: {reason}")));
                }
                Event::Panic(reason) => return Err(chance(format!("the lab's kernel panicked: {reason}"), &console)),
            }
        }
        if !alive {
            return Err(chance("the emulator ended while the lab booted".to_owned(), &console));
        }
        if progress.elapsed() > deadline {
            let what = format!("the lab did not answer within {} seconds", timeout.as_secs());
            return Err(chance(what, &console));
        }
        interruption(signals)?;
        progress.tick();
        std::thread::sleep(TICK);
    }
}

/// Ends the lab; says whether there was one.
pub(crate) fn down(state: &State, progress: &mut Progress) -> Result<bool> {
    let _lock = state.lock(LOCK_PATIENCE, || {
        progress.warn("another basalt-lab is at work; waiting for it")
    })?;
    let was_there = state.emulator()?.is_some();
    end(state, progress)?;
    Ok(was_there)
}

fn end(state: &State, progress: &mut Progress) -> Result<()> {
    if state.is_stale()? {
        state.forget_synced()?;
    }
    if let Some(lab) = state.running()? {
        progress.step("asking the lab to power off");
        match remote::power_off(&lab, DOWN_PATIENCE) {
            Ok(()) => {
                if !state.wait_until_gone(DOWN_PATIENCE)? {
                    state.forget_synced()?;
                    progress.warn(&format!(
                        "the lab did not power off within {} seconds; ending the emulator",
                        DOWN_PATIENCE.as_secs()
                    ));
                }
            }
            // A lab that cannot be asked is ended from outside, which is what `down` is for.
            Err(error) => {
                state.forget_synced()?;
                progress.warn(&format!("{error:#}; ending the emulator"));
            }
        }
    }
    state.kill_emulator()?;
    state.clean()
}
