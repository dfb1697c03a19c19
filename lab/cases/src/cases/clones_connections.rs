//! The TCP connections of the case `clones`: what becomes of those that a clone has inherited. Those that lead out of the guest are
//! ended before its processes go on, in every network namespace; those within it go on. Knows no snapshot.

use anyhow::{Result, ensure};

use super::network::{WORLD4, WORLD6};
use crate::daemon::{Daemon, wait_for};

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
        time.sleep(0.1)

def inside(name, server, address):
    client = socket.create_connection((address, server.getsockname()[1]))
    stream, _ = server.accept()
    for count in range(10 ** 9):
        client.sendall(b'%9d' % count)
        stream.sendall(stream.recv(9))
        if client.recv(9) != b'%9d' % count:
            return
        note(name, 'open %d' % count)
        time.sleep(0.1)

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

/// Makes all of them.
pub(super) fn begin(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    daemon.ok(&["exec", "--detach", name, "python3", "-c", HOLDER, WORLD4, WORLD6])?;
    daemon.ok(&["exec", "--detach", name, "python3", "-c", HOLDER])?;
    wait_for("connections", || {
        let open = |which: &&str| said(daemon, name, which).is_ok_and(|text| text.starts_with("open"));
        Ok(OUTSIDE.iter().chain(&INSIDE).all(open))
    })
}

/// They go on in a machine that is still the one that made them.
pub(super) fn go_on(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    for which in ["v4", "loopback", "own"] {
        counts(daemon, name, which)?;
    }
    for which in OUTSIDE {
        let text = said(daemon, name, which)?;
        ensure!(text.starts_with("open"), "{name}: {which} is {text:?}");
    }
    Ok(())
}

/// What leads out is ended by the machine itself, what is within goes on.
pub(super) fn were_inherited(daemon: &Daemon<'_>, name: &str) -> Result<()> {
    for which in OUTSIDE {
        let mut text = String::new();
        // Its thread has to have its turn first.
        wait_for("the end of an inherited connection", || {
            text = said(daemon, name, which)?;
            Ok(!text.starts_with("open"))
        })?;
        ensure!(text == "ECONNABORTED", "{name}: {which} is {text:?}");
    }
    for which in INSIDE {
        counts(daemon, name, which)?;
    }
    Ok(())
}

fn counts(daemon: &Daemon<'_>, name: &str, which: &str) -> Result<()> {
    let first = said(daemon, name, which)?;
    let mut last = String::new();
    wait_for("a connection to go on", || {
        last = said(daemon, name, which)?;
        ensure!(
            last.starts_with("open"),
            "{name}: {which} is {last:?}, and was {first:?}"
        );
        Ok(last != first)
    })
}

fn said(daemon: &Daemon<'_>, name: &str, which: &str) -> Result<String> {
    daemon.ok(&["exec", name, "cat", &format!("/tmp/tcp-{which}")])
}
