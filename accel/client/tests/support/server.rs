//! A server of the tests: buffers are bytes, commands are done when they are taken, and a kernel adds a number to each byte. It counts what it
//! is asked, and refuses what does not exist, so that whatever comes too early is seen.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use accel_proto::opencl::{self as calls, AnyCall, AnyReply};
use accel_proto::{Arguments, Handle, Limits, List, Memory, Reader, Record, Span, Value, Writer};
use accel_transport::{ServerEnd, Settings, Transport, accept};
use accel_window::Window;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

/// A read of so many bytes is refused.
pub(crate) const REFUSED: usize = 13;

/// The largest work-group.
pub(crate) const LOCAL: u64 = 8;

const MOST: Duration = Duration::from_secs(20);
const PATIENCE: Duration = Duration::from_secs(2);

/// What a client has there.
#[derive(Default)]
struct State {
    objects: HashSet<(&'static str, u32)>,
    buffers: HashMap<u32, Vec<u8>>,
    /// Of one kernel: what is added, to which buffer.
    arguments: HashMap<u32, Vec<u8>>,
    target: Option<u32>,
    /// User events that are not set.
    unset: HashSet<u32>,
    failed: i32,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Before each record but calls that are waited for.
    pause: AtomicU64,
    asked: Mutex<HashMap<u16, u64>>,
    /// Of these, the ones whose answer somebody waited for.
    waited: AtomicU64,
    ends: AtomicBool,
}

/// A server at a socket, for as long as it lives.
pub(crate) struct Server {
    pub(crate) socket: PathBuf,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
    ways: Vec<Transport>,
    dir: tempfile::TempDir,
}

impl Server {
    /// That has these ways, with so many bytes of arena.
    pub(crate) fn start_by(ways: &[Transport], arena: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut server = Self {
            socket: dir.path().join("accel.sock"),
            shared: Arc::default(),
            accepting: None,
            ways: ways.to_vec(),
            dir,
        };
        server.accept(arena);
        server
    }

    fn accept(&mut self, arena: u64) {
        let _ = std::fs::remove_file(&self.socket);
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let listener: OwnedFd = listener.unwrap();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&self.socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let (shared, ways) = (Arc::clone(&self.shared), self.ways.clone());
        self.accepting = Some(std::thread::spawn(move || {
            while let Ok(socket) = rustix::net::accept_with(&listener, SocketFlags::CLOEXEC) {
                if shared.ends.load(Ordering::SeqCst) {
                    return;
                }
                let (shared, ways) = (Arc::clone(&shared), ways.clone());
                std::thread::spawn(move || serve(PacketSocket::from_fd(socket), (ways, arena), &shared));
            }
        }));
    }

    /// It dies, as its clients see it; its objects are gone.
    pub(crate) fn die(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let _ = rustix::net::connect(&socket, &SocketAddrUnix::new(&self.socket).unwrap());
        if let Some(accepting) = self.accepting.take() {
            accepting.join().unwrap();
        }
    }

    /// Another one comes in its place.
    pub(crate) fn restart(&mut self, arena: u64) {
        self.shared = Arc::default();
        self.accept(arena);
    }

    /// How long each record that nobody waits for takes.
    pub(crate) fn pause(&self, pause: Duration) {
        self.shared
            .pause
            .store(u64::try_from(pause.as_micros()).unwrap(), Ordering::SeqCst);
    }

    /// How often a call has come.
    pub(crate) fn asked(&self, op: u16) -> u64 {
        self.shared.asked.lock().unwrap().get(&op).copied().unwrap_or_default()
    }

    /// How many calls have come whose answer was waited for.
    pub(crate) fn waited(&self) -> u64 {
        self.shared.waited.load(Ordering::SeqCst)
    }

    /// How many objects of a kind there are.
    pub(crate) fn objects(&self, c_type: &str) -> usize {
        let state = self.shared.state.lock().unwrap();
        state.objects.iter().filter(|(kind, _)| *kind == c_type).count()
    }

    pub(crate) fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.accepting.is_some() {
            self.die();
        }
    }
}

fn serve(socket: PacketSocket, (transports, arena): (Vec<Transport>, u64), shared: &Arc<Shared>) {
    let settings = Settings {
        transports,
        pairs: 16,
        records: 64,
        arena,
        patience: PATIENCE,
        busy_poll: None,
    };
    let Ok(mut met) = accept(socket, &settings) else {
        return;
    };
    let window = met.window.clone().unwrap();
    let ends = std::mem::take(&mut met.ends);
    let threads: Vec<_> = ends
        .into_iter()
        .map(|end| {
            let (window, shared) = (window.clone(), Arc::clone(shared));
            std::thread::spawn(move || take(end, &window, &shared))
        })
        .collect();
    while !shared.ends.load(Ordering::SeqCst) && !met.is_over() {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(met);
    for thread in threads {
        thread.join().unwrap();
    }
}

fn take(mut end: ServerEnd, window: &Window, shared: &Shared) {
    let limits = Limits {
        arena: window.geometry().arena(),
    };
    while let Ok(request) = end.receive(Some(MOST)) {
        let record = Record::from_bytes(request.to_bytes());
        let bytes = match record.arguments(limits).unwrap() {
            Arguments::Inline(bytes) => bytes.to_vec(),
            Arguments::Message(span) => bytes_at(window, span),
        };
        let mut reader = Reader::new(&bytes, limits);
        let call = AnyCall::read(record.op(), &mut reader).unwrap();
        reader.finish().unwrap();
        *shared.asked.lock().unwrap().entry(record.op()).or_default() += 1;
        let waits = record.flags().unwrap().waits();
        if waits {
            shared.waited.fetch_add(1, Ordering::SeqCst);
        } else {
            std::thread::sleep(Duration::from_micros(shared.pause.load(Ordering::SeqCst)));
        }
        let answer = answer(&call, window, shared, waits);
        if shared.ends.load(Ordering::SeqCst) {
            return;
        }
        if let Some(answer) = &answer
            && let Ok(Arguments::Message(span)) = Record::from_bytes(answer.to_bytes()).arguments(limits)
            && end.send_data(span.offset, span.length, MOST).is_err()
        {
            return;
        }
        if end.finish(&request, answer.as_ref(), MOST).is_err() {
            return;
        }
    }
}

fn bytes_at(window: &Window, span: Span) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(span.length).unwrap()];
    window
        .slice(span.offset, span.length)
        .unwrap()
        .read(0, &mut bytes)
        .unwrap();
    bytes
}

/// Its record, if somebody waits; with what is left of the arguments of the call, where a long answer goes.
fn answer(call: &AnyCall<'_>, window: &Window, shared: &Shared, waits: bool) -> Option<wire::ring::Record> {
    let mut bytes = vec![0; 1 << 16];
    let status = {
        let mut writer = Writer::new(&mut bytes);
        let reply = reply(call, window, shared, &mut writer);
        let length = writer.finish().unwrap();
        bytes.truncate(length);
        reply
    };
    if !waits {
        let mut state = shared.state.lock().unwrap();
        if state.failed == 0 {
            state.failed = status;
        }
        return None;
    }
    let mut record = [0; 64];
    record[..2].copy_from_slice(&call.op().to_le_bytes());
    let mut flags = 2_u16;
    if bytes.len() <= 48 {
        record[16..16 + bytes.len()].copy_from_slice(&bytes);
    } else {
        flags |= 1;
        let mut place = None;
        call.spans(&mut |span| place = Some(span));
        let place = place.unwrap();
        window
            .slice(place.offset, bytes.len() as u64)
            .unwrap()
            .write(0, &bytes)
            .unwrap();
        record[16..24].copy_from_slice(&place.offset.to_le_bytes());
    }
    record[2..4].copy_from_slice(&flags.to_le_bytes());
    record[4..8].copy_from_slice(&u32::try_from(bytes.len()).unwrap().to_le_bytes());
    Some(wire::ring::Record::from_bytes(&record))
}

/// Writes the reply; its status.
fn reply(call: &AnyCall<'_>, window: &Window, shared: &Shared, writer: &mut Writer<'_>) -> i32 {
    let first = |index: u32| Handle::new((1 << 19) + index, 1).unwrap();
    let (platforms, devices) = ([first(0)], [Handle::new((1 << 19) + 7, 1).unwrap()]);
    let value;
    let text = |text: &str| [text.as_bytes(), &[0]].concat();
    let mut told = |status: i32, reply: AnyReply<'_>| {
        reply.write(writer);
        status
    };
    macro_rules! info {
        ($kind:ident $reply:ident $asked:expr, $answer:expr) => {{
            value = $answer;
            let fits = value.len() as u64 <= $asked.param_value_size && !value.is_empty();
            if !fits {
                return told(-30, call.failed(-30));
            }
            let reply = calls::$reply {
                status: 0,
                param_value: Some(List::new(&value)),
                param_value_size_ret: Some(value.len() as u64),
            };
            return told(0, AnyReply::$kind(reply));
        }};
    }
    match call {
        AnyCall::GetPlatformIDs(asked) => {
            let reply = calls::GetPlatformIDsReply {
                status: 0,
                platforms: asked.platforms.then(|| List::new(&platforms)),
                num_platforms: Some(1),
            };
            return told(0, AnyReply::GetPlatformIDs(reply));
        }
        AnyCall::GetDeviceIDs(asked) => {
            let reply = calls::GetDeviceIDsReply {
                status: 0,
                devices: asked.devices.then(|| List::new(&devices)),
                num_devices: asked.num_devices.then_some(1),
            };
            return told(0, AnyReply::GetDeviceIDs(reply));
        }
        AnyCall::GetPlatformInfo(asked) => info!(GetPlatformInfo GetPlatformInfoReply asked, match asked.param_name {
            0x0902 => text("A platform of the tests whose name does not fit into a record of 64 bytes"),
            0x0904 => text("cl_khr_gl_sharing"),
            _ => Vec::new(),
        }),
        AnyCall::GetDeviceInfo(asked) => info!(GetDeviceInfo GetDeviceInfoReply asked, match asked.param_name {
            0x102b => text("A device"),
            0x1031 => u64::from(platforms[0].raw()).to_le_bytes().to_vec(),
            _ => Vec::new(),
        }),
        AnyCall::GetCommandQueueInfo(asked) => info!(GetCommandQueueInfo GetCommandQueueInfoReply asked, vec![0; 8]),
        AnyCall::GetKernelInfo(asked) => info!(GetKernelInfo GetKernelInfoReply asked, 2_u32.to_le_bytes().to_vec()),
        // The first argument of a kernel is a buffer, the other one is none.
        AnyCall::GetKernelArgInfo(asked) => {
            let qualifier = if asked.arg_index == 0 { 0x119b_u32 } else { 0x119e };
            info!(GetKernelArgInfo GetKernelArgInfoReply asked, qualifier.to_le_bytes().to_vec())
        }
        AnyCall::GetEventInfo(asked) => {
            let state = shared.state.lock().unwrap();
            let found = state.objects.contains(&("cl_event", asked.event.raw()));
            let unset = state.unset.contains(&asked.event.raw());
            drop(state);
            match found {
                true => info!(GetEventInfo GetEventInfoReply asked, i32::from(unset).to_le_bytes().to_vec()),
                false => return told(-58, call.failed(-58)),
            }
        }
        _ => {}
    }
    let status = act(call, window, shared);
    if status != 0 {
        unmake(call, shared);
    }
    told(status, call.failed(status))
}

/// What a call that was refused was to make is not there.
fn unmake(call: &AnyCall<'_>, shared: &Shared) {
    call.effects(&mut |effect, object| {
        if let (accel_proto::Effect::Creates, accel_proto::Object::Handle(object)) = (effect, object) {
            let mut state = shared.state.lock().unwrap();
            state.objects.remove(&(object.c_type, object.raw));
        }
    });
}

/// Does what a call that only has a status does.
fn act(call: &AnyCall<'_>, window: &Window, shared: &Shared) -> i32 {
    let mut state = shared.state.lock().unwrap();
    let mut missing = false;
    call.effects(&mut |effect, object| {
        if let accel_proto::Object::Handle(object) = object {
            let key = (object.c_type, object.raw);
            let told = object.raw & ((1 << 20) - 1) >= 1 << 19;
            match effect {
                accel_proto::Effect::Creates => _ = state.objects.insert(key),
                _ if told || state.objects.contains(&key) => {}
                _ => missing = true,
            }
        }
    });
    if missing {
        return -34;
    }
    match call {
        AnyCall::CreateBuffer(call) => {
            let bytes = call.host_ptr.map_or_else(
                || vec![0; usize::try_from(call.size).unwrap()],
                |memory| match memory {
                    Memory::Arena(span) => bytes_at(window, span),
                    Memory::Svm(address) => panic!("{address:?}: no device here has shared virtual memory"),
                },
            );
            state.buffers.insert(call.returned.raw(), bytes);
        }
        AnyCall::EnqueueWriteBuffer(call) => {
            let bytes = bytes_at(window, call.ptr.unwrap());
            let at = usize::try_from(call.offset).unwrap();
            state.buffers.get_mut(&call.buffer.raw()).unwrap()[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        AnyCall::EnqueueReadBuffer(call) if usize::try_from(call.size) == Ok(REFUSED) => return -5,
        AnyCall::EnqueueReadBuffer(call) => copy_out(window, &state, call.buffer.raw(), call.offset, call.ptr.unwrap()),
        AnyCall::EnqueueMapBuffer(call) => copy_out(window, &state, call.buffer.raw(), call.offset, call.returned),
        AnyCall::EnqueueUnmapMemObject(call) => {
            let bytes = bytes_at(window, call.mapped_ptr);
            state.buffers.get_mut(&call.memobj.raw()).unwrap()[..bytes.len()].copy_from_slice(&bytes);
        }
        AnyCall::SetKernelArg(call) => match call.arg_value {
            Some(Value::Object(_)) if call.arg_index != 0 => return -50,
            Some(Value::Object(object)) => state.target = Some(object.raw),
            Some(Value::Bytes(bytes)) => _ = state.arguments.insert(call.kernel.raw(), bytes.to_vec()),
            None => {}
        },
        AnyCall::EnqueueNDRangeKernel(call) => {
            if call
                .local_work_size
                .and_then(|sizes| sizes.get(0))
                .is_some_and(|size| size > LOCAL)
            {
                return -54;
            }
            let added = state
                .arguments
                .get(&call.kernel.raw())
                .and_then(|bytes| bytes.first().copied())
                .unwrap_or_default();
            let target = state.target.unwrap();
            state
                .buffers
                .get_mut(&target)
                .unwrap()
                .iter_mut()
                .for_each(|byte| *byte = byte.wrapping_add(added));
        }
        AnyCall::CreateUserEvent(call) => _ = state.unset.insert(call.returned.raw()),
        AnyCall::SetUserEventStatus(call) => {
            state.unset.remove(&call.event.raw());
            shared.changed.notify_all();
        }
        AnyCall::WaitForEvents(call) => {
            let names: Vec<u32> = call.event_list.unwrap().iter().map(Handle::raw).collect();
            while names.iter().any(|name| state.unset.contains(name)) && !shared.ends.load(Ordering::SeqCst) {
                state = shared.changed.wait_timeout(state, Duration::from_millis(20)).unwrap().0;
            }
        }
        AnyCall::Finish(_) => return std::mem::take(&mut state.failed),
        _ => {}
    }
    call.effects(&mut |effect, object| {
        if let (accel_proto::Effect::Drops, accel_proto::Object::Handle(object)) = (effect, object) {
            state.objects.remove(&(object.c_type, object.raw));
        }
    });
    0
}

fn copy_out(window: &Window, state: &State, buffer: u32, offset: u64, to: Span) {
    let at = usize::try_from(offset).unwrap();
    let bytes = &state.buffers[&buffer][at..at + usize::try_from(to.length).unwrap()];
    window.slice(to.offset, to.length).unwrap().write(0, bytes).unwrap();
}
