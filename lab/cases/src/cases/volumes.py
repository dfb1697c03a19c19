"""The guest's half of the case `volumes`: uses /shared, /ro and /data as programs do. The first thing that is not as it
should be is the exception that ends it."""
import ctypes, errno, fcntl, hashlib, io, mmap, os, stat, sys, tarfile, time

S = "/shared/"


def refused(numbers, call, *args):
    try:
        call(*args)
    except OSError as error:
        assert error.errno in numbers, f"{call.__name__}{args}: {error}"
        return
    raise AssertionError(f"{call.__name__}{args} was not refused")


def in_child(body):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException as error:
            print(f"{body.__name__}: {error!r}", file=sys.stderr)
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, body.__name__


def content():
    big = open(S + "big", "rb").read()
    assert hashlib.sha256(big).hexdigest() == open(S + "big.sha256").read().strip()
    with open(S + "big.back", "wb") as back:
        back.write(big[::-1])
    small = io.BytesIO()
    with tarfile.open(fileobj=small, mode="w") as tar:
        for number in range(100):
            info = tarfile.TarInfo(f"tree/{number % 10}/{number}")
            info.size, info.mode, info.mtime = number, 0o600 | number % 8, 1_000_000 + number
            tar.addfile(info, io.BytesIO(b"x" * number))
    small.seek(0)
    with tarfile.open(fileobj=small) as tar:
        tar.extractall(S)
    for number in range(100):
        found = os.stat(f"{S}tree/{number % 10}/{number}")
        assert (found.st_size, found.st_mtime) == (number, 1_000_000 + number), found
    assert sum(len(files) for _, _, files in os.walk(S + "tree")) == 100


def names():
    os.mkdir(S + "d")
    open(S + "a", "w").write("a")
    open(S + "b", "w").write("b")
    os.rename(S + "a", S + "b")
    assert open(S + "b").read() == "a"
    os.rename(S + "b", S + "d/c")
    os.link(S + "d/c", S + "c2")
    assert os.stat(S + "c2").st_nlink == 2 and os.path.samefile(S + "c2", S + "d/c")
    os.symlink("d/c", S + "l")
    assert os.readlink(S + "l") == "d/c" and open(S + "l").read() == "a"
    os.rename(S + "d", S + "e")
    refused({errno.ENOTEMPTY}, os.rmdir, S + "e")
    held = open(S + "c2")
    os.unlink(S + "c2")
    os.unlink(S + "e/c")
    assert held.read() == "a", "an open file outlives its name"
    os.rmdir(S + "e")
    os.mkfifo(S + "fifo")

    def writer():
        open(S + "fifo", "w").write("through")

    pid = os.fork()
    if pid == 0:
        writer()
        os._exit(0)
    assert open(S + "fifo").read() == "through"
    os.waitpid(pid, 0)


def attributes():
    path = S + "file"
    open(path, "w").write("x")
    os.setxattr(path, "user.colour", b"blue")
    assert os.getxattr(path, "user.colour") == b"blue" and os.listxattr(path) == ["user.colour"]
    refused({errno.EOPNOTSUPP, errno.EPERM}, os.setxattr, path, "trusted.x", b"")
    os.chown(path, 1234, 5678)
    os.chmod(path, 0o6755)
    os.utime(path, ns=(1_000_000_007, 2_000_000_009))
    found = os.stat(path)
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (1234, 5678, 0o6755), found
    assert (found.st_atime_ns, found.st_mtime_ns) == (1_000_000_007, 2_000_000_009), found
    os.mkdir(S + "private", 0o700)
    os.mkdir(S + "theirs")
    os.chown(S + "theirs", 1000, 1000)

    def another_user():
        os.setgroups([])
        os.setgid(1000)
        os.setuid(1000)
        open(S + "theirs/made", "w").write("1000")
        made = os.stat(S + "theirs/made")
        assert (made.st_uid, made.st_gid) == (1000, 1000), made
        os.symlink("x", S + "theirs/link")
        assert os.lstat(S + "theirs/link").st_uid == 1000
        refused({errno.EACCES}, open, S + "private/x", "w")
        refused({errno.EACCES}, open, S + "new", "w")
        refused({errno.EPERM}, os.chown, S + "theirs/made", 0, 0)
        refused({errno.EPERM}, os.chmod, path, 0o777)

    in_child(another_user)


def io_modes():
    path = S + "mapped"
    with open(path, "w+b") as file:
        file.truncate(3 * 4096)
        with mmap.mmap(file.fileno(), 0) as mapped:
            mapped[5000:5005] = b"hello"
            mapped.flush()
        os.fsync(file.fileno())
    assert open(path, "rb").read()[5000:5005] == b"hello"
    log = os.open(S + "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    other = os.open(S + "log", os.O_WRONLY | os.O_APPEND)
    for number in range(20):
        os.write(log if number % 2 else other, b"%02d\n" % number)
    os.fdatasync(log)
    assert open(S + "log").read().split() == [f"{number:02}" for number in range(20)]
    os.posix_fallocate(log, 0, 100_000)
    assert os.stat(S + "log").st_size == 100_000
    first = open(S + "lock", "w")
    fcntl.flock(first, fcntl.LOCK_EX)

    def second():
        with open(S + "lock", "w") as again:
            refused({errno.EWOULDBLOCK}, fcntl.flock, again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            refused({errno.EACCES, errno.EAGAIN}, fcntl.lockf, locked, fcntl.LOCK_EX | fcntl.LOCK_NB)

    locked = open(S + "lock2", "w")
    fcntl.lockf(locked, fcntl.LOCK_EX)
    in_child(second)
    assert os.statvfs(S).f_blocks > 0


def walls():
    # The links are the host's; here they mean what they say here.
    for name in ("out", "out2", "magic"):
        refused({errno.ENOENT, errno.ELOOP, errno.EACCES}, open, S + name)
    assert os.stat(S + "..").st_ino == os.stat("/").st_ino
    refused({errno.EPERM}, os.mknod, S + "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    for call, *args in (
        (open, "/ro/new", "w"),
        (open, "/ro/file", "a"),
        (os.mkdir, "/ro/new"),
        (os.unlink, "/ro/file"),
        (os.chmod, "/ro/file", 0o777),
        (os.setxattr, "/ro/file", "user.x", b""),
    ):
        refused({errno.EROFS}, call, *args)
    assert open("/ro/file").read() == "read me"
    # Also for whoever takes the guest's own lock off.
    remount = 32  # MS_REMOUNT of linux/mount.h, without MS_RDONLY
    assert ctypes.CDLL(None).mount(b"none", b"/ro", b"", remount, None) == 0
    refused({errno.EROFS}, open, "/ro/new", "w")


open("/data/kept", "w").write("kept")
for part in (content, names, attributes, io_modes, walls):
    begun = time.monotonic()
    part()
    print(f"{part.__name__} {time.monotonic() - begun:.1f} s", file=sys.stderr)
print("all is well")
