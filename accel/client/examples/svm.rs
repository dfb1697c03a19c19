//! A program with a list in shared virtual memory, of which each element has the address of the next one: a kernel walks it by the
//! addresses that the program has written, and changes it. It ends well natively and forwarded, or not at all.
//!
//! ```sh
//! cargo run --release -p basalt-accel-client --example svm
//! OCL_ICD_VENDORS=/tmp/vendors BASALT_ACCEL_SOCKET=/run/basalt/accel.sock cargo run --release -p basalt-accel-client --example svm
//! ```
//!
//! Knows nothing of the library: it finds the loader's functions by name.
#![allow(
    unsafe_code,
    clippy::print_stdout,
    reason = "a program that calls C, and tells what came of it"
)]

mod loader;

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use loader::{Loader, Ptr, check, cl, first_queue};

const SOURCE: &CStr = c"struct node { global struct node *next; ulong value; };
kernel void walk(global struct node *first, global ulong *sum) {
    ulong all = 0;
    for (global struct node *node = first; node; node = node->next) {
        all += node->value;
        node->value *= 2;
    }
    sum[0] = all;
    sum[1] = (ulong)first;
}";

/// An element, as the kernel has it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Node {
    next: u64,
    value: u64,
}

/// Elements of the list; each is in an allocation of its own.
const NODES: u64 = 20;
/// Bytes of allocations that are freed in the queue, and how many there are: so much memory that it shows if it is kept.
const KEPT: usize = 16 << 20;
const TIMES: usize = 64;
/// Bytes of the large allocation: more than goes through the arena at once.
const LARGE: usize = 18 << 20;
/// `CL_MAP_READ`, `CL_MAP_WRITE`, `CL_MAP_WRITE_INVALIDATE_REGION`.
const READ: u64 = 1;
const WRITE: u64 = 2;
const INVALIDATE: u64 = 4;

type Alloc = extern "C" fn(Ptr, u64, usize, u32) -> *mut c_void;
type Free = extern "C" fn(Ptr, *mut c_void);
type Map = extern "C" fn(Ptr, u32, u64, *mut c_void, usize, u32, *const Ptr, *mut Ptr) -> i32;
type Unmap = extern "C" fn(Ptr, *mut c_void, u32, *const Ptr, *mut Ptr) -> i32;
type Memcpy = extern "C" fn(Ptr, u32, *mut c_void, *const c_void, usize, u32, *const Ptr, *mut Ptr) -> i32;
type Fill = extern "C" fn(Ptr, *mut c_void, *const c_void, usize, usize, u32, *const Ptr, *mut Ptr) -> i32;
type Read = extern "C" fn(Ptr, Ptr, u32, usize, usize, *mut c_void, u32, *const Ptr, *mut Ptr) -> i32;
type Migrate = extern "C" fn(Ptr, u32, *const *mut c_void, *const usize, u64, u32, *const Ptr, *mut Ptr) -> i32;
type FreeFunction = extern "C" fn(Ptr, u32, *mut *mut c_void, *mut c_void);
type EnqueueFree =
    extern "C" fn(Ptr, u32, *const *mut c_void, Option<FreeFunction>, *mut c_void, u32, *const Ptr, *mut Ptr) -> i32;
type Launch = extern "C" fn(Ptr, Ptr, u32, *const usize, *const usize, *const usize, u32, *const Ptr, *mut Ptr) -> i32;

/// What the program works with.
struct Program {
    cl: Loader,
    context: Ptr,
    queue: Ptr,
}

/// A function by its name and one of the types above.
macro_rules! typed {
    ($program:expr, $name:literal, $type:ty) => {
        // SAFETY: the API's function of this name has this type.
        unsafe { std::mem::transmute::<Ptr, $type>($program.cl.find($name)) }
    };
}

impl Program {
    fn alloc(&self, size: usize) -> *mut c_void {
        let found = typed!(self, "clSVMAlloc", Alloc)(self.context, 1, size, 0);
        assert!(!found.is_null(), "clSVMAlloc of {size} bytes");
        found
    }

    fn free(&self, memory: *mut c_void) {
        typed!(self, "clSVMFree", Free)(self.context, memory);
    }

    /// Works on memory while it is mapped.
    fn mapped<T>(&self, memory: *mut c_void, size: usize, flags: u64, work: impl FnOnce(&mut [u8]) -> T) -> T {
        let map = typed!(self, "clEnqueueSVMMap", Map);
        check(
            "clEnqueueSVMMap",
            map(self.queue, 1, flags, memory, size, 0, ptr::null(), ptr::null_mut()),
        );
        // SAFETY: it is mapped, with so many bytes.
        let done = work(unsafe { std::slice::from_raw_parts_mut(memory.cast::<u8>(), size) });
        let unmap = typed!(self, "clEnqueueSVMUnmap", Unmap);
        check(
            "clEnqueueSVMUnmap",
            unmap(self.queue, memory, 0, ptr::null(), ptr::null_mut()),
        );
        done
    }

    fn finish(&self) {
        check("clFinish", cl!(self.cl, clFinish(Ptr) -> i32)(self.queue));
    }

    fn kernel(&self) -> Ptr {
        let mut code = 0;
        let source = SOURCE.as_ptr();
        let create = cl!(
            self.cl,
            clCreateProgramWithSource(Ptr, u32, *const *const i8, *const usize, *mut i32) -> Ptr
        );
        let program = create(self.context, 1, &raw const source, ptr::null(), &raw mut code);
        check("clCreateProgramWithSource", code);
        let build = cl!(
            self.cl,
            clBuildProgram(Ptr, u32, *const Ptr, *const i8, Ptr, Ptr) -> i32
        );
        let none = (ptr::null(), c"".as_ptr());
        check(
            "clBuildProgram",
            build(program, 0, none.0, none.1, ptr::null(), ptr::null()),
        );
        let kernel = cl!(self.cl, clCreateKernel(Ptr, *const i8, *mut i32) -> Ptr);
        let kernel = kernel(program, c"walk".as_ptr(), &raw mut code);
        check("clCreateKernel", code);
        kernel
    }

    /// Builds the list, has the kernel walk it, and looks at what it has made of it.
    fn list(&self) {
        let nodes: Vec<_> = (0..NODES).map(|_| self.alloc(size_of::<Node>())).collect();
        let sum = self.alloc(16);
        let nexts = nodes.iter().skip(1).map(|next| next.addr() as u64).chain([0]);
        for ((index, node), next) in (0..).zip(&nodes).zip(nexts) {
            self.mapped(*node, size_of::<Node>(), INVALIDATE, |bytes| {
                let node = Node { next, value: index + 1 };
                bytes[..8].copy_from_slice(&node.next.to_ne_bytes());
                bytes[8..].copy_from_slice(&node.value.to_ne_bytes());
            });
        }
        let kernel = self.kernel();
        let set = cl!(self.cl, clSetKernelArgSVMPointer(Ptr, u32, *const c_void) -> i32);
        check("clSetKernelArgSVMPointer", set(kernel, 0, nodes[0]));
        check("clSetKernelArgSVMPointer", set(kernel, 1, sum));
        let reach = cl!(self.cl, clSetKernelExecInfo(Ptr, u32, usize, *const *mut c_void) -> i32);
        check(
            "clSetKernelExecInfo",
            reach(kernel, 0x11b6, size_of_val(nodes.as_slice()), nodes.as_ptr()),
        );
        let launch = typed!(self, "clEnqueueNDRangeKernel", Launch);
        let (one, none) = (1, ptr::null());
        check(
            "clEnqueueNDRangeKernel",
            launch(
                self.queue,
                kernel,
                1,
                none,
                &raw const one,
                none,
                0,
                ptr::null(),
                ptr::null_mut(),
            ),
        );
        let told = self.mapped(sum, 16, READ, |bytes| bytes.to_vec());
        let number = |bytes: &[u8]| u64::from_ne_bytes(*bytes.first_chunk().expect("eight bytes"));
        assert_eq!(
            number(&told),
            NODES * (NODES + 1) / 2,
            "the kernel has not walked the list"
        );
        assert_eq!(number(&told[8..]), nodes[0].addr() as u64, "addresses differ");
        for (index, node) in (0..).zip(&nodes) {
            let value = self.mapped(*node, size_of::<Node>(), READ, |bytes| number(&bytes[8..]));
            assert_eq!(value, 2 * (index + 1), "what the kernel has written");
        }
        self.free_in_queue(&nodes, sum);
    }

    /// Frees in the queue, by a function of the program's and without one.
    fn free_in_queue(&self, nodes: &[*mut c_void], sum: *mut c_void) {
        static FREED: AtomicUsize = AtomicUsize::new(0);
        extern "C" fn freed(_queue: Ptr, count: u32, pointers: *mut *mut c_void, program: *mut c_void) {
            // SAFETY: the data is the program, which waits until this has been called.
            let program = unsafe { &*program.cast::<Program>() };
            for index in 0..count as usize {
                // SAFETY: there are as many addresses.
                program.free(unsafe { *pointers.wrapping_add(index) });
            }
            FREED.fetch_add(count as usize, Ordering::SeqCst);
        }
        let enqueue = typed!(self, "clEnqueueSVMFree", EnqueueFree);
        let count = u32::try_from(nodes.len()).expect("few nodes");
        let data = ptr::from_ref(self).cast_mut().cast();
        check(
            "clEnqueueSVMFree",
            enqueue(
                self.queue,
                count,
                nodes.as_ptr(),
                Some(freed),
                data,
                0,
                ptr::null(),
                ptr::null_mut(),
            ),
        );
        check(
            "clEnqueueSVMFree",
            enqueue(
                self.queue,
                1,
                &raw const sum,
                None,
                ptr::null_mut(),
                0,
                ptr::null(),
                ptr::null_mut(),
            ),
        );
        self.finish();
        let begun = Instant::now();
        while FREED.load(Ordering::SeqCst) < nodes.len() {
            assert!(begun.elapsed() < Duration::from_secs(20), "nobody calls the function");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Has memory filled with a pattern.
    fn fill(&self, memory: *mut c_void, pattern: &[u8], length: usize, event: *mut Ptr) {
        let fill = typed!(self, "clEnqueueSVMMemFill", Fill);
        let (bytes, each) = (pattern.as_ptr().cast(), pattern.len());
        let code = fill(self.queue, memory, bytes, each, length, 0, ptr::null(), event);
        check("clEnqueueSVMMemFill", code);
    }

    /// Fills, copies both ways and within, and moves.
    fn copies(&self) {
        let (one, two) = (self.alloc(LARGE), self.alloc(LARGE));
        let pattern = 0x0102_0304_0506_0708_u64.to_ne_bytes();
        self.fill(one, &pattern, LARGE, ptr::null_mut());
        let none = (0, ptr::null(), ptr::null_mut());
        let copy = typed!(self, "clEnqueueSVMMemcpy", Memcpy);
        check(
            "clEnqueueSVMMemcpy",
            copy(self.queue, 0, two, one, LARGE, none.0, none.1, none.2),
        );
        let migrate = typed!(self, "clEnqueueSVMMigrateMem", Migrate);
        check(
            "clEnqueueSVMMigrateMem",
            migrate(self.queue, 1, &raw const two, ptr::null(), 0, none.0, none.1, none.2),
        );
        let mut own = vec![0_u8; LARGE];
        check(
            "clEnqueueSVMMemcpy",
            copy(
                self.queue,
                1,
                own.as_mut_ptr().cast(),
                two,
                LARGE,
                none.0,
                none.1,
                none.2,
            ),
        );
        assert!(
            own.as_chunks::<8>().0.iter().all(|chunk| *chunk == pattern),
            "a copy out"
        );
        own.iter_mut()
            .zip(0_u32..)
            .for_each(|(byte, index)| *byte = index.to_le_bytes()[1]);
        check(
            "clEnqueueSVMMemcpy",
            copy(self.queue, 0, one, own.as_ptr().cast(), LARGE, none.0, none.1, none.2),
        );
        self.mapped(one, LARGE, READ | WRITE, |bytes| {
            assert!(bytes == own, "a copy in");
            bytes[LARGE - 1] = 77;
        });
        let last = one.wrapping_byte_add(LARGE - 1);
        assert_eq!(
            self.mapped(last, 1, READ, |bytes| bytes[0]),
            77,
            "what was mapped for writing"
        );
        self.finish();
        self.free(one);
        self.free(two);
    }
}

impl Program {
    /// Unmaps what nobody knows yet to be mapped: what a command before has written stays.
    fn unmapped_at_once(&self) {
        let memory = self.alloc(64);
        self.fill(memory, &[7], 64, ptr::null_mut());
        let none = (0, ptr::null(), ptr::null_mut());
        let map = typed!(self, "clEnqueueSVMMap", Map);
        check(
            "clEnqueueSVMMap",
            map(self.queue, 0, READ | WRITE, memory, 64, none.0, none.1, none.2),
        );
        let unmap = typed!(self, "clEnqueueSVMUnmap", Unmap);
        check("clEnqueueSVMUnmap", unmap(self.queue, memory, none.0, none.1, none.2));
        self.mapped(memory, 64, READ, |bytes| assert!(bytes == [7; 64], "unmapped at once"));
        self.free(memory);
    }

    /// Has a buffer read into memory that is mapped, and unmaps that without waiting: the bytes are there.
    fn read_into_while_mapped(&self) {
        let mut code = 0;
        let create = cl!(self.cl, clCreateBuffer(Ptr, u64, usize, *const u8, *mut i32) -> Ptr);
        // CL_MEM_COPY_HOST_PTR
        let buffer = create(self.context, 1 << 5, 64, [5; 64].as_ptr(), &raw mut code);
        check("clCreateBuffer", code);
        let memory = self.alloc(64);
        let read = typed!(self, "clEnqueueReadBuffer", Read);
        self.mapped(memory, 64, READ | WRITE, |bytes| {
            let (none, no_event) = (ptr::null(), ptr::null_mut());
            let at = bytes.as_mut_ptr().cast();
            check(
                "clEnqueueReadBuffer",
                read(self.queue, buffer, 0, 0, 64, at, 0, none, no_event),
            );
        });
        self.mapped(memory, 64, READ, |bytes| assert!(bytes == [5; 64], "read into"));
        check(
            "clReleaseMemObject",
            cl!(self.cl, clReleaseMemObject(Ptr) -> i32)(buffer),
        );
        self.free(memory);
    }

    /// Writes what is read there by a command that nobody has waited for, while one behind that waits for what this thread does later.
    fn written_from_where_is_read_to(&self) {
        let (mut code, none, no_event) = (0, ptr::null(), ptr::null_mut());
        let create = cl!(self.cl, clCreateBuffer(Ptr, u64, usize, *const u8, *mut i32) -> Ptr);
        // CL_MEM_COPY_HOST_PTR
        let from = create(self.context, 1 << 5, 64, [6; 64].as_ptr(), &raw mut code);
        let to = create(self.context, 1 << 5, 64, [0; 64].as_ptr(), &raw mut code);
        let gate = cl!(self.cl, clCreateUserEvent(Ptr, *mut i32) -> Ptr)(self.context, &raw mut code);
        check("clCreateUserEvent", code);
        let (read, write) = (
            typed!(self, "clEnqueueReadBuffer", Read),
            typed!(self, "clEnqueueWriteBuffer", Read),
        );
        let marker = cl!(
            self.cl,
            clEnqueueMarkerWithWaitList(Ptr, u32, *const Ptr, *mut Ptr) -> i32
        );
        let mut between = [0_u8; 64];
        let at = between.as_mut_ptr().cast();
        check(
            "clEnqueueReadBuffer",
            read(self.queue, from, 0, 0, 64, at, 0, none, no_event),
        );
        check(
            "clEnqueueMarkerWithWaitList",
            marker(self.queue, 1, &raw const gate, no_event),
        );
        check(
            "clEnqueueWriteBuffer",
            write(self.queue, to, 0, 0, 64, at, 0, none, no_event),
        );
        let set = cl!(self.cl, clSetUserEventStatus(Ptr, i32) -> i32);
        check("clSetUserEventStatus", set(gate, 0));
        // CL_INVALID_OPERATION, at once.
        assert_eq!(set(gate, 0), -59, "an event is set once");
        let mut back = [0_u8; 64];
        let at = back.as_mut_ptr().cast();
        check(
            "clEnqueueReadBuffer",
            read(self.queue, to, 1, 0, 64, at, 0, none, no_event),
        );
        assert_eq!(back, [6; 64], "written from where is read to");
        for buffer in [from, to] {
            check(
                "clReleaseMemObject",
                cl!(self.cl, clReleaseMemObject(Ptr) -> i32)(buffer),
            );
        }
        check("clReleaseEvent", cl!(self.cl, clReleaseEvent(Ptr) -> i32)(gate));
    }

    /// Has memory freed in the queue again and again, and waits for other commands alone.
    fn freed_behind_what_is_waited_for(&self) {
        let begun = virtual_memory();
        let enqueue = typed!(self, "clEnqueueSVMFree", EnqueueFree);
        let wait = cl!(self.cl, clWaitForEvents(u32, *const Ptr) -> i32);
        let release = cl!(self.cl, clReleaseEvent(Ptr) -> i32);
        for _ in 0..TIMES {
            let memory = self.alloc(KEPT);
            let mut event = ptr::null();
            self.fill(memory, &[7], 64, &raw mut event);
            check(
                "clEnqueueSVMFree",
                enqueue(
                    self.queue,
                    1,
                    &raw const memory,
                    None,
                    ptr::null_mut(),
                    0,
                    ptr::null(),
                    ptr::null_mut(),
                ),
            );
            check("clWaitForEvents", wait(1, &raw const event));
            check("clReleaseEvent", release(event));
        }
        let grown = virtual_memory().saturating_sub(begun);
        assert!(grown < KEPT * TIMES / 2, "{grown} bytes of what was freed are there");
        self.finish();
    }

    /// What PoCL would take for memory that is there, and what is in the wrong place.
    fn refusals(&self) {
        let kernel = self.kernel();
        let set = cl!(self.cl, clSetKernelArgSVMPointer(Ptr, u32, *const c_void) -> i32);
        let nowhere = ptr::without_provenance::<c_void>(0x1000);
        assert_eq!(set(kernel, 0, nowhere), -50, "an address of nothing is an argument");
        let memory = self.alloc(100);
        assert_eq!(set(kernel, 0, memory.wrapping_byte_add(99)), 0);
        assert_eq!(set(kernel, 0, memory.wrapping_byte_add(100)), -50);
        let map = typed!(self, "clEnqueueSVMMap", Map);
        let none = (0, ptr::null(), ptr::null_mut());
        assert_eq!(map(self.queue, 1, READ, memory, 101, none.0, none.1, none.2), -30);
        assert_eq!(
            typed!(self, "clEnqueueSVMUnmap", Unmap)(self.queue, memory, none.0, none.1, none.2),
            -30
        );
        let fill = typed!(self, "clEnqueueSVMMemFill", Fill);
        assert_eq!(
            fill(
                self.queue,
                memory,
                [0_u8; 4].as_ptr().cast(),
                4,
                104,
                none.0,
                none.1,
                none.2
            ),
            -30
        );
        // CL_MEM_READ_WRITE | CL_MEM_SVM_FINE_GRAIN_BUFFER
        let fine = typed!(self, "clSVMAlloc", Alloc)(self.context, 1 | 1 << 10, 64, 0);
        assert!(fine.is_null(), "memory of fine grain");
        // It is an argument of a kernel still.
        self.free(memory);
        assert_eq!(set(kernel, 0, memory), -50, "what was freed is an argument");
        println!("what is wrong is refused");
    }
}

/// Bytes of this process' address space (proc(5), statm).
fn virtual_memory() -> usize {
    let told = std::fs::read_to_string("/proc/self/statm").expect("proc(5) is there");
    let pages = told.split(' ').next().and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("a number of pages") * 4096
}

fn main() {
    let cl = Loader::open();
    let (context, queue) = first_queue(&cl, 0);
    let program = Program { cl, context, queue };
    if std::env::args().any(|argument| argument == "refusals") {
        return program.refusals();
    }
    // What was freed is allocated again.
    (0..3).for_each(|_| program.list());
    program.copies();
    program.unmapped_at_once();
    program.read_into_while_mapped();
    program.written_from_where_is_read_to();
    program.freed_behind_what_is_waited_for();
    println!("all of the list and all copies are right");
}
