//! Namespaces to test in: a host with a link to an outside world, and guests.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::thread::UnshareFlags;

use crate::plan::{GATEWAY_MAC, GUEST_MAC};
use crate::resolvers::Resolvers;
use crate::{Attachment, Egresses, Network, NetworkConfig, tap};
use netlink::Links;

pub(super) const HOST4: &str = "192.0.2.1";
pub(super) const HOST6: &str = "2001:db8::1";
pub(super) const WORLD4: &str = "192.0.2.2";
pub(super) const WORLD6: &str = "2001:db8::2";
/// Where clouds tell their machines secrets.
pub(super) const METADATA: &str = "169.254.169.254";

/// How long something that must come may take, and how long what must not come is waited for.
pub(super) const PATIENCE: Duration = Duration::from_secs(90);
pub(super) const ENOUGH: Duration = Duration::from_millis(400);

type Job = Box<dyn FnOnce() + Send>;

/// A network namespace with a thread in it.
pub(super) struct Place {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    namespace: File,
}

impl Place {
    pub(super) fn new() -> Self {
        let (jobs, queue) = channel::<Job>();
        let (sender, namespace) = channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: 1. only the network namespace of this thread changes.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
            fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").unwrap();
            let links = Links::open().unwrap();
            links.up(links.index("lo").unwrap(), None, None).unwrap();
            sender.send(File::open("/proc/thread-self/ns/net").unwrap()).unwrap();
            queue.into_iter().for_each(|job| job());
        });
        Self {
            jobs: Some(jobs),
            thread: Some(thread),
            namespace: namespace.recv().unwrap(),
        }
    }

    /// Does something there. A panic there is one here.
    pub(super) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (sender, result) = channel();
        let job = move || {
            sender
                .send(std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)))
                .unwrap()
        };
        self.jobs.as_ref().unwrap().send(Box::new(job)).unwrap();
        match result.recv().unwrap() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }

    /// Serves TCP at `address`: says who is there, then echoes.
    pub(super) fn serve_tcp(&self, address: &str) {
        let listener = listen(self, address);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || greet(stream));
            }
        });
    }

    /// Serves UDP at `address`: says who is there, and echoes.
    pub(super) fn serve_udp(&self, address: &str) {
        let address: SocketAddr = address.parse().unwrap();
        let socket = self.run(move || UdpSocket::bind(address).unwrap());
        std::thread::spawn(move || {
            let mut data = vec![0; 65536];
            while let Ok((length, from)) = socket.recv_from(&mut data) {
                let answer = [format!("{} ", from.ip()).as_bytes(), &data[..length]].concat();
                // A test that does not wait for it is over.
                drop(socket.send_to(&answer, from));
            }
        });
    }

    /// Connects, hears by which address it is known, and has a megabyte echoed.
    pub(super) fn tcp(&self, address: &str) -> io::Result<IpAddr> {
        let address = address.parse().unwrap();
        self.run(move || talk(address, 1 << 20))
    }

    /// Whether a connection comes about, given time.
    pub(super) fn reaches(&self, address: &str) -> bool {
        self.connects(address, PATIENCE)
    }

    /// Whether none does.
    pub(super) fn is_cut_off(&self, address: &str) -> bool {
        !self.connects(address, ENOUGH)
    }

    fn connects(&self, address: &str, patience: Duration) -> bool {
        let address: SocketAddr = address.parse().unwrap();
        self.run(move || TcpStream::connect_timeout(&address, patience).is_ok())
    }

    /// Whether anything that is sent from that address is answered.
    pub(super) fn hears(&self, from: &str, address: &str) -> bool {
        self.ask(from, address, 10, ENOUGH).is_ok()
    }

    /// Sends so many bytes and hears by which address it is known.
    pub(super) fn udp(&self, address: &str, length: usize) -> io::Result<IpAddr> {
        let from = if address.starts_with('[') { "::" } else { "0.0.0.0" };
        self.ask(from, address, length, PATIENCE)
    }

    fn ask(&self, from: &str, address: &str, length: usize, patience: Duration) -> io::Result<IpAddr> {
        let (from, address): (IpAddr, SocketAddr) = (from.parse().unwrap(), address.parse().unwrap());
        self.run(move || {
            let socket = UdpSocket::bind((from, 0))?;
            socket.set_read_timeout(Some(patience))?;
            socket.connect(address)?;
            let sent: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).unwrap()).collect();
            socket.send(&sent)?;
            let mut answer = vec![0; 65536];
            let count = socket.recv(&mut answer)?;
            let space = answer.iter().position(|&byte| byte == b' ').unwrap();
            assert_eq!(answer[space + 1..count], sent, "echoed");
            Ok(String::from_utf8_lossy(&answer[..space]).parse().unwrap())
        })
    }

    fn address(&self, link: &'static str, addresses: &'static [(&'static str, u8)]) {
        self.run(move || {
            let links = Links::open().unwrap();
            let index = links.index(link).unwrap();
            links.up(index, None, None).unwrap();
            for (address, prefix) in addresses {
                links.address(index, address.parse().unwrap(), *prefix).unwrap();
            }
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn listen(place: &Place, address: &str) -> TcpListener {
    let address: SocketAddr = address.parse().unwrap();
    place.run(move || TcpListener::bind(address).unwrap())
}

fn greet(mut stream: TcpStream) {
    let peer = stream.peer_addr().unwrap().ip();
    let mut data = vec![0; 65536];
    if stream.write_all(format!("{peer}\n").as_bytes()).is_err() {
        return;
    }
    while let Ok(length @ 1..) = stream.read(&mut data) {
        if stream.write_all(&data[..length]).is_err() {
            return;
        }
    }
}

fn talk(address: SocketAddr, length: usize) -> io::Result<IpAddr> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(byte[0]);
    }
    let sent: Vec<u8> = (0..length).map(|at| u8::try_from(at % 251).unwrap()).collect();
    let mut writer = stream.try_clone()?;
    let copy = sent.clone();
    let writing = std::thread::spawn(move || writer.write_all(&copy));
    let mut back = vec![0; length];
    stream.read_exact(&mut back)?;
    writing.join().unwrap()?;
    assert!(back == sent, "echoed");
    Ok(String::from_utf8_lossy(&line).trim().parse().unwrap())
}

/// A host, the world, and the network on the host.
pub(super) struct World {
    pub(super) world: Place,
    pub(super) host: Arc<Place>,
    pub(super) instance: String,
    /// How many a slot may have, from when the network is opened next.
    pub(super) connections: Option<u32>,
    /// Where slots may send, from when it is opened next.
    pub(super) egresses: Egresses,
    network: Option<Arc<Network>>,
}

static COUNT: AtomicU32 = AtomicU32::new(0);

impl World {
    pub(super) fn new() -> Self {
        let (world, host) = (Place::new(), Place::new());
        let namespace = world.namespace.try_clone().unwrap();
        host.run(move || {
            Links::open()
                .unwrap()
                .pair("eth0", "eth0", namespace.as_fd(), 1500)
                .unwrap()
        });
        host.address("eth0", &[(HOST4, 24), (HOST6, 64)]);
        world.address("eth0", &[(WORLD4, 24), (WORLD6, 64), (METADATA, 32)]);
        host.run(|| {
            let links = Links::open().unwrap();
            let index = links.index("eth0").unwrap();
            for (to, via) in [("0.0.0.0", WORLD4), ("::", WORLD6)] {
                links
                    .route((to.parse().unwrap(), 0), index, Some(via.parse().unwrap()))
                    .unwrap();
            }
        });
        let instance = format!("t{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut made = Self {
            world,
            host: Arc::new(host),
            instance,
            connections: None,
            egresses: Egresses::default(),
            network: None,
        };
        made.open();
        made
    }

    pub(super) fn config(&self) -> NetworkConfig {
        NetworkConfig {
            resolvers: Resolvers {
                v4: Some(WORLD4.parse().unwrap()),
                v6: Some(WORLD6.parse().unwrap()),
                search: vec!["example".to_owned()],
            },
            connections: self.connections,
            ..NetworkConfig::new(&self.instance)
        }
    }

    /// Opens the network, once more if it is open.
    pub(super) fn open(&mut self) {
        self.network = None;
        let (config, egresses) = (self.config(), self.egresses.clone());
        let open = move || Network::open(&config, &egresses).unwrap();
        self.network = Some(Arc::new(self.host.run(open)));
    }

    /// Does something with the network, on the host.
    pub(super) fn with<T: Send + 'static>(&self, job: impl FnOnce(&Network) -> T + Send + 'static) -> T {
        let network = Arc::clone(self.network.as_ref().unwrap());
        self.host.run(move || job(&network))
    }

    /// A guest in a slot.
    pub(super) fn guest(&self, slot: u32) -> Guest {
        Guest::new(self.with(move |network| network.attach(slot, 1).unwrap()))
    }

    pub(super) fn teardown(&mut self) {
        if let Some(network) = self.network.take() {
            self.host
                .run(move || Arc::into_inner(network).unwrap().teardown())
                .unwrap();
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.teardown();
        } else if let Some(network) = self.network.take() {
            drop(self.host.run(move || Arc::into_inner(network).map(Network::teardown)));
        }
    }
}

/// A guest's kernel, joined to its slot's TAP.
pub(super) struct Guest {
    pub(super) place: Place,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Guest {
    pub(super) fn new(attachment: Attachment) -> Self {
        let place = Place::new();
        let guest = attachment.guest;
        let mtu = attachment.mtu;
        let own = place.run(move || {
            let tap = tap::open("eth0", false).unwrap();
            let links = Links::open().unwrap();
            let index = links.index("eth0").unwrap();
            links.up(index, Some(mtu), Some(GUEST_MAC)).unwrap();
            for address in &guest.addresses {
                links.address(index, address.address, address.prefix).unwrap();
            }
            for gateway in &guest.gateways {
                assert_eq!(gateway.mac, GATEWAY_MAC);
                let all = if gateway.address.is_ipv4() { "0.0.0.0" } else { "::" };
                links
                    .route((all.parse().unwrap(), 0), index, Some(gateway.address))
                    .unwrap();
            }
            tap
        });
        let stop = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&stop);
        let [slot] = <[OwnedFd; 1]>::try_from(attachment.taps).unwrap();
        let thread = std::thread::spawn(move || join(&slot, &own, &until));
        Self {
            place,
            stop,
            thread: Some(thread),
        }
    }

    /// Gives the guest one more address.
    pub(super) fn pretend(&self, address: &'static str) {
        self.place.run(move || {
            let links = Links::open().unwrap();
            let index = links.index("lo").unwrap();
            let prefix = if address.contains(':') { 128 } else { 32 };
            links.address(index, address.parse().unwrap(), prefix).unwrap();
        });
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// Carries packets between two TAPs, header and all.
fn join(one: &OwnedFd, two: &OwnedFd, stop: &AtomicBool) {
    for tap in [one, two] {
        offload(tap);
        rustix::io::ioctl_fionbio(tap, true).unwrap();
    }
    let mut packet = vec![0; 70_000];
    let patience = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    while !stop.load(Ordering::Acquire) {
        for (from, to) in [(one, two), (two, one)] {
            while let Ok(length) = rustix::io::read(from, &mut packet[..]) {
                // A link that is not up yet, or not any more, takes none.
                let _ = rustix::io::write(to, &packet[..length]);
            }
        }
        let mut fds = [PollFd::new(one, PollFlags::IN), PollFd::new(two, PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, Some(&patience));
    }
}

/// TUNSETOFFLOAD: checksums (1), and segmentation of IPv4 (2) and IPv6 (4), are for whoever reads.
fn offload(tap: &OwnedFd) {
    const TUNSETOFFLOAD: libc::Ioctl = 0x4004_54d0_u32 as libc::Ioctl;
    // SAFETY: 1. TUNSETOFFLOAD takes a number and touches no memory.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), TUNSETOFFLOAD, 7) };
    assert_eq!(result, 0);
}
