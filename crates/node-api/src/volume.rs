//! Volumes: directories that a sandbox shares with its host, by path or by name. Does not know how they are shared.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::config::MAX_NAME;

/// The most volumes of one sandbox: each is a device.
pub const MAX_VOLUMES: usize = 16;

/// Where a guest's kernel has its own file systems.
const TAKEN: [&str; 3] = ["/proc", "/sys", "/dev"];

/// Why a volume cannot be.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// Not what a volume looks like.
    #[error("`{0}` is no volume: write HOST:GUEST or NAME:GUEST, with `:ro` behind it if nothing may be changed")]
    Form(String),
    /// Not a name.
    #[error(
        "`{0}` is neither a volume's name nor a path: begin a name with a letter or digit, then letters, digits, `_`, `.` and `-`, 64 at most; begin a path with `/` or `./`"
    )]
    Name(String),
    /// The host's side is relative.
    #[error("`{0}` is no absolute path")]
    Source(String),
    /// The guest's side is not usable.
    #[error(
        "a volume cannot be at `{0}` in the guest: give an absolute path without `..`, and not /, /proc, /sys or /dev"
    )]
    Target(String),
    /// Two at one place.
    #[error("two volumes, or a volume and a tmpfs, are to be at `{0}`: give each a place of its own")]
    Twice(String),
    /// Too many.
    #[error(
        "{0} volumes are more than the {MAX_VOLUMES} that a sandbox can have: share a directory above some of them"
    )]
    Many(usize),
}

/// What is shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeSource {
    /// A directory of the host, by its absolute path.
    Directory(String),
    /// A volume that the node keeps, made when it is first used.
    Named(String),
    /// A volume of the tenant's whose sandbox it is ([`crate::tenant_volume`]), which is there already.
    Tenant(String),
    /// A directory of another machine, which somebody serves there.
    Served(Served),
}

/// A directory that is served on another machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Served {
    /// Where.
    pub address: SocketAddr,
    /// What makes it this directory and nobody else's: a line for whoever serves it.
    pub key: String,
    /// Its path there, for people.
    pub directory: String,
}

/// A volume of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeMount {
    /// What is shared.
    pub source: VolumeSource,
    /// Where the guest finds it.
    pub target: String,
    /// The guest can change nothing.
    #[serde(default)]
    pub read_only: bool,
}

/// A volume that a sandbox has, as it was when it was last started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// The directory on the host, with no symbolic link in its path.
    pub directory: PathBuf,
    /// Where the guest finds it.
    pub target: String,
    /// The guest can change nothing.
    pub read_only: bool,
}

/// A named volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Where its files are.
    pub directory: PathBuf,
    /// When it was made: nanoseconds since 1970.
    pub created_ns: u64,
    /// The sandboxes that have it, also those that have ended, by name.
    pub used_by: Vec<String>,
}

/// Checks a volume's name.
///
/// # Errors
/// [`VolumeError::Name`].
pub fn check_name(name: &str) -> Result<(), VolumeError> {
    match crate::config::check_name(name) {
        Ok(()) if name.len() <= MAX_NAME => Ok(()),
        _ => Err(VolumeError::Name(name.to_owned())),
    }
}

/// A path of the guest with nothing superfluous in it.
fn target(text: &str) -> Result<String, VolumeError> {
    let refused = || VolumeError::Target(text.to_owned());
    let path = Path::new(text);
    let plain = |component: Component<'_>| matches!(component, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) || text.contains('\0') {
        return Err(refused());
    }
    let clean: PathBuf = path.components().collect();
    if clean == Path::new("/") || TAKEN.iter().any(|taken| clean.starts_with(taken)) {
        return Err(refused());
    }
    clean.to_str().map(str::to_owned).ok_or_else(refused)
}

/// `SOURCE:TARGET[:ro|rw]`. A source with a slash or a dot in front is a path, as it stands; what is relative has to be
/// made absolute by whoever knows what to.
impl FromStr for VolumeMount {
    type Err = VolumeError;

    fn from_str(text: &str) -> Result<Self, VolumeError> {
        let form = || VolumeError::Form(text.to_owned());
        let (rest, read_only) = match text.rsplit_once(':') {
            Some((rest, "ro")) => (rest, true),
            Some((rest, "rw")) => (rest, false),
            _ => (text, false),
        };
        // The last colon: paths of hosts may have some.
        let (source, guest) = rest.rsplit_once(':').ok_or_else(form)?;
        if source.is_empty() || guest.is_empty() {
            return Err(form());
        }
        let source = match source.contains('/') || source.starts_with('.') {
            true => VolumeSource::Directory(source.to_owned()),
            false => {
                check_name(source)?;
                VolumeSource::Named(source.to_owned())
            }
        };
        Ok(Self {
            source,
            target: target(guest)?,
            read_only,
        })
    }
}

/// Checks everything that can be told from the data alone.
pub(crate) fn check(volumes: &[VolumeMount]) -> Result<(), VolumeError> {
    if volumes.len() > MAX_VOLUMES {
        return Err(VolumeError::Many(volumes.len()));
    }
    let mut seen = BTreeSet::new();
    for volume in volumes {
        match &volume.source {
            VolumeSource::Named(name) | VolumeSource::Tenant(name) => check_name(name)?,
            VolumeSource::Directory(path) if !path.starts_with('/') || path.contains('\0') => {
                return Err(VolumeError::Source(path.clone()));
            }
            VolumeSource::Served(served) if served.key.contains('\n') => {
                return Err(VolumeError::Source(served.directory.clone()));
            }
            VolumeSource::Directory(_) | VolumeSource::Served(_) => (),
        }
        let clean = target(&volume.target)?;
        if !seen.insert(clean) {
            return Err(VolumeError::Twice(volume.target.clone()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<VolumeMount, VolumeError> {
        text.parse()
    }

    #[test]
    fn podmans_forms_are_understood() {
        let volume = parse("/a b:c/d:/src/:ro").unwrap();
        assert_eq!(volume.source, VolumeSource::Directory("/a b:c/d".into()));
        assert_eq!((volume.target.as_str(), volume.read_only), ("/src", true));
        assert_eq!(
            parse("./src:/src").unwrap().source,
            VolumeSource::Directory("./src".into())
        );
        assert_eq!(parse(".:/src:rw").unwrap().source, VolumeSource::Directory(".".into()));
        assert_eq!(parse("cache:/c").unwrap().source, VolumeSource::Named("cache".into()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for form in ["", "x", "/x", ":/x", "x:", "ro", "/x:ro"] {
            assert_eq!(parse(form), Err(VolumeError::Form(form.into())));
        }
        assert_eq!(parse("-x:/x"), Err(VolumeError::Name("-x".into())));
        for target in ["x", "/", "/..", "/a/../b", "/proc", "/sys/fs", "/dev/shm", "//"] {
            assert_eq!(parse(&format!("n:{target}")), Err(VolumeError::Target(target.into())));
        }
        let twice = [parse("a:/x").unwrap(), parse("b:/x/").unwrap()];
        assert_eq!(check(&twice), Err(VolumeError::Twice("/x".into())));
        assert_eq!(
            check(&[parse("./a:/x").unwrap()]),
            Err(VolumeError::Source("./a".into()))
        );
        let many = vec![parse("a:/x").unwrap(); MAX_VOLUMES + 1];
        assert_eq!(check(&many), Err(VolumeError::Many(17)));
    }
}
