//! What calls cost when the back end does nothing: what the server adds to the way of a record (`accel/transport`'s own measurement).
//!
//! `cargo bench -p basalt-accel-server --bench calls -- [ROUNDS [CALLS]]`. Client and server are two threads of this process, on CPUs 0 and 1
//! where there are two; of each way the least disturbed round and the median of rounds are shown.
#![expect(clippy::print_stdout, reason = "what this program is for")]

use std::error::Error;
use std::time::{Duration, Instant};

use accel_proto::opencl::{
    CreateCommandQueue, CreateContext, CreateKernel, CreateProgramWithSource, EnqueueNDRangeKernel, Finish,
    GetDeviceIDs, GetPlatformIDs,
};
use accel_proto::{Call, Callback, Handle, List, Pieces, Record, Span};
use accel_server::{Backend, Server};
use accel_transport::{ClientEnd, Offer, Settings, Transport, connect};
use rustix::thread::{CpuSet, sched_setaffinity};
use wire::packet::PacketSocket;

const MOST: Duration = Duration::from_secs(10);
const NOWHERE: Span = Span { offset: 0, length: 0 };

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let numbers = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let numbers: Vec<u32> = numbers
        .map(|number| number.parse())
        .collect::<std::result::Result<_, _>>()?;
    let rounds = numbers.first().copied().unwrap_or(200).max(1);
    let calls = numbers.get(1).copied().unwrap_or(500).max(100);
    println!("nanoseconds: the least disturbed of {rounds} rounds of {calls} calls, and the median of rounds");
    for transport in [Transport::Spin, Transport::Bell, Transport::SameCpu] {
        let (mut waited, mut sent) = (Vec::new(), Vec::new());
        measure(transport, rounds, calls, (&mut waited, &mut sent))?;
        let of = |values: &mut Vec<f64>| {
            values.sort_by(f64::total_cmp);
            (values[0], values[values.len() / 2])
        };
        let ((least, median), (least_sent, median_sent)) = (of(&mut waited), of(&mut sent));
        println!(
            "{transport:>9}: clFinish {least:>7.0} {median:>7.0}   clEnqueueNDRangeKernel, taken by the server {least_sent:>5.0} \
             {median_sent:>5.0}"
        );
    }
    Ok(())
}

/// Keeps this thread, and those that it starts, on a CPU if it may be there.
fn stay_on(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // One CPU is all that some machines have; figures show it.
    _ = sched_setaffinity(None, &set);
}

fn measure(
    transport: Transport,
    rounds: u32,
    calls: u32,
    (waited, sent): (&mut Vec<f64>, &mut Vec<f64>),
) -> Result<()> {
    let settings = Settings {
        transports: vec![transport],
        pairs: 1,
        records: 256,
        arena: 1 << 20,
        patience: MOST,
        busy_poll: None,
    };
    let (near, far) = PacketSocket::pair()?;
    let serving = std::thread::spawn(move || {
        stay_on(1);
        Server::new(Backend::null(), settings).serve_client(far)
    });
    stay_on(0);
    let offer = Offer {
        transports: vec![transport],
        pairs: 1,
        patience: MOST,
    };
    let mut client = connect(near, &offer)?;
    let mut end = client.ends.pop().ok_or("no end")?;
    let (queue, kernel) = set_up(&mut end)?;
    let finish = record(&Finish { command_queue: queue }, true)?;
    let sizes = [1024_u64];
    let launch = EnqueueNDRangeKernel {
        command_queue: queue,
        kernel,
        work_dim: 1,
        global_work_offset: None,
        global_work_size: Some(List::new(&sizes)),
        local_work_size: None,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    };
    let launch = record(&launch, false)?;
    for _ in 0..rounds {
        let begin = Instant::now();
        for _ in 0..calls {
            end.call(&finish, MOST)?;
        }
        waited.push(begin.elapsed().as_nanos() as f64 / f64::from(calls));
        let begin = Instant::now();
        for _ in 0..calls {
            end.send(&launch, MOST)?;
        }
        end.call(&finish, MOST)?;
        sent.push(begin.elapsed().as_nanos() as f64 / f64::from(calls));
    }
    drop((end, client));
    serving.join().map_err(|_| "the server panicked")??;
    Ok(())
}

fn record<'a, C: Call<'a>>(call: &C, waits: bool) -> Result<wire::ring::Record> {
    Ok(wire::ring::Record::from_bytes(Record::call(call, 0, waits)?.as_bytes()))
}

/// A call that has to succeed.
fn done<'a, C: Call<'a>>(end: &mut ClientEnd, call: &C) -> Result<()> {
    let answer = end.call(&record(call, true)?, MOST)?.to_bytes();
    match answer.get(16..20) {
        Some([0, 0, 0, 0]) => Ok(()),
        _ => Err(format!("call {:#x} failed", C::OP).into()),
    }
}

fn set_up(
    end: &mut ClientEnd,
) -> Result<(
    Handle<accel_proto::opencl::CommandQueue>,
    Handle<accel_proto::opencl::Kernel>,
)> {
    let told = |index| Handle::new(index, 1).ok_or("a name");
    let (platform, device) = (
        Handle::new(Handle::<()>::FIRST_TOLD, 1),
        Handle::new(Handle::<()>::FIRST_TOLD, 1),
    );
    done(
        end,
        &GetPlatformIDs {
            num_entries: 1,
            platforms: true,
            num_platforms: false,
            reply: NOWHERE,
        },
    )?;
    done(
        end,
        &GetDeviceIDs {
            platform: platform.ok_or("a name")?,
            device_type: u64::MAX,
            num_entries: 1,
            devices: true,
            num_devices: false,
            reply: NOWHERE,
        },
    )?;
    let device = device.ok_or("a name")?;
    let context = Handle::new(0, 1).ok_or("a name")?;
    done(
        end,
        &CreateContext {
            properties: None,
            num_devices: 1,
            devices: Some(List::new(&[device])),
            pfn_notify: Callback(0),
            returned: context,
        },
    )?;
    let queue = Handle::new(0, 1).ok_or("a name")?;
    done(
        end,
        &CreateCommandQueue {
            context,
            device,
            properties: 0,
            returned: queue,
        },
    )?;
    let program = told(0)?;
    done(
        end,
        &CreateProgramWithSource {
            context,
            count: 0,
            strings: Pieces {
                lengths: List::new(&[]),
                data: NOWHERE,
            },
            returned: program,
        },
    )?;
    let kernel = Handle::new(0, 1).ok_or("a name")?;
    done(
        end,
        &CreateKernel {
            program,
            kernel_name: None,
            returned: kernel,
        },
    )?;
    Ok((queue, kernel))
}
