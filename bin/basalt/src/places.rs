//! Where things are: state, cache, assets and the programs beside this one. Reads the environment, makes nothing.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::Access;

/// The host's own state directory.
const OF_HOST: &str = "/var/lib/basalt";

/// The state directory: `$BASALT_STATE`, else `/var/lib/basalt` for root and for whoever may ask its daemon, else `basalt` in
/// the user's data directory.
pub(crate) fn state() -> Result<PathBuf> {
    if let Some(path) = variable("BASALT_STATE") {
        return Ok(path);
    }
    if rustix::process::geteuid().is_root() || is_member() {
        return Ok(PathBuf::from(OF_HOST));
    }
    in_home("XDG_DATA_HOME", ".local/share").context("where to keep images is not known: set BASALT_STATE")
}

/// Whether this user is not root, and asks the host's daemon all the same, as a member of the group that may.
pub(crate) fn is_member() -> bool {
    let socket = Path::new(OF_HOST).join(node_api::SOCKET);
    variable("BASALT_STATE").is_none()
        && !rustix::process::geteuid().is_root()
        && rustix::fs::access(socket, Access::WRITE_OK).is_ok()
}

/// Where the images are.
pub(crate) fn images() -> Result<PathBuf> {
    Ok(state()?.join("images"))
}

/// The cache: `$BASALT_CACHE`, else `~/.cache/basalt`.
pub(crate) fn cache() -> Result<PathBuf> {
    if let Some(path) = variable("BASALT_CACHE") {
        return Ok(path);
    }
    let home = variable("HOME").context("where the cache is is not known: set BASALT_CACHE or HOME")?;
    Ok(home.join(".cache/basalt"))
}

/// The guest kernel, the guest initramfs and the VMM: `$BASALT_ASSETS`, else beside this program, else `/usr/lib`.
pub(crate) fn assets() -> PathBuf {
    if let Some(path) = variable("BASALT_ASSETS") {
        return path;
    }
    let beside = beside("basalt-assets").filter(|path| path.is_dir());
    beside.unwrap_or_else(|| PathBuf::from("/usr/lib/basalt"))
}

/// The KVM device: `$BASALT_KVM`, else the usual one.
pub(crate) fn kvm() -> PathBuf {
    variable("BASALT_KVM").unwrap_or_else(|| PathBuf::from(host::kvm::DEVICE))
}

/// Which processor guests see if nobody says: `$BASALT_CPU_MODEL`, else the daemon's own default.
pub(crate) fn cpu_model() -> Option<PathBuf> {
    variable("BASALT_CPU_MODEL")
}

/// What a daemon does with the host's memory and disk: `$BASALT_MEMORY_OVERCOMMIT` and its like, with the daemon's flags for them.
pub(crate) fn policies() -> impl Iterator<Item = (&'static str, PathBuf)> {
    let set = |(name, flag): (&str, &'static str)| Some((flag, variable(name)?));
    POLICIES.into_iter().filter_map(set)
}

const POLICIES: [(&str, &str); 5] = [
    ("BASALT_MEMORY_OVERCOMMIT", "--memory-overcommit"),
    ("BASALT_CLONE_OVERCOMMIT", "--clone-overcommit"),
    ("BASALT_DISK_OVERCOMMIT", "--disk-overcommit"),
    ("BASALT_MEMORY_FILL_RATE", "--memory-fill-rate"),
    ("BASALT_ZEROED_MEMORY", "--zeroed-memory"),
];

/// The program `basalt-lab` beside this one.
pub(crate) fn lab() -> Option<PathBuf> {
    beside("basalt-lab").filter(|path| host::tools::is_executable(path))
}

/// The daemon's program: `$BASALT_DAEMON`, else beside this one, else in `/usr/sbin`.
pub(crate) fn daemon() -> Result<PathBuf> {
    if let Some(path) = variable("BASALT_DAEMON") {
        return Ok(path);
    }
    let places = [beside("basaltd"), Some(PathBuf::from("/usr/sbin/basaltd"))];
    let found = places
        .into_iter()
        .flatten()
        .find(|path| host::tools::is_executable(path));
    found.context("the daemon's program basaltd is not beside this one: run `make run` in Basalt's source tree")
}

/// The gateway's program: beside this one, else in `/usr/sbin`.
pub(crate) fn gateway() -> Result<PathBuf> {
    let places = [
        beside("basalt-gateway"),
        Some(PathBuf::from("/usr/sbin/basalt-gateway")),
    ];
    let found = places
        .into_iter()
        .flatten()
        .find(|path| host::tools::is_executable(path));
    found.context("the gateway's program basalt-gateway is not beside this one: run `make run` in Basalt's source tree")
}

/// Whether somebody wants a daemon with other things than the usual ones.
pub(crate) fn are_chosen() -> bool {
    ["BASALT_ASSETS", "BASALT_KVM", "BASALT_CPU_MODEL"]
        .into_iter()
        .any(|name| variable(name).is_some())
        || policies().next().is_some()
}

/// Everything that `doctor` looks at.
pub(crate) fn for_doctor() -> Result<host::Places> {
    Ok(host::Places {
        state: state()?,
        cache: cache()?,
        lab: lab(),
        assets: assets(),
    })
}

fn beside(name: &str) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    Some(program.parent()?.join(name))
}

/// A variable that is set and not empty.
fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn in_home(name: &str, default: &str) -> Option<PathBuf> {
    // The XDG base directory specification: a relative path is invalid and ignored.
    let set = variable(name).filter(|path| path.is_absolute());
    let base = set.or_else(|| variable("HOME").map(|home| home.join(default)))?;
    Some(base.join(Path::new("basalt")))
}
