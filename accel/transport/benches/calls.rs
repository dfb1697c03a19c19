//! What a call that does nothing costs between two processes, by each way there is, and what a record without an answer costs.
//!
//! `cargo bench -p basalt-accel-transport --bench calls -- [ROUNDS [CALLS [RECORDS]]]`. All ways in turn in each round, so that what disturbs the
//! machine disturbs all; of each way the least disturbed round and the median of rounds are shown. Rounds are short, so that on a
//! machine that does other things some are not disturbed. Each call is timed by itself, which
//! costs one look at the clock (shown); the mean is of calls that are not. The server is this program again, with its end of a socket
//! as standard input. It does what a real one does but for the call's work: it takes, looks at a word, answers.
#![expect(clippy::print_stdout, reason = "what this program is for")]

use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use accel_transport::{ClientConnection, ClientEnd, Offer, Settings, Transport, accept, connect};
use rustix::thread::{CpuSet, sched_setaffinity};
use wire::packet::PacketSocket;
use wire::ring::Record;

/// What the server is told by, before the records of a ring and the CPU that it is to stay on, or none.
const SERVE: &str = "--serve";

/// The longest that anything may take on a machine that does other things.
const MOST: Duration = Duration::from_secs(10);

/// Records without an answer in a round, as a multiple of calls.
const RECORDS: u32 = 4;

/// In the first word of a record that has no answer.
const NO_ANSWER: u64 = 1;

/// One way, with its server.
struct Measured {
    name: &'static str,
    client: ClientConnection,
    server: Child,
    rounds: Vec<Round>,
}

/// What a round found, in nanoseconds.
struct Round {
    median: u64,
    p99: u64,
    mean: f64,
    record: f64,
    record_taken: f64,
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    if let [serve, records, cpu] = arguments.as_slice()
        && serve == SERVE
    {
        return run_server(records.parse()?, cpu.parse().ok());
    }
    let mut numbers = arguments.iter().map(|argument| argument.parse::<u32>());
    let rounds = numbers.next().transpose()?.unwrap_or(200);
    let calls = numbers.next().transpose()?.unwrap_or(500);
    let records = numbers.next().transpose()?.unwrap_or(256);
    measure(rounds.max(1), calls.max(100), records)
}

fn measure(rounds: u32, calls: u32, records: u32) -> Result<()> {
    stay_on(0)?;
    let far = Some(1).filter(|_| affinity_allows(1));
    println!(
        "client on CPU 0, server on CPU {}; rings of {records} records",
        far.unwrap_or(0)
    );
    let begin = |name, transport, cpu| begin(name, transport, cpu, records);
    let mut all = vec![
        begin("spin", Transport::Spin, far)?,
        begin("bell", Transport::Bell, far)?,
        begin("same-cpu", Transport::SameCpu, None)?,
        begin("stream", Transport::Stream, far)?,
        begin("stream, one CPU", Transport::Stream, Some(0))?,
        begin("synchronous", Transport::Synchronous, far)?,
        begin("synchronous, one CPU", Transport::Synchronous, Some(0))?,
    ];
    for _ in 0..rounds {
        for measured in &mut all {
            // Wake-ups from CPU to CPU take fifty times as long, and need no more of them.
            let calls = if measured.client.transport.has_rings() {
                calls
            } else {
                calls / 10
            };
            let round = round(&mut measured.client.ends[0], calls)?;
            measured.rounds.push(round);
        }
    }
    println!("{rounds} rounds; ns; clock {:.0}", clock());
    println!(
        "                        least disturbed round            median of rounds     record without an answer (best)"
    );
    println!("way                     median      p99     mean         median      p99         put    put and taken");
    for measured in &mut all {
        show(measured);
    }
    for mut measured in all {
        println!("{:22} {:?}", measured.name, measured.client.ends[0].counters());
        drop(measured.client);
        measured.server.wait()?;
    }
    Ok(())
}

fn show(measured: &mut Measured) {
    let rounds = &mut measured.rounds;
    rounds.sort_by_key(|round| round.median);
    let (best, middle) = (&rounds[0], &rounds[rounds.len() / 2]);
    let least = |of: fn(&Round) -> f64| rounds.iter().map(of).fold(f64::INFINITY, f64::min);
    println!(
        "{:22} {:7} {:8} {:8.0}        {:7} {:8}    {:8.0} {:8.0}",
        measured.name,
        best.median,
        best.p99,
        least(|round| round.mean),
        middle.median,
        middle.p99,
        least(|round| round.record),
        least(|round| round.record_taken)
    );
}

fn round(end: &mut ClientEnd, calls: u32) -> Result<Round> {
    let call = Record::default();
    for _ in 0..20 {
        end.call(&call, MOST)?;
    }
    let mut times = Vec::with_capacity(calls as usize);
    for _ in 0..calls {
        let begun = Instant::now();
        end.call(&call, MOST)?;
        times.push(u64::try_from(begun.elapsed().as_nanos())?);
    }
    times.sort_unstable();
    let begun = Instant::now();
    for _ in 0..calls {
        end.call(&call, MOST)?;
    }
    let mean = per(begun.elapsed(), calls);
    let record = Record::from_words([NO_ANSWER; 8]);
    let records = calls * RECORDS;
    let begun = Instant::now();
    for _ in 0..records {
        end.send(&record, MOST)?;
    }
    let put = begun.elapsed();
    end.call(&call, MOST)?;
    Ok(Round {
        median: times[times.len() / 2],
        p99: times[times.len() * 99 / 100],
        mean,
        record: per(put, records),
        record_taken: per(begun.elapsed(), records),
    })
}

fn per(time: Duration, count: u32) -> f64 {
    time.as_secs_f64() * 1e9 / f64::from(count)
}

/// What a look at the clock costs.
fn clock() -> f64 {
    let begun = Instant::now();
    for _ in 0..100_000 {
        std::hint::black_box(Instant::now());
    }
    per(begun.elapsed(), 100_000)
}

fn begin(name: &'static str, transport: Transport, cpu: Option<usize>, records: u32) -> Result<Measured> {
    let (near, far) = PacketSocket::pair()?;
    let cpu = cpu.map_or_else(|| "anywhere".to_owned(), |cpu| cpu.to_string());
    let server = Command::new(std::env::current_exe()?)
        .args([SERVE, &records.to_string(), &cpu])
        .stdin(Stdio::from(OwnedFd::from(far)))
        .spawn()?;
    let offer = Offer {
        transports: vec![transport],
        pairs: 1,
        patience: MOST,
    };
    let client = connect(near, &offer)?;
    Ok(Measured {
        name,
        client,
        server,
        rounds: Vec::new(),
    })
}

fn run_server(records: u32, cpu: Option<usize>) -> Result<()> {
    match cpu {
        Some(cpu) => stay_on(cpu)?,
        None => everywhere()?,
    }
    let socket = PacketSocket::from_fd(std::io::stdin().as_fd().try_clone_to_owned()?);
    let settings = Settings {
        transports: Transport::ALL.to_vec(),
        pairs: 1,
        records,
        arena: 1 << 20,
        patience: MOST,
        busy_poll: None,
    };
    let mut connection = accept(socket, &settings)?;
    let mut end = connection.ends.remove(0);
    loop {
        let request = match end.receive(None) {
            Ok(request) => request,
            Err(accel_transport::Error::PeerGone) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let answer = (request.words()[0] != NO_ANSWER).then_some(request);
        end.finish(&request, answer.as_ref(), MOST)?;
    }
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

fn stay_on(cpu: usize) -> Result<()> {
    Ok(sched_setaffinity(None, &only(cpu))?)
}

fn everywhere() -> Result<()> {
    let mut set = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// Whether there is such a CPU, and this may run there.
fn affinity_allows(cpu: usize) -> bool {
    let allowed = stay_on(cpu).is_ok();
    allowed && stay_on(0).is_ok()
}
