//! A client of a server in this process, with one kernel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_proto::opencl::{
    BuildProgram, CommandQueue, CreateBuffer, CreateCommandQueue, CreateContext, CreateKernel, CreateProgramWithSource,
    EnqueueNDRangeKernel, Finish, GetDeviceIDs, GetPlatformIDs, Kernel, ReleaseMemObject, SetKernelArg,
};
use accel_proto::{AnyHandle, Call, Callback, Handle, List, MESSAGE, Pieces, Record, Span, Value, Writer};
use accel_server::Server;
use accel_transport::{ClientConnection, ClientEnd, Offer, Settings, Transport, connect};
use wire::packet::PacketSocket;

use crate::Result;

const MOST: Duration = Duration::from_secs(60);
const SOURCE: &str = "kernel void turn(global uint *at) {
    uint value = get_global_id(0);
    for (int i = 0; i < 100; i++) value = value * 1664525u + 1013904223u;
    at[get_global_id(0) & 1023] = value;
}";
const REPLIES: Span = Span {
    offset: 0,
    length: 4096,
};
const MESSAGES: u64 = 8192;
const DATA: u64 = 1 << 17;

/// How clients connect.
pub(crate) fn settings() -> Settings {
    Settings {
        transports: vec![Transport::Bell],
        pairs: 1,
        records: 64,
        arena: 1 << 20,
        patience: MOST,
        busy_poll: None,
    }
}

/// A client with a queue and a kernel.
pub(crate) struct Client {
    end: ClientEnd,
    connection: ClientConnection,
    queue: Handle<CommandQueue>,
    kernel: Handle<Kernel>,
}

impl Client {
    /// Connects, and makes the kernel, if the device is one that compiles.
    pub(crate) fn connect(server: &Arc<Server>, compiles: bool) -> Result<Self> {
        let (near, far) = PacketSocket::pair()?;
        let serving = Arc::clone(server);
        std::thread::spawn(move || serving.serve_client(far));
        let offer = Offer {
            transports: vec![Transport::Bell],
            pairs: 1,
            patience: MOST,
        };
        let mut connection = connect(near, &offer)?;
        let mut client = Self {
            end: connection.ends.pop().ok_or("no end")?,
            connection,
            queue: name()?,
            kernel: name()?,
        };
        client.set_up()?;
        if compiles {
            client.build()?;
        }
        client.done(&CreateKernel {
            program: name()?,
            kernel_name: Some(c"turn"),
            returned: client.kernel,
        })?;
        if compiles {
            client.done(&SetKernelArg {
                kernel: client.kernel,
                arg_index: 0,
                arg_size: 8,
                arg_value: Some(Value::Object(AnyHandle {
                    c_type: "cl_mem",
                    raw: name::<accel_proto::opencl::Mem>()?.raw(),
                })),
            })?;
        }
        Ok(client)
    }

    /// One kernel of that size.
    pub(crate) fn launch(&mut self, size: u64, waits: bool) -> Result<()> {
        let sizes = [size];
        let call = EnqueueNDRangeKernel {
            command_queue: self.queue,
            kernel: self.kernel,
            work_dim: 1,
            global_work_offset: None,
            global_work_size: Some(List::new(&sizes)),
            local_work_size: None,
            num_events_in_wait_list: 0,
            event_wait_list: None,
            event: Handle::NULL,
        };
        let record = self.record(&call, false)?;
        self.end.send(&record, MOST)?;
        if waits {
            let queue = self.queue;
            self.done(&Finish { command_queue: queue })?;
        }
        Ok(())
    }

    /// Makes a buffer and releases it: how long it took to make it.
    pub(crate) fn buffer(&mut self, size: u64, generation: u32) -> Result<Duration> {
        let returned = Handle::new(2, generation).ok_or("a name")?;
        let begun = Instant::now();
        self.done(&CreateBuffer {
            context: name()?,
            flags: 1,
            size,
            host_ptr: None,
            returned,
        })?;
        let took = begun.elapsed();
        self.done(&ReleaseMemObject { memobj: returned })?;
        Ok(took)
    }

    fn record<'a, C: Call<'a>>(&self, call: &C, waits: bool) -> Result<wire::ring::Record> {
        let record = match Record::call(call, 0, waits) {
            Ok(record) => record,
            Err(_) => {
                let mut bytes = vec![0; MESSAGE];
                let mut writer = Writer::new(&mut bytes);
                call.write(&mut writer);
                let length = writer.finish().map_err(|_| "a message is too long")?;
                self.put(MESSAGES, &bytes[..length])?;
                let span = Span {
                    offset: MESSAGES,
                    length: length as u64,
                };
                Record::call_in::<C>(span, 0, waits)
            }
        };
        Ok(wire::ring::Record::from_bytes(record.as_bytes()))
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let (window, _) = self.connection.window.as_ref().ok_or("no window")?;
        Ok(window.slice(at, bytes.len() as u64)?.write(0, bytes)?)
    }

    /// A call that has to succeed.
    fn done<'a, C: Call<'a>>(&mut self, call: &C) -> Result<()> {
        let record = self.record(call, true)?;
        let answer = self.end.call(&record, MOST)?.to_bytes();
        match answer.get(16..20) {
            Some([0, 0, 0, 0]) => Ok(()),
            code => Err(format!("call {:#x} failed: {code:?}", C::OP).into()),
        }
    }

    fn set_up(&mut self) -> Result<()> {
        let told = Handle::new(Handle::<()>::FIRST_TOLD, 1);
        self.done(&GetPlatformIDs {
            num_entries: 1,
            platforms: true,
            num_platforms: false,
            reply: REPLIES,
        })?;
        self.done(&GetDeviceIDs {
            platform: told.ok_or("a name")?,
            device_type: u64::from(u32::MAX),
            num_entries: 1,
            devices: true,
            num_devices: false,
            reply: REPLIES,
        })?;
        let device = Handle::new(Handle::<()>::FIRST_TOLD, 1).ok_or("a name")?;
        let context = name()?;
        self.done(&CreateContext {
            properties: None,
            num_devices: 1,
            devices: Some(List::new(&[device])),
            pfn_notify: Callback(0),
            returned: context,
        })?;
        let queue = self.queue;
        self.done(&CreateCommandQueue {
            context,
            device,
            properties: 0,
            returned: queue,
        })?;
        self.put(DATA, SOURCE.as_bytes())?;
        let lengths = [SOURCE.len() as u64];
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
            returned: name()?,
        })?;
        self.done(&CreateBuffer {
            context,
            flags: 1,
            size: 4096,
            host_ptr: None,
            returned: name()?,
        })
    }

    fn build(&mut self) -> Result<()> {
        self.done(&BuildProgram {
            program: name()?,
            num_devices: 0,
            device_list: None,
            options: None,
            pfn_notify: Callback(0),
        })
    }
}

/// The only one of its kind.
fn name<K>() -> Result<Handle<K>> {
    Ok(Handle::new(1, 1).ok_or("a name")?)
}
