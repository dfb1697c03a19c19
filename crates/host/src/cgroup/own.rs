//! This process's own cgroup. Does not know who made it.

use std::path::{Path, PathBuf};

use super::file::Directory;
use super::{make, mount_point};
use crate::Error;

/// Moves this process from its cgroup into a child of it, so that the cgroup can hand controllers down to others. Where
/// it is then.
///
/// # Errors
/// There is no cgroup v2, or no right to make cgroups in it.
pub fn step_down(name: &str) -> Result<PathBuf, Error> {
    const PATH: &str = "/proc/self/cgroup";
    let text = std::fs::read_to_string(PATH).map_err(|cause| Error::Cgroup {
        operation: "reading",
        path: PATH.into(),
        cause,
    })?;
    let own = unified(&text).ok_or(Error::NoCgroup2)?;
    let directory = Directory::open(&mount_point()?.join(own.strip_prefix("/").unwrap_or(own)))?;
    let child = make(&directory, name)?;
    child.write("cgroup.procs", "0")?;
    Ok(child.path().to_owned())
}

/// The line of hierarchy 0 (Linux `cgroup-v2.rst`, "Processes").
fn unified(text: &str) -> Option<&Path> {
    text.lines().find_map(|line| line.strip_prefix("0::")).map(Path::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unified_hierarchy_is_found_among_others() {
        let hybrid = "12:memory:/a\n1:name=systemd:/b\n0::/system.slice/x.service\n";
        assert_eq!(unified(hybrid), Some(Path::new("/system.slice/x.service")));
        assert_eq!(unified("1:memory:/a\n"), None);
    }

    /// Tells the test program that it is the process that steps down.
    const INNER: &str = "BASALT_TEST_STEP_DOWN";

    #[test]
    fn a_process_steps_down_and_others_are_made_beside_it() {
        use crate::cgroup::{Limits, Root};
        if std::env::var_os(INNER).is_some() {
            step_down("holder").unwrap();
            // Until the other side hangs up.
            std::io::read_to_string(std::io::stdin()).unwrap();
            return;
        }
        let root = Root::open(&format!("basalt-own-test-{}", std::process::id())).unwrap();
        let parent = root.create("parent", &Limits::default()).unwrap();
        let script = "echo 0 > \"$1/cgroup.procs\" && exec \"$2\" --exact \"$3\"";
        let name = "cgroup::own::tests::a_process_steps_down_and_others_are_made_beside_it";
        let mut child = std::process::Command::new("sh")
            .args(["-c", script, "sh"])
            .arg(parent.path())
            .arg(std::env::current_exe().unwrap())
            .arg(name)
            .env(INNER, "1")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(90);
        let procs = |path: &str| std::fs::read_to_string(parent.path().join(path)).unwrap_or_default();
        while procs("holder/cgroup.procs").is_empty() && std::time::Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        assert_eq!(procs("holder/cgroup.procs"), format!("{}\n", child.id()));
        assert_eq!(procs("cgroup.procs"), "");
        let top = mount_point().unwrap();
        let relative = Path::new("/").join(parent.path().strip_prefix(top).unwrap());
        let below = Root::open_below(&relative, "sandboxes").unwrap();
        assert_eq!(below.path(), parent.path().join("sandboxes"));
        below.remove_root().unwrap();
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        std::fs::remove_dir(parent.path().join("holder")).unwrap();
        root.remove("parent").unwrap();
        assert!(
            Root::open_below(&relative, "sandboxes").is_err(),
            "made what nobody has delegated"
        );
        root.remove_root().unwrap();
    }
}
