//! How the time of one device is divided between two tenants: each a server with a client that always has kernels, or now and then one.
//!
//! `cargo bench -p basalt-accel-server --bench sharing -- [simulated | LIBRARY] [SECONDS]`. The device is a simulated one, which does one
//! kernel at a time and takes as long as is said, or that of an OpenCL library, such as libOpenCL.so.1. All servers, clients and the
//! arbiter are threads of this process; between servers and the arbiter are real sockets and pages.
#![expect(clippy::print_stdout, reason = "what this program is for")]

#[path = "sharing/client.rs"]
mod client;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accel_arbiter::{Arbiter, Priority, Share};
use accel_server::{Backend, Server, TenantLimits};

use client::{Client, settings};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// How a client uses the device: a kernel of so many microseconds, again and again.
#[derive(Clone, Copy)]
struct Load {
    weight: u32,
    microseconds: u64,
    /// Between the end of one kernel and the next; none to put them into the queue without waiting.
    thinks: Option<Duration>,
}

/// What came of it.
struct Outcome {
    used: Duration,
    latencies: Vec<Duration>,
}

impl Outcome {
    fn percentile(&self, of: usize) -> Duration {
        let mut sorted = self.latencies.clone();
        sorted.sort_unstable();
        let index = (sorted.len() * of / 100).min(sorted.len().saturating_sub(1));
        sorted.get(index).copied().unwrap_or_default()
    }
}

/// What devices there are.
struct Setup {
    library: Option<PathBuf>,
    length: Duration,
    /// The size of a kernel that takes a millisecond.
    size: u64,
}

impl Setup {
    fn backend(&self) -> Result<Backend> {
        Ok(match &self.library {
            Some(library) => Backend::opencl(library)?,
            None => Backend::simulated(),
        })
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let library = arguments.first().filter(|name| *name != "simulated").map(PathBuf::from);
    let seconds = arguments.get(1).map_or(Ok(10), |seconds| seconds.parse())?;
    let mut setup = Setup {
        library,
        length: Duration::from_secs(seconds),
        size: 1000,
    };
    setup.size = calibrate(&setup)?;
    println!("on {}, {seconds} s for each line", setup.backend()?.name());
    let steady = |weight, microseconds| Load {
        weight,
        microseconds,
        thinks: None,
    };
    for (first, second) in [
        (steady(1, 1000), steady(1, 1000)),
        (steady(1, 1000), steady(3, 1000)),
        (steady(1, 5000), steady(3, 500)),
        (steady(3, 5000), steady(1, 500)),
    ] {
        shares(&setup, first, second)?;
    }
    latency(&setup)?;
    if setup.library.is_some() {
        buffers(&setup)?;
    }
    cost()
}

/// What new memory costs, which is made of zeroes.
fn buffers(setup: &Setup) -> Result<()> {
    let server = Arc::new(Server::new(setup.backend()?, settings()));
    let mut client = Client::connect(&server, true)?;
    let mut generation = 0;
    for size in [4 << 10, 1 << 20, 64 << 20] {
        let mut least = Duration::MAX;
        for _ in 0..40 {
            generation += 1;
            least = least.min(client.buffer(size, generation)?);
        }
        println!("a new buffer of {size} bytes: {least:?}");
    }
    Ok(())
}

/// What knowing the time of a launch costs when nobody shares the device, by a back end that does nothing.
fn cost() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let arbiter = Arbiter::start()?;
    let path = directory.path().join("alone");
    arbiter.admit("alone", Share::default(), &path)?;
    let measured = TenantLimits {
        measures_time: true,
        ..TenantLimits::default()
    };
    let shared = TenantLimits {
        arbiter: Some(path),
        ..TenantLimits::default()
    };
    let mut plain = None;
    for (what, limits) in [
        ("not measured", TenantLimits::default()),
        ("measured", measured),
        ("with an arbiter", shared),
    ] {
        let took = launch_time(&limits)?;
        let more = took.saturating_sub(*plain.get_or_insert(took));
        let target = Duration::from_micros(1);
        println!(
            "a launch, {what}: {took:?}, {more:?} more (target: 1 us)  {}",
            verdict(more <= target)
        );
    }
    Ok(())
}

/// The least disturbed of many rounds.
fn launch_time(limits: &TenantLimits) -> Result<Duration> {
    const LAUNCHES: u32 = 200;
    let server = Arc::new(Server::with_limits(Backend::null(), settings(), limits)?);
    if limits.arbiter.is_some() {
        while !server.stats().time.is_some_and(|time| time.is_shared) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let mut client = Client::connect(&server, false)?;
    let mut least = Duration::MAX;
    for _ in 0..500 {
        let begun = Instant::now();
        for _ in 1..LAUNCHES {
            client.launch(1, false)?;
        }
        client.launch(1, true)?;
        least = least.min(begun.elapsed() / LAUNCHES);
    }
    Ok(least)
}

/// Two that always have work.
fn shares(setup: &Setup, first: Load, second: Load) -> Result<()> {
    let outcomes = run(setup, &[first, second])?;
    let all: Duration = outcomes.iter().map(|outcome| outcome.used).sum();
    let weights = f64::from(first.weight + second.weight);
    let expected = f64::from(first.weight) / weights;
    let got = outcomes[0].used.as_secs_f64() / all.as_secs_f64();
    let off = (got / expected - 1.0).abs() * 100.0;
    println!(
        "shares {}:{}, kernels of {} and {} us: device time {:.3} and {:.3} s, the first has {:.1} % of {:.1} %, off by {off:.1} % \
         (target: 5 %)  {}",
        first.weight,
        second.weight,
        first.microseconds,
        second.microseconds,
        outcomes[0].used.as_secs_f64(),
        outcomes[1].used.as_secs_f64(),
        got * 100.0,
        expected * 100.0,
        verdict(off <= 5.0)
    );
    println!(
        "    the device was used for {:.1} % of the time",
        all.as_secs_f64() / setup.length.as_secs_f64() * 100.0
    );
    Ok(())
}

/// One with little work, alone and beside one that always has some.
fn latency(setup: &Setup) -> Result<()> {
    let small = Load {
        weight: 1,
        microseconds: 1000,
        thinks: Some(Duration::from_millis(9)),
    };
    let neighbour = Load {
        weight: 1,
        microseconds: 3000,
        thinks: None,
    };
    let alone = run(setup, &[small])?;
    let beside = run(setup, &[small, neighbour])?;
    let target = 2 * alone[0].percentile(99) + Duration::from_micros(neighbour.microseconds);
    let high = beside[0].percentile(99);
    println!(
        "a kernel of {} us each 10 ms: alone P50 {:?}, P99 {:?}; beside kernels of {} us P50 {:?}, P99 {high:?} (target: 2 x alone + one of \
         the neighbour's, {target:?})  {}",
        small.microseconds,
        alone[0].percentile(50),
        alone[0].percentile(99),
        neighbour.microseconds,
        beside[0].percentile(50),
        verdict(high <= target)
    );
    let left = beside[1].used.as_secs_f64() / setup.length.as_secs_f64();
    println!(
        "    the neighbour had {:.1} % of the time (90 % are left)",
        left * 100.0
    );
    Ok(())
}

fn verdict(is_met: bool) -> &'static str {
    if is_met { "met" } else { "NOT MET" }
}

/// How large a kernel of a millisecond is.
fn calibrate(setup: &Setup) -> Result<u64> {
    if setup.library.is_none() {
        return Ok(1000);
    }
    let limits = TenantLimits {
        measures_time: true,
        ..TenantLimits::default()
    };
    let server = Arc::new(Server::with_limits(setup.backend()?, settings(), &limits)?);
    let mut client = Client::connect(&server, true)?;
    const SIZE: u64 = 1 << 16;
    client.launch(SIZE, true)?;
    let before = time_of(&server);
    for _ in 0..50 {
        client.launch(SIZE, true)?;
    }
    let took = time_of(&server).saturating_sub(before).as_nanos() / 50;
    Ok(u64::try_from(u128::from(SIZE) * 1_000_000 / took.max(1))?.max(1000))
}

fn time_of(server: &Server) -> Duration {
    Duration::from_nanos(server.stats().time.map_or(0, |time| time.used))
}

/// Runs loads beside each other, each with a server of its own.
fn run(setup: &Setup, loads: &[Load]) -> Result<Vec<Outcome>> {
    let directory = tempfile::tempdir()?;
    let arbiter = Arbiter::start()?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut running = Vec::new();
        for (index, load) in loads.iter().enumerate() {
            let path = directory.path().join(index.to_string());
            let share = Share {
                weight: load.weight,
                priority: Priority::High,
            };
            arbiter.admit(&index.to_string(), share, &path)?;
            let over = &over;
            running.push(scope.spawn(move || tenant(setup, *load, &path, over)));
        }
        std::thread::sleep(setup.length + WARM_UP);
        over.store(true, Ordering::SeqCst);
        running
            .into_iter()
            .map(|one| one.join().map_err(|_| "a tenant panicked")?)
            .collect()
    })
}

/// Until everybody is connected and has work.
const WARM_UP: Duration = Duration::from_secs(1);

fn tenant(setup: &Setup, load: Load, arbiter: &Path, over: &AtomicBool) -> Result<Outcome> {
    let limits = TenantLimits {
        arbiter: Some(arbiter.to_owned()),
        ..TenantLimits::default()
    };
    let begun = Instant::now();
    let server = Arc::new(Server::with_limits(setup.backend()?, settings(), &limits)?);
    let mut client = Client::connect(&server, setup.library.is_some())?;
    let size = load.microseconds * setup.size / 1000;
    let (mut latencies, mut before) = (Vec::new(), None);
    while !over.load(Ordering::SeqCst) {
        let counts = begun.elapsed() >= WARM_UP;
        if counts && before.is_none() {
            before = Some(time_of(&server));
        }
        let wanted = Instant::now();
        client.launch(size, load.thinks.is_some())?;
        if counts {
            latencies.push(wanted.elapsed());
        }
        if let Some(thinks) = load.thinks {
            std::thread::sleep(thinks);
        }
    }
    let used = time_of(&server).saturating_sub(before.unwrap_or_default());
    Ok(Outcome { used, latencies })
}
