//! Checks that measure the process they run in: its log, and the time of its threads. Each wants a test binary to itself.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use log::{LevelFilter, Log, Metadata, Record};

use super::Failure;
use super::driver::Driver;

struct Count(AtomicU32);

impl Log for Count {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, _: &Record<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn flush(&self) {}
}

static LINES: Count = Count(AtomicU32::new(0));

/// What a guest can make the device say: a few lines a second, however often it breaks ring `queue` and resets the
/// device.
///
/// # Errors
/// There were more lines, or none at all, or the process has a log already.
pub fn broken_rings_fill_no_log(driver: &mut Driver, queue: u16) -> Result<(), Failure> {
    let failure = |what: String| Failure {
        check: "broken rings fill no log".to_owned(),
        what,
    };
    log::set_logger(&LINES).map_err(|error| failure(error.to_string()))?;
    log::set_max_level(LevelFilter::Warn);
    let began = Instant::now();
    for round in 0..100 {
        driver.start();
        driver.jump(queue, 0x7000);
        driver.kick(queue);
        if round == 0 {
            // On a busy machine its thread may see no other round.
            driver.wait_until(|_| LINES.0.load(Ordering::SeqCst) > 0);
        }
        std::thread::sleep(Duration::from_millis(3));
        driver.reset();
    }
    let most = 3 * (began.elapsed().as_secs() + 2);
    let lines = u64::from(LINES.0.load(Ordering::SeqCst));
    if (1..=most).contains(&lines) {
        Ok(())
    } else {
        Err(failure(format!("it said {lines} lines instead of 1 to {most}")))
    }
}

/// The device's threads, all called `thread`, use no processor time; `what` says what they wait for. A thread that spins
/// runs, or waits for a processor, in every window; one that was late with its work on a busy machine does not.
///
/// # Errors
/// They do, or there is none.
pub fn rests(thread: &str, what: &str) -> Result<(), Failure> {
    let failure = |what: String| Failure {
        check: "waiting is free".to_owned(),
        what,
    };
    let look = || threads_called(thread).map_err(|error| failure(error.to_string()));
    let mut used = Duration::ZERO;
    let mut runnable = false;
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(30));
        let before = look()?;
        if before.ran == Duration::ZERO {
            return Err(failure(format!("no thread called {thread} has run")));
        }
        std::thread::sleep(Duration::from_millis(200));
        let after = look()?;
        used = after.ran.saturating_sub(before.ran);
        // One that wants to run and got no processor has not used any, and does not rest either.
        runnable = before.runnable && after.runnable;
        if used < Duration::from_millis(10) && !runnable {
            return Ok(());
        }
    }
    let wants = if runnable { " and wants to run on" } else { "" };
    Err(failure(format!("{what}: the thread ran for {used:?}{wants}")))
}

/// What proc(5) says of the threads of one name.
struct Threads {
    /// How long they have run (`schedstat`).
    ran: Duration,
    /// One of them runs or waits for a processor (state `R` in `stat`).
    runnable: bool,
}

/// This process's threads of that name.
fn threads_called(name: &str) -> std::io::Result<Threads> {
    let mut threads = Threads {
        ran: Duration::ZERO,
        runnable: false,
    };
    for task in fs::read_dir("/proc/self/task")? {
        let path = task?.path();
        if fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim() == name) {
            let times = fs::read_to_string(path.join("schedstat"))?;
            let ran = times.split(' ').next().and_then(|time| time.parse().ok());
            threads.ran += Duration::from_nanos(ran.unwrap_or(0));
            let stat = fs::read_to_string(path.join("stat"))?;
            threads.runnable |= stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('R'));
        }
    }
    Ok(threads)
}
