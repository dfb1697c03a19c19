//! Real jails. Needs root, namespaces and a shell; the jailed programs here are dynamic, which works as long as nothing
//! has emptied their file system.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{PoisonError, RwLock};

use super::*;
use crate::cgroup::{Limits, Root};

const LIMIT: Duration = Duration::from_secs(90);

/// Held for reading while a jail is being started: until then its child may have made this process undumpable.
static LAUNCHES: RwLock<()> = RwLock::new(());

fn start(launch: &Launch<'_>) -> Result<Child, Error> {
    let _started = LAUNCHES.read().unwrap_or_else(PoisonError::into_inner);
    spawn(launch)
}

/// Whether this process may be dumped while no test starts a jail.
fn dumpable_at_rest() -> DumpableBehavior {
    let _alone = LAUNCHES.write().unwrap_or_else(PoisonError::into_inner);
    rustix::process::dumpable_behavior().unwrap()
}

fn identity() -> Isolation {
    Isolation::Full(Pool::default().identity(5).unwrap())
}

struct Run {
    output: String,
    status: WaitIdStatus,
    timing: Timing,
}

/// Runs a shell script in a jail and collects what it writes.
fn shell(script: &str, isolation: Isolation, descriptors: &[BorrowedFd<'_>], cgroup: Option<BorrowedFd<'_>>) -> Run {
    let program = File::open("/bin/sh").unwrap();
    let (mut output, log) = std::io::pipe().unwrap();
    let arguments = ["sh", "-c", script].map(|word| argument(word).unwrap());
    let environment = [argument("PATH=/usr/bin:/bin").unwrap()];
    let child = start(&Launch {
        program: program.as_fd(),
        arguments: &arguments,
        environment: &environment,
        descriptors,
        log: log.as_fd(),
        cgroup,
        isolation,
        open_files: Some(300),
        locks_memory: false,
    })
    .unwrap();
    drop(log);
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    Run {
        output: text,
        status: child.wait().unwrap(),
        timing: child.timing,
    }
}

/// A jail in which nothing happens, which ends with this.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        // One that a test has ended has been waited for by it, or is here.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn sleeper(isolation: Isolation, cgroup: Option<BorrowedFd<'_>>) -> Sleeper {
    let program = File::open("/bin/sleep").unwrap();
    let null = File::options().write(true).open("/dev/null").unwrap();
    let arguments = ["sleep", "1000"].map(|word| argument(word).unwrap());
    let child = start(&Launch {
        program: program.as_fd(),
        arguments: &arguments,
        environment: &[],
        descriptors: &[],
        log: null.as_fd(),
        cgroup,
        isolation,
        open_files: None,
        locks_memory: false,
    });
    Sleeper(child.unwrap())
}

#[test]
fn all_share_a_network_namespace_with_nothing_in_it() {
    let run = |script| shell(script, identity(), &[], None).output;
    let namespace = "readlink /proc/self/ns/net";
    assert_eq!(run(namespace), run(namespace));
    let links = run("cat /proc/self/net/dev");
    let names: Vec<_> = links.lines().filter_map(|line| line.split_once(':')).collect();
    assert!(matches!(&names[..], [(name, _)] if name.trim() == "lo"), "{links}");
    // Which is down: the namespace has no address.
    assert_eq!(run("cat /proc/self/net/fib_trie"), "");
    let ours = std::fs::read_link("/proc/self/ns/net").unwrap();
    assert_ne!(run(namespace).trim(), ours.to_string_lossy());
}

#[test]
fn it_is_an_unprivileged_user_in_namespaces_of_its_own() {
    let script = "id -u; id -g; id -G; cat /proc/self/uid_map; echo $$; \
                  for n in user pid mnt net ipc uts; do readlink /proc/self/ns/$n; done; ulimit -n";
    // /proc is still the host's: its view of `self` goes by our pid namespace.
    let run = shell(script, identity(), &[], None);
    let lines: Vec<_> = run.output.lines().collect();
    assert_eq!(lines.get(..3), Some(&["0", "0", "0"][..]), "{}", run.output);
    let outside = 0x7ba5_0005_u32.to_string();
    assert!(lines[3].split_whitespace().eq(["0", &outside, "1"]), "{}", run.output);
    assert_eq!(lines[4], "1", "the first process of its pid namespace");
    for (name, line) in ["user", "pid", "mnt", "net", "ipc", "uts"].iter().zip(&lines[5..]) {
        let ours = std::fs::read_link(format!("/proc/self/ns/{name}")).unwrap();
        assert_ne!(ours.to_string_lossy(), **line, "{name}");
    }
    assert_eq!(lines[11], "300");
    assert_eq!(run.status.exit_status(), Some(0));
}

#[test]
fn it_cannot_touch_what_is_roots_outside() {
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path();
    let script = format!(": > {0}/x && echo written; cat {0}/secret", directory.display());
    std::fs::write(directory.join("secret"), "s").unwrap();
    std::fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(
        directory.join("secret"),
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    let jailed = shell(&script, identity(), &[], None);
    let free = shell(&script, Isolation::None, &[], None);
    assert!(!jailed.output.contains("written"), "{}", jailed.output);
    assert_ne!(jailed.status.exit_status(), Some(0));
    assert!(free.output.contains("written"), "the test can tell: {}", free.output);
}

#[test]
fn it_has_the_descriptors_that_it_was_given_and_no_other() {
    // Made inheritable, as a careless library might: closed nevertheless.
    let stray = File::open("/dev/zero").unwrap();
    rustix::io::fcntl_setfd(&stray, rustix::io::FdFlags::empty()).unwrap();
    let (near, far) = UnixStream::pair().unwrap();
    let (mut near2, far2) = UnixStream::pair().unwrap();
    near2.write_all(b"ping\n").unwrap();
    for isolation in [identity(), Isolation::None] {
        // Given twice, and the second position first in our own numbering: order is what counts.
        let given = [far2.as_fd(), far.as_fd(), far2.as_fd()];
        let script = "echo $(ls /proc/$$/fd | tr '\\n' ' '); head -c0 <&0; readlink /proc/$$/fd/0";
        // `ls` needs a pid that /proc knows: read through `self` of the shell instead when it is PID 1 of its own.
        let script = script.replace("/proc/$$/fd", "/proc/self/fd");
        let run = shell(&script, isolation, &given, None);
        // 6 is the directory that `ls` reads, and it is not there for readlink.
        assert_eq!(run.output, "0 1 2 3 4 5 6\n/dev/null\n", "{isolation:?}");
    }
    let run = shell(
        "read line <&5; echo $line",
        identity(),
        &[far.as_fd(), far.as_fd(), far2.as_fd()],
        None,
    );
    assert_eq!(run.output, "ping\n");
    drop((near, stray));
}

#[test]
fn it_has_its_limits_before_its_first_instruction() {
    for isolation in [identity(), Isolation::None] {
        for _ in 0..20 {
            assert_eq!(
                shell("ulimit -Hn", isolation, &[], None).output,
                "300\n",
                "{isolation:?}"
            );
        }
    }
}

#[test]
fn signals_and_session_are_its_own() {
    // Rust programs ignore SIGPIPE; a jailed one does not.
    let script = "grep -E '^Sig(Blk|Ign)' /proc/self/status; cut -d' ' -f4,6 /proc/self/stat";
    let run = shell(script, Isolation::None, &[], None);
    for line in run.output.lines().take(2) {
        assert!(line.ends_with("0000000000000000"), "{}", run.output);
    }
    // `cut` is the child of the shell, which leads the session.
    let (parent, session) = run.output.lines().nth(2).unwrap().split_once(' ').unwrap();
    assert_eq!(parent, session, "{}", run.output);
}

#[test]
fn it_is_born_in_its_cgroup_and_killed_by_it() {
    let root = Root::open(&format!("basalt-jail-test-{}", std::process::id())).unwrap();
    let cgroup = root.create("born", &Limits::default()).unwrap();
    let sleeper = sleeper(identity(), Some(cgroup.as_fd()));
    assert_eq!(cgroup.processes().unwrap(), [sleeper.0.pid]);
    cgroup.kill().unwrap();
    assert_eq!(sleeper.0.wait().unwrap().terminating_signal(), Some(libc::SIGKILL));
    cgroup.wait_empty(LIMIT).unwrap();
    root.remove("born").unwrap();
    root.remove_root().unwrap();
}

#[test]
fn what_fails_in_the_child_is_told_by_its_parent_and_nothing_is_left() {
    let root = Root::open(&format!("basalt-jail-fails-{}", std::process::id())).unwrap();
    let cgroup = root.create("failed", &Limits::default()).unwrap();
    let program = File::open("/etc/passwd").unwrap();
    let null = File::options().write(true).open("/dev/null").unwrap();
    let mut launch = Launch {
        program: program.as_fd(),
        arguments: &[],
        environment: &[],
        descriptors: &[],
        log: null.as_fd(),
        cgroup: Some(cgroup.as_fd()),
        isolation: identity(),
        open_files: None,
        locks_memory: false,
    };
    let error = start(&launch).unwrap_err();
    assert!(
        matches!(
            &error,
            Error::Child {
                step: "executing the program",
                ..
            }
        ),
        "{error}"
    );
    // A directory that is no cgroup.
    let directory = File::open("/tmp").unwrap();
    launch.cgroup = Some(directory.as_fd());
    assert!(start(&launch).is_err());
    let many = [null.as_fd(); MAX_DESCRIPTORS + 1];
    launch.descriptors = &many;
    let error = start(&launch).unwrap_err();
    assert!(matches!(&error, Error::NoJail { .. }), "{error}");
    assert!(cgroup.processes().unwrap().is_empty());
    drop(directory);
    root.remove("failed").unwrap();
    root.remove_root().unwrap();
}

#[test]
fn many_threads_start_jails_at_once_and_this_process_stays_dumpable() {
    assert_eq!(dumpable_at_rest(), DumpableBehavior::Dumpable);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..5 {
                    let run = shell(&format!("echo {round}"), identity(), &[], None);
                    assert_eq!(run.output, format!("{round}\n"));
                }
            });
        }
    });
    assert_eq!(dumpable_at_rest(), DumpableBehavior::Dumpable);
}

#[test]
fn a_shared_directory_is_a_mount_of_its_own_whose_owners_are_the_jails() {
    use rustix::fs::{AtFlags, statat};
    let temporary = tempfile::tempdir().unwrap();
    let directory = temporary.path();
    for (name, owner) in [("roots", 0), ("users", 1000)] {
        std::fs::write(directory.join(name), name).unwrap();
        std::os::unix::fs::chown(directory.join(name), Some(owner), Some(owner)).unwrap();
    }
    std::os::unix::fs::symlink("roots", directory.join("link")).unwrap();
    let identity = Pool::default().identity(9).unwrap().with_owners();
    let sleeper = sleeper(Isolation::Full(identity), None);
    let pid = sleeper.0.pid;
    let open = |path: &std::path::Path| rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let share = |read_only| crate::share::directory(open(directory).as_fd(), directory, read_only, pid).unwrap();
    let shared = share(false);
    let owner = |name: &str| statat(&shared, name, AtFlags::SYMLINK_NOFOLLOW).unwrap().st_uid;
    assert_eq!(owner("roots"), identity.uid);
    assert_eq!(owner("users"), OWNERS_BASE + 999);
    assert_eq!(
        owner(".."),
        owner("."),
        "above the root of a mount that is nowhere is the root"
    );
    let number = |name: &str| statat(&shared, name, AtFlags::empty()).unwrap().st_ino;
    assert_eq!(number("../../.."), number("."));
    let read = |name: &str| rustix::fs::openat(&shared, name, OFlags::RDONLY, Mode::empty());
    assert!(read("roots").is_ok());
    assert_eq!(read("link").unwrap_err(), Errno::LOOP);
    let make = |shared: &OwnedFd| rustix::fs::mkdirat(shared, "new", Mode::RWXU);
    assert_eq!(make(&share(true)).unwrap_err(), Errno::ROFS);
    // We are nobody there: the host's root is no owner in the jail.
    assert_eq!(make(&shared).unwrap_err(), Errno::OVERFLOW);
    let descriptors = crate::share::descriptors(pid).unwrap();
    assert!(statat(&descriptors, "0", AtFlags::empty()).is_ok());
    assert!(statat(&descriptors, "../status", AtFlags::empty()).is_err());
}

#[test]
fn a_start_is_timed() {
    let run = shell("exit 3", identity(), &[], None);
    assert_eq!(run.status.exit_status(), Some(3));
    assert!(run.timing.clone > Duration::ZERO && run.timing.exec > Duration::ZERO);
    eprintln!("{:?}", run.timing);
}
