//! Puts files into a running lab, by content: what is there already is not sent again. Knows which of our programs belong
//! there; does not know what they do.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use agent_api::Upload;
use anyhow::{Context, Result, bail};
use lab_init::contract::BINARIES;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::parts;
use crate::progress::Progress;
use crate::remote::Remote;
use crate::state::{Lab, State, write_new};

/// Our programs that run in the lab. One that is not built is left out.
const PROGRAMS: [&str; 8] = [
    "basalt",
    "basaltd",
    "basalt-gateway",
    "basalt-vmm",
    "basalt-agent",
    "basalt-lab-cases",
    "basalt-bench",
    "basalt-kernel-check",
];

/// Name of the assets' directory beside the programs.
const ASSETS: &str = "basalt-assets";

/// A file and where it goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    pub(crate) local: PathBuf,
    pub(crate) remote: String,
}

/// What became of the files.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Outcome {
    /// Paths in the lab that were written.
    pub(crate) sent: Vec<String>,
    /// Paths in the lab that were right already.
    pub(crate) unchanged: Vec<String>,
    /// Programs that are not built on this machine.
    pub(crate) missing: Vec<String>,
    /// Bytes sent.
    pub(crate) bytes: u64,
}

/// What the lab's disk holds, as far as this machine has put it there: a path's contents. It spares the emulated host
/// from computing a digest, at a few megabytes a second, whenever somebody wants to be sure.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Record(BTreeMap<String, Known>);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    sha256: String,
    size: u64,
    mode: u32,
}

/// What belongs into a lab.
pub(crate) struct Items {
    items: Vec<Item>,
    /// Programs that are not built on this machine.
    missing: Vec<String>,
}

/// Our programs that are built, and the assets.
pub(crate) fn items() -> Result<Items> {
    let (mut items, mut missing) = (Vec::new(), Vec::new());
    for name in PROGRAMS {
        match parts::find_program(name)? {
            Some(local) => items.push(Item {
                local,
                remote: format!("{BINARIES}/{name}"),
            }),
            None => missing.push(name.to_owned()),
        }
    }
    items.extend(assets(&parts::assets()?)?);
    Ok(Items { items, missing })
}

/// Files of this machine by what the file system says of them, and the start of the lab that has the same: computing their
/// digests takes tenths of a second, and asking the lab for each file takes its time too.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Checked {
    lab: u32,
    started: u64,
    files: BTreeMap<String, Stamp>,
}

/// A file that is written to gets another one, unless it was written to within [`SETTLED`] before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Stamp {
    local: PathBuf,
    device: u64,
    inode: u64,
    size: u64,
    changed_s: i64,
    changed_ns: i64,
}

/// Two changes may have the same time, if one follows the other at once.
const SETTLED: Duration = Duration::from_secs(1);

impl Checked {
    pub(crate) fn of(lab: &Lab, items: &Items) -> Result<Self> {
        let stamp = |item: &Item| -> Result<(String, Stamp)> {
            let found =
                fs::metadata(&item.local).with_context(|| format!("cannot look at {}", item.local.display()))?;
            let stamp = Stamp {
                local: item.local.clone(),
                device: found.dev(),
                inode: found.ino(),
                size: found.size(),
                changed_s: found.ctime(),
                changed_ns: found.ctime_nsec(),
            };
            Ok((item.remote.clone(), stamp))
        };
        Ok(Self {
            lab: lab.pid,
            started: lab.started,
            files: items.items.iter().map(stamp).collect::<Result<_>>()?,
        })
    }

    /// Whether the lab was found to have just these files.
    pub(crate) fn is_known(&self, state: &State) -> Result<bool> {
        let path = state.checked();
        match fs::read(&path) {
            Ok(bytes) => Ok(serde_json::from_slice::<Self>(&bytes).is_ok_and(|known| known == *self)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// The lab has these files now. A file that has just been written is looked at again the next time.
    pub(crate) fn keep(&self, state: &State) -> Result<()> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let newest = self.files.values().map(|file| (file.changed_s, file.changed_ns)).max();
        let (seconds, nanoseconds) = newest.unwrap_or_default();
        let newest = Duration::new(seconds.try_into()?, nanoseconds.try_into()?);
        if now.saturating_sub(newest) < SETTLED {
            return Ok(());
        }
        write_new(&state.checked(), &serde_json::to_vec(self)?)
    }
}

/// Makes the lab's programs and assets equal to those of this machine.
pub(crate) fn sync(state: &State, remote: &mut Remote, progress: &mut Progress) -> Result<Outcome> {
    let Items { items, missing } = items()?;
    let mut outcome = Outcome {
        missing,
        ..Outcome::default()
    };
    let mut record = Record::read(&state.synced())?;
    for item in &items {
        let known = Known::of(&item.local)?;
        let there = record.0.get(&item.remote) == Some(&known)
            && remote
                .stat(item.remote.as_str(), false)?
                .is_some_and(|info| info.size == known.size);
        if there {
            outcome.unchanged.push(item.remote.clone());
            continue;
        }
        // Until it is sent nothing is known: this program may be killed on the way.
        if record.0.remove(&item.remote).is_some() {
            record.write(&state.synced())?;
        }
        send(remote, item, &known, progress)?;
        outcome.bytes += known.size;
        outcome.sent.push(item.remote.clone());
        record.0.insert(item.remote.clone(), known);
        record.write(&state.synced())?;
    }
    Ok(outcome)
}

/// Puts these files below `directory`, except those that are there with the same contents.
pub(crate) fn push(
    remote: &mut Remote,
    files: &[PathBuf],
    directory: &str,
    progress: &mut Progress,
) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for local in files {
        let name = local
            .file_name()
            .with_context(|| format!("{} names no file", local.display()))?;
        let remote_path = format!("{}/{}", directory.trim_end_matches('/'), name.to_string_lossy());
        let item = Item {
            local: local.clone(),
            remote: remote_path,
        };
        let known = Known::of(local)?;
        let there = remote.stat(item.remote.as_str(), true)?;
        if there.is_some_and(|info| info.sha256.as_ref() == Some(&known.sha256)) {
            outcome.unchanged.push(item.remote);
            continue;
        }
        send(remote, &item, &known, progress)?;
        outcome.bytes += known.size;
        outcome.sent.push(item.remote);
    }
    Ok(outcome)
}

fn send(remote: &mut Remote, item: &Item, known: &Known, progress: &mut Progress) -> Result<()> {
    progress.step(&format!("sending {} ({} KiB)", item.remote, known.size.div_ceil(1024)));
    let mut file = open(&item.local)?;
    let upload = Upload {
        path: item.remote.as_str().into(),
        mode: known.mode,
        size: known.size,
    };
    remote
        .upload(&upload, &mut file)
        .with_context(|| format!("cannot put {} into the lab as {}", item.local.display(), item.remote))?;
    progress.tick();
    Ok(())
}

/// The files of the assets' directory; it has no subdirectories. None if it is not made yet.
fn assets(directory: &Path) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(items),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", directory.display())),
    };
    for entry in entries {
        let local = entry?.path();
        let Some(name) = local.file_name().map(|name| name.to_string_lossy().into_owned()) else {
            continue;
        };
        if local.is_file() {
            items.push(Item {
                local,
                remote: format!("{BINARIES}/{ASSETS}/{name}"),
            });
        }
    }
    items.sort_by(|one, other| one.remote.cmp(&other.remote));
    Ok(items)
}

fn open(path: &Path) -> Result<File> {
    File::open(path).with_context(|| format!("cannot open {}", path.display()))
}

impl Known {
    fn of(path: &Path) -> Result<Self> {
        let mut file = open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            bail!("{} is no regular file", path.display());
        }
        let mut sum = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        let mut size = 0;
        loop {
            let got = file
                .read(&mut buffer)
                .with_context(|| format!("cannot read {}", path.display()))?;
            if got == 0 {
                break;
            }
            sum.update(buffer.get(..got).unwrap_or_default());
            size += u64::try_from(got)?;
        }
        Ok(Self {
            sha256: hex::encode(sum.finalize()),
            size,
            mode: metadata.permissions().mode() & 0o777,
        })
    }
}

impl Record {
    /// An unreadable record is an empty one: everything is sent again.
    fn read(path: &Path) -> Result<Self> {
        match fs::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).unwrap_or_default()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    fn write(&self, path: &Path) -> Result<()> {
        write_new(path, &serde_json::to_vec_pretty(self)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assets_are_files_in_order_and_may_be_absent() {
        let directory = std::env::temp_dir().join(format!("basalt-lab-assets-{}", std::process::id()));
        assert_eq!(assets(&directory).unwrap(), []);
        fs::create_dir_all(directory.join("sub")).unwrap();
        for name in ["vmlinux", "initramfs.cpio"] {
            fs::write(directory.join(name), name).unwrap();
        }
        let remote: Vec<_> = assets(&directory)
            .unwrap()
            .into_iter()
            .map(|item| item.remote)
            .collect();
        assert_eq!(
            remote,
            [
                "/opt/basalt/bin/basalt-assets/initramfs.cpio",
                "/opt/basalt/bin/basalt-assets/vmlinux"
            ]
        );
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn a_file_that_was_written_to_is_looked_at_again() {
        let directory = std::env::temp_dir().join(format!("basalt-lab-checked-{}", std::process::id()));
        let state = State::open(&directory).unwrap();
        let local = directory.join("basalt");
        let of = |pid| {
            let lab = Lab {
                address: "127.0.0.1:1".into(),
                token_file: state.token(),
                pid,
                started: 7,
                cpus: 1,
                memory_mib: 1,
                made_of: String::new(),
            };
            let item = Item {
                local: local.clone(),
                remote: "/opt/basalt".into(),
            };
            let items = Items {
                items: vec![item],
                missing: Vec::new(),
            };
            Checked::of(&lab, &items).unwrap()
        };
        fs::write(&local, "one").unwrap();
        let checked = of(1);
        assert!(!checked.is_known(&state).unwrap());
        // Written just now: a second change might not be seen.
        checked.keep(&state).unwrap();
        assert!(!checked.is_known(&state).unwrap());
        std::thread::sleep(SETTLED);
        checked.keep(&state).unwrap();
        assert!(of(1).is_known(&state).unwrap());
        assert!(!of(2).is_known(&state).unwrap(), "another start of the lab");
        fs::write(&local, "two").unwrap();
        assert!(!of(1).is_known(&state).unwrap());
        fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn contents_and_mode_are_what_is_known_of_a_file() {
        let path = std::env::temp_dir().join(format!("basalt-lab-known-{}", std::process::id()));
        fs::write(&path, "abc").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let known = Known::of(&path).unwrap();
        // FIPS 180-2, appendix B.1.
        assert_eq!(
            known.sha256,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!((known.size, known.mode), (3, 0o750));
        let mut record = Record::default();
        record.0.insert("/x".into(), known.clone());
        record.write(&path).unwrap();
        assert_eq!(Record::read(&path).unwrap().0.get("/x"), Some(&known));
        fs::write(&path, "{").unwrap();
        assert!(Record::read(&path).unwrap().0.is_empty());
        fs::remove_file(&path).unwrap();
        assert!(
            Known::of(Path::new("/dev"))
                .unwrap_err()
                .to_string()
                .contains("no regular file")
        );
    }
}
