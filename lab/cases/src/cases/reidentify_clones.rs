//! Two guests from one snapshot, each re-identified: none says what the other says. Neither its names, nor its boot id, nor any
//! randomness: the generator's for new processes and for one that was frozen, and what the entropy device's driver had
//! fetched ahead of time. Until its re-identification nothing runs in either, and a command whose connection was there before goes on.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use agent_api::{Connection, ExecRequest, Identity, Reidentify, VSOCK_PORT};
use anyhow::{Context, Result, bail, ensure};

use super::snapshot_files::Files;
use super::vsock::connect;
use crate::vm::{self, Builder, Vm};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "reidentify-clones",
    limit: Duration::from_secs(300),
    host,
    guest: Some(guest),
};

/// What the process that is frozen draws, a line each time.
const DRAWN: &str = "/drawn";

/// What the command writes whose connection the restores end.
const ATTACHED: &str = "/attached";

/// The reader of this leaves most of what was fetched for it in the kernel.
const HWRNG: &str = "/dev/hwrng";

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Random bytes that are compared at once: no two of them are ever equal by chance.
const CHUNK: usize = 16;

/// Of these come from [`HWRNG`]: as much as Linux keeps there, in two buffers.
const FROM_DEVICE: usize = 128 / CHUNK;

/// How long a guest may take, in an emulated host.
const PATIENCE: Duration = Duration::from_secs(60);

/// A guest of this case, original or clone.
struct Guest<'a> {
    vm: Vm,
    address: &'a SocketAddr,
}

/// What a clone has said.
struct Said {
    boot_id: String,
    /// Of a process that was started in it.
    new: Vec<String>,
    /// Of the one that was frozen.
    frozen: Vec<String>,
}

impl Guest<'_> {
    fn connect(&self) -> Result<Connection<UnixStream>> {
        Ok(Connection::new(connect(self.address, VSOCK_PORT)?, None)?)
    }

    fn size(&self, path: &str) -> Result<u64> {
        let file = self.connect()?.stat(path, false)?;
        Ok(file.map_or(0, |file| file.size))
    }

    /// Waits until a file is longer than `size`.
    fn grows(&self, path: &str, size: u64) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.size(path)? <= size {
            ensure!(Instant::now() < end, "{path} does not grow beyond {size} bytes");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    fn output(&self, argv: &[&str]) -> Result<String> {
        let request = ExecRequest {
            argv: argv.iter().map(|&word| word.into()).collect(),
            ..ExecRequest::default()
        };
        let output = self.connect()?.exec(&request)?.collect()?;
        ensure!(output.status.exit_code() == 0, "{argv:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

fn host(host: &Host) -> Result<()> {
    let address = SocketAddr::from_abstract_name(format!("basalt-case-re-identify-clones-{}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&address)?;
    let mut files = Files::new(host, "frozen");
    let frozen = original(host, &listener, &address, &mut files)?;
    let [one, two] = ["one", "two"].map(|name| {
        let (state, memory) = files.open()?;
        let mut vm = Builder::new(host)?.restore(listener.try_clone()?.into(), state, memory)?;
        vm.vmm.client.resume()?;
        let address = &address;
        clone(Guest { vm, address }, name, &frozen).with_context(|| format!("clone {name}"))
    });
    differ(&one?, &two?)
}

/// What was there when the snapshot was taken: how long the files are that grow, and which boot it was.
struct Frozen {
    drawn: u64,
    attached: u64,
    boot_id: String,
}

/// Boots a guest and leaves it frozen in a snapshot.
fn original(host: &Host, listener: &UnixListener, address: &SocketAddr, files: &mut Files) -> Result<Frozen> {
    let vm = Builder::new(host)?.start_listening(Some(listener.try_clone()?.into()))?;
    let mut agent = vm.agent()?;
    vm::install(&mut agent)?;
    vm::detach_guest_half(&mut agent, CASE.name)?;
    let mut guest = Guest { vm, address };
    guest.grows(DRAWN, 0)?;
    let script = format!("while :; do echo >> {ATTACHED}; sleep 0.05; done");
    let attached = ExecRequest {
        argv: ["sh", "-c", &script].map(Into::into).to_vec(),
        ..ExecRequest::default()
    };
    let mut connection = guest.connect()?;
    let attached = connection.exec(&attached)?;
    guest.grows(ATTACHED, 0)?;
    // The kernel makes it at the first reading: without one here each clone would have its own by itself.
    let boot_id = guest.output(&["cat", BOOT_ID])?.trim().to_owned();
    // Of what was fetched for it, the rest stays in the kernel.
    guest.output(&["head", "-c", "10", HWRNG])?;
    guest.connect()?.freeze()?;
    let frozen = Frozen {
        drawn: guest.size(DRAWN)?,
        attached: guest.size(ATTACHED)?,
        boot_id,
    };
    guest.vm.vmm.client.pause()?;
    files.take(&mut guest.vm)?;
    drop(guest);
    drop(attached);
    Ok(frozen)
}

/// What a clone says after its re-identification, and that it had nothing to say before.
fn clone(mut guest: Guest<'_>, name: &str, frozen: &Frozen) -> Result<Said> {
    std::thread::sleep(Duration::from_millis(500));
    let size = guest.size(DRAWN).context("looking before the re-identification")?;
    ensure!(size == frozen.drawn, "something runs before the re-identification");
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let digit = if name == "one" { "1" } else { "2" };
    let identity = Identity {
        hostname: name.to_owned(),
        machine_id: digit.repeat(32),
    };
    let request = Reidentify {
        clock_ns: u64::try_from(now.as_nanos())?,
        entropy: digit.repeat(64).into_bytes(),
        identity: Some(identity.clone()),
        hook_ms: 10_000,
        thaw: true,
        ..Reidentify::default()
    };
    let boot_id = guest.connect()?.reidentify(&request).context("reidentifying")?;
    ensure!(boot_id != frozen.boot_id, "its boot id is the original's");
    let new = vm::guest_half(&mut guest.connect()?, CASE.name, &["draw"]).context("drawing")?;
    let script = format!("hostname; cat /etc/machine-id {BOOT_ID}");
    let names = guest.output(&["sh", "-c", &script])?;
    let expected = format!("{}\n{}\n{boot_id}\n", identity.hostname, identity.machine_id);
    ensure!(names == expected, "it says {names:?}, not {expected:?}");
    // Ten lines of the one that was frozen, behind one that it may have drawn before: what is in its memory, all clones have.
    let line = 2 * u64::try_from(CHUNK)? + 1;
    guest.grows(DRAWN, frozen.drawn + 11 * line)?;
    guest.grows(ATTACHED, frozen.attached + 2)?;
    let drawn = guest.output(&["cat", DRAWN])?;
    let later = drawn.get(usize::try_from(frozen.drawn)?..).unwrap_or_default();
    guest.vm.vmm.client.stop()?;
    ensure!(guest.vm.vmm.wait(Duration::from_secs(10))?, "the VMM did not end well");
    let lines = |text: &str| -> Vec<String> { text.lines().map(str::to_owned).collect() };
    Ok(Said {
        boot_id,
        new: lines(&new),
        frozen: lines(later).split_off(1),
    })
}

fn differ(one: &Said, two: &Said) -> Result<()> {
    ensure!(one.boot_id != two.boot_id, "both have the boot id {}", one.boot_id);
    for (what, one, two) in [
        ("a new process", &one.new, &two.new),
        ("the frozen process", &one.frozen, &two.frozen),
    ] {
        ensure!(
            one.len() >= 10 && two.len() >= 10,
            "{what} has drawn {one:?} and {two:?}"
        );
        let (ones, twos) = (one.iter().collect::<BTreeSet<_>>(), two.iter().collect::<BTreeSet<_>>());
        let twice: Vec<_> = ones.intersection(&twos).collect();
        ensure!(twice.is_empty(), "{what} has drawn the same in both: {twice:?}");
        let each = ones.len() == one.len() && twos.len() == two.len();
        ensure!(each, "{what} has drawn the same twice: {one:?}, {two:?}");
    }
    Ok(())
}

fn guest(arguments: &[String]) -> Result<()> {
    match arguments.first().map(String::as_str) {
        Some("draw") => draw(),
        None => draw_for_ever(),
        Some(other) => bail!("{other:?} is nothing that this guest half does"),
    }
}

/// What the device's driver has, and the generator's.
fn draw() -> Result<()> {
    let mut device = [[0; CHUNK]; FROM_DEVICE];
    File::open(HWRNG)?.read_exact(device.as_flattened_mut())?;
    for chunk in device {
        tell(&mut std::io::stdout(), &chunk)?;
    }
    for _ in 0..10 {
        tell(&mut std::io::stdout(), &random()?)?;
    }
    Ok(())
}

fn draw_for_ever() -> Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(DRAWN)?;
    loop {
        let drawn = random()?;
        // Here it is frozen, as good as always.
        std::thread::sleep(Duration::from_millis(20));
        tell(&mut file, &drawn)?;
    }
}

fn random() -> Result<[u8; CHUNK]> {
    let mut chunk = [0; CHUNK];
    let got = rustix::rand::getrandom(&mut chunk, rustix::rand::GetRandomFlags::empty())?;
    ensure!(got == CHUNK, "getrandom gave {got} bytes");
    Ok(chunk)
}

/// A line, in one piece.
fn tell(out: &mut impl Write, chunk: &[u8; CHUNK]) -> Result<()> {
    let line = format!("{:032x}\n", u128::from_be_bytes(*chunk));
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}
