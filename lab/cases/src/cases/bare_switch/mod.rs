//! A server without a CPU of its own, and a guest that runs it in its own place: real basalt.ko, in the lab. Both guests are a few
//! instructions. The server has its CPU until it waits; then that is Linux's again, and the guest's next.
//!
//! ```text
//!  server: CPU 1, to its first WAIT ─► frozen ─► CPU 1 is Linux's
//!  guest:  CPU 1 ─► ENTER, 10 000 times: one exit each ─► interrupts, broken servers, wrong calls, the end
//! ```

mod code;
mod guest;

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use engine::{Exit, MsiMessage};
use reservation::Device;

use self::guest::{Guest, Said, Window, later, serve};
use super::bare::{CPU, Module, in_lab, online, wait_online};
use crate::kernel_log::{complaints, kernel_log};
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "bare-switch",
    limit: Duration::from_secs(240),
    host,
    guest: None,
};

/// Calls that are counted.
const CALLS: u64 = 10_000;
/// Calls, and exits to user space, that are compared.
const COMPARED: u64 = 500;
const ROUNDS: usize = 5;

/// For how long the server may run at once.
const BUDGET: Duration = Duration::from_millis(50);
/// The most that there is.
const LONG: Duration = Duration::from_secs(10);
/// What takes no time to speak of, on a busy machine.
const SOON: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(100);

/// What a guest is answered (`BASALT_ENTERED_*` of kmod/uapi/basalt.h).
const DONE: u8 = 0;
const INTERRUPTED: u8 = 1;
const BUSY: u8 = 2;
const LATE: u8 = 3;
const HALTED: u8 = 4;
const GONE: u8 = 5;
const NONE: u8 = 6;

/// What the server does beside its answer (guests.S).
const SPIN: u64 = 1;
const HALT: u64 = 2;
const OUTSIDE: u64 = 3;
const PORT: u64 = 4;
const FAULT: u64 = 5;
const APIC: u64 = 6;
const NESTED: u64 = 7;

/// What its user space has it read.
const READ: u8 = 0x3c;

fn host(host: &Host) -> Result<()> {
    if !in_lab()? {
        return Ok(());
    }
    let module = Module::load(host)?;
    let device = Device::open(Device::PATH)?;
    let all = online()?;
    let mut log = kernel_log()?;
    type Part = fn(&mut Pair) -> Result<()>;
    let parts: [(&str, Duration, Part); 9] = [
        ("calls", LONG, calls),
        ("time", LONG, time),
        ("interrupts", LONG, interrupts),
        ("its time", BUDGET, late),
        ("questions", LONG, questions),
        ("wrong calls", LONG, wrong_calls),
        ("a halt", LONG, halt),
        ("a fault", LONG, fault),
        ("the end", LONG, end),
    ];
    let cpus = thread::available_parallelism()?.get();
    if cpus >= 4 {
        several(&device, &all).context("several")?;
    }
    // Where Linux has several CPUs left, it interrupts all of them at once now and then, the guest's as well, which has interrupts off.
    let alone = cpus == 2;
    for (name, budget, part) in parts.into_iter().filter(|_| alone) {
        let mut pair = Pair::new(&device, &all, budget).with_context(|| format!("before {name}"))?;
        part(&mut pair).with_context(|| name.to_owned())?;
        pair.end().with_context(|| name.to_owned())?;
        wait_online(&all).with_context(|| format!("after {name}"))?;
    }
    drop(device);
    module.unload()?;
    let complaints = complaints(&mut log)?;
    ensure!(complaints.is_empty(), "the host's kernel says: {complaints:?}");
    Ok(())
}

/// A frozen server, with a thread that answers what it asks, and a guest that is linked to it by the number 0.
struct Pair {
    guest: Guest,
    server: Option<Server>,
    /// What the guest was linked by.
    link: OwnedFd,
    window: Window,
}

impl Pair {
    fn new(device: &Device, all: &str, budget: Duration) -> Result<Self> {
        let window = Window::new()?;
        let (server, link) = serve(device, &window, budget)?;
        // Nobody runs on it, and the server is still there.
        wait_online(all)?;
        let mut guest = Guest::new(device, CPU, &window)?;
        guest.vcpu.kicker().adopt_current_thread();
        // Not the vCPU itself, with which more could be done.
        let is = fs::read_link(format!("/proc/self/fd/{}", link.as_raw_fd()))?;
        ensure!(is.as_os_str() == "anon_inode:basalt-server", "a link is made by {is:?}");
        guest.vcpu.link(0, Some(link.try_clone()?))?;
        ensure!(
            guest.vcpu.link(0, Some(link.try_clone()?)).is_err(),
            "a number had two links"
        );
        let server = Some(Server::start(server));
        Ok(Self {
            guest,
            server,
            link,
            window,
        })
    }

    fn end(mut self) -> Result<()> {
        self.server.as_mut().map_or(Ok(()), Server::end)
    }

    fn server(&self) -> Result<&Server> {
        self.server.as_ref().context("the server has ended")
    }

    fn calls(&mut self, count: u64) -> Result<()> {
        self.guest.begin(code::calls(), &[(8, count)], true)?;
        let said = self.guest.said()?;
        ensure!(said == Said::Done, "a guest that calls {count} times said {said:?}");
        Ok(())
    }

    /// Enters again as long as the server's user space is at work.
    fn enters_patiently(&mut self) -> Result<u8> {
        let end = Instant::now() + SOON;
        loop {
            let status = self.guest.enters(0, false)?;
            if status != BUSY || Instant::now() > end {
                return Ok(status);
            }
        }
    }
}

/// What a server has asked.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    Port(u16),
    Memory(u64),
    Ended,
}

/// The thread of a server's user space.
struct Server {
    asked: Receiver<Asked>,
    kick: std::sync::Arc<dyn engine::Kick>,
    vm: std::sync::Arc<dyn engine::Vm>,
    /// There until it is waited for.
    thread: Option<JoinHandle<Result<()>>>,
}

impl Server {
    fn start(server: Guest) -> Self {
        let (tell, asked) = mpsc::channel();
        let (kick, vm) = (server.vcpu.kicker(), std::sync::Arc::clone(&server.vm));
        let thread = thread::spawn(move || {
            let mut server = server;
            server.vcpu.kicker().adopt_current_thread();
            loop {
                let what = match server.vcpu.run()? {
                    Exit::PortRead { port, data, .. } => {
                        data.fill(READ);
                        Asked::Port(port)
                    }
                    Exit::MmioRead { address, data } => {
                        data.fill(READ);
                        Asked::Memory(address)
                    }
                    Exit::Interrupted => return Ok(()),
                    Exit::Shutdown => Asked::Ended,
                    other => return Err(anyhow!("the server came out with {other:?}")),
                };
                let ended = what == Asked::Ended;
                tell.send(what)?;
                if ended {
                    return Ok(());
                }
            }
        });
        Self {
            asked,
            kick,
            vm,
            thread: Some(thread),
        }
    }

    fn hypercalls(&self) -> u64 {
        let exits = self.vm.counts().exits;
        let found = exits.iter().find(|(name, _)| *name == "hypercall");
        found.map_or(0, |(_, count)| *count)
    }

    fn has_asked(&self, what: &Asked) -> Result<()> {
        let asked = self
            .asked
            .recv_timeout(SOON)
            .context("the server's user space was not told")?;
        ensure!(asked == *what, "the server has asked {asked:?}, not {what:?}");
        Ok(())
    }

    /// Closes it, from under whoever is linked to it.
    fn end(&mut self) -> Result<()> {
        self.kick.kick();
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        thread.join().map_err(|_| anyhow!("the server's thread has panicked"))?
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After a failure, whose words are worth more.
        drop(self.end());
    }
}

/// How often a CPU without Linux has woken somebody. Whoever waits may see what it waits for before the interrupt comes.
fn wakes() -> Result<u64> {
    thread::sleep(PAUSE);
    let interrupts = fs::read_to_string("/proc/interrupts")?;
    let line = interrupts.lines().find(|line| line.trim_end().ends_with(" basalt"));
    let counts = line.context("the module has no interrupt")?.split_whitespace().skip(1);
    Ok(counts.map_while(|word| word.parse::<u64>().ok()).sum())
}

/// One exit a call of the guest's, one of the server's, and nothing for Linux to do.
fn calls(pair: &mut Pair) -> Result<()> {
    pair.calls(10)?;
    let (before, woken) = (pair.guest.exits(), wakes()?);
    let (served, calls) = (pair.server()?.hypercalls(), pair.window.calls()?);
    pair.calls(CALLS)?;
    let exits: Vec<_> = pair
        .guest
        .exits()
        .into_iter()
        .zip(before)
        .map(|((name, now), (_, then))| (name, now - then))
        .collect();
    let served = pair.server()?.hypercalls() - served;
    let woken = wakes()? - woken;
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("{CALLS} calls: {exits:?} of the guest, {served} of the server, {woken} wake-ups of Linux");
    }
    for (name, count) in exits {
        let wanted = match name {
            "hypercall" => CALLS,
            // What the guest says at its end.
            "port" => 1,
            _ => 0,
        };
        ensure!(count == wanted, "{count} exits by {name}, and {wanted} were to be");
    }
    ensure!(served == CALLS, "the server came out {served} times");
    ensure!(
        pair.window.calls()? - calls == CALLS,
        "the server has not counted all calls"
    );
    ensure!(
        woken == 1,
        "Linux was woken {woken} times, and once at the end was to be"
    );
    Ok(())
}

/// Against what comes out to user space and goes in again, in the same boot, by turns.
fn time(pair: &mut Pair) -> Result<()> {
    pair.calls(10)?;
    let mut ratios = Vec::new();
    for _ in 0..ROUNDS {
        let began = Instant::now();
        pair.calls(COMPARED)?;
        let called = began.elapsed();
        pair.guest.begin(code::exits(), &[(8, COMPARED)], true)?;
        let began = Instant::now();
        let said = pair.guest.said()?;
        let came_out = began.elapsed();
        ensure!(said == Said::Done, "a guest that comes out said {said:?}");
        ratios.push(called.as_secs_f64() / came_out.as_secs_f64());
    }
    ratios.sort_by(f64::total_cmp);
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("a call takes so much of an exit to user space and back, emulated: {ratios:.3?}");
    }
    // What else this machine does makes either of them slower in a round, and not in all.
    let least = ratios.first().context("no rounds")?;
    ensure!(*least < 1.0, "a call takes {least:.3} of an exit to user space");
    Ok(())
}

/// What is for the guest ends the server's run, which goes on afterwards.
fn interrupts(pair: &mut Pair) -> Result<()> {
    pair.window.order(SPIN)?;
    let vm = std::sync::Arc::clone(&pair.guest.vm);
    let sends = thread::spawn(move || {
        thread::sleep(PAUSE);
        // To the local APIC 0, vector 0x50 (PCI 3.0, 6.8.1).
        vm.send_msi(MsiMessage {
            address: 0xfee0_0000,
            data: 0x50,
        })
    });
    let status = pair.guest.enters(0, true)?;
    sends.join().map_err(|_| anyhow!("who sends has panicked"))??;
    ensure!(status == INTERRUPTED, "an interrupted guest was answered {status}");
    let count = pair.guest.interrupts()?;
    ensure!(count == 1, "the guest had {count} interrupts");
    // The server is in the midst of that still, and whoever wants the vCPU has it.
    pair.guest.begin(code::calls(), &[(8, 1)], true)?;
    let caller = later(pair.guest.vcpu.kicker(), PAUSE);
    let said = pair.guest.said()?;
    caller.join().map_err(|_| anyhow!("who calls has panicked"))?;
    pair.guest.vcpu.kicker().clear();
    ensure!(said == Said::Called, "a guest that was called said {said:?}");
    goes_on(pair)
}

/// With interrupts off nothing ends the server's run but its time.
fn late(pair: &mut Pair) -> Result<()> {
    pair.window.order(SPIN)?;
    let began = Instant::now();
    let status = pair.guest.enters(0, false)?;
    ensure!(status == LATE, "a server that takes its time was left with {status}");
    ensure!(began.elapsed() >= BUDGET, "a server had only {:?}", began.elapsed());
    goes_on(pair)
}

/// It goes on where it was: no call is lost, and none is made twice.
fn goes_on(pair: &mut Pair) -> Result<()> {
    let calls = pair.window.calls()?;
    pair.window.order(0)?;
    let status = pair.guest.enters(0, false)?;
    let made = pair.window.calls()? - calls;
    ensure!(
        (status, made) == (DONE, 0),
        "it went on with {status}, and {made} calls"
    );
    pair.calls(10)
}

/// What the server asks of its user space, which answers while the guest goes on.
fn questions(pair: &mut Pair) -> Result<()> {
    for (order, asked) in [(PORT, Asked::Port(0x77)), (OUTSIDE, Asked::Memory(0x1000_0000))] {
        pair.window.order(order)?;
        let status = pair.guest.enters(0, false)?;
        ensure!(status == BUSY, "a server that asks was left with {status}");
        pair.server()?.has_asked(&asked)?;
        pair.window.order(0)?;
        let status = pair.enters_patiently()?;
        ensure!(status == DONE, "a server that was answered was left with {status}");
        let outcome = pair.window.outcome()? & u64::from(u32::MAX);
        ensure!(
            outcome == u64::from(u32::from_ne_bytes([READ; 4])),
            "it read {outcome:#x}"
        );
    }
    pair.calls(10)
}

/// What no guest and no server may do.
fn wrong_calls(pair: &mut Pair) -> Result<()> {
    for index in [1, 3, 4, 64, 1 << 32, u64::MAX] {
        let status = pair.guest.enters(index, false)?;
        ensure!(
            status == NONE,
            "a link of number {index} that is not there was answered {status}"
        );
    }
    // A server's APIC is nobody's: the guest whose CPU it is gets none of its interrupts, nor Linux.
    let refused = pair.server()?.vm.counts().refused.unwrap_or(0);
    pair.window.order(APIC)?;
    let status = pair.guest.enters(0, true)?;
    ensure!(
        status == DONE && pair.window.outcome()? == 0,
        "a server with an APIC: {status}"
    );
    ensure!(pair.guest.interrupts()? == 0, "a server has interrupted the guest");
    let now = pair.server()?.vm.counts().refused.unwrap_or(0);
    ensure!(
        now == refused + 3,
        "{} accesses of the server's to its APIC were counted",
        now - refused
    );
    // It has no links.
    pair.window.order(NESTED)?;
    let status = pair.guest.enters(0, false)?;
    ensure!(
        status == DONE && pair.window.outcome()? == u64::from(NONE),
        "a server that enters another: {status}"
    );
    pair.window.order(0)?;
    // Its user space cannot have it do what its CPU would do.
    ensure!(
        pair.server()?
            .vm
            .send_msi(MsiMessage {
                address: 0xfee0_0000,
                data: 0x50
            })
            .is_ok(),
        "a message"
    );
    pair.calls(10)?;
    // A link that ends, and what is none.
    pair.guest.vcpu.link(0, None)?;
    ensure!(pair.guest.vcpu.link(0, None).is_err(), "a link ended twice");
    let status = pair.guest.enters(0, false)?;
    ensure!(status == NONE, "a link that has ended was answered {status}");
    let null = OwnedFd::from(fs::File::open("/dev/null")?);
    ensure!(pair.guest.vcpu.link(0, Some(null)).is_err(), "/dev/null is a server");
    ensure!(pair.guest.vcpu.link(4, None).is_err(), "there are more than four links");
    ensure!(pair.guest.refused() == 0, "{} refused", pair.guest.refused());
    Ok(())
}

/// A server that halts tells so, and does not hold the CPU.
fn halt(pair: &mut Pair) -> Result<()> {
    pair.window.order(HALT)?;
    for _ in 0..2 {
        let status = pair.guest.enters(0, false)?;
        ensure!(status == HALTED, "a server that halts was left with {status}");
    }
    Ok(())
}

/// A server that is over stays that, and its user space knows.
fn fault(pair: &mut Pair) -> Result<()> {
    pair.window.order(FAULT)?;
    for _ in 0..2 {
        let status = pair.guest.enters(0, false)?;
        ensure!(status == GONE, "a server that ends was left with {status}");
    }
    pair.server()?.has_asked(&Asked::Ended)
}

/// A server that is closed while a guest runs it.
fn end(pair: &mut Pair) -> Result<()> {
    pair.window.order(SPIN)?;
    let mut server = pair.server.take().context("no server")?;
    let ends = thread::spawn(move || {
        thread::sleep(PAUSE);
        server.end()
    });
    let began = Instant::now();
    let status = pair.guest.enters(0, false)?;
    ensure!(status == INTERRUPTED, "a server that was closed was left with {status}");
    ensure!(
        began.elapsed() < LONG / 2,
        "a server that was closed went on for {:?}",
        began.elapsed()
    );
    let end = Instant::now() + SOON;
    let mut status = pair.guest.enters(0, false)?;
    while status != GONE && Instant::now() < end {
        status = pair.guest.enters(0, false)?;
    }
    ends.join()
        .map_err(|_| anyhow!("who closes the server has panicked"))??;
    ensure!(status == GONE, "a server that was closed is answered for by {status}");
    thread::sleep(PAUSE);
    let status = pair.guest.enters(0, false)?;
    ensure!(status == GONE, "and then by {status}");
    // The copy of what it was linked by has not kept it.
    let again = pair.guest.vcpu.link(1, Some(pair.link.try_clone()?));
    ensure!(again.is_err(), "a server that was closed was linked");
    Ok(())
}

/// Two guests on CPUs of their own, in a lab that has as many: one server, which each finds as it left it, or at work for the other.
fn several(device: &Device, all: &str) -> Result<()> {
    const EACH: u64 = CALLS / 5;
    let window = Window::new()?;
    let (server, link) = serve(device, &window, BUDGET)?;
    wait_online(all)?;
    let mut server = Server::start(server);
    let mut guests = Vec::new();
    for of in 0..2_u32 {
        let mut guest = Guest::new(device, CPU + of, &window)?;
        guest.vcpu.link(0, Some(link.try_clone()?))?;
        let (place, _) = window.place(of.into())?;
        let own = 0x1111 * u64::from(of + 1);
        guest.begin(code::beside(), &[(8, EACH), (9, place), (14, own)], true)?;
        guests.push(guest);
    }
    drop(link);
    let calls = window.calls()?;
    let all_said = thread::scope(|scope| {
        let run = |mut guest: Guest| {
            guest.vcpu.kicker().adopt_current_thread();
            guest.said()
        };
        let threads: Vec<_> = guests
            .into_iter()
            .map(|guest| scope.spawn(move || run(guest)))
            .collect();
        let said = |thread: thread::ScopedJoinHandle<'_, Result<Said>>| thread.join().expect("it does not panic");
        threads.into_iter().map(said).collect::<Result<Vec<_>>>()
    })?;
    ensure!(all_said == [Said::Done, Said::Done], "two guests said {all_said:?}");
    let served = window.calls()? - calls;
    let busy = [window.place(0)?.1, window.place(1)?.1];
    #[expect(clippy::print_stdout, reason = "a case's own output")]
    {
        println!("two guests: {served} calls, and the server was at work for the other {busy:?} times");
    }
    ensure!(served == 2 * EACH, "the server has counted {served} calls");
    ensure!(busy.iter().sum::<u64>() > 0, "they were never there at the same time");
    server.end()?;
    wait_online(all)
}
