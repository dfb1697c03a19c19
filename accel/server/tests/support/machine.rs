//! A machine that is saved: a server in this process, the VMM's and the guest's side of it, and the file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use accel_server::{Backend, Guest, Output, Refusal, Server, Slot, Slots};
use accel_transport::{ClientConnection, Offer, Settings, Transport, connect};
use agent_api::accelerator::{Begin, FromGuest, FromHost, receive, send};
use wire::packet::PacketSocket;
use wire::{FrameReader, FrameWriter};

use super::*;

/// The whole window is one part of it: 16 MiB of arena and the rings.
pub(crate) const SIZE: u64 = 20 << 20;
pub(crate) const PAIRS: u32 = 2;

/// A server in this process, and the guest's side of its vsock.
pub(crate) struct Host {
    pub(crate) guest: Arc<Guest>,
    streams: mpsc::Receiver<(Begin, FrameReader<UnixStream>)>,
    _directory: tempfile::TempDir,
}

impl Host {
    pub(crate) fn new(backend: Backend, window: &File) -> Self {
        Self::deaf_at_first(backend, window, 0)
    }

    /// One whose guest's agent hears nothing by so many connections.
    pub(crate) fn deaf_at_first(backend: Backend, window: &File, deaf: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let vsock = directory.path().join("vsock");
        let listener = UnixListener::bind(&vsock).unwrap();
        let (tell, streams) = mpsc::channel();
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let mut line = String::new();
                BufReader::with_capacity(1, &stream).read_line(&mut line).unwrap();
                if index < deaf {
                    stream.shutdown(Shutdown::Read).unwrap();
                    stream.write_all(b"OK 1073741824\n").unwrap();
                    continue;
                }
                stream.write_all(b"OK 1073741824\n").unwrap();
                let mut reader = FrameReader::new(stream);
                let begin = receive(&mut reader).unwrap().unwrap();
                if tell.send((begin, reader)).is_err() {
                    return;
                }
            }
        });
        let settings = Settings {
            transports: vec![Transport::Spin],
            pairs: PAIRS,
            records: 64,
            arena: ARENA,
            patience: MOST,
            busy_poll: Some(Duration::from_micros(200)),
        };
        let server = Arc::new(Server::new(backend, settings));
        let slot = Slot {
            name: "slot-0".to_owned(),
            offset: 0,
            length: SIZE,
        };
        let slots = Slots::new(window.try_clone().unwrap(), vec![slot]).unwrap();
        Self {
            guest: Arc::new(Guest::new(server, slots, vsock)),
            streams,
            _directory: directory,
        }
    }

    pub(crate) fn serve(&self) {
        let guest = Arc::clone(&self.guest);
        std::thread::spawn(move || guest.serve());
    }

    pub(crate) fn next(&self) -> (Begin, FrameReader<UnixStream>) {
        self.streams.recv_timeout(MOST).unwrap()
    }

    /// A client's streams, in the order of its pairs.
    fn pairs(&self) -> Vec<UnixStream> {
        let pair = |expected| match self.next() {
            (Begin::Pair { client: 1, pair }, reader) if pair == expected => reader.into_inner(),
            (other, _) => panic!("{other:?}"),
        };
        (0..PAIRS).map(pair).collect()
    }
}

/// What goes to a server from a client's socket: wake-ups, to whichever stream the server has now.
pub(crate) struct Forwarded {
    to: Vec<Arc<Mutex<UnixStream>>>,
    /// A server whose client hangs up lets the window go, which is another one's.
    before: Vec<UnixStream>,
}

impl Forwarded {
    pub(crate) fn new(own: Vec<UnixStream>, streams: Vec<UnixStream>) -> Self {
        let forwarded = own.into_iter().zip(streams).map(|(mut own, stream)| {
            let stream = Arc::new(Mutex::new(stream));
            let to = Arc::clone(&stream);
            std::thread::spawn(move || {
                let mut bytes = [0; 64];
                while let Ok(read @ 1..) = own.read(&mut bytes) {
                    // A server that was saved is nobody's any more.
                    drop(to.lock().unwrap().write_all(&bytes[..read]));
                }
            });
            stream
        });
        Self {
            to: forwarded.collect(),
            before: Vec::new(),
        }
    }

    fn to(&mut self, streams: Vec<UnixStream>) {
        for (place, stream) in self.to.iter().zip(streams) {
            self.before.push(std::mem::replace(&mut *place.lock().unwrap(), stream));
            place.lock().unwrap().write_all(b"1").unwrap();
        }
    }
}

/// A program of the guest: its connection, and the agent's half of it.
pub(crate) struct Running {
    pub(crate) thread: Thread,
    pub(crate) forwarded: Forwarded,
    /// A server whose agent hangs up lets the window go, which is another one's.
    pub(crate) controls: Vec<(FrameReader<UnixStream>, FrameWriter<UnixStream>)>,
    /// What it has said first.
    pub(crate) hello: String,
    _connection: ClientConnection,
    _socket: PacketSocket,
}

impl Running {
    pub(crate) fn start(host: &Host, window: &File) -> Self {
        let (begin, mut reader) = host.next();
        assert!(
            matches!(&begin, Begin::Control { resumed, .. } if resumed.is_empty()),
            "{begin:?}"
        );
        let writer = FrameWriter::new(reader.get_ref().try_clone().unwrap());
        let (socket, theirs) = PacketSocket::pair().unwrap();
        let client = std::thread::spawn(move || {
            let offer = Offer {
                transports: vec![Transport::Spin],
                pairs: PAIRS,
                patience: MOST,
            };
            connect(theirs, &offer).unwrap()
        });
        socket.wait_to_receive(Instant::now() + MOST).unwrap();
        let (hello, _) = socket.receive().unwrap();
        let hello = String::from_utf8(hello).unwrap();
        let asked = FromGuest::Connect {
            client: 1,
            hello: hello.clone(),
            free: vec!["slot-0".to_owned()],
        };
        send(&writer, &asked).unwrap();
        let streams = host.pairs();
        let accepted = receive(&mut reader).unwrap().unwrap();
        let FromHost::Accept { welcome, .. } = accepted else {
            panic!("{accepted:?}");
        };
        let (own, given): (Vec<_>, Vec<_>) = (0..PAIRS).map(|_| UnixStream::pair().unwrap()).unzip();
        let mut fds: Vec<OwnedFd> = vec![window.try_clone().unwrap().into()];
        fds.extend(given.into_iter().map(OwnedFd::from));
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        socket.send(welcome.as_bytes(), &fds).unwrap();
        let mut connection = client.join().unwrap();
        Self {
            thread: Thread {
                end: connection.ends.remove(0),
                window: connection.window.as_ref().unwrap().0.clone(),
            },
            forwarded: Forwarded::new(own, streams),
            controls: vec![(reader, writer)],
            hello,
            _connection: connection,
            _socket: socket,
        }
    }

    /// Another server has its window now.
    pub(crate) fn go_on_with(&mut self, host: &Host) {
        let (begin, mut reader) = host.next();
        assert!(
            matches!(&begin, Begin::Control { resumed, .. } if *resumed == [1]),
            "{begin:?}"
        );
        self.forwarded.to(host.pairs());
        let accepted = receive(&mut reader).unwrap();
        assert!(
            matches!(
                accepted,
                Some(FromHost::Accept {
                    client: 1,
                    file: None,
                    pairs: PAIRS,
                    ..
                })
            ),
            "{accepted:?}"
        );
        let writer = FrameWriter::new(reader.get_ref().try_clone().unwrap());
        self.controls.push((reader, writer));
    }
}

pub(crate) struct ToFile(File);

impl Output for ToFile {
    fn put(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }
}

/// A server's state in a file; the server does not go on before what is told with it is dropped.
pub(crate) fn save(host: &Host, patience: Duration) -> Result<(File, mpsc::Sender<()>), Refusal> {
    let file = tempfile::tempfile().unwrap();
    let (go, gone) = mpsc::channel::<()>();
    let (tell, told) = mpsc::channel();
    let (guest, mut output) = (Arc::clone(&host.guest), ToFile(file.try_clone().unwrap()));
    std::thread::spawn(move || {
        guest.save(&mut output, patience, |outcome| {
            let outcome = outcome.as_ref().copied().map_err(ToString::to_string);
            tell.send(outcome).unwrap();
            // Its end is what is waited for.
            _ = gone.recv();
        });
    });
    match told.recv_timeout(MOST).unwrap() {
        Ok(()) => Ok((file, go)),
        Err(reason) => Err(Refusal::Format(reason)),
    }
}

pub(crate) fn window() -> File {
    base::memfd::sized("window", SIZE).unwrap()
}

/// The same file with another state in it, as a server can write it that a program has taken over.
pub(crate) fn changed(file: &File, change: impl FnOnce(&mut serde_json::Value)) -> File {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let trailer = bytes.split_off(bytes.len() - 24);
    let number = |at: usize| u64::from_le_bytes(trailer[at..at + 8].try_into().unwrap());
    let (at, length) = (number(0), usize::try_from(number(8)).unwrap());
    let begin = usize::try_from(at).unwrap();
    let mut state = serde_json::from_slice(&bytes[begin..begin + length]).unwrap();
    change(&mut state);
    let state = serde_json::to_vec(&state).unwrap();
    bytes.truncate(begin);
    bytes.extend(&state);
    bytes.extend(at.to_le_bytes());
    bytes.extend((state.len() as u64).to_le_bytes());
    bytes.extend(&trailer[16..]);
    let other = tempfile::tempfile().unwrap();
    other.write_all_at(&bytes, 0).unwrap();
    other
}

pub(crate) fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap()))
        .collect()
}

/// A server of a machine, served from a window, and a program that it serves.
pub(crate) fn serving(backend: Backend) -> (File, Host, Running) {
    let window = window();
    let host = Host::new(backend, &window);
    host.serve();
    let program = Running::start(&host, &window);
    (window, host, program)
}

pub(crate) fn launch(
    thread: &mut Thread,
    queue: Handle<CommandQueue>,
    kernel: Handle<Kernel>,
    count: u64,
    event: Handle<Event>,
) {
    thread.send(&EnqueueNDRangeKernel {
        command_queue: queue,
        kernel,
        work_dim: 1,
        global_work_offset: None,
        global_work_size: Some(List::new(&[count])),
        local_work_size: None,
        num_events_in_wait_list: 0,
        event_wait_list: None,
        event,
    });
}

pub(crate) fn contents(thread: &mut Thread, queue: Handle<CommandQueue>, buffer: Handle<Mem>, length: u64) -> Vec<u8> {
    thread.done(&read(queue, buffer, length));
    thread.get(DATA + (4 << 20), usize::try_from(length).unwrap())
}
