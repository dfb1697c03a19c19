//! A program that uses OpenCL as any does, by the loader: builds a kernel from source, runs it, and compares what comes back. It tells how
//! long launches take. The same program runs on any platform that the loader finds:
//!
//! ```sh
//! cargo run --release -p basalt-accel-client --example saxpy
//! OCL_ICD_VENDORS=/tmp/vendors BASALT_ACCEL_SOCKET=/run/basalt/accel.sock cargo run --release -p basalt-accel-client --example saxpy
//! ```
//!
//! Knows nothing of the library: it finds the loader's functions by name.
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

const SOURCE: &CStr = c"kernel void saxpy(global float *y, global const float *x, float a) {
    size_t i = get_global_id(0);
    y[i] += a * x[i];
}";

/// Numbers in each buffer.
const COUNT: usize = 1 << 20;

/// Launches that are measured.
const LAUNCHES: u32 = 2000;

/// A context, a queue, and a kernel.
fn prepare(cl: &Loader) -> (Ptr, Ptr, Ptr) {
    let (context, queue) = first_queue(cl, 0);
    let kernel = build(cl, context, SOURCE, c"saxpy");
    (context, queue, kernel)
}

type Transfer = extern "C" fn(Ptr, Ptr, u32, usize, usize, *mut f32, u32, *const Ptr, *mut Ptr) -> i32;
type Launch = extern "C" fn(Ptr, Ptr, u32, *const usize, *const usize, *const usize, u32, *const Ptr, *mut Ptr) -> i32;

fn main() {
    let cl = Loader::open();
    let (context, queue, kernel) = prepare(&cl);
    let mut x: Vec<f32> = (0..COUNT).map(|index| (index % 1000) as f32).collect();
    let mut y = vec![1_f32; COUNT];
    let (size, mut code) = (size_of_val(x.as_slice()), 0);
    let create = cl!(cl, clCreateBuffer(Ptr, u64, usize, *mut f32, *mut i32) -> Ptr);
    // CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR, and CL_MEM_READ_WRITE.
    let in_x = create(context, 4 | 32, size, x.as_mut_ptr(), &raw mut code);
    check("clCreateBuffer", code);
    let in_y = create(context, 1, size, ptr::null_mut(), &raw mut code);
    check("clCreateBuffer", code);
    // SAFETY: as of `cl`.
    let write = unsafe { std::mem::transmute::<Ptr, Transfer>(cl.find("clEnqueueWriteBuffer")) };
    let none = (0, ptr::null(), ptr::null_mut());
    check(
        "clEnqueueWriteBuffer",
        write(queue, in_y, 0, 0, size, y.as_mut_ptr(), none.0, none.1, none.2),
    );
    let set = cl!(cl, clSetKernelArg(Ptr, u32, usize, Ptr) -> i32);
    let a = 2_f32;
    check("clSetKernelArg", set(kernel, 0, 8, (&raw const in_y).cast()));
    check("clSetKernelArg", set(kernel, 1, 8, (&raw const in_x).cast()));
    check("clSetKernelArg", set(kernel, 2, 4, (&raw const a).cast()));
    // SAFETY: as of `cl`.
    let launch = unsafe { std::mem::transmute::<Ptr, Launch>(cl.find("clEnqueueNDRangeKernel")) };
    let run = |count: usize| {
        launch(
            queue,
            kernel,
            1,
            ptr::null(),
            &raw const count,
            ptr::null(),
            none.0,
            none.1,
            none.2,
        )
    };
    check("clEnqueueNDRangeKernel", run(COUNT));
    // SAFETY: as of `cl`.
    let read = unsafe { std::mem::transmute::<Ptr, Transfer>(cl.find("clEnqueueReadBuffer")) };
    check(
        "clEnqueueReadBuffer",
        read(queue, in_y, 1, 0, size, y.as_mut_ptr(), none.0, none.1, none.2),
    );
    let wrong = x.iter().zip(&y).filter(|(x, y)| **y != 1.0 + 2.0 * **x).count();
    assert_eq!(wrong, 0, "numbers are wrong");
    println!("{COUNT} numbers are right");
    let finish = cl!(cl, clFinish(Ptr) -> i32);
    let begun = Instant::now();
    (0..LAUNCHES).for_each(|_| check("clEnqueueNDRangeKernel", run(1)));
    check("clFinish", finish(queue));
    println!("a launch takes {:?}", begun.elapsed() / LAUNCHES);
    let begun = Instant::now();
    for _ in 0..LAUNCHES {
        check("clEnqueueNDRangeKernel", run(1));
        check("clFinish", finish(queue));
    }
    println!("a launch that is waited for takes {:?}", begun.elapsed() / LAUNCHES);
}
