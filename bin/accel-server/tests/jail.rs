//! The server in the jail that its parent made, with PoCL behind it: a program computes by it, and from outside it is seen what is left
//! to it. Needs root, and what `cargo xtask test` installs for accelerators.
#![allow(unsafe_code, reason = "filters of system calls for a child")]

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use accel_arbiter::{Arbiter, Share};
use host::jail::{Child, Identity, Isolation, Launch, Pool, argument, spawn};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Gid, Mode, OFlags, Uid};

const SERVER: &str = env!("CARGO_BIN_EXE_basalt-accel-server");
/// The longest file: 64 MiB, and an arena of 256 MiB where the server makes one.
const FILE: &str = "335544320";
const FILE_OF_GUEST: &str = "67108864";
const MOST: Duration = Duration::from_secs(60);

/// What cargo has built with this test, by where it lies from there.
fn beside(path: &str) -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let found = own.parent().unwrap().join(path);
    assert!(found.exists(), "{} is built with the tests", found.display());
    found
}

/// A process that ends with this, also where the test fails.
struct Ended(std::process::Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // One that has ended by itself cannot be killed, and is waited for all the same.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A directory of this user's, in which a loader finds the library alone.
fn directory(identity: Identity) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let vendor = format!("{}\n", beside("libbasalt_opencl.so").display());
    fs::write(directory.path().join("basalt.icd"), vendor).unwrap();
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    rustix::fs::chown(directory.path(), Some(uid), Some(gid)).unwrap();
    directory
}

/// A program that computes by whoever serves in this directory.
fn compute(directory: &Path) -> Output {
    compute_by(None, directory)
}

/// The same with records that travel in this way.
fn compute_by(transport: Option<&str>, directory: &Path) -> Output {
    Command::new(beside("../examples/saxpy-of-server"))
        .env("OCL_ICD_VENDORS", directory)
        .env("BASALT_ACCEL_SOCKET", directory.join("socket"))
        .envs(transport.map(|transport| ("BASALT_ACCEL_TRANSPORT", transport)))
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The server with a jail that its parent made. It is killed when this goes.
struct Jailed {
    child: Child,
    log: std::io::PipeReader,
}

impl Drop for Jailed {
    fn drop(&mut self) {
        // One that has ended already is no error here.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

impl Jailed {
    /// One that has its socket in this directory.
    fn start(identity: Identity, directory: &Path, flags: &[&str]) -> Self {
        let socket = directory.join("socket");
        let flags = [&["--socket", socket.to_str().unwrap()], flags].concat();
        Self::with(identity, &flags, &[])
    }

    fn with(identity: Identity, flags: &[&str], descriptors: &[BorrowedFd<'_>]) -> Self {
        let program = File::open(SERVER).unwrap();
        let (log, end) = std::io::pipe().unwrap();
        let words = ["basalt-accel-server", "--jail"];
        let arguments: Vec<_> = words.iter().chain(flags).map(|word| argument(word).unwrap()).collect();
        let child = spawn(&Launch {
            program: program.as_fd(),
            arguments: &arguments,
            environment: &[],
            descriptors,
            log: end.as_fd(),
            cgroup: None,
            isolation: Isolation::Full(identity),
            open_files: Some(4096),
            locks_memory: false,
        })
        .unwrap();
        Self { child, log }
    }

    fn file(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.child.pid).into()
    }

    fn status(&self, key: &str) -> String {
        let text = fs::read_to_string(self.file("status")).unwrap();
        let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        found.unwrap().trim().to_owned()
    }

    /// Waits until it is confined; what it does after that takes longer.
    fn confined(&self) {
        let begin = Instant::now();
        while self.status("Seccomp_filters") != "2" {
            assert!(begin.elapsed() < MOST, "it is not confined");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end; gives what it said.
    fn ended_by_itself(self) -> String {
        let mut fds = [PollFd::new(&self.child.pidfd, PollFlags::IN)];
        let ended = poll(&mut fds, Some(&MOST.try_into().unwrap())).unwrap();
        assert_eq!(ended, 1, "it goes on");
        self.end()
    }

    /// Ends it; gives what it said.
    fn end(mut self) -> String {
        self.child.kill().unwrap();
        let mut text = String::new();
        self.log.read_to_string(&mut text).unwrap();
        text
    }
}

/// What is mounted, by its place, and how.
fn mounts(server: &Jailed) -> Vec<(String, String)> {
    let text = fs::read_to_string(server.file("mountinfo")).unwrap();
    let fields = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields[4].to_owned(), fields[5].to_owned())
    };
    text.lines().map(fields).collect()
}

/// Names in a directory of its root.
fn names(server: &Jailed, path: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(server.file("root").join(path.trim_start_matches('/'))).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn only(names: &BTreeSet<String>, expected: &[&str]) {
    let beyond: Vec<_> = names.iter().filter(|name| !expected.contains(&name.as_str())).collect();
    assert!(beyond.is_empty(), "{beyond:?}");
}

/// Its rights, and the files that are left to it.
fn is_confined(server: &Jailed, identity: Identity, file: &str) {
    assert_eq!(server.status("Seccomp"), "2");
    assert_eq!(server.status("NoNewPrivs"), "1");
    for key in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(u64::from_str_radix(&server.status(key), 16), Ok(0), "{key}");
    }
    for (key, number) in [("Uid", identity.uid), ("Gid", identity.gid)] {
        let numbers = server.status(key);
        assert!(
            numbers.split_whitespace().all(|word| word == number.to_string()),
            "{key} {numbers}"
        );
    }
    assert_eq!(server.status("NSpid").split_whitespace().last(), Some("1"));
    for namespace in ["user", "pid", "mnt", "net", "ipc", "uts"] {
        let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{namespace}")).unwrap();
        assert_ne!(of(&server.child.pid.to_string()), of("self"), "{namespace}");
    }
    let limits = fs::read_to_string(server.file("limits")).unwrap();
    for (limit, number) in [
        ("Max processes", "4096"),
        ("Max file size", file),
        ("Max core file size", "0"),
        ("Max open files", "4096"),
    ] {
        let line = limits.lines().find_map(|line| line.strip_prefix(limit)).unwrap();
        assert!(
            line.split_whitespace().take(2).all(|word| word == number),
            "{limit} {line}"
        );
    }
    let system = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];
    only(
        &names(server, "/"),
        &[&system[..], &["dev", "etc", "proc", "run", "sys", "tmp"]].concat(),
    );
    only(&names(server, "/etc"), &["OpenCL", "alternatives", "ld.so.cache"]);
    only(&names(server, "/proc"), &["cpuinfo", "meminfo"]);
    only(&names(server, "/dev"), &["null", "zero", "urandom", "full"]);
    for (place, how) in mounts(server) {
        let has = |option: &str| how.split(',').any(|word| word == option);
        assert!(has("nosuid"), "{place} {how}");
        assert_eq!(
            has("ro"),
            place != "/tmp" && !place.starts_with("/dev/"),
            "{place} {how}"
        );
        assert_eq!(has("nodev"), !place.starts_with("/dev/"), "{place} {how}");
    }
}

/// Standard streams, the listening socket, and what PoCL and the clients' threads have: no file of the host's.
fn has_no_files(server: &Jailed) {
    for entry in fs::read_dir(server.file("fd")).unwrap() {
        let target = match fs::read_link(entry.unwrap().path()) {
            // A client's that has gone meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            target => target.unwrap(),
        };
        let target = target.to_string_lossy();
        let known = ["/dev/null", "pipe:", "socket:", "anon_inode:", "/memfd:"];
        assert!(known.iter().any(|begin| target.starts_with(begin)), "{target}");
    }
}

#[test]
fn a_program_computes_by_a_server_that_has_nothing_else() {
    let identity = Pool::default().identity(21).unwrap();
    let served = directory(identity);
    let flags = ["--backend=opencl", "--device=/dev/full", "--scratch=64m"];
    let server = Jailed::start(identity, served.path(), &flags);
    server.confined();
    is_confined(&server, identity, FILE);
    assert!(names(&server, "/dev").contains("full"));
    for transport in [None, Some("stream")] {
        let output = compute_by(transport, served.path());
        let text = said(&output);
        assert!(
            output.status.success() && text.contains("numbers are right"),
            "{transport:?}: {text}"
        );
    }
    // With clients and compiled kernels it is as confined as before, and kernels are where they can be.
    is_confined(&server, identity, FILE);
    has_no_files(&server);
    assert!(names(&server, "/tmp").contains("pocl"));
    let text = server.end();
    assert!(!text.contains("error"), "{text}");
}

#[test]
fn its_time_is_divided_and_its_statistics_are_told_from_within() {
    let identity = Pool::default().identity(25).unwrap();
    let (served, shared) = (directory(identity), directory(identity));
    let (share, control) = (shared.path().join("share"), served.path().join("control"));
    let admit = || {
        let arbiter = Arbiter::start().unwrap();
        arbiter.admit("one", Share::default(), &share).unwrap();
        rustix::fs::chown(&share, Some(Uid::from_raw(identity.uid)), None).unwrap();
        arbiter
    };
    let arbiter = admit();
    let flags = [
        format!("--arbiter={}", share.display()),
        format!("--control={}", control.display()),
    ];
    let server = Jailed::start(
        identity,
        served.path(),
        &["--backend=opencl", "--memory=64m", &flags[0], &flags[1]],
    );
    server.confined();
    let output = compute(served.path());
    let text = said(&output);
    assert!(output.status.success() && text.contains("numbers are right"), "{text}");
    is_confined(&server, identity, FILE);
    let line = told_when(&control, r#""is_shared":true"#);
    assert!(
        line.contains(r#""quota":67108864"#) && !line.contains(r#""launches":0"#),
        "{line}"
    );
    // Another arbiter makes another socket in the same directory.
    drop(arbiter);
    told_when(&control, r#""is_shared":false"#);
    let _arbiter = admit();
    told_when(&control, r#""is_shared":true"#);
    let text = server.end();
    assert!(!text.contains("error"), "{text}");
}

/// Statistics, once they have this part.
fn told_when(control: &Path, part: &str) -> String {
    let begin = Instant::now();
    loop {
        let mut line = String::new();
        UnixStream::connect(control).unwrap().read_to_string(&mut line).unwrap();
        if line.contains(part) {
            return line;
        }
        assert!(begin.elapsed() < MOST, "never {part}: {line}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A VMM's socket for connections into its guest, in a directory that nobody but root has a way to.
fn vsock(directory: &Path, identity: Identity) -> (UnixListener, PathBuf) {
    let hidden = directory.join("hidden");
    fs::create_dir(&hidden).unwrap();
    fs::set_permissions(&hidden, Permissions::from_mode(0o700)).unwrap();
    let path = hidden.join("vsock");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::fs::chown(&path, Some(Uid::from_raw(identity.uid)), None).unwrap();
    (listener, path)
}

/// Waits for somebody who connects and wants the agent.
fn dialled(listener: &UnixListener) -> UnixStream {
    let mut fds = [PollFd::new(listener, PollFlags::IN)];
    assert_eq!(
        poll(&mut fds, Some(&MOST.try_into().unwrap())).unwrap(),
        1,
        "nobody connects"
    );
    let (stream, _) = listener.accept().unwrap();
    let mut line = String::new();
    BufReader::with_capacity(1, &stream).read_line(&mut line).unwrap();
    assert_eq!(line, "CONNECT 1026\n");
    stream
}

/// What a node's daemon gives a server beside that: a mount of the directory of its arbiter's socket, to which no path leads, and a socket
/// where statistics are told, which nobody else can connect to.
fn shared(directory: &Path, identity: Identity) -> (PathBuf, OwnedFd, UnixListener) {
    let share = directory.join("hidden/arbiter");
    fs::create_dir(&share).unwrap();
    fs::set_permissions(&share, Permissions::from_mode(0o700)).unwrap();
    rustix::fs::chown(&share, Some(Uid::from_raw(identity.uid)), None).unwrap();
    let open = rustix::fs::open(&share, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let mount = host::share::read_only(open.as_fd(), &share).unwrap();
    let control = directory.join("hidden/control");
    let listener = UnixListener::bind(&control).unwrap();
    fs::set_permissions(&control, Permissions::from_mode(0o600)).unwrap();
    (share.join("socket"), mount, listener)
}

/// Leaves files where only users of the server's namespace can, of whom this user is none.
fn leave_something(server: u32) {
    let script = "mkdir -p /tmp/pocl/kernel && echo program > /tmp/pocl/kernel/program.bc && ln -s /usr /tmp/link";
    let mut command = Command::new("nsenter");
    command.args(["--target", &server.to_string(), "--user", "--mount", "--root", "--wd"]);
    assert!(command.args(["/bin/sh", "-c", script]).status().unwrap().success());
}

#[test]
fn a_guest_is_served_from_a_jail_again_and_again() {
    let identity = Pool::default().identity(23).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (listener, path) = vsock(directory.path(), identity);
    let open = |path: &Path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let socket = open(&path, OFlags::PATH);
    let mount = host::share::read_only(socket.as_fd(), &path).unwrap();
    let window = base::memfd::sized("window", 64 << 20).unwrap();
    let driver = open(&beside("libbasalt_opencl.so"), OFlags::RDONLY);
    let (mut ready, end) = UnixStream::pair().unwrap();
    let flags = [
        "--vsock-fd=3",
        "--window-fd=4",
        "--driver-fd=5",
        "--musl-driver-fd=6",
        "--ready-fd=7",
        "--arbiter-fd=8",
        "--control-fd=9",
        "--cuda-driver-fd=10",
        "--backend=null",
    ];
    let (share, share_mount, statistics) = shared(directory.path(), identity);
    let control = share.parent().unwrap().with_file_name("control");
    // A socket that is still where it was cannot be taken along, and it says so.
    let more = [
        window.as_fd(),
        driver.as_fd(),
        driver.as_fd(),
        end.as_fd(),
        share_mount.as_fd(),
        statistics.as_fd(),
        driver.as_fd(),
    ];
    let wrong = [&[socket.as_fd()][..], &more].concat();
    let text = Jailed::with(identity, &flags, &wrong).ended_by_itself();
    assert!(
        text.contains("no file system tree") && text.contains("/run/vsock"),
        "{text}"
    );

    let descriptors = [&[mount.as_fd()][..], &more].concat();
    let server = Jailed::with(identity, &flags, &descriptors);
    drop((end, statistics));
    let mut said = [0; 6];
    ready.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"ready\n");
    let mut file_system = vec![0; 1 << 20];
    rustix::io::pread(&window, &mut file_system, 0).unwrap();
    for library in ["libbasalt_opencl.so", "libbasalt_opencl-musl.so", "libbasalt_cuda.so"] {
        let is_there = file_system
            .windows(library.len())
            .any(|part| part == library.as_bytes());
        assert!(is_there, "{library}");
    }
    ready.write_all(b"known\n").unwrap();
    is_confined(&server, identity, FILE_OF_GUEST);
    only(&names(&server, "/run"), &["arbiter", "vsock"]);
    for restarts in 0..2 {
        let stream = dialled(&listener);
        // An arbiter that comes later is found, and each process that serves tells of those before it.
        let arbiter = Arbiter::start().unwrap();
        arbiter.admit("one", Share::default(), &share).unwrap();
        rustix::fs::chown(&share, Some(Uid::from_raw(identity.uid)), None).unwrap();
        // The arbiter sees the connection before the server has heard its answer.
        let line = told_when(&control, r#""is_shared":true"#);
        assert!(line.contains(&format!(r#""restarts":{restarts},"#)), "{line}");
        assert!(arbiter.report()["one"].is_connected);
        // What the last one had compiled is gone.
        let room = server.file("root/tmp");
        assert_eq!(fs::read_dir(&room).unwrap().count(), 0);
        leave_something(server.child.pid);
        assert_eq!(fs::read_dir(&room).unwrap().count(), 2);
        // Who serves is a child of the server's, with the same rights.
        let children = server.file(&format!("task/{}/children", server.child.pid));
        let child: u32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
        let status = fs::read_to_string(format!("/proc/{child}/status")).unwrap();
        for line in [
            "Seccomp:\t2",
            "NoNewPrivs:\t1",
            "CapEff:\t0000000000000000",
            "Seccomp_filters:\t2",
        ] {
            assert!(status.contains(line), "{line}: {status}");
        }
        let child = rustix::process::Pid::from_raw(child.try_into().unwrap()).unwrap();
        rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
        drop(stream);
    }
}

/// A back end that tries nothing is in the same jail, without files of devices.
#[test]
fn a_jail_has_what_was_asked_for_and_tells_what_it_cannot_have() {
    let identity = Pool::default().identity(22).unwrap();
    let served = directory(identity);
    let server = Jailed::start(identity, served.path(), &["--backend=null"]);
    server.confined();
    is_confined(&server, identity, FILE);
    only(&names(&server, "/dev"), &["null", "zero", "urandom"]);
    drop(server);
    for (flags, part) in [
        (&["--device=/dev/nvidia-none"][..], "/dev/nvidia-none"),
        (&["--device=/dev/pts"], "no character device"),
        (&["--read-only=/opt/none"], "/opt/none"),
        (&["--library=lib/libOpenCL.so", "--backend=opencl"], "from / on"),
    ] {
        let mut flags = flags.to_vec();
        if flags.len() == 1 {
            flags.push("--backend=null");
        }
        let server = Jailed::start(identity, served.path(), &flags);
        let text = server.ended_by_itself();
        assert!(text.contains(part), "{flags:?}: {text}");
    }
}

/// Each lacks one of the things that make a jail, or both. All are in a mount and a host name's namespace of their own, so that a
/// server that does not notice changes the root of nobody but itself.
#[test]
fn outside_of_namespaces_of_its_own_it_says_how_to_get_some() {
    let served = tempfile::tempdir().unwrap();
    let socket = served.path().join("socket");
    for namespaces in [
        &[][..],
        &["--pid", "--fork", "--kill-child"],
        &["--user", "--map-root-user"],
    ] {
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "--propagation", "private", "--uts"])
            .args(namespaces);
        command.arg(SERVER).arg("--socket").arg(&socket);
        command.args(["--backend=null", "--jail"]).stdin(Stdio::null());
        let output = ended(command);
        let text = said(&output);
        assert!(!output.status.success(), "{namespaces:?}");
        assert!(
            text.contains("have it started by the node's daemon"),
            "{namespaces:?}: {text}"
        );
    }
}

/// What becomes of a program that ends by itself, or is killed after a while.
fn ended(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begin.elapsed() > MOST {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

/// Has a call fail as if the kernel did not have it.
fn without(number: libc::c_long) -> std::io::Result<()> {
    // Load the number; if it is this one skip nothing, else one; ENOSYS; let pass.
    let step = |code: u16, jt: u8, jf: u8, k: u32| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        step(0x20, 0, 0, 0),
        step(0x15, 0, 1, number.try_into().map_err(std::io::Error::other)?),
        step(0x06, 0, 0, 0x0005_0000 | libc::ENOSYS.cast_unsigned()),
        step(0x06, 0, 0, 0x7fff_0000),
    ];
    let program = libc::sock_fprog {
        len: 4,
        filter: program.as_mut_ptr(),
    };
    rustix::thread::set_no_new_privs(true)?;
    // SAFETY: the program lives through the call, and the kernel copies it.
    match unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Computing is a test of the filter: it does not do without what the back end executes.
#[test]
fn without_a_call_that_compilers_need_nothing_is_computed() {
    let served = directory(Identity {
        uid: 0,
        gid: 0,
        owners: false,
    });
    let cache = tempfile::tempdir().unwrap();
    let compute_without = |call: Option<libc::c_long>| {
        let mut command = Command::new(SERVER);
        command
            .arg("--socket")
            .arg(served.path().join("socket"))
            .arg("--backend=opencl");
        command.env("POCL_CACHE_DIR", cache.path()).stdin(Stdio::null());
        if let Some(number) = call {
            // SAFETY: between fork and exec it makes two system calls and allocates nothing.
            unsafe { command.pre_exec(move || without(number)) };
        }
        let server = Ended(command.spawn().unwrap());
        let begin = Instant::now();
        while UnixStream::connect(served.path().join("socket"))
            .is_err_and(|error| error.raw_os_error() != Some(libc::EPROTOTYPE))
        {
            assert!(begin.elapsed() < MOST, "nobody listens");
            std::thread::sleep(Duration::from_millis(5));
        }
        let output = compute(served.path());
        drop(server);
        output
    };
    let output = compute_without(Some(libc::SYS_wait4));
    assert!(!output.status.success(), "{}", said(&output));
    let output = compute_without(None);
    assert!(output.status.success(), "{}", said(&output));
}
