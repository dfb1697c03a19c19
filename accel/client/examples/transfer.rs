//! A program that moves 64 MB to a device's buffer and back, many times, and prints how long each took. The other memory is ordinary, or
//! mapped memory of a buffer that was made with `CL_MEM_ALLOC_HOST_PTR`, which forwarded programs have in the arena.
//!
//! ```sh
//! cargo run --release -p basalt-accel-client --example transfer -- 20
//! ```
//!
//! Knows nothing of the library; `cargo xtask accel-clients --figures` runs it on both sides.
#![allow(
    unsafe_code,
    clippy::print_stdout,
    reason = "a program that calls C, and tells what came of it"
)]

mod loader;

use std::ptr;
use std::time::Instant;

use loader::{Loader, Ptr, check, cl, first_queue};

/// Bytes of each transfer.
const SIZE: usize = 64 << 20;

/// `CL_MEM_READ_WRITE`, `CL_MEM_ALLOC_HOST_PTR`.
const READ_WRITE: u64 = 1 << 0;
const ALLOC_HOST_PTR: u64 = 1 << 4;
/// `CL_MAP_READ | CL_MAP_WRITE`.
const MAP: u64 = 3;

type Transfer = extern "C" fn(Ptr, Ptr, u32, usize, usize, *mut u8, u32, *const Ptr, *mut Ptr) -> i32;
type Map = extern "C" fn(Ptr, Ptr, u32, u64, usize, usize, u32, *const Ptr, *mut Ptr, *mut i32) -> *mut u8;

/// What is moved, and by what.
struct Device<'a> {
    loader: &'a Loader,
    queue: Ptr,
    buffer: Ptr,
}

impl Device<'_> {
    /// Moves it all by a call that is waited for; how many seconds that took.
    fn transfer(&self, call: &str, memory: *mut u8) -> f64 {
        // SAFETY: both of the API's functions that are named here have this type.
        let function = unsafe { std::mem::transmute::<Ptr, Transfer>(self.loader.find(call)) };
        let begun = Instant::now();
        let code = function(
            self.queue,
            self.buffer,
            1,
            0,
            SIZE,
            memory,
            0,
            ptr::null(),
            ptr::null_mut(),
        );
        check(call, code);
        begun.elapsed().as_secs_f64()
    }

    /// There and back: the bytes have to be the same.
    fn is_right(&self, memory: &mut [u8]) -> bool {
        let byte = |index: usize| u8::try_from(index % 251).unwrap_or_default();
        memory.iter_mut().enumerate().for_each(|(index, it)| *it = byte(index));
        self.transfer("clEnqueueWriteBuffer", memory.as_mut_ptr());
        memory.fill(0);
        self.transfer("clEnqueueReadBuffer", memory.as_mut_ptr());
        memory.iter().enumerate().all(|(index, it)| *it == byte(index))
    }
}

fn main() {
    let rounds = std::env::args()
        .nth(1)
        .map_or(20, |rounds| rounds.parse().expect("a number of rounds"));
    let cl = Loader::open();
    let (context, queue) = first_queue(&cl, 0);
    let mut code = 0;
    let create = cl!(&cl, clCreateBuffer(Ptr, u64, usize, *mut u8, *mut i32) -> Ptr);
    let buffer = create(context, READ_WRITE, SIZE, ptr::null_mut(), &raw mut code);
    check("clCreateBuffer", code);
    let host = create(
        context,
        READ_WRITE | ALLOC_HOST_PTR,
        SIZE,
        ptr::null_mut(),
        &raw mut code,
    );
    check("clCreateBuffer", code);
    // SAFETY: the API's function of this name has this type.
    let map = unsafe { std::mem::transmute::<Ptr, Map>(cl.find("clEnqueueMapBuffer")) };
    let mapped = map(
        queue,
        host,
        1,
        MAP,
        0,
        SIZE,
        0,
        ptr::null(),
        ptr::null_mut(),
        &raw mut code,
    );
    check("clEnqueueMapBuffer", code);
    // SAFETY: the map was waited for, has this many bytes, and lasts to the program's end.
    let mapped = unsafe { std::slice::from_raw_parts_mut(mapped, SIZE) };
    let mut ordinary = vec![0; SIZE];
    let device = Device {
        loader: &cl,
        queue,
        buffer,
    };
    for (kind, memory) in [("ordinary", ordinary.as_mut_slice()), ("mapped", mapped)] {
        assert!(
            device.is_right(memory),
            "what came back by {kind} memory is not what was written"
        );
        for _ in 0..rounds {
            for (way, call) in [("write", "clEnqueueWriteBuffer"), ("read", "clEnqueueReadBuffer")] {
                println!("{way} {kind} : {:.9}", device.transfer(call, memory.as_mut_ptr()));
            }
        }
    }
}
