//! A client by hand: a server on a socket, connections to it, and a thread's calls.

pub(crate) mod machine;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use accel_proto::opencl::*;
use accel_proto::{
    AnyHandle, Arguments, Call, Callback, Handle, Limits, List, MESSAGE, Pieces, Reader, Record, Reply, Span, Value,
    Writer,
};
use accel_server::{Backend, Server, TenantLimits};
use accel_transport::{ClientConnection, ClientEnd, Offer, Settings, Transport, connect};
use accel_window::Window;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tempfile::TempDir;
use wire::packet::PacketSocket;

pub(crate) const MOST: Duration = Duration::from_secs(60);
pub(crate) const ARENA: u64 = 16 << 20;
pub(crate) const LIMITS: Limits = Limits { arena: ARENA };

/// Where things are in this test's arena.
pub(crate) const REPLIES: Span = Span {
    offset: 0,
    length: 1 << 16,
};
pub(crate) const MESSAGES: u64 = 1 << 16;
pub(crate) const DATA: u64 = 1 << 20;

pub(crate) fn settings() -> Settings {
    Settings {
        transports: vec![Transport::Bell, Transport::Stream],
        pairs: 4,
        records: 64,
        arena: ARENA,
        patience: Duration::from_secs(10),
        busy_poll: None,
    }
}

/// A server on a socket of its own, whose path is in the directory.
pub(crate) fn start(backend: Backend) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("accel.sock");
    let listener = Server::listen(&path).unwrap();
    let server = Arc::new(Server::new(backend, settings()));
    std::thread::spawn(move || server.serve(listener));
    (directory, path)
}

/// The same with limits, and the server itself.
pub(crate) fn start_with(backend: Backend, limits: &TenantLimits) -> (TempDir, PathBuf, Arc<Server>) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("accel.sock");
    let listener = Server::listen(&path).unwrap();
    let server = Arc::new(Server::with_limits(backend, settings(), limits).unwrap());
    let serving = Arc::clone(&server);
    std::thread::spawn(move || serving.serve(listener));
    (directory, path, server)
}

pub(crate) fn pocl() -> Backend {
    Backend::opencl(Path::new("libOpenCL.so.1")).expect("PoCL; install pocl-opencl-icd and ocl-icd-libopencl1")
}

pub(crate) fn meet(path: &Path, pairs: u32) -> ClientConnection {
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
pub(crate) struct Thread {
    pub(crate) end: ClientEnd,
    pub(crate) window: Window,
}

impl Thread {
    pub(crate) fn record<'a, C: Call<'a>>(&self, call: &C, waits: bool) -> wire::ring::Record {
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

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.window
            .slice(at, bytes.len() as u64)
            .unwrap()
            .write(0, bytes)
            .unwrap();
    }

    pub(crate) fn get(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.window
            .slice(at, length as u64)
            .unwrap()
            .read(0, &mut bytes)
            .unwrap();
        bytes
    }

    pub(crate) fn send<'a, C: Call<'a>>(&mut self, call: &C) {
        let record = self.record(call, false);
        self.end.send(&record, MOST).unwrap();
    }

    pub(crate) fn ask<'a, C: Call<'a>>(&mut self, call: &C) -> Vec<u8> {
        let record = self.record(call, true);
        let answer = self.end.call(&record, MOST).unwrap();
        let reply = Record::from_bytes(answer.to_bytes());
        match reply.arguments(LIMITS).unwrap() {
            Arguments::Inline(bytes) => bytes.to_vec(),
            Arguments::Message(span) => self.get(span.offset, usize::try_from(span.length).unwrap()),
        }
    }

    pub(crate) fn status<'a, C: Call<'a>>(&mut self, call: &C) -> i32 {
        let bytes = self.ask(call);
        C::Reply::read(&mut Reader::new(&bytes, LIMITS), call).unwrap().status()
    }

    pub(crate) fn done<'a, C: Call<'a>>(&mut self, call: &C) {
        assert_eq!(self.status(call), 0, "call {:#x}", C::OP);
    }

    pub(crate) fn devices(&mut self) -> (Handle<Platform>, Handle<Device>) {
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
    pub(crate) fn text(&mut self, platform: Handle<Platform>, param_name: u32) -> String {
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
    pub(crate) fn set_up(&mut self) -> (Handle<Context>, Handle<CommandQueue>) {
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

    pub(crate) fn buffer(&mut self, context: Handle<Context>, size: u64, returned: Handle<Mem>) {
        self.done(&CreateBuffer {
            context,
            flags: 1,
            size,
            host_ptr: None,
            returned,
        });
    }

    /// A kernel of a source with one.
    pub(crate) fn kernel(
        &mut self,
        context: Handle<Context>,
        source: &str,
        kernel_name: &std::ffi::CStr,
    ) -> Handle<Kernel> {
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

    pub(crate) fn argument(&mut self, kernel: Handle<Kernel>, arg_index: u32, value: Value<'_>) -> i32 {
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

pub(crate) fn name<K>(index: u32) -> Handle<K> {
    Handle::new(index, 1).unwrap()
}

pub(crate) fn mem(handle: Handle<Mem>) -> Value<'static> {
    Value::Object(AnyHandle {
        c_type: "cl_mem",
        raw: handle.raw(),
    })
}

pub(crate) fn write<'a>(queue: Handle<CommandQueue>, buffer: Handle<Mem>, length: u64) -> EnqueueWriteBuffer<'a> {
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

pub(crate) fn read<'a>(queue: Handle<CommandQueue>, buffer: Handle<Mem>, length: u64) -> EnqueueReadBuffer<'a> {
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

pub(crate) fn first_thread(path: &Path) -> (ClientConnection, Thread) {
    let mut connection = meet(path, 2);
    let thread = Thread {
        end: connection.ends.remove(0),
        window: connection.window.as_ref().unwrap().0.clone(),
    };
    (connection, thread)
}
