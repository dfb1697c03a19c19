//! Volumes of tenants. Each is a file system of a fixed size in a file of its own, so that no tenant fills the node's disk and a removal is the
//! file's: whatever a guest has made of the tree in it, nobody walks through that. It is mounted when it is needed first, and stays so while
//! sandboxes share it.
//!
//! ```text
//!  DIRECTORY/t-TENANT/NAME/disk          the file system
//!  DIRECTORY/t-TENANT/NAME/mount         where it is mounted
//!  DIRECTORY/t-TENANT/NAME/mount/root    what sandboxes share
//!  DIRECTORY/t-TENANT/NAME/mount/trash   what is being removed in it, which no sandbox sees
//!  DIRECTORY/.NUMBER                     one that is being made or removed
//! ```

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use base::ByteSize;
use host::volume_files::{Done, FilesError, VolumeFiles};
use node_api::tenant_volume::{FileRequest, TenantVolume};
use node_api::volume::check_name;
use node_api::{ErrorKind, Sandbox, VolumeSource};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::Error;
use crate::sandbox::registry::Sandboxes;
use crate::saved::disk;
use crate::store::unfinished::{UNFINISHED, unfinished};

const DISK: &str = "disk";
const MOUNT: &str = "mount";
const ROOT: &str = "root";
const TRASH: &str = "trash";
/// Made and removed beside them, to see whether anything can be.
const PROBE: &str = "probe";

/// Before a tenant's name, which may be `.` and `..`.
const TENANT: &str = "t-";

/// The smallest, in which a file system has some room.
const SMALLEST: ByteSize = ByteSize::mib(16);
/// The largest that ext4 has with blocks of 4 KiB.
const LARGEST: ByteSize = ByteSize::gib(16 << 10);

/// With less the host has no space for a volume that is made whole.
const ROOM: ByteSize = ByteSize::mib(16);

/// How long a mount may take for what earlier removals have left.
const TRASH_TIME: Duration = Duration::from_secs(5);

/// A file's blocks, as stat(2) counts them.
const STAT_BLOCK: u64 = 512;

/// How many stay mounted of which nothing is needed: each takes a loop device and a thread of the kernel.
const IDLE: usize = 16;

/// Why something is not done with a tenant's volume.
#[derive(Debug, thiserror::Error)]
pub enum TenantVolumeError {
    /// No such volume.
    #[error("there is no volume `{0}`")]
    Missing(String),
    /// There is one.
    #[error("there is a volume `{0}` already: use that one, or choose another name")]
    There(String),
    /// Enough.
    #[error("there are {0} volumes, which is all that there may be: remove one first")]
    Many(u32),
    /// Too much.
    #[error(
        "the volumes would have {wanted} together, and {most} is all that they may have: remove one first, or make this one smaller"
    )]
    Space {
        /// With this one.
        wanted: ByteSize,
        /// The most.
        most: ByteSize,
    },
    /// A size that cannot be.
    #[error("a volume of {0} cannot be: give it from {SMALLEST} to {LARGEST}")]
    Size(ByteSize),
    /// A sandbox has it.
    #[error("sandbox {sandbox} has the volume `{name}`: end that sandbox first")]
    InUse {
        /// The volume.
        name: String,
        /// The sandbox's id.
        sandbox: String,
    },
    /// It cannot be mounted.
    #[error(
        "the volume at {} cannot be mounted: {said}; see whether this host has loop devices and ext4, and what `e2fsck -n` says of it",
        .disk.display()
    )]
    Mount {
        /// Its file system.
        disk: PathBuf,
        /// What mount(8) says.
        said: String,
    },
    /// Something about its files.
    #[error(transparent)]
    Files(#[from] FilesError),
}

impl TenantVolumeError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::Missing(_) => ErrorKind::NotFound,
            Self::There(_) | Self::Many(_) | Self::Space { .. } | Self::InUse { .. } => ErrorKind::Conflict,
            Self::Size(_) => ErrorKind::Invalid,
            Self::Mount { .. } => ErrorKind::Host,
            Self::Files(error) => error.kind(),
        }
    }
}

/// What a tenant may have, with the volume that is being made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    /// How many.
    pub(crate) most: u32,
    /// How large together.
    pub(crate) space: Option<ByteSize>,
}

/// The tenants' volumes of a node.
#[derive(Debug)]
pub(crate) struct TenantVolumes {
    directory: PathBuf,
    /// Held by whoever makes, mounts or removes one.
    changing: Mutex<()>,
}

impl TenantVolumes {
    /// Those in this directory, which is made if it is missing, and in which nothing half done stays.
    pub(crate) fn open(directory: PathBuf) -> Result<Self, Error> {
        let clean = || -> io::Result<()> {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
            for entry in fs::read_dir(&directory)? {
                let entry = entry?;
                if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
                    discard(&entry.path());
                }
            }
            Ok(())
        };
        clean().map_err(Error::file("clean", &directory))?;
        Ok(Self {
            directory,
            changing: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, tenant: &str) -> PathBuf {
        self.directory.join(format!("{TENANT}{tenant}"))
    }

    /// Where a volume is, if there is one.
    fn place(&self, tenant: &str, name: &str) -> Result<PathBuf, Error> {
        check_name(name).map_err(node_api::ConfigError::from)?;
        let place = self.of(tenant).join(name);
        match place.join(DISK).is_file() {
            true => Ok(place),
            false => Err(TenantVolumeError::Missing(name.to_owned()).into()),
        }
    }

    /// Makes one, if the tenant may have that much.
    pub(crate) fn make(&self, tenant: &str, name: &str, size: ByteSize, bound: Bound) -> Result<TenantVolume, Error> {
        check_name(name).map_err(node_api::ConfigError::from)?;
        if size < SMALLEST || size > LARGEST {
            return Err(TenantVolumeError::Size(size).into());
        }
        self.require_room(tenant, name, size, bound)?;
        let its = self.of(tenant);
        let begun = self
            .directory
            .join(unfinished().map_err(Error::file("make", &self.directory))?);
        // What is slow is done before anybody has to wait for it.
        let made = begin(&begun, size).and_then(|()| {
            let _changing = self.lock();
            self.require_room(tenant, name, size, bound)?;
            let named = || -> io::Result<()> {
                fs::DirBuilder::new().recursive(true).mode(0o700).create(&its)?;
                renameat_with(CWD, &begun, CWD, its.join(name), RenameFlags::NOREPLACE)?;
                File::open(&its)?.sync_all()?;
                File::open(&self.directory)?.sync_all()
            };
            named().map_err(Error::file("make", &its.join(name)))
        });
        if let Err(error) = made {
            discard(&begun);
            return Err(error);
        }
        describe(&its.join(name), (tenant, name), Vec::new())
    }

    fn require_room(&self, tenant: &str, name: &str, size: ByteSize, bound: Bound) -> Result<(), Error> {
        let there = self.names(tenant)?;
        if there.iter().any(|one| one == name) {
            return Err(TenantVolumeError::There(name.to_owned()).into());
        }
        if there.len() >= bound.most as usize {
            return Err(TenantVolumeError::Many(bound.most).into());
        }
        let Some(most) = bound.space else {
            return Ok(());
        };
        let disks = there.iter().map(|one| self.of(tenant).join(one).join(DISK));
        // One that has gone meanwhile takes nothing.
        let sizes = disks.filter_map(|disk| fs::metadata(disk).ok()).map(|disk| disk.len());
        let wanted = ByteSize(sizes.fold(size.bytes(), u64::saturating_add));
        match wanted <= most {
            true => Ok(()),
            false => Err(TenantVolumeError::Space { wanted, most }.into()),
        }
    }

    /// The names of a tenant's, in order.
    fn names(&self, tenant: &str) -> Result<Vec<String>, Error> {
        let its = self.of(tenant);
        let entries = match fs::read_dir(&its) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(Error::file("read", &its))?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::file("read", &its))?.file_name();
            names.extend(name.to_str().filter(|name| check_name(name).is_ok()).map(str::to_owned));
        }
        names.sort();
        Ok(names)
    }

    /// One that is there.
    pub(crate) fn find(&self, tenant: &str, name: &str, sandboxes: &Sandboxes) -> Result<TenantVolume, Error> {
        self.find_with(tenant, name, &sandboxes.list())
    }

    fn find_with(&self, tenant: &str, name: &str, sandboxes: &[Sandbox]) -> Result<TenantVolume, Error> {
        describe(
            &self.place(tenant, name)?,
            (tenant, name),
            used_by(tenant, name, sandboxes),
        )
    }

    /// All of a tenant.
    pub(crate) fn list(&self, tenant: &str, sandboxes: &Sandboxes) -> Result<Vec<TenantVolume>, Error> {
        let (names, sandboxes) = (self.names(tenant)?, sandboxes.list());
        // One that has gone meanwhile is none.
        Ok(names
            .iter()
            .filter_map(|name| self.find_with(tenant, name, &sandboxes).ok())
            .collect())
    }

    /// All of all tenants, by tenant and name.
    pub(crate) fn list_all(&self, sandboxes: &Sandboxes) -> Result<Vec<TenantVolume>, Error> {
        let mut tenants = self.tenants().map_err(Error::file("read", &self.directory))?;
        tenants.sort();
        let sandboxes = sandboxes.list();
        let mut found = Vec::new();
        for tenant in tenants {
            let names = self.names(&tenant)?;
            found.extend(
                names
                    .iter()
                    .filter_map(|name| self.find_with(&tenant, name, &sandboxes).ok()),
            );
        }
        Ok(found)
    }

    /// Those who have, or had, any.
    fn tenants(&self) -> io::Result<Vec<String>> {
        let mut tenants = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            tenants.extend(
                name.to_str()
                    .and_then(|name| name.strip_prefix(TENANT))
                    .map(str::to_owned),
            );
        }
        Ok(tenants)
    }

    /// Removes one with its files.
    pub(crate) fn remove(&self, tenant: &str, name: &str, sandboxes: &Sandboxes) -> Result<(), Error> {
        let _changing = self.lock();
        let place = self.place(tenant, name)?;
        let hidden = self
            .directory
            .join(unfinished().map_err(Error::file("remove", &place))?);
        {
            // While this is held no sandbox comes to be that has it.
            let entries = sandboxes.entries();
            let user = entries
                .values()
                .map(|entry| entry.stored().sandbox)
                .find(|one| uses(one, tenant, name));
            if let Some(sandbox) = user {
                return Err(TenantVolumeError::InUse {
                    name: name.to_owned(),
                    sandbox: sandbox.id,
                }
                .into());
            }
            fs::rename(&place, &hidden).map_err(Error::file("remove", &place))?;
        }
        let its = self.of(tenant);
        let synced = File::open(&its).and_then(|directory| directory.sync_all());
        synced.map_err(Error::file("write", &its))?;
        discard(&hidden);
        Ok(())
    }

    /// The files of one, which is mounted if it is not; of the one that was made at that time, if that is said.
    pub(crate) fn files(
        &self,
        (tenant, name): (&str, &str),
        created_ns: Option<u64>,
        sandboxes: &Sandboxes,
    ) -> Result<VolumeFiles, Error> {
        let (place, new, files) = {
            let _changing = self.lock();
            self.mount_and_open((tenant, name), created_ns, sandboxes)?
        };
        if new && let Err(error) = files.empty_trash(TRASH_TIME) {
            log::warn!(
                "what was removed in the volume {} is not gone yet: {error}; it is tried again when it is mounted",
                place.display()
            );
        }
        Ok(files)
    }

    /// Where it is, and whether it was mounted now.
    fn mount_and_open(
        &self,
        (tenant, name): (&str, &str),
        created_ns: Option<u64>,
        sandboxes: &Sandboxes,
    ) -> Result<(PathBuf, bool, VolumeFiles), Error> {
        let place = self.place(tenant, name)?;
        if let Some(wanted) = created_ns
            && created(&place)? != wanted
        {
            return Err(TenantVolumeError::Missing(name.to_owned()).into());
        }
        let there = is_mounted(&place).map_err(Error::file("look at", &place))?;
        let new = !there || self.let_go(&place);
        if new {
            self.unmount_idle(sandboxes, IDLE);
            mount(&place)?;
        }
        let files = open(&place).map_err(Error::file("open", &place))?;
        Ok((place, new, files))
    }

    /// Unmounts one that takes no changes any more, as its host had no space for some, if nobody has it open and there is space; whether it
    /// did. Its journal has what it needs to be whole again when it is mounted.
    fn let_go(&self, place: &Path) -> bool {
        // Where there is none, looking would itself write what the host cannot take.
        if !has_room(&self.directory) || !is_stuck(place) {
            return false;
        }
        match unmount(place.join(MOUNT), UnmountFlags::empty()) {
            Ok(()) => {
                log::info!("the volume {} is mounted anew: it took no changes", place.display());
                true
            }
            Err(error) => {
                log::warn!(
                    "the volume {} takes no changes, and cannot be mounted anew ({error}): end or suspend the sandboxes that have it",
                    place.display()
                );
                false
            }
        }
    }

    /// Carries out a request about files of one.
    pub(crate) fn carry_out(
        &self,
        volume: (&str, &str),
        created_ns: Option<u64>,
        request: &FileRequest,
        sandboxes: &Sandboxes,
    ) -> Result<Done, Error> {
        let files = self.files(volume, created_ns, sandboxes)?;
        files
            .carry_out(request)
            .map_err(|error| TenantVolumeError::from(error).into())
    }

    /// Unmounts those that no sandbox has, beyond so many. One whose files somebody is reading stays.
    fn unmount_idle(&self, sandboxes: &Sandboxes, keep: usize) {
        let mounted = match self.mounted() {
            Ok(mounted) => mounted,
            Err(error) => return log::warn!("which volumes are mounted is not known: {error}"),
        };
        let all = sandboxes.list();
        let is_idle = |(tenant, name, _): &(String, String, PathBuf)| !all.iter().any(|one| uses(one, tenant, name));
        for (_, _, place) in mounted.into_iter().filter(is_idle).skip(keep) {
            if let Err(error) = unmount(place.join(MOUNT), UnmountFlags::empty())
                && error != Errno::BUSY
            {
                log::warn!("the volume {} stays mounted: {error}", place.display());
            }
        }
    }

    /// Unmounts all that no sandbox has.
    pub(crate) fn take_away(&self, sandboxes: &Sandboxes) {
        let _changing = self.lock();
        self.unmount_idle(sandboxes, 0);
    }

    /// Tenant, name and place of each that is mounted.
    fn mounted(&self) -> io::Result<Vec<(String, String, PathBuf)>> {
        let mut mounted = Vec::new();
        for tenant in self.tenants()? {
            for volume in fs::read_dir(self.of(&tenant))? {
                let volume = volume?;
                if is_mounted(&volume.path())? {
                    let its = volume.file_name().to_string_lossy().into_owned();
                    mounted.push((tenant.clone(), its, volume.path()));
                }
            }
        }
        Ok(mounted)
    }
}

/// Makes a volume that has no name yet.
fn begin(begun: &Path, size: ByteSize) -> Result<(), Error> {
    let file = |path: &Path| -> io::Result<()> {
        fs::DirBuilder::new().mode(0o700).create(path)?;
        fs::DirBuilder::new().mode(0o700).create(path.join(MOUNT))?;
        File::create_new(path.join(DISK))?.set_len(size.bytes())
    };
    file(begun).map_err(Error::file("make", begun))?;
    disk::make_file_system(&begun.join(DISK))?;
    let synced = || -> io::Result<()> {
        File::open(begun.join(DISK))?.sync_all()?;
        File::open(begun)?.sync_all()
    };
    synced().map_err(Error::file("write", begun))
}

/// Removes what nobody can find any more. What is there that we have not made stays, and is told.
fn discard(hidden: &Path) {
    // Maybe several times, one over the other.
    while unmount(hidden.join(MOUNT), UnmountFlags::DETACH).is_ok() {}
    let missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    let steps = [
        fs::remove_file(hidden.join(DISK)),
        fs::remove_dir(hidden.join(MOUNT)),
        fs::remove_dir(hidden),
    ];
    let failed = steps.into_iter().filter_map(Result::err).find(|error| !missing(error));
    if let Some(error) = failed {
        log::warn!(
            "what is left of a volume in {} stays: {error}; remove it by hand",
            hidden.display()
        );
    }
}

fn is_mounted(place: &Path) -> io::Result<bool> {
    Ok(fs::metadata(place)?.dev() != fs::metadata(place.join(MOUNT))?.dev())
}

/// Whether a mounted one takes no changes: ext4 has given its journal up, as the host could not write to it. How kernels tell this
/// differs; none makes a directory then.
fn is_stuck(place: &Path) -> bool {
    let probe = place.join(MOUNT).join(PROBE);
    let made = fs::create_dir(&probe);
    // Of one that was ended in between, too.
    let removed = fs::remove_dir(&probe);
    let refused = |done: io::Result<()>| {
        let error = done.err().and_then(|error| error.raw_os_error());
        [Errno::ROFS, Errno::IO]
            .into_iter()
            .any(|errno| Some(errno.raw_os_error()) == error)
    };
    refused(made) || refused(removed)
}

/// Whether the host has space for what volumes write.
fn has_room(directory: &Path) -> bool {
    let free = rustix::fs::statvfs(directory).map(|found| found.f_bavail.saturating_mul(found.f_frsize));
    free.is_ok_and(|free| free >= ROOM.bytes())
}

/// Mounts one. mount(8) finds the loop device that has the file already, if there is one: two for one file would destroy it.
fn mount(place: &Path) -> Result<(), Error> {
    let (disk, at) = (place.join(DISK), place.join(MOUNT));
    let failed = |said: String| TenantVolumeError::Mount {
        disk: disk.clone(),
        said,
    };
    let output = Command::new("mount")
        .args([
            "-t",
            disk::FILE_SYSTEM,
            "-o",
            "loop,nosuid,nodev,noexec,noatime,discard,errors=remount-ro",
        ])
        .args([&disk, &at])
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| failed(format!("mount(8) cannot be run ({error})")))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(failed(said.split_whitespace().collect::<Vec<_>>().join(" ")).into());
    }
    let made = || -> io::Result<()> {
        // The root directory of the file system has what mkfs has put there.
        for (name, mode) in [(ROOT, 0o777), (TRASH, 0o700)] {
            let path = at.join(name);
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                // Whoever a sandbox's programs run as, they can use it.
                Ok(()) => fs::set_permissions(&path, Permissions::from_mode(mode))?,
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    };
    Ok(made().map_err(|error| failed(error.to_string()))?)
}

fn open(place: &Path) -> io::Result<VolumeFiles> {
    let at = place.join(MOUNT);
    VolumeFiles::open(&at.join(ROOT), &at.join(TRASH))
}

/// When it was made: nothing is put into its directory later.
fn created(place: &Path) -> Result<u64, Error> {
    let metadata = fs::metadata(place).map_err(Error::file("look at", place))?;
    let since = metadata
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let created = since.map_or(0, |since| since.as_nanos());
    Ok(u64::try_from(created).unwrap_or(u64::MAX))
}

fn describe(place: &Path, (tenant, name): (&str, &str), used_by: Vec<String>) -> Result<TenantVolume, Error> {
    let disk = place.join(DISK);
    let metadata = fs::metadata(&disk).map_err(Error::file("look at", &disk))?;
    Ok(TenantVolume {
        name: name.to_owned(),
        size: ByteSize(metadata.len()),
        bytes: metadata.blocks() * STAT_BLOCK,
        tenant: tenant.to_owned(),
        created_ns: created(place)?,
        used_by,
    })
}

/// The ids of the sandboxes that have it.
fn used_by(tenant: &str, name: &str, sandboxes: &[Sandbox]) -> Vec<String> {
    let its = sandboxes.iter().filter(|one| uses(one, tenant, name));
    let mut users: Vec<String> = its.map(|one| one.id.clone()).collect();
    users.sort();
    users
}

fn uses(sandbox: &Sandbox, tenant: &str, name: &str) -> bool {
    let is_it = |source: &VolumeSource| matches!(source, VolumeSource::Tenant(other) if other == name);
    sandbox.config.owner.as_deref() == Some(tenant) && sandbox.config.volumes.iter().any(|volume| is_it(&volume.source))
}

#[cfg(test)]
mod tests;
