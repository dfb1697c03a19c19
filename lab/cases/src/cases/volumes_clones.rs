//! Sandboxes with volumes are clones of templates: each has the directories that it was asked to have and no other's, as one
//! that has booted has them. What is made of a machine with devices for some, and no directory, is good for those that get some.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::volumes;
use crate::daemon::Daemon;
use crate::{Case, Host};

pub(crate) const CASE: Case = Case {
    name: "volumes-clones",
    limit: Duration::from_secs(500),
    host,
    guest: None,
};

/// Mounts what no directory was given for, and looks what is there.
const BY_HAND: &str = "import ctypes, os\n\
                       libc = ctypes.CDLL(None, use_errno=True)\n\
                       os.makedirs('/mnt/x', exist_ok=True)\n\
                       print(libc.mount(b'volume1', b'/mnt/x', b'virtiofs', 0, None))\n\
                       try: print(os.listdir('/mnt/x'))\n\
                       except OSError as error: print('refused')\n";

fn host(host: &Host) -> Result<()> {
    let node = Node {
        daemon: Daemon::new(host)?,
        image: &host.digest,
    };
    let directories = ["a", "b"].map(|name| host.scratch.join(name));
    for directory in &directories {
        fs::create_dir(directory)?;
        fs::write(
            directory.join("file"),
            directory.file_name().context("a name")?.as_encoded_bytes(),
        )?;
    }
    let [a, b] = directories.map(|directory| directory.display().to_string());
    node.the_second_is_a_clone(&a, &b)?;
    node.two_at_once(&a, &b)?;
    node.built(&a)?;
    node.without_volumes()?;
    node.daemon.ok(&["volume", "rm", "kept"])?;
    node.daemon.ok(&["template", "prune", "--all"])?;
    node.daemon.end()
}

struct Node<'h> {
    daemon: Daemon<'h>,
    image: &'h str,
}

impl Node<'_> {
    fn run(&self, options: &[&str], command: &[&str]) -> Result<String> {
        self.daemon
            .ok(&[&["run", "--memory", "128m"], options, &[self.image, "--"], command].concat())
    }

    /// Runs a shell's command; what it says, and whether a kernel has booted for it.
    fn traced(&self, options: &[&str], script: &str) -> Result<(String, bool)> {
        let (before, behind) = (["--memory", "128m"], [self.image, "--", "sh", "-c", script]);
        self.daemon.traced(&[&before, options, &behind].concat())
    }

    fn inspect(&self, name: &str) -> Result<Value> {
        self.daemon.find(name)?.context("it is gone")
    }

    fn the_second_is_a_clone(&self, a: &str, b: &str) -> Result<()> {
        let (said, booted) = self.traced(&["-v", &format!("{a}:/x")], "cat /x/file; echo booted > /x/first")?;
        ensure!(
            booted && said == "a",
            "the first one says {said:?}, and has booted: {booted}"
        );
        self.daemon.wait_for_templates(1)?;
        let options = [
            "-v",
            &format!("{b}:/src:ro"),
            "-v",
            "kept:/data",
            "--tmpfs",
            "/t:size=1m",
        ];
        let script = "cat /src/file; touch /src/no || echo cannot; echo mine > /data/new; \
                      grep -c -E '^(volume[01] /src|volume[01] /data|tmpfs /t) ' /proc/mounts; test -e /x || echo nothing";
        let (said, booted) = self.traced(&options, &format!("({script}) 2>/dev/null"))?;
        ensure!(!booted, "the second one has booted");
        ensure!(said == "bcannot\n3\nnothing\n", "the second one says {said:?}");
        ensure!(!fs::exists(format!("{b}/no"))?, "it has written where it can only read");
        let kept = self.daemon.state.join("volumes/kept/_data/new");
        ensure!(fs::read(&kept)? == b"mine\n", "what it wrote is not in its volume");
        ensure!(
            fs::read(format!("{a}/first"))? == b"booted\n",
            "what the first one wrote is gone"
        );
        // More than a template has devices for.
        let many = ["x", "y", "z"].map(|at| format!("{a}:/{at}"));
        let many = ["-v", &many[0], "-v", &many[1], "-v", &many[2]];
        let (said, booted) = self.traced(&many, "cat /x/file /y/file /z/file")?;
        ensure!(
            booted && said == "aaa",
            "one with many says {said:?}, and has booted: {booted}"
        );
        Ok(())
    }

    fn two_at_once(&self, a: &str, b: &str) -> Result<()> {
        let daemon = &self.daemon;
        for (name, directory) in [("one", a), ("two", b)] {
            let volume = format!("{directory}:/x");
            self.run(&["-d", "--name", name, "-v", &volume], &["sleep", "10000"])?;
            let found = self.inspect(name)?;
            ensure!(found["template"].is_string(), "{name} is no clone: {found}");
            ensure!(
                found["volumes"][0]["directory"] == *directory,
                "{name} has {}",
                found["volumes"]
            );
            if name == "one" {
                // The other device of it has no directory, and no rights.
                volumes::jail(daemon, 2)?;
            }
        }
        for (name, wanted) in [("one", "a"), ("two", "b")] {
            let said = daemon.ok(&["exec", name, "cat", "/x/file"])?;
            ensure!(said == wanted, "{name} sees {said:?}");
            daemon.ok(&["pause", name])?;
            daemon.ok(&["unpause", name])?;
            daemon.ok(&["exec", name, "sh", "-c", &format!("echo {name} > /x/who")])?;
        }
        for (name, directory) in [("one\n", a), ("two\n", b)] {
            let who = fs::read_to_string(format!("{directory}/who"))?;
            ensure!(who == name, "{directory} was written by {who}");
        }
        // The daemon's death is not noticed; started again it boots, and has what it had.
        daemon.kill()?;
        ensure!(
            daemon.ok(&["exec", "one", "cat", "/x/who"])? == "one\n",
            "its volume went with the daemon"
        );
        daemon.ok(&["kill", "one"])?;
        daemon.ok(&["start", "one"])?;
        ensure!(
            daemon.ok(&["exec", "one", "cat", "/x/who"])? == "one\n",
            "its volume is not there again"
        );
        ensure!(
            self.inspect("one")?["template"].is_null(),
            "started again it is a clone"
        );
        daemon.ok(&["rm", "--force", "one", "two"]).map(drop)
    }

    /// What has no volumes can be kept, cloned and put back, also where it uses a device for them all the same.
    fn without_volumes(&self) -> Result<()> {
        let daemon = &self.daemon;
        let words = ["run", "-d", "--name", "plain", "--template", "built", "sleep", "10000"];
        daemon.ok(&words)?;
        daemon.ok(&["snapshot", "create", "plain", "before"])?;
        daemon.ok(&["clone", "--name", "twin", "before"])?;
        let said = daemon.ok(&["exec", "twin", "python3", "-c", BY_HAND])?;
        ensure!(said == "0\nrefused\n", "without a directory it mounts {said:?}");
        // What it was refused is no more in the way of a snapshot than what it never asked.
        daemon.ok(&["snapshot", "create", "twin", "mounted"])?;
        daemon.ok(&["clone", "--name", "triplet", "mounted"])?;
        let said = daemon.ok(&["exec", "triplet", "sh", "-c", "ls /mnt/x 2>/dev/null || echo refused"])?;
        ensure!(said == "refused\n", "a clone without a directory says {said:?}");
        daemon.ok(&["rollback", "plain", "before"])?;
        daemon.ok(&["exec", "plain", "true"])?;
        daemon.ok(&["snapshot", "create", "plain", "after"])?;
        daemon.ok(&["rm", "--force", "plain", "twin", "triplet"])?;
        daemon.ok(&["snapshot", "rm", "before", "after", "mounted"]).map(drop)
    }

    /// One that somebody has built.
    fn built(&self, a: &str) -> Result<()> {
        let words = [
            "template", "build", "--memory", "128m", "--from", self.image, "--name", "built", "--run",
        ];
        self.daemon.ok(&[&words[..], &["echo made > /made"]].concat())?;
        let volume = format!("{a}:/x");
        let words = ["run", "--template", "built", "-v", &volume, "cat", "/made", "/x/file"];
        let said = self.daemon.ok(&words)?;
        ensure!(said == "made\na", "a clone of a built one says {said:?}");
        Ok(())
    }
}
