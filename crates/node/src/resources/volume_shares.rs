//! What a sandbox's volumes are on the host, and handing them to its VMM. Knows nothing of what is in them.

use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::ByteSize;
use host::jail::Identity;
use node_api::volume::{Mounted, Served};
use node_api::{SandboxConfig, VolumeMount, VolumeSource};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use vmm_api::devices::FsOwners;

use crate::Error;
use crate::guest::reidentify::share_tag;
use crate::resources::volumes::Volumes;
use crate::sandbox::registry::Sandboxes;

/// How many files the guest of a sandbox may know of at a time, in all its volumes. Each costs the VMM a descriptor and the
/// host's kernel some 2 KiB, which count as the VMM's ([`MEMORY`]).
const FILES: u32 = 1 << 17;

/// What those files, and buffers for requests (2 MiB a volume), may take beside a VMM's own memory.
pub(crate) const MEMORY: ByteSize = ByteSize::mib(288);

/// How many descriptors a VMM with volumes may have: these files, and as many again for connections.
pub(crate) const OPEN_FILES: u64 = 1 << 19;

/// How many devices for shared directories a machine has at least that may get some: one that has volumes, that a tenant boots, or in which a
/// template is built. A snapshot is restored to the devices that it was taken with, so clones of it can have as many. Each costs a guest's boot
/// 594 exits, an eighth of all, and a VMM a thread, for which others wait (docs/devices/fs.md): so the rest have none. Few
/// sandboxes have more than two.
pub(crate) const SLOTS: usize = 2;

/// How many a sandbox has that boots.
pub(crate) fn slots(volumes: &[VolumeMount]) -> usize {
    match volumes.len() {
        0 => 0,
        some => some.max(SLOTS),
    }
}

/// A volume, open.
#[derive(Debug)]
pub(crate) struct Opened {
    /// Its directory, or the way to it.
    file: OwnedFd,
    served: bool,
    pub(crate) mounted: Mounted,
}

/// A volume ready for its VMM.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) tag: String,
    pub(crate) source: Source,
}

/// Where its directory is.
#[derive(Debug)]
pub(crate) enum Source {
    Directory(Directory),
    /// On another machine, at the end of this.
    Stream(OwnedFd),
}

/// A directory of this host.
#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) directory: OwnedFd,
    pub(crate) descriptors: OwnedFd,
    pub(crate) read_only: bool,
    pub(crate) owners: FsOwners,
    pub(crate) max_files: u32,
}

/// How long whoever serves a directory may take for anything.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);

/// Finds and opens the directories of a sandbox's volumes; named ones are made if they are missing, but for those of tenants.
pub(crate) fn open_all(config: &SandboxConfig, volumes: &Volumes, sandboxes: &Sandboxes) -> Result<Vec<Opened>, Error> {
    let open_one = |mount: &VolumeMount| {
        let (file, found) = match &mount.source {
            VolumeSource::Directory(path) => open(Path::new(path))?,
            VolumeSource::Named(name) => open(&volumes.make_files(name)?)?,
            VolumeSource::Tenant(name) => {
                let Some(tenant) = config.owner.as_deref() else {
                    return Err(Error::Invalid(format!(
                        "the volume `{name}` is a tenant's, and the sandbox is nobody's: give it a volume by NAME:GUEST"
                    )));
                };
                let files = volumes.tenants.files((tenant, name), None, sandboxes)?;
                found(files.into_root())?
            }
            VolumeSource::Served(served) => (connect(served)?, PathBuf::from(&served.directory)),
        };
        Ok(Opened {
            file,
            served: matches!(mount.source, VolumeSource::Served(_)),
            mounted: Mounted {
                directory: found,
                target: mount.target.clone(),
                read_only: mount.read_only,
            },
        })
    };
    config.volumes.iter().map(open_one).collect()
}

/// Opens a directory by whatever path leads there, once; and tells what its own path is.
fn open(path: &Path) -> Result<(OwnedFd, PathBuf), Error> {
    let refused = |why: &'static str| Error::Volume {
        path: path.to_owned(),
        why,
    };
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOENT => refused("is not there: make it first (mkdir), or leave the slashes out to name a volume"),
        Errno::NOTDIR => refused("leads through something that is no directory"),
        Errno::LOOP => refused("is a symbolic link that leads to itself"),
        other => Error::file("open", path)(io::Error::from(other)),
    })?;
    let stat = rustix::fs::fstat(&directory).map_err(Error::file("look at", path))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Err(refused("is no directory: share the directory that it is in"));
    }
    found(directory)
}

/// A directory that is open, with its own path.
fn found(directory: OwnedFd) -> Result<(OwnedFd, PathBuf), Error> {
    let name = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    let found = fs::read_link(&name).map_err(Error::file("look at", &name))?;
    Ok((directory, found))
}

/// Goes to where a directory is served. Who serves it knows the directory by the key.
fn connect(served: &Served) -> Result<OwnedFd, Error> {
    let connected = || -> io::Result<OwnedFd> {
        let mut stream = TcpStream::connect_timeout(&served.address, SERVER_PATIENCE)?;
        stream.set_nodelay(true)?;
        // What the VMM gets has these limits, too.
        stream.set_read_timeout(Some(SERVER_PATIENCE))?;
        stream.set_write_timeout(Some(SERVER_PATIENCE))?;
        writeln!(stream, "{}", served.key)?;
        let mut answer = [0; 3];
        stream.read_exact(&mut answer)?;
        match &answer {
            b"OK\n" => Ok(stream.into()),
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        }
    };
    connected().map_err(|cause| Error::Server {
        directory: PathBuf::from(&served.directory),
        address: served.address,
        cause,
    })
}

/// Makes of the directories what the VMM `pid` can serve: in a jail mounts of their own with their owners mapped into it,
/// else the directories themselves.
pub(crate) fn share(opened: &[Opened], pid: u32, jail: Option<Identity>) -> Result<Vec<Shared>, Error> {
    let count = u32::try_from(opened.len()).unwrap_or(u32::MAX).max(1);
    let one = |(index, volume): (usize, &Opened)| {
        let Mounted {
            directory, read_only, ..
        } = &volume.mounted;
        let copy = || volume.file.try_clone().map_err(Error::host("copying a descriptor"));
        let (directory, descriptors, owners) = match jail {
            _ if volume.served => {
                let source = Source::Stream(copy()?);
                return Ok(Shared {
                    tag: share_tag(index),
                    source,
                });
            }
            Some(_) => (
                host::share::directory(volume.file.as_fd(), directory, *read_only, pid)?,
                host::share::descriptors(pid)?,
                FsOwners::Kept,
            ),
            None => (copy()?, descriptors(pid)?, owners()),
        };
        let source = Source::Directory(Directory {
            directory,
            descriptors,
            read_only: *read_only,
            owners,
            max_files: FILES / count,
        });
        Ok(Shared {
            tag: share_tag(index),
            source,
        })
    };
    opened.iter().enumerate().map(one).collect()
}

fn descriptors(pid: u32) -> Result<OwnedFd, Error> {
    let path = PathBuf::from(format!("/proc/{pid}/fd"));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(Error::file("open", &path))
}

/// Without a jail: root makes files anybody's, others only their own.
fn owners() -> FsOwners {
    let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
    match uid.is_root() {
        true => FsOwners::Kept,
        false => FsOwners::One {
            uid: uid.as_raw(),
            gid: gid.as_raw(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_resolved_once_and_what_cannot_be_shared_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        let real = base.join("real");
        fs::create_dir(&real).unwrap();
        fs::write(base.join("file"), "").unwrap();
        std::os::unix::fs::symlink(&real, base.join("link")).unwrap();
        std::os::unix::fs::symlink("loop", base.join("loop")).unwrap();
        assert_eq!(open(&base.join("link")).unwrap().1, real);
        let refused = |name: &str| open(&base.join(name)).unwrap_err().to_string();
        assert!(refused("missing").contains("is not there"));
        assert!(refused("file").contains("is no directory"));
        assert!(refused("file/x").contains("leads through"));
        assert!(refused("loop").contains("leads to itself"));
    }
}
