//! A client and a server in two threads, over a real socket: what a program does with OpenCL, by the null back end and by PoCL; and a client
//! that goes in the middle of its work.
//!
//! PoCL has to be there (Debian's pocl-opencl-icd and ocl-icd-libopencl1, which the step `apt-packages` of `cargo xtask test` installs).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use accel_proto::control::{AwaitCompletions, AwaitCompletionsReply};
use accel_proto::opencl::*;
use accel_proto::{
    AnyHandle, Arguments, Call, Callback, Handle, Limits, List, MESSAGE, Pieces, Reader, Record, Reply, Span, Value,
    Writer,
};
use accel_server::{Backend, Server};
use accel_transport::{ClientConnection, ClientEnd, Offer, Settings, Transport, connect};
use accel_window::Window;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;
use wire::packet::PacketSocket;

const MOST: Duration = Duration::from_secs(60);
const ARENA: u64 = 16 << 20;
const LIMITS: Limits = Limits { arena: ARENA };

/// Where things are in this test's arena.
const REPLIES: Span = Span {
    offset: 0,
    length: 1 << 16,
};
const MESSAGES: u64 = 1 << 16;
const DATA: u64 = 1 << 20;

fn settings() -> Settings {
    Settings {
        transports: vec![Transport::Bell, Transport::Stream],
        pairs: 4,
        records: 64,
        arena: ARENA,
        patience: Duration::from_secs(10),
    }
}

/// A server on a socket of its own, whose path is in the directory.
fn start(backend: Backend) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("accel.sock");
    let listener = Server::listen(&path).unwrap();
    let server = Arc::new(Server::new(backend, settings()));
    std::thread::spawn(move || server.serve(listener));
    (directory, path)
}

fn pocl() -> Backend {
    Backend::opencl(Path::new("libOpenCL.so.1")).expect("PoCL; install pocl-opencl-icd and ocl-icd-libopencl1")
}

fn meet(path: &Path, pairs: u32) -> ClientConnection {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let offer = Offer {
        transports: vec![Transport::Bell],
        pairs,
        patience: MOST,
    };
    connect(PacketSocket::from_fd(socket), &offer).unwrap()
}

/// A thread of a client.
struct Thread {
    end: ClientEnd,
    window: Window,
}

impl Thread {
    fn record<'a, C: Call<'a>>(&self, call: &C, waits: bool) -> wire::ring::Record {
        let record = Record::call(call, 0, waits).unwrap_or_else(|_| {
            let mut bytes = vec![0; MESSAGE];
            let mut writer = Writer::new(&mut bytes);
            call.write(&mut writer);
            let length = writer.finish().unwrap();
            self.put(MESSAGES, &bytes[..length]);
            let span = Span {
                offset: MESSAGES,
                length: length as u64,
            };
            Record::call_in::<C>(span, 0, waits)
        });
        wire::ring::Record::from_bytes(record.as_bytes())
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.window
            .slice(at, bytes.len() as u64)
            .unwrap()
            .write(0, bytes)
            .unwrap();
    }

    fn get(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.window
            .slice(at, length as u64)
            .unwrap()
            .read(0, &mut bytes)
            .unwrap();
        bytes
    }

    fn send<'a, C: Call<'a>>(&mut self, call: &C) {
        let record = self.record(call, false);
        self.end.send(&record, MOST).unwrap();
    }

    fn ask<'a, C: Call<'a>>(&mut self, call: &C) -> Vec<u8> {
        let record = self.record(call, true);
        let answer = self.end.call(&record, MOST).unwrap();
        let reply = Record::from_bytes(answer.to_bytes());
        match reply.arguments(LIMITS).unwrap() {
            Arguments::Inline(bytes) => bytes.to_vec(),
            Arguments::Message(span) => self.get(span.offset, usize::try_from(span.length).unwrap()),
        }
    }

    fn status<'a, C: Call<'a>>(&mut self, call: &C) -> i32 {
        let bytes = self.ask(call);
        C::Reply::read(&mut Reader::new(&bytes, LIMITS), call).unwrap().status()
    }

    fn done<'a, C: Call<'a>>(&mut self, call: &C) {
        assert_eq!(self.status(call), 0, "call {:#x}", C::OP);
    }

    fn devices(&mut self) -> (Handle<Platform>, Handle<Device>) {
        let call = GetPlatformIDs {
            num_entries: 8,
            platforms: true,
            num_platforms: false,
            reply: REPLIES,
        };
        let bytes = self.ask(&call);
        let reply = GetPlatformIDsReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        let platform = reply.platforms.unwrap().get(0).unwrap();
        let call = GetDeviceIDs {
            platform,
            device_type: u64::from(u32::MAX),
            num_entries: 8,
            devices: true,
            num_devices: false,
            reply: REPLIES,
        };
        let bytes = self.ask(&call);
        let reply = GetDeviceIDsReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        (platform, reply.devices.unwrap().get(0).unwrap())
    }

    /// A string of the platform's.
    fn text(&mut self, platform: Handle<Platform>, param_name: u32) -> String {
        let call = GetPlatformInfo {
            platform,
            param_name,
            param_value_size: 4096,
            param_value: true,
            param_value_size_ret: true,
            reply: REPLIES,
        };
        let bytes = self.ask(&call);
        let reply = GetPlatformInfoReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        let text = reply.param_value.unwrap().bytes().to_vec();
        assert_eq!(reply.param_value_size_ret, Some(text.len() as u64));
        std::ffi::CString::from_vec_with_nul(text)
            .unwrap()
            .into_string()
            .unwrap()
    }

    /// A context with the name 1.1, with a queue of that name.
    fn set_up(&mut self) -> (Handle<Context>, Handle<CommandQueue>) {
        let (platform, device) = self.devices();
        let (context, queue) = (name(1), name(1));
        let properties = [0x1084, i64::from(platform.raw()), 0];
        self.done(&CreateContext {
            properties: Some(List::new(&properties)),
            num_devices: 1,
            devices: Some(List::new(&[device])),
            pfn_notify: Callback(0),
            returned: context,
        });
        self.done(&CreateCommandQueue {
            context,
            device,
            properties: 0,
            returned: queue,
        });
        (context, queue)
    }

    fn buffer(&mut self, context: Handle<Context>, size: u64, returned: Handle<Mem>) {
        self.done(&CreateBuffer {
            context,
            flags: 1,
            size,
            host_ptr: None,
            returned,
        });
    }

    /// A kernel of a source with one.
    fn kernel(&mut self, context: Handle<Context>, source: &str, kernel_name: &std::ffi::CStr) -> Handle<Kernel> {
        self.put(DATA, source.as_bytes());
        let lengths = [source.len() as u64];
        self.done(&CreateProgramWithSource {
            context,
            count: 1,
            strings: Pieces {
                lengths: List::new(&lengths),
                data: Span {
                    offset: DATA,
                    length: lengths[0],
                },
            },
            returned: name(1),
        });
        self.done(&BuildProgram {
            program: name(1),
            num_devices: 0,
            device_list: None,
            options: None,
            pfn_notify: Callback(5),
        });
        self.done(&CreateKernel {
            program: name(1),
            kernel_name: Some(kernel_name),
            returned: name(1),
        });
        name(1)
    }

    fn argument(&mut self, kernel: Handle<Kernel>, arg_index: u32, value: Value<'_>) -> i32 {
        let arg_size = match value {
            Value::Bytes(bytes) => bytes.len() as u64,
            Value::Object(_) => 8,
        };
        self.status(&SetKernelArg {
            kernel,
            arg_index,
            arg_size,
            arg_value: Some(value),
        })
    }
}

fn name<K>(index: u32) -> Handle<K> {
    Handle::new(index, 1).unwrap()
}

fn mem(handle: Handle<Mem>) -> Value<'static> {
    Value::Object(AnyHandle {
        c_type: "cl_mem",
        raw: handle.raw(),
    })
}

fn write<'a>(queue: Handle<CommandQueue>, buffer: Handle<Mem>, length: u64) -> EnqueueWriteBuffer<'a> {
    EnqueueWriteBuffer {
        command_queue: queue,
        buffer,
        blocking_write: 0,
        offset: 0,
        size: length,
        ptr: Some(Span { offset: DATA, length }),
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    }
}

fn read<'a>(queue: Handle<CommandQueue>, buffer: Handle<Mem>, length: u64) -> EnqueueReadBuffer<'a> {
    EnqueueReadBuffer {
        command_queue: queue,
        buffer,
        blocking_read: 1,
        offset: 0,
        size: length,
        ptr: Some(Span {
            offset: DATA + (4 << 20),
            length,
        }),
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    }
}

fn first_thread(path: &Path) -> (ClientConnection, Thread) {
    let mut connection = meet(path, 2);
    let thread = Thread {
        end: connection.ends.remove(0),
        window: connection.window.as_ref().unwrap().0.clone(),
    };
    (connection, thread)
}

/// What every back end does; whether bytes arrive is told.
fn buffers(path: &Path) -> bool {
    let (_connection, mut thread) = first_thread(path);
    let (platform, _) = thread.devices();
    assert!(!thread.text(platform, 0x0902).is_empty());
    let (context, queue) = thread.set_up();
    let length = 1_u64 << 20;
    let bytes: Vec<u8> = (0..length).map(|at| ((at * 7) >> 3).to_le_bytes()[0]).collect();
    thread.buffer(context, length, name(1));
    thread.put(DATA, &bytes);
    thread.send(&write(queue, name(1), length));
    thread.done(&Finish { command_queue: queue });
    thread.done(&read(queue, name(1), length));
    let same = thread.get(DATA + (4 << 20), bytes.len()) == bytes;
    thread.done(&ReleaseMemObject { memobj: name(1) });
    thread.done(&ReleaseCommandQueue { command_queue: queue });
    thread.done(&ReleaseContext { context });
    assert_eq!(thread.status(&Finish { command_queue: queue }), -36);
    same
}

#[test]
fn buffers_by_a_back_end_that_does_nothing() {
    let (_directory, path) = start(Backend::null());
    assert!(!buffers(&path));
}

#[test]
fn buffers_by_pocl() {
    let (_directory, path) = start(pocl());
    assert!(buffers(&path));
}

#[test]
fn a_kernel_by_pocl_and_arguments_that_are_none() {
    let (_directory, path) = start(pocl());
    let (mut connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    let count = 1000_u64;
    thread.buffer(context, 4 * count, name(1));
    let source =
        "kernel void scale(global uint *all, uint by) { size_t i = get_global_id(0); all[i] = all[i] * by + 1; }";
    let kernel = thread.kernel(context, source, c"scale");
    let bytes: Vec<u8> = (0..1000_u32).flat_map(u32::to_le_bytes).collect();
    thread.put(DATA, &bytes);
    thread.send(&write(queue, name(1), 4 * count));
    // An address is no buffer, a sampler is none, and there is no third argument.
    assert_eq!(thread.argument(kernel, 0, Value::Bytes(&[1; 8])), -50);
    assert_eq!(thread.argument(kernel, 1, mem(name(1))), -50);
    assert_eq!(thread.argument(kernel, 2, Value::Bytes(&[0; 4])), -49);
    assert_eq!(thread.argument(kernel, 0, mem(name(1))), 0);
    assert_eq!(thread.argument(kernel, 1, Value::Bytes(&3_u32.to_le_bytes())), 0);
    thread.send(&EnqueueNDRangeKernel {
        command_queue: queue,
        kernel,
        work_dim: 1,
        global_work_offset: None,
        global_work_size: Some(List::new(&[count])),
        local_work_size: None,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: name(7),
    });
    // Before it is waited for, so that the callback is called in another thread.
    thread.send(&SetEventCallback {
        event: name(7),
        command_exec_callback_type: 0,
        pfn_notify: Callback(9),
    });
    thread.done(&read(queue, name(1), 4 * count));
    let expected: Vec<u8> = (0..1000_u32).flat_map(|value| (value * 3 + 1).to_le_bytes()).collect();
    assert!(thread.get(DATA + (4 << 20), bytes.len()) == expected);
    let mut waiting = Thread {
        end: connection.ends.remove(0),
        window: thread.window.clone(),
    };
    let mut due = Vec::new();
    while due.len() < 2 {
        let call = AwaitCompletions {
            most: 8,
            milliseconds: 500,
            reply: Span { offset: 0, length: 0 },
        };
        let bytes = waiting.ask(&call);
        let reply = AwaitCompletionsReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        due.extend(reply.completions.iter().map(|due| (due.callback.0, due.status)));
    }
    assert_eq!(due, [(5, 0), (9, 0)]);
    // Binaries, one behind the other.
    let info = |param_name, size| GetProgramInfo {
        program: name(1),
        param_name,
        param_value_size: size,
        param_value: Some(Span {
            offset: DATA,
            length: size,
        }),
        param_value_size_ret: true,
    };
    thread.done(&info(0x1165, 8));
    let size = u64::from_le_bytes(thread.get(DATA, 8).try_into().unwrap());
    assert!(size > 0);
    thread.done(&info(0x1166, size));
    assert!(thread.get(DATA, 64).iter().any(|byte| *byte != 0));
    assert_eq!(thread.status(&info(0x1166, size - 1)), -30);
    thread.send(&ReleaseEvent { event: name(7) });
    thread.send(&ReleaseKernel { kernel });
    thread.done(&Finish { command_queue: queue });
}

#[test]
fn maps_by_pocl() {
    let (_directory, path) = start(pocl());
    let (_connection, mut thread) = first_thread(&path);
    let (context, queue) = thread.set_up();
    thread.buffer(context, 4096, name(1));
    thread.put(DATA, &[5; 4096]);
    thread.send(&write(queue, name(1), 4096));
    let place = Span {
        offset: DATA + 8192,
        length: 100,
    };
    thread.done(&EnqueueMapBuffer {
        command_queue: queue,
        buffer: name(1),
        blocking_map: 1,
        map_flags: 3,
        offset: 1000,
        size: 100,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
        returned: place,
    });
    assert_eq!(thread.get(place.offset, 100), [5; 100]);
    thread.put(place.offset, &[6; 100]);
    thread.send(&EnqueueUnmapMemObject {
        command_queue: queue,
        memobj: name(1),
        mapped_ptr: place,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    });
    thread.done(&read(queue, name(1), 4096));
    let found = thread.get(DATA + (4 << 20), 4096);
    assert!(found[..1000] == [5; 1000] && found[1000..1100] == [6; 100] && found[1100..] == [5; 2996]);
}

/// Work that waits for an event that its client sets, and the client goes: the work ends, and so do the server's threads.
#[test]
fn a_client_that_goes_leaves_nothing_that_waits() {
    let server = Arc::new(Server::new(pocl(), settings()));
    let (near, far) = PacketSocket::pair().unwrap();
    let serving: JoinHandle<_> = std::thread::spawn(move || server.serve_client(far));
    let offer = Offer {
        transports: vec![Transport::Bell],
        pairs: 1,
        patience: MOST,
    };
    let mut connection = connect(near, &offer).unwrap();
    let mut thread = Thread {
        end: connection.ends.remove(0),
        window: connection.window.as_ref().unwrap().0.clone(),
    };
    let (context, queue) = thread.set_up();
    thread.buffer(context, 4096, name(1));
    thread.send(&CreateUserEvent {
        context,
        returned: name(1),
    });
    let events = [name(1)];
    let mut waits = write(queue, name(1), 4096);
    waits.num_events_in_wait_list = 1;
    waits.event_wait_list = Some(List::new(&events));
    thread.send(&waits);
    // Released with work in it.
    thread.send(&ReleaseCommandQueue { command_queue: queue });
    thread.send(&ReleaseMemObject { memobj: name(1) });
    // The server's only thread for this client waits in the back end.
    let record = thread.record(
        &WaitForEvents {
            num_events: 1,
            event_list: Some(List::new(&events)),
        },
        true,
    );
    let waited = thread.end.call(&record, Duration::from_millis(300));
    assert!(
        matches!(waited, Err(accel_transport::Error::Deadline { .. })),
        "{waited:?}"
    );
    drop((thread, connection));
    let (ended, news) = std::sync::mpsc::channel();
    std::thread::spawn(move || ended.send(serving.join()));
    news.recv_timeout(MOST)
        .expect("the server's threads end")
        .unwrap()
        .unwrap();
}
