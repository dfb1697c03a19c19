//! The points at which tests kill: every place between two lasting effects of an operation. All of them stand here, the
//! daemon's and those of the image store, and nothing else is known of what they belong to.
//!
//! A test names a directory in `BASALT_POINTS` and makes a file there with a point's name. Whoever comes to that point
//! makes NAME.reached beside it and waits until NAME is gone; meanwhile the test kills what it likes. Without the
//! variable a point costs one comparison.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The variable that names the directory.
pub const VARIABLE: &str = "BASALT_POINTS";

/// How long a point waits for its test, which may have died.
const PATIENCE: Duration = Duration::from_secs(60);

/// Every point of the daemon, in the order in which the life of a sandbox that boots comes to them. A clone's cgroup and VMM come before
/// its disk, network and sockets.
pub const SANDBOX: &[&str] = &[
    CREATE_RECORDED,
    CREATE_DIRECTORY,
    CREATE_DISK,
    START_SOCKETS,
    START_NETWORK,
    START_CGROUP,
    START_SPAWNED,
    START_RECORDED,
    START_CREATED,
    START_STARTED,
    START_AGENT,
    START_PREPARED,
    START_COMMAND,
    START_RUNNING,
    EXEC_CONNECTED,
    PAUSE_PAUSED,
    PAUSE_RESUMED,
    NETWORK_RECORDED,
    SUSPEND_WRITTEN,
    SUSPEND_SAVED,
    SUSPEND_ENDED,
    RESUME_RESTORED,
    RESUME_SPENT,
    SNAPSHOT_BEGUN,
    SNAPSHOT_HELD,
    SNAPSHOT_FROZEN,
    SNAPSHOT_PAUSED,
    SNAPSHOT_SAVED,
    SNAPSHOT_DISK,
    SNAPSHOT_RESUMED,
    SNAPSHOT_THAWED,
    SNAPSHOT_WRITTEN,
    SNAPSHOT_KEPT,
    SNAPSHOT_HIDDEN,
    BUILD_SETTLED,
    BUILD_WRITTEN,
    BUILD_KEPT,
    BUILD_NAMED,
    ROLLBACK_BEGUN,
    ROLLBACK_ENDED,
    ROLLBACK_DISK,
    MOVE_ENDED,
    RESTORE_MADE,
    RESTORE_RESUMED,
    RESTORE_REIDENTIFIED,
    STOP_RECORDED,
    STOP_SIGNALLED,
    STOP_KILLED,
    END_LEARNT,
    END_CLEARED,
    END_RECORDED,
    REMOVE_RECORDED,
    REMOVE_CLEARED,
    REMOVE_FILES,
    REMOVE_DONE,
];

/// Every point of the host's devices, in the order in which the life of one that a sandbox had comes to them.
pub const DEVICE: &[&str] = &[
    DEVICE_BINDING,
    DEVICE_STEP,
    DEVICE_BOUND,
    DEVICE_READY,
    DEVICE_CLAIMED,
    DEVICE_ATTACHED,
    DEVICE_DETACHED,
    DEVICE_RETURNS,
    DEVICE_RETURNED,
    DEVICE_RESETTING,
    DEVICE_RESET,
    DEVICE_UNBINDING,
    DEVICE_GIVEN_BACK,
    VFS_RECORDED,
    VFS_STEP,
    VFS_MADE,
];

/// Every point of what there is beside sandboxes: snapshots that come from elsewhere or are verified, and volumes. The simulated node's
/// tests come to all of them.
pub const BESIDE: &[&str] = &[
    LOAD_BEGUN,
    LOAD_SUMMED,
    LOAD_WRITTEN,
    LOAD_KEPT,
    VERIFY_COMPARED,
    VERIFY_SUMMED,
    VOLUME_BEGUN,
    VOLUME_MADE,
    VOLUME_HIDDEN,
    MEMORY_RECORDED,
    MEMORY_ASKED,
    MEMORY_FITTED,
];

/// Every point of the image store, in the order in which the life of a pulled image comes to them.
pub const IMAGE: &[&str] = &[
    DOWNLOAD_CLAIMED,
    DOWNLOAD_WHOLE,
    IMAGE_CONVERTED,
    IMAGE_KEPT,
    IMAGE_RECORDED,
    IMAGE_NAMED,
    IMAGE_UNNAMED,
    IMAGE_FORGOTTEN,
    IMAGE_REMOVED,
];

macro_rules! points {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => { $($(#[$doc])* pub const $name: &str = $text;)* };
}

points! {
    /// The name is taken, nothing else is there.
    CREATE_RECORDED = "create.recorded";
    /// The directory is there.
    CREATE_DIRECTORY = "create.directory";
    /// The disk is there.
    CREATE_DISK = "create.disk";
    /// The control and vsock sockets are bound.
    START_SOCKETS = "start.sockets";
    /// The TAP is open, the ports are published.
    START_NETWORK = "start.network";
    /// The cgroup is there, empty.
    START_CGROUP = "start.cgroup";
    /// The VMM runs; only its cgroup tells.
    START_SPAWNED = "start.spawned";
    /// The VMM is in the database.
    START_RECORDED = "start.recorded";
    /// The VMM has made the VM.
    START_CREATED = "start.created";
    /// The vCPUs run.
    START_STARTED = "start.started";
    /// The agent has called.
    START_AGENT = "start.agent";
    /// The guest has its root.
    START_PREPARED = "start.prepared";
    /// A detached sandbox's command runs.
    START_COMMAND = "start.command";
    /// It is in the database as running.
    START_RUNNING = "start.running";
    /// A connection to the agent has been made for somebody.
    EXEC_CONNECTED = "exec.connected";
    /// The vCPUs are stopped, the database says running.
    PAUSE_PAUSED = "pause.paused";
    /// The vCPUs of one that was paused go on, the database says paused.
    PAUSE_RESUMED = "pause.resumed";
    /// The record says where it may send, also after a power failure; its network does not know it.
    NETWORK_RECORDED = "network.recorded";
    /// Its memory and its disk have reached the disk, and nothing says so.
    SUSPEND_WRITTEN = "suspend.written";
    /// From here on it is suspended, when its VMM has ended.
    SUSPEND_SAVED = "suspend.saved";
    /// Its VMM has ended.
    SUSPEND_ENDED = "suspend.ended";
    /// It could go on, and what was saved counts.
    RESUME_RESTORED = "resume.restored";
    /// What was saved does not count any more.
    RESUME_SPENT = "resume.spent";
    /// The snapshot's directory is there, with its record and another name.
    SNAPSHOT_BEGUN = "snapshot.begun";
    /// The database says that the sandbox is held still.
    SNAPSHOT_HELD = "snapshot.held";
    /// Its commands stand still.
    SNAPSHOT_FROZEN = "snapshot.frozen";
    /// Its vCPUs are stopped.
    SNAPSHOT_PAUSED = "snapshot.paused";
    /// The VMM has written state and memory.
    SNAPSHOT_SAVED = "snapshot.saved";
    /// The disk is copied.
    SNAPSHOT_DISK = "snapshot.disk";
    /// The vCPUs go on.
    SNAPSHOT_RESUMED = "snapshot.resumed";
    /// The commands go on, the database says held.
    SNAPSHOT_THAWED = "snapshot.thawed";
    /// All of it has reached the disk.
    SNAPSHOT_WRITTEN = "snapshot.written";
    /// It has its name.
    SNAPSHOT_KEPT = "snapshot.kept";
    /// A snapshot that is removed has lost its name.
    SNAPSHOT_HIDDEN = "snapshot.hidden";
    /// The memory of the machine in which a template is built holds nothing that nobody needs.
    BUILD_SETTLED = "build.settled";
    /// All of the template has reached the disk, under another name.
    BUILD_WRITTEN = "build.written";
    /// It has its id and its names; others may have these names, too.
    BUILD_KEPT = "build.kept";
    /// Nobody else has its names.
    BUILD_NAMED = "build.named";
    /// The database says that a sandbox is put back in place; all is still as it was.
    ROLLBACK_BEGUN = "rollback.begun";
    /// What a sandbox was is gone, its disk is still that.
    ROLLBACK_ENDED = "rollback.ended";
    /// Its disk is the snapshot's.
    ROLLBACK_DISK = "rollback.disk";
    /// The machine that a sandbox had is saved and gone, and that of its new class is not there yet.
    MOVE_ENDED = "move.ended";
    /// The VMM has made the VM of a snapshot.
    RESTORE_MADE = "restore.made";
    /// Its vCPUs run; its commands stand still.
    RESTORE_RESUMED = "restore.resumed";
    /// Its guest is a machine of its own, and its commands go on.
    RESTORE_REIDENTIFIED = "restore.reidentified";
    /// It is in the database as stopping.
    STOP_RECORDED = "stop.recorded";
    /// The command has its SIGTERM.
    STOP_SIGNALLED = "stop.signalled";
    /// The VMM was killed.
    STOP_KILLED = "stop.killed";
    /// The VMM is gone, and why is known.
    END_LEARNT = "end.learnt";
    /// Sockets and cgroup are gone.
    END_CLEARED = "end.cleared";
    /// It is in the database as exited.
    END_RECORDED = "end.recorded";
    /// It is in the database as being removed.
    REMOVE_RECORDED = "remove.recorded";
    /// Nothing of a VM is left.
    REMOVE_CLEARED = "remove.cleared";
    /// Its files are gone.
    REMOVE_FILES = "remove.files";
    /// It is no more in the database.
    REMOVE_DONE = "remove.done";
    /// How a device was is in the database, and nothing is done yet.
    DEVICE_BINDING = "device.binding";
    /// The next thing is a write to sysfs for it.
    DEVICE_STEP = "device.step";
    /// It is vfio-pci's, and the database says that it is on its way.
    DEVICE_BOUND = "device.bound";
    /// Sandboxes can have it.
    DEVICE_READY = "device.ready";
    /// A sandbox has it by the database, and nothing of it yet.
    DEVICE_CLAIMED = "device.claimed";
    /// The guest has it.
    DEVICE_ATTACHED = "device.attached";
    /// The VMM has it no more, and the database says that a sandbox does.
    DEVICE_DETACHED = "device.detached";
    /// The database says that it is attached again behind an operation, and it is not detached for that yet.
    DEVICE_RETURNS = "device.returns";
    /// The guest has it again, and the database says that it is to be attached.
    DEVICE_RETURNED = "device.returned";
    /// A sandbox had it, and it is not reset yet.
    DEVICE_RESETTING = "device.resetting";
    /// It is reset, and the database does not say so.
    DEVICE_RESET = "device.reset";
    /// It is to be the host's again, and nothing is done yet.
    DEVICE_UNBINDING = "device.unbinding";
    /// It is the host's again, and still in the database.
    DEVICE_GIVEN_BACK = "device.given-back";
    /// Another size of a sandbox's memory is in the database, and its VMM does not know.
    MEMORY_RECORDED = "memory.recorded";
    /// Its VMM has been asked for it.
    MEMORY_ASKED = "memory.asked";
    /// It is in its record that its guest has given back what it held.
    MEMORY_FITTED = "memory.fitted";
    /// How many virtual functions there were is in the database, and nothing is done yet.
    VFS_RECORDED = "vfs.recorded";
    /// The next thing is a write to sysfs for them.
    VFS_STEP = "vfs.step";
    /// There are so many as was asked, and the database says that they are changed.
    VFS_MADE = "vfs.made";
    /// The directory of a snapshot that comes from elsewhere is there, empty, with another name.
    LOAD_BEGUN = "load.begun";
    /// Its files are there as they came, with checksums, and have reached the disk.
    LOAD_SUMMED = "load.summed";
    /// The record that it has here has reached the disk.
    LOAD_WRITTEN = "load.written";
    /// It has its name.
    LOAD_KEPT = "load.kept";
    /// The files of a snapshot or a template were compared with their checksums; nothing is noted of it.
    VERIFY_COMPARED = "verify.compared";
    /// Those that were missing are there; whether it is damaged is not noted.
    VERIFY_SUMMED = "verify.summed";
    /// The directory of a volume is there, with another name.
    VOLUME_BEGUN = "volume.begun";
    /// It has its name.
    VOLUME_MADE = "volume.made";
    /// A volume that is removed has lost its name.
    VOLUME_HIDDEN = "volume.hidden";
    /// An empty or partial download is there, and its lock is taken.
    DOWNLOAD_CLAIMED = "download.claimed";
    /// It is whole and has its name.
    DOWNLOAD_WHOLE = "download.whole";
    /// The erofs image is there, without metadata.
    IMAGE_CONVERTED = "image.converted";
    /// What it came as is there too; no metadata refer to it.
    IMAGE_KEPT = "image.kept";
    /// The metadata are there.
    IMAGE_RECORDED = "image.recorded";
    /// It has its name.
    IMAGE_NAMED = "image.named";
    /// It has lost its last name.
    IMAGE_UNNAMED = "image.unnamed";
    /// Its metadata are gone, all else is there.
    IMAGE_FORGOTTEN = "image.forgotten";
    /// Nothing of it is there.
    IMAGE_REMOVED = "image.removed";
}

/// What is done at points, if anything is.
#[derive(Clone, Default)]
pub struct Points(Option<Hook>);

/// Is told the name of a point by whoever has come to it, who goes on when it returns.
type Hook = Arc<dyn Fn(&str) + Send + Sync>;

impl Points {
    /// As the environment says.
    #[must_use]
    pub fn from_environment() -> Self {
        let directory = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
        match directory.map(PathBuf::from) {
            Some(directory) => Self::new(move |name| wait_at(&directory, name)),
            None => Self::default(),
        }
    }

    /// With `hook` called at each point, in the thread that has come to it.
    #[must_use]
    pub fn new(hook: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(hook)))
    }

    /// Comes to a point.
    pub fn at(&self, name: &str) {
        if let Some(hook) = &self.0 {
            hook(name);
        }
    }
}

impl fmt::Debug for Points {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Points").field(&self.0.is_some()).finish()
    }
}

/// Waits as long as a test holds this point.
fn wait_at(directory: &Path, name: &str) {
    let file = directory.join(name);
    if !file.exists() {
        return;
    }
    if let Err(error) = std::fs::write(directory.join(format!("{name}.reached")), "") {
        log::error!("the point {name} cannot be told: {error}");
    }
    let end = Instant::now() + PATIENCE;
    while file.exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn there_are_enough_and_each_has_its_own_name() {
        let all: Vec<_> = SANDBOX.iter().chain(DEVICE).chain(BESIDE).chain(IMAGE).collect();
        assert!(SANDBOX.len() >= 20);
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn a_point_waits_for_its_test_and_others_do_not() {
        let directory = tempfile::tempdir().unwrap();
        let held = directory.path().to_owned();
        let points = Points::new(move |name| wait_at(&held, name));
        points.at(STOP_KILLED);
        let file = directory.path().join(STOP_KILLED);
        std::fs::write(&file, "").unwrap();
        let waiting = std::thread::spawn(move || points.at(STOP_KILLED));
        let reached = directory.path().join("stop.killed.reached");
        while !reached.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!waiting.is_finished());
        std::fs::remove_file(file).unwrap();
        waiting.join().unwrap();
    }
}
