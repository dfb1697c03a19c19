//! Two servers: a program's, with the back end `cuda`, and the one that is the device for its libraries, which are ours.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accel_server::{Backend, Server, ServerError, Stats, TenantLimits};
use accel_transport::{Settings, Transport};

use super::Linked;

const MOST: Duration = Duration::from_secs(20);

fn settings() -> Settings {
    Settings {
        transports: vec![Transport::Bell],
        pairs: 4,
        records: 256,
        arena: 1 << 20,
        patience: MOST,
        busy_poll: None,
    }
}

fn serve(backend: Backend, memory: u64, socket: &Path) -> (Arc<Server>, Served) {
    let listener = Server::listen(socket).unwrap();
    let limits = TenantLimits {
        memory: Some(memory),
        ..TenantLimits::default()
    };
    let server = Arc::new(Server::with_limits(backend, settings(), &limits).unwrap());
    let serving = Arc::clone(&server);
    let served = std::thread::spawn(move || serving.serve(&listener));
    (server, served)
}

/// How a server's serving has ended.
type Served = std::thread::JoinHandle<Result<(), ServerError>>;

/// Both servers. The library has one connection in a process, so that there is one of these in a test's.
pub struct Chain {
    pub linked: Linked,
    pub first: Arc<Server>,
    pub device: Arc<Server>,
    /// Of the first one.
    pub served: Served,
}

impl Chain {
    /// A program made of that file; a device by that back end with so many bytes, of which programs may have so many.
    #[allow(
        unsafe_code,
        reason = "the library in this process is told its server by the environment"
    )]
    pub fn new(source: &str, (backend, memory): (Backend, u64), quota: u64) -> Self {
        let linked = Linked::new(source);
        let socket = linked.path().join("device.sock");
        // SAFETY: 1. it is set once, by the one test of its process, before that has other threads that read the environment.
        unsafe { std::env::set_var("BASALT_ACCEL_SOCKET", &socket) };
        let (device, _) = serve(backend, memory, &socket);
        let backend = Backend::cuda(&[linked.path().to_owned()]).unwrap();
        let (first, served) = serve(backend, quota, &linked.socket());
        Self {
            linked,
            first,
            device,
            served,
        }
    }
}

/// A server's statistics when its clients have ended but for so many, and have nothing: what nobody waits for may be on its way.
pub fn ended(server: &Server, left: usize) -> Stats {
    let begin = Instant::now();
    loop {
        let stats = server.stats();
        if stats.clients.len() <= left && stats.memory.used == 0 {
            return stats;
        }
        assert!(begin.elapsed() < MOST, "{stats:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
