//! Named volumes: directories that the node keeps for its sandboxes and that outlive them.
//!
//! A volume is the directory `volumes/NAME`, and its files are in `_data` below. It comes and goes by one rename each, so
//! that after a crash it is there whole or not at all; what was half made or half removed has a name that no volume can
//! have, and goes when the daemon starts. Whether it is in use is told by the sandboxes.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use base::{Points, points};
use host::tree;
use node_api::volume::check_name;
use node_api::{Volume, VolumeSource};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::Error;
use crate::resources::tenant_volumes::TenantVolumes;
use crate::sandbox::registry::Sandboxes;
use crate::store::unfinished::{UNFINISHED, unfinished};

/// Where a volume's files are, below its own directory.
const DATA: &str = "_data";

/// Makes the place for volumes, and removes what a daemon that was killed has left half done. What cannot be removed stays
/// for the next time: guests have shaped it, and nothing about it is worth refusing to start.
fn clean(volumes: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(volumes)?;
    for entry in fs::read_dir(volumes)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes())
            && let Err(error) = tree::remove(&entry.path())
        {
            let path = entry.path();
            log::warn!(
                "what is left of a volume in {} stays: {error}; remove it by hand",
                path.display()
            );
        }
    }
    Ok(())
}

/// Makes one; it is fine if there is one already. Gives its files' directory.
fn make(volumes: &Path, name: &str, points: &Points) -> io::Result<PathBuf> {
    let place = volumes.join(name);
    let data = place.join(DATA);
    if data.is_dir() {
        return Ok(data);
    }
    let begun = volumes.join(unfinished()?);
    let made = begin(&begun).and_then(|()| {
        points.at(points::VOLUME_BEGUN);
        match renameat_with(CWD, &begun, CWD, &place, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(true),
            // Somebody was quicker.
            Err(rustix::io::Errno::EXIST) if data.is_dir() => Ok(false),
            Err(error) => Err(error.into()),
        }
    });
    match made {
        Ok(true) => {
            File::open(volumes)?.sync_all()?;
            points.at(points::VOLUME_MADE);
        }
        Ok(false) => tree::remove(&begun)?,
        Err(error) => {
            // The next daemon tries again.
            if let Err(left) = tree::remove(&begun)
                && left.kind() != io::ErrorKind::NotFound
            {
                log::warn!("{} stays behind: {left}", begun.display());
            }
            return Err(error);
        }
    }
    Ok(data)
}

/// Makes the directory of a volume that has no name yet.
fn begin(begun: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(begun)?;
    let files = begun.join(DATA);
    fs::create_dir(&files)?;
    // What guests find, whatever the umask: whoever they run as can use it. On the host the directory around it is closed.
    fs::set_permissions(&files, fs::Permissions::from_mode(0o755))?;
    File::open(&files)?.sync_all()?;
    File::open(begun)?.sync_all()
}

/// Puts one out of everybody's sight; its files are still to be removed. `None` if there is none.
fn hide(volumes: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    let hidden = volumes.join(unfinished()?);
    match fs::rename(volumes.join(name), &hidden) {
        Ok(()) => {
            File::open(volumes)?.sync_all()?;
            Ok(Some(hidden))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The names of all, in order.
fn names(volumes: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(volumes)? {
        let name = entry?.file_name();
        names.extend(name.to_str().filter(|name| check_name(name).is_ok()).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// The node's volumes.
#[derive(Debug)]
pub(crate) struct Volumes {
    directory: PathBuf,
    points: Points,
    /// Those of tenants.
    pub(crate) tenants: TenantVolumes,
}

impl Volumes {
    /// Those in this directory, which is made if it is missing, and in which nothing half done stays; and those of tenants in theirs.
    pub(crate) fn open(directory: PathBuf, tenants: PathBuf, points: Points) -> Result<Self, Error> {
        clean(&directory).map_err(Error::file("clean", &directory))?;
        Ok(Self {
            directory,
            points,
            tenants: TenantVolumes::open(tenants)?,
        })
    }

    /// Makes a named volume if there is none.
    pub(crate) fn make(&self, name: &str, sandboxes: &Sandboxes) -> Result<Volume, Error> {
        self.make_files(name)?;
        self.find(name, sandboxes)
    }

    /// The directory with the files of one, which is made if there is none.
    pub(crate) fn make_files(&self, name: &str) -> Result<PathBuf, Error> {
        check_name(name).map_err(node_api::ConfigError::from)?;
        make(&self.directory, name, &self.points).map_err(Error::file("make", &self.directory.join(name)))
    }

    /// One that is there.
    pub(crate) fn find(&self, name: &str, sandboxes: &Sandboxes) -> Result<Volume, Error> {
        check_name(name).map_err(node_api::ConfigError::from)?;
        let place = self.directory.join(name);
        let metadata = match fs::metadata(&place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Error::NoVolume(name.to_owned()));
            }
            other => other.map_err(Error::file("look at", &place))?,
        };
        // Of the directory around its files, which nothing is put into later.
        let since = metadata
            .modified()
            .ok()
            .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let created = since.map_or(0, |since| since.as_nanos());
        Ok(Volume {
            name: name.to_owned(),
            directory: place.join(DATA),
            created_ns: u64::try_from(created).unwrap_or(u64::MAX),
            used_by: used_by(name, sandboxes),
        })
    }

    /// All of them.
    pub(crate) fn list(&self, sandboxes: &Sandboxes) -> Result<Vec<Volume>, Error> {
        let names = names(&self.directory).map_err(Error::file("read", &self.directory))?;
        // One that has gone meanwhile is none.
        Ok(names
            .iter()
            .filter_map(|name| self.find(name, sandboxes).ok())
            .collect())
    }

    /// Removes one with its files.
    pub(crate) fn remove(&self, name: &str, sandboxes: &Sandboxes) -> Result<(), Error> {
        check_name(name).map_err(node_api::ConfigError::from)?;
        let hidden = {
            // While this is held no sandbox comes to be that has it.
            let entries = sandboxes.entries();
            let user = entries
                .values()
                .map(|entry| entry.stored().sandbox)
                .find(|sandbox| uses(sandbox, name));
            if let Some(sandbox) = user {
                return Err(Error::VolumeInUse {
                    name: name.to_owned(),
                    sandbox: sandbox.name,
                });
            }
            hide(&self.directory, name).map_err(Error::file("remove", &self.directory.join(name)))?
        };
        let hidden = hidden.ok_or_else(|| Error::NoVolume(name.to_owned()))?;
        self.points.at(points::VOLUME_HIDDEN);
        tree::remove(&hidden).map_err(Error::file("remove", &hidden))
    }

    /// Removes all that no sandbox has; which.
    pub(crate) fn prune(&self, sandboxes: &Sandboxes) -> Result<Vec<String>, Error> {
        let mut removed = Vec::new();
        for volume in self.list(sandboxes)? {
            match self.remove(&volume.name, sandboxes) {
                Ok(()) => removed.push(volume.name),
                Err(Error::VolumeInUse { .. } | Error::NoVolume(_)) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(removed)
    }
}

/// The sandboxes that have it, by name.
fn used_by(name: &str, sandboxes: &Sandboxes) -> Vec<String> {
    let mut users: Vec<String> = sandboxes
        .list()
        .into_iter()
        .filter(|sandbox| uses(sandbox, name))
        .map(|sandbox| sandbox.name)
        .collect();
    users.sort();
    users
}

fn uses(sandbox: &node_api::Sandbox, name: &str) -> bool {
    let is_it = |source: &VolumeSource| matches!(source, VolumeSource::Named(other) if other == name);
    sandbox.config.volumes.iter().any(|volume| is_it(&volume.source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_comes_and_goes_whole() {
        let directory = tempfile::tempdir().unwrap();
        let volumes = directory.path().join("volumes");
        clean(&volumes).unwrap();
        let data = make(&volumes, "cache", &Points::default()).unwrap();
        fs::write(data.join("kept"), "x").unwrap();
        assert_eq!(
            make(&volumes, "cache", &Points::default()).unwrap(),
            data,
            "the same one"
        );
        assert!(data.join("kept").exists());
        make(&volumes, "another", &Points::default()).unwrap();
        assert_eq!(names(&volumes).unwrap(), ["another", "cache"]);
        // What cannot have its name leaves nothing.
        fs::write(volumes.join("file"), "").unwrap();
        make(&volumes, "file", &Points::default()).unwrap_err();
        fs::remove_file(volumes.join("file")).unwrap();
        assert_eq!(fs::read_dir(&volumes).unwrap().count(), 2);
        let hidden = hide(&volumes, "cache").unwrap().unwrap();
        assert!(hidden.join("_data/kept").exists() && !data.exists());
        assert_eq!(names(&volumes).unwrap(), ["another"]);
        assert_eq!(hide(&volumes, "cache").unwrap(), None);
        // What a crash has left goes, and nothing else.
        fs::create_dir_all(volumes.join(".1234/_data")).unwrap();
        clean(&volumes).unwrap();
        assert!(!hidden.exists() && !volumes.join(".1234").exists());
        assert_eq!(names(&volumes).unwrap(), ["another"]);
    }

    #[test]
    fn a_volume_that_a_sandbox_has_stays() {
        let directory = tempfile::tempdir().unwrap();
        let volumes = Volumes::open(
            directory.path().join("volumes"),
            directory.path().join("tenants"),
            Points::default(),
        )
        .unwrap();
        let sandboxes = Sandboxes::default();
        for name in ["free", "used"] {
            let made = volumes.make(name, &sandboxes).unwrap();
            assert_eq!(made.directory, volumes.make_files(name).unwrap());
            assert!(made.used_by.is_empty());
        }
        let mut stored = crate::testing::stored("aaaaaaaaaaaa", "");
        stored.sandbox.config.volumes = vec!["used:/a".parse().unwrap()];
        let entry = sandboxes.register(stored, Some("web"), |_| Ok(())).unwrap();
        assert_eq!(volumes.find("used", &sandboxes).unwrap().used_by, ["web"]);
        let refused = volumes.remove("used", &sandboxes).unwrap_err();
        assert!(matches!(refused, Error::VolumeInUse { sandbox, .. } if sandbox == "web"));
        assert_eq!(volumes.prune(&sandboxes).unwrap(), ["free"]);
        sandboxes.remove(&entry);
        volumes.remove("used", &sandboxes).unwrap();
        assert!(matches!(volumes.find("used", &sandboxes), Err(Error::NoVolume(_))));
        assert!(volumes.list(&sandboxes).unwrap().is_empty());
    }

    #[test]
    fn what_cannot_be_removed_does_not_keep_the_daemon_from_its_start() {
        use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
        // Others cannot mount.
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let volumes = directory.path().join("volumes");
        let (busy, other) = (volumes.join(".busy"), volumes.join(".other"));
        fs::create_dir_all(&busy).unwrap();
        fs::create_dir_all(&other).unwrap();
        rustix::mount::mount("none", &busy, c"tmpfs", MountFlags::empty(), None).unwrap();
        rustix::mount::mount_change(&busy, MountPropagationFlags::PRIVATE).unwrap();
        let cleaned = clean(&volumes);
        rustix::mount::unmount(&busy, UnmountFlags::DETACH).unwrap();
        cleaned.unwrap();
        assert!(busy.exists() && !other.exists());
        clean(&volumes).unwrap();
        assert!(!busy.exists());
    }
}
