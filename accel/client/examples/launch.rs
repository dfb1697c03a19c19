//! A program that launches an empty kernel many times and waits for each, and prints what the driver's own stamps say of it: how long until
//! the driver has handed a launch on to its device, how long until that began, and how long all took; in nanoseconds, the medians, and within how long a tenth was.
//!
//! ```sh
//! cargo run --release -p basalt-accel-client --example launch -- 20000
//! ```
//!
//! Knows nothing of the library; `cargo xtask accel-clients --figures` runs it on both sides.
#![allow(
    unsafe_code,
    clippy::print_stdout,
    reason = "a program that calls C, and tells what came of it"
)]

mod loader;

use std::ffi::CStr;
use std::ptr;
use std::time::Instant;

use loader::{Loader, Ptr, build, check, cl, first_queue};

const SOURCE: &CStr = c"kernel void nothing(void) {}";

/// `CL_QUEUE_PROFILING_ENABLE`.
const PROFILING: u64 = 2;
/// `CL_PROFILING_COMMAND_QUEUED`, `_SUBMIT` and `_START`.
const STAMPS: [u32; 3] = [0x1280, 0x1281, 0x1282];
/// Launches before those that count.
const FIRST: usize = 100;

type Launch = extern "C" fn(Ptr, Ptr, u32, *const usize, *const usize, *const usize, u32, *const Ptr, *mut Ptr) -> i32;

fn main() {
    let launches = std::env::args()
        .nth(1)
        .map_or(20_000, |launches| launches.parse().expect("a number of launches"));
    let cl = Loader::open();
    let (context, queue) = first_queue(&cl, PROFILING);
    let kernel = build(&cl, context, SOURCE, c"nothing");
    // SAFETY: the API's function of this name has this type.
    let launch = unsafe { std::mem::transmute::<Ptr, Launch>(cl.find("clEnqueueNDRangeKernel")) };
    let finish = cl!(&cl, clFinish(Ptr) -> i32);
    let stamp = cl!(
        &cl,
        clGetEventProfilingInfo(Ptr, u32, usize, *mut u64, *mut usize) -> i32
    );
    let release = cl!(&cl, clReleaseEvent(Ptr) -> i32);
    let mut took = [const { Vec::new() }; 3];
    for round in 0..FIRST + launches {
        let (begun, mut event, size) = (Instant::now(), ptr::null(), 1);
        let (none, no_events) = (ptr::null(), ptr::null());
        let code = launch(
            queue,
            kernel,
            1,
            none,
            &raw const size,
            none,
            0,
            no_events,
            &raw mut event,
        );
        check("clEnqueueNDRangeKernel", code);
        check("clFinish", finish(queue));
        let all = begun.elapsed().as_nanos();
        let [queued, handed_on, began] = STAMPS.map(|which| {
            let mut at = 0;
            check(
                "clGetEventProfilingInfo",
                stamp(event, which, 8, &raw mut at, ptr::null_mut()),
            );
            at
        });
        check("clReleaseEvent", release(event));
        if round < FIRST {
            continue;
        }
        let spans = [
            handed_on - queued,
            began - handed_on,
            u64::try_from(all).unwrap_or(u64::MAX),
        ];
        for (took, span) in took.iter_mut().zip(spans) {
            took.push(span);
        }
    }
    for (name, mut took) in ["handed on", "begun", "waited for"].into_iter().zip(took) {
        took.sort_unstable();
        println!("{name} : {}", took[took.len() / 2]);
        println!("{name}, a tenth within : {}", took[took.len() / 10]);
    }
}
