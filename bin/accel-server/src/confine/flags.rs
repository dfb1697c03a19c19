//! The flags that say what the jail is like. Knows nothing of what they do.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use base::ByteSize;

use super::Jail;

/// Part of the program's help.
pub(crate) const HELP: &str = "\
Confined, for code of others, which the back end carries out:
  --jail             leave the process no right, no file and no system call that it does not need. It must have namespaces
                     of its own, by the node's daemon or by unshare(1) (see below). Without this flag it is not confined.
                     With --listen it keeps the port that it listens on, and nothing else of the network
  --scratch SIZE     the most that compiled kernels and temporary files take, in memory; 256m
  --device PATH      a file of a device, beneath /dev; may be given again
  --read-only PATH   a file or directory that stays, to be read and executed; sockets in it can be connected to; may be
                     given again. /usr, /etc/OpenCL, and what --library and OCL_ICD_VENDORS name stay without this
";

/// What was said of the jail so far.
#[derive(Debug)]
pub(crate) struct Flags {
    wanted: bool,
    /// The last flag that means nothing without a jail.
    needs_jail: Option<&'static str>,
    jail: Jail,
}

impl Default for Flags {
    fn default() -> Self {
        Self {
            wanted: false,
            needs_jail: None,
            jail: Jail {
                read_only: Vec::new(),
                devices: Vec::new(),
                listens: false,
                scratch: ByteSize(256 << 20),
            },
        }
    }
}

impl Flags {
    /// A jail is wanted.
    pub(crate) fn want(&mut self) {
        self.wanted = true;
    }

    /// Takes `--scratch`.
    pub(crate) fn scratch(&mut self, size: ByteSize) -> Result<()> {
        self.needs_jail = Some("--scratch");
        if size.0 < 1 << 20 || size.0 > 1 << 40 {
            bail!("--scratch {size}: 1m to 1t");
        }
        self.jail.scratch = size;
        Ok(())
    }

    /// Takes `--device`.
    pub(crate) fn device(&mut self, path: OsString) -> Result<()> {
        self.needs_jail = Some("--device");
        let path = whole("--device", path)?;
        if !path.starts_with("/dev") {
            bail!("--device {}: files of devices are beneath /dev", path.display());
        }
        self.jail.devices.push(path);
        Ok(())
    }

    /// Takes `--read-only`.
    pub(crate) fn read_only(&mut self, path: OsString) -> Result<()> {
        self.needs_jail = Some("--read-only");
        self.jail.read_only.push(whole("--read-only", path)?);
        Ok(())
    }

    /// What all of them say.
    pub(crate) fn finish(self) -> Result<Option<Jail>> {
        match (self.wanted, self.needs_jail) {
            (true, _) => Ok(Some(self.jail)),
            (false, None) => Ok(None),
            (false, Some(flag)) => bail!("{flag} says what --jail is like: give both"),
        }
    }
}

/// A path that means the same in the new root.
fn whole(flag: &str, path: OsString) -> Result<PathBuf> {
    let path = PathBuf::from(path);
    if !path.is_absolute() || path.components().any(|part| part.as_os_str() == "..") || path == Path::new("/") {
        bail!("{flag} {}: give a path from / on, without ..", path.display());
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_jail_is_like_is_said_of_a_jail() {
        let mut flags = Flags::default();
        flags.device("/dev/null".into()).unwrap();
        let error = flags.finish().unwrap_err().to_string();
        assert!(error.contains("--device") && error.contains("give both"), "{error}");
        let mut flags = Flags::default();
        flags.want();
        flags.read_only("/opt/driver".into()).unwrap();
        let jail = flags.finish().unwrap().unwrap();
        assert_eq!(jail.read_only, [PathBuf::from("/opt/driver")]);
        assert_eq!(jail.scratch.0, 256 << 20);
        assert!(HELP.contains("256m"));
        assert!(Flags::default().finish().unwrap().is_none());
    }

    #[test]
    fn what_would_be_something_else_in_the_jail_is_refused() {
        let mut flags = Flags::default();
        let refused = |result: Result<()>, part: &str| {
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(part), "{error}");
        };
        refused(flags.device("/tmp/x".into()), "beneath /dev");
        refused(flags.device("/dev/../etc/shadow".into()), "without ..");
        refused(flags.read_only("driver".into()), "from / on");
        refused(flags.read_only("/".into()), "from / on");
        refused(flags.scratch(ByteSize(1)), "1m to 1t");
    }
}
