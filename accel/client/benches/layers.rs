//! How long a program of many small calls takes by each way for records, and how much of the processors: the mix of calls is that of a
//! deep-learning framework's tests of layers, the ways are those of this tree and a synchronous one to compare with, which waits for an
//! answer to every call as GVirtuS does.
//!
//! `cargo bench -p basalt-accel-client --bench layers -- [ROUNDS [BACKEND]]`. Server and client are processes of their own; ways take turns,
//! and medians of rounds are shown. `null` shows what forwarding costs alone; `pocl` computes, on PoCL's device `basic`, and every number
//! that is read back is checked.
#![allow(
    unsafe_code,
    clippy::print_stdout,
    reason = "a program that calls C, and tells what came of it"
)]

#[path = "../examples/loader/mod.rs"]
mod loader;

use std::error::Error;
use std::fs;
use std::io::Read as _;
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_server::{Backend, Server};
use accel_transport::{Settings, Transport};
use loader::{Loader, Ptr, check, cl, first_queue};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Calls of each kind: a tenth of what Caffe's tests of neuron layers make of CUDA's (the seed of system S4, table 1), and what of OpenCL's
/// stands for each. The last one's answer is kept by the client whichever way is taken, so it costs the synchronous one no more.
const COPIES: u32 = 29_012; // cudaMemcpy: blocking writes and reads, in turn
const ARGUMENTS: u32 = 53_707; // curandSetPseudoRandomGeneratorSeed, curandSetGeneratorOffset: clSetKernelArg with a new value
const LAUNCHES: u32 = 14_239; // cudaLaunch: clEnqueueNDRangeKernel
const QUERIES: u32 = 12_725; // cudaPeekAtLastError: clGetKernelWorkGroupInfo

/// Numbers of a layer's data in these tests (2 x 3 x 4 x 5).
const NUMBERS: usize = 120;

/// The ways that are compared: a name, the transport, and whether it is by TCP.
const WAYS: [(&str, &str, bool); 6] = [
    ("synchronous, TCP", "synchronous", true),
    ("synchronous, unix", "synchronous", false),
    ("stream, TCP", "stream", true),
    ("same-cpu", "same-cpu", false),
    ("bell", "bell", false),
    ("spin", "spin", false),
];

const SOURCE: &str = "kernel void add(global float *x, float a) { x[get_global_id(0)] += a; }";

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["serve", socket, backend] => serve(Path::new(socket), backend),
        ["work", checks] => work(*checks == "yes"),
        ["compare", rest @ ..] | rest => compare(
            rest.first().map_or(Ok(5), |rounds| rounds.parse())?,
            rest.get(1).copied().unwrap_or("null"),
        ),
    }
}

/// The server's process: tells its port by TCP, and serves until it is killed.
fn serve(socket: &Path, backend: &str) -> Result<()> {
    let backend = match backend {
        "null" => Backend::null(),
        _ => Backend::opencl(Path::new("libOpenCL.so.1"))?,
    };
    let settings = Settings {
        transports: Transport::ALL.to_vec(),
        pairs: 16,
        records: 256,
        arena: 64 << 20,
        patience: Duration::from_secs(10),
        busy_poll: None,
    };
    let server = Arc::new(Server::new(backend, settings));
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let unix = Server::listen(socket)?;
    println!("{}", listener.local_addr()?.port());
    let remote = Arc::clone(&server);
    std::thread::spawn(move || remote.serve_remote(&listener, None));
    Ok(server.serve(unix)?)
}

/// What a client is asked to do, spread evenly.
struct Spread {
    of: u32,
    due: u32,
}

impl Spread {
    fn new(of: u32) -> Self {
        Self { of, due: 0 }
    }

    /// How often in this step, of as many as there are arguments.
    fn next(&mut self) -> u32 {
        self.due += self.of;
        let now = self.due / ARGUMENTS;
        self.due %= ARGUMENTS;
        now
    }
}

type Transfer = extern "C" fn(Ptr, Ptr, u32, usize, usize, *mut f32, u32, *const Ptr, *mut Ptr) -> i32;
type Launch = extern "C" fn(Ptr, Ptr, u32, *const usize, *const usize, *const usize, u32, *const Ptr, *mut Ptr) -> i32;
type Query = extern "C" fn(Ptr, Ptr, u32, usize, *mut u8, *mut usize) -> i32;

/// The client's process: prints how many seconds its calls took.
fn work(checks: bool) -> Result<()> {
    let cl = Loader::open();
    let (context, queue) = first_queue(&cl, 0);
    let (kernel, buffer) = made(&cl, context, checks);
    let set = cl!(cl, clSetKernelArg(Ptr, u32, usize, *const u8) -> i32);
    // SAFETY: the API's functions that are named here have these types.
    let launch = unsafe { std::mem::transmute::<Ptr, Launch>(cl.find("clEnqueueNDRangeKernel")) };
    // SAFETY: the same.
    let query = unsafe { std::mem::transmute::<Ptr, Query>(cl.find("clGetKernelWorkGroupInfo")) };
    // SAFETY: both of the API's functions that are named here have this type.
    let [write, read] = ["clEnqueueWriteBuffer", "clEnqueueReadBuffer"]
        .map(|name| unsafe { std::mem::transmute::<Ptr, Transfer>(cl.find(name)) });
    let (mut copies, mut launches, mut queries) = (Spread::new(COPIES), Spread::new(LAUNCHES), Spread::new(QUERIES));
    let (mut numbers, mut expected, mut writes) = ([0_f32; NUMBERS], 0_f32, true);
    let (bytes, items) = (size_of_val(&numbers), NUMBERS);
    let begun = Instant::now();
    for step in 0..ARGUMENTS {
        // A small number, so that sums are exact.
        let argument = f32::from(u8::try_from(step % 7)?);
        let code = set(kernel, checks.into(), 4, (&raw const argument).cast());
        check("clSetKernelArg", code);
        for _ in 0..launches.next() {
            let code = launch(
                queue,
                kernel,
                1,
                ptr::null(),
                &raw const items,
                ptr::null(),
                0,
                ptr::null(),
                ptr::null_mut(),
            );
            check("clEnqueueNDRangeKernel", code);
            expected += argument;
        }
        for _ in 0..queries.next() {
            let mut size = [0_u8; 8];
            check(
                "clGetKernelWorkGroupInfo",
                query(kernel, ptr::null(), 0x11b0, 8, size.as_mut_ptr(), ptr::null_mut()),
            );
        }
        for _ in 0..copies.next() {
            if writes {
                expected = f32::from(u8::try_from(step % 11)?);
                numbers.fill(expected);
            }
            let (name, transfer) = if writes { ("write", write) } else { ("read", read) };
            let code = transfer(
                queue,
                buffer,
                1,
                0,
                bytes,
                numbers.as_mut_ptr(),
                0,
                ptr::null(),
                ptr::null_mut(),
            );
            check(name, code);
            #[expect(clippy::float_cmp, reason = "sums of small whole numbers are exact")]
            let is_right = writes || numbers.iter().all(|number| *number == expected);
            assert!(is_right || !checks, "step {step}: {numbers:?} are to be {expected}");
            writes = !writes;
        }
    }
    check("clFinish", cl!(cl, clFinish(Ptr) -> i32)(queue));
    println!("seconds: {}", begun.elapsed().as_secs_f64());
    Ok(())
}

/// The kernel with its buffer.
fn made(cl: &Loader, context: Ptr, computes: bool) -> (Ptr, Ptr) {
    let mut code = 0;
    let source = cl!(
        cl,
        clCreateProgramWithSource(Ptr, u32, *const *const u8, *const usize, *mut i32) -> Ptr
    );
    let (text, length) = (SOURCE.as_ptr(), SOURCE.len());
    let program = source(context, 1, &raw const text, &raw const length, &raw mut code);
    check("clCreateProgramWithSource", code);
    let build = cl!(cl, clBuildProgram(Ptr, u32, *const Ptr, *const u8, Ptr, Ptr) -> i32);
    check(
        "clBuildProgram",
        build(program, 0, ptr::null(), ptr::null(), ptr::null(), ptr::null()),
    );
    let kernel =
        cl!(cl, clCreateKernel(Ptr, *const u8, *mut i32) -> Ptr)(program, c"add".as_ptr().cast(), &raw mut code);
    check("clCreateKernel", code);
    let create = cl!(cl, clCreateBuffer(Ptr, u64, usize, Ptr, *mut i32) -> Ptr);
    let buffer = create(context, 1, NUMBERS * 4, ptr::null(), &raw mut code);
    check("clCreateBuffer", code);
    // Of a back end that does nothing each kernel has one argument, which is a number.
    if computes {
        let set = cl!(cl, clSetKernelArg(Ptr, u32, usize, *const Ptr) -> i32);
        check("clSetKernelArg", set(kernel, 0, 8, &raw const buffer));
    }
    (kernel, buffer)
}

/// A server that ends with this.
struct Serving {
    child: Child,
    directory: tempfile::TempDir,
    port: String,
}

impl Drop for Serving {
    fn drop(&mut self) {
        // One that has ended already is no error here.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Serving {
    fn start(backend: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(directory.path().join("socket"))
            .arg(backend)
            .env("POCL_DEVICES", "basic")
            .stdout(Stdio::piped())
            .spawn()?;
        let mut port = String::new();
        let mut out = child.stdout.take().ok_or("no pipe")?;
        let mut byte = [0];
        while out.read(&mut byte)? == 1 && byte != *b"\n" {
            port.push(byte[0].into());
        }
        let library = std::env::current_exe()?.with_file_name("libbasalt_opencl.so");
        fs::write(directory.path().join("basalt.icd"), format!("{}\n", library.display()))?;
        Ok(Self { child, directory, port })
    }

    /// Seconds of the processors that it has taken (proc(5)).
    fn cpu(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let (_, fields) = stat.rsplit_once(") ").ok_or("a stat without a name")?;
        let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<f64>);
        Ok(ticks.sum::<std::result::Result<f64, _>>()? / 100.0)
    }

    /// Runs the client; its seconds, and those of the processors that both sides took.
    fn run(&self, (_, transport, is_remote): (&str, &str, bool), checks: bool) -> Result<(f64, f64)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["work", if checks { "yes" } else { "no" }]);
        command
            .env("OCL_ICD_VENDORS", self.directory.path())
            .env("BASALT_ACCEL_TRANSPORT", transport);
        match is_remote {
            true => command.env("BASALT_ACCEL", format!("tcp://127.0.0.1:{}", self.port)),
            false => command.env("BASALT_ACCEL_SOCKET", self.directory.path().join("socket")),
        };
        let before = (self.cpu()?, children());
        let output = command.stderr(Stdio::inherit()).output()?;
        let told = String::from_utf8(output.stdout)?;
        let seconds = told.lines().find_map(|line| line.strip_prefix("seconds: "));
        let seconds: f64 = seconds.ok_or("the client told nothing")?.parse()?;
        let cpu = self.cpu()? - before.0 + children() - before.1;
        Ok((seconds, cpu))
    }
}

/// Seconds of the processors that children have taken that were waited for.
fn children() -> f64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the place is one for what is written.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) };
    // SAFETY: zeroes are a value of this type, too.
    let usage = unsafe { usage.assume_init() };
    let seconds =
        |time: libc::timeval| Duration::new(time.tv_sec.unsigned_abs(), 0).as_secs_f64() + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

fn compare(rounds: usize, backend: &str) -> Result<()> {
    let serving = Serving::start(backend)?;
    let mut measured = vec![(Vec::new(), Vec::new()); WAYS.len()];
    for _ in 0..rounds.max(1) {
        for (way, (seconds, cpu)) in WAYS.iter().zip(&mut measured) {
            let run = serving.run(*way, backend != "null")?;
            seconds.push(run.0);
            cpu.push(run.1);
        }
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        (values[0], values[values.len() / 2])
    };
    let calls = COPIES + ARGUMENTS + LAUNCHES + QUERIES;
    println!(
        "{calls} calls on {backend}, {rounds} rounds: seconds (least, median), less than `synchronous, TCP` and `unix`, processors"
    );
    let rows: Vec<_> = measured
        .iter_mut()
        .map(|(seconds, cpu)| (median(seconds), median(cpu)))
        .collect();
    for ((name, ..), ((least, seconds), (_, cpu))) in WAYS.iter().zip(&rows) {
        let less = |than: usize| 100.0 * (1.0 - seconds / rows[than].0.1);
        println!(
            "{name:<18} {least:>7.3} {seconds:>7.3}   {:>5.1} % {:>5.1} %   {:>4.2}",
            less(0),
            less(1),
            cpu / seconds
        );
    }
    Ok(())
}
