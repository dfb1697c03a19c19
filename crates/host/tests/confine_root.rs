//! A process in a root of its own tries what it should be able to do, and what it should not: this program starts itself in
//! a jail. Needs root.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use host::confine::{Root, Scratch, enter_root};
use host::jail::{Isolation, Launch, Pool, argument, spawn};
use rustix::fs::{Mode, OFlags};
use rustix::process::DumpableBehavior;

const INSIDE: &str = "--inside";
const OUTSIDE: &str = "--outside";
/// Bytes that can be written.
const ROOM: usize = 1 << 20;
/// Where the inherited mount is put.
const PLACE: &str = "/run/given";

fn kind<T>(result: std::io::Result<T>) -> Result<(), ErrorKind> {
    result.map(drop).map_err(|error| error.kind())
}

#[allow(unsafe_code, reason = "an inherited descriptor is a bare number")]
fn inherited() -> OwnedFd {
    // SAFETY: the parent has put it there, and nobody else here knows of it.
    unsafe { OwnedFd::from_raw_fd(3) }
}

/// What the confined half does and sees. `shown` is a directory that was named, with a file and a socket in it.
fn inside(shown: &Path) {
    let root = Root::new(Scratch {
        at: "/tmp".into(),
        bytes: ROOM as u64,
    })
    .system(&["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/nowhere"])
    // It is there by then: no second mount.
    .read_only("/usr/bin")
    .read_only(shown)
    .device("/dev/full")
    .mount(inherited(), PLACE);
    let report = enter_root(root, 64, ROOM as u64).unwrap();
    assert!(report.prepared);
    let denied = |result: Result<(), ErrorKind>, what: &str| {
        // landlock's answer, or that of a mount that can be read alone.
        let expected = [ErrorKind::PermissionDenied, ErrorKind::ReadOnlyFilesystem];
        assert!(expected.contains(&result.unwrap_err()), "{what}");
    };
    for gone in ["/etc/passwd", "/root", "/proc/self", "/nowhere", "/dev/kvm", "/home"] {
        assert_eq!(kind(fs::metadata(gone)), Err(ErrorKind::NotFound), "{gone}");
    }
    for place in [
        "/x",
        "/usr/x",
        "/dev/x",
        &format!("{PLACE}/x"),
        &format!("{}/x", shown.display()),
    ] {
        denied(kind(File::create_new(place)), place);
    }
    denied(kind(fs::remove_file(shown.join("file"))), "removing what is shown");
    for directory in [shown, PLACE.as_ref()] {
        assert_eq!(fs::read_to_string(directory.join("file")).unwrap(), "seen");
        UnixStream::connect(directory.join("socket")).unwrap();
    }
    assert!(Command::new("/bin/true").status().unwrap().success());
    denied(
        kind(Command::new(format!("{PLACE}/program")).status()),
        "executing what was given",
    );
    assert!(fs::metadata("/dev/full").unwrap().file_type().is_char_device());
    let full = File::options().write(true).open("/dev/full").unwrap().write_all(b"x");
    assert_eq!(kind(full), Err(ErrorKind::StorageFull));
    File::open("/dev/zero").unwrap().read_exact(&mut [0; 16]).unwrap();

    fs::write("/tmp/half", vec![1; ROOM / 2]).unwrap();
    assert_eq!(kind(fs::write("/tmp/rest", vec![1; ROOM])), Err(ErrorKind::StorageFull));
    let half = File::options().write(true).open("/tmp/half").unwrap();
    assert_eq!(kind(half.set_len(ROOM as u64 + 1)), Err(ErrorKind::FileTooLarge));
    let files = (0..ROOM)
        .take_while(|n| File::create(format!("/tmp/{n}")).is_ok())
        .count();
    assert!(files < ROOM / 4096, "{files} files");

    if report.landlock.is_some_and(|version| version >= 4) {
        // The loopback interface is down as well, which would be another answer.
        let reached = TcpStream::connect("127.0.0.1:1");
        assert_eq!(kind(reached), Err(ErrorKind::PermissionDenied));
    }
    assert_eq!(
        rustix::process::dumpable_behavior().unwrap(),
        DumpableBehavior::NotDumpable
    );
    let core = rustix::process::getrlimit(rustix::process::Resource::Core);
    assert_eq!(core.maximum, Some(0));
    let sets = rustix::thread::capabilities(None).unwrap();
    assert!((sets.effective | sets.permitted | sets.inheritable).is_empty());
    assert!(rustix::thread::no_new_privs().unwrap());
    let threads: Vec<_> = (0..128)
        .map_while(|_| std::thread::Builder::new().spawn(std::thread::park).ok())
        .collect();
    assert!((32..64).contains(&threads.len()), "{} threads", threads.len());
}

/// A process for which nobody has made namespaces changes nothing.
fn outside() {
    let scratch = Scratch {
        at: "/tmp".into(),
        bytes: ROOM as u64,
    };
    let error = enter_root(Root::new(scratch), 64, 4096).unwrap_err().to_string();
    assert!(error.contains("unshare --user"), "{error}");
    assert!(Path::new("/etc/passwd").exists() && Path::new("/proc/self").exists());
}

fn jailed(shown: &Path, given: &OwnedFd) -> String {
    let program = File::open("/proc/self/exe").unwrap();
    let (mut output, log) = std::io::pipe().unwrap();
    let arguments = ["confine-root", INSIDE, shown.to_str().unwrap()].map(|word| argument(word).unwrap());
    let child = spawn(&Launch {
        program: program.as_fd(),
        arguments: &arguments,
        environment: &[],
        descriptors: &[given.as_fd()],
        log: log.as_fd(),
        cgroup: None,
        isolation: Isolation::Full(Pool::default().identity(11).unwrap()),
        open_files: None,
        locks_memory: false,
    })
    .unwrap();
    drop(log);
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().exit_status(), Some(0), "{text}");
    text
}

/// A directory with a file, a program and a socket that somebody listens on, which others can look into.
fn shown(directory: &Path) -> UnixListener {
    fs::create_dir(directory).unwrap();
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(directory, 0o755);
    fs::write(directory.join("file"), "seen").unwrap();
    fs::copy("/bin/true", directory.join("program")).unwrap();
    let socket = directory.join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    open(&socket, 0o777);
    listener
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if words.get(1).is_some_and(|mode| mode == OUTSIDE) {
        return outside();
    }
    if let [_, mode, path] = words.as_slice()
        && mode == INSIDE
    {
        return inside(path.as_ref());
    }
    let base = tempfile::tempdir().unwrap();
    fs::set_permissions(base.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let (named, hidden) = (base.path().join("named"), base.path().join("hidden"));
    fs::create_dir(&hidden).unwrap();
    // The jail's user has no way through this one.
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o700)).unwrap();
    let given = hidden.join("given");
    let _listeners = [shown(&named), shown(&given)];
    let open = rustix::fs::open(&given, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let mount = host::share::read_only(open.as_fd(), &given).unwrap();
    let text = jailed(&named, &mount);

    // In namespaces that nothing else is in, whatever becomes of it: it must see that they are none for a jail.
    let mut outside = Command::new("unshare");
    outside.args(["--mount", "--propagation", "private", "--uts"]);
    let outside = outside
        .arg(std::env::current_exe().unwrap())
        .arg(OUTSIDE)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&outside.stderr);
    assert!(outside.status.success(), "{said}");
    eprintln!("confine-root: all passed\n{text}");
}
