//! A forwarded accelerator, as programs of the guest find it: the window's file system with the drivers' libraries, a file that a loader
//! finds them by, and a socket that the libraries connect to. Knows no call and no API but by its library's place.
//!
//! ```text
//!  program ── /run/basalt/accel.sock ── Broker ── vsock port 1026 ◀── the host's server
//!     └─ window: /run/basalt/accel/slot-N, by a descriptor ═════════════════┘ (the same memory)
//! ```

mod broker;
mod c_library;
mod slots;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use agent_api::accelerator::ACCELERATOR_PORT;
use agent_api::{Accelerator, CudaLibraries};
use rustix::mount::{MountFlags, mount};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use wire::packet::PacketSocket;

use self::broker::Broker;
use self::c_library::CLibrary;
use super::vsock::VsockListener;
use crate::{Error, Listener, STACK_SIZE, libraries, say};

/// Where the window's file system is, and the socket.
const WINDOW: &str = "/run/basalt/accel";
const SOCKET: &str = "/run/basalt/accel.sock";

/// Where programs find CUDA's libraries: names, all of one file of the window.
const CUDA: &str = "/run/basalt/cuda";

/// Where loaders look for OpenCL's drivers (cl_khr_icd).
const VENDORS: &str = "/etc/OpenCL/vendors";

/// The device comes with the machine, but its driver may take a moment.
const DEVICE_WAIT: Duration = Duration::from_secs(10);
const DEVICE_STEP: Duration = Duration::from_millis(5);

/// Where the label of an ext4 is, and how long it is at most (Linux, Documentation/filesystems/ext4/super.rst).
const LABEL_AT: u64 = 1024 + 0x78;
const LABEL: usize = 16;

/// After a failed accept(2).
const PAUSE: Duration = Duration::from_millis(100);

/// Sets it up; this process is in the container's root.
pub(crate) fn set_up(accelerator: &Accelerator) -> Result<(), Error> {
    let device = wait_for(&accelerator.label)?;
    fs::create_dir_all(WINDOW).map_err(Error::system(format!("making {WINDOW}")))?;
    let flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOATIME;
    mount(&device, WINDOW, c"ext4", flags, c"dax=always").map_err(Error::system(format!(
        "mounting {} as the accelerator's window",
        device.display()
    )))?;
    let (library, cuda) = match c_library::of(Path::new("/")) {
        CLibrary::Glibc => (&accelerator.opencl, &accelerator.cuda),
        CLibrary::Musl => (&accelerator.opencl_musl, &None),
    };
    if let Some(library) = library {
        let vendors = Path::new(VENDORS);
        let file = vendors.join("basalt.icd");
        fs::create_dir_all(vendors).map_err(Error::system(format!("making {VENDORS}")))?;
        fs::write(&file, format!("{WINDOW}/{library}\n"))
            .map_err(Error::system(format!("writing {}", file.display())))?;
    }
    if let Some(cuda) = cuda {
        link(cuda, Path::new(WINDOW), Path::new(CUDA))?;
        libraries::are_in(CUDA);
    }
    serve()
}

/// All names of CUDA's libraries, in a directory of their own.
fn link(cuda: &CudaLibraries, window: &Path, directory: &Path) -> Result<(), Error> {
    let fail = |path: &Path| Error::system(format!("making {}", path.display()));
    fs::create_dir_all(directory).map_err(fail(directory))?;
    let library = window.join(&cuda.file);
    for name in &cuda.names {
        let path = directory.join(name);
        match symlink(&library, &path) {
            // An earlier machine of the same disk has left it.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => (),
            made => made.map_err(fail(&path))?,
        }
    }
    Ok(())
}

/// Lets programs and the host's server meet, from now on.
fn serve() -> Result<(), Error> {
    let broker = Arc::new(Broker::new(Path::new(WINDOW)));
    let programs = listen(Path::new(SOCKET))?;
    let host = VsockListener::bind(ACCELERATOR_PORT)?;
    let for_programs = Arc::clone(&broker);
    start("accel-clients", move || {
        loop {
            match rustix::net::accept_with(&programs, SocketFlags::CLOEXEC) {
                Ok(socket) => for_programs.take_client(PacketSocket::from_fd(socket)),
                Err(error) => pause(error.into()),
            }
        }
    })?;
    start("accel-host", move || {
        loop {
            match host.accept() {
                Ok(Some(stream)) => broker.take_host(stream),
                Ok(None) => (),
                Err(error) => pause(error),
            }
        }
    })
}

fn start(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), Error> {
    let builder = thread::Builder::new().name(name.to_owned()).stack_size(STACK_SIZE);
    builder
        .spawn(work)
        .map(drop)
        .map_err(Error::system("starting a thread"))
}

/// A lasting failure must not spin.
fn pause(error: std::io::Error) {
    say(format_args!("accepting a connection for the accelerator: {error}"));
    thread::sleep(PAUSE);
}

/// A socket for every program of the guest.
fn listen(path: &Path) -> Result<OwnedFd, Error> {
    let fail = || Error::system(format!("making the socket {}", path.display()));
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = socket.map_err(|error| fail()(error.into()))?;
    let address = SocketAddrUnix::new(path).map_err(|error| fail()(error.into()))?;
    // The image or an earlier machine may have left one.
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(fail()(error)),
        _ => (),
    }
    rustix::net::bind(&socket, &address).map_err(|error| fail()(error.into()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o666)).map_err(fail())?;
    rustix::net::listen(&socket, 64).map_err(|error| fail()(error.into()))?;
    Ok(socket)
}

/// The device whose file system has the label.
fn wait_for(label: &str) -> Result<PathBuf, Error> {
    let end = Instant::now() + DEVICE_WAIT;
    loop {
        let devices = fs::read_dir("/dev").map_err(Error::system("reading /dev"))?;
        let found = devices.flatten().map(|entry| entry.path()).find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("pmem") && has_label(path, label)
        });
        match found {
            Some(path) => return Ok(path),
            None if Instant::now() > end => {
                return Err(Error::Refused(format!(
                    "no device with the file system {label:?} appeared within {DEVICE_WAIT:?}; the guest's kernel needs \
                     CONFIG_VIRTIO_PMEM, CONFIG_BLK_DEV_PMEM and CONFIG_FS_DAX"
                )));
            }
            None => thread::sleep(DEVICE_STEP),
        }
    }
}

fn has_label(path: &Path, label: &str) -> bool {
    let mut there = [0; LABEL];
    let read = File::open(path).and_then(|device| device.read_exact_at(&mut there, LABEL_AT));
    let length = there.iter().position(|byte| *byte == 0).unwrap_or(LABEL);
    read.is_ok() && there.get(..length) == Some(label.as_bytes())
}
