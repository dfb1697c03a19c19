//! TCP connections that a restored guest has of the time before: their other ends go on with somebody else, or have gone on
//! without it. Those within the guest are whole, as both of their ends were restored. Does not know what they are for.
//!
//! A connection is within the guest if it leads to a loopback address, or if its other end is among the guest's own, in any
//! network namespace that a process is in. All others are ended; sockets that wait for connections stay.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use netlink::{Connection, Connections};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::{Error, STACK_SIZE, say};

/// Ends those that lead out of the guest. `cgroups` is the hierarchy whose processes may have namespaces of their own. What the
/// kernel cannot do is said on the console, once: the commands go on with dead connections, as they would without this.
pub(crate) fn end_inherited(cgroups: &Path) {
    if let Err(error) = try_to(cgroups) {
        say(format_args!(
            "TCP connections of before the restore stay until their time is over: {error}"
        ));
    }
}

fn try_to(cgroups: &Path) -> Result<(), Error> {
    let mut found = Vec::new();
    for namespace in namespaces(cgroups)? {
        let connections = match namespace {
            None => Connections::open(),
            Some(namespace) => open_in(&namespace),
        };
        let connections = connections.map_err(Error::system("opening a socket for diagnosis"))?;
        let list = connections.list().map_err(Error::system("listing TCP connections"))?;
        found.push((connections, list));
    }
    let inside: HashSet<Ends> = found.iter().flat_map(|(_, list)| list).map(ends).collect();
    let mut result = Ok(());
    for (connections, list) in &found {
        // Of one that only waits nobody has a socket.
        let held = list.iter().filter(|connection| !connection.only_waits);
        for connection in held.filter(|connection| leads_out(ends(connection), &inside)) {
            let ended = connections.end(connection);
            // The others are tried nevertheless.
            result = result.and(ended.map_err(Error::system("ending a TCP connection")));
        }
    }
    result
}

/// Of a connection: this end's address and the other's.
type Ends = (SocketAddr, SocketAddr);

fn ends(connection: &Connection) -> Ends {
    (connection.local, connection.peer)
}

/// Whether its other end is not among the guest's own.
fn leads_out((local, peer): Ends, inside: &HashSet<Ends>) -> bool {
    !peer.ip().is_loopback() && !inside.contains(&(peer, local))
}

/// A socket in another namespace than this process's. Threads have theirs to themselves, hence one is made.
fn open_in(namespace: &File) -> io::Result<Connections> {
    thread::scope(|scope| {
        let opened = thread::Builder::new()
            .name("namespace".to_owned())
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
                Connections::open()
            })?;
        opened
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread in another network namespace panicked")))
    })
}

/// The network namespaces of all processes below the hierarchy's root: this process's own is `None`, and the first.
fn namespaces(cgroups: &Path) -> Result<Vec<Option<File>>, Error> {
    let own = fs::metadata("/proc/thread-self/ns/net")
        .map_err(Error::system("looking at this thread's network namespace"))?;
    let mut known = HashSet::from([own.ino()]);
    let mut all = vec![None];
    let mut left = below(cgroups);
    while let Some(cgroup) = left.pop() {
        left.extend(below(&cgroup));
        // One that is gone has no processes; those of a threaded one are its parent's.
        let Ok(processes) = fs::read_to_string(cgroup.join("cgroup.procs")) else {
            continue;
        };
        for process in processes.lines() {
            // A process that is gone is in no namespace. The number is asked of the open file: it belongs to what is in hand.
            let Ok(namespace) = File::open(format!("/proc/{process}/ns/net")) else {
                continue;
            };
            let metadata = namespace
                .metadata()
                .map_err(Error::system("looking at a network namespace"))?;
            if known.insert(metadata.ino()) {
                all.push(Some(namespace));
            }
        }
    }
    Ok(all)
}

/// The cgroups directly in another one.
fn below(cgroup: &Path) -> Vec<PathBuf> {
    // One that is gone has none.
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends_of(local: &str, peer: &str) -> Ends {
        (local.parse().unwrap(), peer.parse().unwrap())
    }

    #[test]
    fn only_what_has_no_other_end_here_leads_out() {
        let own = ends_of("10.0.0.2:40000", "10.0.0.2:80");
        let other = (own.1, own.0);
        let outside = ends_of("10.0.0.2:40001", "192.0.2.2:443");
        let inside = HashSet::from([own, other, outside]);
        assert!(!leads_out(own, &inside) && !leads_out(other, &inside));
        assert!(leads_out(outside, &inside));
        assert!(leads_out(own, &HashSet::from([own])), "its other end is gone");
        for loopback in [
            ends_of("127.0.0.1:1", "127.0.0.1:2"),
            ends_of("[::1]:1", "[::1]:2"),
            ends_of("127.0.0.1:1", "127.8.0.1:2"),
        ] {
            assert!(!leads_out(loopback, &HashSet::new()), "{loopback:?}");
        }
    }

    #[test]
    fn a_process_in_another_namespace_is_found_once() {
        let cgroups = std::env::temp_dir().join(format!("basalt-agent-namespaces-{}", std::process::id()));
        let inner = cgroups.join("basalt/1");
        fs::create_dir_all(&inner).unwrap();
        // One that is in this process's, one that is nobody, and two in another.
        let mut others: Vec<_> = (0..2)
            .map(|_| {
                let mut command = std::process::Command::new("unshare");
                command.args(["--net", "sleep", "1000"]).spawn().unwrap()
            })
            .collect();
        let own = std::process::id();
        let list = format!("{own}\n4194305\n{}\n{}\n", others[0].id(), others[0].id());
        fs::write(inner.join("cgroup.procs"), list).unwrap();
        fs::write(cgroups.join("basalt/cgroup.procs"), format!("{}\n", others[1].id())).unwrap();
        // Each is in its own as soon as unshare(1) has done its work.
        let mut found = 0;
        for _ in 0..500 {
            found = namespaces(&cgroups).unwrap().len();
            if found == 3 {
                break;
            }
            thread::sleep(std::time::Duration::from_millis(20));
        }
        for other in &mut others {
            other.kill().unwrap();
            other.wait().unwrap();
        }
        fs::remove_dir_all(&cgroups).unwrap();
        assert_eq!(found, 3);
    }
}
