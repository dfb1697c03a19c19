//! Calls against the null back end, and what a hostile client sends.

#![allow(unsafe_code, reason = "back ends of functions of C")]

mod calls;
mod cuda;
mod quota;
mod random;
mod saved;
mod svm;

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use accel_proto::opencl::*;
use accel_proto::{Call, Callback, Handle, Limits, List, MESSAGE, Reader, Record, Reply, Span, Writer};
use accel_window::{Geometry, Window};

use crate::api::{Api, Backend};
use crate::dispatch::Worker;
use crate::session::Client;
use crate::tenant::Tenant;

const ARENA: u64 = 1 << 20;
const LIMITS: Limits = Limits { arena: ARENA };
/// Where tests have their replies and their messages.
const REPLIES: Span = Span {
    offset: 0,
    length: 1 << 16,
};
const MESSAGES: u64 = 1 << 17;

fn client() -> Client {
    client_of(&Tenant::unlimited())
}

fn client_of(tenant: &Arc<Tenant>) -> Client {
    let (_, window) = Window::create(Geometry::new(1, 2, ARENA).unwrap()).unwrap();
    Client::new(Arc::new(Backend::null()), Arc::clone(tenant), Some(window))
}

/// A null back end with these functions.
///
/// # Safety
/// Each has the type of its name.
unsafe fn backend_of(function: &dyn Fn(&CStr) -> Option<*const ()>) -> Backend {
    let find = |name: &CStr| function(name).and_then(|address| NonNull::new(address.cast_mut().cast::<c_void>()));
    let mut backend = Backend::null();
    // SAFETY: 1. the caller's.
    backend.api = unsafe { Api::find(&find) }.0;
    backend
}

/// A client's side of one thread's calls, without a transport.
struct Caller<'c> {
    client: &'c Client,
    worker: Worker<'c>,
    seq: u64,
}

impl<'c> Caller<'c> {
    fn new(client: &'c Client) -> Self {
        Self {
            client,
            worker: Worker::new(client),
            seq: 0,
        }
    }

    fn record<'a, C: Call<'a>>(&mut self, call: &C, waits: bool) -> Record {
        self.seq += 1;
        if let Ok(record) = Record::call(call, self.seq, waits) {
            return record;
        }
        let mut bytes = vec![0; MESSAGE];
        let mut writer = Writer::new(&mut bytes);
        call.write(&mut writer);
        let length = writer.finish().unwrap();
        let message = self
            .client
            .window
            .as_ref()
            .unwrap()
            .slice(MESSAGES, length as u64)
            .unwrap();
        message.write(0, &bytes[..length]).unwrap();
        let span = Span {
            offset: MESSAGES,
            length: length as u64,
        };
        Record::call_in::<C>(span, self.seq, waits)
    }

    /// Sends a call whose reply nobody waits for.
    fn send<'a, C: Call<'a>>(&mut self, call: &C) {
        let record = self.record(call, false);
        assert_eq!(self.worker.serve(&record), None);
    }

    /// Bytes of the reply.
    fn ask<'a, C: Call<'a>>(&mut self, call: &C) -> Vec<u8> {
        let record = self.record(call, true);
        let reply = self.worker.serve(&record).unwrap();
        assert!(reply.flags().unwrap().is_reply() && reply.seq() == self.seq && reply.op() == C::OP);
        match reply.arguments(LIMITS).unwrap() {
            accel_proto::Arguments::Inline(bytes) => bytes.to_vec(),
            accel_proto::Arguments::Message(span) => {
                let mut bytes = vec![0; usize::try_from(span.length).unwrap()];
                let region = self
                    .client
                    .window
                    .as_ref()
                    .unwrap()
                    .slice(span.offset, span.length)
                    .unwrap();
                region.read(0, &mut bytes).unwrap();
                bytes
            }
        }
    }

    fn status<'a, C: Call<'a>>(&mut self, call: &C) -> i32 {
        let bytes = self.ask(call);
        let mut reader = Reader::new(&bytes, LIMITS);
        let status = C::Reply::read(&mut reader, call).unwrap().status();
        reader.finish().unwrap();
        status
    }

    fn device(&mut self) -> (Handle<Platform>, Handle<Device>) {
        let call = GetPlatformIDs {
            num_entries: 4,
            platforms: true,
            num_platforms: true,
            reply: REPLIES,
        };
        let bytes = self.ask(&call);
        let reply = GetPlatformIDsReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        assert_eq!((reply.status, reply.num_platforms), (0, Some(1)));
        let platform = reply.platforms.unwrap().get(0).unwrap();
        let call = GetDeviceIDs {
            platform,
            device_type: u64::MAX,
            num_entries: 4,
            devices: true,
            num_devices: true,
            reply: REPLIES,
        };
        let bytes = self.ask(&call);
        let reply = GetDeviceIDsReply::read(&mut Reader::new(&bytes, LIMITS), &call).unwrap();
        assert_eq!((reply.status, reply.num_devices), (0, Some(1)));
        (platform, reply.devices.unwrap().get(0).unwrap())
    }

    fn context(&mut self, name: Handle<Context>) -> Handle<Device> {
        let (platform, device) = self.device();
        let devices = [device];
        let properties = [0x1084, i64::from(platform.raw()), 0];
        let create = CreateContext {
            properties: Some(List::new(&properties)),
            num_devices: 1,
            devices: Some(List::new(&devices)),
            pfn_notify: Callback(0),
            returned: name,
        };
        assert_eq!(self.status(&create), 0);
        device
    }

    /// A context, a queue and a buffer of so many bytes, all with the index 1.
    fn buffer(&mut self, size: u64) -> (Handle<Context>, Handle<CommandQueue>, Handle<Mem>) {
        let names = (name(1, 1), name(1, 1), name(1, 1));
        let device = self.context(names.0);
        let queue = CreateCommandQueue {
            context: names.0,
            device,
            properties: 0,
            returned: names.1,
        };
        assert_eq!(self.status(&queue), 0);
        let buffer = CreateBuffer {
            context: names.0,
            flags: 1,
            size,
            host_ptr: None,
            returned: names.2,
        };
        assert_eq!(self.status(&buffer), 0);
        names
    }

    /// A program and a kernel with the index 1.
    fn kernel(&mut self, context: Handle<Context>) {
        let program = CreateProgramWithSource {
            context,
            count: 0,
            strings: accel_proto::Pieces {
                lengths: List::new(&[]),
                data: Span { offset: 0, length: 0 },
            },
            returned: name(1, 1),
        };
        assert_eq!(self.status(&program), 0);
        let create = CreateKernel {
            program: name(1, 1),
            kernel_name: Some(c"f"),
            returned: name(1, 1),
        };
        assert_eq!(self.status(&create), 0);
    }
}

fn name<K>(index: u32, generation: u32) -> Handle<K> {
    Handle::new(index, generation).unwrap()
}

fn write<'a>(queue: Handle<CommandQueue>, buffer: Handle<Mem>, (offset, size): (u64, u64)) -> EnqueueWriteBuffer<'a> {
    EnqueueWriteBuffer {
        command_queue: queue,
        buffer,
        blocking_write: 0,
        offset,
        size,
        ptr: Some(Span {
            offset: 4096,
            length: size,
        }),
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event: Handle::NULL,
    }
}
