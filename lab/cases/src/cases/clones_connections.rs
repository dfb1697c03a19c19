//! The TCP connections of the case `clones`: what becomes of those that a clone has inherited. Those that lead out of the guest are
//! ended before its processes go on, in every network namespace; those within it go on. Knows no snapshot.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

use super::network::{WORLD4, WORLD6};
use crate::daemon::Daemon;

/// Makes connections and notes in a file each what becomes of them. Arguments: a host outside by IPv4 and by IPv6.
const HOLDER: &str = r"
import ctypes, errno, fcntl, os, socket, struct, sys, threading, time

def note(name, text):
    with open('/tmp/new-' + name, 'w') as file:
        file.write(text)
    os.rename('/tmp/new-' + name, '/tmp/tcp-' + name)

def watched(name, work):
    try:
        work()
    except OSError as error:
        note(name, errno.errorcode[error.errno])
    else:
        note(name, 'end of stream')

def outside(name, address, talks):
    stream = socket.create_connection((address, 7000), 60)
    stream.settimeout(None)
    while stream.recv(1) != b'\n':
        pass
    for count in range(10 ** 9):
        note(name, 'open %d' % count)
        if talks:
            stream.sendall(b'x')
        if not stream.recv(1):
            return
        time.sleep(1)

def inside(name, server, address):
    client = socket.create_connection((address, server.getsockname()[1]))
    stream, _ = server.accept()
    for count in range(10 ** 9):
        client.sendall(b'%9d' % count)
        stream.sendall(stream.recv(9))
        if client.recv(9) != b'%9d' % count:
            return
        note(name, 'open %d' % count)
        time.sleep(1)

def elsewhere(name):
    # A namespace of this thread's own, whose one link leads to nobody.
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):
        raise OSError(ctypes.get_errno(), 'unshare')
    tun = os.open('/dev/net/tun', os.O_RDWR)
    fcntl.ioctl(tun, 0x400454ca, struct.pack('16sH22x', b'tun0', 0x1001))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    address = struct.pack('16sHH4s16x', b'tun0', socket.AF_INET, 0, socket.inet_aton('10.99.0.1'))
    fcntl.ioctl(udp, 0x8916, address)
    fcntl.ioctl(udp, 0x891c, struct.pack('16sHH4s16x', b'tun0', socket.AF_INET, 0, b'\xff\xff\xff\0'))
    fcntl.ioctl(udp, 0x8914, struct.pack('16sH22x', b'tun0', 0x41))
    stream = socket.socket()
    stream.setsockopt(socket.IPPROTO_TCP, 7, 100)
    note(name, 'open')
    stream.connect(('10.99.0.2', 7000))

if len(sys.argv) == 1:
    watched('elsewhere', lambda: elsewhere('elsewhere'))
    sys.exit()
route = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
route.connect((sys.argv[1], 1))
own = route.getsockname()[0]
both = socket.create_server(('::', 0), family=socket.AF_INET6, dualstack_ipv6=True)
works = {
    'v4': lambda: outside('v4', sys.argv[1], True),
    'v6': lambda: outside('v6', sys.argv[2], False),
    'loopback': lambda: inside('loopback', socket.create_server(('127.0.0.1', 0)), '127.0.0.1'),
    'own': lambda: inside('own', both, own),
}
for name, work in works.items():
    threading.Thread(target=watched, args=(name, work)).start()
";

/// Those that lead out of the guest, the last of them only begun, in another network namespace.
const OUTSIDE: [&str; 3] = ["v4", "v6", "elsewhere"];

/// Those within it: over loopback, and to its own address by way of sockets of both families.
const INSIDE: [&str; 2] = ["loopback", "own"];

/// A shell's function that says what is said of all of them, a line each. The shell reads it itself.
const ALL_SAID: &str = "all() { for which in v4 v6 elsewhere loopback own; do text=; read -r text < /tmp/tcp-$which; \
                        echo $which $text; done; }";

/// Makes all of them.
pub(super) fn begin(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    daemon.ok(&["exec", "--detach", name, "python3", "-c", HOLDER, WORLD4, WORLD6])?;
    daemon.ok(&["exec", "--detach", name, "python3", "-c", HOLDER])?;
    let which: Vec<&str> = OUTSIDE.iter().chain(&INSIDE).copied().collect();
    wait(
        daemon,
        name,
        "connections",
        &format!("for which in {}; do is_open $which || exit 1; done", which.join(" ")),
    )
    .map(drop)
}

/// They go on in a machine that is still the one that made them.
pub(super) fn go_on(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    let last = count(daemon, name, &["v4", "loopback", "own"])?;
    for which in OUTSIDE {
        ensure!(is_open(&last, which), "{name}: {which} is {:?}", last.get(which));
    }
    Ok(())
}

/// What leads out is ended by the machine itself, what is within goes on.
pub(super) fn were_inherited(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    // The threads have to have their turn first.
    let none = format!(
        "for which in {}; do ! is_open $which || exit 1; done",
        OUTSIDE.join(" ")
    );
    let all = wait(daemon, name, "the end of inherited connections", &none)?;
    for which in OUTSIDE {
        let text = all.get(which).map(String::as_str);
        ensure!(text == Some("ECONNABORTED"), "{name}: {which} is {text:?}");
    }
    count(daemon, name, &INSIDE).map(drop)
}

/// By the connection's name.
type Said = BTreeMap<String, String>;

fn is_open(said: &Said, which: &str) -> bool {
    said.get(which).is_some_and(|text| text.starts_with("open"))
}

/// Waits until each of these has counted on; what was said then.
fn count(daemon: &Daemon<'_>, name: &str, those: &[&str]) -> Result<Said> {
    let first = of_text(&daemon.ok(&["exec", name, "sh", "-c", &format!("{ALL_SAID}; all")])?);
    // One that has ended will count no more.
    let tests = those.iter().map(|which| {
        let before = first.get(*which).map_or("", String::as_str);
        format!("{{ ! is_open {which} || [ \"$(text_of {which})\" != \"{before}\" ]; }}")
    });
    let last = wait(
        daemon,
        name,
        "connections to go on",
        &tests.collect::<Vec<_>>().join(" && "),
    )?;
    for which in those {
        let (text, before) = (last.get(*which), first.get(*which));
        ensure!(is_open(&last, which), "{name}: {which} is {text:?}, and was {before:?}");
    }
    Ok(last)
}

/// Waits until a shell's command succeeds, which has two functions for it; what is said of all then.
fn wait(daemon: &Daemon<'_>, name: &str, what: &str, condition: &str) -> Result<Said> {
    const FUNCTIONS: &str = "text_of() { echo \"$now\" | sed -n \"s/^$1 *//p\"; }; \
                             is_open() { case \"$now\" in *\"$1 open\"*) true;; *) false;; esac; }";
    let condition = format!("{ALL_SAID}; {FUNCTIONS}; now=$(all 2>/dev/null); echo \"$now\"; {condition}");
    Ok(of_text(&daemon.wait_in(name, what, &condition)?))
}

fn of_text(text: &str) -> Said {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.map(|(which, text)| (which.to_owned(), text.to_owned())).collect()
}
