//! Virtual machines with an interface on the node's network: a world outside, two guests that must not meet, a published
//! port, several queues, and a pause in between.
//!
//! The world is a network namespace of the lab's host; its servers are the guest half of this case, started there.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use agent_api::{Connection, ExecRequest};
use anyhow::{Context, Result, bail, ensure};
use network::resolvers::Resolvers;
use network::{Egresses, Network, NetworkConfig, SlotState};
use vmm_api::devices::{MacAddress, NetConfig, NetLimits};

use crate::vm::{self, Builder, Vm, guest_half, install};
use crate::vmm::TRACES;
use crate::{Case, Host};

/// The case.
pub(crate) const CASE: Case = Case {
    name: "network",
    limit: Duration::from_secs(300),
    host,
    guest: Some(guest),
};

const WORLD: &str = "case-world";
const HOST4: &str = "192.0.2.1";
const HOST6: &str = "2001:db8::1";
pub(super) const WORLD4: &str = "192.0.2.2";
pub(super) const WORLD6: &str = "2001:db8::2";
const METADATA: &str = "169.254.169.254";

/// How long what must not come is waited for in an emulated guest.
const ENOUGH: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(20);
/// How often a guest is sent more than it can take, until it shows.
const FLOODS: usize = 20;

fn host(host: &Host) -> Result<()> {
    let world = World::new()?;
    let network = Opened::new()?;
    let outside = ["[::]:7000", "[::]:53"];
    let mut servers = vec![world.serve(&outside)?, serve_here(&["[::]:7001"])?];
    let mut one = Guest::start(host, network.get()?, 0, 2)?;
    if std::env::var_os(TRACES).is_some() {
        // Under strace a packet costs a hundred times as much, and each kind of call is of interest once.
        reaches_the_world(&mut one)?;
        one.vm.vmm.client.pause()?;
        one.vm.vmm.client.resume()?;
        return finish(network, vec![one], &mut servers);
    }
    let mut two = Guest::start(host, network.get()?, 1, 1)?;

    reaches_the_world(&mut one)?;
    reaches_the_world(&mut two)?;
    finds_names(&mut one)?;
    has_queues(&mut one, 2)?;
    has_queues(&mut two, 1)?;
    is_isolated(network.get()?, &mut one, &mut two)?;
    publishes(network.get()?, &world, &mut two)?;
    one.vm.vmm.client.pause()?;
    one.vm.vmm.client.resume()?;
    reaches_the_world(&mut one)?;

    finish(network, vec![one, two], &mut servers)
}

/// Nothing is left of guests that have ended.
fn finish(network: Opened, guests: Vec<Guest>, servers: &mut [Server]) -> Result<()> {
    for guest in guests {
        guest.end()?;
    }
    for slot in [0, 1] {
        network.get()?.detach(slot)?;
    }
    let left = network.get()?.slots()?;
    ensure!(
        left.iter()
            .all(|SlotState { in_use, published, .. }| !in_use && published.is_empty()),
        "slots are left: {left:?}"
    );
    for server in servers {
        server.0.kill()?;
    }
    network.teardown()
}

/// TCP and UDP, IPv4 and IPv6, in packets of all sizes; the world sees the host.
fn reaches_the_world(guest: &mut Guest) -> Result<()> {
    for (server, seen) in [(WORLD4, HOST4), (WORLD6, HOST6)] {
        let address = join(server, 7000);
        for request in [["tcp", "1000000"], ["udp", "10"], ["udp", "1400"], ["udp", "6000"]] {
            let [protocol, length] = request;
            let answer = guest.run(&[protocol, &address, length])?;
            ensure!(
                answer.trim() == seen,
                "by {protocol} to {address} the guest is known as {answer}"
            );
        }
    }
    Ok(())
}

/// The guest's own resolv.conf leads to the host's name server.
fn finds_names(guest: &mut Guest) -> Result<()> {
    let text = guest.run(&["resolv-conf"])?;
    let servers: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("nameserver "))
        .collect();
    ensure!(servers.len() == 2, "the guest's resolv.conf is:\n{text}");
    for (server, seen) in servers.iter().zip([HOST4, HOST6]) {
        let answer = guest.run(&["udp", &join(server, 53), "40"])?;
        ensure!(answer.trim() == seen, "{server} knows the guest as {answer}");
    }
    Ok(())
}

fn has_queues(guest: &mut Guest, count: usize) -> Result<()> {
    let queues = guest.run(&["queues"])?;
    ensure!(queues.trim() == count.to_string(), "{queues} queues instead of {count}");
    Ok(())
}

/// Neither the other guest, nor the host, nor metadata; and a guest is known by its TAP, whatever it calls itself.
fn is_isolated(network: &Network, one: &mut Guest, two: &mut Guest) -> Result<()> {
    two.serve(&["[::]:80"])?;
    let ranges = network.ranges();
    let (slot4, slot6) = (ranges.slot_v4(1)?.to_string(), ranges.slot_v6(1)?.to_string());
    // The host reaches the other guest and the metadata, so they are there.
    for address in [join(&slot4, 80), join(&slot6, 80), join(METADATA, 7000)] {
        ensure!(reach(&address)?, "the host does not reach {address}");
    }
    let forbidden = [
        join(&slot4, 80),
        join(&slot6, 80),
        join(HOST4, 7001),
        join(HOST6, 7001),
        join("10.0.2.15", 7001),
        join(&ranges.host_v4().to_string(), 7001),
        join(&ranges.host_v6().to_string(), 7001),
        join(METADATA, 7000),
    ];
    let arguments: Vec<&str> = ["reach"]
        .into_iter()
        .chain(forbidden.iter().map(String::as_str))
        .collect();
    let reached = one.run(&arguments)?;
    ensure!(reached.trim().is_empty(), "the guest reaches {reached}");
    // Translated, not dropped: the answer goes to the guest's real address, so the name that it made up hears nothing.
    let heard = one.run(&["spoof", &join(WORLD4, 7000), "198.51.100.1", &slot4])?;
    ensure!(heard.trim() == "nothing", "a made-up address hears {heard}");
    Ok(())
}

fn publishes(network: &Network, world: &World, guest: &mut Guest) -> Result<()> {
    guest.serve(&["[::]:8000"])?;
    let mappings = ["18080:8000".parse()?, "18080:8000/udp".parse()?];
    network.publish(1, &mappings)?;
    for (address, seen) in [(join(HOST4, 18080), WORLD4), (join(HOST6, 18080), WORLD6)] {
        for protocol in ["tcp", "udp"] {
            let answer = world.run(&[protocol, &address, "1000"])?;
            ensure!(
                answer.trim() == seen,
                "by {protocol} to {address} the guest sees {answer}"
            );
        }
    }
    ensure!(
        reach("127.0.0.1:18080")?,
        "the host does not reach its own published port"
    );
    outruns(world, guest, &join(HOST4, 18080))?;
    let taken = network.publish(0, &mappings).map_err(|error| error.to_string());
    ensure!(
        taken.as_ref().is_err_and(|error| error.contains("another sandbox")),
        "a port is published twice: {taken:?}"
    );
    network.unpublish(1)?;
    ensure!(!reach("127.0.0.1:18080")?, "the port is still published");
    Ok(())
}

/// More comes than a guest has room for: what does not fit is copied or lost, and the guest is there as before.
fn outruns(world: &World, guest: &mut Guest, address: &str) -> Result<()> {
    let mut copied = 0;
    for _ in 0..FLOODS {
        world.run(&["flood", address, "3000"])?;
        let samples = guest.vm.vmm.client.metrics()?;
        let found = samples.iter().find(|sample| sample.name == "net_copied_packets_total");
        copied = found.context("no such metric")?.value;
        if copied > 0 {
            break;
        }
    }
    ensure!(
        copied > 0,
        "the guest has room for all that comes, which proves nothing"
    );
    let answer = world.run(&["tcp", address, "1000"])?;
    ensure!(answer.trim() == WORLD4, "behind a flood the guest sees {answer}");
    Ok(())
}

/// A VM in a slot.
struct Guest {
    vm: Vm,
    agent: Connection<UnixStream>,
}

impl Guest {
    fn start(host: &Host, network: &Network, slot: u32, queues: usize) -> Result<Self> {
        let host = &Host {
            logs: host.logs.join(format!("guest{slot}")),
            ..host.clone()
        };
        std::fs::create_dir_all(&host.logs)?;
        let attachment = network.attach(slot, queues)?;
        let mut builder = Builder::new(host)?.cpus(u32::try_from(queues)?);
        let taps = attachment.taps.into_iter().map(|tap| builder.fd(tap)).collect();
        let config = NetConfig {
            taps,
            mac: MacAddress(attachment.mac),
            mtu: attachment.mtu,
            limits: NetLimits::default(),
        };
        builder.device("net", &config)?;
        let vm = builder.start()?;
        let mut agent = vm.agent_with(Some(&attachment.guest))?;
        install(&mut agent)?;
        Ok(Self { vm, agent })
    }

    fn run(&mut self, arguments: &[&str]) -> Result<String> {
        guest_half(&mut self.agent, CASE.name, arguments).with_context(|| format!("in the guest: {arguments:?}"))
    }

    /// Serves in the background, for as long as the guest lives.
    fn serve(&mut self, addresses: &[&str]) -> Result<()> {
        // It says when it listens.
        let command = format!(
            "rm -f /ready; /cases guest {} serve {} </dev/null >/ready 2>&1 & \
             until [ -s /ready ]; do sleep 0.1; done",
            CASE.name,
            addresses.join(" ")
        );
        let done = self.agent.exec(&ExecRequest {
            argv: ["/bin/sh", "-c", &command].map(Into::into).to_vec(),
            ..ExecRequest::default()
        })?;
        ensure!(done.collect()?.status.exit_code() == 0, "the guest starts no server");
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        self.vm.vmm.client.stop()?;
        ensure!(self.vm.vmm.wait(vm::BOOT)?, "the VMM ended with a failure");
        Ok(())
    }
}

/// The node's network, removed at the end whatever happens.
pub(super) struct Opened(Option<Network>);

impl Opened {
    pub(super) fn new() -> Result<Self> {
        let config = NetworkConfig {
            resolvers: Resolvers {
                v4: Some(WORLD4.parse()?),
                v6: Some(WORLD6.parse()?),
                search: Vec::new(),
            },
            ..NetworkConfig::new("case")
        };
        Ok(Self(Some(Network::open(&config, &Egresses::default())?)))
    }

    pub(super) fn get(&self) -> Result<&Network> {
        self.0.as_ref().context("the network is closed")
    }

    pub(super) fn teardown(mut self) -> Result<()> {
        let network = self.0.take().context("the network is closed")?;
        Ok(network.teardown()?)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.take().map(Network::teardown) {
            log::error!("the network stays: {error}");
        }
    }
}

/// A namespace behind the host.
pub(super) struct World {
    /// The directory of namespaces was there before.
    keep_directory: bool,
}

const NAMESPACES: &str = "/run/netns";

impl World {
    pub(super) fn new() -> Result<Self> {
        let world = Self {
            keep_directory: std::fs::exists(NAMESPACES)?,
        };
        for command in [
            "netns add case-world",
            "link add case0 type veth peer name eth0 netns case-world",
            "address add 192.0.2.1/24 dev case0",
            "address add 2001:db8::1/64 dev case0 nodad",
            "link set case0 up",
            "route add 169.254.169.254/32 via 192.0.2.2 onlink dev case0",
            "-n case-world link set lo up",
            "-n case-world address add 192.0.2.2/24 dev eth0",
            "-n case-world address add 2001:db8::2/64 dev eth0 nodad",
            "-n case-world address add 169.254.169.254/32 dev lo",
            "-n case-world link set eth0 up",
        ] {
            ip(command)?;
        }
        Ok(world)
    }

    pub(super) fn serve(&self, addresses: &[&str]) -> Result<Server> {
        let mut command = self.command()?;
        command.arg("serve").args(addresses);
        started(command)
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command()?.args(arguments).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(
            output.status.success(),
            "in the world {arguments:?} fails: {text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(text)
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", WORLD]).arg(std::env::current_exe()?);
        command.args(["guest", CASE.name]);
        Ok(command)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The links would go with the namespace, but that stays for as long as a connection in it waits for its other end.
        for command in ["link delete case0", "netns delete case-world"] {
            if let Err(error) = ip(command) {
                log::error!("{error}");
            }
        }
        // ip-netns(8) has made it a mount.
        if !self.keep_directory {
            let gone = rustix::mount::unmount(NAMESPACES, rustix::mount::UnmountFlags::DETACH);
            if let Err(error) = gone.map_err(Into::into).and_then(|()| std::fs::remove_dir(NAMESPACES)) {
                log::error!("{NAMESPACES} stays: {error}");
            }
        }
    }
}

/// A server of this case; ends with it.
pub(super) struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // Fails when it has ended and been waited for, which is fine.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn serve_here(addresses: &[&str]) -> Result<Server> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["guest", CASE.name, "serve"]).args(addresses);
    started(command)
}

/// Waits until it says that it listens.
fn started(mut command: Command) -> Result<Server> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut output = child.stdout.take().context("a server without output")?;
    let server = Server(child);
    let mut byte = [0];
    output.read_exact(&mut byte).context("a server does not start")?;
    Ok(server)
}

pub(super) fn ip(command: &str) -> Result<()> {
    let output = Command::new("ip").args(command.split(' ')).output()?;
    ensure!(
        output.status.success(),
        "ip {command}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn join(ip: &str, port: u16) -> String {
    if ip.contains(':') {
        format!("[{ip}]:{port}")
    } else {
        format!("{ip}:{port}")
    }
}

/// The guest half, and what serves and asks in the world.
fn guest(arguments: &[String]) -> Result<()> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let text = match words.as_slice() {
        ["serve", addresses @ ..] => return serve(addresses),
        ["tcp", address, length] => talk(address.parse()?, length.parse()?)?,
        ["udp", address, length] => ask(None, address.parse()?, length.parse()?, PATIENCE)?,
        ["flood", address, count] => return flood(address.parse()?, count.parse()?),
        ["reach", addresses @ ..] => reached(addresses)?.join(" "),
        ["spoof", address, names @ ..] => spoof(address.parse()?, names)?,
        ["resolv-conf"] => std::fs::read_to_string("/etc/resolv.conf")?,
        ["queues"] => {
            let mut count = 0;
            for entry in std::fs::read_dir("/sys/class/net/eth0/queues")? {
                count += u32::from(entry?.file_name().to_string_lossy().starts_with("rx-"));
            }
            count.to_string()
        }
        _ => bail!("the guest half does not know {arguments:?}"),
    };
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

/// Says who asks, then echoes; TCP and UDP, for ever.
fn serve(addresses: &[&str]) -> Result<()> {
    for address in addresses {
        let listener = TcpListener::bind(address)?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || greet(stream));
            }
        });
        let socket = UdpSocket::bind(address)?;
        std::thread::spawn(move || {
            let mut data = vec![0; 65536];
            while let Ok((length, from)) = socket.recv_from(&mut data) {
                let answer = [format!("{} ", from.ip().to_canonical()).as_bytes(), &data[..length]].concat();
                if let Err(error) = socket.send_to(&answer, from) {
                    log::warn!("{from} is not answered: {error}");
                }
            }
        });
    }
    writeln!(std::io::stdout(), "ready")?;
    loop {
        std::thread::park();
    }
}

fn greet(mut stream: TcpStream) -> Result<()> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    writeln!(stream, "{peer}")?;
    let mut data = vec![0; 65536];
    loop {
        let length = stream.read(&mut data)?;
        if length == 0 {
            return Ok(());
        }
        stream.write_all(&data[..length])?;
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0_u8..251).cycle().take(length).collect()
}

/// Connects, hears who we are, has so many bytes echoed.
fn talk(address: SocketAddr, length: usize) -> Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut line = String::new();
    while !line.ends_with('\n') {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        line.push(char::from(byte[0]));
    }
    let sent = pattern(length);
    let mut back = vec![0; length];
    std::thread::scope(|scope| {
        let mut writer = stream.try_clone()?;
        let sent = &sent;
        let writing = scope.spawn(move || writer.write_all(sent));
        stream.read_exact(&mut back)?;
        writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        anyhow::Ok(())
    })?;
    ensure!(back == sent, "{length} bytes came back changed");
    Ok(line.trim().to_owned())
}

/// Sends a datagram of so many bytes and hears who we are.
fn ask(from: Option<IpAddr>, address: SocketAddr, length: usize, patience: Duration) -> Result<String> {
    let any = if address.is_ipv4() { "0.0.0.0" } else { "::" };
    let socket = UdpSocket::bind((from.map_or_else(|| any.parse(), Ok)?, 0))?;
    socket.set_read_timeout(Some(patience))?;
    socket.connect(address)?;
    let sent = pattern(length);
    socket.send(&sent)?;
    let mut answer = vec![0; 65536];
    let count = socket.recv(&mut answer)?;
    let space = answer
        .iter()
        .position(|&byte| byte == b' ')
        .context("no answer of ours")?;
    ensure!(answer[space + 1..count] == sent, "{length} bytes came back changed");
    Ok(String::from_utf8_lossy(&answer[..space]).into_owned())
}

/// Sends so many datagrams and hears nothing.
fn flood(address: SocketAddr, count: usize) -> Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    socket.connect(address)?;
    let data = pattern(1400);
    for _ in 0..count {
        socket.send(&data)?;
    }
    Ok(())
}

/// Whether a connection comes about, and if not, whether a datagram is answered.
fn reach(address: &str) -> Result<bool> {
    let address: SocketAddr = address.parse()?;
    if TcpStream::connect_timeout(&address, ENOUGH).is_ok() {
        return Ok(true);
    }
    Ok(ask(None, address, 1, ENOUGH).is_ok())
}

/// Those that are reached; all are tried at once.
fn reached<'a>(addresses: &[&'a str]) -> Result<Vec<&'a str>> {
    std::thread::scope(|scope| {
        let tries: Vec<_> = addresses
            .iter()
            .map(|&address| (address, scope.spawn(move || reach(address))))
            .collect();
        let mut reached = Vec::new();
        for (address, thread) in tries {
            if thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?? {
                reached.push(address);
            }
        }
        Ok(reached)
    })
}

/// Takes on other names and tells what is heard by them.
fn spoof(address: SocketAddr, names: &[&str]) -> Result<String> {
    let links = netlink::Links::open()?;
    let lo = links.index("lo")?;
    let began = Instant::now();
    for name in names {
        let name: IpAddr = name.parse()?;
        links.address(lo, name, 32)?;
        if let Ok(heard) = ask(Some(name), address, 1, ENOUGH) {
            return Ok(format!("{name} is known as {heard}"));
        }
    }
    // It was waited for.
    ensure!(began.elapsed() >= ENOUGH, "the datagrams were not sent");
    Ok("nothing".to_owned())
}
